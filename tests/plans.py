"""Plans of each noise mechanism, and the covariance across steps that each states."""

import numpy as np
import torch
from torch import nn

from dpengine.noise.toeplitz import matrix, toeplitz_inverse
from dpengine.plan import BandedInverseConfig, BandMFConfig, BLTConfig, DPSGDConfig

ROWS = 120
STEPS = 8
DRAWS = 100_000
NOISE = {"noise_multiplier": 1.5, "l2_clip_norm": 2.0}
CONFIGS = {
    "independent": DPSGDConfig(iterations=STEPS, **NOISE),
    "banded": BandMFConfig(iterations=STEPS, strategy=(2.0, 1.0, 0.4), **NOISE),
    "column-normalised": BandMFConfig(iterations=STEPS, strategy=(2.0, 1.0, 0.4), column_normalize=True, **NOISE),
    "blt": BLTConfig(iterations=STEPS, cycle_length=4, decays=(0.9, 0.5), scales=(0.3, 0.2), **NOISE),
    "lambda-cgd": BandedInverseConfig(iterations=STEPS, cycle_length=4, coefficients=(1.0, -0.8), **NOISE),
    "banded inverse": BandedInverseConfig(iterations=STEPS, cycle_length=4, coefficients=(1.0, -0.5, -0.1), **NOISE),
}


def strategy_of(config):
    """S ``(STEPS, STEPS)``, with 1 as its largest column norm, built whole."""
    if isinstance(config, DPSGDConfig):
        return np.eye(STEPS)
    if isinstance(config, BandMFConfig):
        s = matrix(np.array(config.strategy), STEPS)
        norms = np.linalg.norm(s, axis=0)
        return s / (norms if config.column_normalize else norms.max())
    if isinstance(config, BLTConfig):
        column = [1.0] + [
            sum(w * d**k for w, d in zip(config.scales, config.decays, strict=True)) for k in range(STEPS - 1)
        ]
        s = matrix(np.array(column), STEPS)
    else:
        s = matrix(toeplitz_inverse(config.coefficients, STEPS), STEPS)
    return s / np.linalg.norm(s[:, 0])


def covariance(noise_NP):
    return noise_NP @ noise_NP.T / noise_NP.shape[1]


def agrees(found, expected, draws):
    """Checks that each entry is within 4 standard errors of the expected covariance of normals."""
    error = np.sqrt((expected**2 + np.outer(np.diag(expected), np.diag(expected))) / draws)
    return np.abs(found - expected) <= 4 * error


def expected_covariance(config, unit):
    noising = np.linalg.inv(strategy_of(config))
    return (config.noise_multiplier * unit) ** 2 * noising @ noising.T


PLANS = {
    "dp-sgd": DPSGDConfig(iterations=8, sampling_prob=0.25, noise_multiplier=1.0),
    "band-mf": BandMFConfig(iterations=8, strategy=(1.0, 0.5), sampling_prob=0.5, noise_multiplier=1.0),
    "public": BandMFConfig(
        iterations=8, strategy=(1.0, 0.5), sampling_prob=0.5, noise_multiplier=1.0, num_examples=ROWS,
        l2_clip_norm=0.2, rescale_to_unit_norm=False, normalize_by=30.0,
    ),
    "blt": BLTConfig(iterations=8, cycle_length=4, decays=(0.9,), scales=(0.3,), noise_multiplier=1.0),
    "inverse": BandedInverseConfig(
        iterations=8, cycle_length=4, coefficients=(1.0, -0.5), noise_multiplier=1.0, num_examples=ROWS
    ),
}  # fmt: skip


class Still(nn.Module):
    """A parameter for each draw, whose gradient is zero."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DRAWS))

    def forward(self, x):
        return 0 * (x * self.weight).sum(dim=1)
