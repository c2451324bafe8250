"""The forward pass, the backward pass and clipping as compiled functions, from one traced graph."""
