"""Locking of a ledger file, failed writes, and rejection of damaged or forged files."""

import errno
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import inside
import pytest
import torch
from ledger_runs import Run

from dpengine import PrivacyEngine
from dpengine.accounting import GaussianEvent, Ledger
from dpengine.accounting.ledger import steps_of
from dpengine.distributed.ranks import Ranks
from dpengine.errors import LedgerError
from dpengine.ledger_file import file as ledger_file
from dpengine.ledger_file import read, run_ledger
from dpengine.ledger_file.file import LedgerFile
from dpengine.ledger_file.lines import sealed
from dpengine.ledger_file.run_ledger import RunLedger
from dpengine.noise import BandMF


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ledger"


HOLD = """
import sys
from pathlib import Path
from dpengine.ledger_file.engine_ledger import open_ledger
one = open_ledger(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_second_process_cannot_open_the_file_until_the_first_exits(path):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    with pytest.raises(LedgerError, match="locked by another process"):
        Run(path)
    other.communicate("")
    assert Run(path).train(1).engine.ledger.steps == 1


FORKED = """
import os, sys, time
from pathlib import Path
from dpengine.ledger_file.engine_ledger import open_ledger
one = open_ledger(Path(sys.argv[1]))
if os.fork() == 0:
    time.sleep(60)
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_fork_of_a_process_that_died_does_not_hold_the_file(path):
    other = subprocess.Popen([sys.executable, "-c", FORKED, str(path)], stdout=subprocess.PIPE, start_new_session=True)
    assert other.stdout.readline() == b"held\n"
    other.kill()
    other.wait()
    try:
        assert Run(path).train(1).engine.ledger.steps == 1
    finally:
        os.killpg(other.pid, signal.SIGKILL)


@pytest.mark.parametrize("content", [b"my notes", b'{"a": 1}', b"x" * 5000], ids=["text", "json", "long"])
def test_a_file_of_one_line_that_is_not_a_ledger_is_not_modified(path, content):
    path.write_bytes(content)
    with pytest.raises(LedgerError, match="is not a ledger"):
        Run(path)
    assert path.read_bytes() == content


def test_a_last_line_up_to_its_seal_counts(path):
    Run(path).train(3).gone()
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert steps_of(read(path).history) == 3
    assert Run(path).train(1).engine.ledger.steps == 4
    assert steps_of(read(path).history) == 4


@pytest.mark.parametrize("cut", [2, 30])
def test_an_incomplete_last_line_is_dropped(path, cut):
    Run(path).train(3).gone()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert Run(path).train(1).engine.ledger.steps == 3
    assert path.read_bytes().startswith(whole[: whole.rindex(b"\n", 0, -1) + 1])
    assert steps_of(read(path).history) == 3


def test_a_created_but_unwritten_file_is_a_new_one(path):
    path.write_bytes(b'{"seq":0,"kind":"led')
    assert Run(path).train(1).engine.ledger.steps == 1


