"""Benchmarks: what a private step costs beside an ordinary one, and beside other libraries."""
