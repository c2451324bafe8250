"""A sharded checkpoint resumes with any number of processes and gives the same run."""

import json
import stat

import inside
import pytest
import torch
from launch import launched
from spread_runs import Case, Spread, data, difference, whole_weights
from torch.utils.data import DataLoader

from dpengine import checkpoint
from dpengine.errors import BatchStateError, CorruptFileError, MechanismMismatchError

CASES = {
    "gaussian": Case(model="tied"),
    "bandmf": Case(noise="bandmf", clipping="per_layer"),
    "inverse": Case(model="adapted", noise="inverse"),
    "adaptive": Case(model="frozen", clipping="adaptive", physical=3),
}
BEFORE, AFTER = 5, 4


def save_all(folder, topologies, names):
    """Trains and saves each case in each topology."""
    for topology in topologies:
        for name in names:
            run = Spread(CASES[name], topology, optimizer="Adam").train(BEFORE)
            checkpoint.save(folder / topology / name, run.engine)


def go_on(folder, topology, names, one_matrix):
    """Loads and trains each case that was saved in a folder."""
    found = {}
    for name in names:
        run = Spread(CASES[name], topology, optimizer="Adam")
        checkpoint.load(folder / name, run.engine, nothing_released_since=one_matrix)
        found[name, one_matrix] = run.train(AFTER).result()
    return found


def go_on_with_all(folders, topologies, names, ends):
    """The same of several folders, in several topologies, each with its noise gone on in one or both ways."""
    return {
        (str(folder), topology): {k: v for one in ends for k, v in go_on(folder, topology, names, one).items()}
        for folder in folders
        for topology in topologies
    }


def assert_same_runs(of_ranks, expected):
    assert all(isinstance(one, dict) for one in of_ranks), of_ranks
    for where, cases in of_ranks[0].items():
        for case, first in cases.items():
            for one in (rank[where][case] for rank in of_ranks):
                assert difference(one["weights"], expected[case]["weights"]) < 1e-6, (where, case)
                assert one["epsilon"] == expected[case]["epsilon"], (where, case)
                assert all(torch.equal(w, first["weights"][k]) for k, w in one["weights"].items()), (where, case)


def saved_and_gone_on_alone(folder, names, ends):
    save_all(folder, ["data"], names)
    return go_on_with_all([folder / "data"], ["data"], names, ends)[str(folder / "data"), "data"]


@pytest.mark.slow
@pytest.mark.hazard("B9")
def test_a_run_resumes_with_another_number_of_processes(tmp_path):
    names, ends = ["gaussian", "bandmf"], [True]
    expected = saved_and_gone_on_alone(tmp_path / "alone", names, ends)
    assert launched(2, save_all, tmp_path, ["fsdp"], names) == [None] * 2
    assert_same_runs([go_on_with_all([tmp_path / "fsdp"], ["data"], names, ends)], expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["bandmf"], pytest.param(["gaussian", "inverse"], marks=pytest.mark.nightly)], ids="-".join
)
def test_a_run_resumes_from_any_topology_in_any_other(tmp_path, names):
    ends = [True, False]
    expected = saved_and_gone_on_alone(tmp_path / "alone", names, ends)
    four, two = ["data", "fsdp", "hybrid", "tp_fsdp"], ["ddp", "fsdp", "tp"]
    assert launched(4, save_all, tmp_path / "4", four, names) == [None] * 4
    assert launched(2, save_all, tmp_path / "2", two, names) == [None] * 2
    by_four, by_two, alone = (
        [tmp_path / n / one for one in kinds] for n, kinds in (("4", four), ("2", two), ("alone", ["data"]))
    )
    assert_same_runs([go_on_with_all(by_four + by_two, ["data"], names, ends)], expected)
    assert_same_runs(launched(2, go_on_with_all, by_four + alone, two, names, ends), expected)
    assert_same_runs(launched(4, go_on_with_all, by_two + alone, four, names, ends), expected)


@pytest.mark.slow
def test_adaptive_thresholds_and_chunked_batches_resume(tmp_path):
    expected = saved_and_gone_on_alone(tmp_path / "alone", ["adaptive"], [True])
    assert launched(2, save_all, tmp_path, ["ddp", "fsdp"], ["adaptive"]) == [None] * 2
    folders = [tmp_path / "ddp", tmp_path / "fsdp"]
    assert_same_runs([go_on_with_all(folders, ["data"], ["adaptive"], [True])], expected)


