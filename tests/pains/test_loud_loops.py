"""Loud pains in the loop: empty batches, accumulation, several losses, models made private again and again, copies."""

import copy
import io
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from pains.doors import (
    ALL_DOORS,
    COMPAT_DOORS,
    DEFAULT_DOORS,
    LAYER_DOORS,
    SLACK,
    assert_equal,
    fixed_loader,
    opacus,
    true_sum,
)
from pains.wide import through_some
from reference import clipped_sum, flat_norms, per_sample_gradients
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpengine import PrivacyEngine, checkpoint
from dpengine.accounting import epsilon
from dpengine.batch_selection import pad_to_multiple_of
from dpengine.errors import UnknownParameterError
from dpengine.functional import clipped_grad
from dpengine.public_pass import public

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012:dpengine.PrivacyWarning")

FEATURES, CLASSES, ROWS = 4, 3, 6
CRITERION = nn.CrossEntropyLoss()


def batch(rows=ROWS, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, FEATURES, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def opened(door, model=None, rows=ROWS, **options):
    return door.open(mlp() if model is None else model, fixed_loader(rows), criterion=CRITERION, **options)


# 39


class Texts(Dataset):
    """What a text collator gives: numbers of several types, a text and a number of Python's."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        x = torch.arange(FEATURES, dtype=torch.float64) + i
        return {"x": x, "half": x.to(torch.bfloat16), "y": i % CLASSES, "text": f"row {i}", "pair": (i, x > 2)}


def assert_has_the_structure(found, rows):
    """As the batch of a plain loader, but for the number of rows."""
    expected = next(iter(DataLoader(Texts(), batch_size=4)))
    assert type(found) is type(expected) and list(found) == list(expected)
    assert isinstance(found["text"], list) and len(found["text"]) == rows
    assert type(found["pair"]) is type(expected["pair"])
    for one, other in [
        *((found[k], expected[k]) for k in ("x", "half", "y")),
        *zip(found["pair"], expected["pair"], strict=True),
    ]:
        assert one.dtype is other.dtype and one.shape == (rows, *other.shape[1:])


@pytest.mark.parametrize("place", ["first", "middle", "only"])
def test_rank_39_empty_batches_have_the_structure_of_others_wherever_they_come(place):
    for seed in range(50):  # until the draw has an empty batch there
        model = mlp().double()
        settings = {
            "noise_multiplier": 1.0,
            **(
                {"sample_rate": 1e-9, "expected_batch_size": 1, "steps": 3, "target_delta": 1e-2}
                if place == "only"
                else {}
            ),
        }
        engine = PrivacyEngine(seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if place == "only":
            settings.pop("steps")
        _, _, loader = engine.make_private(model, optimizer, DataLoader(Texts(), batch_size=1), **settings)
        batches = list(itertools.islice(loader, 8))
        sizes = [len(one["text"]) for one in batches]
        wanted = {"first": sizes[0] == 0, "middle": 0 in sizes[1:-1] and sizes[0] > 0, "only": not any(sizes)}
        if wanted[place]:
            break
    assert wanted[place]
    for found, rows in zip(batches, sizes, strict=True):
        assert_has_the_structure(found, rows)


@pytest.mark.parametrize("skips", [True, False], ids=["without a backward pass", "with one"])
@through_some(LAYER_DOORS)
def test_rank_39_an_empty_batch_is_a_step_with_noise(door, skips):
    model = mlp()
    data = TensorDataset(torch.arange(ROWS))
    private = door.open(model, DataLoader(data, batch_size=1), criterion=CRITERION, noise_multiplier=1.0, poisson=True)
    inputs, targets = batch()
    steps, empty = 0, 0
    while not empty or steps < 4:
        for (rows,) in private.loader:
            before = copy.deepcopy(model.state_dict())
            private.optimizer.zero_grad()
            if len(rows) or not skips:
                private.backward(inputs[rows], targets[rows])
            private.optimizer.step()
            steps, empty = steps + 1, empty + (len(rows) == 0)
            assert all(not torch.equal(before[name], value) for name, value in model.state_dict().items())
            assert all(value.isfinite().all() for value in model.state_dict().values())
    counted = sum(one[-1] for one in private.engine.accountant.history) if door.compat else private.engine.ledger.steps
    assert counted == steps


@pytest.mark.parametrize("place", ["first", "middle", "only"])
def test_rank_39_empty_batches_of_compat_have_the_structure_of_others(place):
    compat = opacus("data_loader")
    rate = 1e-9 if place == "only" else 1 / 8
    for _ in range(50):
        loader = compat.DPDataLoader(Texts(), sample_rate=rate)
        batches = list(itertools.islice(loader, 8))
        sizes = [len(one["text"]) for one in batches]
        wanted = {"first": sizes[0] == 0, "middle": 0 in sizes[1:-1] and sizes[0] > 0, "only": not any(sizes)}
        if wanted[place]:
            break
    assert wanted[place]
    for found, rows in zip(batches, sizes, strict=True):
        assert_has_the_structure(found, rows)


# 40


def forgets_zero_grad(private, rows):
    private.step(*rows)
    for _ in private.loader:
        private.backward(*rows)
        private.optimizer.step()


def has_a_second_loss(private, rows):
    private.optimizer.zero_grad()
    private.backward(*rows)
    private.backward(*rows)
    private.optimizer.step()


@through_some(LAYER_DOORS)
def test_rank_40_what_looks_like_accumulation_has_a_message_for_each_cause(door):
    said = []
    for cause, expected in ((forgets_zero_grad, "zero_grad"), (has_a_second_loss, "backward")):
        private = opened(door, poisson=True)
        for _ in private.loader:
            with pytest.raises((ValueError, RuntimeError), match=expected) as seen:
                cause(private, batch())
            break
        said.append(str(seen.value))
    assert said[0] != said[1]


@through_some(ALL_DOORS, always={"default-auto", "compat-hooks"})
def test_rank_40_an_optimizer_over_a_part_of_the_model_takes_two_steps(door):
    model, rows = mlp(), batch()
    some = list(model[2].parameters())
    private = opened(door, model, make_optimizer=lambda _: torch.optim.SGD(some, lr=0.1), poisson=True)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        for _ in private.loader:
            private.step(*rows)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert changed == {"2.weight", "2.bias"}


# 47


def traces(model):
    """All that could be left on a model and its parameters."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]
    own = [(type(m), sorted(vars(m))) for m in model.modules()]
    return hooks, own, [(type(p), sorted(vars(p)), bool(p._backward_hooks)) for p in model.parameters()]


def test_rank_47_attach_and_detach_ten_times_leaves_nothing_and_the_budget_adds_up():
    model, rows, found = mlp(), batch(), []
    before, never = traces(model), copy.deepcopy(model)
    engine = PrivacyEngine(seed=0)
    for _ in range(10):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = fixed_loader(ROWS)
        _, optimizer, private = engine.make_private(model, optimizer, loader, noise_multiplier=0.0)
        for _ in private:
            optimizer.zero_grad()
            CRITERION(model(rows[0]), rows[1]).backward()
            optimizer.step()
        found.append({name: p.grad.double() * ROWS for name, p in model.named_parameters()})
        engine.detach(model)
        model.zero_grad()
        assert traces(model) == before
    for one in found:
        assert_equal(one, true_sum(never, CRITERION, rows))
    assert engine.ledger.steps == 10


def test_rank_47_a_second_engine_composes_what_the_first_spent():
    first = PrivacyEngine(seed=0)
    second = PrivacyEngine(seed=1)
    for engine in (first, second):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, optimizer, loader = engine.make_private(
            model, optimizer, DataLoader(TensorDataset(*batch(20)), batch_size=5), noise_multiplier=2.0
        )
        for x, y in loader:
            optimizer.zero_grad()
            CRITERION(model(x), y).backward()
            optimizer.step()
        engine.detach(model)
    second.load_state_dict(first.state_dict())
    assert second.ledger.steps == 8
    both = epsilon(noise_multiplier=2.0, sample_rate=0.25, steps=8, delta=1e-3)
    assert second.get_epsilon(1e-3) == pytest.approx(both, rel=1e-3)


@pytest.mark.parametrize("functorch", [False, True])
def test_rank_47_wrapping_ten_times_in_compat_leaves_nothing(functorch):
    model, (x, y) = mlp(), batch()
    before = traces(model)
    truth = {
        name: torch.stack([row[name] for row in per_sample_gradients(model, CRITERION, (x,), y)])
        for name, _ in model.named_parameters()
    }
    for _ in range(10):
        wrapper = opacus().GradSampleModule(model, force_functorch=functorch)
        CRITERION(wrapper(x), y).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad_sample.double(), truth[name], rtol=1e-4, atol=1e-5)
        assert wrapper.to_standard_module() is model
        model.zero_grad()
        assert traces(model) == before
        assert not any(hasattr(p, "grad_sample") for p in model.parameters())


