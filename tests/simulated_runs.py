"""Runs of models and options on the CPU and on the simulated GPU: ``python -m tests.simulated_runs``.

Prints for each run the largest difference between the parameters, or the error on the simulated device. One process
runs all of them, because the device has to be loaded before torch is imported.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent))

from case_models import MODELS, Apply, Parts

from benchmarks.gpu_model import engine_on, generates_as_device
from benchmarks.kernel_log import Log
from benchmarks.simulated_gpu import Card, run_again, simulated
from dpengine import PrivacyEngine
from dpengine.noise import BLT, BandedInverse, BandMF

ROWS, BATCH, FEATURES, CLASSES = 24, 6, 4, 3
STEPS = 4
CAPABILITIES = [(7, 5), (8, 0), (8, 9), (9, 0), (12, 0)]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def vectors(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape)


def words() -> Tensor:
    return torch.randint(7, (ROWS, 5))


def mean(x: Tensor) -> Tensor:
    return x.mean(1)


def first(part: nn.Module, x: Tensor) -> Tensor:
    return part.layer(x)[0]


@dataclass(frozen=True)
class Run:
    """A short private run.

    Attributes:
        make: Makes the model.
        inputs: Makes the inputs of all samples.
        options: Arguments of ``make_private``.
        engine: Arguments of the engine.
        optimizer: Makes the optimizer.
        autocast: If True, forward pass and loss run in bfloat16 where autocast does so.
        backward_inside: If True, the backward pass runs in the context of autocast, too.
        dtype: Dtype of the model and of inputs.
    """

    make: Callable[[], nn.Module] = mlp
    inputs: Callable[[], Tensor] = lambda: vectors(FEATURES)
    options: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=0.5)
    autocast: bool = False
    backward_inside: bool = False
    dtype: torch.dtype = torch.float32

    def parameters(self, card: Card | None = None) -> list[Tensor]:
        """Returns the parameters after some steps, on the CPU."""
        torch.manual_seed(0)
        model, inputs = self.make().to(self.dtype), self.inputs()
        inputs = inputs.to(self.dtype) if inputs.is_floating_point() else inputs
        data = TensorDataset(inputs, torch.randint(CLASSES, (ROWS,)))
        model = model if card is None else card.move_model(model)
        move = (lambda tensor: tensor) if card is None else card.moved
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
        options = {"noise_multiplier": 0.0, **self.options}
        if "clipping" not in options:
            options["max_grad_norm"] = 0.5
        engine = PrivacyEngine(**{"seed": 0, **self.engine})
        model, optimizer, loader = engine.make_private(model, optimizer, DataLoader(data, batch_size=BATCH), **options)
        device = "cpu" if card is None else "cuda"
        autocast = torch.autocast(device, torch.bfloat16) if self.autocast else nullcontext()
        for x, y in _batches(loader, STEPS):
            optimizer.zero_grad()
            with autocast:
                loss = cross_entropy(model(move(x)), move(y), reduction=options.get("loss_reduction", "mean"))
                if self.backward_inside:
                    loss.backward()
            if not self.backward_inside:
                loss.backward()
            optimizer.step()
        return [p.detach().cpu().double() for p in model.parameters()]


def _batches(loader: Any, count: int) -> Any:
    while True:
        for batch in loader:
            yield batch
            count -= 1
            if not count:
                return


def with_lstm() -> nn.Module:
    return Parts(lambda m, x: m.head(m.layer(x)[0][:, -1]), layer=nn.LSTM(6, 8, batch_first=True), head=nn.Linear(8, 3))


def convolutions() -> nn.Module:
    layers = [nn.Conv1d(4, 8, 3, padding=1, groups=2), nn.ConvTranspose1d(8, 6, 3, stride=2)]
    return nn.Sequential(
        *layers, nn.InstanceNorm1d(6, affine=True), nn.PReLU(6), Apply(lambda x: x.mean(2)), nn.Linear(6, 3)
    )


def positions() -> nn.Module:
    run = lambda m, x: m.head((m.words(x) + m.places(torch.arange(x.shape[1], device=x.device)[None])).mean(1))  # noqa: E731
    return Parts(run, words=nn.Embedding(7, 8), places=nn.Embedding(5, 8), head=nn.Linear(8, 3))


def checkpointed() -> nn.Module:
    return Parts(lambda m, x: m.head(checkpoint(m.body, x, use_reentrant=False)), body=mlp(), head=nn.Linear(3, 3))


def unused() -> nn.Module:
    return Parts(lambda m, x: m.used(x), used=mlp(), other=nn.Linear(2, 2))


def bias_only() -> nn.Module:
    model = mlp()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return model


def not_finite() -> Tensor:
    x = vectors(FEATURES)
    x[::5] = float("nan")
    return x


SEQUENCES: dict[str, Any] = {
    "make": lambda: nn.Sequential(
        nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), Apply(mean), nn.Linear(64, 3)
    ),
    "inputs": lambda: vectors(5, 64),
}
RUNS = {
    **{f"model {case.id}": Run(case.make, lambda case=case: case.inputs(ROWS, torch.float32)[0]) for case in MODELS},
    "lstm": Run(with_lstm, lambda: vectors(5, 6)),
    "bidirectional gru": Run(
        lambda: Parts(
            lambda m, x: m.head(m.layer(x)[0].mean(1)),
            layer=nn.GRU(6, 8, batch_first=True, bidirectional=True),
            head=nn.Linear(16, 3),
        ),
        lambda: vectors(5, 6),
    ),
    "convolutions": Run(convolutions, lambda: vectors(4, 9)),
    "group norm": Run(
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.GroupNorm(3, 6), Apply(lambda x: x.mean(2)), nn.Linear(6, 3)),
        lambda: vectors(4, 9),
    ),
    "bilinear": Run(
        lambda: Parts(
            lambda m, x: m.head(m.norm(m.layer(x, x))),
            layer=nn.Bilinear(4, 4, 5),
            norm=nn.RMSNorm(5),
            head=nn.Linear(5, 3),
        )
    ),
    "positions of a table": Run(positions, words),
    "checkpoint": Run(checkpointed),
    **{
        f"mode {mode}": Run(options={"grad_sample_mode": mode})
        for mode in ("hooks", "functorch", "ghost", "whole_model")
    },
    **{
        f"sequences by {mode}": Run(**SEQUENCES, options={"grad_sample_mode": mode})
        for mode in ("hooks", "ghost", "whole_model")
    },
    **{
        f"clipping {name}": Run(options={"clipping": name, "max_grad_norm": 0.5}) for name in ("per_layer", "automatic")
    },
    "clipping adaptive": Run(options={"clipping": "adaptive", "noise_multiplier": 1.0}),
    "sum loss": Run(options={"loss_reduction": "sum"}),
    "physical batches": Run(options={"physical_batch_size": 3}),
    "accumulation": Run(options={"accumulation_steps": 2}),
    "privacy units": Run(options={"privacy_unit": np.arange(ROWS) // 2}),
    "unused parameter": Run(unused, options={"unused_parameters": "zero"}),
    "bias only": Run(bias_only),
    "samples that are not finite": Run(inputs=not_finite),
    "shuffled": Run(options={"sampling": "shuffle"}),
    "adamw": Run(optimizer=lambda params: torch.optim.AdamW(params, lr=0.01)),
    "momentum": Run(optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
    "float64": Run(dtype=torch.float64),
    "noise": Run(options={"noise_multiplier": 1.0}),
    **{
        f"noise {type(noise).__name__}": Run(options={"noise": noise, "noise_multiplier": 1.0, "epochs": 2})
        for noise in (BandMF(num_bands=2), BLT(), BandedInverse(num_bands=2))
    },
    "target epsilon": Run(options={"target_epsilon": 5.0, "target_delta": 1e-2, "epochs": 2, "noise_multiplier": None}),
}
NARROW = {
    "bfloat16 model": Run(dtype=torch.bfloat16),
    "autocast": Run(autocast=True),
    "autocast of sequences": Run(**SEQUENCES, autocast=True),
    "autocast of sequences, backward inside": Run(**SEQUENCES, autocast=True, backward_inside=True),
}


def compare(run: Run, capability: tuple[int, int] = (9, 0)) -> float | str:
    """Returns the largest difference of a parameter to the run on the CPU, or the error."""
    log = Log(lambda kernel: 0.0)
    with warnings.catch_warnings(), generates_as_device():
        warnings.simplefilter("ignore")
        expected = run.parameters()
        try:
            with simulated(log, "cpu", capability=capability) as card, engine_on(log, checks=True, draws=True):
                got = run.parameters(card)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True))


def name_with(run: str, capability: tuple[int, int]) -> str:
    """Returns the name of a run on a device of a compute capability."""
    return f"{run}, {capability[0]}.{capability[1]}"


def main() -> None:
    """Prints the results of all runs."""
    results = {name: compare(run) for name, run in RUNS.items()}
    for capability in CAPABILITIES:
        results |= {name_with(name, capability): compare(run, capability) for name, run in NARROW.items()}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    status = run_again("tests.simulated_runs", sys.argv[1:])
    if status is not None:
        sys.exit(status)
    main()
