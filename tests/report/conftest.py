"""Facts of an ordinary run, and variants of them."""

import dataclasses

import pytest

from dpengine.accounting import (
    Charge,
    GaussianEvent,
    MatrixGaussianEvent,
    NonPrivateEvent,
    PoissonGaussianEvent,
    Relation,
    UnclaimedEvent,
)
from dpengine.report import AccountingFacts, DatasetFacts, EnvironmentFacts, RunFacts

PLAN = {
    "sampling": "poisson",
    "sample_rate": 0.02,
    "expected_batch_size": 100.0,
    "clipping": {"policy": "flat", "max_norm": 0.5},
    "sensitivity": 0.5,
    "noise_multiplier": 1.5,
    "noise_std_of_sum": 0.75,
    "noise_std_of_mean": 0.0075,
    "relation": "zero-out",
}
ORDINARY = RunFacts(
    plan=PLAN,
    accounting=AccountingFacts(
        history=(Charge(PoissonGaussianEvent(0.02 + 2.0**-60, 1.5), 200),),
        delta=1e-5,
        relation=Relation.ZERO_OUT,
        target_epsilon=2.5,
        planned_steps=200,
        ledger_on_disk=True,
    ),
    dataset=DatasetFacts(
        num_examples=5003,
        description={
            "name": "Census",
            "source": "a public archive",
            "licence": "CC BY 4.0",
            "sha256": {"a.data": "ab" * 32},
        },
    ),
    environment=EnvironmentFacts(torch="2.13.0", device="cpu"),
    noise={"kind": "chacha20", "cryptographic": True, "insecure_seed": False, "largest_normal": 9.4},
    loss_checked=True,
    utility={"metric": "accuracy", "value": 0.8493, "split": "test"},
)
SLOW = {"voids-and-clips": pytest.mark.slow}  # many charges to account for
VARIANTS = {
    "ordinary": {},
    "not-private": {"plan": PLAN | {"noise_multiplier": 0.0}, "history": (Charge(NonPrivateEvent(), 3),)},
    "shuffled": {
        "plan": PLAN | {"sampling": "shuffle"},
        "history": (Charge(UnclaimedEvent("sampling='shuffle' does not draw Poisson batches."), 7),),
        "unamplified": (Charge(GaussianEvent(1.5), 2),),
    },
    "not-started": {"history": ()},
    "full-batch": {"history": (Charge(GaussianEvent(4.0), 9),), "plan": PLAN | {"sample_rate": 1.0}},
    "bare": {
        "plan": {},
        "noise": {},
        "description": {},
        "utility": {},
        "torch": None,
        "device": None,
        "num_examples": None,
    },
    "add-or-remove": {"relation": Relation.ADD_OR_REMOVE_ONE, "constants_declared": True},
    "seeded": {"noise": {"kind": "philox", "cryptographic": False, "insecure_seed": True}},
    "voids-and-clips": {
        "history": (
            Charge(PoissonGaussianEvent(0.02, 1.5), 3),
            Charge(PoissonGaussianEvent(0.02, 1.5), 2, "void"),
            Charge(PoissonGaussianEvent(0.02, 30.0), 5, "clip"),
            Charge(PoissonGaussianEvent(0.02, 1.5), 1),
        )
    },
    "external": {
        "plan": PLAN | {"sampling": "external", "sample_rate": 1.0},
        "history": (Charge(UnclaimedEvent("sampling='external' does not draw Poisson batches."), 7),),
    },
    "external-not-started": {"plan": PLAN | {"sampling": "external", "sample_rate": 1.0}, "history": ()},
    "declared": {"plan": PLAN | {"sampling": "external-poisson"}},
    "declared-before": {"other_samplings": ("external-poisson",)},
    "probed": {"loss_evidence": "no mixing of samples was seen in 3 probed steps"},
    "loaded": {"other_samplings": ("unknown", "fixed-size")},
    "refused": {"accountant": "gdp"},
    "correlated": {
        "plan": PLAN | {"sampling": "cyclic-poisson", "correlated_noise": {"noise": "blt", "decays": [0.9, 0.5]}},
        "history": (Charge(MatrixGaussianEvent(4.0, 5, (1.0, 1.5), "0123abcd"), 8),),
    },
}


@pytest.fixture
def make_facts():
    """Returns a function that changes facts of the ordinary run by field name; a string selects a variant."""

    def make(variant: str = "ordinary", **changes):
        changes = VARIANTS[variant] | changes
        groups = {name: getattr(ORDINARY, name) for name in ("accounting", "dataset", "environment")}
        for name, group in groups.items():
            names = {one.name for one in dataclasses.fields(group)} & changes.keys()
            groups[name] = dataclasses.replace(group, **{one: changes.pop(one) for one in names})
        return dataclasses.replace(ORDINARY, **groups, **changes)

    return make


@pytest.fixture(params=[pytest.param(one, marks=SLOW.get(one, ())) for one in VARIANTS], ids=str)
def any_facts(request, make_facts):
    """Facts of every kind of run that a report supports."""
    return make_facts(request.param)
