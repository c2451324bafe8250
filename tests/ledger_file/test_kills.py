"""A process killed at any time has charged its releases, reuses no noise, and can be resumed."""

import itertools
import random
import time

import pytest
from launch import started
from ledger_file.killed_runs import STEPS, killed_at, released, trained

from dpengine.accounting.ledger import steps_of
from dpengine.ledger_file import read
from dpengine.noise import BandMF


def charged(folder):
    return steps_of(read(folder / "run.ledger").history)


@pytest.mark.slow
@pytest.mark.hazard("L5")
def test_a_crash_at_any_point_between_draw_and_update_leaves_every_release_charged(tmp_path):
    """Kills before, during and after each system call, and before and after each change of the weights."""
    unused = []
    for place in itertools.count():
        folder = tmp_path / str(place)
        folder.mkdir()
        process = started(killed_at, folder, place)
        process.join(60)
        assert process.exitcode in {0, -9}
        unused.append(charged(folder) - len(released(folder)))
        assert 0 <= unused[-1] <= 2  # steps that are reserved at once
        if (folder / "ended").exists():
            break
    assert place >= 12
    assert {0, 1, 2} <= set(unused)


KILLS = 34  # of each kind of run
KINDS = {
    "gaussian": {"reserve": 5},
    "bandmf": {"reserve": 5, "noise": BandMF(num_bands=2), "steps": STEPS},
    "seeded": {"seed": 7},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("gaussian", marks=pytest.mark.nightly), "bandmf", "seeded"])
@pytest.mark.hazard("P2")
def test_a_run_killed_at_random_resumes_without_reusing_noise(tmp_path, kind):
    generator, settings = random.Random(kind), KINDS[kind]
    whole = tmp_path / "whole"
    whole.mkdir()
    started(trained, whole, **settings).join(60)
    lasted = (whole / "ended").stat().st_mtime - (whole / "begun").stat().st_mtime
    folders = []
    for number in range(KILLS + 1):
        if not folders or (folders[-1] / "ended").exists():
            folders.append(tmp_path / str(number))
            folders[-1].mkdir()
            before = 0
        process = started(trained, folders[-1], **settings)
        if number < KILLS:  # the last one may go on to its end
            while number % 4 and process.is_alive() and not (folders[-1] / "begun").exists():
                time.sleep(0.002)  # three of four are killed while they train, the others perhaps before
            time.sleep(generator.uniform(0, lasted))
            process.kill()
        process.join(60)
        assert process.exitcode in {0, -9}
        (folders[-1] / "begun").unlink(missing_ok=True)
        assert max(before, len(released(folders[-1]))) <= charged(folders[-1])
        before = charged(folders[-1])
    assert (folders[-1] / "ended").exists()
    for folder in folders:
        releases = {}
        for one in released(folder):
            releases.setdefault(tuple(one["address"]), set()).add((one["batch"], one["weights"]))
        assert all(len(different) == 1 for different in releases.values())  # each noise address was used by one release
        assert {step for *_, step in releases} == set(range(STEPS))
        if kind == "seeded":
            assert released(folder)[-1] == released(whole)[-1]  # the weights of a run that was not killed
    assert sum(len(released(folder)) > STEPS for folder in folders) >= 3  # these repeated some steps
