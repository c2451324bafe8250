"""PrivacyEngine as a whole: what it returns, what it draws, what it adds, what it spends and when it ends."""

import json
import math
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loops import (
    BATCH,
    ROWS,
    assert_same_gradients,
    examples,
    expected_gradients,
    first_batch,
    gradients_of,
    make_loop,
    mlp,
    state_of,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import Adaptive, Automatic, Flat, PerLayer, PrivacyEngine
from dpengine.accounting import Charge, Ledger, Relation, calibration, epsilon_of, release_event
from dpengine.distributed import SINGLE
from dpengine.errors import (
    AccountingRefusedError,
    BudgetExceeded,
    CalibrationError,
    InvalidBudgetError,
    LedgerError,
    MissingGradientError,
    PrivacyWarning,
    TicketError,
    UnknownParameterError,
)
from dpengine.run import Budget

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012", "ignore:.*DPE006")


def train(loop, epochs=1):
    steps = 0
    for _ in range(epochs):
        for batch in loop.loader:
            loop.step(*batch)
            steps += 1
    return steps


def weights_changed(loop, before):
    return any(not torch.equal(before[name], value) for name, value in state_of(loop.model).items())


# V2 and V3


@pytest.mark.parametrize("options", [{"noise_multiplier": 1.0, "target_epsilon": 3.0, "epochs": 1}, {}])
def test_v2_either_the_noise_or_the_target_is_given(options):
    model = mlp()
    with pytest.raises(InvalidBudgetError, match=r"Exactly one of noise_multiplier and target_epsilon"):
        PrivacyEngine().make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(examples(), 6), **options
        )


class OwnLoader(DataLoader):
    pass


