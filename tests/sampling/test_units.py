"""User-level selection, multi-owner selection, and padding of batches."""

import itertools

import numpy as np
import pytest

from dpengine.sampling import (
    PADDING,
    CyclicPoissonSampling,
    MultiOwnerGraph,
    MultiOwnerMinSepSampling,
    MultiOwnerSelection,
    UserSelectionStrategy,
    greedy_contribution_bound,
    pad_to_multiple_of,
    split_and_pad_global_batch,
)
from dpengine.sampling.scheme import KeyedWords

ALL = CyclicPoissonSampling(sampling_prob=1.0, iterations=4)
SOME = CyclicPoissonSampling(sampling_prob=0.5, iterations=30)


def test_examples_of_a_user_are_selected_in_sequence():
    ids = ["b", "a", "b", "c", "b", "a"]
    batches = list(UserSelectionStrategy(base=ALL, examples_per_user=2).batch_iterator(ids))
    assert batches[0].tolist() == [[1, 5], [0, 2], [3, 3]]
    assert batches[1].tolist() == [[1, 5], [4, 0], [3, 3]]
    assert batches[2].tolist() == [[1, 5], [2, 4], [3, 3]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_users_are_drawn_by_the_base_scheme(shuffle):
    ids, words = np.array([3, 1, 1, 2, 3, 3]), KeyedWords((1, 2))
    strategy = UserSelectionStrategy(base=SOME, examples_per_user=2, shuffle=shuffle)
    users = [batch.tolist() for batch in SOME.batch_iterator(3, words)]
    for batch, drawn in zip(strategy.batch_iterator(ids, words), users, strict=True):
        assert (ids[batch] == np.array(drawn).reshape(-1, 1) + 1).all()


def test_shuffled_selection_uses_each_example_of_a_user_equally_often():
    ids = np.repeat([0, 1], [5, 2])
    scheme = UserSelectionStrategy(base=CyclicPoissonSampling(sampling_prob=1.0, iterations=10), shuffle=True)
    orders = []
    for seed in range(40):
        seen = np.concatenate([batch.ravel() for batch in scheme.batch_iterator(ids, KeyedWords((seed, 0)))])
        assert np.bincount(seen).tolist() == [2, 2, 2, 2, 2, 5, 5]
        orders.append(tuple(seen[seen < 5][:5]))
    assert len(set(orders)) > 20


def test_a_run_over_users_resumes():
    ids, words = np.array([0, 0, 0, 1, 1, 2]), KeyedWords((3, 4))
    scheme = UserSelectionStrategy(base=SOME, examples_per_user=2)
    whole = [batch.tolist() for batch in scheme.batch_iterator(ids, words)]
    first = scheme.batch_iterator(ids, words)
    for _ in range(11):
        next(first)
    resumed = scheme.batch_iterator(ids, words)
    resumed.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in resumed] == whole[11:]
    with pytest.raises(ValueError, match="has 3 users, not 2"):
        scheme.batch_iterator([0, 1], words).load_state_dict(first.state_dict())


def test_no_users():
    assert [batch.shape for batch in UserSelectionStrategy(base=ALL).batch_iterator([])] == [(0, 1)] * 4


def test_bad_users_are_rejected():
    with pytest.raises(TypeError, match="base is a int"):
        UserSelectionStrategy(base=3)
    with pytest.raises(ValueError, match="examples_per_user must be at least 1"):
        UserSelectionStrategy(base=ALL, examples_per_user=0)
    with pytest.raises(ValueError, match=r"user_ids has shape \(2, 2\)"):
        UserSelectionStrategy(base=ALL).batch_iterator(np.zeros((2, 2)))


def slowly(graph, max_degree):
    """Reference implementation that considers one example at a time."""
    owners = {}
    for example, user in zip(graph.examples.tolist(), graph.users.tolist(), strict=True):
        owners.setdefault(example, set()).add(user)
    kept, taken = [], set()
    for example in sorted(owners, key=lambda one: (len(owners[one]), one)):
        if len(owners[example]) <= max_degree and not owners[example] & taken:
            kept.append(example)
            taken |= owners[example]
    return sorted(kept)


@pytest.mark.parametrize("seed", range(30))
def test_vectorized_greedy_selection_equals_sequential_greedy_selection(seed):
    generator = np.random.default_rng(seed)
    users = int(generator.integers(1, 25))
    edges = [
        (example, user)
        for example in range(int(generator.integers(1, 40)))
        for user in generator.choice(users, size=min(users, int(generator.integers(1, 6))), replace=False)
    ]
    generator.shuffle(edges)
    examples, owners = np.array(edges).T
    graph = MultiOwnerGraph(examples, owners)
    for max_degree in (1, 2, 8):
        assert greedy_contribution_bound(graph, max_degree).tolist() == slowly(graph, max_degree)


def test_each_user_contributes_at_most_one_selected_example():
    graph = MultiOwnerGraph(np.array([0, 0, 1, 2, 2, 3]), np.array([0, 1, 1, 2, 3, 4]))
    selection = MultiOwnerSelection(base=SOME)
    seen = set(itertools.chain.from_iterable(batch.tolist() for batch in selection.batch_iterator(graph)))
    assert seen == {1, 2, 3}
    assert len(list(selection.batch_iterator(graph))) == 30
    empty = MultiOwnerGraph(np.empty(0, dtype=int), np.empty(0, dtype=int))
    assert not len(greedy_contribution_bound(empty))


@pytest.mark.parametrize(
    "examples, users, message",
    [
        ([0, 1], [0], "shapes"),
        ([0, 0], [1, 1], "duplicates"),
        ([0, 2], [0, 0], "1 examples have no owner, the first is 1"),
        ([0, -1], [0, 0], "whole numbers"),
        ([0.0, 1.0], [0.0, 0.0], "whole numbers"),
    ],
)
def test_bad_graphs_are_rejected(examples, users, message):
    with pytest.raises(ValueError, match=message):
        MultiOwnerGraph(np.array(examples), np.array(users))


