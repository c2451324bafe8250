"""Recurrent and attention layers with per-sample gradients, under the names of Opacus."""

from .dp_multihead_attention import DPMultiheadAttention, SequenceBias
from .dp_rnn import DPGRU, DPLSTM, DPRNN
from .param_rename import RenameParamsMixin

__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention", "RenameParamsMixin", "SequenceBias"]