def test_v3_the_loader_keeps_what_the_user_set():
    model = mlp()
    collate = lambda rows: tuple(torch.stack(column) for column in zip(*rows, strict=True))  # noqa: E731
    mine = OwnLoader(
        examples(),
        batch_size=7,
        shuffle=True,
        collate_fn=collate,
        num_workers=1,
        worker_init_fn=print,
        generator=torch.Generator(),
        timeout=60,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = PrivacyEngine().make_private(model, optimizer, mine, noise_multiplier=1.0, physical_batch_size=2)
    assert loader is not mine
    assert isinstance(loader, OwnLoader)
    for name in ("dataset", "num_workers", "pin_memory", "worker_init_fn", "generator", "timeout"):
        assert getattr(loader, name) is getattr(mine, name), name
    assert loader.collate_fn([mine.dataset[0]])[0].shape == collate([mine.dataset[0]])[0].shape
    assert len(loader) == math.ceil(ROWS / 7)  # logical steps, in however many chunks


# V4: the budget


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_v4_stop_ends_the_loader_before_the_target_is_passed(accountant):
    loop = make_loop(engine=PrivacyEngine(accountant, seed=0), target_epsilon=2.0, epochs=2, target_delta=1e-3)
    steps = train(loop, epochs=4)
    assert steps >= 2 * len(loop.loader)
    assert 1.9 < loop.engine.epsilon <= 2.0
    one_more = [*loop.engine.ledger.history, Charge(loop.release.plan.event(), 1)]
    assert epsilon_of(one_more, 1e-3, accountant=accountant) > 2.0
    assert list(loop.loader) == []
    before = state_of(loop.model)
    for _ in range(2):
        with pytest.raises(BudgetExceeded, match=rf"DPE011.*Step {steps + 1} would reach epsilon 2\.\d+"):
            loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert not weights_changed(loop, before)


def test_v4_raise_refuses_the_step_that_overspends_and_charges_nothing():
    loop = make_loop(target_epsilon=2.0, steps=3, target_delta=1e-3, on_budget="raise")
    with pytest.raises(BudgetExceeded, match="DPE011"):
        train(loop, epochs=2)
    assert loop.engine.ledger.steps == 3
    assert loop.engine.epsilon <= 2.0
    assert not any(flat.any() for flat in loop.release.sums.buffer.flats.values())


def test_v4_warn_goes_on_and_says_so_once():
    loop = make_loop(target_epsilon=2.0, steps=3, target_delta=1e-3, on_budget="warn")
    with pytest.warns(PrivacyWarning, match="DPE011") as seen:
        assert train(loop, epochs=2) == 8
    assert len(seen) == 1
    assert loop.engine.epsilon > 2.0


def test_v4_batches_that_were_given_up_count():
    loop = make_loop(target_epsilon=2.0, steps=4, target_delta=1e-3)
    handed_out = sum(1 for _ in range(9) for _ in zip(range(1), loop.loader, strict=False))  # draws and breaks off
    assert handed_out == 4
    assert [(charge.kind, charge.count) for charge in loop.engine.ledger.history] == [("void", 3)]
    loop.engine.detach(loop.model)
    assert loop.engine.ledger.steps == 4
    assert loop.engine.epsilon <= 2.0


@pytest.mark.parametrize("on_budget", ["stop", "raise"])
def test_v4_undeclared_accumulation_never_passes_the_target(on_budget):
    loop = make_loop(target_epsilon=2.0, steps=8, target_delta=1e-3, on_budget=on_budget)
    try:
        for _ in range(4):
            loop.optimizer.zero_grad()
            for position, batch in enumerate(loop.loader):
                loop.backward(*batch)
                if position % 2:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
                    assert loop.engine.epsilon <= 2.0
    except BudgetExceeded:
        assert on_budget == "raise"
    assert 2 <= loop.engine.ledger.steps < 8  # each costs more than what the noise was found for


def test_v4_what_was_spent_before_counts():
    first = make_loop(target_epsilon=2.0, steps=4, target_delta=1e-3)
    train(first)
    state = json.loads(json.dumps(first.engine.state_dict()))
    engine = PrivacyEngine(seed=1)
    engine.load_state_dict(state)
    resumed = make_loop(engine=engine, target_epsilon=2.0, steps=8, target_delta=1e-3)
    assert engine.epsilon == first.engine.epsilon
    train(resumed, epochs=3)
    assert engine.epsilon <= 2.0
    straight = make_loop(target_epsilon=2.0, steps=8, target_delta=1e-3)
    train(straight, epochs=3)
    assert engine.ledger.steps < 4 + straight.engine.ledger.steps


def test_v4_a_second_run_shares_the_target_with_the_first():
    engine = PrivacyEngine(seed=1)
    first = make_loop(engine=engine, target_epsilon=1.0, steps=4, target_delta=1e-3)
    train(first)
    engine.detach(first.model)
    second = make_loop(engine=engine, target_epsilon=2.0, steps=4, target_delta=1e-3)
    train(second)
    assert engine.ledger.steps == 8
    assert 1.99 < engine.epsilon <= 2.0
    with pytest.raises(CalibrationError, match=r"DPE008.*with what was spent before"):
        make_loop(engine=engine, target_epsilon=0.99 * engine.epsilon, steps=4, target_delta=1e-3)


def test_v4_a_resumed_run_gets_the_steps_that_are_left():
    straight = make_loop(target_epsilon=2.0, steps=8, target_delta=1e-3)
    train(straight)
    state = straight.engine.state_dict()  # half way
    train(straight)
    engine = PrivacyEngine(seed=1)
    engine.load_state_dict(state)
    resumed = make_loop(engine=engine, target_epsilon=2.0, steps=8, target_delta=1e-3)
    train(resumed, epochs=3)
    assert engine.ledger.history == straight.engine.ledger.history or engine.ledger.steps == 8
    assert engine.epsilon <= 2.0


def test_v4_the_budget_agrees_with_the_accountant_on_any_history():
    loop = make_loop(noise_multiplier=1.5)
    choose = random.Random(0)
    for _ in range(40):
        target = choose.choice([0.5, 1.0, 2.0, 4.0])
        budget = Budget(target, 1e-3, None, "raise", "rdp")
        loop.release.ledger = ledger = Ledger()
        for _ in range(choose.randrange(12)):
            count = choose.choice([1, 1, 1, 2, 3])
            event = loop.release.plan.event(count)
            after = Ledger()
            after.load_state_dict(ledger.state_dict())
            after.charge(event, count=count)
            spent = epsilon_of(after.history, 1e-3, accountant="rdp", relation=Relation.ZERO_OUT)
            reached = budget.overspend(loop.release, count)
            assert (reached is None) == (spent <= target)
            assert reached is None or reached == spent
            if reached is None:
                ledger.charge(event, count=count, kind=choose.choice(["release", "void"]))


def test_v4_without_a_target_nothing_ends():
    loop = make_loop(noise_multiplier=0.3)
    assert train(loop, epochs=3) == 12
    loop.optimizer.zero_grad()
    with pytest.raises(TicketError):
        loop.optimizer.step()


# What is spent


def test_epsilon_is_zero_before_the_first_step_and_grows_with_each():
    loop = make_loop(noise_multiplier=1.0)
    assert loop.engine.get_epsilon(1e-5) == loop.engine.epsilon == 0.0
    seen = [0.0]
    for batch in loop.loader:
        loop.step(*batch)
        seen.append(loop.engine.epsilon)
    assert seen == sorted(set(seen))
    direct = (Charge(release_event(noise_multiplier=1.0, sample_rate=BATCH / ROWS), 4),)
    assert seen[-1] == pytest.approx(epsilon_of(direct, ROWS**-1.1))
    assert loop.engine.spent.steps == 4
    assert loop.engine.metrics()["privacy/epsilon"] == seen[-1]
    assert "nonprivate" not in str(loop.engine.metrics())


def test_the_charged_rate_is_not_below_the_drawn_one():
    loop = make_loop(noise_multiplier=1.0, sample_rate=2.0**-40)
    assert loop.release.plan.event().sample_rate == 2.0**-40 + 2.0**-60


def test_noise_is_found_for_the_rate_that_is_charged(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "dpengine.admission.calibration", lambda **given: asked.append(given["sample_rate"]) or calibration(**given)
    )
    loop = make_loop(target_epsilon=3.0, steps=4, sample_rate=0.1)
    assert asked == [loop.release.plan.event().sample_rate]
    assert asked[0] > 0.1


def test_without_noise_epsilon_is_infinite_and_it_is_said():
    with pytest.warns(PrivacyWarning, match=r"DPE012.*NOT PRIVATE"):
        loop = make_loop(noise_multiplier=0)
    train(loop)
    assert loop.engine.epsilon == math.inf


def test_for_shuffled_batches_no_epsilon_is_claimed():
    with pytest.warns(PrivacyWarning, match=r"DPE012.*epsilon not claimed"):
        loop = make_loop(sampling="shuffle", noise_multiplier=1.0)
    assert sorted(len(targets) for _, targets in loop.loader) == [6, 6, 6, 6]
    train(loop)
    with pytest.raises(AccountingRefusedError, match="shuffle"):
        loop.engine.get_epsilon(1e-3)
    assert "privacy/epsilon" not in loop.engine.metrics()


def test_metrics_need_no_epsilon_where_a_target_is_set():
    unclaimed = make_loop(sampling="shuffle", noise_multiplier=1.0)
    train(unclaimed)
    loop = make_loop(target_epsilon=3.0, steps=4)
    assert loop.engine.metrics()["privacy/budget_used"] == 0
    loop.engine.load_state_dict(unclaimed.engine.state_dict())
    found = loop.engine.metrics()
    assert found["privacy/step"] == 4
    assert not {"privacy/epsilon", "privacy/budget_used"} & set(found)


def test_the_relation_is_add_or_remove_only_where_all_constants_are_given():
    constants = {"sample_rate": 0.25, "expected_batch_size": 6.0, "target_delta": 1e-3}
    for left_out in (None, *constants):
        options = {name: value for name, value in constants.items() if name != left_out}
        relation = make_loop(noise_multiplier=1.0, **options).release.plan.relation
        assert relation is (Relation.ZERO_OUT if left_out else Relation.ADD_OR_REMOVE_ONE)


def test_the_state_is_plain_json_and_loads_on_top():
    one, two = make_loop(noise_multiplier=1.0), make_loop(noise_multiplier=2.0)
    train(one)
    train(two)
    two.engine.load_state_dict(json.loads(json.dumps(one.engine.state_dict())))
    assert two.engine.ledger.steps == 8
    both = [*one.engine.ledger.history, Charge(release_event(noise_multiplier=2.0, sample_rate=0.25), 4)]
    assert two.engine.get_epsilon(1e-3) == pytest.approx(epsilon_of(both, 1e-3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: None, "NoneType"),
        (lambda state: {}, "no 'ledger'"),
        (lambda state: {"ledger": state["ledger"]}, "no 'delta'"),
        (lambda state: state | {"ledger": None}, "NoneType as its 'ledger'"),
        (lambda state: state | {"ledger": {}}, "schema None"),
        *[(lambda state, delta=delta: state | {"delta": delta}, "delta=") for delta in (7.0, 0.0, "1e-5", math.nan)],
    ],
)
def test_a_state_that_is_damaged_is_refused_and_changes_nothing(change, says):
    stored = make_loop(noise_multiplier=1.0)
    train(stored)
    engine = PrivacyEngine()
    with pytest.raises(LedgerError, match=f"DPE021.*{says}"):
        engine.load_state_dict(change(stored.engine.state_dict()))
    assert engine.ledger.history == ()
    engine.load_state_dict(stored.engine.state_dict())
    assert engine.epsilon == stored.engine.epsilon


