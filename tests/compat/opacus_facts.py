"""Writes opacus_facts.json: the names, kinds, arguments and defaults of the surface of Opacus 1.6.0, and nothing else.

Run by hand where that version is installed: ``python tests/compat/opacus_facts.py``. The same functions read the
surface of any package of those paths, so the test reads ours with them.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any

FACTS = Path(__file__).with_name("opacus_facts.json")
VERSION = "1.6.0"

# Below the root: the names that scripts import from each path. Also the public functions and classes that a
# module defines itself.
_RULES = (
    "compute_conv_grad_sample compute_linear_grad_sample compute_embedding_grad_sample compute_layer_norm_grad_sample "
    "compute_group_norm_grad_sample compute_instance_norm_grad_sample compute_rms_norm_grad_sample "
    "compute_rnn_linear_grad_sample compute_sequence_bias_grad_sample compute_embedding_norm_sample"
)
NAMES = {
    "": "PrivacyEngine GradSampleModule GradSampleModuleFastGradientClipping utils __version__",
    "privacy_engine": "",
    "version": "__version__",
    "grad_sample": f"{_RULES} create_or_accumulate_grad_sample",
    "grad_sample.grad_sample_module": "promote_current_grad_sample",
    "grad_sample.grad_sample_module_fast_gradient_clipping": "create_norm_sample",
    "grad_sample.grad_sample_module_fast_gradient_clipping_fsdp": "",
    "grad_sample.grad_sample_module_fast_gradient_clipping_tp": "",
    "grad_sample.gsm_base": "",
    "grad_sample.gsm_exp_weights": "",
    "grad_sample.gsm_no_op": "",
    "grad_sample.utils": "",
    "grad_sample.linear": "",
    "grad_sample.conv": "",
    "grad_sample.embedding": "",
    "grad_sample.embedding_norm_sample": "",
    "grad_sample.dp_rnn": "",
    "grad_sample.dp_multihead_attention": "",
    "grad_sample.layer_norm": "",
    "grad_sample.group_norm": "",
    "grad_sample.instance_norm": "",
    "grad_sample.rms_norm": "",
    "grad_sample.functorch": "",
    "optimizers": "DistributedDPOptimizerFastGradientClipping",
    "optimizers.optimizer": "",
    "optimizers.perlayeroptimizer": "",
    "optimizers.adaclipoptimizer": "",
    "optimizers.ddpoptimizer": "",
    "optimizers.ddp_perlayeroptimizer": "",
    "optimizers.optimizer_fast_gradient_clipping": "",
    "optimizers.ddpoptimizer_fast_gradient_clipping": "",
    "optimizers.fsdpoptimizer_fast_gradient_clipping": "",
    "optimizers.utils": "",
    "data_loader": "",
    "accountants": "",
    "accountants.accountant": "",
    "accountants.rdp": "",
    "accountants.prv": "",
    "accountants.gdp": "",
    "accountants.registry": "",
    "accountants.utils": "MAX_SIGMA",
    "accountants.analysis": "",
    "accountants.analysis.rdp": "",
    "accountants.analysis.gdp": "",
    "accountants.analysis.prv": "",
    "schedulers": "",
    "schedulers.noise_scheduler": "_NoiseScheduler",
    "schedulers.grad_clip_scheduler": "_GradClipScheduler",
    "validators": "",
    "validators.module_validator": "",
    "validators.errors": "",
    "validators.utils": "",
    "validators.batch_norm": "",
    "validators.instance_norm": "",
    "validators.lstm": "",
    "validators.gru": "",
    "validators.multihead_attention": "",
    "layers": "",
    "layers.dp_rnn": "",
    "layers.dp_multihead_attention": "",
    "layers.param_rename": "",
    "distributed": "",
    "lightning": "",
    "utils": "",
    "utils.batch_memory_manager": "",
    "utils.uniform_sampler": "",
    "utils.module_utils": "",
    "utils.tensor_utils": "",
    "utils.packed_sequences": "",
    "utils.fast_gradient_clipping_utils": "",
    "utils.adaptive_clipping": "",
    "utils.adaptive_clipping.adaptive_clipping_utils": "",
    "utils.per_sample_gradients_utils": "",
    "utils.fsdp_utils": "",
}
PRIVATE_METHODS = {"_prepare_model", "_prepare_optimizer", "_prepare_data_loader", "_prepare_criterion"}
OPERATORS = {"__call__", "__len__", "__iter__", "__getitem__", "__enter__", "__exit__", "__add__", "__sub__", "__mul__"}
OPERATORS |= {"__truediv__", "__radd__", "__rsub__", "__rmul__", "__neg__"}
MISSPELLED = {"DistributedDPOptimizerFastGradientlipping"}  # in an __all__, so that `import *` fails


def module_of(root: str, path: str) -> types.ModuleType:
    """The module of a path below ``root``."""
    return importlib.import_module(".".join(filter(None, [root, path])))


def names_of(module: types.ModuleType, path: str) -> list[str]:
    """The names that a path must have, where ``module`` is Opacus's."""
    own = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and isinstance(value, (type, types.FunctionType))
        and value.__module__ == module.__name__
    }
    return sorted({*NAMES[path].split(), *getattr(module, "__all__", ()), *own} - MISSPELLED)


