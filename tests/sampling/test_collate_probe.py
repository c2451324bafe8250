"""Collate functions that keep examples independent, mix examples, or cannot be classified."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from sampling.collate_functions import ORDINARY, TIME_FIRST, VALUES, VECTORS, Collator, flipped, noisy, stacked
from sampling.mixing_collate_functions import (
    MIXED,
    OTHER_NUMBERS,
    UNDECIDED,
    mixup,
    needs_four,
    sorted_and_noisy,
    standardized,
)
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data.dataloader import default_collate, default_convert

from dpengine import PrivacyEngine
from dpengine.errors import BatchDependentLossError, BatchMismatchError, PrivacyWarning
from dpengine.sampling import ExternalBatches
from dpengine.sampling.collate_probe import check_collate


def check(data, collate, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        check_collate(DataLoader(copy.deepcopy(data), batch_size=4, collate_fn=collate), **options)


@pytest.mark.one_in(3, "name", others="slow")
@pytest.mark.parametrize("name", ORDINARY)
def test_collate_functions_without_mixing_are_accepted(name):
    check(*ORDINARY[name])


@pytest.mark.parametrize("name", TIME_FIRST)
def test_collate_functions_with_the_batch_on_axis_1_are_accepted(name):
    check(*TIME_FIRST[name], batch_first=False)


@pytest.mark.parametrize("rows", range(1, 8))
@pytest.mark.parametrize("name", ["stack", "padded", "sorted", "flipped", "masked one by one"])
def test_small_data_sets_pass(name, rows):
    data, collate = ORDINARY[name]
    check(data[:rows], collate)


@pytest.mark.parametrize("name", MIXED)
def test_mixing_collate_functions_are_rejected(name):
    data, collate, path = MIXED[name]
    with pytest.raises(BatchDependentLossError, match="depending on other examples of the batch") as raised:
        check(data, collate)
    assert f" in {path} was" in str(raised.value)
    assert raised.value.fix


@pytest.mark.parametrize("name", OTHER_NUMBERS)
def test_collate_functions_that_change_the_batch_size_are_rejected(name):
    collate, message = OTHER_NUMBERS[name]
    with pytest.raises(BatchMismatchError, match=message):
        check(VECTORS, collate)


@pytest.mark.parametrize("name", UNDECIDED)
def test_undecided_collate_function_warns_once(name):
    data, collate, message = UNDECIDED[name]
    loader = DataLoader(data, batch_size=4, collate_fn=collate)
    with pytest.warns(PrivacyWarning, match=message) as shown:
        check_collate(loader)
        check_collate(loader)
    assert len(shown) == 1
    assert "[DPE012] It could not be checked whether collate_fn=" in str(shown[0].message)
    assert "Return one row for each example" in str(shown[0].message)


class Observed(Dataset):
    """Counts its reads, and uses the global random generators."""

    def __init__(self, rows=1000):
        self.rows, self.reads = rows, []

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        self.reads.append(index)
        random.random(), np.random.rand(), torch.rand(1)
        return VALUES[index % 30], index % 4


class ByLists(Observed):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def states():
    return [torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in np.random.get_state()]]


@pytest.mark.parametrize("collate", [stacked, flipped, noisy, standardized, mixup, needs_four])
def test_collate_check_restores_global_random_states(collate):
    before = states()
    loader = DataLoader(Observed(), batch_size=4, collate_fn=collate)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_collate(loader)
    except BatchDependentLossError:
        pass
    assert states() == before


@pytest.mark.parametrize("generator", [torch.Generator(), np.random.default_rng(0)])
def test_collate_check_restores_generators_of_the_function(generator):
    collator = Collator(generator)
    draw = (lambda: torch.rand(1, generator=generator)) if isinstance(generator, torch.Generator) else generator.random
    kept = copy.deepcopy(generator) if not isinstance(generator, torch.Generator) else generator.clone_state()
    check(VECTORS, collator if isinstance(generator, torch.Generator) else collator.of_numpy)
    expected = torch.rand(1, generator=kept) if isinstance(generator, torch.Generator) else kept.random()
    assert draw() == expected


def make_private(dataset, collate, **options):
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset, batch_size=50, collate_fn=collate)
    PrivacyEngine().make_private(model, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0, **options)
    return model


@pytest.mark.parametrize("kind", [Observed, ByLists])
@pytest.mark.parametrize("collate", [stacked, flipped, sorted_and_noisy, lambda batch: stacked(batch)])
def test_at_most_eight_examples_are_read(kind, collate):
    dataset = kind()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_private(dataset, collate)
    assert 2 <= len(dataset.reads) <= 8
    assert {0, 999} <= set(dataset.reads)


def test_make_private_rejects_a_function_that_mixes_examples():
    with pytest.raises(BatchDependentLossError, match="collate_fn=standardized changes an example"):
        make_private(Observed(), standardized)


@pytest.mark.parametrize("collate", [default_collate, default_convert])
def test_torch_collate_functions_are_accepted_without_reading_examples(collate):
    dataset = Observed()
    check_collate(DataLoader(dataset, batch_size=4, collate_fn=collate))
    assert not dataset.reads


def test_a_function_that_a_user_registered_with_torch_is_called(monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, Own, lambda batch, **_: standardized([one.example for one in batch]))
    with pytest.raises(BatchDependentLossError, match="default_collate changes"):
        check([Own(example) for example in VECTORS], default_collate)


class Own:
    def __init__(self, example):
        self.example = example


def test_batches_of_the_loop_are_not_checked():
    dataset = Observed()
    model = make_private(dataset, standardized, sampling=ExternalBatches(expected_batch_size=50), target_delta=1e-6)
    assert not dataset.reads
    assert model.weight.shape == (4, 3)


def test_messages_do_not_hold_values_of_examples():
    secret = [(torch.full((3,), 4321.5 + i), i % 4) for i in range(12)]
    with pytest.raises(BatchDependentLossError) as raised:
        check(secret, standardized)
    assert "43" not in str(raised.value)
