"""``BatchMemoryManager``: the chunks of a logical batch make one step, also after interruptions."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from opacus_runs import (
    arguments,
    assert_clipped_step,
    assert_same,
    batch,
    by_hand,
    gradients,
    loss,
    private,
    rows,
    step,
    steps_in_history,
    train,
    truth,
)
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

import dpengine
from dpengine.compat.opacus.data_loader import DPDataLoader
from dpengine.compat.opacus.grad_sample import get_gsm_class
from dpengine.compat.opacus.utils.batch_memory_manager import (
    BatchMemoryManager,
    BatchSplittingSampler,
    wrap_data_loader,
)
from dpengine.errors import BatchStateError


@pytest.mark.one_in(2, "through", "mode", others="slow")
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("through", ["make_private", "by hand"])
def test_chunks_are_one_logical_batch(through, mode):
    parts = private(batch_size=6, grad_sample_mode=mode)
    wrapped, optimizer, loader = parts.model, parts.optimizer, parts.loader
    if through == "by hand":
        more = {"max_grad_norm": 1.0} if mode == "ghost" else {}
        wrapped, optimizer = by_hand(wrapper=lambda m: get_gsm_class(mode)(m, **more), expected_batch_size=6)
        loader = DataLoader(rows(), 6)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as chunks:
        assert isinstance(chunks, DataLoader)
        seen = []
        for inputs, targets in chunks:
            seen.append((inputs, targets))
            optimizer.zero_grad()
            if len(seen) % 2:
                before = {name: p.detach().clone() for name, p in wrapped.named_parameters()}
                expected = truth(wrapped._module, *[t[6 * (len(seen) // 2) :][:6] for t in rows().tensors])
            loss(wrapped, inputs, targets).backward()
            optimizer.step()
            if len(seen) % 2:
                assert all(torch.equal(p, before[name]) for name, p in wrapped.named_parameters())
            else:
                assert_same(gradients(wrapped._module, 6), expected)
    assert [len(inputs) for inputs, _ in seen] == [3, 3, 3, 3]
    assert torch.equal(torch.cat([inputs for inputs, _ in seen]), rows().tensors[0])
    if through == "make_private":
        assert steps_in_history(parts) == 2


@pytest.mark.one_in(2, "workers", "through")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("through", ["make_private", "by hand"])
def test_a_batch_that_was_interrupted_never_enters_another(through, workers):
    parts = private(batch_size=6, workers=workers)
    wrapped, optimizer, loader = parts.model, parts.optimizer, parts.loader
    if through == "by hand":
        wrapped, optimizer = by_hand(expected_batch_size=6)
        loader = DataLoader(rows(), 6, num_workers=workers)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as chunks:
        for inputs, targets in chunks:
            loss(wrapped, inputs, targets).backward()
            optimizer.step()
            break
    for inputs, targets in loader:
        assert_clipped_step(wrapped, optimizer, inputs, targets, size=6)
        assert not optimizer.step_was_skipped


def by_sampler(*, data_loader, max_batch_size, optimizer):
    """Builds the loader of chunks with a sampler, as scripts do."""
    sampler = BatchSplittingSampler(
        sampler=data_loader.batch_sampler, max_batch_size=max_batch_size, optimizer=optimizer
    )
    return DataLoader(data_loader.dataset, batch_sampler=sampler, num_workers=data_loader.num_workers)


PERSISTENT = {"num_workers": 2, "persistent_workers": True}
INTERRUPTIONS = [  # a loader of chunks, its workers, and the chunk of 15 after which the pass ends
    (wrap_data_loader, {}, 1),
    (wrap_data_loader, {"num_workers": 2}, 1),
    (wrap_data_loader, {"num_workers": 2}, 13),  # the sampler has ended by then
    (wrap_data_loader, PERSISTENT, 1),
    (wrap_data_loader, PERSISTENT, 13),
    (by_sampler, {}, 1),
    (by_sampler, {"num_workers": 2}, 1),
]


@pytest.mark.one_in(4, "make_chunks", others="slow")
@pytest.mark.parametrize(("make_chunks", "workers", "left_at"), INTERRUPTIONS)
def test_an_unfinished_pass_without_the_context_does_not_affect_the_next_batch(make_chunks, workers, left_at):
    wrapped, optimizer = by_hand(expected_batch_size=20)
    loader = DataLoader(rows(60), 20, **workers)
    chunks = make_chunks(data_loader=loader, max_batch_size=4, optimizer=optimizer)
    skipped = []
    for inputs, targets in chunks:
        loss(wrapped, inputs, targets).backward()
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
        if len(skipped) == left_at:
            break
    assert skipped == [number % 5 != 0 for number in range(1, left_at + 1)]
    for inputs, targets in itertools.islice(loader, 2):
        assert_clipped_step(wrapped, optimizer, inputs, targets, size=20)
        assert not optimizer.step_was_skipped


@pytest.mark.parametrize("make_chunks", [wrap_data_loader, by_sampler])
def test_a_pass_that_is_left_late_does_not_interrupt_the_one_that_followed(make_chunks):
    wrapped, optimizer = by_hand(expected_batch_size=6)
    chunks = make_chunks(data_loader=DataLoader(rows(), 6), max_batch_size=3, optimizer=optimizer)
    left = iter(chunks)
    next(left)
    expected = truth(wrapped._module, *next(iter(DataLoader(rows(), 6))))
    for number, (inputs, targets) in enumerate(chunks):
        if number == 1:
            del left
        loss(wrapped, inputs, targets).backward()
        optimizer.step()
        if number == 1:
            break
    assert_same(gradients(wrapped._module, 6), expected)


@pytest.mark.one_in(2, "make_chunks", "workers")
@pytest.mark.parametrize("make_chunks", [wrap_data_loader, by_sampler])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_of_another_loader_keeps_its_signals_when_an_earlier_iterator_is_deleted(make_chunks, workers):
    wrapped, optimizer = by_hand(expected_batch_size=6)
    loader = DataLoader(rows(24), 6, num_workers=workers)
    skipped = []
    for _ in range(2):  # rebinding `batches` deletes the iterator of the earlier pass after this one has started
        batches = iter(make_chunks(data_loader=loader, max_batch_size=2, optimizer=optimizer))
        for _ in range(8):
            loss(wrapped, *next(batches)).backward()
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
    assert skipped == [True, True, False, True, True, False, True, True] * 2


class WithUnreadableExample(Dataset):
    """A data set of which one example cannot be read."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 3:
            raise OSError("row 3")
        return rows(12)[index]


