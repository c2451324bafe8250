"""Checkpoints in Opacus's layout: one file, with what it puts there. Of randomness and batches it holds nothing."""

from __future__ import annotations

import warnings
from typing import Any

import torch

MODULE, ACCOUNTANT = "module_state_dict", "privacy_accountant_state_dict"
OPTIONAL = {
    "optimizer": "optimizer_state_dict",
    "noise_scheduler": "noise_scheduler_state_dict",
    "grad_clip_scheduler": "grad_clip_scheduler_state_dict",
}


def save(
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


def load(
    path: Any, module: Any, accountant: Any, parts: dict[str, Any], module_kwargs: Any, load_kwargs: Any
) -> dict[str, Any]:
    """Reads what ``save`` wrote, or Opacus did.

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
    accountant.load_state_dict(content[ACCOUNTANT])
    module.load_state_dict(content[MODULE], **(module_kwargs or {}))
    for name, part in parts.items():
        state = states[name]
        if part is not None and state is not None:
            part.load_state_dict(state)
        elif (part is None) != (state is None):
            said = "is in the checkpoint, and none was passed" if part is None else "was passed, and is not in it"
            warnings.warn(f"The {name.replace('_', ' ')} {said}: its state stays as it is.", stacklevel=3)
    return content
