"""Section 6 of the user rules, the error catalogue, and section 1.11 of the faults, bad arguments.

An error has its class, its code, the name of what it is about, and a remedy that works when it is typed. A refusal
leaves everything as it was.
"""

import copy
import functools
import math
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loops import ROWS, examples, first_batch, make_loop, mlp, state_of
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import dpengine
from dpengine import PrivacyEngine, errors
from dpengine.accounting import PoissonGaussianEvent, Relation, suggested_delta, to_dp_accounting
from dpengine.clipping import Adaptive, Flat
from dpengine.run_plan import RunPlan
from dpengine.sampling import PoissonSampling
from dpengine.validation.loss import check_loss, per_example

UNREACHABLE = {"target_epsilon": 1e-9, "target_delta": 1e-9, "steps": 9}
quiet = pytest.mark.filterwarnings("ignore:.*DPE012")


# Section 6: what each row of the catalogue says


def batch_norm():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


class WithSpare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, inputs):
        return self.used(inputs)


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.layer(inputs) + F.linear(inputs, self.layer.weight)


def one_step(loop):
    loop.step(*first_batch(loop.loader))
    return loop


def backward_only(loop, *, times=1):
    inputs, targets = first_batch(loop.loader)
    for _ in range(times):
        loop.backward(inputs, targets)
    return loop


def foreign_optimizer():
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


def mixed_tokens(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-1)


def token_batch():
    targets = torch.tensor([[0, -1, -1], [1, 2, 0], [2, 2, 1]])
    return torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(0)), targets


def summed(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum")


def over_budget(**options):
    loop = make_loop(target_epsilon=2.0, steps=2, target_delta=1e-3, **options)
    for batch in loop.loader:
        loop.step(*batch)
    loop.optimizer.zero_grad()
    loop.optimizer.step()


def rdp():
    return PrivacyEngine(accountant="rdp")  # the fastest to say that it cannot be done


def group_added():
    make_loop().optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})


def lbfgs():
    make_loop(make_optimizer=torch.optim.LBFGS)


def doubled_rows():
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


def clipped_outside():
    loop = backward_only(make_loop())
    for p in loop.model.parameters():
        p.grad = torch.ones_like(p)
    loop.optimizer.step()


def accumulated():
    loop = make_loop()
    for _, batch in zip(range(2), loop.loader, strict=False):
        loop.backward(*batch)
    loop.optimizer.step()


@dataclass(frozen=True)
class Row:
    """A line of the catalogue: what brings it about, whom it names, and what it tells to do."""

    code: str
    kind: type[Exception] | type[Warning]
    trigger: Callable[[], Any]
    names: str
    remedy: str


