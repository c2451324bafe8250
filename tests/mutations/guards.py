"""The guards of the training step. Each row removes one guard, and names the test that fails without it."""

from . import guards_engine, guards_extensions, guards_gradients, guards_late_binding, guards_passes, guards_run

PARTS = (guards_engine, guards_extensions, guards_gradients, guards_late_binding, guards_passes, guards_run)
GUARDS = [guard for part in PARTS for guard in part.GUARDS]
