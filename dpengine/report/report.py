"""Privacy report of a run as JSON, as a model card in Markdown, and as an HTML page."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from dpengine.accounting.overviews import html_table

from . import pages, sentences
from .assumptions import assumptions
from .document import document_of, facts_of, figures_in
from .facts import RunFacts
from .figures import USER, Figures
from .other_versions import checked_figures
from .privacy_statement import entries, statement_of
from .reading import read_document, read_file, report_schema, violations


@final
@dataclass(frozen=True, repr=False)
class PrivacyReport:
    """Report on the privacy of a run, for publication.

    Every epsilon in it is an upper bound at ``facts.accounting.delta``. The size of the training set is omitted unless
    it is public. The versions of two packages are the only information from the machine. All forms are derived from
    the JSON, from which `from_json` and `load` restore the same report.

    Args:
        facts: The facts of the run.
    """

    facts: RunFacts
    _recorded: Mapping[str, Any] | None = field(default=None, kw_only=True, compare=False)

    @classmethod
    def from_json(cls, text: str) -> PrivacyReport:
        """Restores a report from the result of `to_json`.

        The digest detects accidental changes; it is not a signature. If this version of dpengine wrote the report, all
        numbers are recomputed from the history of the run and compared. A report of another version keeps its numbers,
        and is rejected if one of them is below the lower bound of this version. All its forms state that only this
        was checked, and its page omits the chart that needs new numbers.

        Args:
            text: The JSON.

        Returns:
            A report with the same JSON, Markdown and HTML as the original.

        Raises:
            CorruptFileError: If the text was truncated or edited, is not a report, or has another schema.
        """  # noqa: DOC502 - raised by read_document
        return cls._of_text(text, "report.from_json")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PrivacyReport:
        """Restores a report from a file, as `from_json` does.

        Args:
            path: ``privacy_report.json``, or the folder that contains it.

        Returns:
            The report.

        Raises:
            CorruptFileError: If there is no such file, or its text was truncated or edited, is not a report, or has
                another schema.
        """  # noqa: DOC502 - raised by read_document
        return cls._of_text(read_file(Path(path)), os.fspath(path))

    @classmethod
    def _of_text(cls, text: str, where: str) -> PrivacyReport:
        document = read_document(text, where)
        return cls(facts_of(document), _recorded=document)

    def with_audit(self, audit: Mapping[str, Any]) -> PrivacyReport:
        """Adds the result of an audit of a run with these settings, which is not part of the guarantee.

        Args:
            audit: ``AuditReport.summary()``.

        Returns:
            A new report with an entry ``audit``.

        Raises:
            ValueError: If ``audit`` is not such a summary.
        """
        violation = next(violations(audit, report_schema()["properties"]["audit"], "audit"), "")
        if violation:
            raise ValueError(f"report.with_audit: {violation}. Pass AuditReport.summary().")
        return PrivacyReport(replace(self.facts, audit=audit))

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON values, in the form of ``schema.json`` in the folder of this module.

        Infinity is ``"inf"``. Unknown values are None, as is an epsilon that is not claimed.
        """
        if self._recorded is not None:
            return copy.deepcopy(dict(self._recorded))
        return document_of(self.facts, checked_figures(self.facts))

    def to_json(self) -> str:
        """Returns ``to_dict`` as strict JSON, without NaN or Infinity."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """Returns the model card, with front matter."""
        return pages.model_card(*self._facts_and_figures())

    def to_html(self) -> str:
        """Returns the HTML page, which needs no network."""
        return pages.html_page(*self._facts_and_figures(), self.to_markdown())

    def save(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Writes ``privacy_report.json``, ``.md`` and ``.html``.

        Every file is replaced atomically.

        Args:
            directory: The folder, which is created if it does not exist.

        Returns:
            The paths, in the order above.
        """
        folder = Path(directory)
        texts = {".json": self.to_json(), ".md": self.to_markdown(), ".html": self.to_html()}
        folder.mkdir(parents=True, exist_ok=True)
        return [_write(folder / f"privacy_report{suffix}", text) for suffix, text in texts.items()]

    def __str__(self) -> str:
        """Returns the statement."""
        return statement_of(*self._facts_and_figures())

    def __repr__(self) -> str:
        """Returns the guarantee in one line, with the origin of its numbers."""
        facts, figures = self._facts_and_figures()
        unverified = f"computed by {figures.accountant}, not verified" if figures.library == USER else ""
        origin = "" if figures.recomputable else f", {unverified or f'by dpengine {figures.version}'}"
        return f"PrivacyReport({sentences.headline(facts, figures)}{origin})"

    def _repr_html_(self) -> str:
        """Returns the guarantee and the assumptions as a table, for notebooks; `save` writes the page."""
        facts, figures = self._facts_and_figures()
        rows = entries(facts, figures) | {item.name: f"{item.holds}: {item.evidence}" for item in assumptions(facts)}
        return html_table(sentences.headline(facts, figures), rows)

    def _facts_and_figures(self) -> tuple[RunFacts, Figures]:
        # Read from the JSON, so that the JSON contains everything that the other forms show.
        document = self.to_dict()
        return facts_of(document), figures_in(document)


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
