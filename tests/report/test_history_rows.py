"""History rows of a report, and removal of paths from its text."""

import pytest

from dpengine.accounting import Relation
from dpengine.report.history_rows import public_text, public_values, rows_of


def test_facts_hold_no_paths(make_facts):
    facts = make_facts(
        description={"source": "/home/alice/x.csv"}, excludes=("logs in /home/alice/logs",), git="/home/alice"
    )
    assert "alice" not in repr(facts).replace("git='alice'", "")


def test_the_relation_decides_whether_the_size_is_public(make_facts):
    public = {relation: make_facts(relation=relation).num_examples_is_public for relation in Relation}
    assert public == {Relation.ADD_OR_REMOVE_ONE: False, Relation.ZERO_OUT: True, Relation.REPLACE_ONE: True}


def test_the_history_merges_discarded_with_released_batches_and_lists_clipping_separately(make_facts):
    rows = rows_of(make_facts("voids-and-clips").accounting.history)
    assert [(row["kind"], row["noise_multiplier"], row["steps"]) for row in rows] == [
        ("step", 1.5, 5),
        ("clip", 30.0, 5),
        ("step", 1.5, 1),
    ]


def test_a_plan_without_noise_is_not_private_even_before_its_first_step(make_facts):
    assert not make_facts("not-private", history=()).is_private
    assert not make_facts("not-private", plan=make_facts().plan).is_private
    assert make_facts("not-started").is_private


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("/home/alice/data/train.csv", "train.csv"),
        ("/home/alice smith/train.csv", "train.csv"),
        ("/data.csv", "data.csv"),
        ("~/data/train.csv", "train.csv"),
        ("C:\\Users\\alice\\train.csv", "train.csv"),
        ("\\\\server\\alice\\train.csv", "train.csv"),
        ("file:///home/alice/train.csv", "train.csv"),
        ("read from /home/alice/train.csv on Monday", "read from train.csv on Monday"),
        ("(/home/alice/train.csv)", "(train.csv)"),
    ],
)
def test_absolute_paths_lose_their_folders(text, public):
    assert public_text(text) == public


@pytest.mark.parametrize(
    "text",
    [
        "UCI Machine Learning Repository, doi:10.24432/C5XW20",
        "https://archive.example.org/dataset/2/adult",
        "CC BY 4.0 and/or MIT",
        "data/train.csv",
        "../data/train.csv",
        "ε / δ",
    ],
)
def test_text_without_an_absolute_path_is_unchanged(text):
    assert public_text(text) == text


def test_a_text_is_one_line_of_bounded_length():
    assert public_text("a\nb\t\x1b[31mc\x00") == "a b [31mc"
    assert len(public_text("x" * 10_000)) == 500


def test_nested_values_are_cleaned_and_numbers_stay():
    value = {"/home/alice/a": [1, 2.5, True, None, "/home/alice/b"], "c": {"d": ("/e/f",)}}
    assert public_values(value) == {"a": [1, 2.5, True, None, "b"], "c": {"d": ["f"]}}
