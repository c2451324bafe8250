"""The option that writes the table of models."""

from pathlib import Path

from models.page import write

_results: list[list[str]] = []


def pytest_addoption(parser):
    parser.addoption("--write-models", metavar="PATH", help="write the table of models to this page")


def pytest_runtest_logreport(report):
    """Collects the results of all workers in the process that writes the page."""
    if report.when == "call":
        _results.extend(value for name, value in report.user_properties if name == "row")


def pytest_sessionfinish(session):
    path = session.config.getoption("--write-models", None)
    if path and not hasattr(session.config, "workerinput"):
        write(Path(path), _results)
