"""Replacements by ``fix``, submodules that it keeps, and its guarantee for the result."""

import copy

import pytest
import torch
from case_models import Parts
from torch import nn
from torch.nn.utils import parametrizations

from dpengine.layers import PrivateGRU, PrivateLSTM, PrivateMultiheadAttention, PrivateRNN
from dpengine.validation import check, fix

SPACE = {nn.BatchNorm1d: (), nn.BatchNorm2d: (3, 3), nn.BatchNorm3d: (2, 2, 2), nn.SyncBatchNorm: (3, 3)}
CHANNELS = [*range(2, 70), 96, 100, 127, 128, 130, 256, 384, 512, 1000]


class Block(nn.Module):
    """Residual block with in-place ReLU."""

    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


def tagger():
    """Returns a text classifier: an embedding, a recurrent layer, a head."""
    run = lambda m, x: m.head(m.lstm(m.table(x))[0].mean(dim=1))  # noqa: E731
    return Parts(
        run,
        table=nn.Embedding(10, 4, scale_grad_by_freq=True),
        lstm=nn.LSTM(4, 4, batch_first=True, bidirectional=True),
        head=nn.Linear(8, 2),
    )


class Mixed(nn.Module):
    """Model that needs every type of replacement."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv1d(4, 8, 3, padding=1), nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
        )
        self.norm = nn.BatchNorm1d(8)
        self.rnn = nn.RNN(8, 8, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        x = self.norm(self.image(x)).transpose(1, 2)
        return self.encoder(self.gru(self.rnn(x)[0])[0])


MODELS = {
    "resnet-like": lambda: (
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), Block(16), Block(16), nn.Flatten(), nn.LazyLinear(3)),
        torch.randn(4, 3, 6, 6),
    ),
    "lstm": lambda: (tagger(), torch.randint(10, (4, 5))),
    "mixed": lambda: (Mixed(), torch.randn(4, 4, 6)),
}


def made(name):
    """Returns a model of the table and its inputs."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model(inputs)
    return model, inputs


@pytest.mark.parametrize("name", MODELS)
def test_fixed_model_passes_the_check_and_keeps_samples_independent(name):
    model, inputs = made(name)
    assert not check(model).ok
    mended, changes = fix(model)
    assert check(mended).ok
    assert changes
    assert all(change.after is not None for change in changes)
    for module in mended.modules():  # dropout masks would differ
        for name in ("dropout", "p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    together = mended(inputs)
    alone = torch.cat([mended(row[None]) for row in inputs])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    together.sum().backward()
    assert all(p.grad is not None for p in mended.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_the_given_model_is_left_as_it_was(name):
    model, _ = made(name)
    before, state = repr(model), copy.deepcopy(model.state_dict())
    mended, _ = fix(model)
    assert repr(model) == before
    assert {id(p) for p in model.parameters()}.isdisjoint({id(p) for p in mended.parameters()})
    with torch.no_grad():
        for parameter in mended.parameters():
            parameter.add_(1)
    torch.testing.assert_close(dict(model.state_dict()), dict(state))


@pytest.mark.parametrize("name", MODELS)
def test_fixing_twice_changes_nothing_more(name):
    mended, _ = fix(made(name)[0])
    assert fix(mended)[1] == []


@pytest.mark.parametrize("layer", SPACE, ids=lambda layer: layer.__name__)
def test_output_of_the_batch_norm_replacement_has_variance_of_order_one(layer):
    torch.manual_seed(0)
    for channels in CHANNELS:
        mended, _ = fix(layer(channels))
        output = mended(3 + 5 * torch.randn(64, channels, *SPACE[layer])).detach()
        assert isinstance(mended, nn.GroupNorm)
        assert mended.num_channels // mended.num_groups >= 2
        assert output.var() == pytest.approx(1, abs=0.1), channels


@pytest.mark.parametrize(
    ("layer", "channels", "groups"),
    [
        (nn.BatchNorm1d, (2, 16, 32, 64, 100, 127, 512), [1, 1, 2, 4, 5, 1, 32]),  # groups of about sixteen
        (nn.BatchNorm2d, (2, 3, 16, 32, 64, 96, 512), [1, 1, 8, 16, 32, 32, 32]),  # about thirty-two groups
    ],
)
def test_vectors_have_groups_of_about_sixteen_and_images_about_thirty_two_groups(layer, channels, groups):
    assert [fix(layer(number))[0].num_groups for number in channels] == groups


@pytest.mark.parametrize("layer", SPACE, ids=lambda layer: layer.__name__)
def test_fix_keeps_affine_parameters_and_settings(layer):
    norm = layer(8, eps=0.25, dtype=torch.float64).eval()
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    norm.bias.requires_grad_(False)
    mended, (change,) = fix(nn.Sequential(norm).eval())
    found = mended[0]
    assert torch.equal(found.weight, norm.weight)
    assert torch.equal(found.bias, norm.bias)
    assert (found.weight.requires_grad, found.bias.requires_grad) == (True, False)
    assert (found.eps, found.training, found.weight.dtype) == (0.25, False, torch.float64)
    assert not mended.training
    assert change.name == "0"


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_fix_keeps_the_device_and_affine_false(device):
    norm, _ = fix(nn.BatchNorm2d(4, device=device))
    assert norm.weight.device.type == device
    norm, _ = fix(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False, device=device)))
    assert list(norm[1].parameters()) == [] and not norm[1].affine


