"""Batched reading of in-memory tensors: the batches equal those of per-example reading."""

import functools
import sys
import warnings

import pytest
import torch
from sampling.doubles import Fixed, private
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from dpengine.sampling.batched_tensors import batched_tensors


class ByRow(TensorDataset):
    """Counts how many examples are read."""

    reads = 0

    def __getitem__(self, index):
        ByRow.reads += 1
        return super().__getitem__(index)


class Doubling(DataLoader):
    def __iter__(self):
        for first, *others in super().__iter__():
            yield [2 * first, *others]


def tensors():
    torch.manual_seed(0)
    return torch.randn(20, 3, 2, dtype=torch.float64).transpose(1, 2), torch.arange(20), torch.rand(20) > 0.5


BATCHES = [[3, 1, 4], [], [19], [0, 0, 5]]


def batches(loader):
    return private(Fixed(*BATCHES, rows=len(loader.dataset)), loader=loader)


def read(dataset, kind=DataLoader, **settings):
    return [[*batch] for batch in batches(kind(dataset, batch_size=4, **settings))]


FORMS = {
    "tensors": lambda kind: kind(*tensors()),
    "one tensor": lambda kind: kind(tensors()[0]),
    "subset that counts from the end": lambda kind: Subset(kind(*tensors()), torch.arange(-20, 0)),
    "subset of a subset": lambda kind: Subset(Subset(kind(*tensors()), range(19, -1, -1)), list(range(20))[::-1]),
}


@pytest.mark.parametrize("form", FORMS)
def test_batched_reading_equals_reading_each_example(form):
    got, expected = read(FORMS[form](TensorDataset)), read(FORMS[form](ByRow))
    assert [len(batch[0]) for batch in got] == [3, 0, 1, 3]
    for one, other in zip(got, expected, strict=True):
        assert type(one) is type(other)
        for left, right in zip(one, other, strict=True):
            assert (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
            assert torch.equal(left, right)


def test_tensor_dataset_is_read_in_batches(monkeypatch):
    stacked = []
    some, single = batches(DataLoader(TensorDataset(*tensors()))), batches(DataLoader(ByRow(*tensors())))
    stack = torch.stack
    monkeypatch.setattr(
        torch, "stack", lambda rows, *rest, **named: stacked.append(rows) or stack(rows, *rest, **named)
    )
    assert torch.equal(next(iter(some))[1], torch.tensor([3, 1, 4]))
    assert not stacked
    next(iter(single))
    assert len(stacked) == 3


def by_other_rows(self, rows):
    return [self[0] for _ in rows]


def of_class(monkeypatch, dataset):
    monkeypatch.setattr(type(dataset), "__getitems__", by_other_rows, raising=False)


def rows_of_class(monkeypatch, dataset):
    theirs = TensorDataset.__getitem__

    @functools.wraps(theirs)
    def first(self, row):
        return theirs(self, 0)

    monkeypatch.setattr(TensorDataset, "__getitem__", first)


def of_object(monkeypatch, dataset):
    dataset.__getitems__ = functools.partial(by_other_rows, dataset)


def of_another_object(monkeypatch, dataset):
    other = Subset(TensorDataset(*(tensor[:1].expand_as(tensor) for tensor in tensors())), range(20))
    dataset.__getitems__ = other.__getitems__


def of_tensors(monkeypatch, dataset):
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda rows, **_: torch.stack(rows) + 1)


def of_tuples(monkeypatch, dataset):
    def turned(rows, **rest):
        return default_collate([list(row[::-1]) for row in rows])

    monkeypatch.setitem(default_collate_fn_map, tuple, turned)


CHANGES = (of_class, rows_of_class, of_object, of_another_object, of_tensors, of_tuples)