CATALOGUE = [
    Row("DPE001", errors.UnsupportedLayerError, lambda: make_loop(batch_norm()), "1 (BatchNorm1d)", "dp.fix(model)"),
    Row("DPE002", errors.MissingGradientError, lambda: one_step(make_loop(WithSpare())), "'spare.weight'",
        "model.get_parameter('spare.weight').requires_grad_(False), or pass unused_parameters='zero'"),
    Row("DPE002", errors.MissingGradientError, lambda: backward_only(make_loop(Functional())), "'layer.weight'",
        "Call the layer itself"),
    Row("DPE003", errors.ParameterMismatchError, foreign_optimizer, "4 optimizer parameters",
        "Build the optimizer last"),
    Row("DPE004", errors.SamplingError, weighted_loader, "WeightedRandomSampler", "Weight the loss instead"),
    Row("DPE005", errors.StaleGradientError, no_zero_grad, "optimizer.zero_grad()", "top of the loop"),
    Row("DPE006", errors.PrivacyWarning, accumulated, "2 sampled batches", "accumulation_steps=2"),
    Row("DPE007", errors.InvalidBudgetError, lambda: make_loop(target_delta=0.5), "delta=0.5", "Suggested: 3.0e-02"),
    Row("DPE008", errors.CalibrationError, lambda: make_loop(engine=rdp(), **UNREACHABLE),
        "epsilon=1e-09", "Use fewer epochs, a smaller"),
    Row("DPE009", errors.ScaledGradientError, scaled_loss, "GradScaler",
        "torch.autocast(dtype=torch.bfloat16), or pass make_private(..., grad_scaler=scaler)"),
    Row("DPE010", errors.BatchDependentLossError, lambda: check_loss(mlp(), mixed_tokens, token_batch()), "row 0",
        "per_example(loss_fn)"),
    Row("DPE011", errors.BudgetExceeded, over_budget, "Step 3", "Raise target_epsilon deliberately, or report now"),
    Row("DPE012", errors.PrivacyWarning, lambda: make_loop(noise_multiplier=0), "noise_multiplier=0", "NOT PRIVATE"),
    Row("DPE012", errors.PrivacyWarning, lambda: make_loop(sampling="shuffle", noise_multiplier=1.0),
        "sampling='shuffle'", "epsilon not claimed"),
    Row("DPE013", errors.ReductionError, lambda: check_loss(mlp(), summed, examples().tensors), "looks like a sum",
        'loss_reduction="sum"'),
    Row("DPE015", errors.PrivacyWarning, clipped_outside, "p.grad was changed", "Use max_grad_norm"),
    Row("DPE016", errors.UnknownParameterError, group_added, "Parameter(2, 2)", "engine.detach(model)"),
    Row("DPE016", errors.UnknownParameterError, lbfgs, "LBFGS", "such as SGD or AdamW"),
    Row("DPE017", errors.RepeatedBackwardError, lambda: backward_only(make_loop(), times=2), "2 backward passes",
        "(a + b).backward()"),
    Row("DPE018", errors.BatchMismatchError, doubled_rows, "Layer '2'", "Keep the batch on axis 0"),
    Row("DPE019", errors.DetachedError, copied_optimizer, "optimizer is a copy", "dpengine.detach(optimizer)"),
    Row("DPE020", errors.MissingDependencyError, without_dp_accounting, "dp-accounting", "pip install"),
    Row("DPE022", errors.TicketError, lambda: make_loop().optimizer.step(), "step() has nothing to release",
        "Iterate over the loader that make_private returned"),
    Row("DPE022", errors.TicketError, lambda: next(iter((loop := make_loop()).loader)) and loop.optimizer.step(),
        "no backward pass", "Call loss.backward() before optimizer.step()"),
    Row("DPE022", errors.TicketError, eval_mode, "eval mode", "Call model.train() before the forward pass"),
]  # fmt: skip


@quiet
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


# Section 6: the remedy, typed


@quiet
def test_errors_dpe001_fix_mends_the_model():
    model, changes = dpengine.fix(batch_norm())
    assert len(changes) == 1
    assert one_step(make_loop(model)).engine.ledger.steps == 1


@quiet
def test_errors_dpe002_both_remedies_work():
    model = WithSpare()
    for name in ("spare.weight", "spare.bias"):
        model.get_parameter(name).requires_grad_(False)
    one_step(make_loop(model))
    loop = one_step(make_loop(WithSpare(), unused_parameters="zero", noise_multiplier=1.0))
    assert all(p.grad.any() for p in loop.model.spare.parameters())  # noise only, and noise at all


def test_errors_dpe007_the_suggested_delta_is_accepted():
    make_loop(target_delta=round(suggested_delta(ROWS), 4), noise_multiplier=1.0)
    make_loop(target_delta=0.5, allow_large_delta=True, noise_multiplier=1.0)


def test_errors_dpe010_per_example_mends_the_loss():
    check_loss(mlp(), per_example(mixed_tokens), token_batch())


@quiet
def test_errors_dpe016_detach_first_and_add_then():
    loop = make_loop()
    loop.engine.detach(loop.model)
    loop.optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})


