"""Tensors in memory are read a batch at a time, and nobody sees a difference but in time."""

import pytest
import torch
from sampling.doubles import Fixed, private
from torch.utils.data import DataLoader, Subset, TensorDataset

from dpengine.sampling.whole_tensors import whole_tensors


class ByRow(TensorDataset):
    """Says what it was asked for."""

    asked = 0

    def __getitem__(self, index):
        ByRow.asked += 1
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
def test_batches_are_those_of_reading_row_by_row(form):
    got, expected = read(FORMS[form](TensorDataset)), read(FORMS[form](ByRow))
    assert [len(batch[0]) for batch in got] == [3, 0, 1, 3]
    for one, other in zip(got, expected, strict=True):
        assert type(one) is type(other)
        for left, right in zip(one, other, strict=True):
            assert (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
            assert torch.equal(left, right)


def test_rows_are_not_read_one_by_one(monkeypatch):
    calls = []
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, row: calls.append(row) or (torch.zeros(1),) * 3)
    dataset = TensorDataset(*tensors())
    assert torch.equal(read(dataset)[0][1], torch.tensor([3, 1, 4]))
    assert calls == [0]  # the structure of an empty batch


def test_what_the_user_writes_to_the_tensors_is_read():
    dataset = TensorDataset(*tensors())
    rest = iter(batches(DataLoader(dataset, batch_size=4)))
    next(rest)
    dataset.tensors[1][19] = 77
    assert [batch[1].tolist() for batch in rest][1] == [77]


def test_a_class_with_an_iteration_of_its_own_gets_empty_batches_in_the_same_form():
    expected = read(ByRow(*tensors()), Doubling)
    for one, other in zip(read(TensorDataset(*tensors()), Doubling), expected, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def test_a_class_of_the_users_own_is_asked_for_each_row():
    ByRow.asked = 0
    read(ByRow(*tensors()))
    assert ByRow.asked >= 7


def test_workers_have_the_users_data_set():
    def init(worker):
        assert type(torch.utils.data.get_worker_info().dataset) is TensorDataset

    assert len(read(TensorDataset(*tensors()), num_workers=1, worker_init_fn=init)) == 4


def test_another_collate_fn_of_a_private_loader_is_asked():
    private_one = batches(DataLoader(TensorDataset(*tensors()), batch_size=4))
    private_one.collate_fn = len
    assert list(private_one)[2:] == [1, 3]


class Labelled(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("dataset", "collate_fn"),
    [
        (TensorDataset(*tensors()), list),
        (ByRow(*tensors()), None),
        (Subset(ByRow(*tensors()), [1]), None),
        (TensorDataset(torch.eye(4).to_sparse()), None),
        (TensorDataset(torch.eye(4).as_subclass(Labelled)), None),
        ([1, 2, 3], None),
    ],
    ids=["collate_fn", "subclass", "subset", "sparse", "tensor subclass", "list"],
)
def test_what_might_be_read_otherwise_is_left_to_torch(dataset, collate_fn):
    default = DataLoader([0]).collate_fn
    assert whole_tensors(TensorDataset(*tensors()), default) is not None
    assert whole_tensors(dataset, collate_fn or default) is None
