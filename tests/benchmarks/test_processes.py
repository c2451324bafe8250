"""Programs beside the timing process: JAX, and the measurement of memory."""

from dataclasses import replace

import pytest

from benchmarks.cells import CELLS
from benchmarks.jax_process import jax_runner
from benchmarks.memory import peak_memory
from benchmarks.runner import Setting
from benchmarks.step import contenders_for

SETTING = Setting(threads=1)


def start_jax(cell, **setting):
    jax_runner(private=True)(cell, cell.make(), cell.batch(2), replace(SETTING, **setting))


def test_an_interpreter_that_dies_is_an_error_and_not_a_wait():
    with pytest.raises(RuntimeError, match="no message"):
        start_jax(CELLS["cnn"], jax_python="/bin/false")


def test_a_model_that_is_not_written_in_jax_is_refused():
    with pytest.raises(NotImplementedError, match="not written in JAX"):
        start_jax(CELLS["lstm"])


@pytest.mark.slow
def test_memory_of_two_steps_is_more_than_the_parameters_take():
    held = peak_memory("cnn", "plain", SETTING)
    assert held is not None
    assert held["first"] > 1 and held["later"] > 1  # 256 images of 784 float32 alone take 0.77 MiB


@pytest.mark.slow
def test_memory_of_what_fails_is_not_known():
    assert peak_memory("cnn", "jax plain", SETTING) is None
    assert peak_memory("cnn", "nobody", SETTING) is None


def test_contenders_are_chosen_by_mode_and_library():
    assert contenders_for(["auto"], ["none"]) == ["plain", "dpengine auto"]
    assert contenders_for(["ew"], ["jax-privacy"]) == ["plain", "dpengine ew", "jax plain", "jax-privacy"]
    everything = contenders_for(["auto"], ["all"])
    assert {"opacus ghost", "opake", "backpack norm", "jax plain", "jax-privacy"} <= set(everything)
