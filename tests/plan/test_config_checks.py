"""Arguments, targets and JSON that configs reject."""

import math

import numpy as np
import pytest
from plan.configs import CONFIGS, noisy

from dpengine.errors import AccountingRefusedError, PrivacyError
from dpengine.plan import (
    BandedInverseConfig,
    BandMFConfig,
    BLTConfig,
    DPSGDConfig,
)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not JSON"),
        ("[]", "not a DPSGDConfig"),
        ("{}", "not a DPSGDConfig"),
        (noisy(CONFIGS["blt"]).to_json(), "not a DPSGDConfig"),
        ('{"config": "DPSGDConfig", "iterations": 5}', "version None"),
        ('{"config": "DPSGDConfig", "version": 2, "iterations": 5}', "version 2"),
        ('{"config": "DPSGDConfig", "version": 1}', "iterations"),
        ('{"config": "DPSGDConfig", "version": 1, "iterations": 5, "sigma": 1}', r"unknown fields \['sigma'\]"),
        ('{"config": "DPSGDConfig", "version": 1, "iterations": "5"}', "iterations='5'"),
        ('{"config": "DPSGDConfig", "version": 1, "iterations": 5, "sampling_prob": NaN}', "sampling_prob=nan"),
    ],
)
def test_json_of_another_config_is_rejected(text, message):
    with pytest.raises(ValueError, match=message):
        DPSGDConfig.from_json(text)


BAND = {"iterations": 10, "strategy": (1.0, 0.5)}


CYCLES = {"iterations": 10, "cycle_length": 5}


