"""Execution of one private step: charges and clipped sums are correct for any order of calls."""

import copy
import itertools

import inside
import pytest
import torch
from engine.failing_optimizer import Boom, Fragile
from loops import BATCH, examples, first_batch, gradients_of, make_loop, unchanged

from dpengine.errors import BatchStateError, PrivacyError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE006", "ignore:.*DPE012", "ignore:.*DPE015")


# After a discarded batch, the next sum equals that of a new engine, including the noise


def leave_the_batch(loop, batch, chunks):
    """Does not use the batch, which the test has drawn."""


def restart_the_loader(loop, batch, chunks):
    loop.backward(*batch)
    return iter(loop.loader)


def fail_in_backward(loop, batch, chunks):
    outputs = loop.model(batch[0])
    outputs.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        outputs.sum().backward()


def run_backward_twice(loop, batch, chunks):
    loop.backward(*batch)
    with pytest.raises(PrivacyError, match="DPE017"):
        loop.backward(*batch)


def double_the_samples(loop, batch, chunks):
    with pytest.raises(PrivacyError, match="DPE018"):
        loop.backward(batch[0].repeat(2, 1), batch[1].repeat(2))


def discard_the_batch(loop, batch, chunks):
    loop.backward(*batch)
    loop.optimizer.zero_grad()


def fail_in_the_update(loop, batch, chunks):
    loop.backward(*batch)
    loop.optimizer.fails = True
    with pytest.raises(Boom):
        loop.optimizer.step()
    loop.optimizer.fails = False


def forget_to_clear(loop, batch, chunks):
    loop.backward(*batch)
    loop.optimizer.step()
    with pytest.raises(PrivacyError, match="DPE005"):
        loop.backward(*next(chunks))


def leave_out_a_parameter(loop, batch, chunks):
    hidden = loop.model[0](batch[0])
    hidden.square().mean().backward()
    with pytest.raises(
        PrivacyError, match=r"DPE002|DPE001.*run again"
    ):  # ghost: the forward pass of the model did not run
        loop.optimizer.step()


WAYS_TO_DISCARD = [
    leave_the_batch,
    restart_the_loader,
    fail_in_backward,
    run_backward_twice,
    double_the_samples,
    discard_the_batch,
    fail_in_the_update,
    forget_to_clear,
    leave_out_a_parameter,
]


@pytest.mark.one_in(8, "mode", "spoil", others="slow")
@pytest.mark.one_in(4, "mode", "spoil")
@pytest.mark.parametrize("mode", ["auto", "hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("spoil", WAYS_TO_DISCARD, ids=lambda f: f.__name__)
def test_step_after_a_discarded_batch_equals_that_of_a_fresh_engine(spoil, mode):
    options = {"noise_multiplier": 1.0, "make_optimizer": lambda ps: Fragile(ps, lr=0.5), "grad_sample_mode": mode}
    loop = make_loop(**options)
    chunks = iter(loop.loader)
    chunks = spoil(loop, next(chunks), chunks) or chunks
    position = loop.loader.position
    fresh = make_loop(copy.deepcopy(loop.model), **options)
    fresh.loader.load_state_dict({"position": position})
    loop.step(*next(chunks))
    fresh.step(*first_batch(fresh.loader, least=0))
    found, truth = gradients_of(loop.model), gradients_of(fresh.model)
    for name, grad in truth.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-6, atol=1e-7)
    assert loop.engine.ledger.steps == position + 1
    assert "void" in {charge.kind for charge in loop.engine.ledger.history} or spoil is fail_in_the_update


def test_an_unfinished_batch_discards_the_batches_merged_with_it():
    loop = make_loop(accumulation_steps=2)
    chunks = iter(loop.loader)
    for _ in range(3):  # one complete batch, and half of the next
        loop.backward(*next(chunks))
    chunks = iter(loop.loader)
    first = next(chunks)
    assert loop.charges == [("void", 2)]
    fresh = make_loop(copy.deepcopy(loop.model), accumulation_steps=2)
    fresh.loader.load_state_dict({"position": 2})
    for one, batches in ((loop, itertools.chain([first], chunks)), (fresh, fresh.loader)):
        for _, batch in zip(range(2), batches, strict=False):
            one.step(*batch)
    found, truth = gradients_of(loop.model), gradients_of(fresh.model)
    assert all(torch.equal(found[name], truth[name]) for name in truth)


def test_an_unused_batch_does_not_discard_earlier_ones():
    loop = make_loop(noise_multiplier=1.0)
    chunks = iter(loop.loader)
    loop.backward(*next(chunks))
    next(chunks)
    loop.backward(*next(chunks))
    loop.optimizer.step()
    assert loop.charges == [("void", 1), ("release", 2)]


# One step of the state machine at a time


def test_the_stages_of_an_ordinary_step():
    loop = make_loop(accumulation_steps=2)
    stages = [inside.state(loop.engine).stage]
    for _, batch in zip(range(2), loop.loader, strict=False):
        stages.append(inside.state(loop.engine).stage)
        loop.optimizer.zero_grad()
        loop.backward(*batch)
        stages.append(inside.state(loop.engine).stage)
        loop.optimizer.step()
    stages.append(inside.state(loop.engine).stage)
    loop.optimizer.zero_grad()
    stages.append(inside.state(loop.engine).stage)
    assert stages == ["idle", "open", "open", "open", "clipped", "released", "idle"]


def test_step_is_charged_before_the_update_runs():
    loop = make_loop()
    seen = []
    loop.optimizer.register_step_pre_hook(
        lambda *_: seen.append((inside.state(loop.engine).stage, loop.engine.ledger.steps))
    )
    loop.step(*first_batch(loop.loader))
    assert seen == [("charged", 1)]


@pytest.mark.parametrize("before", [0, 1])
def test_samples_from_outside_the_private_loader_are_rejected(before):
    loop = make_loop(noise_multiplier=1.0)
    for _, batch in zip(range(before), loop.loader, strict=False):
        loop.step(*batch)
    loop.optimizer.zero_grad()
    with unchanged(loop.model):
        with pytest.raises(BatchStateError, match=r"DPE022.*did not come from the private loader"):
            loop.backward(*examples().tensors)
        with pytest.raises(BatchStateError):
            loop.optimizer.step()
    assert loop.engine.ledger.steps == before


def test_step_clears_the_clipped_sums():
    loop = make_loop()
    loop.backward(*first_batch(loop.loader))
    assert not inside.state(loop.engine).zero
    loop.optimizer.step()
    assert inside.state(loop.engine).zero
    assert all(p.grad.any() for p in loop.model.parameters())


def test_gradient_is_divided_by_the_expected_batch_size():
    loop = make_loop(batch_size=BATCH)
    sizes = set()
    for inputs, targets in loop.loader:
        loop.optimizer.zero_grad()
        loop.backward(inputs, targets)
        sums = inside.clipped_sums(loop.engine)
        loop.optimizer.step()
        for name, p in loop.model.named_parameters():
            torch.testing.assert_close(p.grad, sums[name] / BATCH, rtol=1e-6, atol=0)
        sizes.add(len(targets))
    assert len(sizes) > 1
