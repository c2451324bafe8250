"""Tutorials and the demonstration. They are not installed: run them from the repository root."""
