"""Factors of custom policies are checked against their stated bounds in every step."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import Flat, PerLayer, PerSampleGradientClipper, PrivacyEngine
from dpengine.clipping.policy import AbstractClip
from dpengine.clipping.short_forms import BUILTIN, SHORT_FORMS
from dpengine.errors import ExtensionError


class Own(AbstractClip):
    """Flat or per-layer clipping to a multiple of its stated bounds."""

    def __init__(self, times=1.0, bounds=(0.5,), groups=1):
        self.times, self._bounds, self.groups = times, bounds, groups

    @property
    def bounds(self):
        return self._bounds

    def group_of(self, names):
        return [i % self.groups for i in range(len(names))]

    def factors(self, norms_BK):
        bounds = self._bounds if len(self._bounds) == self.groups else [self._bounds[0] / math.sqrt(self.groups)]
        return (torch.tensor(bounds, dtype=norms_BK.dtype) / norms_BK).clamp(max=1) * self.times

    def describe(self):
        return {"policy": "own"}


def returning(answer, bounds=(0.5,)):
    made = Own(bounds=bounds)
    made.factors = answer
    return made


def clip(policy, inputs=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    clipper = PerSampleGradientClipper(model, policy)
    model(torch.randn(8, 3) * 10 if inputs is None else inputs).square().sum(1).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    return float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())


EXCEEDS = [
    Own(2.0),
    Own(1.001),
    Own(1 + 4e-6),
    Own(-2.0),
    Own(2.0, (0.5, 1.0, 0.1, 3.0), 4),
    Own(1.001, (0.5, 1.0, 0.1, 3.0), 4),
    Own(1.001, (0.02,), 4),
    returning(lambda norms_BK: torch.full_like(norms_BK, torch.nan)),
    returning(lambda norms_BK: (0.5 / norms_BK).index_fill(0, torch.tensor([5]), torch.inf)),
    returning(lambda norms_BK: 0.5 / norms_BK.mul_(0.1).clamp(min=0.5)),  # writes to the norms
]


@pytest.mark.parametrize("policy", EXCEEDS, ids=range(len(EXCEEDS)))
def test_a_policy_that_exceeds_its_bounds_is_rejected(policy):
    with pytest.raises(ExtensionError, match=r"DPE027.*Own\.factors\(\) exceeds the bounds"):
        clip(policy)


def test_the_message_states_the_factor_by_which_bounds_are_exceeded():
    with pytest.raises(ExtensionError, match="up to 2 times the bound"):
        clip(Own(2.0))


@pytest.mark.parametrize(
    "policy", [Own(), Own(0.3), Own(1.0, (0.5, 1.0, 0.1, 3.0), 4), Own(1.0, (2.0,), 4), Own(1.0, (7,))]
)
def test_a_policy_within_its_bounds_clips(policy):
    assert 0 < clip(policy) <= math.hypot(*policy.bounds)


@pytest.mark.parametrize("factor", [7.0, math.inf, math.nan])
def test_factors_of_samples_that_are_dropped_do_not_count(factor):
    inputs = torch.randn(8, 3)
    inputs[2] = torch.nan
    policy = returning(lambda norms_BK: torch.where(norms_BK.isfinite(), 0.5 / norms_BK.clamp(min=0.5), factor))
    assert clip(policy, inputs) == pytest.approx(clip(Flat(0.5), inputs), rel=1e-5)


BAD = {
    r"bounds is \(0\.5, 1\.0\); expected one positive number, or one for each of the 1 groups": Own(1.0, (0.5, 1.0)),
    r"bounds is \(\); expected": returning(lambda norms_BK: 0 * norms_BK, ()),
    r"bounds is \(inf,\); expected": returning(lambda norms_BK: norms_BK, (math.inf,)),
    r"factors\(\) returned \(8,\); expected real factors of shape \(8, 1\)": returning(lambda norms_BK: norms_BK[:, 0]),
    r"factors\(\) returned list; expected": returning(lambda norms_BK: [0.0]),
    r"sensitivity\(\) is 0\.25, below the norm 0\.5": returning(lambda norms_BK: 0 * norms_BK),
}


@pytest.mark.parametrize("message", BAD)
def test_an_invalid_policy_is_rejected_with_its_value(message):
    policy = BAD[message]
    if "sensitivity" in message:
        policy.sensitivity = lambda relation="add-or-remove-one": 0.25
    with pytest.raises(ExtensionError, match=rf"DPE027.*Own\.{message}"):
        clip(policy)


@pytest.mark.parametrize("times", [2.0, 1.001])
def test_a_private_run_raises_at_its_first_batch_and_changes_no_weight(times):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(TensorDataset(torch.randn(32, 3)), batch_size=16)
    before = model.weight.detach().clone()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        model, optimizer, loader, noise_multiplier=1.0, clipping=Own(times, (0.01,))
    )
    with pytest.raises(ExtensionError, match="exceeds the bounds"):
        for (inputs,) in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    assert torch.equal(before, model.weight) and engine.ledger.steps == 1


def test_built_in_policies_are_not_checked_and_others_are_in_every_step(monkeypatch):
    asked = []
    sensitivity = AbstractClip.sensitivity  # which only the check reads here
    monkeypatch.setattr(AbstractClip, "sensitivity", lambda *args: asked.append(1) or sensitivity(*args))
    clip(Flat(1.0))
    clip(PerLayer(1.0))
    assert not asked
    for _ in range(3):
        clip(Own())
    assert len(asked) == 3
    assert BUILTIN >= set(SHORT_FORMS.values()) and all(kind.__module__.startswith("dpengine.") for kind in BUILTIN)
    assert type("Subclass", (Own,), {}) not in BUILTIN
