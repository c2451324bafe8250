"""The result of a run does not depend on the number of processes and the distribution of the model."""

import pytest
import torch
from launch import launched
from spread_runs import Case, all_trained, difference, trained

CASES = [
    *(
        Case(model=model, clipping=clipping)
        for model in ("tied", "frozen", "adapted")
        for clipping in ("flat", "per_layer")
    ),
    *(Case(model=model, noise=noise) for model in ("tied", "adapted") for noise in ("bandmf", "inverse")),
    Case(model="frozen", noise="inverse", clipping="per_layer", physical=2),
    Case(model="tied", noise="bandmf", clipping="per_layer", physical=3),
    Case(batch=2),  # most processes have no sample
    Case(clipping="adaptive", physical=2),
    Case(clipping="automatic", model="tied"),
    Case(model="tied", more=(("accumulation_steps", 3),)),
]


A_FEW = [
    Case(model="tied", clipping="per_layer", physical=2),
    Case(model="adapted", noise="bandmf"),
    Case(batch=2),
    Case(clipping="adaptive", more=(("accumulation_steps", 2),)),
]


def assert_same_runs(case, of_ranks, expected):
    for one in of_ranks:
        assert one["weights"].keys() == expected["weights"].keys()
        assert difference(one["weights"], expected["weights"]) < 1e-6, case
        assert one["epsilon"] == expected["epsilon"]
        assert all(torch.equal(w, of_ranks[0]["weights"][name]) for name, w in one["weights"].items()), case


def compare(cases, topology, ranks, steps):
    found = launched(ranks, all_trained, cases, topology, steps)
    assert all(isinstance(one, list) for one in found), found
    for i, case in enumerate(cases):
        assert_same_runs(case, [one[i] for one in found], trained(case, steps=steps))
    rare = cases.index(Case(batch=2))
    assert any(one[rare]["empty"] for one in found)  # a process without samples participates


@pytest.mark.one_in(2, "topology", others="slow")
@pytest.mark.parametrize("topology", ["ddp", "fsdp"])
@pytest.mark.hazard("S7", "X1", "X2")
def test_two_processes_give_the_weights_of_one_process(topology):
    compare(A_FEW, topology, 2, steps=6)


@pytest.mark.hazard("X2")
def test_a_process_without_samples_may_skip_backward_if_it_has_the_full_model():
    cases = [Case(batch=1, skips_empty=True), Case(batch=1, noise="bandmf", skips_empty=True)]
    found = launched(2, all_trained, cases, "data", 8)
    for i, case in enumerate(cases):
        assert sum(one[i]["empty"] for one in found) > 1
        assert_same_runs(case, [one[i] for one in found], trained(case, steps=8))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*DPE028")
@pytest.mark.parametrize("topology", ["data", "ddp"])
def test_processes_choose_the_parts_that_run_per_sample_once_they_have_samples(topology):
    cases = [
        *(Case(model="flattened", batch=batch, skips_empty=topology == "data") for batch in (1, 4)),
        Case(model="recomputed", more=(("accumulation_steps", 2),)),
    ]
    found = launched(2, all_trained, cases, topology, 8)
    for i, case in enumerate(cases):
        assert_same_runs(case, [one[i] for one in found], trained(case, steps=8))
    assert sum(one[0]["empty"] for one in found) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "ranks"),
    [
        ("data", 4),
        ("fsdp", 2),
        ("hybrid", 4),
        pytest.param("ddp", 2, marks=pytest.mark.nightly),
        pytest.param("fsdp", 4, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.hazard("S7", "X1", "X2")
def test_the_weights_are_those_of_one_process_and_the_same_on_all(topology, ranks):
    compare(CASES, topology, ranks, steps=10)
