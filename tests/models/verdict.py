"""Trains a model privately for some steps, and compares each with a loop over single samples on a copy."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset

import dpengine
from dpengine import PrivacyEngine
from dpengine.errors import PrivacyError

EXAMPLES, BATCH, STEPS = 12, 4, 3
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float64: 1e-5}
KINK = 2e-2  # largest error in float32 of a model that is exact in float64
# The error of a parameter is relative to at least this fraction of the norm of all parameters.
FLOOR = {torch.float32: 0.1, torch.bfloat16: 1.0, torch.float64: 0.1}
KNOWN_OUTPUTS = (
    *("logits", "prediction_logits", "question_answering_score", "image_embeds", "prediction_outputs"),
    *("reconstruction", "last_hidden_state"),
)


class Wrong(AssertionError):
    """Raised if the clipped sums differ from those of the loop."""


@dataclass(frozen=True)
class Verdict:
    """Result for a model: ``"exact"`` and the algorithm of the gradients, or ``"rejected"``, codes and a reason."""

    state: str
    by: str
    reason: str = ""


class Examples(Dataset):
    def __init__(self, inputs, dtype):
        self.inputs = _map(inputs, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf)
        self.weights = torch.linspace(1, 4, EXAMPLES)

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, i):
        return _map(self.inputs, lambda leaf: leaf[i]), self.weights[i]


def _map(inputs, of):
    if isinstance(inputs, Mapping):
        return {key: of(value) for key, value in inputs.items()}
    return tuple(of(value) for value in inputs)


def _run(model, inputs):
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def loss_of(row, model, inputs, weights):
    outputs = _run(model, inputs)
    if isinstance(outputs, Mapping):
        names = row.outputs or [next(name for name in KNOWN_OUTPUTS if name in outputs)]
        values = [outputs[name] for name in names]
    else:
        values = [outputs] if isinstance(outputs, torch.Tensor) else [outputs[0]]
    return sum((value.float().flatten(1).sin().mean(1) * weights).mean() for value in values)


def gradients_of(row, model, chosen):
    """Yields the gradient of each single sample, by plain autograd."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    buffers = copy.deepcopy(dict(model.named_buffers()))
    for inputs, weight in chosen:
        for name, buffer in model.named_buffers():
            buffer.data.copy_(buffers[name])
        loss = loss_of(row, model, _map(inputs, lambda leaf: leaf[None]), weight[None])
        yield torch.autograd.grad(loss, parameters, allow_unused=True)


def norm_of(gradient):
    parts = [part if part.dtype == torch.float64 else part.float() for part in gradient if part is not None]
    return torch.stack([part.norm() for part in parts]).norm().item()


def verdict_of(row, dtype=torch.float32) -> Verdict:
    """Returns the verdict on a model in the default mode, or in mode ``whole_model`` if the default mode rejects it.

    First applies the fixes that the messages name: ``fix`` for a blocked layer, and a forward pass that fills caches.
    """
    errors = []
    for mode, fills_caches in (("auto", False), ("auto", True), ("whole_model", False)):
        if fills_caches and "fill a cache by a forward pass" not in errors[-1].fix:
            continue
        torch.manual_seed(0)
        model, examples = row.make(), Examples(row.batch(EXAMPLES), dtype)
        remedies = []
        if not dpengine.check(model).ok:
            model, remedies = dpengine.fix(model)[0], ["`fix`"]
        model = model.to(dtype)
        if fills_caches:
            _run(model, _map(examples.inputs, lambda leaf: leaf[:2]))
            remedies.append("a forward pass")
        try:
            by, rounds = train(row, model, examples, dtype, mode)
            if rounds:
                verdict_of(row, torch.float64)  # raises Wrong unless sums are exact there
                by += ", compared in float64, too"
            return Verdict("exact", f"{by}, after {' and '.join(remedies)}" if remedies else by)
        except PrivacyError as error:
            errors.append(error)
    return Verdict("rejected", " ".join(dict.fromkeys(f"`{error.code}`" for error in errors)), str(errors[-1]))


def train(row, model, examples, dtype, mode):
    """Trains some steps. Returns the algorithm of the gradients, and True if float32 rounding exceeds the tolerance."""
    plain = copy.deepcopy(model)
    found = list(gradients_of(row, plain, [examples[i] for i in range(EXAMPLES)]))
    max_norm = torch.tensor([norm_of(gradient) for gradient in found]).quantile(0.6).item()
    unused = "zero" if any(all(one[k] is None for one in found) for k in range(len(found[0]))) else "error"
    loader = DataLoader(examples, batch_size=BATCH)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model, optimizer, loader = PrivacyEngine(seed=1).make_private(
            model,
            optimizer,
            loader,
            noise_multiplier=0.0,
            max_grad_norm=max_norm,
            grad_sample_mode=mode,
            unused_parameters=unused,
        )
        rounds = False
        for step, (inputs, weights) in enumerate(loader):
            plain.load_state_dict(model.state_dict(), strict=False)
            optimizer.zero_grad()
            loss_of(row, model, inputs, weights).backward()
            optimizer.step()
            chosen = [(_map(inputs, lambda leaf, i=i: leaf[i]), weights[i]) for i in range(len(weights))]
            rounds |= not compare(row, model, plain, chosen, max_norm, dtype, step)
            if step == STEPS - 1:
                break
    units = {
        f"`{re.sub(r'[0-9]+', '*', match.group(1))}`" if match.group(1) else "the model"
        for one in seen
        if (match := re.search(r"\[DPE028\].* through (?:'(.*?)'|the model) \(", str(one.message)))
    }
    if mode == "whole_model":
        return f"`{mode}`", rounds
    return "units " + ", ".join(sorted(units)) if units else "rules of layers", rounds


def compare(row, model, plain, chosen, max_norm, dtype, step):
    """Returns True if all clipped sums are those of the loop up to the tolerance. Raises Wrong if one is not.

    Rounding to float32 moves an activation across a kink now and then, in the step or in the loop, which changes
    gradients by up to a percent. Returns False for such an error, which float64 must confirm as rounding.
    """
    of_loop = clipped_sums(row, plain, chosen, max_norm)
    parameters = {name: model.get_parameter(name) for name in of_loop}
    of_step = {n: torch.zeros_like(of_loop[n]) if p.grad is None else BATCH * p.grad for n, p in parameters.items()}
    errors = errors_of(of_step, of_loop, dtype)
    worst = max(errors, key=errors.get)
    if errors[worst] < TOLERANCE[dtype]:
        return True
    if dtype == torch.float32 and errors[worst] < KINK:
        return False
    raise Wrong(f"step {step}, {len(chosen)} samples: {worst} is off by {errors[worst]:.2g}")


def clipped_sums(row, plain, chosen, max_norm):
    """Returns the sum of clipped gradients of single samples, by the name of the parameter, at least in float32."""
    named = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for name, p in named.items()}
    for gradient in gradients_of(row, plain, chosen):
        factor = min(1.0, max_norm / max(norm_of(gradient), 1e-30))
        for total, part in zip(sums.values(), gradient, strict=True):
            if part is not None:
                total += factor * part
    return sums


def errors_of(sums, truth, dtype):
    """Returns the relative error of each sum. For small sums it is relative to a fraction of the norm of all sums."""
    scale = torch.stack([total.norm() for total in truth.values()]).norm()
    floor = FLOOR[dtype] * scale
    return {
        name: ((sums[name].to(total.dtype) - total).norm() / (total.norm() + floor).clamp(min=1e-20)).item()
        for name, total in truth.items()
    }
