"""State of random generators and autocast at the start of a forward pass, to repeat the pass."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ForwardState:
    """State outside the model on which a forward pass depends.

    Attributes:
        random: The state of torch's random generators, by device.
        host_random: The state of the random generators of Python and NumPy.
        autocast: Device type, enabled flag, and dtype of autocast.
    """

    random: list[tuple[str, Tensor]]
    host_random: tuple[Any, Any]
    autocast: list[tuple[str, bool, torch.dtype]]

    @classmethod
    def now(cls, tensors: Iterable[Tensor]) -> ForwardState:
        """Saves the current state, for the CPU and the devices of these tensors."""
        devices = {tensor.device for tensor in tensors}
        kinds = {"cpu", *(d.type for d in devices if torch.amp.is_autocast_available(d.type))}
        return cls(
            _random_states(["cpu", *sorted(str(d) for d in devices if d.type == "cuda")]),
            _host_random(),
            [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)],
        )

    @property
    def autocast_enabled(self) -> bool:
        """True if autocast is enabled."""
        return any(enabled for _, enabled, _ in self.autocast)

    def random_now(self) -> list[tuple[str, Tensor]]:
        """Returns the current state of torch's random generators, by device."""
        return _random_states([device for device, _ in self.random])

    def has_drawn(self) -> bool:
        """Returns True if random numbers were drawn since this state."""
        torch_same = all(torch.equal(a, b) for (_, a), (_, b) in zip(self.random, self.random_now(), strict=True))
        return not torch_same or self.host_has_drawn()

    def host_has_drawn(self) -> bool:
        """Returns True if random numbers of Python or NumPy were drawn since this state."""
        (python, numpy), (python_now, numpy_now) = self.host_random, _host_random()
        return not (python == python_now and all(map(np.array_equal, numpy, numpy_now)))

    def restore_random(self) -> None:
        """Sets the random generators to this state."""
        for device, state in self.random:
            torch.set_rng_state(state) if device == "cpu" else torch.cuda.set_rng_state(state, device)
        random.setstate(self.host_random[0])
        np.random.set_state(self.host_random[1])

    @contextlib.contextmanager
    def random_again(self) -> Iterator[None]:
        """Sets the random generators to this state, and restores their current state on exit."""
        host = _host_random()
        with torch.random.fork_rng(devices=[device for device, _ in self.random if device != "cpu"]):
            self.restore_random()
            try:
                yield
            finally:
                random.setstate(host[0])
                np.random.set_state(host[1])

    @contextlib.contextmanager
    def with_autocast(self) -> Iterator[None]:
        """Enables the same autocast in the context, without its cache of cast parameters."""
        with contextlib.ExitStack() as stack:
            for device_type, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device_type, enabled=enabled, dtype=dtype, cache_enabled=False))
            yield


def _random_states(devices: Sequence[str]) -> list[tuple[str, Tensor]]:
    return [(d, torch.get_rng_state() if d == "cpu" else torch.cuda.get_rng_state(d)) for d in devices]


def _host_random() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()
