"""``make_private`` with external batches: charges, budget, declared sampling, and rejected arguments."""

import inside
import pytest
import torch
import torch.nn.functional as F
from inside_parts import accounted_rate
from loops import assert_same_gradients, examples, expected_gradients, gradients_of, mlp, state_of, unchanged
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from dpengine import PrivacyEngine, PrivacyWarning
from dpengine.accounting import PoissonGaussianEvent, Relation, UnclaimedEvent
from dpengine.checkpoint import save
from dpengine.engine import fetch_ahead
from dpengine.errors import (
    AccountingRefusedError,
    BatchStateError,
    BudgetExceeded,
    InvalidBudgetError,
    SamplingError,
    StaleGradientError,
)
from dpengine.noise import BLT, BandMF
from dpengine.report import PrivacyReport
from dpengine.sampling import ExternalBatches

EXAMPLES, RATE, EXPECTED = 60, 0.1, 6
STATED = ExternalBatches(EXPECTED, num_examples=EXAMPLES, sample_rate=RATE)
SIZES = [5, 8, 0, 6]


class Loop:
    """Private model with batches that the training loop draws."""

    def __init__(self, sampling=STATED, *, engine=None, data=None, **options):
        if "target_epsilon" not in options:
            options.setdefault("noise_multiplier", 1.0)
        options = {"target_delta": 1e-3, "max_grad_norm": 1.4} | options
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        self.engine = engine or PrivacyEngine(seed=0)
        self.data = [] if data is None else data
        self.model, self.optimizer, self.loader = self.engine.make_private(
            model, optimizer, self.data, sampling=sampling, **options
        )
        self.generator = torch.Generator().manual_seed(5)

    def batch(self, samples):
        inputs = torch.randn(samples, 4, generator=self.generator)
        return inputs, torch.randint(3, (samples,), generator=self.generator)

    def backward(self, samples):
        batch = self.batch(samples)
        F.cross_entropy(self.model(batch[0]), batch[1]).backward()
        return batch

    def step(self, samples):
        self.optimizer.zero_grad()
        self.backward(samples)
        self.optimizer.step()


def charges(loop):
    return [(charge.kind, charge.count) for charge in loop.engine.ledger.history]


# Charges and values


def test_each_step_is_charged_once_and_the_loader_is_returned_as_it_is():
    loop = Loop(data=[1, 2])
    assert loop.loader is loop.data
    for steps, size in enumerate(SIZES, start=1):
        loop.step(size)
        assert charges(loop) == [("release", steps)]
    assert loop.engine.ledger.history[0].event == PoissonGaussianEvent(accounted_rate(RATE), 1.0)


@pytest.mark.parametrize("sampling", [STATED, ExternalBatches(EXPECTED)], ids=["stated", "not stated"])
@pytest.mark.filterwarnings("ignore:.*DPE012")
def test_the_gradient_is_the_clipped_sum_over_the_expected_batch_size(sampling):
    loop = Loop(sampling, noise_multiplier=0.0)
    for size in SIZES:
        loop.optimizer.zero_grad()
        before = mlp()
        before.load_state_dict(state_of(loop.model))
        batch = loop.backward(size)
        loop.optimizer.step()
        assert_same_gradients(gradients_of(loop.model), expected_gradients(before, [batch], divisor=EXPECTED))


@pytest.mark.filterwarnings("ignore:.*DPE006")
def test_passes_that_are_merged_into_a_step_are_charged_each():
    loop = Loop()
    loop.optimizer.zero_grad()
    for size in (4, 5, 6):
        loop.backward(size)
    loop.optimizer.step()
    assert charges(loop) == [("release", 3)]
    event = loop.engine.ledger.history[0].event
    assert event.sample_rate == accounted_rate(RATE)
    assert event.noise_multiplier == pytest.approx(3**-0.5)
    once = Loop()
    once.step(15)
    assert loop.engine.epsilon > once.engine.epsilon


def test_a_batch_without_a_step_is_charged_as_discarded():
    loop = Loop()
    loop.optimizer.zero_grad()
    loop.backward(4)
    loop.optimizer.zero_grad()
    assert charges(loop) == [("void", 1)]
    loop.backward(4)
    loop.engine.detach(loop.model)
    assert charges(loop) == [("void", 2)]


@pytest.mark.filterwarnings("ignore:.*DPE006")
def test_two_engines_on_one_data_set_warn_before_the_second_step():
    data = TensorDataset(torch.randn(EXAMPLES, 4))
    loops = [Loop(data=data), Loop(data=data)]
    loops[0].step(5)
    with pytest.warns(PrivacyWarning, match="Another engine trained on the same data set"):
        loops[1].step(5)


