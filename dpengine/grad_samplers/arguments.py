"""Inputs of a layer's forward, however the caller passed them."""

from __future__ import annotations

from typing import Any

from dpengine.capture import LayerCall


def argument(call: LayerCall, position: int, name: str) -> Any:
    """The input at ``position``, or the keyword input ``name``; None where neither was given."""
    return call.inputs[position] if position < len(call.inputs) else call.kwargs.get(name)
