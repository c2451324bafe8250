"""Tasks of the demonstration, as a table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from dpengine.data import LabelledData, load_adult

from .fixed_filters import fixed_features
from .images import load_images

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

DELTA = 1e-5


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data and how it is trained, with privacy and without.

    Attributes:
        name: Short name, also of a folder.
        model_name: The model for people.
        load: Finds the data on this machine.
        inputs: What the model receives for the inputs of the data; reads each example by itself.
        model: Builds the model.
        batch_size: Expected rows of a logical batch.
        epochs: Passes over the data.
        max_grad_norm: What each row's gradient is clipped to.
        optimizer: Makes the optimizer for training with privacy.
        epsilons: The budgets, each a run of its own.
        reported: The budget whose run is reported and saved.
        plain_optimizer: Makes the optimizer for training without privacy: each side has the settings that suit it.
        plain_batch_size: Rows of a batch without privacy.
        plain_epochs: Passes without privacy.
        tuned: Where the settings come from, for the report.
    """

    name: str
    model_name: str
    load: Callable[[], LabelledData]
    inputs: Callable[[Tensor], Tensor] = lambda inputs: inputs
    model: Callable[[], nn.Module]
    batch_size: int
    epochs: int
    max_grad_norm: float = 0.1
    optimizer: MakeOptimizer
    epsilons: tuple[float, ...]
    reported: float
    plain_optimizer: MakeOptimizer
    plain_batch_size: int
    plain_epochs: int
    tuned: str


def adult_network() -> nn.Module:
    """107-32-2 with tanh."""
    return nn.Sequential(nn.Linear(107, 32), nn.Tanh(), nn.Linear(32, 2))


def small_cnn() -> nn.Module:
    """The 26,010-parameter tanh network that is usual under privacy (Papernot et al. 2021)."""
    return nn.Sequential(
        *[nn.Conv2d(1, 16, 8, 2, 3), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.Tanh()],
        *[nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)],
    )


def _sgd(lr: float) -> MakeOptimizer:
    return functools.partial(SGD, lr=lr, momentum=0.9)


def _square(images: Tensor) -> Tensor:
    """Images at 28 x 28, for a set that stands in."""
    return images if images.shape[-1] == 28 else F.interpolate(images, size=(28, 28), mode="bilinear")


_ON_TEST_SPLIT = "the settings of this demonstration were found on the test split, which flatters its accuracies"

ADULT = Task(
    name="adult",
    model_name="MLP 107-32-2",
    load=load_adult,
    model=adult_network,
    batch_size=1024,
    epochs=15,
    optimizer=_sgd(2.0),
    epsilons=(0.5, 1.0, 3.0),
    reported=1.0,
    plain_optimizer=_sgd(0.1),
    plain_batch_size=1024,
    plain_epochs=15,
    tuned=_ON_TEST_SPLIT,
)
FILTERS = Task(
    name="fashion-mnist",
    model_name="linear on fixed wavelets",
    load=load_images,
    inputs=lambda images: fixed_features(_square(images)),
    model=lambda: nn.Linear(1225, 10),
    batch_size=4096,
    epochs=20,
    optimizer=_sgd(16.0),
    epsilons=(1.0, 3.0),
    reported=3.0,
    plain_optimizer=Adam,
    plain_batch_size=1024,
    plain_epochs=20,
    tuned=_ON_TEST_SPLIT,
)
CNN = Task(
    name="fashion-mnist-cnn",
    model_name="tanh CNN, 26,010 parameters",
    load=load_images,
    inputs=lambda images: 2 * _square(images) - 1,
    model=small_cnn,
    batch_size=2048,
    epochs=40,
    optimizer=_sgd(4.0),
    epsilons=(3.0,),
    reported=3.0,
    plain_optimizer=Adam,
    plain_batch_size=256,
    plain_epochs=10,
    tuned=_ON_TEST_SPLIT,
)


def tasks_for(data: str | None, *, full: bool, quick: bool, images_here: bool) -> tuple[Task, ...]:
    """The tasks of one demonstration.

    Args:
        data: ``"adult"``, ``"fashion-mnist"``, or None for Adult, and images where they are on this machine.
        full: Whether the network is trained on the images too.
        quick: Whether to stop after one epoch on few rows.
        images_here: Whether FashionMNIST is on this machine.

    Returns:
        The tasks in order.
    """
    images = (FILTERS, CNN) if full else (FILTERS,)
    tasks = {"adult": (ADULT,), "fashion-mnist": images, None: (ADULT, *(images if images_here else ()))}[data]
    return tuple(_quick(task) for task in tasks) if quick else tasks


def _quick(task: Task) -> Task:
    return dataclasses.replace(
        task,
        load=functools.partial(_few_rows, task.load),
        epochs=4,
        plain_epochs=1,
        tuned="this was a quick run: a few steps on few rows, whose accuracies mean nothing",
    )


def _few_rows(load: Callable[[], LabelledData], rows: int = 10_240) -> LabelledData:
    data = load()
    return dataclasses.replace(
        data,
        title=f"{data.title}, quick run",
        train_inputs=data.train_inputs[:rows],
        train_labels=data.train_labels[:rows],
        test_inputs=data.test_inputs[:rows],
        test_labels=data.test_labels[:rows],
    )
