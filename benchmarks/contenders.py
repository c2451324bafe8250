"""Steps of each library with the same model, batch, clipping norm and SGD, written as in its documentation.

Peers are optional and imported where they are used: ``pip install -r benchmarks/requirements.txt``.
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
    """Implementation of a step, and limits of its errors.

    Attributes:
        build: Function that prepares the step.
        tolerance: Largest relative error of the clipped sum compared with a loop over single samples.
        overshoot: Largest relative excess of the norm of one sample over the clipping norm; None for no limit.
        stores_gradients: Whether the per-sample gradients of all parameters are in memory at once.
        groups: Unit of ``clipping="per_layer"``: ``"layer"`` or ``"parameter"``; None if not supported.
        baseline: Name of the same contender without privacy.
        gate_batch_size: Batch size of the gate; None for the timed one. Needed by contenders that step when they are
            built.
    """

    build: Build
    tolerance: float = 1e-4
    overshoot: float | None = None
    stores_gradients: bool = False
    groups: str | None = None
    baseline: str = "plain"
    gate_batch_size: int | None = None


def _loss(model: Callable[..., Any], criterion: Callable[..., Any], batch: Batch, setting: Setting) -> Any:
    with torch.autocast(setting.device, torch.bfloat16, enabled=setting.autocast):
        return criterion(model(batch[0]), batch[1])


def plain(cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> Runner:
    """Returns the ordinary step."""
    criterion, optimizer = cell.loss(), torch.optim.SGD(trainable(model).values(), lr=setting.rate)

    def step() -> None:
        optimizer.zero_grad()
        _loss(model, criterion, batch, setting).backward()
        optimizer.step()

    return Runner(step, lambda: trainable(model))


def batch_returner(engine: Any, batch_size: int) -> Callable[[], None]:
    """Returns a function that tells the engine that the loader has returned a logical batch.

    It uses internals of the engine: of this version, and of earlier ones for `benchmarks.revisions`.
    """
    from dpengine.sampling import batches

    run, steps = engine.runs[-1], iter(range(10**9))
    if hasattr(run, "step"):
        return lambda: run.step.batch_returned(batches.LogicalBatch(next(steps), (batch_size,)), 0)
    return lambda: run.release.handed_out(batches.Ticket(next(steps), (batch_size,)), 0)


def ours(mode: str, **options: Any) -> Build:
    """Returns the same loop after ``make_private``; `batch_returner` replaces the loader.

    Args:
        mode: The ``grad_sample_mode``.
        options: Arguments of the engine, ``ledger`` and ``reserve_steps``.

    Returns:
        The function that prepares the step.
    """

    def build(cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> Runner:
        import dpengine

        criterion, optimizer = cell.loss(), torch.optim.SGD(trainable(model).values(), lr=setting.rate)
        batch_size = len(batch[0])
        data = torch.utils.data.TensorDataset(torch.zeros(max(batch_size, 10_000), 1))
        engine = dpengine.PrivacyEngine(**options)
        engine.make_private(
            model,
            optimizer,
            torch.utils.data.DataLoader(data, batch_size=batch_size),
            noise_multiplier=setting.sigma,
            max_grad_norm=setting.max_norm,
            clipping=cell.clipping,
            grad_sample_mode=mode,
        )
        return_batch = batch_returner(engine, batch_size)

        def step() -> None:
            return_batch()
            optimizer.zero_grad()
            _loss(model, criterion, batch, setting).backward()
            optimizer.step()

        return Runner(step, lambda: trainable(model))

    return build


def torch_func(cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> Runner:
    """Returns a hand-written loop: ``vmap`` over ``torch.func.grad``, in chunks of the size that dpengine uses."""
    from torch.func import functional_call, grad, vmap
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from dpengine.grad_samplers.per_sample_forward import chunk_size_for

    criterion, optimizer = cell.loss(), torch.optim.SGD(trainable(model).values(), lr=setting.rate)
    batch_size = len(batch[0])
    size = chunk_size_for(trainable(model).values(), batch_size)

    def sample_loss(parameters: dict[str, Tensor], inputs: Tensor, target: Tensor) -> Tensor:
        sample = inputs.unsqueeze(0), target.unsqueeze(0)
        return _loss(lambda x: functional_call(model, parameters, (x,)), criterion, sample, setting)

    grads_of = vmap(grad(sample_loss), in_dims=(None, 0, 0), randomness="different")

    def step() -> None:
        optimizer.zero_grad()
        parameters = {name: p.detach() for name, p in trainable(model).items()}
        sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for chunk in zip(*[tensor.split(size) for tensor in batch], strict=True):
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no batching rule
                grads = grads_of(parameters, *chunk)
            norm_B = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
            factor_B = (setting.max_norm / norm_B).clamp(max=1.0)
            for name, g in grads.items():
                sums[name] += (factor_B @ g.flatten(1)).view_as(sums[name])
        for name, p in model.named_parameters():
            if name in sums:
                noise = torch.randn_like(p) * (setting.sigma * setting.max_norm)
                p.grad = (sums[name] + noise) / batch_size
        optimizer.step()

    return Runner(step, lambda: trainable(model))


def opacus(mode: str) -> Build:
    """Returns the loop of Opacus. Its ``ModuleValidator`` replaces unsupported layers, as documented."""

    def build(cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> Runner:
        from opacus import PrivacyEngine
        from opacus.validators import ModuleValidator

        batch_size = len(batch[0])
        model = model if ModuleValidator.is_valid(model) else ModuleValidator.fix(model).train()
        optimizer = torch.optim.SGD(trainable(model).values(), lr=setting.rate)
        count = len(trainable(model))
        flat = cell.clipping == "flat"
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=batch_size),
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
    """Returns a loop with ``clipped_grad`` (``vmap`` in microbatches) and ``gaussian_noise`` of Opake."""
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

    def sample_loss(parameters: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        every = merge(frozen, parameters)
        sample = inputs.unsqueeze(0), targets.unsqueeze(0)
        return _loss(lambda x: call(every, x), criterion, sample, setting)

    def step_with(size: int | None) -> Callable[[], None]:
        batch_size = len(batch[0])
        grad_of, clip_state = clipped_grad(
            sample_loss, clipping_norm=bound, batch_argnums=(1, 2), normalize_by=batch_size, microbatch_size=size
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
    """Returns a loop with BackPACK: ``"grad"`` clips per-sample gradients, ``"norm"`` weights the losses."""

    def build(cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> Runner:
        # BackPACK computes per-sample gradients or norms. Clipping, noise and update are the minimum that a user must
        # write.
        from backpack import backpack as extensions
        from backpack import extend
        from backpack.extensions import BatchGrad, BatchL2Grad

        model = extend(model)
        criterion, parameters = cell.loss(reduction="none"), list(trainable(model).values())
        optimizer = torch.optim.SGD(parameters, lr=setting.rate)

        def check_supported(attribute: str) -> None:
            missing = [name for name, p in trainable(model).items() if not hasattr(p, attribute)]
            if missing:
                raise NotImplementedError(f"does not support {len(missing)} parameters, such as {missing[0]}")

        def factors(squared: list[Tensor]) -> Tensor:
            return (setting.max_norm / torch.stack(squared).sum(dim=0).sqrt()).clamp(max=1.0)

        def clip_gradients(losses_B: Tensor) -> None:
            with extensions(BatchGrad()):
                losses_B.sum().backward()
            check_supported("grad_batch")
            factor_B = factors([p.grad_batch.flatten(1).square().sum(dim=1) for p in parameters])
            for p in parameters:
                p.grad = (factor_B @ p.grad_batch.flatten(1)).view_as(p)
                del p.grad_batch

        def weigh_losses(losses_B: Tensor) -> None:
            with extensions(BatchL2Grad()):
                losses_B.sum().backward(retain_graph=True)
            check_supported("batch_l2")
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
    stores = mode in ("hooks", "functorch", "ew", "whole_model")
    return Contender(ours(mode), tolerance=1e-5, overshoot=1e-6, stores_gradients=stores, groups="layer")


CONTENDERS: dict[str, Contender] = {
    "plain": Contender(plain, groups="layer"),
    **{f"dpengine {mode}": _our(mode) for mode in (*OUR_MODES, "whole_model")},
    "torch.func": Contender(torch_func, stores_gradients=True),
    **{f"opacus {m}": Contender(opacus(m), stores_gradients=m != "ghost", groups="parameter") for m in OPACUS_MODES},
    "opake": Contender(opake, groups="layer", gate_batch_size=4),
    "backpack grad": Contender(backpack("grad"), stores_gradients=True),
    "backpack norm": Contender(backpack("norm")),
    "jax plain": Contender(jax_runner(private=False)),
    "jax-privacy": Contender(jax_runner(private=True), baseline="jax plain", gate_batch_size=4),
}
BASELINES = ("plain", "jax plain")  # not private, so the gate does not apply

LABELS: dict[tuple[str, str], str] = {
    ("opacus", "bert-per-layer"): "clips each parameter, not each layer, which is a different mechanism",
}
"""(prefix of contender names, cell): why contenders are timed, but do not count as sound peers."""

NOT_RUN = {
    "fastDP": "no release on PyPI; unsound with tied or reused weights, ignores groups of convolutions",
    "private-transformers": "no release on PyPI; only for models of an old `transformers`",
    "FlashDP": "no release on PyPI; per-layer clipping only, and its code takes bias norms over the wrong axes",
}
"""Peers that are not timed, and why."""


def start(cell: Cell, contender: str, setting: Setting) -> Runner:
    """Prepares a contender with the batch and the initial model that all contenders share."""
    torch.manual_seed(0)
    inputs, targets = cell.batch(cell.batch_size)
    batch = (inputs.to(setting.device), targets.to(setting.device))
    return CONTENDERS[contender].build(cell, cell.make().to(setting.device), batch, setting)


def label(contender: str, cell: str) -> str | None:
    """Returns the reason for which a contender does not count in a cell, or None."""
    return next((why for (name, where), why in LABELS.items() if where == cell and contender.startswith(name)), None)
