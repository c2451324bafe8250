"""Checks that the samples of a batch do not influence each other's gradients."""
