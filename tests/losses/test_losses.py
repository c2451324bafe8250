"""`dpengine.losses`, and the losses that Hugging Face models compute themselves."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.errors import BatchDependentLossError
from dpengine.losses import causal_lm_loss, per_token_mean

B, T, V = 5, 6, 7


def tokens(masked=True):
    torch.manual_seed(0)
    logits, labels = torch.randn(B, T, V), torch.randint(V, (B, T))
    if masked:
        labels[0, 3:] = labels[1, :2] = labels[2] = -100
    return logits, labels


@pytest.mark.parametrize("shift", [False, True])
def test_each_sample_has_the_mean_over_its_own_tokens(shift):
    logits, labels = tokens()
    found = per_token_mean(logits, labels, shift=shift, reduction="none")
    for i in range(B):
        one = (logits[i, :-1], labels[i, 1:]) if shift else (logits[i], labels[i])
        expected = F.cross_entropy(*one) if i != 2 else torch.zeros(())
        torch.testing.assert_close(found[i], expected)
    torch.testing.assert_close(per_token_mean(logits, labels, shift=shift), found.mean())
    torch.testing.assert_close(per_token_mean(logits, labels, shift=shift, reduction="sum"), found.sum())


def test_the_gradient_of_a_sample_does_not_depend_on_others():
    logits, labels = tokens()
    grads = []
    for others in (labels, labels.clone().index_fill_(0, torch.arange(1, B), -100)):
        leaf = logits.clone().requires_grad_()
        per_token_mean(leaf, others).backward()
        grads.append(leaf.grad[0])
    torch.testing.assert_close(*grads)


def test_a_batch_without_samples_has_loss_0():
    logits = torch.zeros(0, T, V, requires_grad=True)
    loss = per_token_mean(logits, torch.zeros(0, T, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0


def test_half_precision_is_computed_in_float32():
    logits, labels = tokens()
    loss = per_token_mean(logits.bfloat16(), labels)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, per_token_mean(logits.bfloat16().float(), labels))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"labels": torch.zeros(B, T - 1)}, r"got \(5, 6, 7\) and \(5, 5\)"),
        ({"logits": torch.zeros(B, V)}, r"needs logits \(B, T, V\)"),
        ({"reduction": "max"}, "reduction='max' is not known"),
    ],
)
def test_arguments_that_do_not_fit_are_rejected(change, says):
    logits, labels = tokens()
    with pytest.raises(ValueError, match=says):
        per_token_mean(**{"logits": logits, "labels": labels} | change)


@dataclasses.dataclass
class CausalLMOutput:
    """Stands for the output of that name in the library transformers."""

    loss: torch.Tensor
    logits: torch.Tensor


class MaskedLMOutput(CausalLMOutput):
    pass


class LanguageModel(nn.Module):
    """Averages over the labels of the batch, as models of that library do."""

    def __init__(self, kind=CausalLMOutput):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head, self.kind = nn.Embedding(V, 8), nn.Linear(8, V), kind

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        logits, loss = self.head(self.words(input_ids)), None
        if labels is not None:
            shifted = issubclass(self.kind, CausalLMOutput) and self.kind is not MaskedLMOutput
            given = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
            divisor = {"reduction": "mean" if num_items_in_batch is None else "sum"}
            loss = F.cross_entropy(given[0].transpose(1, 2), given[1], **divisor)
            loss = loss if num_items_in_batch is None else loss / num_items_in_batch
        return self.kind(loss, logits)


class Replaceable(LanguageModel):
    """Has a loss that can be replaced, as models of newer versions of that library."""

    @property
    def loss_function(self):
        return vars(self).get("own_loss")

    @loss_function.setter
    def loss_function(self, loss):
        self.own_loss = loss

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        if self.loss_function is None:
            return super().forward(input_ids, labels, num_items_in_batch)
        logits = self.head(self.words(input_ids))
        return self.kind(
            self.loss_function(logits, labels, vocab_size=V, num_items_in_batch=num_items_in_batch), logits
        )


@pytest.fixture
def step(monkeypatch):
    """Returns a function that runs one private step with given labels."""
    for kind in (CausalLMOutput, MaskedLMOutput, LanguageModel, Replaceable):
        monkeypatch.setattr(kind, "__module__", "transformers.modeling")

    def run(labels, loss_of, kind=CausalLMOutput, wrap=lambda model: model, of=LanguageModel):
        model, ids = wrap(of(kind)), torch.randint(V, (B, T))
        objects = model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(ids, labels), B)
        model, optimizer, loader = PrivacyEngine().make_private(*objects, noise_multiplier=1.0, max_grad_norm=1.0)
        optimizer.zero_grad()
        loss_of(model, *next(iter(loader))).backward()
        optimizer.step()

    return run


def own(model, ids, labels):
    return model(ids, labels=labels).loss


def first_masked(count):
    labels = tokens(masked=False)[1]
    labels[:count, 0] = -100
    return labels


@pytest.mark.parametrize(
    ("labels", "kind", "says"),
    [
        (tokens()[1], CausalLMOutput, "different numbers of labels.*labels, shift=True"),
        (tokens()[1], MaskedLMOutput, r"different numbers of labels.*outputs.logits, labels\)"),
        (first_masked(2), MaskedLMOutput, "different numbers of labels"),
    ],
)
def test_a_mean_over_all_labels_of_the_batch_is_rejected(labels, kind, says, step):
    with pytest.raises(BatchDependentLossError, match=says):
        step(labels, own, kind)


class Wrapped(nn.Module):
    """Holds a model of the library, as Lightning modules do, and returns a tuple."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels):
        output = self.model(input_ids, labels)
        return output.loss, output.logits


