"""``restrict_to_optimizer``: norms, clipping and noise over only the parameters of the optimizer."""

import copy
import itertools

import inside
import pytest
import spread_runs
import torch
import torch.nn.functional as F
from case_models import Parts
from launch import launched
from loops import BATCH, CLASSES, MAX_NORM, SLACK, assert_same_gradients, examples, gradients_of, make_loop
from reference import clipped_sum, flat_norms, per_sample_gradients
from torch import nn
from torch.utils.data import DataLoader

from dpengine import Adaptive, Groups, PerLayer, PrivacyEngine, PrivacyWarning
from dpengine.checkpoint import load, save
from dpengine.engine import restrict_to_optimizer
from dpengine.errors import (
    BatchStateError,
    InvalidBudgetError,
    MechanismMismatchError,
    MissingGradientError,
    ParameterMismatchError,
    UnknownParameterError,
    UnsupportedLayerError,
)
from dpengine.noise import BandMF
from dpengine.sampling import ExternalBatches

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE003", "ignore:.*DPE012")
FIRST, LAST = ("0.weight", "0.bias"), ("2.weight", "2.bias")


def branches():
    """Returns a body with two heads, of which the forward pass uses one."""
    torch.manual_seed(1)
    run = lambda m, inputs: m.used(torch.tanh(m.body(inputs)))  # noqa: E731
    return Parts(run, body=nn.Linear(4, 5), used=nn.Linear(5, CLASSES), idle=nn.Linear(5, CLASSES))


def holding(*names):
    """Builds an optimizer over the parameters with these names, among those of the model of `loops`."""
    places = [(*FIRST, *LAST).index(name) for name in names]
    return lambda parameters: torch.optim.SGD([parameters[i] for i in places], lr=0.5)


def restricted(names=LAST, **options):
    loop = make_loop(make_optimizer=holding(*names), **options)
    restrict_to_optimizer(loop.engine)
    return loop


def truth(model, batches, names, *, divisor=BATCH, max_norm=MAX_NORM):
    """Returns the clipped sum of the gradients of these parameters, from a loop over samples."""
    plain = copy.deepcopy(model)
    rows = [row for x, y in batches for row in per_sample_gradients(plain, F.cross_entropy, (x,), y)]
    own = [{name: row[name] for name in names} for row in rows]
    return {name: total / divisor for name, total in clipped_sum(own, (1 - SLACK) * max_norm).items()}


def batch_of(loop, *, least=2):
    return next(batch for batch in loop.loader if len(batch[1]) >= least)


def assert_step(loop, names, **options):
    """Asserts that a step has the clipped gradients of a loop over samples, for only these parameters."""
    batch = batch_of(loop)
    expected = truth(loop.model, [batch], names, **options)
    loop.step(*batch)
    assert_same_gradients(gradients_of(loop.model), expected)


# Values


@pytest.mark.parametrize("names", [FIRST, LAST, ("0.bias",), ("0.weight", "2.bias")], ids="+".join)
def test_gradients_are_clipped_by_the_norm_over_the_parameters_of_the_optimizer(names):
    loop = restricted(names)
    for step, batch in enumerate(loop.loader):
        expected = truth(loop.model, [batch], names) if len(batch[1]) else None
        loop.step(*batch)
        if expected is not None:
            assert_same_gradients(gradients_of(loop.model), expected)
        assert set(gradients_of(loop.model)) == set(names)
        assert loop.engine.ledger.steps == step + 1


def test_the_largest_norm_is_that_of_the_subset():
    loop = restricted()
    batch = batch_of(loop)
    rows = per_sample_gradients(copy.deepcopy(loop.model), F.cross_entropy, (batch[0],), batch[1])
    loop.backward(*batch)
    own = flat_norms([{name: row[name] for name in LAST} for row in rows])
    assert inside.state(loop.engine).largest_norm == pytest.approx(float(own.max()), rel=1e-5)
    assert float(own.max()) < float(flat_norms(rows).max())


def test_chunks_of_one_batch_add_up():
    loop = restricted(physical_batch_size=2)
    before = copy.deepcopy(loop.model)
    batches = []
    for batch in loop.loader:
        batches.append(batch)
        loop.backward(*batch)
        loop.optimizer.step()
        if gradients_of(loop.model):
            break
    assert len(batches) > 1
    assert_same_gradients(gradients_of(loop.model), truth(before, batches, LAST))


