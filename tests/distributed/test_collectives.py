"""A private step has the collectives of an ordinary step. Split layers add a few numbers per sample."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import launched
from spread_runs import ROWS, data, plain, wrapped
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.exchanges import Exchanges
from dpengine import PrivacyEngine
from dpengine.distributed.detect import topology_of
from dpengine.distributed.ranks import RankFingerprint, Ranks

TOPOLOGIES = ("ddp", "fsdp", "tp")
RANKS = 2
GROUPS = 8  # layers of the model
SEAL = 4 * RankFingerprint.WORDS


def exchanged(topology, options=None, chunks=1):
    """Exchanges of the third step, each kind with its number and bytes; ``options`` of a private run, None for none."""
    torch.manual_seed(0)
    model = wrapped(plain(), topology)
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(), batch_size=ROWS)
    if options is not None:
        engine = PrivacyEngine(seed=1)
        options = {"noise_multiplier": 0.8, "accumulation_steps": chunks, **options}
        model, optimizer, loader = engine.make_private(model, optimizer, loader, **options)
    for _ in range(3):
        with Exchanges() as seen:
            for words, following in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(words).flatten(0, 1), following.flatten()).backward()
                optimizer.step()
    return {kind: (count, seen.sizes[kind]) for kind, count in seen.calls.items()}


def test_objects_are_exchanged_through_the_device_of_the_model(monkeypatch):
    current = []

    @contextmanager
    def on_device(device):
        current.append(device)
        yield
        current.pop()

    seen = []
    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(dist, "all_gather_object", lambda found, value, group: seen.append(list(current)))
    monkeypatch.setattr(dist, "broadcast_object_list", lambda shared, src, group: seen.append(list(current)))
    second = torch.device("cuda", 1)
    for device, expected in ((second, [second]), (torch.device("cpu"), []), (None, [])):
        ranks = Ranks(size=RANKS, device=device)
        ranks.all_gather(1)
        ranks.broadcast(1)
        assert seen == [expected] * 2
        seen.clear()


def _devices_of_topology():
    topology = topology_of(nn.Linear(2, 2))
    return topology.replicas.device, topology.everyone.device, topology.shards.device


def test_the_topology_of_a_model_has_its_device():
    cpu = torch.device("cpu")
    assert launched(RANKS, _devices_of_topology) == [(cpu, cpu, None)] * RANKS


def known():
    """Returns the result of the counter for exchanges of known number and size."""
    with Exchanges() as nothing:
        plain()(data().tensors[0])
    with Exchanges() as seen:
        dist.all_reduce(torch.zeros(5))
        dist.all_gather_into_tensor(torch.zeros(6), torch.zeros(3))
        dist.reduce_scatter_tensor(torch.zeros(4, dtype=torch.float64), torch.zeros(8, dtype=torch.float64))
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
        model(torch.zeros(1, 3)).sum().backward()
    with Exchanges() as object_seen:
        dist.all_gather_object([None] * RANKS, "a word")
    return dict(nothing.calls), dict(seen.calls), dict(seen.sizes), dict(object_seen.calls)


def everything():
    runs = {
        "ordinary": None,
        "private": {},
        "per layer": {"clipping": "per_layer"},
        "adaptive": {"clipping": "adaptive"},
    }
    found = {(name, t): exchanged(t, options) for name, options in runs.items() for t in TOPOLOGIES}
    chunked = {("chunks", topology): exchanged(topology, {}, chunks=3) for topology in TOPOLOGIES}
    return {"known": known(), **found, **chunked}


@pytest.fixture(scope="module")
def counts():
    first, second = launched(RANKS, everything)
    assert first == second
    return first


@pytest.mark.slow
def test_the_counter_sees_what_ddp_begins_in_cpp_and_each_other_exchange_once(counts):
    nothing, calls, sizes, of_object = counts["known"]
    assert nothing == {}
    weights = 4 * (3 * 2 + 2)
    broadcast = {kind: n for kind, n in calls.items() if kind not in ("all_reduce", "all_gather", "reduce_scatter")}
    assert calls["all_reduce"] == 2 and sizes["all_reduce"] == 4 * 5 + weights
    assert calls["reduce_scatter"] == 1 and sizes["reduce_scatter"] == 8 * 8
    assert calls["all_gather"] >= 1 and broadcast  # the wrapper compares shapes, and sends the first rank's weights
    assert of_object  # a message that is not a tensor is counted


@pytest.mark.slow
def test_an_ordinary_run_of_fsdp_has_the_exchanges_that_fsdp_is_known_for(counts):
    ordinary = counts["ordinary", "fsdp"]
    groups = 3  # two blocks, and what is around them
    assert ordinary["all_gather"][0] == 2 * groups - 1  # the root group is not resharded after the forward pass
    assert ordinary["reduce_scatter"][0] == groups


@pytest.mark.slow
@pytest.mark.parametrize("run", ["private", "per layer"])
def test_ddp_and_fsdp_exchange_no_more_than_without_privacy(counts, run):
    for topology in ("ddp", "fsdp"):
        ordinary, private = counts["ordinary", topology], counts[run, topology]
        assert private.keys() == ordinary.keys()
        for kind, (count, size) in private.items():
            assert count <= ordinary[kind][0]
            seals = 0 if kind == "all_gather" else (RANKS if kind == "reduce_scatter" else 1) * SEAL * count
            assert size <= ordinary[kind][1] + seals


@pytest.mark.slow
@pytest.mark.parametrize(("run", "groups"), [("private", 1), ("per layer", GROUPS)])
def test_split_layers_add_one_exchange_of_a_few_numbers_per_sample(counts, run, groups):
    ordinary, private = counts["ordinary", "tp"], dict(counts[run, "tp"])
    count, size = private.pop("all_reduce")
    plain_count, plain_size = ordinary["all_reduce"]
    assert private == {kind: found for kind, found in ordinary.items() if kind != "all_reduce"}
    assert count == plain_count + 1
    assert size == plain_size + 8 * (ROWS * (groups + 2) + RankFingerprint.WORDS)


@pytest.mark.slow
def test_chunks_of_a_logical_batch_are_exchanged_together_where_each_rank_has_all_parameters(counts):
    assert counts["chunks", "ddp"] == counts["private", "ddp"]
    for kind, (count, size) in counts["private", "fsdp"].items():  # as in ordinary training
        assert counts["chunks", "fsdp"][kind] == (3 * count, 3 * size)


@pytest.mark.slow
def test_an_adaptive_threshold_adds_one_number_to_the_exchanges(counts):
    for topology in ("ddp", "fsdp"):
        count, size = counts["private", topology].get("all_reduce", (0, 0))
        assert counts["adaptive", topology]["all_reduce"] == (count + 1, size + 8)
    assert counts["adaptive", "tp"] == counts["private", "tp"]
