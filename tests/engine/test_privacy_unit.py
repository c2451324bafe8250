"""``make_private(..., privacy_unit=ids)``: user-level sampling, clipping and accounting."""

import itertools
import math

import inside
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.errors import InvalidBudgetError, SamplingError, UnsupportedLayerError
from dpengine.noise import BandMF
from dpengine.plan import BandMFConfig
from dpengine.sampling.poisson import PoissonDraws
from dpengine.sampling.units import UnitDraws, unit_numbers

ROWS, CLASSES, BOUND = 60, 4, 0.1


def attention():
    """Returns a transformer encoder layer, whose attention has packed projections, with a head."""
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Parts(lambda m, x: m.head(m.block(x).mean(dim=1)), block=block, head=nn.Linear(8, CLASSES))


def tied():
    """Returns a model that uses one embedding twice."""
    run = lambda m, ids: m.head(m.table(ids[:, :3]).sum(dim=1) * m.table(ids[:, 3:]).mean(dim=1))  # noqa: E731
    return Parts(run, table=nn.Embedding(12, 5), head=nn.Linear(5, CLASSES))


def recurrent():
    lstm = nn.LSTM(6, 5, batch_first=True)
    return Parts(lambda m, x: m.head(m.lstm(x)[0][:, -1]), lstm=lstm, head=nn.Linear(5, CLASSES))


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)), (6,)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, CLASSES)),
        (3, 5, 5),
    ),
    "attention": (attention, (5, 8)),
    "embedding": (tied, None),
    "recurrent": (recurrent, (4, 6)),
}


def data(shape, rows=ROWS):
    generator = torch.Generator().manual_seed(2)
    x = (
        torch.randint(0, 12, (rows, 7), generator=generator)
        if shape is None
        else torch.randn(rows, *shape, generator=generator)
    )
    return TensorDataset(x, torch.randint(0, CLASSES, (rows,), generator=generator), torch.arange(rows))


