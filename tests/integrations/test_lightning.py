"""A plain LightningModule trains privately with one callback, to the weights and epsilon of a loop written by hand."""

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning.pytorch")

from integrations.lightning_doubles import WANTED, Manual, Plain, by_hand, data, fit, loader, trainer, weights  # noqa: E402

from dpengine import PrivacyEngine  # noqa: E402
from dpengine.errors import (  # noqa: E402
    ParameterMismatchError,
    SamplingError,
    ScaledGradientError,
)
from dpengine.integrations.lightning import DPCallback  # noqa: E402
from dpengine.noise import BandMF  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, on workers and logging


class Bypassing(Plain):
    """Calls its submodules instead of the module itself."""

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Scheduled(Plain):
    """Has a scheduler that counts steps."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Asking(Scheduled):
    """Reads the number of steps, for which Lightning sets up the loader before there is an optimizer."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches in {18, -1}
        return super().configure_optimizers()


class Two(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


class Batches:
    """An iterable that is not a DataLoader."""

    def __iter__(self):
        yield data()


class Breaking(Plain):
    def training_step(self, batch, index):
        if index == 2:
            raise RuntimeError("broke")
        return super().training_step(batch, index)


@pytest.mark.one_in(2, "kind", others="slow")
@pytest.mark.parametrize("kind", [Plain, Bypassing, Scheduled, Asking, Manual])
def test_weights_and_epsilon_are_those_of_a_loop_by_hand(kind):
    expected, engine = by_hand(**WANTED)
    callback, module = DPCallback(PrivacyEngine(seed=5), **WANTED), kind()
    made = fit(module, callback)
    assert torch.equal(weights(module), expected)
    assert not torch.equal(weights(module), weights(kind()))
    assert callback.engine.ledger.steps == engine.ledger.steps == 18
    assert callback.engine.epsilon == engine.epsilon
    assert float(made.callback_metrics["epsilon"]) == pytest.approx(engine.epsilon)


@pytest.mark.slow
def test_the_target_is_kept_over_the_epochs_of_the_trainer():
    wanted = {"target_epsilon": 3.0, "target_delta": 1e-3}
    expected, _ = by_hand(planned=3, **wanted)
    callback, module = DPCallback(PrivacyEngine(seed=5), **wanted), Plain()
    fit(module, callback)
    assert 2.9 < callback.engine.epsilon <= 3.0
    assert torch.equal(weights(module), expected)


@pytest.mark.slow
def test_the_docstring_example_runs(capsys):
    names = {"Trainer": trainer_of, "module": Plain(), "loader": loader(), "DPCallback": DPCallback}
    code = inspect.getdoc(DPCallback).split("::\n\n")[1].split("\n\n")[0]
    exec(inspect.cleandoc(code), names)
    assert 2.9 < names["private"].engine.epsilon <= 3.0
    assert "ε = 3.00" in capsys.readouterr().out


def trainer_of(callbacks, max_epochs):
    return trainer(*callbacks, epochs=max_epochs)


@pytest.mark.one_in(4, "settings", others="slow")
@pytest.mark.one_in(2, "settings")
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"limit_train_batches": 2}, 6),
        ({"limit_train_batches": 1}, 3),
        ({"limit_train_batches": 0.5}, 9),
        ({"max_steps": 40}, 18),
        ({"max_steps": 11, "epochs": -1}, 11),
        ({"max_steps": 5}, 5),
        ({"max_steps": 5, "limit_train_batches": 1}, 3),
        ({"limit_train_batches": 50}, 18),
    ],
)
def test_the_target_is_kept_and_used_up_at_the_last_step_of_the_trainer(settings, steps):
    callback = DPCallback(target_epsilon=3.0, target_delta=1e-3)
    made = fit(Plain(), callback, **settings)
    assert made.global_step == callback.engine.ledger.steps == steps
    assert 2.9 < callback.engine.epsilon <= 3.0


def test_chunks_make_one_step_and_are_all_fetched():
    expected, engine = by_hand(**WANTED)
    callback, module = DPCallback(PrivacyEngine(seed=5), physical_batch_size=4, **WANTED), Scheduled()
    made = fit(module, callback)
    assert max(module.seen) <= 4
    assert callback.engine.ledger.steps == engine.ledger.steps
    assert torch.allclose(weights(module), expected, atol=1e-6)
    assert made.lr_scheduler_configs[0].scheduler.last_epoch == engine.ledger.steps


def test_validation_loaders_are_unchanged():
    callback = DPCallback(**WANTED)
    made = trainer(callback, num_sanity_val_steps=2)
    made.fit(Plain(), loader(), loader(25))
    assert float(made.callback_metrics["validated"]) == 25


def test_after_fit_the_module_is_detached_and_a_second_fit_adds_to_the_privacy_cost():
    callback, module = DPCallback(**WANTED), Plain()
    made = fit(module, callback)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())
    assert "process_dataloader" not in vars(made.strategy)
    first = callback.engine.epsilon
    fit(module, callback)
    assert callback.engine.ledger.steps == 36
    assert callback.engine.epsilon > first


