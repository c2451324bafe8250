"""Settings and call sequences, drawn from a seed alone: plain data, without dpengine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MODES = ("auto", "auto", "hooks", "functorch", "ew", "ghost", "ghost")
CLIPPINGS = ("flat", "flat", "per_layer", "per_layer_list", "groups", "automatic", "adaptive", "adaptive")
NOISES = ("gaussian", "band_mf", "blt", "banded_inverse")
PLANS = ("dp_sgd", "band_mf_plan", "blt_plan", "banded_inverse_plan")
SAMPLINGS = ("poisson", "poisson", "constants", "shuffle", "units", "units_sum")
MODELS = ("linear", "mlp", "mlp", "frozen", "unused", "tied", "norm", "raw", "embedding", "checkpointed")
PLANNED = {"clipping": "flat", "sampling": "poisson", "rows": 12, "batch_size": 4}  # what all plans below fit
PARAMETERS = 3  # the first ones of a model, which operations freeze and leak


@dataclass(frozen=True)
class Settings:
    """Arguments by which a case is made private, by the keys that ``player`` understands."""

    seed: int
    model: str = "mlp"
    mode: str = "auto"
    clipping: str = "flat"
    noise: str = "gaussian"
    sampling: str = "poisson"
    reduction: str = "mean"
    unused: str = "error"
    optimizer: str = "SGD"
    accountant: str = "rdp"
    noise_multiplier: float = 1.0
    max_grad_norm: float = 0.7
    rows: int = 10
    batch_size: int = 4
    physical: int | None = None
    accumulation: int = 1
    target_epsilon: float | None = None
    on_budget: str = "stop"
    seeded: bool = True
    ledger_file: bool = False
    reserve: int = 1
    topology: str = "data"


Operation = tuple[Any, ...]  # a method of the player, and its arguments


@dataclass(frozen=True)
class Case:
    """A case that both sides run."""

    settings: Settings
    operations: list[Operation] = field(default_factory=list)


class Net(nn.Module):
    """A model with a handful of parameters."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        narrow = kind in {"tied", "embedding", "checkpointed"}
        self.first = nn.Embedding(4, 3) if kind == "embedding" else nn.Linear(3, 3 if narrow else 4)
        self.last = nn.Linear(3 if narrow else 4, 2)
        self.norm = nn.LayerNorm(4, eps=0.0) if kind == "norm" else nn.Identity()  # a dropped sample gives NaN
        if kind == "linear":
            self.first, self.last = nn.Linear(3, 2), nn.Identity()
        if kind == "unused":
            self.spare = nn.Linear(2, 2)
        if kind == "raw":
            self.scale = nn.Parameter(torch.ones(4))
        if kind == "frozen":
            self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "embedding":
            return self.last(self.first((x[:, 0].abs() * 2).long().clamp(max=3)))
        if self.kind == "checkpointed":  # "ghost" cannot join the norms of the two uses
            x = checkpoint(self.first, x.detach().requires_grad_(), use_reentrant=True)
            return self.last(checkpoint(self.first, x, use_reentrant=True))
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.first(x)) if self.kind == "tied" else x
        x = x * self.scale if self.kind == "raw" else x
        return self.last(self.norm(x))


def settings_of(seed: int, choose: random.Random, *, rare: float) -> Settings:
    """Draws settings; ``rare`` is the probability of the noises, plans and budgets that take long to set up."""
    batch_size = choose.randint(2, 6)
    chunks = choose.choice([{}, {}, {}, {"physical": choose.randint(1, 3)}, {"accumulation": 2}])
    more: dict[str, Any] = {}
    if choose.random() < rare:
        more = choose.choice(
            [
                {"noise": choose.choice(NOISES[1:]), **PLANNED},
                {"noise": choose.choice(PLANS), **PLANNED},
                {"target_epsilon": choose.choice([3.0, 8.0]), "on_budget": choose.choice(["stop", "raise", "warn"])},
                {"ledger_file": True, "reserve": choose.choice([1, 1, 3])},
            ]
        )
    sampling = choose.choice(SAMPLINGS)
    modes = MODES[:1] if sampling.startswith("units") and choose.random() < 0.9 else MODES  # others are refused
    return Settings(
        **{
            "seed": seed,
            "model": choose.choice(MODELS),
            "mode": choose.choice(modes),
            "clipping": choose.choice(CLIPPINGS),
            "sampling": sampling,
            "reduction": choose.choice(["mean", "sum"]),
            "unused": choose.choice(["error", "zero"]),
            "optimizer": choose.choice(["SGD", "SGD", "Adam"]),
            "noise_multiplier": choose.choice([0.0, 0.8, 1.3]),
            "max_grad_norm": choose.choice([0.1, 0.7, 5.0]),
            "rows": choose.randint(max(6, batch_size), 14),
            "batch_size": batch_size,
            "seeded": choose.random() < 0.7,
            **chunks,
            **more,
        }
    )


