"""``make_private`` attaches all hooks or, on an error, none."""

import gc
import sys
import threading
import weakref

import inside
import pytest
import torch
from inside_parts import fail_to_attach, is_private, list_as_private
from loops import every_mode, examples, make_loop, mlp, train
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from dpengine import PrivacyEngine


def fail(*args, **kwargs):
    raise RuntimeError("in between")


# Position of the error: in the optimizer, between two hooks, at AMP or LR schedulers, and at the end.
STOPS = {
    "optimizer": lambda model, patch: fail_to_attach(patch, "optimizer", fail),
    "layers": lambda model, patch: fail_to_attach(patch, "layers", fail),
    "hooks": lambda model, patch: patch.setattr(model, "register_forward_pre_hook", fail),
    "scaler": lambda model, patch: fail_to_attach(patch, "scaler", fail),
    "scheduler": lambda model, patch: fail_to_attach(patch, "scheduler", fail),
    "models": lambda model, patch: fail_to_attach(patch, "models", fail),
}


def hooks_of(model):
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = [hook for module in model.modules() for name in names for hook in getattr(module, name).values()]
    found += [module.forward for module in model.modules() if "forward" in vars(module)]
    return found + [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values()]


@pytest.mark.parametrize("stop", STOPS)
def test_an_interrupted_attach_leaves_no_hooks(stop, monkeypatch):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, scaler = lr_scheduler.StepLR(optimizer, 1), torch.amp.GradScaler("cpu")
    engine, before = PrivacyEngine(), dict(optimizer.__dict__)

    def make():
        loader = DataLoader(examples(), batch_size=6)
        options = {"noise_multiplier": 1.0, "lr_scheduler": scheduler, "grad_scaler": scaler}
        return engine.make_private(model, optimizer, loader, **options)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="in between"):
        STOPS[stop](model, patch)
        make()
    assert [type(one) for one in (optimizer, scheduler, scaler)] == [
        torch.optim.SGD,
        lr_scheduler.StepLR,
        torch.amp.GradScaler,
    ]
    assert optimizer.__dict__ == before
    assert not hooks_of(model)
    assert not is_private(model)
    assert inside.runs_of(engine) == ((), None)
    make()
    assert is_private(model) and inside.is_attached(engine)


def test_several_threads_may_make_models_private_at_once():
    failed = []

    def work():
        models = [torch.nn.Identity() for _ in range(300)]
        try:
            for model in models:
                list_as_private(model)
        except RuntimeError as error:  # the set changed during iteration
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not failed


@pytest.mark.one_in(3, "mode", others="slow")
@pytest.mark.one_in(2, "mode")
@every_mode
def test_a_run_without_references_is_garbage_collected(mode):
    loop = make_loop(noise_multiplier=1.0, grad_sample_mode=mode)
    train(loop)
    parts = (loop.engine, loop.model, loop.optimizer, loop.loader, loop.loader.dataset)
    left, run_is_alive = [weakref.ref(part) for part in parts], inside.alive(loop.engine)
    del loop, parts
    gc.collect()
    assert [reference() for reference in left] == [None] * len(left)
    assert not run_is_alive()
