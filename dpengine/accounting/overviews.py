"""Text and HTML representations of the engine, the loader, the ledger and the report."""

import html
from collections.abc import Mapping

MAX_ROWS = 20


def text_line(title: str, values: Mapping[str, object]) -> str:
    """Returns ``title(name=value, ...)``."""
    return f"{title}({', '.join(f'{name}={value}' for name, value in values.items())})"


def html_table(title: str, values: Mapping[str, object]) -> str:
    """Returns the title and the first ``MAX_ROWS`` values as HTML, escaped."""
    rows = [f"<tr><th>{_escaped(name)}</th><td>{_escaped(value)}</td></tr>" for name, value in values.items()]
    more = f"<p>and {len(rows) - MAX_ROWS} more</p>" if len(rows) > MAX_ROWS else ""
    return f"<p><b>{_escaped(title)}</b></p><table>{''.join(rows[:MAX_ROWS])}</table>{more}"


def _escaped(value: object) -> str:
    return html.escape(str(value))
