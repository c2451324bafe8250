"""``save``: a run in a folder, with what anybody may have apart from what must stay secret."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpengine.distributed.ranks import Ranks
from dpengine.engine.grad_sample_module import model_inside
from dpengine.engine.run import Run
from dpengine.errors import BatchStateError

from . import folder as folders
from . import run_state, spread
from .folder import apart
from .layout import (
    MODEL,
    NOISE,
    OPTIMIZER,
    PUBLIC,
    RUN,
    SEALS,
    SECRET,
    VERSION,
    Engine,
    companions,
    only_run,
    without_ties,
)
from .pieces import Part, file_name, writer

_FORMAT = {"format": "pt"}  # what other readers of such files look for


def save(folder: str | Path, engine: Engine) -> None:
    """Writes the last run of an engine into a folder, as a whole or not at all.

    ``model.safetensors``, ``optimizer.safetensors`` and ``privacy_state.json`` may be given away as far as the model
    may: they follow from releases, and from what else the program wrote into the model. The folder ``private`` holds
    the key of the noise, with which noise can be taken off again. It is readable by its owner alone, and must not be
    published.

    Where several processes train the model, each of them calls this, and all see the same folder. Each writes what it
    holds, as ``model-00001-of-00004.safetensors`` and so on; `load` takes it into any other number of processes, and
    so does ``torch.distributed.checkpoint`` with its ``HuggingFaceStorageReader``.

    Args:
        folder: Where. What an earlier ``save`` wrote there is replaced when the new files are complete.
        engine: The engine, between ``optimizer.step()`` and the next batch. A ``lr_scheduler`` and a ``grad_scaler``
            that it was given are saved with it.

    Raises:
        BatchStateError: If a batch is at hand.
        InvalidBudgetError: If the engine has no run, or more than one that is not detached.
        FileExistsError: If there is something else in the folder.
        TypeError: If the model, the optimizer or their companions keep what is neither a tensor nor plain data, or an
            optimizer has a state of which it is not known how it is sharded.
        RuntimeError: If another process failed.
    """  # noqa: DOC502 - what is called raises on our behalf
    run, folder = only_run(engine), Path(folder)
    ranks = run.step.passes.topology.everyone
    files = _Files(run)
    facts = ranks.each(files.take)
    ranks.each(lambda: files.collect(facts))
    ranks.each(lambda: _on_first(ranks, lambda: folders.begin(folder, secret_folder=SECRET)))
    try:
        written = ranks.each(lambda: files.write(folders.begun(folder)))
        seals = {name: seal for one in written for name, seal in one.items()}
        ranks.each(lambda: _on_first(ranks, lambda: _finish(folder, engine, seals)))
    except Exception:
        _on_first(ranks, lambda: folders.discard(folder))  # the key is in it
        raise


def _on_first(ranks: Ranks, action: Callable[[], Any]) -> None:
    if ranks.rank == 0:
        action()


def _finish(folder: Path, engine: Engine, seals: dict[str, str]) -> None:
    """Writes what one rank writes, and puts the folder in its place."""
    new = folders.begun(folder)
    spent = (json.dumps(engine.state_dict(), indent=1) + "\n").encode()
    seals[PUBLIC] = folders.write(new / PUBLIC, lambda path: _put(path, spent), secret=False)
    sealed = json.dumps(seals, indent=1).encode()
    folders.write(new / SECRET / SEALS, lambda path: _put(path, sealed), secret=True)
    folders.commit(folder, secret_folder=SECRET)


def _put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


class _Files:
    """The files that a rank writes."""

    def __init__(self, run: Run):
        self._run = run
        self._ranks = run.step.passes.topology.everyone
        self._writers: list[tuple[str, Callable[[Path], None], bool]] = []

    def take(self) -> tuple[dict[str, Any], int]:
        """Takes the state of the run: what this rank says of its noise, and rows dropped that no other rank has."""
        self._state = {"version": VERSION, **run_state.taken(self._run)}
        self._slices = self._state["noise"].pop("slices")
        alone = self._run.step.passes.topology.splits.rank == 0
        return self._state["noise"], self._state["dropped_rows"] if alone else 0

    def collect(self, facts: list[tuple[dict[str, Any], int]]) -> None:
        """Makes all that will be written of what the ranks took. Refuses what cannot be."""
        run, topology = self._run, self._run.step.passes.topology
        weights = without_ties(model_inside(run.model), topology)
        self._add(MODEL, spread.written(weights, topology), _FORMAT)
        kept = {name: one.state_dict() for name, one in companions(run).items()}
        others, tensors = apart(kept, "state")
        metadata = {"state": json.dumps(others)}
        metadata["of"] = json.dumps(spread.owners(tensors, run.optimizer, kept["optimizer"]))
        self._add(OPTIMIZER, spread.written(tensors, topology), metadata)
        self._add(NOISE, spread.slice_parts(self._slices), {}, secret=True)
        noise = {**_agreed([noise for noise, _ in facts]), "slices": {}}
        state = {**self._state, "noise": noise, "dropped_rows": sum(dropped for _, dropped in facts)}
        if self._ranks.rank == 0:
            plain, tensors = apart(state, "run")
            parts = {name: Part(tensor) for name, tensor in tensors.items()}
            self._writers.append((f"{RUN}.safetensors", writer(parts, {"state": json.dumps(plain)}), True))

    def _add(self, name: str, parts: dict[str, Part], metadata: dict[str, str], *, secret: bool = False) -> None:
        if parts or (self._ranks.rank == 0 and not secret):
            self._writers.append((file_name(name, self._ranks.rank, self._ranks.size), writer(parts, metadata), secret))

    def write(self, folder: Path) -> dict[str, str]:
        """Writes them; the seal of each by its place in the folder."""
        places = ((f"{SECRET}/{name}" if secret else name, into, secret) for name, into, secret in self._writers)
        return {place: folders.write(folder / place, into, secret=secret) for place, into, secret in places}


def _agreed(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks that have drawn noise say of it; a rank whose share is empty has nothing to say."""
    drawn = [one for one in facts if one.get("rows") is not None] or facts
    found = {**drawn[0], "next_step": max(one["next_step"] for one in facts)}
    if any({**one, "next_step": found["next_step"]} != found for one in drawn):
        raise BatchStateError(
            "The ranks have not drawn the noise of the same steps: one of them failed in the middle of a step.",
            fix="Save after the next step that all of them make.",
        )
    return found
