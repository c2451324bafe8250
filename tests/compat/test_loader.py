"""Loaders under Opacus's names: sampling, settings that are carried over, and empty batches."""

import collections

import pytest
import torch
from opacus_runs import loss, model, private, rows, steps_in_history, train
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dpengine.accounting import EpochParticipation
from dpengine.compat.opacus import PrivacyEngine
from dpengine.compat.opacus.data_loader import (
    CollateFnWithEmpty,
    DPDataLoader,
    dtype_safe,
    shape_safe,
    switch_generator,
    wrap_collate_with_empty,
)
from dpengine.compat.opacus.engine_batches import InOrder
from dpengine.errors import SamplingError


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def numbered(count):
    return TensorDataset(torch.arange(count))


def drawn(loader):
    return [batch[0].tolist() for batch in loader]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_attributes_are_those_of_opacus():
    loader = DPDataLoader(rows(40), sample_rate=0.1, generator=seeded())
    assert isinstance(loader, DataLoader)
    assert loader.sample_rate == 0.1
    assert loader.batch_size is None
    assert (loader.distributed, loader.rand_on_empty) == (False, False)
    assert len(loader) == 10
    sampler = loader.batch_sampler
    assert (sampler.num_samples, sampler.sample_rate, sampler.steps) == (40, 0.1, 10)


@pytest.mark.parametrize("count", [1, 7, 93, 99, 105, 141])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_pass_has_as_many_batches_as_the_original_loader(count, size):
    plain = DataLoader(numbered(count), size)
    loader = DPDataLoader.from_data_loader(plain)
    assert len(loader) == len(plain)
    assert loader.sample_rate == pytest.approx(1 / len(plain))
    assert len(list(loader)) == len(plain)


def batches_of_a_run(*, manual, **asked):
    plain = DataLoader(rows(60), 6, shuffle=True, generator=seeded(1))
    module = model()
    *_, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DPDataLoader.from_data_loader(plain) if manual else plain,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **asked,
    )
    return [inputs.tolist() for inputs, _ in loader]


@pytest.mark.parametrize("manual", [False, True])
def test_the_generator_of_a_loader_does_not_draw_poisson_batches(manual):
    with pytest.warns(UserWarning, match="must be secret"):
        one, other = (batches_of_a_run(manual=manual) for _ in range(2))
    assert one != other


def test_the_generator_of_a_loader_draws_batches_where_noise_repeats_too():
    one, other = (batches_of_a_run(manual=False, noise_generator=seeded(2)) for _ in range(2))
    assert one == other


def test_settings_of_the_loader_are_carried_over():
    def collate(examples):
        return torch.stack([one[0] for one in examples]) if examples else torch.zeros(0)

    plain = DataLoader(numbered(12), 4, collate_fn=collate, num_workers=2, pin_memory=False, timeout=30)
    loader = DPDataLoader.from_data_loader(plain, generator=seeded())
    assert (loader.num_workers, loader.timeout, loader.dataset) == (2, 30, plain.dataset)
    assert all(isinstance(batch, torch.Tensor) for batch in loader)
    again = DPDataLoader.from_data_loader(loader)
    assert (len(again), again.sample_rate, again.num_workers) == (len(loader), loader.sample_rate, 2)


def test_a_data_set_without_an_index_raises_a_value_error():
    with pytest.raises(ValueError, match="IterableDataset"):
        DPDataLoader(Stream(), sample_rate=0.1)
    with pytest.raises(ValueError, match="IterableDataset"):
        DPDataLoader.from_data_loader(DataLoader(Stream(), 2))


def test_a_sampler_with_its_own_distribution_is_rejected():
    class RepeatingSampler(torch.utils.data.Sampler):
        def __iter__(self):
            return iter([0, 0, 1, 1])

        def __len__(self):
            return 4

    for poisson in (True, False):
        with pytest.raises(SamplingError, match="RepeatingSampler"):
            private_over(DataLoader(rows(), 2, sampler=RepeatingSampler()), poisson)


def private_over(plain, poisson):
    from dpengine.compat.opacus.preparation import Preparation

    engine = Preparation()
    engine.dataset = None
    return engine._prepare_data_loader(plain, poisson_sampling=poisson, distributed=False)


@pytest.mark.parametrize("drop_last", [False, True])
def test_without_poisson_sampling_batches_are_those_of_the_loader(drop_last):
    plain = DataLoader(numbered(10), 4, drop_last=drop_last)
    for loader in (private_over(plain, False), private_over(private_over(plain, False), False)):
        assert drawn(loader) == drawn(plain)
        assert len(loader) == len(plain)
    shuffled = private_over(DataLoader(numbered(40), 4, shuffle=True), False)
    passes = [[row for batch in drawn(shuffled) for row in batch] for _ in range(2)]
    assert all(sorted(one) == list(range(40)) for one in passes)
    assert passes[0] != passes[1]


def test_a_private_loader_can_use_the_other_sampling_scheme():
    plain = DataLoader(numbered(40), 4, drop_last=True)
    poisson = private_over(private_over(plain, False), True)
    assert poisson.sample_rate == 0.1
    assert len({len(batch) for batch in drawn(poisson) + drawn(poisson)}) > 1
    with pytest.raises(SamplingError):
        private_over(poisson, False)


