"""Detector DI: tests that samples are independent in model and loss, and that no buffer depends on the data."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .finding import AuditFinding, Evidence
from .subject import Maker, Subject, in_double, new_subject, without_dropout

_BATCH_SIZE = 6
_TOLERANCE_64 = 1e-9  # relative
_TOLERANCE_32 = 1e-5


def independence(make: Maker, *, seed: int = 0) -> AuditFinding:
    """Tests that the samples of a batch are independent.

    Tests that a change of one sample does not change the outputs of the others, that the loss and gradient of a batch
    are the sums or means over its samples, and that no buffer depends on the data.
    """
    evidence = Evidence("DI", seed)
    subject, is_double = _in_double(new_subject(make))
    dataset = subject.loader.dataset
    if len(dataset) < _BATCH_SIZE + 1:  # type: ignore[arg-type]
        evidence.inconclusive(f"the data set has fewer than {_BATCH_SIZE + 1} examples")
        return evidence.finding()
    machine_epsilon = max(torch.finfo(p.dtype).eps for p in subject.model.parameters())
    runner = _BatchRunner(
        subject, seed, is_double, _TOLERANCE_64 if is_double else max(_TOLERANCE_32, 8 * machine_epsilon)
    )
    examples = [dataset[index] for index in range(_BATCH_SIZE + 1)]
    _check_outputs(evidence, runner, examples)
    _check_losses(evidence, runner, examples[:_BATCH_SIZE])
    _check_buffers(evidence, runner, examples)
    return evidence.finding()


def _in_double(subject: Subject) -> tuple[Subject, bool]:
    """Returns the subject in float64 and True, or unchanged and False if it fails in float64 or casts its tensors."""
    without_dropout(subject.model)
    double = subject._replace(model=copy.deepcopy(subject.model).double())
    try:
        _, loss, _ = _BatchRunner(double, 0, True, _TOLERANCE_64).run([subject.loader.dataset[0]])
    except (RuntimeError, TypeError):
        return subject, False
    return (double, True) if loss.dtype is torch.float64 else (subject, False)


class _BatchRunner:
    """Runs batches through copies of the model, in training mode."""

    def __init__(self, subject: Subject, seed: int, is_double: bool, tolerance: float):
        self.subject = subject
        self.tolerance = tolerance
        self.axis = 0 if subject.options.get("batch_first", True) else 1
        self.mean = subject.options.get("loss_reduction", "mean") == "mean"
        self._seed, self._is_double = seed, is_double

    def run(self, examples: Sequence[Any]) -> tuple[list[Tensor], Tensor, nn.Module]:
        """Returns the outputs, the loss, and the model."""
        model = copy.deepcopy(self.subject.model)
        batch = self.subject.loader.collate_fn(list(examples))
        if self._is_double:
            batch = in_double(batch)
        outputs: list[Any] = []
        hook = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            loss = self.subject.loss_of(model, batch)
        hook.remove()
        return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)], loss, model

    def gradient(self, examples: Sequence[Any]) -> tuple[float, Tensor]:
        """Returns the loss and its gradient, as sums over samples."""
        _, loss, model = self.run(examples)
        factor = len(examples) if self.mean else 1
        parameters = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        filled = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, grads, strict=True)]
        return float(loss.detach()) * factor, torch.cat([grad.flatten() for grad in filled]) * factor


def _check_outputs(evidence: Evidence, runner: _BatchRunner, examples: Sequence[Any]) -> None:
    """Tests that a change of one sample does not change the outputs of the others."""
    batch = list(examples[:_BATCH_SIZE])
    outputs, _, _ = runner.run(batch)
    for sample in range(_BATCH_SIZE):
        changed_outputs, _, _ = runner.run([*batch[:sample], examples[_BATCH_SIZE], *batch[sample + 1 :]])
        others = torch.tensor([index for index in range(_BATCH_SIZE) if index != sample])
        for output, changed in zip(outputs, changed_outputs, strict=True):
            has_samples = output.dim() > runner.axis and output.shape[runner.axis] == _BATCH_SIZE
            if not has_samples or output.shape != changed.shape:
                continue
            evidence.n += 1
            a, b = (tensor.detach().double().index_select(runner.axis, others) for tensor in (output, changed))
            change = float((a - b).abs().max()) / max(1e-30, float(a.abs().max()))
            evidence.ratio("change of an output by another sample", change / runner.tolerance)


def _check_losses(evidence: Evidence, runner: _BatchRunner, examples: Sequence[Any]) -> None:
    """Tests that the loss and gradient of a batch are the sums of those of its samples."""
    batch_loss, batch_gradient = runner.gradient(examples)
    losses, gradients = zip(*(runner.gradient([example]) for example in examples), strict=True)
    evidence.n += len(examples)
    scale = max(1e-30, sum(abs(loss) for loss in losses))
    evidence.ratio("loss of a batch minus sum over samples", abs(batch_loss - sum(losses)) / scale / runner.tolerance)
    norm = max(1e-30, math.fsum(float(gradient.norm()) for gradient in gradients))
    error = float((batch_gradient - torch.stack(gradients).sum(dim=0)).norm()) / norm
    evidence.ratio("gradient of a batch minus sum over samples", error / runner.tolerance)


def _check_buffers(evidence: Evidence, runner: _BatchRunner, examples: Sequence[Any]) -> None:
    """Tests that no buffer depends on the data."""
    _, _, model = runner.run(examples[:_BATCH_SIZE])
    _, _, other_model = runner.run(examples[1 : _BATCH_SIZE + 1])
    other_buffers = dict(other_model.named_buffers())
    for name, buffer in model.named_buffers():
        evidence.n += 1
        if not torch.equal(buffer.nan_to_num(), other_buffers[name].nan_to_num()):
            evidence.violation(f"buffer {name!r} depends on the data")
