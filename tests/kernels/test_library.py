"""Version check of the native library, and its threads after a fork."""

import os
import subprocess
import sys

import pytest

from dpengine.kernels import library
from dpengine.kernels.library import native_library

IN_A_FORK = """
import os
from dpengine.kernels.library import thread_team
before = thread_team()
if os.fork() == 0:
    os._exit(0 if thread_team() is None else 1)
print(before is not None, os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not available")
@pytest.mark.slow
def test_a_forked_process_has_no_thread_team():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", IN_A_FORK], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "0"


@pytest.mark.skipif(native_library() is None, reason="native code is not built")
def test_a_library_of_another_version_is_not_loaded(monkeypatch):
    monkeypatch.setattr(library, "_VERSION", library._VERSION + 1)
    native_library.cache_clear()
    try:
        assert native_library() is None
    finally:
        monkeypatch.undo()
        native_library.cache_clear()
    assert native_library() is not None