Point = collections.namedtuple("Point", "x y")


def test_an_empty_batch_has_the_structure_of_the_first():
    collate = CollateFnWithEmpty(lambda examples: {"a": torch.ones(len(examples), 3), "b": Point(torch.ones(2, 4), [])})
    assert collate([]) == []
    full = collate([0, 1])
    assert full["a"].shape == (2, 3)
    empty = collate([])
    assert empty["a"].shape == (0, 3)
    assert type(empty["b"]) is Point
    assert empty["b"].x.shape == (0, 4)
    assert empty["b"].y == []


def test_an_empty_batch_may_be_on_axis_1_or_hold_one_random_sample():
    second = wrap_collate_with_empty(collate_fn=lambda e: torch.ones(5, len(e), dtype=torch.long), batch_first=False)
    second([1])
    assert second([]).shape == (5, 0)
    chance = wrap_collate_with_empty(collate_fn=lambda e: torch.full((len(e), 50), 7.5), rand_on_empty=True)
    chance([1, 2])
    assert chance([]).shape == (1, 50)
    assert set(chance([]).flatten().tolist()) == {0.0, 1.0}
    shaped = wrap_collate_with_empty(
        collate_fn=None, sample_empty_shapes=[(0, 3), (0,)], dtypes=[torch.float, torch.long]
    )
    assert [(tuple(one.shape), one.dtype) for one in shaped([])] == [((0, 3), torch.float), ((0,), torch.long)]


def test_leaves_that_are_not_tensors_have_no_empty_form():
    collate = CollateFnWithEmpty(list)
    collate(["a text"])
    with pytest.raises(TypeError, match="str"):
        collate([])


def test_shapes_and_types_of_anything_are_reported():
    assert (shape_safe(torch.ones(2)), shape_safe(3)) == (torch.Size([2]), ())
    assert (dtype_safe(torch.ones(2)), dtype_safe(3)) == (torch.float32, int)


def test_another_generator_makes_a_copy_that_draws_from_it():
    plain = DataLoader(numbered(40), 4, shuffle=True)
    one, other = (switch_generator(data_loader=plain, generator=seeded(3)) for _ in range(2))
    assert one is not plain
    assert plain.generator is None
    assert drawn(one) == drawn(other)
    with pytest.raises(ValueError, match="SequentialSampler"):
        switch_generator(data_loader=DataLoader(numbered(4), 2), generator=seeded())


@pytest.mark.one_in(2, "padded", others="slow")
@pytest.mark.parametrize("padded", [False, True])
def test_empty_batches_are_steps_and_a_padding_sample_contributes_nothing(padded):
    parts = private(poisson_sampling=True, count=6, batch_size=1, rand_on_empty=padded, noise_multiplier=1e-9)
    empties = 0
    for _ in range(20):
        for inputs, targets in parts.loader:
            parts.optimizer.zero_grad()
            known = len(inputs) and any(torch.equal(inputs[0], row) for row in rows(6).tensors[0])
            loss(parts.model, inputs, targets).backward()
            parts.optimizer.step()
            if not known:
                empties += 1
                assert len(inputs) == int(padded)
                assert all(p.grad.abs().max() < 1e-7 for p in parts.model.parameters())
            else:
                assert any(p.grad.abs().max() > 1e-4 for p in parts.model.parameters())
    assert empties
    assert steps_in_history(parts) == 120


def test_samples_that_the_loader_did_not_draw_are_rejected():
    parts = private(noise_multiplier=1.0)
    train(parts)
    parts.optimizer.zero_grad()
    loss(parts.model, *rows().tensors).backward()
    with pytest.raises(Exception, match=r"private loader|returned no batch"):
        parts.optimizer.step()


def test_a_custom_loader_may_iterate_over_the_drawn_indices():
    loader = DPDataLoader(numbered(40), sample_rate=0.25)
    again = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
    assert len(drawn(again)) == 4


@pytest.mark.parametrize(
    "rows, size, drop_last", [(10, 4, False), (10, 4, True), (8, 4, False), (3, 4, False), (3, 4, True)]
)
def test_batches_are_those_of_an_unshuffled_loader_in_every_pass(rows, size, drop_last):
    strategy = InOrder(rows, size, drop_last)
    plain = [batch.tolist() for batch in DataLoader(range(rows), size, drop_last=drop_last)]
    assert strategy.steps_per_epoch == len(plain)
    drawn = [strategy.draw(step, None).tolist() for step in range(2 * len(plain))]
    assert drawn == 2 * plain
    assert strategy.expected_batch_size == min(size, rows)
    assert strategy.sample_rate == min(1, size / rows)
    assert strategy.participation == EpochParticipation(len(plain), claimed=True)


@pytest.mark.parametrize("wrong", [(0, 4), (4, 0), (4, -1)])
def test_counts_below_1_are_rejected(wrong):
    with pytest.raises(ValueError, match="InOrder"):
        InOrder(*wrong)
