"""Placeholder until merged."""

GRAD_SAMPLERS: dict = {}
NORM_SAMPLERS: dict = {}