@pytest.mark.one_in(3, "workers", "wrap", "change", others="slow")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("wrap", [lambda kept: kept, lambda kept: Subset(kept, range(20))], ids=["tensors", "subset"])
@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_monkeypatched_torch_functions_are_called(change, wrap, workers, monkeypatch):
    rows = [torch.arange(1.0, 21.0).unsqueeze(1), torch.arange(20)]
    monkeypatch.setattr(sys.modules[__name__], "tensors", lambda: rows)
    kept = TensorDataset(*rows)
    dataset = wrap(kept)
    change(monkeypatch, dataset)
    loader = DataLoader(dataset, batch_size=3, num_workers=workers, multiprocessing_context="fork" if workers else None)
    expected = next(iter(DataLoader(dataset, batch_sampler=[BATCHES[0]])))
    got = next(iter(batches(loader)))
    assert [one.tolist() for one in got] == [one.tolist() for one in expected]
    assert got[0].tolist() != [[4.0], [2.0], [5.0]]


def test_default_device_does_not_affect_the_batches():
    whole = batched_tensors(TensorDataset(torch.arange(20)), default_collate)
    with torch.device("meta"):
        assert whole.__getitems__([3, 1, 4])[0].tolist() == [3, 1, 4]


def test_shared_memory_and_autograd_history_match_torch():
    shared = torch.arange(20.0).share_memory_()
    assert not read(TensorDataset(shared))[0][0].is_shared()
    weight = torch.arange(20.0).requires_grad_()
    read(TensorDataset(weight))[0][0].sum().backward()
    assert weight.grad.nonzero().flatten().tolist() == [1, 3, 4]


def test_in_place_changes_of_the_tensors_are_read():
    dataset = TensorDataset(*tensors())
    rest = iter(batches(DataLoader(dataset, batch_size=4)))
    next(rest)
    dataset.tensors[1][19] = 77
    assert [batch[1].tolist() for batch in rest][1] == [77]


def test_batched_reading_does_not_change_the_batches_of_an_overridden_iter():
    expected = read(ByRow(*tensors()), Doubling)
    for one, other in zip(read(TensorDataset(*tensors()), Doubling), expected, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def test_dataset_subclass_is_read_one_example_at_a_time():
    ByRow.reads = 0
    read(ByRow(*tensors()))
    assert ByRow.reads >= 7


def test_worker_init_fn_sees_the_original_dataset():
    def init(worker):
        assert type(torch.utils.data.get_worker_info().dataset) is TensorDataset

    assert len(read(TensorDataset(*tensors()), num_workers=1, worker_init_fn=init)) == 4


def test_replaced_collate_fn_of_a_private_loader_is_called():
    private_one = batches(DataLoader(TensorDataset(*tensors()), batch_size=4))
    private_one.collate_fn = len
    assert list(private_one)[2:] == [1, 3]


class Labelled(torch.Tensor):
    pass


class Backwards(list):
    def __getitem__(self, index):
        return super().__getitem__(-1 - index)


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype in torch
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def uneven():
    dataset = TensorDataset(torch.zeros(3), torch.zeros(3))
    dataset.tensors = (torch.zeros(3), torch.zeros(4))
    return dataset


@pytest.mark.parametrize(
    ("dataset", "collate_fn"),
    [
        (TensorDataset(*tensors()), list),
        (ByRow(*tensors()), None),
        (Subset(ByRow(*tensors()), [1]), None),
        (TensorDataset(torch.eye(4).to_sparse()), None),
        (TensorDataset(torch.eye(4).as_subclass(Labelled)), None),
        ([1, 2, 3], None),
        (TensorDataset(nested()), None),
        (TensorDataset(torch.zeros(4, 2, requires_grad=True)), None),
        (Subset(uneven(), [-1]), None),
        (Subset(TensorDataset(*tensors()), Backwards([1, 2])), None),
    ],
    ids="collate_fn subclass subset sparse tensor-subclass list nested grad uneven indices".split(),
)
def test_data_without_exact_batched_indexing_is_read_by_torch(dataset, collate_fn):
    default = DataLoader([0]).collate_fn
    assert batched_tensors(TensorDataset(*tensors()), default) is not None
    assert batched_tensors(dataset, collate_fn or default) is None
