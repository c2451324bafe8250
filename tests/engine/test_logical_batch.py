"""``logical_batch``: several backward passes over parts of one external batch."""

import pytest
import torch
import torch.nn.functional as F
from loops import assert_same_gradients, expected_gradients, gradients_of, make_loop, mlp, state_of

from dpengine import PrivacyEngine
from dpengine.engine import logical_batch
from dpengine.errors import BatchStateError
from dpengine.sampling import ExternalBatches

EXPECTED = 6


class Loop:
    """Private model with batches that the training loop draws."""

    def __init__(self, noise_multiplier=1.0):
        model, self.engine = mlp(), PrivacyEngine(seed=0)
        sampling = ExternalBatches(EXPECTED, num_examples=60, sample_rate=0.1)
        settings = {"noise_multiplier": noise_multiplier, "target_delta": 1e-3, "max_grad_norm": 1.4}
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        self.model, self.optimizer, _ = self.engine.make_private(model, sgd, [], sampling=sampling, **settings)
        self.generator = torch.Generator().manual_seed(5)

    def backward(self, samples):
        inputs = torch.randn(samples, 4, generator=self.generator)
        targets = torch.randint(3, (samples,), generator=self.generator)
        F.cross_entropy(self.model(inputs), targets).backward()
        return inputs, targets


@pytest.mark.filterwarnings("ignore:.*DPE012")
def test_parts_of_one_batch_are_charged_once_and_add_up():
    loop = Loop(noise_multiplier=0.0)
    for parts in [(4, 1, 0, 2), (3, 3)]:
        loop.optimizer.zero_grad()
        before = mlp()
        before.load_state_dict(state_of(loop.model))
        with logical_batch(loop.engine):
            batches = [loop.backward(samples) for samples in parts]
        loop.optimizer.step()
        assert_same_gradients(gradients_of(loop.model), expected_gradients(before, batches, divisor=EXPECTED))
    assert loop.engine.ledger.steps == 2


@pytest.mark.filterwarnings("ignore:.*DPE006")
def test_only_passes_inside_the_context_are_of_one_batch():
    loop = Loop()
    loop.optimizer.zero_grad()
    with pytest.raises(ZeroDivisionError), logical_batch(loop.engine):
        loop.backward(4)
        loop.backward(2)
        raise ZeroDivisionError
    loop.backward(5)  # merged
    loop.optimizer.step()
    assert loop.engine.ledger.steps == 2
    with logical_batch(loop.engine):
        for _ in range(2):
            loop.optimizer.zero_grad()
            loop.backward(3)
            loop.optimizer.step()
    assert loop.engine.ledger.steps == 4


def test_a_batch_in_parts_begins_with_empty_sums_in_a_run_without_a_loader():
    loop = Loop()
    loop.optimizer.zero_grad()
    with logical_batch(loop.engine), pytest.raises(BatchStateError, match="do not nest it"):
        logical_batch(loop.engine).__enter__()
    loop.backward(4)
    with pytest.raises(BatchStateError, match=r"before optimizer\.step\(\) of the last batch"):
        logical_batch(loop.engine).__enter__()
    with pytest.raises(BatchStateError, match="private loader"):
        logical_batch(make_loop().engine).__enter__()
