"""Validator and fixer of ``nn.MultiheadAttention``, which the engine supports."""

from torch import nn

from dpengine.compat.opacus.layers import DPMultiheadAttention

from .change_of_class import register_replacement

validate, fix = register_replacement(nn.MultiheadAttention, DPMultiheadAttention)
