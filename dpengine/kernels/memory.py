"""Settings of glibc for CPU memory that torch frees."""

from __future__ import annotations

import ctypes
import functools
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_KEPT_BYTES = 128 * 2**20
_MAX_HEAP_BLOCK = 32 * 2**20  # largest block that glibc can allocate from its heap


@functools.cache
def keep_freed_memory() -> bool:
    """Makes glibc keep up to 128 MiB of freed memory in this process. Returns True on success.

    By default, glibc repeatedly returns memory to the system, which clears each page before its next use. This took
    5 to 40 % of the time of a step on two cores, also without privacy. If the user set ``MALLOC_TRIM_THRESHOLD_``,
    ``MALLOC_MMAP_THRESHOLD_`` or ``GLIBC_TUNABLES``, nothing is changed.
    """
    set_by_user = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if sys.platform != "linux" or any(name in os.environ for name in set_by_user):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        ctypes.CDLL(None).gnu_get_libc_version  # noqa: B018 - other C libraries may use different numbers
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES) and mallopt(_MMAP_THRESHOLD, _MAX_HEAP_BLOCK))
