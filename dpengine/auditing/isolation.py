"""DI: tests that the rows of a batch are independent in model and loss, and that no buffer depends on data."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .finding import AuditFinding, Evidence
from .subject import Maker, Subject, in_double, made, without_dropout

_ROWS = 6
_EXACT = 1e-9  # relative, in float64
_NARROW = 1e-5


def isolation(make: Maker, *, seed: int = 0) -> AuditFinding:
    """Changes one row of a batch and compares the outputs of the others.

    The outputs of the other rows must not change; loss and gradient of a batch must be the sum, or mean, of those of
    its rows; no buffer may depend on the data.
    """
    evidence = Evidence("DI", seed)
    subject, wide = _in_double(made(make))
    dataset = subject.loader.dataset
    if len(dataset) < _ROWS + 1:  # type: ignore[arg-type]
        evidence.unknown(f"the data set has fewer than {_ROWS + 1} examples")
        return evidence.finding()
    narrowest = max(torch.finfo(p.dtype).eps for p in subject.model.parameters())
    view = _View(subject, seed, wide, _EXACT if wide else max(_NARROW, 8 * narrowest))
    examples = [dataset[index] for index in range(_ROWS + 1)]
    _outputs(evidence, view, examples)
    _losses(evidence, view, examples[:_ROWS])
    _buffers(evidence, view, examples)
    return evidence.finding()


def _in_double(subject: Subject) -> tuple[Subject, bool]:
    """Returns the subject in float64, if it runs there and has no cast to a narrower dtype."""
    without_dropout(subject.model)
    wide = subject._replace(model=copy.deepcopy(subject.model).double())
    try:
        _, loss, _ = _View(wide, 0, True, _EXACT).run([subject.loader.dataset[0]])
    except (RuntimeError, TypeError):
        return subject, False
    return (wide, True) if loss.dtype is torch.float64 else (subject, False)


class _View:
    """Runs batches through a copy of the model, in training mode."""

    def __init__(self, subject: Subject, seed: int, wide: bool, tolerance: float):
        self.subject = subject
        self.tolerance = tolerance
        self.axis = 0 if subject.options.get("batch_first", True) else 1
        self.mean = subject.options.get("loss_reduction", "mean") == "mean"
        self._seed, self._wide = seed, wide

    def run(self, examples: Sequence[Any]) -> tuple[list[Tensor], Tensor, nn.Module]:
        """Returns the outputs, the loss, and the model."""
        model = copy.deepcopy(self.subject.model)
        batch = self.subject.loader.collate_fn(list(examples))
        if self._wide:
            batch = in_double(batch)
        outputs: list[Any] = []
        hook = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            loss = self.subject.loss_of(model, batch)
        hook.remove()
        return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)], loss, model

    def gradient(self, examples: Sequence[Any]) -> tuple[float, Tensor]:
        """Returns the loss and its gradient, as sums over rows."""
        _, loss, model = self.run(examples)
        times = len(examples) if self.mean else 1
        parameters = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        return float(loss.detach()) * times, torch.cat([one.flatten() for one in flat]) * times


def _outputs(evidence: Evidence, view: _View, examples: Sequence[Any]) -> None:
    """Tests that a change of one row does not change the outputs of the others."""
    batch = list(examples[:_ROWS])
    whole, _, _ = view.run(batch)
    for row in range(_ROWS):
        changed, _, _ = view.run([*batch[:row], examples[_ROWS], *batch[row + 1 :]])
        others = torch.tensor([index for index in range(_ROWS) if index != row])
        for one, other in zip(whole, changed, strict=True):
            if one.dim() <= view.axis or one.shape[view.axis] != _ROWS or one.shape != other.shape:
                continue
            evidence.n += 1
            a, b = (each.detach().double().index_select(view.axis, others) for each in (one, other))
            moved = float((a - b).abs().max()) / max(1e-30, float(a.abs().max()))
            evidence.ratio("change of an output by another row", moved / view.tolerance)


def _losses(evidence: Evidence, view: _View, examples: Sequence[Any]) -> None:
    """Tests that loss and gradient of a batch are the sums of those of its rows."""
    together, whole = view.gradient(examples)
    alone = [view.gradient([one]) for one in examples]
    total = sum(loss for loss, _ in alone)
    parts = torch.stack([gradient for _, gradient in alone]).sum(dim=0)
    evidence.n += len(examples)
    scale = max(1e-30, sum(abs(loss) for loss, _ in alone))
    evidence.ratio("loss of a batch minus those of its rows", abs(together - total) / scale / view.tolerance)
    size = max(1e-30, math.fsum(float(gradient.norm()) for _, gradient in alone))
    evidence.ratio("gradient of a batch minus those of its rows", float((whole - parts).norm()) / size / view.tolerance)


def _buffers(evidence: Evidence, view: _View, examples: Sequence[Any]) -> None:
    """Tests that no buffer depends on the data."""
    _, _, one = view.run(examples[:_ROWS])
    _, _, other = view.run(examples[1 : _ROWS + 1])
    theirs = dict(other.named_buffers())
    for name, buffer in one.named_buffers():
        evidence.n += 1
        if not torch.equal(buffer.nan_to_num(), theirs[name].nan_to_num()):
            evidence.fault(f"buffer {name!r} depends on the data")
