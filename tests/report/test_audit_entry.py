"""A report may say what an audit found, apart from the guarantee; one without an audit has no such entry."""

import math

import pytest

from dpengine.auditing import AuditReport
from dpengine.report import PrivacyReport

FOUND = AuditReport(
    "DC", 0.9, 1000, "pass", bound=1.23456, claimed=2.0, details={"kind": "gradient", "delta": 1e-5, "alpha": 0.05}
).summary()


@pytest.mark.slow
def test_without_an_audit_no_form_speaks_of_one(make_facts):
    report = PrivacyReport(make_facts())
    assert "audit" not in report.to_dict()
    for text in (str(report), report.to_markdown(), report.to_html()):
        assert "Audit" not in text


def test_every_form_says_what_was_found_and_that_it_is_no_part_of_the_guarantee(make_facts):
    plain = PrivacyReport(make_facts())
    report = plain.with_audit(FOUND)
    assert report.to_dict()["audit"] == FOUND
    assert report.to_dict()["guarantee"] == plain.to_dict()["guarantee"]
    for text in (" ".join(str(report).split()), report.to_markdown(), report.to_html()):
        for needed in ("Audit", "1,000 gradient canaries", "no violation found", "95 %", "no part of the guarantee"):
            assert needed in text
    assert '<th scope="row">Audit</th>' in report.to_html()
    assert "at least 1.234 " in str(report)  # a lower bound is rounded down


def test_a_violation_is_not_hidden(make_facts):
    text = str(PrivacyReport(make_facts()).with_audit({**FOUND, "verdict": "violation", "bound": "inf"}))
    assert "REFUTED" in text and "∞" in text


def test_the_entry_comes_out_of_json_as_it_went_in(make_facts):
    report = PrivacyReport(make_facts()).with_audit(FOUND)
    again = PrivacyReport.from_json(report.to_json())
    assert again.to_dict() == report.to_dict() and str(again) == str(report)


@pytest.mark.parametrize(
    "wrong",
    [{}, {**FOUND, "verdict": "private"}, {**FOUND, "more": 1}, {**FOUND, "bound": -1.0}, {**FOUND, "bound": math.nan}],
    ids=["empty", "verdict", "other key", "negative", "nan"],
)
def test_what_is_no_summary_is_refused(make_facts, wrong):
    with pytest.raises(ValueError, match=r"AuditReport\.summary"):
        PrivacyReport(make_facts()).with_audit(wrong)