@pytest.mark.parametrize("shared", ["layer", "parameter"])
def test_shared_layers_and_parameters_stay_shared(shared):
    norm, second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    second.weight = norm.weight
    mended, changes = fix(
        nn.ModuleDict({"a": norm, "b": nn.Sequential(nn.Linear(4, 4), norm if shared == "layer" else second)})
    )
    assert isinstance(mended["a"], nn.GroupNorm) and mended["a"].weight is mended["b"][1].weight
    assert (mended["a"] is mended["b"][1]) is (shared == "layer")
    assert [change.name for change in changes] == (["a"] if shared == "layer" else ["a", "b.1"])


@pytest.mark.parametrize(
    ("layer", "twin"),
    [
        (nn.RNN(4, 4), PrivateRNN),
        (nn.GRU(4, 4), PrivateGRU),
        (nn.LSTM(4, 4, proj_size=2), PrivateLSTM),
        (nn.MultiheadAttention(4, 2), PrivateMultiheadAttention),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_recurrent_and_attention_layers_become_their_replacements(layer, twin):
    mended, (change,) = fix(nn.ModuleList([layer]))
    assert type(mended[0]) is twin
    assert change.after.startswith(f"{twin.__name__}(")
    mended.load_state_dict(nn.ModuleList([layer]).state_dict(), strict=True)


class BatchNormAct2d(nn.BatchNorm2d):
    """Batch norm of timm, which is followed by dropout and an activation."""

    def __init__(self, channels, **settings):
        super().__init__(channels, **settings)
        self.drop, self.act = nn.Identity(), nn.LeakyReLU(0.3)

    def forward(self, images):
        return self.act(self.drop(super().forward(images)))


class SplitBatchNorm2d(nn.BatchNorm2d):
    """Batch norm of timm with a separate batch norm for each split of the batch."""

    def __init__(self, channels):
        super().__init__(channels)
        self.aux_bn = nn.ModuleList([nn.BatchNorm2d(channels)])

    def forward(self, images):
        half = len(images) // 2
        return torch.cat([super().forward(images[:half]), self.aux_bn[0](images[half:])])


class EvoNorm2dB0(nn.Module):
    """Evolved layer of timm, which may take the variance over the batch."""

    def __init__(self, channels, apply_act=True):
        super().__init__()
        self.eps, self.apply_act = 1e-3, apply_act
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.v = nn.Parameter(torch.ones(channels)) if apply_act else None
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, images):
        if self.apply_act:
            images = images / images.var((0, 2, 3), keepdim=True).add(self.eps).sqrt().maximum(images)
        return images * self.weight[:, None, None] + self.bias[:, None, None]


@pytest.mark.parametrize(
    ("layer", "kinds"),
    [
        (lambda: BatchNormAct2d(8, affine=False), [nn.GroupNorm, nn.LeakyReLU]),
        (lambda: BatchNormAct2d(8), [nn.GroupNorm, nn.LeakyReLU]),
        (lambda: SplitBatchNorm2d(8), [nn.GroupNorm]),
        (lambda: EvoNorm2dB0(8), [nn.GroupNorm, nn.SiLU]),
    ],
    ids=["without-scale", "with-activation", "of-parts", "evolved"],
)
def test_timm_batch_norm_becomes_group_norm_with_its_dropout_and_activation(layer, kinds):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), layer())
    assert check(model).blocked[0].name == "1"
    mended, (change,) = fix(model)
    parts = list(mended[1]) if len(kinds) > 1 else [mended[1]]
    assert [type(part) for part in parts] == kinds
    assert change.name == "1" and change.after is not None
    assert check(mended).ok
    for name in ("weight", "bias"):
        torch.testing.assert_close(getattr(parts[0], name), getattr(model[1], name))
    images = torch.randn(4, 3, 6, 6)
    torch.testing.assert_close(mended(images)[:1], mended(images[:1]))


def test_an_evolved_layer_without_statistics_is_kept():
    assert fix(nn.Sequential(EvoNorm2dB0(8, apply_act=False)))[1] == []


