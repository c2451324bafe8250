"""Tests of a module that is marked with ``xdist_group`` run in one worker, so that what they look at is made once."""

import os
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("groups")

TESTS = Path(__file__).resolve().parent


@pytest.mark.parametrize("number", range(6))
def test_all_run_in_one_worker(number, request, tmp_path_factory):
    if not request.config.getoption("loadgroup", default=True):
        pytest.skip("workers take tests one by one, as --dist says")
    worker, folder = os.environ.get("PYTEST_XDIST_WORKER"), tmp_path_factory.getbasetemp()
    folder = folder.parent if worker else folder  # what the workers share
    (folder / f"{worker} had one of the group").touch()
    assert len(list(folder.glob("* had one of the group"))) == 1


def test_every_group_is_one_module_and_marked_as_the_scheduler_reads_it():
    texts = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")]
    names = [
        name for text in texts for name in re.findall(r'^pytestmark = pytest\.mark\.xdist_group\("(.+)"\)', text, re.M)
    ]
    assert len(names) == len(set(names)) == sum("mark.xdist_group(" in text for text in texts)
