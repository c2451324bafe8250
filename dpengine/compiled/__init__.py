"""Compiles the forward pass, the backward pass and clipping into functions, from one traced graph."""
