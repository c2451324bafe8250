"""Runs without a closed form, for tests: each scheme once, with three bands."""

import math

from dpengine.accounting import SampledMatrixEvent

BANDS = (1.0, 0.7, 0.3)
SCHEMES = {
    "bins": {"scheme": "balls-in-bins"},
    "cyclic": {"scheme": "cyclic-poisson", "sample_rate": 0.4},
    "cyclic-all": {"scheme": "cyclic-poisson", "sample_rate": 1.0},
    "cold": {"scheme": "b-min-sep", "sample_rate": 0.4},
    "warm": {"scheme": "b-min-sep", "sample_rate": 0.4, "warm_start": True},
    "cold-all": {"scheme": "b-min-sep", "sample_rate": 1.0},
    "warm-all": {"scheme": "b-min-sep", "sample_rate": 1.0, "warm_start": True},
}
DENSE = tuple(
    tuple(math.sqrt(2 + i) / (1 + t - i) if i <= t < i + 3 else 0.0 for t in range(7)) for i in range(7)
)  # columns of growing norms


def run(scheme, *, sigma=2.0, apart=3, steps=7, coefficients=BANDS, columns=()):
    coefficients = () if columns else coefficients
    return SampledMatrixEvent(
        sigma, cycle_length=apart, steps=steps, coefficients=coefficients, columns=columns, **SCHEMES[scheme]
    )
