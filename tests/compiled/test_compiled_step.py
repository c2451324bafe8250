"""Compiled and eager steps give the same weights after the same batches, in the same loop."""

import itertools
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from torch import nn
from torch.utils.data import TensorDataset

from dpengine import checkpoint
from dpengine.engine import restrict_to_optimizer
from dpengine.noise import BandMF

from .trainings import (
    CLASSES,
    MODELS,
    Training,
    assert_loops_alike,
    assert_trains_alike,
    batches_after_checks,
    before_compiled_batch,
    data,
    weights_of,
)

IN_EVERY_RUN = {"linear"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in MODELS]
)
def test_trains_as_the_eager_step_does(name, passes):
    make, shape = MODELS[name]
    assert_trains_alike(make, data(shape))
    assert len(passes) == 5  # of 7: the model is checked with the first, the loop with the first of another size
    assert len(set(passes)) > 2  # one graph for all sizes


@pytest.mark.slow
@pytest.mark.one_in(3, "settings")
@pytest.mark.filterwarnings("ignore:.*NOT PRIVATE")
@pytest.mark.parametrize(
    "settings",
    [
        {"clipping": "per_layer", "max_grad_norm": [0.1, 0.3]},
        {"clipping": "adaptive"},
        {"clipping": "automatic"},
        {"physical_batch_size": 5},
        {"accumulation_steps": 3},
        {"loss_reduction": "sum"},
        {"noise_multiplier": 0.0},
        {"noise": BandMF(num_bands=2), "steps": 7},
        {"sampling": "shuffle", "target_delta": 1e-3},
        {"compile": "aot_eager"},
    ],
    ids=str,
)
def test_settings_have_the_same_effect_as_in_eager_mode(settings, passes):
    make, shape = MODELS["linear"]
    eager = {key: value for key, value in settings.items() if key != "compile"}
    compiled = Training(make, data(shape), **{"compile": "eager", **settings}).run()
    torch.testing.assert_close(compiled, Training(make, data(shape), **eager).run(), rtol=1e-5, atol=1e-6)
    assert passes


@pytest.mark.slow
@pytest.mark.one_in(2, "before", "after")
@pytest.mark.parametrize("before", ["eager", False])
@pytest.mark.parametrize("after", ["eager", False])
def test_a_run_is_resumed_with_and_without_compilation(before, after, tmp_path, passes):
    make, shape = MODELS["linear"]
    whole = Training(make, data(shape)).run(9)
    first = Training(make, data(shape), compile=before)
    first.run(5)
    checkpoint.save(tmp_path / "run", first.engine)
    second = Training(make, data(shape), compile=after)
    checkpoint.load(tmp_path / "run", second.engine)
    passes.clear()
    torch.testing.assert_close(second.run(4), whole, rtol=1e-5, atol=1e-6)
    assert second.engine.ledger.steps == 9
    assert bool(passes) is bool(after)


@pytest.mark.slow
@pytest.mark.parametrize("standalone", [True, False])  # torch 2.6 has no standalone_compile
def test_inductor_trains_as_the_eager_step_does(standalone, passes, monkeypatch):
    if not standalone:
        monkeypatch.delattr("torch._inductor.standalone_compile")
        monkeypatch.setitem(sys.modules, "torch._inductor.standalone_compile", None)
    make, shape = MODELS["convolution"]
    assert_trains_alike(make, data(shape), compile=True)
    assert passes


@pytest.mark.slow
def test_dropout_in_inductor_draws_what_the_eager_step_draws(passes):
    make = lambda: nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, CLASSES))  # noqa: E731
    training = Training(make, data((6,)), compile=True)
    training.run()
    assert passes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "convolution", "sequence"])
def test_under_autocast_no_sample_exceeds_the_clipping_norm(name, passes):
    make, shape = MODELS[name]
    x, y = data(shape).tensors
    settings = {"noise_multiplier": 0.0, "target_delta": 1e-3, "max_grad_norm": 0.01, "batch_size": 8}
    training = Training(make, TensorDataset(x[:8], y[:8]), compile="eager", sampling="shuffle", **settings)
    for row in (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5):
        list(training.loader)  # a batch of eight, in whose place others come
        training.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(training.model(x[row].expand(8, *x[row].shape)), y[row].repeat(8))
        loss.backward()
        training.optimizer.step()
        norm = torch.cat([p.grad.flatten() for p in training.model.parameters()]).norm()
        assert norm <= 0.01 * (1 + 1e-5)  # of eight samples that are the same, divided by eight
    assert len(passes) >= 9  # the probe is due at the first and the eighth


