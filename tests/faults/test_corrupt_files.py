"""Reading a damaged file returns a value or raises a typed error, and runs no code from the file."""

import hashlib
import json
import random
import sys
import warnings

import pytest
import torch
from faults.broken_files import damage_bytes, damage_tree
from faults.neighbours import mlp, private, tensors
from plans import CONFIGS

from dpengine import PrivacyEngine
from dpengine.accounting import GaussianEvent, Ledger, PoissonGaussianEvent, RepeatAndSelectEvent
from dpengine.checkpoint import tensor_files
from dpengine.checkpoint.folder import join_tensors, split_tensors
from dpengine.errors import CorruptFileError, LedgerError, PrivacyWarning
from dpengine.plan import DPSGDConfig
from dpengine.report import PrivacyReport

CODE_EVENTS = {
    "exec",
    "compile",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "pickle.find_class",
    "ctypes.dlopen",
}


class _AuditRecorder:
    """Records audit events of code execution while it is active."""

    def __init__(self):
        self.on, self.seen = False, []
        sys.addaudithook(self._record)  # hooks cannot be removed

    def _record(self, event, args):
        if self.on and event in CODE_EVENTS:
            self.seen.append((event, str(args)[:100]))


@pytest.fixture(scope="module")
def watch():
    return _AuditRecorder()


def tensor_file(folder):
    """Returns the bytes of a tensor file, a reader, and the error of damaged files."""
    path = folder / "x.safetensors"
    parts = {"w": tensor_files.Shard(torch.ones(2, 3), (0, 0)), "b": tensor_files.Shard(torch.arange(4))}
    tensor_files.writer(parts, {"state": "{}"})(path)

    def read(data):
        path.write_bytes(data)
        with tensor_files.StoredTensors([path]) as stored:
            return [stored.read(name) for name in stored.names]

    return path.read_bytes(), read, CorruptFileError


def state_file(folder):
    state = {"source": {"key": "00" * 32, "incarnation": 3}, "last_step": 4, "noise": {"slices": {0: torch.ones(2)}},
             "clipping": (1.0, float("inf")), "examples": [None, "ab"]}  # fmt: skip
    plain, tensors = split_tensors(state, "run")
    return json.dumps(plain).encode(), lambda data: join_tensors(parsed(data), tensors), CorruptFileError


def ledger_state():
    ledger = Ledger()
    ledger.charge(PoissonGaussianEvent(0.01, 1.5), count=30)
    ledger.charge(GaussianEvent(4.0), count=2, kind="void")
    ledger.charge(RepeatAndSelectEvent(((GaussianEvent(9.0), 3),), 10.0))
    return ledger.state_dict()


def ledger_file(folder):
    return json.dumps(ledger_state()).encode(), lambda data: Ledger().load_state_dict(parsed(data)), LedgerError


def engine_file(folder):
    whole = json.dumps({"ledger": ledger_state(), "delta": 1e-5}).encode()
    return whole, lambda data: PrivacyEngine().load_state_dict(parsed(data)), LedgerError


def plan_file(folder):
    return CONFIGS["independent"].to_json().encode(), lambda data: DPSGDConfig.from_json(as_text(data)), ValueError


def report_file(folder):
    engine = private(mlp(), tensors(), noise_multiplier=1.0)[0]
    text = engine.report().to_json()
    return text.encode(), lambda data: PrivacyReport.from_json(as_text(data)), CorruptFileError


def report_file_with_new_digest(folder):
    """Returns the bytes of a report, a reader that recomputes the digest of the damaged report, and the error."""
    whole, read, rejection = report_file(folder)
    document = json.loads(whole)
    document.pop("digest")

    def sealed(data):
        found = parsed(data)
        text = json.dumps(found, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        if isinstance(found, dict):
            found["digest"] = hashlib.sha256(text.encode("utf-8", errors="replace")).hexdigest()
        return read(json.dumps(found).encode())

    return json.dumps(document).encode(), sealed, rejection


def as_text(data):
    return data.decode("utf-8", errors="replace")


class NotJson(Exception):
    """Raised for bytes that are not JSON; the functions under test receive parsed values."""


def parsed(data):
    try:
        return json.loads(as_text(data))
    except (ValueError, RecursionError) as error:
        raise NotJson from error


READERS = {  # and the number of files in the nightly run; only tensor files are written to disk
    "tensors": (tensor_file, 10_000),
    "state": (state_file, 22_000),
    "ledger": (ledger_file, 22_000),
    "engine": (engine_file, 20_000),
    "plan": (plan_file, 20_000),
    "report": (report_file, 5_000),
    "sealed report": (report_file_with_new_digest, 1_000),
}


def read_damaged_files(name, folder, watch, count):
    """Reads ``count`` damaged files; returns the numbers of rejected, readable and non-JSON files."""
    whole, read, rejection = READERS[name][0](folder)
    choose, tree = random.Random(name), None if name == "tensors" else json.loads(whole)
    found = {"rejected": 0, "read": 0, "not json": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        read(whole)  # runs deferred imports
        watch.seen.clear()
        for number in range(count):
            if tree is None or choose.random() < 0.5:
                data = damage_bytes(choose, whole)
            else:
                data = json.dumps(damage_tree(choose, json.loads(whole))).encode()
            watch.on = True
            try:
                read(data)
                outcome = "read"
            except rejection:
                outcome = "rejected"
            except NotJson:
                outcome = "not json"
            except BaseException as error:
                raise AssertionError(f"file {number} of {name}: {data!r}") from error
            finally:
                watch.on = False
            found[outcome] += 1
    assert not watch.seen, watch.seen[:3]
    return found


@pytest.mark.parametrize("name", READERS)
@pytest.mark.hazard("P5")
def test_300_corrupt_files_are_rejected_or_read(tmp_path, watch, name):
    found = read_damaged_files(name, tmp_path, watch, 300)
    assert found["rejected"] > 50


@pytest.mark.nightly
@pytest.mark.parametrize("name", READERS)
@pytest.mark.hazard("P5")
def test_100_000_corrupt_files_are_rejected_or_read(tmp_path, watch, name):
    count = READERS[name][1]
    found = read_damaged_files(name, tmp_path, watch, count)
    assert sum(found.values()) == count and found["rejected"] > count / 5
    assert sum(count for _, count in READERS.values()) >= 100_000


@pytest.mark.hazard("P5")
def test_the_audit_hook_records_unpickling_and_exec(watch):
    import pickle

    watch.seen.clear()
    watch.on = True
    try:
        with pytest.raises(Exception, match="nothing"):
            pickle.loads(b"cnothing\nnothing\n.")
        exec("pass")
    finally:
        watch.on = False
    assert {event for event, _ in watch.seen} >= {"pickle.find_class", "exec"}
