"""Tasks of the demonstration."""

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
    """A model, its data, and its settings for training with and without privacy.

    Attributes:
        name: Short name, which is also that of the output folder.
        model_name: Description of the model for readers.
        load: Function that loads the data.
        inputs: Function that transforms the inputs of the model, each example independently.
        model: Function that builds the model.
        batch_size: Expected size of a logical batch.
        epochs: Number of epochs.
        max_grad_norm: Clipping norm.
        optimizer: Function that builds the optimizer for training with privacy.
        epsilons: The budgets. Each is a separate run.
        reported: Budget whose run is reported and saved.
        plain_optimizer: Function that builds the optimizer for training without privacy, with its own settings.
        plain_batch_size: Batch size without privacy.
        plain_epochs: Number of epochs without privacy.
        tuned: Origin of the settings, for the report.
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
    """Returns an MLP 107-32-2 with tanh."""
    return nn.Sequential(nn.Linear(107, 32), nn.Tanh(), nn.Linear(32, 2))


def small_cnn() -> nn.Module:
    """Returns the tanh network with 26,010 parameters of Papernot et al. (2021)."""
    return nn.Sequential(
        *[nn.Conv2d(1, 16, 8, 2, 3), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.Tanh()],
        *[nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)],
    )


def _sgd(lr: float) -> MakeOptimizer:
    return functools.partial(SGD, lr=lr, momentum=0.9)


def _resized(images: Tensor) -> Tensor:
    """Resizes images of a substitute data set to 28 x 28."""
    return images if images.shape[-1] == 28 else F.interpolate(images, size=(28, 28), mode="bilinear")


_ON_TEST_SPLIT = "the settings of this demonstration were chosen on the test split, which makes its accuracies too high"

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
    inputs=lambda images: fixed_features(_resized(images)),
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
    inputs=lambda images: 2 * _resized(images) - 1,
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
    """Returns the tasks of the demonstration.

    Args:
        data: ``"adult"``, ``"fashion-mnist"``, or None for Adult, and images if they are on this machine.
        full: Whether the CNN is also trained on the images.
        quick: Whether to train for a few steps on few examples.
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
        load=functools.partial(_few_examples, task.load),
        epochs=4,
        plain_epochs=1,
        tuned="this was a quick run: a few steps on few examples, whose accuracies are meaningless",
    )


def _few_examples(load: Callable[[], LabelledData], count: int = 10_240) -> LabelledData:
    data = load()
    return dataclasses.replace(
        data,
        title=f"{data.title}, quick run",
        train_inputs=data.train_inputs[:count],
        train_labels=data.train_labels[:count],
        test_inputs=data.test_inputs[:count],
        test_labels=data.test_labels[:count],
    )