@quiet
def test_errors_dpe022_the_loop_goes_on_after_each_refusal():
    loop = make_loop()
    chunks = iter(loop.loader)
    for spoil in (lambda *_: None, lambda *b: backward_only_eval(loop, *b)):
        batch = next(chunks)
        spoil(*batch)
        with pytest.raises(errors.TicketError):
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
        notice("DPE012", "Twice is once.")
        notice("DPE012", "But a key of its own is its own.", key="other")
    notice("DPE006", "Another code.")
print(len(seen), {w.category.__name__ for w in seen})
"""


def test_errors_each_notice_is_shown_once_in_a_process():
    found = subprocess.run([sys.executable, "-c", NOTICES], capture_output=True, text=True, check=True)
    assert found.stdout.split(maxsplit=1) == ["3", "{'PrivacyWarning'}\n"]


# Section 1.11: bad arguments


class Stream(IterableDataset):
    def __iter__(self):
        return iter(examples())


@dataclass
class Subject:
    """What a refused call must leave alone."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader
    engine: PrivacyEngine

    @classmethod
    def make(cls, *, model=None, optimizer=None, loader=None):
        model = mlp() if model is None else model
        if optimizer is None:
            parameters = model.parameters() if isinstance(model, nn.Module) else [torch.ones(1)]
            optimizer = torch.optim.SGD(parameters, lr=0.1)
        loader = DataLoader(examples(), batch_size=6, shuffle=True) if loader is None else loader
        return cls(model, optimizer, loader, PrivacyEngine())

    def snapshot(self):
        modules = list(self.model.modules()) if isinstance(self.model, nn.Module) else []
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        return {
            "modules": [(type(m), set(m.__dict__), m.training) for m in modules],
            "hooks": [list(getattr(m, name)) for m in modules for name in hooks],
            "parameters": [
                (id(p), p.requires_grad, p.grad, set(p.__dict__), list(p._post_accumulate_grad_hooks or ()))
                for m in modules
                for p in m.parameters(recurse=False)
            ],
            "optimizer": (type(self.optimizer), dict(getattr(self.optimizer, "__dict__", {}))),
            "loader": (type(self.loader), dict(getattr(self.loader, "__dict__", {}))),
            "engine": (list(self.engine.runs), self.engine.ledger.history, self.engine._delta),
            "torch": torch.get_rng_state().tolist(),
            "numpy": repr(np.random.get_state()),
            "python": random.getstate(),
        }

    def call(self, **options):
        return self.engine.make_private(self.model, self.optimizer, self.loader, **options)


@dataclass(frozen=True)
class Bad:
    """Arguments that must be refused: the fault's id, the error, what its message must hold, and the arguments."""

    id: str
    kind: type[Exception]
    match: str
    options: dict[str, Any]
    subject: Callable[[], Subject] = Subject.make
    noise: bool = True  # whether a valid noise multiplier is passed as well


Budget = errors.InvalidBudgetError
nan, inf = math.nan, math.inf


def attached(part):
    loop = make_loop(noise_multiplier=1.0)
    extra = {"model": loop.model} if part == "model" else {"model": nn.Sequential(loop.model)}
    if part == "child":
        extra = {"model": loop.model[0]}
    subject = Subject.make(**extra)
    subject.kept = loop
    return subject


def with_private_optimizer():
    loop = make_loop(noise_multiplier=1.0)
    return Subject.make(model=mlp(), optimizer=loop.optimizer)


def with_parameter_twice():
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.SGD([*model.parameters(), model[0].weight], lr=0.1)
    return Subject.make(model=model, optimizer=optimizer)


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(mlp())


def loading(make):
    return lambda: Subject.make(loader=make())


def modelling(make):
    return lambda: Subject.make(model=make())


class OwnBatches(BatchSampler):
    pass


def empty():
    return DataLoader(TensorDataset(torch.zeros(0, 4)), 2)


def with_rdp():
    subject = Subject.make()
    subject.engine = rdp()
    return subject


def frozen():
    model = mlp().requires_grad_(False)
    return Subject.make(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def with_foreign_optimizer():
    return Subject.make(model=mlp(), optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1))


