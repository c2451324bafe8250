"""Settings of the C library for memory that torch frees on the CPU."""

from __future__ import annotations

import ctypes
import functools
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_KEPT_BYTES = 128 * 2**20
_LARGEST_BLOCK = 32 * 2**20  # the most that glibc takes from its own heap


@functools.cache
def keep_freed_memory() -> bool:
    """Has glibc keep up to 128 MiB that was freed, for this process, once.

    By default it gives memory back to the system again and again, which clears each page before it is used the next
    time: on two cores that took 5 to 40 % of a step, ordinary ones included. Where ``MALLOC_TRIM_THRESHOLD_``,
    ``MALLOC_MMAP_THRESHOLD_`` or ``GLIBC_TUNABLES`` is set, that is left alone.
    """
    set_by_user = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if sys.platform != "linux" or any(name in os.environ for name in set_by_user):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        ctypes.CDLL(None).gnu_get_libc_version  # noqa: B018 - another C library may number its settings otherwise
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES) and mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK))
