"""Tasks of the demonstration, selection of the device, and formatted output."""

import dataclasses

import pytest
import torch

from dpengine.data import LabelledData
from tutorials.demo import tasks, training
from tutorials.demo.devices import best_device, device_text
from tutorials.demo.screen import WIDTH, line, table
from tutorials.demo.tasks import ADULT, CNN, FILTERS, small_cnn, tasks_for
from tutorials.demo.training import Split, accuracy, prepare, train_without_privacy


def test_the_network_for_images_has_the_size_that_is_usual_in_papers():
    assert sum(parameter.numel() for parameter in small_cnn().parameters()) == 26_010


@pytest.mark.parametrize(
    ("data", "full", "here", "expected"),
    [
        (None, False, False, [ADULT]),
        (None, False, True, [ADULT, FILTERS]),
        (None, True, True, [ADULT, FILTERS, CNN]),
        ("adult", True, True, [ADULT]),
        ("fashion-mnist", False, False, [FILTERS]),
        ("fashion-mnist", True, True, [FILTERS, CNN]),
    ],
)
def test_the_tasks_follow_from_the_options(data, full, here, expected):
    assert list(tasks_for(data, full=full, quick=False, images_here=here)) == expected


@pytest.mark.slow
def test_quick_tasks_are_short_and_labeled():
    quick = tasks_for(None, full=True, quick=True, images_here=True)
    for task in quick:
        assert task.epochs * 10_240 <= 10 * task.batch_size * task.epochs  # a few steps an epoch
        assert "quick" in task.tuned
    data = quick[0].load()
    assert "quick run" in data.title
    assert len(data.train_labels) == 10_240


def fake_images(side=28, rows=64):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(rows) % 10
    inputs = torch.rand(rows, 1, side, side, generator=generator) * 0.2 + labels.view(-1, 1, 1, 1) / 12
    return LabelledData(
        name="fake",
        title="Fake",
        train_inputs=inputs,
        train_labels=labels,
        test_inputs=inputs,
        test_labels=labels,
        classes=10,
        source="",
        licence="",
        sha256={},
    )


@pytest.mark.parametrize("task", [FILTERS, CNN], ids=lambda task: task.name)
@pytest.mark.parametrize("side", [28, 8])
def test_each_model_accepts_its_inputs_and_those_of_its_small_data_set(task, side):
    assert task.model()(task.inputs(fake_images(side).train_inputs)).shape == (64, 10)


@pytest.mark.parametrize("task", [FILTERS, CNN], ids=lambda task: task.name)
def test_inputs_of_a_sample_do_not_depend_on_other_samples(task):
    images = fake_images().train_inputs
    assert torch.allclose(task.inputs(images)[5], task.inputs(images[5:6])[0], atol=1e-5)


def test_a_private_run_keeps_its_budget_and_its_constants_are_declared():
    task = dataclasses.replace(CNN, epochs=2, batch_size=8)
    data, device = fake_images(), torch.device("cpu")
    split = Split(task.inputs(data.train_inputs), data.train_labels, task.inputs(data.test_inputs), data.test_labels)
    training = prepare(task, split, 4.0, seed=1, device=device)
    outcome = training.run(split)
    assert training.steps == 16
    assert outcome.engine.ledger.steps == 16
    assert 3.9 < outcome.engine.epsilon <= 4.0
    assert [step for step, _ in outcome.curve] == [8, 16]
    assert outcome.engine.describe()["relation"] == "add-or-remove-one"


def test_accuracy_counts_over_all_chunks(monkeypatch):
    inputs, labels = torch.eye(3)[torch.arange(9) % 3], torch.arange(9) % 3
    labels[:3] = 0  # the identity misclassifies samples 1 and 2
    split = Split(inputs, labels, inputs, labels)
    monkeypatch.setattr(training, "_CHUNK", 4)
    assert accuracy(torch.nn.Identity(), split, torch.device("cpu")) == pytest.approx(7 / 9)


@pytest.mark.slow
def test_training_without_privacy_learns():
    task = dataclasses.replace(FILTERS, plain_epochs=40)
    data = fake_images()
    split = Split(task.inputs(data.train_inputs), data.train_labels, task.inputs(data.test_inputs), data.test_labels)
    assert train_without_privacy(task, split, seed=0, device=torch.device("cpu")).accuracy > 0.8


def test_delta_is_below_one_over_the_size_of_every_dataset():
    assert tasks.DELTA < 1 / 60_000


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"),
    [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_device_preference_is_cuda_mps_cpu(monkeypatch, cuda, mps, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert best_device().type == expected


def test_a_device_is_shown_with_its_name_and_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert device_text(torch.device("cpu")) == f"cpu ({torch.get_num_threads()} threads)"
    assert device_text(torch.device("cuda")) == "cuda (Some GPU)"
    assert device_text(torch.device("mps")) == "mps"


def test_a_table_is_framed_and_aligned():
    assert table(("run", "ε"), [("private", "0.50"), ("x", "∞")], "<^").splitlines() == [
        "┌─────────┬──────┐",
        "│   run   │  ε   │",
        "├─────────┼──────┤",
        "│ private │ 0.50 │",
        "│ x       │  ∞   │",
        "└─────────┴──────┘",
    ]


def test_a_line_has_its_figure_at_the_right_edge():
    text = line("training", "6.1 s")
    assert len(text) == WIDTH
    assert text.startswith("training ")
    assert text.endswith(" 6.1 s")


def test_a_long_line_keeps_its_figure():
    assert line("x" * WIDTH, "6.1 s") == "x" * WIDTH + "  6.1 s"
    assert line("alone") == "alone"
