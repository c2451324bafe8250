# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Correlated noise
#
# DP-SGD adds independent noise at every step. The trained weights depend on *sums* of the steps. If the noise of
# each step cancels a part of the noise of earlier steps, these sums have much less noise, at the same guarantee.
# This is BandMF (Choquette-Choo et al. 2023).
#
# This tutorial creates a plan, compares it with independent noise at the same epsilon, trains five models with each on
# UCI Adult, and then uses the parts of the plan in a loop without the engine. It takes about a minute.

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
num_examples = len(adult.train_inputs)
batch, epsilon, delta = 32, 1.0, 1e-5
steps = num_examples // batch
print(f"{num_examples:,} examples, batches of {batch}, {steps:,} steps: each example is used about once")

# %% [markdown]
# ## 1. A plan
#
# A config describes a run by public numbers: steps, batches, clipping norm and noise. `calibrate` finds the noise for a
# budget, and returns a new config. `to_json` stores it.
#
# With 16 bands, the examples are split into 16 groups, and each step samples from the next group. An example is
# therefore sampled at most every 16th step. Its sampling rate within the group is 16 times as large, which needs more
# noise at each step. `rmse` is the resulting error of the sums over the whole run.

# %%
shared = {
    "iterations": steps,
    "num_examples": num_examples,  # public
    "l2_clip_norm": 0.1,
    "normalize_by": float(batch),
}
independent = DPSGDConfig(sampling_prob=batch / num_examples, **shared).calibrate(epsilon=epsilon, delta=delta)
print(f"independent: noise multiplier {independent.noise_multiplier:.3f}")

errors = {}
for bands in (1, 4, 16, 64):
    config = BandMFConfig.default(num_bands=bands, sampling_prob=bands * batch / num_examples, **shared)
    config = config.calibrate(epsilon=epsilon, delta=delta, tol=1e-3)
    errors[bands] = config.rmse
    print(f"{bands:3d} bands: noise multiplier {config.noise_multiplier:.3f}, error of the sums {config.rmse:6.2f}")

assert errors[16] < 0.5 * errors[1]

# %% [markdown]
# One band is DP-SGD. Sixteen bands halve the error at the same epsilon, although each single step has more noise. More
# bands help little, and need more memory: one copy of the parameters for each band.
#
# ## 2. The same loop
#
# `make_private(..., plan=...)` draws batches, clips, adds noise and accounts by the plan. It raises an error for a plan
# that does not fit, such as a plan for another number of examples.
#
# A short form is `make_private(..., noise=BandMF(num_bands=16), noise_multiplier=1.0, epochs=1)`, with `BandMF` from
# `dpengine.noise`.

# %%
correlated = BandMFConfig.default(num_bands=16, sampling_prob=16 * batch / num_examples, **shared)
correlated = correlated.calibrate(epsilon=epsilon, delta=delta)


def train(config, seed: int) -> tuple[float, float]:
    """Returns the test accuracy, and epsilon."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(107, 512), nn.Tanh(), nn.Linear(512, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(TensorDataset(adult.train_inputs, adult.train_labels), batch_size=batch)
    engine = dpengine.PrivacyEngine(seed=seed)  # for reproducible numbers; omit the seed for real data
    model, optimizer, loader = engine.make_private(model, optimizer, loader, plan=config, target_delta=delta)
    for inputs, targets in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        correct = model(adult.test_inputs).argmax(1) == adult.test_labels
    return correct.float().mean().item(), engine.epsilon


accuracies = {}
for name, config in {"independent": independent, "16 bands": correlated}.items():
    results = [train(config, seed) for seed in range(5)]
    accuracies[name] = [accuracy for accuracy, _ in results]
    mean, deviation = statistics.mean(accuracies[name]), statistics.stdev(accuracies[name])
    spent = results[0][1]
    print(f"{name:>12}: test accuracy {mean:.2%} (deviation {deviation:.2%} over seeds), epsilon {round_up(spent, 4)}")
    assert spent <= epsilon

assert statistics.mean(accuracies["16 bands"]) > statistics.mean(accuracies["independent"])

# %% [markdown]
# The learning rate is suitable for both. On FashionMNIST the difference is larger, and grows with epsilon: see
# `benchmarks/RESULTS.md`, which also has the cost of the noise in time and memory.
#
# Two things differ from DP-SGD. The run ends with its plan: further steps raise an error, because the noise was not
# computed for them. The epsilon of a part of the run is valid only if its number of steps was fixed in advance.

# %%
for step in (0, 1, steps // 2, steps):
    print(f"after {step:5d} steps: epsilon = {round_up(correlated.epsilon(delta, step), 3)}")

# %% [markdown]
# ## 3. Without the engine
#
# Your own training loop can use the three parts of a plan: the clipped gradient of a function, the sampling scheme, and
# the noise. The clipped sum must not change before the noise is added. Indices, batches and sums without noise are
# private.

# %%
plan = correlated.make(PerformanceFlags(noise_seed=0))
gradient = plan.clipped_grad(lambda w, x, y: cross_entropy(x @ w, y), batch_argnums=(1, 2))
weights = torch.zeros(107, 2)
state = plan.noise_addition_transform.init(weights)
for step, indices in enumerate(plan.batch_selection_strategy.batch_iterator(num_examples, np.random.default_rng(0))):
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
# - `BLTConfig` needs a few buffers for a run of any length. `BandedInverseConfig` needs none, because it draws earlier
#   noise again. Their noise is correlated across cycles, so there is no amplification by sampling: examples are used in
#   a fixed order. They suit runs in which random sampling is not possible.
# - `Plan` accepts any sampling scheme, noise and clipping policy, including your own.
# - `from_json` returns an equal config.

# %%
again = BandMFConfig.from_json(correlated.to_json())
assert again == correlated
print(again.describe()["accounting"])
