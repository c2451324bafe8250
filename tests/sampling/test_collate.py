"""Empty batches: structure, types, and independence of the values of the examples."""

import collections
import dataclasses
import pickle
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from dpengine.errors import SamplingError
from dpengine.sampling.collate import EmptyAwareCollate, empty_template


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclasses.dataclass(frozen=True)
class Record:
    image: Any
    names: Any
    kind: str = "train"


class Encoding(collections.UserDict):
    """Batch like the BatchEncoding of transformers: a UserDict with attributes."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


IMAGE = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def empty(template) -> Any:
    """Returns the template with tensors and arrays replaced by (dtype, shape)."""
    if isinstance(template, (torch.Tensor, np.ndarray)):
        return str(template.dtype), *template.shape
    if isinstance(template, collections.abc.Mapping):
        return {key: empty(value) for key, value in template.items()}
    if isinstance(template, (list, tuple)):
        return [empty(item) for item in template]
    return template


F, I = "torch.float32", "torch.int64"
STRUCTURES = {  # collate function, example, expected template
    "tensor": (default_collate, IMAGE, (F, 0, 2, 3)),
    "half": (default_collate, IMAGE.half(), ("torch.float16", 0, 2, 3)),
    "tuple": (default_collate, (IMAGE, 3), [(F, 0, 2, 3), (I, 0)]),
    "dict": (default_collate, {"x": IMAGE, "y": 1}, {"x": (F, 0, 2, 3), "y": (I, 0)}),
    "nested": (default_collate, {"a": [IMAGE, {"b": 1.0}]}, {"a": [(F, 0, 2, 3), {"b": ("torch.float64", 0)}]}),
    "text": (default_collate, {"text": "hello", "y": 1}, {"text": [], "y": (I, 0)}),
    "words": (default_collate, ["ab", "cd"], [[], []]),
    "one-text": (default_collate, "hello", []),
    "array": (lambda rows: {"x": np.stack(rows)}, np.zeros((4, 2), np.int16), {"x": ("int16", 0, 4, 2)}),
    "one-row-axes": (default_collate, torch.zeros(1, 1), (F, 0, 1, 1)),
    "rows-in-a-list": (lambda rows: {"boxes": list(rows)}, IMAGE, {"boxes": []}),
    "transposed": (lambda rows: tuple(zip(*rows, strict=True)), (IMAGE, {"boxes": IMAGE}), [[], []]),
    "concatenated": (torch.cat, IMAGE, (F, 0, 3)),
    "time-major": (lambda rows: torch.stack(rows, dim=1), IMAGE, (F, 2, 0, 3)),
    "constant-beside": (lambda rows: (torch.stack(rows), torch.ones(5)), IMAGE, [(F, 0, 2, 3), (F, 5)]),
    "plain-beside": (
        lambda rows: {"x": torch.stack(rows), "task": "mnli", "use": True, "none": None},
        IMAGE,
        {"x": (F, 0, 2, 3), "task": "mnli", "use": True, "none": None},
    ),
    "longest": (lambda rows: (torch.stack(rows), torch.tensor(2)), IMAGE, [(F, 0, 2, 3), (I,)]),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_an_empty_batch_has_the_structure_of_a_real_one(name):
    collate, example, left = STRUCTURES[name]
    assert empty(EmptyAwareCollate(collate, empty_template(collate, example))([])) == left


@pytest.mark.parametrize("name", STRUCTURES)
def test_non_empty_batches_equal_the_output_of_collate_fn(name):
    collate, example, _ = STRUCTURES[name]
    wrapped = EmptyAwareCollate(collate, empty_template(collate, example))
    assert repr(wrapped([example, example])) == repr(collate([example, example]))


def test_named_tuples_and_dataclasses_keep_their_type():
    pair = empty_template(default_collate, Pair(IMAGE, 1))
    assert type(pair) is Pair
    assert pair.image.shape == (0, 2, 3)
    record = empty_template(lambda rows: Record(torch.stack(rows), ["name"] * len(rows)), IMAGE)
    assert type(record) is Record
    assert (record.image.shape, record.names, record.kind) == ((0, 2, 3), [], "train")


def test_mappings_keep_their_type_and_drop_the_values_of_the_example():
    kinds = [
        lambda rows: Encoding({"x": torch.stack(rows)}, encodings=["secret"] * len(rows)),
        lambda rows: collections.OrderedDict(x=torch.stack(rows)),
        lambda rows: collections.UserDict(x=torch.stack(rows)),
        lambda rows: collections.defaultdict(list, x=torch.stack(rows)),
    ]
    for collate in kinds:
        template = empty_template(collate, IMAGE)
        assert type(template) is type(collate([IMAGE]))
        assert template["x"].shape == (0, 2, 3)
        assert "secret" not in repr(vars(template) if isinstance(template, Encoding) else template)


def test_a_template_holds_no_tensor_value_of_the_example():
    template = empty_template(lambda rows: (torch.stack(rows), rows[0] * 1, torch.tensor(7)), IMAGE + 1)
    assert all(part.sum() == 0 for part in template)


def test_batch_axis_that_cannot_be_inferred_falls_back_to_the_declared_axis():
    # The collate function removes duplicates: one and two copies give the same batch.
    unique = [
        lambda rows: torch.unique(torch.stack(rows), dim=0),
        lambda rows: {"x": torch.zeros(1, 4, 2), "y": torch.zeros(1), "names": ["a"]},
    ]
    assert empty_template(unique[0], IMAGE).shape == (0, 2, 3)
    assert empty(empty_template(unique[1], IMAGE)) == {"x": (F, 0, 4, 2), "y": (F, 0), "names": []}
    late = empty_template(unique[1], IMAGE, batch_first=False)
    assert empty(late) == {"x": (F, 1, 0, 2), "y": (F, 0), "names": []}


@pytest.mark.hazard("S5")
def test_collate_fn_is_never_called_with_an_empty_list():
    sizes = []

    def collate(rows):
        sizes.append(len(rows))
        return torch.stack(rows)

    wrapped = EmptyAwareCollate(collate, empty_template(collate, IMAGE))
    wrapped([])
    wrapped([IMAGE])
    assert 0 not in sizes


def test_each_empty_batch_is_a_new_object():
    wrapped = EmptyAwareCollate(default_collate, empty_template(default_collate, {"x": IMAGE, "name": "a"}))
    first, second = wrapped([]), wrapped([])
    first["x"].requires_grad_()
    first["name"].append("b")
    first["extra"] = 1
    assert empty(second) == {"x": (F, 0, 2, 3), "name": []}
    assert not second["x"].requires_grad


def test_empty_aware_collate_can_be_pickled():
    wrapped = EmptyAwareCollate(default_collate, empty_template(default_collate, (IMAGE, 1)))
    assert empty(pickle.loads(pickle.dumps(wrapped))([])) == [(F, 0, 2, 3), (I, 0)]


def test_error_for_an_unknown_type_states_its_position_in_the_batch():
    with pytest.raises(SamplingError, match=r"Opaque cannot be created for batch\['a'\]\[1\]"):
        empty_template(lambda rows: {"a": [torch.stack(rows), Opaque(rows)]}, IMAGE)


def test_global_random_states_do_not_change():
    def collate(rows):
        torch.rand(3), np.random.rand(3), random.random()
        return torch.stack(rows)

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    before = torch.get_rng_state().tolist(), np.random.get_state()[2], random.getstate()
    empty_template(collate, IMAGE)
    assert before == (torch.get_rng_state().tolist(), np.random.get_state()[2], random.getstate())
