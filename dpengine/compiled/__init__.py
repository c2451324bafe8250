"""Traces the forward pass, backward pass and clipping into one graph, and compiles it into functions."""
