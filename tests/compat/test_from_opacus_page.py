"""The Python code of docs/from_opacus.md runs in order, and its two scripts differ only by the stated rule."""

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
from migrated import SCRIPTS, written_for_opacus
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from dpengine.compat import opacus
from dpengine.errors import PrivacyError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from_opacus.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
BEFORE = [block for block in BLOCKS if re.search(r"^from opacus\b", block, flags=re.MULTILINE)]
AFTER = [block for block in BLOCKS if block not in BEFORE]


@pytest.fixture(scope="module")
def page_namespace():
    """Returns the names that the blocks of the page define, without the block that needs Opacus; fails on a warning."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for block in AFTER:
            line = TEXT[: TEXT.index(block)].count("\n")
            exec(compile("\n" * line + block, str(PAGE), "exec"), namespace)  # errors then name the line of the page
    return namespace


def test_the_script_before_is_the_script_after_by_the_rule():
    assert len(BEFORE) == 1
    assert written_for_opacus(AFTER[1]) == BEFORE[0]


@pytest.mark.slow
def test_the_page_runs_and_both_interfaces_have_nearly_equal_epsilon(page_namespace):
    theirs, ours = page_namespace["privacy_engine"].get_epsilon(1e-5), page_namespace["engine"].get_epsilon(1e-5)
    assert 0 < page_namespace["spent"](page_namespace["history"], 1e-5) <= theirs < 1.01 * ours


def test_relative_links_exist():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT)
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []


@pytest.mark.slow
def test_names_of_dpengine_on_the_page_exist(page_namespace):
    import dpengine

    names = set(re.findall(r"`dpengine\.(\w+)\(", TEXT))
    assert names
    assert names <= set(dpengine.__all__)


def test_the_page_counts_the_scripts():
    assert f"The {['no', 'one', 'two', 'three', 'four', 'five', 'six', 'seven'][len(SCRIPTS)]} scripts of" in TEXT


def private_run(*, layers=(), loader=None, optimizer=torch.optim.SGD, **settings):
    """Returns the three values of Opacus's ``make_private`` for a small model with Poisson batches of 16 samples."""
    model = nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 2))
    rows = TensorDataset(torch.randn(64, 3), torch.randint(2, (64,)))
    return opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer(model.parameters(), lr=0.1),
        data_loader=loader or DataLoader(rows, batch_size=16),
        **({"noise_multiplier": 1.0, "max_grad_norm": 1.0} | settings),
    )


def backward(model, batch):
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss


class Stream(IterableDataset):
    """A data set without an index."""

    def __iter__(self):
        yield torch.zeros(3), 0


REJECTED_CALLS = {
    "an unknown keyword": lambda: private_run(posson_sampling=False),
    "negative noise": lambda: private_run(noise_multiplier=-1.0),
    "a negative threshold": lambda: private_run(max_grad_norm=-1.0),
    "batch norm": lambda: private_run(layers=[nn.BatchNorm1d(4)]),
    "batch norm without parameters": lambda: private_run(layers=[nn.BatchNorm1d(4, affine=False)]),
    "frozen batch norm": lambda: private_run(layers=[nn.BatchNorm1d(4).requires_grad_(False)]),
    "batch norm without running statistics": lambda: private_run(
        layers=[nn.BatchNorm1d(4, track_running_stats=False).requires_grad_(False).eval()]
    ),
    "SyncBatchNorm": lambda: private_run(layers=[nn.SyncBatchNorm(4).requires_grad_(False).eval()]),
    "DataParallel": lambda: private_run(layers=[nn.DataParallel(nn.Linear(4, 4))]),
    "a copy of the optimizer": lambda: copy.deepcopy(private_run()[1]),
    "rows drawn by weight": lambda: private_run(
        loader=DataLoader(TensorDataset(torch.zeros(64, 3)), 16, sampler=WeightedRandomSampler([1.0] * 64, 64))
    ),
    "a stream": lambda: private_run(loader=DataLoader(Stream(), batch_size=16)),
    "LBFGS": lambda: private_run(optimizer=torch.optim.LBFGS),
}


@pytest.mark.parametrize("what", REJECTED_CALLS)
def test_everything_that_the_page_calls_rejected_raises(what):
    with pytest.raises((TypeError, ValueError, PrivacyError)):
        REJECTED_CALLS[what]()


def test_frozen_batch_norm_in_eval_mode_is_accepted():
    model, optimizer, loader = private_run(layers=[nn.BatchNorm1d(4).requires_grad_(False).eval()])
    backward(model, next(iter(loader)))
    optimizer.step()
    model.train()
    with pytest.raises(ValueError, match=r"train mode.*\.eval\(\)"):
        model(torch.zeros(2, 3))


def test_autograd_grad_for_parameters_raises_the_error_that_the_page_quotes():
    model, _, loader = private_run()
    inputs, targets = next(iter(loader))
    loss = nn.functional.cross_entropy(model(inputs), targets)
    with pytest.raises(RuntimeError) as raised:
        torch.autograd.grad(loss, list(model.parameters()))
    words = "appears to not have been used in the graph"
    assert words in str(raised.value)
    assert words in TEXT


def test_a_second_backward_a_second_step_and_samples_from_elsewhere_are_rejected():
    model, _, loader = private_run()
    batch = next(iter(loader))
    backward(model, batch)
    with pytest.raises(ValueError, match="backward"):
        backward(model, batch)
    model, optimizer, loader = private_run()
    backward(model, next(iter(loader)))
    optimizer.step()
    with pytest.raises(ValueError, match="zero_grad"):
        optimizer.step()
    model, optimizer, loader = private_run()
    backward(model, (torch.randn(5, 3), torch.zeros(5, dtype=torch.long)))
    with pytest.raises(PrivacyError, match="private loader"):
        optimizer.step()


def test_differences_listed_on_the_page_hold():
    assert opacus.PrivacyEngine(secure_mode=True).get_epsilon(delta=1e-5) == 0
    model, optimizer, loader = private_run()
    batches = iter(loader)
    backward(model, next(batches))
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.zero_grad()
    assert optimizer.step(lambda: backward(model, next(batches))).item() > 0
    assert optimizer.expected_batch_size == 16
