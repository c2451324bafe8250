"""Independent Gaussian noise at each step: the noise of DP-SGD (Abadi et al. 2016)."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from dpengine.errors import PrivacyError

from .mechanism import AbstractNoise, check_release, end_of
from .source import NoiseSource


@final
class GaussianNoise(AbstractNoise):
    """Adds ``std`` times standard normals, fresh for every (step, index).

    Reusing an address would let the difference of two releases cancel the noise, so a step that lies behind, or a part
    of a step's vector that has had its noise, is refused.

    Args:
        source: Where the normals come from.
        domain: What they are for, as against other uses of the same source.
    """

    def __init__(self, source: NoiseSource, *, domain: str = "noise"):
        self._source = source
        self._domain = domain
        self._next = (0, 0)  # (step, index): the first address not used yet

    def add(
        self,
        sums: Tensor,
        *,
        std: float,
        step: int,
        start: int = 0,
        scale: float = 1.0,
        rows: int = 1,
        stride: int = 0,
    ) -> None:
        """Adds this step's noise in place, and multiplies by ``scale``.

        Slices of one step's vector come in the order of their ``start``.

        Args:
            sums: Contiguous 1-D tensor of clipped sums, float32 or float64.
            std: Noise multiplier times sensitivity, in units of ``sums``. 0 adds nothing and uses up nothing.
            step: Number of the release, above those before it.
            start: Index of ``sums[0]`` in the whole vector.
            scale: What the noisy sums are multiplied by.
            rows: See ``AbstractNoise.add``.
            stride: See ``AbstractNoise.add``.

        Raises:
            PrivacyError: If this address has been used.
        """
        check_release("noise.GaussianNoise.add", sums, std)
        if std == 0:
            sums.mul_(scale)
            return
        if (step, start) < self._next:
            raise PrivacyError(
                f"noise.GaussianNoise.add: got step {step} from index {start}, after step {self._next[0]} up to index "
                f"{self._next[1]}. The same noise in two releases cancels in their difference.",
                fix="Give each release its own step, and each slice of one vector its own start.",
            )
        self._next = (step, end_of(sums, start, rows, stride))  # before: an address that failed half-way is used up
        cut = {"rows": rows, "stride": stride}
        self._source.add_normal_(sums, std, domain=self._domain, step=step, start=start, scale=scale, **cut)

    def state_dict(self) -> dict[str, Any]:
        """The first step of which no address was used."""
        return {"next_step": self._next[0] + (self._next[1] > 0), "slices": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from ``state_dict()``."""
        self._next = (state["next_step"], 0)
