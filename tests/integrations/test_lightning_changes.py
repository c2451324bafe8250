"""Changes that other code makes during a Lightning run are rejected before they reach the weights."""

import warnings

import inside
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

lightning = pytest.importorskip("lightning.pytorch")

from integrations.lightning_doubles import WANTED, Manual, Plain, by_hand, fit, loader, trainer, weights  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelPruning  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402

from dpengine import PrivacyEngine  # noqa: E402
from dpengine.errors import (  # noqa: E402
    BatchStateError,
    DetachedError,
    ParameterMismatchError,
    SamplingError,
    ScaledGradientError,
    UnsupportedLayerError,
    forget_notices,
)
from dpengine.integrations.lightning import DPCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, on workers and logging


class Tuned(Plain):
    """Module with the attributes that a tuner sets."""

    lr, batch_size = 0.1, 4

    def train_dataloader(self):
        return loader()


class Logging(Plain):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("train_loss", 0.0, on_epoch=True, batch_size=1)
        return loss

    def validation_step(self, batch, index):
        super().validation_step(batch, index)
        self.log("val_constraint", 0.0, on_epoch=True, batch_size=1)


class AtEpoch(lightning.Callback):
    """Calls a function at the start of an epoch, and stores the weights before the call."""

    def __init__(self, action, epoch=1):
        self.action, self.epoch = action, epoch

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            self.before = weights(pl_module)
            self.action(trainer, pl_module)


def changed_at_epoch(action, callback=None):
    """Fits with this change at epoch 1, and returns the weights before and after."""
    change, module = AtEpoch(action), Plain()
    try:
        trainer(callback or DPCallback(**WANTED), change).fit(module, loader())
    finally:
        assert torch.equal(weights(module), change.before)


CHANGES = {
    "accumulate": (lambda trainer: {"accumulate_grad_batches": 2}, ScaledGradientError, "physical_batch_size"),
    "clip": (lambda trainer: {"gradient_clip_val": 1.0}, ValueError, "max_grad_norm"),
    "replace_optimizer": (
        lambda trainer: {"optimizers": [torch.optim.SGD(trainer.lightning_module.parameters(), lr=0.5)]},
        ParameterMismatchError,
        "optimizer of the trainer is not the one",
    ),
    "drop_callbacks": (lambda trainer: {"callbacks": []}, SamplingError, "was removed from"),
}


@pytest.mark.parametrize(("changed", "error", "says"), CHANGES.values(), ids=CHANGES)
def test_changes_in_the_middle_are_rejected_before_the_next_step(changed, error, says):
    def change(trainer, module):
        for name, value in changed(trainer).items():
            setattr(trainer, name, value)

    with pytest.raises(error, match=says):
        changed_at_epoch(change)


def test_a_module_that_is_detached_during_fit_stops_training():
    callback = DPCallback(**WANTED)
    with pytest.raises(DetachedError, match="detach"):
        changed_at_epoch(lambda trainer, module: callback.engine.detach(module), callback)
    assert callback.engine.ledger.steps == 6


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward"])
def test_a_module_that_is_detached_between_batch_and_step_does_not_step(hook):
    class Detaching(Plain):
        def detach(self, *_):
            if self.trainer.global_step == 2:
                self.before = weights(self)
                callback.engine.detach(self)

    setattr(Detaching, hook, Detaching.detach)
    callback, module = DPCallback(**WANTED), Detaching()
    with pytest.raises((DetachedError, BatchStateError), match="detach"):
        fit(module, callback)
    assert torch.equal(weights(module), module.before)


def test_a_module_may_be_detached_when_training_ended():
    class Detaching(Plain):
        def on_train_end(self):
            callback.engine.detach(self)

    callback = DPCallback(**WANTED)
    fit(Detaching(), callback)
    assert callback.engine.ledger.steps == 18


def test_callbacks_and_tuners_that_break_the_guarantee_are_rejected():
    with pytest.raises(ScaledGradientError, match="GradientAccumulationScheduler"):
        trainer(GradientAccumulationScheduler({1: 2}), DPCallback(**WANTED)).fit(Plain(), loader())
    module = Tuned()
    before = weights(module)
    with pytest.raises(SamplingError, match=r"LearningRateFinder.* public data"):
        Tuner(trainer(DPCallback(**WANTED))).lr_find(module, num_training=3)
    with pytest.raises(SamplingError, match=r"BatchSizeFinder.*physical_batch_size"):
        Tuner(trainer(DPCallback(**WANTED))).scale_batch_size(module, max_trials=1)
    assert torch.equal(weights(module), before)
    with pytest.raises(UnsupportedLayerError, match=r"ModelPruning.*after trainer\.fit"):
        trainer(ModelPruning("l1_unstructured", amount=0.5), DPCallback(**WANTED)).fit(module, loader())


