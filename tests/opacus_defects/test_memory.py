"""Defects of Opacus: memory of large embeddings and convolutions, and the memory budget."""

import copy

import pytest
import torch
from opacus_defects.apis import LAYER_APIS, assert_equal, fixed_loader, true_sum, with_few_apis
from torch import nn
from torch.profiler import ProfilerActivity, profile

from dpengine import PrivacyEngine
from dpengine.grad_modes import MethodTable


def peak_of(run):
    """Returns the peak memory in bytes that ``run`` allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    changes = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        allocated += change.nbytes()
        peak = max(peak, allocated)
    return peak


pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012:dpengine.PrivacyWarning")

CRITERION = nn.CrossEntropyLoss()
# Modes that do not keep per-sample gradients. The others return those of all samples, or use torch's implementation.
LOW_MEMORY_APIS = [d for d in LAYER_APIS if d.mode in ("auto", "ghost") or (d.compat and d.mode == "hooks")]
MIB = 2**20


def test_the_measured_peak_is_the_largest_memory_at_one_time():
    def run():
        first = torch.zeros(MIB // 4)
        second = first + 1
        del first
        third = second * 2
        del second, third
        torch.zeros(MIB // 4)

    assert 2 * MIB <= peak_of(run) < 2.1 * MIB


def peak_of_a_step(private, x, y):
    """Returns the peak of the second step, because the first allocates persistent buffers."""
    for _ in private.loader:
        private.step(x, y)
    found = []
    for _ in private.loader:
        found.append(peak_of(lambda: private.step(x, y)))
    return found[0]


@with_few_apis(LOW_MEMORY_APIS, always={"default-auto", "compat-hooks"})
@pytest.mark.hazard("O51")
def test_memory_of_a_large_embedding_does_not_grow_with_the_batch(api):
    entries, width = 10**6, 2
    table = 4 * entries * width
    peaks = {}
    for rows in (4, 64):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(entries, width), nn.Flatten(), nn.Linear(5 * width, 3))
        x, y = torch.randint(0, entries, (rows, 5)), torch.randint(0, 3, (rows,))
        private = api.open(model, fixed_loader(rows), criterion=CRITERION)
        peaks[rows] = peak_of_a_step(private, x, y)
    assert peaks[4] < 4 * table
    assert peaks[64] - peaks[4] < table / 4  # dense gradients of 64 samples would be 64 tables


@pytest.fixture
def untimed_methods(monkeypatch):
    """Chooses methods by estimated cost instead of timings, which depend on the load of the machine."""
    plan = MethodTable.plan

    def untimed(self, entries, rows):
        self.timed = False
        return plan(self, entries, rows)

    monkeypatch.setattr(MethodTable, "plan", untimed)


@with_few_apis(LOW_MEMORY_APIS, always={"default-auto", "compat-hooks"})
@pytest.mark.hazard("O52")
def test_a_convolution_does_not_unfold_its_input(api, untimed_methods):
    rows = 16
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 7, padding=3), nn.ReLU(), nn.Conv2d(8, 8, 7, padding=3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    x, y = torch.randn(rows, 3, 32, 32), torch.randint(0, 8, (rows,))
    activations = 4 * rows * 8 * 32 * 32
    plain = copy.deepcopy(model)
    ordinary = peak_of(lambda: CRITERION(plain(x), y).backward())
    found = peak_of_a_step(api.open(model, fixed_loader(rows), criterion=CRITERION), x, y)
    assert found < ordinary + 24 * activations  # unfolded, the second input alone would be 49 activations


@pytest.mark.hazard("O52")
def test_without_a_memory_budget_sums_are_exact_and_gradients_are_not_kept():
    rows, width = 32, 256
    torch.manual_seed(1)
    model = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())), nn.Linear(width, 3)
    )
    x, y = torch.randn(rows, width), torch.randint(0, 3, (rows,))
    plain, truth = copy.deepcopy(model), true_sum(model, CRITERION, (x, y))
    ordinary = peak_of(lambda: CRITERION(plain(x), y).backward())
    engine = PrivacyEngine(seed=0, methods=MethodTable(keep_budget=0, timed=False))
    _, optimizer, loader = engine.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.0), fixed_loader(rows), noise_multiplier=0.0, max_grad_norm=1.0
    )

    def step():
        optimizer.zero_grad()
        CRITERION(model(x), y).backward()
        optimizer.step()

    for _ in loader:
        step()
    for _ in loader:
        found = peak_of(step)
    all_rows = 4 * rows * sum(p.numel() for p in model.parameters())
    assert found < ordinary + 2 * MIB < all_rows / 3
    assert_equal({name: p.grad.double() * rows for name, p in model.named_parameters()}, truth)
    chosen = [line for line in engine.explain().splitlines() if ".weight " in line]
    assert len(chosen) == 5 and all("keep" not in line for line in chosen)
