"""Tensor-parallel layers: the run equals that of one process, with one added all-reduce of norms."""

import itertools
import re
from collections import Counter

import inside
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from case_models import Parts
from launch import launched
from spread_runs import Case, all_trained, plain, trained, wrapped
from spread_runs import data as sentences
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.distributed.local_shards import Box, LocalShard, ParameterLayout
from dpengine.distributed.ranks import Ranks
from dpengine.distributed.topology import Topology, all_reduce_sq_norms
from dpengine.grad_modes.flat_buffer import FlatBuffer
from dpengine.noise import BandMF, NoiseSource
from dpengine.noise.correlated import mechanism_for
from dpengine.noise.mechanism import GaussianNoise
from dpengine.noise.sharded_noise import add_noise

ROWS, INPUTS, HIDDEN = 24, 6, 8
MIXED = Case(model="tied", noise="bandmf", clipping="per_layer", physical=3)
CASES = [
    *(Case(model=m, clipping=c) for m in ("plain", "tied", "frozen") for c in ("flat", "per_layer")),
    *(Case(model=m, noise=n) for m in ("plain", "tied") for n in ("bandmf", "inverse")),
    MIXED,
    Case(model="adapted"),  # the split layers are frozen
    Case(batch=2),  # often no process has a sample
    Case(clipping="adaptive", physical=2),
    Case(clipping="automatic", model="tied"),
    Case(model="tied", more=(("accumulation_steps", 3),)),
    Case(model="tied", more=(("privacy_unit", [i // 3 for i in range(96)]),)),
]


def difference(found, expected):
    a, b = (torch.cat([w.flatten() for w in weights.values()]) for weights in (found, expected))
    return float((a - b).norm() / b.norm())


def assert_same_runs(of_ranks, expected):
    for one in of_ranks:
        assert one["weights"].keys() == expected["weights"].keys()
        assert difference(one["weights"], expected["weights"]) < 1e-6
        assert one["epsilon"] == expected["epsilon"]
        assert all(torch.equal(w, of_ranks[0]["weights"][name]) for name, w in one["weights"].items())


def one_trained(case, topology, steps):
    return trained(case, topology, steps=steps)


@pytest.mark.hazard("X1")
def test_split_layers_give_the_run_of_one_process(checks):
    assert_same_runs([one["run"] for one in checks], trained(Case(model="tied")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "ranks"),
    [
        ("tp_fsdp", 4),
        pytest.param("tp", 2, marks=pytest.mark.nightly),
        pytest.param("tp_data", 4, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.hazard("X1")
def test_every_kind_of_run_is_that_of_one_process(topology, ranks):
    found = launched(ranks, all_trained, CASES, topology)
    for i, case in enumerate(CASES):
        assert_same_runs([one[i] for one in found], trained(case))


@pytest.mark.slow
def test_embeddings_may_be_split_by_features():
    assert_same_runs(launched(2, one_trained, Case(), "tp_features", 20), trained(Case()))


class Exchanges(TorchDispatchMode):
    """Counts messages and their elements."""

    def __init__(self):
        super().__init__()
        self.calls, self.numbers = Counter(), 0

    @classmethod
    def is_infra_mode(cls):
        return True  # DTensors run as if it were not there, and their exchanges are seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if "c10d" in name and "wait" not in name and "wrap" not in name:
            self.calls[name] += 1
            if name.startswith("c10d::allreduce"):
                self.numbers += args[0][0].numel()
        return func(*args, **(kwargs or {}))


def exchanges(private):
    torch.manual_seed(0)
    model = wrapped(plain(), "tp")
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(sentences(), batch_size=12)
    if private:
        model, optimizer, loader = PrivacyEngine(seed=1).make_private(model, optimizer, loader, noise_multiplier=0.8)
    batches = iter(loader)
    for _ in range(2):
        words, following = next(batches)
        with Exchanges() as seen:
            optimizer.zero_grad()
            F.cross_entropy(model(words).flatten(0, 1), following.flatten()).backward()
            optimizer.step()
    return seen.calls, seen.numbers, len(words)


def split_layers(*, between=False, dropout=0.0):
    """Two linear layers, a norm between or after them, and dropout."""
    run = lambda m, x: m.norm(m.dropout(m.outer(m.scale(m.inner(x)))))  # noqa: E731
    return Parts(
        run,
        inner=nn.Linear(INPUTS, HIDDEN),
        outer=nn.Linear(HIDDEN, INPUTS),
        scale=nn.PReLU(1) if between else nn.Identity(),
        dropout=nn.Dropout(dropout),
        norm=nn.LayerNorm(INPUTS),
    )


def with_positions():
    run = lambda m, x: m.outer(x + m.entries(torch.arange(4)))  # noqa: E731
    return Parts(run, entries=nn.Embedding(4, INPUTS), outer=nn.Linear(INPUTS, INPUTS))


STYLES = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
SEQUENCES = {
    "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
    "norm": SequenceParallel(use_local_output=True),
}


def run(model, plan, *, seed=0, shape=(INPUTS,), **options):
    """Runs one step on two ranks. Returns the number of dropped samples and the first weights, or the error."""
    torch.manual_seed(0)
    model = model()
    if dist.is_initialized():
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    torch.manual_seed(seed * (dist.get_rank() if dist.is_initialized() else 0))
    x = torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(3))
    x[5] = torch.nan
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(x, x.nan_to_num())
    loader = DataLoader(data, batch_size=ROWS)
    try:
        engine = PrivacyEngine(seed=1)
        options = {"noise_multiplier": 0.5, "sample_rate": 1.0, **options}
        model, optimizer, loader = engine.make_private(model, optimizer, loader, **options)
        for inputs, targets in loader:
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return inside.state(engine).dropped, [weight.detach() for weight in weights]


def norms(rank, own, whole, facts=("step", 3)):
    group, parts = Ranks.of(dist.group.WORLD), (torch.tensor(own[rank]), torch.tensor(whole[rank]))
    try:
        found = all_reduce_sq_norms(group, *parts, facts, torch.device("cpu"))
    except RuntimeError as error:
        return type(error).__name__
    return found.tolist()


def all_checks():
    """Runs all checks that need two processes."""
    rank, inf, nan = dist.get_rank(), float("inf"), float("nan")
    whole = ColwiseParallel(output_layouts=Replicate())
    own = [[[1.0], [2.0], [3.0]], [[4.0], [inf], [6.0]]]
    same = [[[5.0], [5.0], [5.0]]] * 2
    return {
        "run": trained(Case(model="tied"), "tp"),
        "exchanges": [exchanges(private) for private in (False, True)],
        "norms": norms(rank, own, same),
        "one is not finite": norms(rank, [own[0], own[0]], [same[0], [[5.0], [5.0], [nan]]]),
        "one differs": norms(rank, own, [same[0], [[5.0], [5.0], [5.2]]]),
        "other step": norms(rank, own, same, ("step", 3 + rank)),
        "a row is dropped": run(split_layers, STYLES),
        "dropout differs": run(lambda: split_layers(dropout=0.5), STYLES, seed=1),
        "between": run(lambda: split_layers(between=True), STYLES),
        "mode": run(split_layers, STYLES, grad_sample_mode="ghost"),
        "sequences": run(split_layers, {"norm": SEQUENCES["norm"]}, shape=(4, INPUTS)),
        "positions": run(with_positions, {"entries": whole}, shape=(4, INPUTS)),
        "other weights": run(lambda: (torch.manual_seed(rank), split_layers())[1], {"inner": whole}),
    }


@pytest.fixture(scope="module")
def checks():
    return launched(2, all_checks)


def test_one_exchange_of_norms_is_all_that_privacy_adds(checks):
    for one in checks:
        (plain_calls, _, _), (calls, numbers, rows) = one["exchanges"]
        assert calls - plain_calls == Counter({"c10d::allreduce_": 1}) and not plain_calls - calls
        assert numbers == 3 * rows + 16


@pytest.mark.hazard("X1")
def test_norms_of_shards_are_summed_and_replicated_parameters_count_once(checks):
    for one in checks:
        assert one["norms"] == [[10.0], [float("inf")], [14.0]]
        assert one["one is not finite"] == [[7.0], [9.0], [float("inf")]]


@pytest.mark.parametrize("case", ["one differs", "other step"])
@pytest.mark.hazard("X5")
def test_ranks_that_differ_are_rejected_on_all_of_them(checks, case):
    assert [one[case] for one in checks] == ["MechanismMismatchError"] * 2


def test_a_nonfinite_sample_is_dropped_on_all_ranks(checks):
    dropped, weights = run(split_layers, None)
    for one in checks:
        assert one["a row is dropped"][0] == dropped == 1
        for found, expected, first in zip(
            one["a row is dropped"][1], weights, checks[0]["a row is dropped"][1], strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(found, first)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("dropout differs", "MechanismMismatchError.*Gradients of replicated parameters differ"),
        ("between", "MechanismMismatchError.*Gradients of replicated parameters differ"),
        ("mode", "UnsupportedLayerError.*grad_sample_mode='ghost'"),
        ("sequences", "UnsupportedLayerError.*Layer 'norm' .LayerNorm."),
        ("positions", "UnsupportedLayerError.*Embedding 'entries'"),
        ("other weights", "MechanismMismatchError.*'outer.weight' differs between rank 0 and rank 1"),
    ],
)
def test_unsupported_models_are_rejected_by_name(checks, case, message):
    assert all(re.search(message, str(one[case])) for one in checks), [one[case] for one in checks]


def mechanism(kind):
    source = NoiseSource.seeded(4)
    return GaussianNoise(source) if kind == "gaussian" else mechanism_for(source, BandMF(num_bands=3).recurrence(5))


@pytest.mark.parametrize("kind", ["gaussian", "bandmf"])
def test_a_shard_gets_the_noise_of_its_position_in_the_parameter(kind):
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3,), (7, 6), (2, 2))]

    def noise(held, step, drawing):
        topology = Topology(
            layout=ParameterLayout(local_shard=lambda p: held if p is parameters[1] else LocalShard.full(p.shape))
        )
        taken = FlatBuffer(parameters, topology).drain()
        add_noise(taken, drawing, std=2.0, step=step, scale=0.5, replicas=Ranks(), fingerprint=())
        return [taken.views[p] for p in parameters]

    one, others = mechanism(kind), {}
    for step in range(3):
        expected = noise(LocalShard.full((7, 6)), step, one)
        assert all(float(view.std()) > 0.2 for view in expected)
        for place in itertools.product(range(2), range(3)):  # two parts of columns, and three of the rows of each
            formed = Box.full((7, 6)).part(1, place[0], 2)
            held = LocalShard((7, 6), formed, formed.part(0, place[1], 3))
            found = noise(held, step, others.setdefault(place, mechanism(kind)))
            box = tuple(slice(a, a + n) for a, n in zip(held.kept.start, held.kept.size, strict=True))
            torch.testing.assert_close(found, [expected[0], expected[1][box], expected[2]])