@pytest.mark.parametrize("seed", ["x", True, 1.5])
def test_a_seed_that_is_no_integer_is_refused_at_once(seed):
    with pytest.raises(TypeError, match=f"seed must be an int, got {type(seed).__name__}"):
        PrivacyEngine(seed=seed)
    assert PrivacyEngine(seed=-3)._source(SINGLE).insecure_seed


def test_an_engine_without_a_run_says_what_to_call():
    engine = PrivacyEngine()
    for ask in (lambda: engine.epsilon, engine.metrics, engine.describe, lambda: engine.backward(torch.ones(2))):
        with pytest.raises(InvalidBudgetError, match="make_private"):
            ask()


# What is added


def noise_of(steps=4, **options):
    """Released noise in units of what the sum got, from steps on which no row has a gradient."""
    model = nn.Linear(60, 50)
    dataset = TensorDataset(torch.zeros(ROWS, 60), torch.zeros(ROWS, dtype=torch.long))
    if "clipping" not in options:
        options.setdefault("max_grad_norm", 1.0)
    loop = make_loop(model, dataset=dataset, **{"noise_multiplier": 2.0, **options})
    found = []
    batches = (batch for _ in range(steps) for batch in loop.loader)
    for _, (inputs, _) in zip(range(steps), batches, strict=False):
        loop.optimizer.zero_grad()
        (model(inputs) * 0).sum().backward()
        loop.optimizer.step()
        found.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
    return torch.stack(found)


