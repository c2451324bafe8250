"""Products, norms and sums of layers whose tensors stay in bfloat16. The CPU simulates the GPU."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from inside_parts import ClippedPasses
from oracle import relative_error
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dpengine import GradSampleModule
from dpengine.capture.record import LayerCall, Use
from dpengine.clipping import Flat
from dpengine.grad_modes import bookkeep, choose_method, entry, rows
from dpengine.grad_modes.entry import Entry
from dpengine.grad_modes.flat_buffer import FlatBuffer
from dpengine.grad_modes.method import KEEP, Algorithm, Method
from dpengine.grad_modes.scratch import Scratch
from dpengine.grad_samplers import devices
from dpengine.grad_samplers.embedding import SAMPLERS as EMBEDDING
from dpengine.grad_samplers.linear import SAMPLERS

ROWS, POSITIONS = 6, 5
PRODUCT_ERROR = 3 * 2.0**-19  # of note [bfloat16 products]
ALGORITHMS = [Algorithm(Method.KEEP, "direct"), Algorithm(Method.DISCARD, "direct"), Algorithm(Method.GHOST, "gram")]


def wide():
    """Linear layers whose gradients are too large to be computed together."""
    torch.manual_seed(0)
    run = lambda m, inputs: m.again(m.down(m.up(inputs).tanh())).mean(1)  # noqa: E731
    return Parts(run, up=nn.Linear(300, 200), down=nn.Linear(200, 300), again=nn.Linear(300, 200))


@pytest.fixture
def narrow(monkeypatch):
    """Returns what was found of each call, with products of bfloat16 matrices on the CPU."""
    monkeypatch.setattr(rows, "multiplies_bfloat16", lambda device: True)
    found, stays = [], rows.stays_narrow

    def watched(call, samplers):
        found.append(stays(call, samplers))
        return found[-1]

    monkeypatch.setattr(bookkeep, "stays_narrow", watched)
    return found


def sentences():
    torch.manual_seed(1)
    return torch.randn(ROWS, POSITIONS, 300).bfloat16(), torch.randint(0, 200, (ROWS,))


def clipped(model, bound=0.05, batch=None, mode="auto"):
    sums = ClippedPasses(model, Flat(bound), mode=mode)
    inputs, targets = batch or sentences()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(inputs).float(), targets)
    loss.backward()
    found = sums.clip(rows=ROWS)
    return found, {name: total.double() for name, total in sums.totals().items()}


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_sums_and_norms_are_those_of_widened_tensors(algorithm, mode, narrow, monkeypatch):
    monkeypatch.setattr(choose_method, "_fastest", lambda seconds, fits: algorithm if fits(algorithm) else None)
    model = wide()
    found, sums = clipped(copy.deepcopy(model), mode=mode)
    assert any(narrow)
    monkeypatch.setattr(rows, "multiplies_bfloat16", lambda device: False)
    expected, truth = clipped(model, mode=mode)
    check_close(algorithm, found, sums, expected, truth)


def check_close(algorithm, found, sums, expected, truth):
    """Norms and sums from Gram matrices differ by the rounding that they include."""
    rounds = algorithm.method is Method.GHOST
    assert relative_error(sums, truth) < (0.01 if rounds else 2e-5)
    ratio = found.largest_norm / expected.largest_norm
    assert 1 <= ratio < 1.01 if rounds else ratio == pytest.approx(1, rel=1e-6)


def test_weighted_sums_are_not_rounded_after_norms_were_read(narrow, monkeypatch):
    monkeypatch.setattr(choose_method, "_fastest", lambda seconds, fits: ALGORITHMS[2] if fits(ALGORITHMS[2]) else None)
    wrapped, (inputs, targets) = GradSampleModule(wide()), sentences()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(wrapped(inputs).float(), targets)
    loss.backward()
    found, weights = wrapped.last_pass, torch.linspace(-3, 0.7, ROWS)
    assert any(narrow)
    found.norms()
    for name, total in found.weighted_sum(weights).items():
        expected = torch.einsum("b,b...->...", weights.double(), found.gradients(name).double())
        assert relative_error({name: total.double()}, {name: expected}) < 1e-6


CONVOLVED = [Algorithm(Method.KEEP, "unfold"), Algorithm(Method.DISCARD, "unfold"), Algorithm(Method.GHOST, "gram")]


@pytest.mark.parametrize("algorithm", CONVOLVED, ids=str)
def test_convolutions_have_the_sums_of_rounded_inputs(algorithm, narrow, monkeypatch):
    """Without tensor cores the inputs are not rounded in the gradient, as they are in the forward pass."""
    monkeypatch.setattr(choose_method, "_fastest", lambda seconds, fits: algorithm if fits(algorithm) else None)
    torch.manual_seed(0)
    layers = nn.Conv2d(8, 64, 3), nn.Tanh(), nn.Conv2d(64, 64, 3, stride=2), nn.Flatten(), nn.Linear(64, 5)
    model = nn.Sequential(*layers)
    inputs = torch.randn(ROWS, 8, 5, 5).bfloat16().float()
    batch = inputs, torch.randint(0, 5, (ROWS,))
    found, sums = clipped(copy.deepcopy(model), batch=batch)
    assert narrow and all(narrow)
    monkeypatch.setattr(rows, "multiplies_bfloat16", lambda device: False)
    expected, truth = clipped(model, batch=batch)
    check_close(algorithm, found, sums, expected, truth)


@pytest.mark.parametrize("bfloat16", [True, False])
@pytest.mark.parametrize("algorithm", ALGORITHMS[:2], ids=str)
def test_gradients_of_one_shape_are_computed_together(algorithm, bfloat16, monkeypatch):
    monkeypatch.setattr(choose_method, "_fastest", lambda seconds, fits: algorithm if fits(algorithm) else None)
    model = wide()
    expected, truth = clipped(copy.deepcopy(model))
    groups = []

    def grouped(entries, algorithm, rows):
        groups.append({one.use.name for one in entries})
        return entry.group_sq_norms(entries, algorithm, rows)

    monkeypatch.setattr(bookkeep, "group_sq_norms", grouped)
    monkeypatch.setattr(rows, "multiplies_bfloat16", lambda device: bfloat16)
    monkeypatch.setattr(entry, "launches_kernels", lambda device: True)
    monkeypatch.setattr(entry, "memory_for", lambda device, on_cpu: 2**30)
    found, sums = clipped(model)
    alone = algorithm.method is Method.DISCARD and not bfloat16  # whose norms depend on what each may lose
    assert groups[:2] == ([] if alone else [{"again.weight", "up.weight"}, {"down.weight"}])
    assert relative_error(sums, truth) < 2e-5
    assert found.largest_norm == pytest.approx(expected.largest_norm, rel=1e-6)


@pytest.mark.parametrize("fitting", [1, 2, 5])
def test_groups_that_do_not_fit_are_divided(fitting, monkeypatch):
    torch.manual_seed(0)
    layers = [nn.Linear(30, 20) for _ in range(3)]
    entries, alone = [], []
    for layer in layers:
        call = LayerCall(layer, (torch.randn(ROWS, POSITIONS, 30),), torch.randn(ROWS, POSITIONS, 20))
        entries.append(Entry(Use(layer.weight, "weight"), [(call, SAMPLERS["weight"])]))
        alone.append(Entry(Use(layer.weight, "weight"), [(call, SAMPLERS["weight"])]).sq_norm(KEEP, ROWS, Scratch()))
    monkeypatch.setattr(entry, "memory_for", lambda device, on_cpu: 4 * ROWS * 600 * fitting)
    found = entry.group_sq_norms(entries, Algorithm(Method.KEEP, "direct"), ROWS)
    torch.testing.assert_close(found, alone)


def tied():
    """Embedding whose weight is tied to the last layer."""
    torch.manual_seed(0)
    run = lambda m, indices: m.head(m.words(indices)).mean(1)  # noqa: E731
    m = Parts(run, words=nn.Embedding(40, 300), head=nn.Linear(300, 40, bias=False))
    m.head.weight = m.words.weight
    return m


def test_a_tied_parameter_has_the_sums_of_widened_tensors(narrow, monkeypatch):
    words, targets = torch.randint(0, 40, (ROWS, POSITIONS)), torch.randint(0, 40, (ROWS,))
    _, sums = clipped(tied(), batch=(words, targets))
    assert any(narrow)
    monkeypatch.setattr(rows, "multiplies_bfloat16", lambda device: False)
    _, truth = clipped(tied(), batch=(words, targets))
    assert relative_error(sums, truth) < 2e-3  # the input of the last layer is rounded to bfloat16, or not


@pytest.mark.parametrize("algorithm", ALGORITHMS[1:], ids=str)
def test_the_sum_of_a_tied_parameter_is_that_of_its_norms(algorithm, monkeypatch):
    """The bfloat16 call stays narrow if the gradients are formed, and is widened for the Gram matrix and its sum."""
    monkeypatch.setattr(rows, "multiplies_bfloat16", lambda device: True)
    model = tied()
    words, by_words = torch.randint(0, 40, (ROWS, POSITIONS)), torch.randn(ROWS, POSITIONS, 300)
    inputs, by_head = torch.randn(ROWS, POSITIONS, 300).bfloat16(), torch.randn(ROWS, POSITIONS, 40).bfloat16()
    by_words[0] = -inputs[0].float() * by_head[0, :, :1].float()  # the uses cancel in part
    head = LayerCall(model.head, (inputs,), by_head, name="head")
    table = LayerCall(model.words, (words,), by_words, name="words")
    samplers = SAMPLERS["weight"], EMBEDDING["weight"]
    one = Entry(Use(model.head.weight, "weight"), list(zip((head, table), samplers, strict=True)))
    truth = torch.einsum("bto,bti->boi", by_head.double(), inputs.double())
    for i in range(ROWS):
        truth[i].index_add_(0, words[i], by_words[i].double())
    one.join()
    assert [call.grad_output.dtype for call, _ in one.calls] == [torch.bfloat16, torch.float32]
    sq_norm_B = one.sq_norm(algorithm, ROWS, Scratch())
    torch.testing.assert_close(sq_norm_B.double(), truth.flatten(1).square().sum(dim=1), rtol=1e-6, atol=0)
    dtypes = {call.grad_output.dtype for call, _ in one.calls}
    assert (torch.bfloat16 in dtypes) is (algorithm.method is Method.DISCARD)
    factor_B, buffer = torch.rand(ROWS), FlatBuffer([model.head.weight])
    one.add_sum(factor_B, 2.0, buffer)
    expected = 2 * torch.einsum("b,boi->oi", factor_B.double(), truth)
    (found,) = buffer.drain().views.values()
    assert relative_error({"weight": found.double()}, {"weight": expected}) < 1e-6


@pytest.mark.one_in(2, "mode", "rows_at_a_time", others="slow")
@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("rows_at_a_time", [1, 4, ROWS])
def test_the_sum_of_discarded_gradients_adds_the_products_of_the_norms(rows_at_a_time, mode, narrow, monkeypatch):
    monkeypatch.setattr(choose_method, "_fastest", lambda seconds, fits: ALGORITHMS[1] if fits(ALGORITHMS[1]) else None)
    monkeypatch.setattr(Entry, "_rows_at_a_time", lambda entry: rows_at_a_time)
    plain = SAMPLERS["weight"].write_grads["direct"]

    def half(call, out):
        plain(call, out)
        out /= 2

    model = wide()
    _, expected = clipped(copy.deepcopy(model), bound=1e6, mode=mode)
    monkeypatch.setitem(SAMPLERS["weight"].write_grads, "direct", half)
    _, sums = clipped(model, bound=1e6, mode=mode)
    for name, total in sums.items():
        torch.testing.assert_close(total, expected[name] / (2 if "weight" in name else 1))


def test_inputs_have_the_dtype_that_the_layer_multiplied_in():
    """Under autocast a float32 input is rounded before the layer multiplies it, and so it is in the gradient."""
    layer = nn.Linear(3, 2)
    inputs, grads = torch.randn(4, 5, 3), torch.randn(4, 5, 2).bfloat16()
    call = LayerCall(layer, (inputs,), grads, name="layer")
    expected = torch.bmm(grads.float().transpose(1, 2), inputs.bfloat16().float())
    assert torch.equal(SAMPLERS["weight"].grad(call), expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS[:2], ids=str)
def test_norms_of_one_position_are_not_rounded(algorithm):
    torch.manual_seed(0)
    layer, inputs, grads = nn.Linear(30, 20), torch.randn(64, 30).bfloat16(), torch.randn(64, 20).bfloat16()
    call = LayerCall(layer, (inputs,), grads, name="layer")
    found = Entry(Use(layer.weight, "weight"), [(call, SAMPLERS["weight"])]).sq_norm(algorithm, 64, Scratch())
    expected = (inputs.double().norm(dim=1) * grads.double().norm(dim=1)).square()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def sum_in_blocks(products, block, extra_bits):
    """The sum of float64 numbers as tensor cores form it in float32, by the model of note [bfloat16 products]."""
    total = torch.zeros(1, dtype=torch.float64)
    for some in products.split(block):
        terms = torch.cat([total, some])
        unit = 2.0 ** (torch.frexp(terms.abs().max()).exponent.item() - 24 - extra_bits)
        total = (terms / unit).trunc().sum(dim=0, keepdim=True) * unit
        unit = 2.0 ** (torch.frexp(total).exponent.item() - 24)
        total = (total / unit).trunc() * unit
    return float(total)


@pytest.mark.parametrize(("block", "extra_bits"), [(4, 1), (8, 1), (16, 2)])
@pytest.mark.parametrize("positions", [5, 65, 4096])
def test_the_bound_covers_truncated_products(positions, block, extra_bits):
    """Each position after the first is slightly too small to change the sum."""
    small = torch.tensor(255 / 256 * 2.0 ** -(12 + extra_bits)).bfloat16()
    acts, grads = torch.full((1, positions, 1), 2.0**-11).bfloat16(), small.expand(1, positions, 1).clone()
    acts[:, 0], grads[:, 0] = 1, 1
    products = (acts.double() * grads.double()).flatten()
    lost = float(products.sum()) - sum_in_blocks(products, block, extra_bits)
    assert lost == pytest.approx(float(products[1:].sum()), rel=1e-6)
    call = LayerCall(nn.Linear(1, 1), (acts,), grads, name="layer")
    assert lost <= PRODUCT_ERROR * float(SAMPLERS["weight"].rounding_scale(call))


def test_traced_bfloat16_tensors_are_widened(monkeypatch):
    """Fake tensors and Inductor of torch 2.8 and later do not know all products with a float32 result."""
    monkeypatch.setattr(rows, "multiplies_bfloat16", lambda device: True)
    for mode, stays in ((contextlib.nullcontext(), True), (FakeTensorMode(), False)):
        with mode:
            inputs, grads = torch.ones(2, 3).bfloat16(), torch.ones(2, 4).bfloat16()
            call = LayerCall(nn.Linear(3, 4), (inputs,), grads, name="layer")
            assert rows.stays_narrow(call, [SAMPLERS["weight"]]) is stays


@pytest.mark.parametrize(("hip", "capability", "expected"), [(None, (9, 0), True), ("7.0", (9, 4), False)])
def test_only_gpus_with_a_known_product_error_multiply_bfloat16(hip, capability, expected, monkeypatch):
    """AMD builds of torch also use the device type "cuda"."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert devices.multiplies_bfloat16(torch.device("cuda", 0)) is expected
