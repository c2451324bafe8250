"""Empty, non-finite and wrongly sized batches, data sets shared between engines, and unusual loaders."""

import contextlib
import gc
import math
import warnings
import weakref

import inside
import pytest
import torch
from case_models import model_of
from loops import (
    CLASSES,
    FEATURES,
    ROWS,
    assert_same_gradients,
    every_mode,
    examples,
    expected_gradients,
    first_batch,
    gradients_of,
    make_loop,
    mlp,
    state_of,
    train,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpengine import PrivacyEngine
from dpengine.accounting import Charge, epsilon_of, release_event
from dpengine.errors import BatchMismatchError, PrivacyWarning, SamplingError

NOISE = {"noise_multiplier": 1.0}

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012", "ignore:.*DPE006")


# Empty batches


class DictDataset(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"x": {"values": torch.randn(FEATURES, generator=generator)}, "y": index % CLASSES}


def test_an_empty_batch_is_a_placeholder_of_zeros_and_costs_a_step():
    loop = make_loop(batch_size=1, noise_multiplier=1.0)
    empty = 0
    for inputs, targets in loop.loader:
        before = state_of(loop.model)
        loop.optimizer.zero_grad()
        loss = loop.backward(inputs, targets)
        loop.optimizer.step()
        changed = [not torch.equal(before[name], value) for name, value in state_of(loop.model).items()]
        assert all(changed)  # noise is added with or without samples
        assert all(value.isfinite().all() for value in state_of(loop.model).values())
        if inside.samples_now(loop.engine) == 0:
            empty += 1
            assert inputs.shape == (1, FEATURES) and not inputs.any()
            assert targets.dtype is torch.int64 and targets.tolist() == [0]
            assert loss.isfinite()
    assert empty > 0
    assert loop.engine.ledger.steps == len(loop.loader) == ROWS
    assert {charge.kind for charge in loop.engine.ledger.history} == {"release"}


@pytest.mark.parametrize("skip_backward", [True, False], ids=["without backward", "with backward"])
def test_an_empty_batch_of_dicts_trains(skip_backward):
    loop = make_loop(batch_size=1, dataset=DictDataset(), seed=1)
    sizes = []
    for batch in loop.loader:
        sizes.append(inside.samples_now(loop.engine))
        assert batch["x"]["values"].shape == (max(sizes[-1], 1), FEATURES)
        loop.optimizer.zero_grad()
        if sizes[-1] or not skip_backward:
            loop.backward(batch["x"]["values"], batch["y"])
        loop.optimizer.step()
        if sizes[-1] == 0:
            assert all(not p.grad.any() for p in loop.model.parameters())
    assert 0 in sizes
    assert loop.engine.ledger.steps == 8


@model_of(lambda: {"layer": nn.MultiheadAttention(4, 2, batch_first=True), "head": nn.Linear(4, 3)})
def attention(model, inputs):
    return model.head(model.layer(inputs, inputs, inputs)[0][:, 0])


@model_of(lambda: {"layer": nn.LSTM(4, 5, batch_first=True), "head": nn.Linear(5, 3)})
def lstm(model, inputs):
    return model.head(model.layer(inputs)[0][:, 0])


EMPTY_MODELS = {
    "conv-groupnorm": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3)),
        (1, 6, 6),
    ),
    "linear-layernorm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)), (4,)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 3)), (3,)),
    "attention": (attention, (2, 4)),
    "lstm": (lstm, (2, 4)),
}


@pytest.mark.one_in(6, "mode", "make_model", others="slow")
@pytest.mark.one_in(3, "mode", "make_model")
@every_mode
@pytest.mark.parametrize(("make_model", "shape"), EMPTY_MODELS.values(), ids=EMPTY_MODELS)
def test_layers_accept_batches_without_samples(make_model, shape, mode):
    torch.manual_seed(0)
    inputs = torch.randint(0, 5, (6, *shape)) if shape == (3,) else torch.randn(6, *shape)
    dataset = TensorDataset(inputs, torch.randint(0, CLASSES, (6,)))
    loop = make_loop(make_model(), dataset=dataset, batch_size=1, grad_sample_mode=mode, max_grad_norm=0.5, seed=4)
    sizes = set()
    for batch, targets in inside.without_placeholders(loop.loader):
        expected = expected_gradients(loop.model, [(batch, targets)], max_norm=0.5, divisor=1)
        loop.step(batch, targets)
        assert_same_gradients(gradients_of(loop.model), expected, rtol=1e-5 if len(targets) else 0)
        sizes.add(len(targets))
    assert sizes > {0}


