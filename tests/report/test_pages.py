import json
import re
import sys
from html.parser import HTMLParser

import pytest

from dpengine.report import PrivacyReport
from dpengine.report.assumptions import assumptions
from dpengine.report.pages import _ticks

LOADING = {"src", "srcset", "href", "xlink:href", "data", "action", "formaction", "poster", "background", "ping"}


class Page(HTMLParser):
    """Collects tags, attributes that load something, and visible text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.loads, self.texts, self._open = [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in LOADING]
        if tag not in ("meta", "link", "br", "circle", "rect", "path", "line", "polyline", "polygon"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        if tag in self._open:
            assert self._open.pop() == tag, f"{tag} closes another element"

    def handle_data(self, data):
        if not {"style", "script", "textarea"} & set(self._open):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join("".join(self.texts).split())


def test_the_page_loads_nothing(any_facts):
    html = PrivacyReport(any_facts).to_html()
    page = Page(html)
    assert set(page.loads) == {"data:,"}  # an icon of no bytes, so that browsers do not ask for one
    assert not {"img", "iframe", "object", "embed", "base", "form", "audio", "video"} & set(page.tags)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", html)
    assert "default-src 'none'" in html
    assert page._open == []


def test_a_url_in_a_text_is_not_a_link(make_facts):
    source = "https://archive.example.org/adult"
    html = PrivacyReport(make_facts(description={"source": source})).to_html()
    assert source in html
    assert set(Page(html).loads) == {"data:,"}


def test_user_text_is_escaped(make_facts):
    evil = "</textarea></title><script>alert(1)</script><img src=x>"
    plain, spoilt = (
        Page(
            PrivacyReport(
                make_facts(description={"name": t}, unit=t, excludes=(t,), utility={"metric": t, "value": 1})
            ).to_html()
        )
        for t in ("text", evil)
    )
    assert spoilt.tags == plain.tags


def test_every_assumption_has_a_light_of_its_color(any_facts):
    html = PrivacyReport(any_facts).to_html()
    assert re.findall(r'class="light (\w+)"', html) == [item.light for item in assumptions(any_facts)]


def test_the_page_contains_the_statement(make_facts):
    page = Page(PrivacyReport(make_facts("full-batch")).to_html()).text
    for part in (
        "3.15",
        "1e-05",
        "0.75",
        "29.3 %",
        "right at most 64.7 %",
        "accountant 'pld'",
        "5,003 rows",
        "not covered",
    ):
        assert part in page, part


def test_charts_are_shown_if_epsilon_is_finite(make_facts):
    counts = {
        name: PrivacyReport(make_facts(name)).to_html().count('<polyline class="line"')
        for name in ("ordinary", "full-batch", "not-private", "shuffled", "not-started")
    }
    assert counts == {"ordinary": 2, "full-batch": 2, "not-private": 0, "shuffled": 0, "not-started": 0}


def test_chart_points_lie_inside_the_picture(make_facts):
    html = PrivacyReport(make_facts("full-batch")).to_html()
    for points in re.findall(r'points="([^"]*)"', html):
        for pair in points.split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 520
            assert 0 <= y <= 300


@pytest.mark.parametrize("high", [1e-4, 0.37, 1.0, 2.24, 480, 30_000])
def test_an_axis_has_two_to_six_round_ticks_inside_its_range(high):
    ticks = _ticks(high)
    assert 2 <= len(ticks) <= 6
    assert ticks[0] == 0.0
    assert ticks[-1] <= high * (1 + 1e-9)
    assert float(f"{ticks[1]:.0e}") == pytest.approx(ticks[1])


def test_the_corners_of_the_chart_are_the_corners_of_the_frame(make_facts):
    html = PrivacyReport(make_facts("full-batch")).to_html()
    assert '<polyline class="reference" points="76.0,252.0 496.0,18.0 "/>' in html


def test_the_page_holds_the_model_card_to_copy(make_facts):
    report = PrivacyReport(make_facts())
    _, _, rest = report.to_html().partition("<textarea")
    body = rest.partition(">\n")[2].partition("</textarea>")[0]
    for escaped, plain in {"&lt;": "<", "&gt;": ">", "&#39;": "'", "&#34;": '"', "&amp;": "&"}.items():
        body = body.replace(escaped, plain)
    assert body == report.to_markdown()


def test_the_card_opens_with_front_matter(any_facts):
    lines = PrivacyReport(any_facts).to_markdown().splitlines()
    assert lines[:3] == ["---", "tags: [differential-privacy]", "---"]


def test_a_text_of_a_user_cannot_end_the_front_matter_or_a_table(make_facts):
    evil = "---\n| a | b |\n# Title\n```\n<b>x</b> [link](http://a)"
    card = PrivacyReport(
        make_facts(description={"name": evil}, noise={"kind": evil, "cryptographic": True})
    ).to_markdown()
    assert card.count("\n---\n") == 1
    assert card.count("\n```") == 2
    assert "<b>" not in card.partition("## Registry entry")[0].replace(r"\<b", "")
    for line in card.partition("## Assumptions")[2].partition("## Covered")[0].splitlines()[4:-1]:
        assert line.replace(r"\|", "").count("|") == 4


def test_the_registry_entry_is_yaml_with_numbers_rounded_up(make_facts):
    card = PrivacyReport(make_facts("full-batch")).to_markdown()
    block = card.partition("```yaml\n")[2].partition("```")[0]
    assert re.search(r"^ {4}epsilon: 3\.147$", block, re.MULTILINE)
    assert re.search(r"^ {4}delta: 1\.0e-05$", block, re.MULTILINE)
    for line in block.splitlines():
        key, _, value = line.strip().partition(": ")
        if value.startswith('"'):
            json.loads(value)
        else:
            assert not value or re.fullmatch(r"[\d.e-]+", value), key


@pytest.mark.parametrize(("variant", "shown"), [("shuffled", '"not claimed"'), ("not-private", ".inf")])
def test_the_registry_entry_claims_no_more_than_the_statement(make_facts, variant, shown):
    assert f"    epsilon: {shown}\n" in PrivacyReport(make_facts(variant)).to_markdown()


def test_the_plain_words_give_the_odds_of_the_advantage(make_facts):
    card = PrivacyReport(make_facts("full-batch")).to_markdown()
    assert "right at most 64.7 % of the time" in card  # (1 + 0.29234) / 2, rounded up
    # The best test of N(0, 1) against N(0.75, 1) finds 5.76 % at one false alarm in a hundred.
    found = float(re.search(r"detect at most ([\d.]+) %", card)[1])
    assert 5.76 <= found <= 6.8


def test_a_long_history_is_truncated_in_the_page_but_not_in_the_json(make_facts):
    from dpengine.accounting import Charge, GaussianEvent

    report = PrivacyReport(make_facts(history=tuple(Charge(GaussianEvent(2.0 + k)) for k in range(40))))
    assert "And 28 more rows" in report.to_html()
    assert len(report.to_dict()["history"]) == 40


def test_reports_need_no_matplotlib(make_facts, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert len(PrivacyReport(make_facts()).save(tmp_path)) == 3
