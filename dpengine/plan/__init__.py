"""Execution plans: a mechanism described by public numbers, calibrated, and built into its parts."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .band_mf import BandMFConfig as BandMFConfig
    from .band_mf import BandMFExecutionPlanConfig as BandMFExecutionPlanConfig
    from .config import AbstractPlanConfig as AbstractPlanConfig
    from .config import PerformanceFlags as PerformanceFlags
    from .dp_sgd import DPSGDConfig as DPSGDConfig
    from .execution_plan import DPExecutionPlan as DPExecutionPlan
    from .long_noise import BandedInverseConfig as BandedInverseConfig
    from .long_noise import BLTConfig as BLTConfig
    from .non_private import NonPrivateConfig as NonPrivateConfig
    from .plan import Plan as Plan
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "band_mf": ["BandMFConfig", "BandMFExecutionPlanConfig"],
            "config": ["AbstractPlanConfig", "PerformanceFlags"],
            "dp_sgd": ["DPSGDConfig"],
            "execution_plan": ["DPExecutionPlan"],
            "long_noise": ["BLTConfig", "BandedInverseConfig"],
            "non_private": ["NonPrivateConfig"],
            "plan": ["Plan"],
        },
    )
