"""Audited training setups, reproducible runs of them, and a small built-in setup."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

from dpengine.engine.privacy_engine import PrivacyEngine

LossOf = Callable[[nn.Module, Any], Tensor]
"""``loss_of(model, batch)``: forward pass and loss of one batch."""

OMITTED = object()
"""Value of an option that is not passed."""


class Subject(NamedTuple):
    """Audited training setup. A tuple of four or five elements is accepted as well.

    Attributes:
        model: New model, before ``make_private``.
        optimizer: Optimizer of the model's parameters.
        loader: Data loader of the training data.
        loss_of: ``loss_of(model, batch)`` is the scalar loss of a batch.
        options: Arguments of ``make_private``.
    """

    model: nn.Module
    optimizer: Optimizer
    loader: DataLoader
    loss_of: LossOf
    options: Mapping[str, Any] = {}


Maker = Callable[[], Any]
"""Returns a new `Subject` or tuple at each call. It is called dozens of times, so create the data set outside."""


class IndexRecorder(torch.utils.data.Dataset):
    """Data set that records the indices of the examples read."""

    def __init__(self, dataset: Any, *, widen: bool = False):
        self._dataset = dataset
        self._widen = widen
        self._read: list[int] = []

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        self._read.append(index)
        example = self._dataset[index]
        return in_double(example) if self._widen else example

    def pop_indices(self) -> list[int]:
        """Returns the indices read since the last call."""
        read, self._read = self._read, []
        return read


@dataclasses.dataclass(frozen=True)
class Step:
    """One logical batch."""

    drawn: tuple[int, ...]  # indices of its examples
    release: dict[str, Tensor]  # float64 ``p.grad`` by parameter name after ``optimizer.step()``
    std: float  # planned standard deviation of the noise, in units of the sum
    bounds: tuple[float, ...]  # clipping norms
    sensitivity: float  # sensitivity of the sum to one unit

    @property
    def flat(self) -> Tensor:
        """The release as one vector."""
        return torch.cat([grad.flatten() for grad in self.release.values()]) if self.release else torch.zeros(0)


class Trial:
    """Reproducible run of a subject, with seeded batches, noise and weights, and without dropout."""

    def __init__(
        self,
        make: Maker,
        *,
        seed: int = 0,
        dataset: Any = None,
        changes: Mapping[str, Any] | None = None,
        double: bool = False,
        prepare: Callable[[nn.Module], Any] | None = None,
        engine: PrivacyEngine | None = None,
    ):
        subject = new_subject(make)
        self.subject = subject
        model = subject.model.double() if double else subject.model
        without_dropout(model)
        if prepare is not None:
            prepare(model)
        self.data = IndexRecorder(subject.loader.dataset if dataset is None else dataset, widen=double)
        options = {**subject.options, **(changes or {})}
        self.options = {name: value for name, value in options.items() if value is not OMITTED}
        batch_size = subject.loader.batch_size or 1
        loader = DataLoader(
            self.data,
            batch_size=min(batch_size, max(1, len(self.data))),
            collate_fn=subject.loader.collate_fn,
        )
        self.engine = PrivacyEngine(seed=seed) if engine is None else engine
        with quiet():
            private = self.engine.make_private(model, subject.optimizer, loader, **self.options)
            self.model, self.optimizer = private[:2]
            self.loader: Any = private[2]
        self.loss_of = subject.loss_of
        self._weights = [p.detach().clone() for p in model.parameters()]
        self.data.pop_indices()

    @property
    def step(self) -> Any:
        """The private step of this run."""
        return self.engine.runs[-1].step

    @property
    def plan(self) -> Any:
        """The plan of this run."""
        return self.step.plan

    @property
    def divisor(self) -> float:
        """Declared divisor of the sum."""
        if self.options.get("plan") is not None:
            return float(self.plan.expected_batch_size)
        if self.options.get("loss_reduction", "mean") == "sum":
            return 1.0
        declared = self.options.get("expected_batch_size")
        return float(self.plan.expected_batch_size if declared is None else declared)

    @property
    def sensitivity(self) -> float:
        """Declared sensitivity of the sum to one unit."""
        max_grad_norm = self.options.get("max_grad_norm")
        if isinstance(self.options.get("clipping", "flat"), str) and self.options.get("clipping") != "adaptive":
            if isinstance(max_grad_norm, (int, float)):
                return float(max_grad_norm)
            if isinstance(max_grad_norm, (list, tuple)):
                return math.hypot(*max_grad_norm)
        return float(self.plan.clipping.sensitivity())

    @property
    def noise_multiplier(self) -> float:
        """Declared noise multiplier."""
        declared = self.options.get("noise_multiplier")
        return float(self.plan.noise_multiplier if declared is None else declared)

    @property
    def std(self) -> float:
        """Declared standard deviation of the noise on the next sum."""
        sigma = self.plan.clipping.gradient_noise_multiplier(self.noise_multiplier)
        return float(sigma * self.sensitivity)

    @property
    def rounding(self) -> float:
        """Machine epsilon of the least precise dtype of the trainable parameters."""
        dtypes = {p.dtype for p in self.model.parameters() if p.requires_grad}
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)

    def passes(self, number: int) -> list[Step]:
        """Runs ``number`` passes over the loader, and returns their steps."""
        return [step for _ in range(number) for step in self._pass(1.0, True)]

    def steps(self, number: int, *, scale: float = 1.0, hold: bool = True) -> list[Step]:
        """Runs ``number`` steps, or fewer if an epoch has none. ``hold`` restores the weights after each step."""
        steps: list[Step] = []
        while len(steps) < number:
            before = len(steps)
            for step in self._pass(scale, hold):
                steps.append(step)
                if len(steps) == number:
                    break
            if len(steps) == before:
                break
        return steps

    def _pass(self, scale: float, hold: bool) -> Iterator[Step]:
        with quiet():
            drawn: list[int] = []
            for batch in self.loader:
                drawn += self.data.pop_indices()
                declared = self.std, tuple(self.plan.clipping.bounds), self.sensitivity
                self.optimizer.zero_grad()
                self.backward(batch, scale)
                self.optimizer.step()
                if self.optimizer.step_was_skipped:  # type: ignore[attr-defined]
                    continue
                yield Step(tuple(drawn), self.gradients(), *declared)
                drawn = []
                if hold:
                    self.restore_weights()

    def backward(self, batch: Any, scale: float = 1.0) -> None:
        """Runs the backward pass of one batch."""
        loss = self.loss_of(self.model, batch)
        (loss * scale if scale else (loss * 0.0).nan_to_num(0.0)).backward()

    def gradients(self) -> dict[str, Tensor]:
        """Returns a float64 copy of ``p.grad`` of each trainable parameter, zeros if it is None."""
        return {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().cpu().double().clone()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }

    @torch.no_grad()
    def restore_weights(self) -> None:
        """Restores the initial weights."""
        for parameter, weights in zip(self.model.parameters(), self._weights, strict=True):
            parameter.copy_(weights)

    def close(self) -> None:
        """Detaches the engine from the model."""
        self.engine.detach(self.model)


def new_subject(make: Maker) -> Subject:
    """Returns a new subject, initialized with the same seed each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = make()
    if not isinstance(parts, tuple) or not 4 <= len(parts) <= 5 or not isinstance(parts[0], nn.Module):
        raise TypeError(
            f"auditing: make() returned {torch.typename(parts)}. Return a new (model, optimizer, loader, loss_of) at "
            "each call, optionally followed by the arguments of make_private."
        )
    return Subject(*parts)


