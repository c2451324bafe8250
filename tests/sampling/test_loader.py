"""The private loader: preserved settings, errors, and the sampling scheme derived from a loader."""

import math
import queue
import threading

import pytest
import torch
from sampling.doubles import Fixed, Recorder, Rows, private, rows_of
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from dpengine.accounting.run_events import EpochParticipation
from dpengine.errors import SamplingError
from dpengine.sampling.choose_scheme import draws_for
from dpengine.sampling.poisson import PoissonDraws
from dpengine.sampling.shuffle import ShuffleDraws

WORKERS = [0, 2]


class Doubling(DataLoader):
    """Loader class whose overridden ``__iter__`` changes each batch."""

    def __iter__(self):
        for batch in super().__iter__():
            yield {"doubled": 2 * batch["x"]}


class Threaded(DataLoader):
    """Loader class that prefetches batches in a thread."""

    def __iter__(self):
        ahead, end = queue.Queue(maxsize=3), object()

        def fill():
            for batch in super(Threaded, self).__iter__():
                ahead.put(batch)
            ahead.put(end)

        thread = threading.Thread(target=fill, daemon=True)
        thread.start()
        while (batch := ahead.get()) is not end:
            yield batch
        thread.join()


class Impatient(DataLoader):
    def __iter__(self):
        yield next(super().__iter__())


class Stubborn(DataLoader):
    def __iter__(self):
        for index in range(100):
            yield self.dataset[index % 20]


class Stuttering(DataLoader):
    def __iter__(self):
        yield from super().__iter__()
        yield from [1, 2]


class Around(DataLoader):
    """Loader that wraps another one and prefetches one batch, as those of accelerate do."""

    def __init__(self, inner):
        self.__dict__.update(vars(inner))
        self.inner = inner
        self.finished = []

    def __iter__(self):
        batches = iter(self.inner)
        last = next(batches)
        for batch in batches:
            yield last
            last = batch
        yield last
        self.finished.append(True)


def test_loader_class_and_settings_are_preserved():
    class Custom(DataLoader):
        pass

    def collate(rows):
        return torch.stack(rows)

    def start(worker):
        pass

    generator = torch.Generator()
    data = [torch.zeros(2)] * 20
    loader = Custom(
        data, batch_size=2, shuffle=True, collate_fn=collate, num_workers=2, worker_init_fn=start, generator=generator,
        prefetch_factor=3, persistent_workers=True, timeout=5.0, pin_memory=True,
    )  # fmt: skip
    loader.note = "mine"
    before = dict(vars(loader))
    copied = private(Fixed([1]), loader=loader)
    assert isinstance(copied, Custom)
    assert copied.dataset is data
    assert copied.collate_fn.collate is collate
    assert copied.worker_init_fn is start
    assert copied.generator is generator
    assert (copied.num_workers, copied.prefetch_factor, copied.persistent_workers) == (2, 3, True)
    assert (copied.timeout, copied.pin_memory, copied.note) == (5.0, True, "mine")
    assert vars(loader) == before
    assert type(loader) is Custom
    assert type(private(Fixed([1]), loader=loader)) is type(copied)


def test_batch_sampler_exposes_its_expected_batch_size():
    loader = private(Fixed([1]))
    assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (2, False)


@pytest.mark.parametrize("workers", WORKERS)
def test_overridden_iter_receives_empty_batches(workers):
    rows = [{"x": torch.full((3,), float(index))} for index in range(20)]
    loader = private(Fixed([], [1, 2], [], [3]), loader=Doubling(rows, batch_size=2, num_workers=workers))
    batches = [batch["doubled"] for batch in loader]
    assert [batch.shape for batch in batches] == [(0, 3), (2, 3), (0, 3), (1, 3)]
    assert batches[1][:, 0].tolist() == [2.0, 4.0]


def test_prefetching_in_a_thread_preserves_the_batch_order(seeded_words):
    rows = [{"y": index} for index in range(20)]
    strategy = PoissonDraws(20, 0.05, 300, 1.0)
    recorder = Recorder()
    loader = private(strategy, words=seeded_words(5), loader=Threaded(rows, batch_size=2), recorder=recorder)
    for step, batch in enumerate(loader):
        assert batch["y"].tolist() == strategy.draw(step, seeded_words(5)).tolist()
        assert recorder.handed[-1][0].size == len(batch["y"])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Impatient, "Impatient ended before"),
        (Stubborn, "Stubborn does not read its batch_sampler"),
        (Stuttering, "Stuttering returned more batches"),
    ],
)
def test_loader_class_that_drops_or_repeats_batches_raises_with_its_name(kind, message):
    with pytest.raises(SamplingError, match=message):
        list(private(Fixed([1], [2]), loader=kind([torch.zeros(1)] * 20, batch_size=2)))


