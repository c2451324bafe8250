"""A common interface to each API that makes a model private, and the expected clipped sums.

A test runs the same loop with each API::

    @with_apis(ALL_APIS)
    def test_the_sum_is_right(api):
        found = api.clipped_sum(model, criterion, (inputs, targets), max_grad_norm)
        assert_equal(found, true_sum(model, criterion, (inputs, targets), max_grad_norm))

Noise is off by default, and a batch is the whole data set: `fixed_loader` returns every index once, in one batch.
Inputs are a tensor, a tuple of positional or a dict of keyword inputs.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from reference import clipped_sum, per_sample_gradients, stacked
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpengine

OPACUS = "dpengine.compat.opacus"  # "opacus" here runs the tests of compat on Opacus itself
SLACK = 2.0**-20  # relative reduction of the clipping norm that leaves room for rounding
BOUND = 1 + 1e-5  # largest contribution of one sample, relative to the clipping norm


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


@dataclass
class PrivateRun:
    """Objects of one private run.

    Attributes:
        engine: The privacy engine.
        module: The first value of ``make_private``: the model itself, a wrapper, or a hooks object.
        model: The module that the loop calls.
        bare: The user's own module, whose parameters are trained.
        optimizer: The private optimizer.
        criterion: The criterion of the loop: the one that ``make_private`` returned, or the user's own.
        loader: The private loader.
        size: The divisor of the sum in ``p.grad``.
        writes: True if the loop must write ``p.grad_sample`` itself.
    """

    engine: Any
    module: Any
    model: nn.Module
    bare: nn.Module
    optimizer: Any
    criterion: Callable[..., Any]
    loader: DataLoader
    size: float
    writes: bool = False

    def backward(self, inputs: Any, targets: Tensor) -> None:
        """Runs forward and backward, or writes ``p.grad_sample`` if the loop must do so."""
        if not self.writes:
            self.criterion(run(self.model, inputs), targets).backward()
            return
        rows = per_sample_gradients(self.bare, self.criterion, as_inputs(inputs), targets)
        each = stacked(rows) if rows else {}
        for name, p in trainable(self.bare).items():
            p.grad_sample = each[name].to(p.dtype) if rows else p.new_zeros(0, *p.shape)

    def step(self, inputs: Any, targets: Tensor) -> None:
        """Runs zero_grad, forward, backward and step."""
        self.optimizer.zero_grad()
        self.backward(inputs, targets)
        self.optimizer.step()

    def run(self, inputs: Any, targets: Tensor) -> dict[str, Tensor]:
        """Runs a step on these samples for each batch of the loader, and returns the last clipped sum."""
        for _ in self.loader:
            self.step(inputs, targets)
        return self.sum()

    def sum(self) -> dict[str, Tensor]:
        """Returns the clipped sum of the last step in float64, by parameter name of the user's model."""
        return {name: p.grad.detach().double() * self.size for name, p in trainable(self.bare).items()}


@dataclass(frozen=True)
class Api:
    """An API that makes a model private.

    Attributes:
        id: The name in test ids.
        open: ``(model, loader, *, criterion, max_grad_norm, noise_multiplier, make_optimizer, poisson, **options)``:
            makes the model private, in place if the API does so. Options are passed to its ``make_private``.
        mode: The ``grad_sample_mode``.
        compat: True for Opacus's API.
        writes: True if the loop writes ``p.grad_sample`` itself, so that layers need no hooks.
    """

    id: str
    open: Callable[..., PrivateRun]
    mode: str
    compat: bool = False
    writes: bool = False

    def clipped_sum(
        self,
        model: nn.Module,
        criterion: Callable[..., Any],
        batch: tuple[Any, Tensor],
        max_grad_norm: Any = 1.0,
        *,
        plain: bool = False,
        **options: Any,
    ) -> dict[str, Tensor]:
        """Returns the clipped sum of one step by parameter name; does not change the model.

        ``plain``: the loop calls the user's own criterion even if ``make_private`` returned one.
        """
        private = self.open(
            copy.deepcopy(model),
            fixed_loader(len(batch[1])),
            criterion=criterion,
            max_grad_norm=max_grad_norm,
            **options,
        )
        if plain:
            private.criterion = criterion
        for (rows,) in private.loader:
            assert len(rows) == len(batch[1])
            private.step(*batch)
        return private.sum()


