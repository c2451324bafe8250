"""Checkpoints: round trips, files in the layout of Opacus, and warnings about missing parts and steps."""

import io
import warnings
from collections import OrderedDict

import pytest
import torch
from opacus_runs import Counting, flat, model, private, rows, steps_in_history, train

from dpengine import PrivacyWarning
from dpengine.compat.opacus import PrivacyEngine
from dpengine.compat.opacus.accountants import PRVAccountant
from dpengine.compat.opacus.schedulers import ExponentialGradClip, ExponentialNoise


def as_file(content):
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


def save(parts, **more):
    file = io.BytesIO()
    parts.engine.save_checkpoint(path=file, module=parts.model, **more)
    file.seek(0)
    return file


def weights(parts):
    return flat(dict(parts.model.named_parameters())).detach()


@pytest.mark.one_in(2, "poisson", "mode", others="slow")
@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_run_continues_with_its_weights_and_its_privacy_cost(mode, poisson):
    options = {"grad_sample_mode": mode, "poisson_sampling": poisson, "noise_multiplier": 1.0}
    parts = private(**options)
    train(parts)
    file = save(parts, optimizer=parts.optimizer, checkpoint_dict={"epoch": 7})
    other = private(module=model(9), **options)
    content = other.engine.load_checkpoint(path=file, module=other.model, optimizer=other.optimizer)
    assert content["epoch"] == 7
    assert set(content) == {"epoch", "module_state_dict", "privacy_accountant_state_dict"}
    assert torch.equal(weights(parts), weights(other))
    assert other.engine.get_epsilon(1e-5) == pytest.approx(parts.engine.get_epsilon(1e-5))
    train(parts)
    train(other)
    # Two runs of one pass each cost what two passes of one run do.
    assert other.engine.get_epsilon(1e-5) == pytest.approx(parts.engine.get_epsilon(1e-5), rel=1e-6)
    assert steps_in_history(other) == 6


def test_schedulers_are_saved_under_their_names():
    def make():
        parts = private(noise_multiplier=1.0)
        noise = ExponentialNoise(parts.optimizer, gamma=0.5)
        return parts, {"noise_scheduler": noise, "grad_clip_scheduler": ExponentialGradClip(parts.optimizer, gamma=0.5)}

    parts, schedulers = make()
    for scheduler in schedulers.values():
        scheduler.step()
    file = save(parts, optimizer=parts.optimizer, **schedulers)
    content = torch.load(file, weights_only=False)
    assert set(content) == {
        "module_state_dict",
        "privacy_accountant_state_dict",
        "optimizer_state_dict",
        "noise_scheduler_state_dict",
        "grad_clip_scheduler_state_dict",
    }
    file.seek(0)
    other, fresh = make()
    remaining = other.engine.load_checkpoint(path=file, module=other.model, optimizer=other.optimizer, **fresh)
    assert set(remaining) == {"module_state_dict", "privacy_accountant_state_dict"}
    assert all(scheduler.last_epoch == 1 for scheduler in fresh.values())


@pytest.mark.parametrize("prefix", ["_module.", ""])
def test_a_file_that_opacus_wrote_is_read(prefix):
    state = OrderedDict((prefix + name, value) for name, value in model(5).state_dict().items())
    content = {
        "module_state_dict": state,
        "privacy_accountant_state_dict": OrderedDict(history=[(1.5, 0.01, 20), (1.0, 0.02, 3)], mechanism="rdp"),
        "optimizer_state_dict": torch.optim.SGD(model().parameters(), lr=0.03).state_dict(),
    }
    file = as_file(content)
    parts = private(noise_multiplier=1.0)
    parts.engine.load_checkpoint(path=file, module=parts.model, optimizer=parts.optimizer)
    assert torch.equal(parts.model._module[0].weight, model(5)[0].weight)
    assert parts.optimizer.param_groups[0]["lr"] == 0.03
    assert parts.engine.accountant.history == [(1.5, 0.01, 20), (1.0, 0.02, 3)]
    epsilon = parts.engine.get_epsilon(1e-5)
    train(parts)
    assert parts.engine.get_epsilon(1e-5) > epsilon


