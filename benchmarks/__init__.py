"""Benchmarks: cost of private steps compared with ordinary steps and with other libraries."""