def assert_a_plain_batch_is_independent(wrapped, optimizer):
    assert_clipped_step(wrapped, optimizer, *batch(6), size=6)
    assert not optimizer.step_was_skipped


def backward_and_step(wrapped, optimizer, inputs, targets):
    step(wrapped, optimizer, inputs, targets)
    return optimizer.step_was_skipped


@pytest.mark.one_in(2, "make_chunks", "workers")
@pytest.mark.parametrize("make_chunks", [wrap_data_loader, by_sampler])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_example_that_cannot_be_read_discards_its_batch(make_chunks, workers, monkeypatch):
    monkeypatch.setattr(
        torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5
    )  # seconds within which a worker must stop
    wrapped, optimizer = by_hand(expected_batch_size=6)
    chunks = make_chunks(
        data_loader=DataLoader(WithUnreadableExample(), 6, num_workers=workers), max_batch_size=2, optimizer=optimizer
    )
    with pytest.raises(OSError, match="row 3"):
        for inputs, targets in chunks:
            backward_and_step(wrapped, optimizer, inputs, targets)
    gc.collect()  # the error holds the iterator for a while, and with it the user's sampler
    assert_a_plain_batch_is_independent(wrapped, optimizer)


@pytest.mark.parametrize("make_chunks", [wrap_data_loader, by_sampler])
def test_an_unfinished_pass_that_resumed_after_another_one_is_discarded(make_chunks):
    wrapped, optimizer = by_hand(expected_batch_size=6)
    older, other = (
        make_chunks(data_loader=DataLoader(rows(), 6), max_batch_size=2, optimizer=optimizer) for _ in range(2)
    )
    batches = iter(older)
    skipped = [backward_and_step(wrapped, optimizer, *next(batches)) for _ in range(3)]
    skipped += [backward_and_step(wrapped, optimizer, *one) for one in other]
    skipped.append(backward_and_step(wrapped, optimizer, *next(batches)))
    del batches
    assert skipped == [True, True, False] * 3 + [True]
    assert_a_plain_batch_is_independent(wrapped, optimizer)


