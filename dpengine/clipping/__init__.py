"""Stage 5: norms become factors, and the sensitivity that follows; the clipped sums that they give."""

from .adaptive import Adaptive
from .automatic import Automatic
from .clipped_sums import ClippedSums, ClipStatistics
from .clipper import PerSampleGradientClipper
from .flat import Flat
from .groups import Groups
from .per_layer import PerLayer
from .policy import AbstractClip
from .short_forms import clipping_from
from .shown_sums import ShownSums

__all__ = [
    "AbstractClip",
    "Adaptive",
    "Automatic",
    "ClipStatistics",
    "ClippedSums",
    "Flat",
    "Groups",
    "PerLayer",
    "PerSampleGradientClipper",
    "ShownSums",
    "clipping_from",
]
