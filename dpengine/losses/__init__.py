"""Losses that are means over the samples of a batch."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .token_mean import causal_lm_loss as causal_lm_loss
    from .token_mean import per_token_mean as per_token_mean
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, {"token_mean": ["causal_lm_loss", "per_token_mean"]})
