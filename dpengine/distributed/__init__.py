"""Placement of parameters on ranks, and communication between ranks."""