def without_dropout(model: nn.Module) -> None:
    """Disables dropout in place, because the mask of a sample depends on the batch size."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]


def replace_target(options: Mapping[str, Any], noise_multiplier: float) -> dict[str, Any]:
    """Returns options that replace a target epsilon by a noise multiplier."""
    omitted = {name: OMITTED for name in ("target_epsilon", "epochs", "steps") if name in options}
    return {**omitted, "noise_multiplier": noise_multiplier}


def declare_constants(subject: Subject, rate: float) -> dict[str, Any]:
    """Returns options that declare all constants, so that none depends on the size of the data set."""
    size = subject.options.get("expected_batch_size") or float(subject.loader.batch_size or 1)
    constants = {"sample_rate": rate, "expected_batch_size": size, "target_delta": 1e-3, "allow_large_delta": True}
    return constants | {"example_input": subject.loader.dataset[0]}


def in_double(tree: Any) -> Any:
    """Returns nested values with floating-point tensors in float64."""

    def to_double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(to_double, tree)


quiet = functools.partial(warnings.catch_warnings, action="ignore")
"""Context manager that suppresses warnings, such as those about runs without noise or with few examples."""


_FEATURES, _CLASSES, _NUM_EXAMPLES = 6, 3, 40
OPTIONS = {  # noise multiplier and clipping norm have distinct products, squares and ratios
    "noise_multiplier": 0.8,
    "max_grad_norm": 0.5,
    "sample_rate": 0.15,
    "expected_batch_size": 6.5,
    "target_delta": 1e-3,
}


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Returns the loss of a batch ``(inputs, targets)``."""
    return F.cross_entropy(model(batch[0]), batch[1])


def small_classifier(width: int = 40) -> nn.Module:
    """Returns a model of three linear layers, whose hidden parameters have equal shapes."""
    return nn.Sequential(
        nn.Linear(_FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, _CLASSES)
    )


def small_dataset(number: int = _NUM_EXAMPLES) -> TensorDataset:
    """Returns inputs of very different norms, so that some gradients are clipped and some are not."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(number, _FEATURES, generator=generator)
    inputs *= torch.tensor([1.0, 4.0, 0.1, 15.0]).repeat(-(-number // 4))[:number].unsqueeze(1)
    return TensorDataset(inputs, torch.randint(0, _CLASSES, (number,), generator=generator))


def small(changes: Mapping[str, Any] | None = None, *, width: int = 40, number: int = _NUM_EXAMPLES) -> Maker:
    """Returns a function that creates a small classifier, its data, and the arguments of ``make_private``."""

    def make() -> Subject:
        model = small_classifier(width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(small_dataset(number), batch_size=6)
        return Subject(model, optimizer, loader, cross_entropy, {**OPTIONS, **(changes or {})})

    return make
