"""DS: the distribution of batches, against the charged one.

Axes: T logical batches, N examples.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from dpengine.checkpoint.loading import load
from dpengine.checkpoint.saving import save
from dpengine.engine.privacy_engine import PrivacyEngine
from dpengine.noise.source import NoiseSource
from dpengine.sampling.loader import private_loader
from dpengine.sampling.poisson import PoissonDraws

from .bounds import binomial, chi_square, two_sided
from .finding import AuditFinding, Evidence
from .subject import LEFT_OUT, Maker, Subject, Trial, made, quiet, without_target

Masks = npt.NDArray[np.int64]
_LAGS = (1, 5, 10)
_EXAMPLES = 60
_FEW, _FEW_RATE = 10, 0.1  # one example per batch on average, so that a third of the batches are empty
_RANKS = 2
_OF_RANKS = 600  # draws


def sampler_law(make: Maker, *, draws: int = 3000, seed: int = 0) -> AuditFinding:
    """Tests the sampling masks that follow from the subject's options.

    Tests the frequency of each example, the batch sizes, the pairs of examples in a batch, and the correlation between
    batches; that no example is twice in a batch; that all drawn batches are charged; that two ranks share one mask; and
    for cyclic sampling, that examples stay in their groups, also across a resume.

    Args:
        make: Returns the subject.
        draws: Number of batches over 60 examples; half as many over 10.
        seed: Seed of the masks.

    Returns:
        The finding.
    """
    evidence = Evidence("DS", seed)
    options = made(make).options
    if options.get("plan") is not None or options.get("sampling", "poisson") != "poisson":
        evidence.unknown("no Poisson sampling is claimed, or a plan defines the sampling")
        return evidence.finding()
    rate, loader = options.get("sample_rate"), made(make).loader
    if rate is None:
        rate = min(1.0, (loader.batch_size or 1) / max(1, len(loader.dataset)))  # type: ignore[arg-type]
    if options.get("noise") is not None:
        _cyclic(evidence, make, seed)
        return evidence.finding()
    for examples, count, declared in ((_EXAMPLES, draws, rate), (_FEW, draws // 2, _FEW_RATE)):
        changes = {"sample_rate": declared, "expected_batch_size": 6.0}
        trial = _trial(make, examples, changes, seed)
        masks_TN = _masks(evidence, trial, count, examples)
        trial.close()
        _poisson(evidence, f"{examples} examples", masks_TN, declared, len(trial.loader))
    _of_ranks(evidence, rate, seed)
    return evidence.finding()


def _trial(
    make: Maker, examples: int, changes: Mapping[str, Any], seed: int, engine: PrivacyEngine | None = None
) -> Trial:
    """Returns a run whose examples are their indices; no model receives them."""

    def over_numbers() -> Subject:
        subject = made(make)
        return subject._replace(loader=DataLoader(torch.arange(examples), batch_size=6))  # type: ignore[arg-type]

    options: dict[str, Any] = {"target_delta": 1e-3, "allow_large_delta": True, "accumulation_steps": 1}
    if made(make).options.get("target_epsilon") is not None:
        options |= without_target(made(make).options, 1.0)
    options |= {"physical_batch_size": None, "example_input": torch.tensor(0), "privacy_unit": LEFT_OUT}
    return Trial(over_numbers, seed=seed, changes={**options, **changes}, engine=engine)


def _masks(evidence: Evidence, trial: Trial, draws: int, examples: int) -> Masks:
    """Returns the number of times that each example is in each batch. Each batch must be charged, used or not."""
    found_TN = np.zeros((draws, examples), dtype=np.int64)
    step, charged = 0, trial.engine.ledger.steps
    with quiet():
        while step < draws:
            before = step
            for batch in trial.loader:
                drawn = batch.numpy()[: trial.step.batches.samples]  # without the placeholder of an empty batch
                np.add.at(found_TN[step], drawn, 1)
                step += 1
                if step == draws:
                    break
            if step == before:
                evidence.fault(f"the loader returned {step} batches and ended")
                break
        trial.step.discard()
    charged = trial.engine.ledger.steps - charged
    if charged != step:
        evidence.fault(f"{step} batches were drawn, {charged} were charged")
    return found_TN[:step]


def _poisson(evidence: Evidence, where: str, masks_TN: Masks, rate: float, epoch: int) -> None:
    """Tests that the entries are independent and 1 with this probability."""
    steps, examples = masks_TN.shape
    evidence.n += masks_TN.size
    if masks_TN.max(initial=0) > 1:
        evidence.fault(f"{where}: an example is twice in one batch")
    spread = rate * (1 - rate)

    def note(name: str, p: float) -> None:
        evidence.probability(f"{where}, {name}", p)

    note("how many in all", binomial(int(masks_TN.sum()), masks_TN.size, rate))
    off_N = masks_TN.sum(axis=0) - steps * rate
    note("how often each", chi_square(float((off_N**2).sum() / (steps * spread)), examples))
    _sizes(evidence, where, masks_TN.sum(axis=1), examples, rate)
    centred_TN = (masks_TN - rate) / math.sqrt(spread)
    for lag in sorted({*_LAGS, epoch}):
        if lag < steps:
            products = centred_TN[lag:] * centred_TN[:-lag]
            note(f"batches {lag} apart", two_sided(float(products.sum()) / math.sqrt(products.size)))
    pairs_NN = centred_TN.T @ centred_TN / math.sqrt(steps)
    pairs = pairs_NN[np.triu_indices(examples, 1)]
    if steps * rate * rate > 20:  # enough pairs for a normal approximation
        note("most related pair", min(1.0, two_sided(float(np.abs(pairs).max())) * len(pairs)))
    note("pairs in all", two_sided(float(pairs.sum()) / math.sqrt(max(1, len(pairs)))))


def _sizes(evidence: Evidence, where: str, sizes_T: Masks, examples: int, rate: float) -> None:
    """Tests the batch sizes, in particular the number of empty batches."""
    steps = len(sizes_T)
    none = (1 - rate) ** examples
    evidence.probability(f"{where}, empty batches", binomial(int((sizes_T == 0).sum()), steps, none))
    variance = examples * rate * (1 - rate)
    squares = float((((sizes_T - examples * rate) ** 2) / variance).sum())
    kurtosis = 2 + (1 - 6 * rate * (1 - rate)) / variance  # of a binomial variable, relative to its squared variance
    evidence.probability(f"{where}, sizes of batches", two_sided((squares - steps) / math.sqrt(steps * kurtosis)))


def _of_ranks(evidence: Evidence, rate: float, seed: int) -> None:
    """Tests that the batches of two ranks together have the distribution of one mask."""
    source = NoiseSource.seeded(seed)
    together_TN = np.zeros((_OF_RANKS, _EXAMPLES), dtype=np.int64)
    for rank in range(_RANKS):
        loader = private_loader(
            DataLoader(torch.arange(_EXAMPLES), batch_size=6),  # type: ignore[arg-type]
            strategy=PoissonDraws(_EXAMPLES, rate, _OF_RANKS, 6.0),
            words=lambda count, *, step, block: source.words(count, domain="audit", step=step, block=block << 32),
            on_return=lambda batch, chunk, data: None,
            may_draw=lambda step: True,
            share=(rank, _RANKS),
        )
        for step, batch in enumerate(loader):
            if step < _OF_RANKS:
                np.add.at(together_TN[step], batch.numpy(), 1)
    _poisson(evidence, "two ranks", together_TN, rate, _OF_RANKS)


def _cyclic(evidence: Evidence, make: Maker, seed: int) -> None:
    """Tests cyclic sampling, before and after a resume that continues one noise matrix."""
    half = 40
    changes = {"epochs": LEFT_OUT, "steps": 2 * half, "sample_rate": 0.1, "expected_batch_size": 6.0}

    def begun() -> Trial:
        return _trial(make, _EXAMPLES, changes, seed, PrivacyEngine())  # a seeded run would reproduce itself

    trial = begun()
    strategy = trial.plan.sampling
    if not hasattr(strategy, "cycle_length"):
        evidence.unknown(f"the sampling scheme {strategy.law!r} is not tested")
        return
    turns, rate = strategy.cycle_length, strategy.sample_rate
    with tempfile.TemporaryDirectory() as folder:
        first = _masks(evidence, trial, half, _EXAMPLES)
        save(Path(folder) / "run", trial.engine)
        resumed = begun()
        load(Path(folder) / "run", resumed.engine, nothing_left_since=True)
        masks_TN = np.concatenate([first, _masks(evidence, resumed, half, _EXAMPLES)])
    evidence.n += masks_TN.size
    if masks_TN.max(initial=0) > 1:
        evidence.fault("an example is twice in one batch")
    groups_NT = [{int(step) % turns for step in np.flatnonzero(column)} for column in masks_TN.T]
    if any(len(steps) > 1 for steps in groups_NT):
        evidence.fault(f"examples are in batches of other steps than every {turns}th, which share noise")
    taking_part = sum(1 for steps in groups_NT if steps)
    turns_taken = len(masks_TN) // turns
    if abs(len(masks_TN) % turns) == 0 and rate < 1:
        evidence.probability("how many in all", binomial(int(masks_TN.sum()), turns_taken * _EXAMPLES, rate))
    if taking_part < _EXAMPLES // 2:
        evidence.fault(f"only {taking_part} of {_EXAMPLES} examples are in a batch")
