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
# You have a training script. It learns from records about people, and the model will leave the house. This tutorial
# makes that script differentially private: whoever sees the model can then hardly tell whether any one record was in
# the training set.
#
# We start with an ordinary script, add one call, and leave the loop as it was. Then we read what was spent, write the
# report, and look at what the engine refuses, since knowing that is what makes the guarantee trustworthy.
#
# The data are UCI Adult: 1994 census records, which ask whether a person earns more than 50,000 dollars a year. They
# are part of the package. It takes less than a minute on a laptop.

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
# One thing about these inputs already is a privacy decision. They are scaled by ranges that were fixed beforehand (an
# age lies between 17 and 90), not by the minimum and maximum of the rows. A statistic that you compute from the rows
# is a release of its own, and nothing that happens later in training pays for it.
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
    print(f"epoch {epoch + 1}: {accuracy(model):.1%} of the test rows")

ordinary = accuracy(model)

# %% [markdown]
# ## 2. The private script
#
# DP-SGD changes three things. Batches are drawn so that every row has the same small chance to be in each of them.
# Each row's own gradient is clipped to a norm `max_grad_norm`, so that no row can move the model far. And to the sum
# of what is left, noise is added that hides any one row's part.
#
# All three happen inside the objects that `make_private` returns. We say what may be spent, `target_epsilon`, and for
# how long we intend to train, and the engine finds the least noise that keeps to it.

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
# The loop below is the one from above, but for `engine.progress`, which shows ε as it grows. (It shows
# nothing where there is no terminal.)
#
# The learning rate did change, from 0.1 to 2. That is usual: clipped gradients are short, here 0.1 at most, so steps
# may be long. A small threshold with a large learning rate is a good place to start, since what counts is the noise
# in relation to the threshold.

# %%
for epoch in range(5):
    for inputs, targets in engine.progress(loader):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: {accuracy(model):.1%} of the test rows, epsilon = {round_up(engine.epsilon, 3)}")

private = accuracy(model)
assert engine.epsilon <= 1.0
assert private > ordinary - 0.02

# %% [markdown]
# The model is the object that you passed, and so is the optimizer. State dicts have the keys that they always had,
# schedulers and checkpoints work as before. The loader is a new one: `batch_size=1024` is now what its batches have
# on average, since every row is drawn by a coin of its own. A batch without any row is possible, and costs a step
# like any other.

# %% [markdown]
# ## 3. What was spent
#
# `engine.epsilon` is an upper bound on what all steps until now revealed, at the delta that we chose. The same run
# has an epsilon for every delta; a smaller one asks for more.

# %%
for delta in (1e-4, 1e-5, 1e-6):
    print(f"delta = {delta:g}: epsilon = {round_up(engine.get_epsilon(delta), 3)}")

# %% [markdown]
# What does epsilon = 1 mean? Somebody who knows every other record guesses whether one particular person is in the
# training set. The *advantage* bounds by how much any test of theirs can beat a coin: the rate of right alarms minus
# that of false ones.

# %%
spent = engine.spent
print(f"advantage of a membership test: at most {spent.advantage:.1%}, after {spent.steps} steps")
assert spent.advantage < 0.15

# %% [markdown]
# We asked for 5 epochs and have used them up, so the loader is at its end: it returns no more batches rather than
# overspend, and a warning says so.

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in loader:
        raise AssertionError("a batch beyond the budget")
print(caught[0].message)

# %% [markdown]
# ## 4. The report
#
# An epsilon without its assumptions says little. The report states whom the guarantee protects, what it rests on,
# whether that held in this run, and what is *not* covered. Read that last part: choosing the learning rate on a test
# set, or publishing the accuracy that we printed above, is not paid for by this epsilon.

# %%
report = engine.report(data={"name": adult.title, "source": adult.source, "licence": adult.licence})
print(report)

with tempfile.TemporaryDirectory() as folder:
    for path in report.save(folder):
        print(path.name)