# Samples that are not finite


@pytest.mark.one_in(8, "mode", "bad", others="slow")
@pytest.mark.one_in(4, "mode", "bad")
@every_mode
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e38])
def test_samples_with_non_finite_values_contribute_nothing(bad, mode):
    dataset = examples()
    dataset.tensors[0][::3] = bad
    loop = make_loop(dataset=dataset, grad_sample_mode=mode)
    dropped = 0
    for inputs, targets in loop.loader:
        good = (inputs.abs() < 1e30).all(dim=1)
        expected = expected_gradients(loop.model, [(inputs[good], targets[good])])
        loop.step(inputs, targets)
        dropped += int((~good).sum())
        found = gradients_of(loop.model)
        if bad == 1e38:  # finite: saturated units may leave a finite gradient, which is clipped
            assert all(gradient.isfinite().all() for gradient in found.values())
        else:
            assert_same_gradients(found, expected)
    assert all(value.isfinite().all() for value in state_of(loop.model).values())
    if bad != 1e38:
        assert inside.state(loop.engine).dropped == dropped > 0
        assert loop.engine.metrics(nonprivate=True)["nonprivate/dropped_rows"] == dropped


# Batches of the wrong size


def test_more_samples_than_were_drawn_raise_and_charge_the_batch():
    loop = make_loop(**NOISE)
    inputs, targets = first_batch(loop.loader)
    size = len(targets)
    message = rf"DPE018.*All layers, such as '2', saw {2 * size} samples, and the loader returned {size}.*duplicated"
    with pytest.raises(BatchMismatchError, match=message):
        loop.backward(torch.cat([inputs, inputs]), torch.cat([targets, targets]))
    assert loop.charges == [("void", 1)]


def test_samples_for_an_empty_batch_raise():
    loop = make_loop(batch_size=1, **NOISE)
    loader = inside.without_placeholders(loop.loader)
    assert any(len(targets) == 0 for _, targets in loader)  # stops at the first empty batch
    inputs, targets = examples()[:1]
    with pytest.raises(BatchMismatchError, match=r"DPE018.*saw 1 samples, and the loader returned 0"):
        loop.backward(inputs, targets)


def test_fewer_samples_than_were_drawn_raise_because_axis_0_may_not_be_the_batch():
    loop = make_loop()
    inputs, targets = first_batch(loop.loader, least=2)
    with pytest.raises(BatchMismatchError, match=r"DPE018.*axis 0"):
        loop.backward(inputs[1:], targets[1:])


# Several engines on one data set


