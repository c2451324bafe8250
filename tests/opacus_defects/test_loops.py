"""Defects of Opacus in the loop: empty batches, accumulation, several losses, privacy units, public gradients."""

import copy
import itertools

import inside
import pytest
import torch
import torch.nn.functional as F
from opacus_defects.apis import (
    ALL_APIS,
    COMPAT_APIS,
    DEFAULT_APIS,
    LAYER_APIS,
    SLACK,
    assert_equal,
    opacus,
    true_sum,
    with_few_apis,
)
from opacus_defects.small import CLASSES, CRITERION, FEATURES, ROWS, mlp, open_run
from opacus_defects.small import normal_batch as batch
from reference import clipped_sum
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpengine import PrivacyEngine
from dpengine.engine.public_gradients import public
from dpengine.errors import UnknownParameterError
from dpengine.functional import clipped_grad
from dpengine.sampling import pad_to_multiple_of

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012:dpengine.PrivacyWarning")


class Texts(Dataset):
    """Data set of dicts with tensors of several dtypes, a string, an int and a tuple."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        x = torch.arange(FEATURES, dtype=torch.float64) + i
        return {"x": x, "half": x.to(torch.bfloat16), "y": i % CLASSES, "text": f"row {i}", "pair": (i, x > 2)}


def assert_has_the_structure(found, rows):
    """Compares with the batch of an ordinary loader, except for the batch size."""
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
@pytest.mark.hazard("O39")
def test_empty_batches_have_the_structure_of_other_batches_at_any_position(place):
    for seed in range(50):  # until an empty batch is at this position
        model = mlp().double()
        rare = {"sample_rate": 1e-9, "expected_batch_size": 1, "target_delta": 1e-2}
        settings = {"noise_multiplier": 1.0} | (rare if place == "only" else {})
        engine = PrivacyEngine(seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, _, loader = engine.make_private(model, optimizer, DataLoader(Texts(), batch_size=1), **settings)
        batches, sizes = [], []
        for one in itertools.islice(loader, 8):
            batches.append(one)
            sizes.append(inside.samples_now(engine))
        empty_at = {"first": sizes[0] == 0, "middle": 0 in sizes[1:-1] and sizes[0] > 0, "only": not any(sizes)}
        if empty_at[place]:
            break
    assert empty_at[place]
    for found, rows in zip(batches, sizes, strict=True):
        assert_has_the_structure(found, max(rows, 1))


@pytest.mark.parametrize("skip_backward", [True, False], ids=["no-backward-pass", "backward-pass"])
@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O39")
def test_an_empty_batch_is_a_step_with_noise(api, skip_backward):
    model = mlp()
    data = TensorDataset(torch.arange(ROWS))
    private = api.open(model, DataLoader(data, batch_size=1), criterion=CRITERION, noise_multiplier=1.0, poisson=True)
    inputs, targets = batch()
    steps, empty = 0, 0
    while not empty or steps < 4:
        for (rows,) in private.loader:
            before = copy.deepcopy(model.state_dict())
            size = len(rows) if api.compat else inside.samples_now(private.engine)
            private.optimizer.zero_grad()
            if size or not skip_backward:
                private.backward(inputs[rows], targets[rows])
            private.optimizer.step()
            steps, empty = steps + 1, empty + (size == 0)
            assert all(not torch.equal(before[name], value) for name, value in model.state_dict().items())
            assert all(value.isfinite().all() for value in model.state_dict().values())
    counted = sum(one[-1] for one in private.engine.accountant.history) if api.compat else private.engine.ledger.steps
    assert counted == steps


@pytest.mark.parametrize("place", ["first", "middle", "only"])
@pytest.mark.hazard("O39")
def test_empty_batches_of_compat_have_the_structure_of_other_batches(place):
    compat = opacus("data_loader")
    rate = 1e-9 if place == "only" else 1 / 8
    for _ in range(50):
        loader = compat.DPDataLoader(Texts(), sample_rate=rate)
        batches = list(itertools.islice(loader, 8))
        sizes = [len(one["text"]) for one in batches]
        empty_at = {"first": sizes[0] == 0, "middle": 0 in sizes[1:-1] and sizes[0] > 0, "only": not any(sizes)}
        if empty_at[place]:
            break
    assert empty_at[place]
    for found, rows in zip(batches, sizes, strict=True):
        assert_has_the_structure(found, rows)


def without_zero_grad(private, rows):
    private.step(*rows)
    for _ in private.loader:
        private.backward(*rows)
        private.optimizer.step()


def with_two_backward_passes(private, rows):
    private.optimizer.zero_grad()
    private.backward(*rows)
    private.backward(*rows)
    private.optimizer.step()


@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O40")
def test_each_cause_of_apparent_accumulation_has_a_message(api):
    messages = []
    for cause, expected in ((without_zero_grad, "zero_grad"), (with_two_backward_passes, "backward")):
        private = open_run(api, poisson=True)
        for _ in private.loader:
            with pytest.raises((ValueError, RuntimeError), match=expected) as seen:
                cause(private, batch())
            break
        messages.append(str(seen.value))
    assert messages[0] != messages[1]


@with_few_apis(ALL_APIS, always={"default-auto", "compat-hooks"})
@pytest.mark.hazard("O40")
def test_an_optimizer_over_some_parameters_can_step_twice(api):
    model, rows = mlp(), batch()
    some = list(model[2].parameters())
    private = open_run(api, model, make_optimizer=lambda _: torch.optim.SGD(some, lr=0.1), poisson=True)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        for _ in private.loader:
            private.step(*rows)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert changed == {"2.weight", "2.bias"}


@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O56", "C6")
def test_gradients_of_two_losses_on_one_batch_are_added_before_clipping(api):
    model, (x, y) = mlp(), batch()
    both = lambda m, r: CRITERION(m(x[r]), y[r]) + CRITERION(m(2 * x[r]), y[r])  # noqa: E731
    rows = []
    for i in range(ROWS):
        one = copy.deepcopy(model)
        both(one, slice(i, i + 1)).backward()
        rows.append({name: p.grad.double() for name, p in one.named_parameters()})
    truth = clipped_sum(rows, 1 - SLACK)
    private = open_run(api, model)
    for _ in private.loader:
        private.optimizer.zero_grad()
        (private.criterion(private.model(x), y) + private.criterion(private.model(2 * x), y)).backward()
        private.optimizer.step()
    assert_equal(private.sum(), truth)


@with_few_apis(LAYER_APIS, always={"default-auto", "compat-hooks"})
@pytest.mark.hazard("O56")
def test_two_models_with_two_optimizers_have_two_budgets(api):
    """Two private models with different noise multipliers, as a generator and a discriminator."""
    x, y = batch()
    discriminator, generator = open_run(api, noise_multiplier=1.0), open_run(api, noise_multiplier=4.0)
    for _, _ in zip(discriminator.loader, generator.loader, strict=True):
        discriminator.step(x, y)
        generator.step(x, y)
    for _ in discriminator.loader:
        discriminator.step(x, y)
    larger, smaller = discriminator.engine.get_epsilon(1e-3), generator.engine.get_epsilon(1e-3)
    assert larger > smaller > 0
    reference = open_run(api, noise_multiplier=4.0)
    for _ in reference.loader:
        reference.step(x, y)
    assert smaller == pytest.approx(reference.engine.get_epsilon(1e-3), rel=1e-9)


@with_few_apis([d for d in COMPAT_APIS if not d.writes and d.mode != "ew"])
@pytest.mark.hazard("O56")
def test_the_memory_manager_accepts_empty_batches(api):
    private = api.open(
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


@pytest.mark.hazard("O57")
def test_batches_padded_to_one_size_give_the_sum_of_the_drawn_examples():
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


@pytest.mark.hazard("O57")
def test_a_reshape_to_a_fixed_size_raises():
    class FixedSizeModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES)

        def forward(self, x):
            return self.layer(x.reshape(5, 2, FEATURES // 2).flatten(1))

    model = FixedSizeModel()
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


def plain_gradients(model, rows):
    plain = copy.deepcopy(model)
    plain.zero_grad()
    CRITERION(plain(rows[0]), rows[1]).backward()
    return {name: p.grad.double() for name, p in plain.named_parameters()}


@pytest.mark.parametrize(
    "when", ["before the pass", "between forward and backward", "before the step", "after the step"]
)
@with_few_apis(DEFAULT_APIS)
@pytest.mark.hazard("O62")
def test_a_public_backward_pass_gives_ordinary_gradients_and_is_not_charged(api, when):
    model, rows, others = mlp(), batch(), batch(9, seed=8)
    private = open_run(api, model, max_grad_norm=0.1)
    public_gradients, truth = plain_gradients(model, others), true_sum(model, CRITERION, rows, 0.1)
    found = []

    def run_public_pass():
        with public(private.engine) as gradients:
            for part in (slice(0, 4), slice(4, 9)):  # adds up over passes, as p.grad does
                (CRITERION(model(others[0][part]), others[1][part]) * len(others[1][part]) / 9).backward()
        found.append({name: g.double() for name, g in gradients.items()})

    for _ in private.loader:
        private.optimizer.zero_grad()
        if when.startswith("before the pass"):
            run_public_pass()
        loss = CRITERION(model(rows[0]), rows[1])
        if when.startswith("between"):
            run_public_pass()
        loss.backward()
        if when == "before the step":
            run_public_pass()
        private.optimizer.step()
        if when == "after the step":
            moved = plain_gradients(model, others)
            run_public_pass()
            public_gradients = moved
    assert_equal(found[0], public_gradients)
    assert_equal(private.sum(), truth)
    assert private.engine.ledger.steps == 1


@pytest.mark.hazard("O62")
def test_public_gradients_require_a_private_model():
    with pytest.raises(UnknownParameterError, match="make_private"), public(PrivacyEngine()):
        pass


@with_few_apis([api for api in COMPAT_APIS if api.mode in ("hooks", "functorch", "ghost")])
@pytest.mark.hazard("O62")
def test_the_hooks_of_compat_can_be_switched_off_and_on(api):
    model, rows, others = mlp(), batch(), batch(9, seed=8)
    private, truth = open_run(api, model, max_grad_norm=0.1), true_sum(model, CRITERION, rows, 0.1)
    private.module.disable_hooks()
    assert not private.module.hooks_enabled
    CRITERION(private.model(others[0]), others[1]).backward()
    assert_equal({name: p.grad.double() for name, p in model.named_parameters()}, plain_gradients(model, others))
    private.module.enable_hooks()
    for _ in private.loader:
        private.step(*rows)
    assert_equal(private.sum(), truth)


@pytest.mark.one_in(4, "api", others="slow")
@with_few_apis(ALL_APIS, always={"default-auto", "compat-hooks", "compat-ghost", "compat-no_op"})
@pytest.mark.hazard("O63")
def test_training_without_noise_and_clipping_equals_sgd(api):
    plain, (x, y) = mlp(), batch(24)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    private = open_run(
        api,
        rows=24,
        max_grad_norm=1e9,
        poisson=False,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
    )
    for _ in range(4):
        for (rows,) in private.loader:
            plain_optimizer.zero_grad()
            CRITERION(plain(x[rows]), y[rows]).backward()
            plain_optimizer.step()
            private.step(x[rows], y[rows])
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(private.bare.state_dict()[name], value, rtol=1e-4, atol=1e-6)