def test_a_mean_over_all_labels_is_rejected_inside_another_model(step):
    with pytest.raises(BatchDependentLossError, match="different numbers of labels"):
        step(tokens()[1], lambda model, ids, labels: model(ids, labels)[0], wrap=Wrapped)


def test_a_count_of_the_batch_is_rejected(step):
    def loss_of(model, ids, labels):
        return model(ids, labels=labels, num_items_in_batch=labels.numel()).loss

    with pytest.raises(BatchDependentLossError, match="num_items_in_batch="):
        step(tokens(masked=False)[1], loss_of)


@pytest.mark.parametrize("kind", [CausalLMOutput, MaskedLMOutput])
def test_equal_numbers_of_labels_are_accepted(kind, step):
    step(tokens(masked=False)[1], own, kind)


def test_the_first_label_of_a_causal_model_does_not_count(step):
    step(first_masked(2), own, CausalLMOutput)


def test_a_loss_that_is_not_used_is_not_rejected(step):
    def loss_of(model, ids, labels):
        return per_token_mean(model(ids, labels=labels).logits, labels, shift=True)

    step(tokens()[1], loss_of)


def install(model):
    model.loss_function = causal_lm_loss
    return model


def counted(model, ids, labels):
    return model(ids, labels=labels, num_items_in_batch=labels.numel()).loss


@pytest.mark.parametrize("loss_of", [own, counted])
def test_the_loss_that_the_message_names_can_be_installed(loss_of, step):
    with pytest.raises(BatchDependentLossError, match=r"model\.loss_function = dpengine\.losses\.causal_lm_loss\."):
        step(tokens()[1], loss_of, of=Replaceable)
    step(tokens()[1], loss_of, of=Replaceable, wrap=install)


def test_a_model_without_a_place_for_a_loss_names_none(step):
    with pytest.raises(BatchDependentLossError) as seen:
        step(tokens()[1], own)
    assert "loss_function" not in str(seen.value)


@pytest.mark.parametrize("shifted", [False, True])
def test_the_loss_of_a_causal_model_is_the_shifted_mean(shifted):
    logits, labels = tokens()
    given = {"shift_labels": F.pad(labels, (0, 1), value=-100)[:, 1:]} if shifted else {}
    found = causal_lm_loss(logits, labels, vocab_size=V, num_items_in_batch=3, **given)
    torch.testing.assert_close(found, per_token_mean(logits, labels, shift=True))
