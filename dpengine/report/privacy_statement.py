"""Privacy statement of a run: the guarantee, its assumptions and its limits."""

from __future__ import annotations

import textwrap

from . import sentences
from .assumptions import assumptions
from .facts import RunFacts
from .figures import Figures
from .other_versions import checked_figures, origin_of_numbers

_WIDTH = 100


def statement(facts: RunFacts) -> str:
    """Returns the complete statement of the guarantee of a run.

    The statement of a run without noise has ``ε = ∞``. If the sampling scheme has no privacy analysis, it has no
    epsilon. Every number is an upper bound, rounded up.

    Args:
        facts: The facts of the run.

    Returns:
        Plain text of several lines.
    """
    return statement_of(facts, checked_figures(facts))


def statement_of(facts: RunFacts, figures: Figures) -> str:
    """Returns the statement of a run for computed figures."""
    lines = [sentences.headline(facts, figures)]
    lines += [_entry(f"{name}: ", text) for name, text in entries(facts, figures).items()]
    lines.append("Assumptions, and whether they hold in this run:")
    lines += [_entry(f"  [{item.holds}] ", f"{item.name}: {item.evidence}.") for item in assumptions(facts)]
    lines.append("Covered:")
    lines += [_entry("  - ", text) for text in sentences.covers(facts)]
    lines.append("Not covered:")
    lines += [_entry("  - ", text) for text in sentences.excludes(facts)]
    return "\n".join(lines) + "\n"


def entries(facts: RunFacts, figures: Figures) -> dict[str, str]:
    """Returns the entries that the statement, model card and page share, by name. Empty entries are omitted."""
    central = f"{sentences.SETTING} differential privacy: the trainer sees the data, others see released results only."
    texts = {
        "Setting": central,
        "Unit": f"one {facts.accounting.unit}.",
        "Adjacency": f"{facts.accounting.relation.value}: {sentences.neighbors(facts)}",
        "Numbers": origin_of_numbers(facts, figures),
        "Also": sentences.other_measures(facts, figures),
        "Bound": sentences.unamplified(facts, figures),
        "Mechanism": sentences.mechanism(facts),
        "Steps": sentences.budget(facts, figures),
        "Accounting": sentences.accounting(figures),
        "Audit": sentences.audit(facts),
    }
    return {name: text for name, text in texts.items() if text}


def _entry(lead: str, text: str) -> str:
    return textwrap.fill(lead + text, _WIDTH, subsequent_indent="    ", break_on_hyphens=False)
