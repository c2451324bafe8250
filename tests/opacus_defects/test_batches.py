"""Defects of Opacus: a step includes all samples of its batch, all of them clipped, and nothing else."""

import contextlib
import math

import inside
import pytest
import torch
import torch.nn.functional as F
from case_models import model_of
from opacus_defects.apis import (
    ALL_APIS,
    COMPAT_APIS,
    DEFAULT_APIS,
    LAYER_APIS,
    assert_equal,
    assert_run_is_right,
    assert_unmoved,
    fixed_loader,
    opacus,
    true_sum,
    weights_of,
    with_apis,
)
from opacus_defects.small import CLASSES, ROWS, batch, classes, indices, mlp, seeded
from reference import flat_norms, per_sample_gradients
from torch import nn

from dpengine.clipping import Adaptive
from dpengine.errors import PrivacyError
from dpengine.noise import NoiseSource

pytestmark = pytest.mark.filterwarnings("ignore::dpengine.PrivacyWarning")

LOSS = nn.CrossEntropyLoss()
NORM = 1.5  # about the median norm: if all samples were clipped, one that counts twice might not be detected


# One sample that is not finite makes the step NaN


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
@with_apis(ALL_APIS)
@pytest.mark.hazard("O14")
def test_a_sample_that_is_not_finite_is_dropped(api, value):
    inputs, targets = batch()
    inputs[2, 1] = value
    others = [0, 1, 3, 4, 5]
    truth = true_sum(mlp(), LOSS, (inputs[others], targets[others]), NORM)
    private = api.open(mlp(), fixed_loader(ROWS), max_grad_norm=NORM)
    before = weights_of(private.bare)
    assert_equal(private.run(inputs, targets), truth)
    moved = {name: private.size * (before[name] - p.detach()).double() for name, p in private.bare.named_parameters()}
    assert_equal(moved, truth, rtol=1e-4)  # the update rounds the weights again
    if not api.compat:
        assert private.engine.metrics(nonprivate=True)["nonprivate/dropped_rows"] == 1


# An interrupted batch enters the next one


@contextlib.contextmanager
def in_chunks(api, private, rows):
    """Opens a loader that returns at most ``rows`` samples at once."""
    if not api.compat:
        yield private.loader
        return
    manager = opacus("utils.batch_memory_manager").BatchMemoryManager
    with manager(data_loader=private.loader, max_physical_batch_size=rows, optimizer=private.optimizer) as loader:
        yield loader


def open_in_chunks(api, model, rows, *, loader=None, **options):
    if not api.compat:
        options["physical_batch_size"] = rows
    return api.open(model, loader or fixed_loader(ROWS), max_grad_norm=NORM, **options)


def charges_of(api, private):
    if not api.compat:
        return sum(charge.count for charge in private.engine.ledger.history)
    return sum(steps for *_, steps in private.engine.accountant.history)


