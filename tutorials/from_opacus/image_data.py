"""Image sets of ``tutorials/demo``, for scripts that run in any folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the repository root: the tutorials are not installed

from tutorials.demo.images import load_images

__all__ = ["load_images"]
