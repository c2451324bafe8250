"""Squared norms of per-sample gradients that lie in parts on several ranks: one exchange for each pass.

Note [replicated]: ranks that hold parts of each layer also hold whole parameters, each its own copy, whose gradients
must be the same on all of them. One counts. Where they differ, as with other dropout on each rank, the norm of what
another rank adds up would not be bounded: so their norms travel too, and their spread over ranks is looked at. It
shows on every rank alike. What is let through differs by a thousandth.

Axes: B rows, K groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpengine.errors import MechanismMismatchError

from .ranks import Ranks
from .seal import Seal

_SPREAD = 1e-6  # variance of a row's norms over ranks, of their squared mean


def add_up_sq_norms(
    splits: Ranks, own_BK: Tensor, whole_BK: Tensor, facts: Sequence[object], device: torch.device
) -> Tensor:
    """Adds up squared norms of parts.

    Args:
        splits: The ranks that hold parts, for the same rows.
        own_BK: Squared norms of the gradients of parts that only this rank holds.
        whole_BK: Those of parameters that each rank holds as a whole.
        facts: What must be the same on all of them.
        device: Where numbers are exchanged.

    Returns:
        Squared norms of whole gradients, float64 and the same bits on every rank.

    Raises:
        MechanismMismatchError: If ranks do not do the same, or have other gradients of what each holds as a whole.
    """
    rows, groups = own_BK.shape
    message = torch.zeros(rows * (groups + 2) + Seal.WORDS, dtype=torch.float64, device=device)
    sums = message[: -Seal.WORDS].view(rows, groups + 2)
    sums[:, :groups] = own_BK if splits.rank else own_BK.double() + whole_BK.double()
    sums[:, groups + 1] = whole_BK.double().sum(dim=1)
    sums[:, groups] = sums[:, groups + 1].sqrt()
    Seal.write(message[-Seal.WORDS :], facts)
    splits.add_up(message)()
    Seal.refuse_other(message[-Seal.WORDS :], splits.size)
    norm_B, sq_norm_B = sums[:, groups], sums[:, groups + 1]
    if bool((splits.size * sq_norm_B > norm_B.square() * (1 + _SPREAD)).any()):
        raise MechanismMismatchError(
            "The processes that hold parts of the layers do not have the same gradients of the parameters that each "
            "holds as a whole.",
            fix="Give all of them the same random state (torch.manual_seed), so that dropout is the same; and let no "
            "layer that is whole work on a part of an activation, as between ColwiseParallel and RowwiseParallel, or "
            "with sequences split.",
        )
    unusable_B1 = ~sq_norm_B.isfinite().unsqueeze(1)  # on any rank: then the row is dropped on all
    return sums[:, :groups].masked_fill(unusable_B1, torch.inf).to(own_BK.device)
