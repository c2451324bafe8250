"""``save`` and ``load``: a run in a folder, with what anybody may have apart from what must stay secret."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dpengine.errors import CorruptFileError, InvalidBudgetError, MechanismMismatchError
from dpengine.run import Run

from . import folder as folders
from .plain import apart, together
from .run_state import refuse_other, resume, taken
from .tensor_file import from_bytes, to_bytes

_VERSION = 1
_SECRET = "private"
_MODEL, _OPTIMIZER, _PUBLIC = "model.safetensors", "optimizer.safetensors", "privacy_state.json"
_RUN, _SEALS = "run.safetensors", "seals.json"
_FORMAT = {"format": "pt"}  # what other readers of such files look for
_EARLIER = "Take an earlier checkpoint."


class Engine(Protocol):
    """What is asked of a ``PrivacyEngine``."""

    runs: list[Run]

    def state_dict(self) -> dict[str, Any]:
        """What was spent."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adds what was spent."""


def save(folder: str | Path, engine: Engine) -> None:
    """Writes the last run of an engine into a folder, as a whole or not at all.

    ``model.safetensors``, ``optimizer.safetensors`` and ``privacy_state.json`` are for anybody: all in them follows
    from releases. The folder ``private`` holds the key of the noise; with it and the model the noise can be taken off
    again. It is readable by its owner alone, and must not be published.

    Args:
        folder: Where. What an earlier ``save`` wrote there is replaced when the new files are complete.
        engine: The engine, between ``optimizer.step()`` and the next batch.

    Raises:
        TicketError: If a batch is at hand.
        InvalidBudgetError: If the engine has no run, or more than one that is not detached.
        FileExistsError: If there is something else in the folder.
        TypeError: If the optimizer keeps something that is neither a tensor nor a number.
    """  # noqa: DOC502 - what is called raises on our behalf
    run = _only_run(engine)
    state, tensors = apart({"version": _VERSION, **taken(run)}, "run")
    optimizer, optimizer_tensors = apart(run.optimizer.state_dict(), "optimizer")
    public = {
        _MODEL: to_bytes(_without_ties(run.model.state_dict()), _FORMAT),
        _OPTIMIZER: to_bytes(optimizer_tensors, {"state": json.dumps(optimizer)}),
        _PUBLIC: (json.dumps(engine.state_dict(), indent=1) + "\n").encode(),
    }
    secret = {_RUN: to_bytes(tensors, {"state": json.dumps(state)})}
    seals = {name: hashlib.sha256(data).hexdigest() for name, data in {**public, **secret}.items()}
    secret[_SEALS] = json.dumps(seals, indent=1).encode()
    folders.write(Path(folder), public, secret, secret_folder=_SECRET)


def load(folder: str | Path, engine: Engine) -> None:
    """Goes on with a run that was saved: call ``make_private`` as the first time, then this, then train.

    Model, optimizer, what was spent, the place in the run and the past of correlated noise are those of the checkpoint.
    Batches and noise from here on are fresh. What was released after the checkpoint by the process that saved it is
    not known here, and its cost is not either: add the state of a later ``engine.state_dict()`` if there is one.

    Args:
        folder: Where it was saved.
        engine: An engine whose last run has not begun.

    Raises:
        MechanismMismatchError: If the run is another one.
        CorruptFileError: If a file is missing or damaged. Nothing has changed then.
        FileNotFoundError: If there is no such folder.
        TicketError: If the run has begun.
        InvalidBudgetError: If the engine has no run, or more than one that is not detached.
    """  # noqa: DOC502 - what is called raises on our behalf
    run = _only_run(engine)
    files = _files(folders.present(Path(folder)))
    tensors, metadata = from_bytes(files[_RUN], _RUN)
    state = together(_json(metadata.get("state", ""), _RUN), tensors)
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        version = state.get("version") if isinstance(state, dict) else None
        raise CorruptFileError(f"{_RUN} has version {version!r}; this one reads {_VERSION}.", fix=_EARLIER)
    refuse_other(run, state)
    weights, _ = from_bytes(files[_MODEL], _MODEL)
    _refuse_other_weights(run.model.state_dict(), weights)
    optimizer_tensors, metadata = from_bytes(files[_OPTIMIZER], _OPTIMIZER)
    optimizer = together(_json(metadata.get("state", ""), _OPTIMIZER), optimizer_tensors)
    spent = _json(files[_PUBLIC].decode(errors="replace"), _PUBLIC)
    run.optimizer.load_state_dict(optimizer)  # refuses another one before it changes anything
    engine.load_state_dict(spent)
    run.model.load_state_dict(weights, strict=False)  # a tied tensor is there under its first name
    resume(run, state)


def _only_run(engine: Engine) -> Run:
    runs = [run for run in engine.runs if run.attached]
    if len(runs) != 1:
        raise InvalidBudgetError(
            f"A checkpoint is of one run, and this engine has {len(runs)}.",
            fix="Call make_private first." if not runs else "Detach the others, or use an engine for each.",
        )
    return runs[0]


def _files(folder: Path) -> dict[str, bytes]:
    """All files of a checkpoint, each as it was sealed."""
    secret = folder / _SECRET
    seals = _json(folders.read(secret / _SEALS).decode(errors="replace"), _SEALS)
    places = {_MODEL: folder, _OPTIMIZER: folder, _PUBLIC: folder, _RUN: secret}
    files = {name: folders.read(place / name) for name, place in places.items()}
    for name, data in files.items():
        if not isinstance(seals, dict) or seals.get(name) != hashlib.sha256(data).hexdigest():
            raise CorruptFileError(f"{name} is not as it was saved.", fix=_EARLIER)
    return files


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{where} is damaged: {error}.", fix=_EARLIER) from error


def _without_ties(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Each tensor once, under its first name: readers of such files refuse tensors that share memory."""
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        first.setdefault(_memory(name, tensor), name)
    return {name: weights[name] for name in first.values()}


def _memory(name: str, tensor: Any) -> tuple[Any, ...]:
    whole = tensor.numel() and (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
    return whole or (name,)


def _refuse_other_weights(now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in _without_ties(now).items()}
    found = {name: tuple(tensor.shape) for name, tensor in then.items()}
    differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if differing:
        name = differing[0]
        raise MechanismMismatchError(
            f"The checkpoint is of another model: {len(differing)} tensors differ, the first is {name!r} "
            f"({found.get(name)}, now {expected.get(name)}).",
            fix="Build the model as the first time.",
        )
