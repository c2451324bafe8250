"""``dpengine check``: checks whether a model can be trained privately."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
from argparse import Namespace
from typing import Any

from torch import nn

from dpengine.validation.check_model import check

from .commands import CommandError
from .main import DONE, FAILED
from .screen import strong


def run(arguments: Namespace) -> int:
    """Prints one row for each layer. Returns 1 if a layer prevents private training."""
    with contextlib.redirect_stdout(sys.stderr):  # output of the user's module
        model = _model(arguments.model)
    report = check(model)
    if arguments.json:
        findings = [dataclasses.asdict(finding) for finding in report.findings]
        print(json.dumps({"ok": report.ok, "findings": findings}, ensure_ascii=False, indent=2))
    else:
        verdict = (
            "Nothing blocks private training." if report.ok else f"Blocked by {len(report.blocked)} of the layers."
        )
        print(f"{report}\n\n{strong(verdict)}")
    return DONE if report.ok else FAILED


def imported(text: str) -> Any:
    """Imports a module and returns the object that ``MODULE:NAME`` names."""
    module_name, _, attribute = text.partition(":")
    if not module_name or not attribute:
        raise CommandError(f"{text!r} is not of the form MODULE:FACTORY, such as mymodels:make.")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        target = importlib.import_module(module_name)
        for name in attribute.split("."):
            target = getattr(target, name)
    except (Exception, SystemExit) as error:
        raise CommandError(f"{text} cannot be imported: {type(error).__name__}: {error}") from error
    return target


def _model(text: str) -> nn.Module:
    target = imported(text)
    try:
        model = target if isinstance(target, nn.Module) or not callable(target) else target()
    except (Exception, SystemExit) as error:
        raise CommandError(
            f"{text} must be a function without arguments that returns the model; calling it failed with "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise CommandError(f"{text} returns a {type(model).__name__}, not a torch.nn.Module.")
    return model
