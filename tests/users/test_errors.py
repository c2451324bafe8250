"""The error catalogue: class, code, cause, and a fix that works as written."""

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import ROWS, examples, first_batch, make_loop, mlp, one_step
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from dpengine import PrivacyEngine, errors
from dpengine.accounting import PoissonGaussianEvent, suggested_delta, to_dp_accounting
from dpengine.clipping import AbstractClip
from dpengine.validation.loss import check_loss

from .mistakes import UNREACHABLE_BUDGET, batch_norm_model, rdp_engine

ignore_dpe012 = pytest.mark.filterwarnings("ignore:.*DPE012")


# The message of each entry in the catalogue


class WithSpare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, inputs):
        return self.used(inputs)


class WithLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.layer(inputs) + F.linear(inputs, self.layer.weight)


class DoubleClip(AbstractClip):
    """Policy that clips to twice the norm in ``bounds``."""

    bounds = (0.1,)

    def group_of(self, names):
        return [0] * len(names)

    def factors(self, norms_BK):
        return (0.2 / norms_BK).clamp(max=1)

    def describe(self):
        return {"policy": "doubled"}


def backward_only(loop, *, times=1):
    inputs, targets = first_batch(loop.loader)
    for _ in range(times):
        loop.backward(inputs, targets)
    return loop


def optimizer_of_another_model():
    make_loop(make_optimizer=lambda _: torch.optim.SGD(mlp().parameters(), lr=0.1))


def weighted_loader():
    model = mlp()
    loader = DataLoader(examples(), 6, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS))
    PrivacyEngine().make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, noise_multiplier=1.0)


def no_zero_grad():
    loop = make_loop()
    chunks = iter(loop.loader)
    loop.step(*next(chunks))
    loop.backward(*next(chunks))


def scaled_loss():
    loop = make_loop()
    inputs, targets = first_batch(loop.loader)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(F.cross_entropy(loop.model(inputs), targets)).backward()
    scaler.step(loop.optimizer)


def token_mean(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-1)


def token_batch():
    targets = torch.tensor([[0, -1, -1], [1, 2, 0], [2, 2, 1]])
    return torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(0)), targets


def summed_loss(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum")


def over_budget(**options):
    loop = make_loop(target_epsilon=2.0, steps=2, target_delta=1e-3, **options)
    for batch in loop.loader:
        loop.step(*batch)
    loop.optimizer.zero_grad()
    loop.optimizer.step()


def add_param_group():
    make_loop().optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})


def lbfgs():
    make_loop(make_optimizer=torch.optim.LBFGS)


def duplicated_samples():
    loop = make_loop()
    inputs, targets = first_batch(loop.loader)
    loop.backward(inputs.repeat(2, 1), targets.repeat(2))


def copied_optimizer():
    copy.deepcopy(make_loop().optimizer).step()


def without_dp_accounting():
    to_dp_accounting(PoissonGaussianEvent(0.1, 1.0))


def eval_mode():
    loop = make_loop()
    loop.model.eval()
    backward_only(loop).optimizer.step()


def changed_gradients():
    loop = backward_only(make_loop())
    for p in loop.model.parameters():
        p.grad = torch.ones_like(p)
    loop.optimizer.step()


def undeclared_accumulation():
    loop = make_loop()
    for _, batch in zip(range(2), loop.loader, strict=False):
        loop.backward(*batch)
    loop.optimizer.step()


@dataclass(frozen=True)
class Row:
    """Entry of the catalogue: code, class, a function that triggers the error, a name in the message, and the fix."""

    code: str
    kind: type[Exception] | type[Warning]
    trigger: Callable[[], Any]
    names: str
    remedy: str


