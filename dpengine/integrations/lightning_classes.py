"""Classes of Lightning, from the package that the user's script has: ``lightning`` or ``pytorch_lightning``."""

from __future__ import annotations

import importlib
import sys

NAMES = ("lightning.pytorch", "pytorch_lightning")


def lightning_class(name: str) -> type:
    """Returns a class of Lightning, of the package that is imported already if one is; ``object`` if neither is there.

    Args:
        name: Of the class, as ``Callback``.
    """
    for package in sorted(NAMES, key=lambda package: package not in sys.modules):
        try:
            return getattr(importlib.import_module(package), name)  # type: ignore[no-any-return]
        except ImportError:
            continue
    return object