def other_optimizer():
    return torch.optim.SGD(mlp().parameters(), lr=0.1)


def given(id, kind, argument, values, *, match="", noise=True, **rest):
    """The same fault with several values."""
    expected = [match or re.escape(f"{argument}={value!r}") for value in values]
    return [Bad(id, kind, m, {argument: v, **rest}, noise=noise) for v, m in zip(values, expected, strict=True)]


BAD = [
    *given("F-B1", Budget, "noise_multiplier", (-1, nan, inf, "1.1", True), noise=False),
    Bad("F-B1", Budget, r"noise_multiplier=1e-30.*round to nothing",
        {"noise_multiplier": 1e-30, "max_grad_norm": 1e-3}),
    Bad("F-B1", Budget, r"noise_multiplier=4.0.*count_noise_multiplier",
        {"noise_multiplier": 4.0, "clipping": Adaptive(count_noise_multiplier=1.0)}),
    *given("F-B2", Budget, "max_grad_norm", (0, -1.0, nan, inf, "1"), match="max_norm="),
    Bad("F-B2", Budget, r"max_grad_norm=\[1.0, 1.0\] is a list", {"max_grad_norm": [1.0, 1.0]}),
    Bad("F-B2", ValueError, "3 thresholds for 2 layers", {"max_grad_norm": [1.0, 1.0, 1.0], "clipping": "per_layer"}),
    Bad("F-B2", ValueError, "say different things", {"max_grad_norm": 2.0, "clipping": Flat(1.0)}),
    *given("F-B3", ValueError, "sample_rate", (0, -0.1, 1.5, nan), match="sample_rate"),
    *given("F-B3", ValueError, "expected_batch_size", (0, -1, nan, inf), match="expected_batch_size"),
    Bad("F-B3", TypeError, r"sample_rate.*'a'", {"sample_rate": "a"}),
    *given("F-B4", Budget, "epochs", (0, -1, 1.5, True, "2")),
    *given("F-B4", Budget, "steps", (0, -1, 2.0)),
    Bad("F-B4", Budget, "epochs and steps were both given", {"epochs": 1, "steps": 1}),
    *given("F-B4", (TypeError, ValueError), "physical_batch_size", (0, -1, 1.5), match="physical_batch_size"),
    *given("F-B4", (TypeError, ValueError), "accumulation_steps", (0, -1, 1.5), match="accumulation_steps"),
    Bad("F-B4", ValueError, "physical_batch_size=2 and accumulation_steps=2",
        {"physical_batch_size": 2, "accumulation_steps": 2}),
    *given("F-B5", Budget, "target_delta", (0.0, 1.0, -1.0, 2.0, nan), match="delta="),
    Bad("F-B5", Budget, "delta=0.1 is too large for 24 rows", {"target_delta": 0.1}),
    *given("F-B6", Budget, "target_epsilon", (0.0, -1.0, nan, inf), noise=False, steps=2),
    Bad("F-B6", errors.CalibrationError, "DPE008", UNREACHABLE, with_rdp, noise=False),
    Bad("F-B7", Budget, "both were given", {"target_epsilon": 3.0, "steps": 2}),
    Bad("F-B7", Budget, "neither was given", {}, noise=False),
    Bad("F-B7", Budget, "Pass epochs= or steps=", {"target_epsilon": 3.0}, noise=False),
    Bad("F-B7", Budget, "sampling='shuffle'", {"target_epsilon": 3.0, "steps": 2, "sampling": "shuffle"}, noise=False),
    Bad("F-B8", ValueError, r"clipping='flatt' is not known.*flat, per_layer, automatic", {"clipping": "flatt"}),
    Bad("F-B8", ValueError, "clipping=1.0", {"clipping": 1.0}),
    Bad("F-B8", ValueError, r"sampling.*'poisson', 'shuffle'.*'poison'", {"sampling": "poison"}),
    Bad("F-B8", ValueError, r"grad_sample_mode='fast' is not known.*'auto', 'hooks'", {"grad_sample_mode": "fast"}),
    Bad("F-B8", ValueError, r"loss_reduction='none' is not known.*'mean', 'sum'", {"loss_reduction": "none"}),
    Bad("F-B8", ValueError, "unused_parameters=None", {"unused_parameters": None}),
    Bad("F-B8", ValueError, r"on_budget='ignore'.*'stop', 'raise', 'warn'", {"on_budget": "ignore"}),
    Bad("F-B10", errors.UnsupportedLayerError, "no trainable parameter", {}, frozen),
    Bad("F-B11", errors.ParameterMismatchError, r"4 optimizer parameters .*\(5, 4\)", {}, with_foreign_optimizer),
    Bad("F-B12", errors.ParameterMismatchError, r"twice.*List each parameter once", {}, with_parameter_twice),
    *[
        Bad("F-B13", errors.UnknownParameterError, r"private already.*detach", {}, functools.partial(attached, part))
        for part in ("model", "parent", "child")
    ],
    Bad("F-B13", errors.UnknownParameterError, r"optimizer \(DPSGD\) is private already", {}, with_private_optimizer),
    Bad("F-B14", errors.SamplingError, r"empty.*example_input=", {}, loading(empty)),
    Bad("F-B14", errors.SamplingError, r"empty.*example_input=",
        {"sample_rate": 0.1, "expected_batch_size": 3, "target_delta": 1e-5}, loading(empty)),
    Bad("F-B15", errors.SamplingError, "WeightedRandomSampler", {},
        loading(lambda: DataLoader(examples(), 6, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS)))),
    Bad("F-B15", errors.SamplingError, "SubsetRandomSampler", {},
        loading(lambda: DataLoader(examples(), 6, sampler=SubsetRandomSampler(range(9))))),
    Bad("F-B15", errors.SamplingError, "replacement=True", {},
        loading(lambda: DataLoader(examples(), 6, sampler=RandomSampler(examples(), replacement=True)))),
    Bad("F-B15", errors.SamplingError, "batch_sampler=OwnBatches", {},
        loading(lambda: DataLoader(examples(), batch_sampler=OwnBatches(SequentialSampler(examples()), 6, False)))),
    Bad("F-B15", errors.SamplingError, "IterableDataset", {}, loading(lambda: DataLoader(Stream(), 6))),
    Bad("F-B15", errors.SamplingError, "is not a torch DataLoader", {}, loading(lambda: [1, 2])),
    Bad("F-B17", errors.UnsupportedLayerError, "float16", {}, modelling(lambda: mlp().half())),
    Bad("layer", errors.UnsupportedLayerError, "BatchNorm1d", {}, modelling(batch_norm)),
    Bad("scripted", errors.UnsupportedLayerError, r"The model \(\w+\) is compiled by torch.jit.*ordinary module", {},
        modelling(scripted)),
    Bad("scripted", errors.UnsupportedLayerError, r"1 \(\w+\) is compiled by torch.jit.*ordinary module", {},
        modelling(lambda: nn.Sequential(nn.Linear(4, 4), scripted()))),
    Bad("F-B18", TypeError, "Did you mean 'noise_multiplier'", {"noise_multipler": 1.0}),
    Bad("type", TypeError, "module is a list", {}, modelling(lambda: [mlp()])),
    Bad("type", TypeError, "optimizer is a dict", {}, lambda: Subject.make(optimizer={"lr": 1})),
    Bad("type", TypeError, "grad_scaler is a str", {"grad_scaler": "cpu"}),
    Bad("type", TypeError, "lr_scheduler is a float", {"lr_scheduler": 0.1}),
    Bad("type", TypeError, r"lr_scheduler is an optimizer \(SGD\)", {"lr_scheduler": other_optimizer()}),
    Bad("scheduler", ValueError, r"lr_scheduler \(StepLR\) belongs to another optimizer.* SGD",
        {"lr_scheduler": torch.optim.lr_scheduler.StepLR(other_optimizer(), 1)}),
    *given("type", TypeError, "batch_first", ("no", 1, None)),
    *given("type", TypeError, "allow_large_delta", ("no", 1)),
]  # fmt: skip