@pytest.mark.parametrize("failing", ["pwrite", "sync"])
def test_a_step_that_cannot_be_written_is_rejected_and_leaves_the_file_unchanged(path, monkeypatch, failing):
    run = Run(path).train(2)
    weights, content = run.model.weight.detach().clone(), path.read_bytes()
    full = OSError(errno.ENOSPC, "No space left on device")

    def half(file, data, place):
        os.lseek(file, place, os.SEEK_SET)
        os.write(file, data[: len(data) // 2])
        raise full

    def fail(file):
        raise full

    with monkeypatch.context() as patch:
        if failing == "pwrite":
            patch.setattr("dpengine.ledger_file.file.os.pwrite", half)
        else:
            patch.setattr("dpengine.ledger_file.file._sync", fail)
        with pytest.raises(LedgerError, match="No space left"):
            run.train(1)
        assert torch.equal(run.model.weight, weights) and path.read_bytes() == content
        assert run.engine.ledger.steps == 3  # the discarded batch counts and is written with the next charge
        assert inside.state(run.engine).zero
    if failing == "pwrite":
        run.train(1)
        assert run.engine.ledger.steps == steps_of(read(path).history) == 4
    else:  # the content on disk is unknown
        with pytest.raises(LedgerError, match="can no longer be written"):
            run.train(1)


@pytest.mark.parametrize("noise", [None, BandMF(num_bands=2)], ids=["gaussian", "bandmf"])
def test_batches_that_were_discarded_while_the_disk_was_full_are_charged_later(path, monkeypatch, noise):
    run = Run(path, noise=noise, steps=12)
    sync, full = ledger_file._sync, []

    def sometimes(file):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(ledger_file, "_sync", sometimes)

    def take_back(self):
        os.ftruncate(self._file, self._size)
        self._broken = ""

    monkeypatch.setattr(LedgerFile, "_truncate", take_back)
    for step in range(12):
        full[:] = [step] if step % 2 else []
        if full:
            with pytest.raises(LedgerError, match="No space"):
                run.train(1)
        else:
            run.train(1)
    full.clear()
    assert run.engine.ledger.steps == 12  # discarded batches count immediately
    assert steps_of(read(path).history) == 11  # and are written with the next one that is released
    run.engine.detach(run.model)
    assert steps_of(read(path).history) == 12
    assert sum(charge.count for charge in read(path).history if charge.kind == "void") == 6


def test_no_step_is_taken_from_a_settled_reservation(path):
    run = Run(path, reserve=10).train(2)
    inside.close_ledger_file(run.engine)  # as at the end of the process, while a thread still trains
    weights = run.model.weight.detach().clone()
    with pytest.raises(LedgerError):
        run.train(1)
    assert torch.equal(run.model.weight, weights) and steps_of(read(path).history) == 2


def test_steps_are_reserved_again_after_a_settlement_during_the_run(path):
    run = Run(path, reserve=10).train(2)
    inside.settle_ledger_file(run.engine)
    assert steps_of(read(path).history) == 2
    run.train(1)
    assert steps_of(read(path).history) == 2 + 10


def test_threads_that_share_a_file_lose_no_charge(path):
    runs, failed = [Run(path, reserve=2) for _ in range(3)], []

    def work(run):
        try:
            for number in range(15):  # each charge has a distinct event
                event = GaussianEvent(1.0 + 100 * runs.index(run) + number)
                inside.charge(run.engine, event, kind="void" if number % 2 else "release")
        except LedgerError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and runs[0].engine.ledger.steps == 45
    runs[0].gone()
    assert steps_of(read(path).history) == 45


def test_an_interrupt_at_any_line_of_a_write_leaves_a_readable_file_and_no_release_uncharged(path):
    """Interrupts at every third line that the two writing modules execute in six charges."""
    names = {ledger_file.__file__, run_ledger.__file__}
    for place in itertools.count(1, 3):
        target = path.with_name(f"{place}.ledger")
        file = LedgerFile(target)
        file.append(opened("r", file.session))
        ledger = RunLedger(Ledger(), "r", Ranks(), file, reserve=2)
        made, left = 0, place

        def trace(frame, event, argument):
            nonlocal left
            if frame.f_code.co_filename not in names:
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
            return trace

        for _ in range(6):
            try:
                sys.settrace(trace)
                ledger.charge(GaussianEvent(1.0), max_reserved=lambda: 5)
                made += 1
            except (KeyboardInterrupt, LedgerError):
                pass
            finally:
                sys.settrace(None)
        assert steps_of(read(target).history) >= made
        file.close()
        assert steps_of(read(target).history) >= made
        if left > 0:
            break
    assert place > 300


def test_a_model_is_detached_even_if_the_file_cannot_be_written(path):
    run = Run(path).train(1)
    path.unlink()
    next(iter(run.loader))
    with pytest.raises(LedgerError):
        run.engine.detach(run.model)
    run.optimizer.zero_grad()
    run.model(torch.ones(2, 4)).sum().backward()
    assert not inside.is_attached(run.engine) and run.model.weight.grad is not None


def test_a_step_is_rejected_after_the_file_was_changed_moved_or_deleted(path):
    run = Run(path).train(1)
    content = path.read_bytes()
    for change in (
        lambda: path.write_bytes(content + b"x"),
        lambda: path.unlink(),
        lambda: path.write_bytes(content),  # another file of that name
    ):
        change()
        weights = run.model.weight.detach().clone()
        with pytest.raises(LedgerError, match="was changed, moved or deleted"):
            run.train(1)
        assert torch.equal(run.model.weight, weights)


def charge_in_child(run, answers):
    try:
        inside.charge(run.engine, GaussianEvent(1.0))
    except LedgerError as error:
        answers.put(str(error))


@pytest.mark.hazard("N4")
def test_a_forked_process_neither_charges_nor_settles(path):
    run = Run(path, reserve=5).train(5)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=charge_in_child, args=(run, answers))
    child.start()
    assert "forked" in answers.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    run.train(2).gone()
    assert steps_of(read(path).history) == 7


def edited(path, change):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(change(lines)))


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [*lines[:3], *lines[4:]],
        lambda lines: [line.replace(b'"count":1', b'"count":0') for line in lines],
        lambda lines: [b"text\n"],
        lambda lines: [*lines, b"\n"],
    ],
    ids=["taken out", "edited", "another file", "an empty line"],
)
@pytest.mark.hazard("P1")
def test_an_edited_file_is_rejected_before_anything_is_changed(path, change):
    Run(path).train(3).gone()
    edited(path, change)
    content = path.read_bytes()
    with pytest.raises(LedgerError, match="backup"):
        PrivacyEngine(ledger=path)
    assert path.read_bytes() == content


