"""Training loops of the demonstration, with and without privacy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.data import LabelledData
from dpengine.engine.progress import progress
from dpengine.validation import check_loss

from .tasks import DELTA, Task

_CHUNK = 2000  # batch size of evaluation


@dataclass(frozen=True, eq=False)
class Split:
    """Training and test data of a task, as the model receives them."""

    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor


@dataclass(frozen=True, eq=False)
class Outcome:
    """One trained model.

    Attributes:
        model: The model.
        accuracy: Accuracy on the test split.
        seconds: Duration of training, without calibration.
    """

    model: nn.Module
    accuracy: float
    seconds: float


@dataclass(frozen=True, eq=False)
class PrivateOutcome:
    """Results of a private run.

    Attributes:
        trained: The trained model, its accuracy and its duration.
        engine: Engine of the run, with its privacy cost.
        curve: Number of charged steps and epsilon after each epoch.
    """

    trained: Outcome
    engine: PrivacyEngine
    curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class Results:
    """Results of one task.

    Attributes:
        task: The task.
        data: The training data.
        private: The private runs by target epsilon.
        plain: The model that was trained without privacy.
        seed: Seed of the runs; None without a seed.
    """

    task: Task
    data: LabelledData
    private: Mapping[float, PrivateOutcome]
    plain: Outcome
    seed: int | None

    @property
    def reported(self) -> PrivateOutcome:
        """The run whose report and model are written."""
        return self.private[self.task.reported]


@dataclass(eq=False)
class PrivateTraining:
    """Private run that is ready for training."""

    task: Task
    engine: PrivacyEngine
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader
    target_epsilon: float
    device: torch.device

    @property
    def steps(self) -> int:
        """Number of planned steps."""
        return self.task.epochs * len(self.loader)

    def run(self, split: Split) -> PrivateOutcome:
        """Trains until the budget is used up."""
        start = time.monotonic()
        curve: list[tuple[int, float]] = []

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for _ in range(self.task.epochs):
                yield from self.loader
                curve.append((self.engine.ledger.steps, self.engine.epsilon))

        for inputs, labels in progress(self.engine, batches(), target_epsilon=self.target_epsilon, total=self.steps):
            self.optimizer.zero_grad()
            cross_entropy(self.model(inputs.to(self.device)), labels.to(self.device)).backward()
            self.optimizer.step()
        seconds = time.monotonic() - start
        trained = Outcome(self.model, accuracy(self.model, split, self.device), seconds)
        return PrivateOutcome(trained, self.engine, tuple(curve))


def prepare(
    task: Task, split: Split, target_epsilon: float, *, seed: int | None, device: torch.device
) -> PrivateTraining:
    """Makes the training of a task private, with noise calibrated to the target epsilon."""
    torch.manual_seed(seed or 0)  # initial weights are public; the noise does not use this generator
    model = task.model().to(device)
    check_loss(model, cross_entropy, (split.train_inputs[:8].to(device), split.train_labels[:8].to(device)))
    optimizer = task.optimizer(model.parameters())
    data = TensorDataset(split.train_inputs, split.train_labels)
    batch_size = _batch_size(task.batch_size, len(data))
    engine = PrivacyEngine(seed=seed)
    model, optimizer, loader = engine.make_private(
        model,
        optimizer,
        DataLoader(data, batch_size=batch_size, shuffle=True),
        target_epsilon=target_epsilon,
        target_delta=DELTA,
        epochs=task.epochs,
        max_grad_norm=task.max_grad_norm,
        # These constants come from the public documentation of the data, so the guarantee is for add-or-remove.
        sample_rate=batch_size / len(data),
        expected_batch_size=batch_size,
    )
    return PrivateTraining(task, engine, model, optimizer, loader, target_epsilon, device)


def train_without_privacy(task: Task, split: Split, *, seed: int | None, device: torch.device) -> Outcome:
    """Trains the same model without privacy, with its own settings."""
    torch.manual_seed(seed or 0)
    model = task.model().to(device)
    optimizer = task.plain_optimizer(model.parameters())
    data = TensorDataset(split.train_inputs, split.train_labels)
    loader = DataLoader(data, batch_size=_batch_size(task.plain_batch_size, len(data)), shuffle=True)
    start = time.monotonic()
    for _ in range(task.plain_epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
            optimizer.step()
    seconds = time.monotonic() - start
    return Outcome(model, accuracy(model, split, device), seconds)


@torch.no_grad()
def accuracy(model: nn.Module, split: Split, device: torch.device) -> float:
    """Returns the accuracy on the test split."""
    model.eval()
    parts = zip(split.test_inputs.split(_CHUNK), split.test_labels.split(_CHUNK), strict=True)
    correct = sum(int((model(inputs.to(device)).argmax(1).cpu() == labels).sum()) for inputs, labels in parts)
    model.train()
    return correct / len(split.test_labels)


def _batch_size(requested: int, num_examples: int) -> int:
    # For a small substitute data set, an epoch still has at least 8 batches.
    return min(requested, num_examples // 8)