class Stream(IterableDataset):
    """Iterates over the examples, without a length."""

    def __iter__(self):
        return iter(loader().dataset)


@pytest.mark.parametrize("limits", [{"limit_train_batches": 2}, {"max_steps": 3}])
def test_a_stream_is_rejected_by_make_private_if_the_trainer_ends_sooner(limits):
    made = trainer(DPCallback(target_epsilon=3.0, target_delta=1e-3), **limits)
    with pytest.raises(SamplingError, match="Stream"):
        made.fit(Plain(), DataLoader(Stream(), 4))


@pytest.mark.parametrize(("monitor", "count"), [("train_loss", 1), ("validated", 0), ("val_constraint", 0)])
def test_early_stopping_warns_only_if_it_monitors_the_training_loss(monitor, count):
    forget_notices()
    stopping = EarlyStopping(monitor, patience=50, check_on_train_epoch_end=monitor == "train_loss")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer(stopping, DPCallback(**WANTED)).fit(Logging(), loader(), loader())
    found = [str(one.message) for one in seen if "decides by the training data" in str(one.message)]
    assert len(found) == count
    assert all("EarlyStopping(monitor='train_loss')" in one and "public data" in one for one in found)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_step_before_the_first_training_batch_is_rejected(wrapped):
    class Validating(Manual):
        def validation_step(self, batch, index):
            self.before = weights(self)
            optimizer = self.optimizers(use_pl_optimizer=wrapped)
            with torch.enable_grad():
                self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()

    module = Validating()
    with pytest.raises(SamplingError, match="before the first training batch"):
        trainer(DPCallback(**WANTED), inference_mode=False).fit(module, loader(), loader(25))
    assert torch.equal(weights(module), module.before)
    assert not module.trainer.optimizers[0]._optimizer_step_pre_hooks


@pytest.mark.parametrize("wanted", [{}, {"physical_batch_size": 4}])
def test_a_step_that_reads_the_loader_itself_trains_as_well(wanted):
    class Reading(Plain):
        def training_step(self, dataloader_iter):
            (inputs, labels), _, _ = next(dataloader_iter)
            return nn.functional.cross_entropy(self(inputs), labels)

    expected, engine = by_hand(**WANTED)
    callback, module = DPCallback(PrivacyEngine(seed=5), **WANTED, **wanted), Reading()
    made = fit(module, callback)
    assert torch.allclose(weights(module), expected, atol=1e-6)
    assert float(made.callback_metrics["epsilon"]) == pytest.approx(engine.epsilon)


class Leaving(Plain):
    """Returns no loss for one batch."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.before = weights(self)
        return None if self.trainer.global_step == 2 else loss

    def on_train_batch_end(self, outputs, batch, index):
        if not outputs:
            assert torch.equal(weights(self), self.before)


def test_a_batch_without_a_loss_is_discarded_and_charged():
    callback, module = DPCallback(**WANTED), Leaving()
    fit(module, callback)
    state = inside.state(callback.engine)
    assert (callback.engine.ledger.steps, state.released, state.discarded) == (18, 17, 1)


def test_a_chunk_without_a_loss_is_rejected():
    with pytest.raises(BatchStateError, match="training_step returned None for a chunk"):
        fit(Leaving(), DPCallback(physical_batch_size=4, **WANTED))


def test_an_empty_batch_can_be_skipped_and_is_released():
    class OnlyRows(Plain):
        def training_step(self, batch, index):
            self.seen.append(inside.samples_now(callback.engine))
            return super().training_step(batch, index) if self.seen[-1] else None

    callback, module = (
        DPCallback(PrivacyEngine(seed=5), sample_rate=0.02, expected_batch_size=1.2, **WANTED),
        OnlyRows(),
    )
    fit(module, callback, epochs=2)
    assert 0 in module.seen
    assert inside.state(callback.engine).released == callback.engine.ledger.steps


def test_training_without_a_step_limit_stops_when_the_budget_is_used_up():
    callback = DPCallback(target_epsilon=3.0, target_delta=1e-3, steps=10)
    made = trainer(callback, AtEpoch(pytest.fail, epoch=10), epochs=-1)
    made.fit(Plain(), loader())
    assert made.global_step == callback.engine.ledger.steps == 10
