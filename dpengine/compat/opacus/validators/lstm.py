"""Validator and fixer of ``nn.LSTM``, which the engine supports and Opacus replaces by ``DPLSTM``."""

from torch import nn

from dpengine.compat.opacus.layers import DPLSTM

from .change_of_class import register_replacement

validate, fix = register_replacement(nn.LSTM, DPLSTM)
