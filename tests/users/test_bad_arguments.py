"""Bad arguments of ``make_private``: the error names its cause and leaves all objects as they were."""

import copy
import functools
import math
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import inside
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from inside_parts import Plan
from loops import ROWS, Stream, examples, make_loop, mlp, one_step, state_of, train
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from dpengine import PrivacyEngine, errors
from dpengine.accounting import Relation
from dpengine.clipping import Adaptive, Flat
from dpengine.sampling.poisson import PoissonDraws

from .mistakes import UNREACHABLE_BUDGET, batch_norm_model, rdp_engine


@dataclass
class Subject:
    """Objects that a rejected call must leave unchanged."""

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
            "engine": (inside.runs_of(self.engine), self.engine.ledger.history),
            "torch": torch.get_rng_state().tolist(),
            "numpy": repr(np.random.get_state()),
            "python": random.getstate(),
        }

    def call(self, **options):
        return self.engine.make_private(self.model, self.optimizer, self.loader, **options)


@dataclass(frozen=True)
class Case:
    """Rejected arguments: the id of the hazard or a name, the error, a pattern of its message, and the arguments."""

    id: str
    kind: type[Exception]
    match: str
    options: dict[str, Any]
    subject: Callable[[], Subject] = Subject.make
    noise: bool = True  # also passes a valid noise multiplier


Budget = errors.InvalidBudgetError
nan, inf = math.nan, math.inf


def with_private(part):
    loop = make_loop(noise_multiplier=1.0)
    models = {"model": loop.model, "parent": nn.Sequential(loop.model), "child": loop.model[0]}
    subject = Subject.make(model=models[part])
    subject.private_loop = loop  # keeps the private run alive
    return subject


def with_private_optimizer():
    return Subject.make(model=mlp(), optimizer=make_loop(noise_multiplier=1.0).optimizer)


def with_parameter_twice():
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.SGD([*model.parameters(), model[0].weight], lr=0.1)
    return Subject.make(model=model, optimizer=optimizer)


def scripted_model():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(mlp())


def with_loader(make):
    return lambda: Subject.make(loader=make())


def with_model(make):
    return lambda: Subject.make(model=make())


class OwnSampler(BatchSampler):
    pass


def empty_loader():
    return DataLoader(TensorDataset(torch.zeros(0, 4)), 2)


def with_rdp_engine():
    subject = Subject.make()
    subject.engine = rdp_engine()
    return subject


