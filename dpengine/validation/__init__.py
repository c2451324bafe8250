"""What stands in the way of training a model privately, and a mended copy of it."""

from .batch_norms import BATCH_NORMS, group_count, group_norm_of, instance_norm_of
from .check import CheckReport, Finding, check
from .fix import Change, copied, fix, with_replacements
from .loss import check_loss, loss_was_checked, per_example

__all__ = [
    "BATCH_NORMS",
    "Change",
    "CheckReport",
    "Finding",
    "check",
    "check_loss",
    "copied",
    "fix",
    "group_count",
    "group_norm_of",
    "instance_norm_of",
    "loss_was_checked",
    "per_example",
    "with_replacements",
]
