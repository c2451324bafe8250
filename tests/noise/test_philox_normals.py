"""Normals on accelerators, run on the CPU. The Triton kernel is tested where Triton is installed."""

import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from dpengine.noise import NoiseSource, philox_normals
from dpengine.noise.box_muller import GROUP, LARGEST_NORMAL, PAIRS, normals_of_keystream
from dpengine.noise.philox_normals import add_with_torch, philox

FULL = 2**32 - 1
DIGITS_OF_PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
KEY = (1, FULL, 2**31, 3)
SIZE = 5 * GROUP + 77


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL, FULL, FULL, FULL), (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (DIGITS_OF_PI[:4], DIGITS_OF_PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_words_equal_the_published_philox_test_vectors(counter, key, words):
    assert tuple(int(word) for word in philox(tuple(torch.tensor([word]) for word in counter), key)) == words


def expected_normals(first, size, std=1.0):
    """The transform of the CPU in NumPy, on the words of each pair."""
    groups = range(first // GROUP, -(-(first + size) // GROUP))
    pairs = torch.arange(groups.start * PAIRS, groups.stop * PAIRS)
    low, high, turn, _ = philox((pairs & FULL, pairs >> 32, KEY[2], KEY[3]), KEY[:2])
    rows = [word.numpy().astype("<u4").reshape(-1, PAIRS) for word in (low, high, turn)]
    far = np.stack(rows[:2], axis=2).reshape(len(groups), 2 * PAIRS)
    table = np.concatenate([far, rows[2]], axis=1).reshape(-1, 3, 16, 16)
    keystream = np.ascontiguousarray(table.transpose(0, 1, 3, 2)).view("<u8").reshape(-1)
    return normals_of_keystream(keystream, std)[first - groups.start * GROUP :][:size]


@pytest.mark.parametrize("first", [0, 2**40 + 100, 2**41 - 300])
def test_normals_equal_those_of_the_cpu_up_to_rounding(first):
    got = torch.zeros(SIZE, dtype=torch.float64)
    add_with_torch(got, 1.0, 1.0, KEY, first)
    # Not bit by bit: the CPU square root of torch has an error of one unit in the last place.
    np.testing.assert_allclose(got.numpy(), expected_normals(first, SIZE), rtol=1e-15)


def test_a_slice_drawn_separately_equals_the_slice_of_one_draw(monkeypatch):
    monkeypatch.setattr(philox_normals, "_GROUPS_AT_ONCE", 2)
    whole = torch.linspace(-1, 1, SIZE)
    part = whole[700:2000].clone()
    add_with_torch(whole, 1.5, 0.25, KEY, 2**40 + 100)
    add_with_torch(part, 1.5, 0.25, KEY, 2**40 + 800)
    assert torch.equal(whole[700:2000], part)


def test_each_word_of_the_key_changes_all_normals():
    draws = []
    for key in [KEY, *(tuple(word ^ (i == place) for i, word in enumerate(KEY)) for place in range(4))]:
        draws.append(torch.zeros(SIZE, dtype=torch.float64))
        add_with_torch(draws[-1], 1.0, 1.0, key, 0)
    for i, one in enumerate(draws):
        assert all(float((one * other).mean()) < 5 / SIZE**0.5 for other in draws[:i])


def test_normals_are_normal_and_independent_of_their_neighbors():
    """A million draws. Seeded, so that the p-values are fixed: they were chosen before the seed."""
    drawn = torch.zeros(1_000_000, dtype=torch.float64)
    add_with_torch(drawn, 1.0, 1.0, KEY, 0)
    x = drawn.numpy()
    assert stats.kstest(x, "norm").pvalue > 1e-3
    assert 4.5 < abs(x).max() <= LARGEST_NORMAL
    for distance in (1, PAIRS, GROUP):
        for left, right in ((x[:-distance], x[distance:]), (x[:-distance] ** 2 - 1, x[distance:] ** 2 - 1)):
            assert abs(np.mean(left * right)) < 5 * math.sqrt(np.mean((left * right) ** 2) / len(left))


def test_noise_of_steps_domains_and_seeds_is_uncorrelated(monkeypatch):
    monkeypatch.setattr("dpengine.noise.source._GENERATOR_DEVICES", ("cpu",))
    source = NoiseSource.seeded(1)
    whole = source.normal_(torch.empty(50_000), domain="noise", step=3)
    part = source.normal_(torch.empty(50_000 - 7001), domain="noise", step=3, start=7001)
    assert whole[7001:].equal(part)
    for other in (
        source.normal_(torch.empty(50_000), domain="noise", step=4),
        source.normal_(torch.empty(50_000), domain="other", step=3),
        NoiseSource.seeded(2).normal_(torch.empty(50_000), domain="noise", step=3),
    ):
        assert abs(float((whole * other).mean())) < 5 / 50_000**0.5
    sums = torch.full((50_000,), 2.0)
    assert torch.allclose(source.add_normal_(sums, 3.0, domain="noise", step=3, scale=0.5), 1 + 1.5 * whole, atol=1e-6)


@pytest.mark.parametrize("fault", ["other numbers", "no Triton", None])
def test_a_kernel_with_other_numbers_is_not_used(monkeypatch, fault):
    def kernel(flat, *arguments):
        add_with_torch(flat, *arguments)
        if fault is not None:
            flat[7] = torch.nextafter(flat[7], torch.tensor(9.0, dtype=flat.dtype))

    module = None if fault == "no Triton" else SimpleNamespace(add_with_triton=kernel)
    monkeypatch.setitem(sys.modules, "dpengine.noise.philox_kernel", module)
    philox_normals._fastest_on.cache_clear()
    try:
        assert philox_normals._fastest_on(torch.device("cpu")) is (kernel if fault is None else add_with_torch)
    finally:
        philox_normals._fastest_on.cache_clear()


@pytest.mark.gpu
def test_a_gpu_uses_the_kernel_that_reproduces_the_bits_of_torch():
    assert philox_normals._fastest_on(torch.device("cuda")) is not add_with_torch


# The Triton kernel. Triton selects its interpreter at import, so these tests need a separate process.

INTERPRETED = """
import sys, torch
from dpengine.noise.philox_kernel import add_with_triton
sums, std, scale, key, first = torch.load(sys.argv[1])
for one in sums:
    add_with_triton(one, std, scale, key, first)
torch.save(sums, sys.argv[1])
"""


@pytest.mark.parametrize("first", [0, 2**40 + 100, 2**41 - 300])
def test_the_kernel_gives_the_bits_of_the_transform_of_the_cpu(tmp_path, first):
    pytest.importorskip("triton", reason="Triton is not installed")
    sums = [torch.linspace(-1, 1, SIZE, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    normals = torch.from_numpy(expected_normals(first, SIZE, 1.5))
    expected = [((one.double() + normals) * 0.7).to(one.dtype) for one in sums]
    torch.save((sums, 1.5, 0.7, KEY, first), tmp_path / "sums")
    command = [sys.executable, "-c", INTERPRETED, str(tmp_path / "sums")]
    subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
    for got, one in zip(torch.load(tmp_path / "sums"), expected, strict=True):
        assert torch.equal(got, one)


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120])
def test_the_compiled_kernel_rounds_each_operation_and_passes_once_over_memory(capability):
    """Results are equal on all GPUs: no fused multiply-add, no approximate division or square root."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from dpengine.noise import philox_kernel as kernel

    types = dict.fromkeys(kernel.add_kernel.arg_names, "i64") | {"flat": "*fp32", "pairs": "constexpr"}
    source = ASTSource(fn=kernel.add_kernel, signature=types, constexprs={"pairs": PAIRS})
    code = compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False}).asm["ptx"]
    operations = set(re.findall(r"\b(fma|mul|add|sub|div|sqrt)((?:\.\w+)*)\.f64", code))
    assert operations == {(name, ".rn") for name in ("mul", "add", "sub", "div", "sqrt")}
    per_thread = GROUP // (4 * 32)  # elements, of 4 warps
    assert len(re.findall(r"ld\.global", code)) == len(re.findall(r"st\.global", code)) == per_thread