def with_frozen_model():
    model = mlp().requires_grad_(False)
    return Subject.make(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def optimizer_of_another_model():
    return torch.optim.SGD(mlp().parameters(), lr=0.1)


def bad_values(id, kind, argument, values, *, match="", noise=True, **rest):
    """Returns one case for each invalid value of the argument."""
    expected = [match or re.escape(f"{argument}={value!r}") for value in values]
    return [Case(id, kind, m, {argument: v, **rest}, noise=noise) for v, m in zip(values, expected, strict=True)]


CASES = [
    *bad_values("B1", Budget, "noise_multiplier", (-1, nan, inf, "1.1", True), noise=False),
    Case("B1", Budget, r"noise_multiplier=1e-30.*rounds to",
        {"noise_multiplier": 1e-30, "max_grad_norm": 1e-3}),
    Case("B1", Budget, r"noise_multiplier=4.0.*count_noise_multiplier",
        {"noise_multiplier": 4.0, "clipping": Adaptive(count_noise_multiplier=1.0)}),
    *bad_values("B2", Budget, "max_grad_norm", (0, -1.0, nan, inf, "1"), match="max_norm="),
    *bad_values("B2", Budget, "max_grad_norm", [[bad, 1.0] for bad in (0, -1.0, nan, inf)], match="DPE007",
           clipping="per_layer"),
    Case("B2", Budget, r"max_grad_norm=\[1.0, 1.0\] is a list", {"max_grad_norm": [1.0, 1.0]}),
    Case("B2", ValueError, "3 clipping norms for 2 layers",
        {"max_grad_norm": [1.0, 1.0, 1.0], "clipping": "per_layer"}),
    Case("B2", ValueError, "contradicts clipping=", {"max_grad_norm": 2.0, "clipping": Flat(1.0)}),
    *bad_values("B3", ValueError, "sample_rate", (0, -0.1, 1.5, nan), match="sample_rate"),
    *bad_values("B3", ValueError, "expected_batch_size", (0, -1, nan, inf), match="expected_batch_size"),
    Case("B3", TypeError, r"sample_rate.*'a'", {"sample_rate": "a"}),
    *bad_values("B4", Budget, "epochs", (0, -1, 1.5, True, "2")),
    *bad_values("B4", Budget, "steps", (0, -1, 2.0)),
    Case("B4", Budget, "epochs and steps were both given", {"epochs": 1, "steps": 1}),
    *bad_values("B4", (TypeError, ValueError), "physical_batch_size", (0, -1, 1.5), match="physical_batch_size"),
    *bad_values("B4", (TypeError, ValueError), "accumulation_steps", (0, -1, 1.5), match="accumulation_steps"),
    Case("B4", ValueError, "physical_batch_size=2 and accumulation_steps=2",
        {"physical_batch_size": 2, "accumulation_steps": 2}),
    *bad_values("B5", Budget, "target_delta", (0.0, 1.0, -1.0, 2.0, nan), match="delta="),
    Case("B5", Budget, "target_delta=0.1 is too large for 24 examples", {"target_delta": 0.1}),
    *bad_values("B6", Budget, "target_epsilon", (0.0, -1.0, nan, inf), noise=False, steps=2),
    Case("B6", errors.CalibrationError, "DPE008", UNREACHABLE_BUDGET, with_rdp_engine, noise=False),
    Case("B7", Budget, "both were given", {"target_epsilon": 3.0, "steps": 2}),
    Case("B7", Budget, "neither was given", {}, noise=False),
    Case("B7", Budget, "Pass epochs= or steps=", {"target_epsilon": 3.0}, noise=False),
    Case("B7", Budget, "sampling='shuffle'", {"target_epsilon": 3.0, "steps": 2, "sampling": "shuffle"}, noise=False),
    Case("B8", ValueError, r"clipping='flatt' is not known.*flat, per_layer, automatic", {"clipping": "flatt"}),
    Case("B8", TypeError, "clipping=1.0 is not a policy", {"clipping": 1.0}),
    Case("B8", ValueError, r"sampling.*'poisson', 'shuffle'.*'poison'", {"sampling": "poison"}),
    Case("B8", ValueError, r"grad_sample_mode='fast' is not known.*'auto', 'hooks'", {"grad_sample_mode": "fast"}),
    Case("B8", ValueError, r"loss_reduction='none' is not known.*'mean', 'sum'", {"loss_reduction": "none"}),
    Case("B8", ValueError, "unused_parameters=None", {"unused_parameters": None}),
    Case("B8", ValueError, r"on_budget='ignore'.*'stop', 'raise', 'warn'", {"on_budget": "ignore"}),
    Case("B10", errors.UnsupportedLayerError, "no trainable parameter", {}, with_frozen_model),
    Case("B11", errors.ParameterMismatchError, r"4 optimizer parameters .*\(5, 4\)", {},
        lambda: Subject.make(optimizer=optimizer_of_another_model())),
    Case("B12", errors.ParameterMismatchError, r"twice.*List each parameter once", {}, with_parameter_twice),
    *[
        Case("B13", errors.UnknownParameterError, r"private already.*detach", {}, functools.partial(with_private, part))
        for part in ("model", "parent", "child")
    ],
    Case("B13", errors.UnknownParameterError, r"optimizer \(DPSGD\) is private already", {}, with_private_optimizer),
    Case("B14", errors.SamplingError, r"empty.*example_input=", {}, with_loader(empty_loader)),
    Case("B14", errors.SamplingError, r"empty.*example_input=",
        {"sample_rate": 0.1, "expected_batch_size": 3, "target_delta": 1e-5}, with_loader(empty_loader)),
    Case("B15", errors.SamplingError, "WeightedRandomSampler", {},
        with_loader(lambda: DataLoader(examples(), 6, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS)))),
    Case("B15", errors.SamplingError, "SubsetRandomSampler", {},
        with_loader(lambda: DataLoader(examples(), 6, sampler=SubsetRandomSampler(range(9))))),
    Case("B15", errors.SamplingError, "replacement=True", {},
        with_loader(lambda: DataLoader(examples(), 6, sampler=RandomSampler(examples(), replacement=True)))),
    Case("B15", errors.SamplingError, "batch_sampler=OwnSampler", {},
        with_loader(lambda: DataLoader(examples(), batch_sampler=OwnSampler(SequentialSampler(examples()), 6, False)))),
    Case("B15", errors.SamplingError, "IterableDataset", {}, with_loader(lambda: DataLoader(Stream(), 6))),
    Case("B15", errors.SamplingError, "is not a torch DataLoader", {}, with_loader(lambda: [1, 2])),
    Case("B17", errors.UnsupportedLayerError, "float16", {}, with_model(lambda: mlp().half())),
    Case("layer", errors.UnsupportedLayerError, "BatchNorm1d", {}, with_model(batch_norm_model)),
    Case("scripted", errors.UnsupportedLayerError, r"The model \(\w+\) is compiled by torch.jit.*original module", {},
        with_model(scripted_model)),
    Case("scripted", errors.UnsupportedLayerError, r"1 \(\w+\) is compiled by torch.jit.*original module", {},
        with_model(lambda: nn.Sequential(nn.Linear(4, 4), scripted_model()))),
    Case("B18", TypeError, "Did you mean 'noise_multiplier'", {"noise_multipler": 1.0}),
    Case("type", TypeError, "module is a list", {}, with_model(lambda: [mlp()])),
    Case("type", TypeError, "optimizer is a dict", {}, lambda: Subject.make(optimizer={"lr": 1})),
    Case("type", TypeError, "grad_scaler is a str", {"grad_scaler": "cpu"}),
    Case("type", TypeError, "lr_scheduler is a float", {"lr_scheduler": 0.1}),
    Case("type", TypeError, r"lr_scheduler is an optimizer \(SGD\)", {"lr_scheduler": optimizer_of_another_model()}),
    Case("scheduler", ValueError, r"lr_scheduler \(StepLR\) does not belong to the optimizer.* SGD",
        {"lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer_of_another_model(), 1)}),
    *bad_values("type", TypeError, "batch_first", ("no", 1, None)),
    *bad_values("type", TypeError, "allow_large_delta", ("no", 1)),
]  # fmt: skip


def case_id(bad):
    shown = (f"{k}={v if isinstance(v, (int, float, str)) else type(v).__name__}" for k, v in bad.options.items())
    return f"{bad.id}-{','.join(shown) or bad.match[:20]}"


@pytest.mark.hazard(
    "B1", "B2", "B3", "B4", "B5", "B6", "B7", "B8", "B10", "B11", "B12", "B13", "B14", "B15", "B17", "B18", "C10"
)
@pytest.mark.parametrize("bad", CASES, ids=case_id)
def test_bad_arguments_are_rejected_and_leave_all_objects_unchanged(bad):
    subject = bad.subject()
    before = subject.snapshot()
    options = {"noise_multiplier": 1.0, **bad.options} if bad.noise else bad.options
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(bad.kind, match=bad.match):
            subject.call(**options)
    assert subject.snapshot() == before


def test_the_same_objects_train_after_a_rejection():
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


def test_a_warning_that_is_an_error_changes_nothing():
    subject = Subject.make()
    before = subject.snapshot()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(errors.PrivacyWarning, match="NOT PRIVATE"):
            subject.call(noise_multiplier=0)
    assert subject.snapshot() == before


@pytest.mark.hazard("B8")
def test_a_plan_rejects_relations_outside_the_enum_and_invalid_batch_sizes():
    sampling = PoissonDraws(10, 0.1, 10, 1.0)
    for relation in ("zero-out", "anything", None):
        with pytest.raises(TypeError, match=r"relation=.*Relation\.ADD_OR_REMOVE_ONE"):
            Plan(sampling, Flat(1.0), 1.0, 1.0, relation)
    Plan(sampling, Flat(1.0), 1.0, 1.0, Relation.ZERO_OUT)
    for size in (0.0, -1.0, nan, inf):
        with pytest.raises(Budget, match="expected_batch_size"):
            Plan(sampling, Flat(1.0), 1.0, size, Relation.ZERO_OUT)


@pytest.mark.hazard("B8")
def test_an_unknown_accountant_is_rejected():
    with pytest.raises(ValueError, match=r"moments.*pld"):
        PrivacyEngine(accountant="moments")


@pytest.mark.hazard("B11")
def test_a_model_with_more_parameters_than_the_optimizer_is_reported():
    with pytest.warns(errors.PrivacyWarning, match=r"DPE003.*2 trainable parameters.*'2\.weight'"):
        make_loop(make_optimizer=lambda ps: torch.optim.SGD(ps[:2], lr=0.1), noise_multiplier=1.0)


@pytest.mark.hazard("B14")
def test_an_empty_data_set_trains_with_noise_only():
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
        assert inputs.shape == (1, 4)
        loop.step(inputs, targets)
    assert loop.engine.ledger.steps == 4
    assert not any(torch.equal(before[name], value) for name, value in state_of(loop.model).items())


@pytest.mark.filterwarnings("ignore:.*DPE012")
@pytest.mark.hazard("B13")
def test_make_private_works_again_after_detach():
    loop = make_loop()
    loop.engine.detach(loop.model)
    with pytest.raises(errors.UnknownParameterError, match="private in this engine, or was detached before"):
        loop.engine.detach(loop.model)
    again = make_loop(loop.model, make_optimizer=lambda _: loop.optimizer, engine=loop.engine)
    one_step(again)


def test_a_model_in_shared_memory_is_rejected_by_name_and_a_copy_trains():
    model = mlp()
    model.share_memory()
    with pytest.raises(errors.UnknownParameterError, match=r"DPE016.*'0.weight' is in shared memory.*copy.deepcopy"):
        make_loop(model)
    model = copy.deepcopy(model)
    loop = make_loop(model)
    assert train(loop) == loop.engine.ledger.steps
