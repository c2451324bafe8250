"""Limits on the files and function calls of one step, so that its trace stays readable."""

import gc
import itertools
import os
import sys
from collections import OrderedDict

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpengine
from dpengine import PrivacyEngine
from dpengine.grad_modes import choose_method

PACKAGE = os.path.dirname(dpengine.__file__)
# As measured: two Linear layers, hooks, flat clipping, one process, no probe due.
MOST_FILES, MOST_CHANGES, MOST_CALLS = 30, 145, 272


def files_of_calls(actions):
    """Returns the file of each call of a function of the package, in order, during the actions.

    The garbage collector is off meanwhile: it would run finalizers of objects that other tests left behind.
    """
    files = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    gc.collect()
    gc.disable()
    try:
        for action in actions:
            sys.setprofile(profile)
            try:
                action()
            finally:
                sys.setprofile(None)
    finally:
        gc.enable()
    return files


def test_one_step_stays_within_the_limits_on_files_and_calls(monkeypatch):
    monkeypatch.setattr(
        choose_method, "time_algorithms", lambda _, algorithms, rows, copies: {str(a): 1.0 for a in algorithms}
    )
    # Those of runs that other tests left.
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_pre_hooks", OrderedDict())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(256, 20), torch.randint(0, 2, (256,)))
    loader = DataLoader(data, batch_size=32)
    _, _, loader = PrivacyEngine(seed=0).make_private(model, optimizer, loader, noise_multiplier=1.1, max_grad_norm=1.0)
    batches = (batch for _ in range(100) for batch in loader)
    drawn, made = [], {}
    actions = [
        lambda: drawn.append(next(batches)),
        optimizer.zero_grad,
        lambda: made.update(out=model(drawn[-1][0])),
        lambda: nn.functional.cross_entropy(made["out"], drawn[-1][1]).backward(),
        optimizer.step,
    ]
    for _ in range(100):  # the probes at passes 1, 8 and 64 are behind, and methods are timed
        for action in actions:
            action()
    files = files_of_calls(actions)
    changes = sum(first != second for first, second in itertools.pairwise(files))
    assert len(set(files)) <= MOST_FILES, sorted({os.path.relpath(file, PACKAGE) for file in files})
    assert changes <= MOST_CHANGES
    assert len(files) <= MOST_CALLS
