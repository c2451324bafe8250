"""Recurrent layers load what Opacus writes for them: every tensor under torch's name, and under its own again."""

import pytest
import torch
from torch import nn

from dpengine.compat.opacus.layers import DPGRU, DPLSTM, DPRNN


def as_opacus_writes_it(layer, prefix, *, only_own=False):
    state = {f"{prefix}{name}": value for name, value in layer.state_dict().items()}
    own = {}
    for name, value in layer.state_dict().items():
        kind, gates, place = name.split("_", 2)
        own[f"{prefix}{place}.{gates}.{kind}"] = value
    return own if only_own else state | own


@pytest.mark.parametrize("only_own", [False, True])
@pytest.mark.parametrize("kind", [DPRNN, DPGRU, DPLSTM])
def test_a_layer_inside_a_model_loads_it_strictly(kind, only_own):
    def model():
        return nn.Sequential(nn.Linear(2, 3), kind(3, 4, num_layers=2, bidirectional=True))

    first, second = model(), model()
    state = dict(first.state_dict()) | as_opacus_writes_it(first[1], "1.", only_own=only_own)
    if only_own:
        state = {name: value for name, value in state.items() if "_l" not in name}
    assert any(".ih." in name for name in state)
    second.load_state_dict(state, strict=True)
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)


def test_other_names_are_still_unexpected():
    layer = DPLSTM(3, 4)
    with pytest.raises(RuntimeError, match="Unexpected"):
        layer.load_state_dict(dict(layer.state_dict()) | {"l0.other.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Unexpected"):
        layer.load_state_dict(dict(layer.state_dict()) | {"l1.ih.weight": torch.zeros(1)})
