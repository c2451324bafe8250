"""Messages for a loop that wastes privacy budget or steps an optimizer that is not private, and their fixes."""

import gc
import itertools
import re

import pytest
import torch
from loops import CLASSES, FEATURES, ROWS, examples, make_loop, mlp, train, unchanged
from torch import nn
from torch.utils.data import DataLoader

import dpengine
from dpengine import PrivacyEngine, PrivacyWarning
from dpengine.errors import BatchStateError, SamplingError, UnknownParameterError, forget_notices

NOISE = {"noise_multiplier": 1.0}


@pytest.fixture(autouse=True)
def reset_notices():
    forget_notices()
    yield
    forget_notices()


def train_merged_batches(loop, count):
    loop.optimizer.zero_grad()
    for i, (inputs, targets) in enumerate(loop.loader):
        loop.backward(inputs, targets)
        if i % count == count - 1:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def test_accumulation_by_hand_warns_with_both_epsilons_and_the_arguments():
    with pytest.warns(PrivacyWarning, match="DPE006") as seen:
        train_merged_batches(loop := make_loop(batch_size=3, **NOISE), 2)
    text = next(str(one.message) for one in seen if "DPE006" in str(one.message))
    now, less = (float(one) for one in re.search(r"epsilon is ([\d.]+) after .* it is (\d+\.\d+)", text).groups())
    assert loop.engine.epsilon <= now <= loop.engine.epsilon + 0.01
    arguments = re.search(r"batch_size=(\d+)\) and (accumulation_steps)=(\d+)", text).groups()
    remedy = make_loop(batch_size=int(arguments[0]), **{arguments[1]: int(arguments[2])}, **NOISE)
    parts = 0
    for inputs, targets in remedy.loader:
        remedy.step(inputs, targets)
        parts += 1
    assert parts == len(loop.loader)
    assert remedy.engine.epsilon <= less <= remedy.engine.epsilon + 0.01 < now


def test_a_batch_that_is_not_trained_on_is_reported_once_with_the_remedy():
    loop = make_loop(**NOISE)
    with pytest.warns(
        PrivacyWarning, match=r"DPE006.*not trained on.*len\(loader\).*by 0 instead of .*continue"
    ) as seen:
        assert len(list(loop.loader)) == len(loop.loader)
    assert len([one for one in seen if "not trained on" in str(one.message)]) == 1


@pytest.mark.one_in(3, "seed", others="slow")
@pytest.mark.parametrize("seed", range(3))
def test_the_remedies_for_a_batch_that_is_left_out_are_silent(recwarn, seed):
    loop = make_loop(seed=seed, dataset=examples(4 * ROWS), **NOISE)
    assert len(loop.loader) == 4 * ROWS // 6
    for i, (inputs, targets) in enumerate(loop.loader):
        keep = float(i % 2 == 0)
        loop.optimizer.zero_grad()
        (keep * nn.functional.cross_entropy(loop.model(inputs), targets)).backward()
        loop.optimizer.step()
    assert not [one for one in recwarn if "DPE0" in str(one.message)]


@pytest.mark.slow
def test_each_run_is_reported():
    for _ in range(2):
        with pytest.warns(PrivacyWarning, match=r"DPE006.*not trained on"):
            list(make_loop(**NOISE).loader)
        loop = make_loop(target_epsilon=3.0, target_delta=1e-3, epochs=1)
        train(loop)
        with pytest.warns(PrivacyWarning, match=r"DPE011.*returned no batch"):
            train(loop)


def test_steps_beyond_the_plan_of_a_run_without_a_target_are_reported(recwarn):
    loop = make_loop(**NOISE, epochs=2)
    assert train(loop, 2) == 2 * len(loop.loader)
    assert not [one for one in recwarn if "DPE011" in str(one.message)]
    with pytest.warns(
        PrivacyWarning, match=r"DPE011.*8 planned steps are taken, and the loader continues.*target_epsilon="
    ):
        train(loop)


def test_steps_beyond_the_plan_are_reported():
    loop = make_loop(target_epsilon=3.0, target_delta=1e-3, epochs=1)
    assert train(loop) == len(loop.loader)
    with pytest.warns(PrivacyWarning, match=r"DPE011.*returned no batch: the 4 planned steps are taken and the budget"):
        assert train(loop) == 0


def test_no_warning_at_the_end_of_the_plan(recwarn):
    loop = make_loop(target_epsilon=3.0, target_delta=1e-3, steps=6)
    train(loop, 2)
    assert loop.engine.ledger.steps == 6
    assert not [one for one in recwarn if "DPE011" in str(one.message)]


def test_a_loader_that_ends_early_states_the_reason():
    loop = make_loop(target_epsilon=3.0, target_delta=1e-3, epochs=1)
    with pytest.warns(
        PrivacyWarning, match=r"DPE011.*ended after 1 of 4 planned batches: another step.*accumulation_steps="
    ):
        for batch in itertools.islice(loop.loader, 2):
            loop.backward(*batch)
        assert not list(itertools.islice(loop.loader, 1))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_of_another_optimizer_is_rejected(when):
    model = mlp()
    other = torch.optim.Adam(model.parameters()) if when == "before" else None
    loop = make_loop(model, **NOISE)
    other = other or torch.optim.Adam(model.parameters())
    inputs, targets = next(iter(loop.loader))
    loop.backward(inputs, targets)
    with pytest.raises(BatchStateError, match=r"DPE022.*Adam.step\(\).*make_private did not return this optimizer"):
        other.step()
    with unchanged(model):
        torch.optim.SGD.step(loop.optimizer)  # without the private step, there is no gradient to apply
    loop.optimizer.step()  # the remedy


