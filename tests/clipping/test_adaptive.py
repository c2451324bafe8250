"""Adaptive clipping is one Gaussian mechanism on a joint vector, and its threshold converges to the quantile."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpengine.clipping.adaptive import Adaptive
from dpengine.errors import InvalidBudgetError
from dpengine.noise import NoiseSource

RATE = 0.2


class Stream:
    """Noise stream that fills tensors with one number and records the calls."""

    def __init__(self, value=0.0):
        self.value, self.asked = value, []

    def normal_(self, out, *, domain, step):
        self.asked.append((out.numel(), domain, step))
        return out.fill_(self.value)


def column(*norms):
    return torch.tensor(norms).unsqueeze(1)


def released_count(policy, stream=None, size=10.0):
    """Returns the noisy count implied by the change of the threshold."""
    before = policy.max_grad_norm
    policy.finish_step(stream or Stream(), 1, size)
    share = -math.log(policy.max_grad_norm / before) / policy.learning_rate + policy.target_quantile
    return (share - 0.5) * size


@given(sigma=st.floats(1e-3, 1e3), ratio=st.floats(0.5001, 1e4))
def test_gradient_and_count_together_cost_the_noise_multiplier_that_is_charged(sigma, ratio):
    """Oracle: the squared sensitivity-to-noise ratios of independent Gaussians add up."""
    policy = Adaptive(1.0, count_noise_multiplier=sigma * ratio)
    sigma_g = policy.gradient_noise_multiplier(sigma)
    assert sigma_g > sigma
    assert 1 / sigma_g**2 + (0.5 / policy.count_noise_multiplier) ** 2 == pytest.approx(1 / sigma**2, rel=1e-9)


@pytest.mark.parametrize("norm", [0.0, 0.3, 2.0, 2.0001, 50.0, math.nan, math.inf])
def test_one_sample_moves_the_joint_vector_by_at_most_the_charged_sensitivity(norm):
    sigma, policy = 1.3, Adaptive(2.0, count_noise_multiplier=4.0)
    sigma_g, norms = policy.gradient_noise_multiplier(sigma), column(norm)
    added = policy.factors(norms).item() * (norm if math.isfinite(norm) else 0.0)
    policy.observe(norms)
    with_sample, without = released_count(policy), released_count(Adaptive(2.0))
    moved = math.hypot(added / (2.0 * sigma_g), (with_sample - without) / 4.0)
    assert moved <= 1 / sigma * (1 + 1e-12)


@pytest.mark.parametrize(
    ("count", "sigma", "words"),
    [
        *((4.0, sigma, "count_noise_multiplier") for sigma in (8.0, 8.1, 100.0)),  # the count costs the whole step
        *((None, sigma, "noise_multiplier") for sigma in (-1.0, math.nan, math.inf)),
    ],
)
def test_a_noise_multiplier_out_of_range_is_rejected(count, sigma, words):
    with pytest.raises(InvalidBudgetError, match=words):
        Adaptive(1.0, **({"count_noise_multiplier": count} if count else {})).gradient_noise_multiplier(sigma)


def test_without_noise_the_effective_gradient_noise_multiplier_is_zero():
    assert Adaptive(1.0).gradient_noise_multiplier(0.0) == 0.0


@pytest.mark.parametrize(
    ("norms", "count"),
    [
        ((0.1, 1.0, 1.5, 7.0, 0.2), 0.5),  # three at most C, two above
        ((), 0.0),
        ((0.5, math.nan, math.inf), 0.5),  # two are dropped
    ],
)
def test_each_sample_counts_plus_or_minus_one_half_and_a_dropped_one_zero(norms, count):
    policy = Adaptive(1.0)
    policy.observe(column(*norms))
    assert released_count(policy) == pytest.approx(count)


def test_the_threshold_moves_by_the_geometric_rule():
    policy = Adaptive(4.0, target_quantile=0.8, learning_rate=RATE)
    policy.observe(column(*[1.0] * 6, *[9.0] * 4))  # a share of 0.6 of the ten that are expected
    policy.finish_step(Stream(), 1, 10)
    assert policy.max_grad_norm == pytest.approx(4.0 * math.exp(-RATE * (0.6 - 0.8)))


def test_the_divisor_is_the_expected_batch_size_and_not_the_size_that_was_drawn():
    moves = []
    for drawn in (3, 10, 30):  # centred counts of zero: three sizes, one release
        policy = Adaptive(1.0)
        policy.observe(torch.cat((torch.full((drawn, 1), 0.5), torch.full((drawn, 1), 2.0))))
        policy.finish_step(Stream(0.7), 1, 10)
        moves.append(policy.max_grad_norm)
    assert moves[0] == moves[1] == moves[2]


def test_physical_batches_add_up_to_their_logical_batch():
    norms = torch.rand(64, 1, generator=torch.Generator().manual_seed(1)) * 2
    whole, parts = Adaptive(1.0), Adaptive(1.0)
    whole.observe(norms)
    for part in norms.split(13):
        parts.observe(part)
    whole.finish_step(Stream(), 1, 64)
    parts.finish_step(Stream(), 1, 64)
    assert whole.max_grad_norm == parts.max_grad_norm != 1.0


def test_the_threshold_is_constant_within_a_step_and_ignores_discarded_batches():
    policy = Adaptive(1.0)
    policy.observe(torch.full((50, 1), 0.1))
    assert policy.bounds == (1.0,) and policy.factors(column(2.0)).item() == pytest.approx(0.5, rel=2**-19)
    policy.discard()
    assert released_count(policy) == 0.0


def test_a_finished_step_resets_the_count():
    policy = Adaptive(1.0)
    policy.observe(torch.full((5, 1), 0.1))
    policy.finish_step(Stream(), 1, 10)
    assert released_count(policy) == pytest.approx(0.0, abs=1e-12)


def test_count_noise_uses_the_given_stream_with_its_own_domain_and_step():
    policy, stream = Adaptive(1.0, count_noise_multiplier=3.0), Stream(2.0)
    policy.finish_step(stream, 41, 10)
    assert stream.asked == [(1, "clip", 41)]
    assert math.log(policy.max_grad_norm) == pytest.approx(-RATE * 3.0 * 2.0 / 10)


def test_count_noise_has_the_stated_standard_deviation():
    """4000 draws: the variance ratio has standard deviation sqrt(2/4000) = 0.022, the mean 0.016; 5 of each."""
    policy, source = Adaptive(1.0, count_noise_multiplier=7.0, learning_rate=1e-3), NoiseSource.seeded(3)
    counts = []
    for step in range(4000):
        before = policy.max_grad_norm
        policy.finish_step(source, step, 100.0)
        counts.append(-math.log(policy.max_grad_norm / before) / 1e-3 * 100.0 / 7.0)
    drawn = torch.tensor(counts, dtype=torch.float64)
    assert abs(drawn.var().item() - 1) < 5 * 0.0224 and abs(drawn.mean().item()) < 5 * 0.0158


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("start", [0.01, 100.0])
def test_the_threshold_finds_the_quantile(quantile, start):
    """Batches of 500 +- 22 and count noise 10: one step has the share within 0.03, the mean of 200 within 0.02."""
    generator, source = torch.Generator().manual_seed(5), NoiseSource.seeded(8)
    policy, shares = Adaptive(start, target_quantile=quantile), []
    for step in range(400):
        drawn = int(torch.poisson(torch.tensor(500.0), generator=generator))
        policy.observe(torch.randn(drawn, 1, generator=generator).exp())  # log-normal: the share below C is known
        shares.append(0.5 * (1 + math.erf(math.log(policy.max_grad_norm) / math.sqrt(2))))
        policy.finish_step(source, step, 500)
    assert sum(shares[200:]) / 200 == pytest.approx(quantile, abs=0.02)


@pytest.mark.parametrize(("value", "end"), [(1e9, 0.5), (-1e9, 8.0)])
def test_the_threshold_stays_between_its_limits(value, end):
    policy = Adaptive(1.0, min_norm=0.5, max_norm=8.0)
    policy.finish_step(Stream(value), 1, 1)
    assert policy.max_grad_norm == pytest.approx(end) and 0.5 <= policy.max_grad_norm <= 8.0


@pytest.mark.parametrize(
    "arguments",
    [
        {"target_quantile": 1.0},
        {"target_quantile": 0.0},
        {"learning_rate": -0.1},
        {"count_noise_multiplier": 0.0},
        {"count_noise_multiplier": math.nan},
        {"min_norm": 2.0},
        {"max_norm": 0.5},
        {"max_norm": math.inf},
    ],
    ids=str,
)
def test_arguments_out_of_range_are_rejected_by_name(arguments):
    with pytest.raises(InvalidBudgetError, match=f"DPE007.*{next(iter(arguments))}"):
        Adaptive(1.0, **arguments)


@pytest.mark.parametrize("size", [0, -5, math.nan])
def test_an_expected_batch_size_out_of_range_is_rejected_and_changes_nothing(size):
    policy = Adaptive(1.0)
    with pytest.raises(InvalidBudgetError, match="expected_batch_size"):
        policy.finish_step(Stream(), 1, size)
    assert policy.bounds == (1.0,)


def test_a_restored_policy_continues_from_the_public_clipping_norm_only():
    policy = Adaptive(1.0)
    policy.observe(torch.full((5, 1), 0.1))
    policy.finish_step(Stream(0.3), 1, 10)
    policy.observe(torch.full((5, 1), 0.1))  # private, and so not in the state
    other = Adaptive(1.0)
    other.load_state_dict(policy.state_dict())
    assert policy.state_dict() == {"norm": policy.max_grad_norm} and other.bounds == policy.bounds
    assert released_count(other) == pytest.approx(0.0, abs=1e-12)
