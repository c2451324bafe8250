"""What stands in the way of training a model privately, and a mended copy of it."""

from .check import CheckReport, Finding, check
from .fix import Change, fix
from .loss import check_loss, loss_was_checked, per_example

__all__ = ["Change", "CheckReport", "Finding", "check", "check_loss", "fix", "loss_was_checked", "per_example"]