def user_ids(rows=ROWS, users=20):
    return np.random.default_rng(0).permutation(np.arange(rows) ** 2 // (rows**2 // users))


def one_release(model, rows, ids, **settings):
    """Returns the gradient of one step without noise, and the examples in its batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = PrivacyEngine(seed=1)
    settings = {"noise_multiplier": 0.0, "max_grad_norm": BOUND, **settings}
    _, _, loader = engine.make_private(model, optimizer, DataLoader(rows, batch_size=5), privacy_unit=ids, **settings)
    seen, chunks = [], []
    optimizer.zero_grad()
    reduction = settings.get("loss_reduction", "mean")
    for x, y, index in loader:
        seen += index.tolist()
        chunks.append(index.tolist())
        F.cross_entropy(model(x), y, reduction=reduction).backward()
        optimizer.step()
        if next(model.parameters()).grad is not None:
            break
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    engine.detach(model)
    return gradient, np.array(seen), chunks, engine


def of_user(model, rows, members, how):
    """Returns the gradient of one user, computed from only that user's examples."""
    x, y, _ = rows.tensors
    model.zero_grad()
    F.cross_entropy(model(x[members]), y[members], reduction=how).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.one_in(3, "settings", "how", "name")
@pytest.mark.filterwarnings("ignore:.*NOT PRIVATE")
@pytest.mark.parametrize("settings", [{}, {"physical_batch_size": 4}, {"accumulation_steps": 3}], ids=str)
@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.hazard("O61")
def test_gradient_of_each_user_is_clipped_as_a_whole(name, how, settings):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, rows, ids = make(), data(shape), user_ids()
    gradient, seen, chunks, engine = one_release(model, rows, ids, unit_reduction=how, **settings)
    expected = torch.zeros_like(gradient)
    for user in set(ids[seen].tolist()):
        members = np.flatnonzero(ids == user)
        assert set(members) <= set(seen)  # all examples of a user, or none
        assert len({i for i, chunk in enumerate(chunks) if set(chunk) & set(members)}) == 1
        one = of_user(model, rows, members, how)
        expected += one * min(1.0, BOUND / float(one.norm()))
    users = len(set(ids))
    torch.testing.assert_close(gradient, expected / (users * 15 / ROWS), rtol=1e-4, atol=1e-6)
    assert engine.delta == pytest.approx(users**-1.1)


@pytest.mark.filterwarnings("ignore:.*NOT PRIVATE")
def test_loss_reduction_sum_is_supported_with_privacy_units():
    make, shape = MODELS["linear"]
    torch.manual_seed(0)
    model, rows, ids = make(), data(shape), user_ids()
    gradient, seen, _, _ = one_release(model, rows, ids, loss_reduction="sum", max_grad_norm=1e6)
    expected = sum(of_user(model, rows, np.flatnonzero(ids == u), "mean") for u in set(ids[seen].tolist()))
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*NOT PRIVATE")
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_one_user_moves_the_sum_by_the_bound_at_most(value):
    make, shape = MODELS["linear"]
    ids = user_ids()
    torch.manual_seed(0)
    model, rows = make(), data(shape)
    whole, seen, _, _ = one_release(model, rows, ids)
    user = ids[seen][0]
    other = TensorDataset(*(tensor.clone() for tensor in rows.tensors))
    other.tensors[0][np.flatnonzero(ids == user)[0]] = value
    changed, again, _, _ = one_release(model, other, ids)
    assert (again == seen).all()
    expected_users = len(set(ids)) * 15 / ROWS
    moved = float((whole - changed).norm()) * expected_users
    one = of_user(model, rows, np.flatnonzero(ids == user), "mean")
    own = min(BOUND, float(one.norm()))
    assert moved <= (BOUND + own) * (1 + 1e-5)
    if not math.isfinite(value):  # a user with such an example contributes nothing
        assert moved == pytest.approx(own, rel=1e-4)


def train(engine, model, loader, optimizer, steps):
    for x, y, _ in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "settings",
    [
        {"noise_multiplier": 1.0},
        {"noise_multiplier": 1.0, "noise": BandMF(num_bands=2), "steps": 8},
        {"plan": BandMFConfig(iterations=8, strategy=(1.0, 0.5), sampling_prob=0.5, noise_multiplier=1.0)},
        {"plan": BandMFConfig(
            iterations=8, strategy=(1.0, 0.5), sampling_prob=0.5, noise_multiplier=1.0, num_examples=20
        )},
    ],
    ids=["numbers", "bands", "plan", "public"],
)  # fmt: skip
def test_accounting_uses_the_number_of_users(settings):
    make, shape = MODELS["linear"]
    model, ids = make(), np.repeat(np.arange(20), 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(seed=2)
    _, _, loader = engine.make_private(
        model, optimizer, DataLoader(data(shape), batch_size=5), privacy_unit=ids, target_delta=1e-3, **settings
    )
    train(engine, model, loader, optimizer, 8)
    rate = 0.25
    plain = PrivacyEngine()
    other = make()
    plain.make_private(
        other, torch.optim.SGD(other.parameters(), lr=0.1), DataLoader(range(20), batch_size=5), target_delta=1e-3,
        **settings,
    )  # fmt: skip
    for _ in range(8):
        plain.ledger.charge(inside.event(plain))
    assert engine.epsilon == pytest.approx(plain.epsilon, rel=1e-9)
    assert inside.sampling(engine).num_examples == 20
    assert inside.sampling(engine).sample_rate in (rate, 2 * rate)


def test_the_report_names_the_unit():
    class Table(TensorDataset):
        def __getitem__(self, key):
            return np.repeat(np.arange(20), 3) if key == "patient" else super().__getitem__(key)

    make, shape = MODELS["linear"]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(seed=2)
    rows = Table(*data(shape).tensors)
    _, _, loader = engine.make_private(
        model, optimizer, DataLoader(rows, batch_size=5), noise_multiplier=1.0, privacy_unit="patient"
    )
    train(engine, model, loader, optimizer, 2)
    said = str(engine.report())
    assert "for each patient" in said
    assert "one patient" in said
    assert "training example" not in said


def test_a_model_that_mixes_samples_is_rejected():
    mixing = Parts(lambda m, x: m.layer(x - x.mean(dim=0)), layer=nn.Linear(6, CLASSES))
    with pytest.raises(UnsupportedLayerError, match=r"rows|batch"):
        one_release(mixing, data((6,)), user_ids(), noise_multiplier=1.0)


BAD = [
    ({"privacy_unit": np.zeros(59)}, ValueError, r"shape \(59,\) for 60 examples"),
    ({"privacy_unit": np.zeros((60, 2))}, ValueError, r"shape \(60, 2\)"),
    ({"privacy_unit": np.array([math.nan] + [1.0] * 59)}, ValueError, "1 examples have no id, the first is example 0"),
    ({"privacy_unit": [None] + ["a"] * 59}, ValueError, "1 examples have no id"),
    ({"privacy_unit": "user"}, ValueError, "no such column"),
    ({"privacy_unit": np.zeros(60), "grad_sample_mode": "hooks"}, UnsupportedLayerError, "grad_sample_mode='auto'"),
    ({"privacy_unit": np.zeros(60), "sampling": "shuffle"}, InvalidBudgetError, "sampling='shuffle'"),
    ({"privacy_unit": np.zeros(60), "unit_reduction": "max"}, ValueError, "unit_reduction='max'"),
]


@pytest.mark.parametrize("settings, error, message", BAD, ids=[message for *_, message in BAD])
def test_invalid_privacy_units_are_rejected(settings, error, message):
    model = nn.Linear(6, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data((6,)), batch_size=5)
    with pytest.raises(error, match=message):
        PrivacyEngine().make_private(
            model, optimizer, loader, **{"noise_multiplier": 1.0, "target_delta": 1e-3, **settings}
        )
    assert not model._forward_hooks


# Ids, order and chunks


def test_ids_of_any_kind_are_distinguished():
    assert unit_numbers(np.array([5, "a", 5, 2.5, "a"], dtype=object), range(5)).tolist() == [0, 1, 0, 2, 1]
    assert unit_numbers(["x", "y", "x"], range(3)).tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="3 examples have no id, the first is example 1"):
        unit_numbers(np.array([5, math.nan, 1, math.nan, 5, math.nan], dtype=object), range(6))