def test_rank_47_a_wrapper_is_made_private_again_and_again_in_compat_and_engines_compose():
    model, (x, y) = mlp(), batch(20)
    wrapper, accountants = model, []
    for _ in range(3):  # rounds of a federated loop, each with an engine of its own
        engine = opacus().PrivacyEngine(accountant="rdp")
        wrapper, optimizer, loader = engine.make_private(
            module=wrapper,
            optimizer=torch.optim.SGD(wrapper.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=5),
            noise_multiplier=2.0,
            max_grad_norm=1.0,
        )
        if accountants:
            engine.accountant.load_state_dict(accountants[-1])
        for inputs, targets in loader:
            optimizer.zero_grad()
            CRITERION(wrapper(inputs), targets).backward()
            optimizer.step()
        accountants.append(engine.accountant.state_dict())
    assert wrapper._module is model
    ((sigma, rate, steps),) = engine.accountant.history
    assert (sigma, rate, steps) == (2.0, pytest.approx(0.25), 12)


# 48


WRAPPED = [door for door in COMPAT_DOORS if not door.id.endswith("unwrapped")]


@through_some(WRAPPED)
def test_rank_48_both_spellings_of_keys_load(door):
    private, plain = opened(door), mlp()
    bare = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    for state in (bare, {f"_module.{name}": value + 1 for name, value in bare.items()}):
        private.module.load_state_dict(state, strict=True)
        assert list(private.module.state_dict()) == [f"_module.{name}" for name in bare]
        for name, value in private.bare.state_dict().items():
            assert torch.equal(value, state.get(name, state.get(f"_module.{name}")))
    with pytest.raises(RuntimeError, match="Missing key"):
        private.module.load_state_dict({"_module.0.weight": bare["0.weight"]}, strict=True)