@pytest.mark.hazard("A11")
def test_a_second_model_on_one_engine_composes():
    dataset = examples()
    one = make_loop(dataset=dataset, **NOISE)
    two = make_loop(mlp(), engine=one.engine, dataset=dataset, noise_multiplier=2.0, batch_size=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(one)
        train(two)
    charges = [
        Charge(release_event(noise_multiplier=1.0, sample_rate=6 / ROWS), 4),
        Charge(release_event(noise_multiplier=2.0, sample_rate=3 / ROWS), 8),
    ]
    assert one.engine.get_epsilon(1e-3) == pytest.approx(epsilon_of(charges, 1e-3))
    assert one.engine.get_epsilon(1e-3) > max(epsilon_of([charge], 1e-3) for charge in charges)


SHARED_DATASET = r"DPE012.*Another engine.*use one engine.*load the state"


def one_step(loop):
    loop.step(*next(iter(loop.loader)))


@contextlib.contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        yield


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.hazard("A11")
def test_two_engines_on_one_data_set_warn_before_the_first_step_of_the_second(order):
    dataset = examples()
    loops = [make_loop(dataset=dataset, **NOISE) for _ in range(2)]
    first, second = (loops[i] for i in order)
    with no_warnings():
        one_step(first)
        with pytest.raises(PrivacyWarning, match=SHARED_DATASET):
            one_step(second)
    assert second.engine.ledger.steps == 0  # as an error, the warning prevents the step


def one_epoch(dataset, **options):
    """Runs a loop over one epoch."""
    loop = make_loop(dataset=dataset, **NOISE, **options)
    train(loop)
    return loop


def engine_with(state):
    engine = PrivacyEngine()
    engine.load_state_dict(state)
    return engine


def test_an_engine_for_each_epoch_is_reported_after_the_first_was_garbage_collected():
    dataset = examples()
    one_epoch(dataset)
    gc.collect()
    with pytest.warns(PrivacyWarning, match=SHARED_DATASET):
        one_epoch(dataset)


def test_a_run_that_outlives_its_engine_is_reported():
    dataset = examples()
    kept = make_loop(dataset=dataset, **NOISE)
    engine = weakref.ref(kept.engine)
    kept.engine = None  # as in a function that does not return the engine
    gc.collect()
    assert engine() is None
    one_epoch(dataset)
    with pytest.warns(PrivacyWarning, match=SHARED_DATASET):
        train(kept)


def test_each_data_set_is_reported_once():
    for dataset in (examples(), examples()):
        one_epoch(dataset)
        with pytest.warns(PrivacyWarning, match=SHARED_DATASET) as seen:
            one_epoch(dataset)
            one_epoch(dataset)
        assert len(seen) == 1


@pytest.mark.parametrize("when", ["before make_private", "after make_private", "after detach"])
def test_an_engine_that_continues_from_the_state_of_the_first_does_not_warn(when):
    dataset = examples()
    first = one_epoch(dataset)
    if when == "after detach":
        first.engine.detach(first.model)
    state = first.engine.state_dict()
    with no_warnings():
        if when == "before make_private":
            one_epoch(dataset, engine=engine_with(state))
        else:
            second = make_loop(dataset=dataset, **NOISE)
            second.engine.load_state_dict(state)
            train(second)


def test_the_first_engine_that_continues_next_to_one_with_its_state_warns():
    dataset = examples()
    first = one_epoch(dataset)
    one_step(make_loop(dataset=dataset, **NOISE, engine=engine_with(first.engine.state_dict())))
    with pytest.warns(PrivacyWarning, match=SHARED_DATASET):
        one_step(first)


def test_steps_over_other_data_do_not_suppress_the_warning():
    one, other = examples(), examples()
    first_state = one_epoch(one).engine.state_dict()
    second = one_epoch(other)  # as many steps of the same kind
    with pytest.warns(PrivacyWarning, match=SHARED_DATASET):
        one_epoch(one, engine=second.engine)
    assert len(first_state["ledger"]["charges"]) == 1


def test_a_loaded_state_may_lack_steps_over_other_data():
    one, other = examples(), examples()
    first = one_epoch(one)
    state = first.engine.state_dict()
    one_epoch(other, engine=first.engine)
    with no_warnings():
        one_epoch(one, engine=engine_with(state))


@pytest.mark.parametrize("as_list", [True, False])
def test_other_data_or_an_engine_that_made_no_step_do_not_warn(as_list):
    def data():
        return list(examples()) if as_list else examples()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = [one_epoch(data()) for _ in range(3)]
        dataset = data()
        unused = make_loop(dataset=dataset, **NOISE)
        one_epoch(dataset)
    assert len(kept) == 3
    assert unused.engine.ledger.steps == 0


# Loaders that are rejected


def test_a_loader_with_batch_size_none_is_rejected():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SamplingError, match=r"DPE004.*batch_size=None") as seen:
        PrivacyEngine().make_private(model, optimizer, DataLoader(examples(), batch_size=None), **NOISE)
    assert seen.value.fix in str(seen.value) and seen.value.fix
    assert type(optimizer) is torch.optim.SGD