def test_a_batch_that_another_pass_interrupts_does_not_join_it():
    wrapped, optimizer = by_hand(expected_batch_size=6)
    chunks = wrap_data_loader(data_loader=DataLoader(rows(6), 6), max_batch_size=3, optimizer=optimizer)
    expected = truth(wrapped._module, *rows(6).tensors)
    batches = iter(chunks)
    backward_and_step(wrapped, optimizer, *next(batches))
    skipped = [backward_and_step(wrapped, optimizer, *one) for one in chunks]
    assert skipped == [True, False]
    assert_same(gradients(wrapped._module, 6), expected)


def test_a_wrapped_loader_can_be_wrapped_again():
    wrapped, optimizer = by_hand(expected_batch_size=6)
    once = wrap_data_loader(data_loader=DataLoader(rows(), 6), max_batch_size=3, optimizer=optimizer)
    twice = wrap_data_loader(data_loader=once, max_batch_size=2, optimizer=optimizer)
    skipped = [backward_and_step(wrapped, optimizer, *one) for one in twice]
    assert skipped == [True, True, False] * 2
    for inputs, targets in wrap_data_loader(data_loader=twice, max_batch_size=6, optimizer=optimizer):
        assert len(inputs) == len(targets) == 2
        backward_and_step(wrapped, optimizer, inputs, targets)
        break
    assert_a_plain_batch_is_independent(wrapped, optimizer)


@pytest.mark.parametrize("left_out", [0, 2])
def test_a_chunk_without_a_step_is_not_confused_with_another_one(left_out):
    wrapped, optimizer = by_hand(expected_batch_size=6)
    chunks = wrap_data_loader(data_loader=DataLoader(rows(), 6), max_batch_size=2, optimizer=optimizer)
    with pytest.raises(BatchStateError, match=r"parts of several batches.*multiply its loss by 0"):
        for number, one in enumerate(chunks):
            if number != left_out:
                backward_and_step(wrapped, optimizer, *one)
    assert number == 3  # the first part of the next batch
    assert_a_plain_batch_is_independent(wrapped, optimizer)


def test_alternating_between_chunks_of_two_passes_is_rejected():
    wrapped, optimizer = by_hand(expected_batch_size=6)
    pair = [wrap_data_loader(data_loader=DataLoader(rows(), 6), max_batch_size=2, optimizer=optimizer) for _ in "ab"]
    with pytest.raises(BatchStateError, match="parts of several batches"):
        for first, _ in zip(*pair, strict=True):
            backward_and_step(wrapped, optimizer, *first)


@pytest.mark.parametrize("left_out", [None, 5])
def test_chunks_that_are_fetched_at_once_are_separate_steps_and_the_next_batch_is_independent(left_out):
    wrapped, optimizer = by_hand(expected_batch_size=6)
    chunks = wrap_data_loader(data_loader=DataLoader(rows(), 6), max_batch_size=2, optimizer=optimizer)
    if left_out is None:
        assert not any(backward_and_step(wrapped, optimizer, *one) for one in list(chunks))
    else:
        for number, one in enumerate(chunks):
            if number != left_out:
                backward_and_step(wrapped, optimizer, *one)
    assert_a_plain_batch_is_independent(wrapped, optimizer)


