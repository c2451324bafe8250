"""One step of each library: the same model, batch, clipping norm and SGD for all, as their documentation says.

Peers are imported where they are used; ``pip install -r benchmarks/requirements.txt`` brings them. None is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cells import Batch, Cell
from benchmarks.jax_process import jax_runner
from benchmarks.runner import Build, Runner, Setting, fastest, layers_of, microbatch_sizes, trainable

OUR_MODES = ("auto", "hooks", "ghost", "ew", "functorch")
OPACUS_MODES = ("hooks", "functorch", "ew", "ghost")


@dataclass(frozen=True)
class Contender:
    """A way to make a step.

    Attributes:
        build: Prepares it.
        tolerance: How far, relatively, the clipped sum may be from the loop over single rows.
        overshoot: How far, relatively, the norm of what one row adds may be above the threshold, where that is gated.
        keeps_rows: Whether a gradient for each row and parameter is held at once.
        groups: What is clipped together under ``clipping="per_layer"``: ``"layer"``, ``"parameter"``, or nothing.
        baseline: The contender that is the same without privacy.
        gate_rows: Rows of the gate's batch, None for that which is timed; for those who step while they are built.
    """

    build: Build
    tolerance: float = 1e-4
    overshoot: float | None = None
    keeps_rows: bool = False
    groups: str | None = None
    baseline: str = "plain"
    gate_rows: int | None = None


def _loss(model: Callable[..., Any], criterion: Callable[..., Any], batch: Batch, setting: Setting) -> Any:
    with torch.autocast(setting.device, torch.bfloat16, enabled=setting.autocast):
        return criterion(model(batch[0]), batch[1])


def plain(cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> Runner:
    """The ordinary step."""
    criterion, optimizer = cell.loss(), torch.optim.SGD(trainable(model).values(), lr=setting.rate)

    def step() -> None:
        optimizer.zero_grad()
        _loss(model, criterion, batch, setting).backward()
        optimizer.step()

    return Runner(step, lambda: trainable(model))


def batch_returner(engine: Any, rows: int) -> Callable[[], None]:
    """Returns a function that acts as a private loader which returns a logical batch of ``rows`` samples.

    It reads internals of the engine: of this version, and of the baseline of `benchmarks.revisions`.
    """
    from dpengine.sampling import batches

    run, steps = engine.runs[-1], iter(range(10**9))
    if hasattr(run, "step"):
        return lambda: run.step.batch_returned(batches.LogicalBatch(next(steps), (rows,)), 0)
    return lambda: run.release.handed_out(batches.Ticket(next(steps), (rows,)), 0)


def ours(mode: str, **books: Any) -> Build:
    """The same loop after ``make_private``; `batch_returner` acts as the loader.

    Args:
        mode: The ``grad_sample_mode``.
        books: The engine's ``ledger`` and ``reserve_steps``.

    Returns:
        What prepares it.
    """

    def build(cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> Runner:
        import dpengine

        criterion, optimizer = cell.loss(), torch.optim.SGD(trainable(model).values(), lr=setting.rate)
        rows = len(batch[0])
        data = torch.utils.data.TensorDataset(torch.zeros(max(rows, 10_000), 1))
        engine = dpengine.PrivacyEngine(**books)
        engine.make_private(
            model,
            optimizer,
            torch.utils.data.DataLoader(data, batch_size=rows),
            noise_multiplier=setting.sigma,
            max_grad_norm=setting.max_norm,
            clipping=cell.clipping,
            grad_sample_mode=mode,
        )
        return_batch = batch_returner(engine, rows)

        def step() -> None:
            return_batch()
            optimizer.zero_grad()
            _loss(model, criterion, batch, setting).backward()
            optimizer.step()

        return Runner(step, lambda: trainable(model))

    return build


def torch_func(cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> Runner:
    """The loop that one writes by hand: ``vmap`` over ``torch.func.grad``, in chunks as large as those of dpengine."""
    from torch.func import functional_call, grad, vmap
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from dpengine.grad_samplers.per_sample_forward import chunk_size_for

    criterion, optimizer = cell.loss(), torch.optim.SGD(trainable(model).values(), lr=setting.rate)
    rows = len(batch[0])
    size = chunk_size_for(trainable(model).values(), rows)

    def loss_of_row(parameters: dict[str, Tensor], inputs: Tensor, target: Tensor) -> Tensor:
        row = inputs.unsqueeze(0), target.unsqueeze(0)
        return _loss(lambda x: functional_call(model, parameters, (x,)), criterion, row, setting)

    grads_of = vmap(grad(loss_of_row), in_dims=(None, 0, 0), randomness="different")

    def step() -> None:
        optimizer.zero_grad()
        parameters = {name: p.detach() for name, p in trainable(model).items()}
        sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for chunk in zip(*[tensor.split(size) for tensor in batch], strict=True):
            with sdpa_kernel(SDPBackend.MATH):  # the fused ones have no batching rule
                grads = grads_of(parameters, *chunk)
            norm_B = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
            factor_B = (setting.max_norm / norm_B).clamp(max=1.0)
            for name, g in grads.items():
                sums[name] += (factor_B @ g.flatten(1)).view_as(sums[name])
        for name, p in model.named_parameters():
            if name in sums:
                noise = torch.randn_like(p) * (setting.sigma * setting.max_norm)
                p.grad = (sums[name] + noise) / rows
        optimizer.step()

    return Runner(step, lambda: trainable(model))


def opacus(mode: str) -> Build:
    """Opacus. What it has no layer for is replaced by its ``ModuleValidator``, as its documents say."""

    def build(cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> Runner:
        from opacus import PrivacyEngine
        from opacus.validators import ModuleValidator

        rows = len(batch[0])
        model = model if ModuleValidator.is_valid(model) else ModuleValidator.fix(model).train()
        optimizer = torch.optim.SGD(trainable(model).values(), lr=setting.rate)
        count = len(trainable(model))
        flat = cell.clipping == "flat"
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=rows),
            criterion=cell.loss(),
            noise_multiplier=setting.sigma,
            max_grad_norm=setting.max_norm if flat else [setting.max_norm / count**0.5] * count,
            clipping=cell.clipping,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        wrapped, private = made[0], made[1]
        criterion = made[2] if mode == "ghost" else cell.loss()

        def step() -> None:
            private.zero_grad()
            _loss(wrapped, criterion, batch, setting).backward()
            private.step()

        return Runner(step, lambda: trainable(model))

    return build


def opake(cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> Runner:
    """Opake's ``clipped_grad`` (vmap over ``torch.func.grad``, microbatches) and ``gaussian_noise``."""
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.functional import make_functional
    from opake.pytree import merge
    from opake.random import key
    from opake.types import PerGroup

    criterion = cell.loss()
    call, trained, frozen = make_functional(model, disable_autograd_tracking=True, partition_trainable=True)
    bound: Any = setting.max_norm
    if cell.clipping == "per_layer":
        layers = layers_of(list(trained))
        share = setting.max_norm / len(set(layers)) ** 0.5
        bound = PerGroup(dict(zip(trained, layers, strict=True)), dict.fromkeys(layers, share))

    def loss_of_row(parameters: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        every = merge(frozen, parameters)
        row = inputs.unsqueeze(0), targets.unsqueeze(0)
        return _loss(lambda x: call(every, x), criterion, row, setting)

    def step_with(size: int | None) -> Callable[[], None]:
        rows = len(batch[0])
        grad_of, clip_state = clipped_grad(
            loss_of_row, clipping_norm=bound, batch_argnums=(1, 2), normalize_by=rows, microbatch_size=size
        )
        add_noise, noise_state = gaussian_noise(noise_multiplier=setting.sigma, key=key(0))
        state = {"clip": clip_state, "noise": noise_state}

        def step() -> None:
            grads, state["clip"] = grad_of(trained, *batch, state=state["clip"])
            noisy, state["noise"] = add_noise(grads, state["noise"])
            with torch.no_grad():
                for name, parameter in trained.items():
                    parameter.sub_(noisy.pytree[name], alpha=setting.rate)

        return step

    step = fastest([step_with(size) for size in microbatch_sizes(len(batch[0]), model)], setting.device)
    return Runner(step, lambda: dict(trained))


def backpack(extension: str) -> Build:
    """BackPACK: ``"grad"`` clips gradients of rows; ``"norm"`` takes norms, then goes back with weighted losses."""

    def build(cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> Runner:
        # BackPACK gives gradients or norms for each row; clipping, noise and update are the least that a user writes.
        from backpack import backpack as watching
        from backpack import extend
        from backpack.extensions import BatchGrad, BatchL2Grad

        model = extend(model)
        criterion, parameters = cell.loss(reduction="none"), list(trainable(model).values())
        optimizer = torch.optim.SGD(parameters, lr=setting.rate)

        def known(attribute: str) -> None:
            missing = [name for name, p in trainable(model).items() if not hasattr(p, attribute)]
            if missing:
                raise NotImplementedError(f"has no rule for {len(missing)} parameters, {missing[0]} the first")

        def factors(squared: list[Tensor]) -> Tensor:
            return (setting.max_norm / torch.stack(squared).sum(dim=0).sqrt()).clamp(max=1.0)

        def clip_gradients(losses_B: Tensor) -> None:
            with watching(BatchGrad()):
                losses_B.sum().backward()
            known("grad_batch")
            factor_B = factors([p.grad_batch.flatten(1).square().sum(dim=1) for p in parameters])
            for p in parameters:
                p.grad = (factor_B @ p.grad_batch.flatten(1)).view_as(p)
                del p.grad_batch

        def weigh_losses(losses_B: Tensor) -> None:
            with watching(BatchL2Grad()):
                losses_B.sum().backward(retain_graph=True)
            known("batch_l2")
            factor_B = factors([p.batch_l2 for p in parameters])
            optimizer.zero_grad()
            (factor_B * losses_B).sum().backward()

        clip = {"grad": clip_gradients, "norm": weigh_losses}[extension]

        def step() -> None:
            optimizer.zero_grad()
            clip(_loss(model, criterion, batch, setting))
            for p in parameters:
                p.grad.add_(torch.randn_like(p), alpha=setting.sigma * setting.max_norm).div_(len(batch[0]))
            optimizer.step()

        return Runner(step, lambda: trainable(model))

    return build


def _our(mode: str) -> Contender:
    keeps = mode in ("hooks", "functorch", "ew", "whole_model")
    return Contender(ours(mode), tolerance=1e-5, overshoot=1e-6, keeps_rows=keeps, groups="layer")


CONTENDERS: dict[str, Contender] = {
    "plain": Contender(plain, groups="layer"),
    **{f"dpengine {mode}": _our(mode) for mode in (*OUR_MODES, "whole_model")},
    "torch.func": Contender(torch_func, keeps_rows=True),
    **{f"opacus {m}": Contender(opacus(m), keeps_rows=m != "ghost", groups="parameter") for m in OPACUS_MODES},
    "opake": Contender(opake, groups="layer", gate_rows=4),
    "backpack grad": Contender(backpack("grad"), keeps_rows=True),
    "backpack norm": Contender(backpack("norm")),
    "jax plain": Contender(jax_runner(private=False)),
    "jax-privacy": Contender(jax_runner(private=True), baseline="jax plain", gate_rows=4),
}
BASELINES = ("plain", "jax plain")  # not private, so not gated

LABELS: dict[tuple[str, str], str] = {
    ("opacus", "bert-per-layer"): "clips each parameter alone, not each layer: another mechanism",
}
"""(beginning of a contender's name, cell): what is timed but not counted as a sound peer, and why."""

NOT_RUN = {
    "fastDP": "no release on PyPI; unsound with tied or reused weights, ignores groups of convolutions",
    "private-transformers": "no release on PyPI; only for models of an old `transformers`",
    "FlashDP": "no release on PyPI; per-layer clipping only, and its code takes bias norms over the wrong axes",
}
"""Peers of the literature that no cell can time here, and why."""


def start(cell: Cell, contender: str, setting: Setting) -> Runner:
    """A contender with a whole batch and a model that all contenders begin with."""
    torch.manual_seed(0)
    inputs, targets = cell.batch(cell.rows)
    batch = (inputs.to(setting.device), targets.to(setting.device))
    return CONTENDERS[contender].build(cell, cell.make().to(setting.device), batch, setting)


def label(contender: str, cell: str) -> str | None:
    """Returns the reason for which a contender does not count in a cell, or None."""
    return next((why for (name, where), why in LABELS.items() if where == cell and contender.startswith(name)), None)