def test_a_privacy_unit_is_clipped_by_the_norm_over_the_subset():
    units = [i // 3 for i in range(24)]
    loop = restricted(privacy_unit=units, unit_reduction="sum", max_grad_norm=0.5)
    batch = batch_of(loop, least=4)
    before = copy.deepcopy(loop.model)
    loop.step(*batch)
    rows = per_sample_gradients(before, F.cross_entropy, (batch[0],), batch[1])
    data, whose = examples().tensors[0], {}
    for x, row in zip(batch[0], rows, strict=True):
        whose.setdefault(units[int((data == x).all(dim=1).nonzero())], []).append(row)
    summed = [{name: sum(row[name] for row in own) for name in LAST} for own in whose.values()]
    expected = clipped_sum(summed, (1 - SLACK) * 0.5)
    divisor = inside.divisor(loop.engine)
    assert_same_gradients(gradients_of(loop.model), {name: total / divisor for name, total in expected.items()})


def test_noise_covers_only_the_subset_with_the_same_standard_deviation():
    loop, whole = restricted(noise_multiplier=1.0), make_loop(noise_multiplier=1.0)
    assert inside.state(loop.engine).noise_std == inside.state(whole.engine).noise_std
    loop.step(*batch_of(loop))
    assert set(gradients_of(loop.model)) == set(LAST)
    first = loop.model[0].weight.detach().clone()
    for batch in loop.loader:
        loop.step(*batch)
    assert torch.equal(loop.model[0].weight, first)
    assert loop.engine.epsilon > 0


def test_external_batches_may_be_restricted():
    loop = restricted(sampling=ExternalBatches(BATCH, num_examples=24))
    batch = tuple(tensor[:5] for tensor in examples().tensors)
    expected = truth(loop.model, [batch], LAST)
    loop.step(*batch)
    assert_same_gradients(gradients_of(loop.model), expected)


def test_an_optimizer_that_holds_all_parameters_is_not_restricted():
    loop, whole = restricted((*FIRST, *LAST), grad_sample_mode="ghost"), make_loop(grad_sample_mode="ghost")
    batch = batch_of(loop)
    batch_of(whole)
    for one in (loop, whole):
        one.step(*batch)
    found, expected = gradients_of(loop.model), gradients_of(whole.model)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_one_clipping_norm_is_divided_over_the_layers_of_the_subset():
    loop = restricted(clipping=PerLayer(0.5))
    assert_step(loop, LAST, max_norm=0.5)  # one layer, which has the whole clipping norm


def test_each_layer_of_the_subset_has_its_own_threshold():
    names = ("0.weight", "2.bias")
    loop = restricted(names, clipping=PerLayer([0.3, 0.6]))
    batch = batch_of(loop)
    expected = {}
    for name, norm in zip(names, (0.3, 0.6), strict=True):
        expected |= truth(loop.model, [batch], [name], max_norm=norm)
    loop.step(*batch)
    assert_same_gradients(gradients_of(loop.model), expected)


def test_unused_subset_has_zero_gradients():
    model, policy = branches(), Adaptive(1.0)
    engine = PrivacyEngine(seed=0)
    optimizer = torch.optim.SGD(model.idle.parameters(), lr=0.5)
    _, _, loader = engine.make_private(
        model, optimizer, DataLoader(examples(), BATCH), noise_multiplier=1.0, clipping=policy, unused_parameters="zero"
    )
    restrict_to_optimizer(engine)
    inputs, targets = next(batch for batch in loader if len(batch[1]) > 1)
    F.cross_entropy(model(inputs), targets).backward()
    assert inside.state(engine).largest_norm == 0
    assert inside.unclipped_count(engine) == len(targets) / 2
    optimizer.step()
    assert set(gradients_of(model)) == {"idle.weight", "idle.bias"}


# Other parameters


def test_other_parameters_have_no_gradient_and_another_optimizer_leaves_them():
    loop = restricted()
    other = torch.optim.SGD(loop.model[0].parameters(), lr=0.5, weight_decay=0.1)
    before = copy.deepcopy(loop.model[0].state_dict())
    for batch in loop.loader:
        loop.step(*batch)
        assert all(p.grad is None for p in loop.model[0].parameters())
        other.step()
    assert all(torch.equal(before[name], value) for name, value in loop.model[0].state_dict().items())


def test_a_use_outside_its_layer_is_rejected_for_other_parameters_too():
    loop = restricted()
    inputs, targets = batch_of(loop)
    loss = F.cross_entropy(loop.model(inputs), targets) + loop.model[0].weight.square().sum()
    with pytest.raises(MissingGradientError, match=r"'0\.weight'"):
        loss.backward()
    assert loop.model[0].weight.grad is None


def test_mixing_through_other_parameters_is_detected():
    class Mixing(nn.Module):
        """Mixes samples only in the backward pass; the gradients of later layers are independent."""

        def forward(self, inputs):
            return inputs.detach() + inputs.detach().mean().cos() * (inputs - inputs.detach())

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), Mixing(), nn.Tanh(), nn.Linear(5, CLASSES))
    loop = make_loop(model, make_optimizer=lambda parameters: torch.optim.SGD(parameters[-2:], lr=0.5))
    restrict_to_optimizer(loop.engine)
    with pytest.raises(UnsupportedLayerError, match="DPE001"):
        for batch in loop.loader:
            loop.step(*batch)