def sorted_by_target(examples):
    return torch.utils.data.default_collate(sorted(examples, key=lambda one: float(one[0].sum())))


def centred(examples):
    x, y, index = torch.utils.data.default_collate(examples)
    return x - x.mean(dim=0) * (y == y[0]).float().mean() * torch.arange(len(x)).view(-1, 1), y, index


@pytest.mark.parametrize("collate", [sorted_by_target, centred])
def test_a_collate_that_reorders_is_rejected(collate):
    model = nn.Linear(6, CLASSES)
    loader = DataLoader(data((6,)), batch_size=5, collate_fn=collate)
    with pytest.raises(SamplingError, match="reorders"):
        PrivacyEngine().make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader, noise_multiplier=1.0, privacy_unit=user_ids()
        )


@pytest.mark.parametrize("settings", [{"physical_batch_size": 4}, {"accumulation_steps": 3}, {}], ids=str)
def test_batch_without_users_is_supported(settings):
    model = nn.Linear(6, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(seed=0)
    _, _, loader = engine.make_private(
        model, optimizer, DataLoader(data((6,)), batch_size=1), noise_multiplier=1.0, privacy_unit=user_ids(),
        target_delta=1e-3, **settings,
    )  # fmt: skip
    sizes = []
    for x, y, _ in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if "accumulation_steps" not in settings:
            sizes.append(inside.samples_now(engine))
            optimizer.step()
    if sizes:
        assert 0 in sizes


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_chunks_do_not_split_users(size):
    ids = unit_numbers(user_ids(), range(ROWS))
    users = int(ids.max()) + 1
    strategy = UnitDraws(PoissonDraws(users, 0.5, 4, 10.0), ids)
    for step in range(30):
        drawn = strategy.draw(step, lambda count, step, block: np.random.default_rng((step, block)).integers(
            0, 2**64, count, dtype=np.uint64))  # fmt: skip
        chunks = strategy.chunks(drawn, size=size, parts=1)
        assert np.concatenate(chunks).tolist() == drawn.tolist()
        for chunk in chunks:
            whose = ids[chunk]
            assert len(chunk) <= size or len(set(whose)) == 1
            assert strategy.chunk_units(chunk).tolist() == [sorted(set(whose)).index(one) for one in whose]
        assert sum(len(set(ids[chunk])) for chunk in chunks) == len(set(ids[drawn]))
        parts = strategy.chunks(drawn, size=None, parts=size)
        assert len(parts) == size
        assert np.concatenate(parts).tolist() == drawn.tolist()
        assert sum(len(set(ids[part])) for part in parts) == len(set(ids[drawn]))
