"""Subjects: a random model with data, a loss and settings of the engine, all determined by one seed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from case_inputs import batch_second, channels_last, sliced, transposed
from generated.blocks import chain
from generated.draws import Draw
from generated.layers_of import entry, shape_after
from generated.modules import Cast
from generated.planted import PLANTED
from generated.uncovered import ByTable, uncovered
from torch import Tensor, nn

CLASSES, VOCABULARY, SIDE = 4, 6, 3
MODES = ("auto", "auto", "hooks", "functorch", "ew", "ghost", "whole_model")
SINGLE_SAMPLE_MODES = ("auto", "whole_model")  # modes that run single samples through units without a grad sampler
CLIPPINGS = ("flat", "per_layer", "automatic")
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.float64, torch.bfloat16)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: channels_last(x) if x.dim() > 3 else x,
    "transposed": lambda x: transposed(x) if x.dim() > 2 else x,
    "batch_second": batch_second,
    "sliced": sliced,
}
SIGNALS: dict[str, Callable[[Draw], tuple[int, ...]]] = {
    "vector": lambda draw: (draw.width(),),
    "sequence": lambda draw: (draw.whole(2, 5), draw.whole(3, 6)),
    "tokens": lambda draw: (draw.whole(2, 5),),
    "image": lambda draw: (draw.whole(1, 4), draw.whole(3, 6), draw.whole(3, 6)),
    "volume": lambda draw: (draw.whole(1, 3), draw.whole(2, 3), draw.whole(2, 4), draw.whole(2, 4)),
}


class Root(nn.Module):
    """The body between an entry and a head; accepts inputs and returns outputs in the form that the settings name."""

    def __init__(self, entry: nn.Module, side: nn.Module | None, body: nn.Module, head: nn.Module, output: str):
        super().__init__()
        self.entry, self.side, self.body, self.head = entry, side, body, head
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        main, side = _unpacked(args, kwargs)
        x = self.entry(main)
        if self.side is not None:
            beside = self.side(side)
            x = x + beside.reshape(len(beside), *[1] * (x.dim() - 2), beside.shape[-1])
        features = self.body(x)
        if features.dim() > 3:
            features = features.flatten(3).mean(dim=3).flatten(2).transpose(1, 2)
        logits = self.head(features)
        if self.output == "dict":
            return {"logits": logits, "features": features}
        return (logits, features) if self.output == "tuple" else logits


def _unpacked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Returns the main and the side input from any form of arguments."""
    given = list(args) + [kwargs[name] for name in ("main", "side") if name in kwargs]
    if len(given) == 1 and isinstance(given[0], dict):
        return given[0]["main"], given[0].get("side")
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = list(given[0])
    return given[0], given[1] if len(given) > 1 else None


