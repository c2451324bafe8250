"""Noise of a distributed run, gathered from its ranks: equal to that of one process, with the stated distribution.

All gradients are zero, so that what stands in ``p.grad`` after a step is noise and nothing else.
"""

import itertools

import inside
import numpy as np
import pytest
import torch
import torch.distributed as dist
from launch import launched
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.noise import BandedInverse, BandMF
from dpengine.noise.toeplitz import matrix

STEPS, BATCH, ROWS, SEED = 8, 4, 32, 7
INPUTS, HIDDEN, OUTPUTS = 251, 401, 101  # sizes that are not divisible by two or four
NOISE = {"gaussian": None, "bandmf": BandMF(num_bands=4), "inverse": BandedInverse(num_bands=4)}
SIGMAS = 5
every_noise = pytest.mark.parametrize("noise", NOISE)
BY_NIGHT = [pytest.mark.slow, pytest.mark.nightly]


class Layers(nn.Module):
    """Two blocks of a linear layer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def wrapped(model, topology):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if topology == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if topology in ("fsdp", "hybrid"):
        shape, names = ((ranks,), ("shard",)) if topology == "fsdp" else ((2, ranks // 2), ("replica", "shard"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
    return model


def noise_of_run(noise, topology="data", seed=SEED):
    """All noise of a run ``(STEPS, n)``, in units of its standard deviation, and S."""
    torch.manual_seed(0)
    model = wrapped(Layers(), topology)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(ROWS, INPUTS)), batch_size=BATCH)
    more = {"noise": NOISE[noise], "steps": STEPS} if NOISE[noise] else {}
    engine = PrivacyEngine(seed=seed)
    model, optimizer, loader = engine.make_private(
        model, optimizer, loader, noise_multiplier=0.8, max_grad_norm=0.7, **more
    )
    state = inside.state(engine)
    whole = []
    for (x,) in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), STEPS):
        optimizer.zero_grad()
        (0 * model(x).sum()).backward()
        optimizer.step()
        grads = [p.grad for p in model.parameters()]
        whole.append(torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten() for g in grads]))
    unit = inside.divisor(engine) / state.noise_std
    return torch.stack(whole) * unit, strategy(state.noise)


def strategy(noise):
    """Returns S as a dense matrix."""
    if noise is None:
        return np.eye(STEPS)
    if "inverse_coefficients" in noise:
        return np.linalg.inv(matrix(np.array(noise["inverse_coefficients"]), STEPS))
    return matrix(np.array(noise["strategy"]), STEPS)


def noise_of_ranks(topologies):
    """Returns the noise of each kind of run, gathered on rank 0, and whether all ranks have the same."""
    found = {}
    for topology, noise in itertools.product(topologies, NOISE):
        whole = noise_of_run(noise, topology)[0]
        found[topology, noise] = share(whole)
    found["no seed"] = share(noise_of_run("gaussian", topologies[0], seed=None)[0])
    return found


def share(whole):
    first = whole.clone()
    dist.broadcast(first, src=0)
    return whole if dist.get_rank() == 0 else torch.equal(first, whole)


def launch(ranks, topologies):
    first, *others = launched(ranks, noise_of_ranks, topologies)
    assert all(one == dict.fromkeys(first, True) for one in others)
    return ranks, first


@pytest.fixture(scope="module")
def of_two():
    return launch(2, ["ddp", "fsdp"])


@pytest.fixture(scope="module")
def of_two_times_two():
    return launch(4, ["hybrid"])


@pytest.fixture(scope="module")
def of_four():
    return launch(4, ["ddp", "fsdp"])


@pytest.fixture(scope="module")
def of_one():
    return {noise: noise_of_run(noise) for noise in NOISE}


@pytest.fixture(
    params=[
        *(("of_two", topology) for topology in ("ddp", "fsdp")),
        pytest.param(("of_two_times_two", "hybrid"), marks=pytest.mark.slow),
        *(pytest.param(("of_four", topology), marks=BY_NIGHT) for topology in ("ddp", "fsdp")),
    ],
    ids="-".join,
)
def of_ranks(request):
    """Returns the number of ranks, and the noise of each kind."""
    launches, topology = request.param
    ranks, found = request.getfixturevalue(launches)
    return ranks, {noise: found[topology, noise] for noise in NOISE}


@every_noise
@pytest.mark.hazard("N5")
def test_the_noise_is_that_of_one_process_bit_by_bit(of_ranks, of_one, noise):
    assert torch.equal(of_ranks[1][noise], of_one[noise][0])


@every_noise
@pytest.mark.hazard("N5")
def test_uncorrelated_noise_is_standard_normal_and_independent_across_ranks(of_ranks, of_one, noise):
    """1.1 million draws. Moments within five standard deviations, Kolmogorov-Smirnov test with p > 1e-6."""
    ranks, found = of_ranks
    fresh = of_one[noise][1] @ found[noise].double().numpy()
    error = fresh.size**-0.5
    assert abs(fresh.mean()) < SIGMAS * error and abs(fresh.var() - 1) < SIGMAS * 2**0.5 * error
    assert stats.kstest(fresh.ravel(), "norm").pvalue > 1e-6
    rows = fresh[:, : HIDDEN * INPUTS].reshape(STEPS, HIDDEN, INPUTS)
    each, share = -(-HIDDEN // ranks), fresh.shape[1] // ranks
    least = HIDDEN - each * (ranks - 1)  # rows of the last rank, which has the fewest
    by_rows = [rows[:, each * rank : each * rank + least] for rank in range(ranks)]
    by_numbers = [fresh[:, share * rank : share * (rank + 1)] for rank in range(ranks)]
    for parts in (by_rows, by_numbers):
        for one, other in itertools.combinations(parts, 2):
            assert abs((one * other).mean()) * one.size**0.5 < SIGMAS
            assert abs((one[1:] * other[:-1]).mean()) * one[1:].size ** 0.5 < SIGMAS


@every_noise
def test_the_covariance_over_steps_is_the_one_that_the_strategy_states(of_ranks, of_one, noise):
    """140,000 draws: each of 64 entries is within five standard deviations."""
    found = of_ranks[1][noise].double().numpy()
    inverse = np.linalg.inv(of_one[noise][1])
    stated = inverse @ inverse.T
    variances = np.outer(np.diag(stated), np.diag(stated)) + stated**2
    assert (np.abs(found @ found.T / found.shape[1] - stated) <= SIGMAS * np.sqrt(variances / found.shape[1])).all()


@pytest.mark.parametrize(
    "launches",
    ["of_two", pytest.param("of_two_times_two", marks=pytest.mark.slow), pytest.param("of_four", marks=BY_NIGHT)],
)
@pytest.mark.hazard("N5")
def test_unseeded_noise_of_each_shard_has_unit_variance_and_is_independent(launches, of_one, request):
    """Each shard has variance 1, independent of the number of ranks. 0.57 million draws on 2 ranks."""
    ranks, found = request.getfixturevalue(launches)
    noise = found["no seed"].double()
    shares = noise.split(-(-noise.shape[1] // ranks), dim=1)
    for share in shares:
        assert abs(share.var().item() - 1) < SIGMAS * (2 / share.numel()) ** 0.5
    others = [of_one["gaussian"][0].double(), noise.roll(1, 0), noise.roll(shares[0].shape[1], 1)]
    assert all(abs((noise * other).mean().item()) * noise.numel() ** 0.5 < SIGMAS for other in others)


def two_trials():
    """Two models, each sharded over two of four processes; and one on a mesh that leaves two out."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def private(mesh):
        torch.manual_seed(0)
        model = fully_shard(Layers(), mesh=mesh)
        loader = DataLoader(TensorDataset(torch.zeros(ROWS, INPUTS)), batch_size=BATCH)
        return PrivacyEngine().make_private(
            model, torch.optim.SGD(model.parameters(), lr=1.0), loader, noise_multiplier=1.0
        )

    model, optimizer, loader = private(init_device_mesh("cpu", (2, 2), mesh_dim_names=("trial", "shard"))["shard"])
    (x,) = next(iter(loader))
    (0 * model(x).sum()).backward()
    optimizer.step()
    noise = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    refused, rank = "", dist.get_rank()
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replica", "shard"))
    if rank < 2:
        try:
            private(mesh)
        except Exception as error:
            refused = str(error)
    return noise, refused


@pytest.mark.slow
def test_two_models_in_one_process_group_have_different_noise():
    found = launched(4, two_trials)
    noises = [noise.double() for noise, _ in found]
    assert torch.equal(noises[0], noises[1]) and torch.equal(noises[2], noises[3])
    error = noises[0].numel() ** -0.5 * noises[0].var().item()
    assert abs((noises[0] * noises[2]).mean().item()) < SIGMAS * error
    assert all("The model is on a mesh of 2 x 1" in refused for _, refused in found[:2])
