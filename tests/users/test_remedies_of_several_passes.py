"""GANs, adversarial inputs, masks and preference pairs: the fix that an error message suggests is exact."""

import copy

import pytest
import torch
import torch.nn.functional as F
from loops import (
    BATCH,
    FEATURES,
    MAX_NORM,
    ROWS,
    assert_same_gradients,
    expected_gradients,
    first_batch,
    gradients_of,
    make_loop,
)
from reference import clipped_sum, per_sample_gradients
from torch import nn
from torch.utils.data import TensorDataset

from dpengine.errors import BatchDependentLossError, BatchMismatchError, RepeatedBackwardError

NOISE = {"noise_multiplier": 1.0}


def discriminator_loss(model, inputs, real):
    outputs = model(inputs)
    return F.binary_cross_entropy_with_logits(outputs, torch.full_like(outputs, real))


def train_gan(frozen):
    discriminator = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))
    generator = nn.Linear(2, FEATURES)
    loop = make_loop(discriminator, **NOISE)
    public = torch.optim.SGD(generator.parameters(), lr=0.1)

    for inputs, _ in loop.loader:
        loop.optimizer.zero_grad()
        fake = generator(torch.randn(len(inputs), 2))
        (
            discriminator_loss(discriminator, inputs, 1.0) + discriminator_loss(discriminator, fake.detach(), 0.0)
        ).backward()
        loop.optimizer.step()
        public.zero_grad()
        if frozen:
            discriminator.requires_grad_(False)
        discriminator_loss(discriminator, fake, 1.0).backward()
        if frozen:
            discriminator.requires_grad_(True)
        public.step()
    return loop


def test_the_error_for_a_gan_suggests_freezing_the_discriminator():
    with pytest.raises(RepeatedBackwardError, match=r"DPE017.*discriminator.requires_grad_\(False\) before"):
        train_gan(frozen=False)
    loop = train_gan(frozen=True)
    assert loop.engine.ledger.steps == len(loop.loader)
    assert {charge.kind for charge in loop.engine.ledger.history} == {"release"}


def test_the_passes_of_a_gan_are_exact_for_the_discriminator_and_ordinary_for_the_generator():
    loop = make_loop(nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)))
    generator, plain = nn.Linear(2, FEATURES), copy.deepcopy(loop.model).double()
    real, _ = first_batch(loop.loader, least=3)
    fake, rows = generator(torch.randn(len(real), 2)), []
    for one, other in zip(real.double(), fake.detach().double(), strict=True):
        plain.zero_grad()
        (discriminator_loss(plain, one, 1.0) + discriminator_loss(plain, other, 0.0)).backward()
        rows.append({name: p.grad.clone() for name, p in plain.named_parameters()})
    truth = torch.autograd.grad(
        discriminator_loss(plain, fake.double(), 1.0), list(generator.parameters()), retain_graph=True
    )
    (discriminator_loss(loop.model, real, 1.0) + discriminator_loss(loop.model, fake.detach(), 0.0)).backward()
    loop.model.requires_grad_(False)
    discriminator_loss(loop.model, fake, 1.0).backward()
    loop.model.requires_grad_(True)
    loop.optimizer.step()
    expected = {name: total / BATCH for name, total in clipped_sum(rows, MAX_NORM).items()}
    assert_same_gradients(gradients_of(loop.model), expected)
    torch.testing.assert_close([p.grad for p in generator.parameters()], list(truth))


def adversarial_inputs(loop, inputs, targets, steps, eval_mode):
    """Returns inputs moved along the signs of their gradients."""
    moved = inputs
    loop.model.train(not eval_mode)
    for _ in range(steps):
        moved = moved.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.cross_entropy(loop.model(moved), targets, reduction="sum"), moved)
        moved = moved + 0.1 * gradient.sign()
    loop.model.train()
    return moved.detach()


@pytest.mark.parametrize("steps", [1, 3], ids=["FGSM", "PGD"])
def test_an_attack_on_inputs_names_eval_mode_and_is_exact_in_it(steps):
    loop = make_loop()
    inputs, targets = first_batch(loop.loader, least=3)
    with pytest.raises(RepeatedBackwardError, match=r"DPE017.*FGSM or PGD, call model\.eval\(\) before"):
        F.cross_entropy(
            loop.model(adversarial_inputs(loop, inputs, targets, steps, eval_mode=False)), targets
        ).backward()
    loop = make_loop()
    inputs, targets = first_batch(loop.loader, least=3)
    moved = adversarial_inputs(loop, inputs, targets, steps, eval_mode=True)
    expected = expected_gradients(copy.deepcopy(loop.model), [(moved, targets)])
    loop.optimizer.zero_grad()
    F.cross_entropy(loop.model(moved), targets).backward()
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), expected)