def _default(mode: str) -> Api:
    def open(
        model: nn.Module,
        loader: DataLoader,
        *,
        criterion: Callable[..., Any] | None = None,
        max_grad_norm: Any = 1.0,
        noise_multiplier: float = 0.0,
        make_optimizer: Callable[..., torch.optim.Optimizer] = _sgd,
        poisson: bool = True,
        **options: Any,
    ) -> PrivateRun:
        engine = dpengine.PrivacyEngine(seed=0)
        optimizer = make_optimizer(trainable(model).values())
        options = {"grad_sample_mode": mode, "sampling": "poisson" if poisson else "shuffle", **options}
        settings = {"noise_multiplier": noise_multiplier, "max_grad_norm": max_grad_norm, **options}
        private, optimizer, private_loader = engine.make_private(model, optimizer, loader, **settings)
        criterion = criterion or nn.CrossEntropyLoss()
        return PrivateRun(engine, private, private, model, optimizer, criterion, private_loader, loader.batch_size)

    return Api(f"default-{mode}", open, mode)


def _compat(mode: str, *, wrap: bool = True) -> Api:
    def open(
        model: nn.Module,
        loader: DataLoader,
        *,
        criterion: Callable[..., Any] | None = None,
        max_grad_norm: Any = 1.0,
        noise_multiplier: float = 0.0,
        make_optimizer: Callable[..., torch.optim.Optimizer] = _sgd,
        poisson: bool = False,
        make_engine: Callable[[], Any] | None = None,
        **options: Any,
    ) -> PrivateRun:
        engine = make_engine() if make_engine else opacus().PrivacyEngine()
        criterion = criterion or nn.CrossEntropyLoss()
        found = engine.make_private(
            module=model,
            optimizer=make_optimizer(trainable(model).values()),
            criterion=criterion,
            data_loader=loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            poisson_sampling=poisson,
            grad_sample_mode=mode,
            wrap_model=wrap,
            **options,
        )
        module, optimizer, private_loader = found[0], found[1], found[-1]
        criterion = found[2] if len(found) == 4 else criterion
        called = module if wrap else model
        size = 1 if optimizer.loss_reduction == "sum" else optimizer.expected_batch_size
        return PrivateRun(engine, module, called, model, optimizer, criterion, private_loader, size, mode == "no_op")

    name = f"compat-{mode}" if wrap else f"compat-{mode}-unwrapped"
    return Api(name, open, mode, compat=True, writes=mode == "no_op")


DEFAULT_APIS = [_default(mode) for mode in ("auto", "hooks", "functorch", "ew", "ghost")]
COMPAT_APIS = [
    *(_compat(mode) for mode in ("hooks", "functorch", "ew", "ghost", "no_op")),
    *(_compat(mode, wrap=False) for mode in ("hooks", "functorch", "ghost")),
]
ALL_APIS = [*DEFAULT_APIS, *COMPAT_APIS]
GHOST_APIS = [api for api in COMPAT_APIS if api.mode == "ghost"]
LAYER_APIS = [api for api in ALL_APIS if not api.writes]  # those that compute per-sample gradients of layers


QUICK = ("default-auto", "default-ghost", "compat-hooks", "compat-ghost")

# Each shares its code with an API that runs in the quick or the slow suite.
NIGHTLY = {"default-hooks", "compat-ew", "compat-functorch-unwrapped", "compat-ghost-unwrapped"}


def marks_of(api: Api) -> Any:
    """Returns the marks of tests of an API that is not in the quick suite."""
    return (pytest.mark.slow, pytest.mark.nightly) if api.id in NIGHTLY else pytest.mark.slow


def with_apis(apis: list[Api], *, quick: tuple[str, ...] = QUICK) -> Any:
    """Parametrizes a test with ``api``; APIs outside ``quick`` run in the slow or nightly suite."""
    cases = [pytest.param(api, id=api.id, marks=() if api.id in quick else marks_of(api)) for api in apis]
    return pytest.mark.parametrize("api", cases)


def with_few_apis(apis: list[Api], always: Iterable[str] = ("default-auto", "compat-hooks", "compat-ghost")) -> Any:
    """Parametrizes a test with ``api``; APIs outside ``always`` run in the slow or nightly suite."""
    return with_apis(apis, quick=tuple(always))


def opacus(path: str = "") -> Any:
    """Imports the module at this path below the root package of Opacus's API."""
    return importlib.import_module(f"{OPACUS}.{path}" if path else OPACUS)


def fixed_loader(rows: int, **options: Any) -> DataLoader:
    """Returns a loader over the indices ``0..rows-1``, by default in one batch."""
    return DataLoader(TensorDataset(torch.arange(rows)), **{"batch_size": max(1, rows), **options})