BAD = [
    (DPSGDConfig, {"iterations": 0}, "iterations=0 must be at least 1"),
    (DPSGDConfig, {"iterations": 5, "noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
    (DPSGDConfig, {"iterations": 5, "noise_multiplier": math.inf}, "noise_multiplier=inf"),
    (DPSGDConfig, {"iterations": 5, "l2_clip_norm": -1.0}, "l2_clip_norm=-1.0"),
    (DPSGDConfig, {"iterations": 5, "l2_clip_norm": math.nan}, "l2_clip_norm=nan"),
    (DPSGDConfig, {"iterations": 5, "normalize_by": 0.0}, "normalize_by=0.0 must be finite and above 0"),
    (DPSGDConfig, {"iterations": 5, "num_examples": -1}, "num_examples=-1"),
    (DPSGDConfig, {"iterations": 5, "sampling_prob": 1.5}, r"sampling_prob=1.5 must be in \[0, 1\]"),
    (DPSGDConfig, {"iterations": 5, "sampling_prob": -0.1}, "sampling_prob=-0.1"),
    (DPSGDConfig, {"iterations": 5, "expected_participations": 6.0}, "more than the 5 cycles"),
    (DPSGDConfig, {"iterations": 5, "sampling_prob": 0.5, "expected_participations": 2.0}, "means 2.5 participations"),
    (DPSGDConfig, {"iterations": 5, "truncated_batch_size": 8}, "needs num_examples"),
    (DPSGDConfig, {"iterations": 5, "truncated_batch_size": -8, "num_examples": 9}, "truncated_batch_size=-8"),
    (DPSGDConfig, {"iterations": 5, "fixed_batch_size": 8}, "needs num_examples"),
    (DPSGDConfig, {"iterations": 5, "fixed_batch_size": 8, "num_examples": 7}, "at least this size; got 7"),
    (DPSGDConfig, {"iterations": 5, "fixed_batch_size": 8, "num_examples": 9, "sampling_prob": 0.1}, "be combined"),
    (BandMFConfig, {**BAND, "strategy": (1.0,) * 11}, "11 numbers for 10 iterations"),
    (BandMFConfig, {**BAND, "strategy": ()}, "strategy"),
    (BandMFConfig, {**BAND, "strategy": (0.0, 1.0)}, "whose first one is positive"),
    (BandMFConfig, {**BAND, "strategy": (1.0, math.nan)}, "finite"),
    (BandMFConfig, {**BAND, "truncated_batch_size": 5}, "needs num_examples"),
    (BLTConfig, {**CYCLES, "decays": (1.5,), "scales": (0.5,)}, "decays"),
    (BLTConfig, {**CYCLES, "decays": (0.5,), "scales": ()}, "one finite scale each"),
    (BLTConfig, {**CYCLES, "cycle_length": 0, "decays": (0.5,), "scales": (0.5,)}, "cycle_length=0"),
    (BandedInverseConfig, {**CYCLES, "coefficients": (-1.0,)}, "whose first one is positive"),
    (BandedInverseConfig, {**CYCLES, "coefficients": (1.0,) * 11}, "11 numbers for 10 iterations"),
]  # fmt: skip


@pytest.mark.parametrize("kind, fields, message", BAD, ids=lambda value: str(value)[:60])
def test_bad_fields_are_rejected_by_name_and_value(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        kind(**fields)


@pytest.mark.parametrize(
    "fields", [{"iterations": 5.5}, {"iterations": True}, {"rescale_to_unit_norm": 1}, {"l2_clip_norm": "1"}], ids=str
)
def test_fields_of_a_wrong_type_are_rejected(fields):
    with pytest.raises(TypeError, match=next(iter(fields))):
        DPSGDConfig(**{"iterations": 5, **fields})


@pytest.mark.parametrize("bands", [0, 11])
def test_a_number_of_bands_out_of_range_is_rejected(bands):
    with pytest.raises(ValueError, match=f"num_bands={bands}"):
        BandMFConfig.default(num_bands=bands, iterations=10)


@pytest.mark.parametrize(
    "target", [{"epsilon": 0.0, "delta": 1e-5}, {"epsilon": 1.0, "delta": 1.0}, {"epsilon": math.nan, "delta": 1e-5}]
)
@pytest.mark.parametrize("name", ["dp-sgd", "fixed", "blt"])
def test_targets_out_of_range_are_rejected(name, target):
    with pytest.raises(ValueError, match=r"epsilon|delta"):
        CONFIGS[name].calibrate(**target)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("delta", [0.0, 1.0, 2.0, math.nan, -1.0])
def test_deltas_out_of_range_are_rejected(name, delta):
    with pytest.raises(ValueError, match="delta"):
        noisy(CONFIGS[name]).epsilon(delta)


@pytest.mark.parametrize(
    "name, accountant", [("fixed", "rdp"), ("fixed", "gdp"), ("truncated", "rdp"), ("truncated", "gdp")]
)
def test_an_accountant_that_does_not_support_the_sampling_is_rejected(name, accountant):
    for ask in (
        lambda: noisy(CONFIGS[name]).epsilon(1e-5, accountant=accountant),
        lambda: CONFIGS[name].calibrate(epsilon=1.0, delta=1e-5, accountant=accountant),
    ):
        with pytest.raises(AccountingRefusedError, match="does not support"):
            ask()


@pytest.mark.parametrize("name", CONFIGS)
def test_unknown_accountants_are_rejected(name):
    with pytest.raises(ValueError, match="accountant"):
        noisy(CONFIGS[name]).epsilon(1e-5, accountant="typo")


HOSTILE = [
    '{"config": "DPSGDConfig", "version": 1, "iterations": 1' + "0" * 400 + "}",
    '{"config": "DPSGDConfig", "version": 1, "iterations": 5, "noise_multiplier": 1' + "0" * 400 + "}",
    '{"config": "DPSGDConfig", "version": true, "iterations": 5}',
    '{"config": "DPSGDConfig", "version": 1, "iterations": 5, "fixed_batch_size": 0, "num_examples": 0}',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=["steps", "noise", "version", "no examples", "nested"])
def test_malformed_json_is_rejected(text):
    with pytest.raises(ValueError, match="DPSGDConfig"):
        DPSGDConfig.from_json(text)


@pytest.mark.parametrize("strategy", [["1.0"], [True, False], 1.0, "1.0", [1e200], [1e-200, 1.0], [[1.0]]], ids=str)
def test_strategies_are_lists_of_numbers(strategy):
    with pytest.raises((ValueError, TypeError), match="strategy"):
        BandMFConfig(iterations=5, strategy=strategy)


@pytest.mark.parametrize("strategy", [[2, 1], np.array([2.0, 1.0]), (2.0, 1.0)], ids=["list", "array", "tuple"])
def test_strategies_may_be_lists_arrays_or_tuples(strategy):
    assert BandMFConfig(iterations=5, strategy=strategy).strategy == (2.0, 1.0)


def test_a_sampling_probability_of_zero_cannot_be_calibrated():
    with pytest.raises(PrivacyError, match="no noise to calibrate"):
        DPSGDConfig(iterations=5, sampling_prob=0.0).calibrate(epsilon=1.0, delta=1e-5)
