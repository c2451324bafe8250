"""Addresses, secrets and processes. test_source_law.py tests the distribution of the draws."""

import copy
import itertools
import os
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpengine.errors import PrivacyError
from dpengine.noise import NoiseSource
from dpengine.noise import source as noise_source
from dpengine.noise.keyed_streams import STREAM_KINDS

NARROW_DTYPES = [torch.bfloat16, torch.float16, torch.int64, torch.complex64]
NOT_FLAT = [torch.zeros(2, 2), torch.zeros(()), torch.zeros(6)[::2]]
SIZE = 200_000  # many groups, the last one incomplete, for several threads
every_kind = pytest.mark.parametrize("kind", STREAM_KINDS)


def normals(source, size=1000, *, domain="noise", step=3, start=0, dtype=torch.float64):
    return source.normal_(torch.empty(size, dtype=dtype), domain=domain, step=step, start=start)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# Addresses


@every_kind
def test_one_address_gives_the_same_values_in_every_call_and_object(kind):
    source, again = NoiseSource.seeded(7, kind), NoiseSource.seeded(7, kind)
    first = normals(source)
    normals(source, step=4)
    source.words(100, domain="mask", step=3)
    assert first.equal(normals(source)) and first.equal(normals(again))
    assert np.array_equal(source.words(99, domain="mask", step=3), again.words(99, domain="mask", step=3))


@every_kind
@pytest.mark.hazard("N2", "N3")
def test_two_addresses_share_no_value(kind):
    """64-bit values coincide by chance with probability 10**-13."""
    addresses = [
        (NoiseSource.seeded(seed, kind, nonce=incarnation), domain, step)
        for seed in (0, 1, -1, 2**32, 2**64)  # a generator that keeps 32 bits of its seed would repeat
        for incarnation in (0, 1)
        for domain in ("noise", "noise2", "mask", "")
        for step in (0, 1, 2**32, 2**63)
    ]
    words = np.concatenate([source.words(64, domain=domain, step=step) for source, domain, step in addresses])
    drawn = torch.cat([normals(source, 64, domain=domain, step=step) for source, domain, step in addresses])
    assert len(np.unique(words)) == len(words)
    assert len(torch.unique(drawn)) == len(drawn)


def test_words_and_normals_of_one_address_come_from_different_streams():
    """Otherwise an attacker who knows the sampled batch could infer the noise."""
    source = NoiseSource.seeded(1)
    words = source.words(2**17, domain="noise", step=3).view(np.int64).astype(np.float64)
    drawn = normals(source, 2**17).numpy()
    assert abs(np.corrcoef(np.abs(words[: 2**15]), np.abs(drawn[: 2**15]))[0, 1]) < 5 / 2**7.5


@every_kind
def test_words_are_a_pure_function_of_their_block(kind):
    source = NoiseSource.seeded(1, kind)
    whole = source.words(1000, domain="mask", step=2)
    assert np.array_equal(whole[8 * 31 : 8 * 31 + 100], source.words(100, domain="mask", step=2, block=31))
    assert whole.dtype == np.uint64 and source.words(0, domain="mask", step=2).shape == (0,)


@every_kind
def test_values_do_not_depend_on_the_number_of_threads(kind, threads):
    source, drawn = NoiseSource.seeded(1, kind), []
    for count in (1, 2, 3, 8):
        threads(count)
        drawn.append(normals(source, SIZE))
    assert all(drawn[0].equal(other) for other in drawn[1:])


@given(cuts=st.lists(st.integers(0, SIZE), max_size=4))
@settings(max_examples=10, deadline=None)
def test_slices_drawn_separately_equal_slices_of_one_draw(cuts):
    source = NoiseSource.seeded(1)
    ends = [0, *sorted(cuts), SIZE]
    parts = [normals(source, high - low, start=low) for low, high in itertools.pairwise(ends)]
    assert torch.cat(parts).equal(normals(source, SIZE))


