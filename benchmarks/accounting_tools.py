"""Runs the compared accountants and measures their cost: one process for each tool, one fork for each job.

``python -m benchmarks.accounting_tools TOOL`` reads jobs, one per line, and writes an answer for each. A fork has the
imported modules of its tool, and no cached results. Other tools may run in another interpreter than dpengine.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from .accounting_settings import Setting

MAX_SECONDS, MAX_BYTES = 60, 4 * 2**30
EPS_ERROR = 0.01  # for prv-accountant; the value that Opacus uses
_KIB = 1024
_PAGE = resource.getpagesize()

Bounds = tuple[float | None, float]
Ask = Callable[[Setting], Bounds]
Solve = Callable[[dict[str, float]], float]
"""Noise for ``rate``, ``steps``, ``epsilon`` and ``delta``."""


class UnsupportedJobError(Exception):
    """The tool does not support the job."""


def dpengine_tool(accountant: str, *, both_bounds: bool) -> tuple[Ask, Solve]:
    """Returns the functions of an accountant of dpengine."""
    from dpengine import accounting
    from dpengine.accounting import Charge
    from dpengine.accounting.events import Relation, release_event

    def ask(setting: Setting) -> Bounds:
        history = tuple(Charge(release_event(noise_multiplier=s, sample_rate=q), n) for q, s, n in setting.kinds)
        relation = Relation(setting.relation)
        if not both_bounds:
            return None, accounting.epsilon_of(history, setting.delta, accountant, relation)
        lower, _, upper = accounting.bounds_of(history, setting.delta, accountant, relation)
        return lower, upper

    def solve(job: dict[str, float]) -> float:
        return accounting.calibration(
            target_epsilon=job["epsilon"],
            target_delta=job["delta"],
            sample_rate=job["rate"],
            steps=int(job["steps"]),
            accountant=accountant,
        ).noise_multiplier

    return ask, solve


def library_tool(name: str) -> tuple[Ask, Solve]:
    """Returns the functions of an accountant of dp-accounting."""
    import dp_accounting
    from dp_accounting import NeighboringRelation, pld, rdp

    accountant_type = {"pld": pld.PLDAccountant, "rdp": rdp.RdpAccountant}[name]
    relations = {
        "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
        "replace_one": NeighboringRelation.REPLACE_ONE,
    }

    def event(rate: float, sigma: float, steps: int) -> dp_accounting.DpEvent:
        one = dp_accounting.GaussianDpEvent(sigma)
        one = one if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, one)
        return dp_accounting.SelfComposedDpEvent(one, steps)

    def ask(setting: Setting) -> Bounds:
        accountant = accountant_type(neighboring_relation=relations[setting.relation])
        try:
            for kind in setting.kinds:
                accountant.compose(event(*kind))
        except dp_accounting.UnsupportedEventError as error:
            raise UnsupportedJobError(str(error)) from error
        return None, float(accountant.get_epsilon(setting.delta))

    def solve(job: dict[str, float]) -> float:
        return dp_accounting.calibrate_dp_mechanism(
            accountant_type,
            lambda sigma: event(job["rate"], sigma, int(job["steps"])),
            job["epsilon"],
            job["delta"],
            dp_accounting.LowerEndpointAndGuess(0.3, 1.0),
        )

    return ask, solve


def opacus_tool(name: str) -> tuple[Ask, Solve]:
    """Returns the functions of an accountant of Opacus."""
    from opacus import accountants
    from opacus.accountants.utils import get_noise_multiplier

    def ask(setting: Setting) -> Bounds:
        if setting.relation != "add_remove":
            raise UnsupportedJobError("add or remove only")
        if name == "gdp" and len(setting.kinds) > 1:
            raise UnsupportedJobError("one kind of release only")
        accountant = accountants.create_accountant(name)
        accountant.history = [(sigma, rate, steps) for rate, sigma, steps in setting.kinds]
        return None, float(accountant.get_epsilon(setting.delta))

    def solve(job: dict[str, float]) -> float:
        return get_noise_multiplier(
            target_epsilon=job["epsilon"],
            target_delta=job["delta"],
            sample_rate=job["rate"],
            steps=int(job["steps"]),
            accountant=name,
        )

    return ask, solve


def prv_tool() -> tuple[Ask, Solve]:
    """Returns the functions of prv-accountant, with the error bounds of Opacus."""
    from prv_accountant import PRVAccountant
    from prv_accountant.privacy_random_variables import GaussianMechanism, PoissonSubsampledGaussianMechanism

    def ask(setting: Setting) -> Bounds:
        if setting.relation != "add_remove":
            raise UnsupportedJobError("add or remove only")
        prvs = [
            GaussianMechanism(sigma) if rate == 1 else PoissonSubsampledGaussianMechanism(rate, sigma)
            for rate, sigma, _ in setting.kinds
        ]
        counts = [steps for *_, steps in setting.kinds]
        accountant = PRVAccountant(
            prvs=prvs, max_self_compositions=counts, eps_error=EPS_ERROR, delta_error=setting.delta / 1000
        )
        lower, _, upper = accountant.compute_epsilon(setting.delta, counts)
        return float(lower), float(upper)

    def solve(job: dict[str, float]) -> float:
        raise UnsupportedJobError("no calibration")

    return ask, solve


TOOLS: dict[str, Callable[[], tuple[Ask, Solve]]] = {
    "dpengine pld": lambda: dpengine_tool("pld", both_bounds=False),
    "dpengine pld, both bounds": lambda: dpengine_tool("pld", both_bounds=True),
    "dpengine prv": lambda: dpengine_tool("prv", both_bounds=True),
    "dpengine rdp": lambda: dpengine_tool("rdp", both_bounds=False),
    "dp-accounting pld": lambda: library_tool("pld"),
    "dp-accounting rdp": lambda: library_tool("rdp"),
    "prv-accountant": prv_tool,
    "opacus rdp": lambda: opacus_tool("rdp"),
    "opacus prv": lambda: opacus_tool("prv"),
    "opacus gdp": lambda: opacus_tool("gdp"),
}
OURS = tuple(name for name in TOOLS if name.startswith("dpengine"))


def every_step(ask: Ask, rate: float, sigma: float, delta: float, steps: int) -> Bounds:
    """Computes epsilon after every step, as an engine does. Returns the first and the last one."""
    answers = [ask(Setting(((rate, sigma, step),), delta))[1] for step in range(1, steps + 1)]
    return answers[0], answers[-1]


def answer(ask: Ask, solve: Solve, job: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of a tool and its cost, in the process that is measured."""
    before, started = _resident(), time.process_time()
    result: dict[str, Any] = {}
    try:
        if "solve" in job:
            result["noise"] = float(solve(job["solve"]))
        else:
            lower, upper = every_step(ask, **job["every"]) if "every" in job else ask(Setting.from_json(job))
            result["lower"], result["upper"] = lower, upper
            if not math.isfinite(upper) or upper < 0:
                result = {"failed": f"returns {upper}"}
    except UnsupportedJobError as error:
        result["not applied"] = str(error)[:100]
    except Exception as error:  # an error of a tool is a result
        result["failed"] = f"{type(error).__name__}: {error}"[:200]
    result["seconds"] = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
    return {**result, "mib": max(0, peak - before) / 2**20}


def forked(ask: Ask, solve: Solve, job: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of `answer` in a new fork, with limits on time and memory."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _limit(job.get("limit", MAX_SECONDS))
        with contextlib.suppress(BaseException), os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(answer(ask, solve, job)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status, usage = os.wait4(child, 0)
    if text:
        return json.loads(text)
    seconds = usage.ru_utime + usage.ru_stime
    reason = "takes too long" if seconds > 0.95 * job.get("limit", MAX_SECONDS) else f"ends with status {status}"
    return {"failed": reason, "seconds": seconds, "mib": usage.ru_maxrss * _KIB / 2**20}


def _limit(seconds: int) -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * _PAGE
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, used + MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE


def main() -> None:
    """Answers jobs from the standard input."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output that tools print is not an answer
    warnings.simplefilter("ignore")
    ask, solve = TOOLS[sys.argv[1]]()
    for line in sys.stdin:
        output.write(json.dumps(forked(ask, solve, json.loads(line))) + "\n")
        output.flush()


if __name__ == "__main__":
    main()