def test_noise_addresses_are_never_reused():
    loop = Loop()
    with inside.drawn_noise(loop.engine) as drawn:
        loop.step(4)
        loop.optimizer.zero_grad()
        loop.backward(4)
        loop.optimizer.zero_grad()  # discarded
        loop.step(0)
        loop.optimizer.zero_grad()
        loop.backward(3)
        loop.backward(5)
        loop.optimizer.step()
        loop.step(4)
    places = [(domain, step, start) for domain, step, start, _ in drawn]
    assert len(set(places)) == len(places)
    assert len({step for _, step, _ in places}) == 4
    noise = []
    for _ in range(2):
        loop.step(0)  # only noise
        noise.append(gradients_of(loop.model)["0.weight"])
    assert not torch.equal(*noise)


# The declared sampling rate


@pytest.mark.slow
def test_declared_rate_costs_as_much_as_poisson_sampling_at_that_rate():
    loop = Loop()
    engine, model = PrivacyEngine(seed=0), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plain = DataLoader(examples(EXAMPLES), batch_size=EXPECTED)
    model, optimizer, plain = engine.make_private(model, optimizer, plain, noise_multiplier=1.0, target_delta=1e-3)
    for inputs, targets in plain:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        loop.step(len(inputs))
        assert loop.engine.epsilon == engine.epsilon > 0
    assert loop.engine.ledger.history == engine.ledger.history
    assert loop.engine.report().to_dict()["guarantee"] == engine.report().to_dict()["guarantee"]


@pytest.mark.slow
def test_report_marks_the_rate_as_declared_also_after_loading(tmp_path):
    loop = Loop()
    loop.step(5)
    report = loop.engine.report()
    text = " ".join(str(report).split())
    assert report.to_dict()["guarantee"]["epsilon"] == loop.engine.epsilon
    assert "the rate 0.1 was declared by the user; dpengine drew no batch" in text
    report.save(tmp_path)
    loaded = PrivacyReport.load(tmp_path)
    assert (str(loaded), loaded.to_json()) == (str(report), report.to_json())


def test_without_a_rate_no_epsilon_is_claimed(tmp_path):
    with pytest.warns(PrivacyWarning, match=r"DPE012.*epsilon not claimed \(sampling='external'\)"):
        loop = Loop(ExternalBatches(EXPECTED))
    loop.step(5)
    assert isinstance(loop.engine.ledger.history[0].event, UnclaimedEvent)
    with pytest.raises(AccountingRefusedError, match="sampling='external'"):
        _ = loop.engine.epsilon
    assert "privacy/epsilon" not in loop.engine.metrics()
    report = loop.engine.report()
    assert report.to_dict()["guarantee"]["epsilon"] is None
    assert str(report).startswith(
        "ε not claimed: the training loop drew the batches, and no sampling rate was declared"
    )
    report.save(tmp_path)
    assert str(PrivacyReport.load(tmp_path)) == str(report)


def test_run_without_a_rate_leaves_later_runs_without_epsilon():
    engine = PrivacyEngine(seed=0)
    with pytest.warns(PrivacyWarning, match="not claimed"):
        Loop(ExternalBatches(EXPECTED), engine=engine).step(4)
    later = Loop(engine=engine)
    later.step(4)
    assert str(engine.report()).startswith("ε not claimed")
    assert "drawn by external, in an earlier run" in " ".join(str(engine.report()).split())


def test_the_constants_do_not_count_as_declared():
    assert Loop().engine.report().facts.accounting.relation is Relation.ZERO_OUT


# The budget


@pytest.mark.parametrize("on_budget", ["stop", "raise"])
def test_over_budget_the_step_raises_and_nothing_is_charged_or_changed(on_budget):
    loop = Loop(target_epsilon=2.0, steps=3, on_budget=on_budget)
    for _ in range(3):
        loop.step(5)
    spent = loop.engine.epsilon
    assert 1.9 < spent <= 2.0
    with unchanged(loop.model):
        for _ in range(2):
            with pytest.raises(BudgetExceeded, match=r"DPE011.*Step 4 would reach epsilon 2\.\d+, above the target"):
                loop.step(5)
            assert inside.state(loop.engine).zero
            assert (charges(loop), loop.engine.epsilon) == ([("release", 3)], spent)
    assert not gradients_of(loop.model)


