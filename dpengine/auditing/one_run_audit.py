"""Privacy audit of one training run, by guesses about which canaries it included."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from dpengine.accounting.accountant import epsilon_of, mu_gdp
from dpengine.accounting.gdp import epsilon_of_mu, largest_mu
from dpengine.accounting.ledger import Charge
from dpengine.capture.model_state import preserve_modes
from dpengine.engine.privacy_engine import PrivacyEngine
from dpengine.errors import AccountingRefusedError, keyword_hints

from .audited_run import AuditedRun
from .bounds import GaussianShift, gaussian_shift
from .canaries import Canaries, Directions, log_likelihood_ratios, participation_means
from .guessing import Floats, Guesses, epsilon_from_guesses, guess, guessing_p_value, mu_from_guesses
from .verdict import AuditReport

PrivateRun = tuple[PrivacyEngine, nn.Module, Optimizer, DataLoader[Any]]
KINDS = ("gradient", "input")
CAVEATS = (
    "A pass means that no violation was found. Bounds are lower bounds, and weak if epsilon is small.",
    "Canaries count as rows of the data set. The model of the audited run must not be released.",
    "An audit on private data is itself a release, which no ledger accounts for.",
)
_NORMAL_CAVEAT = "The Gaussian bound assumes normal scores, and batches drawn as charged; epsilon_delta does not."


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on epsilon; None if a bound does not apply."""

    epsilon_delta: float  # from the number of correct guesses, for (epsilon, delta)-privacy
    f_dp: float | None = None  # from the correct guesses, for the smallest Gaussian curve that covers the claim
    gaussian: float | None = None  # from the shift of included canaries relative to the noise of a participation

    @property
    def best(self) -> float:
        """The largest bound."""
        return max(bound for bound in dataclasses.astuple(self) if bound is not None)


@keyword_hints
def one_run(
    make: Callable[[Dataset[Any]], PrivateRun],
    train: Callable[[PrivacyEngine, nn.Module, Optimizer, DataLoader[Any]], object],
    dataset: Dataset[Any],
    *,
    canaries: int = 1000,
    kind: str = "gradient",
    delta: float | None = None,
    alpha: float = 0.05,
    guesses: int | Sequence[int] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    examples: Dataset[Any] | None = None,
    seed: int | None = None,
) -> AuditReport:
    """Trains once with canaries, and compares a lower bound on epsilon with the epsilon that the engine claims.

    ::

        def make(dataset):
            model, engine = Net(), PrivacyEngine()
            optimizer, loader = SGD(model.parameters(), lr=0.1), DataLoader(dataset, batch_size=64)
            return engine, *engine.make_private(model, optimizer, loader, noise_multiplier=1.0)

        print(one_run(make, train, dataset, canaries=1000, delta=1e-5))

    A fair coin includes or excludes each canary. An excluded canary has a gradient of zero, so the number of examples
    does not depend on the coins. The engine samples, clips, adds noise and divides as usual, and claims
    ``get_epsilon(delta)``.

    Args:
        make: Function that receives the data set with canaries and returns engine, model, optimizer and private loader.
        train: Training loop: a function of engine, model, optimizer and loader. Its result is ignored.
        dataset: Training set, map-style. For gradient canaries, copies of example 0 are appended. Their content has
            no effect.
        canaries: Number of canaries, at least 20.
        kind: ``"gradient"``: the adversary inserts gradients, and sees each release. ``"input"``: canaries are
            examples, and the adversary sees only their losses under the final model.
        delta: Delta of the bound; the default is that of the engine.
        alpha: Probability of a false violation, in (0, 1).
        guesses: Number of canaries to guess as included, which is also the number to guess as excluded. It must be
            fixed in advance. Several numbers split ``alpha``. The default is a twentieth of the canaries.
        loss: ``loss(model, batch)`` returns the loss of each sample of a batch ``(B,)``, for input canaries.
        examples: Examples to append as input canaries, at least ``canaries``, such as examples with wrong labels. The
            default is random examples of the data set.
        seed: Seed of coins and directions. It does not affect the engine.

    Returns:
        The report: ``bound`` is the largest lower bound, ``claimed`` the engine's epsilon, and the verdict
        ``"violation"`` if the bound is above the claim.

    Raises:
        ValueError: If an argument is out of range, or a loss is missing.
        UnknownParameterError: If the run cannot be audited.
    """  # noqa: DOC502 - raised by the audited run
    started = time.perf_counter()
    guesses_per_side = _check_arguments(dataset, canaries, kind, alpha, guesses, loss, examples)
    rng = np.random.default_rng(seed)
    with_canaries, canary_set = add_canaries(dataset, canaries, kind, examples, rng)
    engine, model, optimizer, loader = make(with_canaries)
    directions = (lambda sizes: Directions(sizes, canaries, rng)) if kind == "gradient" else None
    run = AuditedRun(engine, canary_set, directions)
    with run.inserted_canaries():
        train(engine, model, optimizer, loader)
    run.check_canaries_drawn()
    delta = engine.delta if delta is None else delta
    try:
        claimed = engine.get_epsilon(delta)
    except AccountingRefusedError:
        claimed = None
    shift = None
    if loss is None or kind == "gradient":
        trace = run.trace()
        scores = log_likelihood_ratios(trace)
        shift = gaussian_shift(*participation_means(trace), canary_set.coins, alpha=alpha / 2)
    else:
        scores = -_losses(model, loader, with_canaries, canary_set, loss)
    # The Gaussian bound gets half of alpha. The two limits on guesses, for each number of guesses, share the rest.
    share = (alpha if shift is None else alpha / 2) / 2 / len(guesses_per_side)
    results = [guess(scores, canary_set.coins, number) for number in guesses_per_side]
    bounds = bounds_of_run(results, shift, run, engine, delta, share, claimed)
    p, verdict = None, "inconclusive"
    if claimed is not None and math.isfinite(claimed):
        p = min(1.0, len(results) * min(guessing_p_value(result, claimed, delta) for result in results))
        if run.releases:
            verdict = "violation" if bounds.best > claimed else "pass"
    details = {"kind": kind, "delta": delta, "alpha": alpha, "steps": engine.ledger.steps, "releases": run.releases}
    return AuditReport(
        detector="DC",
        statistic=max(result.right / result.made for result in results),
        n=canaries,
        verdict=verdict,
        p=p,
        bound=bounds.best,
        claimed=claimed,
        seed=seed,
        cost=time.perf_counter() - started,
        details=details | _details(results, bounds, shift),
        caveats=(*CAVEATS, *(() if bounds.gaussian is None else (_NORMAL_CAVEAT,))),
    )


