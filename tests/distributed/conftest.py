"""The counter of exchanges belongs to the benchmarks, which are not installed: they are found beside the package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
