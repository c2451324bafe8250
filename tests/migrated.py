"""The scripts of ``tutorials/from_opacus`` as modules, and their text before the migration from Opacus."""

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
    """Imports a script without running it."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # scripts import modules of their folder
    return importlib.import_module(name)


def text_of(name: str) -> str:
    """Returns the text of a script."""
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def written_for_opacus(text: str) -> str:
    """Reverts the migration: replaces a leading ``dpengine.compat.opacus`` by ``opacus``."""
    return re.sub(r"\bdpengine\.compat\.opacus\b", "opacus", text)
