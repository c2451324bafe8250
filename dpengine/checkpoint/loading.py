"""``load``: goes on with a run that was saved, on as many processes as there are now."""

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
from dpengine.engine.run import Run
from dpengine.errors import CorruptFileError, MechanismMismatchError
from dpengine.noise.share import drawn_places

from . import folder as folders
from . import spread
from .folder import together
from .layout import (
    EARLIER,
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
from .pieces import Stored, files_of
from .run_state import is_seeded, next_life, refuse_damaged, resumption


def load(folder: str | Path, engine: Engine, *, nothing_left_since: bool = False) -> None:
    """Goes on with a run that was saved: call ``make_private`` as the first time, then this, then train.

    Model, optimizer, what was spent and the place in the run are those of the checkpoint. Batches and noise from here
    on are fresh, so nothing is drawn twice; only a run with a seed goes on as if it had never stopped. What the saving
    process released afterwards, its cost included, is in the ledger file, if there is one. Else it is not known here:
    add it with ``engine.load_state_dict`` if its state is there.

    Noise that hangs together over steps begins anew, as a mechanism that adds to what was spent: that costs some more
    than the run would have. With ``nothing_left_since`` it goes on as the one matrix that was planned.

    The data set must be the same, in the same order. Its length is compared, and some of its examples, as far as they
    are the same each time they are read. How many processes there are, and how they share the model, may be as it was
    or not: the run that goes on is the same. Each of them calls this.

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
        RuntimeError: If another process failed.
    """  # noqa: DOC502 - what is called raises on our behalf
    run = only_run(engine)
    topology = run.step.passes.topology
    ranks = topology.everyone
    seals = ranks.each(lambda: _refuse_damage(folders.present(Path(folder)), ranks.rank, ranks.size))
    topology.check_consistent(checkpoint=seals[ranks.rank], nothing_left_since=nothing_left_since)
    with contextlib.ExitStack() as opened:
        files = _Files(opened)
        ranks.each(lambda: files.open(folders.present(Path(folder))))
        life = ranks.broadcast(next_life(files.state))
        ranks.each(lambda: files.prepare(run, engine, life, nothing_left_since=nothing_left_since))
        with _all_or_nothing(run):
            ranks.each(lambda: files.fill(run, engine))
            ranks.each(lambda: files.changes.apply(run))


def exists(folder: str | Path) -> bool:
    """Whether `load` finds a run there. A ``save`` that broke off may have left it beside the folder.

    Args:
        folder: Where it was saved.

    Returns:
        Whether there is one.
    """
    try:
        folders.present(Path(folder))
    except FileNotFoundError:
        return False
    return True


class _Files:
    """The files of a checkpoint, and what becomes of a run that takes them."""

    def __init__(self, opened: contextlib.ExitStack):
        self._opened = opened

    def open(self, folder: Path) -> None:
        """Reads what is small."""
        self._folder = folder
        seals = _seals(folder)
        names = [name.removeprefix(f"{SECRET}/") for name in seals]

        def stored(name: str, folder: Path) -> Stored:
            return self._opened.enter_context(Stored(folder / file for file in files_of(name, names)))

        self._model, self._optimizer = stored(MODEL, self._folder), stored(OPTIMIZER, self._folder)
        self._noise, kept = stored(NOISE, self._folder / SECRET), stored(RUN, self._folder / SECRET)
        tensors = {name: kept.read(name) for name in kept.names}
        self.state = together(_json(kept.metadata.get("state", ""), RUN), tensors)
        if not isinstance(self.state, dict) or self.state.get("version") != VERSION:
            version = self.state.get("version") if isinstance(self.state, dict) else None
            raise CorruptFileError(f"{RUN} has version {version!r}; this one reads {VERSION}.", fix=EARLIER)
        refuse_damaged(self.state)

    def prepare(self, run: Run, engine: Engine, life: int, *, nothing_left_since: bool) -> None:
        """Makes all that the run will have, and changes nothing."""
        topology = run.step.passes.topology
        if (nothing_left_since or is_seeded(self.state)) and self._noise.names:
            places = drawn_places(run.step.passes.buffer, topology.replicas)
            self.state["noise"]["slices"] = spread.cut_slices(self._noise, places)
        self.changes = resumption(
            run, self.state, engine.ledger.history, life=life, nothing_left_since=nothing_left_since
        )
        now = without_ties(model_inside(run.model), topology)
        _refuse_other_weights(now, self._model)
        self._weights = {name: spread.taken(self._model, name, like, topology) for name, like in now.items()}
        metadata = self._optimizer.metadata
        of = _json(metadata.get("of", ""), OPTIMIZER)
        if not isinstance(of, dict) or not all(isinstance(number, int) for number in of.values()):
            raise CorruptFileError(f"{OPTIMIZER} does not tell whose its tensors are.", fix=EARLIER)
        tensors = spread.optimizer_tensors(self._optimizer, of, run.optimizer, topology)
        self._others = together(_json(metadata.get("state", ""), OPTIMIZER), tensors)
        if not isinstance(self._others, dict):
            raise CorruptFileError(f"{OPTIMIZER} has no states.", fix=EARLIER)
        if self._others.keys() != companions(run).keys():
            raise MechanismMismatchError(
                f"The checkpoint has {list(self._others)}, and this run has {sorted(companions(run))}.",
                fix="Give make_private the same lr_scheduler= and grad_scaler=.",
            )
        self._spent = _json(folders.read(self._folder / PUBLIC).decode(errors="replace"), PUBLIC)

    def fill(self, run: Run, engine: Engine) -> None:
        """Gives model, companions and ledger what was stored."""
        # A tied tensor is there under its first name.
        model_inside(run.model).load_state_dict(self._weights, strict=False)
        for name, companion in companions(run).items():
            try:
                companion.load_state_dict(self._others[name])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CorruptFileError(f"The stored state does not fit the {name}: {error!r}.", fix=EARLIER) from error
        engine.load_state_dict(_marked_resumed(self._spent))


def _marked_resumed(spent: Any) -> Any:
    """Returns the state of an engine whose charges are marked as resumed, so that a ledger file records it too.

    Charges that are in a ledger file already keep their marks: that file has all later charges.
    """
    if not isinstance(spent, dict) or "anchor" in spent:
        return spent
    return spent | {"origins": states_of(dataclasses.replace(one, resumed=True) for one in origins_in(spent))}


@contextlib.contextmanager
def _all_or_nothing(run: Run) -> Iterator[None]:
    """Puts model and companions back if one of them does not take its state."""
    with contextlib.ExitStack() as undo:
        for one in (model_inside(run.model), *companions(run).values()):
            undo.callback(one.load_state_dict, copy.deepcopy(one.state_dict()))
        yield
        undo.pop_all()  # all is well: nothing is undone


def _refuse_damage(folder: Path, rank: int, ranks: int) -> str:
    """Refuses files that are not as they were saved. Each rank reads some of them; what they are sealed with."""
    for name, seal in list(_seals(folder).items())[rank::ranks]:
        if folders.digest(folder / name) != seal:
            raise CorruptFileError(f"{name} is not as it was saved.", fix=EARLIER)
    return folders.digest(folder / SECRET / SEALS)


def _seals(folder: Path) -> dict[str, str]:
    seals = _json(folders.read(folder / SECRET / SEALS).decode(errors="replace"), SEALS)
    if not isinstance(seals, dict) or not all(isinstance(name, str) and ".." not in name for name in seals):
        raise CorruptFileError(f"{SEALS} is damaged.", fix=EARLIER)
    if not {PUBLIC, f"{SECRET}/{RUN}.safetensors"} <= seals.keys():
        raise CorruptFileError(f"{SEALS} does not tell of all files.", fix=EARLIER)
    return seals


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{where} is damaged: {error}.", fix=EARLIER) from error


def _refuse_other_weights(now: Mapping[str, Tensor], stored: Stored) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in now.items()}
    found = {name: stored.shape(name) for name in stored.names}
    differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if differing:
        name = differing[0]
        raise MechanismMismatchError(
            f"The checkpoint is of another model: {len(differing)} tensors differ, the first is {name!r} "
            f"({found.get(name)}, now {expected.get(name)}).",
            fix="Build the model as the first time.",
        )