CATALOGUE = [
    Row("DPE001", errors.UnsupportedLayerError, lambda: make_loop(batch_norm_model()), "1 (BatchNorm1d)",
        "dpengine.fix(model)"),
    Row("DPE002", errors.MissingGradientError, lambda: one_step(make_loop(WithSpare())), "'spare.weight'",
        "model.get_parameter('spare.weight').requires_grad_(False), or pass unused_parameters='zero'"),
    Row("DPE002", errors.MissingGradientError, lambda: backward_only(make_loop(WithLinear(), grad_sample_mode="hooks")),
        "'layer.weight'", "Pass grad_sample_mode='auto'"),
    Row("DPE003", errors.ParameterMismatchError, optimizer_of_another_model, "4 optimizer parameters",
        "Build the optimizer last"),
    Row("DPE004", errors.SamplingError, weighted_loader, "WeightedRandomSampler", "Weight the loss instead"),
    Row("DPE005", errors.StaleGradientError, no_zero_grad, "optimizer.zero_grad()", "top of the loop"),
    Row("DPE006", errors.PrivacyWarning, undeclared_accumulation, "2 sampled batches", "accumulation_steps=2"),
    Row("DPE007", errors.InvalidBudgetError, lambda: make_loop(target_delta=0.5), "target_delta=0.5",
        "Pass target_delta=3.0e-02"),
    Row("DPE008", errors.CalibrationError, lambda: make_loop(engine=rdp_engine(), **UNREACHABLE_BUDGET),
        "epsilon=1e-09", "Use fewer epochs, a smaller"),
    Row("DPE009", errors.ScaledGradientError, scaled_loss, "GradScaler",
        "torch.autocast(dtype=torch.bfloat16), or pass make_private(..., grad_scaler=scaler)"),
    Row("DPE010", errors.BatchDependentLossError, lambda: check_loss(mlp(), token_mean, token_batch()), "sample 0",
        "per_example(loss_fn)"),
    Row("DPE011", errors.BudgetExceeded, over_budget, "Step 3", "Raise target_epsilon deliberately, or report now"),
    Row("DPE012", errors.PrivacyWarning, lambda: make_loop(noise_multiplier=0), "noise_multiplier=0", "NOT PRIVATE"),
    Row("DPE012", errors.PrivacyWarning, lambda: make_loop(sampling="shuffle", noise_multiplier=1.0),
        "sampling='shuffle'", "epsilon not claimed"),
    Row("DPE013", errors.ReductionError, lambda: check_loss(mlp(), summed_loss, examples().tensors),
        "looks like a sum", 'loss_reduction="sum"'),
    Row("DPE015", errors.PrivacyWarning, changed_gradients, "p.grad was changed",
        "pass max_grad_norm= to make_private"),
    Row("DPE016", errors.UnknownParameterError, add_param_group, "Parameter(2, 2)", "engine.detach(model)"),
    Row("DPE016", errors.UnknownParameterError, lbfgs, "LBFGS", "such as SGD or AdamW"),
    Row("DPE017", errors.RepeatedBackwardError, lambda: backward_only(make_loop(), times=2), "2 backward passes",
        "(a + b).backward()"),
    Row("DPE018", errors.BatchMismatchError, duplicated_samples, "such as '2'", "Augment each example in the data set"),
    Row("DPE019", errors.DetachedError, copied_optimizer, "optimizer is a copy", "dpengine.detach(optimizer)"),
    Row("DPE020", errors.MissingDependencyError, without_dp_accounting, "dp-accounting", "pip install"),
    Row("DPE022", errors.BatchStateError, lambda: make_loop().optimizer.step(), "step() has no complete batch",
        "Iterate over the loader that make_private returned"),
    Row("DPE022", errors.BatchStateError, lambda: next(iter((loop := make_loop()).loader)) and loop.optimizer.step(),
        "no backward pass", "Call loss.backward() before optimizer.step()"),
    Row("DPE022", errors.BatchStateError, eval_mode, "eval mode", "Call model.train() before the forward pass"),
    Row("DPE027", errors.ExtensionError, lambda: one_step(make_loop(clipping=DoubleClip())), "DoubleClip.factors()",
        "Return factors of at most bounds[k] / norms_BK[:, k]"),
]  # fmt: skip


@ignore_dpe012
@pytest.mark.parametrize("row", CATALOGUE, ids=lambda row: f"{row.code.lower()}-{row.trigger.__name__.strip('<>')}")
def test_errors_name_their_cause_and_their_remedy(row, monkeypatch):
    if row.code == "DPE020":
        monkeypatch.setitem(sys.modules, "dp_accounting", None)
    expect = pytest.warns if issubclass(row.kind, Warning) else pytest.raises
    with expect(row.kind, match=rf"\[{row.code}\]") as seen:
        row.trigger()
    if issubclass(row.kind, Warning):
        messages = [str(one.message) for one in seen if one.category is row.kind and row.code in str(one.message)]
        assert len(messages) == 1
        message = messages[0]
    else:
        message = str(seen.value)
        assert type(seen.value) is row.kind
        assert isinstance(seen.value, errors.PrivacyError)
        assert seen.value.code == row.code
        assert seen.value.docs.endswith(row.code.lower())
        assert seen.value.fix in message
    assert row.names in message
    assert row.remedy in message


def test_errors_every_code_of_the_training_loop_has_a_row():
    elsewhere = {"DPE000", "DPE014", "DPE021", "DPE023", "DPE024", "DPE025", "DPE026"}  # files, ranks, accountants
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.PrivacyError)]
    assert {kind.code for kind in kinds} - elsewhere <= {row.code for row in CATALOGUE}
    assert not issubclass(errors.PrivacyWarning, UserWarning)


# The suggested fixes, applied


def test_errors_dpe007_the_suggested_delta_is_accepted():
    make_loop(target_delta=round(suggested_delta(ROWS), 4), noise_multiplier=1.0)
    make_loop(target_delta=0.5, allow_large_delta=True, noise_multiplier=1.0)


@ignore_dpe012
def test_errors_dpe016_a_group_can_be_added_after_detach():
    loop = make_loop()
    loop.engine.detach(loop.model)
    loop.optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})


@ignore_dpe012
def test_errors_dpe022_training_continues_after_each_error():
    loop = make_loop()
    chunks = iter(loop.loader)
    for spoil in (lambda *_: None, lambda *b: backward_only_eval(loop, *b)):
        batch = next(chunks)
        spoil(*batch)
        with pytest.raises(errors.BatchStateError):
            loop.optimizer.step()
        loop.step(*batch)
    assert loop.engine.ledger.steps == 2


def backward_only_eval(loop, inputs, targets):
    loop.model.eval()
    loop.backward(inputs, targets)
    loop.model.train()
    loop.optimizer.zero_grad()


NOTICES = """
import warnings
import dpengine
from dpengine.errors import notice
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(3):
        notice("DPE012", "A repeated notice is shown once.")
        notice("DPE012", "A notice with another key is shown.", key="other")
        for one in (notice, dpengine):
            notice("DPE012", "Shown once for each object.", of=one)
    notice("DPE006", "Another code.")
print(len(seen), {w.category.__name__ for w in seen})
"""


def test_errors_each_notice_is_shown_once_for_each_object_at_fault():
    found = subprocess.run([sys.executable, "-c", NOTICES], capture_output=True, text=True, check=True)
    assert found.stdout.split(maxsplit=1) == ["5", "{'PrivacyWarning'}\n"]
