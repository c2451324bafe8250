"""Creates the sampling scheme that replaces the order of the user's loader."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from torch.utils.data import DataLoader

from dpengine.errors import InvalidBudgetError, SamplingError

from .check import check_loader
from .custom_scheme import CustomScheme
from .poisson import PoissonDraws, checked_batch_size, checked_sample_rate
from .scheme import Draws, SamplingScheme
from .shuffle import ShuffleDraws


def draws_for(
    loader: DataLoader[Any],
    *,
    sampling: str = "poisson",
    sample_rate: float | None = None,
    expected_batch_size: float | None = None,
    num_units: int | None = None,
) -> Draws:
    """Returns the sampling scheme for the batch size of a loader.

    Values that are None are derived from the loader: ``sample_rate`` is the batch size over ``len(dataset)``, at most
    1, which makes the size of the data set public. If ``sample_rate`` and ``expected_batch_size`` are given, the size
    of the data set does not affect the rate, the divisor or the number of steps. With ``num_units``, privacy units are
    sampled instead of examples, and the batch size of the loader is a number of units.

    Raises SamplingError for a loader that `check_loader` rejects, or for an empty data set without both constants.
    """
    check_loader(loader)
    if sampling not in _BY_NAME:
        raise ValueError(f"sampling must be one of {', '.join(map(repr, _BY_NAME))}, got {sampling!r}.")
    if num_units is None:
        return _BY_NAME[sampling](loader, sample_rate, expected_batch_size, len(loader.dataset))  # type: ignore[arg-type]
    if sampling != "poisson":
        raise InvalidBudgetError(
            f"privacy_unit= does not support sampling={sampling!r}.", fix='Pass sampling="poisson".'
        )
    return _poisson(loader, sample_rate, expected_batch_size, num_units)


def _poisson(
    loader: DataLoader[Any], sample_rate: float | None, batch_size: float | None, num_units: int
) -> PoissonDraws:
    drop_last = loader.batch_sampler.drop_last  # type: ignore[union-attr]
    if sample_rate is not None:
        rate = checked_sample_rate("draws_for", sample_rate)
        size = rate * num_units if batch_size is None else batch_size
        steps = batches_per_epoch(rate, drop_last=drop_last)
    else:
        size = loader.batch_sampler.batch_size if batch_size is None else batch_size  # type: ignore[union-attr]
        size = checked_batch_size("draws_for", size)
        rate = min(1.0, size / num_units) if num_units else 0.0
        steps = _rounded(Fraction(num_units) / Fraction(size), drop_last)
        size = size if batch_size is not None else min(size, num_units)  # a declared constant is kept
    if num_units == 0 and (sample_rate is None or batch_size is None):
        raise SamplingError(
            f"The data set ({type(loader.dataset).__name__}) is empty, so no sampling rate can be derived.",
            fix="Pass sample_rate= and expected_batch_size= as constants, and example_input=.",
        )
    return PoissonDraws(num_units, rate, steps, size)


def _shuffle(
    loader: DataLoader[Any], sample_rate: float | None, batch_size: float | None, num_examples: int
) -> ShuffleDraws:
    for name, value in {"sample_rate": sample_rate, "expected_batch_size": batch_size}.items():
        if value is not None:
            raise ValueError(f'{name}={value!r} is not supported by sampling="shuffle": set the loader\'s batch_size.')
    if num_examples == 0:
        raise SamplingError(f"The data set ({type(loader.dataset).__name__}) is empty, so it cannot be shuffled.")
    batches = loader.batch_sampler
    return ShuffleDraws(num_examples, batches.batch_size, batches.drop_last)  # type: ignore[arg-type, union-attr]


def scheme_from(value: Any) -> SamplingScheme:
    """Returns a sampling scheme. Wraps and checks a custom one."""
    return value if isinstance(value, SamplingScheme) else CustomScheme(value)


_BY_NAME = {"poisson": _poisson, "shuffle": _shuffle}


def batches_per_epoch(sample_rate: float, *, drop_last: bool) -> int:
    """Returns the number of logical batches per epoch: ``1 / sample_rate``, rounded to an integer."""
    return _rounded(_inverse_rate(checked_sample_rate("batches_per_epoch", sample_rate)), drop_last)


def _inverse_rate(rate: float) -> Fraction:
    """Returns ``1 / rate`` exactly. Rates such as 1/3, which float64 cannot represent, give the integer."""
    exact = 1 / Fraction(rate)
    nearest = Fraction(round(exact))
    return nearest if abs(exact - nearest) <= exact / (1 << 50) else exact


def _rounded(batches: Fraction, drop_last: bool) -> int:
    return math.floor(batches) if drop_last else math.ceil(batches)
