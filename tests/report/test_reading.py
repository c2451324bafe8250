"""Reports are rebuilt from their JSON, and a modified JSON is rejected."""

import hashlib
import json
import math
import re

import pytest

from dpengine.accounting import (
    Charge,
    CyclicGaussianEvent,
    MatrixGaussianEvent,
    PoissonGaussianEvent,
    TruncatedGaussianEvent,
    UnclaimedEvent,
)
from dpengine.errors import CorruptFileError
from dpengine.report import PrivacyReport
from dpengine.report.history_rows import charges_of, rows_of


def resealed(document):
    """Returns the document with a new digest, computed as documented."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return rest | {"digest": hashlib.sha256(text.encode("utf-8")).hexdigest()}


def changed(document, path, value):
    """Returns a copy with one value replaced."""
    copy = json.loads(json.dumps(document))
    *way, last = path
    place = copy
    for key in way:
        place = place[key]
    place[last] = value
    return copy


def assert_rejected(document, message):
    with pytest.raises(CorruptFileError, match=message):
        PrivacyReport.from_json(json.dumps(document))


@pytest.fixture
def report(make_facts):
    return PrivacyReport(make_facts("full-batch"))


def test_the_files_and_the_statement_are_rebuilt_from_the_json(any_facts):
    first = PrivacyReport(any_facts)
    again = PrivacyReport.from_json(first.to_json())
    assert again.to_json() == first.to_json()
    assert again.to_markdown() == first.to_markdown()
    assert again.to_html() == first.to_html()
    assert (str(again), repr(again)) == (str(first), repr(first))


def test_what_is_known_of_a_reason_and_of_sentences_survives(make_facts):
    facts = make_facts("shuffled", excludes=("the moon",), utility={"metric": "loss", "value": math.nan})
    again = PrivacyReport.from_json(PrivacyReport(facts).to_json())
    assert again.facts.excludes == ("the moon",)
    assert again.facts.accounting.history == facts.accounting.history
    assert again.to_html() == PrivacyReport(facts).to_html()


def test_a_file_or_its_folder_can_be_read_and_saved_again(report, tmp_path):
    first = report.save(tmp_path / "first")
    for path in (tmp_path / "first", tmp_path / "first" / "privacy_report.json", str(tmp_path / "first")):
        second = PrivacyReport.load(path).save(tmp_path / "second")
        assert [path.read_bytes() for path in second] == [path.read_bytes() for path in first]


def test_whitespace_and_key_order_do_not_change_the_digest(report):
    text = json.dumps(report.to_dict(), sort_keys=True, separators=(", ", ":"))
    assert PrivacyReport.from_json(text).to_html() == report.to_html()


def test_the_digest_is_the_documented_one(report):
    assert report.to_dict() == resealed(report.to_dict())


def test_history_rows_contain_all_fields_of_an_event():
    cyclic = CyclicGaussianEvent(0.1, 2.0, 4, "random-name")
    history = (
        Charge(cyclic, 12),
        Charge(CyclicGaussianEvent(0.1, 2.0, 4, "another"), 3),
        Charge(MatrixGaussianEvent(4.0, 5, (1.0, 1.5), "third"), 8),
        Charge(PoissonGaussianEvent(0.1, 9.0), 2, "clip"),
        Charge(UnclaimedEvent("no analysis"), 7),
        Charge(cyclic, 5),
    )
    rows = json.loads(json.dumps(rows_of(history)))
    again = charges_of(rows)
    assert [row["run"] for row in rows] == [1, 2, 3, None, None, 1]
    assert [(type(one.event), one.count, one.kind) for one in again] == [
        (type(one.event), one.count, one.kind) for one in history
    ]
    assert again[2].event.sq_sensitivities == (1.0, 1.5)
    assert rows_of(again) == rows


def test_discarded_batches_are_not_distinguished(make_facts):
    report = PrivacyReport(make_facts("voids-and-clips"))
    assert "void" not in report.to_json()
    assert {charge.kind for charge in PrivacyReport.from_json(report.to_json()).facts.accounting.history} == {
        "release",
        "clip",
    }


def test_a_private_size_is_not_in_it(make_facts):
    text = PrivacyReport(make_facts("not-started", num_examples=5003, relation="add-or-remove-one")).to_json()
    assert "5003" not in text
    assert PrivacyReport.from_json(text).facts.dataset.num_examples is None


SPOILT_TEXTS = {
    "empty": (lambda text: "", "truncated"),
    "cut-in-the-middle": (lambda text: text[: len(text) // 2], "truncated"),
    "without-its-last-brace": (lambda text: text.rstrip()[:-1], "truncated"),
    "no-json": (lambda text: "ε = 1", "not JSON"),
    "more-than-json": (lambda text: text + "}", "not JSON"),
    "a-list": (lambda text: "[]", "not a privacy report"),
    "no-version": (lambda text: text.replace('"schema_version"', '"version"'), "not a privacy report"),
    "nan": (lambda text: text.replace('"delta": 1e-05', '"delta": NaN'), "NaN is not a JSON number"),
    "infinity": (lambda text: text.replace('"delta": 1e-05', '"delta": Infinity'), "Infinity is not a JSON number"),
    "infinity-in-digits": (lambda text: text.replace('"delta": 1e-05', '"delta": 1e999'), "guarantee.delta"),
    "a-key-twice": (lambda text: text.replace('"delta":', '"delta": 1e-9, "delta":', 1), "'delta' occurs twice"),
    "too-deep": (lambda text: "[" * 100_000, "not JSON"),
    "half-a-character": (lambda text: text.replace("Census", "Census\\ud800"), "digest"),
    "newer": (
        lambda text: text.replace('"schema_version": 2', '"schema_version": 3'),
        "written by a newer dpengine, schema 3; this one reads 2: upgrade",
    ),
    "older": (lambda text: '{"schema_version": 1}', "older dpengine, schema 1"),
    "version-is-no-number": (lambda text: text.replace('_version": 2', '_version": "2"'), 'schema_version is "2"'),
    "edited": (lambda text: text.replace('"delta": 1e-05', '"delta": 1e-06'), "digest.*not a signature"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILT_TEXTS.values(), ids=SPOILT_TEXTS)
@pytest.mark.hazard("P1", "P7")
def test_a_modified_text_is_rejected(report, spoil, message):
    text = report.to_json()
    assert spoil(text) != text
    with pytest.raises(CorruptFileError, match=rf"DPE024. report\.from_json: .*{message}"):
        PrivacyReport.from_json(spoil(text))


@pytest.mark.parametrize("key", ["guarantee", "history_unamplified", "digest"])
def test_a_missing_key_is_named(report, key):
    document = report.to_dict()
    del document[key]
    assert_rejected(document, f"{key} is missing")


WRONG_FORMS = {
    ("note",): "",
    ("guarantee", "note"): "",
    ("guarantee", "delta"): "1e-5",
    ("guarantee", "epsilon"): True,
    ("guarantee", "advantage"): 1.5,
    ("guarantee", "adjacency"): "none",
    ("mechanism", "steps"): 2.5,
    ("accounting", "assumptions"): [],
    ("history", 0, "law"): "laplace",
    ("history", 0, "steps"): 0,
    ("run", "ledger_on_disk"): 1,
    ("data", "n"): {"value": -1, "public": True},
    ("profile", 0): [0.1],
}


EDITS = {
    ("guarantee", "epsilon"): 0.5,
    ("guarantee", "mu_gdp"): 0.1,
    ("guarantee", "advantage"): 0.01,
    ("profile", 3): [1e-4, 0.1],
    ("mechanism", "steps"): 2,
    ("accounting", "assumptions", 5, "evidence"): "all is well",
    ("coverage", "excludes", 0): "nothing",
    ("data", "n", "public"): False,
}


IMPOSSIBLE = {("accounting", "accountant"): "abacus", ("history", 0, "noise_multiplier"): None}


def place_of(path):
    return re.escape(".".join(str(key) for key in path).replace(".0", "[0]"))


CHANGED = [
    *((path, value, f"schema 2: {place_of(path)}") for path, value in WRONG_FORMS.items()),
    *((path, value, f"{path[0]}.*the rest of the report implies") for path, value in EDITS.items()),
    *((path, value, "inconsistent") for path, value in IMPOSSIBLE.items()),
]


@pytest.mark.parametrize(("path", "value", "message"), CHANGED, ids=str)
def test_a_changed_value_with_a_new_digest_is_rejected_with_its_key(report, path, value, message):
    assert_rejected(resealed(changed(report.to_dict(), path, value)), message)


@pytest.mark.parametrize("share", [1 - 9e-7, 1 - 1e-7, 1 + 1e-7])
@pytest.mark.parametrize("path", [("guarantee", "epsilon"), ("guarantee", "mu_gdp"), ("profile", 3, 1)], ids=str)
def test_a_changed_number_of_this_version_is_rejected(report, path, share):
    value = report.to_dict()
    for key in path:
        value = value[key]
    assert_rejected(resealed(changed(report.to_dict(), path, value * share)), "the rest of the report implies")


def test_a_rounding_difference_of_another_machine_is_accepted(report):
    epsilon = math.nextafter(report.to_dict()["guarantee"]["epsilon"], math.inf)
    again = PrivacyReport.from_json(json.dumps(resealed(changed(report.to_dict(), ("guarantee", "epsilon"), epsilon))))
    assert again.to_dict()["guarantee"]["epsilon"] == epsilon


def by_version(document, version="7.1", **changes):
    """Returns the document as another version writes it, with changed numbers of the guarantee."""
    for path in (("accounting", "version"), ("run", "dpengine")):
        document = changed(document, path, version)
    for name, value in changes.items():
        document = changed(document, ("guarantee", name), value)
    return resealed(document)


@pytest.mark.parametrize("path", [("accounting", "version"), ("run", "dpengine")], ids=str)
def test_versions_that_contradict_each_other_are_rejected(report, path):
    document = changed(changed(report.to_dict(), path, "99.0"), ("guarantee", "epsilon"), 0.1)
    assert_rejected(resealed(document), r"run.dpengine is .*, but accounting.version is .*99.0|99.0.*, but")


@pytest.mark.parametrize("version", ["", "0.1.0\n\n# Checked", " 0.1.0 "], ids=repr)
def test_an_invalid_version_string_is_rejected(report, version):
    assert_rejected(by_version(report.to_dict(), version), "is not a version")


@pytest.mark.parametrize(
    "variant", ["full-batch", "ordinary", pytest.param("voids-and-clips", marks=pytest.mark.slow), "correlated"]
)
def test_a_report_of_another_version_keeps_its_numbers_and_names_the_version(make_facts, variant):
    first = PrivacyReport(make_facts(variant)).to_dict()
    document = by_version(first, epsilon=1.1 * first["guarantee"]["epsilon"])
    again = PrivacyReport.from_json(json.dumps(document))
    assert again.to_dict() == document
    ours = first["accounting"]["version"]
    said = f"computed by dpengine 7.1; dpengine {ours} has checked the numbers against its own lower bound only"
    for text in (str(again), again.to_markdown().replace("\\", ""), again.to_html()):
        assert said in " ".join(text.split())
    assert "dpengine 7.1" in repr(again)
    for text in (str(PrivacyReport(make_facts(variant))), PrivacyReport(make_facts(variant)).to_html()):
        assert "lower bound" not in text


def test_the_page_of_another_version_omits_sections_that_need_new_numbers(report):
    again = PrivacyReport.from_json(json.dumps(by_version(report.to_dict(), epsilon=4.321)))
    page = again.to_html()
    assert "4.33" in page and "dpengine 7.1" in page
    assert page.count('<polyline class="line"') == 1  # it has no cost per step
    assert "(ε = 4.33, δ = 1e-05)" in str(again)


FORGED = {
    "epsilon": lambda document: document["guarantee"].update(epsilon=0.99 * document["guarantee"]["epsilon"]),
    "epsilon-of-nothing": lambda document: document["guarantee"].update(epsilon=0.0),
    "mu": lambda document: document["guarantee"].update(mu_gdp=0.98 * document["guarantee"]["mu_gdp"]),
    "advantage": lambda document: document["guarantee"].update(advantage=0.98 * document["guarantee"]["advantage"]),
    "profile": lambda document: document["profile"][4].__setitem__(1, 0.5 * document["profile"][4][1]),
}


@pytest.mark.one_in(8, "variant", "forge", others="slow")
@pytest.mark.one_in(4, "variant", "forge")
@pytest.mark.parametrize("variant", ["full-batch", "ordinary", "voids-and-clips", "correlated"])
@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_number_of_another_version_below_the_lower_bound_is_rejected(make_facts, variant, forge):
    document = by_version(PrivacyReport(make_facts(variant)).to_dict())
    PrivacyReport.from_json(json.dumps(document))
    forge(document)
    assert_rejected(resealed(document), r"below .*lower bound")


@pytest.mark.parametrize(
    ("variant", "changes", "says"),
    [("not-private", {}, "below .*lower bound"), ("shuffled", {"refusal": None}, "no .* claimed")],
)
def test_a_finite_epsilon_of_another_version_is_rejected_if_the_history_has_none(make_facts, variant, changes, says):
    document = PrivacyReport(make_facts(variant)).to_dict()
    assert_rejected(by_version(document, epsilon=3.0, mu_gdp=0.5, advantage=0.4, **changes), says)


def test_a_bound_without_amplification_below_its_lower_bound_is_rejected(make_facts):
    first = PrivacyReport(make_facts("shuffled")).to_dict()
    PrivacyReport.from_json(json.dumps(by_version(first)))
    low = 0.9 * first["guarantee"]["epsilon_unamplified"]
    assert_rejected(by_version(first, epsilon_unamplified=low), r"epsilon_unamplified.* below .*lower bound")


@pytest.mark.slow
def test_numbers_without_a_lower_bound_are_reported_as_unchecked(make_facts):
    cut = TruncatedGaussianEvent(503, 0.02, 15, 1.5)
    plan = make_facts().plan | {"sampling": "truncated"}
    first = PrivacyReport(make_facts(plan=plan, history=(Charge(cut, 3),))).to_dict()
    again = PrivacyReport.from_json(json.dumps(by_version(first, epsilon=0.01)))
    for text in (str(again), again.to_markdown(), again.to_html()):
        assert "has no lower bound for such a run and could not check the numbers" in " ".join(text.split())


def test_steps_that_are_not_those_of_the_history_are_rejected_in_every_version(report):
    document = changed(by_version(report.to_dict()), ("mechanism", "steps"), 2)
    assert_rejected(resealed(document), r"mechanism\.steps is 2")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("history", 0, "cycle_length"), 5),
        (("history", 0, "reason"), "none"),
        (("history", 0, "sample_rate"), 0.5),
        (("history", 0, "more"), {"weight": 0.1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("version", [None, "7.1"])
def test_invalid_fields_of_a_row_are_rejected_by_name(report, path, value, version):
    document = report.to_dict() if version is None else by_version(report.to_dict(), version)
    named = "weight" if isinstance(value, dict) else path[-1]
    assert_rejected(resealed(changed(document, path, value)), named)


def test_a_missing_or_binary_file_is_named(tmp_path):
    with pytest.raises(CorruptFileError, match=r"privacy_report\.json does not exist"):
        PrivacyReport.load(tmp_path)
    (tmp_path / "picture").write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptFileError, match="picture cannot be read"):
        PrivacyReport.load(tmp_path / "picture")
