"""The files of a checkpoint: tensors and plain values come back as they were, folders are there as a whole."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpengine.checkpoint import folder as folders
from dpengine.checkpoint.plain import apart, together
from dpengine.checkpoint.tensor_file import from_bytes, to_bytes
from dpengine.errors import CorruptFileError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool]  # fmt: skip


def tensors():
    torch.manual_seed(0)
    made = {f"{dtype}": (100 * torch.randn(3, 5)).to(dtype) for dtype in DTYPES}
    made |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "view": torch.arange(12.0).reshape(3, 4).T}
    return made


def test_tensors_come_back():
    found, metadata = from_bytes(to_bytes(tensors(), {"a": "b"}), "x")
    assert metadata == {"a": "b"}
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_the_layout_is_that_of_the_format():
    data = to_bytes({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3], dtype=torch.int64)}, {})
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header["a"] == {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert header["b"] == {"dtype": "I64", "shape": [1], "data_offsets": [8, 16]}
    assert data[8 + length :] == b"\x00\x00\x80?\x00\x00\x00@" + (3).to_bytes(8, "little")


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"'c' is a torch\.complex64"):
        to_bytes({"c": torch.zeros(1, dtype=torch.complex64)}, {})


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_files_are_refused_or_read(data):
    whole = to_bytes(tensors(), {"a": "b"})
    place = data.draw(st.integers(0, len(whole) - 1))
    broken = data.draw(
        st.one_of(
            st.just(whole[:place]),
            st.integers(1, 255).map(lambda bit: whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :]),
            st.binary(max_size=200),
        )
    )
    try:
        found, _ = from_bytes(broken, "x")
    except CorruptFileError as error:
        assert "DPE024" in str(error)
    else:
        assert all(isinstance(tensor, torch.Tensor) for tensor in found.values())


def test_a_pickle_is_refused():
    import pickle

    class Harm:
        def __reduce__(self):
            return (pytest.fail, ("code of the file ran",))

    with pytest.raises(CorruptFileError):
        from_bytes(pickle.dumps(Harm()), "x")


STATES = [
    {"state": {0: {"step": torch.tensor(3.0), "m": torch.ones(2)}}, "param_groups": [{"betas": (0.9, 0.99), "lr": 1}]},
    {"tensor": "a name that is a mark"},
    {"pairs": [1, 2], "tuple": (1,), "float": None},
    [math.inf, -math.inf, 0.1, True, None, "x", [], {}, ()],
    torch.zeros(2),
    {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: torch.full((1,), 2.0), "1": torch.full((1,), 3.0)},
]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("state", STATES, ids=str)
def test_plain_values_come_back(state):
    plain, found = apart(state, "x")
    assert same(together(json.loads(json.dumps(plain, allow_nan=False)), found), state)


def test_what_is_not_plain_is_refused_with_its_place():
    with pytest.raises(TypeError, match=r"x\.a\.1 is a set"):
        apart({"a": [1, {2}]}, "x")


@pytest.mark.parametrize(
    "plain", [{"tensor": "y"}, {"other": 1}, {}, {"a": 1, "b": 2}, {"pairs": [[1]]}, {"float": "x"}]
)
def test_damaged_values_are_refused(plain):
    with pytest.raises(CorruptFileError):
        together(plain, {})


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Dead(Exception):
    pass


def dying(function, calls):
    """The function, until so many calls were made of all that share the counter."""

    def call(*arguments, **options):
        calls[0] -= 1
        if calls[0] == 0:
            raise Dead
        return function(*arguments, **options)

    return call


def test_a_death_at_any_call_leaves_a_whole_folder(tmp_path, monkeypatch):
    old, new, last = ({"a": value, "s": value} for value in (b"1", b"2", b"3"))
    for death in range(1, 40):
        where = tmp_path / str(death) / "run"
        folders.write(where, {"a": b"1"}, {"s": b"1"}, secret_folder="private")
        calls = [death]
        with monkeypatch.context() as patch:
            for owner, name in ((folders.Path, "rename"), (folders.Path, "mkdir"), (folders.os, "open"),
                                (folders.os, "fsync"), (folders.shutil, "rmtree")):  # fmt: skip
                patch.setattr(owner, name, dying(getattr(owner, name), calls))
            try:
                folders.write(where, {"a": b"2"}, {"s": b"2"}, secret_folder="private")
            except Dead:
                assert contents(folders.present(where)) in (old, new)
            else:
                assert contents(where) == new
                assert death > 10
                return
        folders.write(where, {"a": b"3"}, {"s": b"3"}, secret_folder="private")
        assert contents(where) == last
        assert [path.name for path in where.parent.iterdir()] == ["run"]
    pytest.fail("write never came to its end")


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="something else"):
        folders.write(tmp_path, {"a": b""}, {}, secret_folder="private")
    assert (tmp_path / "thesis.txt").exists()


def test_an_empty_folder_will_do(tmp_path):
    folders.write(tmp_path / "run", {"a": b"1"}, {}, secret_folder="private")
    (tmp_path / "empty").mkdir()
    folders.write(tmp_path / "empty", {"a": b"1"}, {}, secret_folder="private")
    assert contents(tmp_path / "empty") == {"a": b"1"}


def test_a_link_is_followed(tmp_path):
    folders.write(tmp_path / "run", {"a": b"1"}, {}, secret_folder="private")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    folders.write(tmp_path / "link", {"a": b"2"}, {}, secret_folder="private")
    assert contents(folders.present(tmp_path / "link")) == {"a": b"2"} == contents(tmp_path / "run")
    assert (tmp_path / "link").is_symlink()


def test_folders_of_the_user_are_left_alone(tmp_path):
    for name in ("run.old", "run.new", "run.bak"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("years of work")
    for value in (b"1", b"2"):
        folders.write(tmp_path / "run", {"a": value}, {}, secret_folder="private")
    assert len(list(tmp_path.rglob("thesis.txt"))) == 3
    (tmp_path / "run").rename(tmp_path / "run.last")
    with pytest.raises(FileNotFoundError):
        folders.present(tmp_path / "run")
