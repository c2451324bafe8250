"""Reports of ordinary runs, and the entry of an audit."""

import json
import math
import os
from importlib import resources

import pytest

from dpengine.auditing import AuditReport
from dpengine.report import PrivacyReport
from dpengine.report import reading as schema_check

KEYS = {
    "guarantee": {
        *{"epsilon", "delta", "mu_gdp", "advantage", "adjacency", "unit", "setting"},
        *{"refusal", "epsilon_unamplified"},
    },
    "mechanism": {
        *{"noise_multiplier", "clipping", "sampling", "sample_rate", "steps", "expected_batch_size"},
        "correlated_noise",
    },
    "accounting": {"accountant", "library", "version", "discretization", "assumptions"},
    "coverage": {"covers", "excludes", "excludes_added"},
    "run": {
        *{"seed_policy", "rng", "torch", "dpengine", "device", "git", "target_epsilon", "planned_steps"},
        *{"ledger_on_disk", "constants_declared", "loss_checked"},
    },
    "data": {"n", "name", "source", "licence", "sha256"},
    "utility": {"metric", "value", "split"},
}
SCHEMA = json.loads(resources.files("dpengine.report").joinpath("schema.json").read_text())
JSON_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def violations(value, schema, where="report"):
    """A small JSON Schema check: the keywords that our schema uses, and an error for any other."""
    found = []
    for keyword, rule in schema.items():
        if keyword == "$ref":
            found += violations(value, SCHEMA["$defs"][rule.removeprefix("#/$defs/")], where)
        elif keyword == "type":
            names = [rule] if isinstance(rule, str) else rule
            fits = any(isinstance(value, JSON_TYPES[name]) for name in names)
            if not fits or (isinstance(value, bool) and "boolean" not in names):
                found.append(f"{where}: {value!r} is no {rule}")
        elif keyword == "required":
            found += [f"{where}: {key} is missing" for key in rule if key not in value]
        elif keyword == "properties":
            known = [(key, part) for key, part in rule.items() if isinstance(value, dict) and key in value]
            found += [line for key, part in known for line in violations(value[key], part, f"{where}.{key}")]
        elif keyword == "additionalProperties":
            found += [f"{where}: {key} is not known" for key in value if key not in schema["properties"]]
        elif keyword == "items":
            found += [line for i, item in enumerate(value or ()) for line in violations(item, rule, f"{where}[{i}]")]
        elif keyword == "anyOf":
            if all(violations(value, part, where) for part in rule):
                found.append(f"{where}: {value!r} fits none of {rule}")
        elif keyword in RANGES:
            if isinstance(value, (int, float)) and not RANGES[keyword](value, rule):
                found.append(f"{where}: {value!r} breaks {keyword} {rule}")
        elif keyword in ("minItems", "maxItems"):
            if not (len(value) >= rule if keyword == "minItems" else len(value) <= rule):
                found.append(f"{where}: has {len(value)} items")
        elif keyword in ("const", "enum"):
            if value not in ([rule] if keyword == "const" else rule):
                found.append(f"{where}: {value!r} is not {rule}")
        else:
            assert keyword in ("$schema", "$defs", "title", "description"), keyword
    return found


RANGES = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}


READ = {
    *{"$schema", "$defs", "$ref", "title", "description", "type", "required", "properties", "additionalProperties"},
    *{"items", "anyOf", "enum", "const", *schema_check._LIMITS},
}


def keywords(schema):
    """All keywords of a schema and of the schemas in it."""
    for keyword, rule in schema.items():
        yield keyword
        parts = rule.values() if keyword in ("properties", "$defs") else rule if keyword == "anyOf" else [rule]
        for part in parts:
            if isinstance(part, dict) and keyword in ("properties", "$defs", "anyOf", "items"):
                yield from keywords(part)


def test_the_reader_supports_all_keywords_of_the_schema():
    assert set(keywords(SCHEMA)) <= READ


def strictly_parsed(text):
    def reject_constant(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=reject_constant)


