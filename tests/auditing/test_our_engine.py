"""White-box audit of our own engine for epsilon 1 to 8: the bound is between half of the claim and the claim."""

import numpy as np
import pytest
from auditing.runs import halve_noise, made, rows, trained
from scipy import stats

from dpengine.auditing import one_run
from dpengine.noise import BandMF

pytestmark = pytest.mark.slow

# Assumptions of the Gaussian bound: with sampled batches it measures noise and sensitivity, and trusts the rate of the
# ledger. With every example in each batch of its cycle, it only assumes that scores are normal.
SETTINGS = {
    "dp-sgd, sampled": {"sample_rate": 0.1, "steps": 100, "canaries": 1000},
    "band-mf, sampled": {"sample_rate": 0.05, "steps": 200, "canaries": 1000, "noise": BandMF(num_bands=4)},
    "dp-sgd, all rows": {"sample_rate": 1.0, "steps": 3, "canaries": 8000, "width": 450, "physical_batch_size": 1000},
    "band-mf, all rows": {
        "sample_rate": 0.25, "steps": 12, "canaries": 8000, "width": 450, "physical_batch_size": 1000,
        "noise": BandMF(num_bands=4),
    },
}  # fmt: skip


def audited(epsilon, *, steps, canaries, seed=0, **options):
    make = made(target_epsilon=epsilon, steps=steps, seed=seed, **options)
    return one_run(make, trained(steps), rows(), canaries=canaries, delta=1e-5, seed=seed)


@pytest.mark.one_in(2, "setting", "epsilon")
@pytest.mark.parametrize("epsilon", [1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_bound_is_between_half_of_the_claim_and_the_claim(setting, epsilon):
    report = audited(epsilon, **setting)
    assert report.claimed == pytest.approx(epsilon, rel=1e-3)
    assert 0.5 * report.claimed <= report.bound <= report.claimed
    assert report.verdict == "pass"


@pytest.mark.one_in(4, "setting", "epsilon")
@pytest.mark.parametrize("epsilon", [1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_pb_1_half_of_the_noise_is_a_violation_at_every_claim(monkeypatch, setting, epsilon):
    halve_noise(monkeypatch)
    assert audited(epsilon, **setting).verdict == "violation"


@pytest.mark.one_in(2, "noise")
@pytest.mark.parametrize("noise", [None, BandMF(num_bands=4)], ids=["dp-sgd", "band-mf"])
def test_bounds_exceed_the_claim_at_most_at_rate_alpha(noise):
    # 30 seeds at alpha = 0.05: as many wrong bounds as happen with a chance of 1e-6 are allowed.
    reports = [audited(2.0, steps=40, canaries=400, sample_rate=0.1, noise=noise, seed=seed) for seed in range(30)]
    wrong = [report for report in reports if report.bound > report.claimed]
    assert len(wrong) <= stats.binom(30, 0.05).isf(1e-6)
    assert np.median([report.bound for report in reports]) > 1
