"""Parses the arguments, runs a command, and converts errors to a message and an exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import dpengine
from dpengine.errors import InvalidBudgetError, PrivacyError

from .commands import COMMANDS, CommandError, help_texts
from .screen import columns

DONE, FAILED, INVALID_USE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0 on success, 1 for a negative result or a failure, 2 for invalid use."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ε shows a question mark instead of a traceback
    arguments = _parser().parse_args(argv)  # exits with code 2 on invalid use
    command = importlib.import_module(f".{arguments.module}", __package__)
    try:
        return int(command.run(arguments))
    except (CommandError, InvalidBudgetError) as error:
        return _failed(str(error), INVALID_USE)
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (PrivacyError, OSError) as error:
        return _failed(str(error), FAILED)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)


def _parser() -> argparse.ArgumentParser:
    listed = columns([(f"  {command.name}", command.summary) for command in COMMANDS])
    parser = argparse.ArgumentParser(
        prog="dpengine",
        description="Tools for PyTorch training with differential privacy.",
        epilog=f"commands:\n{listed}\n\nEach has its own help, with an example: dpengine calibrate --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dpengine {dpengine.__version__}")
    parsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, help="one of those below")
    for command in COMMANDS:
        child = parsers.add_parser(command.name, **help_texts(command.description, command.example))
        command.add_options(child)
        child.set_defaults(module=command.module)
    return parser


def _failed(message: str, code: int) -> int:
    print(f"dpengine: {message}", file=sys.stderr)
    return code