# 4 steps of 3,050 draws: the standard deviation is known to 0.64 % (one sigma); five are allowed
@pytest.mark.parametrize(
    ("options", "std"),
    [
        ({"max_grad_norm": 0.5}, 2.0 * 0.5 / BATCH),
        ({"max_grad_norm": 0.5, "loss_reduction": "sum"}, 2.0 * 0.5),
        ({"expected_batch_size": 12.0}, 2.0 / 12),
        ({"clipping": PerLayer([0.3])}, 2.0 * 0.3 / BATCH),
        ({"clipping": Automatic(0.5)}, 2.0 * 0.5 / BATCH),
        ({"clipping": Flat(0.25)}, 2.0 * 0.25 / BATCH),
        ({"accumulation_steps": 1, "physical_batch_size": 50}, 2.0 / BATCH),
        ({"grad_sample_mode": "ghost"}, 2.0 / BATCH),
    ],
    ids=str,
)
def test_noise_has_the_standard_deviation_that_is_charged(options, std):
    noise = noise_of(**options)
    assert float(noise.std()) == pytest.approx(std, rel=0.032)
    assert abs(float(noise.mean())) < 5 * std / math.sqrt(noise.numel())
    for first, second in ((0, 1), (0, 3), (2, 3)):
        assert abs(float(torch.corrcoef(noise[[first, second]])[0, 1])) < 5 / math.sqrt(noise.shape[1])


def test_adaptive_clipping_leaves_room_for_its_count():
    noise = noise_of(steps=1, clipping=Adaptive(0.5, count_noise_multiplier=1.5))
    expected = 0.5 * (2.0**-2 - 3.0**-2) ** -0.5 / BATCH
    assert float(noise.std()) == pytest.approx(expected, rel=0.065)


def test_every_parameter_gets_noise_of_its_own():
    noise = noise_of(steps=1)[0]
    assert len(noise.unique()) == len(noise)


def test_parameters_of_two_dtypes_share_no_noise():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow, self.wide = nn.Linear(4, 50), nn.Linear(4, 50).double()

        def forward(self, inputs):
            return self.narrow(inputs).double() + self.wide(inputs.double())

    loop = make_loop(Mixed(), noise_multiplier=1.0)
    loop.optimizer.zero_grad()
    (loop.model(first_batch(loop.loader)[0]) * 0).sum().backward()
    loop.optimizer.step()
    narrow, wide = loop.model.narrow.weight.grad.double().flatten(), loop.model.wide.weight.grad.flatten()
    assert abs(float(torch.corrcoef(torch.stack([narrow, wide]))[0, 1])) < 5 / math.sqrt(len(wide))


