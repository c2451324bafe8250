"""``dpengine doctor``: versions and devices for a bug report, without paths and names of the user."""

from __future__ import annotations

import json
import platform
from argparse import Namespace
from collections.abc import Callable

import torch

import dpengine
from dpengine.accounting.accountant import accountant_name
from dpengine.noise.keyed_streams import SECURE_KIND, native_normals
from dpengine.noise.source import NoiseSource
from dpengine.report.figures import version_of

from .screen import columns

_PACKAGES = ("numpy", "scipy", "dp-accounting", "opt-einsum", "safetensors", "tqdm", "jinja2", "matplotlib")
_FRAMEWORKS = ("transformers", "accelerate", "peft", "lightning", "pytorch-lightning", "opacus")


def run(arguments: Namespace) -> int:
    """Prints versions and devices."""
    facts = {name: find() for name, find in _ROWS.items()}
    print(json.dumps(facts, ensure_ascii=False, indent=2) if arguments.json else columns(list(facts.items())))
    return 0


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _device_text() -> str:
    device = _device()
    if device.type == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}, cuda {torch.version.cuda}"
    built = "" if torch.version.cuda is None else f", built for cuda {torch.version.cuda}"
    return f"{device.type} ({torch.get_num_threads()} threads{built})"


def _bf16() -> str:
    device = _device()
    try:
        ones = torch.ones(2, 2, dtype=torch.bfloat16, device=device)
        return f"works on {device.type}" if float((ones @ ones)[0, 0]) == 2 else f"wrong on {device.type}"
    except RuntimeError as error:
        return f"fails on {device.type}: {error}".splitlines()[0]


def _noise() -> str:
    device = _device()
    kinds = [NoiseSource.fresh().describe(device), NoiseSource.fresh(kind=SECURE_KIND).describe(device)]
    return "; secure_rng: ".join(
        f"{kind['kind']} ({'' if kind['cryptographic'] else 'not '}cryptographic)" for kind in kinds
    )


def _versions(packages: tuple[str, ...]) -> str:
    return ", ".join(f"{package} {version_of(package)}" for package in packages)


_ROWS: dict[str, Callable[[], str]] = {
    "dpengine": lambda: dpengine.__version__,
    "python": lambda: f"{platform.python_version()} on {platform.system()} {platform.machine()}",
    "torch": lambda: torch.__version__,
    "device": _device_text,
    "bfloat16": _bf16,
    "path optimization": lambda: "opt_einsum" if torch.backends.opt_einsum.is_available() else "none",
    "accountant": lambda: accountant_name("pld"),
    "noise": _noise,
    "noise on the CPU": lambda: "native code" if native_normals() else "NumPy: no C compiler when it was installed",
    "packages": lambda: _versions(_PACKAGES),
    "frameworks": lambda: _versions(_FRAMEWORKS),
}
