"""Detector DS: tests that batches have the charged distribution.

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
from .subject import OMITTED, Maker, Subject, Trial, new_subject, quiet, replace_target

Masks = npt.NDArray[np.int64]
_LAGS = (1, 5, 10)
_EXAMPLES = 60
_FEW, _FEW_RATE = 10, 0.1  # one example per batch on average, so a third of the batches are empty
_RANKS = 2
_RANK_DRAWS = 600  # number of batches of two ranks


def batch_distribution(make: Maker, *, draws: int = 3000, seed: int = 0) -> AuditFinding:
    """Tests the batches that are drawn with the subject's options.

    Tests the frequency of each example, the batch sizes, the pairs of examples in a batch, and the correlation between
    batches. Tests that no batch contains an example twice, that all drawn batches are charged, and that the batches of
    two ranks together are Poisson batches. For cyclic sampling, tests that examples stay in their groups, also across a
    resume.

    Args:
        make: Returns the subject.
        draws: Number of batches from 60 examples; half as many from 10 examples.
        seed: Seed of the batches.

    Returns:
        The finding.
    """
    evidence = Evidence("DS", seed)
    options = new_subject(make).options
    if options.get("plan") is not None or options.get("sampling", "poisson") != "poisson":
        evidence.inconclusive("no Poisson sampling is claimed, or a plan defines the sampling")
        return evidence.finding()
    rate, loader = options.get("sample_rate"), new_subject(make).loader
    if rate is None:
        rate = min(1.0, (loader.batch_size or 1) / max(1, len(loader.dataset)))  # type: ignore[arg-type]
    if options.get("noise") is not None:
        _check_cyclic(evidence, make, seed)
        return evidence.finding()
    for examples, count, declared in ((_EXAMPLES, draws, rate), (_FEW, draws // 2, _FEW_RATE)):
        changes = {"sample_rate": declared, "expected_batch_size": 6.0}
        trial = _trial(make, examples, changes, seed)
        masks_TN = _draw_masks(evidence, trial, count, examples)
        trial.close()
        _check_poisson(evidence, f"{examples} examples", masks_TN, declared, len(trial.loader))
    _check_two_ranks(evidence, rate, seed)
    return evidence.finding()


def _trial(
    make: Maker, examples: int, changes: Mapping[str, Any], seed: int, engine: PrivacyEngine | None = None
) -> Trial:
    """Returns a run over a data set of indices, which no model receives."""

    def subject_over_indices() -> Subject:
        subject = new_subject(make)
        return subject._replace(loader=DataLoader(torch.arange(examples), batch_size=6))  # type: ignore[arg-type]

    options: dict[str, Any] = {"target_delta": 1e-3, "allow_large_delta": True, "accumulation_steps": 1}
    if new_subject(make).options.get("target_epsilon") is not None:
        options |= replace_target(new_subject(make).options, 1.0)
    options |= {"physical_batch_size": None, "example_input": torch.tensor(0), "privacy_unit": OMITTED}
    return Trial(subject_over_indices, seed=seed, changes={**options, **changes}, engine=engine)


def _draw_masks(evidence: Evidence, trial: Trial, draws: int, examples: int) -> Masks:
    """Returns the number of times that each batch contains each example. Tests that every batch is charged."""
    counts_TN = np.zeros((draws, examples), dtype=np.int64)
    step, charged = 0, trial.engine.ledger.steps
    with quiet():
        while step < draws:
            before = step
            for batch in trial.loader:
                drawn = batch.numpy()[: trial.step.batches.samples]  # without the placeholder of an empty batch
                np.add.at(counts_TN[step], drawn, 1)
                step += 1
                if step == draws:
                    break
            if step == before:
                evidence.violation(f"the loader ended after {step} batches")
                break
        trial.step.discard()
    charged = trial.engine.ledger.steps - charged
    if charged != step:
        evidence.violation(f"{step} batches were drawn, {charged} were charged")
    return counts_TN[:step]


def _check_poisson(evidence: Evidence, where: str, masks_TN: Masks, rate: float, epoch: int) -> None:
    """Tests that the entries are independent Bernoulli variables with probability ``rate``."""
    steps, examples = masks_TN.shape
    evidence.n += masks_TN.size
    if masks_TN.max(initial=0) > 1:
        evidence.violation(f"{where}: a batch contains an example twice")
    variance = rate * (1 - rate)

    def note(name: str, p: float) -> None:
        evidence.p_value(f"{where}, {name}", p)

    note("total count", binomial(int(masks_TN.sum()), masks_TN.size, rate))
    deviations_N = masks_TN.sum(axis=0) - steps * rate
    note("count of each example", chi_square(float((deviations_N**2).sum() / (steps * variance)), examples))
    _check_batch_sizes(evidence, where, masks_TN.sum(axis=1), examples, rate)
    standardized_TN = (masks_TN - rate) / math.sqrt(variance)
    for lag in sorted({*_LAGS, epoch}):
        if lag < steps:
            products = standardized_TN[lag:] * standardized_TN[:-lag]
            note(f"batches {lag} apart", two_sided(float(products.sum()) / math.sqrt(products.size)))
    pairs_NN = standardized_TN.T @ standardized_TN / math.sqrt(steps)
    pairs = pairs_NN[np.triu_indices(examples, 1)]
    if steps * rate * rate > 20:  # enough pairs for a normal approximation
        note("most correlated pair", min(1.0, two_sided(float(np.abs(pairs).max())) * len(pairs)))
    note("sum over pairs", two_sided(float(pairs.sum()) / math.sqrt(max(1, len(pairs)))))


def _check_batch_sizes(evidence: Evidence, where: str, sizes_T: Masks, examples: int, rate: float) -> None:
    """Tests the batch sizes, in particular the number of empty batches."""
    steps = len(sizes_T)
    empty_rate = (1 - rate) ** examples
    evidence.p_value(f"{where}, empty batches", binomial(int((sizes_T == 0).sum()), steps, empty_rate))
    variance = examples * rate * (1 - rate)
    squares = float((((sizes_T - examples * rate) ** 2) / variance).sum())
    # Variance of the squared deviation of a binomial variable, relative to its squared variance.
    variance_of_square = 2 + (1 - 6 * rate * (1 - rate)) / variance
    p = two_sided((squares - steps) / math.sqrt(steps * variance_of_square))
    evidence.p_value(f"{where}, sizes of batches", p)


def _check_two_ranks(evidence: Evidence, rate: float, seed: int) -> None:
    """Tests that the batches of two ranks together have the distribution of Poisson batches."""
    source = NoiseSource.seeded(seed)
    masks_TN = np.zeros((_RANK_DRAWS, _EXAMPLES), dtype=np.int64)
    for rank in range(_RANKS):
        loader = private_loader(
            DataLoader(torch.arange(_EXAMPLES), batch_size=6),  # type: ignore[arg-type]
            sampling=PoissonDraws(_EXAMPLES, rate, _RANK_DRAWS, 6.0),
            words=lambda count, *, step, block: source.words(count, domain="audit", step=step, block=block << 32),
            on_return=lambda batch, chunk, data: None,
            may_draw=lambda step: True,
            shard=(rank, _RANKS),
        )
        for step, batch in enumerate(loader):
            if step < _RANK_DRAWS:
                np.add.at(masks_TN[step], batch.numpy(), 1)
    _check_poisson(evidence, "two ranks", masks_TN, rate, _RANK_DRAWS)


def _check_cyclic(evidence: Evidence, make: Maker, seed: int) -> None:
    """Tests cyclic sampling before and after a resume with correlated noise."""
    half = 40
    changes = {"epochs": OMITTED, "steps": 2 * half, "sample_rate": 0.1, "expected_batch_size": 6.0}

    def new_trial() -> Trial:
        return _trial(make, _EXAMPLES, changes, seed, PrivacyEngine())  # a seeded run would reproduce itself

    trial = new_trial()
    scheme = trial.plan.sampling
    if not hasattr(scheme, "cycle_length"):
        evidence.inconclusive(f"the sampling scheme {scheme.name!r} is not tested")
        return
    cycle_length, rate = scheme.cycle_length, scheme.sample_rate
    with tempfile.TemporaryDirectory() as folder:
        first = _draw_masks(evidence, trial, half, _EXAMPLES)
        save(Path(folder) / "run", trial.engine)
        resumed = new_trial()
        load(Path(folder) / "run", resumed.engine, nothing_released_since=True)
        masks_TN = np.concatenate([first, _draw_masks(evidence, resumed, half, _EXAMPLES)])
    evidence.n += masks_TN.size
    if masks_TN.max(initial=0) > 1:
        evidence.violation("a batch contains an example twice")
    groups_N = [{int(step) % cycle_length for step in np.flatnonzero(column)} for column in masks_TN.T]
    if any(len(groups) > 1 for groups in groups_N):
        evidence.violation(
            f"examples participate in steps that are not {cycle_length} apart, whose noise is correlated"
        )
    sampled = sum(1 for groups in groups_N if groups)
    cycles = len(masks_TN) // cycle_length
    if len(masks_TN) % cycle_length == 0 and rate < 1:
        evidence.p_value("total count", binomial(int(masks_TN.sum()), cycles * _EXAMPLES, rate))
    if sampled < _EXAMPLES // 2:
        evidence.violation(f"only {sampled} of {_EXAMPLES} examples were sampled")
