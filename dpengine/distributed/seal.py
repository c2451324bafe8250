"""Words that travel with sums, by which ranks see that all of them do the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dpengine.errors import MechanismMismatchError


class Seal:
    """Words that travel with a sum, by which every rank sees whether all of them summed the same thing.

    A fact is hashed to 32 bits, in eight words ``h`` below 16, and beside them their squares. Sums of both over R ranks
    are exact in float32, and the words are the same everywhere exactly if ``R * sum(h**2) == sum(h)**2``.
    """

    WORDS = 16

    @staticmethod
    def write(into: Tensor, facts: Sequence[object]) -> None:
        """Writes the words of a fact into ``(16,)``, or into each of several such."""
        digest = hashlib.blake2b(repr(tuple(facts)).encode(), digest_size=4).digest()
        words = [half for byte in digest for half in (byte >> 4, byte & 15)]
        into.copy_(torch.tensor([*words, *(word * word for word in words)], dtype=into.dtype))

    @staticmethod
    def refuse_other(summed: Tensor, ranks: int) -> None:
        """Raises MechanismMismatchError unless all ranks wrote the same words."""
        words = [round(number) for number in summed.tolist()]
        if any(ranks * words[8 + i] != words[i] ** 2 for i in range(8)):
            raise MechanismMismatchError(
                "The ranks are not at the same step, or do not do the same in it: one of them skipped a batch, a "
                "backward pass or a step, or has another noise, threshold or ledger.",
                fix="Let every rank run the same loop over the private loader, empty batches included.",
            )
