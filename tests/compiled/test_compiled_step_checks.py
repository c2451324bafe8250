"""Calls that a compiled step rejects; errors, copies and interrupts leave nothing behind."""

import copy
import itertools
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpengine import errors
from dpengine.compiled.settings import model_key

from .trainings import (
    CLASSES,
    MODELS,
    Training,
    batches_after_checks,
    before_compiled_batch,
    data,
    weights_of,
)


@pytest.mark.slow
def test_detach_and_copies_do_not_keep_the_compiled_step():
    training = Training(MODELS["linear"][0], data((6,)), compile="eager")
    training.run(3)
    assert "forward" not in vars(copy.deepcopy(training.model))
    training.engine.detach(training.model)
    assert "forward" not in vars(training.model)
    assert training.model(torch.randn(3, 6)).grad_fn.name() == "AddmmBackward0"


@pytest.mark.slow
def test_two_threads_compile_one_after_the_other():
    trained = {}

    def work(name):
        trained[name] = Training(MODELS["linear"][0], TensorDataset(*data((6,)).tensors), compile="eager").run()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(trained) == 2
    assert all(weights.isfinite().all() for weights in trained.values())
    Training(MODELS["linear"][0], TensorDataset(*data((6,)).tensors), compile="eager").run()  # and after them


@pytest.mark.one_in(3, "where", others="slow")
@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_interrupt_while_tracing_leaves_the_model_as_it_was(where, monkeypatch):
    training = Training(lambda: nn.Sequential(nn.PReLU(6), nn.Linear(6, CLASSES)), data((6,)), compile="eager")
    batch = next(batches_after_checks(training))
    training.optimizer.zero_grad()
    calls = []
    original = F.prelu

    def prelu(*args):
        calls.append(1)
        if len(calls) == where + 1:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(F, "prelu", prelu)
    with pytest.raises(KeyboardInterrupt):
        training.model(batch[0])
    monkeypatch.undo()
    assert all(type(p) is nn.Parameter for p in training.model.parameters())
    training.run(3)
    assert all(type(p) is nn.Parameter for p in training.model.parameters())


@pytest.mark.parametrize("kind", ["module", "tensor"])
def test_the_key_of_a_graph_keeps_nothing_alive_and_never_equals_that_of_a_later_object_at_the_same_address(kind):
    held = nn.Identity() if kind == "tensor" else None

    def key_at():
        layer = nn.Identity() if held is None else held
        layer.table = torch.zeros(2) if kind == "tensor" else None
        own = layer if held is None else layer.table
        key, again = model_key(layer, []), model_key(layer, [])
        assert key == again and hash(key) == hash(again)
        return id(own), key, weakref.ref(own)

    place, key, alive = key_at()
    if held is not None:
        del held.table
    assert alive() is None
    later = [key_at()]
    while later[-1][0] != place and len(later) < 1000:
        if held is not None:
            del held.table
        later.append(key_at())
    assert later[-1][0] == place
    assert key not in [other for _, other, _ in later]


@pytest.mark.slow
def test_a_batch_counts_once():
    training, x, y = before_compiled_batch()
    loss = F.cross_entropy(training.model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(errors.RepeatedBackwardError):
        loss.backward()


def test_other_samples_than_were_drawn_are_rejected():
    training, x, y = before_compiled_batch()
    with pytest.raises(errors.BatchMismatchError):
        F.cross_entropy(training.model(torch.cat([x, x])), torch.cat([y, y])).backward()


def test_a_model_in_eval_mode_is_rejected_as_in_eager_mode():
    training = Training(MODELS["linear"][0], data((6,)), compile="eager")
    batch = next(batches_after_checks(training))
    training.model.eval()
    with pytest.raises(errors.PrivacyError, match="eval mode"):
        training.step(batch)


@pytest.mark.slow
def test_a_parameter_used_by_the_loss_is_rejected():
    training, x, y = before_compiled_batch()
    loss = F.cross_entropy(training.model(x), y) + training.model[0].weight.square().sum()
    with pytest.raises(errors.MissingGradientError, match="used outside the forward"):
        loss.backward()


@pytest.mark.slow
def test_a_model_called_twice_before_backward_is_rejected_or_runs_eagerly(passes):
    def trained(compile):
        training = Training(MODELS["linear"][0], data((6,)), compile=compile)
        for x, y in itertools.islice(training.loader, 5):
            training.optimizer.zero_grad()
            (F.cross_entropy(training.model(x), y) + F.cross_entropy(training.model(-x), y)).backward()
            training.optimizer.step()
        return weights_of(training.model)

    with pytest.warns(errors.PrivacyWarning, match="called more than once"):
        compiled = trained("eager")
    torch.testing.assert_close(compiled, trained(False), rtol=1e-5, atol=1e-6)
    assert not passes

    training, x, y = before_compiled_batch()  # the model was called once there
    loss = F.cross_entropy(training.model(x), y) + F.cross_entropy(training.model(-x), y)
    with pytest.raises(errors.UnsupportedLayerError, match="more than once before one backward pass"):
        loss.backward()
