"""``save`` and ``load``: a run in a folder, with what anybody may have apart from what must stay secret."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from dpengine.accounting import Ledger
from dpengine.errors import CorruptFileError, InvalidBudgetError, MechanismMismatchError
from dpengine.run import Run

from . import folder as folders
from .plain import apart, together
from .run_state import resumption, taken
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
    ledger: Ledger

    def state_dict(self) -> dict[str, Any]:
        """What was spent."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adds what was spent."""


def save(folder: str | Path, engine: Engine) -> None:
    """Writes the last run of an engine into a folder, as a whole or not at all.

    ``model.safetensors``, ``optimizer.safetensors`` and ``privacy_state.json`` may be given away as far as the model
    may: they follow from releases, and from what else the program wrote into the model. The folder ``private`` holds
    the key of the noise, with which noise can be taken off again. It is readable by its owner alone, and must not be
    published.

    Args:
        folder: Where. What an earlier ``save`` wrote there is replaced when the new files are complete.
        engine: The engine, between ``optimizer.step()`` and the next batch. A ``lr_scheduler`` and a ``grad_scaler``
            that it was given are saved with it.

    Raises:
        TicketError: If a batch is at hand.
        InvalidBudgetError: If the engine has no run, or more than one that is not detached.
        MechanismMismatchError: If the run is spread over several processes.
        FileExistsError: If there is something else in the folder.
        TypeError: If the model, the optimizer or their companions keep what is neither a tensor nor plain data.
    """  # noqa: DOC502 - what is called raises on our behalf
    run = _only_run(engine)
    state, tensors = apart({"version": _VERSION, **taken(run)}, "run")
    others, other_tensors = apart({name: one.state_dict() for name, one in _companions(run).items()}, "state")
    public = {
        _MODEL: to_bytes(_without_ties(run.model.state_dict()), _FORMAT),
        _OPTIMIZER: to_bytes(other_tensors, {"state": json.dumps(others)}),
        _PUBLIC: (json.dumps(engine.state_dict(), indent=1) + "\n").encode(),
    }
    secret = {_RUN: to_bytes(tensors, {"state": json.dumps(state)})}
    seals = {name: hashlib.sha256(data).hexdigest() for name, data in {**public, **secret}.items()}
    secret[_SEALS] = json.dumps(seals, indent=1).encode()
    folders.write(Path(folder), public, secret, secret_folder=_SECRET)


def load(folder: str | Path, engine: Engine, *, nothing_left_since: bool = False) -> None:
    """Goes on with a run that was saved: call ``make_private`` as the first time, then this, then train.

    Model, optimizer, what was spent and the place in the run are those of the checkpoint. Batches and noise from here
    on are fresh, so nothing is drawn twice; only a run with a seed repeats itself if it goes on twice from one place.
    What the saving process released afterwards, its cost included, is not known here: add it with
    ``engine.load_state_dict`` if its state is there.

    Noise that hangs together over steps begins anew, as a mechanism that adds to what was spent: that costs some more
    than the run would have. With ``nothing_left_since`` it goes on as the one matrix that was planned.

    The data set must be the same, in the same order. It is not compared, apart from its length.

    Args:
        folder: Where it was saved.
        engine: An engine whose last run has not begun. Nothing of the run's history needs loading before.
        nothing_left_since: Your word that nothing which the saving process made after the checkpoint was released,
            not even shown: it crashed, say, and its weights are gone.

    Raises:
        MechanismMismatchError: If the run is another one.
        CorruptFileError: If a file is missing or damaged.
        LedgerError: If ``nothing_left_since`` is not so, as far as this engine knows.
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
    changes = resumption(run, state, engine.ledger.history, nothing_left_since=nothing_left_since)
    weights, _ = from_bytes(files[_MODEL], _MODEL)
    _refuse_other_weights(run.model.state_dict(), weights)
    other_tensors, metadata = from_bytes(files[_OPTIMIZER], _OPTIMIZER)
    others = together(_json(metadata.get("state", ""), _OPTIMIZER), other_tensors)
    if others.keys() != _companions(run).keys():
        raise MechanismMismatchError(
            f"The checkpoint has {sorted(others)}, and this run has {sorted(_companions(run))}.",
            fix="Give make_private the same lr_scheduler= and grad_scaler=.",
        )
    spent = _json(files[_PUBLIC].decode(errors="replace"), _PUBLIC)
    with _all_or_nothing(run):
        run.model.load_state_dict(weights, strict=False)  # a tied tensor is there under its first name
        for name, companion in _companions(run).items():
            companion.load_state_dict(others[name])
        engine.load_state_dict(spent)
    changes.apply(run)


def _companions(run: Run) -> dict[str, Any]:
    """What keeps a state beside the model."""
    found = {"optimizer": run.optimizer, "lr_scheduler": run.lr_scheduler, "grad_scaler": run.grad_scaler}
    return {name: one for name, one in found.items() if one is not None}


@contextlib.contextmanager
def _all_or_nothing(run: Run) -> Iterator[None]:
    """Puts model and companions back if one of them does not take its state."""
    with contextlib.ExitStack() as undo:
        for one in (run.model, *_companions(run).values()):
            undo.callback(one.load_state_dict, copy.deepcopy(one.state_dict()))
        yield
        undo.pop_all()  # all is well: nothing is undone


def _only_run(engine: Engine) -> Run:
    runs = [run for run in engine.runs if run.attached]
    if len(runs) != 1:
        raise InvalidBudgetError(
            f"A checkpoint is of one run, and this engine has {len(runs)}.",
            fix="Call make_private first." if not runs else "Detach the others, or use an engine for each.",
        )
    if runs[0].release.sums.topology.everyone.size > 1:
        raise MechanismMismatchError(
            "A checkpoint is of a run in one process; this one is spread over several, each with a part of its state.",
            fix="Save model and optimizer with torch.distributed.checkpoint, and engine.state_dict() beside them: a "
            "run that goes on from there adds to what was spent.",
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
    strange = [name for name, tensor in weights.items() if not isinstance(tensor, Tensor)]
    if strange:
        raise TypeError(f"checkpoint: {strange[0]!r} in the model's state is no tensor. Leave out get_extra_state.")
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