def test_loading_an_earlier_history_warns():
    parts = private(noise_multiplier=1.0)
    train(parts, 2)
    file, again = save(parts), save(parts)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        parts.engine.load_checkpoint(path=again, module=parts.model)
    train(parts, 1)
    with pytest.warns(PrivacyWarning, match="goes back from 3 steps to the 2"):
        parts.engine.load_checkpoint(path=file, module=parts.model)


def test_loading_a_history_that_contains_all_steps_of_the_engine_does_not_warn():
    first = private(noise_multiplier=1.0)
    train(first, steps=2)
    file = save(first)
    train(first, steps=2)
    longer = save(first)
    other = private(noise_multiplier=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        other.engine.load_checkpoint(path=file, module=other.model)
        train(other, steps=1)
        own = save(other)
        other.engine.load_checkpoint(path=own, module=other.model)
        other.engine.load_checkpoint(path=longer, module=other.model)
        train(other, steps=1)
        other.engine.load_checkpoint(path=save(other), module=other.model)


def test_loading_a_checkpoint_without_the_saved_steps_of_the_engine_warns():
    other, first = private(noise_multiplier=2.0), private(noise_multiplier=1.0)
    train(other, steps=2)
    train(first, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        first.engine.load_checkpoint(path=save(first), module=first.model)
    with pytest.warns(PrivacyWarning, match=r"DPE021.*2 steps of this engine are no longer accounted"):
        first.engine.load_checkpoint(path=save(other), module=first.model)


@pytest.mark.parametrize("entry", [([1.0], 0.5, 2), (), ("a note",), (torch.tensor(1.0), torch.tensor(0.5), 2), 7])
def test_any_history_entry_of_a_custom_accountant_can_be_saved_and_loaded(entry):
    parts = private(noise_multiplier=1.0)
    parts.engine.accountant = Counting()
    parts.engine.accountant.history.append(entry)
    train(parts, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        parts.engine.load_checkpoint(path=save(parts), module=parts.model)


class UnreadableAccountant(Counting):
    """An accountant whose history cannot be read."""

    @property
    def history(self):
        raise RuntimeError("unreadable")

    @history.setter
    def history(self, value):
        self._history = value

    def step(self, *, noise_multiplier, sample_rate):
        self._history.append((noise_multiplier, sample_rate, 1))


def test_an_unreadable_history_counts_as_empty():
    dataset = rows()
    train(private(noise_multiplier=1.0, dataset=dataset))
    second = private(noise_multiplier=1.0, dataset=dataset)
    second.engine.accountant = UnreadableAccountant()
    with pytest.warns(PrivacyWarning, match=r"DPE012.*Another engine"):
        train(second)


@pytest.mark.parametrize(("noise", "steps"), [(1.0, 3), (2.0, 1)])
def test_loading_a_history_without_the_unsaved_steps_of_the_engine_warns(noise, steps):
    first = private(noise_multiplier=noise)
    train(first, steps=steps)
    file = save(first)
    other = private(noise_multiplier=1.0)
    train(other, steps=1)
    with pytest.warns(PrivacyWarning, match=r"DPE021.*1 steps of this engine are no longer accounted"):
        other.engine.load_checkpoint(path=file, module=other.model)


@pytest.mark.one_in(2, "poisson", "accountant", others="slow")
@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("accountant", [PRVAccountant, Counting])
def test_an_engine_that_loads_the_history_of_another_over_the_same_data_does_not_warn(accountant, poisson):
    dataset = rows()

    def make():
        parts = private(noise_multiplier=1.0, dataset=dataset, poisson_sampling=poisson)
        parts.engine.accountant = accountant()
        return parts

    first = make()
    train(first, steps=2)
    file = save(first)
    second = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        if accountant is PRVAccountant or poisson:  # a Counting accountant records less about passes than the ledger
            second.engine.load_checkpoint(path=file, module=second.model)
            train(second, steps=2)
    third = make()
    if accountant is PRVAccountant or poisson:
        file.seek(0)
        third.engine.load_checkpoint(path=file, module=third.model)  # contains the first two steps only
    with pytest.warns(PrivacyWarning, match=r"DPE012.*Another engine.*load_checkpoint"):
        train(third, steps=1)


def test_a_part_missing_from_the_checkpoint_or_the_arguments_warns():
    parts = private(noise_multiplier=1.0)
    without, with_it = save(parts), save(parts, optimizer=parts.optimizer)
    with pytest.warns(UserWarning, match="optimizer is not in the checkpoint"):
        parts.engine.load_checkpoint(path=without, module=parts.model, optimizer=parts.optimizer)
    with pytest.warns(UserWarning, match="optimizer was not passed"):
        parts.engine.load_checkpoint(path=with_it, module=parts.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        without.seek(0)
        parts.engine.load_checkpoint(path=without, module=parts.model)


def test_an_invalid_checkpoint_is_a_value_error_and_changes_nothing():
    parts = private(noise_multiplier=1.0)
    before = weights(parts).clone()
    for content in ({}, {"module_state_dict": model(5).state_dict()}):
        file = as_file(content)
        with pytest.raises(ValueError, match=r"module_state_dict|privacy_accountant_state_dict"):
            parts.engine.load_checkpoint(path=file, module=parts.model)
    other = private(engine=PrivacyEngine(accountant="gdp"), noise_multiplier=1.0)
    train(other)
    with pytest.raises(ValueError, match="gdp"):
        parts.engine.load_checkpoint(path=save(other), module=parts.model)
    assert torch.equal(weights(parts), before)


def test_arguments_for_torch_are_passed_on():
    parts = private(noise_multiplier=1.0)
    file = io.BytesIO()
    parts.engine.save_checkpoint(
        path=file,
        module=parts.model,
        module_state_dict_kwargs={"prefix": "inner."},
        torch_save_kwargs={"_use_new_zipfile_serialization": False},
    )
    assert not file.getvalue().startswith(b"PK")
    file.seek(0)
    assert all(key.startswith("inner.") for key in torch.load(file, weights_only=False)["module_state_dict"])
    bare = save(parts)
    with pytest.raises(RuntimeError, match="Missing key"):
        short = torch.load(bare, weights_only=False)
        short["module_state_dict"].popitem()
        again = as_file(short)
        parts.engine.load_checkpoint(path=again, module=parts.model)
    again.seek(0)
    loose = {"strict": False}
    parts.engine.load_checkpoint(path=again, module=parts.model, module_load_dict_kwargs=loose)
    bare.seek(0)
    parts.engine.load_checkpoint(path=bare, module=parts.model, torch_load_kwargs={"map_location": "cpu"})


class RunsCode:
    """Sets a flag when it is unpickled."""

    ran = False

    def __reduce__(self):
        return setattr, (RunsCode, "ran", True)


def test_a_file_that_may_run_code_is_loaded_only_on_request(monkeypatch):
    monkeypatch.setattr(RunsCode, "ran", False)
    parts = private(noise_multiplier=1.0)
    before = weights(parts).clone()
    file = save(parts, checkpoint_dict={"extra": RunsCode()})
    with pytest.raises(ValueError, match=r"may run code.*torch_load_kwargs=\{'weights_only': False\}") as caught:
        parts.engine.load_checkpoint(path=file, module=parts.model)
    assert not RunsCode.ran and torch.equal(weights(parts), before)
    file.seek(0)
    fix = str(caught.value).rpartition("pass ")[2].removesuffix(".")
    eval(f"parts.engine.load_checkpoint(path=file, module=parts.model, {fix})", {"parts": parts, "file": file})
    assert RunsCode.ran
