"""Trains on real data with and without privacy: ``python -m tutorials.demo``, from the repository root."""
