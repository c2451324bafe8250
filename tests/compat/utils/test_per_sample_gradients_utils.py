"""The checker of per-sample gradients under Opacus's names."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from dpengine.compat.opacus.utils import per_sample_gradients_utils as utils
from dpengine.compat.opacus.utils.per_sample_gradients_utils import (
    ModelWithLoss,
    check_per_sample_gradients_are_correct,
    clone_module,
    compute_grad_samples_microbatch_and_opacus,
    compute_microbatch_grad_sample,
    compute_microbatch_grad_sample_tensor_or_seq,
    compute_opacus_grad_sample,
    get_grad_sample_modes,
    is_batch_empty,
    unpack_packedsequences,
)
from dpengine.layers import PrivateLSTM


class LSTMOutputs(nn.Module):
    """The outputs of a recurrent layer without its state."""

    def __init__(self, batch_first):
        super().__init__()
        self.layer = PrivateLSTM(3, 4, batch_first=batch_first)

    def forward(self, x):
        return self.layer(x)[0]


def images():
    return torch.randn(4, 2, 5, 5).to(memory_format=torch.channels_last)


def packed():
    return pack_sequence([torch.randn(length, 3) for length in (2, 5, 3)], enforce_sorted=False)


CASES = {
    "linear": (lambda: nn.Linear(3, 2), lambda: torch.randn(5, 3), True),
    "image": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(27, 2)), images, True),
    "padding-index": (lambda: nn.Embedding(4, 3, padding_idx=1), lambda: torch.arange(8).view(2, 4) % 3, True),
    "batch-second": (lambda: LSTMOutputs(False), lambda: torch.randn(5, 4, 3), False),
    "as-many-times-as-rows": (lambda: nn.Linear(3, 2), lambda: torch.randn(5, 5, 3), False),
    "packed": (lambda: LSTMOutputs(True), packed, True),
}
each_case = pytest.mark.parametrize("make, batch, batch_first", CASES.values(), ids=CASES)
MODES = get_grad_sample_modes(use_ew=True)


@pytest.mark.one_in(2, "mode", others="slow")
@each_case
@pytest.mark.parametrize("mode", MODES)
def test_correct_gradients_pass_the_check_in_every_mode(make, batch, batch_first, mode):
    torch.manual_seed(0)
    model, x = make(), batch()
    assert check_per_sample_gradients_are_correct(x, model, batch_first=batch_first, grad_sample_mode=mode) is True


@each_case
def test_both_results_have_a_gradient_for_each_sample_and_parameter(make, batch, batch_first):
    torch.manual_seed(0)
    model, x = make(), batch()
    alone, together = compute_grad_samples_microbatch_and_opacus(x, model, batch_first=batch_first)
    size = 3 if isinstance(x, PackedSequence) else x.shape[0 if batch_first else 1]
    shapes = {name: (size, *p.shape) for name, p in model.named_parameters()}
    for found in (alone, together):
        assert {name: tuple(gradient.shape) for name, gradient in found.items()} == shapes
        assert any(gradient.abs().max() > 1e-3 for gradient in found.values())


def test_a_wrong_gradient_fails_the_check_for_either_reduction(monkeypatch):
    torch.manual_seed(0)
    right = utils.compute_opacus_grad_sample
    for wrong_reduction in ("mean", "sum"):

        def scaled(x, module, batch_first, loss_reduction, mode, wrong=wrong_reduction):
            found = right(x, module, batch_first, loss_reduction, mode)
            return {name: g * (1.01 if loss_reduction == wrong else 1) for name, g in found.items()}

        monkeypatch.setattr(utils, "compute_opacus_grad_sample", scaled)
        assert check_per_sample_gradients_are_correct(torch.randn(5, 3), nn.Linear(3, 2)) is False
    monkeypatch.setattr(utils, "compute_opacus_grad_sample", right)
    assert check_per_sample_gradients_are_correct(torch.randn(5, 3), nn.Linear(3, 2)) is True


def test_atol_and_rtol_are_absolute_and_relative(monkeypatch):
    true, off = {"p": torch.full((2, 3), 100.0)}, {"p": torch.full((2, 3), 100.5)}
    monkeypatch.setattr(utils, "compute_grad_samples_microbatch_and_opacus", lambda *args: (true, off))
    assert check_per_sample_gradients_are_correct(None, None, atol=0.6, rtol=0.0)
    assert check_per_sample_gradients_are_correct(None, None, atol=0.0, rtol=0.006)
    assert not check_per_sample_gradients_are_correct(None, None, atol=0.006, rtol=0.0)
    assert not check_per_sample_gradients_are_correct(None, None, atol=0.4, rtol=0.0)


def test_samples_may_come_from_a_method_of_the_script():
    torch.manual_seed(0)
    bags = nn.EmbeddingBag(5, 3, mode="sum")
    indices, offsets = torch.tensor([0, 1, 1, 4, 2]), torch.tensor([0, 3, 4])

    def each_bag(x):
        ends = [*x[1].tolist()[1:], len(x[0])]
        for start, end in zip(x[1].tolist(), ends, strict=True):
            yield x[0][start:end], torch.tensor([0])

    alone, together = compute_grad_samples_microbatch_and_opacus((indices, offsets), bags, chunk_method=each_bag)
    torch.testing.assert_close(together["weight"], alone["weight"])
    assert (alone["weight"].abs().sum(-1) > 0).tolist() == [
        [True, True, False, False, False],
        [False, False, False, False, True],
        [False, False, True, False, False],
    ]


def test_single_sequences_have_the_gradients_of_the_packed_one():
    torch.manual_seed(0)
    model, x = LSTMOutputs(True), packed()
    by_rows = compute_microbatch_grad_sample_tensor_or_seq(x, model)
    in_packed_order = compute_microbatch_grad_sample(unpack_packedsequences(x), model)
    for name, gradient in by_rows.items():
        assert torch.equal(gradient[x.sorted_indices], in_packed_order[name])
    tensor = torch.randn(3, 4, 3)
    same = compute_microbatch_grad_sample(tensor, model)
    assert all(torch.equal(g, same[n]) for n, g in compute_microbatch_grad_sample_tensor_or_seq(tensor, model).items())


def test_packed_sequences_are_unpacked_longest_first():
    sequences = [torch.randn(length, 2) for length in (2, 5, 3)]
    found = unpack_packedsequences(pack_sequence(sequences, enforce_sorted=False))
    for one, place in zip(found, (1, 2, 0), strict=True):
        assert torch.equal(one, sequences[place])


def test_the_model_and_the_generators_stay_as_they_were():
    model = nn.Linear(3, 2)
    x, state = torch.randn(4, 3), torch.random.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_per_sample_gradients_are_correct(x, model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.weight.grad is None and not torch.are_deterministic_algorithms_enabled()


def test_frozen_parameters_are_omitted():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    alone, together = compute_grad_samples_microbatch_and_opacus(torch.randn(4, 3), model)
    assert list(alone) == list(together) == ["weight"]


def test_an_empty_batch_is_rejected_and_recognized():
    assert is_batch_empty(torch.zeros(0, 3)) and is_batch_empty([torch.zeros(0), torch.zeros(2)])
    assert not is_batch_empty(torch.zeros(1, 3)) and not is_batch_empty((torch.zeros(2), torch.zeros(0)))
    with pytest.raises(RuntimeError, match="empty"):
        check_per_sample_gradients_are_correct(torch.zeros(0, 3), nn.Linear(3, 2))


def test_the_modes_are_those_that_compute_per_sample_gradients():
    assert get_grad_sample_modes() == ["hooks", "functorch"]
    assert get_grad_sample_modes(use_ew=True) == ["hooks", "functorch", "ew"]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_model_with_loss_reduces_the_losses_of_single_samples(reduction):
    torch.manual_seed(0)
    model = ModelWithLoss(nn.Linear(3, 2), reduction)
    x = torch.randn(4, 3)
    alone = torch.stack([model(x[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(model(x), getattr(alone, reduction)())
    assert model((x,)) == model(x)
    assert reduction in ModelWithLoss.supported_reductions


def test_an_unknown_reduction_is_rejected():
    with pytest.raises(ValueError, match="'none' is unknown"):
        ModelWithLoss(nn.Linear(3, 2), "none")


def test_zero_weights_still_give_nonzero_gradients_except_at_the_padding_index():
    model = nn.Embedding(4, 3, padding_idx=1)
    torch.nn.init.zeros_(model.weight)
    found = compute_opacus_grad_sample(torch.tensor([[1, 2], [0, 1]]), model)["weight"]
    assert (found.abs().sum(-1) > 0).tolist() == [[False, False, True, False], [True, False, False, False]]


def test_clones_are_those_of_module_utils():
    from dpengine.compat.opacus.utils import module_utils

    assert clone_module is module_utils.clone_module
