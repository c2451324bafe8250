"""States of the current logical batch. `dpengine.engine.release` makes the transitions."""

from __future__ import annotations

import enum


class Stage(enum.Enum):
    """Where the present logical batch is."""

    IDLE = "idle"  # nothing handed out, or the last release was cleared by zero_grad
    OPEN = "open"  # handed out; some chunk has not been through backward
    CLIPPED = "clipped"  # all chunks are in the sums
    CHARGED = "charged"  # the ledger has it; the weights do not yet
    RELEASED = "released"  # the weights changed; waits for zero_grad
    VOID = "void"  # given up; waits for the next batch
    CLOSED = "closed"  # the model is private no longer; batches are of no concern
