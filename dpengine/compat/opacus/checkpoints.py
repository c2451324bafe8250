"""Checkpoints in the layout of Opacus: one file, without the state of random generators and batches."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections import Counter
from typing import Any

import torch

import dpengine
from dpengine.errors import keyword_hints, notice

MODULE, ACCOUNTANT = "module_state_dict", "privacy_accountant_state_dict"
PARTS = ("optimizer", "noise_scheduler", "grad_clip_scheduler")


class Checkpoints:
    """Checkpoint methods of an engine."""

    accountant: Any
    engine: dpengine.PrivacyEngine
    _steps_at_load = 0  # steps of the engine when a checkpoint was last loaded

    @keyword_hints
    def save_checkpoint(
        self,
        *,
        path: Any,
        module: Any,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Writes the state of the model, of the accountant and of the other given objects, in Opacus's layout.

        Args:
            path: Path or file, for ``torch.save``.
            module: The wrapper or the model.
            optimizer: The private optimizer.
            noise_scheduler: Scheduler of the noise multiplier.
            grad_clip_scheduler: Scheduler of the clipping norm.
            checkpoint_dict: Additional entries of the file.
            module_state_dict_kwargs: Arguments of ``module.state_dict``.
            torch_save_kwargs: Arguments of ``torch.save``.
        """
        content = dict(checkpoint_dict or {})
        content[MODULE] = module.state_dict(**(module_state_dict_kwargs or {}))
        content[ACCOUNTANT] = self.accountant.state_dict()
        for name, part in zip(PARTS, (optimizer, noise_scheduler, grad_clip_scheduler), strict=True):
            if part is not None:
                content[f"{name}_state_dict"] = part.state_dict()
        torch.save(content, path, **(torch_save_kwargs or {}))

    @keyword_hints
    def load_checkpoint(
        self,
        *,
        path: Any,
        module: Any,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint of ``save_checkpoint`` or of Opacus.

        Args:
            path: Path or file, for ``torch.load``.
            module: The wrapper or the model: keys with and without ``_module.`` are accepted.
            optimizer: The private optimizer.
            noise_scheduler: Scheduler of the noise multiplier.
            grad_clip_scheduler: Scheduler of the clipping norm.
            module_load_dict_kwargs: Arguments of ``module.load_state_dict``.
            torch_load_kwargs: Arguments of ``torch.load``. ``weights_only`` is True by default; with False, a file
                may run code.

        Returns:
            The content without the states of optimizer and schedulers.

        Raises:
            ValueError: If the file is not such a checkpoint, is of another accountant, or contains objects that
                ``weights_only`` does not load.
        """
        content = _loaded(path, {"weights_only": True, **(torch_load_kwargs or {})})
        missing = [key for key in (MODULE, ACCOUNTANT) if key not in content]
        if missing:
            raise ValueError(f"{path} has no {missing[0]!r}, which save_checkpoint writes. It has {list(content)}.")
        states = [content.pop(f"{name}_state_dict", None) for name in PARTS]
        steps = self.engine.ledger.steps
        _load_accountant(self.accountant, content[ACCOUNTANT], steps - self._steps_at_load, steps)
        module.load_state_dict(content[MODULE], **(module_load_dict_kwargs or {}))
        for name, part, state in zip(PARTS, (optimizer, noise_scheduler, grad_clip_scheduler), states, strict=True):
            if part is not None and state is not None:
                part.load_state_dict(state)
            elif (part is None) != (state is None):
                problem = "was not passed, but is in the checkpoint" if part is None else "is not in the checkpoint"
                warnings.warn(f"The {name.replace('_', ' ')} {problem}. Its state is not loaded.", stacklevel=3)
        self._steps_at_load = steps
        return content


def _loaded(path: Any, options: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(torch.load(path, **options))
    except pickle.UnpicklingError as error:
        if not options["weights_only"]:
            raise
        raise ValueError(
            f"{path} contains objects other than tensors and plain values, and loading them may run code in the "
            "file. If you trust the file, pass torch_load_kwargs={'weights_only': False}."
        ) from error


def _load_accountant(accountant: Any, state: Any, steps_since_load: int, steps: int) -> None:
    """Replaces an accountant's history. Warns if steps of the engine may no longer be accounted."""
    before = _steps(accountant)
    accountant.load_state_dict(state)
    after = _steps(accountant)
    more = after.total() - before.total()
    if more < 0:
        what = f"The accountant goes back from {before.total()} steps to the {after.total()} steps of the checkpoint."
        _notice_lost(accountant, "back", what)
    elif (steps_since_load and more) or (steps and before - after):
        lost = steps_since_load or steps
        what = f"{lost} steps of this engine are no longer accounted, unless the checkpoint includes them."
        _notice_lost(accountant, "other", what)


def _notice_lost(accountant: Any, key: str, what: str) -> None:
    notice(
        "DPE021",
        f"{what} This is correct only if no result of the lost steps is kept or shown. Otherwise load only the "
        "weights, by module.load_state_dict.",
        key=key,
        of=accountant,
    )


def _steps(accountant: Any) -> Counter[str]:
    """Counts the steps of each kind in the triples of a history."""
    steps = Counter[str]()
    for entry in accountant.history:
        with contextlib.suppress(TypeError, ValueError):  # a user's accountant may store other entries
            *kind, count = (getattr(value, "item", lambda value=value: value)() for value in entry)
            steps[repr(kind)] += count
    return steps
