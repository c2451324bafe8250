"""Loops in which one sample changes the gradients of others are rejected, or reported as undecided."""

import random
import warnings

import numpy as np
import pytest
import torch
from independence import mixing_loops
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpengine
from dpengine.errors import BatchDependentLossError, PrivacyWarning, ReductionError, forget_notices

SAMPLES, BATCH = 90, 15
UNDECIDED = {  # a value is converted to Python, or code outside torch computes a gradient
    *("float_of_max", "numpy_temperature", "comprehension", "masked_by_nonzero", "numpy_shuffle"),
    "python_list",  # cannot be distinguished from per-sample weights
    *("normalized_gradient", "gradient_reversal", "branch_on_loss"),
    *("root_of_size", "temperature_of_size", "penalty_over_size"),
}


def vector_data():
    data = torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % mixing_loops.CLASSES
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), data


def token_data():
    labels = torch.randint(9, (SAMPLES, 5))
    labels[torch.arange(5) >= torch.randint(1, 4, (SAMPLES, 1))] = -100
    labels[3] = 1  # the only long text in the first batch
    return nn.Sequential(nn.Embedding(9, 8), nn.Tanh(), nn.Linear(8, 9)), (torch.randint(9, (SAMPLES, 5)), labels)


def map_data():
    data = torch.randn(SAMPLES, 1, 4, 4), (torch.randn(SAMPLES, 4, 4) > 0.5).float()
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 1)), data


CASES = {
    name: (kind, loss)
    for kind, table in (
        (vector_data, mixing_loops.VECTORS),
        (token_data, mixing_loops.TOKENS),
        (map_data, mixing_loops.MAPS),
    )
    for name, loss in table.items()
}


class RecordingModel(nn.Module):
    """Stores the inputs and outputs of the model."""

    def __init__(self, model):
        super().__init__()
        self.model, self.calls = model, []

    def forward(self, x):
        outputs = self.model(x)
        outputs.retain_grad()
        self.calls.append((x.detach().clone(), outputs))
        return outputs


def seed():
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def inputs_and_gradients(loss, model, x, y):
    """Returns the inputs of each sample and the gradients of the outputs, scaled as the engine scales them."""
    seed()
    recorder = RecordingModel(model)
    loss(recorder, x, y, {}).backward()
    return [
        part.flatten(1)
        for given, out in recorder.calls
        for part in (given, len(x) * (0 if out.grad is None else out.grad))
    ]


def effect_on_others(kind, loss):
    """Returns the largest relative change in other samples' values if one sample is removed or set to zero."""
    seed()
    model, data = kind()
    x, y = (tensor[:BATCH] for tensor in data)
    full, effects = inputs_and_gradients(loss, model, x.clone(), y.clone()), []
    for index in range(BATCH):
        others = torch.arange(BATCH) != index
        removed = inputs_and_gradients(loss, model, x[others], y[others])
        cleared_x, cleared_y = x.clone(), y.clone()
        cleared_x[index], cleared_y[index] = 0, 0
        cleared = [part[others] for part in inputs_and_gradients(loss, model, cleared_x, cleared_y)]
        for now in (removed, cleared):
            pairs = [(part[others].float(), other.float()) for part, other in zip(full, now, strict=True)]
            effects.append(max(float((b - a).norm() / (a.norm() + 1e-9)) for a, b in pairs))
    return max(effects)


def outcome(kind, loss, relation, reduction="mean", steps=8):
    """Returns "rejected", "undecided" (with a warning that the loss could not be checked) or "silent"."""
    forget_notices()
    seed()
    model, data = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constants = {"sample_rate": BATCH / SAMPLES, "expected_batch_size": BATCH} if relation == "add-or-remove" else {}
    loader = DataLoader(TensorDataset(*data), batch_size=BATCH)
    model, optimizer, loader = dpengine.PrivacyEngine(seed=1).make_private(
        *(model, optimizer, loader), noise_multiplier=1.0, max_grad_norm=1.0, loss_reduction=reduction, **constants
    )
    state, left = {}, steps
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        try:
            while left:
                for x, y in loader:
                    optimizer.zero_grad()
                    loss(model, x, y, state).backward()
                    optimizer.step()
                    left -= 1
                    if not left:
                        break
        except BatchDependentLossError:
            return "rejected"
        except ReductionError:  # the suggested fix must not silence the check
            return outcome(kind, loss, relation, "sum") if reduction == "mean" else "rejected"
    texts = [str(one.message) for one in shown if issubclass(one.category, PrivacyWarning)]
    return "undecided" if any("could not be checked" in text for text in texts) else "silent"


@pytest.mark.one_in(8, "name", "relation", others="slow")
@pytest.mark.one_in(4, "name", "relation")
@pytest.mark.parametrize("relation", ["zero-out", "add-or-remove"])
@pytest.mark.parametrize("name", CASES)
def test_loop_that_mixes_samples_is_rejected_or_reported(name, relation):
    kind, loss = CASES[name]
    assert effect_on_others(kind, loss) > 1e-3
    found = outcome(kind, loss, relation)
    assert found == ("undecided" if name in UNDECIDED else "rejected")
