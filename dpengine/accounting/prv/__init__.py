"""The privacy random variable accountant."""