def test_an_optimizer_that_steps_without_gradients_is_rejected():
    loop = make_loop(**NOISE)
    other = torch.optim.Adam(loop.model.parameters())
    loop.optimizer.zero_grad()
    with pytest.raises(BatchStateError, match=r"DPE022.*Adam.step\(\).*would change nothing"):
        other.step()


@pytest.mark.filterwarnings("ignore:.*DPE003")
def test_a_second_optimizer_steps_after_the_first_on_gradients_with_noise():
    model = mlp()
    head = torch.optim.SGD(model[2].parameters(), lr=0.1)
    loop = make_loop(model, make_optimizer=lambda _: torch.optim.SGD(model[0].parameters(), lr=0.1), **NOISE)
    inputs, targets = next(iter(loop.loader))
    loop.step(inputs, targets)
    before = model[2].weight.detach().clone()
    head.step()
    torch.testing.assert_close(model[2].weight, before - 0.1 * model[2].weight.grad)


def test_other_models_and_optimizers_step_as_before():
    loop, public = make_loop(**NOISE), nn.Linear(FEATURES, CLASSES)
    other = torch.optim.SGD(public.parameters(), lr=0.1)
    for inputs, targets in loop.loader:
        loop.optimizer.zero_grad()
        loop.backward(inputs, targets)
        public(inputs).sum().backward()
        other.step()
        loop.optimizer.step()
    loop.model.add_module("added", nn.Linear(2, 2))  # only steps of this model may be rejected
    public(inputs).sum().backward()
    other.step()
    dpengine.detach(loop.model)
    del loop.model.added
    loop.backward(inputs, targets)
    torch.optim.SGD(loop.model.parameters(), lr=0.1).step()


@pytest.mark.one_in(3, "what", others="slow")
@pytest.mark.parametrize("what", ["model", "optimizer", "engine"])
def test_detach_accepts_a_model_an_optimizer_or_an_engine(what):
    loop = make_loop(**NOISE)
    train(loop)
    dpengine.detach(getattr(loop, what))
    assert type(loop.optimizer) is torch.optim.SGD
    assert not loop.model._forward_hooks and "forward" not in vars(loop.model[0])
    again = make_loop(loop.model, **NOISE)
    train(again)
    assert loop.engine.ledger.steps == again.engine.ledger.steps == len(again.loader)


def test_detach_of_an_engine_names_the_function_for_other_objects():
    loop = make_loop(**NOISE)
    with pytest.raises(UnknownParameterError, match=r"DPSGD is not private.*For an optimizer.*dpengine\.detach\(x\)"):
        loop.engine.detach(loop.optimizer)
    dpengine.detach(loop.optimizer)  # the remedy
    with pytest.raises(UnknownParameterError, match="is not private, or was detached before"):
        dpengine.detach(loop.model)


def test_detach_rejects_other_objects():
    with pytest.raises(UnknownParameterError, match=r"DPE016.*Linear"):
        dpengine.detach(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="str is not a model"):
        dpengine.detach("model")


def test_a_notebook_cell_that_is_run_twice_gets_a_message_with_the_remedy():
    model, loader = mlp(), DataLoader(examples(), batch_size=6)
    cell = """
engine = PrivacyEngine()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = engine.make_private(model, optimizer, loader, noise_multiplier=1.0)
"""
    scope = {"PrivacyEngine": PrivacyEngine, "torch": torch, "model": model, "loader": loader}
    exec(cell, scope)
    with pytest.raises(UnknownParameterError, match=r"DPE016.*cell was run twice.*dpengine.detach\(model\)"):
        exec(cell, scope)
    gc.collect()  # the first engine and optimizer are gone
    dpengine.detach(model)
    with pytest.raises(SamplingError, match=r"DPE004.*create it again, for example if a notebook cell"):
        exec(cell, scope)
    exec(cell, {**scope, "loader": DataLoader(examples(), batch_size=6)})


def test_a_new_model_with_the_optimizer_of_another_model_is_rejected():
    loop = make_loop(**NOISE)
    private, loop.model = loop.model, mlp()
    with pytest.raises(BatchStateError, match=r"DPE022.*the model that make_private returned and not of a new one"):
        train(loop)
    loop.model = private
    assert train(loop) == len(loop.loader)


def test_epsilon_without_arguments_uses_the_delta_of_the_run():
    loop = make_loop(target_delta=1e-3, **NOISE)
    train(loop)
    assert loop.engine.get_epsilon() == loop.engine.epsilon == loop.engine.get_epsilon(1e-3)


def test_delta_and_target_delta_suggest_each_other():
    with pytest.raises(TypeError, match="Did you mean 'target_delta'"):
        make_loop(delta=1e-5, **NOISE)
    with pytest.raises(TypeError, match="Did you mean 'delta'"):
        make_loop(**NOISE).engine.get_epsilon(target_delta=1e-5)


def test_the_batch_size_of_a_loader_counts_privacy_units():
    loop = make_loop(batch_size=2, privacy_unit=[i // 4 for i in range(ROWS)], **NOISE)
    description = loop.engine.describe()
    assert description["expected_batch_size"] == 2 and description["sample_rate"] == pytest.approx(2 / 6)
    assert len(loop.loader) == 3