def as_inputs(inputs: Any) -> Any:
    return (inputs,) if isinstance(inputs, Tensor) else inputs


def run(model: nn.Module, inputs: Any) -> Any:
    """Returns the model's output."""
    return model(**inputs) if isinstance(inputs, dict) else model(*as_inputs(inputs))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# Expected sums


def true_sum(
    model: nn.Module,
    criterion: Callable[..., Tensor],
    batch: tuple[Any, Tensor],
    max_grad_norm: float = 1.0,
    *,
    row: Callable[[Any, int], Any] | None = None,
) -> dict[str, Tensor]:
    """Returns the clipped sum of a loop over samples in float64; ``row`` as in ``per_sample_gradients``."""
    inputs, targets = batch
    rows = per_sample_gradients(model, criterion, as_inputs(inputs), targets, row=row)
    return clipped_sum(rows, (1 - SLACK) * max_grad_norm)


def true_sum_by_group(
    model: nn.Module,
    criterion: Callable[..., Tensor],
    batch: tuple[Any, Tensor],
    bounds: dict[str, float],
    group_of: Callable[[str], str] = lambda name: name,
) -> dict[str, Tensor]:
    """Returns ``true_sum`` with a separate clipping norm for each parameter group; ``bounds`` lists them by group."""
    rows = per_sample_gradients(model, criterion, as_inputs(batch[0]), batch[1])
    names = list(rows[0])
    total = {}
    for group, bound in bounds.items():
        mine = [name for name in names if group_of(name) == group]
        total |= clipped_sum([{name: one[name] for name in mine} for one in rows], (1 - SLACK) * bound)
    return {name: total[name] for name in names}


def as_vector(total: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten().double() for t in total.values()])


def assert_equal(found: dict[str, Tensor], truth: dict[str, Tensor], *, rtol: float = 1e-5) -> None:
    """Asserts equality relative to the norm of the expected sum, which must not be zero."""
    assert found.keys() == truth.keys()
    scale = float(as_vector(truth).norm())
    assert scale > 0
    worst = {name: float((found[name] - truth[name]).norm()) / scale for name in truth}
    assert max(worst.values()) < rtol, worst


def assert_run_is_right(
    private: PrivateRun, batch: tuple[Any, Tensor], max_grad_norm: float = 1.0, *, rtol: float = 1e-5
) -> None:
    """Asserts that a step gives the clipped sum of a loop over these samples."""
    truth = true_sum(private.bare, nn.CrossEntropyLoss(), batch, max_grad_norm)
    assert_equal(private.run(*batch), truth, rtol=rtol)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_unmoved(model: nn.Module, before: dict[str, Tensor]) -> None:
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def without(tree: Any, row: int, rows: int) -> Any:
    """Removes one sample from every tensor whose axis 0 has size ``rows``."""
    if isinstance(tree, Tensor):
        return torch.cat([tree[:row], tree[row + 1 :]]) if tree.dim() and len(tree) == rows else tree
    if isinstance(tree, dict):
        return {key: without(value, row, rows) for key, value in tree.items()}
    return type(tree)(without(value, row, rows) for value in tree) if isinstance(tree, (tuple, list)) else tree


def largest_contribution(
    sum_of: Callable[[Any, Tensor], dict[str, Tensor]], batch: tuple[Any, Tensor], left_out: Iterable[int] | None = None
) -> float:
    """Largest change of ``sum_of(inputs, targets)`` when a sample (of ``left_out``, if given) is removed."""
    inputs, targets = batch
    rows = len(targets)
    whole = as_vector(sum_of(inputs, targets))
    assert whole.isfinite().all() and whole.norm() > 0  # a zero sum would not change
    return max(
        float((whole - as_vector(sum_of(without(inputs, i, rows), without(targets, i, rows)))).norm())
        for i in (range(rows) if left_out is None else left_out)
    )


def assert_bounded(
    api: Api,
    model: nn.Module,
    criterion: Callable[..., Any],
    batch: tuple[Any, Tensor],
    max_grad_norm: float = 1.0,
    *,
    left_out: Iterable[int] | None = (1, 3),
    **options: Any,
) -> None:
    """Asserts that no sample in ``left_out`` adds more to the sum than the clipping norm."""
    sum_of = lambda *rows: api.clipped_sum(model, criterion, rows, max_grad_norm, **options)  # noqa: E731
    assert largest_contribution(sum_of, batch, left_out) <= max_grad_norm * BOUND
