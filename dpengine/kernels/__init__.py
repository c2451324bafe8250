"""Optional compiled C code, and Python code that computes the same without it."""
