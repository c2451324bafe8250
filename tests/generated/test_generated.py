"""Thousands of random models: the clipped sums equal those of a loop over single samples, or the model is rejected."""

import dataclasses

import pytest
import torch
from generated import verdicts
from generated.blocks import BLOCKS
from generated.layers_of import LAYERS
from generated.planted import PLANTED
from generated.subjects import CLIPPINGS, DTYPES, FORMS, LAYOUTS, MODES, SINGLE_SAMPLE_MODES, drawn, subject_of
from generated.survey import survey
from generated.uncovered import AROUND, UNCOVERED
from generated.verdicts import verdict_on

from dpengine.clipping import Flat
from dpengine.grad_samplers.table import BUILTIN

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # warnings of torch about dtypes and padding, and of dpengine about zero noise


def assert_none_wrong(seeds, capsys):
    found = survey(seeds)
    with capsys.disabled():
        print(f"\n{found}" if found.of("wrong") else "", end="")
    assert not found.of("wrong")
    assert len(found.of("right")) >= 0.6 * len(
        found.verdicts
    )  # an engine that rejects every model would pass the line above


@pytest.mark.one_in(10, "tens", others="slow")
@pytest.mark.parametrize("tens", range(10))
def test_a_hundred_models_give_exact_sums_or_are_rejected_with_the_name_of_the_cause(tens, capsys):
    assert_none_wrong(range(10 * tens, 10 * tens + 10), capsys)


@pytest.mark.slow
@pytest.mark.one_in(4, "first")
@pytest.mark.parametrize("first", [*range(1000, 3000, 100)])
def test_two_thousand_models_give_exact_sums_or_are_rejected_with_the_name_of_the_cause(first, capsys):
    assert_none_wrong(range(first, first + 100), capsys)


@pytest.mark.slow
def test_random_models_cover_all_layers_blocks_and_settings():
    subjects = [drawn(seed) for seed in range(1000, 2000)]
    used = {name for subject in subjects for name in subject.used}
    assert used >= {name for table in (*LAYERS.values(), *UNCOVERED.values()) for name in table} | BLOCKS.keys()
    assert used >= {f"around-{name}" for name in AROUND} | {"tied-embedding", "tied-by-function"}
    alone = {name for subject in subjects if subject.settings["mode"] in SINGLE_SAMPLE_MODES for name in subject.used}
    assert alone >= {name for table in UNCOVERED.values() for name in table}
    assert {subject.planted for subject in subjects} == PLANTED.keys() | {None}
    tables = {"mode": MODES, "clipping": CLIPPINGS, "dtype": DTYPES, "form": FORMS, "layout": LAYOUTS}
    for name, table in tables.items():
        assert {subject.settings[name] for subject in subjects} == set(table), name
    kinds = {type(part) for subject in subjects for part in subject.model.modules()}
    assert kinds >= BUILTIN.keys()


# Wrong engines that the comparison must detect


def scaled(sampler):
    """Returns a sampler whose gradients are one percent too large, without its optimized algorithms."""
    return dataclasses.replace(
        sampler,
        grad=lambda call: 1.01 * sampler.grad(call),
        sq_norm=None, weighted_sum=None, add_weighted_sum=None, concat=None, rounding_scale=None, factors=None,
        cost=None, more_grads={}, more_sq_norms={}, write_grads={},
    )  # fmt: skip


def suited(kind, seeds=range(3000)):
    """Yields subjects that train a layer of class ``kind`` with its grad sampler, in single precision or better."""
    for seed in seeds:
        subject = drawn(seed)
        settings = subject.settings
        exact = settings["dtype"] is not torch.bfloat16 and not settings["autocast"]
        by_rule = settings["mode"] in {"auto", "hooks", "ghost"} or settings["path"] == "grad_sample"
        layers = (m for m in subject.model.modules() if type(m) is kind)
        trained = any(p.requires_grad for layer in layers for p in layer.parameters(recurse=False))
        if exact and by_rule and trained and subject.planted is None:
            yield subject_of(seed)


@pytest.mark.one_in(6, "kind", others="slow")
@pytest.mark.one_in(3, "kind")
@pytest.mark.parametrize("kind", BUILTIN, ids=lambda kind: kind.__name__)
def test_a_layer_whose_gradients_are_one_percent_too_large_is_detected(monkeypatch, kind):
    wrong = {name: scaled(sampler) for name, sampler in BUILTIN[kind].items()}
    monkeypatch.setitem(BUILTIN, kind, wrong)
    tried = []
    for subject in suited(kind):
        tried.append(verdict_on(subject).kind)
        if tried[-1] == "wrong" or len(tried) > 20:
            break
    assert tried[-1] == "wrong", f"not detected in {len(tried)} models"


@pytest.mark.slow
def test_samples_above_the_clipping_norm_are_detected(monkeypatch):
    original = Flat.factors
    monkeypatch.setattr(Flat, "factors", lambda self, norms_BK: original(self, norms_BK) * (1 + 2e-6))
    seeds = [seed for seed in range(200) if drawn(seed).settings["clipping"] == "flat"][:20]
    whys = (verdict.why for seed in seeds for verdict in survey([seed]).of("wrong").values())
    assert any("above the threshold" in why for why in whys)


def test_a_rejection_without_a_reason_is_detected(monkeypatch):
    seed = next(seed for seed in range(1000) if drawn(seed).planted == "unused")
    assert verdict_on(subject_of(seed)).kind == "rejected"
    subject = dataclasses.replace(subject_of(seed), planted=None)
    assert verdict_on(subject).kind == "rejected"  # the parameter is really unused
    monkeypatch.setattr(verdicts, "untouched", lambda subject: set())
    assert verdict_on(subject).kind == "wrong"
