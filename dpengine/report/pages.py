"""Renders a report as a self-contained HTML page and as a model card in Markdown."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from dpengine.accounting.rounding import percent_up, round_up, round_up_delta

from . import sentences
from .assumptions import assumptions, stamps
from .facts import RunFacts
from .figures import Figures, attack_bound, epsilon_by_step
from .history_rows import rows_of
from .privacy_statement import entries

if TYPE_CHECKING:
    import jinja2

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~&])")
_MAX_RUNS = 12
_TICKS = 5


def html_page(facts: RunFacts, figures: Figures, card: str) -> str:
    """Renders the page, which loads no other files. Its only script copies the model card."""
    context = _context(facts, figures) | {"card": card, "charts": _charts(facts, figures)}
    return _template("page.html.jinja", autoescape=True).render(context)


def model_card(facts: RunFacts, figures: Figures) -> str:
    """Renders the model card in Markdown, with front matter and an entry for the DP Deployments Registry."""
    return _template("card.md.jinja", autoescape=False).render(_context(facts, figures))


@functools.cache
def _template(name: str, *, autoescape: bool) -> jinja2.Template:
    import jinja2  # only reports need it

    source = resources.files("dpengine.report").joinpath(name).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["md"] = lambda text: _MARKDOWN.sub(r"\\\1", str(text))
    # A string in JSON is valid YAML. YAML 1.1 reads 1e-05 as a string: a number needs a decimal point.
    environment.filters["quoted"] = lambda text: json.dumps(text, ensure_ascii=False)
    environment.filters["number"] = lambda text: text if "." in text else text.replace("e", ".0e")
    return environment.from_string(source)


def _context(facts: RunFacts, figures: Figures) -> dict[str, Any]:
    spent = figures.spent
    runs = rows_of(facts.accounting.history)
    checked = assumptions(facts)
    return {
        "facts": facts,
        "figures": figures,
        "data": {key: facts.dataset.description.get(key) for key in ("name", "source", "licence")},
        "entries": entries(facts, figures),
        "stamps": stamps(facts, figures),
        "bracketed_stamps": _bracketed_stamps(facts, figures),
        "headline": sentences.headline(facts, figures),
        "epsilon": None if spent is None else round_up(spent.epsilon),
        "registry_epsilon": None if spent is None else round_up(spent.epsilon, 3),  # enough for a registry
        "mu": None if spent is None else round_up(spent.mu),
        "advantage": None if spent is None else percent_up(spent.advantage),
        "delta": round_up_delta(facts.accounting.delta),
        "explanation": sentences.explanation(facts, figures),
        "neighbors": sentences.neighbors(facts),
        "assumptions": checked,
        "no_guarantee": any(item.light == "red" for item in checked),
        "covers": sentences.covers(facts),
        "excludes": sentences.excludes(facts),
        "utility": sentences.utility(facts),
        "runs": runs[:_MAX_RUNS],
        "more_runs": max(0, len(runs) - _MAX_RUNS),
        "profile": [(round_up_delta(delta), round_up(eps)) for delta, eps in figures.profile],
        "examples": facts.dataset.num_examples if facts.num_examples_is_public else None,
        "significant": lambda value: f"{value:.6g}" if isinstance(value, (int, float)) else "–",
        "hashes": _hashes(facts.dataset.description.get("sha256")),
    }


def _bracketed_stamps(facts: RunFacts, figures: Figures) -> str:
    return "".join(f" [{stamp}]" for stamp in stamps(facts, figures))


def _hashes(value: Any) -> dict[str, str]:
    if not value:
        return {}
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else {"": str(value)}


def _charts(facts: RunFacts, figures: Figures) -> list[dict[str, Any]]:
    if figures.spent is None or not math.isfinite(figures.spent.epsilon) or figures.spent.epsilon <= 0:
        return []
    mark = _bracketed_stamps(facts, figures)
    attack = {
        "title": "Bound on membership attacks",
        "label": "bound on the true positive rate of a membership test, by its false positive rate",
        "note": f"No membership test lies above the solid line. The dashed line is guessing.{mark}",
        "x": _axis("false positive rate", 1.0, "{:.0%}".format),
        "y": _axis("true positive rate, at most", 1.0, "{:.0%}".format),
        "points": attack_bound(facts, figures),
        "reference": ((0.0, 0.0), (1.0, 1.0)),
    }
    # Epsilons by step are not comparable with a total that another version computed.
    return [_steps_chart(facts, mark), attack] if figures.recomputable else [attack]


def _steps_chart(facts: RunFacts, mark: str) -> dict[str, Any]:
    points = epsilon_by_step(facts)
    last, highest = points[-1]
    target = facts.accounting.target_epsilon
    shown = target if target is not None and target < 4 * highest else None
    top = 1.12 * max(highest, shown or 0.0)
    return {
        "title": "Privacy cost by step",
        "label": f"epsilon over {facts.steps} steps, up to {round_up(highest)}",
        "note": f"ε at δ = {round_up_delta(facts.accounting.delta)}, if training had stopped at that step.{mark}",
        "x": _axis("steps", last, "{:,.0f}".format if last >= 5 else "{:g}".format),
        "y": _axis("ε", top, "{:.6g}".format),
        "points": tuple((x / last, y / top) for x, y in points),
        "value": round_up(highest),
        "reference": () if shown is None else ((0.0, shown / top), (1.0, shown / top)),
    }


def _axis(label: str, high: float, form: Callable[[float], str]) -> dict[str, Any]:
    """Returns an axis from 0 to ``high``: its label, and the positions in [0, 1] and labels of about five ticks."""
    return {"label": label, "ticks": [(tick / high, form(tick)) for tick in _ticks(high)]}


def _ticks(high: float) -> list[float]:
    unit = 10.0 ** math.floor(math.log10(high / _TICKS))
    step = next(unit * factor for factor in (1, 2, 5, 10) if high / (unit * factor) <= _TICKS)
    return [step * i for i in range(math.floor(high / step + 1e-9) + 1)]
