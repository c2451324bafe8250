"""Direct detectors: functions of a model, data and loss. They train nothing and store nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpengine.errors import forget_notices

from .files import files
from .finding import AuditFinding, timed
from .isolation import isolation
from .ledger_detector import accounting_table, ledger_law
from .noise_detector import noise_law
from .oracle import oracle
from .replay_detector import replay
from .sampler_detector import sampler_law
from .subject import Maker, Subject, made

DETECTORS: dict[str, Callable[[Maker, int], AuditFinding]] = {
    "DR": lambda make, seed: replay(make, pairs=14, seed=seed),
    "DN": lambda make, seed: noise_law(make, seed=seed),
    "DS": lambda make, seed: sampler_law(make, seed=seed),
    "DL": lambda make, seed: ledger_law(make, seed=seed),
    "DO": lambda make, seed: oracle(make, seed=seed),
    "DI": lambda make, seed: isolation(make, seed=seed),
    "DA": lambda make, seed: accounting_table(seed=seed),
    "DF": lambda make, seed: files(make, seed=seed),
}
"""Direct detectors by code, each ``(make, seed) -> finding`` at a size that takes seconds.

Releases on neighboring data sets; the distribution of the noise; the distribution of batches; the charges; clipped
sums, by a loop over samples; the independence of samples; the accountant, by closed forms; files and logs.
"""


def quick(
    make: Maker,
    options: Mapping[str, Any] | None = None,
    *,
    detectors: Sequence[str] = tuple(DETECTORS),
    seed: int = 0,
) -> list[AuditFinding]:
    """Tests a training setup with all direct detectors, in less than a minute for a small model.

    ::

        def make():
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(dataset, batch_size=64)
            return model, optimizer, loader, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])

        for finding in quick(make, {"noise_multiplier": 1.1, "max_grad_norm": 1.0}):
            print(finding)

    Each detector trains its own private copies with seeded noise: their results must not be published. Dropout is
    disabled. A pass means that no violation was found.

    Args:
        make: Returns new ``(model, optimizer, loader, loss_of)`` at each call, optionally followed by the arguments of
            ``make_private``; ``loss_of(model, batch)`` is the loss of a batch.
        options: Arguments of ``make_private``, which override those of ``make``. The default of
            ``noise_multiplier`` is 1.
        detectors: Codes of `DETECTORS`.
        seed: Seed of all random numbers.

    Returns:
        One finding for each detector.

    Raises:
        ValueError: If a detector is not known, or ``make`` returns the same model twice.
    """
    unknown = [code for code in detectors if code not in DETECTORS]
    if unknown:
        raise ValueError(f"auditing.quick: no detector {unknown[0]!r}. Choose among: {', '.join(DETECTORS)}.")

    def make_with_options() -> Subject:
        subject = made(make)
        given = {**subject.options, **(options or {})}
        if not {"noise_multiplier", "target_epsilon", "plan"} & given.keys():
            given["noise_multiplier"] = 1.0
        return subject._replace(options=given)

    one, other = make_with_options(), make_with_options()
    if {*one.model.parameters()} & {*other.model.parameters()}:
        raise ValueError("auditing.quick: make() returned the same model twice. Build a fresh one at each call.")
    try:
        return [timed(code, seed, functools.partial(DETECTORS[code], make_with_options, seed)) for code in detectors]
    finally:
        forget_notices()  # of these runs, so that the user's own runs show theirs
