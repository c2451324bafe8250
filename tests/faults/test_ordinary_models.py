"""The probe of the engine and ``check`` accept all built-in layers and a table of models."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import CASES, MODELS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine, check
from dpengine.errors import PrivacyWarning

ROWS = 6
MIN_MODELS = 60
CRASHES_IN_TORCH = {"group-norm-channels-last"}  # torch 2.13 crashes in a plain backward pass without an input gradient


@dataclass(frozen=True)
class OrdinaryModel:
    """A batch-first model and a batch for it."""

    id: str
    make: Any
    inputs: tuple[Any, ...]
    names: tuple[str, ...] = ()

    def loss(self, model):
        """Returns a mean over samples whose gradient differs for each sample."""
        first = len(self.inputs) - len(self.names)
        by_name = dict(zip(self.names, self.inputs[first:], strict=True))
        return mean_of(model(*self.inputs[:first], **by_name), torch.zeros(ROWS))


def mean_of(outputs, targets):
    rows = len(targets)
    leaves = outputs if isinstance(outputs, tuple) else (outputs,)
    floats = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return sum(torch.tanh(leaf).reshape(rows, -1).sum(dim=1).mean() for leaf in floats if len(leaf) == rows)


def table_models():
    """Returns the table models whose batch axis is 0 and that can be made private."""
    torch.manual_seed(0)
    layers = [OrdinaryModel(c.id, c.make, c.inputs(ROWS, torch.float32), c.keywords) for c in CASES if c.row is None]
    models = [OrdinaryModel(f"model-{c.id}", c.make, c.inputs(ROWS, torch.float32)) for c in MODELS]
    return [one for one in layers + models if can_be_private(one)]


def can_be_private(one):
    with torch.no_grad():
        return isinstance(one.loss(one.make()), torch.Tensor) and check(one.make()).ok


@pytest.fixture(scope="module")
def ordinary():
    return table_models()


@pytest.mark.slow
@pytest.mark.hazard("M2")
def test_the_probe_accepts_all_ordinary_models(ordinary):
    probed = 0
    for one in ordinary:
        torch.manual_seed(0)
        model, engine = one.make(), PrivacyEngine(seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.arange(ROWS)), batch_size=ROWS)
        constants = {"sample_rate": 1.0, "expected_batch_size": float(ROWS), "target_delta": 1e-3}
        model, optimizer, loader = engine.make_private(model, optimizer, loader, noise_multiplier=1.0, **constants)
        with warnings.catch_warnings():
            warnings.simplefilter("error", PrivacyWarning)
            warnings.filterwarnings("ignore", message=".*input of the model was not computed from tensors of the batch")
            for _ in loader:
                optimizer.zero_grad()
                one.loss(model).backward()
                optimizer.step()
        probed += engine.ledger.steps
    assert probed == len(ordinary) >= MIN_MODELS


@pytest.mark.slow
@pytest.mark.hazard("M2")
def test_check_accepts_all_ordinary_models(ordinary):
    checked = 0
    for one in ordinary:
        torch.manual_seed(0)
        if one.id in CRASHES_IN_TORCH:
            continue
        model = one.make()
        inputs = one.inputs if not one.names else inputs_by_name(model, one)
        with warnings.catch_warnings():
            warnings.simplefilter("error", PrivacyWarning)
            report = check(model, mean_of, (inputs, torch.zeros(ROWS)))
        assert report.ok, (one.id, str(report))
        checked += 1
    assert checked >= MIN_MODELS


def inputs_by_name(model, one):
    import inspect

    first = len(one.inputs) - len(one.names)
    positional = list(inspect.signature(model.forward).parameters)[:first]
    return dict(zip((*positional, *one.names), one.inputs, strict=True))


def test_the_tables_have_enough_models(ordinary):
    assert len(ordinary) >= MIN_MODELS
    assert len({one.id for one in ordinary}) == len(ordinary)
    assert all(isinstance(one.make(), nn.Module) for one in ordinary[:3])
