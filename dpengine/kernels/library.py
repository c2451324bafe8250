"""Loads the compiled library, which ``setup.py`` builds if there is a C compiler. Detects traced tensors."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from torch import Tensor

_HERE = Path(__file__).resolve().parent
_VERSION = 4  # version of the arguments of the functions; must equal interface_version() in vectors.c
_POINTER, _COUNT, _REAL = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_double
_RECURRENT = {"lstm_step_f32": 7, "lstm_back_f32": 7, "gru_step_f32": 7, "gru_back_f32": 8}
_PRODUCTS = {
    "sq_norms_f32": (_COUNT, _COUNT, _COUNT, _POINTER, _POINTER),
    "gram_norms_f32": (_COUNT, _COUNT, _COUNT, _POINTER, _COUNT, *[_POINTER] * 4),
    "sum_products_f32": (_COUNT, _POINTER, _POINTER),
}


@functools.cache
def native_library() -> Any:
    """Returns the library; None if it cannot be loaded or was built from a different version. Calls release the GIL."""
    for suffix in EXTENSION_SUFFIXES:
        path = _HERE / f"native{suffix}"
        if path.exists():
            try:
                return _with_types(ctypes.CDLL(str(path)))
            except (OSError, AttributeError):  # built for a different machine, or from a different version
                continue
    return None


@functools.cache
def thread_team() -> int | None:
    """Returns the address of ``GOMP_parallel`` in the OpenMP library of torch; None if the library lacks it.

    Returns None in a forked process, where the team has no threads and a call would never return.
    """
    if _forked:
        return None
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return None
    mapped = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    candidates = [path for path in mapped if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))]
    # Other packages may load a different OpenMP library, so that of torch comes first.
    for path in sorted(candidates, key=lambda path: ("/torch" not in path, path)):
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, _POINTER).value
        except (OSError, AttributeError):
            continue
    return None


def _after_fork() -> None:
    global _forked
    _forked = True
    thread_team.cache_clear()


_forked = False
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)


def _with_types(library: ctypes.CDLL) -> ctypes.CDLL:
    if library.interface_version() != _VERSION:
        raise OSError("The library was built from a different version of dpengine. Install dpengine again.")
    for name in ("add_normals_f32", "add_normals_f64"):
        function = getattr(library, name)
        function.argtypes = (ctypes.c_char_p, *[_COUNT] * 4, _REAL, _REAL, _POINTER, ctypes.c_uint, _POINTER)
        function.restype = None
    for name, pointers in _RECURRENT.items():
        function = getattr(library, name)
        function.argtypes = (*[_COUNT] * 5, *[_POINTER] * pointers)
        function.restype = None
    team = (ctypes.c_uint, _POINTER)
    for name, arguments in _PRODUCTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = (*arguments, *team), None
    library.gram_work.argtypes, library.products_work.argtypes = (_COUNT, _COUNT), (_COUNT, _POINTER)
    library.gram_work.restype = library.products_work.restype = _COUNT
    library.allow_vectors.argtypes = (ctypes.c_int,)
    return library


def traced(tensor: Tensor) -> bool:
    """Returns True if the tensor has no values, because the code is being traced."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # not imported here, because the import takes a second
    return module is not None and isinstance(tensor, module.FakeTensor)
