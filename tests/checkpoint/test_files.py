"""Checkpoint files: round trips of tensors and plain values, and atomic writes of folders."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpengine.checkpoint import folder as folders
from dpengine.checkpoint import tensor_files
from dpengine.checkpoint.folder import join_tensors, split_tensors
from dpengine.distributed.local_shards import Box
from dpengine.errors import CorruptFileError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool]  # fmt: skip


def tensors():
    torch.manual_seed(0)
    made = {f"{dtype}": (100 * torch.randn(3, 5)).to(dtype) for dtype in DTYPES}
    made |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "view": torch.arange(12.0).reshape(3, 4).T}
    return made


def put(path, parts, metadata=None):
    tensor_files.writer({name: tensor_files.Shard(*part) for name, part in parts.items()}, metadata or {})(path)
    return path


def test_tensors_survive_a_round_trip(tmp_path):
    path = put(tmp_path / "x.safetensors", {name: (tensor,) for name, tensor in tensors().items()}, {"a": "b"})
    with tensor_files.StoredTensors([path]) as found:
        assert found.metadata == {"a": "b"}
        assert set(found.names) == tensors().keys()
        for name, tensor in tensors().items():
            assert found.shape(name) == tuple(tensor.shape)
            assert found.read(name).dtype == tensor.dtype
            assert torch.equal(found.read(name), tensor)


def test_a_view_is_stored_without_the_rest_of_its_storage(tmp_path):
    whole = torch.arange(1000.0)
    path = put(tmp_path / "x.safetensors", {"a": (whole[10:20],), "b": (whole[15:25],)})
    assert path.stat().st_size < 500
    with tensor_files.StoredTensors([path]) as found:
        assert torch.equal(found.read("b"), whole[15:25])


CUTS = {
    "rows": [Box((0, 0), (3, 5)), Box((3, 0), (4, 5))],
    "columns": [Box((0, 0), (7, 2)), Box((0, 2), (7, 1)), Box((0, 3), (7, 2))],
    "both": [Box((i, j), (n, m)) for i, n in ((0, 4), (4, 3)) for j, m in ((0, 3), (3, 2))],
    "none": [Box((0, 0), (7, 5))],
}


@pytest.mark.parametrize("then", CUTS)
@pytest.mark.parametrize("now", CUTS)
def test_shards_of_any_size_are_read(tmp_path, then, now):
    whole = torch.randn(7, 5)
    paths = [
        put(
            tmp_path / tensor_files.file_name("w", i, len(CUTS[then])),
            {"w": (whole[box.slices_in(Box.full((7, 5)))], box.start)},
        )
        for i, box in enumerate(CUTS[then])
    ]
    assert [path.name for path in paths] == tensor_files.files_of(
        "w", [path.name for path in paths] + ["w2.safetensors"]
    )
    with tensor_files.StoredTensors(paths) as found:
        assert found.shape("w") == (7, 5)
        for box in CUTS[now]:
            assert torch.equal(found.read("w", box), whole[box.slices_in(Box.full((7, 5)))])


def test_a_missing_shard_is_reported(tmp_path):
    path = put(tmp_path / "x.safetensors", {"w": (torch.zeros(2, 2), (2, 0))})
    with tensor_files.StoredTensors([path]) as found:
        assert torch.equal(found.read("w", Box((3, 0), (1, 2))), torch.zeros(1, 2))
        with pytest.raises(CorruptFileError, match="is incomplete"):
            found.read("w")


@settings(max_examples=200, deadline=None)
@given(st.data())
@pytest.mark.hazard("P5")
def test_damaged_files_are_rejected_or_read(tmp_path_factory, data):
    path = put(
        tmp_path_factory.mktemp("x") / "x.safetensors", {"w": (torch.zeros(2, 2), (2, 0)), "b": (torch.ones(3),)}
    )
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    broken = data.draw(
        st.one_of(
            st.just(whole[:place]),
            st.integers(1, 255).map(lambda bit: whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :]),
            st.binary(max_size=200),
        )
    )
    path.write_bytes(broken)
    try:
        with tensor_files.StoredTensors([path]) as stored:
            found = [stored.read(name) for name in stored.names]
    except CorruptFileError as error:
        assert "DPE024" in str(error)
    else:
        assert all(isinstance(tensor, torch.Tensor) for tensor in found)


@pytest.mark.hazard("P5")
def test_a_pickle_is_rejected(tmp_path):
    import pickle

    class Harm:
        def __reduce__(self):
            return (pytest.fail, ("code of the file ran",))

    (tmp_path / "x.safetensors").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(CorruptFileError):
        tensor_files.StoredTensors([tmp_path / "x.safetensors"])


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
def test_plain_values_survive_a_round_trip(state):
    plain, found = split_tensors(state, "x")
    assert same(join_tensors(json.loads(json.dumps(plain, allow_nan=False)), found), state)


def test_values_that_are_not_plain_are_rejected_with_their_key():
    with pytest.raises(TypeError, match=r"x\.a\.1 is a set"):
        split_tensors({"a": [1, {2}]}, "x")


@pytest.mark.parametrize(
    "plain", [{"tensor": "y"}, {"other": 1}, {}, {"a": 1, "b": 2}, {"pairs": [[1]]}, {"float": "x"}]
)
@pytest.mark.hazard("P5")
def test_damaged_values_are_rejected(plain):
    with pytest.raises(CorruptFileError):
        join_tensors(plain, {})


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(where, files, secret):
    """Writes a complete folder as ``save`` does."""
    new = folders.begin(where, secret_folder="private")
    for name, data in files.items():
        folders.write(new / name, lambda path, data=data: path.write_bytes(data), secret=False)
    for name, data in secret.items():
        folders.write(new / "private" / name, lambda path, data=data: path.write_bytes(data), secret=True)
    folders.commit(where, secret_folder="private")


class Dead(Exception):
    pass


def dying(function, calls):
    """Wraps a function to raise ``Dead`` once the shared call counter is used up."""

    def call(*arguments, **options):
        calls[0] -= 1
        if calls[0] == 0:
            raise Dead
        return function(*arguments, **options)

    return call


@pytest.mark.hazard("P4")
def test_a_crash_at_any_call_leaves_a_complete_folder(tmp_path, monkeypatch):
    old, new, last = ({"a": value, "s": value} for value in (b"1", b"2", b"3"))
    for death in range(1, 40):
        where = tmp_path / str(death) / "run"
        write(where, {"a": b"1"}, {"s": b"1"})
        calls = [death]
        with monkeypatch.context() as patch:
            for owner, name in ((folders.Path, "rename"), (folders.Path, "mkdir"), (folders.os, "open"),
                                (folders.os, "fsync"), (folders.shutil, "rmtree")):  # fmt: skip
                patch.setattr(owner, name, dying(getattr(owner, name), calls))
            try:
                write(where, {"a": b"2"}, {"s": b"2"})
            except Dead:
                assert contents(folders.last_complete(where)) in (old, new)
            else:
                assert contents(where) == new
                assert death > 10
                return
        write(where, {"a": b"3"}, {"s": b"3"})
        assert contents(where) == last
        assert [path.name for path in where.parent.iterdir()] == ["run"]
    pytest.fail("write never came to its end")


def test_a_folder_with_other_files_is_not_changed(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="other files"):
        write(tmp_path, {"a": b""}, {})
    assert (tmp_path / "thesis.txt").exists()


def test_an_empty_folder_is_accepted(tmp_path):
    write(tmp_path / "run", {"a": b"1"}, {})
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", {"a": b"1"}, {})
    assert contents(tmp_path / "empty") == {"a": b"1"}


def test_a_symlink_is_followed(tmp_path):
    write(tmp_path / "run", {"a": b"1"}, {})
    (tmp_path / "link").symlink_to(tmp_path / "run")
    write(tmp_path / "link", {"a": b"2"}, {})
    assert contents(folders.last_complete(tmp_path / "link")) == {"a": b"2"} == contents(tmp_path / "run")
    assert (tmp_path / "link").is_symlink()


def test_folders_of_the_user_are_not_changed(tmp_path):
    for name in ("run.old", "run.new", "run.bak"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("years of work")
    for value in (b"1", b"2"):
        write(tmp_path / "run", {"a": value}, {})
    assert len(list(tmp_path.rglob("thesis.txt"))) == 3
    (tmp_path / "run").rename(tmp_path / "run.last")
    with pytest.raises(FileNotFoundError):
        folders.last_complete(tmp_path / "run")
