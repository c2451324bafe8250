from dpengine.accounting import Relation
from dpengine.report.history_rows import rows_of


def test_paths_are_gone_as_soon_as_facts_exist(make_facts):
    facts = make_facts(
        description={"source": "/home/alice/x.csv"}, excludes=("logs in /home/alice/logs",), git="/home/alice"
    )
    assert "alice" not in repr(facts).replace("git='alice'", "")


def test_the_relation_decides_whether_the_size_is_public(make_facts):
    public = {relation: make_facts(relation=relation).num_examples_is_public for relation in Relation}
    assert public == {Relation.ADD_OR_REMOVE_ONE: False, Relation.ZERO_OUT: True, Relation.REPLACE_ONE: True}


def test_the_history_merges_voids_with_releases_and_keeps_clipping_apart(make_facts):
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
