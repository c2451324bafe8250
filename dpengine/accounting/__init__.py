"""Privacy accounting: events, the ledger, accountants and noise calibration. Does not import torch."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .accountant import ACCOUNTANTS as ACCOUNTANTS
    from .accountant import PrivacySpent as PrivacySpent
    from .accountant import advantage_of as advantage_of
    from .accountant import bounds_of as bounds_of
    from .accountant import delta_of as delta_of
    from .accountant import epsilon_of as epsilon_of
    from .accountant import mu_gdp as mu_gdp
    from .accountant import privacy_profile as privacy_profile
    from .accountant import privacy_spent as privacy_spent
    from .batch_events import FixedSizeGaussianEvent as FixedSizeGaussianEvent
    from .batch_events import MixtureGaussianEvent as MixtureGaussianEvent
    from .batch_events import TruncatedGaussianEvent as TruncatedGaussianEvent
    from .constants import suggested_delta as suggested_delta
    from .custom_accountant import Accountant as Accountant
    from .dp_sgd import calibrate as calibrate
    from .dp_sgd import delta as delta
    from .dp_sgd import epsilon as epsilon
    from .dp_sgd import epsilon_bounds as epsilon_bounds
    from .dp_sgd import steps_within as steps_within
    from .events import CyclicGaussianEvent as CyclicGaussianEvent
    from .events import Event as Event
    from .events import GaussianEvent as GaussianEvent
    from .events import MatrixGaussianEvent as MatrixGaussianEvent
    from .events import NonPrivateEvent as NonPrivateEvent
    from .events import PoissonGaussianEvent as PoissonGaussianEvent
    from .events import Relation as Relation
    from .events import UnclaimedEvent as UnclaimedEvent
    from .events import release_event as release_event
    from .gdp import central_limit_epsilon as central_limit_epsilon
    from .gdp import central_limit_mu as central_limit_mu
    from .gdp import delta_of_mu as delta_of_mu
    from .gdp import epsilon_of_mu as epsilon_of_mu
    from .ledger import Charge as Charge
    from .ledger import Ledger as Ledger
    from .library_events import to_dp_accounting as to_dp_accounting
    from .monte_carlo.estimate import MonteCarloClaim as MonteCarloClaim
    from .monte_carlo.estimate import monte_carlo_epsilon as monte_carlo_epsilon
    from .monte_carlo.estimate import verify as verify
    from .noise_calibration import Calibration as Calibration
    from .noise_calibration import calibration as calibration
    from .rounding import round_up as round_up
    from .run_events import EpochParticipation as EpochParticipation
    from .run_events import FixedSizeParticipation as FixedSizeParticipation
    from .run_events import PoissonParticipation as PoissonParticipation
    from .run_events import SeparatedParticipation as SeparatedParticipation
    from .run_events import TruncatedParticipation as TruncatedParticipation
    from .run_events import UnknownParticipation as UnknownParticipation
    from .sampled_matrix import SampledMatrixEvent as SampledMatrixEvent
    from .trade_off_curve import trade_off as trade_off
    from .tuning import RepeatAndSelectEvent as RepeatAndSelectEvent
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "accountant": [
                "ACCOUNTANTS",
                "PrivacySpent",
                "advantage_of",
                "bounds_of",
                "delta_of",
                "epsilon_of",
                "mu_gdp",
                "privacy_profile",
                "privacy_spent",
            ],
            "batch_events": ["FixedSizeGaussianEvent", "MixtureGaussianEvent", "TruncatedGaussianEvent"],
            "constants": ["suggested_delta"],
            "dp_sgd": ["calibrate", "delta", "epsilon", "epsilon_bounds", "steps_within"],
            "events": [
                "CyclicGaussianEvent",
                "Event",
                "GaussianEvent",
                "MatrixGaussianEvent",
                "NonPrivateEvent",
                "PoissonGaussianEvent",
                "Relation",
                "UnclaimedEvent",
                "release_event",
            ],
            "gdp": ["central_limit_epsilon", "central_limit_mu", "delta_of_mu", "epsilon_of_mu"],
            "ledger": ["Charge", "Ledger"],
            "library_events": ["to_dp_accounting"],
            "monte_carlo.estimate": ["MonteCarloClaim", "monte_carlo_epsilon", "verify"],
            "noise_calibration": ["Calibration", "calibration"],
            "custom_accountant": ["Accountant"],
            "rounding": ["round_up"],
            "run_events": [
                "EpochParticipation",
                "FixedSizeParticipation",
                "PoissonParticipation",
                "SeparatedParticipation",
                "TruncatedParticipation",
                "UnknownParticipation",
            ],
            "sampled_matrix": ["SampledMatrixEvent"],
            "trade_off_curve": ["trade_off"],
            "tuning": ["RepeatAndSelectEvent"],
        },
    )