def test_an_exception_during_fit_detaches_the_module():
    callback, module = DPCallback(**WANTED), Breaking()
    with pytest.raises(RuntimeError, match="broke"):
        fit(module, callback)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())
    assert callback.engine.ledger.steps == 3  # the batch that the loader returned counts


def test_a_resumed_run_counts_the_steps_before_the_checkpoint(tmp_path):
    first = DPCallback(**WANTED)
    fit(Plain(), first, epochs=2).save_checkpoint(tmp_path / "run.ckpt")
    second = DPCallback(**WANTED)
    fit(Plain(), second, epochs=3, ckpt_path=tmp_path / "run.ckpt")
    assert (first.engine.ledger.steps, second.engine.ledger.steps) == (12, 18)
    _, engine = by_hand(**WANTED)
    assert second.engine.epsilon == pytest.approx(engine.epsilon)


def test_an_engine_that_trained_before_adds_the_steps_of_a_checkpoint_of_another_process(tmp_path):
    fit(Plain(), DPCallback(**WANTED), epochs=2).save_checkpoint(tmp_path / "run.ckpt")
    callback = DPCallback(**WANTED)
    fit(Plain(), callback, epochs=1)
    fit(Plain(), callback, epochs=3, ckpt_path=tmp_path / "run.ckpt")
    assert callback.engine.ledger.steps == 6 + 12 + 6


def test_each_run_resumed_from_a_checkpoint_adds_to_the_privacy_cost(tmp_path):
    callback, module = DPCallback(**WANTED), Plain()
    fit(module, callback, epochs=2).save_checkpoint(tmp_path / "run.ckpt")
    trainer(callback).validate(module, loader(25), ckpt_path=tmp_path / "run.ckpt", verbose=False)
    assert callback.engine.ledger.steps == 12
    fit(module, callback, epochs=3, ckpt_path=tmp_path / "run.ckpt")
    assert callback.engine.ledger.steps == 12 + 12 + 6


def test_correlated_noise_uses_the_number_of_steps_of_the_trainer():
    callback = DPCallback(noise=BandMF(num_bands=3), noise_multiplier=1.0)
    fit(Plain(), callback)
    assert callback.engine.ledger.steps == 18
    assert 0 < callback.engine.epsilon < 100


def test_a_checkpoint_without_a_record_of_privacy_is_rejected(tmp_path):
    fit(Plain(), lightning.Callback(), epochs=1).save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(SamplingError, match="has no record of the privacy cost"):
        fit(Plain(), DPCallback(**WANTED), epochs=2, ckpt_path=tmp_path / "run.ckpt")


@pytest.mark.parametrize(
    ("module", "callback", "settings", "error", "says"),
    [
        (Two, {}, {}, ParameterMismatchError, "2 optimizers"),
        (Plain, {}, {"loaders": lambda: [loader(), loader()]}, SamplingError, "several training loaders"),
        (Plain, {}, {"loaders": Batches}, SamplingError, "is a Batches"),
        (Asking, {"physical_batch_size": 4}, {}, SamplingError, r"max_epochs \* len\(loader\)"),
    ],
    ids=["two optimizers", "several loaders", "no loader", "chunks before there is an optimizer"],
)
def test_unsupported_modules_and_loaders_are_rejected(module, callback, settings, error, says):
    with pytest.raises(error, match=says):
        fit(module(), DPCallback(**WANTED, **callback), **{name: make() for name, make in settings.items()})


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"accumulate_grad_batches": 2}, ScaledGradientError, "physical_batch_size"),
        ({"gradient_clip_val": 1.0}, ValueError, "max_grad_norm"),
        ({"reload_dataloaders_every_n_epochs": 1}, SamplingError, "once for each loader"),
        ({"devices": 2, "strategy": "ddp_spawn"}, SamplingError, "2 processes"),
        ({"strategy": "ddp_spawn"}, SamplingError, "another process"),
    ],
    ids=["accumulation", "clipping", "reloading", "processes", "another process on one device"],
)
def test_settings_that_would_break_the_guarantee_are_rejected(settings, error, says):
    made = trainer(DPCallback(**WANTED), **settings)
    with pytest.raises(error, match=says):
        made.callbacks[0].setup(made, Plain(), "fit")


def test_a_loader_that_was_set_up_before_the_callback_is_rejected():
    class Early(lightning.Callback):
        def setup(self, trainer, pl_module, stage):
            trainer.fit_loop.setup_data()

    callback = DPCallback(**WANTED)
    with pytest.raises(SamplingError, match="before this callback"):
        trainer(Early(), callback).fit(Plain(), loader())


def test_a_misspelt_keyword_names_the_nearest():
    with pytest.raises(TypeError, match="'noise_multiplier'"):
        DPCallback(noise_multiplyer=1.0)


@pytest.mark.slow
def test_without_lightning_an_error_says_what_to_install():
    hidden = "import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None; "
    code = hidden + "from dpengine.integrations.lightning import DPCallback; DPCallback(noise_multiplier=1.0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install lightning" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_opacus_interface_imports_lightning_lazily():
    code = (
        "import sys; from dpengine.compat import opacus; print('lightning' in sys.modules); "
        "print(opacus.lightning.DPLightningDataModule.__name__, 'lightning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "DPLightningDataModule", "True"]
