"""The user's DataLoader, handing out private batches."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch.utils.data import DataLoader, SequentialSampler

from dpengine.errors import SamplingError

from .batches import LogicalBatch, LogicalBatches, Pass, PrivateBatchSampler
from .check import check_loader
from .collate import EmptyAwareCollate, empty_template, generators_untouched
from .scheme import AbstractBatchStrategy, WordStream, whole_number
from .whole_tensors import as_read, whole_tensors

_END = object()
_ONE_FOR_ONE = "Pass a loader that yields each batch of its batch_sampler once, in order."


def private_loader(
    loader: DataLoader[Any],
    *,
    strategy: AbstractBatchStrategy,
    words: WordStream,
    on_return: Callable[[LogicalBatch, int], None],
    may_draw: Callable[[int], bool],
    physical_batch_size: int | None = None,
    accumulation_steps: int = 1,
    batch_first: bool = True,
    example_input: Any = None,  # for a data set whose example 0 cannot be read
    share: tuple[int, int] = (0, 1),
    placeholder: bool = False,  # whether the collate function returns a placeholder sample for an empty batch
) -> DataLoader[Any]:
    """Returns a copy of ``loader`` that draws its batches by ``strategy``.

    The copy is an instance of the user's own class, with the data set, workers, memory pinning, generator and all other
    attributes of the original, which stays as it was. A pass over it yields ``strategy.steps_per_epoch`` logical
    batches, each in one or more physical chunks, and the next pass goes on where the last one ended: ``position``
    counts logical batches handed out. A batch that workers have fetched ahead but that was never handed out has no
    effect, and comes again, the same. Batches are drawn in the main process; workers receive the data set and
    ``collate_fn`` only.

    An empty logical batch is a batch of zero rows, in the structure of a real one. That structure is taken here, once,
    from ``dataset[0]``.

    Starting a pass ends one that is still open; reading the old one then raises `SamplingError`.
    """
    check_loader(loader)
    _check_loader_size(loader, strategy)
    accumulation_steps = whole_number("private_loader", "accumulation_steps", accumulation_steps, at_least=1)
    if physical_batch_size is not None:
        physical_batch_size = whole_number("private_loader", "physical_batch_size", physical_batch_size, at_least=1)
        if accumulation_steps > 1:
            raise ValueError(
                f"physical_batch_size={physical_batch_size} and accumulation_steps={accumulation_steps} both split "
                "the logical batch. Pass one of them."
            )
    batches = LogicalBatches(
        strategy,
        words,
        physical_batch_size=physical_batch_size,
        accumulation_steps=accumulation_steps,
        on_return=on_return,
        may_draw=may_draw,
        share=share,
        placeholder=placeholder,
    )
    template = _template(loader, example_input, batch_first=batch_first)
    batch_sampler = PrivateBatchSampler(batches)
    settings = {
        "batch_sampler": batch_sampler,
        "batch_size": batch_sampler.batch_size,
        "drop_last": False,
        # What torch itself puts there beside a batch sampler: the user's order of rows is gone.
        "sampler": SequentialSampler(loader.dataset),  # type: ignore[arg-type]
        "collate_fn": EmptyAwareCollate(loader.collate_fn, template),
        "in_order": True,  # logical batches are matched first in, first out
        "_iterator": None,  # persistent workers belong to the original
    }
    wrapped = {name: _changed(part, type(part), settings) for name, part in _same_batches(loader).items()}
    # A class that changes batches in an __iter__ of its own must get the empty ones too. In all others they do not pass
    # through workers, where `dataset.__getitems__` would meet an empty list.
    fetch_empty = type(loader).__iter__ is not DataLoader.__iter__
    own = {"_batches": batches, "_fetch_empty": fetch_empty, "_physical_batch_size": physical_batch_size}
    private = {**settings, **wrapped, **own}
    return _changed(loader, _private_class(type(loader)), private)  # type: ignore[arg-type]


def _check_loader_size(loader: Any, strategy: AbstractBatchStrategy | None = None) -> None:
    """A data set that has grown or shrunk is not the one whose examples have the chance that is accounted for."""
    strategy = loader._batches.strategy if strategy is None else strategy
    rows = len(loader.dataset)
    if rows != strategy.num_examples:
        raise SamplingError(
            f"The data set has {rows} rows, the strategy draws from {strategy.num_examples}.",
            fix="A data set stays as it is while a run goes on: call make_private on a loader of the new one.",
        )


def _changed(loader: DataLoader[Any], kind: type[DataLoader[Any]], attributes: dict[str, Any]) -> DataLoader[Any]:
    """A shallow copy of class ``kind`` with these attributes. Through __dict__, as DataLoader forbids setting them."""
    changed = object.__new__(kind)
    changed.__dict__.update(loader.__dict__, **attributes)
    return changed


def _same_batches(loader: DataLoader[Any]) -> dict[str, DataLoader[Any]]:
    """The loaders inside ``loader`` that it iterates over, as those of accelerate do."""
    parts = {name: part for name, part in loader.__dict__.items() if isinstance(part, DataLoader)}
    return {name: part for name, part in parts.items() if part.batch_sampler is loader.batch_sampler}


def _template(loader: DataLoader[Any], example_input: Any, *, batch_first: bool) -> Any:
    example = example_input
    if example is None:
        if len(loader.dataset) == 0:  # type: ignore[arg-type]
            raise SamplingError(
                f"The data set ({type(loader.dataset).__name__}) is empty, so the structure of a batch is not known.",
                fix="Pass example_input=, one example as the data set would return it.",
            )
        try:
            with generators_untouched():
                example = loader.dataset[0]
        except Exception as error:
            raise SamplingError(
                f"dataset[0] of {type(loader.dataset).__name__} cannot be read ({type(error).__name__}: {error}), so "
                "the structure of an empty batch is not known.",
                fix="Pass example_input=, one example as the data set would return it.",
            ) from error
    return empty_template(loader.collate_fn, example, batch_first=batch_first)


@functools.cache
def _private_class(kind: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    """The subclass of the user's loader class, one for each."""
    return type(f"Private{kind.__name__}", (PrivateIteration, kind), {"__module__": __name__, "__doc__": kind.__doc__})