def test_instance_norm_stops_tracking():
    layer = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    mended, _ = fix(layer)
    x = torch.randn(2, 3, 5)
    assert list(mended.buffers()) == []
    torch.testing.assert_close(mended(x), layer(x))
    torch.testing.assert_close(mended.eval()(x), mended.train()(x))


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_fix_removes_only_the_mixing_options_of_embeddings(layer):
    mended, (change,) = fix(layer(5, 3, scale_grad_by_freq=True, max_norm=1.0, sparse=True, padding_idx=2))
    assert (mended.scale_grad_by_freq, mended.max_norm, mended.sparse, mended.padding_idx) == (False, None, True, 2)
    assert "scale_grad_by_freq" in change.why
    assert "max_norm" in change.why


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: nn.utils.spectral_norm(nn.Linear(3, 3)), "power iteration"),
        (lambda: parametrizations.spectral_norm(nn.Linear(3, 3)), "power iteration"),
        (lambda: nn.BatchNorm1d(1), "a single channel"),
        (lambda: type("Special", (nn.BatchNorm2d,), {})(4), "Replace it manually"),
        (lambda: nn.LazyLinear(2), "shape is not known yet"),
        (lambda: nn.Linear(2, 2).half(), "float16"),
        (lambda: nn.SyncBatchNorm(4), "does not store its number of dimensions"),  # for an instance norm
    ],
    ids=["spectral-norm-old", "spectral-norm", "one-channel", "subclass", "lazy", "half", "unknown-dimensions"],
)
def test_layers_that_cannot_be_fixed_are_unchanged_and_listed(layer, reason):
    model = nn.Sequential(nn.Linear(2, 2), layer())
    mended, (change,) = fix(model, batch_norm="instance" if type(model[1]) is nn.SyncBatchNorm else "group")
    assert type(mended[1]) is type(model[1])
    assert (change.name, change.after) == ("1", None)
    assert reason in change.why
    assert [finding.name for finding in check(mended).blocked] == ["1"]


def test_string_form_of_a_change_is_one_line():
    _, (change,) = fix(nn.Sequential(nn.BatchNorm2d(4)))
    assert str(change).startswith("0: BatchNorm2d(4, ")
    assert " -> GroupNorm(2, 4, " in str(change)
    assert str(change).endswith(": batch norm mixes the samples of a batch; group norm normalizes one sample")
    _, (left,) = fix(nn.Sequential(nn.LazyLinear(2)))
    assert str(left).startswith("0: LazyLinear -> NOT FIXED: has parameters whose shape is not known yet.")


def test_supported_model_is_copied_without_changes():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Dropout())
    mended, changes = fix(model)
    assert changes == []
    assert repr(mended) == repr(model)
    assert mended is not model


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_fix_can_use_instance_norm(layer):
    norm = layer(4, eps=0.25)
    with torch.no_grad():
        norm.weight.normal_()
    mended, (change,) = fix(nn.Sequential(norm), batch_norm="instance")
    assert type(mended[0]).__name__ == layer.__name__.replace("Batch", "Instance")
    assert torch.equal(mended[0].weight, norm.weight)
    assert (mended[0].eps, mended[0].track_running_stats) == (0.25, False)
    assert "instance norm" in change.why
    assert check(mended).ok


def test_fix_accepts_the_number_of_groups():
    mended, changes = fix(nn.ModuleList([nn.BatchNorm1d(12), nn.BatchNorm2d(9), nn.BatchNorm2d(3)]), num_groups=3)
    assert [type(layer) for layer in mended] == [nn.GroupNorm, nn.GroupNorm, nn.BatchNorm2d]
    assert [layer.num_groups for layer in mended[:2]] == [3, 3]
    assert (changes[2].name, changes[2].after) == ("2", None)
    assert "3 channels cannot be divided into 3 groups" in changes[2].why


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_norm": "layer"}, "'group', 'instance'"),
        ({"num_groups": 0}, "positive"),
        ({"num_groups": 2, "batch_norm": "instance"}, "batch_norm='group' only"),
    ],
)
def test_unknown_arguments_of_fix_are_rejected(kwargs, message):
    with pytest.raises(ValueError, match=message):
        fix(nn.BatchNorm1d(4), **kwargs)


def test_a_model_whose_last_forward_left_tensors_on_it_is_copied():
    def run(m, x):
        m.last = m.norm(x)
        return m.last

    model = Parts(run, norm=nn.BatchNorm1d(4))
    model(torch.randn(3, 4))
    mended, _ = fix(model)
    assert torch.equal(mended.last, model.last)
    assert mended.last is not model.last
    assert mended(torch.randn(3, 4)).grad_fn is not None
