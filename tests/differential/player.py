"""Plays a case on the package that is imported, and records what each call gave."""

from __future__ import annotations

import contextlib
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from differential.adapter import (
    Recorder,
    charges,
    digest,
    error_of,
    find,
    form_gradients_alone,
    projections,
    tables_are_untimed,
)
from differential.scenarios import KINDS, Case, Net, Settings
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import (
    Adaptive,
    Automatic,
    Flat,
    GradSampleModule,
    Groups,
    PerLayer,
    PerSampleGradientClipper,
    PrivacyEngine,
    checkpoint,
    noise,
    plan,
)

DELTA, STEPS = 1e-3, 24
_PLAN = {"iterations": STEPS, "noise_multiplier": 1.1, "l2_clip_norm": 0.7, "normalize_by": 4.0, "num_examples": 12}
NOISES: dict[str, Callable[[], dict[str, Any]]] = {
    "gaussian": lambda: {},
    "band_mf": lambda: {"noise": noise.BandMF(num_bands=2), "steps": STEPS},
    "blt": lambda: {"noise": noise.BLT(num_buffers=1), "steps": STEPS},
    "banded_inverse": lambda: {"noise": noise.BandedInverse(num_bands=2), "steps": STEPS},
    "dp_sgd": lambda: {"plan": plan.DPSGDConfig(sampling_prob=1 / 3, **_PLAN)},
    "band_mf_plan": lambda: {"plan": plan.BandMFConfig(strategy=(1.0, 0.5), sampling_prob=2 / 3, **_PLAN)},
    "blt_plan": lambda: {"plan": plan.BLTConfig(cycle_length=3, decays=(0.9,), scales=(0.3,), **_PLAN)},
    "banded_inverse_plan": lambda: {
        "plan": plan.BandedInverseConfig(cycle_length=3, coefficients=(1.0, -0.5), **_PLAN)
    },
}
SAMPLINGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "poisson": lambda rows: {},
    "constants": lambda rows: {"sample_rate": 0.4, "expected_batch_size": 3.0},
    "shuffle": lambda rows: {"sampling": "shuffle"},
    "units": lambda rows: {"privacy_unit": [i * i % 5 for i in range(rows)]},
    "units_sum": lambda rows: {"privacy_unit": [i // 2 for i in range(rows)], "unit_reduction": "sum"},
}


def policy_of(settings: Settings, model: nn.Module) -> Any:
    """Returns the clipping policy of a case, which the engine and the clipper alone both take."""
    norm, trainable = settings.max_grad_norm, [name for name, p in model.named_parameters() if p.requires_grad]
    layers = len({name.rpartition(".")[0] for name in trainable})
    policies: dict[str, Callable[[], Any]] = {
        "flat": lambda: Flat(norm),
        "per_layer": lambda: PerLayer(norm),
        "per_layer_list": lambda: PerLayer([norm * (1 + i) for i in range(layers)]),
        "groups": lambda: Groups({name.split(".")[0]: norm for name in trainable}),
        "automatic": lambda: Automatic(norm),
        "adaptive": lambda: Adaptive(norm, count_noise_multiplier=1.0),
    }
    return policies[settings.clipping]()


class Fault(RuntimeError):
    """A mistake in a user's code."""


def fail(*_: Any, **__: Any) -> None:
    raise Fault


class Player:
    """A user with a model, an optimizer and an engine. Each public method is one call of a sequence."""

    def __init__(self, settings: Settings, recorder: Recorder, folder: Path):
        self.settings, self.recorder, self.folder = settings, recorder, folder
        generator = torch.Generator().manual_seed(settings.seed)
        x = torch.randn(settings.rows, 3, generator=generator)
        self.data = TensorDataset(x, torch.randint(0, 2, (settings.rows,), generator=generator))
        self.stored: Any = None  # of an engine, by save
        self.batch: list[Tensor] = list(self.data[: settings.batch_size])
        self.loss: Any = None
        self.ledger: list[Any] = []
        self._build()

    def _build(self) -> None:
        torch.manual_seed(self.settings.seed)
        self.model: Any = Net(self.settings.model)
        self.parameters = list(self.model.parameters())
        kind = getattr(torch.optim, self.settings.optimizer)
        wrapped = _wrapped(self.model, self.settings.topology)
        self.model, self.parameters = wrapped, list(wrapped.parameters())
        self.optimizer = kind([p for p in self.parameters if p.requires_grad], lr=0.1)
        ledger = self.folder / "ledger" if self.settings.ledger_file else None
        seed = self.settings.seed if self.settings.seeded else None
        self.engine = PrivacyEngine(
            self.settings.accountant, seed=seed, ledger=ledger, reserve_steps=self.settings.reserve if ledger else 1
        )
        tables_are_untimed(self.engine)
        self.iterator: Iterator[Any] = iter(())
        self.loader: Any = ()

    def play(self, operations: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Calls one method after the other, and records each."""
        return [self._recorded(*operation) for operation in operations]

    def _recorded(self, name: str, *args: Any) -> dict[str, Any]:
        error = answer = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                answer = getattr(self, name)(*args)
            except (Exception, KeyboardInterrupt) as raised:
                error = raised
        named = [re.match(r"\[(DPE\d+)\]", str(one.message)) for one in caught]
        record = {
            "call": [name, *args],
            "answer": answer,
            "error": error_of(error),
            "warnings": [match[1] for match in named if match],
            "gradients": projections(p.grad for p in self.parameters),
            "parameters": projections(self.parameters),
            "draws": self.recorder.take(),
            "ledger": charges(self.engine),
        }
        if record["ledger"] == self.ledger:
            del record["ledger"]  # long, and as it was
        else:
            self.ledger = record["ledger"]
        return self.recorder.named({name: value for name, value in record.items() if value not in (None, [])})

    # The run

    def attach(self) -> str:
        s = self.settings
        options: dict[str, Any] = {**NOISES[s.noise](), **SAMPLINGS[s.sampling](s.rows)}
        if "plan" not in options:
            options["clipping"] = policy_of(s, self.model)
            budget = {
                "target_epsilon": s.target_epsilon,
                "target_delta": DELTA,
                "steps": STEPS,
                "on_budget": s.on_budget,
            }
            plain = {"noise_multiplier": s.noise_multiplier, "target_delta": DELTA}
            options = {**(plain if s.target_epsilon is None else budget), **options}
        _, _, self.loader = self.engine.make_private(
            self.model,
            self.optimizer,
            DataLoader(self.data, batch_size=s.batch_size),
            physical_batch_size=s.physical,
            accumulation_steps=s.accumulation,
            loss_reduction=s.reduction,
            grad_sample_mode=s.mode,
            unused_parameters=s.unused,
            **options,
        )
        self.iterator = iter(self.loader)
        return s.sampling

    def detach(self) -> None:
        self.engine.detach(self.model)

    def next(self) -> list[Any]:
        try:
            self.batch = next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.loader)
            self.batch = next(self.iterator)
        return [len(self.batch[-1]), digest(self.batch)]

    def save(self) -> None:
        checkpoint.save(self.folder / "checkpoint", self.engine)
        self.stored = self.engine.state_dict()

    def load_state(self) -> None:
        self.engine.load_state_dict(self.stored)

    def resume(self, nothing_left_since: bool) -> None:
        with contextlib.suppress(RuntimeError):  # it may be detached
            self.engine.detach(self.model)
        self._build()
        self.attach()
        checkpoint.load(self.folder / "checkpoint", self.engine, nothing_left_since=nothing_left_since)

    def epsilon(self) -> str:
        return repr(self.engine.get_epsilon(DELTA))

    def change(self, constant: str, value: float) -> None:
        setattr(self.optimizer, constant, value)

    def schedule(self, constant: str, gamma: float) -> None:
        find("schedule")(self.optimizer, constant, find("exponential")(gamma)).step()

    # The loop

    def forward(self, kind: str = "plain", index: int = 0) -> str:
        x, y = self.batch
        if kind == "fewer":
            x, y = x[1:], y[1:]
        elif kind == "doubled":
            x, y = torch.cat([x, x]), torch.cat([y, y])
        elif kind == "not_finite" and len(x):
            x = x.clone()
            x[0] = float("nan")
        self.loss = None
        if kind == "none":
            return "none"
        hook = self._fault_hook(kind)
        try:
            loss_B = F.cross_entropy(self.model(x), y, reduction="none")
        finally:
            if hook is not None:
                hook.remove()
        if kind == "fault_in_loss":
            raise Fault
        if kind == "twice":
            loss_B = loss_B + F.cross_entropy(self.model(x), y, reduction="none")
        loss = loss_B if kind == "per_example" else loss_B.sum()
        if self.settings.reduction == "mean" and kind != "per_example":
            loss = loss / max(1, len(x))
        if kind == "leak":
            loss = loss + 0.1 * self.parameters[min(index, len(self.parameters) - 1)].square().sum()
        if kind == "two_passes":
            loss.backward(retain_graph=True)
        self.loss = loss
        return projections([loss])

    def _fault_hook(self, kind: str) -> Any:
        last = [part for part in self.model.modules() if isinstance(part, nn.Linear)][-1]
        if kind == "fault":
            return last.register_forward_hook(fail)
        if kind == "fault_in_backward":
            return last.register_forward_pre_hook(lambda part, given: given[0].requires_grad and _trip(given[0]))
        return None

    def backward(self) -> None:
        if self.loss is None:
            return
        if self.loss.dim():
            self.engine.backward(self.loss)
        else:
            self.loss.backward()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> bool:
        self.optimizer.step()
        return getattr(self.optimizer, "step_was_skipped", False)

    def finish(self) -> None:
        """Steps until no chunk of a logical batch waits, so that the run can be saved."""
        for _ in range(12):
            if not self.optimizer.step_was_skipped:
                return
            self.next()
            self.optimizer.zero_grad()
            self.forward()
            self.backward()
            self.optimizer.step()

    def closure_step(self) -> None:
        def closure() -> Any:
            self.forward()
            self.backward()

        self.optimizer.step(closure)

    def fault_in_step(self) -> None:
        hook = self.optimizer.register_step_pre_hook(fail)
        try:
            self.optimizer.step()
        finally:
            hook.remove()

    def fault_in_charge(self, call: str) -> Any:
        self.engine.ledger.charge = fail
        try:
            return getattr(self, call)()
        finally:
            del self.engine.ledger.charge

    def freeze(self, index: int) -> None:
        parameter = self.parameters[min(index, len(self.parameters) - 1)]
        parameter.requires_grad_(not parameter.requires_grad)

    def eval_mode(self) -> None:
        self.model.eval()

    def train_mode(self) -> None:
        self.model.train()

    def add_group(self) -> None:
        self.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    # Without an engine

    def clipper(self) -> None:
        s = self.settings
        more = {"loss_reduction": s.reduction, "grad_sample_mode": s.mode}
        self.alone: Any = PerSampleGradientClipper(self.model, policy_of(s, self.model), **more)

    def grad_sample_module(self) -> None:
        more = {"loss_reduction": self.settings.reduction, "force_functorch": self.settings.mode == "functorch"}
        self.alone = self.model = GradSampleModule(self.model, **more)

    def rows(self, count: int) -> None:
        self.batch = list(self.data[:count])

    def samples(self) -> str:
        found = [getattr(p, "grad_sample", None) for p in self.parameters]
        return projections(part for one in found for part in (one if isinstance(one, list) else [one]))

    def clip(self) -> None:
        self.alone.clip_and_accumulate()

    def pre_step(self) -> list[float]:
        return [float(value) for value in self.alone.pre_step()]

    def update(self) -> None:
        self.optimizer.step()

    def reset(self) -> None:
        self.alone.reset()


def _trip(tensor: Tensor) -> None:
    tensor.register_hook(fail)


def _wrapped(model: nn.Module, topology: str) -> nn.Module:
    if not dist.is_initialized() or topology == "data":
        return model
    if topology == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


def played(kind: str, seed: int, recorder: Recorder, folder: Path | None = None) -> list[dict[str, Any]]:
    """Returns the records of a case."""
    recorder.begin()
    torch.manual_seed(seed)
    form_gradients_alone(kind != "model")  # sums of models are compared up to rounding
    if kind == "model":
        from differential.models import played_model

        return recorder.named(played_model(seed, recorder))
    case: Case = KINDS[kind](seed)
    with tempfile.TemporaryDirectory() as own:
        return Player(case.settings, recorder, folder or Path(own)).play(case.operations)
