"""``DPDataLoader``: Poisson batches, which may be empty, drawn by the engine."""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset
from torch.utils.data._utils.collate import default_collate

from dpengine.distributed.topology import Topology
from dpengine.errors import keyword_hints
from dpengine.sampling.batches import PrivateBatchSampler
from dpengine.sampling.check import check_loader
from dpengine.sampling.choose_scheme import draws_for
from dpengine.sampling.loader import PrivateIteration
from dpengine.sampling.poisson import PoissonDraws
from dpengine.sampling.scheme import Draws

from .engine_batches import plain, reporting_loader, topology_for, whole_loader, words_for


def wrap_collate_with_empty(
    *,
    collate_fn: Callable[[list[Any]], Any] | None,
    batch_first: bool = True,
    rand_on_empty: bool = False,
    sample_empty_shapes: Sequence[tuple[int, ...]] | None = None,
    dtypes: Sequence[torch.dtype | type] | None = None,
) -> CollateFnWithEmpty:
    """Returns a ``CollateFnWithEmpty`` with these arguments."""
    return CollateFnWithEmpty(collate_fn, batch_first, rand_on_empty, sample_empty_shapes, dtypes)


class CollateFnWithEmpty:
    """Collate function that returns the structure of the first batch, without samples, for an empty batch.

    A ``DPDataLoader`` does not need it, because it reads an example first.

    Args:
        collator_fn: Function from a list of examples to a batch; None returns the list.
        batch_first: Whether axis 0 of tensors is the batch; else axis 1.
        rand_on_empty: Whether an empty batch has one sample of zeros and ones.
        sample_empty_shapes: Shapes of the tensors of an empty batch that precedes all nonempty ones.
        dtypes: Their dtypes.
    """

    def __init__(
        self,
        collator_fn: Callable[[list[Any]], Any] | None,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        sample_empty_shapes: Sequence[tuple[int, ...]] | None = None,
        dtypes: Sequence[torch.dtype | type] | None = None,
    ):
        self.wrapped_collator_fn = collator_fn
        self.batch_first = batch_first
        self.rand_on_empty = rand_on_empty
        self.sample_empty_shapes = sample_empty_shapes
        self.dtypes = dtypes
        self.first_batch: Any = None

    def __call__(self, batch: list[Any]) -> Any:
        """Collates the examples, or returns an empty batch.

        Raises TypeError for an empty batch if the first batch contained anything other than tensors.
        """
        if len(batch):
            collated = batch if self.wrapped_collator_fn is None else self.wrapped_collator_fn(batch)
            if self.first_batch is None:
                self.first_batch = copy.deepcopy(collated)
            return collated
        if self.first_batch is not None:
            return self._make_empty_batch(self.first_batch)
        shapes, dtypes = self.sample_empty_shapes or (), self.dtypes or ()
        return [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]  # type: ignore[arg-type]

    def _make_empty_batch(self, sample: Any) -> Any:
        if isinstance(sample, torch.Tensor):
            shape = list(sample.shape)
            shape[0 if self.batch_first else 1] = int(self.rand_on_empty)
            return torch.randint(0, 2, shape, device=sample.device).to(sample.dtype)
        if isinstance(sample, Mapping):
            return {key: self._make_empty_batch(value) for key, value in sample.items()}
        if isinstance(sample, tuple) and hasattr(sample, "_fields"):
            return type(sample)(*map(self._make_empty_batch, sample))
        if isinstance(sample, (list, tuple)):
            return type(sample)(map(self._make_empty_batch, sample))
        raise TypeError(
            f"A batch contains a {type(sample).__name__}, which has no empty form. Collate to tensors in dictionaries, "
            "lists or tuples, or use a DPDataLoader."
        )


def shape_safe(x: Any) -> tuple[int, ...]:
    """Returns the shape of a tensor or array; ``()`` for other types."""
    return getattr(x, "shape", ())


def dtype_safe(x: Any) -> torch.dtype | type:
    """Returns the dtype of a tensor or array; the type of other values."""
    return getattr(x, "dtype", type(x))


