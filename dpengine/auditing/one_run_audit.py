"""The privacy audit: canaries in one run of the user's own training, and what can be told of their coins after it."""

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
from dpengine.errors import AccountingRefusedError, suggests_names

from .bounds import GaussianShift, gaussian_shift
from .canaries import Canaries, Directions, log_likelihood_ratios, means_of_participations
from .guessing import Floats, Guesses, epsilon_from_guesses, guess, guessing_p_value, mu_from_guesses
from .verdict import AuditReport
from .watched_run import WatchedRun

Made = tuple[PrivacyEngine, nn.Module, Optimizer, DataLoader[Any]]
KINDS = ("gradient", "input")
CAVEATS = (
    "A pass says that no violation was found. Bounds are from below, and weak where epsilon is small.",
    "Canaries count as rows of the data set. The model of the audited run must not be released.",
    "An audit on private data is itself a release, which no ledger has.",
)
_NORMAL = (
    "The Gaussian bound takes scores for normal, and batches for drawn as the ledger has them; epsilon_delta does not."
)


@dataclass(frozen=True)
class Bounds:
    """What epsilon is at least, by each form; None where a form does not apply.

    Attributes:
        epsilon_delta: From guesses, by (epsilon, delta) alone.
        f_dp: From guesses, by the Gaussian curve that covers the claim.
        gaussian: From the shift of canaries that took part, over the noise of a participation.
    """

    epsilon_delta: float
    f_dp: float | None = None
    gaussian: float | None = None

    @property
    def best(self) -> float:
        """The largest."""
        return max(one for one in dataclasses.astuple(self) if one is not None)


