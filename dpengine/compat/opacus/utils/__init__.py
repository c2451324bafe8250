"""Tools of Opacus's names."""