class _PaddedCollate:
    """Returns a sample of zeros and ones for an empty batch. Its gradient is dropped."""

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self._collate = collate

    def __call__(self, examples: list[Any]) -> Any:
        batch = self._collate(examples)
        return batch if len(examples) else pytree.tree_map_only(torch.Tensor, _one_sample, batch)


def _one_sample(empty: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 2, [size or 1 for size in empty.shape], device=empty.device).to(empty.dtype)


class DPDataLoader(PrivateIteration, DataLoader):  # type: ignore[misc]
    """A ``DataLoader`` of Poisson batches, which may be empty.

    Args:
        dataset: A map-style data set.
        sample_rate: Probability that an example is in a batch, in (0, 1].
        collate_fn: Function from a list of examples to a batch; None for torch's default.
        drop_last: Has no effect, because the last batch is not shorter.
        generator: Source of the seed of reproducible batches, for tests.
        distributed: True if each process loads its own part of every batch. A topology of the model is also accepted.
        batch_first: Whether axis 0 of tensors is the batch; else axis 1.
        rand_on_empty: Whether an empty batch has one sample of zeros and ones, whose gradient is dropped.
        kwargs: Further arguments of ``torch.utils.data.DataLoader``.

    Raises:
        ValueError: If the data set is an ``IterableDataset``, or the rate is out of range.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        sample_rate: float,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        distributed: bool | Topology = False,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        **kwargs: Any,
    ):
        check_map_style(dataset)
        _check_keywords(kwargs)
        num_examples = len(dataset)  # type: ignore[arg-type]
        size = max(1, round(sample_rate * num_examples))
        plain: DataLoader[Any] = DataLoader(
            dataset, batch_size=size, collate_fn=collate_fn or default_collate, **kwargs
        )
        expected = max(sample_rate * num_examples, 1e-9)
        scheme = draws_for(plain, sample_rate=sample_rate, expected_batch_size=expected)
        private = _private(plain, scheme, generator, distributed, batch_first, rand_on_empty)
        self.__dict__.update(private.__dict__)

    @classmethod
    @keyword_hints
    def from_data_loader(
        cls,
        data_loader: DataLoader[Any],
        *,
        distributed: bool | Topology = False,
        generator: torch.Generator | None = None,
        batch_first: bool = True,
        rand_on_empty: bool = False,
    ) -> DPDataLoader:
        """Returns a loader with the data set and settings of another loader, and the same number of batches per epoch.

        The batch size of ``data_loader`` is the total of all processes. With a ``DistributedSampler``, it is that of
        each process. ``generator=None`` uses the generator of ``data_loader``. The other
        arguments are those of the class. Raises ValueError for an ``IterableDataset`` or a custom sampler.
        """
        generator = data_loader.generator if generator is None else generator
        scheme, whole = _scheme_and_loader(data_loader, distributed)
        return _private(plain(whole), scheme, generator, distributed, batch_first, rand_on_empty)

    @property
    def strategy(self) -> Draws:
        """The sampling scheme."""
        return self._batches.sampling

    @property
    def sample_rate(self) -> float:
        """Probability that an example is in a batch."""
        return self.strategy.sample_rate


def private_loader_for(
    data_loader: DataLoader[Any],
    *,
    reproducible: bool,
    distributed: bool | Topology,
    batch_first: bool,
    rand_on_empty: bool,
) -> DPDataLoader:
    """Returns the private loader of a run, with secret batches.

    If ``reproducible``, the generator of the loader draws them, for tests with reproducible noise.
    """
    generator = data_loader.generator if reproducible else None
    if generator is not data_loader.generator:
        warnings.warn(
            "The generator of the loader is not used: batches must be secret for privacy amplification by sampling. "
            "For reproducible tests, pass noise_generator= as well.",
            stacklevel=5,
        )
    scheme, whole = _scheme_and_loader(data_loader, distributed)
    return _private(plain(whole), scheme, generator, distributed, batch_first, rand_on_empty)


def _scheme_and_loader(data_loader: DataLoader[Any], distributed: bool | Topology) -> tuple[Draws, DataLoader[Any]]:
    """Returns the sampling scheme of the private loader, and a loader of the batches of all processes."""
    check_map_style(data_loader.dataset)
    if isinstance(data_loader, DPDataLoader):
        return data_loader.strategy, data_loader
    steps, data_loader = len(data_loader), whole_loader(plain(data_loader), topology_for(distributed))
    check_loader(data_loader)
    batches: Any = data_loader.batch_sampler
    num_examples, size = len(data_loader.dataset), batches.batch_size  # type: ignore[arg-type]
    scheme = PoissonDraws(num_examples, min(1.0, 1 / max(steps, 1)), steps, float(min(size, num_examples)))
    return scheme, data_loader


@keyword_hints
def switch_generator(*, data_loader: DataLoader[Any], generator: torch.Generator) -> DataLoader[Any]:
    """Returns a copy of a loader whose sampler and workers use the given generator.

    Raises:
        ValueError: If the loader has no batches, or its sampler has no generator.
    """
    batches: Any = data_loader.batch_sampler
    inner = batches.sampler if isinstance(batches, BatchSampler) else batches
    if inner is None or not hasattr(inner, "generator"):
        raise ValueError(f"The sampler of the loader ({type(inner).__name__}) has no generator.")
    other, sampler = copy.copy(data_loader), copy.copy(inner)
    sampler.generator = generator  # type: ignore[attr-defined]
    other.__dict__.update(batch_sampler=sampler, generator=generator)
    if isinstance(batches, BatchSampler):
        batches = copy.copy(batches)
        batches.sampler = sampler
        other.__dict__.update(sampler=sampler, batch_sampler=batches)
    return other


def _private(
    plain: DataLoader[Any],
    scheme: Draws,
    generator: torch.Generator | None,
    distributed: bool | Topology,
    batch_first: bool,
    rand_on_empty: bool,
) -> DPDataLoader:
    topology = topology_for(distributed)
    private = reporting_loader(
        plain,
        topology,
        sampling=scheme,
        words=words_for(generator, topology),
        batch_first=batch_first,
        placeholder=rand_on_empty,
    )
    if rand_on_empty:
        private.__dict__["collate_fn"] = _PaddedCollate(private.collate_fn)
    more = {"batch_size": None, "distributed": bool(distributed), "rand_on_empty": rand_on_empty}
    private.__dict__.update(more, batch_sampler=_BatchSampler(private._batches))  # type: ignore[attr-defined]
    private.__class__ = _class_for(type(plain))  # type: ignore[assignment, arg-type]
    return private  # type: ignore[return-value]


class _BatchSampler(PrivateBatchSampler):
    """Batch sampler with the attributes of Opacus's ``UniformWithReplacementSampler``."""

    num_samples = property(lambda self: self._batches.sampling.num_examples)
    sample_rate = property(lambda self: self._batches.sampling.sample_rate)
    steps = property(len)


@functools.cache
def _class_for(kind: type[DataLoader[Any]]) -> type[DPDataLoader]:
    """Returns ``DPDataLoader``, or a subclass of it and of the user's loader class."""
    if kind is DataLoader:
        return DPDataLoader
    return type(f"DP{kind.__name__}", (DPDataLoader, kind), {"__module__": __name__, "__doc__": kind.__doc__})


def _check_keywords(kwargs: Mapping[str, Any]) -> None:
    known = [*inspect.signature(DPDataLoader).parameters, *inspect.signature(DataLoader).parameters]
    for name in kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else " Its arguments include those of DataLoader."
            raise TypeError(f"DPDataLoader() has no argument {name!r}.{hint}")


def check_map_style(dataset: Any) -> None:
    """Raises ValueError for an ``IterableDataset``."""
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"{type(dataset).__name__} is an IterableDataset, whose examples cannot be sampled with equal probability. "
            "Pass a data set with __len__ and __getitem__."
        )
