"""dpengine: PyTorch training with differential privacy, in the loop that you already have."""
