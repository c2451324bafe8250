"""Stage 1: a data set becomes logical batches, drawn by a known law and handed out with a ticket."""

from .batches import PrivateBatchSampler
from .check import check_loader
from .choose_strategy import batches_in_a_pass, strategy_for
from .collate import EmptyAwareCollate, empty_template
from .cyclic import PARTITION_STEP, CyclicPoissonStrategy, Partition
from .in_order import ByHand, InOrder
from .loader import PrivateIteration, private_loader
from .poisson import PoissonSampling
from .shuffle import ShuffleSampling
from .strategy import AbstractBatchStrategy, IndexBatch, WordStream, whole_number
from .subset import TruncatedStrategy, numbers_below, uniform_subset
from .ticket import Ticket
from .units import UnitIds, UnitStrategy, refuse_reordering, unit_numbers

__all__ = [
    "PARTITION_STEP",
    "AbstractBatchStrategy",
    "ByHand",
    "CyclicPoissonStrategy",
    "EmptyAwareCollate",
    "InOrder",
    "IndexBatch",
    "Partition",
    "PoissonSampling",
    "PrivateBatchSampler",
    "PrivateIteration",
    "ShuffleSampling",
    "Ticket",
    "TruncatedStrategy",
    "UnitIds",
    "UnitStrategy",
    "WordStream",
    "batches_in_a_pass",
    "check_loader",
    "empty_template",
    "numbers_below",
    "private_loader",
    "refuse_reordering",
    "strategy_for",
    "uniform_subset",
    "unit_numbers",
    "whole_number",
]
