"""The direct detectors: each a function of the user's own model, data and loss, which trains nothing and keeps nothing.

What they can say is that something is wrong. A pass says that no violation was found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Detector:
    """One way to look at an engine.

    Attributes:
        code: Its name in findings.
        summary: What it looks at, in a few words.
        quick: ``quick(make, seed)``, at the size that takes seconds.
    """

    code: str
    summary: str
    quick: Callable[[Maker, int], AuditFinding]


DETECTORS = {
    one.code: one
    for one in (
        Detector("DR", "releases on neighbouring data sets", lambda make, seed: replay(make, pairs=14, seed=seed)),
        Detector("DN", "the law of the noise", lambda make, seed: noise_law(make, seed=seed)),
        Detector("DS", "the law of the sampler", lambda make, seed: sampler_law(make, seed=seed)),
        Detector("DL", "what is booked", lambda make, seed: ledger_law(make, seed=seed)),
        Detector("DO", "sums, by a loop of one", lambda make, seed: oracle(make, seed=seed)),
        Detector("DI", "whether rows are kept apart", lambda make, seed: isolation(make, seed=seed)),
        Detector("DA", "the accountant, by closed forms", lambda make, seed: accounting_table(seed=seed)),
        Detector("DF", "what leaves the machine", lambda make, seed: files(make, seed=seed)),
    )
}
QUICK = ("DR", "DN", "DS", "DL", "DO", "DI", "DA", "DF")


def quick(
    make: Maker,
    options: Mapping[str, Any] | None = None,
    *,
    detectors: Sequence[str] = QUICK,
    seed: int = 0,
) -> list[AuditFinding]:
    """Looks at a training set-up with every direct detector, in well under a minute for a small model.

    ::

        def make():
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(dataset, batch_size=64)
            return model, optimizer, loader, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])

        for finding in quick(make, {"noise_multiplier": 1.1, "max_grad_norm": 1.0}):
            print(finding)

    Each detector makes private copies of its own, on seeded noise; nothing of the user's is changed, and nothing that
    they make may be published. Dropout is switched off.

    Args:
        make: Returns ``(model, optimizer, loader, loss_of)``, fresh at each call, perhaps with the arguments of
            ``make_private`` behind them; ``loss_of(model, batch)`` is the loss of a batch.
        options: Arguments of ``make_private``, over those that ``make`` returns. None adds nothing; where neither says
            how much noise there is, ``noise_multiplier`` is 1.
        detectors: Codes of `DETECTORS`.
        seed: With which everything repeats.

    Returns:
        A finding for each detector.

    Raises:
        ValueError: If a detector is not known, or ``make`` returns one model twice.
    """
    unknown = [code for code in detectors if code not in DETECTORS]
    if unknown:
        raise ValueError(f"auditing.quick: no detector {unknown[0]!r}. Choose among: {', '.join(DETECTORS)}.")
    looked_at = _with_options(make, options or {})
    _refuse_shared(looked_at(), looked_at())  # what is wrong with the function itself is told at once
    try:
        return [_look(code, looked_at, seed) for code in detectors]
    finally:
        forget_notices()  # that these runs had; the user's own shall be told of again


def _refuse_shared(one: Subject, other: Subject) -> None:
    """Two calls must not give one model: what one detector does to it, another would find."""
    if {id(p) for p in one.model.parameters()} & {id(p) for p in other.model.parameters()}:
        raise ValueError("auditing.quick: make() returned the same model twice. Build a fresh one at each call.")


def _look(code: str, make: Maker, seed: int) -> AuditFinding:
    return timed(code, seed, lambda: DETECTORS[code].quick(make, seed))


def _with_options(make: Maker, options: Mapping[str, Any]) -> Maker:
    def make_with_options() -> Subject:
        subject = made(make)
        given = {**subject.options, **options}
        if not {"noise_multiplier", "target_epsilon", "plan"} & given.keys():
            given["noise_multiplier"] = 1.0
        return subject._replace(options=given)

    return make_with_options