@pytest.mark.filterwarnings("ignore:.*DPE006")
def test_merged_passes_are_over_budget_together():
    loop = Loop(target_epsilon=2.0, steps=3)
    loop.step(5)
    loop.optimizer.zero_grad()
    for _ in range(3):
        loop.backward(5)
    with pytest.raises(BudgetExceeded, match="DPE011"):
        loop.optimizer.step()
    assert charges(loop) == [("release", 1)]


def test_with_warn_training_continues_and_is_charged():
    loop = Loop(target_epsilon=2.0, steps=2, on_budget="warn")
    with pytest.warns(PrivacyWarning, match="DPE011|epsilon"):
        for _ in range(4):
            loop.step(5)
    assert charges(loop) == [("release", 4)]
    assert loop.engine.epsilon > 2.0


def test_epochs_are_counted_in_steps_per_epoch():
    epochs = Loop(ExternalBatches(EXPECTED, EXAMPLES, RATE, steps_per_epoch=10), target_epsilon=2.0, epochs=2)
    steps = Loop(target_epsilon=2.0, steps=20)
    assert inside.state(epochs.engine).noise_multiplier == inside.state(steps.engine).noise_multiplier


# Order of calls


def test_a_step_needs_a_backward_pass():
    loop = Loop()
    with pytest.raises(BatchStateError, match=r"DPE022.*step\(\) has no complete batch"):
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.model(loop.batch(3)[0])
    with pytest.raises(BatchStateError, match="DPE022"):
        loop.optimizer.step()
    loop.step(3)
    loop.optimizer.zero_grad()
    with pytest.raises(BatchStateError, match="DPE022"):
        loop.optimizer.step()
    assert charges(loop) == [("release", 1)]


def test_pass_in_eval_mode_does_not_create_a_batch():
    loop = Loop()
    loop.model.eval()
    with pytest.raises(BatchStateError, match="DPE022"):
        loop.step(3)
    assert charges(loop) == []


def test_a_second_step_or_a_missing_zero_grad_is_an_error():
    loop = Loop()
    loop.step(3)
    with pytest.raises(StaleGradientError, match=r"DPE005.*zero_grad\(\) at the top of the loop"):
        loop.optimizer.step()
    with pytest.raises(StaleGradientError, match=r"DPE005.*zero_grad\(\) was not called"):
        loop.backward(3)
    loop.step(3)
    assert charges(loop)[0][0] == "release"


def test_checkpoint_raises_and_names_the_objects_to_save(tmp_path):
    loop = Loop()
    loop.step(3)
    with pytest.raises(SamplingError, match=r"DPE004.*external batches cannot be saved.*engine\.state_dict\(\)"):
        save(tmp_path, loop.engine)
    state, other = loop.engine.state_dict(), PrivacyEngine(seed=1)
    other.load_state_dict(state)
    again = Loop(engine=other)
    again.step(3)
    assert again.engine.ledger.steps == 2


# Arguments


OF_THE_LOADER = r"DPE004.*does not support {}.*sampling=\"poisson\""
UNSUPPORTED = [
    ({"physical_batch_size": 4}, SamplingError, OF_THE_LOADER.format("physical_batch_size")),
    ({"accumulation_steps": 2}, SamplingError, OF_THE_LOADER.format("accumulation_steps")),
    (
        {"data": DataLoader(examples(6)), "privacy_unit": torch.arange(6)},
        SamplingError,
        "DPE004.*does not support privacy_unit",
    ),
    *(
        ({"noise": noise, "steps": 10}, InvalidBudgetError, "does not support sampling='external-poisson'")
        for noise in (BandMF(num_bands=2), BLT())
    ),
    (
        {"sampling": ExternalBatches(EXPECTED), "target_epsilon": 2.0, "steps": 3},
        InvalidBudgetError,
        "no epsilon is claimed",
    ),
    *(
        ({"sampling": other}, TypeError, r"pass 'poisson', 'shuffle', a sampling scheme, or dpengine\.sampling")
        for other in (ExternalBatches, {"sample_rate": 0.1}, None)
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), UNSUPPORTED)
def test_unsupported_options_are_rejected(options, error, message):
    with pytest.raises(error, match=message):
        Loop(**options)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"expected_batch_size": 0}, ValueError, "expected_batch_size must be positive and finite, got 0"),
        ({"expected_batch_size": float("nan")}, ValueError, "expected_batch_size must be positive"),
        ({"expected_batch_size": "6"}, TypeError, "expected_batch_size must be a number, got '6'"),
        ({"sample_rate": 0.0}, ValueError, r"sample_rate must be in \(0, 1\], got 0.0"),
        ({"sample_rate": 1.1}, ValueError, r"sample_rate must be in \(0, 1\]"),
        ({"sample_rate": True}, TypeError, "sample_rate must be a number, got True"),
        ({"num_examples": -1}, ValueError, "num_examples must be at least 0, got -1"),
        ({"num_examples": 1.5}, TypeError, "num_examples must be a whole number, got 1.5"),
        ({"steps_per_epoch": 0}, ValueError, "steps_per_epoch must be at least 1, got 0"),
        ({"sample_rte": 0.1}, TypeError, "has no argument 'sample_rte'. Did you mean 'sample_rate'"),
    ],
)
def test_arguments_are_checked(arguments, error, words):
    with pytest.raises(error, match=words):
        ExternalBatches(**{"expected_batch_size": 6} | arguments)