def test_parameters_unfrozen_later_are_clipped_only_if_the_optimizer_holds_them():
    loop = restricted(("0.bias", *LAST))
    for frozen in (loop.model[0].weight, loop.model[2].weight):
        frozen.requires_grad_(False)
    assert_step(loop, ("0.bias", "2.bias"))
    loop.optimizer.zero_grad()
    loop.model.requires_grad_(True)
    assert_step(loop, ("0.bias", *LAST))


def test_a_parameter_frozen_between_forward_and_backward_is_rejected():
    loop = restricted()
    inputs, targets = batch_of(loop)
    loss = F.cross_entropy(loop.model(inputs), targets)
    loop.model[2].bias.requires_grad_(False)
    with pytest.raises(UnknownParameterError, match=r"'2\.bias'"):
        loss.backward()


def test_a_subset_that_is_frozen_or_replaced_as_a_whole_is_rejected():
    for change in (
        lambda layer: layer.requires_grad_(False),
        lambda layer: [setattr(layer, name, nn.Parameter(p.detach())) for name, p in list(layer.named_parameters())],
    ):
        loop = restricted()
        batch = batch_of(loop)
        change(loop.model[2])
        with pytest.raises(ParameterMismatchError, match="frozen or replaced"):
            loop.backward(*batch)


def test_replaced_parameter_is_rejected():
    loop = restricted()
    loop.model[2].weight = nn.Parameter(torch.zeros(CLASSES, 5))
    with pytest.warns(PrivacyWarning, match="1 parameters were added to the model"):
        loop.step(*batch_of(loop))
    assert set(gradients_of(loop.model)) == {"2.bias"}


def test_a_group_added_later_is_rejected():
    loop = restricted()
    with pytest.raises(UnknownParameterError, match=r"0\.weight"):
        loop.optimizer.add_param_group({"params": loop.model[0].parameters()})


def test_parameter_of_another_model_is_rejected():
    with pytest.raises(ParameterMismatchError, match="not in the model"):
        make_loop(make_optimizer=lambda ps: torch.optim.SGD([ps[0], nn.Parameter(torch.zeros(3))], lr=0.1))


# Rejected arguments


def one_pass(loop):
    F.cross_entropy(loop.model(torch.randn(5, 4)), torch.zeros(5, dtype=torch.long)).backward()


@pytest.mark.parametrize(
    ("begin", "options"),
    [
        (lambda loop: next(iter(loop.loader)), {}),
        (one_pass, {"sampling": ExternalBatches(BATCH, num_examples=24)}),
        (lambda loop: loop.engine.detach(loop.model), {}),
    ],
    ids=["a batch was returned", "a pass was recorded", "detached"],
)
def test_a_run_that_has_begun_or_ended_is_rejected(begin, options):
    loop = make_loop(make_optimizer=holding(*LAST), **options)
    begin(loop)
    with pytest.raises(BatchStateError, match="right after make_private"):
        restrict_to_optimizer(loop.engine)


def test_an_engine_without_a_run_is_rejected():
    with pytest.raises(InvalidBudgetError, match="make_private"):
        restrict_to_optimizer(PrivacyEngine())


