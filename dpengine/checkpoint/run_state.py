"""What a run needs to go on where it was: where it is, the key of its randomness, and what its noise keeps. Secret.

A run that goes on draws fresh batches and fresh normals, in a new life of the same source: whatever came after the
checkpoint the first time, nothing is drawn twice. Correlated noise keeps its past, so it goes on as the same matrix,
and who is in which group stays as it was drawn.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any

from dpengine.errors import MechanismMismatchError, TicketError
from dpengine.noise import NoiseSource, mechanism_for
from dpengine.run import Run
from dpengine.stage import Stage

_BETWEEN_STEPS = (Stage.IDLE, Stage.RELEASED, Stage.VOID)
_LIFE_BITS = 63


def taken(run: Run) -> dict[str, Any]:
    """The state of a run between two steps.

    Args:
        run: The run.

    Returns:
        Numbers, strings and tensors. **The key is in it.**

    Raises:
        TicketError: If a batch is at hand.
    """
    release = run.release
    if release.stage not in _BETWEEN_STEPS or release.fetched:
        raise TicketError(
            "A batch is at hand that was not stepped; a checkpoint is of a run between two steps.",
            fix="Save after optimizer.step(), before the next batch is drawn.",
        )
    source = release.source.secret_state()
    return {
        "fingerprint": fingerprint(run),
        "run": release.plan.run,
        "last_step": release.last_step,
        "source": source,
        "first_life": source["incarnation"] if run.first_life is None else run.first_life,
        "noise": release.noise.state_dict(),
        "clipping": release.plan.clipping.state_dict(),
        "dropped_rows": release.dropped_rows,
        "joined": release.joined,
    }


def refuse_other(run: Run, state: Mapping[str, Any]) -> None:
    """Refuses a state of another run, and a run that has begun.

    Args:
        run: The run that shall go on.
        state: What `taken` returned.

    Raises:
        MechanismMismatchError: If the plan, the parameters or the data set are others; the message says which.
        TicketError: If the run drew batches already.
    """
    if run.release.last_step >= 0 or not run.attached:
        raise TicketError(
            "The run that shall go on has drawn batches already, or is private no longer.",
            fix="Call make_private, then load, then train.",
        )
    now, then = fingerprint(run), state["fingerprint"]
    differing = [name for name in {**now, **then} if now.get(name) != then.get(name)]
    if differing:
        name = differing[0]
        raise MechanismMismatchError(
            f"The checkpoint is of a run with another {', '.join(differing)} ({name}: {then.get(name)!r}, now "
            f"{now.get(name)!r}).",
            fix="Call make_private with the model, the data and the arguments of the run that was saved.",
        )


def resume(run: Run, state: Mapping[str, Any]) -> None:
    """Lets a run go on from a state that was not refused.

    Args:
        run: A run that has not begun.
        state: What `taken` returned.
    """
    release, plan = run.release, run.release.plan
    source = NoiseSource.from_secret_state(state["source"], incarnation=_next_life(state))
    noise = mechanism_for(source, plan.noise)
    noise.load_state_dict(dict(state["noise"]))
    claim = plan.claim
    if claim is not None and hasattr(claim, "run"):
        claim = dataclasses.replace(claim, run=state["run"])
    release.source.close()
    release.plan = dataclasses.replace(plan, run=state["run"], claim=claim)
    release.source, release.noise = source, noise
    release.plan.clipping.load_state_dict(dict(state["clipping"]))
    release.last_step = state["last_step"]
    release.dropped_rows, release.joined = state["dropped_rows"], state["joined"]
    run.first_life = state["first_life"]
    run.batches.load_state_dict({"position": state["last_step"] + 1})


def fingerprint(run: Run) -> dict[str, Any]:
    """What must be the same for one run to go on as another."""
    plan = run.release.plan
    moving = plan.clipping.state_dict()
    clipping = {name: value for name, value in plan.clipping.describe().items() if name not in moving}
    parts = {
        "sampling": repr(plan.sampling),
        "clipping": clipping,
        "noise_multiplier": plan.noise_multiplier,
        "divisor": plan.expected_batch_size,
        "relation": plan.relation.value,
        "noise": None if plan.noise is None else {"name": plan.noise.name, **plan.noise.facts},
        "iterations": plan.iterations,
        "unit": [run.unit, run.release.unit_reduction],
        "parameters": [
            [name, list(parameter.shape), str(parameter.dtype), parameter.device.type]
            for name, parameter in run.model.named_parameters()
            if parameter.requires_grad
        ],
    }
    return json.loads(json.dumps(parts))  # type: ignore[no-any-return]  # as it is read from a file


def _next_life(state: Mapping[str, Any]) -> int:
    """A life of the source that was not lived: by chance, but one that follows from the state where a seed is used."""
    if not state["source"]["insecure_seed"]:
        return secrets.randbits(_LIFE_BITS)
    words = json.dumps([state["source"]["incarnation"], state["last_step"]]).encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> (64 - _LIFE_BITS)
