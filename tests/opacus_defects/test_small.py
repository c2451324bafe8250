"""Small defects of Opacus, one test each: a typo, a forgotten argument, a missing case."""

import copy

import pytest
import torch
import torch.nn.functional as F
from case_models import model_of
from opacus_defects.apis import (
    LAYER_APIS,
    assert_equal,
    fixed_loader,
    opacus,
    trainable,
    true_sum,
    with_few_apis,
)
from opacus_runs import arguments
from torch import nn

import dpengine
from dpengine import PrivacyEngine
from dpengine.errors import PrivacyWarning, UnsupportedLayerError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012:dpengine.PrivacyWarning")

FEATURES, CLASSES, ROWS = 4, 3, 5
CRITERION = nn.CrossEntropyLoss()


def labels(rows=ROWS):
    return torch.randint(0, CLASSES, (rows,), generator=torch.Generator().manual_seed(3))


def assert_sum_is_right(api, model, inputs, max_norm=1.0, *, row=None, rtol=1e-5):
    truth = true_sum(model, CRITERION, (inputs, labels()), max_norm, row=row)
    assert_equal(api.clipped_sum(model, CRITERION, (inputs, labels()), max_norm), truth, rtol=rtol)


REPAIRS = {
    "default": lambda model: dpengine.fix(model)[0],
    "compat": lambda model: opacus("validators").ModuleValidator.fix(model),
}


class LastStepModel(nn.Module):
    """Recurrent layer with a head on its last time step."""

    def __init__(self, layer, width):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.hazard("O68")
def test_fix_of_an_lstm_with_a_projection(repair):
    torch.manual_seed(1)
    plain, x = LastStepModel(nn.LSTM(FEATURES, 6, batch_first=True, proj_size=2), 2), torch.randn(ROWS, 5, FEATURES)
    fixed = REPAIRS[repair](plain)
    torch.testing.assert_close(fixed(x), plain(x))
    assert list(fixed.state_dict()) == list(plain.state_dict())
    api = next(d for d in LAYER_APIS if d.compat == (repair == "compat") and d.mode in ("auto", "hooks"))
    assert_sum_is_right(api, fixed, x, rtol=2e-5)


@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.hazard("O69")
def test_fix_accepts_classes_that_cannot_be_pickled(repair):
    class NotPicklable(nn.Module):  # a local class, which cannot be pickled
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.Linear(32, CLASSES))
            self.identity = lambda x: x  # lambdas cannot be pickled

        def forward(self, x):
            return self.layers(self.identity(x))

    plain = NotPicklable()
    fixed = REPAIRS[repair](plain)
    assert type(fixed) is NotPicklable and fixed is not plain
    assert isinstance(plain.layers[1], nn.BatchNorm1d) and not isinstance(fixed.layers[1], nn.BatchNorm1d)


@model_of(lambda: {"first": nn.Linear(FEATURES, 6), "second": nn.Linear(6, CLASSES)})
def grid(m, x):
    return m.second(torch.tanh(m.first(x))).mean(dim=(1, 2))


class BagModel(nn.Module):
    """Model that calls an EmbeddingBag with one of several forms of arguments."""

    def __init__(self, kind):
        super().__init__()
        self.bag, self.head, self.kind = nn.EmbeddingBag(7, 4, mode="sum"), nn.Linear(4, CLASSES), kind

    def forward(self, words, weights):
        calls = {
            "2d": lambda: self.bag(words),
            "keywords": lambda: self.bag(input=words, per_sample_weights=weights),
            "offsets": lambda: self.bag(words.flatten(), offsets=torch.arange(len(words)) * words.shape[1]),
        }
        return self.head(calls[self.kind]())


def norm_without_bias():
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.LayerNorm(6, bias=False), nn.Linear(6, CLASSES))


def words_and_weights():
    return torch.randint(0, 7, (ROWS, 3)), torch.rand(ROWS, 3)


LAYERS = {
    "layer norm without a bias": (norm_without_bias, lambda: torch.randn(ROWS, FEATURES)),
    "linear on four axes": (grid, lambda: torch.randn(ROWS, 3, 2, FEATURES)),
    "bag with 2d input": (lambda: BagModel("2d"), words_and_weights),
    "bag with keywords": (lambda: BagModel("keywords"), words_and_weights),
    "bag with offsets": (lambda: BagModel("offsets"), words_and_weights),
}


