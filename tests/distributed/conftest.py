"""What counts exchanges is a benchmark's, and those are not installed: they are found beside the package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