@pytest.mark.slow
@pytest.mark.parametrize("where", ["around", "in the model"])
def test_autocast_is_that_of_the_loop(where, passes):
    def cast(m, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=where != "around" or torch.is_autocast_enabled("cpu")):
            return m.last(torch.tanh(m.first(x)))

    def step(training, x, y, i):
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
            output = training.model(x)
        assert output.dtype is torch.bfloat16
        F.cross_entropy(output.float(), y).backward()
        training.optimizer.step()

    make = lambda: Parts(cast, first=nn.Linear(6, 9), last=nn.Linear(9, CLASSES))  # noqa: E731
    assert_loops_alike(step, make, (1e-4, 1e-4))
    assert passes


def test_a_sample_that_is_not_finite_is_dropped(passes):
    def trained(compile):
        training = Training(MODELS["linear"][0], data((6,)), compile=compile)
        batches = batches_after_checks(training)
        for i, (x, y) in enumerate(itertools.islice(batches, 4)):
            x[::3] = math.nan if i != 1 else 0.0
            training.step((x, y))
        return weights_of(training.model), training.engine.metrics(nonprivate=True)["nonprivate/dropped_rows"]

    (compiled, dropped), (eager, expected) = trained("eager"), trained(False)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    assert dropped == expected > 0
    assert len(passes) == 3  # the graphs are compared with the hooks on a batch whose samples are finite


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*NOT PRIVATE")
def test_a_sample_is_dropped_without_other_random_numbers_for_the_others(passes):
    make = lambda: nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, CLASSES))  # noqa: E731

    def gradient(drop):
        settings = {"noise_multiplier": 0.0, "sampling": "shuffle", "target_delta": 1e-3, "loss_reduction": "sum"}
        training = Training(make, data((6,)), compile="eager", **settings)
        batches = batches_after_checks(training)
        training.step(next(batches))
        x, y = next(batches)
        if drop == "by its value":
            x[3] = math.nan
        torch.manual_seed(7)
        training.optimizer.zero_grad()
        losses_B = F.cross_entropy(training.model(x), y, reduction="none")
        torch.where(
            torch.arange(len(x)) == 3, 0 * losses_B if drop == "by its weight" else losses_B, losses_B
        ).sum().backward()
        training.optimizer.step()
        return torch.cat([p.grad.flatten() for p in training.model.parameters()])

    torch.testing.assert_close(gradient("by its value"), gradient("by its weight"), rtol=1e-5, atol=1e-6)
    assert len(passes) == 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*NOT PRIVATE")
def test_a_batch_without_a_finite_sample_adds_nothing(passes):
    training = Training(MODELS["linear"][0], data((6,)), compile="eager", noise_multiplier=0.0, target_delta=1e-3)
    batches = batches_after_checks(training)
    training.step(next(batches))
    before = weights_of(training.model)
    x, y = next(batches)
    training.step((torch.full_like(x, math.nan), y))
    assert torch.equal(weights_of(training.model), before)
    assert len(passes) == 2


@pytest.mark.slow
def test_dropout_draws_anew_in_every_step():
    make = lambda: nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, CLASSES))  # noqa: E731
    training = Training(make, data((6,)), compile="aot_eager")
    batches = batches_after_checks(training)
    training.step(next(batches))
    x = next(batches)[0]
    first, second = training.model(x), training.model(x)
    assert first.grad_fn.name() == second.grad_fn.name() == "CompiledPassFunctionBackward"
    assert not torch.equal(first, second)
    zeros = torch.stack([training.model(torch.ones(16, 6)) for _ in range(20)]).std(dim=0)
    assert bool((zeros > 0).all())


@pytest.mark.slow
def test_outputs_with_one_number_for_each_sample(passes):
    make = lambda: nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))  # noqa: E731
    loss = lambda found, y, reduction: F.mse_loss(found, y.float(), reduction=reduction)  # noqa: E731
    assert_trains_alike(make, data((6,)), loss=loss)
    assert passes