@pytest.mark.parametrize("end", ["break", pytest.param("exception", marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@with_apis(ALL_APIS)
@pytest.mark.hazard("O15")
def test_an_interrupted_batch_does_not_affect_the_next(api, workers, end):
    inputs, targets = batch()
    model = mlp()
    private = open_in_chunks(api, model, 2, loader=fixed_loader(ROWS, num_workers=workers), noise_multiplier=1e-6)
    before = weights_of(model)
    with contextlib.suppress(ZeroDivisionError), in_chunks(api, private, 2) as loader:
        for (chunk,) in loader:
            assert len(chunk) == 2
            private.step(inputs[chunk], targets[chunk])
            if end == "break":
                break
            raise ZeroDivisionError
    assert_unmoved(model, before)
    with in_chunks(api, private, 2) as loader:
        for (chunk,) in loader:
            private.step(inputs[chunk], targets[chunk])
    plain = mlp()
    plain.load_state_dict(before)
    assert_equal(private.sum(), true_sum(plain, LOSS, (inputs, targets), NORM), rtol=1e-4)
    assert charges_of(api, private) in {1, 2}  # the interrupted batch is counted, or was dropped entirely
    if not api.compat:
        assert charges_of(api, private) == 2


# A training step bypasses the wrapper and is not private


@with_apis(ALL_APIS)
@pytest.mark.hazard("O16")
def test_a_step_on_gradients_that_were_set_by_hand_raises(api):
    private = api.open(mlp(), fixed_loader(ROWS))
    before = weights_of(private.bare)
    next(iter(private.loader))
    private.optimizer.zero_grad()
    for p in private.bare.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises((PrivacyError, ValueError), match=r"(?i)backward|not initialized"):
        private.optimizer.step()
    assert_unmoved(private.bare, before)


@with_apis(LAYER_APIS)
@pytest.mark.hazard("O16")
def test_a_gradient_that_bypasses_the_model_raises_before_the_weights_change(api):
    private = api.open(mlp(), fixed_loader(ROWS))
    before = weights_of(private.bare)
    next(iter(private.loader))
    private.optimizer.zero_grad()
    inputs, targets = batch()
    outputs = torch.func.functional_call(mlp(), dict(private.bare.named_parameters()), (inputs,))
    with pytest.raises((PrivacyError, ValueError), match=r"(?i)backward|around|not initialized"):
        F.cross_entropy(outputs, targets).backward()
        private.optimizer.step()
    assert_unmoved(private.bare, before)


@with_apis([api for api in COMPAT_APIS if not api.writes])
@pytest.mark.hazard("O16")
def test_the_original_optimizer_has_no_gradients_to_apply(api):
    held = []

    def make_optimizer(parameters):
        held.append(torch.optim.SGD(parameters, lr=1.0))
        return held[0]

    private = api.open(mlp(), fixed_loader(ROWS), make_optimizer=make_optimizer)
    before = weights_of(private.bare)
    next(iter(private.loader))
    private.optimizer.zero_grad()
    inputs, targets = batch()
    LOSS(private.model(inputs), targets).backward()
    with contextlib.suppress(PrivacyError):
        held[0].step()
    assert_unmoved(private.bare, before)


@with_apis([api for api in COMPAT_APIS if not api.writes])
@pytest.mark.hazard("O16")
def test_a_loop_that_calls_the_module_inside_the_wrapper_is_private(api):
    private = api.open(mlp(), fixed_loader(ROWS), max_grad_norm=NORM)
    private.model = private.bare  # as a LightningModule that made itself private calls itself
    assert_run_is_right(private, batch(), NORM)


# Adaptive clipping uses the last physical batch only


def norms_of(model, inputs, targets):
    return flat_norms(per_sample_gradients(model, LOSS, (inputs,), targets))


@pytest.mark.parametrize(("chunk", "reduction"), [(2, "mean"), (6, "mean"), (6, "sum")])
@with_apis(DEFAULT_APIS)
@pytest.mark.hazard("O23")
def test_the_next_clipping_norm_depends_on_the_whole_batch_and_a_public_size(api, chunk, reduction):
    inputs, targets = batch()
    policy = Adaptive(2.0, count_noise_multiplier=1e-9, learning_rate=0.5)  # practically without noise
    options = {"clipping": policy, "sample_rate": 1.0, "expected_batch_size": 9.0, "target_delta": 1e-3}
    options |= {"loss_reduction": reduction, "criterion": nn.CrossEntropyLoss(reduction=reduction)}
    private = api.open(mlp(), fixed_loader(ROWS), max_grad_norm=None, physical_batch_size=chunk, **options)
    norms = norms_of(mlp(), inputs, targets)
    below = int((norms <= 2.0).sum())
    assert 0 < below < ROWS
    for (some,) in private.loader:
        private.step(inputs[some], targets[some])
    share = (below - (ROWS - below)) / 2 / 9 + 0.5  # a count of plus and minus one half, over the public 9
    found = private.optimizer.max_grad_norm
    assert found == pytest.approx(2.0 * math.exp(-0.5 * (share - 0.5)), rel=1e-6)


@pytest.mark.hazard("O23")
def test_the_count_of_unclipped_samples_has_noise():
    found = set()
    for seed in (0, 1):
        policy = Adaptive(2.0, count_noise_multiplier=1.5)
        options = {"max_grad_norm": None, "clipping": policy, "noise_multiplier": 2.0}
        private = DEFAULT_APIS[0].open(mlp(), fixed_loader(ROWS), **options)
        inside.draw_from(private.engine, NoiseSource.seeded(seed))
        private.run(*batch())
        found.add(private.optimizer.max_grad_norm)
    assert len(found) == 2


def next_threshold(api, private, chunk):
    inputs, targets = batch()
    with in_chunks(api, private, chunk) as loader:
        for (some,) in loader:
            private.step(inputs[some], targets[some])
    return float(private.optimizer.max_grad_norm)


def expected_threshold(now, rows=slice(None)):
    below = (norms_of(mlp(), *batch())[rows] <= now).double()
    return now * math.exp(-0.5 * (float(below.mean()) - 0.5))


ADAPTIVE = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.5, "max_clipbound": 1e8}


@pytest.mark.parametrize("chunk", [2, 6])
@with_apis(COMPAT_APIS)
@pytest.mark.hazard("O23")
def test_the_next_clipping_norm_of_compat_depends_on_the_whole_batch(api, chunk):
    options = {"clipping": "adaptive", "min_clipbound": 1e-8, "unclipped_num_std": 1e-9, **ADAPTIVE}
    private = api.open(mlp(), fixed_loader(ROWS), max_grad_norm=2.0, **options)
    assert next_threshold(api, private, chunk) == pytest.approx(expected_threshold(2.0), rel=1e-5)


@pytest.mark.parametrize("chunk", [2, 6])
@with_apis(COMPAT_APIS)
@pytest.mark.hazard("O23")
def test_the_next_clipping_norm_of_the_adaptive_engine_depends_on_the_whole_batch(api, chunk):
    engine = opacus("utils.adaptive_clipping").PrivacyEngineAdaptiveClipping
    seeded = torch.Generator().manual_seed(0)  # noise of the usual size, ROWS / 20 of a count: 2.5 % of the threshold
    options = {"min_clipbound": 1e-8, **ADAPTIVE, "make_engine": engine, "noise_generator": seeded}
    private = api.open(mlp(), fixed_loader(ROWS), max_grad_norm=1.68, **options)
    expected = expected_threshold(1.68)
    assert expected_threshold(1.68, slice(-2, None)) < 0.86 * expected  # the value if only the last chunk were counted
    assert next_threshold(api, private, chunk) == pytest.approx(expected, rel=0.07)


# Ghost: the first of two backward passes is dropped


@with_apis(ALL_APIS)
@pytest.mark.hazard("O28")
def test_physical_batches_sum_to_the_logical_batch(api):
    inputs, targets = batch()
    private = open_in_chunks(api, mlp(), 2)
    with in_chunks(api, private, 2) as loader:
        for (chunk,) in loader:
            private.step(inputs[chunk], targets[chunk])
    assert_equal(private.sum(), true_sum(mlp(), LOSS, (inputs, targets), NORM))


@with_apis(LAYER_APIS)
@pytest.mark.hazard("O28")
def test_one_step_after_two_backward_passes_includes_both_batches(api):
    inputs, targets = batch()
    private = api.open(mlp(), fixed_loader(ROWS, batch_size=3), max_grad_norm=NORM, poisson=False)
    private.optimizer.zero_grad()
    for (some,) in private.loader:
        private.backward(inputs[some], targets[some])
    private.optimizer.step()
    found = {name: 2 * total for name, total in private.sum().items()}  # the mean is over both
    assert_equal(found, true_sum(mlp(), LOSS, (inputs, targets), NORM))


# A step changes flags of torch.backends


@model_of(lambda: {"words": nn.Embedding(5, 4), "head": nn.Linear(4, CLASSES)})
def words_model(m, tokens):
    return m.head(m.words(tokens).mean(dim=1))


def flags():
    found = {}
    for name in ("cudnn", "cuda.matmul", "mkldnn", "mkl"):
        module = torch.backends
        for part in name.split("."):
            module = getattr(module, part)
        for flag in ("deterministic", "benchmark", "enabled", "allow_tf32", "allow_fp16_reduced_precision_reduction"):
            with contextlib.suppress(AttributeError, AssertionError):
                found[name, flag] = getattr(module, flag)
    return {**found, "deterministic": torch.are_deterministic_algorithms_enabled()}


@with_apis([api for api in ALL_APIS if api.id != "compat-ew"])  # Opacus's own ew mode rejects empty batches
@pytest.mark.hazard("O36")
def test_an_empty_batch_of_an_embedding_changes_no_setting_of_the_process(api):
    tokens, targets = indices(5, 4), classes()
    private = api.open(seeded(words_model), fixed_loader(ROWS, batch_size=1), poisson=True)
    before, sizes = flags(), set()
    assert before["cudnn", "deterministic"] is False
    for _ in range(20):
        for (some,) in private.loader:
            sizes.add(len(some) if api.compat else inside.samples_now(private.engine))
            private.step(tokens[some], targets[some])
        if 0 in sizes:
            break
    assert 0 in sizes
    assert flags() == before


def test_some_of_these_samples_are_clipped():
    norms = norms_of(mlp(), *batch())
    assert 2 <= int((norms < NORM).sum()) <= 4
