"""Checks before the first batch that all ranks of a run have the same data, model and plan."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator, Sized
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from dpengine.distributed.data_parallel import check_equal_weights
from dpengine.noise.source import NoiseSource
from dpengine.sampling.scheme import KeyedWords

if TYPE_CHECKING:
    from dpengine.plan.run_plan import RunPlan

    from .run import Run

_EXAMPLES = 16  # number of examples of the data set that are compared
_TRIAL_BATCHES = 2


def check_rank_consistency(run: Run, physical_batch_size: int | None, accumulation_steps: int) -> None:
    """Raises if the processes of a run disagree about data, model or plan. Does nothing with one process."""
    step, passes = run.step, run.step.passes
    topology, source = passes.topology, step.source
    if topology.everyone.size == 1:
        return
    # If ranks ordered examples differently, one example would be used twice and another one never. Examples with random
    # augmentation cannot be compared.
    words = source.words(8, domain="agreement", step=0).tobytes()
    examples = topology.everyone.all_gather(_examples(run.loader.dataset, words))
    comparable = all(digest is not None for of_rank in examples for digest in of_rank)
    topology.check_consistent(
        key=hashlib.blake2b(words, digest_size=16).hexdigest(),
        dpengine=version("dpengine"),
        torch=torch.__version__,
        topology=(topology.name, topology.replicas.size, topology.shards.size, topology.splits.size),
        parameters=[(name, tuple(p.shape), str(p.dtype)) for name, p in passes.trainable().items()],
        plan=step.plan.describe(),
        event=step.plan.event(),
        batches=_batches(step.plan, words),
        data=len(run.loader.dataset),
        examples=examples[topology.everyone.rank] if comparable else None,
        units=None if run.units is None else hashlib.sha256(run.units.tobytes()).hexdigest(),
        optimizer=(type(run.optimizer).__qualname__, _settings(run.optimizer)),
        chunks=(physical_batch_size, accumulation_steps),
        loss=(passes.loss_reduction, step.unit_reduction, passes.grad_sample_mode, step.unused_parameters),
        budget=(run.budget.target_epsilon, run.budget.delta, run.budget.planned_steps, run.budget.on_budget),
        ledger=step.ledger.totals,
    )
    check_equal_weights(passes.model, topology)


def _batches(plan: RunPlan, key: bytes) -> list[str]:
    """Returns digests of trial batches, because a user's scheme may depend on more than the random words."""
    words = KeyedWords((int.from_bytes(key[:8], "little"), int.from_bytes(key[8:16], "little")))
    batches = [plan.sampling.draw(step, words) for step in range(_TRIAL_BATCHES) if plan.has_step(step)]
    return [hashlib.blake2b(batch.tobytes(), digest_size=8, key=key).hexdigest() for batch in batches]


def examples_of(run: Run, source: NoiseSource, nonce: int | None = None) -> list[str | None]:
    """Returns digests of some examples, which are compared when a run is resumed. They are as secret as the key."""
    return _examples(run.loader.dataset, source.words(8, domain="agreement", step=0, nonce=nonce).tobytes())


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the settings of an optimizer, such as learning rates, by parameter group."""
    types = (bool, int, float, str, tuple, type(None))
    return [
        {name: value for name, value in group.items() if isinstance(value, types)} for group in optimizer.param_groups
    ]


def _examples(data: Any, key: bytes) -> list[str | None]:
    """Returns digests of some examples; None if reading one is not deterministic, or fails."""
    size = len(data) if isinstance(data, Sized) else 0
    with _preserved_random_state():
        return [_digest_of(data, i * size // _EXAMPLES, key) for i in range(_EXAMPLES if size else 0)]


def _digest_of(data: Any, index: int, key: bytes) -> str | None:
    try:
        first, second = (_content(data[index]) for _ in range(2))
    except Exception:  # user code may need a batch, or files that only some ranks have
        return None
    # An error message may show the digest. It is keyed, so that testing an example against it requires the key.
    return hashlib.blake2b(first, digest_size=8, key=key).hexdigest() if first == second else None


def _content(example: Any) -> bytes:
    """Returns the content of an example as bytes that can be compared."""
    parts = []
    for leaf in pytree.tree_leaves(example):
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if leaf.numel() else leaf
            parts.append(repr((leaf.dtype, leaf.shape, hashlib.blake2b(flat.numpy().tobytes()).hexdigest())))
        elif hasattr(leaf, "tobytes"):  # arrays and images
            parts.append(hashlib.blake2b(leaf.tobytes()).hexdigest())
        elif isinstance(leaf, (bool, int, float, str, bytes, type(None))):
            parts.append(repr(leaf))
    return "|".join(parts).encode()


@contextlib.contextmanager
def _preserved_random_state() -> Iterator[None]:
    """Restores the global random generators on exit, because reading an example may draw random numbers."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[]):  # by default, fork_rng warns if there are several accelerators
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
