"""``DPDataLoader``: Poisson batches, drawn by the engine, empty ones included."""

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
from dpengine.errors import suggests_names
from dpengine.sampling.check import check_loader
from dpengine.sampling.choose_scheme import strategy_for
from dpengine.sampling.loader import PrivateIteration
from dpengine.sampling.poisson import PoissonSampling
from dpengine.sampling.scheme import AbstractBatchStrategy

from .engine_batches import plain, reporting_loader, topology_for, whole_loader, words_for


def wrap_collate_with_empty(
    *,
    collate_fn: Callable[[list[Any]], Any] | None,
    batch_first: bool = True,
    rand_on_empty: bool = False,
    sample_empty_shapes: Sequence[tuple[int, ...]] | None = None,
    dtypes: Sequence[torch.dtype | type] | None = None,
) -> CollateFnWithEmpty:
    """``CollateFnWithEmpty`` of these arguments."""
    return CollateFnWithEmpty(collate_fn, batch_first, rand_on_empty, sample_empty_shapes, dtypes)


class CollateFnWithEmpty:
    """A collate function that knows what an empty batch looks like: the first batch that it saw, without rows.

    A ``DPDataLoader`` needs none: it looks at an example beforehand.

    Args:
        collator_fn: From a list of examples to a batch; None leaves the list as it is.
        batch_first: Whether axis 0 of tensors is the batch; else axis 1.
        rand_on_empty: Whether an empty batch has one row of zeros and ones instead of none.
        sample_empty_shapes: Shapes of the tensors of a batch that is empty before any other was seen.
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
        """The batch of these examples, or an empty one; TypeError if that would hold anything but tensors."""
        if len(batch):
            made = batch if self.wrapped_collator_fn is None else self.wrapped_collator_fn(batch)
            if self.first_batch is None:
                self.first_batch = copy.deepcopy(made)
            return made
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
            f"A batch holds a {type(sample).__name__}, of which there is no empty form that tells nothing. Collate to "
            "tensors in dictionaries, lists or tuples, or use a DPDataLoader."
        )


def shape_safe(x: Any) -> tuple[int, ...]:
    """The shape of a tensor or array, ``()`` of anything else."""
    return getattr(x, "shape", ())


def dtype_safe(x: Any) -> torch.dtype | type:
    """The dtype of a tensor or array, the type of anything else."""
    return getattr(x, "dtype", type(x))


class _PaddedCollate:
    """Gives a row of zeros and ones where the engine gives none. Its gradient is dropped."""

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self._collate = collate

    def __call__(self, examples: list[Any]) -> Any:
        made = self._collate(examples)
        return made if len(examples) else pytree.tree_map_only(torch.Tensor, _one_row, made)


def _one_row(empty: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 2, [size or 1 for size in empty.shape], device=empty.device).to(empty.dtype)


class DPDataLoader(PrivateIteration, DataLoader):  # type: ignore[misc]
    """A ``DataLoader`` that draws each example with one probability for each batch, and gives empty batches too.

    Args:
        dataset: A map-style data set.
        sample_rate: That probability, in (0, 1].
        collate_fn: From a list of examples to a batch; None for torch's own.
        drop_last: Without effect: there is no last batch that is shorter.
        generator: Makes batches repeat, for tests: it gives the seed.
        distributed: Whether each process loads its own part of every batch; or the topology of the model, which says
            who has which part.
        batch_first: Whether axis 0 of tensors is the batch; else axis 1.
        rand_on_empty: Whether an empty batch has one row of zeros and ones, whose gradient is dropped.
        kwargs: Of ``torch.utils.data.DataLoader``: workers, memory pinning and the like.

    Raises:
        ValueError: If the data set is an ``IterableDataset``, or the rate is out of its range.
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
        refuse_iterable(dataset)
        _refuse_unknown(kwargs)
        rows = len(dataset)  # type: ignore[arg-type]
        size = max(1, round(sample_rate * rows))
        plain: DataLoader[Any] = DataLoader(
            dataset, batch_size=size, collate_fn=collate_fn or default_collate, **kwargs
        )
        strategy = strategy_for(plain, sample_rate=sample_rate, expected_batch_size=max(sample_rate * rows, 1e-9))
        made = _made(plain, strategy, generator, distributed, batch_first, rand_on_empty)
        self.__dict__.update(made.__dict__)

    @classmethod
    @suggests_names
    def from_data_loader(
        cls,
        data_loader: DataLoader[Any],
        *,
        distributed: bool | Topology = False,
        generator: torch.Generator | None = None,
        batch_first: bool = True,
        rand_on_empty: bool = False,
    ) -> DPDataLoader:
        """A loader with the data set, workers and all else of another one, and as many batches in a pass.

        Args:
            data_loader: A plain loader, shuffled or not. It stays as it is. Its batch size is that of all processes
                together; with a ``DistributedSampler``, that of each.
            distributed: As in the class.
            generator: As in the class; None takes that of the loader.
            batch_first: As in the class.
            rand_on_empty: As in the class.

        Returns:
            The loader.

        Raises:
            ValueError: If its data set is an ``IterableDataset``, or its sampler has a law of its own.
        """  # noqa: DOC502 - the checks raise on our behalf
        generator = data_loader.generator if generator is None else generator
        strategy, whole = _drawn_as(data_loader, distributed)
        return _made(plain(whole), strategy, generator, distributed, batch_first, rand_on_empty)

    @property
    def strategy(self) -> AbstractBatchStrategy:
        """How its batches are drawn."""
        return self._batches.strategy

    @property
    def sample_rate(self) -> float:
        """The probability with which an example is in a batch."""
        return self.strategy.sample_rate


