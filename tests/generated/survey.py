"""Counts right, wrong and rejected models: ``python tests/generated/survey.py --models 1000``."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from generated.subjects import subject_of
from generated.verdicts import Verdict, verdict_on


@dataclass
class Survey:
    """Verdicts on many subjects."""

    verdicts: dict[int, Verdict] = field(default_factory=dict)

    def of(self, kind: str) -> dict[int, Verdict]:
        """Returns the verdicts of one kind, by seed."""
        return {seed: verdict for seed, verdict in self.verdicts.items() if verdict.kind == kind}

    def __str__(self) -> str:
        reasons = Counter(re.sub(r"'[^']*'", "'...'", v.why)[:110] for v in self.of("rejected").values())
        lines = [f"generated {len(self.verdicts)}, rejected {len(self.of('rejected'))}, wrong {len(self.of('wrong'))}"]
        lines += [f"  rejected {count} times: {why}" for why, count in reasons.most_common()]
        notices = Counter(notice for v in self.verdicts.values() for notice in v.notices if "DPE012" not in notice)
        lines += [f"  warned {count} times: {notice}" for notice, count in notices.most_common()]
        errors = sorted((v.error, v.own, seed) for seed, v in self.of("right").items() if v.error is not None)
        if errors:
            lines.append(
                f"  largest error of a right model: {errors[-1][0]:.3g}; of plain autograd: {errors[-1][1]:.3g}"
            )
        lines += [f"wrong: {verdict.why}\n{subject_of(seed)}" for seed, verdict in self.of("wrong").items()]
        return "\n".join(lines)


def survey(seeds: Iterable[int]) -> Survey:
    """Returns the verdicts on the subjects of these seeds."""
    return Survey({seed: verdict_on(subject_of(seed)) for seed in seeds})


def main() -> None:
    """Prints a survey; exits with 1 if a model is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    args = parser.parse_args()
    start = time.process_time()
    found = survey(range(args.first, args.first + args.models))
    print(found)
    print(f"{time.process_time() - start:.0f} s of processor time")
    sys.exit(bool(found.of("wrong")))


if __name__ == "__main__":
    main()
