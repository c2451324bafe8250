"""Checks that conversion changes only the class of a module, in both directions."""

import copy
import pickle

import pytest
import torch
from torch import nn

from dpengine.layers.replacements import REPLACEMENTS, to_original, to_replacement

MAKE = {
    nn.RNN: lambda: nn.RNN(4, 4, num_layers=2, nonlinearity="relu", bidirectional=True),
    nn.GRU: lambda: nn.GRU(4, 4, num_layers=2, dropout=0.5, batch_first=True),
    nn.LSTM: lambda: nn.LSTM(4, 4, num_layers=2, proj_size=2),
    nn.RNNCell: lambda: nn.RNNCell(4, 4),
    nn.GRUCell: lambda: nn.GRUCell(4, 4, bias=False),
    nn.LSTMCell: lambda: nn.LSTMCell(4, 4),
    nn.MultiheadAttention: lambda: nn.MultiheadAttention(4, 2, dropout=0.5, kdim=3, vdim=3, add_bias_kv=True),
}
each_layer = pytest.mark.parametrize("original", MAKE, ids=lambda layer: layer.__name__)


def output_of(module):
    torch.manual_seed(0)
    x = torch.randn(2, 4) if isinstance(module, nn.RNNCellBase) else torch.randn(3, 2, 4)
    extra = (torch.randn(3, 2, 3),) * 2 if isinstance(module, nn.MultiheadAttention) else ()
    result = module.eval()(x, *extra)
    return result if isinstance(result, torch.Tensor) else result[0]


def test_every_replacement_is_tested():
    assert set(MAKE) == set(REPLACEMENTS)


@each_layer
def test_converting_to_the_replacement_and_back_leaves_the_module_unchanged(original):
    module = MAKE[original]()
    before, parameters = dict(module.__dict__), list(module.parameters())
    assert to_replacement(module) is module
    assert type(module) is REPLACEMENTS[original]
    assert isinstance(module, original)
    assert module.__dict__ == before
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert to_replacement(module) is None
    assert to_original(module) is module
    assert type(module) is original
    assert to_original(module) is None
    assert module.__dict__ == before


@each_layer
def test_state_dicts_load_strictly_in_both_directions(original):
    module, replacement = MAKE[original](), to_replacement(MAKE[original]())
    assert list(module.state_dict()) == list(replacement.state_dict())
    replacement.load_state_dict(module.state_dict(), strict=True)
    torch.testing.assert_close(output_of(replacement), output_of(module))
    other = MAKE[original]()
    other.load_state_dict(replacement.state_dict(), strict=True)
    torch.testing.assert_close(output_of(other), output_of(module))


@each_layer
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_replacements_with_separate_parameters(original, copied):
    module = to_replacement(MAKE[original]())
    other = copied(module)
    assert type(other) is REPLACEMENTS[original]
    assert torch.equal(output_of(other), output_of(module))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert all(p.any() for name, p in other.named_parameters() if "weight" in name)


@each_layer
def test_double_and_float_cast_the_replacement(original):
    module = MAKE[original]()
    expected = output_of(module)
    to_replacement(module).double()
    assert all(p.dtype == torch.float64 for p in module.parameters())
    with pytest.raises((RuntimeError, ValueError)):
        output_of(module)  # single precision input
    module.float()
    torch.testing.assert_close(output_of(module), expected)


@each_layer
def test_a_subclass_has_no_replacement(original):
    module = MAKE[original]()
    module.__class__ = type("Changed", (original,), {})
    assert to_replacement(module) is None


def test_modules_without_a_replacement_are_not_changed():
    module = nn.Linear(2, 2)
    assert to_replacement(module) is None
    assert to_original(module) is None
    assert type(module) is nn.Linear


@each_layer
def test_a_replacement_has_the_constructor_and_repr_of_its_original(original):
    plain = MAKE[original]()
    assert REPLACEMENTS[original].__init__ is original.__init__
    assert repr(to_replacement(MAKE[original]())) == repr(plain).replace(
        original.__name__, REPLACEMENTS[original].__name__, 1
    )
