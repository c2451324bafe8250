"""Renders a report as a self-contained HTML page and as a model card in Markdown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from dpengine.accounting.rounding import percent_up, round_up, round_up_delta
from dpengine.errors import MissingDependencyError

from . import sentences
from .assumptions import assumptions, stamps
from .charts import Axis, Line, line_chart
from .facts import RunFacts
from .figures import Figures, attack_bound, epsilon_by_step
from .history_rows import rows_of
from .other_versions import made_by

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~&])")
_SHOWN_RUNS = 12


def html_page(facts: RunFacts, figures: Figures, card: str) -> str:
    """Renders the page. It loads nothing, and its only script copies the model card."""
    context = _context(facts, figures) | {"card": card, "charts": _charts(facts, figures)}
    return _render("page.html.jinja", context, autoescape=True)


def model_card(facts: RunFacts, figures: Figures) -> str:
    """Renders the Markdown, with the front matter of a model card."""
    registry = "\n".join(_yaml(_registry_entry(facts, figures)))
    return _render("card.md.jinja", _context(facts, figures) | {"registry": registry}, autoescape=False)


def _render(name: str, context: Mapping[str, Any], *, autoescape: bool) -> str:
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependencyError("jinja2 is needed for reports:", fix="pip install jinja2") from error
    source = resources.files("dpengine.report").joinpath(name).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["md"] = lambda text: _MARKDOWN.sub(r"\\\1", str(text))
    return environment.from_string(source).render(context)


def _context(facts: RunFacts, figures: Figures) -> dict[str, Any]:
    spent = figures.spent
    runs = rows_of(facts.accounting.history)
    return {
        "facts": facts,
        "data": {key: facts.dataset.description.get(key) for key in ("name", "source", "licence")},
        "utility": {key: facts.utility.get(key) for key in ("metric", "value", "split")},
        "stamps": stamps(facts, figures),
        "mark": _bracketed_stamps(facts, figures),
        "headline": sentences.headline(facts, figures),
        "epsilon": None if spent is None else round_up(spent.epsilon),
        "mu": None if spent is None else round_up(spent.mu),
        "advantage": None if spent is None else percent_up(spent.advantage),
        "delta": round_up_delta(facts.accounting.delta),
        "refusal": figures.refusal,
        "plain": sentences.plain_words(facts, figures),
        "measures": sentences.other_measures(facts, figures),
        "unamplified": sentences.unamplified(facts, figures),
        "setting": sentences.SETTING,
        "neighbours": sentences.neighbours(facts),
        "budget": sentences.budget(facts, figures),
        "mechanism": sentences.mechanism(facts),
        "clipping": sentences.described(facts.plan.get("clipping")),
        "accounting": sentences.accounting(figures),
        "audit": sentences.audit(facts),
        "made_by": made_by(facts, figures),
        "assumptions": assumptions(facts),
        "void": any(item.light == "red" for item in assumptions(facts)),
        "covers": sentences.covers(facts),
        "excludes": sentences.excludes(facts),
        "runs": runs[:_SHOWN_RUNS],
        "more_runs": max(0, len(runs) - _SHOWN_RUNS),
        "profile": [(round_up_delta(delta), round_up(eps)) for delta, eps in figures.profile],
        "examples": facts.dataset.num_examples if facts.num_examples_is_public else None,
        "versions": {"dpengine": figures.version, "torch": facts.environment.torch},
        "significant": lambda value: f"{value:.6g}" if isinstance(value, (int, float)) else "–",
        "hashes": _hashes(facts.dataset.description.get("sha256")),
    }


def _bracketed_stamps(facts: RunFacts, figures: Figures) -> str:
    return "".join(f" [{stamp}]" for stamp in stamps(facts, figures))


def _hashes(value: Any) -> dict[str, str]:
    if not value:
        return {}
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else {"": str(value)}


def _charts(facts: RunFacts, figures: Figures) -> list[dict[str, str]]:
    if figures.spent is None or not math.isfinite(figures.spent.epsilon) or figures.spent.epsilon <= 0:
        return []
    mark = _bracketed_stamps(facts, figures)
    attack = {
        "title": "What an attacker can achieve",
        "svg": _attack_chart(facts, figures),
        "note": f"No membership test lies above the line. The dashed one is guessing.{mark}",
    }
    if not figures.are_ours:  # only the version that computed the total can compute the cost of each step
        return [attack]
    delta = round_up_delta(facts.accounting.delta)
    steps = {
        "title": "What each step cost",
        "svg": _steps_chart(facts),
        "note": f"ε at δ = {delta}, if the run had stopped there.{mark}",
    }
    return [steps, attack]


def _steps_chart(facts: RunFacts) -> str:
    points = epsilon_by_step(facts)
    last, highest = points[-1]
    lines = [Line(points, "line", f"{round_up(highest)}")]
    top, target = highest, facts.accounting.target_epsilon
    if target is not None and target < 4 * highest:
        top = max(highest, target)
        lines.insert(0, Line(((0.0, target), (last, target)), "reference"))
    title = f"epsilon over {facts.steps} steps, up to {round_up(highest)}"
    return line_chart(
        title,
        Axis("steps", 0.0, last, lambda v: f"{v:,.0f}" if last >= 5 else f"{v:g}"),
        Axis("ε", 0.0, 1.12 * top, lambda v: f"{v:.6g}"),
        lines,
        area_under=lines[-1],
    )


def _attack_chart(facts: RunFacts, figures: Figures) -> str:
    points = attack_bound(facts, figures)
    rate = Axis("false positive rate", 0.0, 1.0, lambda v: f"{v:.0%}")
    line = Line(points, "line")
    return line_chart(
        "bound on the true positive rate of a membership test, by its false positive rate",
        rate,
        Axis("true positive rate, at most", 0.0, 1.0, lambda v: f"{v:.0%}"),
        [Line(((0.0, 0.0), (1.0, 1.0)), "reference"), line],
        area_under=line,
    )


def _registry_entry(facts: RunFacts, figures: Figures) -> dict[str, Any]:
    """Returns the run under the field names of the Differential Privacy Deployments Registry."""
    spent = figures.spent
    # Three digits are enough for a registry, as long as they are rounded up.
    bound = "not claimed" if spent is None else round_up(spent.epsilon, 3).replace("∞", "inf")
    return {
        "basic": {"data_product_type": "Machine learning model"},
        "dp_variant": {
            "variant_name": "Approximate DP",
            "data_domain": sentences.neighbours(facts),
            "unprotected_quantities": "; ".join(sentences.excludes(facts)),
        },
        "privacy_loss": {
            "privacy_unit": facts.accounting.unit,
            "number_of_privacy_units": 1,
            "privacy_parameters": {"epsilon": bound, "delta": round_up_delta(facts.accounting.delta)},
            "privacy_parameters_details": "; ".join(stamps(facts, figures)) or sentences.accounting(figures),
        },
        "deployment_model": {"model_name": "Central", "data_source_type": "Static", "access_type": "Non-interactive"},
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": "not covered",
            "mechanisms": sentences.mechanism(facts),
            "composition": f"{facts.steps:,} steps; {sentences.accounting(figures)}",
            "utility": _utility(facts),
        },
    }


def _utility(facts: RunFacts) -> str:
    utility = facts.utility
    if utility.get("value") is None:
        return ""
    split = f" on {utility['split']}" if utility.get("split") else ""
    return f"{utility.get('metric', 'score')} {utility['value']}{split}; not covered by the guarantee"


def _yaml(tree: Mapping[str, Any], indent: str = "") -> list[str]:
    """Writes nested mappings as YAML. Strings are quoted as in JSON, which is valid YAML."""
    lines = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}:", *_yaml(value, indent + "  ")]
        elif key in ("epsilon", "delta", "number_of_privacy_units") and value != "not claimed":
            lines.append(f"{indent}{key}: {_yaml_number(str(value))}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}")
    return lines


def _yaml_number(text: str) -> str:
    # YAML 1.1 reads 1e-05 as a string: a number needs a decimal point.
    return ".inf" if text == "inf" else text if "." in text else text.replace("e", ".0e")