@pytest.mark.parametrize("workers", WORKERS)
def test_wrapping_loader_returns_the_drawn_batches(workers):
    recorder = Recorder()
    loader = Around(DataLoader([{"y": index} for index in range(20)], batch_size=2, num_workers=workers))
    private_copy = private(Fixed([1], [], [2, 3]), loader=loader, recorder=recorder)
    for number, batch in enumerate(private_copy):
        assert batch["y"].tolist() == [[1], [], [2, 3]][number]
        assert len(recorder.handed) == number + 1
    assert private_copy.finished == [True]
    assert private_copy.inner is not loader.inner
    assert loader.inner.batch_sampler is loader.batch_sampler


def test_persistent_workers_survive_passes_and_breaks(seeded_words):
    strategy = PoissonDraws(20, 0.2, 4, 4.0)
    loader = DataLoader(Rows(), batch_size=2, num_workers=2, persistent_workers=True)
    loader = private(strategy, words=seeded_words(4), loader=loader)
    seen = []
    for passes in range(3):
        for batch in loader:
            seen.append(batch["y"].tolist())
            if passes == 1 and len(seen) == 6:
                break
    assert seen == [strategy.draw(step, seeded_words(4)).tolist() for step in range(10)]


def test_private_loader_does_not_take_over_persistent_workers():
    loader = DataLoader(Rows(), batch_size=10, num_workers=1, persistent_workers=True)
    original = rows_of(loader)
    assert rows_of(private(Fixed([1], [2]), loader=loader)) == [[1], [2]]
    assert rows_of(loader) == original


def test_batches_keep_their_order_when_workers_may_deliver_out_of_order():
    loader = DataLoader(Rows(), batch_size=2, num_workers=2, in_order=False)
    logical = [[number] for number in range(20)]
    assert rows_of(private(Fixed(*logical), loader=loader)) == logical


@pytest.mark.slow
def test_spawned_workers_receive_no_private_state(seeded_words):
    data = TensorDataset(torch.arange(20.0))
    loader = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="spawn")
    recorder = Recorder()
    recorder.lambda_that_does_not_pickle = lambda: None
    batches = list(private(Fixed([], [3, 4], [5]), words=lambda *_: None, loader=loader, recorder=recorder))
    assert [batch[0].tolist() for batch in batches] == [[], [3.0, 4.0], [5.0]]
    assert len(recorder.handed) == 3


def test_global_generators_advance_as_with_the_original_loader(seeded_words):
    class Noisy(Rows):
        def __getitem__(self, index):
            torch.rand(1)
            return super().__getitem__(index)

    torch.manual_seed(5)
    plain = DataLoader(Noisy(), batch_size=2)
    next(iter(plain))  # one seed for workers, and two examples
    expected = torch.get_rng_state()
    torch.manual_seed(5)
    next(iter(private(Fixed([4, 9]), words=seeded_words(), loader=DataLoader(Noisy(), batch_size=2))))
    assert torch.equal(torch.get_rng_state(), expected)


def test_worker_seed_comes_from_the_generator_of_the_loader():
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    list(private(Fixed([1]), loader=DataLoader(Rows(), batch_size=2, generator=generator)))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.hazard("D3", "B14")
def test_empty_dataset_requires_example_input(workers, seeded_words):
    loader = DataLoader(Rows(0), batch_size=4, num_workers=workers)
    strategy = draws_for(loader, sample_rate=0.25, expected_batch_size=4)
    with pytest.raises(SamplingError, match="example_input="):
        private(strategy, loader=loader)
    batches = list(private(strategy, words=seeded_words(), loader=loader, example_input=Rows()[0]))
    assert rows_of(batches) == [[], [], [], []]
    assert batches[0]["x"].shape == (0, 3)


def test_unreadable_first_example_raises_and_suggests_example_input():
    class Locked(Rows):
        def __getitem__(self, index):
            raise OSError("closed in the main process")

    loader = DataLoader(Locked(), batch_size=2)
    with pytest.raises(SamplingError, match=r"dataset\[0\] of Locked.*OSError: closed.*example_input="):
        private(Fixed([1]), loader=loader)
    private(Fixed([1]), loader=loader, example_input=Rows()[0])


def test_empty_time_major_batches_have_size_zero_on_axis_1():
    def collate(rows):
        return torch.stack([row["x"] for row in rows], dim=1), torch.tensor([row["y"] for row in rows])

    loader = DataLoader(Rows(), batch_size=2, collate_fn=collate)
    (empty, labels), (full, _) = private(Fixed([], [1, 2]), loader=loader, batch_first=False)
    assert (empty.shape, labels.shape, full.shape) == ((3, 0), (0,), (3, 2))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"physical_batch_size": 0}, ValueError, "physical_batch_size must be at least 1"),
        ({"physical_batch_size": 2.0}, TypeError, "physical_batch_size must be a whole number"),
        ({"accumulation_steps": 0}, ValueError, "accumulation_steps must be at least 1"),
        ({"physical_batch_size": 4, "accumulation_steps": 2}, ValueError, "Pass one of them"),
    ],
)
def test_a_bad_argument_is_named(options, error, message):
    with pytest.raises(error, match=message):
        private(Fixed([1]), **options)


def test_a_strategy_for_other_data_is_rejected():
    with pytest.raises(SamplingError, match="has 20 examples, and the sampling scheme expects 21"):
        private(Fixed([1], rows=21), loader=DataLoader(Rows(20), batch_size=2))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 93, 99, 105, 1999])
