"""The scripts of ``tutorials/from_opacus`` as modules, and the same text as it was written for Opacus."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tutorials" / "from_opacus"
SCRIPTS = tuple(sorted(path.stem for path in FOLDER.glob("*.py") if "def main(" in path.read_text(encoding="utf-8")))


def script(name: str) -> ModuleType:
    """A script, not run yet."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # a script finds what lies beside it, as it does when Python runs it
    return importlib.import_module(name)


def text_of(name: str) -> str:
    """The script as it stands."""
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def written_for_opacus(text: str) -> str:
    """The rule of the migration, backwards: a leading ``dpengine.compat.opacus`` was ``opacus``."""
    return re.sub(r"\bdpengine\.compat\.opacus\b", "opacus", text)