def train(*, forward: Operation = ("forward",)) -> list[Operation]:
    return [("next",), ("zero_grad",), forward, ("backward",), ("step",)]


def merged() -> list[Operation]:
    return [*train()[:-1], ("next",), ("forward",), ("backward",), ("step",)]


def run(seed: int) -> Case:
    """An orderly run: steps, a change of constants, a checkpoint that it goes on from, and more steps."""
    choose = random.Random(f"run {seed}")
    settings = settings_of(seed, choose, rare=0.5)
    operations = [("attach",)]
    for part in range(3):
        for _ in range(choose.randint(2, 5)):
            operations += train()
        if part < 2:
            operations += choose.choice(
                [
                    [("finish",), ("save",), ("resume", choose.random() < 0.5)],
                    [("finish",), ("save",), ("resume", choose.random() < 0.5)],
                    [("change", "noise_multiplier", 1.7)],
                    [("schedule", "max_grad_norm", 0.5)],
                    [("detach",), ("attach",)],
                ]
            )
    return Case(settings, [*operations, ("epsilon",), ("detach",)])


def spread(seed: int) -> Case:
    """An orderly run of two processes."""
    choose = random.Random(f"spread {seed}")
    more = {"unused": "zero", "topology": ("data", "ddp", "fsdp")[seed % 3], "model": choose.choice(MODELS[:4])}
    modes = {"mode": choose.choice(("auto", "hooks"))} if seed % 3 == 2 else {}
    settings = settings_of(seed, choose, rare=0.3)
    settings = replace(settings, **{"ledger_file": False, "noise_multiplier": 1.1, **more, **modes})
    return Case(
        settings, [("attach",), *train() * 4, ("finish",), ("save",), ("resume", True), *train() * 2, ("epsilon",)]
    )


def sequence(seed: int) -> Case:
    """Calls in an order that no tutorial shows."""
    choose = random.Random(f"sequence {seed}")
    operations: list[Operation] = [("attach",)]
    for _ in range(choose.randint(4, 9)):
        operations += _shuffled(choose, _phrase(choose))
    return Case(settings_of(seed, choose, rare=0.08), [*operations, *train(), ("epsilon",), ("detach",)])


DIRECTED: list[tuple[dict[str, Any], list[Operation]]] = [  # what is easy to lose, and seldom drawn
    ({"clipping": "adaptive", "reduction": "sum"}, train() * 3),
    ({"model": "frozen"}, [("freeze", 1), *train(), *train(forward=("forward", "leak", 1)), *train()]),
    ({"noise_multiplier": 0.0}, [*train()[:-1], ("fault_in_charge", "zero_grad"), *train()]),
    ({"noise_multiplier": 0.0}, [*train()[:-1], ("fault_in_charge", "detach"), ("attach",), *train()]),
    ({"model": "norm", "mode": "ghost"}, [*train(), *train(forward=("forward", "not_finite")) * 3, *train()]),
    ({"model": "checkpointed", "mode": "ghost"}, train() * 2),
    ({"mode": "ghost"}, [*train(forward=("forward", "twice")) * 2, *train()[:-1], *merged(), *train()]),
    ({"seeded": False}, [*train() * 2, ("save",), ("resume", False), *train()]),
    ({"seeded": False, "noise": "band_mf", **PLANNED}, [*train() * 2, ("save",), ("resume", True), *train()]),
    ({"sampling": "units_sum"}, train() * 3),
    (
        {"noise": "blt", **PLANNED},
        [*train(), ("next",), ("next",), *train()[1:], ("save",), ("resume", True), *train()],
    ),
    ({"target_epsilon": 1.0, "on_budget": "raise"}, train() * 30),
    ({"physical": 1, "clipping": "automatic"}, [*train() * 9, ("change", "max_grad_norm", 0.2), *train() * 9]),
    ({"ledger_file": True, "reserve": 3}, [*train() * 3, ("fault_in_step",), *train()]),
]


