"""Arguments of ``engine.report`` are checked at the call."""

import pytest
import torch.nn.functional as F
from inside_parts import replace_report
from loops import examples, make_loop

from dpengine import check_loss
from dpengine.errors import BatchDependentLossError
from dpengine.validation.loss import loss_was_checked

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")


@pytest.fixture
def engine(monkeypatch):
    """An engine that fails the test if the report computes anything."""
    replace_report(monkeypatch, lambda *args: pytest.fail("the report was made"))
    return make_loop(noise_multiplier=1.0).engine


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data": {"license": "none"}}, "data has no key 'license'. Did you mean 'licence'"),
        ({"data": {"n": 3}}, "data has no key 'n'. "),
        ({"data": {3: 3}}, "data has no key 3. Valid keys: name, source, licence, sha256"),
        ({"utility": {"values": 0.5}}, "utility has no key 'values'. Did you mean 'value'"),
    ],
)
def test_an_unknown_key_is_rejected_with_the_nearest_one(engine, options, says):
    with pytest.raises(ValueError, match=says):
        engine.report(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data": "MNIST"}, "data is a str; pass a dictionary with name, source"),
        ({"utility": 0.5}, "utility is a float; pass a dictionary with metric, value, split"),
        ({"utility": [("value", 1)]}, "utility is a list"),
        ({"data": {"name": 3}}, r"data\['name'\] is a int, not str"),
        ({"data": {"sha256": 1}}, r"data\['sha256'\] is a int"),
        ({"utility": {"value": [0.5]}}, r"utility\['value'\] is a list"),
        ({"excludes": "the moon"}, "excludes is a str; pass a list of sentences"),
        ({"excludes": b"the moon"}, "excludes is a bytes"),
        ({"excludes": None}, "excludes is a NoneType"),
        ({"excludes": ["the moon", 3]}, "excludes is a list that holds a int"),
        ({"excludes": {"the moon"}}, "excludes is a set"),
    ],
)
def test_an_argument_of_another_type_is_rejected(engine, options, says):
    with pytest.raises(TypeError, match=says):
        engine.report(**options)


def test_a_list_of_sentences_is_as_good_as_a_tuple():
    report = make_loop(noise_multiplier=1.0).engine.report(excludes=["the moon"])
    assert report.facts.excludes == ("the moon",)


# The light for the loss


def of_rows_apart(report):
    (found,) = (
        one for one in report.to_dict()["accounting"]["assumptions"] if "depends on that row alone" in one["name"]
    )
    return found


def mixed(outputs, targets):
    return F.cross_entropy(outputs - outputs.mean(0), targets)


def test_the_loss_assumption_shows_whether_the_loss_was_probed():
    loop, other = make_loop(noise_multiplier=1.0), make_loop(noise_multiplier=1.0)
    batch = examples().tensors
    assert of_rows_apart(loop.engine.report())["holds"] == "not checked"
    check_loss(loop.model, F.cross_entropy, batch)
    assert loss_was_checked(loop.model)
    assert of_rows_apart(loop.engine.report())["holds"] == "yes"
    assert of_rows_apart(other.engine.report())["holds"] == "not checked"
    with pytest.raises(BatchDependentLossError):
        check_loss(loop.model, mixed, batch)
    assert not loss_was_checked(loop.model)
    assert of_rows_apart(loop.engine.report())["holds"] == "not checked"
