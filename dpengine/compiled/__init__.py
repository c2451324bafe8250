"""The forward pass, loss, backward pass and clipping as one graph, for ``torch.compile``."""