def test_bad_bounds_are_rejected():
    graph = MultiOwnerGraph(np.array([0]), np.array([0]))
    with pytest.raises(ValueError, match="max_degree must be at least 1"):
        greedy_contribution_bound(graph, 0)
    with pytest.raises(TypeError, match="base is a str"):
        MultiOwnerSelection(base="poisson")


@pytest.mark.parametrize("count", [0, 1, 5, 8, 13])
def test_padding_makes_the_batch_size_a_multiple(count):
    padded = pad_to_multiple_of(np.arange(count), 8)
    assert len(padded) % 8 == 0
    assert len(padded) - count < 8
    assert padded[:count].tolist() == list(range(count))
    assert (padded[count:] == PADDING).all()
    parts = split_and_pad_global_batch(np.arange(count), 4)
    assert all(len(part) == 4 for part in parts)
    assert [i for part in parts for i in part.tolist() if i != PADDING] == list(range(count))


def test_padding_falls_into_the_last_microbatches():
    padded = pad_to_multiple_of(np.arange(5), 12, microbatch_size=3)
    # Sample i is in microbatch i mod 4.
    microbatches = [padded[j::4].tolist() for j in range(4)]
    assert microbatches == [[0, 1, 2], [3, 4, -1], [-1, -1, -1], [-1, -1, -1]]


def test_padding_of_two_dimensional_batches_adds_whole_rows():
    assert pad_to_multiple_of([[1, 2], [3, 4], [5, 6]], 2).tolist() == [[1, 2], [3, 4], [5, 6], [-1, -1]]


@pytest.mark.parametrize("multiple, microbatch", [(0, None), (8, 0), (8, 3)])
def test_bad_multiples_are_rejected(multiple, microbatch):
    with pytest.raises(ValueError, match=r"multiple|microbatch_size"):
        pad_to_multiple_of(np.arange(5), multiple, microbatch_size=microbatch)


# Multi-owner batches with a minimum separation


def graph_of(owners):
    return MultiOwnerGraph(*np.array([(i, user) for i, users in enumerate(owners) for user in users]).T)


def steps_of_users(graph, batches):
    owners = {}
    for example, user in zip(graph.examples.tolist(), graph.users.tolist(), strict=True):
        owners.setdefault(example, []).append(user)
    steps = {}
    for step, batch in enumerate(batches):
        for example in batch.tolist():
            for user in owners[example]:
                steps.setdefault(user, []).append(step)
    return steps


@pytest.mark.one_in(5, "seed", others="slow")
@pytest.mark.parametrize("seed", range(20))
def test_participations_of_a_user_respect_min_separation(seed):
    generator = np.random.default_rng(seed)
    users = int(generator.integers(3, 40))
    graph = graph_of([generator.choice(users, size=int(generator.integers(1, 4)), replace=False) for _ in range(60)])
    scheme = MultiOwnerMinSepSampling(batch_size=4, iterations=25, min_separation=3)
    plan = scheme.schedule(graph)
    steps = steps_of_users(graph, plan.batches)
    assert all(later - earlier >= 3 for met in steps.values() for earlier, later in itertools.pairwise(met))
    assert plan.user_participations == max(map(len, steps.values()))
    counts = np.bincount(np.concatenate(plan.batches), minlength=60)
    assert plan.example_participations == counts.max()
    assert all(len(batch) <= 4 and (np.diff(batch) > 0).all() for batch in plan.batches)
    assert [batch.tolist() for batch in scheme.batch_iterator(graph)] == [batch.tolist() for batch in plan.batches]


def test_every_example_is_used_before_any_is_repeated():
    graph = graph_of([[i] for i in range(12)])
    plan = MultiOwnerMinSepSampling(batch_size=3, iterations=8, min_separation=4).schedule(graph)
    first, second = (sorted(np.concatenate(half).tolist()) for half in (plan.batches[:4], plan.batches[4:]))
    assert first == second == list(range(12))
    assert (plan.user_participations, plan.example_participations) == (2, 2)


@pytest.mark.parametrize(
    ("owners", "settings", "batches", "participations"),
    [  # unused examples of a user come first; limits grow only if no other constraint prevents a larger batch
        ([[0], [0], [1], [1]], (2, 4, 2), [[0, 2], [], [1, 3], []], (2, 1)),
        ([[0], [1], [0, 1]], (3, 2, 5), [[0, 1], []], (1, 1)),
    ],
)
def test_schedule_matches_the_expected_batches(owners, settings, batches, participations):
    names = ("batch_size", "iterations", "min_separation")
    plan = MultiOwnerMinSepSampling(**dict(zip(names, settings, strict=True))).schedule(graph_of(owners))
    assert [batch.tolist() for batch in plan.batches] == batches
    assert (plan.user_participations, plan.example_participations) == participations


def test_examples_with_too_many_owners_are_excluded():
    plan = MultiOwnerMinSepSampling(batch_size=2, iterations=3, min_separation=1, max_degree=1).schedule(
        graph_of([[0, 1], [2]])
    )
    assert [batch.tolist() for batch in plan.batches] == [[1], [1], [1]]


@pytest.mark.parametrize("name", ["batch_size", "iterations", "min_separation", "max_degree"])
def test_invalid_settings_of_a_schedule_are_rejected(name):
    good = {"batch_size": 2, "iterations": 3, "min_separation": 1}
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        MultiOwnerMinSepSampling(**{**good, name: -1})
    with pytest.raises(TypeError, match=name):
        MultiOwnerMinSepSampling(**{**good, name: 1.5})
