"""Command line of the demonstration. Run ``python -m tutorials.demo`` from the repository root."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dpengine.errors import PrivacyError

from .run import run

_DESCRIPTION = """\
Trains on real data at several budgets and without privacy, prints a table, and writes the privacy report,
the trade-off plot and the model to a folder. Needs no network."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demonstration.

    Args:
        argv: Command-line arguments; None for ``sys.argv[1:]``.

    Returns:
        The exit code: 0, 1 after an error, 130 after Ctrl+C.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ε prints a question mark
    arguments = _parser().parse_args(argv)
    try:
        run(arguments)
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (PrivacyError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tutorials.demo",
        description=_DESCRIPTION,
        epilog="Example:\n  python -m tutorials.demo --data adult --out runs/demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data",
        choices=("adult", "fashion-mnist"),
        help="one data set; default: Adult, and FashionMNIST if it was downloaded",
    )
    parser.add_argument("--full", action="store_true", help="also train the CNN on the images")
    parser.add_argument("--quick", action="store_true", help="train for a few steps, to check that everything works")
    parser.add_argument("--out", type=_folder, default=Path("runs/demo"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--seed", type=int, metavar="N", help="reproducible noise, which is not secret: for tests only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file; pass a folder")
    return path


if __name__ == "__main__":
    sys.exit(main())
