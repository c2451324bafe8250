"""Argument checks of loaders and datasets: accepted ones, and the errors for others."""

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import dpengine
from dpengine import PrivacyEngine
from dpengine.errors import SamplingError
from dpengine.sampling.check import check_loader, check_repeats, example_numbers
from dpengine.sampling.loader import private_loader
from dpengine.sampling.poisson import PoissonDraws

DATA = TensorDataset(torch.zeros(10, 2))


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class Reversed(Sampler):
    def __iter__(self):
        return iter(range(9, -1, -1))

    def __len__(self):
        return 10


class ShuffledTwice(RandomSampler):
    pass


class OddBatches(BatchSampler):
    pass


class Endless(Dataset):
    def __getitem__(self, index):
        return torch.zeros(2)


class Subclass(DataLoader):
    pass


ACCEPTED = {
    "sequential": lambda: DataLoader(DATA, batch_size=4),
    "shuffled": lambda: DataLoader(DATA, batch_size=4, shuffle=True, drop_last=True),
    "subclass": lambda: Subclass(DATA, batch_size=4),
    "sampler": lambda: DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA)),
    "batch-sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, True)),
}


def sampled_by(sampler):
    return lambda: DataLoader(DATA, batch_size=4, sampler=sampler)


WEIGHTED = WeightedRandomSampler([1.0] * 10, 10)
REJECTED = {  # the name and the reason in the message
    "list": (lambda: [1, 2], "list", "not a torch DataLoader"),
    "iterable": (lambda: DataLoader(Stream(), batch_size=4), "Stream", r"DataLoader\(list\(dataset\)"),
    "weighted": (
        sampled_by(WEIGHTED),
        "WeightedRandomSampler",
        "unequal probabilities; accounting needs equal sampling rates. Weight the loss",
    ),
    "subset": (sampled_by(SubsetRandomSampler([1, 2])), "SubsetRandomSampler", r"Subset\(dataset, indices\)"),
    "distributed": (
        sampled_by(DistributedSampler(DATA, num_replicas=3, rank=0)),
        "DistributedSampler",
        "repeats examples",
    ),
    "own-sampler": (sampled_by(Reversed()), "Reversed", "may sample unequally"),
    "sampler-subclass": (sampled_by(ShuffledTwice(DATA)), "ShuffledTwice", "may sample unequally"),
    "own-batch-sampler": (
        lambda: DataLoader(DATA, batch_sampler=OddBatches(SequentialSampler(DATA), 4, False)),
        "OddBatches",
        "may sample unequally",
    ),
    "list-of-batches": (lambda: DataLoader(DATA, batch_sampler=[[0, 1], [2]]), "list", "may sample unequally"),
    "sampler-in-batch-sampler": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(WEIGHTED, 4, False)),
        "WeightedRandomSampler",
        "unequal probabilities",
    ),
    "with-replacement": (sampled_by(RandomSampler(DATA, replacement=True)), "RandomSampler", "replacement=True"),
    "fewer-rows": (sampled_by(RandomSampler(DATA, num_samples=5)), "RandomSampler", "5 examples from a data set of 10"),
    "other-rows": (sampled_by(SequentialSampler(range(3))), "SequentialSampler", "3 examples from a data set of 10"),
    "other-source": (sampled_by(RandomSampler(range(3), num_samples=10)), "RandomSampler", "the sampling rate is not"),
    "no-length": (
        lambda: DataLoader(Endless(), batch_size=4, sampler=SequentialSampler(range(3))),
        "Endless",
        "no length",
    ),
    "no-batches": (lambda: DataLoader(DATA, batch_size=None), "DataLoader", "batch_size=None"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_loaders_with_uniform_sampling_are_accepted(name):
    check_loader(ACCEPTED[name]())


@pytest.mark.parametrize("name", REJECTED)
@pytest.mark.hazard("S8", "D1", "B15")
def test_error_for_an_unsupported_loader_names_the_unsupported_component(name):
    make, class_name, message = REJECTED[name]
    with pytest.raises(SamplingError, match=message) as raised:
        check_loader(make())
    assert raised.value.code == "DPE004"
    assert class_name in str(raised.value)
    assert raised.value.fix


def test_private_loader_is_rejected(seeded_words):
    private = private_loader(
        DataLoader(DATA, batch_size=4),
        sampling=PoissonDraws(10, 0.4, 3, 4.0),
        words=seeded_words(),
        on_return=lambda ticket, chunk, data: None,
        may_draw=lambda step: True,
    )
    with pytest.raises(SamplingError, match=r"PrivateDataLoader is private already.*plain loader"):
        check_loader(private)


class Keyed(dict):
    """Dataset whose examples have string keys."""


class Unhashable(list):
    """List, which is not hashable."""


REPEATED = {  # the dataset, and the expected message
    "an index twice": (lambda: Subset(DATA, [0, 3, 3]), "Example 3 of TensorDataset is in the data set 2 times"),
    "an index from the end": (lambda: Subset(DATA, torch.tensor([9, -1])), "Example 9 of TensorDataset"),
    "oversampled": (lambda: Subset(DATA, [*range(10), 1, 1, 2]), "3 times, and 2 of 10 examples are repeated"),
    "twice the data": (lambda: ConcatDataset([DATA, DATA]), "2 times, and 10 of 10 examples"),
    "overlapping parts": (lambda: ConcatDataset([Subset(DATA, range(6)), Subset(DATA, range(5, 9))]), "Example 5 of"),
    "part of twice the data": (lambda: Subset(ConcatDataset([DATA, DATA]), [2, 12]), "Example 2 of"),
    "end of twice the data": (lambda: Subset(ConcatDataset([DATA, DATA]), [9, -1]), "Example 9 of"),
    "part of a part": (lambda: Subset(Subset(DATA, [4, 4, 5]), [0, 1]), "Example 4 of"),
    "of a list": (lambda: Subset(Unhashable([1, 2]), [0, 0]), "Example 0 of Unhashable"),
    "without a length": (lambda: Subset(Endless(), [7, 7]), "Example 7 of Endless"),
}
ONCE = {
    "the parts of a split": lambda: ConcatDataset(random_split(DATA, [4, 6])),
    "other data": lambda: ConcatDataset([DATA, TensorDataset(torch.zeros(10, 2))]),
    "one of two copies": lambda: Subset(Subset(DATA, [4, 4, 5]), [1, 2]),
    "names": lambda: Subset(Keyed(a=1, b=2), ["a", "b"]),
    "no length": lambda: Subset(Endless(), [7, 8]),
    "nothing": lambda: Subset(DATA, []),
}


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_examples_are_rejected(name):
    make, message = REPEATED[name]
    with pytest.raises(SamplingError, match=message):
        check_repeats(make())


@pytest.mark.parametrize("name", [name for name in REPEATED if "list" not in name and "length" not in name])
def test_code_suggested_for_repeated_examples_runs(name):
    loader = DataLoader(REPEATED[name][0](), batch_size=2)
    model = nn.Linear(2, 2)
    objects = model, torch.optim.SGD(model.parameters(), lr=0.1), loader
    with pytest.raises(SamplingError) as raised:
        PrivacyEngine().make_private(*objects, noise_multiplier=1.0)
    fix = raised.value.fix.rpartition("pass to make_private: ")[2]
    assert fix.startswith("privacy_unit=")
    names = {"loader": loader, "dpengine": dpengine}
    arguments = eval(f"dict({fix})", names)
    PrivacyEngine().make_private(*objects, noise_multiplier=1.0, target_delta=1e-6, **arguments)
    assert len(set(arguments["privacy_unit"].tolist())) < len(loader.dataset)


def test_copies_of_an_example_share_one_unit_id():
    numbers = torch.arange(10.0)
    data, other = TensorDataset(numbers), TensorDataset(numbers + 10)
    dataset = Subset(ConcatDataset([data, other, Subset(data, [3, -1]), other]), [0, 9, 10, 20, 21, 22, 3, -1])
    assert example_numbers(dataset).tolist() == [int(value) for (value,) in dataset]


@pytest.mark.parametrize("name", ONCE)
def test_data_sets_without_repeated_examples_are_accepted(name):
    check_repeats(ONCE[name]())


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_make_private_rejects_repeated_examples_unless_they_are_one_unit(sampling):
    data = Subset(TensorDataset(torch.randn(10, 4), torch.zeros(10, dtype=torch.int64)), [*range(10), 3])
    model = nn.Linear(4, 2)
    objects = model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    with pytest.raises(SamplingError, match="Example 3 of TensorDataset is in the data set 2 times"):
        PrivacyEngine().make_private(*objects, sampling=sampling, **settings)
    assert "forward" not in vars(model)
    if sampling == "poisson":
        PrivacyEngine().make_private(*objects, privacy_unit=[*range(10), 3], **settings)
