"""The private loader: a copy of the user's DataLoader that returns private batches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch.utils.data import DataLoader, SequentialSampler

from dpengine.accounting.overviews import html_table, text_line
from dpengine.errors import SamplingError

from .batched_tensors import batched_tensors, identity_collate
from .batches import LoaderPass, LogicalBatch, LogicalBatches, PrivateBatchSampler
from .check import check_loader, check_repeats
from .collate import EmptyAwareCollate, empty_template, placeholder_batch, restored_generators
from .collate_probe import check_collate
from .scheme import Draws, WordStream, checked_integer

_END = object()
_IN_ORDER = "Pass a loader that returns each batch of its batch_sampler once, in order."


def private_loader(
    loader: DataLoader[Any],
    *,
    sampling: Draws,
    words: WordStream,
    on_return: Callable[[LogicalBatch, int, Any], None],
    on_end: Callable[[], None] = lambda: None,
    may_draw: Callable[[int], bool],
    physical_batch_size: int | None = None,
    accumulation_steps: int = 1,
    batch_first: bool = True,
    example_input: Any = None,  # for the structure of an empty batch, instead of example 0 of the data set
    shard: tuple[int, int] = (0, 1),
    placeholder: bool = False,  # True if an empty batch has a placeholder sample, whose gradient must be dropped
) -> DataLoader[Any]:
    """Returns a copy of ``loader`` that draws its batches by a sampling scheme.

    The class of the copy is a subclass of the user's class. The copy has the data set, workers, memory pinning,
    generator and all other attributes of the original, which does not change.

    A pass yields ``sampling.steps_per_epoch`` logical batches, each as one or more physical batches. The next pass
    continues after the last one: ``position`` counts the logical batches returned. A batch that was prefetched but not
    returned has no effect, and is drawn again, identically. Batches are drawn in the main process. Workers only receive
    the data set and ``collate_fn``.

    An empty physical batch has the structure of other batches, which is derived once from ``dataset[0]``. It has zero
    samples or, with ``placeholder``, one: ``example_input`` if given, otherwise zeros.

    Starting a pass ends an open pass, whose iterator then raises SamplingError.
    """
    check_loader(loader)
    if not sampling.may_repeat:
        check_repeats(loader.dataset)
    _check_loader_size(loader, sampling)
    accumulation_steps = checked_integer("private_loader", "accumulation_steps", accumulation_steps, at_least=1)
    if physical_batch_size is not None:
        physical_batch_size = checked_integer("private_loader", "physical_batch_size", physical_batch_size, at_least=1)
        if accumulation_steps > 1:
            raise ValueError(
                f"physical_batch_size={physical_batch_size} and accumulation_steps={accumulation_steps} both split "
                "the logical batch. Pass one of them."
            )
    batches = LogicalBatches(
        sampling,
        words,
        physical_batch_size=physical_batch_size,
        accumulation_steps=accumulation_steps,
        on_return=on_return,
        on_end=on_end,
        may_draw=may_draw,
        shard=shard,
        placeholder=placeholder,
    )
    check_collate(loader, batch_first=batch_first)
    template = _template(loader, example_input, batch_first=batch_first, placeholder=placeholder)
    batch_sampler = PrivateBatchSampler(batches)
    settings = {
        "batch_sampler": batch_sampler,
        "batch_size": batch_sampler.batch_size,
        "drop_last": False,
        # The sampler that torch sets if a batch sampler is passed. Replaces the user's order.
        "sampler": SequentialSampler(loader.dataset),  # type: ignore[arg-type]
        "collate_fn": EmptyAwareCollate(loader.collate_fn, template),
        "in_order": True,  # `LoaderPass` matches batches in order
        "_iterator": None,  # persistent workers belong to the original
    }
    wrapped = {name: _copy_with(part, type(part), settings) for name, part in _wrapped_loaders(loader).items()}
    # A class with its own __iter__ may change batches, so it must also receive empty ones. For other classes, empty
    # batches skip the workers, where `dataset.__getitems__` would receive an empty list.
    fetch_empty = type(loader).__iter__ is not DataLoader.__iter__
    state = {"_batches": batches, "_fetch_empty": fetch_empty, "_physical_batch_size": physical_batch_size}
    attributes = {**settings, **wrapped, **state}
    return _copy_with(loader, _private_class(type(loader)), attributes)  # type: ignore[arg-type]


def _check_loader_size(loader: Any, sampling: Draws | None = None) -> None:
    """Raises SamplingError if the number of examples differs from that of the accounted sampling rate."""
    sampling = loader._batches.sampling if sampling is None else sampling
    size = len(loader.dataset)
    if size != sampling.num_examples:
        raise SamplingError(
            f"The data set has {size} examples, and the sampling scheme expects {sampling.num_examples}.",
            fix="Do not change a data set during a run: call make_private with a loader of the new one.",
        )


def _copy_with(loader: DataLoader[Any], kind: type[DataLoader[Any]], attributes: dict[str, Any]) -> DataLoader[Any]:
    """Returns a shallow copy of class ``kind`` with changed attributes. DataLoader protects some from assignment."""
    copied = object.__new__(kind)
    copied.__dict__.update(loader.__dict__, **attributes)
    return copied


def _wrapped_loaders(loader: DataLoader[Any]) -> dict[str, DataLoader[Any]]:
    """Returns the loaders in attributes of ``loader`` with the same batch sampler, as in wrappers of accelerate."""
    parts = {name: part for name, part in loader.__dict__.items() if isinstance(part, DataLoader)}
    return {name: part for name, part in parts.items() if part.batch_sampler is loader.batch_sampler}


def _template(loader: DataLoader[Any], example_input: Any, *, batch_first: bool, placeholder: bool) -> Any:
    example = example_input
    if example is None:
        if len(loader.dataset) == 0:  # type: ignore[arg-type]
            raise SamplingError(
                f"The data set ({type(loader.dataset).__name__}) is empty, so the structure of a batch is not known.",
                fix="Pass example_input=, an example as the data set would return it.",
            )
        try:
            with restored_generators():
                example = loader.dataset[0]
        except Exception as error:
            raise SamplingError(
                f"dataset[0] of {type(loader.dataset).__name__} cannot be read ({type(error).__name__}: {error}), so "
                "the structure of an empty batch is not known.",
                fix="Pass example_input=, an example as the data set would return it.",
            ) from error
    if placeholder:
        return placeholder_batch(loader.collate_fn, example, public=example_input is not None)
    return empty_template(loader.collate_fn, example, batch_first=batch_first)


@functools.cache
def _private_class(kind: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    """Returns the private subclass of a loader class."""
    return type(f"Private{kind.__name__}", (PrivateIteration, kind), {"__module__": __name__, "__doc__": kind.__doc__})


def _users_class(loader: Any) -> str:
    kinds = type(loader).__mro__
    return kinds[kinds.index(PrivateIteration) + 1].__name__


class PrivateIteration:
    """Iteration of a private loader. In the method resolution order it precedes the user's class."""

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
                # Checked when the user requests the batch, not when a worker prefetches it, because the result may
                # depend on the steps taken so far.
                if not batches.may_draw(batches.position):
                    return
                batch = this_pass.next_for_user()
                for chunk, size in enumerate(batch.sizes):
                    data = self._chunk(this_pass, size)
                    batches.mark_returned(batch, chunk, data)
                    yield data
                    if batches.open_pass is not this_pass:
                        raise SamplingError(
                            "This pass over the private loader has ended: another pass started, or a state was loaded.",
                            fix="Use one iterator at a time.",
                        )
            # Exhausts the iterator, so that the user's class runs its code that follows the last batch.
            if next(this_pass.source, _END) is not _END:
                raise SamplingError(f"{_users_class(self)} returned more batches than were drawn.", fix=_IN_ORDER)
        finally:
            if batches.open_pass is this_pass:
                batches.end_pass()

    def _get_iterator(self) -> Any:
        """Returns torch's iterator, or a faster one with the same batches for a ``TensorDataset``.

        If the user's class overrides this method, returns its result.
        """
        get_iterator = super()._get_iterator  # type: ignore[misc]
        is_torch_method = getattr(get_iterator, "__func__", None) is DataLoader._get_iterator
        if not is_torch_method or type(self.collate_fn) is not EmptyAwareCollate or self.__dict__["num_workers"]:
            return get_iterator()
        tensors = batched_tensors(self.__dict__["dataset"], self.collate_fn.collate)
        if tensors is None:
            return get_iterator()
        return _copy_with(self, DataLoader, {"dataset": tensors, "collate_fn": identity_collate})._get_iterator()  # type: ignore[arg-type]

    def _chunk(self, this_pass: LoaderPass, size: int) -> Any:
        """Returns the data of the next physical batch."""
        if size == 0 and not self._fetch_empty:
            return self.collate_fn([])
        data = next(this_pass.source, _END)  # type: ignore[arg-type]
        this_pass.received += 1
        if data is _END or this_pass.received > this_pass.sent:
            fault = "ended before it returned all batches" if data is _END else "does not read its batch_sampler"
            raise SamplingError(f"{_users_class(self)} {fault}.", fix=_IN_ORDER)
        return data

    def __len__(self) -> int:
        """Returns the number of logical batches in a pass."""
        return len(self.batch_sampler)

    def __repr__(self) -> str:
        """Returns the class, the sampling scheme, the number of steps in a pass, and the position."""
        return text_line(type(self).__name__, self._overview())

    def _repr_html_(self) -> str:
        """Returns the same values as a table, for notebooks."""
        return html_table(type(self).__name__, self._overview())

    def _overview(self) -> dict[str, Any]:
        return {"sampling": self._batches.sampling, "steps": len(self), "position": self.position}

    @property
    def position(self) -> int:
        """Number of logical batches returned since the start of the run."""
        return self._batches.position

    def state_dict(self) -> dict[str, int]:
        """Returns the position, which is public. A resumed run needs the position and the same ``words``."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues from a stored position. Ends an open pass."""
        if set(state) != {"position"}:
            raise ValueError(f"load_state_dict: expected only the key 'position', got {sorted(state)}.")
        position = checked_integer("load_state_dict", "position", state["position"], at_least=0)
        self._batches.end_pass()
        self._batches.position = position

    def __copy__(self) -> Any:
        return self._with({**self.__dict__})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._with(
            {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items() if name != "_iterator"}
        )

    def _with(self, attributes: dict[str, Any]) -> Any:
        """Returns a loader of the same run with these attributes, without workers."""
        copied = object.__new__(type(self))
        copied.__dict__.update(attributes, _iterator=None)
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._batches.__reduce_ex__(protocol)
