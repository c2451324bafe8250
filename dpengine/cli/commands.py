"""Table of the commands and their options. The module of a command is imported only when the command runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from dpengine.accounting.accountant import ACCOUNTANTS
from dpengine.accounting.arguments import MAX_COUNT

_MAX_LENGTH = 40  # characters of a value in a message


class CommandError(Exception):
    """Raised for invalid use of a command."""


@dataclass(frozen=True)
class Command:
    """Command that calls ``run(arguments)`` of a module of this package. Its help shows the texts."""

    name: str
    module: str
    summary: str
    description: str
    example: str
    add_options: Callable[[argparse.ArgumentParser], None]


def _folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file; pass a folder")
    return path


def _count(text: str) -> int:
    try:
        value = Decimal(text)  # accepts 6e4; checked before the conversion to an integer, which could be huge
        if 1 <= value <= MAX_COUNT and value == value.to_integral_value():
            return int(value)
    except InvalidOperation:  # not a number, or NaN
        pass
    raise argparse.ArgumentTypeError(f"{_shortened(text)!r} is not an integer from 1 to 2**62")


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."


def _number(range_: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{_shortened(text)!r} is not a number {range_}")
        return value

    return read


def _size(text: str) -> int:
    value = _number("from 1 to 1e9", lambda value: 1 <= value <= 1e9)(text)
    return round(value)


_POSITIVE = _number("above 0", lambda value: 0 < value < math.inf)
_NOISE = _number("of at least 0", lambda value: 0 <= value < math.inf)
_DELTA = _number("strictly between 0 and 1", lambda value: 0 < value < 1)
_RATE = _number("above 0 and at most 1", lambda value: 0 < value <= 1)


def _calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epsilon", type=_POSITIVE, required=True, metavar="E", help="budget of the run")
    _run_options(parser)


def _epsilon(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sigma", type=_NOISE, required=True, metavar="S", help="the noise multiplier")
    _run_options(parser)


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=_count, required=True, metavar="N", help="examples in the training set")
    parser.add_argument("--batch", type=_count, required=True, metavar="B", help="expected size of a logical batch")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=_count, metavar="K", help="passes over the training set")
    length.add_argument("--steps", type=_count, metavar="K", help="logical batches, instead of --epochs")
    parser.add_argument("--delta", type=_DELTA, metavar="D", help="default: N to the power of -1.1")
    parser.add_argument(
        "--sample-rate",
        type=_RATE,
        metavar="Q",
        help="probability that an example is in a batch, as a constant; needs --steps; default: B / N. If --delta is "
        "also given, nothing is derived from N, and the statement is for add-or-remove-one",
    )
    parser.add_argument(
        "--relation",
        choices=("add-remove", "zero-out", "replace-one"),
        help="the neighboring relation. add-remove keeps N private, so it needs --sample-rate and --delta; "
        "default: add-remove if these are given, else zero-out",
    )
    _accountant(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--full", action="store_true", help="print the privacy statement instead of one line")
    output.add_argument("--json", action="store_true", help="print JSON, with the statement")


def _accountant(parser: argparse.ArgumentParser) -> None:
    choices = tuple(name for name, accountant in ACCOUNTANTS.items() if not accountant.simulates)
    parser.add_argument("--accountant", choices=choices, default="pld", help="default: %(default)s")


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a privacy_report.json or privacy_state.json, or a folder with one of them; the first is preferred",
    )
    parser.add_argument("--out", type=_folder, metavar="DIR", help="output folder; default: the folder of the file")
    _json(parser)


def _check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODULE:FACTORY", help="a function without arguments that returns the model")
    _json(parser)


def _ledger(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, summary, several_files in (
        ("show", "the runs of a file, and their charges", False),
        ("verify", "check that a file was not changed", False),
        ("total", "epsilon of all charges in one file, or in several files on the same data", True),
    ):
        child = actions.add_parser(action, help=summary, **help_texts("", f"dpengine ledger {action} run.ledger"))
        child.add_argument("paths", type=Path, nargs="+" if several_files else 1, metavar="FILE", help="a ledger file")
        if several_files:
            child.add_argument("--delta", type=_DELTA, metavar="D", help="default: that of the last run")
            _accountant(child)
        _json(child)


def _audit(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for row in _DETECTORS:
        _audit_direct(actions, *row)
    _audit_one_run(actions)


def _audit_one_run(actions: Any) -> None:
    parser = actions.add_parser(
        "one-run",
        help="a lower bound on epsilon from canaries in one training run",
        **help_texts(
            "Trains a small model on a part of Adult with canaries, and derives a lower bound on epsilon from guesses\n"
            "about them. For your own training, see dpengine.auditing.one_run. The exit code is 0 if no violation was\n"
            "found, 1 if the claim is refuted, and 2 if the result is inconclusive.",
            "dpengine audit one-run --canaries 2000 --steps 500 --delta 1e-5 --alpha 0.05",
        ),
    )
    parser.add_argument("--canaries", type=_count, default=2000, metavar="M", help="default: %(default)s")
    parser.add_argument("--steps", type=_count, default=500, metavar="T", help="default: %(default)s")
    parser.add_argument("--delta", type=_DELTA, default=1e-5, metavar="D", help="default: %(default)s")
    parser.add_argument(
        "--alpha", type=_DELTA, default=0.05, metavar="A", help="probability of a false alarm; default: %(default)s"
    )
    parser.add_argument(
        "--kind",
        choices=("gradient", "input"),
        default="gradient",
        help="gradient: the adversary inserts gradients and sees each release; input: examples with flipped labels, "
        "and the adversary sees only the last model; default: %(default)s",
    )
    noise = parser.add_mutually_exclusive_group()
    noise.add_argument("--epsilon", type=_POSITIVE, default=4.0, metavar="E", help="the claim; default: %(default)s")
    noise.add_argument("--noise-multiplier", type=_NOISE, metavar="S", help="instead of --epsilon")
    parser.add_argument(
        "--sample-rate",
        type=_RATE,
        default=0.1,
        metavar="Q",
        help="probability that an example is in a batch; default: %(default)s",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="reproducible coins, batches and noise, for tests")
    _json(parser)
    parser.set_defaults(module="audit_one_run")


_SUBJECT = (
    "MODULE:FACTORY is a function without arguments that returns (model, optimizer, loader, loss_of), optionally\n"
    "followed by the arguments of make_private; loss_of(model, batch) is the loss of a batch. The default is a small\n"
    "classifier. The exit code is 0 if no violation was found, 1 if there is one, and 2 if the result is inconclusive."
)
_DETECTORS = (
    ("quick", "Runs all direct detectors.", None, 0),
    ("replay", "Compares releases on data sets that differ in one unit.", "--pairs", 20),
    ("noise", "Tests the distribution of the noise.", "--coords", 1_000_000),
    ("sampler", "Tests the distribution of batches.", "--draws", 3000),
)
"""Name and description of each direct detector, and the option for its size, with the default."""


def _audit_direct(actions: Any, name: str, description: str, size: str | None, default: int) -> None:
    texts = help_texts(f"{description}\n{_SUBJECT}", f"dpengine audit {name} mytraining:make")
    parser = actions.add_parser(name, help=description.rstrip("."), **texts)
    parser.add_argument("make", nargs="?", metavar="MODULE:FACTORY", help="function that returns your own training")
    if size is None:
        parser.add_argument("--only", nargs="+", metavar="CODE", help="codes of the detectors to run, such as DN")
    else:
        parser.add_argument(size, type=_size, default=default, metavar="N", dest="size", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="K", help="for batches and noise; default: %(default)s")
    _json(parser)
    parser.set_defaults(module="audit_direct")


def help_texts(description: str, example: str) -> dict[str, Any]:
    """Returns the keyword arguments of a parser for the help texts of a command."""
    texts = {"description": description, "epilog": f"Example:\n  {example}"}
    return texts | {"formatter_class": argparse.RawDescriptionHelpFormatter}


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


COMMANDS = (
    Command(
        "calibrate",
        "budget",
        "the noise for a budget",
        "Computes the smallest noise multiplier for DP-SGD with Poisson batches within a budget.",
        "dpengine calibrate --epsilon 3 --delta 1e-5 --n 60000 --batch 2048 --epochs 20",
        _calibrate,
    ),
    Command(
        "epsilon",
        "budget",
        "the privacy cost of a run",
        "Computes the privacy cost of DP-SGD with Poisson batches for a given noise.",
        "dpengine epsilon --sigma 1.1 --delta 1e-5 --n 60000 --batch 2048 --epochs 20",
        _epsilon,
    ),
    Command(
        "report",
        "rebuild",
        "write the report of a run again",
        "Writes privacy_report.json, .md and .html again from the privacy_report.json of a run, or from its\n"
        "privacy_state.json; prints the statement. A report that was truncated or edited is rejected: its digest\n"
        "is a checksum against accidental edits, not a signature.",
        "dpengine report runs/demo",
        _report,
    ),
    Command(
        "check",
        "check_model",
        "whether a model can be trained privately",
        "Lists for each layer of a model how its per-sample gradients are computed.\n"
        "The exit code is 1 if a layer prevents private training.",
        "dpengine check mypackage.models:make_model",
        _check,
    ),
    Command(
        "ledger",
        "ledgers",
        "the privacy cost in ledger files",
        "Reads ledger files, which PrivacyEngine(ledger=...) writes. Epsilon is computed from the files alone.\n"
        "A file that was edited or truncated is rejected. Its checksums detect accidents, not forgery by its owner.",
        "dpengine ledger total run.ledger --delta 1e-5",
        _ledger,
    ),
    Command(
        "audit",
        "audit_direct",
        "test the guarantee by experiments",
        "Tests the guarantee by experiments. A pass means that no violation was found.",
        "dpengine audit quick",
        _audit,
    ),
    Command(
        "doctor",
        "doctor",
        "versions and devices, for a bug report",
        "Prints information for a bug report: versions, devices, accountants, noise generators.",
        "dpengine doctor",
        _json,
    ),
)