def private_form(
    data_loader: DataLoader[Any],
    *,
    repeats: bool,
    distributed: bool | Topology,
    batch_first: bool,
    rand_on_empty: bool,
) -> DPDataLoader:
    """Returns the private loader of a run, as ``DPDataLoader.from_data_loader`` does, with secret batches.

    Only with ``repeats`` the generator of the loader draws them, for tests whose noise repeats, too.
    """
    generator = data_loader.generator if repeats else None
    if generator is not data_loader.generator:
        warnings.warn(
            "The generator of the loader draws no batches here: which rows a batch has must stay secret, or sampling "
            "amplifies no privacy. For tests pass noise_generator= as well, and noise and batches repeat.",
            stacklevel=5,
        )
    strategy, whole = _drawn_as(data_loader, distributed)
    return _made(plain(whole), strategy, generator, distributed, batch_first, rand_on_empty)


def _drawn_as(
    data_loader: DataLoader[Any], distributed: bool | Topology
) -> tuple[AbstractBatchStrategy, DataLoader[Any]]:
    """How batches of a loader are drawn, and the loader of all rows."""
    refuse_iterable(data_loader.dataset)
    if isinstance(data_loader, DPDataLoader):
        return data_loader.strategy, data_loader
    steps, data_loader = len(data_loader), whole_loader(plain(data_loader), topology_for(distributed))
    check_loader(data_loader)
    batches: Any = data_loader.batch_sampler
    rows, size = len(data_loader.dataset), batches.batch_size  # type: ignore[arg-type]
    return PoissonSampling(rows, min(1.0, 1 / max(steps, 1)), steps, float(min(size, rows))), data_loader


@suggests_names
def switch_generator(*, data_loader: DataLoader[Any], generator: torch.Generator) -> DataLoader[Any]:
    """A copy of a loader whose sampler, workers and data draw from another generator.

    Args:
        data_loader: A loader.
        generator: The generator.

    Returns:
        The copy.

    Raises:
        ValueError: If the loader makes no batches, or its sampler draws from no generator.
    """
    batches: Any = data_loader.batch_sampler
    inner = batches.sampler if isinstance(batches, BatchSampler) else batches
    if inner is None or not hasattr(inner, "generator"):
        raise ValueError(f"The sampler of the loader ({type(inner).__name__}) draws from no generator.")
    other = copy.copy(data_loader)
    drawn = copy.copy(inner)
    drawn.generator = generator  # type: ignore[attr-defined]
    if isinstance(batches, BatchSampler):
        again = copy.copy(batches)
        again.sampler = drawn
        other.__dict__.update(sampler=drawn, batch_sampler=again, generator=generator)
    else:
        other.__dict__.update(batch_sampler=drawn, generator=generator)
    return other


def _made(
    plain: DataLoader[Any],
    strategy: AbstractBatchStrategy,
    generator: torch.Generator | None,
    distributed: bool | Topology,
    batch_first: bool,
    rand_on_empty: bool,
) -> DPDataLoader:
    topology = topology_for(distributed)
    private = reporting_loader(
        plain,
        topology,
        strategy=strategy,
        words=words_for(generator, topology),
        batch_first=batch_first,
        placeholder=rand_on_empty,
    )
    if rand_on_empty:
        private.__dict__["collate_fn"] = _PaddedCollate(private.collate_fn)
    more = {"batch_size": None, "distributed": bool(distributed), "rand_on_empty": rand_on_empty}
    private.__dict__.update(more)
    private.__class__ = _class_for(type(plain))  # type: ignore[assignment, arg-type]
    return private  # type: ignore[return-value]


@functools.cache
def _class_for(kind: type[DataLoader[Any]]) -> type[DPDataLoader]:
    """``DPDataLoader``, or a class that is that and the user's own."""
    if kind is DataLoader:
        return DPDataLoader
    return type(f"DP{kind.__name__}", (DPDataLoader, kind), {"__module__": __name__, "__doc__": kind.__doc__})


def _refuse_unknown(kwargs: Mapping[str, Any]) -> None:
    known = [*inspect.signature(DPDataLoader).parameters, *inspect.signature(DataLoader).parameters]
    for name in kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else " It takes its own arguments and those of DataLoader."
            raise TypeError(f"DPDataLoader() has no argument {name!r}.{hint}")


def refuse_iterable(dataset: Any) -> None:
    """Raises ValueError for an ``IterableDataset``."""
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"{type(dataset).__name__} is an IterableDataset: rows without an index cannot be drawn with equal "
            "chances. Pass a data set with __len__ and __getitem__."
        )
