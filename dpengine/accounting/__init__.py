"""From what was released to epsilon: events, the ledger that keeps them, accountants, and calibration. No torch."""

from .accountant import (
    ACCOUNTANTS,
    Accountant,
    PrivacySpent,
    accountant_used,
    advantage_of,
    bounds_of,
    delta_of,
    discretization_of,
    epsilon_of,
    mu_gdp,
    privacy_profile,
    privacy_spent,
)
from .arguments import MOST_COUNT
from .batch_events import FixedSizeGaussianEvent, MixtureGaussianEvent, TruncatedGaussianEvent
from .calibrate import Calibration, calibration, least_noise
from .constants import check_delta, sample_rate_of, steps_per_epoch, suggested_delta
from .dp_sgd import calibrate, delta, epsilon, epsilon_bounds, steps_within
from .events import (
    CyclicGaussianEvent,
    Event,
    GaussianEvent,
    MatrixGaussianEvent,
    NonPrivateEvent,
    PoissonGaussianEvent,
    Relation,
    UnclaimedEvent,
    event_from_state,
    event_to_state,
    release_event,
)
from .gdp import central_limit_epsilon, epsilon_of_mu, largest_mu
from .ledger import KINDS, Charge, Ledger, steps_of
from .library import library_relation
from .library_events import to_dp_accounting
from .monte_carlo import MonteCarloClaim, monte_carlo_epsilon, verify
from .monte_carlo_verified import threshold_for, verified_delta
from .rounding import percent_up, round_up, round_up_delta
from .sampled_matrix import SampledMatrixEvent
from .trade_off import trade_off
from .tuning import RepeatAndSelectEvent

__all__ = [
    "ACCOUNTANTS",
    "KINDS",
    "MOST_COUNT",
    "Accountant",
    "Calibration",
    "Charge",
    "CyclicGaussianEvent",
    "Event",
    "FixedSizeGaussianEvent",
    "GaussianEvent",
    "Ledger",
    "MatrixGaussianEvent",
    "MixtureGaussianEvent",
    "MonteCarloClaim",
    "NonPrivateEvent",
    "PoissonGaussianEvent",
    "PrivacySpent",
    "Relation",
    "RepeatAndSelectEvent",
    "SampledMatrixEvent",
    "TruncatedGaussianEvent",
    "UnclaimedEvent",
    "accountant_used",
    "advantage_of",
    "bounds_of",
    "calibrate",
    "calibration",
    "central_limit_epsilon",
    "check_delta",
    "delta",
    "delta_of",
    "discretization_of",
    "epsilon",
    "epsilon_bounds",
    "epsilon_of",
    "epsilon_of_mu",
    "event_from_state",
    "event_to_state",
    "largest_mu",
    "least_noise",
    "library_relation",
    "monte_carlo_epsilon",
    "mu_gdp",
    "percent_up",
    "privacy_profile",
    "privacy_spent",
    "release_event",
    "round_up",
    "round_up_delta",
    "sample_rate_of",
    "steps_of",
    "steps_per_epoch",
    "steps_within",
    "suggested_delta",
    "threshold_for",
    "to_dp_accounting",
    "trade_off",
    "verified_delta",
    "verify",
]
