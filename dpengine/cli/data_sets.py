"""``dpengine data``: what is known by name, and the only command that downloads."""

from __future__ import annotations

import json
from argparse import Namespace

from dpengine.data import SOURCES, fetch, find_files

from .commands import CommandError
from .main import WRONG_USE
from .screen import columns


def run(arguments: Namespace) -> int:
    """Lists the sets, or gets one."""
    if arguments.action == "get":
        return _get(arguments.name)
    rows = [
        {"name": name, "title": source.title, "licence": source.licence, "here": _is_here(name)}
        for name, source in SOURCES.items()
    ]
    if arguments.json:
        print(json.dumps(rows, ensure_ascii=False, indent=2))
    else:
        marks = {True: "yes", False: "no"}
        body = [(str(row["name"]), marks[bool(row["here"])], row["title"], row["licence"]) for row in rows]
        print(columns([("name", "here", "title", "licence"), *body]))  # type: ignore[list-item]
        print("\nTo download one: dpengine data get NAME")
    return 0


def _get(name: str) -> int:
    if name not in SOURCES:
        raise CommandError(f"no data set is called {name!r}. Choose one of: {', '.join(SOURCES)}.", exit_code=WRONG_USE)
    try:
        paths = fetch(name)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    source = SOURCES[name]
    print(f"{source.title}\n  source    {source.origin}\n  licence   {source.licence}\n  citation  {source.citation}")
    for path in paths:
        print(f"  file      {path} (SHA-256 as expected)")
    if not paths:
        print("  file      part of dpengine")
    return 0


def _is_here(name: str) -> bool:
    return not SOURCES[name].package or find_files(name) is not None
