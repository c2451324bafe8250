"""``dpengine check``: whether a model can be trained privately, before anything is trained."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from torch import nn

from dpengine.validation.check_model import check

from .commands import CommandError
from .main import DONE, FAILED, WRONG_USE
from .screen import strong


def run(arguments: Namespace) -> int:
    """Prints one row for each layer; the exit code is 1 if something blocks private training."""
    with contextlib.redirect_stdout(sys.stderr):  # what the user's module prints is no part of the answer
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


def _made(factory: Callable[[], Any], text: str) -> Any:
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise CommandError(
            f"{text} must be a function without arguments that returns the model; calling it failed with "
            f"{type(error).__name__}: {error}",
            exit_code=WRONG_USE,
        ) from error


def named(text: str) -> Any:
    """What ``MODULE:NAME`` names. The module is imported, so it should do nothing but define."""
    module_name, _, attribute = text.partition(":")
    if not module_name or not attribute:
        raise CommandError(f"{text!r} is not of the form MODULE:FACTORY, such as mymodels:make.", exit_code=WRONG_USE)
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found = importlib.import_module(module_name)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise CommandError(f"{text} cannot be found: {error}.", exit_code=WRONG_USE) from error
    except (Exception, SystemExit) as error:
        raise CommandError(
            f"{module_name} must be a module that can be imported; importing it failed with "
            f"{type(error).__name__}: {error}",
            exit_code=WRONG_USE,
        ) from error
    return found


def _model(text: str) -> nn.Module:
    """The model that ``MODULE:FACTORY`` makes."""
    found = named(text)
    model = found if isinstance(found, nn.Module) or not callable(found) else _made(found, text)
    if not isinstance(model, nn.Module):
        raise CommandError(f"{text} gives a {type(model).__name__}, not a torch.nn.Module.", exit_code=WRONG_USE)
    return model
