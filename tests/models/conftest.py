"""The option that writes the table of models, and operators without which torchvision cannot be imported.

Its compiled part does not load beside every build of torch.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

import torch

from models.page import write

OPERATORS = [
    "nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor",
]
_library = None  # the operators exist as long as this object


def define_operators():
    """Imports torchvision, with declared operators in place of compiled ones if these do not load."""
    global _library
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in OPERATORS:
            _library.define(operator)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        importlib.import_module("torchvision")


if importlib.util.find_spec("torchvision"):
    define_operators()


_results: list[list[str]] = []


def pytest_addoption(parser):
    parser.addoption("--write-models", metavar="PATH", help="write the table of models to this page")


def pytest_runtest_logreport(report):
    """Collects rows in the process that writes the page, also from workers."""
    if report.when == "call":
        _results.extend(value for name, value in report.user_properties if name == "row")


def pytest_sessionfinish(session):
    path = session.config.getoption("--write-models", None)
    if path and not hasattr(session.config, "workerinput"):
        write(Path(path), _results)
