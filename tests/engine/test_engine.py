"""PrivacyEngine: returned objects, clipping policies, changes of parameters, and parallel runs."""

import math
import warnings

import inside
import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from loops import (
    BATCH,
    ROWS,
    assert_same_gradients,
    examples,
    expected_gradients,
    first_batch,
    gradients_of,
    make_loop,
    mlp,
    state_of,
    train,
    unchanged,
)
from torch import nn
from torch.utils.data import DataLoader

from dpengine import Adaptive, Automatic, Flat, PerLayer, PrivacyEngine
from dpengine.errors import BatchStateError, InvalidBudgetError, MissingGradientError, UnknownParameterError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012", "ignore:.*DPE006")


# Arguments and results of make_private


@pytest.mark.parametrize("options", [{"noise_multiplier": 1.0, "target_epsilon": 3.0, "epochs": 1}, {}])
def test_either_the_noise_or_the_target_is_given(options):
    model = mlp()
    with pytest.raises(InvalidBudgetError, match=r"Exactly one of noise_multiplier and target_epsilon"):
        PrivacyEngine().make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(examples(), 6), **options
        )


class OwnLoader(DataLoader):
    pass


def test_loader_settings_are_preserved():
    model = mlp()
    collate = lambda rows: tuple(torch.stack(column) for column in zip(*rows, strict=True))  # noqa: E731
    mine = OwnLoader(
        examples(),
        batch_size=7,
        shuffle=True,
        collate_fn=collate,
        num_workers=1,
        worker_init_fn=print,
        generator=torch.Generator(),
        timeout=60,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = PrivacyEngine().make_private(model, optimizer, mine, noise_multiplier=1.0, physical_batch_size=2)
    assert loader is not mine
    assert isinstance(loader, OwnLoader)
    for name in ("dataset", "num_workers", "pin_memory", "worker_init_fn", "generator", "timeout"):
        assert getattr(loader, name) is getattr(mine, name), name
    assert loader.collate_fn([mine.dataset[0]])[0].shape == collate([mine.dataset[0]])[0].shape
    assert len(loader) == math.ceil(ROWS / 7)  # logical steps, in however many chunks


def test_engine_without_a_run_raises_and_suggests_make_private():
    engine = PrivacyEngine()
    for ask in (lambda: engine.epsilon, engine.metrics, engine.describe, lambda: engine.backward(torch.ones(2))):
        with pytest.raises(InvalidBudgetError, match="make_private"):
            ask()


# Policies and parameters


@pytest.mark.parametrize(
    "policy", [Flat(0.2), Automatic(0.2), PerLayer(0.2), Adaptive(0.2)], ids=lambda p: type(p).__name__
)
def test_policy_object_needs_no_max_grad_norm(policy):
    loop = make_loop(clipping=policy, noise_multiplier=1.0)
    assert loop.optimizer.max_grad_norm == pytest.approx(0.2)
    train(loop)


def test_per_layer_clipping_uses_one_threshold_per_layer():
    loop = make_loop(clipping="per_layer", max_grad_norm=[0.3, 0.1])
    inputs, targets = first_batch(loop.loader)
    rows = [
        expected_gradients(loop.model, [(x[None], y[None])], max_norm=1e9, divisor=1)
        for x, y in zip(inputs, targets, strict=True)
    ]
    expected = {}
    for row in rows:
        for layer, bound in (("0", 0.3), ("2", 0.1)):
            names = [f"{layer}.weight", f"{layer}.bias"]
            norm = math.hypot(*(float(row[name].norm()) for name in names))
            for name in names:
                expected[name] = expected.get(name, 0) + row[name] * min(1, (1 - 2**-20) * bound / norm) / BATCH
    loop.step(inputs, targets)
    assert_same_gradients(gradients_of(loop.model), {name: expected[name] for name in gradients_of(loop.model)})


def test_parameters_may_be_frozen_and_unfrozen_between_steps():
    loop = make_loop(batch_size=1, noise_multiplier=1.0, unused_parameters="zero")
    frozen_when = {0: False, 1: True}
    for position, (inputs, targets) in enumerate(loop.loader):
        thawed = frozen_when[position // 3 % 2]
        loop.model[0].requires_grad_(not thawed)
        before = state_of(loop.model)
        loop.step(inputs, targets)
        changed = {name: not torch.equal(before[name], value) for name, value in state_of(loop.model).items()}
        assert changed == {"0.weight": not thawed, "0.bias": not thawed, "2.weight": True, "2.bias": True}


def test_an_empty_batch_gives_noise_to_an_unfrozen_parameter_too():
    model = mlp()
    loop = make_loop(
        model, batch_size=1, noise_multiplier=1.0, make_optimizer=lambda _: torch.optim.SGD(model.parameters(), 0.1)
    )
    model[0].requires_grad_(False)
    train_one = (batch for batch in loop.loader)
    loop.step(*next(train_one))
    model[0].requires_grad_(True)
    next(batch for batch in fresh(train_one, loop) if inside.samples_now(loop.engine) == 0)
    before = state_of(model)
    loop.optimizer.zero_grad()
    loop.optimizer.step()
    assert not any(torch.equal(before[name], value) for name, value in state_of(model).items())


def fresh(batches, loop):
    """Batches, each stepped unless it is empty."""
    for batch in batches:
        yield batch
        loop.model[0].requires_grad_(False)
        loop.step(*batch)
        loop.model[0].requires_grad_(True)


def test_parameters_may_not_change_within_a_step():
    loop = make_loop(accumulation_steps=2, noise_multiplier=1.0, batch_size=12)
    chunks = iter(loop.loader)
    loop.backward(*next(chunks))
    loop.model[0].weight.requires_grad_(False)
    with pytest.raises(UnknownParameterError, match=r"DPE016.*'0\.weight'.*before the next batch"):
        loop.backward(*next(chunks))
    assert [charge.kind for charge in loop.engine.ledger.history] == ["void"]
    loop.step(*next(chunks))
    loop.step(*next(chunks))  # with the new set from the start
    assert [charge.kind for charge in loop.engine.ledger.history] == ["void", "release"]


def test_an_unused_parameter_can_get_only_noise():
    def with_spare():
        return Parts(lambda m, inputs: m.used(inputs), used=nn.Linear(4, 3), spare=nn.Linear(4, 3))

    loop = make_loop(with_spare(), unused_parameters="zero", noise_multiplier=1.0)
    train(loop)
    quiet = make_loop(with_spare(), unused_parameters="zero")
    with unchanged(quiet.model.spare):
        train(quiet)
    assert loop.model.spare.weight.grad.std() > 0.5 / BATCH


def test_a_missing_gradient_is_reported_in_every_step():
    run = lambda m, inputs: m.left(inputs) + (m.right(inputs) if m.both else 0)  # noqa: E731
    loop = make_loop(Parts(run, left=nn.Linear(4, 3), right=nn.Linear(4, 3), both=True), noise_multiplier=1.0)
    batches = iter(loop.loader)
    loop.step(*next(batches))
    loop.model.both = False
    with pytest.raises(
        MissingGradientError, match=r"DPE002.*'right\.weight' has no gradient in this step \(2 parameters have none\)"
    ):
        loop.step(*next(batches))


def test_two_models_train_side_by_side():
    dataset = examples()
    one = make_loop(dataset=dataset, noise_multiplier=1.0)
    two = make_loop(dataset=dataset, noise_multiplier=2.0, engine=one.engine)
    for first, second in zip(one.loader, two.loader, strict=True):
        two.optimizer.zero_grad()
        one.optimizer.zero_grad()
        one.backward(*first)
        two.backward(*second)
        two.optimizer.step()
        one.optimizer.step()
    one.engine.detach(two.model)
    train(one)
    assert one.engine.ledger.steps == 12
    assert {charge.kind for charge in one.engine.ledger.history} == {"release"}


def test_after_detach_the_private_loader_returns_and_charges_nothing():
    loop = make_loop(noise_multiplier=1.0)
    batches = iter(loop.loader)
    loop.step(*next(batches))
    outputs = loop.model(first := torch.ones(2, 4))
    loop.engine.detach(loop.model)
    with pytest.raises(BatchStateError, match=r"before the model was detached"):
        F.cross_entropy(outputs, torch.tensor([0, 1])).backward()
    assert len(list(batches)) == 3
    assert loop.engine.ledger.steps == 1
    F.cross_entropy(loop.model(first), torch.tensor([0, 1])).backward()
    assert all(p.grad is not None for p in loop.model.parameters())


def test_detach_in_the_middle_of_a_batch_charges_it_and_destroys_its_sums():
    loop = make_loop(noise_multiplier=1.0)
    loop.backward(*first_batch(loop.loader))
    assert not inside.state(loop.engine).zero
    loop.engine.detach(loop.model)
    assert inside.state(loop.engine).zero
    assert loop.charges == [("void", 1)]


def test_normal_run_gives_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(make_loop(noise_multiplier=1.0))
