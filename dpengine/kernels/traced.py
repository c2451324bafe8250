"""Whether a tensor has no numbers, since a graph is being traced."""

from __future__ import annotations

import sys

from torch import Tensor


def traced(tensor: Tensor) -> bool:
    """Whether code may not look at numbers of the tensor: what it does is written down, and run later."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # a second to import, and without it there are none
    return module is not None and isinstance(tensor, module.FakeTensor)
