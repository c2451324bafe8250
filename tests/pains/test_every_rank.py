"""No pain of the list is left out: every rank has a test of its name, and so has every small one."""

import re
from pathlib import Path

RANKS = range(1, 66)
NAMED = re.compile(r"^def test_rank_(\d\d)_\w+\(", re.MULTILINE)
SMALL = (
    "a_star_import_of_the_optimizers",
    "fix_to_instance_norm_beside_an_lstm",
    "fix_of_an_lstm_with_a_projection",
    "fix_takes_classes_that_cannot_be_pickled",
    "layer_norm_without_a_bias",
    "a_linear_layer_on_four_axes",
    "a_layer_without_a_rule_that_has_dropout_inside",
    "a_plain_rnn_trains_or_is_refused",
    "an_embedding_bag_takes_its_inputs_in_any_way",
    "no_accountant_raises_before_the_first_step",
    "no_noise_costs_infinity_with_every_accountant",
    "a_checkpoint_of_compat_loads_with_weights_only",
)
NAMED_SMALL = re.compile(r"^def test_small_(\w+)\(", re.MULTILINE)


def ranks_in(text: str) -> set[int]:
    """The ranks that test functions of this source are named by."""
    return {int(rank) for rank in NAMED.findall(text)}


def test_every_rank_has_a_test_and_every_test_a_rank():
    found = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        found |= ranks_in(path.read_text())
    assert found == set(RANKS), sorted(found ^ set(RANKS))


def test_every_small_pain_has_a_test():
    found = NAMED_SMALL.findall((Path(__file__).parent / "test_small.py").read_text())
    assert [small for small in SMALL if not any(name.startswith(small) for name in found)] == []


def test_ranks_are_read_from_names_of_test_functions_alone():
    text = "def test_rank_07_a(door):\n# def test_rank_08_b():\n    def test_rank_09_c():\nx = 'test_rank_10_d('\n"
    assert ranks_in(text) == {7}
