"""Plays the named cases on the baseline and on the current package: ``python tests/differential/compare.py run:3``.

A kind with a range of seeds is allowed too: ``sequence:0-999``. Prints the differences.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from differential.sides import compare


def main(names: list[str]) -> int:
    cases = []
    for name in names:
        kind, _, seeds = name.partition(":")
        first, _, last = seeds.partition("-")
        cases += [(kind, seed) for seed in range(int(first), int(last or first) + 1)]
    begun = time.perf_counter()
    found = compare(cases)
    print(*found, sep="\n\n")
    print(f"{len(found)} of {len(cases)} cases differ; {len(cases) / (time.perf_counter() - begun):.1f} cases/s.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
