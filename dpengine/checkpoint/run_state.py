"""State of a run for a checkpoint: position, key of the randomness, and state of the noise. Secret.

A resumed run samples fresh batches and noise with a new nonce of the same source, so no randomness repeats. A run with
a seed keeps its nonce, to reproduce the uninterrupted run; its noise is not secret.

Correlated noise continues as one matrix only if nothing after the checkpoint was released. Otherwise two continuations
of one matrix would share the earlier contributions of an example, which has no privacy analysis here. So the noise
starts again as a separate mechanism, unless the caller states that nothing was released.

A matrix that regenerates earlier rows, so that they cancel, continues only with the generator that generated them. If
there were several generators, the file does not state which one generated a row, so such a matrix does not continue.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from dpengine.accounting.ledger import Charge
from dpengine.engine.batch_state import Stage
from dpengine.engine.grad_sample_module import model_inside
from dpengine.engine.rank_consistency import examples_of
from dpengine.engine.run import Run
from dpengine.errors import BatchStateError, CorruptFileError, LedgerError, MechanismMismatchError, SamplingError
from dpengine.noise.correlated import Recurrence, mechanism_for
from dpengine.noise.mechanism import AbstractNoise
from dpengine.noise.source import NoiseSource
from dpengine.plan.run_plan import RunPlan

from .layout import USE_EARLIER

_BETWEEN_STEPS = (Stage.IDLE, Stage.RELEASED, Stage.DISCARDED)
_NONCE_BITS = 63
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("last_step", "first_life", "dropped_rows", "joined", "source.incarnation"), int),
    **dict.fromkeys(("fingerprint", "noise", "clipping"), dict),
    **dict.fromkeys(("run", "source.kind", "source.key"), str),
    "noise_multiplier": float,
    "matrix": (str, type(None)),
    "source.insecure_seed": bool,
}
"""Types of the values of `state_of`, by their path."""


def state_of(run: Run) -> dict[str, Any]:
    """Returns the state of a run between two steps, with the secret key and this rank's slices of the noise."""
    step = run.step
    if run.loader is None:
        raise SamplingError(
            "A run with external batches cannot be saved, because the position of its batches is unknown.",
            fix="Save the model, the optimizer and engine.state_dict(), and call make_private again.",
        )
    if step.batches.stage not in _BETWEEN_STEPS or step.batches.fetched:
        raise BatchStateError(
            "A batch was returned whose step was not taken, but a checkpoint needs a run between two steps.",
            fix="Save after optimizer.step(), before the next batch is drawn.",
        )
    source = step.source.secret_state()
    return {
        "fingerprint": fingerprint(run),
        "noise_multiplier": step.plan.noise_multiplier,
        "matrix": None if step.plan.noise is None else step.plan.noise.name,
        "run": step.plan.run,
        "last_step": step.batches.last_step,
        "source": source,
        "first_life": step.earlier_nonces[0][1] if step.earlier_nonces else source["incarnation"],
        "earlier_nonces": [list(entry) for entry in step.earlier_nonces],
        "noise": step.noise.state_dict(),
        "clipping": step.plan.clipping.state_dict(),
        "dropped_rows": step.dropped_samples,
        "joined": step.batches.merged,
        "examples": examples_of(run, step.source),
        "units": None if step.passes.capture.choice is not None else list(step.passes.capture.units),
    }


def check_state(state: Any) -> None:
    """Raises CorruptFileError if `state_of` cannot have returned the state."""
    for path, kind in _TYPES.items():
        value = state
        for name in path.split("."):
            if not isinstance(value, dict) or name not in value:
                raise CorruptFileError(f"The state of the run has no {path!r}.", fix=USE_EARLIER)
            value = value[name]
        in_range = kind is not int or (not isinstance(value, bool) and isinstance(value, int) and -1 <= value < 2**64)
        if not isinstance(value, kind) or not in_range:
            description = "number out of range" if isinstance(value, int) else type(value).__name__
            raise CorruptFileError(f"The state of the run has a {description} as {path!r}.", fix=USE_EARLIER)
    nonces = state.get("earlier_nonces", [])  # missing in earlier checkpoints
    are_lists = isinstance(nonces, list) and all(isinstance(pair, list) for pair in nonces)
    if not are_lists or any([*map(type, pair)] != [int, int] for pair in nonces):
        raise CorruptFileError("The state of the run has damaged 'earlier_nonces'.", fix=USE_EARLIER)
    generators = state["noise"].get("generators", [])  # missing in earlier checkpoints
    if not isinstance(generators, list) or not all(isinstance(name, str) for name in generators):
        raise CorruptFileError("The state of the noise has damaged 'generators'.", fix=USE_EARLIER)
    units = state.get("units")  # missing in earlier checkpoints; None before the first batch
    if not (units is None or (isinstance(units, list) and all(isinstance(name, str) for name in units))):
        raise CorruptFileError("The state of the run has damaged 'units'.", fix=USE_EARLIER)
    if not all(isinstance(name, str) for name in state["fingerprint"]):
        raise CorruptFileError("The fingerprint of the run has names that are not strings.", fix=USE_EARLIER)


