"""PrivacyReport: one run as JSON for programs, as Markdown for a model card, and as a page for people."""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from . import pages, sentences
from .assumptions import assumptions
from .facts import RunFacts
from .figures import figures_of
from .statement import statement

SCHEMA_VERSION = 1


@final
@dataclass(frozen=True, repr=False)
class PrivacyReport:
    """What may be published about the privacy of a run.

    Every epsilon in it is an upper bound at the delta of the facts. The size of the training set is withheld unless it
    is public, and nothing is read from the machine but the versions of two packages.

    Args:
        facts: The facts of the run.
    """

    facts: RunFacts

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON values; its form is that of ``schema.json`` beside this module.

        Infinity is ``"inf"``; an epsilon that is not claimed, and whatever is not known, is None.
        """
        facts, figures = self.facts, figures_of(self.facts)
        spent = figures.spent
        library, version = "dpengine", sentences.version_of("dpengine")
        report = {
            "schema_version": SCHEMA_VERSION,
            "guarantee": {
                "epsilon": None if spent is None else spent.epsilon,
                "delta": facts.delta,
                "mu_gdp": None if spent is None else spent.mu,
                "advantage": None if spent is None else spent.advantage,
                "adjacency": facts.relation.value,
                "unit": facts.unit,
                "setting": sentences.SETTING,
            },
            "mechanism": {
                "noise_multiplier": facts.plan.get("noise_multiplier"),
                "clipping": facts.plan.get("clipping"),
                "sampling": facts.plan.get("sampling"),
                "sample_rate": facts.plan.get("sample_rate"),
                "steps": facts.steps,
                "expected_batch_size": facts.plan.get("expected_batch_size"),
            },
            "accounting": {
                "accountant": figures.accountant,
                "library": library,
                "version": version,
                "discretization": figures.grid,
                "assumptions": [
                    {"name": item.name, "holds": item.holds, "evidence": item.evidence} for item in assumptions(facts)
                ],
            },
            "coverage": {"covers": sentences.covers(facts), "excludes": sentences.excludes(facts)},
            "profile": [list(point) for point in figures.profile],
            "history": facts.runs_of_steps(),
            "run": self._run(),
            "data": self._data(),
            "utility": {key: facts.utility.get(key) for key in ("metric", "value", "split")},
        }
        return _strict(report)

    def to_json(self) -> str:
        """Returns ``to_dict`` as strict JSON, without NaN or Infinity."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """Returns the model card, with front matter."""
        return pages.model_card(self.facts, figures_of(self.facts))

    def to_html(self) -> str:
        """Returns a page that needs no network."""
        return pages.html_page(self.facts, figures_of(self.facts), self.to_markdown())

    def save(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Writes ``privacy_report.json``, ``.md`` and ``.html``.

        A file that was there is replaced as a whole or not at all.

        Args:
            directory: Where to; made if it does not exist.

        Returns:
            The paths, in the order above.
        """
        folder = Path(directory)
        texts = {".json": self.to_json(), ".md": self.to_markdown(), ".html": self.to_html()}
        folder.mkdir(parents=True, exist_ok=True)
        return [_write(folder / f"privacy_report{suffix}", text) for suffix, text in texts.items()]

    def __str__(self) -> str:
        """The statement."""
        return statement(self.facts)

    def __repr__(self) -> str:
        """The guarantee in one line, with its stamps."""
        return f"PrivacyReport({sentences.headline(self.facts, figures_of(self.facts))})"

    def _run(self) -> dict[str, Any]:
        noise = self.facts.noise
        policies = {True: "INSECURE_SEED", False: "operating-system entropy", None: "unknown"}
        return {
            "seed_policy": policies[noise.get("insecure_seed")],
            "rng": {"kind": noise.get("kind"), "cryptographic": noise.get("cryptographic")},
            "torch": self.facts.torch,
            "dpengine": sentences.version_of("dpengine"),
            "device": self.facts.device,
            "git": self.facts.git,
        }

    def _data(self) -> dict[str, Any]:
        public = self.facts.rows_are_public
        # A private size is withheld: under add-or-remove the exact number of rows is itself a release.
        size = {"value": self.facts.num_examples if public else None, "public": public}
        return {"n": size} | {key: self.facts.data.get(key) for key in ("source", "licence", "sha256")}


def _strict(value: Any) -> Any:
    """The value with infinities as texts and NaN as None, so that any JSON parser reads it."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def _write(path: Path, text: str) -> Path:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
