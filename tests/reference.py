"""Reference gradients: a loop over single samples by plain autograd in float64, without code of dpengine."""

from __future__ import annotations

import copy

import torch


def per_sample_gradients(model, loss_fn, inputs, targets, *, row=None):
    """Returns the gradient of the loss of each sample, as one ``{parameter name: gradient}`` per sample.

    Args:
        model: Any module; a float64 copy runs, with the initial buffers for each sample.
        loss_fn: ``(output, targets of one sample) -> scalar``.
        inputs: A tuple of positional or a dict of keyword inputs.
        targets: Tensor with the batch on axis 0.
        row: ``(inputs, i) -> inputs of sample i``; by default slices axis 0 of tensors that have the batch there.
    """
    row = row or cut_row(len(targets))
    model = copy.deepcopy(model).double()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    found = []
    for i in range(len(targets)):
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        one = row(widened(inputs), i)
        output = model(**one) if isinstance(one, dict) else model(*one)
        loss = loss_fn(output, widened(targets)[i : i + 1])
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        found.append(
            {
                name: torch.zeros_like(p) if gradient is None else gradient.to_dense()
                for (name, p), gradient in zip(parameters.items(), gradients, strict=True)
            }
        )
    return found


def stacked(gradients):
    """Stacks the result of ``per_sample_gradients`` as ``{name: (B, *shape)}``."""
    return {name: torch.stack([row[name] for row in gradients]) for name in gradients[0]}


def flat_norms(gradients):
    """Returns the norm of the gradient of each sample over all parameters, ``(B,)``."""
    return torch.stack([torch.cat([g.flatten() for g in row.values()]).norm() for row in gradients])


def clipped_sum(gradients, max_norm):
    """Returns the sum of the gradients, each scaled down to a norm of at most ``max_norm``."""
    factors = [(max_norm / norm.clamp(min=1e-300)).clamp(max=1.0) for norm in flat_norms(gradients)]
    return {name: sum(f * row[name] for f, row in zip(factors, gradients, strict=True)) for name in gradients[0]}


def cut_row(size):
    """Returns a function that slices sample i from each tensor with this size on axis 0, in nested containers."""

    def cut(tree, i):
        if isinstance(tree, torch.Tensor):
            return tree[i : i + 1].contiguous() if tree.dim() and len(tree) == size else tree
        if isinstance(tree, dict):
            return {key: cut(value, i) for key, value in tree.items()}
        return type(tree)(cut(value, i) for value in tree) if isinstance(tree, (tuple, list)) else tree

    return cut


def widened(tree):
    """Converts floating-point tensors to float64."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().double() if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: widened(value) for key, value in tree.items()}
    return type(tree)(widened(value) for value in tree) if isinstance(tree, (tuple, list)) else tree
