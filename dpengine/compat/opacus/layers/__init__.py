"""Recurrent and attention layers under Opacus's names: torch's own, whose rows the engine can tell apart."""

from .dp_multihead_attention import DPMultiheadAttention, SequenceBias
from .dp_rnn import DPGRU, DPLSTM, DPRNN
from .param_rename import RenameParamsMixin

__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention", "RenameParamsMixin", "SequenceBias"]
