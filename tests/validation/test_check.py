"""Results of ``check`` for each kind of layer."""

import pytest
import torch
from case_models import Parts
from cases import CASES
from torch import nn
from torch.nn.utils import parametrizations

import dpengine
from dpengine.errors import UnsupportedLayerError
from dpengine.grad_samplers import register_grad_sampler
from dpengine.grad_samplers.table import BUILTIN
from dpengine.layers.replacements import REPLACEMENTS
from dpengine.validation import CheckReport, Finding, check
from dpengine.validation.obstacles import OBSTACLES


class Own(nn.Module):
    """Layer of an unsupported type."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.scale


def container():
    """Returns a module with a direct parameter and a child layer."""
    return Parts(None, token=nn.Parameter(torch.zeros(1, 1, 3)), inner=nn.Linear(3, 3))


class NewBatchNorm(nn.BatchNorm2d):
    """Subclass with unknown behavior."""


def test_a_registered_rule_is_named(registries):
    register_grad_sampler(Own)(lambda layer, activations, backprops: {})
    assert finding_for(Own()).how == "registered rule"


FIX = r"Run before creating the optimizer: model, changes = dpengine.fix\(model\)"
BLOCKED = {
    "batch-norm-1d": (lambda: nn.BatchNorm1d(4), "mixes the samples", FIX),
    "batch-norm-2d": (lambda: nn.BatchNorm2d(4), "mixes the samples", FIX),
    "batch-norm-3d": (lambda: nn.BatchNorm3d(4), "mixes the samples", FIX),
    "batch-norm-plain": (lambda: nn.BatchNorm2d(4, affine=False), "mixes the samples", FIX),
    "batch-norm-without-statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), "mixes the samples", FIX),
    "batch-norm-frozen": (lambda: nn.BatchNorm2d(4).requires_grad_(False), "mixes the samples", FIX),
    "batch-norm-in-eval-mode-without-statistics": (
        lambda: nn.BatchNorm2d(4, track_running_stats=False).eval(),
        "mixes the samples",
        FIX,
    ),
    "batch-norm-subclass-in-eval-mode": (lambda: NewBatchNorm(4).eval(), "mixes the samples", "GroupNorm"),
    "batch-norm-in-eval-mode-with-a-forward": (
        lambda: with_other_forward(nn.BatchNorm2d(4).eval()),
        "mixes the samples",
        FIX,
    ),
    "sync-batch-norm-in-eval-mode": (lambda: nn.SyncBatchNorm(4).eval(), "mixes the samples", FIX),
    "batch-norm-subclass": (lambda: NewBatchNorm(4), "mixes the samples", "GroupNorm"),
    "batch-norm-lazy": (lambda: nn.LazyBatchNorm2d(affine=False), "shape is not known", r"model\(example_input\)"),
    "sync-batch-norm": (lambda: nn.SyncBatchNorm(4), "mixes the samples", FIX),
    "instance-norm-tracking": (lambda: nn.InstanceNorm2d(4, track_running_stats=True), "statistics of the batch", FIX),
    "embedding-by-frequency": (lambda: nn.Embedding(4, 3, scale_grad_by_freq=True), "counts over the whole batch", FIX),
    "bag-by-frequency": (lambda: nn.EmbeddingBag(4, 3, scale_grad_by_freq=True), "counts over the whole batch", FIX),
    "embedding-with-max-norm": (lambda: nn.Embedding(4, 3, max_norm=1.0), "rescales the entries", FIX),
    "data-parallel": (lambda: nn.DataParallel(nn.Linear(2, 2)), "several devices", r"make_private\(model.module"),
    "lazy": (lambda: nn.LazyLinear(3), "shape is not known", r"model\(example_input\)"),
    "spectral-norm-old": (lambda: nn.utils.spectral_norm(nn.Linear(3, 3)), "power iteration", "remove_spectral_norm"),
    "spectral-norm": (lambda: parametrizations.spectral_norm(nn.Linear(3, 3)), "power iteration", "remove_parametriz"),
    "half": (lambda: nn.Linear(2, 2).half(), "float16", r"model.bfloat16\(\)"),
    "complex": (lambda: nn.Linear(2, 2, dtype=torch.complex64), "complex", "view_as_real"),
}
NOT_BLOCKED = {
    "batch-norm-in-eval-mode": (lambda: nn.BatchNorm2d(4).eval(), "fallback"),
    "batch-norm-frozen-in-eval-mode": (
        lambda: nn.BatchNorm2d(4).requires_grad_(False).eval(),
        "no trainable parameters",
    ),
    "instance-norm": (lambda: nn.InstanceNorm2d(4, affine=True), "supported"),
    "sparse-embedding": (lambda: nn.Embedding(4, 3, sparse=True), "supported"),
    "local-response-norm": (lambda: nn.CrossMapLRN2d(2), "no trainable parameters"),
    "bfloat16": (lambda: nn.Linear(2, 2).bfloat16(), "supported"),
    "frozen": (lambda: nn.Linear(2, 2).requires_grad_(False), "no trainable parameters"),
    "frozen-half": (lambda: nn.Linear(2, 2).half().requires_grad_(False), "no trainable parameters"),
    "frozen-spectral-norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(3, 3)).requires_grad_(False),
        "no trainable parameters",
    ),
    "weight-norm": (lambda: parametrizations.weight_norm(nn.Linear(2, 2)), "fallback"),
    "unknown": (Own, "fallback"),
    "subclass": (lambda: type("NewLinear", (nn.Linear,), {})(2, 2), "fallback"),
    "forward-of-its-own": (lambda: with_other_forward(nn.Linear(2, 2)), "fallback"),
    "container": (container, "supported"),
}


def with_other_forward(layer):
    layer.forward = lambda x: x
    return layer


def around(layer):
    """Returns a model that contains the layer as a nested submodule."""
    return nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"block": nn.Sequential(layer)}))


def finding_for(layer) -> Finding:
    found = {finding.name: finding for finding in check(around(layer)).findings}
    assert found["0"].verdict == "supported"
    return found["1.block.0"]


@pytest.mark.parametrize("case", BLOCKED)
def test_unsupported_layers_are_blocked_with_reason_and_remedy(case):
    make, why, remedy = BLOCKED[case]
    layer = make()
    report = check(around(layer))
    assert not report.ok
    assert [(f.name, f.type, f.verdict) for f in report.blocked] == [("1.block.0", type(layer).__name__, "blocked")]
    with pytest.raises(UnsupportedLayerError, match=f"{why}.*{remedy}") as refusal:
        report.raise_if_blocked()
    assert str(refusal.value).startswith(f"[DPE001] 1.block.0 ({type(layer).__name__}) ")
    assert refusal.value.fix == report.blocked[0].remedy


REMEDIES = {
    **{case: "model, changes = dpengine.fix(model)" for case, (_, _, remedy) in BLOCKED.items() if remedy == FIX},
    "lazy": "model(example_input)",
    "spectral-norm-old": "torch.nn.utils.remove_spectral_norm(layer)",
    "spectral-norm": "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')",
    "half": "model.bfloat16()",
    "complex": "layer.requires_grad_(False)",
}


@pytest.mark.parametrize("case", REMEDIES)
def test_the_remedy_of_a_blocked_layer_works_as_written(case):
    layer = BLOCKED[case][0]()
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(case != "lazy"), layer)
    scope = {"torch": torch, "dpengine": dpengine, "model": model, "layer": layer, "example_input": torch.randn(1, 2)}
    (blocked,) = check(model).blocked
    assert REMEDIES[case] in blocked.remedy
    exec(REMEDIES[case], scope)
    assert check(scope["model"]).ok


def test_every_reason_for_blocking_has_a_test_case():
    met = {next(o for o in OBSTACLES if o.applies(make())) for make, _, _ in BLOCKED.values()}
    assert met == set(OBSTACLES)


@pytest.mark.parametrize("case", NOT_BLOCKED)
def test_layers_with_independent_samples_are_accepted(case):
    make, verdict = NOT_BLOCKED[case]
    assert finding_for(make()).verdict == verdict


@pytest.mark.parametrize("layer", list(REPLACEMENTS), ids=lambda layer: layer.__name__)
def test_findings_name_the_replacement_before_and_after_conversion(layer):
    for kind in (layer, REPLACEMENTS[layer]):
        finding = finding_for(kind(4, 4))
        assert (finding.verdict, finding.how) == ("twin", f"{REPLACEMENTS[layer].__name__}, operation by operation")


def test_every_layer_with_a_built_in_rule_is_supported():
    layers = [case.make() for case in CASES]
    findings = [(type(layer), finding_for(layer)) for layer in layers]
    assert set(BUILTIN) <= {kind for kind, finding in findings if finding.how == "built-in rule"}
    assert {finding.verdict for kind, finding in findings if kind in BUILTIN} <= {"supported", "blocked"}


def test_all_blocked_layers_are_named_in_one_error():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm2d(4)))
    with pytest.raises(UnsupportedLayerError) as refusal:
        check(model).raise_if_blocked()
    assert str(refusal.value) == (
        "[DPE001] 1 (BatchNorm2d) mixes the samples of a batch, so one sample changes the gradients of others. "
        "Also blocked: 2.0 (BatchNorm2d). Run before creating the optimizer: model, changes = dpengine.fix(model); or, "
        "if its running statistics are public, keep them: layer.eval() after each model.train()"
    )


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(2, 2).requires_grad_(False)), nn.Sequential(nn.ReLU())])
def test_a_model_without_trainable_parameters_is_rejected(model):
    report = check(model)
    assert [f.name for f in report.blocked] == [""]
    with pytest.raises(UnsupportedLayerError, match=r"The model \(Sequential\) has no trainable parameter"):
        report.raise_if_blocked()


def test_a_model_that_is_one_layer_is_checked_itself():
    assert [(f.name, f.verdict) for f in check(nn.Linear(2, 2)).findings] == [("", "supported")]
    with pytest.raises(UnsupportedLayerError, match=r"The model \(BatchNorm1d\) mixes the samples"):
        check(nn.BatchNorm1d(3)).raise_if_blocked()


def test_a_model_without_obstacles_passes():
    report = check(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert report.ok and report.blocked == () and report.raise_if_blocked() is None


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            nn.Sequential(container(), nn.ReLU()),
            [
                ("0", "supported", "bare parameter, operation by operation"),
                ("0.inner", "supported", "built-in rule"),
                ("1", "no trainable parameters", ""),
            ],
        ),
        (nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2))), [("0", "fallback", None)]),
    ],
    ids=["container", "parametrized"],
)
def test_direct_parameters_of_a_container_are_listed_and_submodules_of_parametrizations_are_not(model, expected):
    found = [(f.name, f.verdict, f.how) for f in check(model).findings]
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert all(how is None or how == found[i][2] for i, (_, _, how) in enumerate(expected))


def test_checking_changes_nothing():
    model = nn.Sequential(nn.Embedding(4, 4), nn.LSTM(4, 4), nn.BatchNorm1d(4))
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    check(model)
    assert {name: (type(module), dict(vars(module))) for name, module in model.named_modules()} == before


def test_table_lists_each_layer_before_the_reasons():
    report = CheckReport(
        (Finding("a", "Linear", "supported", "built-in rule"), Finding("b.c", "X", "blocked", why="w", remedy="r"))
    )
    assert str(report).splitlines() == [
        "layer  type    verdict    how",
        "-" * len("a      Linear  supported  built-in rule"),
        "a      Linear  supported  built-in rule",
        "b.c    X       blocked",
        "",
        "b.c (X) w. r",
    ]


# Modules compiled by torch.jit support no hooks and hide their submodules

without_jit_warning = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@without_jit_warning
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.jit.script(nn.Linear(2, 2)),
        lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2))),
        lambda: torch.jit.script(nn.BatchNorm1d(2)),  # mixes samples; its type does not show it
    ],
    ids=["script", "trace", "nested", "batch-norm"],
)
@pytest.mark.parametrize("within", [False, True])
def test_a_compiled_module_is_blocked_by_name(make, within):
    layer = make()
    model, name = (nn.Sequential(nn.Linear(2, 2), layer), "1") if within else (layer, "The model")
    with pytest.raises(UnsupportedLayerError, match="DPE001") as refusal:
        check(model).raise_if_blocked()
    assert f"{name} ({type(layer).__name__}) is compiled by torch.jit" in str(refusal.value)


@without_jit_warning
def test_a_compiled_part_that_is_frozen_is_blocked_too():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.BatchNorm1d(2).requires_grad_(False)))
    assert [finding.name for finding in check(model).blocked] == ["1"]