def test_declared_rate_of_1_differs_from_an_undeclared_rate():
    stated, not_stated = ExternalBatches(6, sample_rate=1.0), ExternalBatches(6)
    assert stated.sample_rate == not_stated.sample_rate == 1.0
    assert (stated.claims_epsilon, not_stated.claims_epsilon) == (True, False)
    assert (stated.name, not_stated.name) == ("external-poisson", "external")
    assert stated != not_stated


def test_the_engine_does_not_draw_these_batches():
    with pytest.raises(TypeError, match="drawn by the training loop"):
        STATED.draw(0, lambda count, **address: None)


def test_a_run_without_a_loader_does_not_fetch_ahead_and_needs_a_delta_or_a_number_of_examples():
    model = mlp()
    engine, optimizer = PrivacyEngine(), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidBudgetError, match="target_delta is not given"):
        engine.make_private(model, optimizer, (), sampling=ExternalBatches(4.0), noise_multiplier=1.0)
    engine.make_private(model, optimizer, (), sampling=ExternalBatches(4.0), noise_multiplier=1.0, target_delta=1e-3)
    with pytest.raises(BatchStateError, match="fetch_ahead"):
        fetch_ahead(engine, 1)


@pytest.mark.parametrize("place", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_backward_pass_inside_the_update_is_rejected_and_leaves_nothing(place):
    """Otherwise the pass would be in the sums of the next step without a charge."""
    loop = Loop()
    inputs, targets = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])

    def again(optimizer, args, kwargs):
        optimizer.zero_grad()
        F.cross_entropy(loop.model(inputs), targets).backward()

    handle = getattr(loop.optimizer, place)(again)
    loop.optimizer.zero_grad()
    F.cross_entropy(loop.model(inputs), targets).backward()
    with pytest.raises(BatchStateError, match=r"inside optimizer\.step"):
        loop.optimizer.step()
    handle.remove()
    assert inside.state(loop.engine).zero
    assert loop.engine.ledger.steps == 1


# The number of examples


class Stream(IterableDataset):
    """Stream whose length need not be the number of examples."""

    def __len__(self):
        return 7

    def __iter__(self):
        return iter(())


ROWS = torch.zeros(EXAMPLES + 1, 4)


@pytest.mark.parametrize(
    "data",
    [ROWS, (ROWS, ROWS), TensorDataset(ROWS), DataLoader(TensorDataset(ROWS), 5), DataLoader(ROWS, 5, shuffle=True)],
    ids=["tensor", "tensors", "data set", "loader", "loader of a tensor"],
)
def test_wrong_number_of_examples_is_rejected(data):
    with pytest.raises(
        SamplingError, match=rf"num_examples={EXAMPLES}\) does not fit the data, which has {len(ROWS)} "
    ):
        Loop(data=data)
    Loop(ExternalBatches(EXPECTED, num_examples=len(ROWS), sample_rate=RATE), data=data)
    Loop(ExternalBatches(EXPECTED, sample_rate=RATE), data=data)


@pytest.mark.parametrize(
    "data",
    [
        iter(()),
        [ROWS, ROWS],
        (ROWS, ROWS[1:]),
        torch.tensor(1.0),
        Stream(),
        DataLoader(Stream(), 5),
        DataLoader(TensorDataset(ROWS), None),
        DataLoader(TensorDataset(ROWS), 5, sampler=SubsetRandomSampler(range(EXAMPLES))),
        DataLoader(TensorDataset(ROWS), batch_sampler=[[0, 1], [2]]),
    ],
    ids=["iterator", "list", "uneven", "scalar", "stream", "loader of a stream", "unbatched", "part", "own batches"],
)
def test_data_whose_number_of_examples_is_not_certain_is_accepted(data):
    assert Loop(data=data).loader is data