def name_of(bad):
    shown = ",".join(
        f"{k}={v if isinstance(v, (int, float, str)) else type(v).__name__}" for k, v in bad.options.items()
    )
    return f"{bad.id}-{shown or bad.match[:20]}"


@pytest.mark.parametrize("bad", BAD, ids=name_of)
def test_errors_bad_arguments_are_refused_and_change_nothing(bad):
    subject = bad.subject()
    before = subject.snapshot()
    options = {"noise_multiplier": 1.0, **bad.options} if bad.noise else bad.options
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(bad.kind, match=bad.match):
            subject.call(**options)
    assert subject.snapshot() == before


def test_errors_fb_after_a_refusal_the_same_objects_train():
    subject = Subject.make(model=nn.Sequential(nn.Linear(4, 3)))
    for options in ({"noise_multiplier": -1}, {"noise_multiplier": 1.0, "accumulation_steps": 0}):
        with pytest.raises(ValueError):
            subject.call(**options)
    model, optimizer, loader = subject.call(noise_multiplier=1.0)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    assert subject.engine.ledger.steps == len(loader)


def test_errors_fb_a_warning_that_is_an_error_changes_nothing_either():
    subject = Subject.make()
    before = subject.snapshot()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(errors.PrivacyWarning, match="NOT PRIVATE"):
            subject.call(noise_multiplier=0)
    assert subject.snapshot() == before


