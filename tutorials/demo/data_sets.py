"""Lists the data sets and models that can be downloaded, and downloads one by name.

python -m tutorials.demo.data_sets list
python -m tutorials.demo.data_sets get fashion-mnist
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from dpengine.cli.screen import columns
from dpengine.errors import MissingDependencyError

from .fetch import fetch
from .sources import GET, SOURCES, find_files


def main(argv: Sequence[str] | None = None) -> int:
    """Lists the data sets, or downloads one.

    Args:
        argv: Command-line arguments; None for ``sys.argv[1:]``.

    Returns:
        The exit code: 0, or 1 if a download failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tutorials.demo.data_sets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    list_parser = actions.add_parser("list", help="list all names, and whether the files are on this machine")
    list_parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    get_parser = actions.add_parser("get", help="download one and check its SHA-256")
    get_parser.add_argument("name", choices=SOURCES, metavar="NAME", help=", ".join(SOURCES))
    arguments = parser.parse_args(argv)
    if arguments.action == "list":
        _list(as_json=arguments.json)
        return 0
    try:
        _get(arguments.name)
    except (MissingDependencyError, OSError, ValueError) as error:
        print(f"data_sets: {error}", file=sys.stderr)
        return 1
    return 0


def _list(*, as_json: bool) -> None:
    rows = [
        {"name": name, "title": source.title, "licence": source.licence, "here": find_files(name) is not None}
        for name, source in SOURCES.items()
    ]
    if as_json:
        print(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    body = [(row["name"], "yes" if row["here"] else "no", row["title"], row["licence"]) for row in rows]
    print(columns([("name", "here", "title", "licence"), *body]))
    print(f"\nTo download one: {GET} NAME")


def _get(name: str) -> None:
    paths = fetch(name)
    source = SOURCES[name]
    print(f"{source.title}\n  source    {source.origin}\n  licence   {source.licence}\n  citation  {source.citation}")
    for path in paths:
        print(f"  file      {path} (SHA-256 as expected)")


if __name__ == "__main__":
    sys.exit(main())
