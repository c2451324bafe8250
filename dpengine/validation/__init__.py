"""Checks of models, losses and training loops for private training, and automatic fixes of models."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .check_model import CheckReport as CheckReport
    from .check_model import Finding as Finding
    from .check_model import check as check
    from .fix_model import Change as Change
    from .fix_model import fix as fix
    from .loop import LoopCheck as LoopCheck
    from .loop import check_loop as check_loop
    from .loss import check_loss as check_loss
    from .loss import per_example as per_example
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "check_model": ["CheckReport", "Finding", "check"],
            "fix_model": ["Change", "fix"],
            "loop": ["LoopCheck", "check_loop"],
            "loss": ["check_loss", "per_example"],
        },
    )
