"""A model is watched by one capture at a time, and threads that switch it off overlap without harm."""

import threading

import pytest
import torch
from loops import make_loop
from torch import nn

from dpengine import Flat, GradSampleModule, PerSampleGradientClipper
from dpengine.capture.capture import CaptureState, attached_captures
from dpengine.errors import UnknownParameterError, UnsupportedLayerError

WATCHERS = {
    "module": lambda model: GradSampleModule(model).to_standard_module,
    "clipper": lambda model: PerSampleGradientClipper(model, Flat(1.0)).detach,
    "engine": lambda model: (lambda loop: lambda: loop.engine.detach(model))(make_loop(model, noise_multiplier=1.0)),
}


@pytest.mark.parametrize("second", WATCHERS)
@pytest.mark.parametrize("first", WATCHERS)
def test_a_second_watcher_is_rejected_until_the_first_is_detached(first, second):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    let_go = WATCHERS[first](model)
    with pytest.raises(UnknownParameterError, match=r"DPE016.*(already watched|private already)"):
        WATCHERS[second](model)
    let_go()
    WATCHERS[second](model)()
    assert not model._forward_hooks and not model[0]._forward_hooks


def test_models_that_share_an_activation_are_watched_at_the_same_time():
    activation = nn.Tanh()
    models = [nn.Sequential(nn.Linear(4, 5), activation) for _ in range(2)]
    inner, outer = (GradSampleModule(model) for model in models)
    inner.to_standard_module()
    inputs = torch.randn(3, 4)
    outer(inputs).sum().backward()
    assert [len(p.grad_sample) for p in outer.parameters()] == [3, 3]


def of(model):
    """The capture of a model that is watched."""
    return next(one for one in attached_captures() if one.model is model)


def in_thread(enter):
    """Enters a context in another thread, and returns a function that leaves it there."""
    entered, left, errors = threading.Event(), threading.Event(), []

    def run():
        try:
            with enter():
                entered.set()
                left.wait(10)
        except Exception as error:
            errors.append(error)
        entered.set()

    thread = threading.Thread(target=run)
    thread.start()
    entered.wait(10)

    def finish():
        left.set()
        thread.join()
        return errors

    return finish


@pytest.mark.parametrize("first_to_leave", ["outer", "inner"])
def test_pauses_of_two_threads_end_with_the_last_one(first_to_leave):
    model = nn.Linear(4, 3)
    clipper = PerSampleGradientClipper(model, Flat(1.0))
    capture = of(model)
    leave_other = in_thread(capture.paused)
    own = capture.paused()
    own.__enter__()
    ends = [lambda: own.__exit__(None, None, None), leave_other]
    first, last = ends if first_to_leave == "inner" else reversed(ends)
    first()
    assert capture.state is CaptureState.PAUSED
    last()
    assert capture.state is CaptureState.ATTACHED
    with capture.paused():
        clipper.detach()
    assert capture.state is CaptureState.DETACHED


def test_a_second_thread_cannot_redirect_calls_meanwhile():
    model = nn.Linear(4, 3)
    PerSampleGradientClipper(model, Flat(1.0))
    capture, recipients = of(model), [object(), object()]
    leave_other = in_thread(lambda: capture.redirected(recipients[0], 1))
    with pytest.raises(UnsupportedLayerError, match="two threads"), capture.redirected(recipients[1], 1):
        pass
    assert capture.recipient is recipients[0]
    assert not leave_other() and capture.recipient is capture.listener
    with capture.redirected(recipients[0], 1), capture.redirected(recipients[1], 1):
        assert capture.recipient is recipients[1]
    assert capture.recipient is capture.listener and not in_thread(lambda: capture.redirected(recipients[0], 1))()
