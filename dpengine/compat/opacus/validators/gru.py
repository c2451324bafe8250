"""Validator and fixer of ``nn.GRU``, which the engine supports and Opacus replaces by ``DPGRU``."""

from torch import nn

from dpengine.compat.opacus.layers import DPGRU

from .change_of_class import register_replacement

validate, fix = register_replacement(nn.GRU, DPGRU)
