"""An unknown keyword is rejected, and the message names the nearest one."""

import functools

import pytest

import dpengine
from dpengine.engine.progress import progress

PUBLIC = [name for name in dpengine.__all__ if name != "PrivacyWarning"]


def public_callables():
    """Returns every public callable, including the methods of the engine."""
    engine = dpengine.PrivacyEngine
    cases = [(name, getattr(dpengine, name)) for name in PUBLIC]
    members = [name for name, value in vars(engine).items() if callable(value) and not name.startswith("_")]
    cases += [(f"PrivacyEngine.{name}", functools.partial(getattr(engine, name), None)) for name in members]
    cases += [("progress.progress", progress)]
    return [pytest.param(call, id=name) for name, call in cases]


@pytest.mark.parametrize("call", public_callables())
def test_an_unknown_keyword_is_a_type_error(call):
    with pytest.raises(TypeError, match="no argument 'entirely_unknown'"):
        call(entirely_unknown=1)


@pytest.mark.parametrize(
    ("call", "given", "near"),
    [
        (dpengine.PrivacyEngine, "secure_rgn", "secure_rng"),
        (dpengine.PrivacyEngine, "acountant", "accountant"),
        (functools.partial(dpengine.PrivacyEngine.make_private, None), "noise_multipler", "noise_multiplier"),
        (functools.partial(dpengine.PrivacyEngine.make_private, None), "max_gard_norm", "max_grad_norm"),
        (functools.partial(dpengine.PrivacyEngine.make_private, None), "max_norm", "max_grad_norm"),
        (functools.partial(dpengine.PrivacyEngine.progress, None), "totl", "total"),
        (functools.partial(dpengine.PrivacyEngine.load_state_dict, None), "sttate", "state"),
        (progress, "totl", "total"),
        (dpengine.calibrate, "target_epsilom", "target_epsilon"),
        (dpengine.Flat, "max_norms", "max_norm"),
        (dpengine.GradSampleModule, "batch_fist", "batch_first"),
        (dpengine.PerSampleGradientClipper, "norm_cliper", "norm_clipper"),
        (dpengine.check_loss, "los_fn", "loss_fn"),
        (dpengine.fix, "modle", "model"),
    ],
)
@pytest.mark.hazard("L15")
def test_the_nearest_name_is_suggested(call, given, near):
    with pytest.raises(TypeError, match=f"no argument '{given}'. Did you mean '{near}'"):
        call(**{given: 1})