@dataclasses.dataclass(frozen=True)
class Resumption:
    """All changes that resume a run. They are prepared completely before `apply` makes them."""

    state: Mapping[str, Any]  # result of `state_of`
    plan: RunPlan  # with the saved noise multiplier
    source: NoiseSource  # with the nonce of the resumed run
    noise: AbstractNoise  # with the saved state, or a new one
    earlier_nonces: tuple[tuple[int, int], ...]  # see `PrivateStep`

    def apply(self, run: Run) -> None:
        """Makes the changes."""
        step, state = run.step, self.state
        step.source.close()
        # A smaller noise multiplier was calibrated for other steps, so the steps of this run may not fit the budget.
        run.budget.fits_plan = self.plan.noise_multiplier >= step.plan.noise_multiplier
        step.plan, step.source, step.noise = self.plan, self.source, self.noise
        step.plan.clipping.load_state_dict(dict(state["clipping"]))
        step.batches.last_step, step.batches.merged = state["last_step"], state["joined"]
        first = step.passes.topology.everyone.rank == 0
        step.dropped_samples = state["dropped_rows"] if first else 0  # the stored number is the sum over ranks
        step.earlier_nonces = self.earlier_nonces
        capture = step.passes.capture
        if state.get("units") is not None and capture.choice is not None:
            capture.choice.use(capture, state["units"])
        run.resumed = True
        run.loader.load_state_dict({"position": state["last_step"] + 1})


def resumption(
    run: Run, state: Mapping[str, Any], charges: Iterable[Charge], *, nonce: int, nothing_released_since: bool
) -> Resumption:
    """Returns the changes that resume a run, without making them. ``nonce`` must be equal on all ranks."""
    if run.step.batches.last_step >= 0 or run.resumed or not run.attached:
        raise BatchStateError(
            "The run to resume has already drawn batches, was already loaded, or was detached.",
            fix="Call make_private, then load, then train.",
        )
    _check_fingerprint(run, state)
    plan = dataclasses.replace(run.step.plan, noise_multiplier=state["noise_multiplier"])
    try:
        source = NoiseSource.from_secret_state(state["source"], nonce=nonce)
    except ValueError as error:
        raise CorruptFileError(f"The state of the run has no usable key: {error}", fix=USE_EARLIER) from error
    _check_examples(run, source, state)
    first = state["last_step"] + 1
    same_matrix = plan.noise is None or plan.noise.name == state["matrix"]
    if not (nothing_released_since or (is_seeded(state) and same_matrix)):
        return Resumption(state, plan, source, mechanism_for(source, plan.noise, first_step=first), ())
    if nothing_released_since and any(getattr(charge.event, "run", None) == state["run"] for charge in charges):
        raise LedgerError(
            "This engine has charged steps of the loaded run, so results may have been released since the checkpoint.",
            fix="Omit nothing_released_since=True. The noise then starts again, and both mechanisms are accounted.",
        )
    if not same_matrix:
        raise MechanismMismatchError(
            f"The noise cannot continue as one matrix: it was {state['matrix']}, but this run has another matrix, "
            "perhaps because it was optimized on another machine.",
            fix="Omit nothing_released_since=True, or pass the matrix as numbers: a plan, or BandMF(strategy=...).",
        )
    if plan.noise is not None:
        _check_generators(run, plan.noise, source, state["noise"])
    noise = mechanism_for(source, plan.noise)
    noise.load_state_dict(dict(state["noise"]))
    plan = dataclasses.replace(plan, run=state["run"])
    # Earlier checkpoints only have the nonce of the groups.
    earlier = state.get("earlier_nonces") or [(0, state["first_life"])]
    nonces = (*((int(end), int(nonce)) for end, nonce in earlier), (first, state["source"]["incarnation"]))
    return Resumption(state, plan, source, noise, nonces)