def test_length_equals_that_of_the_original_loader(rows, drop_last, seeded_words):
    loader = DataLoader(Rows(rows), batch_size=16, drop_last=drop_last)
    copied = private(draws_for(loader), words=seeded_words(), loader=loader)
    assert len(copied) == len(loader) == sum(1 for _ in copied)


def loader_of(rows: int, size: int, **options) -> DataLoader:
    return DataLoader(range(rows), batch_size=size, **options)


@pytest.mark.one_in(4, "sampling", "drop_last", "size", others="slow")
@pytest.mark.one_in(2, "sampling", "drop_last", "size")
@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 7, 64, 99])
@pytest.mark.hazard("S4", "O35")
def test_an_epoch_has_as_many_steps_as_the_loader_for_1_to_2000_rows(sampling, drop_last, size):
    for rows in range(1, 2001):
        loader = loader_of(rows, size, drop_last=drop_last)
        assert draws_for(loader, sampling=sampling).steps_per_epoch == len(loader)


@pytest.mark.hazard("S2")
def test_rate_and_divisor_follow_from_the_batch_size():
    strategy = draws_for(loader_of(60000, 256))
    assert strategy == PoissonDraws(60000, 256 / 60000, 235, 256.0)


def test_a_batch_larger_than_the_data_has_rate_one():
    assert draws_for(loader_of(5, 8)) == PoissonDraws(5, 1.0, 1, 5.0)


def test_batch_size_is_read_from_a_torch_batch_sampler():
    data = range(10)
    loader = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, True))
    assert draws_for(loader) == PoissonDraws(10, 0.4, 2, 4.0)


@pytest.mark.hazard("S1")
def test_shuffled_sampling_is_opt_in():
    loader = loader_of(10, 4, shuffle=True)
    assert draws_for(loader).name == "poisson"
    shuffled = draws_for(loader, sampling="shuffle")
    assert shuffled == ShuffleDraws(10, 4)
    assert shuffled.participation == EpochParticipation(3)


@pytest.mark.parametrize("rows", [0, 900, 1000, 1100])
@pytest.mark.hazard("S13")
def test_declared_constants_do_not_depend_on_the_dataset_size(rows):
    strategy = draws_for(DataLoader(range(rows), batch_size=32), sample_rate=0.03, expected_batch_size=30.0)
    assert (strategy.sample_rate, strategy.expected_batch_size, strategy.steps_per_epoch) == (0.03, 30.0, 34)


@pytest.mark.hazard("S4")
def test_steps_per_epoch_is_the_exact_inverse_of_a_declared_rate():
    for steps in range(1, 2001):
        assert draws_for(loader_of(10, 1), sample_rate=1 / steps).steps_per_epoch == steps


def test_steps_per_epoch_of_a_declared_rate_is_rounded_according_to_drop_last():
    assert draws_for(loader_of(1000, 1), sample_rate=0.3).steps_per_epoch == 4
    assert draws_for(loader_of(1000, 1, drop_last=True), sample_rate=0.3).steps_per_epoch == 3
    assert draws_for(loader_of(1000, 1), sample_rate=0.3).expected_batch_size == 300.0


def test_declared_batch_size_overrides_that_of_the_loader():
    assert draws_for(loader_of(1000, 1), expected_batch_size=300) == PoissonDraws(1000, 0.3, 4, 300.0)
    assert draws_for(loader_of(10, 1), expected_batch_size=64) == PoissonDraws(10, 1.0, 1, 64.0)


@pytest.mark.hazard("B14")
def test_an_empty_data_set_without_constants_is_rejected():
    for constants in ({}, {"sample_rate": 0.1}, {"expected_batch_size": 3}):
        with pytest.raises(SamplingError, match=r"empty.*sample_rate= and expected_batch_size="):
            draws_for(DataLoader(TensorDataset(torch.zeros(0, 2)), batch_size=3), **constants)
    with pytest.raises(SamplingError, match="cannot be shuffled"):
        draws_for(DataLoader(range(0), batch_size=3), sampling="shuffle")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "poison"}, "'poisson', 'shuffle', got 'poison'"),
        ({"sample_rate": 0.0}, "sample_rate must be in"),
        ({"sample_rate": math.nan}, "sample_rate must be in"),
        ({"expected_batch_size": -1}, "expected_batch_size must be positive"),
        ({"sampling": "shuffle", "sample_rate": 0.1}, "sample_rate=0.1 is not supported"),
        ({"sampling": "shuffle", "expected_batch_size": 4}, "expected_batch_size=4 is not supported"),
    ],
)
def test_a_bad_argument_of_a_sampling_scheme_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        draws_for(loader_of(10, 2), **options)


def test_a_loader_with_unequal_probabilities_is_rejected_for_both_sampling_schemes():
    loader = DataLoader(range(4), batch_size=2, sampler=WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], 4))
    for sampling in ("poisson", "shuffle"):
        with pytest.raises(SamplingError, match="WeightedRandomSampler"):
            draws_for(loader, sampling=sampling)
