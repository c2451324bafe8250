"""Backward passes that clip only some of the parameters."""

import warnings

import torch
import torch.nn.functional as F
from inside_parts import ClippedPasses
from loops import mlp

from dpengine import PrivacyWarning


def test_a_pass_of_which_a_part_is_clipped_is_probed_as_a_whole():
    model = mlp()
    passes = ClippedPasses(model)
    passes.restrict(list(model.parameters())[-2:])
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)  # raised if norms do not cover all parameters
        F.cross_entropy(model(torch.randn(6, 4)), torch.randint(3, (6,))).backward()
        passes.clip(rows=6)