def fingerprint(run: Run) -> dict[str, Any]:
    """Returns the values that must equal those of the saved run to resume it."""
    plan, noise = run.step.plan, run.step.plan.noise
    changing = plan.clipping.state_dict()
    parameters = run.step.passes.topology.parameters(model_inside(run.model))
    trained = set(run.step.passes.trainable().values())
    names = {parameter: name for name, parameter in parameters.items()}
    target = run.budget.target_epsilon
    units = None if run.units is None else hashlib.sha256(run.units.tobytes()).hexdigest()
    optimizer = getattr(type(run.optimizer), "dp_base", type(run.optimizer))
    parts = {
        "sampling": repr(plan.sampling),
        "clipping": {name: value for name, value in plan.clipping.describe().items() if name not in changing},
        # With a target, the noise multiplier depends on earlier charges, which another process may lack.
        "noise multiplier": plan.noise_multiplier if target is None else f"for epsilon {target!r}",
        "loss_reduction": run.step.passes.loss_reduction,
        "divisor": plan.divisor(1, mean=run.step.passes.loss_reduction == "mean"),
        "relation": plan.relation.value,
        "noise": None if noise is None else {key: noise.description.get(key) for key in ("noise", "bands")},
        "iterations": plan.iterations if noise is None else noise.size,
        "privacy unit": [run.unit, run.step.unit_reduction, units],
        "seed": run.step.source.insecure_seed,
        "optimizer": [
            f"{optimizer.__module__}.{optimizer.__qualname__}",
            [[names.get(parameter, "") for parameter in group["params"]] for group in run.optimizer.param_groups],
        ],
        "parameters": [
            [name, list(parameter.shape), str(parameter.dtype), parameter.device.type]
            for name, parameter in parameters.items()
            if parameter in trained
        ],
    }
    return json.loads(json.dumps(parts))  # type: ignore[no-any-return]  # as read from a file


_FORMER_NAMES = {  # in the descriptions of sampling schemes in earlier checkpoints
    "PoissonSampling(": "PoissonDraws(",
    "CyclicPoissonStrategy(": "CyclicDraws(",
    "TruncatedStrategy(": "TruncatedDraws(",
    "FixedSizeStrategy(": "FixedSizeDraws(",
    "ShuffleSampling(": "ShuffleDraws(",
    "OwnDraws(": "CustomDraws(",
    ", name=": ", class_name=",  # of `CustomDraws`
}


def _check_fingerprint(run: Run, state: Mapping[str, Any]) -> None:
    current, saved = fingerprint(run), dict(state["fingerprint"])
    for former, name in _FORMER_NAMES.items():
        saved["sampling"] = str(saved.get("sampling")).replace(former, name)
    differing = [name for name in {**current, **saved} if current.get(name) != saved.get(name)]
    if differing:
        name = differing[0]
        raise MechanismMismatchError(
            f"The saved run has another {', '.join(differing)} ({name}: {saved.get(name)!r}, "
            f"now {current.get(name)!r}).",
            fix="Call make_private with the model, the data and the arguments of the saved run.",
        )


def _check_examples(run: Run, source: NoiseSource, state: Mapping[str, Any]) -> None:
    saved = state.get("examples")  # missing in the first checkpoints
    saved = saved if isinstance(saved, list) else []
    current = examples_of(run, source, state["source"]["incarnation"])
    differing = [i for i, (a, b) in enumerate(zip(saved, current, strict=False)) if a and b and a != b]
    if differing:
        source.close()
        raise MechanismMismatchError(
            f"The data set differs from that of the checkpoint: {len(differing)} of {len(current)} compared examples "
            "are different, or at another index.",
            fix="Use the same data set in the same order, or begin a new run for another data set.",
        )


def _check_generators(run: Run, noise: Recurrence, source: NoiseSource, state: Mapping[str, Any]) -> None:
    current = {source.generator_on(parameter.device) for parameter in run.step.passes.trainable().values()}
    saved = state.get("generators", current & {"CPU"} or {"not recorded"})  # earlier checkpoints have none
    if len({*saved, *current}) > 1 and noise.regenerates:
        source.close()
        raise MechanismMismatchError(
            f"The noise cannot continue as one matrix: its generator was {', '.join(sorted(saved))}, and is now "
            f"{', '.join(sorted(current))}. Their values differ, so earlier noise would not cancel.",
            fix="Continue on a device of the same type as in the saved run, with the same version of dpengine. Without "
            "a seed you can also omit nothing_released_since=True, so that the noise starts again.",
        )


def next_nonce(state: Mapping[str, Any]) -> int:
    """Returns an unused nonce of the source, or the saved nonce of a run with a seed."""
    return int(state["source"]["incarnation"]) if is_seeded(state) else secrets.randbits(_NONCE_BITS)


def is_seeded(state: Mapping[str, Any]) -> bool:
    """Returns True if the run has a seed, so that it is reproducible and its noise is not secret."""
    return bool(state["source"]["insecure_seed"])
