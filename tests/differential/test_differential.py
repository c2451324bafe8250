"""The current package and the package at a baseline commit give the same bits, charges, noise addresses and errors.

A safety net for the restructuring, which is removed when that is done. It plays the same seeded cases on both packages,
in processes of their own, and compares after every call: the bits of ``p.grad`` and of the parameters, the ledger, the
address of every draw from the noise source, epsilon, the type and code of errors, and the codes of warnings. Messages
are not compared. The kinds of cases:

- ``run``: an orderly run; modes, clipping, noise, sampling, chunks, checkpoint and ledger file follow from the seed.
- ``spread``: a run of two processes.
- ``directed``: a few sequences by hand, of what is easy to lose and seldom drawn.
- ``sequence``: calls in a random order, with faults in between.
- ``alone``: the same for ``PerSampleGradientClipper`` and ``GradSampleModule``.
- ``model``: a generated model (`tests/generated`) through each of these. Its sums are compared up to 1e-6.

The default suite plays a few dozen cases. ``make differential`` plays the full form, and `test_detects`. Environment
variables set the number of cases of a kind and the first seed:
``DPENGINE_SEQUENCE=20000 DPENGINE_RUN=500 DPENGINE_FIRST_SEED=1000 DPENGINE_PROCESSES=2 make differential``. One case,
or a range of seeds: ``python tests/differential/compare.py sequence:17 run:0-99``.

The baseline is ``BASELINE`` in `sides`, or ``DPENGINE_BASELINE`` in the environment. To advance it, set it to a commit
whose behavior is known to be right, and empty ``INTENDED``. An issue that changes behavior on purpose adds a row to
``INTENDED``. One that moves or renames an internal adds the new name to `adapter`; `tests/generated` must keep running
under both packages, so it may use public names of dpengine and its ``errors`` only.
"""

import os

import pytest
from differential.scenarios import DIRECTED
from differential.sides import NoBaseline, compare

SHORT = {"spread": 1, "directed": len(DIRECTED), "run": 12, "model": 2, "alone": 6, "sequence": 20}
FULL = {"spread": 12, "directed": len(DIRECTED), "run": 100, "model": 200, "alone": 400, "sequence": 4000}


def cases(counts):
    first = int(os.environ.get("DPENGINE_FIRST_SEED", "0"))
    numbers = {kind: int(os.environ.get(f"DPENGINE_{kind.upper()}", count)) for kind, count in counts.items()}
    return [(kind, seed) for kind, number in numbers.items() for seed in range(first, first + number)]


def assert_same(counts, processes):
    try:
        found = compare(cases(counts), processes=processes)
    except NoBaseline as reason:
        pytest.skip(str(reason))
    assert not found, f"{len(found)} cases differ from the baseline:\n" + "\n".join(found[:10])


@pytest.mark.slow
def test_a_few_cases_are_as_at_the_baseline():
    assert_same(SHORT, processes=2)


@pytest.mark.nightly
def test_all_cases_are_as_at_the_baseline():
    assert_same(FULL, processes=int(os.environ.get("DPENGINE_PROCESSES", "2")))
