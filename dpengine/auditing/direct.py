"""Direct detectors, which test a training setup: its model, data, loss and options. They store nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpengine.errors import forget_notices

from .finding import AuditFinding, timed
from .independence import independence
from .ledger_detector import accounting_table, ledger_charges
from .noise_detector import noise_distribution
from .oracle import oracle
from .public_output import public_output
from .replay_detector import replay
from .sampler_detector import batch_distribution
from .subject import Maker, Subject, new_subject

DETECTORS: dict[str, Callable[[Maker, int], AuditFinding]] = {
    "DR": lambda make, seed: replay(make, pairs=14, seed=seed),
    "DN": lambda make, seed: noise_distribution(make, seed=seed),
    "DS": lambda make, seed: batch_distribution(make, seed=seed),
    "DL": lambda make, seed: ledger_charges(make, seed=seed),
    "DO": lambda make, seed: oracle(make, seed=seed),
    "DI": lambda make, seed: independence(make, seed=seed),
    "DA": lambda make, seed: accounting_table(seed=seed),
    "DF": lambda make, seed: public_output(make, seed=seed),
}
"""Direct detectors by code: functions ``(make, seed) -> finding`` that run for seconds.

They test, in this order: releases on neighboring data sets; the distribution of the noise; the distribution of batches;
the charges; clipped sums, against a loop over samples; the independence of samples; the accountant, against closed
forms; files and logs.
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

    Each detector trains its own copies of the model with seeded noise. Weights and releases of these runs must not be
    published. Dropout is disabled. A pass means that no violation was found.

    Args:
        make: Returns new ``(model, optimizer, loader, loss_of)`` at each call, optionally followed by the arguments of
            ``make_private``; ``loss_of(model, batch)`` is the loss of a batch.
        options: Arguments of ``make_private``, which override those of ``make``. The default ``noise_multiplier`` is 1.
        detectors: Codes of `DETECTORS`.
        seed: Seed of all random numbers.

    Returns:
        One finding for each detector.

    Raises:
        ValueError: If a detector is unknown, or ``make`` returns the same model twice.
    """
    unknown = [code for code in detectors if code not in DETECTORS]
    if unknown:
        raise ValueError(f"auditing.quick: detector {unknown[0]!r} is unknown. Choose from: {', '.join(DETECTORS)}.")

    def make_with_options() -> Subject:
        subject = new_subject(make)
        merged = {**subject.options, **(options or {})}
        if not {"noise_multiplier", "target_epsilon", "plan"} & merged.keys():
            merged["noise_multiplier"] = 1.0
        return subject._replace(options=merged)

    first, second = make_with_options(), make_with_options()
    if {*first.model.parameters()} & {*second.model.parameters()}:
        raise ValueError("auditing.quick: make() returned the same model twice. Create a new model at each call.")
    try:
        return [timed(code, seed, functools.partial(DETECTORS[code], make_with_options, seed)) for code in detectors]
    finally:
        forget_notices()  # so that notices of these runs do not suppress those of the user's runs
