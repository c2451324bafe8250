"""The isolation probe put in front of every strategy, whether or not the engine does that by itself."""

import pytest

from dpengine.clipping import clipped_sums
from dpengine.gradients.probe import Probed


@pytest.fixture
def probed(monkeypatch):
    watch_model = clipped_sums.watch_model

    def watch(model, receiver, mode, **options):
        capture, strategy = watch_model(model, receiver, mode, **options)
        return capture, strategy if isinstance(strategy, Probed) else Probed(strategy, capture)

    monkeypatch.setattr(clipped_sums, "watch_model", watch)
