"""Stage 4: the records of a batch become norms, and factors become clipped sums."""

from .bookkeep import Bookkeep
from .choose_method import KeepAll, MethodTable, method_table
from .explain import explain
from .flat_buffer import FlatBuffer, Key, Stretch, Sums, Taken, wide
from .materialize import forget_grad_samples, show_grad_sample
from .modes import MODES, watch_model
from .on_demand import OnDemand
from .probed import Probed
from .strategy import KEEP_THE_BATCH_FIRST, AbstractGradients, common_rows
from .units import Units

__all__ = [
    "KEEP_THE_BATCH_FIRST",
    "MODES",
    "AbstractGradients",
    "Bookkeep",
    "FlatBuffer",
    "KeepAll",
    "Key",
    "MethodTable",
    "OnDemand",
    "Probed",
    "Stretch",
    "Sums",
    "Taken",
    "Units",
    "common_rows",
    "explain",
    "forget_grad_samples",
    "method_table",
    "show_grad_sample",
    "watch_model",
    "wide",
]