@through_some([door for door in ALL_DOORS if door not in WRAPPED])
def test_rank_48_keys_are_those_of_the_users_model(door):
    private, plain = opened(door), mlp()
    for name, value in plain.state_dict().items():
        plain.state_dict()[name].copy_(torch.randn_like(value))
    private.model.load_state_dict(plain.state_dict(), strict=True)
    assert list(private.model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(private.model.state_dict(), strict=True)
    torch.testing.assert_close(private.model(batch()[0]), plain(batch()[0]))


class Own(nn.Module):
    """A layer that goes through the functional fallback."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, x):
        return torch.sin(x @ self.weight)


def through_torch_save(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "save": through_torch_save}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@through_some(ALL_DOORS, always={"default-auto", "compat-hooks"})
def test_rank_48_a_copy_of_a_private_model_runs_forward_and_backward(door, copied):
    private, (x, y) = opened(door, nn.Sequential(mlp(), Own())), batch()
    for _ in private.loader:
        private.step(x, y)
    other = copied(private.model)
    other.zero_grad()
    private.optimizer.zero_grad()
    torch.testing.assert_close(other(x), private.model(x))
    F.cross_entropy(other(x), y).backward()
    prefix = "_module." if door.compat and not door.id.endswith("unwrapped") else ""
    truth = per_sample_gradients(private.bare, CRITERION, (x,), y)
    if prefix and door.mode == "ghost":
        torch.testing.assert_close(other.per_sample_gradient_norms.double(), flat_norms(truth), rtol=1e-4, atol=1e-6)
    for name, p in other.named_parameters():
        rows = torch.stack([row[name.removeprefix(prefix)] for row in truth])
        if prefix and door.mode not in ("ghost", "no_op"):
            torch.testing.assert_close(p.grad_sample.double(), rows, rtol=1e-4, atol=1e-5)
        elif not prefix or door.mode == "no_op":  # a copy without an engine is an ordinary model
            torch.testing.assert_close(p.grad.double(), rows.mean(dim=0), rtol=1e-4, atol=1e-5)
    for _ in private.loader:  # and what was copied goes on
        private.step(x, y)
    assert_equal(private.sum(), clipped_sum(truth, 1 - SLACK))


@pytest.mark.parametrize("place", ["before the end of an epoch", pytest.param("after it", marks=pytest.mark.slow)])
def test_rank_48_a_run_gone_on_with_equals_one_that_never_stopped_noise_included(tmp_path, place):
    stop = 3 if place.startswith("before") else 8

    def run():
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine = PrivacyEngine(seed=7)
        data = DataLoader(TensorDataset(*batch(40)), batch_size=5)
        return engine, *engine.make_private(model, optimizer, data, noise_multiplier=1.0)

    def train(engine, model, optimizer, loader, steps):
        taken = 0
        while taken < steps:
            for x, y in itertools.islice(loader, steps - taken):
                optimizer.zero_grad()
                CRITERION(model(x), y).backward()
                optimizer.step()
                taken += 1

    whole, first, second = run(), run(), run()
    train(*whole, stop)
    train(*first, stop)
    for one in (whole, first):
        checkpoint.save(tmp_path / str(one is first), one[0])
    checkpoint.load(tmp_path / "True", second[0])
    train(*whole, 6)
    train(*second, 6)
    assert second[0].ledger.steps == whole[0].ledger.steps == stop + 6
    for name, value in whole[1].state_dict().items():
        assert torch.equal(value, second[1].state_dict()[name])


@through_some(COMPAT_DOORS, always={"compat-hooks"})
def test_rank_48_a_checkpoint_of_compat_is_gone_on_with(door, tmp_path):
    first, second = opened(door, noise_multiplier=1.0), opened(door, noise_multiplier=1.0)
    rows = batch()
    for _ in first.loader:
        first.step(*rows)
    module = first.module if door.id.endswith("wrapped") is False else first.bare
    first.engine.save_checkpoint(
        path=tmp_path / "state.pt", module=module, optimizer=first.optimizer, checkpoint_dict={"epoch": 3}
    )
    other = second.module if module is first.module else second.bare
    said = second.engine.load_checkpoint(path=tmp_path / "state.pt", module=other, optimizer=second.optimizer)
    assert said["epoch"] == 3
    assert second.engine.accountant.history == first.engine.accountant.history
    for name, value in first.bare.state_dict().items():
        assert torch.equal(value, second.bare.state_dict()[name])


# 56


@through_some(LAYER_DOORS)
def test_rank_56_contributions_of_one_batch_add_before_they_are_clipped(door):
    model, (x, y) = mlp(), batch()
    both = lambda m, r: CRITERION(m(x[r]), y[r]) + CRITERION(m(2 * x[r]), y[r])  # noqa: E731
    rows = []
    for i in range(ROWS):
        one = copy.deepcopy(model)
        both(one, slice(i, i + 1)).backward()
        rows.append({name: p.grad.double() for name, p in one.named_parameters()})
    truth = clipped_sum(rows, 1 - SLACK)
    private = opened(door, model)
    for _ in private.loader:
        private.optimizer.zero_grad()
        (private.criterion(private.model(x), y) + private.criterion(private.model(2 * x), y)).backward()
        private.optimizer.step()
    assert_equal(private.sum(), truth)


@through_some(LAYER_DOORS, always={"default-auto", "compat-hooks"})
def test_rank_56_two_models_with_two_optimizers_have_two_budgets(door):
    """A generator that is trained through a private discriminator, and is private itself, at another price."""
    x, y = batch()
    judge, other = opened(door, noise_multiplier=1.0), opened(door, noise_multiplier=4.0)
    for _, _ in zip(judge.loader, other.loader, strict=True):
        judge.step(x, y)
        other.step(x, y)
    for _ in judge.loader:
        judge.step(x, y)
    judged, made = judge.engine.get_epsilon(1e-3), other.engine.get_epsilon(1e-3)
    assert judged > made > 0
    once = opened(door, noise_multiplier=4.0)
    for _ in once.loader:
        once.step(x, y)
    assert made == pytest.approx(once.engine.get_epsilon(1e-3), rel=1e-9)


@through_some([d for d in COMPAT_DOORS if not d.writes and d.mode != "ew"])
def test_rank_56_the_memory_manager_takes_batches_of_none(door):
    private = door.open(
        mlp(),
        DataLoader(TensorDataset(*batch(8)), batch_size=1),
        criterion=CRITERION,
        noise_multiplier=1.0,
        poisson=True,
    )
    manager = opacus("utils.batch_memory_manager").BatchMemoryManager
    sizes, steps = [], 0
    while 0 not in sizes:
        with manager(data_loader=private.loader, max_physical_batch_size=1, optimizer=private.optimizer) as loader:
            for x, y in loader:
                private.step(x, y)
                sizes.append(len(x))
        steps += 8
    assert max(sizes) == 1
    assert sum(count for *_, count in private.engine.accountant.history) == steps


# 57


def test_rank_57_batches_padded_to_one_size_give_the_sum_of_the_rows_that_were_drawn():
    x, y = batch(40)
    weight = torch.randn(FEATURES, CLASSES)
    gradient = clipped_grad(
        lambda w, one, target: F.cross_entropy(one @ w, target), l2_clip_norm=0.5, batch_argnums=(1, 2)
    )
    model = mlp()
    engine = PrivacyEngine(seed=3)
    sampling = engine.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(TensorDataset(torch.arange(40)), batch_size=5),
        noise_multiplier=1.0,
    )[2]
    sizes = set()
    for (drawn,) in sampling:
        sizes.add(len(drawn))
        padded = torch.from_numpy(pad_to_multiple_of(drawn.numpy(), 16)) if len(drawn) else torch.full((16,), -1)
        assert len(padded) == 16  # what the code with a fixed size sees
        found = gradient(weight, x[padded], y[padded], is_padding_example=padded == -1)
        expected = gradient(weight, x[drawn], y[drawn]) if len(drawn) else torch.zeros_like(weight)
        torch.testing.assert_close(found, expected)
    assert len(sizes) > 2


def test_rank_57_a_reshape_to_a_fixed_size_is_named_when_it_breaks():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES)

        def forward(self, x):
            return self.layer(x.reshape(5, 2, FEATURES // 2).flatten(1))

    model = Fixed()
    _, optimizer, loader = PrivacyEngine(seed=3).make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(TensorDataset(*batch(40)), batch_size=5),
        noise_multiplier=1.0,
    )
    with pytest.raises(RuntimeError, match="shape"):
        for x, y in loader:
            optimizer.zero_grad()
            CRITERION(model(x), y).backward()
            optimizer.step()


# 61


def unit_gradient(model, x, y, reduction):
    """What its rows make together, by ordinary autograd."""
    alone = copy.deepcopy(model).double()
    F.cross_entropy(alone(x.double()), y, reduction=reduction).backward()
    return {name: p.grad for name, p in alone.named_parameters()}


def test_rank_61_a_unit_with_a_thousand_rows_weighs_as_one():
    x, y = batch(1001)
    model, unit = mlp(), torch.tensor([0] * 1000 + [1])
    for reduction in ("mean", "sum"):
        private = copy.deepcopy(model)
        optimizer = torch.optim.SGD(private.parameters(), lr=1.0)
        _, optimizer, loader = PrivacyEngine(seed=0).make_private(
            private,
            optimizer,
            DataLoader(TensorDataset(x, y), batch_size=1001),
            noise_multiplier=0.0,
            max_grad_norm=5.0,
            privacy_unit=unit.numpy(),
            unit_reduction=reduction,
        )
        joined, other = (
            unit_gradient(model, x[:1000], y[:1000], reduction),
            unit_gradient(model, x[1000:], y[1000:], reduction),
        )
        truth = clipped_sum([joined, other], (1 - SLACK) * 5.0)
        for inputs, targets in loader:
            assert len(inputs) == 1001
            optimizer.zero_grad()
            CRITERION(private(inputs), targets).backward()
            optimizer.step()
            assert_equal({name: 2 * p.grad.double() for name, p in private.named_parameters()}, truth)
            break


# 62


def plain_gradients(model, rows):
    plain = copy.deepcopy(model)
    plain.zero_grad()
    CRITERION(plain(rows[0]), rows[1]).backward()
    return {name: p.grad.double() for name, p in plain.named_parameters()}


@pytest.mark.parametrize("when", ["before the pass", "between forward and backward", "before the step", "after it"])
@through_some(DEFAULT_DOORS)
def test_rank_62_a_public_pass_gives_an_ordinary_gradient_costs_nothing_and_stays_apart(door, when):
    model, rows, others = mlp(), batch(), batch(9, seed=8)
    private = opened(door, model, max_grad_norm=0.1)
    public_gradients, truth = plain_gradients(model, others), true_sum(model, CRITERION, rows, 0.1)
    found = []

    def look():
        with public(private.engine) as gradients:
            for part in (slice(0, 4), slice(4, 9)):  # sums over passes, as p.grad does
                (CRITERION(model(others[0][part]), others[1][part]) * len(others[1][part]) / 9).backward()
        found.append({name: g.double() for name, g in gradients.items()})

    for _ in private.loader:
        private.optimizer.zero_grad()
        if when.startswith("before the pass"):
            look()
        loss = CRITERION(model(rows[0]), rows[1])
        if when.startswith("between"):
            look()
        loss.backward()
        if when == "before the step":
            look()
        private.optimizer.step()
        if when == "after it":
            moved = plain_gradients(model, others)
            look()
            public_gradients = moved
    assert_equal(found[0], public_gradients)
    assert_equal(private.sum(), truth)
    assert private.engine.ledger.steps == 1


def test_rank_62_a_public_pass_needs_a_private_model():
    with pytest.raises(UnknownParameterError, match="make_private"), public(PrivacyEngine()):
        pass


@through_some([door for door in COMPAT_DOORS if door.mode in ("hooks", "functorch", "ghost")])
def test_rank_62_the_hooks_of_compat_can_be_switched_off_and_on(door):
    model, rows, others = mlp(), batch(), batch(9, seed=8)
    private, truth = opened(door, model, max_grad_norm=0.1), true_sum(model, CRITERION, rows, 0.1)
    private.module.disable_hooks()
    assert not private.module.hooks_enabled
    CRITERION(private.model(others[0]), others[1]).backward()
    assert_equal({name: p.grad.double() for name, p in model.named_parameters()}, plain_gradients(model, others))
    private.module.enable_hooks()
    for _ in private.loader:
        private.step(*rows)
    assert_equal(private.sum(), truth)


# 63


@through_some(ALL_DOORS, always={"default-auto", "compat-hooks", "compat-ghost", "compat-no_op"})
def test_rank_63_without_noise_and_without_a_threshold_it_is_ordinary_training(door):
    plain, (x, y) = mlp(), batch(24)
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    private = opened(
        door,
        rows=24,
        max_grad_norm=1e9,
        poisson=False,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
    )
    for _ in range(4):
        for (rows,) in private.loader:
            by_hand.zero_grad()
            CRITERION(plain(x[rows]), y[rows]).backward()
            by_hand.step()
            private.step(x[rows], y[rows])
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(private.bare.state_dict()[name], value, rtol=1e-4, atol=1e-6)