def saved_and_looked_at(folder):
    """Returns the contents of the files of a sharded run, and those that torch.distributed.checkpoint reads."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    run = Spread(Case(), "fsdp", seed=None).train(2)
    checkpoint.save(folder, run.engine)
    dist.barrier()
    expected, found = whole_weights(run.model), {k: torch.zeros(w.shape) for k, w in whole_weights(run.model).items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    key = inside.noise_source(run.engine).secret_state()["key"]
    holding = [path.name for path in folder.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    other = Spread(Case(), "fsdp", seed=None)
    checkpoint.load(folder, other.engine)
    again = other.train(2).result()["weights"]
    same = all(torch.equal(w, found[k]) for k, w in expected.items())
    report = other.engine.report()
    return same, holding, again, (report.to_dict()["run"]["device"], str(report))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded") / "run"
    return folder, launched(2, saved_and_looked_at, folder)


def test_torch_distributed_checkpoint_reads_the_files(sharded):
    _, found = sharded
    assert [one[0] for one in found] == [True, True]


def test_no_process_writes_the_full_model(sharded):
    folder, _ = sharded
    names = sorted(path.name for path in folder.iterdir())
    assert names[:2] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    sizes = [(folder / name).stat().st_size for name in names[:2]]
    whole = sum(w.numel() * 4 for w in Spread(Case()).model.parameters())
    assert max(sizes) < 0.75 * whole + 3000  # headers


@pytest.mark.hazard("N11")
def test_the_key_is_in_one_private_file(sharded):
    folder, found = sharded
    assert [one[1] for one in found] == [["run.safetensors"]] * 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder / "private").iterdir()} == {0o600}


def test_resumed_ranks_share_one_random_nonce(sharded):
    _, found = sharded
    first, second = (one[2] for one in found)
    assert all(torch.equal(w, second[k]) for k, w in first.items())


def test_the_report_states_the_number_of_processes(sharded):
    _, found = sharded
    for device, text in (one[3] for one in found):
        assert device == "cpu, 2 processes (fully sharded)"
        assert "the network between the processes" in text


@pytest.mark.hazard("P1")
def test_a_missing_or_changed_file_of_another_rank_is_detected(sharded):
    folder, _ = sharded
    seals = json.loads((folder / "private" / "seals.json").read_text())
    assert {name for name in seals if name.startswith(("model", "optimizer"))} == {
        f"{kind}-0000{i}-of-00002.safetensors" for kind in ("model", "optimizer") for i in (1, 2)
    }
    path = folder / "model-00002-of-00002.safetensors"
    data = path.read_bytes()
    for changed in (data[:-1] + bytes([data[-1] ^ 1]), None):
        path.unlink() if changed is None else path.write_bytes(changed)
        with pytest.raises(CorruptFileError, match="model-00002"):
            checkpoint.load(folder, Spread(Case(), seed=None).engine)
        path.write_bytes(data)


def saved_where_one_cannot(folder):
    """One rank has an unfinished batch when all ranks save."""
    import torch.distributed as dist

    run = Spread(Case()).train(1)
    if dist.get_rank() == 1:
        next(iter(run.loader))
    checkpoint.save(folder, run.engine)


@pytest.mark.hazard("X3")
def test_if_one_rank_cannot_save_no_rank_does(tmp_path):
    first, second = launched(2, saved_where_one_cannot, tmp_path / "run")
    assert isinstance(second, BatchStateError)
    assert isinstance(first, RuntimeError) and "Rank 1" in str(first) and "between two steps" in str(first)
    assert not (tmp_path / "run").exists()


def loads_others(folder):
    """Each rank loads a different checkpoint, and then the same one with a different option."""
    import torch.distributed as dist

    found = []
    for where, one_matrix in ((folder / str(dist.get_rank()), False), (folder / "0", dist.get_rank() == 0)):
        try:
            checkpoint.load(where, Spread(Case(noise="bandmf")).engine, nothing_released_since=one_matrix)
        except MechanismMismatchError as error:
            found.append(str(error))
    return found


@pytest.mark.hazard("X5")
def test_ranks_that_load_different_checkpoints_are_rejected(tmp_path):
    for name in ("0", "1"):
        checkpoint.save(tmp_path / name, Spread(Case(noise="bandmf"), seed=1 + int(name)).train(2).engine)
    for found in launched(2, loads_others, tmp_path):
        assert "do not agree on checkpoint" in found[0] and "do not agree on nothing_released_since" in found[1]


class TiedRows(torch.nn.Module):
    """Weight with fewer rows than processes, shared by two layers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def saved_and_loaded_with_an_empty_part(folder):
    from torch.distributed.fsdp import fully_shard

    from dpengine import PrivacyEngine

    found = []
    for going_on in (False, True):
        torch.manual_seed(0)
        model, engine = fully_shard(TiedRows()), PrivacyEngine()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.make_private(model, optimizer, DataLoader(data(), batch_size=12), noise_multiplier=1.0)
        checkpoint.load(folder, engine) if going_on else checkpoint.save(folder, engine)
        found.append(whole_weights(model)["embedding.weight"])
    return torch.equal(*found), model.embedding.weight.to_local().numel()


@pytest.mark.slow
def test_tied_weights_of_which_a_rank_has_nothing_are_stored_once_and_read_again(tmp_path):
    found = launched(3, saved_and_loaded_with_an_empty_part, tmp_path / "run")
    assert [same for same, _ in found] == [True] * 3 and found[-1][1] == 0


@pytest.mark.hazard("N11")
def test_a_save_that_fails_leaves_no_key_behind(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    run = Spread(Case()).train(1)
    monkeypatch.setattr(checkpoint.save.__globals__["folders"], "commit", full)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(tmp_path / "run", run.engine)
    assert list(tmp_path.iterdir()) == []
