"""An empty batch reaches the loop as one placeholder sample, which contributes nothing to the step."""

import inside
import pytest
import torch
import torch.nn.functional as F
from case_models import model_of
from loops import CLASSES, FEATURES, ROWS, every_mode, examples, gradients_of, make_loop, mlp, state_of
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from dpengine.sampling.collate import placeholder_batch


@model_of(lambda: {"first": nn.Linear(FEATURES, 4), "second": nn.Linear(4, CLASSES)})
def reshaping_model(m, inputs):
    """Reshapes with -1, as many attention layers do; torch rejects -1 for a tensor without elements."""
    hidden = m.first(inputs)
    return m.second(hidden.reshape(len(inputs), -1, 2).flatten(1))


@pytest.mark.one_in(2, "mode", others="slow")
@every_mode
def test_a_model_that_cannot_run_without_samples_trains(mode):
    loop = make_loop(reshaping_model(), batch_size=1, grad_sample_mode=mode, noise_multiplier=1.0)
    sizes = []
    for inputs, targets in loop.loader:
        loop.step(inputs, targets)
        sizes.append(inside.samples_now(loop.engine))
    assert 0 in sizes
    assert loop.engine.ledger.steps == len(sizes)


@pytest.mark.one_in(6, "mode", others="slow")
@pytest.mark.one_in(2, "mode")
@every_mode
def test_a_placeholder_sample_contributes_nothing(mode):
    huge = (torch.full((FEATURES,), 1e3), torch.tensor(1))
    runs = []
    for example in (None, huge, (torch.full((FEATURES,), torch.nan), torch.tensor(1))):
        loop = make_loop(batch_size=1, grad_sample_mode=mode, noise_multiplier=1.0, example_input=example)
        for inputs, targets in loop.loader:
            loop.step(inputs, targets)
            if inside.samples_now(loop.engine) == 0:
                assert loop.engine.metrics(nonprivate=True)["nonprivate/dropped_rows"] == 0
                assert inside.state(loop.engine).largest_norm == 0
        runs.append((state_of(loop.model), loop.engine.ledger.history))
    for state, history in runs[1:]:
        assert history == runs[0][1]
        assert all(torch.equal(runs[0][0][name], value) for name, value in state.items())


@model_of(lambda: {"recurrent": nn.GRU(FEATURES, 4, batch_first=True), "head": nn.Linear(4, CLASSES)})
def lengths_model(m, sequences, lengths):
    """Model of sequences and their lengths, which must be positive."""
    packed = nn.utils.rnn.pack_padded_sequence(sequences, lengths, batch_first=True, enforce_sorted=False)
    return m.head(m.recurrent(packed)[1][-1])


def test_a_model_error_on_a_placeholder_suggests_a_fix():
    sequences, lengths = torch.randn(20, 5, FEATURES), torch.arange(20) % 5 + 1
    data = TensorDataset(sequences, lengths, torch.arange(20) % CLASSES)

    def train(**options):
        loop = make_loop(lengths_model(), dataset=data, batch_size=1, noise_multiplier=1.0, **options)
        for sequences, lengths, targets in loop.loader:
            loop.optimizer.zero_grad()
            F.cross_entropy(loop.model(sequences, lengths), targets).backward()
            loop.optimizer.step()
        return loop.engine.ledger.steps

    with pytest.raises(RuntimeError, match="greater than 0") as seen:
        train()
    assert "No sample was drawn" in seen.value.__notes__[0] and "example_input=" in seen.value.__notes__[0]
    assert train(example_input=data[0]) == 20


def test_a_model_error_on_real_samples_has_no_placeholder_note():
    loop = make_loop(batch_size=ROWS, sample_rate=1.0, noise_multiplier=1.0)
    ((inputs, _),) = loop.loader
    with pytest.raises(RuntimeError) as seen:
        loop.model(inputs[:, 1:])
    assert not hasattr(seen.value, "__notes__")


def test_adaptive_clipping_ignores_the_placeholder():
    norms = []
    for example in (None, (torch.full((FEATURES,), 1e3), torch.tensor(1))):
        loop = make_loop(batch_size=1, clipping="adaptive", noise_multiplier=1.0, example_input=example)
        for inputs, targets in loop.loader:
            loop.step(inputs, targets)
        norms.append(loop.optimizer.max_grad_norm)
    assert norms[0] == norms[1]


def test_per_sample_losses_accept_the_placeholder():
    loop = make_loop(batch_size=1)
    for inputs, targets in loop.loader:
        loop.optimizer.zero_grad()
        loop.engine.backward(F.cross_entropy(loop.model(inputs), targets, reduction="none"))
        loop.optimizer.step()
        if inside.samples_now(loop.engine) == 0:
            assert all(not gradient.any() for gradient in gradients_of(loop.model).values())


def test_a_second_backward_over_a_placeholder_raises():
    loop = make_loop(batch_size=1)
    for inputs, targets in loop.loader:
        if inside.samples_now(loop.engine) == 0:
            break
        loop.step(inputs, targets)
    loop.optimizer.zero_grad()
    loop.backward(inputs, targets)
    with pytest.raises(RuntimeError, match="DPE017"):
        loop.backward(inputs, targets)


@pytest.mark.slow
def test_a_compiled_pass_drops_the_placeholder():
    loop, plain = (make_loop(batch_size=1, noise_multiplier=1.0, compile=one) for one in ("eager", False))
    for one in (loop, plain):
        for inputs, targets in one.loader:
            one.step(inputs, targets)
    for name, value in state_of(plain.model).items():
        torch.testing.assert_close(state_of(loop.model)[name], value)


class CustomBatch:
    def __init__(self, rows):
        self.inputs = torch.stack([row[0] for row in rows])
        self.targets = torch.stack([row[1] for row in rows])


class ExampleDataset(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return examples()[index]


def test_a_batch_type_of_unknown_structure_trains_if_an_example_is_given():
    from dpengine import PrivacyEngine

    loader = torch.utils.data.DataLoader(ExampleDataset(), batch_size=1, collate_fn=CustomBatch)

    def private(**options):
        model, engine = mlp(), PrivacyEngine(seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, *engine.make_private(model, optimizer, loader, noise_multiplier=1.0, **options)[1:]

    with pytest.raises(
        RuntimeError,
        match=r"DPE004.*CustomBatch cannot be created for batch\. .*or pass example_input=, a fictitious example",
    ):
        private()
    model, optimizer, batches = private(example_input=(torch.zeros(FEATURES), torch.tensor(0)))
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()


def test_a_placeholder_holds_no_value_of_an_example():
    rows = {"image": torch.ones(2, 3), "boxes": [torch.ones(4)], "name": "Ann", "meta": {"id": 17}, "label": 3}

    def collate(batch):
        return {
            "image": torch.stack([row["image"] for row in batch]),
            "boxes": [row["boxes"] for row in batch],
            "name": [row["name"] for row in batch],
            "meta": [row["meta"] for row in batch],
            "label": torch.tensor([row["label"] for row in batch]),
            "task": "detection",
        }

    found = placeholder_batch(collate, rows)
    assert found["image"].shape == (1, 2, 3) and not found["image"].any()
    assert len(found["boxes"]) == 1 and not found["boxes"][0][0].any()
    assert (found["name"], found["meta"], found["label"].tolist()) == ([""], [{"id": 0}], [0])
    assert found["task"] == "detection"
    assert placeholder_batch(collate, rows, public=True)["name"] == ["Ann"]