class _AddedCanaries(Subset[Any]):
    """Examples that are appended as canaries, possibly copies."""


def add_canaries(
    dataset: Dataset[Any], count: int, kind: str, examples: Dataset[Any] | None, rng: np.random.Generator
) -> tuple[Dataset[Any], Canaries]:
    """Returns the data set with canaries, and the canaries."""
    size, coins = _length(dataset), rng.random(count) < 0.5
    if kind == "input" and examples is None:
        canary_of = np.full(size, -1, dtype=np.int64)
        canary_of[rng.permutation(size)[:count]] = np.arange(count)
        return dataset, Canaries(coins, canary_of)
    added = _AddedCanaries(dataset, [0] * count) if examples is None else _AddedCanaries(examples, range(count))
    canary_of = np.concatenate([np.full(size, -1, dtype=np.int64), np.arange(count)])
    return ConcatDataset([dataset, added]), Canaries(coins, canary_of)


def bounds_of_run(
    results: Sequence[Guesses],
    shift: GaussianShift | None,
    run: AuditedRun,
    engine: PrivacyEngine,
    delta: float,
    alpha: float,
    claimed: float | None,
) -> Bounds:
    """Returns the lower bounds. ``alpha`` is the level of each bound from guesses."""
    from_delta = max(epsilon_from_guesses(result, delta=delta, alpha=alpha) for result in results)
    if claimed is None or not 0 < claimed < math.inf:
        return Bounds(from_delta)
    history, relation = engine.ledger.history, run.run.step.plan.relation
    covering = mu_gdp(history, delta, engine.accountant, relation)
    # A sampled run is not Gaussian: the mu of its covering curve exceeds the mu that has the claimed epsilon at this
    # delta. Scaled by their ratio, the audited mu exceeds the claim only if the covering curve is refuted.
    scale = min(1.0, largest_mu(claimed, delta) / covering) if covering > 0 else 1.0
    mu = max(mu_from_guesses(result, alpha=alpha) for result in results)
    from_shift = None
    if shift is not None:
        from_shift = _epsilon_of_ratio(engine, run, shift.ratio_at_least, delta) if shift.ratio_at_least > 0 else 0.0
    from_curve = epsilon_of_mu(mu * scale, delta, above=False) if mu * scale > 0 else 0.0
    return Bounds(from_delta, from_curve, from_shift)