def _users_class(loader: Any) -> str:
    return type(loader).__mro__[2].__name__


class PrivateIteration:
    """What a private loader does differently from the user's class, which follows it in the order of resolution."""

    batch_sampler: PrivateBatchSampler
    collate_fn: EmptyAwareCollate
    _batches: LogicalBatches
    _fetch_empty: bool
    _physical_batch_size: int | None

    def __iter__(self) -> Iterator[Any]:
        batches = self._batches
        _check_loader_size(self)
        batches.physical_batch_size = self._physical_batch_size
        this_pass = batches.start_pass(fetch_empty=self._fetch_empty)
        try:
            this_pass.source = super().__iter__()  # type: ignore[misc]
            for _ in range(len(self.batch_sampler)):
                # Asked when the user wants the batch, not when a worker runs ahead: the answer may depend on the steps
                # taken until now.
                if not batches.may_draw(batches.position):
                    return
                batch = this_pass.next_for_user()
                for chunk, rows in enumerate(batch.rows):
                    data = self._chunk(this_pass, rows)
                    batches.mark_returned(batch, chunk)
                    yield data
                    if batches.open_pass is not this_pass:
                        raise SamplingError(
                            "This pass over the private loader is over: another was started, or a state loaded.",
                            fix="Use one iterator at a time.",
                        )
            # To the end, so that what the user's class does after its last batch is done.
            if next(this_pass.source, _END) is not _END:
                raise SamplingError(f"{_users_class(self)} gave more batches than were drawn.", fix=_ONE_FOR_ONE)
        finally:
            if batches.open_pass is this_pass:
                batches.end_pass()

    def _get_iterator(self) -> Any:
        """The iterator of the user's class; of torch's own, over tensors in memory, one that reads a batch at once."""
        theirs = super()._get_iterator  # type: ignore[misc]
        as_torch_does = getattr(theirs, "__func__", None) is DataLoader._get_iterator
        if not as_torch_does or type(self.collate_fn) is not EmptyAwareCollate or self.__dict__["num_workers"]:
            return theirs()
        whole = whole_tensors(self.__dict__["dataset"], self.collate_fn.collate)
        if whole is None:
            return theirs()
        return _changed(self, DataLoader, {"dataset": whole, "collate_fn": as_read})._get_iterator()  # type: ignore[arg-type]

    def _chunk(self, this_pass: Pass, rows: int) -> Any:
        """The data of the next chunk."""
        if rows == 0 and not self._fetch_empty:
            return self.collate_fn([])
        data = next(this_pass.source, _END)  # type: ignore[arg-type]
        this_pass.received += 1
        if data is _END or this_pass.received > this_pass.sent:
            what = "ended before all of its batches had come" if data is _END else "does not read its batch_sampler"
            raise SamplingError(f"{_users_class(self)} {what}.", fix=_ONE_FOR_ONE)
        return data

    def __len__(self) -> int:
        """Returns the number of logical batches in a pass; for a loader of `in_chunks` about the number of chunks."""
        steps, size = len(self.batch_sampler), self._physical_batch_size
        if not self.__dict__.get("_counts_chunks") or size is None:
            return steps
        return math.ceil(steps * max(1.0, self._batches.strategy.expected_batch_size / size))

    def in_chunks(self, physical_batch_size: int) -> Any:
        """Returns a loader of the same run that splits logical batches into nearly equal chunks up to this size."""
        size = whole_number("in_chunks", "physical_batch_size", physical_batch_size, at_least=1)
        return self._with({**self.__dict__, "_physical_batch_size": size, "_counts_chunks": True})

    @property
    def position(self) -> int:
        """Logical batches handed out since the start of the run."""
        return self._batches.position

    def state_dict(self) -> dict[str, int]:
        """Returns the position. It is public, and all that a resumed run needs beside the same ``words``."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from a stored position. An open pass is over."""
        if set(state) != {"position"}:
            raise ValueError(f"load_state_dict: expected the key 'position' alone, got {sorted(state)}.")
        position = whole_number("load_state_dict", "position", state["position"], at_least=0)
        self._batches.end_pass()
        self._batches.position = position

    def __copy__(self) -> Any:
        return self._with({**self.__dict__})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._with(
            {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items() if name != "_iterator"}
        )

    def _with(self, attributes: dict[str, Any]) -> Any:
        """A loader of the same run with these attributes, and no workers yet."""
        other = object.__new__(type(self))
        other.__dict__.update(attributes, _iterator=None)
        return other

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._batches.__reduce_ex__(protocol)