def test_errors_fb8_a_plan_takes_relations_of_the_enum_only():
    sampling = PoissonSampling(10, 0.1, 10, 1.0)
    for relation in ("zero-out", "anything", None):
        with pytest.raises(TypeError, match=r"relation=.*Relation\.ADD_OR_REMOVE_ONE"):
            RunPlan(sampling, Flat(1.0), 1.0, 1.0, relation)
    RunPlan(sampling, Flat(1.0), 1.0, 1.0, Relation.ZERO_OUT)
    for size in (0.0, -1.0, nan, inf):
        with pytest.raises(Budget, match="expected_batch_size"):
            RunPlan(sampling, Flat(1.0), 1.0, size, Relation.ZERO_OUT)


def test_errors_fb8_an_unknown_accountant_is_refused():
    with pytest.raises(ValueError, match=r"moments.*pld"):
        PrivacyEngine(accountant="moments")


def test_errors_fb11_a_model_with_more_parameters_than_the_optimizer_is_told():
    with pytest.warns(errors.PrivacyWarning, match=r"DPE003.*2 trainable parameters.*'2\.weight'"):
        make_loop(make_optimizer=lambda ps: torch.optim.SGD(ps[:2], lr=0.1), noise_multiplier=1.0)


def test_errors_fb14_an_empty_data_set_trains_on_noise_alone():
    loop = make_loop(
        dataset=TensorDataset(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)),
        noise_multiplier=1.0,
        sample_rate=0.25,
        expected_batch_size=6,
        target_delta=1e-5,
        example_input=(torch.zeros(4), torch.tensor(0)),
    )
    before = state_of(loop.model)
    for inputs, targets in loop.loader:
        assert inputs.shape == (0, 4)
        loop.step(inputs, targets)
    assert loop.engine.ledger.steps == 4
    assert not any(torch.equal(before[name], value) for name, value in state_of(loop.model).items())


@quiet
def test_errors_fb13_a_second_make_private_after_detach_is_fine():
    loop = make_loop()
    loop.engine.detach(loop.model)
    with pytest.raises(errors.UnknownParameterError, match="not private in this engine"):
        loop.engine.detach(loop.model)
    again = make_loop(loop.model, make_optimizer=lambda _: loop.optimizer, engine=loop.engine)
    one_step(again)
