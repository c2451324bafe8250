"""Execution plans: a mechanism in public numbers, calibrated, then made into parts that fit together."""

from .band_mf import BandMFConfig, BandMFExecutionPlanConfig
from .config import AbstractPlanConfig
from .dp_sgd import DPSGDConfig
from .execution_plan import DPExecutionPlan
from .flags import PerformanceFlags
from .long_noise import BandedInverseConfig, BLTConfig
from .non_private import NonPrivateConfig

__all__ = [
    "AbstractPlanConfig",
    "BLTConfig",
    "BandMFConfig",
    "BandMFExecutionPlanConfig",
    "BandedInverseConfig",
    "DPExecutionPlan",
    "DPSGDConfig",
    "NonPrivateConfig",
    "PerformanceFlags",
]