@pytest.mark.parametrize("secure", [True, False])
def test_without_a_seed_no_two_runs_share_noise_or_batches(secure):
    def run():
        loop = make_loop(engine=PrivacyEngine(secure_rng=secure), noise_multiplier=1.0)
        batches = [inputs for inputs, _ in loop.loader]
        loop.step(*first_batch(loop.loader))
        return batches, gradients_of(loop.model)["0.weight"]

    torch.manual_seed(0)
    batches, noise = run()
    torch.manual_seed(0)
    others, other = run()
    assert not torch.isclose(noise, other).all()
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(batches, others, strict=True))


def test_a_seed_repeats_the_run_and_is_stamped():
    one, two = (make_loop(noise_multiplier=1.0, seed=3) for _ in range(2))
    train(one)
    train(two)
    assert all(torch.equal(state_of(one.model)[name], value) for name, value in state_of(two.model).items())
    assert "INSECURE_SEED" in repr(one.optimizer)
    again = make_loop(engine=one.engine, noise_multiplier=1.0)  # another run of the engine is another stream
    train(again)
    assert not torch.equal(state_of(again.model)["0.weight"], state_of(two.model)["0.weight"])


def test_neither_noise_nor_masks_touch_the_global_generators():
    loop = make_loop(noise_multiplier=1.0)
    batches = iter(loop.loader)
    loop.step(*next(batches))  # here torch's own loader draws a seed for its workers
    before = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()
    for batch in batches:
        loop.step(*batch)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (repr(np.random.get_state()), random.getstate()) == before[1:]


# What is drawn


def test_large_batches_do_not_repeat_their_random_words():
    rows = 2**20
    model = nn.Linear(1, 1)
    loader = DataLoader(range(rows), batch_size=rows // 2)  # more words than one request gives
    _, _, private = PrivacyEngine(seed=0).make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader, noise_multiplier=1.0
    )
    gaps = np.diff(next(iter(private.batch_sampler)))
    windows = np.lib.stride_tricks.sliding_window_view(gaps, 64)
    keys = windows @ np.random.default_rng(0).integers(1, 2**40, 64)
    assert len(np.unique(keys)) == len(keys)


def test_a_loader_that_is_set_back_cannot_have_its_noise_twice():
    loop = make_loop(noise_multiplier=1.0)
    train(loop)
    loop.loader.load_state_dict({"position": 1})
    with pytest.raises(TicketError, match=r"DPE022.*Step 1 was handed out before.*make_private again"):
        next(iter(loop.loader))
    loop.loader.load_state_dict({"position": 9})  # forward is fine
    train(loop)


# Policies and parameters


@pytest.mark.parametrize(
    "policy", [Flat(0.2), Automatic(0.2), PerLayer(0.2), Adaptive(0.2)], ids=lambda p: type(p).__name__
)
def test_a_policy_needs_no_threshold_beside_it(policy):
    loop = make_loop(clipping=policy, noise_multiplier=1.0)
    assert loop.release.plan.clipping.max_grad_norm == pytest.approx(0.2)
    train(loop)


def test_layers_have_thresholds_of_their_own():
    loop = make_loop(clipping="per_layer", max_grad_norm=[0.3, 0.1])
    inputs, targets = first_batch(loop.loader)
    rows = [
        expected_gradients(loop.model, [(x[None], y[None])], max_norm=1e9, divisor=1)
        for x, y in zip(inputs, targets, strict=True)
    ]
    expected = {}
    for row in rows:
        for layer, bound in (("0", 0.3), ("2", 0.1)):
            names = [f"{layer}.weight", f"{layer}.bias"]
            norm = math.hypot(*(float(row[name].norm()) for name in names))
            for name in names:
                expected[name] = expected.get(name, 0) + row[name] * min(1, (1 - 2**-20) * bound / norm) / BATCH
    loop.step(inputs, targets)
    assert_same_gradients(gradients_of(loop.model), {name: expected[name] for name in gradients_of(loop.model)})


