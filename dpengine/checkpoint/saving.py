"""Saves a run to a folder, with separate public and secret files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpengine.distributed.ranks import Ranks
from dpengine.engine.grad_sample_module import model_inside
from dpengine.engine.privacy_engine import PrivacyEngine
from dpengine.engine.run import Run
from dpengine.errors import BatchStateError

from . import folder as folders
from . import layout, run_state, sharded_state
from .folder import split_tensors
from .layout import only_run, stateful_objects, untied_tensors
from .tensor_files import Shard, file_name, writer

_FORMAT = {"format": "pt"}  # required by other readers of safetensors


def save(folder: str | Path, engine: PrivacyEngine) -> None:
    """Saves the last run of an engine to a folder, completely or not at all.

    ``model.safetensors``, ``optimizer.safetensors`` and ``privacy_state.json`` may be published if the model may be
    published: they depend only on released values, and on values that the program itself wrote into the model. The
    folder ``private`` contains the key of the noise, with which noise can be removed. Only its owner can read it, and
    it must not be published.

    If several processes train the model, every process must call this function with the same shared folder. Each writes
    its shards, as ``model-00001-of-00004.safetensors`` and so on. `load` reads them on any number of processes, and so
    does ``torch.distributed.checkpoint`` with its ``HuggingFaceStorageReader``.

    Args:
        folder: The folder. An earlier checkpoint in it is replaced once the new files are complete.
        engine: The engine, between ``optimizer.step()`` and the next batch. Its ``lr_scheduler`` and ``grad_scaler``
            are also saved.

    Raises:
        BatchStateError: If the loader returned a batch whose step was not taken.
        InvalidBudgetError: If the engine has no run, or more than one that is not detached.
        FileExistsError: If the folder contains other files.
        TypeError: If a state contains anything except tensors and plain data, or an optimizer has a state with unknown
            sharding.
        RuntimeError: If another process failed.
    """  # noqa: DOC502 - what is called raises on our behalf
    run, folder = only_run(engine), Path(folder)
    ranks = run.step.passes.topology.everyone
    files = _RankFiles(run)
    states = ranks.run_on_all(files.capture)
    ranks.run_on_all(lambda: files.collect(states))
    ranks.run_on_all(lambda: _on_first(ranks, lambda: folders.begin(folder, secret_folder=layout.SECRET)))
    try:
        written = ranks.run_on_all(lambda: files.write(folders.staging_folder(folder)))
        seals = {name: seal for rank_seals in written for name, seal in rank_seals.items()}
        ranks.run_on_all(lambda: _on_first(ranks, lambda: _finish(folder, engine, seals)))
    except Exception:
        _on_first(ranks, lambda: folders.discard(folder))  # the staging folder contains the key
        raise


def _on_first(ranks: Ranks, action: Callable[[], Any]) -> None:
    if ranks.rank == 0:
        action()


def _finish(folder: Path, engine: PrivacyEngine, seals: dict[str, str]) -> None:
    """Writes the files of the first rank and commits the folder."""
    new = folders.staging_folder(folder)
    privacy_state = (json.dumps(engine.state_dict(), indent=1) + "\n").encode()
    seals[layout.PUBLIC] = folders.write(
        new / layout.PUBLIC, lambda path: path.write_bytes(privacy_state), secret=False
    )
    sealed = json.dumps(seals, indent=1).encode()
    folders.write(new / layout.SECRET / layout.SEALS, lambda path: path.write_bytes(sealed), secret=True)
    folders.commit(folder, secret_folder=layout.SECRET)


class _RankFiles:
    """The files that a rank writes."""

    def __init__(self, run: Run):
        self._run = run
        self._ranks = run.step.passes.topology.everyone
        self._writers: list[tuple[str, Callable[[Path], None], bool]] = []

    def capture(self) -> tuple[dict[str, Any], int]:
        """Stores the state of the run. Returns this rank's noise state and its number of dropped samples."""
        self._state = {"version": layout.VERSION, **run_state.state_of(self._run)}
        self._slices = self._state["noise"].pop("slices")
        is_counted = self._run.step.passes.topology.splits.rank == 0
        return self._state["noise"], self._state["dropped_rows"] if is_counted else 0

    def collect(self, states: list[tuple[dict[str, Any], int]]) -> None:
        """Prepares all files from the states of the ranks. Raises if a value cannot be stored."""
        run, topology = self._run, self._run.step.passes.topology
        weights = untied_tensors(model_inside(run.model), topology)
        self._add(layout.MODEL, sharded_state.owned_shards(weights, topology), _FORMAT)
        object_states = {name: stateful.state_dict() for name, stateful in stateful_objects(run).items()}
        values, tensors = split_tensors(object_states, "state")
        metadata = {"state": json.dumps(values)}
        metadata["of"] = json.dumps(sharded_state.owners(tensors, run.optimizer, object_states["optimizer"]))
        self._add(layout.OPTIMIZER, sharded_state.owned_shards(tensors, topology), metadata)
        self._add(layout.NOISE, sharded_state.slice_shards(self._slices), {}, secret=True)
        noise = {**_merged_noise([noise for noise, _ in states]), "slices": {}}
        state = {**self._state, "noise": noise, "dropped_rows": sum(dropped for _, dropped in states)}
        if self._ranks.rank == 0:
            values, tensors = split_tensors(state, "run")
            parts = {name: Shard(tensor) for name, tensor in tensors.items()}
            self._writers.append((f"{layout.RUN}.safetensors", writer(parts, {"state": json.dumps(values)}), True))

    def _add(self, name: str, parts: dict[str, Shard], metadata: dict[str, str], *, secret: bool = False) -> None:
        if parts or (self._ranks.rank == 0 and not secret):
            self._writers.append((file_name(name, self._ranks.rank, self._ranks.size), writer(parts, metadata), secret))

    def write(self, folder: Path) -> dict[str, str]:
        """Writes the files. Returns their seals by relative path."""
        files = (
            (f"{layout.SECRET}/{name}" if secret else name, write, secret) for name, write, secret in self._writers
        )
        return {path: folders.write(folder / path, write, secret=secret) for path, write, secret in files}


def _merged_noise(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the noise state that is common to the ranks; ranks with an empty shard have none."""
    with_rows = [state for state in states if state.get("rows") is not None] or states
    differing = {"next_step": max(state["next_step"] for state in states)}
    if "generators" in with_rows[0]:
        differing["generators"] = sorted({name for state in with_rows for name in state["generators"]})
    merged = {**with_rows[0], **differing}
    if any({**state, **differing} != merged for state in with_rows):
        raise BatchStateError(
            "The ranks have not generated noise for the same steps, because a step failed on some rank.",
            fix="Save after the next step that all ranks complete.",
        )
    return merged