def test_every_run_gives_a_report_of_the_shipped_schema(any_facts):
    report = strictly_parsed(PrivacyReport(any_facts).to_json())
    assert violations(report, SCHEMA) == []
    assert list(schema_check.violations(report, SCHEMA)) == []


def test_the_schema_check_sees_what_is_wrong(make_facts):
    report = PrivacyReport(make_facts()).to_dict()
    spoilt = report | {"guarantee": report["guarantee"] | {"epsilon": -1.0, "delta": 1, "unit": None, "note": ""}}
    del spoilt["utility"]
    assert len(violations(spoilt, SCHEMA)) == 5
    assert len(list(schema_check.violations(spoilt, SCHEMA))) == 5


def test_every_key_is_present_and_no_other(any_facts):
    report = PrivacyReport(any_facts).to_dict()
    assert set(report) == {*KEYS, "schema_version", "profile", "history", "history_unamplified", "digest"}
    optional = {"other_samplings"} if any_facts.other_samplings else set()  # absent, as in reports of earlier versions
    evidence = {"loss_evidence"} if any_facts.loss_evidence else set()
    expected = KEYS | {"mechanism": KEYS["mechanism"] | optional, "run": KEYS["run"] | evidence}
    assert {name: set(report[name]) for name in KEYS} == expected
    for item in report["accounting"]["assumptions"]:
        assert set(item) == {"name", "holds", "evidence"}


def test_the_numbers_match_the_accounting_package(make_facts):
    from dpengine.accounting import privacy_spent

    facts = make_facts()
    spent = privacy_spent(
        facts.accounting.history, facts.accounting.delta, facts.accounting.accountant, facts.accounting.relation
    )
    guarantee = PrivacyReport(facts).to_dict()["guarantee"]
    assert (guarantee["epsilon"], guarantee["mu_gdp"]) == (spent.epsilon, spent.mu)
    assert (guarantee["advantage"], guarantee["delta"]) == (spent.advantage, 1e-5)


def test_infinity_is_a_string_and_nan_is_null(make_facts):
    report = strictly_parsed(PrivacyReport(make_facts("not-private", utility={"value": math.nan})).to_json())
    assert report["guarantee"]["epsilon"] == report["guarantee"]["mu_gdp"] == "inf"
    assert {eps for _, eps in report["profile"]} == {"inf"}
    assert report["utility"]["value"] is None


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, {"value": 5003, "public": True}),
        ({"variant": "add-or-remove"}, {"value": None, "public": False}),
        ({"variant": "add-or-remove", "num_examples_public": True}, {"value": 5003, "public": True}),
        ({"num_examples": None}, {"value": None, "public": True}),
    ],
)
def test_the_dataset_size_is_reported_only_if_public(make_facts, changes, size):
    assert PrivacyReport(make_facts(**changes)).to_dict()["data"]["n"] == size


def test_the_grid_spacing_is_reported_if_the_accountant_has_one(make_facts):
    grids = {
        name: PrivacyReport(make_facts(name)).to_dict()["accounting"]["discretization"]
        for name in ("ordinary", "full-batch", "shuffled", "not-private")
    }
    assert grids.pop("ordinary") > 0
    assert set(grids.values()) == {None}


def test_epsilon_can_be_recomputed_from_the_report(make_facts):
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    report = strictly_parsed(PrivacyReport(make_facts("voids-and-clips")).to_json())
    accountant = PLDAccountant()
    for row in report["history"]:
        event = PoissonSampledDpEvent(row["sample_rate"], GaussianDpEvent(row["noise_multiplier"]))
        accountant.compose(SelfComposedDpEvent(event, row["steps"]))
    epsilon = accountant.get_epsilon(report["guarantee"]["delta"])
    assert report["guarantee"]["epsilon"] == pytest.approx(epsilon, rel=1e-3)


def test_saving_writes_three_files_and_gives_their_paths(make_facts, tmp_path):
    report = PrivacyReport(make_facts())
    paths = report.save(tmp_path / "runs" / "demo")
    assert [path.name for path in paths] == ["privacy_report.json", "privacy_report.md", "privacy_report.html"]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(path.name for path in paths)
    assert [path.read_text(encoding="utf-8") for path in paths] == [
        report.to_json(),
        report.to_markdown(),
        report.to_html(),
    ]