def test_parameters_may_be_frozen_and_thawed_between_steps():
    loop = make_loop(batch_size=1, noise_multiplier=1.0, unused_parameters="zero")
    frozen_when = {0: False, 1: True}
    for position, (inputs, targets) in enumerate(loop.loader):
        thawed = frozen_when[position // 3 % 2]
        loop.model[0].requires_grad_(not thawed)
        before = state_of(loop.model)
        loop.step(inputs, targets)
        changed = {name: not torch.equal(before[name], value) for name, value in state_of(loop.model).items()}
        assert changed == {"0.weight": not thawed, "0.bias": not thawed, "2.weight": True, "2.bias": True}


def test_an_empty_batch_gives_noise_to_a_thawed_parameter_too():
    model = mlp()
    loop = make_loop(
        model, batch_size=1, noise_multiplier=1.0, make_optimizer=lambda _: torch.optim.SGD(model.parameters(), 0.1)
    )
    model[0].requires_grad_(False)
    train_one = (batch for batch in loop.loader)
    loop.step(*next(train_one))
    model[0].requires_grad_(True)
    empty = next(batch for batch in fresh(train_one, loop) if len(batch[1]) == 0)
    before = state_of(model)
    loop.optimizer.zero_grad()
    assert len(empty[1]) == 0
    loop.optimizer.step()
    assert not any(torch.equal(before[name], value) for name, value in state_of(model).items())


def fresh(batches, loop):
    """Batches, each stepped unless it is empty."""
    for batch in batches:
        yield batch
        loop.model[0].requires_grad_(False)
        loop.step(*batch)
        loop.model[0].requires_grad_(True)


def test_parameters_may_not_change_within_a_step():
    loop = make_loop(accumulation_steps=2, noise_multiplier=1.0, batch_size=12)
    chunks = iter(loop.loader)
    loop.backward(*next(chunks))
    loop.model[0].weight.requires_grad_(False)
    with pytest.raises(UnknownParameterError, match=r"DPE016.*'0\.weight'.*before the next batch"):
        loop.backward(*next(chunks))
    assert [charge.kind for charge in loop.engine.ledger.history] == ["void"]
    loop.step(*next(chunks))
    loop.step(*next(chunks))  # with the new set from the start
    assert [charge.kind for charge in loop.engine.ledger.history] == ["void", "release"]


def test_a_parameter_that_took_no_part_may_get_noise_alone():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, inputs):
            return self.used(inputs)

    loop = make_loop(Spare(), unused_parameters="zero", noise_multiplier=1.0)
    train(loop)
    quiet = make_loop(Spare(), unused_parameters="zero")
    before = state_of(quiet.model.spare)
    train(quiet)
    assert all(torch.equal(before[name], value) for name, value in state_of(quiet.model.spare).items())
    assert loop.model.spare.weight.grad.std() > 0.5 / BATCH


def test_a_parameter_is_missed_in_every_step_anew():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.both = nn.Linear(4, 3), nn.Linear(4, 3), True

        def forward(self, inputs):
            return self.left(inputs) + (self.right(inputs) if self.both else 0)

    loop = make_loop(Branches(), noise_multiplier=1.0)
    batches = iter(loop.loader)
    loop.step(*next(batches))
    loop.model.both = False
    with pytest.raises(
        MissingGradientError, match=r"DPE002.*'right\.weight' took no part in this step \(nor did 1 others"
    ):
        loop.step(*next(batches))


def test_two_models_train_side_by_side():
    dataset = examples()
    one = make_loop(dataset=dataset, noise_multiplier=1.0)
    two = make_loop(dataset=dataset, noise_multiplier=2.0, engine=one.engine)
    for first, second in zip(one.loader, two.loader, strict=True):
        two.optimizer.zero_grad()
        one.optimizer.zero_grad()
        one.backward(*first)
        two.backward(*second)
        two.optimizer.step()
        one.optimizer.step()
    one.engine.detach(two.model)
    train(one)
    assert one.engine.ledger.steps == 12
    assert {charge.kind for charge in one.engine.ledger.history} == {"release"}


def test_after_detach_the_private_loader_hands_out_and_charges_nothing():
    loop = make_loop(noise_multiplier=1.0)
    batches = iter(loop.loader)
    loop.step(*next(batches))
    outputs = loop.model(first := torch.ones(2, 4))
    loop.engine.detach(loop.model)
    with pytest.raises(TicketError, match=r"before the model was detached"):
        F.cross_entropy(outputs, torch.tensor([0, 1])).backward()
    assert len(list(batches)) == 3
    assert loop.engine.ledger.steps == 1
    F.cross_entropy(loop.model(first), torch.tensor([0, 1])).backward()
    assert all(p.grad is not None for p in loop.model.parameters())


def test_detach_in_the_middle_of_a_batch_charges_it():
    loop = make_loop(noise_multiplier=1.0)
    loop.backward(*first_batch(loop.loader))
    loop.engine.detach(loop.model)
    assert [(charge.kind, charge.count) for charge in loop.engine.ledger.history] == [("void", 1)]


def test_a_normal_run_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(make_loop(noise_multiplier=1.0))
