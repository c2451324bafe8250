"""An optimizer whose update raises on demand."""

import torch


class Boom(Exception):
    """Error that a user's own code raises."""


class Fragile(torch.optim.SGD):
    """Optimizer whose update fails while a flag is set."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise Boom
        return super().step()
