"""Demonstration: trains on real data with and without privacy. Run ``python -m tutorials.demo``."""