def test_samples_that_a_mask_drops_are_rejected_and_exact_if_their_losses_are_masked():
    loop = make_loop()
    inputs, targets = first_batch(loop.loader, least=3)
    keep = torch.arange(len(inputs)) % 3 > 0
    with pytest.raises(BatchMismatchError, match="DPE018"):
        F.cross_entropy(loop.model(inputs[keep]), targets[keep]).backward()
    loop = make_loop()
    inputs, targets = first_batch(loop.loader, least=3)
    expected = expected_gradients(copy.deepcopy(loop.model), [(inputs[keep], targets[keep])])
    loop.optimizer.zero_grad()
    (F.cross_entropy(loop.model(inputs), targets, reduction="none") * keep).mean().backward()
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), expected)


class ScoreDifference(nn.Module):
    """Model of both inputs of a sample, for the loop over samples."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, one, other):
        return scores(self.model, one) - scores(self.model, other)


def scores(model, inputs):
    return model(inputs).sin().sum(1)


def test_two_texts_of_a_preference_are_exact_if_the_model_is_called_once_for_each():
    dataset = TensorDataset(torch.randn(ROWS, FEATURES), torch.randn(ROWS, FEATURES))
    loop = make_loop(dataset=dataset)
    chosen, rejected = first_batch(loop.loader, least=3)
    with pytest.raises(BatchMismatchError, match=r"DPE018.*both texts of a preference, call the model once for each"):
        one, other = scores(loop.model, torch.cat([chosen, rejected])).chunk(2)
        (-F.logsigmoid(one - other)).mean().backward()
    loop = make_loop(dataset=dataset)
    chosen, rejected = first_batch(loop.loader, least=3)
    paired = ScoreDifference(copy.deepcopy(loop.model))
    rows = per_sample_gradients(paired, lambda d, _: -F.logsigmoid(d).mean(), (chosen, rejected), chosen)
    loop.optimizer.zero_grad()
    preference(loop.model, chosen, rejected).mean().backward()
    loop.optimizer.step()
    truth = clipped_sum(rows, MAX_NORM)
    expected = {name.removeprefix("model."): total / BATCH for name, total in truth.items()}
    assert_same_gradients(gradients_of(loop.model), expected)


def preference(model, chosen, rejected):
    return -F.logsigmoid(scores(model, chosen) - scores(model, rejected))


def test_preferences_of_one_user_are_clipped_together():
    users = torch.arange(ROWS) // 3
    dataset = TensorDataset(torch.randn(ROWS, FEATURES), torch.randn(ROWS, FEATURES), users)
    loop = make_loop(dataset=dataset, privacy_unit=users)
    chosen, rejected, user_B = first_batch(loop.loader, least=6)
    plain, rows = copy.deepcopy(loop.model).double(), []
    for user in user_B.unique():
        plain.zero_grad()
        preference(plain, chosen[user_B == user].double(), rejected[user_B == user].double()).mean().backward()
        rows.append({name: p.grad.clone() for name, p in plain.named_parameters()})
    loop.optimizer.zero_grad()
    preference(loop.model, chosen, rejected).mean().backward()
    loop.optimizer.step()
    expected = {name: total / BATCH for name, total in clipped_sum(rows, MAX_NORM).items()}
    assert_same_gradients(gradients_of(loop.model), expected)


def test_preference_pairs_in_two_samples_are_rejected_with_the_advice_to_use_one_example():
    pairs = torch.arange(ROWS) // 2
    loop = make_loop(dataset=TensorDataset(torch.randn(ROWS, FEATURES), pairs), privacy_unit=pairs)
    with pytest.raises(BatchDependentLossError, match=r"DPE010.*pairs.*store both in one example, and call the model"):
        for inputs, _ in loop.loader:
            one, other = scores(loop.model, inputs).view(-1, 2).T
            (-F.logsigmoid(one - other)).mean().backward()