def test_equal_facts_give_equal_files(make_facts, tmp_path):
    first, second = (PrivacyReport(make_facts()).save(tmp_path / name) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_a_write_that_fails_leaves_the_old_report(make_facts, tmp_path, monkeypatch):
    old = PrivacyReport(make_facts()).save(tmp_path)[0].read_text()

    def fail(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        PrivacyReport(make_facts("shuffled")).save(tmp_path)
    assert (tmp_path / "privacy_report.json").read_text() == old
    assert len(list(tmp_path.iterdir())) == 3


def test_no_file_names_the_machine_its_user_or_a_folder(make_facts, tmp_path, monkeypatch):
    def name_of_the_machine():
        return "tell-tale"

    for target in ("socket.gethostname", "socket.getfqdn", "platform.node", "getpass.getuser", "os.getlogin"):
        monkeypatch.setattr(target, name_of_the_machine)
    for name in ("USER", "LOGNAME", "HOSTNAME", "HOME", "USERNAME", "PWD"):
        monkeypatch.setenv(name, "/home/tell-tale")
    home = "/home/tell-tale/"
    facts = make_facts(
        description={
            "name": f"{home}adult.csv",
            "source": f"copied from {home}adult.csv",
            "sha256": {f"{home}a.csv": "00"},
        },
        utility={"metric": "accuracy", "value": 0.5, "split": f"{home}test"},
        device=f"{home}gpu",
        excludes=(f"the log {home}run.log",),
        noise={"kind": f"{home}rng", "cryptographic": True, "insecure_seed": False},
    )
    folder = tmp_path / "tell-tale"
    report = PrivacyReport(facts)
    for path in report.save(folder):
        assert b"tell-tale" not in path.read_bytes(), path.name
    assert "tell-tale" not in str(report) + repr(report)


FOUND = AuditReport(
    "DC", 0.9, 1000, "pass", bound=1.23456, claimed=2.0, details={"kind": "gradient", "delta": 1e-5, "alpha": 0.05}
).summary()


@pytest.mark.slow
def test_without_an_audit_no_file_mentions_one(make_facts):
    report = PrivacyReport(make_facts())
    assert "audit" not in report.to_dict()
    for text in (str(report), report.to_markdown(), report.to_html()):
        assert "Audit" not in text


def test_every_file_states_the_audit_result_and_that_it_is_not_a_guarantee(make_facts):
    plain = PrivacyReport(make_facts())
    report = plain.with_audit(FOUND)
    assert report.to_dict()["audit"] == FOUND
    assert report.to_dict()["guarantee"] == plain.to_dict()["guarantee"]
    for text in (" ".join(str(report).split()), report.to_markdown(), report.to_html()):
        for needed in ("Audit", "1,000 gradient canaries", "no violation found", "95 %", "not part of the guarantee"):
            assert needed in text
    assert '<th scope="row">Audit</th>' in report.to_html()
    assert "at least 1.234 " in str(report)  # a lower bound is rounded down


def test_a_violation_is_not_hidden(make_facts):
    text = str(PrivacyReport(make_facts()).with_audit({**FOUND, "verdict": "violation", "bound": "inf"}))
    assert "REFUTED" in text and "∞" in text


def test_the_audit_entry_survives_a_json_round_trip(make_facts):
    report = PrivacyReport(make_facts()).with_audit(FOUND)
    again = PrivacyReport.from_json(report.to_json())
    assert again.to_dict() == report.to_dict() and str(again) == str(report)


@pytest.mark.parametrize(
    "wrong",
    [{}, {**FOUND, "verdict": "private"}, {**FOUND, "more": 1}, {**FOUND, "bound": -1.0}, {**FOUND, "bound": math.nan}],
    ids=["empty", "verdict", "other key", "negative", "nan"],
)
def test_an_invalid_summary_is_rejected(make_facts, wrong):
    with pytest.raises(ValueError, match=r"AuditReport\.summary"):
        PrivacyReport(make_facts()).with_audit(wrong)
