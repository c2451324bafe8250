"""Text and tables by which terminals and notebooks show the engine, the loader, the ledger and the report."""

import html
from collections.abc import Mapping

MOST_ROWS = 20


def text_line(title: str, values: Mapping[str, object]) -> str:
    """Returns ``title(name=value, ...)``."""
    return f"{title}({', '.join(f'{name}={value}' for name, value in values.items())})"


def html_table(title: str, values: Mapping[str, object]) -> str:
    """Returns the title and the first ``MOST_ROWS`` values as HTML, escaped."""
    rows = [f"<tr><th>{_escaped(name)}</th><td>{_escaped(value)}</td></tr>" for name, value in values.items()]
    more = f"<p>and {len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
    return f"<p><b>{_escaped(title)}</b></p><table>{''.join(rows[:MOST_ROWS])}</table>{more}"


def _escaped(value: object) -> str:
    return html.escape(str(value))
