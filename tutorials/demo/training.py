"""The two training loops of the demonstration. They differ in one call."""

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

_CHUNK = 2000  # rows at once where no gradient is needed


@dataclass(frozen=True, eq=False)
class Split:
    """Data on which a task is trained and evaluated, as the model receives them."""

    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor


@dataclass(frozen=True, eq=False)
class Outcome:
    """One trained model.

    Attributes:
        model: The model.
        accuracy: On the test split.
        seconds: What training took, without calibration.
    """

    model: nn.Module
    accuracy: float
    seconds: float


@dataclass(frozen=True, eq=False)
class PrivateOutcome:
    """Results of a private run.

    Attributes:
        trained: The model.
        engine: Engine of the run, with its privacy cost.
        curve: Steps charged and epsilon after each epoch.
    """

    trained: Outcome
    engine: PrivacyEngine
    curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class Results:
    """All that was trained for one task.

    Attributes:
        task: The task.
        data: What it was trained on.
        private: The private runs by their target.
        plain: The model that was trained without privacy.
        seed: What the runs were seeded with, if they were.
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
    """A private run that is set up, and has not seen a batch."""

    task: Task
    engine: PrivacyEngine
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader
    target_epsilon: float
    device: torch.device

    @property
    def steps(self) -> int:
        """Planned logical batches."""
        return self.task.epochs * len(self.loader)

    def run(self, split: Split) -> PrivateOutcome:
        """Trains to the end of the budget."""
        began = time.monotonic()
        curve: list[tuple[int, float]] = []

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for _ in range(self.task.epochs):
                yield from self.loader
                curve.append((self.engine.ledger.steps, self.engine.epsilon))

        for inputs, labels in progress(self.engine, batches(), target_epsilon=self.target_epsilon, total=self.steps):
            self.optimizer.zero_grad()
            cross_entropy(self.model(inputs.to(self.device)), labels.to(self.device)).backward()
            self.optimizer.step()
        seconds = time.monotonic() - began
        trained = Outcome(self.model, accuracy(self.model, split, self.device), seconds)
        return PrivateOutcome(trained, self.engine, tuple(curve))


def prepare(
    task: Task, split: Split, target_epsilon: float, *, seed: int | None, device: torch.device
) -> PrivateTraining:
    """Makes the training of a task private; the noise is found for the target."""
    torch.manual_seed(seed or 0)  # the first weights are public; the noise has a source of its own
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
        # Constants that anyone can read in the documentation of these data, so add-or-remove holds.
        sample_rate=batch_size / len(data),
        expected_batch_size=batch_size,
    )
    return PrivateTraining(task, engine, model, optimizer, loader, target_epsilon, device)


def train_plainly(task: Task, split: Split, *, seed: int | None, device: torch.device) -> Outcome:
    """Trains the same model without privacy, at the settings that suit that."""
    torch.manual_seed(seed or 0)
    model = task.model().to(device)
    optimizer = task.plain_optimizer(model.parameters())
    data = TensorDataset(split.train_inputs, split.train_labels)
    loader = DataLoader(data, batch_size=_batch_size(task.plain_batch_size, len(data)), shuffle=True)
    began = time.monotonic()
    for _ in range(task.plain_epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
            optimizer.step()
    seconds = time.monotonic() - began
    return Outcome(model, accuracy(model, split, device), seconds)


@torch.no_grad()
def accuracy(model: nn.Module, split: Split, device: torch.device) -> float:
    """Share of the test rows whose label the model finds."""
    model.eval()
    parts = zip(split.test_inputs.split(_CHUNK), split.test_labels.split(_CHUNK), strict=True)
    right = sum(int((model(inputs.to(device)).argmax(1).cpu() == labels).sum()) for inputs, labels in parts)
    model.train()
    return right / len(split.test_labels)


def _batch_size(wanted: int, rows: int) -> int:
    # A set that stands in is small: an eighth of it, so that an epoch still has steps.
    return min(wanted, rows // 8)