@pytest.mark.parametrize("name", LAYERS)
@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O70", "O71", "O74")
def test_layers_give_the_clipped_sum_of_a_loop_over_samples(api, name):
    make, inputs = LAYERS[name]
    torch.manual_seed(1)
    assert_sum_is_right(api, make(), inputs())


class CustomLayer(nn.Module):
    """Layer without a gradient rule that contains dropout."""

    def __init__(self, apply):
        super().__init__()
        self.weight, self.dropout, self.apply_to = nn.Parameter(torch.randn(6, 6)), nn.Dropout(0.5), apply

    def forward(self, x):
        return torch.tanh(self.apply_to(self.dropout(x), self.weight))


def from_the_left(x, weight):
    return (weight @ x.unsqueeze(-1)).squeeze(-1)


@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O72")
def test_a_layer_without_a_rule_that_contains_dropout_is_exact_or_rejected_with_a_fix(api):
    x = torch.randn(ROWS, FEATURES)
    for apply in (F.linear, torch.matmul, from_the_left):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(FEATURES, 6), CustomLayer(apply), nn.Linear(6, CLASSES))
        plain = copy.deepcopy(model)
        private = api.open(model, fixed_loader(ROWS), criterion=CRITERION, max_grad_norm=1e6)
        for _ in private.loader:
            private.optimizer.zero_grad()
            torch.manual_seed(5)
            if apply is from_the_left and api.id in ("default-auto", "compat-ghost"):
                with pytest.warns(PrivacyWarning, match="DPE028"):
                    private.backward(x, labels())  # runs each sample alone, with other random numbers
                private.optimizer.step()
                break
            if apply is from_the_left and api.mode != "functorch":
                with pytest.raises(UnsupportedLayerError, match=r"'1(' \(Own\)|\.weight')") as seen:
                    private.backward(x, labels())
                assert "'whole_model'" in seen.value.fix
                break
            private.backward(x, labels())
            private.optimizer.step()
            torch.manual_seed(5)
            CRITERION(plain(x), labels()).backward()
            assert_equal(private.sum(), {name: p.grad.double() * ROWS for name, p in plain.named_parameters()})


@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O73")
def test_a_plain_rnn_is_exact(api):
    torch.manual_seed(1)
    model, x = LastStepModel(nn.RNN(FEATURES, 6, batch_first=True), 6), torch.randn(ROWS, 5, FEATURES)
    if api.compat:
        validator = opacus("validators").ModuleValidator
        model = validator.fix(model)
        assert validator.is_valid(model)
    assert_sum_is_right(api, model, x, rtol=2e-5)


@pytest.mark.hazard("O75")
def test_epsilon_is_zero_before_the_first_step():
    engine = PrivacyEngine()
    engine.make_private(**arguments(nn.Linear(FEATURES, CLASSES), data_loader=fixed_loader(20, batch_size=5)))
    assert engine.epsilon == 0.0


@pytest.mark.parametrize("mechanism", ["rdp", "gdp", "prv"])
@pytest.mark.hazard("O75")
def test_epsilon_of_compat_is_zero_before_the_first_step(mechanism):
    assert opacus().PrivacyEngine(accountant=mechanism).get_epsilon(delta=1e-5) == 0.0


@pytest.mark.hazard("O77")
def test_a_checkpoint_of_compat_loads_with_weights_only_or_without(tmp_path):
    engine = opacus().PrivacyEngine(accountant="rdp")
    model = nn.Linear(FEATURES, CLASSES)
    module, optimizer, _ = engine.make_private(**arguments(model, data_loader=fixed_loader(20, batch_size=5)))
    engine.accountant.step(noise_multiplier=1.0, sample_rate=0.25)
    path = tmp_path / "state.pt"
    engine.save_checkpoint(path=path, module=module, optimizer=optimizer, checkpoint_dict={"epoch": 3})
    for weights_only in (True, False):
        found = engine.load_checkpoint(path=path, module=module, torch_load_kwargs={"weights_only": weights_only})
        assert found["epoch"] == 3
    assert set(trainable(model)) == {"weight", "bias"}
