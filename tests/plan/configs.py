"""Configs of every kind."""

import dataclasses

from dpengine.noise import BLT
from dpengine.plan import (
    BandedInverseConfig,
    BandMFConfig,
    BLTConfig,
    DPSGDConfig,
    Plan,
)
from dpengine.sampling import BallsInBinsSampling

CONFIGS = {
    "dp-sgd": DPSGDConfig(iterations=100, sampling_prob=0.1),
    "truncated": DPSGDConfig(iterations=20, sampling_prob=0.1, truncated_batch_size=160, num_examples=1000),
    "plan": Plan(iterations=50, sampling=BallsInBinsSampling(cycle_length=10), noise=BLT(num_buffers=1)),
    "fixed": DPSGDConfig(iterations=100, fixed_batch_size=50, num_examples=1000),
    "band-mf": BandMFConfig.default(num_bands=4, iterations=64, sampling_prob=0.3),
    "band-mf, public": BandMFConfig(iterations=21, strategy=(2.0, 1.0, 0.3), sampling_prob=0.5, num_examples=300),
    "column-normalised": BandMFConfig(iterations=20, strategy=(1.0, 0.5), sampling_prob=0.2, column_normalize=True),
    "band-mf, truncated": BandMFConfig(
        iterations=12, strategy=(1.0, 0.5), sampling_prob=0.2, truncated_batch_size=160, num_examples=1000
    ),
    "blt": BLTConfig.default(iterations=60, cycle_length=20),
    "inverse": BandedInverseConfig.default(num_bands=4, iterations=60, cycle_length=20, num_examples=100),
}


def noisy(config, sigma=1.3):
    return dataclasses.replace(config, noise_multiplier=sigma)
