"""Stage 1: a data set becomes logical batches, drawn by a known law and handed out with a ticket."""

from .batches import PrivateBatchSampler
from .check import check_loader
from .choose_strategy import strategy_for
from .collate import EmptyAwareCollate, empty_template
from .cyclic import CyclicPoissonSampling, Partition
from .loader import private_loader
from .poisson import PoissonSampling
from .shuffle import ShuffleSampling
from .strategy import AbstractBatchStrategy, WordStream
from .ticket import Ticket

__all__ = [
    "AbstractBatchStrategy",
    "CyclicPoissonSampling",
    "EmptyAwareCollate",
    "Partition",
    "PoissonSampling",
    "PrivateBatchSampler",
    "ShuffleSampling",
    "Ticket",
    "WordStream",
    "check_loader",
    "empty_template",
    "private_loader",
    "strategy_for",
]