@suggests_names
def one_run(
    make: Callable[[Dataset[Any]], Made],
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
    """Trains once with canaries, and reports what epsilon is at least, beside what the engine claims.

    ::

        def make(dataset):
            model, engine = Net(), PrivacyEngine()
            optimizer, loader = SGD(model.parameters(), lr=0.1), DataLoader(dataset, batch_size=64)
            return engine, *engine.make_private(model, optimizer, loader, noise_multiplier=1.0)

        print(one_run(make, train, dataset, canaries=1000, delta=1e-5))

    Each canary has a fair coin. One that is out has a gradient of zero, so the data set has as many rows whatever the
    coins say. Sampling, clipping, noise and division are those of the engine, as is the claim, ``get_epsilon(delta)``.

    Args:
        make: Gets the data set with canaries in it. Returns engine, model, optimizer and private loader.
        train: The training loop: gets these four. What it returns is ignored.
        dataset: The training set, map-style. With gradient canaries, rows are appended whose own content does not
            matter (copies of row 0).
        canaries: How many, at least 20.
        kind: ``"gradient"``: the adversary plants gradients, and sees each release. ``"input"``: rows are the
            canaries, and all that is seen is the loss of the last model on them.
        delta: For which epsilon is meant; None takes the engine's.
        alpha: How often a correct engine may be accused, in (0, 1).
        guesses: How many canaries are guessed to be in, and as many to be out, fixed in advance; several share
            ``alpha``. None takes a twentieth of the canaries.
        loss: ``loss(model, batch)`` gives the loss ``(B,)`` of each row of a batch, for input canaries.
        examples: Rows to append as input canaries, at least as many as ``canaries``, such as rows with wrong labels.
            None takes rows of the data set itself, by chance.
        seed: Makes coins and directions repeat. The engine's randomness is its own.

    Returns:
        The report: ``bound`` is the largest lower bound, ``claimed`` the engine's epsilon, and the verdict
        ``"violation"`` if the bound is above the claim.

    Raises:
        ValueError: If an argument is out of range, or a loss is missing.
        UnknownParameterError: If the run cannot be watched.
    """  # noqa: DOC502 - the watched run raises on our behalf
    started = time.perf_counter()
    each = _refuse(dataset, canaries, kind, alpha, guesses, loss, examples)
    rng = np.random.default_rng(seed)
    with_canaries, planted = plant(dataset, canaries, kind, examples, rng)
    engine, model, optimizer, loader = make(with_canaries)
    directions = (lambda sizes: Directions(sizes, canaries, rng)) if kind == "gradient" else None
    watched = WatchedRun(engine, planted, directions)
    with watched.planted():
        train(engine, model, optimizer, loader)
    watched.refuse_bypassed()
    delta = engine.delta if delta is None else delta
    claimed = _claim(engine, delta)
    shift = None
    if directions is not None:
        trace = watched.trace()
        scores = log_likelihood_ratios(trace)
        shift = gaussian_shift(*means_of_participations(trace), planted.coins, alpha=alpha / 2)
    else:
        assert loss is not None
        scores = -_losses(model, loader, with_canaries, planted, loss)
    # Half of alpha goes to the Gaussian bound; both limits on guesses, and the numbers of guesses, share the rest.
    share = (alpha if shift is None else alpha / 2) / 2 / len(each)
    made = [guess(scores, planted.coins, one) for one in each]
    bounds = bounds_of_run(made, shift, watched, engine, delta, share, claimed)
    best = max(made, key=lambda one: one.right / one.made)
    length = {"steps": engine.ledger.steps, "releases": watched.releases}
    return AuditReport(
        detector="DC",
        statistic=best.right / best.made,
        n=canaries,
        verdict=_verdict(bounds, claimed, watched.releases),
        p=_p_value(made, claimed, delta),
        bound=bounds.best,
        claimed=claimed,
        seed=seed,
        cost=time.perf_counter() - started,
        details={"kind": kind, "delta": delta, "alpha": alpha, **length, **_details(made, bounds, shift)},
        caveats=(*CAVEATS, *(() if bounds.gaussian is None else (_NORMAL,))),
    )


class _Added(Subset[Any]):
    """Examples that are canaries, which may be copies."""


def plant(
    dataset: Dataset[Any], count: int, kind: str, examples: Dataset[Any] | None, rng: np.random.Generator
) -> tuple[Dataset[Any], Canaries]:
    """The data set with canaries in it, and which rows they are."""
    rows, coins = _length(dataset), rng.random(count) < 0.5
    if kind == "input" and examples is None:
        at = np.full(rows, -1, dtype=np.int64)
        at[rng.permutation(rows)[:count]] = np.arange(count)
        return dataset, Canaries(coins, at)
    added = _Added(dataset, [0] * count) if examples is None else _Added(examples, range(count))
    at = np.concatenate([np.full(rows, -1, dtype=np.int64), np.arange(count)])
    return ConcatDataset([dataset, added]), Canaries(coins, at)


def bounds_of_run(
    made: Sequence[Guesses],
    shift: GaussianShift | None,
    watched: WatchedRun,
    engine: PrivacyEngine,
    delta: float,
    alpha: float,
    claimed: float | None,
) -> Bounds:
    """The bounds of each form, those of guesses at level ``alpha`` each."""
    by_delta = max(epsilon_from_guesses(one, delta=delta, alpha=alpha) for one in made)
    if claimed is None or not 0 < claimed < math.inf:
        return Bounds(by_delta)
    history, relation = engine.ledger.history, watched.run.step.plan.relation
    covering = mu_gdp(history, delta, engine.accountant, relation)
    # A sampled run is no Gaussian: the curve that covers it is above the one that has its epsilon at this delta. So mu
    # is brought down by that, and exceeds the claim only where the covering curve, which is sound, is refuted.
    spare = min(1.0, largest_mu(claimed, delta) / covering) if covering > 0 else 1.0
    mu = max(mu_from_guesses(one, alpha=alpha) for one in made)
    by_shift = None
    if shift is not None:
        by_shift = _with_noise(engine, watched, shift.ratio_at_least, delta) if shift.ratio_at_least > 0 else 0.0
    by_curve = epsilon_of_mu(mu * spare, delta, above=False) if mu * spare > 0 else 0.0
    return Bounds(by_delta, by_curve, by_shift)


def _with_noise(engine: PrivacyEngine, watched: WatchedRun, ratio: float, delta: float) -> float:
    """Epsilon of the ledger's history, had the noise been what the canaries show that it is at most."""
    plan = watched.run.step.plan
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


def _claim(engine: PrivacyEngine, delta: float) -> float | None:
    try:
        return engine.get_epsilon(delta)
    except AccountingRefusedError:
        return None


def _details(made: Sequence[Guesses], bounds: Bounds, shift: GaussianShift | None) -> dict[str, Any]:
    found = {name: value for name, value in dataclasses.asdict(bounds).items() if value is not None}
    measured = {} if shift is None else {"noise_of_a_participation": shift.noise, "shift": shift.shift}
    return {"guesses": [{"made": one.made, "right": one.right} for one in made], "bounds": found, **measured}


def _p_value(made: Sequence[Guesses], claimed: float | None, delta: float) -> float | None:
    """The chance of the guesses if the claim holds, by (epsilon, delta) alone."""
    if claimed is None or math.isinf(claimed):
        return None
    return min(1.0, len(made) * min(guessing_p_value(one, claimed, delta) for one in made))


def _verdict(bounds: Bounds, claimed: float | None, releases: int) -> str:
    if claimed is None or math.isinf(claimed) or not releases:
        return "inconclusive"
    return "violation" if bounds.best > claimed else "pass"


@torch.no_grad()
def _losses(
    model: nn.Module,
    loader: DataLoader[Any],
    dataset: Dataset[Any],
    canaries: Canaries,
    loss: Callable[[nn.Module, Any], Tensor],
) -> Floats:
    """The loss ``(M,)`` of each canary under the model as it is."""
    rows, found = np.flatnonzero(canaries.at >= 0), np.zeros(canaries.count)
    with preserve_modes(model):
        model.eval()
        for part in np.array_split(rows, max(1, len(rows) // 256)):
            batch = loader.collate_fn([dataset[int(row)] for row in part])
            loss_B = loss(model, batch)
            if loss_B.shape != (len(part),):
                raise ValueError(
                    f"auditing.one_run: loss gave shape {tuple(loss_B.shape)} for {len(part)} rows; give one number "
                    "for each, as reduction='none' does."
                )
            found[canaries.at[part]] = loss_B.double().cpu().numpy()
    return found


def _length(dataset: Dataset[Any]) -> int:
    return len(cast(Sized, dataset))


def _refuse(
    dataset: Dataset[Any],
    canaries: int,
    kind: str,
    alpha: float,
    guesses: int | Sequence[int] | None,
    loss: Callable[..., Tensor] | None,
    examples: Dataset[Any] | None,
) -> list[int]:
    """Refuses arguments that cannot be; returns how many guesses of each side are made."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not known. Choose one of: {', '.join(map(repr, KINDS))}.")
    if isinstance(canaries, bool) or not isinstance(canaries, int) or canaries < 20:
        raise ValueError(f"canaries={canaries!r}; expected a whole number of at least 20.")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha={alpha!r} is not strictly between 0 and 1.")
    if kind == "input" and loss is None:
        raise ValueError("kind='input' scores canaries by their loss. Pass loss=lambda model, batch: ..., one a row.")
    if kind == "gradient" and examples is not None:
        raise ValueError("examples= are for kind='input'; gradient canaries have no content.")
    available = _length(dataset if examples is None else examples)
    if kind == "input" and canaries > available:
        raise ValueError(f"canaries={canaries:,} of {available:,} rows. Pass fewer, or more examples=.")
    each = [max(1, canaries // 20)] if guesses is None else [guesses] if isinstance(guesses, int) else list(guesses)
    if not each or any(not 1 <= one <= canaries // 2 for one in each):
        raise ValueError(f"guesses={guesses!r}; expected numbers from 1 to {canaries // 2}, half of the canaries.")
    return each
