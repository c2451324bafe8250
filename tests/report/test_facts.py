import json

import pytest

from dpengine.accounting import Relation
from dpengine.report import RunFacts
from dpengine.report.history_rows import rows_of


def test_facts_survive_a_round_trip_through_json(any_facts):
    state = json.loads(json.dumps(any_facts.state_dict(), allow_nan=False))
    again = RunFacts.from_state(state)
    assert again.state_dict() == any_facts.state_dict()
    history, expected = again.accounting.history, any_facts.accounting.history
    assert history == expected or sum(c.count for c in history) == sum(c.count for c in expected)


KEYS = (
    "accountant audit constants_declared data delta device excludes git history ledger_on_disk loss_checked noise "
    "num_examples num_examples_public plan planned_steps relation schema target_epsilon torch unamplified unit utility"
)


def test_the_state_has_the_flat_keys_of_schema_1(any_facts):
    state = any_facts.state_dict()
    assert " ".join(sorted(state.keys() - {"other_samplings", "loss_evidence"})) == KEYS
    assert ("other_samplings" in state) == bool(any_facts.other_samplings)
    assert ("loss_evidence" in state) == bool(any_facts.loss_evidence)
    for group in ("accounting", "dataset", "environment", "description"):
        with pytest.raises(ValueError, match=group):
            RunFacts.from_state(state | {group: {}})


def test_a_private_size_is_not_in_the_state(make_facts):
    facts = make_facts("add-or-remove")
    assert facts.state_dict()["num_examples"] is None
    assert "5003" not in json.dumps(facts.state_dict())
    assert make_facts("add-or-remove", num_examples_public=True).state_dict()["num_examples"] == 5003


def test_a_state_of_another_version_is_refused(make_facts):
    state = make_facts().state_dict()
    with pytest.raises(ValueError, match="shoe_size"):
        RunFacts.from_state(state | {"shoe_size": 42})
    with pytest.raises(ValueError, match="schema 99"):
        RunFacts.from_state(state | {"schema": 99})


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