def _epsilon_of_ratio(engine: PrivacyEngine, run: AuditedRun, ratio: float, delta: float) -> float:
    """Returns epsilon of the charges with the largest noise multiplier that is consistent with the canaries' shift."""
    plan = run.run.step.plan
    gradient = plan.clipping.gradient_noise_multiplier(plan.noise_multiplier)
    sigma = plan.noise_multiplier / (ratio * gradient)
    if math.isinf(ratio) or sigma == 0:
        return math.inf
    history = [
        charge
        if getattr(charge.event, "noise_multiplier", None) is None
        else Charge(dataclasses.replace(cast(Any, charge.event), noise_multiplier=sigma), charge.count, charge.kind)
        for charge in engine.ledger.history
    ]
    return epsilon_of(history, delta, engine.accountant, plan.relation)


def _details(results: Sequence[Guesses], bounds: Bounds, shift: GaussianShift | None) -> dict[str, Any]:
    applicable = {name: value for name, value in dataclasses.asdict(bounds).items() if value is not None}
    measured = {} if shift is None else {"noise_of_a_participation": shift.noise, "shift": shift.shift}
    guesses = [{"made": result.made, "right": result.right} for result in results]
    return {"guesses": guesses, "bounds": applicable, **measured}


@torch.no_grad()
def _losses(
    model: nn.Module,
    loader: DataLoader[Any],
    dataset: Dataset[Any],
    canaries: Canaries,
    loss: Callable[[nn.Module, Any], Tensor],
) -> Floats:
    """Returns the loss ``(M,)`` of each canary under the final model."""
    indices, losses = np.flatnonzero(canaries.canary_of >= 0), np.zeros(canaries.count)
    with preserve_modes(model):
        model.eval()
        for part in np.array_split(indices, max(1, len(indices) // 256)):
            batch = loader.collate_fn([dataset[int(index)] for index in part])
            loss_B = loss(model, batch)
            if loss_B.shape != (len(part),):
                raise ValueError(
                    f"auditing.one_run: loss returned shape {tuple(loss_B.shape)} for {len(part)} samples. Return the "
                    "loss of each sample, for example with reduction='none'."
                )
            losses[canaries.canary_of[part]] = loss_B.double().cpu().numpy()
    return losses


def _length(dataset: Dataset[Any]) -> int:
    return len(cast(Sized, dataset))


def _check_arguments(
    dataset: Dataset[Any],
    canaries: int,
    kind: str,
    alpha: float,
    guesses: int | Sequence[int] | None,
    loss: Callable[..., Tensor] | None,
    examples: Dataset[Any] | None,
) -> list[int]:
    """Raises ValueError for arguments out of range. Returns the numbers of guesses per side."""
    enough = isinstance(canaries, int) and not isinstance(canaries, bool) and canaries >= 20
    available = _length(dataset if examples is None else examples)
    checks = {
        f"kind={kind!r} is not known. Choose one of: {', '.join(map(repr, KINDS))}.": kind in KINDS,
        f"canaries={canaries!r} is not an integer of at least 20.": enough,
        f"alpha={alpha!r} is not strictly between 0 and 1.": 0 < alpha < 1,
        "kind='input' needs a loss. Pass loss=lambda model, batch: ..., which returns one loss per sample.": kind
        != "input"
        or loss,
        "examples= requires kind='input': gradient canaries have no content.": kind != "gradient" or examples is None,
        f"canaries={canaries!r}, but there are {available} examples. Pass fewer, or more examples=.": (
            kind != "input" or not enough or canaries <= available
        ),
    }
    for message, holds in checks.items():
        if not holds:
            raise ValueError(message)
    guesses_per_side = (
        [max(1, canaries // 20)] if guesses is None else [guesses] if isinstance(guesses, int) else list(guesses)
    )
    if not guesses_per_side or any(not 1 <= number <= canaries // 2 for number in guesses_per_side):
        raise ValueError(f"guesses={guesses!r} is not from 1 to {canaries // 2}, half of the canaries.")
    return guesses_per_side