UNSUPPORTED = [
    *(({"grad_sample_mode": mode}, UnsupportedLayerError, mode) for mode in ("hooks", "functorch", "ew", "ghost")),
    ({"clipping": PerLayer([0.5, 0.5])}, ValueError, "clipping norms for 1 layers"),
    ({"clipping": Groups({"0": 0.5, "2": 0.5})}, ValueError, r"prefixes \['0'\]"),
]


@pytest.mark.parametrize(("options", "error", "message"), UNSUPPORTED, ids=str)
def test_unsupported_options_are_rejected_and_nothing_is_restricted(options, error, message):
    loop = make_loop(make_optimizer=holding(*LAST), **options)
    with pytest.raises(error, match=message):
        restrict_to_optimizer(loop.engine)
    loop.step(*batch_of(loop))
    assert set(gradients_of(loop.model)) == {*FIRST, *LAST}


def test_an_optimizer_without_a_trainable_parameter_is_rejected():
    loop = make_loop(make_optimizer=holding(*LAST))
    loop.model[2].requires_grad_(False)
    with pytest.raises(ParameterMismatchError, match="No parameter of the optimizer is trainable"):
        restrict_to_optimizer(loop.engine)


def test_several_processes_are_rejected():
    for error in launched(2, spread_runs.restricted):
        assert isinstance(error, UnsupportedLayerError) and "2 processes" in str(error)


def test_warning_suggests_restrict_to_optimizer():
    with pytest.warns(PrivacyWarning, match=r"2 trainable parameters.*restrict_to_optimizer\(engine\)"):
        make_loop(make_optimizer=holding(*LAST))


# The run


def test_plan_and_report_equal_those_of_an_unrestricted_run():
    loop, whole = restricted(noise_multiplier=1.0), make_loop(noise_multiplier=1.0)
    for one in (loop, whole):
        for batch in one.loader:
            one.step(*batch)
    assert loop.engine.describe() == whole.engine.describe()
    assert loop.engine.epsilon == whole.engine.epsilon
    assert str(loop.engine.report()) == str(whole.engine.report())
    shown = [line.split()[0] for line in loop.engine.explain().splitlines()[1:]]
    assert set(shown) == set(LAST)


def test_the_restriction_ends_with_the_run():
    loop = restricted()
    for batch in loop.loader:
        loop.step(*batch)
    loop.engine.detach(loop.model)
    loop.optimizer.zero_grad()
    again = make_loop(loop.model)
    assert_step(again, (*FIRST, *LAST))


def test_a_checkpoint_is_of_a_run_with_the_same_restriction(tmp_path):
    loop = restricted(noise_multiplier=1.0)
    loop.step(*batch_of(loop))
    save(tmp_path / "run", loop.engine)
    whole = make_loop(make_optimizer=holding(*LAST), noise_multiplier=1.0)
    with pytest.raises(MechanismMismatchError, match="another parameters"):
        load(tmp_path / "run", whole.engine)
    again = restricted(noise_multiplier=1.0)
    load(tmp_path / "run", again.engine)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), loop.model.parameters(), strict=True))
    again.step(*batch_of(again))
    assert set(gradients_of(again.model)) == set(LAST)
    with pytest.raises(BatchStateError, match="was resumed"):
        restrict_to_optimizer(again.engine)


def test_correlated_noise_continues_after_a_checkpoint(tmp_path):
    """A seeded resumed run equals the uninterrupted run up to the rounding of sums."""

    def begun():
        return restricted(noise_multiplier=1.0, noise=BandMF(num_bands=2), steps=4)

    def train(loop, steps):
        for _ in range(steps):
            for batch in itertools.islice(loop.loader, 1):
                loop.step(*batch)

    whole, first, second = begun(), begun(), begun()
    train(whole, 4)
    train(first, 2)
    save(tmp_path / "run", first.engine)
    load(tmp_path / "run", second.engine)
    train(second, 2)
    for expected, found in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_a_run_resumed_before_its_first_step_is_rejected(tmp_path):
    save(tmp_path / "run", make_loop(make_optimizer=holding(*LAST)).engine)
    again = make_loop(make_optimizer=holding(*LAST))
    load(tmp_path / "run", again.engine)
    with pytest.raises(BatchStateError, match="was resumed"):
        restrict_to_optimizer(again.engine)
