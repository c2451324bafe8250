"""Functions for trainers: fetching ahead, external batches in several parts, and training a subset of parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dpengine.errors import BatchStateError, ParameterMismatchError, UnsupportedLayerError, keyword_hints
from dpengine.sampling.scheme import checked_integer

from .batch_state import Stage
from .optimizer import parameters_of

if TYPE_CHECKING:
    from .privacy_engine import PrivacyEngine


@keyword_hints
def fetch_ahead(engine: PrivacyEngine, batches: int) -> None:
    """Declares that the trainer fetches batches from the private loader before it uses the first of them.

    Call it after ``make_private``, before the first batch. Each physical batch must then go through one backward pass,
    in the order of the loader. The backward pass of an empty batch may be left out, but not its ``optimizer.step()``.

    Args:
        engine: The engine; it applies to the run of the last ``make_private``.
        batches: Number of physical batches that are fetched ahead; 0 if each is used before the next one is fetched.

    Raises:
        InvalidBudgetError: If no model is private yet.
        BatchStateError: If the loader has returned a batch already, or the loop draws its own batches.
        TypeError: If ``batches`` is not an integer.
        ValueError: If ``batches`` is negative.
    """  # noqa: DOC502 - the checks raise
    state = engine._last_run().step.batches
    ahead = checked_integer("fetch_ahead", "batches", batches, at_least=0)
    if state.external or state.last_step >= 0 or state.fetched:
        raise BatchStateError(
            "fetch_ahead was called for a run that has no private loader, or whose loader has returned a batch.",
            fix="Call it right after make_private, and only for a run with a private loader.",
        )
    state.look_ahead = ahead


@keyword_hints
@contextlib.contextmanager
def logical_batch(engine: PrivacyEngine) -> Iterator[None]:
    """Declares that the backward passes in this context are over parts of one external batch.

    The parts are charged once, and noise is added once. Without this context, each backward pass of a run with
    `dpengine.sampling.ExternalBatches` is a separate logical batch. Call ``optimizer.step()`` after the last part.

    Privacy: the parts together must be the batch that ``ExternalBatches`` describes. No example may be in two parts.

    Args:
        engine: The engine; it applies to the run of the last ``make_private``.

    Raises:
        InvalidBudgetError: If no model is private yet.
        BatchStateError: If the run has a private loader, or ``optimizer.step()`` has not used the last batch.
    """  # noqa: DOC502 - the engine raises
    state = engine._last_run().step.batches
    if not state.external or state.continues or state.stage is Stage.CLIPPED:
        raise BatchStateError(
            "logical_batch was called for a run with a private loader, or before optimizer.step() of the last batch.",
            fix="Use it with sampling=ExternalBatches(...) only, after optimizer.zero_grad(), and do not nest it.",
        )
    state.continues = True
    try:
        yield
    finally:
        state.continues = False


@keyword_hints
def restrict_to_optimizer(engine: PrivacyEngine) -> None:
    """Restricts clipping and noise to the parameters that the optimizer holds.

    Call it after ``make_private``, before the first batch. Norms, clipping factors, sums and noise then cover only the
    parameters of the optimizer. The ``.grad`` of all other parameters stays None, even if they are unfrozen later. The
    call has no effect if the optimizer holds all parameters of the model.

    Privacy: the guarantee is the same. Gradients of other parameters are used for the independence check only.

    Args:
        engine: The engine; it applies to the run of the last ``make_private``.

    Raises:
        InvalidBudgetError: If no model is private yet.
        BatchStateError: If the loader has returned a batch already, a backward pass was recorded, the run was resumed,
            or the model was detached.
        ParameterMismatchError: If the optimizer holds no trainable parameter.
        UnsupportedLayerError: If several processes train the model, or ``grad_sample_mode`` is not ``"auto"``.
        ValueError: If the clipping policy has clipping norms for other groups of parameters.
    """  # noqa: DOC502 - what is called raises
    run = engine._last_run()
    passes, state = run.step.passes, run.step.batches
    has_begun = state.last_step >= 0 or state.fetched or passes.pending or passes.capture.unfinished is not None
    if has_begun or run.resumed or not run.attached:
        raise BatchStateError(
            "restrict_to_optimizer was called for a run that has begun, was resumed or has ended.",
            fix="Call it right after make_private; load a checkpoint after it.",
        )
    if passes.topology.everyone.size > 1:  # the rank fingerprint does not cover the restriction
        raise UnsupportedLayerError(
            f"restrict_to_optimizer does not support {passes.topology.everyone.size} processes.",
            fix="Freeze the other parameters before make_private: parameter.requires_grad_(False).",
        )
    parameters = frozenset(parameters_of(run.optimizer))
    if parameters.issuperset(passes.model.parameters()):
        return
    if passes.grad_sample_mode != "auto":
        raise UnsupportedLayerError(
            f"restrict_to_optimizer needs grad_sample_mode='auto', got {passes.grad_sample_mode!r}.",
            fix="Leave grad_sample_mode out, or freeze the other parameters.",
        )
    names = [name for name, parameter in passes.trainable().items() if parameter in parameters]
    if not names:
        raise ParameterMismatchError(
            "No parameter of the optimizer is trainable.", fix="Unfreeze the parameters to train."
        )
    run.step.plan.clipping.group_of(names)  # raises if the clipping norms are for other groups
    passes.only = parameters
    passes.update_buffer()
