"""Resumes a saved run, on any number of processes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dpengine.accounting.origin import origins_in, states_of
from dpengine.engine.grad_sample_module import model_inside
from dpengine.engine.privacy_engine import PrivacyEngine
from dpengine.engine.run import Run
from dpengine.errors import CorruptFileError, MechanismMismatchError
from dpengine.noise.sharded_noise import noised_positions

from . import folder as folders
from . import layout, sharded_state
from .folder import join_tensors
from .layout import only_run, stateful_objects, untied_tensors
from .run_state import check_state, is_seeded, next_nonce, resumption
from .tensor_files import StoredTensors, files_of


def load(folder: str | Path, engine: PrivacyEngine, *, nothing_released_since: bool = False) -> None:
    """Resumes a saved run. Call ``make_private`` as in the first run, then ``load``, then train.

    The model, the optimizer, the privacy cost and the position are those of the checkpoint. Later batches and noise are
    fresh, so no randomness repeats. Only a run with a seed continues exactly like an uninterrupted run.

    A ledger file contains the cost of steps that the saving process took after the checkpoint. Without a ledger file
    this cost is unknown: add it with ``engine.load_state_dict`` if its state is available.

    Correlated noise starts again as a separate mechanism, whose cost is added, so the total cost is higher than that of
    the uninterrupted run. With ``nothing_released_since``, it continues as the planned matrix.

    The data set must be the same, in the same order. Its length is compared, and some examples if reading them is
    deterministic. The number of processes and the sharding of the model may change. Every process must call this
    function.

    Args:
        folder: The folder of the checkpoint.
        engine: An engine whose last run has not begun. Earlier charges of the run need not be loaded.
        nothing_released_since: True if the caller states that no result of steps after the checkpoint was released or
            displayed, for example because the process crashed and its weights are lost.

    Raises:
        MechanismMismatchError: If the run differs from the saved one.
        CorruptFileError: If a file is missing or damaged.
        LedgerError: If this engine has charges that contradict ``nothing_released_since``.
        FileNotFoundError: If the folder does not exist.
        BatchStateError: If the run has begun.
        InvalidBudgetError: If the engine has no run, or more than one that is not detached.
        RuntimeError: If another process failed.
    """  # noqa: DOC502 - what is called raises on our behalf
    run = only_run(engine)
    topology = run.step.passes.topology
    ranks = topology.everyone
    seals = ranks.run_on_all(lambda: _check_seals(folders.last_complete(Path(folder)), ranks.rank, ranks.size))
    topology.check_consistent(checkpoint=seals[ranks.rank], nothing_released_since=nothing_released_since)
    with contextlib.ExitStack() as opened:
        files = _CheckpointFiles(opened)
        ranks.run_on_all(lambda: files.open(folders.last_complete(Path(folder))))
        nonce = ranks.broadcast(next_nonce(files.state))
        ranks.run_on_all(lambda: files.prepare(run, engine, nonce, nothing_released_since=nothing_released_since))
        with _restored_on_error(run):
            ranks.run_on_all(lambda: files.load_states(run, engine))
            ranks.run_on_all(lambda: files.changes.apply(run))


def exists(folder: str | Path) -> bool:
    """Returns True if `load` finds a checkpoint, including one that an interrupted ``save`` left next to the folder.

    Args:
        folder: The folder of the checkpoint.

    Returns:
        True if there is a checkpoint.
    """
    try:
        folders.last_complete(Path(folder))
    except FileNotFoundError:
        return False
    return True


class _CheckpointFiles:
    """The files of a checkpoint, and the changes that `load` makes."""

    def __init__(self, opened: contextlib.ExitStack):
        self._opened = opened

    def open(self, folder: Path) -> None:
        """Opens the tensor files and reads the state of the run."""
        self._folder = folder
        seals = _seals(folder)
        names = [name.removeprefix(f"{layout.SECRET}/") for name in seals]

        def stored(name: str, folder: Path) -> StoredTensors:
            return self._opened.enter_context(StoredTensors(folder / file for file in files_of(name, names)))

        self._model, self._optimizer = stored(layout.MODEL, self._folder), stored(layout.OPTIMIZER, self._folder)
        self._noise = stored(layout.NOISE, self._folder / layout.SECRET)
        run_file = stored(layout.RUN, self._folder / layout.SECRET)
        tensors = {name: run_file.read(name) for name in run_file.names}
        self.state = join_tensors(_json(run_file.metadata.get("state", ""), layout.RUN), tensors)
        if not isinstance(self.state, dict) or self.state.get("version") != layout.VERSION:
            version = self.state.get("version") if isinstance(self.state, dict) else None
            raise CorruptFileError(
                f"{layout.RUN} has version {version!r}; this release reads {layout.VERSION}.", fix=layout.USE_EARLIER
            )
        check_state(self.state)

    def prepare(self, run: Run, engine: PrivacyEngine, nonce: int, *, nothing_released_since: bool) -> None:
        """Prepares all changes without making them."""
        topology = run.step.passes.topology
        if (nothing_released_since or is_seeded(self.state)) and self._noise.names:
            positions = noised_positions(run.step.passes.buffer, topology.replicas)
            self.state["noise"]["slices"] = sharded_state.read_slices(self._noise, positions)
        self.changes = resumption(
            run, self.state, engine.ledger.history, nonce=nonce, nothing_released_since=nothing_released_since
        )
        current = untied_tensors(model_inside(run.model), topology)
        _check_weights(current, self._model)
        self._weights = {
            name: sharded_state.local_tensor(self._model, name, like, topology) for name, like in current.items()
        }
        metadata = self._optimizer.metadata
        owners = _json(metadata.get("of", ""), layout.OPTIMIZER)
        if not isinstance(owners, dict) or not all(isinstance(number, int) for number in owners.values()):
            raise CorruptFileError(
                f"{layout.OPTIMIZER} does not assign its tensors to parameters.", fix=layout.USE_EARLIER
            )
        tensors = sharded_state.optimizer_tensors(self._optimizer, owners, run.optimizer, topology)
        self._object_states = join_tensors(_json(metadata.get("state", ""), layout.OPTIMIZER), tensors)
        if not isinstance(self._object_states, dict):
            raise CorruptFileError(f"{layout.OPTIMIZER} has no states.", fix=layout.USE_EARLIER)
        if self._object_states.keys() != stateful_objects(run).keys():
            raise MechanismMismatchError(
                f"The checkpoint has {list(self._object_states)}, but this run has {sorted(stateful_objects(run))}.",
                fix="Pass the same lr_scheduler= and grad_scaler= to make_private.",
            )
        self._privacy_state = _json(folders.read(self._folder / layout.PUBLIC).decode(errors="replace"), layout.PUBLIC)

    def load_states(self, run: Run, engine: PrivacyEngine) -> None:
        """Loads the stored states into the model, the other objects and the ledger."""
        # A tied tensor is stored under its first name.
        model_inside(run.model).load_state_dict(self._weights, strict=False)
        for name, stateful in stateful_objects(run).items():
            try:
                stateful.load_state_dict(self._object_states[name])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CorruptFileError(
                    f"The stored state does not fit the {name}: {error!r}.", fix=layout.USE_EARLIER
                ) from error
        engine.load_state_dict(_marked_resumed(self._privacy_state))


def _marked_resumed(state: Any) -> Any:
    """Returns the state of an engine with its charges marked as resumed, which a ledger file also records.

    Charges that are already in a ledger file are not marked, because that file contains all later charges.
    """
    if not isinstance(state, dict) or "anchor" in state:
        return state
    return state | {"origins": states_of(dataclasses.replace(origin, resumed=True) for origin in origins_in(state))}


@contextlib.contextmanager
def _restored_on_error(run: Run) -> Iterator[None]:
    """Restores the states of the model and the other objects after an error in the context."""
    with contextlib.ExitStack() as undo:
        for stateful in (model_inside(run.model), *stateful_objects(run).values()):
            undo.callback(stateful.load_state_dict, copy.deepcopy(stateful.state_dict()))
        yield
        undo.pop_all()  # on success, nothing is restored


def _check_seals(folder: Path, rank: int, ranks: int) -> str:
    """Raises if a file changed since it was saved. Each rank checks some files. Returns the digest of the seals."""
    for name, seal in list(_seals(folder).items())[rank::ranks]:
        if folders.digest(folder / name) != seal:
            raise CorruptFileError(f"{name} was changed after it was saved.", fix=layout.USE_EARLIER)
    return folders.digest(folder / layout.SECRET / layout.SEALS)


def _seals(folder: Path) -> dict[str, str]:
    seals = _json(folders.read(folder / layout.SECRET / layout.SEALS).decode(errors="replace"), layout.SEALS)
    if not isinstance(seals, dict) or not all(isinstance(name, str) and ".." not in name for name in seals):
        raise CorruptFileError(f"{layout.SEALS} is damaged.", fix=layout.USE_EARLIER)
    if not {layout.PUBLIC, f"{layout.SECRET}/{layout.RUN}.safetensors"} <= seals.keys():
        raise CorruptFileError(f"{layout.SEALS} does not list all files.", fix=layout.USE_EARLIER)
    return seals


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{where} is damaged: {error}.", fix=layout.USE_EARLIER) from error


def _check_weights(current: Mapping[str, Tensor], stored: StoredTensors) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in current.items()}
    saved = {name: stored.shape(name) for name in stored.names}
    differing = sorted(name for name in expected.keys() | saved.keys() if expected.get(name) != saved.get(name))
    if differing:
        name = differing[0]
        raise MechanismMismatchError(
            f"The checkpoint has another model: {len(differing)} tensors differ. The first is {name!r}, of shape "
            f"{saved.get(name)} in the checkpoint and {expected.get(name)} in this run.",
            fix="Build the same model as in the saved run.",
        )