def directed(seed: int) -> Case:
    """A case of the table."""
    settings, operations = DIRECTED[seed % len(DIRECTED)]
    return Case(Settings(**{"seed": seed, **settings}), [("attach",), *operations, ("epsilon",), ("detach",)])


def alone(seed: int) -> Case:
    """Calls of ``PerSampleGradientClipper`` or ``GradSampleModule``, without an engine."""
    choose = random.Random(f"alone {seed}")
    clips = choose.random() < 0.5
    last = [("clip",), ("pre_step",), ("update",), ("zero_grad",)] if clips else [("samples",), ("zero_grad",)]
    single: list[Operation] = [("reset",)] if clips else []
    single += [*last, ("freeze", choose.randrange(PARAMETERS)), ("eval_mode",), ("train_mode",), ("samples",)]
    operations: list[Operation] = [("clipper",) if clips else ("grad_sample_module",)]
    for _ in range(choose.randint(3, 8)):
        phrase = [("rows", choose.randint(0, 5)), _forward(choose), ("backward",), last[0]]
        phrase += last[1:] if choose.random() < 0.6 else []
        phrase += [choose.choice(single)] if choose.random() < 0.3 else []
        operations += _shuffled(choose, phrase)
    return Case(settings_of(seed, choose, rare=0.0), operations)


def _forward(choose: random.Random) -> Operation:
    if choose.random() < 0.7:
        return ("forward",)
    kinds = (
        "leak",
        "leak",
        "fewer",
        "doubled",
        "not_finite",
        "not_finite",
        "fault",
        "fault_in_backward",
        "fault_in_loss",
        "none",
    )
    kind = choose.choice((*kinds, "twice", "two_passes", "per_example"))
    return ("forward", kind, choose.randrange(PARAMETERS)) if kind == "leak" else ("forward", kind)


def _phrase(choose: random.Random) -> list[Operation]:
    index = choose.randrange(PARAMETERS)
    faulty = choose.choice(["next", "zero_grad", "step", "detach"])
    phrases: list[tuple[int, Callable[[], list[Operation]]]] = [
        (12, lambda: train(forward=_forward(choose))),
        (2, lambda: [("next",), _forward(choose), ("backward",)]),
        (2, merged),
        (3, lambda: [choose.choice([("next",), ("zero_grad",), ("backward",), ("step",), ("forward",)])]),
        (2, lambda: [*train()[:-1], ("fault_in_step",)]),
        (3, lambda: [*train()[: choose.randint(1, 4)], ("fault_in_charge", faulty)]),
        (2, lambda: [("change", "noise_multiplier", choose.choice([0.5, 2.0, -1.0]))]),
        (2, lambda: [("change", "max_grad_norm", choose.choice([0.2, 3.0, 0.0]))]),
        (1, lambda: [("schedule", choose.choice(["noise_multiplier", "max_grad_norm"]), 0.9)]),
        (2, lambda: [("freeze", index), *train(), ("freeze", index), ("next",), ("zero_grad",),
                     choose.choice([("forward",), ("forward", "leak", index)]), ("backward",), ("step",)]),
        (1, lambda: [("eval_mode",), ("forward",), ("backward",), ("train_mode",)]),
        (1, lambda: [("detach",), *train()[1:], ("attach",)]),
        (1, lambda: [("finish",), ("save",), ("resume", choose.random() < 0.5)]),
        (1, lambda: [("epsilon",)]),
        (1, lambda: [("next",), ("zero_grad",), ("closure_step",)]),
        (1, lambda: [choose.choice([("add_group",), ("load_state",)])]),
    ]  # fmt: skip
    return choose.choices([make for _, make in phrases], [weight for weight, _ in phrases])[0]()


def _shuffled(choose: random.Random, operations: list[Operation]) -> list[Operation]:
    """Leaves out, repeats and swaps a few operations."""
    found: list[Operation] = []
    for operation in operations:
        chance = choose.random()
        if chance < 0.05:
            continue
        found += [operation] * (2 if chance > 0.95 else 1)
        if 0.05 <= chance < 0.09 and len(found) > 1:
            found[-1], found[-2] = found[-2], found[-1]
    return found


KINDS: dict[str, Callable[[int], Case]] = {
    "directed": directed,
    "run": run,
    "spread": spread,
    "sequence": sequence,
    "alone": alone,
}
