# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # From an ordinary script to a private one
#
# A training script learns from records about people, and its model will be published. This tutorial makes the script
# differentially private: the model then hardly reveals whether any single record was in the training set.
#
# The tutorial starts with an ordinary script, adds one call, and keeps the loop. It then reads the privacy cost, writes
# the report, and shows which mistakes the engine rejects.
#
# The data set is UCI Adult: 1994 census records, with the label whether a person earns more than 50,000 dollars a year.
# It is part of the package. The tutorial takes less than a minute on a laptop.

# %%
import tempfile
import warnings

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import dpengine
from dpengine.accounting import round_up
from dpengine.data import load_adult

torch.manual_seed(0)
adult = load_adult()
dataset = TensorDataset(adult.train_inputs, adult.train_labels)
print(adult.describe())

# %% [markdown]
# The inputs are scaled by ranges that were fixed in advance (an age is between 17 and 90), not by the minimum and
# maximum of the data. A statistic that is computed from the data has its own privacy cost, which the training does not
# account for.
#
# ## 1. The ordinary script


# %%
def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(107, 32), nn.Tanh(), nn.Linear(32, 2))


def accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        return (model(adult.test_inputs).argmax(1) == adult.test_labels).float().mean().item()


model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(dataset, batch_size=1024, shuffle=True)

for epoch in range(5):
    for inputs, targets in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: {accuracy(model):.1%} of the test examples")

ordinary = accuracy(model)

# %% [markdown]
# ## 2. The private script
#
# DP-SGD changes three things. Each batch includes every example with the same small probability. The gradient of each
# sample is clipped to norm `max_grad_norm`, which limits its influence. Noise is added to the sum of the clipped
# gradients.
#
# The objects that `make_private` returns do all of this. `target_epsilon` is the privacy budget, and `epochs` is the
# length of training. The engine calibrates the noise to both.

# %%
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
loader = DataLoader(dataset, batch_size=1024, shuffle=True)

engine = dpengine.PrivacyEngine()
model, optimizer, loader = engine.make_private(
    model,
    optimizer,
    loader,
    target_epsilon=1.0,
    target_delta=1e-5,
    epochs=5,
    max_grad_norm=0.1,
)
print(repr(optimizer).splitlines()[0])

# %% [markdown]
# The loop is the same, except for `engine.progress`, which shows the current ε in a terminal.
#
# The learning rate changed from 0.1 to 2. This is usual: clipped gradients have a norm of at most 0.1 here. A small
# clipping norm with a large learning rate is a good start, because only the ratio of noise to clipping norm matters.

# %%
for epoch in range(5):
    for inputs, targets in engine.progress(loader):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: {accuracy(model):.1%} of the test examples, epsilon = {round_up(engine.epsilon, 3)}")

private = accuracy(model)
assert engine.epsilon <= 1.0
assert private > ordinary - 0.02

# %% [markdown]
# The model and the optimizer are the objects that were passed. State dicts have the same keys, and schedulers and
# checkpoints work as before. The loader is new: `batch_size=1024` is now the expected size of its batches, because each
# example is sampled independently. A batch may be empty, and then still counts as a step.

# %% [markdown]
# ## 3. The privacy cost
#
# `engine.epsilon` is an upper bound on the epsilon of all steps so far, at the chosen delta. A run has an epsilon for
# every delta: the smaller delta is, the larger is epsilon.

# %%
for delta in (1e-4, 1e-5, 1e-6):
    print(f"delta = {delta:g}: epsilon = {round_up(engine.get_epsilon(delta), 3)}")

# %% [markdown]
# What does epsilon = 1 mean? Suppose that an attacker knows all other records, and tests whether one person is in the
# training set. The *advantage* is an upper bound on the true positive rate of such a test minus its false positive
# rate.

# %%
spent = engine.spent
print(f"advantage of a membership test: at most {spent.advantage:.1%}, after {spent.steps} steps")
assert spent.advantage < 0.15

# %% [markdown]
# The 5 planned epochs are over, so the loader returns no more batches, and warns about it.

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in loader:
        raise AssertionError("a batch beyond the budget")
print(caught[0].message)

# %% [markdown]
# ## 4. The report
#
# An epsilon is only meaningful with its assumptions. The report states whom the guarantee protects, the assumptions,
# whether they held in this run, and what is *not* covered. For example, this epsilon does not cover the choice of the
# learning rate on a test set, or the publication of the accuracies above.

# %%
report = engine.report(data={"name": adult.title, "source": adult.source, "licence": adult.licence})
print(report)

with tempfile.TemporaryDirectory() as folder:
    for path in report.save(folder):
        print(path.name)