# %% [markdown]
# `privacy_report.html` is for people, `privacy_report.md` is a model card, `privacy_report.json` is for programs.
#
# ## 5. Will my model do?
#
# Privacy for single rows needs the gradient of single rows. `check` says for each layer how that is found, before
# anything is trained. BatchNorm is the layer that cannot work: it normalises each row by the others, so that one
# person's record changes what everybody contributes.

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
# `fix` replaces it by GroupNorm, which stays within a row. Do this before you build the optimizer, since parameters
# are replaced.

# %%
convnet, changes = dpengine.fix(convnet)
print(changes)
assert dpengine.check(convnet).ok

# %% [markdown]
# ## 6. What is refused
#
# A mistake in a private script rarely crashes. It trains well, prints a small epsilon, and protects nobody. So
# whatever would break the guarantee is refused, by an error that says what to type. Each has a code; `docs/errors.md`
# has a section for each.


# %%
def refused(attempt) -> str:
    """Runs what should be refused, and shows how that looks."""
    try:
        attempt()
    except dpengine.errors.PrivacyError as error:
        print(f"{type(error).__name__}: {error}\n")
        return error.code
    raise AssertionError("this should have been refused")


def fresh(engine=None, loader=None, delta=1e-5):
    """A small private run."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = loader or DataLoader(TensorDataset(*dataset[:2000]), batch_size=100, shuffle=True)
    engine = engine or dpengine.PrivacyEngine()
    return engine.make_private(model, optimizer, loader, noise_multiplier=1.0, target_delta=delta)


# %% [markdown]
# **Drawing rare rows more often.** The accounting needs the same chance for every row. Weight the loss instead.

# %%
weights = 1.0 + 2.0 * adult.train_labels.double()
weighted = DataLoader(dataset, batch_size=1024, sampler=WeightedRandomSampler(weights, len(dataset)))
assert refused(lambda: fresh(loader=weighted)) == "DPE004"

# %% [markdown]
# **A delta that promises nothing.** With 2,000 rows and delta = 0.01, a mechanism that publishes twenty whole records
# would pass.

# %%
assert refused(lambda: fresh(delta=0.01)) == "DPE007"


# %% [markdown]
# **A forgotten `zero_grad`.** Without it an ordinary loop adds up old gradients. Here that would release old noise
# again.


# %%
def no_zero_grad():
    model, optimizer, loader = fresh()
    for inputs, targets in loader:
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()


assert refused(no_zero_grad) == "DPE005"


# %% [markdown]
# **Two losses, two backward passes.** Each pass is clipped alone, so every row would count twice. Add the losses
# first.


# %%
def two_backward_passes():
    model, optimizer, loader = fresh()
    inputs, targets = next(iter(loader))
    optimizer.zero_grad()
    cross_entropy(model(inputs), targets).backward()
    model(inputs).square().mean().backward()


assert refused(two_backward_passes) == "DPE017"


# %% [markdown]
# **A loss that mixes rows.** Class weights inside `cross_entropy` look harmless, but the mean is divided by the
# weights *of this batch*: a row's gradient depends on its neighbours. The engine sees the model and not the loss, so
# ask `check_loss` before training.


# %%
def weighted_loss(outputs, targets):
    return cross_entropy(outputs, targets, weight=torch.tensor([1.0, 3.0]))


batch = next(iter(DataLoader(dataset, batch_size=64)))
assert refused(lambda: dpengine.check_loss(make_model(), weighted_loss, batch)) == "DPE010"

# %% [markdown]
# The remedy is in the message. Reduce each row by itself, and let the engine average:

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
# - Decide on epsilon and delta first, with `dpengine calibrate` on the command line, and on the number of epochs.
# - Choose hyper-parameters on public data, or count the runs that you made.
# - One person, one row? If people have several rows, this guarantee is for a row and not for a person.
# - Train without a seed. `PrivacyEngine(seed=...)` makes noise repeat, which is good for tests and protects nobody.
# - Publish the weights and the report, not the training loss.
