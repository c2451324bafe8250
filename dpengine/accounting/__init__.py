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
from .calibrate import MOST_NOISE, Calibration, calibration, least_noise, least_noise_by
from .constants import check_delta, sample_rate_of, steps_of_epochs, steps_per_epoch, suggested_delta
from .discrete_losses import (
    RemovalLoss,
    composed_masses,
    delta_of_losses,
    epsilon_of_losses,
    mean_of_losses,
    safe_reach,
    self_composed_masses,
)
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
from .first_answer import FirstAnswer, first_answer
from .gdp import central_limit_epsilon, central_limit_mu, delta_of_mu, epsilon_of_mu, largest_mu
from .ledger import KINDS, Charge, Ledger, steps_of
from .library import library_relation
from .library_events import to_dp_accounting
from .monte_carlo import MonteCarloClaim, monte_carlo_epsilon, verify
from .monte_carlo_verified import threshold_for, verified_delta
from .rdp import ORDERS
from .renyi_orders import epsilon_by_orders, epsilon_of_divergences, renyi_divergences
from .rounding import percent_up, round_up, round_up_delta
from .sampled_matrix import SampledMatrixEvent
from .trade_off import trade_off
from .tuning import RepeatAndSelectEvent

__all__ = [
    "ACCOUNTANTS",
    "KINDS",
    "MOST_COUNT",
    "MOST_NOISE",
    "ORDERS",
    "Accountant",
    "Calibration",
    "Charge",
    "CyclicGaussianEvent",
    "Event",
    "FirstAnswer",
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
    "RemovalLoss",
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
    "central_limit_mu",
    "check_delta",
    "composed_masses",
    "delta",
    "delta_of",
    "delta_of_losses",
    "delta_of_mu",
    "discretization_of",
    "epsilon",
    "epsilon_bounds",
    "epsilon_by_orders",
    "epsilon_of",
    "epsilon_of_divergences",
    "epsilon_of_losses",
    "epsilon_of_mu",
    "event_from_state",
    "event_to_state",
    "first_answer",
    "largest_mu",
    "least_noise",
    "least_noise_by",
    "library_relation",
    "mean_of_losses",
    "monte_carlo_epsilon",
    "mu_gdp",
    "percent_up",
    "privacy_profile",
    "privacy_spent",
    "release_event",
    "renyi_divergences",
    "round_up",
    "round_up_delta",
    "safe_reach",
    "sample_rate_of",
    "self_composed_masses",
    "steps_of",
    "steps_of_epochs",
    "steps_per_epoch",
    "steps_within",
    "suggested_delta",
    "threshold_for",
    "to_dp_accounting",
    "trade_off",
    "verified_delta",
    "verify",
]