# %% [markdown]
# `privacy_report.html` is a web page, `privacy_report.md` is a model card, and `privacy_report.json` is for programs.
#
# ## 5. Is my model supported?
#
# DP-SGD needs per-sample gradients. `check` shows before training how they are computed for each layer. BatchNorm is
# not possible: it normalizes each sample with statistics of the batch, so one sample changes the gradients of all.

# %%
convnet = nn.Sequential(
    nn.Conv2d(3, 32, 3),
    nn.BatchNorm2d(32),
    nn.ReLU(inplace=True),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 10),
)
print(dpengine.check(convnet))

# %% [markdown]
# `fix` replaces BatchNorm by GroupNorm, which normalizes each sample independently. Call `fix` before the optimizer is
# built, because it replaces parameters.

# %%
convnet, changes = dpengine.fix(convnet)
print(changes)
assert dpengine.check(convnet).ok

# %% [markdown]
# ## 6. Rejected mistakes
#
# A mistake in a private script rarely causes a crash. The model trains well, and the script prints a small epsilon that
# is wrong. The engine therefore raises an error for code that would break the guarantee, and the error says what to
# change. Each error has a code, with a section in `docs/errors.md`.


# %%
def rejected(attempt) -> str:
    """Runs code that should be rejected, prints the error, and returns its code."""
    try:
        attempt()
    except dpengine.errors.PrivacyError as error:
        print(f"{type(error).__name__}: {error}\n")
        return error.code
    raise AssertionError("this should have been rejected")


def fresh(engine=None, loader=None, delta=1e-5):
    """Starts a small private run."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = loader or DataLoader(TensorDataset(*dataset[:2000]), batch_size=100, shuffle=True)
    engine = engine or dpengine.PrivacyEngine()
    return engine.make_private(model, optimizer, loader, noise_multiplier=1.0, target_delta=delta)


# %% [markdown]
# **Oversampling.** The accounting needs the same probability for every example. Weight the loss instead.

# %%
weights = 1.0 + 2.0 * adult.train_labels.double()
weighted = DataLoader(dataset, batch_size=1024, sampler=WeightedRandomSampler(weights, len(dataset)))
assert rejected(lambda: fresh(loader=weighted)) == "DPE004"

# %% [markdown]
# **A delta that is too large.** With 2,000 examples and delta = 0.01, a mechanism that publishes twenty random records
# would be (0, delta)-private.

# %%
assert rejected(lambda: fresh(delta=0.01)) == "DPE007"


# %% [markdown]
# **A missing `zero_grad`.** An ordinary loop would then accumulate gradients. A private loop would reuse old noise.


# %%
def no_zero_grad():
    model, optimizer, loader = fresh()
    for inputs, targets in loader:
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()


assert rejected(no_zero_grad) == "DPE005"


# %% [markdown]
# **Two losses, two backward passes.** Each pass is clipped separately, so every sample would count twice. Add the
# losses.


# %%
def two_backward_passes():
    model, optimizer, loader = fresh()
    inputs, targets = next(iter(loader))
    optimizer.zero_grad()
    cross_entropy(model(inputs), targets).backward()
    model(inputs).square().mean().backward()


assert rejected(two_backward_passes) == "DPE017"


# %% [markdown]
# **A loss that mixes samples.** With class weights, `cross_entropy` divides the sum by the weights *of this batch*, so
# the gradient of a sample depends on other samples. Training raises an error in the first backward pass; `check_loss`
# raises it before training.


# %%
def weighted_loss(outputs, targets):
    return cross_entropy(outputs, targets, weight=torch.tensor([1.0, 3.0]))


batch = next(iter(DataLoader(dataset, batch_size=64)))
assert rejected(lambda: dpengine.check_loss(make_model(), weighted_loss, batch)) == "DPE010"

# %% [markdown]
# The message says how to fix it: compute per-sample losses, and let the engine average them.

# %%
engine = dpengine.PrivacyEngine()
model, optimizer, loader = fresh(engine=engine)
for inputs, targets in loader:
    optimizer.zero_grad()
    loss_B = cross_entropy(model(inputs), targets, weight=torch.tensor([1.0, 3.0]), reduction="none")
    engine.backward(loss_B)
    optimizer.step()
print(f"epsilon = {round_up(engine.epsilon)}")

# %% [markdown]
# ## 7. Before you publish
#
# - Choose epsilon, delta and the number of epochs first, for example with `dpengine calibrate` on the command line.
# - Choose hyperparameters on public data, or account for all runs.
# - If a person has several records, this guarantee protects single records. `privacy_unit=` protects persons.
# - Train without a seed. `PrivacyEngine(seed=...)` makes the noise reproducible, which is useful for tests but not
#   private.
# - Publish the weights and the report, not the training loss.