def test_a_shorter_tensor_gets_the_beginning_of_a_longer_one():
    source = NoiseSource.seeded(1)
    whole = normals(source, SIZE)
    for size in (0, 1, 7, 511, 512, 513, 32768, 32769, 65536, 65537):
        assert normals(source, size).equal(whole[:size])


def test_elements_at_large_addresses_do_not_overflow():
    source = NoiseSource.seeded(1)
    near, far = normals(source, 100), normals(source, 100, start=2**63)
    assert far.isfinite().all() and not torch.isin(far, near).any()


def test_add_normal_adds_the_values_of_normal():
    source, sums = NoiseSource.seeded(1), torch.linspace(-3, 3, 1000, dtype=torch.float64)
    expected = sums + 2.5 * normals(source)
    returned = source.add_normal_(sums, 2.5, domain="noise", step=3)
    assert returned is sums and torch.allclose(sums, expected, rtol=1e-14)


def test_float32_sums_are_rounded_once_after_float64_noise():
    source, sums = NoiseSource.seeded(1), torch.linspace(-3, 3, SIZE)
    expected = (sums.double() + 2.5 * normals(source, SIZE)).float()
    assert source.add_normal_(sums, 2.5, domain="noise", step=3).equal(expected)


def test_normal_overwrites_nonfinite_contents():
    source, out = NoiseSource.seeded(1), torch.tensor([float("nan"), float("inf"), 5.0])
    assert source.normal_(out, domain="a", step=0).equal(source.normal_(torch.zeros(3), domain="a", step=0))


def test_noise_can_be_added_to_a_parameter_and_under_any_mode_of_torch():
    source, expected = NoiseSource.seeded(1), normals(NoiseSource.seeded(1), dtype=torch.float32)
    with torch.inference_mode():
        assert normals(source, dtype=torch.float32).equal(expected)
    assert normals(source, dtype=torch.float32).equal(expected)  # buffers created in inference mode would raise
    parameter = torch.nn.Parameter(torch.zeros(1000))
    source.add_normal_(parameter, 1.0, domain="noise", step=3)
    assert parameter.detach().equal(expected)
    target = torch.zeros(1000)
    with torch.device("meta"):
        assert source.normal_(target, domain="noise", step=3).equal(expected)


# Global generators


def test_global_generators_are_neither_read_nor_advanced():
    """RN5."""
    source = NoiseSource.seeded(1)
    expected = normals(source, SIZE)
    for seed in (0, 1):
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), np.random.get_state()[2], random.getstate()
        assert normals(source, SIZE).equal(expected)
        source.words(100, domain="mask", step=1)
        NoiseSource.fresh()
        after = torch.get_rng_state(), np.random.get_state()[1], np.random.get_state()[2], random.getstate()
        assert before[0].equal(after[0]) and np.array_equal(before[1], after[1]) and before[2:] == after[2:]