FORMS: dict[str, Callable[[list[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "positional": lambda tensors: (tuple(tensors), {}),
    "keywords": lambda tensors: ((), dict(zip(("main", "side"), tensors, strict=False))),
    "mixed": lambda tensors: (tuple(tensors[:1]), dict(zip(("side",), tensors[1:], strict=False))),
    "dict": lambda tensors: ((dict(zip(("main", "side"), tensors, strict=False)),), {}),
    "tuple": lambda tensors: ((tuple(tensors),), {}),
}


def row_losses(output: Any, targets_B: Tensor) -> Tensor:
    """Returns the loss of each sample ``(B,)``: of the first output, plus 0.1 times that of the second."""
    if isinstance(output, dict):
        output = (output["logits"], output["features"])
    logits, more = output if isinstance(output, tuple) else (output, None)
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    if logits.dim() == 3:
        each = F.cross_entropy(logits.transpose(1, 2), targets_B[:, None].expand(logits.shape[:2]), reduction="none")
        losses_B = each.mean(dim=1)
    else:
        losses_B = F.cross_entropy(logits, targets_B, reduction="none")
    if more is not None:
        losses_B = losses_B + 0.1 * more.flatten(1).to(losses_B.dtype).square().mean(dim=1)
    return losses_B


@dataclass(frozen=True)
class Subject:
    """A random model, its batch, and the settings of the engine.

    Attributes:
        seed: Determines all other attributes.
        model: In train mode; it is copied before use.
        tensors: Main and perhaps side input, ``(B, ...)``, contiguous.
        targets_B: The class of each sample.
        settings: Settings of the engine and of the loop, by name.
        planted: Key of ``PLANTED`` for an unsupported model, else None.
        is_covered: False if a module has parameters and no grad sampler.
        used: The names of the layers and blocks that were drawn.
    """

    seed: int
    model: nn.Module
    tensors: list[Tensor]
    targets_B: Tensor
    settings: dict[str, Any]
    planted: str | None = None
    is_covered: bool = True
    used: tuple[str, ...] = field(default=())

    def call(self, model: nn.Module, tensors: list[Tensor], *, layout: str | None = None) -> Any:
        """Returns the output for a batch, in the memory layout and the form that the settings name."""
        lay = LAYOUTS[layout or self.settings["layout"]]
        tensors = [lay(t) for t in tensors]
        if "channels_last" in (self.settings["layout"], self.settings["weights"]):
            # Otherwise torch 2.13 crashes in the backward of group_norm on such an input, also without dpengine.
            tensors = [t.detach().requires_grad_() if t.dim() > 3 else t for t in tensors]
        args, kwargs = FORMS[self.settings["form"]](tensors)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.settings["autocast"]):
            return model(*args, **kwargs)

    def __str__(self) -> str:
        frozen = [name for name, p in self.model.named_parameters() if not p.requires_grad]
        shapes = [f"{tuple(t.shape)} {t.dtype}" for t in self.tensors]
        facts = {"planted": self.planted, "settings": self.settings, "inputs": shapes, "frozen": frozen}
        lines = [f"subject_of({self.seed})", *(f"{name}: {value}" for name, value in facts.items()), str(self.model)]
        return "\n".join(lines)


def subject_of(seed: int) -> Subject:
    """Returns the subject of a seed: the first of its draws that plain torch can train."""
    return next(subject for again in range(20) if trains((subject := drawn(seed, again)), slice(None)))


def trains(subject: Subject, rows: slice) -> bool:
    """Returns True if plain torch can train a subject on these samples with finite gradients."""
    model = copy.deepcopy(subject.model)
    tensors, targets_B = [t[rows].clone() for t in subject.tensors], subject.targets_B[rows]
    try:
        row_losses(subject.call(model, tensors), targets_B).sum().backward()
    except (RuntimeError, ValueError, IndexError):
        return False
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return bool(grads) and all(grad.to_dense().isfinite().all() for grad in grads)


def drawn(seed: int, again: int = 0) -> Subject:
    """Returns a draw, which torch may be unable to train."""
    draw = Draw(seed * 1000 + again)
    torch.manual_seed(seed)
    dtype = draw.pick(DTYPES)
    autocast = dtype is torch.float32 and draw.chance(0.1)
    draw.smooth = autocast or dtype is torch.bfloat16
    planted = draw.pick(sorted(PLANTED)) if draw.chance(0.08) else None
    is_covered = planted is not None or draw.chance(0.6)
    signal = draw.pick(sorted(SIGNALS) if planted is None else ("vector", "sequence"))
    rows = draw.pick((1, 2, 3, 4, 5, 6)) if planted is None else 6
    shape = SIGNALS[signal](draw)
    model, tensors = _model_and_inputs(draw, signal, shape, rows, planted, is_covered=is_covered)
    _perturb(model)
    model.to(dtype)
    for part in model.modules():
        if isinstance(part, Cast):
            part.inner.to(torch.float16 if planted == "float16" and part is model.body[0] else torch.float64)
    # The backward of instance_norm in torch 2.13 is wrong for a batch of one sample with a channels_last gradient.
    fits = signal == "image" and not any(isinstance(part, nn.InstanceNorm2d) for part in model.modules())
    weights = "channels_last" if fits and draw.chance(0.5) else "contiguous"
    if weights == "channels_last":
        model.to(memory_format=torch.channels_last)
    if planted is None:
        _freeze(draw, model)
    tensors = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    settings = {
        "dtype": dtype,
        "autocast": autocast,
        "mode": draw.pick(_modes(planted, is_covered=is_covered)),
        "clipping": draw.pick(CLIPPINGS),
        "quantile": draw.pick((0.0, 0.5, 0.5, 1.1)),
        "reduction": draw.pick(("mean", "sum")),
        "chunk": draw.pick((None, None, 1, 2, 3)),
        "per_example": draw.chance(0.2),
        "layout": draw.pick(sorted(LAYOUTS)),
        "weights": weights,
        "form": draw.pick(sorted(FORMS)) if len(tensors) > 1 else draw.pick(("positional", "dict", "keywords")),
        "path": draw.pick(("engine", "engine", "engine", "sums", "grad_sample")),
    }
    if settings["mode"] == "whole_model" and settings["path"] == "grad_sample":
        settings["path"] = "sums"
    if planted is not None:
        settings |= {"path": "engine", "chunk": None, **PLANTED[planted].settings}
    targets_B = torch.randint(CLASSES, (rows,))
    return Subject(seed, model.train(), tensors, targets_B, settings, planted, is_covered, tuple(draw.used))


def _modes(planted: str | None, *, is_covered: bool) -> tuple[str, ...]:
    if planted == "unused":  # whole_model treats a missing gradient as zero
        return MODES[:-1]
    return MODES if is_covered else (*MODES, *6 * SINGLE_SAMPLE_MODES)


def _model_and_inputs(
    draw: Draw, signal: str, shape: tuple[int, ...], rows: int, planted: str | None, *, is_covered: bool
) -> tuple[nn.Module, list[Tensor]]:
    sizes = torch.tensor([1.0, 3.0, 0.2, 1.0, 2.0, 1.0])[:rows]  # samples with different norms
    if signal == "tokens":
        first = entry(draw, VOCABULARY)
        main = torch.randint(VOCABULARY, (rows, *shape))
        shape = (*shape, first.embedding_dim)
    else:
        first = nn.Identity()
        main = torch.randn(rows, *shape) * sizes.view(-1, *[1] * len(shape))
    side = nn.Linear(SIDE, shape[-1]) if draw.chance(0.3) else None
    body, after = _body(draw, shape, is_covered=is_covered)
    if planted is not None:
        # Before all drawn layers, so that none hides it; after a dense layer, so that gradients flow through it.
        body = nn.Sequential(PLANTED[planted].make(shape[-1]), body)
        first = nn.Linear(shape[-1], shape[-1])
    features = after[0] if len(after) > 2 else after[-1]
    head: nn.Module = nn.Linear(features, CLASSES, bias=draw.chance(0.8))
    if signal == "tokens" and CLASSES <= VOCABULARY and features == first.embedding_dim and draw.chance(0.6):
        if is_covered:
            head = nn.Linear(features, VOCABULARY)
            head.weight = first.weight
        else:
            head = ByTable(first)
        draw.used.append("tied-embedding" if is_covered else "tied-by-function")
    model = Root(first, side, body, head, draw.pick(("tensor", "tensor", "tuple", "dict")))
    return model, [main] if side is None else [main, torch.randn(rows, SIDE)]


def _body(draw: Draw, shape: tuple[int, ...], *, is_covered: bool) -> tuple[nn.Module, tuple[int, ...]]:
    """Returns blocks and the shape of a sample after them; unless ``is_covered``, one module has no grad sampler."""
    body: nn.Module = chain(draw, shape, depth=draw.whole(1, 3))
    after = shape_after(body, shape)
    if not is_covered:
        if draw.chance(0.5):
            body = nn.Sequential(body, uncovered(draw, after))
        else:
            part = uncovered(draw, shape)
            body = nn.Sequential(part, chain(draw, shape_after(part, shape), depth=1))
    return body, shape_after(body, shape)


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    """Perturbs parameters with constant initialization: weights of norms, biases."""
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.add_(0.2 * torch.randn_like(parameter))


def _freeze(draw: Draw, model: nn.Module) -> None:
    if not draw.chance(0.3):
        return
    parameters = list(model.parameters())
    last = model.entry.weight if isinstance(model.head, ByTable) else model.head.weight
    for parameter in parameters:
        parameter.requires_grad_(not draw.chance(0.4))
    if not any(p.requires_grad for p in parameters):
        last.requires_grad_(True)
    if draw.chance(0.5):  # the whole body
        for parameter in model.body.parameters():
            parameter.requires_grad_(False)
        last.requires_grad_(True)
