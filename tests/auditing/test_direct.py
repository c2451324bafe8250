"""Direct detectors on a correct engine and on user models, and their test statistics."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine.auditing import DETECTORS, AuditFinding, quick, replay, small
from dpengine.auditing.finding import Evidence, timed, worst_verdict
from dpengine.auditing.ledger_detector import _epsilon_at, _log_delta_gaussian, _log_delta_poisson
from dpengine.auditing.noise_detector import _check_distribution
from dpengine.auditing.sampler_detector import _check_poisson
from dpengine.noise import BandMF

UNITS = [row // 2 for row in range(40)]


def images(**options):
    """Returns a convolution with dropout and a summed loss."""

    def make():
        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(48, 4))
        generator = torch.Generator().manual_seed(3)
        inputs, targets = torch.randn(50, 1, 6, 6, generator=generator), torch.arange(50) % 4
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)

        def loss_of(model, batch):
            return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

        return model, torch.optim.AdamW(model.parameters()), loader, loss_of, options

    return make


SLOW = dict.fromkeys(("DR", "DS", "DF", "DN"), pytest.mark.slow)  # the command-line tests use smaller samples


@pytest.mark.parametrize("code", [pytest.param(code, marks=SLOW.get(code, ())) for code in DETECTORS])
def test_the_unmodified_engine_passes_all_detectors(code):
    (finding,) = quick(small(), detectors=[code])
    assert finding.verdict == "pass", str(finding)
    assert finding.n > 0 and finding.detector == code


@pytest.mark.slow
@pytest.mark.one_in(2, "options")
@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ({"clipping": "per_layer"}, ["DO", "DL"]),
        ({"clipping": "adaptive"}, ["DO", "DL"]),
        pytest.param({"privacy_unit": UNITS}, ["DO", "DF"], marks=pytest.mark.slow, id="units"),
        ({"physical_batch_size": 2}, ["DL", "DO"]),
        ({"accumulation_steps": 2}, ["DL", "DO"]),
        ({"noise": BandMF(num_bands=4), "steps": 100}, ["DN", "DS", "DL"]),
    ],
    ids=str,
)
def test_the_engine_passes_all_detectors_with_each_option(options, codes):
    findings = quick(small(), options, detectors=codes)
    assert worst_verdict(findings) == "pass", "\n".join(map(str, findings))


@pytest.mark.slow
def test_detectors_run_on_a_user_model():
    findings = quick(images(loss_reduction="sum"), {"max_grad_norm": 2.0}, detectors=["DO", "DI", "DL"])
    assert worst_verdict(findings) == "pass", "\n".join(map(str, findings))


def test_a_wrongly_declared_loss_reduction_is_detected():
    (finding,) = quick(images(), detectors=["DI"])
    assert finding.verdict == "violation" and "loss of a batch" in finding.reason


def test_a_run_that_is_always_rejected_is_inconclusive():
    """The engine rejects a model that mixes samples on both neighbors, so nothing is learned about its releases."""

    class Mixing(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs - inputs.mean(dim=0))

    def make():
        model = Mixing(6, 3)
        subject = small()()
        return model, torch.optim.SGD(model.parameters(), lr=0.1), subject.loader, subject.loss_of, subject.options

    (finding,) = quick(make, detectors=["DI"])
    assert finding.verdict == "violation"
    assert replay(make, pairs=1).verdict != "pass"


def test_shuffled_batches_have_no_distribution_to_check():
    (finding,) = quick(
        small({"sampling": "shuffle", "sample_rate": None, "expected_batch_size": None}), detectors=["DS"]
    )
    assert finding.verdict == "inconclusive"


def test_an_invalid_subject_is_rejected_at_once():
    with pytest.raises(TypeError, match=r"\(model, optimizer, loader, loss_of\)"):
        quick(lambda: nn.Linear(2, 2))
    with pytest.raises(ValueError, match="'DX'"):
        quick(small(), detectors=["DX"])


def test_findings_never_claim_that_a_run_is_private():
    passed, failed, unknown = (
        AuditFinding("DN", "p", 3, 1e-6, verdict, 0) for verdict in ("pass", "violation", "inconclusive")
    )
    assert "no violation found" in str(passed) and "VIOLATION" in str(failed)
    assert not any("private" in str(one) for one in (passed, failed, unknown))
    assert set(passed.to_dict()) >= {"detector", "statistic", "n", "bound", "verdict", "seed", "cost"}
    assert worst_verdict([passed, unknown]) == "inconclusive"
    assert worst_verdict([passed, unknown, failed]) == "violation"


def test_many_statistics_share_one_probability_of_error():
    single, many = Evidence("DN", 0, n=1), Evidence("DN", 0, n=1)
    single.p_value("one", 9e-7)
    for number in range(2):
        many.p_value(str(number), 9e-7)
    assert single.finding().verdict == "violation" and many.finding().verdict == "pass"


def test_nan_is_a_violation_and_no_observation_is_inconclusive():
    evidence = Evidence("DO", 0, n=1)
    evidence.ratio("error", float("nan"))
    assert evidence.finding().verdict == "violation"
    assert Evidence("DO", 0).finding().verdict == "inconclusive"


def test_a_detector_that_fails_is_inconclusive():
    def fails():
        raise RuntimeError("no memory")

    found = timed("DR", 7, fails)
    assert (found.verdict, found.seed) == ("inconclusive", 7) and "no memory" in found.reason


def test_a_factory_that_returns_the_same_model_twice_is_rejected_before_any_change():
    model, optimizer, loader, loss_of, *options = small()()
    dropout = torch.nn.Dropout(0.5)
    whole = torch.nn.Sequential(dropout, model)
    with pytest.raises(ValueError, match="same model twice"):
        quick(lambda: (whole, optimizer, loader, loss_of, *options))
    assert dropout.p == 0.5


REPEATS = 200


def noise(seed, steps, numbers, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(steps, numbers, generator=generator, dtype=torch.float64)


def p_values(look):
    """By statistic, over many repeats."""
    found = {}
    for seed in range(REPEATS):
        evidence = Evidence("D", seed)
        look(evidence, seed)
        assert not evidence.violations
        for name, p in evidence.p_values.items():
            found.setdefault(name, []).append(p)
    return found


def assert_about_uniform(found):
    # 200 draws of chance 0.2: 40 are expected, and 6 standard deviations are 34
    for name, values in found.items():
        assert min(values) > 1e-6, name
        assert sum(p < 0.2 for p in values) < 74, name


@pytest.mark.slow
def test_statistics_of_the_noise_are_uniform_where_it_is_normal():
    tensors = {"one": (12, 300), "two": (12, 300), "bias": (12, 7)}

    def look(evidence, seed):
        _check_distribution(
            evidence, "n", {name: noise(3 * seed + i, *size) for i, (name, size) in enumerate(tensors.items())}
        )

    assert_about_uniform(p_values(look))


def test_statistics_of_masks_are_uniform_where_they_are_poisson():
    def look(evidence, seed):
        masks = np.random.default_rng(seed).random((400, 30)) < 0.25
        _check_poisson(evidence, "m", masks.astype(np.int64), 0.25, 7)

    found = p_values(look)
    assert_about_uniform(found)
    assert "m, most correlated pair" in found


@pytest.mark.parametrize(
    ("scale", "numbers", "seen"), [(1.01, 1_000_000, True), (0.97, 100_000, True), (1.0, 1_000_000, False)]
)
def test_a_hundredth_of_the_standard_deviation_shows_in_a_million_numbers(scale, numbers, seen):
    evidence = Evidence("DN", 0)
    _check_distribution(evidence, "n", {"all": noise(0, 10, numbers // 10, scale)})
    assert (evidence.finding().verdict == "violation") is seen


def test_closed_forms_match_published_values():
    # one Gaussian of mu = sqrt(1e5) / 600 at 1e-10; and DP-SGD's one step at q = 0.01, sigma = 1 by direct integration
    assert _epsilon_at(lambda eps: _log_delta_gaussian(eps, np.sqrt(1e5) / 600), 1e-10) == pytest.approx(
        3.278323, abs=2e-6
    )
    x = np.linspace(-12, 13, 2_000_001)
    plain, moved = (np.exp(-((x - m) ** 2) / 2) / np.sqrt(2 * np.pi) for m in (0, 1))
    mixed = 0.99 * plain + 0.01 * moved
    for epsilon in (0.01, 0.05):
        over = [np.trapezoid(np.clip(a - np.exp(epsilon) * b, 0, None), x) for a, b in ((mixed, plain), (plain, mixed))]
        assert _log_delta_poisson(epsilon, 0.01, 1.0) == pytest.approx(np.log(max(over)), abs=1e-6)
