"""Optional C code, and the fallback that computes the same without it."""