def facts_of(value: Any, package: str) -> dict[str, Any]:
    """Returns kind and signature of one name; for a class, also of each member that classes of ``package`` define."""
    if inspect.ismodule(value):
        return {"kind": "module"}
    if inspect.isclass(value):
        return {"kind": "class", "call": arguments_of(value.__init__)[1:], "members": members_of(value, package)}
    if callable(value):
        return {"kind": "function", "call": arguments_of(value)}
    return {"kind": "constant", "value": default_text(value)}


def members_of(cls: type, package: str) -> dict[str, Any]:
    """The public methods, properties and class attributes that come from the classes of a package."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if base.__module__.split(".")[0] != package:
            continue
        for name in vars(base):
            if name not in found and (not name.startswith("_") or name in PRIVATE_METHODS | OPERATORS):
                found[name] = member_of(cls, name)
    return dict(sorted(found.items()))


def member_of(cls: type, name: str) -> dict[str, Any]:
    """Kind and arguments of one member, the bound argument left out."""
    value = inspect.getattr_static(cls, name)
    if isinstance(value, property):
        return {"kind": "property"}
    if isinstance(value, classmethod):
        return {"kind": "classmethod", "call": arguments_of(value.__func__)[1:]}
    if isinstance(value, staticmethod):
        return {"kind": "staticmethod", "call": arguments_of(value.__func__)}
    if callable(value) and not isinstance(value, type):
        return {"kind": "method", "call": arguments_of(value)[1:]}
    return {"kind": "attribute"}


def arguments_of(function: Any) -> list[list[str]]:
    """``[name, kind, default]`` of each argument, the default as text, empty if there is none."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C, without a text signature
        return [["self", "POSITIONAL_ONLY", ""], ["?", "VAR_POSITIONAL", ""]]
    return [[p.name, p.kind.name, "" if p.default is p.empty else default_text(p.default)] for p in parameters]


def default_text(value: Any) -> str:
    """A default as text that does not depend on addresses or on the module where a class lives."""
    return value.__qualname__ if inspect.isclass(value) or inspect.isroutine(value) else repr(value)


def collect(root: str = "opacus") -> dict[str, Any]:
    """Returns the table: for each path its names with the objects that they refer to, and each object once."""
    _stand_in_for_lightning()
    paths: dict[str, dict[str, str]] = {}
    objects: dict[str, Any] = {}
    for path in NAMES:
        module = module_of(root, path)
        paths[path] = {}
        for name in names_of(module, path):
            value = getattr(module, name)
            home = getattr(value, "__module__", None) or f"{root}.{path}"
            key = f"{home.removeprefix(root).lstrip('.')}:{getattr(value, '__qualname__', name)}"
            paths[path][name] = key
            objects[key] = facts_of(value, root.split(".")[0])
    return {"version": VERSION, "paths": paths, "objects": dict(sorted(objects.items()))}


def _stand_in_for_lightning() -> None:
    """Adds a placeholder for ``pytorch_lightning``, from which Opacus's Lightning module inherits."""
    try:
        importlib.import_module("pytorch_lightning")
    except ImportError:
        module = types.ModuleType("pytorch_lightning")
        module.LightningDataModule = type("LightningDataModule", (), {})  # type: ignore[attr-defined]
        sys.modules["pytorch_lightning"] = module


def as_text(facts: dict[str, Any]) -> str:
    """JSON with one line for each path and each object, so that a change shows as one line."""
    paths, objects = (
        ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in facts[part].items())
        for part in ("paths", "objects")
    )
    version = json.dumps(facts["version"])
    return f'{{"version": {version},\n"paths": {{\n{paths}\n}},\n"objects": {{\n{objects}\n}}}}\n'


if __name__ == "__main__":
    FACTS.write_text(as_text(collect()), encoding="utf-8")
