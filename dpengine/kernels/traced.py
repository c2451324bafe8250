"""Whether a tensor has no numbers, since a graph is being traced."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def traced(tensor: Tensor) -> bool:
    """Whether code may not look at numbers of the tensor: what it does is written down, and run later."""
    return isinstance(tensor, FakeTensor)
