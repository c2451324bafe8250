# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Noise that hangs together
#
# DP-SGD adds fresh noise at every step. Nobody needs that: what leaves the house are the weights, and those are *sums*
# of all steps. If the noise of each step takes back a part of the noise of the steps before, the sums become much less
# noisy, and the guarantee can be the same. That is BandMF (Choquette-Choo et al. 2023).
#
# This tutorial makes an execution plan, compares it with independent noise at the same epsilon, trains five models
# each way on UCI Adult, and then uses the parts of a plan in a loop without the engine. It takes about a minute.

# %%
import statistics

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import dpengine
from dpengine.accounting import round_up
from dpengine.data import load_adult
from dpengine.plan import BandMFConfig, DPSGDConfig, PerformanceFlags

adult = load_adult()
rows = len(adult.train_inputs)
batch, epsilon, delta = 32, 1.0, 1e-5
steps = rows // batch
print(f"{rows:,} rows, batches of {batch}, {steps:,} steps: each row takes part about once")

# %% [markdown]
# ## 1. A plan
#
# A config says in plain numbers what a run does: steps, batches, threshold, noise. `calibrate` finds the noise for a
# budget, and returns a new config. All of it is public, so it may be stored, printed and signed: `to_json`.
#
# With 16 bands, rows are put into 16 groups that take turns. So a row can only take part at every 16th step, where the
# noise of its last part is used up. The price: a row's chance within its group is 16 times as large, which takes more
# noise at each step. What that leads to over the whole run is `rmse`, the error of the sums.

# %%
shared = {
    "iterations": steps,
    "num_examples": rows,  # the number of rows is public
    "l2_clip_norm": 0.1,
    "normalize_by": float(batch),
}
independent = DPSGDConfig(sampling_prob=batch / rows, **shared).calibrate(epsilon=epsilon, delta=delta)
print(f"independent: noise multiplier {independent.noise_multiplier:.3f}")

errors = {}
for bands in (1, 4, 16, 64):
    config = BandMFConfig.default(num_bands=bands, sampling_prob=bands * batch / rows, **shared)
    config = config.calibrate(epsilon=epsilon, delta=delta, tol=1e-3)
    errors[bands] = config.rmse
    print(f"{bands:3d} bands: noise multiplier {config.noise_multiplier:.3f}, error of the sums {config.rmse:6.2f}")

assert errors[16] < 0.5 * errors[1]

# %% [markdown]
# One band is DP-SGD. Sixteen halve the error at the same epsilon, although each step alone is noisier. More bands help
# less and less, and keep more noise in memory: as many copies of the model as there are bands.
#
# ## 2. The same loop
#
# `make_private(..., plan=...)` draws batches, clips, adds noise and accounts as the plan says. What does not fit, such
# as a plan for another number of rows, is refused with the numbers.
#
# (For a first try there is a short form: `make_private(..., noise=BandMF(num_bands=16), noise_multiplier=1.0,
# epochs=1)` from `dpengine.noise`.)

# %%
correlated = BandMFConfig.default(num_bands=16, sampling_prob=16 * batch / rows, **shared)
correlated = correlated.calibrate(epsilon=epsilon, delta=delta)


def train(config, seed: int) -> tuple[float, float]:
    """Accuracy on the test rows, and epsilon."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(107, 512), nn.Tanh(), nn.Linear(512, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(TensorDataset(adult.train_inputs, adult.train_labels), batch_size=batch)
    engine = dpengine.PrivacyEngine(seed=seed)  # so that this page repeats; leave the seed out for real data
    model, optimizer, loader = engine.make_private(model, optimizer, loader, plan=config, target_delta=delta)
    for inputs, targets in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        right = model(adult.test_inputs).argmax(1) == adult.test_labels
    return right.float().mean().item(), engine.epsilon


accuracies = {}
for name, config in {"independent": independent, "16 bands": correlated}.items():
    results = [train(config, seed) for seed in range(5)]
    accuracies[name] = [accuracy for accuracy, _ in results]
    mean, spread = statistics.mean(accuracies[name]), statistics.stdev(accuracies[name])
    spent = results[0][1]
    print(f"{name:>12}: {mean:.2%} of the test rows (deviation {spread:.2%} over seeds), epsilon {round_up(spent, 4)}")
    assert spent <= epsilon

assert statistics.mean(accuracies["16 bands"]) > statistics.mean(accuracies["independent"])

# %% [markdown]
# The learning rate is one that suits both. On FashionMNIST the difference is larger, and grows with epsilon: see
# `benchmarks/RESULTS.md`, which also says what the noise costs in time and memory.
#
# Two things are different from DP-SGD. The run ends with its plan: steps beyond it would meet noise that was not made
# for them, and are refused. And epsilon may be asked for at any step, if the step was fixed beforehand.

# %%
for step in (0, 1, steps // 2, steps):
    print(f"after {step:5d} steps: epsilon = {round_up(correlated.epsilon(delta, step), 3)}")

# %% [markdown]
# ## 3. Without the engine
#
# A plan has three parts, and a loop of your own may use them: the clipped gradient of a plain function, the law of
# batches, and the noise. Nothing may touch the clipped sum before the noise, and indices, batches and clean sums are
# private.

# %%
plan = correlated.make(PerformanceFlags(noise_seed=0))
gradient = plan.clipped_grad(lambda w, x, y: cross_entropy(x @ w, y), batch_argnums=(1, 2))
weights = torch.zeros(107, 2)
state = plan.noise_addition_transform.init(weights)
for step, indices in enumerate(plan.batch_selection_strategy.batch_iterator(rows, np.random.default_rng(0))):
    if step == 300:
        break
    clipped_sum = gradient(weights, adult.train_inputs[indices], adult.train_labels[indices])
    noisy, state = plan.noise_addition_transform.update(clipped_sum, state)
    weights = weights - 0.5 * noisy

linear = ((adult.test_inputs @ weights).argmax(1) == adult.test_labels).float().mean().item()
print(f"a linear model after 300 steps: {linear:.1%}, epsilon = {round_up(plan.epsilon(delta, 300), 3)}")
assert linear > 0.76

# %% [markdown]
# ## 4. Other plans
#
# - `BLTConfig` keeps a few buffers whatever the length of the run, `BandedInverseConfig` keeps nothing at all and draws
#   old noise again. Their noise reaches further than a cycle, so they earn no credit for sampling: rows take turns in
#   one fixed order. They are for runs where sampling at random is not possible anyway.
# - `from_json` gives the config back, exactly.

# %%
again = BandMFConfig.from_json(correlated.to_json())
assert again == correlated
print(again.describe()["accounting"])