class Named(nn.Module):
    """Accepts keyword arguments, shared positions and plain numbers, and returns nested outputs."""

    def __init__(self):
        super().__init__()
        self.layer, self.head, self.other = nn.Linear(6, 8), nn.Linear(8, CLASSES), nn.Linear(8, 2)

    def forward(self, x, *, table, by=1):
        h = torch.tanh(self.layer(x) + table) * by
        return {"logits": self.head(h), "more": [self.other(h), h.detach().argmax(dim=1)], "by": by}


@pytest.mark.slow
def test_keywords_shared_tensors_and_nested_outputs(passes):
    def step(training, x, y, i):
        found = training.model(x, table=torch.linspace(0, i, 8)[None], by=2.0)
        assert found["by"] == 2.0 and found["more"][1].dtype is torch.int64 and len(found["more"][1]) == len(x)
        (F.cross_entropy(found["logits"], y) + found["more"][0].square().sum(dim=1).mean()).backward()
        training.optimizer.step()

    assert_loops_alike(step, Named)
    assert len(passes) == 5


@pytest.mark.slow
def test_an_output_that_the_loss_does_not_use_has_a_gradient_of_zero(passes):
    def step(training, x, y, i):
        F.cross_entropy(training.model(x, table=torch.zeros(1, 8))["logits"], y).backward()
        training.optimizer.step()

    assert_loops_alike(step, Named, unused_parameters="zero")
    assert passes


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.5, 1.0], ids=["padded", "full"])
def test_outputs_may_be_changed_in_place(size, passes):
    def loss(output, y, reduction):
        output /= 2.0
        return F.cross_entropy(output, y, reduction=reduction)

    settings = {"sampling": "shuffle", "target_delta": 1e-3} if size == 1.0 else {}
    make = MODELS["linear"][0]
    compiled, eager = (Training(make, data((6,)), compile=one, loss=loss, **settings).run() for one in ("eager", False))
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    assert passes


@pytest.mark.slow
def test_an_output_that_the_backward_pass_reads_may_not_be_changed_in_place():
    make = lambda: nn.Sequential(nn.Linear(6, CLASSES), nn.Sigmoid())  # noqa: E731
    training, x, y = before_compiled_batch(make, sampling="shuffle", target_delta=1e-3)
    output = training.model(x)
    assert output.grad_fn.name() == "CompiledPassFunctionBackward"
    output.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        F.cross_entropy(output, y).backward()


@pytest.mark.slow
def test_a_parameter_that_is_changed_before_backward_raises():
    training, x, y = before_compiled_batch()
    loss = F.cross_entropy(training.model(x), y)
    with torch.no_grad():
        training.model[2].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
def test_gradients_of_the_loss_may_be_scaled_by_a_grad_scaler(passes):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def step(training, x, y, i):
        scaler.scale(F.cross_entropy(training.model(x), y)).backward()
        scaler.step(training.optimizer)
        scaler.update()

    assert_loops_alike(step, grad_scaler=scaler)
    assert passes


@pytest.mark.slow
def test_only_the_parameters_of_the_optimizer_are_clipped(passes):
    def trained(compile):
        training = Training(MODELS["linear"][0], data((6,)), compile=compile)
        training.optimizer.param_groups[0]["params"] = list(training.model[2].parameters())
        restrict_to_optimizer(training.engine)
        return training.run()

    torch.testing.assert_close(trained("eager"), trained(False), rtol=1e-5, atol=1e-6)
    assert passes


@pytest.mark.slow
def test_an_attack_in_eval_mode_between_steps_is_not_recorded(passes):
    training = Training(MODELS["linear"][0], data((6,)), compile="eager")
    for batch in itertools.islice(training.loader, 6):
        training.model.eval()
        training.model(batch[0]).sum().backward()
        training.model.train()
        training.step(batch)
    assert len(passes) == 4


@pytest.mark.slow
def test_a_forward_pass_without_gradients_or_backward_is_not_recorded(passes):
    def step(training, x, y, i):
        with torch.no_grad():
            training.model(x)
        training.model(x)
        training.step((x, y))

    assert_loops_alike(step)
    assert len(passes) == 5


@pytest.mark.slow
def test_checkpointing_in_the_model(passes):
    def saving(m, x):
        return m.last(torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(m.first(x)), x, use_reentrant=False))

    assert_trains_alike(lambda: Parts(saving, first=nn.Linear(6, 9), last=nn.Linear(9, CLASSES)), data((6,)))
    assert passes
