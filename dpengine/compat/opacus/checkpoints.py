"""Checkpoints in Opacus's layout: one file, with what it puts there. Of randomness and batches it holds nothing."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from typing import Any

import torch

import dpengine
from dpengine.errors import notice, suggests_names

MODULE, ACCOUNTANT = "module_state_dict", "privacy_accountant_state_dict"
OPTIONAL = {
    "optimizer": "optimizer_state_dict",
    "noise_scheduler": "noise_scheduler_state_dict",
    "grad_clip_scheduler": "grad_clip_scheduler_state_dict",
}


def _save(
    path: Any, module: Any, accountant: Any, parts: dict[str, Any], more: Any, module_kwargs: Any, save_kwargs: Any
) -> None:
    """Writes the state of a model, an accountant and whatever of ``OPTIONAL`` is there."""
    content = dict(more or {})
    content[MODULE] = module.state_dict(**(module_kwargs or {}))
    content[ACCOUNTANT] = accountant.state_dict()
    for name, part in parts.items():
        if part is not None:
            content[OPTIONAL[name]] = part.state_dict()
    torch.save(content, path, **(save_kwargs or {}))


def _load(
    path: Any,
    module: Any,
    accountant: Any,
    parts: dict[str, Any],
    module_kwargs: Any,
    load_kwargs: Any,
    made: tuple[int, int],
) -> dict[str, Any]:
    """Reads what ``save`` wrote, or Opacus did.

    Args:
        path: As in ``load_checkpoint``.
        module: As there.
        accountant: Whose history is replaced.
        parts: What belongs to ``OPTIONAL``.
        module_kwargs: Of ``module.load_state_dict``.
        load_kwargs: Of ``torch.load``.
        made: Steps of this engine: since the last checkpoint that was loaded, and ever.

    Returns:
        The content less what belongs to ``OPTIONAL``.

    Raises:
        ValueError: If it is no such file.
    """
    content = dict(torch.load(path, **{"weights_only": False, **(load_kwargs or {})}))
    missing = [key for key in (MODULE, ACCOUNTANT) if key not in content]
    if missing:
        raise ValueError(f"{path} holds no {missing[0]!r}, as save_checkpoint writes it; it has {list(content)}.")
    states = {name: content.pop(key, None) for name, key in OPTIONAL.items()}
    before = _steps(accountant)
    accountant.load_state_dict(content[ACCOUNTANT])
    after = _steps(accountant)
    more = after.total() - before.total()
    if more < 0:
        what = f"The account goes back from {before.total()} steps to the {after.total()} of the checkpoint."
        _notice_lost("back", what)
    elif (made[0] and more) or (made[1] and before - after):
        what = f"Unless the checkpoint has them too, steps made here count no more: {made[0] or made[1]}."
        _notice_lost("other", what)
    module.load_state_dict(content[MODULE], **(module_kwargs or {}))
    for name, part in parts.items():
        state = states[name]
        if part is not None and state is not None:
            part.load_state_dict(state)
        elif (part is None) != (state is None):
            said = "is in the checkpoint, and none was passed" if part is None else "was passed, and is not in it"
            warnings.warn(f"The {name.replace('_', ' ')} {said}: its state stays as it is.", stacklevel=3)
    return content


def _notice_lost(key: str, what: str) -> None:
    notice(
        "DPE021",
        f"{what} That is right only if nothing was kept or shown of what was trained since. Else load the weights "
        "alone, by module.load_state_dict.",
        key=key,
    )


def _steps(accountant: Any) -> Counter[str]:
    """How many steps of each kind a history holds, as far as it holds triples."""
    steps = Counter[str]()
    for entry in accountant.history:
        with contextlib.suppress(TypeError, ValueError):  # an accountant of the user's own may keep what it likes
            *kind, count = (getattr(value, "item", lambda value=value: value)() for value in entry)
            steps[repr(kind)] += count
    return steps


class Checkpoints:
    """What an engine has of them."""

    accountant: Any
    engine: dpengine.PrivacyEngine
    _made_before = 0  # steps, when a checkpoint was loaded last

    @suggests_names
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
        """Writes the state of the model, of what was spent, and of whatever else is given, as Opacus does.

        Args:
            path: A path or file, for ``torch.save``.
            module: The wrapper, or the model.
            optimizer: The private optimizer.
            noise_scheduler: Of the noise multiplier.
            grad_clip_scheduler: Of the threshold.
            checkpoint_dict: More, by keys of the user's.
            module_state_dict_kwargs: Of ``module.state_dict``.
            torch_save_kwargs: Of ``torch.save``.
        """
        parts = {
            "optimizer": optimizer,
            "noise_scheduler": noise_scheduler,
            "grad_clip_scheduler": grad_clip_scheduler,
        }
        _save(path, module, self.accountant, parts, checkpoint_dict, module_state_dict_kwargs, torch_save_kwargs)

    @suggests_names
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
        """Goes on from a checkpoint of ``save_checkpoint``, or of Opacus's.

        Args:
            path: A path or file, for ``torch.load``.
            module: The wrapper, or the model: keys may have ``_module.`` or not.
            optimizer: The private optimizer.
            noise_scheduler: Of the noise multiplier.
            grad_clip_scheduler: Of the threshold.
            module_load_dict_kwargs: Of ``module.load_state_dict``.
            torch_load_kwargs: Of ``torch.load``; ``weights_only`` is False unless it is there.

        Returns:
            The content, less the states of optimizer and schedulers.

        Raises:
            ValueError: If it is no such checkpoint, or of another accountant.
        """  # noqa: DOC502 - what is called raises on our behalf
        parts = {
            "optimizer": optimizer,
            "noise_scheduler": noise_scheduler,
            "grad_clip_scheduler": grad_clip_scheduler,
        }
        made = self.engine.ledger.steps
        kwargs = module_load_dict_kwargs, torch_load_kwargs
        content = _load(path, module, self.accountant, parts, *kwargs, (made - self._made_before, made))
        self._made_before = made
        return content
