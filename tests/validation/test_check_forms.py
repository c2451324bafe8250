"""``check``, ``check_loss`` and ``per_example`` for dict batches, losses inside the model, and time on axis 0."""

import re
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from torch import nn

from dpengine import check, check_loss
from dpengine.errors import BatchDependentLossError, ReductionError
from dpengine.losses import per_token_mean
from dpengine.validation import per_example

WORDS, ROWS, TIME = 9, 4, 6


class Language(nn.Module):
    """Returns a dict with its logits and, given labels, its loss, as models of transformers do."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.words, self.drop, self.head = nn.Embedding(WORDS, 5), nn.Dropout(0.3), nn.Linear(5, WORDS)
        self.reduction = reduction

    def forward(self, input_ids, labels=None):
        logits = self.head(self.drop(self.words(input_ids)))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=self.reduction)
        return {"loss": loss, "logits": logits}


class OnlyLoss(Language):
    def forward(self, input_ids, labels):
        return super().forward(input_ids, labels)["loss"]


def tokens(*, padded=False):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS, (ROWS, TIME), generator=generator)
    labels = ids.clone()
    if padded:
        labels[0, 2:] = -100
    return {"input_ids": ids, "labels": labels}


OWN = [(Language, lambda outputs, batch: outputs["loss"]), (OnlyLoss, lambda outputs, batch: outputs)]


@pytest.mark.parametrize(("make", "loss_fn"), OWN, ids=["dict", "only the loss"])
def test_a_mean_loss_inside_the_model_is_accepted(make, loss_fn):
    report = check(make(), loss_fn, tokens())
    assert report.ok, str(report)
    check_loss(make(), loss_fn, tokens())


@pytest.mark.parametrize(("make", "loss_fn"), OWN, ids=["dict", "only the loss"])
def test_a_token_mean_inside_the_model_is_rejected_and_the_remedy_passes(make, loss_fn):
    report = check(make(), loss_fn, tokens(padded=True))
    assert not report.ok and "mixes samples" in str(report) and "per_token_mean" in str(report)
    with pytest.raises(BatchDependentLossError, match=r"DPE010.*per_token_mean"):
        check_loss(make(), loss_fn, tokens(padded=True))

    def remedy(outputs, batch):
        return per_token_mean(outputs["logits"], batch["labels"])

    batch = tokens(padded=True)
    check_loss(Language(), remedy, ({"input_ids": batch["input_ids"]}, batch))
    assert check(Language(), remedy, batch).ok


def test_a_sum_inside_the_model_is_reported_by_its_name_and_the_remedy_passes():
    loss_fn = OWN[0][1]
    with pytest.raises(ReductionError, match=r'DPE013.*looks like a sum.*loss_reduction="sum"'):
        check_loss(Language("sum"), loss_fn, tokens())
    check_loss(Language("sum"), loss_fn, tokens(), loss_reduction="sum")
    assert check(Language("sum"), loss_fn, tokens(), loss_reduction="sum").ok


class TimeFirst(nn.Module):
    """A recurrent language model over (T, B); ``flat`` outputs are (T * B, V)."""

    def __init__(self, flat=False):
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(WORDS, 5), nn.GRU(5, 5), nn.Linear(5, WORDS)
        self.flat = flat

    def forward(self, ids, hidden=None):
        logits = self.head(self.rnn(self.words(ids), hidden)[0])
        return logits.flatten(0, 1) if self.flat else logits


def cross_entropy(outputs, targets):
    return F.cross_entropy(outputs.reshape(-1, WORDS), targets.reshape(-1))


@pytest.mark.parametrize("hidden", [False, True], ids=["tokens", "tokens and state"])
@pytest.mark.parametrize("flat_outputs", [False, True], ids=["outputs", "flat outputs"])
@pytest.mark.parametrize("flat_targets", [False, True], ids=["targets", "flat targets"])
def test_a_model_with_time_first_is_checked_on_axis_1(flat_outputs, flat_targets, hidden):
    ids = tokens()["input_ids"].t()
    targets = ids.reshape(-1) if flat_targets else ids
    inputs = (ids, torch.zeros(1, ROWS, 5)) if hidden else ids
    model = TimeFirst(flat_outputs)
    report = check(model, cross_entropy, (inputs, targets), batch_first=False)
    assert report.ok, str(report)
    check_loss(model, cross_entropy, (inputs, targets), batch_first=False)


def test_without_batch_first_the_report_names_the_argument():
    ids = tokens()["input_ids"].t()
    assert "batch_first=False" in str(check(TimeFirst(), cross_entropy, (ids, ids)))
    with pytest.raises(ValueError, match="batch_first=False"):
        check(TimeFirst(), cross_entropy, (ids, ids.reshape(-1)))
    with pytest.raises(BatchDependentLossError, match="batch_first=False"):
        check_loss(TimeFirst(), cross_entropy, (ids, ids))


def test_a_layer_that_mixes_samples_on_axis_1_is_named():
    model = Parts(lambda m, ids: m.norm(m.inner(ids)), inner=TimeFirst(), norm=nn.LayerNorm([ROWS, WORDS]))
    ids = tokens()["input_ids"].t()
    report = check(model, cross_entropy, (ids, ids), batch_first=False)
    assert [finding.name for finding in report.blocked] == ["norm"]


def token_mean(outputs, targets):
    return F.cross_entropy(outputs.reshape(-1, WORDS), targets.reshape(-1), ignore_index=-100)


@pytest.mark.parametrize("flat", [False, True], ids=["targets", "flat targets"])
def test_per_example_is_the_remedy_for_time_first(flat):
    batch = tokens(padded=True)
    ids, targets = batch["input_ids"].t(), batch["labels"].t()
    targets = targets.reshape(-1) if flat else targets
    model = TimeFirst()
    with pytest.raises(BatchDependentLossError, match=r"per_example\(loss_fn, batch_first=False\)"):
        check_loss(model, token_mean, (ids, targets), batch_first=False)
    loss_fn = per_example(token_mean, batch_first=False)
    check_loss(model, loss_fn, (ids, targets), batch_first=False)
    alone = [token_mean(model(ids)[:, i : i + 1], batch["labels"][i]) for i in range(ROWS)]
    torch.testing.assert_close(loss_fn(model(ids), targets), torch.stack(alone).mean())


class Output(NamedTuple):
    loss: torch.Tensor | None
    logits: torch.Tensor


class Named(Language):
    def forward(self, input_ids, labels=None):
        found = super().forward(input_ids, labels)
        return Output(found.get("loss"), found["logits"])


@pytest.mark.parametrize("called", [check, check_loss])
def test_a_model_that_returns_its_loss_without_a_loss_fn_raises_with_the_call(called):
    model, batch = Named(), tokens()
    with pytest.raises(TypeError) as told:
        called(model, None, batch)
    remedy = re.search(r"its loss: (\w+\(.*\)), with a batch that is a dict", str(told.value)).group(1)
    eval(remedy, {"check": check, "check_loss": check_loss, "model": model, "batch": batch})


@pytest.mark.parametrize("called", [check, check_loss])
def test_loss_fn_without_a_loss_raises_and_locates_the_targets(called):
    ids = tokens()["input_ids"]
    with pytest.raises(TypeError, match=r"loss_fn returned NoneType; .*\(\(inputs, targets\), targets\)"):
        called(Named(), lambda outputs, _: outputs.loss, (ids, ids))
    called(Named(), lambda outputs, _: outputs.loss, ((ids, ids), ids))
    with pytest.raises(TypeError, match=r"loss_fn returned a tensor of shape \(4, 6, 9\)"):
        called(Named(), lambda outputs, _: outputs.logits, (ids, ids))