# Inconsistent entries with valid seals. The run of the file is "r", and its event has the number 2.
IMPOSSIBLE = {
    "an unknown kind": [("gift", {"run": "r"})],
    "an unknown field": [("charge", {"run": "r", "event": 2, "count": 1, "of": "release", "discount": 1})],
    "a missing field": [("charge", {"run": "r", "event": 2, "of": "release"})],
    "a count of 0": [("charge", {"run": "r", "event": 2, "count": 0, "of": "release"})],
    "a negative count": [("charge", {"run": "r", "event": 2, "count": -3, "of": "release"})],
    "a count that is no number": [("charge", {"run": "r", "event": 2, "count": "1", "of": "release"})],
    "an unknown charge": [("charge", {"run": "r", "event": 2, "count": 1, "of": "gift"})],
    "an unknown event": [("charge", {"run": "r", "event": 1, "count": 1, "of": "release"})],
    "a run that was not opened": [("charge", {"run": "s", "event": 2, "count": 1, "of": "release"})],
    "a run opened twice": [("open", "again")],
    "a second beginning": [("ledger", {"schema": 1, "id": "x"})],
    "more used than reserved": [
        ("reserve", {"run": "r", "event": 2, "count": 3}),
        ("settle", {"run": "r", "reserve": 3, "used": {"release": 4}}),
    ],
    "settled twice": [
        ("reserve", {"run": "r", "event": 2, "count": 3}),
        ("settle", {"run": "r", "reserve": 3, "used": {"release": 2}}),
        ("settle", {"run": "r", "reserve": 3, "used": {"release": 1}}),
    ],
    "a negative use": [
        ("reserve", {"run": "r", "event": 2, "count": 3}),
        ("settle", {"run": "r", "reserve": 3, "used": {"release": 4, "void": -2}}),
    ],
    "what was not reserved settled": [
        ("charge", {"run": "r", "event": 2, "count": 3, "of": "release"}),
        ("settle", {"run": "r", "reserve": 3, "used": {"release": 1}}),
    ],
    "settled by a later process": [
        ("reserve", {"run": "r", "event": 2, "count": 3}),
        ("open", "another session"),
        ("settle", {"run": "r", "reserve": 3, "used": {"release": 0}}),
    ],
    "charged after its end": [
        ("close", {"run": "r"}),
        ("charge", {"run": "r", "event": 2, "count": 1, "of": "release"}),
    ],
    "a damaged event": [("event", {"event": {"type": "gaussian", "noise_multiplier": -1}})],
}


def opened(run, session):
    empty = {"about": {"unit": "training example"}, "asked": {}, "versions": {}, "noise": {}, "processes": 1}
    return "open", {"run": run, "session": session, "date": "2026-01-01T00:00Z", **empty}


def forged(path, added, *, schema=1):
    entries = [("ledger", {"schema": schema, "id": "i"}), opened("r", "s")]
    entries.append(("event", {"event": {"type": "gaussian", "noise_multiplier": 1.0}}))
    for kind, fields in added:
        known = {"again": opened("r", "s"), "another session": opened("q", "t")}
        entries.append(known[fields] if isinstance(fields, str) else (kind, fields))
    last, data = None, b""
    for kind, fields in entries:
        line, last = sealed(last, kind, fields)
        data += line
    path.write_bytes(data)


@pytest.mark.parametrize("entries", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_inconsistent_entries_are_rejected(path, entries):
    forged(path, entries)
    with pytest.raises(LedgerError, match=r"line \d+ .*|event"):
        read(path)


def test_consistent_entries_are_read(path):
    reserved = ("reserve", {"run": "r", "event": 2, "count": 3})
    used = ("settle", {"run": "r", "reserve": 3, "used": {"release": 1, "void": 1}})
    forged(
        path, [reserved, used, ("charge", {"run": "r", "event": 2, "count": 2, "of": "clip"}), ("close", {"run": "r"})]
    )
    assert [(charge.kind, charge.count) for charge in read(path).history] == [("release", 1), ("void", 1), ("clip", 2)]


@pytest.mark.parametrize("schema", [0, 2])
@pytest.mark.hazard("P7")
def test_another_schema_is_rejected_by_its_number(path, schema):
    forged(path, [], schema=schema)
    with pytest.raises(LedgerError, match=rf"schema {schema}; this version reads 1"):
        PrivacyEngine(ledger=path)
