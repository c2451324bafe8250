"""The formulas behind the accountants, as functions."""
