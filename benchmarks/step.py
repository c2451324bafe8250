"""Cost of one private training step, as a ratio to the ordinary step, interleaved with other libraries.

    python -m benchmarks.step --cells all --peers all --steps 20 --out results.json

Every contender trains the same model on the same batch with SGD. Noise and the optimizer's update are included, data
loading is not. In each round every contender takes one step, so that drifts of the machine affect all of them. Before a
cell is timed, the clipped sum without noise must equal a loop over single samples, and no sample may exceed the
clipping norm of dpengine; a contender that fails is not timed. Peers need ``pip install -r
benchmarks/requirements.txt``; without it they are listed as missing. JAX may be elsewhere: ``--jax-python PATH``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from importlib import metadata
from typing import Any

import torch

from benchmarks import table
from benchmarks.cells import CELLS
from benchmarks.contenders import BASELINES, CONTENDERS, NOT_RUN, OUR_MODES
from benchmarks.held_out import ALL, HELD_OUT
from benchmarks.runner import Setting
from benchmarks.timing import Protocol, measure

PEERS = [name for name in CONTENDERS if name != "plain" and not name.startswith("dpengine ")]
LIBRARIES = sorted({name.split()[0] for name in PEERS} - {"jax"})
PACKAGES = ("torch", "opacus", "opake", "backpack-for-pytorch", "jax-privacy", "jax")


def contenders_for(modes: list[str], peers: list[str]) -> list[str]:
    """Returns the contenders for modes of dpengine and for peers, which may be ``["all"]`` or ``["none"]``."""
    libraries = LIBRARIES if peers == ["all"] else peers
    chosen = [
        name for name in PEERS if name.split()[0] in libraries or (name in BASELINES and "jax-privacy" in libraries)
    ]
    return ["plain", *[f"dpengine {mode}" for mode in modes], *chosen]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["all"], choices=["all", "held-out", *ALL])
    parser.add_argument("--peers", nargs="+", default=["all"], choices=["all", "none", *LIBRARIES])
    parser.add_argument("--modes", nargs="+", default=list(OUR_MODES), choices=[*OUR_MODES, "whole_model"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which a slow contender stops early")
    parser.add_argument("--memory", default="all", choices=["all", "ours", "none"], help="whose peak memory to take")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--autocast",
        choices=["bf16"],
        help="run forward and loss in this type; the check before timing stays in float32",
    )
    parser.add_argument("--jax-python", help="an interpreter that has jax-privacy; this one if left out")
    parser.add_argument("--out", help="a JSON file, written after each cell")
    parser.add_argument("--plot", help="a bar chart of the ratios, .svg or .png")
    return parser


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Runs the benchmark from the command line."""
    given = _parser().parse_args()
    warnings.simplefilter(
        "ignore"
    )  # the comparison before timing trains without noise, about which every library warns
    if given.plot:
        table.pyplot()  # fails before an hour of measurements
    torch.set_num_threads(given.threads)
    protocol = Protocol(given.steps, given.warm_up, given.budget, given.memory)
    setting = Setting(
        device=given.device, autocast=given.autocast == "bf16", threads=given.threads, jax_python=given.jax_python
    )
    results: dict[str, Any] = {
        "versions": _versions(),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
        "autocast": given.autocast,
        "threads": given.threads,
        "not_run": NOT_RUN,
        "cells": {},
    }
    contenders = contenders_for(given.modes, given.peers)
    groups = {"all": CELLS, "held-out": HELD_OUT}
    for name in (name for cell in given.cells for name in groups.get(cell, [cell])):
        results["cells"][name] = measure(name, ALL[name], contenders, protocol, setting)
        print(table.detail({"cells": {name: results["cells"][name]}}), end="\n\n", flush=True)
        if given.out:
            with open(given.out, "w") as file:
                json.dump(results, file, indent=1)
    print(table.report(results))
    if given.plot:
        table.plot(results, given.plot)


if __name__ == "__main__":
    main()
