"""Settings of every test: no network, one thread for each worker, the same draws in any order, and new notices.

``pytest --plant PB-7 TESTS`` runs tests with that bug planted in the engine; see `mutations`.
"""

import gc
import importlib.util
import os
import socket
import sys
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported, and for every process that a test starts
    os.environ["OMP_NUM_THREADS"] = "1"

import pytest

try:
    import torch
except ModuleNotFoundError:  # as in `make pythons`
    torch = None

from dpengine.errors import forget_notices

if torch is not None and "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
if torch is not None and importlib.util.find_spec("torchvision"):
    from models.operators import define_operators

    define_operators()

_LOCAL_NAMES = {None, "", b"", "localhost", "127.0.0.1", "::1", b"localhost", socket.gethostname()}


class NetworkRefused(RuntimeError):
    """A test tried to reach the network."""


def _reject_network(event: str, args: tuple) -> None:
    # An audit hook sees every socket of the process, forked workers of a DataLoader included, and nothing can unset it
    if event in {"socket.connect", "socket.sendto", "socket.sendmsg"}:
        if args[0].family != socket.AF_UNIX:
            raise NetworkRefused(f"{event}: tests must not use the network, got the address {args[1]!r}.")
    elif event in {"socket.getaddrinfo", "socket.gethostbyname"} and args[0] not in _LOCAL_NAMES:
        raise NetworkRefused(f"{event}: tests must not use the network, got the host {args[0]!r}.")


sys.addaudithook(_reject_network)


def pytest_addoption(parser):
    parser.addoption("--plant", metavar="ID", help="plant a bug of mutations.bugs.BUGS for the whole session")


def pytest_configure(config):
    if name := config.getoption("--plant"):
        from mutations.bugs import BUGS
        from mutations.planted import planted

        context = planted(BUGS[name])
        context.__enter__()
        config.add_cleanup(lambda: context.__exit__(None, None, None))


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items):
    """Marks all but one in n cases of a test with ``one_in(n, *names)`` as nightly, or with the marker ``others``.

    The numbers of a case's values are added up, as in a Latin square: each value of an argument keeps about one case
    in n. Which these are does not depend on what else is collected.
    """
    for item in items:
        for mark in item.iter_markers("one_in"):
            n, *names = mark.args
            if sum(_number_of_value(item, name) for name in names) % n:
                item.add_marker(mark.kwargs.get("others", "nightly"))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    gc.disable()  # it takes a third of the time to look for garbage among modules and syntax trees
    try:
        return (yield)
    finally:
        gc.freeze()  # a collection that a test asks for need not go through all tests and their modules
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``--dist loadfile``, one worker gets all files that start processes, and starts their server once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "launch" if file in starting else file

    starting = {
        path.relative_to(config.rootpath).as_posix()
        for path in Path(__file__).parent.rglob("test_*.py")
        if "from launch import" in path.read_text(encoding="utf-8")
    }
    return Scheduling(config, log)


PARAM = type(pytest.param())
_NUMBERS: dict[int, dict[tuple[int, ...], int]] = {}  # by the identity of a table, and of the values in a row


def _number_of_value(item, name):
    """The place in the table of the argument's values."""
    for mark in item.iter_markers("parametrize"):
        names, rows = mark.args
        names = [one.strip() for one in names.split(",")] if isinstance(names, str) else list(names)
        if name in names:
            if id(mark) not in _NUMBERS:
                values = [row.values if isinstance(row, PARAM) else row if len(names) > 1 else [row] for row in rows]
                _NUMBERS[id(mark)] = {tuple(map(id, row)): number for number, row in reversed([*enumerate(values)])}
            return _NUMBERS[id(mark)][tuple(id(item.callspec.params[one]) for one in names)]
    raise LookupError(f"{item.nodeid}: no table has this value of {name!r}")


@pytest.fixture(autouse=True)
def _fresh_notices():
    forget_notices()


@pytest.fixture(autouse=True)
def _same_draws_in_any_order():
    # Else what a test draws depends on the tests before it. torch.manual_seed formats the stack for each kind of GPU.
    if torch is not None:
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True)
def _no_open_records():
    yield
    loops = sys.modules.get("dpengine.independence.loop_record")
    for record in [] if loops is None else list(loops.OPEN_RECORDS):  # of loops that a test left in the middle
        record.close()


@pytest.fixture
def registries():
    """Registered rules: none before a test, and those from before it again after it."""
    from dpengine.grad_samplers.registered import REGISTERED, REGISTERED_NORMS

    tables = REGISTERED, REGISTERED_NORMS
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.fixture
def network_refused() -> type[NetworkRefused]:
    return NetworkRefused