@pytest.mark.hazard("N1")
def test_no_private_draw_comes_from_the_generators_of_torch_numpy_or_python(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a stock generator was used")

    for owner, names in {
        torch: ("randn", "rand", "normal", "randint", "bernoulli", "Generator", "manual_seed"),
        torch.Tensor: ("normal_", "random_", "uniform_"),
        np.random: ("default_rng", "Generator", "Philox", "SFC64", "PCG64", "MT19937", "RandomState", "normal"),
        random: ("random", "gauss", "getrandbits", "Random"),
    }.items():
        for name in names:
            monkeypatch.setattr(owner, name, forbidden)
    source = NoiseSource.fresh()
    assert normals(source).std() > 0.8
    source.words(10, domain="mask", step=0)


# Secrets


@pytest.mark.hazard("N1")
def test_a_fresh_key_is_256_bits_from_the_operating_system(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "urandom", lambda size: asked.append(size) or bytes(range(size)))
    source = NoiseSource.fresh()
    assert asked == [32] and normals(source).equal(normals(NoiseSource(bytes(range(32)))))
    monkeypatch.undo()
    assert not normals(NoiseSource.fresh()).equal(normals(NoiseSource.fresh()))


def test_a_seeded_source_is_marked_insecure_and_a_fresh_one_is_not():
    seeded, fresh = NoiseSource.seeded(3), NoiseSource.fresh()
    assert seeded.insecure_seed and seeded.describe()["insecure_seed"] and "INSECURE_SEED" in repr(seeded)
    assert not fresh.insecure_seed and not fresh.describe()["insecure_seed"] and "INSECURE" not in repr(fresh)


@every_kind
def test_the_description_states_which_generators_are_cryptographic(kind):
    described = NoiseSource.fresh(kind).describe()
    assert described == {
        "kind": kind,
        "cryptographic": kind == "chacha20",
        "insecure_seed": False,
        "largest_normal": pytest.approx(9.4926, abs=1e-4),
    }
    assert NoiseSource.fresh(kind).describe("cuda")["cryptographic"] is False


@pytest.mark.hazard("P6")
def test_repr_str_and_description_do_not_contain_the_key():
    source = NoiseSource(bytes(range(32)))
    shown = f"{source!r} {source!s} {source.describe()}"
    assert bytes(range(32)).hex() not in shown and "0, 1, 2, 3" not in shown and "\\x00\\x01" not in shown


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_source_cannot_be_copied_or_pickled(copier):
    with pytest.raises(TypeError, match="pickled or copied"):
        copier(NoiseSource.fresh())


@every_kind
def test_the_secret_state_restores_the_source_with_the_same_or_a_new_nonce(kind):
    source = NoiseSource.seeded(5, kind, nonce=4)
    state = source.secret_state()
    same, other = NoiseSource.from_secret_state(state), NoiseSource.from_secret_state(state, nonce=5)
    assert normals(same).equal(normals(source)) and same.nonce == 4 and same.insecure_seed
    assert not normals(other).equal(normals(source)) and other.nonce == 5 and other.insecure_seed


def test_a_closed_source_has_no_key_and_draws_nothing():
    source = NoiseSource.fresh()
    normals(source, SIZE)
    source.close()
    assert bytes(source._key) == b""
    for use in (normals, NoiseSource.secret_state, lambda s: s.words(1, domain="a", step=0)):
        with pytest.raises(PrivacyError, match="closed"):
            use(source)


# Processes and threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("use", [normals, NoiseSource.secret_state, lambda s: s.words(1, domain="a", step=0)])
@pytest.mark.hazard("N4")
def test_a_forked_process_cannot_draw(use):
    source, (reader, writer) = NoiseSource.fresh(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            use(source)
            os.write(writer, b"drawn")
        except PrivacyError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert b"main process" in os.read(reader, 1000)
    os.close(reader)
    use(source)  # the parent can still draw


def test_an_error_in_a_thread_reaches_the_caller(threads):
    threads(2)
    source = NoiseSource.seeded(1)
    kind = source._stream

    def fill(subkey, block, out):
        if block >= 48 * (SIZE // 2 // 512 + 1):  # beyond the share of the calling thread
            raise MemoryError("here")
        kind.fill(subkey, block, out)

    source._stream = type(kind)(fill, cryptographic=True)
    with pytest.raises(MemoryError, match="here"):
        normals(source, SIZE)


# Arguments


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        *((torch.zeros(3, dtype=dtype), TypeError, "float32 or float64") for dtype in NARROW_DTYPES),
        *((tensor, ValueError, "contiguous 1-D") for tensor in NOT_FLAT),
    ],
    ids=[*map(str, NARROW_DTYPES), "2-D", "0-D", "strided"],
)
@pytest.mark.hazard("N12")
def test_a_tensor_raises_unless_it_is_flat_contiguous_and_at_least_float32(tensor, error, message):
    with pytest.raises(error, match=message):
        NoiseSource.seeded(1).add_normal_(tensor, 1.0, domain="a", step=0)
    with pytest.raises(error, match=message):
        NoiseSource.seeded(1).normal_(tensor, domain="a", step=0)


@pytest.mark.parametrize("bad", [-1, 2**64])
@pytest.mark.parametrize("name", ["step", "block", "count", "nonce", "start"])
@pytest.mark.hazard("U4")
def test_a_number_outside_64_bits_is_rejected_and_nothing_is_changed(name, bad):
    source, out = NoiseSource.seeded(1), torch.ones(3)
    with pytest.raises(ValueError, match=name):
        if name == "nonce":
            NoiseSource.fresh(nonce=bad)
        elif name == "start":
            source.normal_(out, domain="a", step=0, start=bad)
        else:
            source.words(**{"count": 1, "step": 0, "block": 0, "domain": "a", name: bad})
    assert out.equal(torch.ones(3))


@pytest.mark.hazard("U4")
def test_an_address_past_the_end_of_the_stream_is_rejected():
    source = NoiseSource.seeded(1)
    assert source.words(8, domain="a", step=0, block=2**64 - 1).shape == (8,)
    with pytest.raises(ValueError, match="exceed the last block"):
        source.words(9, domain="a", step=0, block=2**64 - 1)
    with pytest.raises(ValueError, match="exceed"):
        source.normal_(torch.empty(2), domain="a", step=0, start=2**64 - 1)


@pytest.mark.parametrize("bad", [1.0, True, None, "1"])
def test_a_noninteger_step_or_seed_raises(bad):
    with pytest.raises(TypeError):
        NoiseSource.seeded(1).words(1, domain="a", step=bad)
    with pytest.raises(TypeError, match="seed must be an int"):
        NoiseSource.seeded(bad)


def test_a_step_may_be_a_numpy_integer():
    source = NoiseSource.seeded(1)
    assert np.array_equal(source.words(9, domain="a", step=np.int64(5)), source.words(9, domain="a", step=5))


def test_a_key_of_another_length_or_an_unknown_kind_raises():
    with pytest.raises(ValueError, match="32 bytes"):
        NoiseSource(b"short")
    with pytest.raises(ValueError, match="chacha20"):
        NoiseSource.fresh("mersenne")


# Accelerators


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_cuda_noise_is_normal_addressed_and_repeatable(dtype):
    """5 million draws: the variance ratio has standard deviation 0.00063, tested at 5."""
    source, size = NoiseSource.seeded(1), 5_000_000
    state = torch.cuda.get_rng_state()
    whole = source.normal_(torch.empty(size, dtype=dtype, device="cuda"), domain="noise", step=3)
    part = source.normal_(
        torch.empty(size - 3_000_001, dtype=dtype, device="cuda"), domain="noise", step=3, start=3_000_001
    )
    other = source.normal_(torch.empty(size, dtype=dtype, device="cuda"), domain="noise", step=4)
    assert whole[3_000_001:].equal(part) and torch.cuda.get_rng_state().equal(state)
    assert abs(whole.var().item() - 1) < 5 * 0.00063
    assert abs((whole * other).mean().item()) < 5 / size**0.5


def test_a_secure_source_draws_for_an_accelerator_what_it_draws_for_the_cpu(monkeypatch):
    """The CPU simulates an accelerator."""
    expected = NoiseSource(bytes(32)).normal_(torch.empty(5000), domain="noise", step=3)
    monkeypatch.setattr(noise_source, "_GENERATOR_DEVICES", ("cpu",))
    secure, ordinary = NoiseSource(bytes(32), kind="secure"), NoiseSource(bytes(32))
    assert torch.equal(secure.normal_(torch.empty(5000), domain="noise", step=3), expected)
    assert not torch.equal(ordinary.normal_(torch.empty(5000), domain="noise", step=3), expected)
    assert [source.describe()["cryptographic"] for source in (secure, ordinary)] == [True, False]
    again = NoiseSource.from_secret_state(secure.secret_state())
    assert again.describe() == secure.describe() and again.describe()["kind"] == "chacha20"
