"""The guards of the training step. Each row removes one guard, and names the test that fails without it."""

from . import guards_engine, guards_gradients, guards_passes, guards_run

GUARDS = [*guards_engine.GUARDS, *guards_gradients.GUARDS, *guards_passes.GUARDS, *guards_run.GUARDS]
