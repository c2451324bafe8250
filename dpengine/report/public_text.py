"""What may stand in a report that leaves the machine: one line of text, without the folders of whoever ran it."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

_LONGEST = 500
_FOLDERS = re.compile(
    r"""(?: file:/*                             # a file URL,
          | (?<![\w:/\\.~-])                    # or not inside a web address, a relative path, a DOI or a fraction,
            (?: ~[\w.-]* | [A-Za-z]: )? )       # a home or a drive
        [/\\]+ (?=[^\s/\\]) (?: [^\s/\\]+ [/\\]+ )*  # folders
        ( [^\s/\\]* )                           # and the name that stays""",
    re.VERBOSE,
)


def public_text(text: str) -> str:
    """Returns the text on one line, of at most 500 characters, with absolute paths cut down to their last name.

    Args:
        text: Anything that a user wrote.

    Returns:
        Text without control characters and without absolute paths.
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    for path in (PureWindowsPath(line), PurePosixPath(line)):
        if path.is_absolute() and not path.anchor == str(path):
            line = path.name  # the whole text is one path, so folders with spaces in their names go too
    line = _FOLDERS.sub(r"\1", line)
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def public_values(value: Any) -> Any:
    """Applies `public_text` to every text in nested mappings and sequences; numbers stay as they are."""
    if isinstance(value, str):
        return public_text(value)
    if isinstance(value, Mapping):
        return {public_text(str(key)): public_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [public_values(item) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return float(value) if hasattr(value, "__float__") else public_text(str(value))