def test_a_manual_poisson_loader_is_split_for_a_manual_optimizer():
    wrapped, optimizer = by_hand(expected_batch_size=6)
    released, sizes = [], []
    optimizer.attach_step_hook(lambda one: released.append(len(sizes)))
    loader = DPDataLoader(rows(40), sample_rate=0.25, generator=torch.Generator().manual_seed(0))
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as chunks:
        for inputs, targets in chunks:
            step(wrapped, optimizer, inputs, targets)
            sizes.append(len(inputs))
    assert max(sizes) <= 3
    assert len(released) == len(loader) == 4
    assert len(sizes) > 4


def signals_to(optimizer, loader):
    """Returns the skip signals for the chunks of a loader, and the chunks."""
    signals = []
    optimizer.signal_skip_step = lambda do_skip: signals.append(do_skip)
    return signals, wrap_data_loader(data_loader=loader, max_batch_size=3, optimizer=optimizer)


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy])
def test_a_loader_and_its_copies_report_to_the_optimizer_that_was_named_last(make_copy):
    (_, first), (_, second) = by_hand(), by_hand()
    loader = DPDataLoader(rows(40), sample_rate=0.25, generator=torch.Generator().manual_seed(0))
    other = make_copy(loader)
    before, chunks = signals_to(first, loader)
    assert len(list(chunks)) == len(before) > before.count(False) == len(loader)
    passed = len(before)
    after, others_chunks = signals_to(second, other)
    assert len(list(others_chunks)) == len(after) > after.count(False) == len(loader)
    assert len(list(loader)) == len(loader)
    assert after[-len(loader) :] == [False] * len(loader)
    assert len(before) == passed


def test_a_loader_does_not_keep_an_optimizer_alive():
    loader, (_, optimizer) = DPDataLoader(rows(40), sample_rate=0.25), by_hand()
    wrap_data_loader(data_loader=loader, max_batch_size=3, optimizer=optimizer)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    assert len(list(loader)) == len(loader)


def test_a_loader_of_dpengine_is_not_split_for_an_optimizer_built_by_hand():
    *_, loader = dpengine.PrivacyEngine().make_private(**arguments())
    _, optimizer = by_hand()
    with pytest.raises(TypeError, match=r"dpengine\.PrivacyEngine"):
        wrap_data_loader(data_loader=loader, max_batch_size=3, optimizer=optimizer)


def test_chunks_are_nearly_equal_and_the_last_one_is_marked():
    _, optimizer = by_hand()
    signals = []
    optimizer.signal_skip_step = lambda do_skip=True: signals.append(do_skip)
    sampler = BatchSampler(SequentialSampler(range(11)), 7, drop_last=False)
    parts = BatchSplittingSampler(sampler=sampler, max_batch_size=3, optimizer=optimizer)
    assert list(parts) == [[0, 1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    assert signals == [True, True, False, True, False]
    assert len(parts) == 5
    with pytest.raises(ValueError, match="max_physical_batch_size"):
        BatchMemoryManager(data_loader=None, max_physical_batch_size=0, optimizer=optimizer)


def test_settings_of_the_loader_are_carried_over():
    _, optimizer = by_hand()
    plain = DataLoader(rows(), 6, collate_fn=list, timeout=0, pin_memory=False)
    chunks = wrap_data_loader(data_loader=plain, max_batch_size=4, optimizer=optimizer)
    assert chunks.collate_fn is list
    assert chunks.dataset is plain.dataset
    assert isinstance(chunks, DataLoader)
    assert chunks.prefetch_factor is None
    unbatched = wrap_data_loader(data_loader=DataLoader(rows(), batch_size=None), max_batch_size=4, optimizer=optimizer)
    assert len(list(unbatched)) == 12


def test_the_loader_continues_after_its_chunks():
    parts = private(noise_multiplier=1.0)
    with BatchMemoryManager(data_loader=parts.loader, max_physical_batch_size=3, optimizer=parts.optimizer) as chunks:
        train(parts._replace(loader=chunks))
    assert [len(inputs) for inputs, _ in parts.loader] == [4, 4, 4]
