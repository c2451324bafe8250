"""Optimizers that clip and add noise, by Opacus's names."""
