"""Counts the passes that went through a graph."""

import pytest

from dpengine.compiled.compiled_pass import Done


@pytest.fixture
def passes(monkeypatch):
    """Rows of the passes that were compiled."""
    seen = []
    original = Done.add_sums

    def add_sums(self, *args):
        seen.append(self.num_rows)
        original(self, *args)

    monkeypatch.setattr(Done, "add_sums", add_sums)
    return seen
