"""Records the compiled passes."""

import pytest

from dpengine.compiled.compiled_pass import CompiledPass


@pytest.fixture
def passes(monkeypatch):
    """Number of samples of each compiled pass that was clipped."""
    seen = []
    original = CompiledPass.add_sums

    def add_sums(self, *args):
        seen.append(len(args[1]))
        original(self, *args)

    monkeypatch.setattr(CompiledPass, "add_sums", add_sums)
    return seen
