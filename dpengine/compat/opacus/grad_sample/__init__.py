"""Wrappers that leave per-sample gradients on parameters, and rules for them, by Opacus's names."""
