"""The cost model of large runs, on numbers that can be checked by hand."""

from dataclasses import replace

import pytest

from benchmarks.scale_large import LAYOUTS, large_tables
from benchmarks.scale_model import (
    Machine,
    Message,
    Run,
    draw_seconds,
    exchange_seconds,
    first_to_bind,
    max_positions,
    memory,
    messages,
    noise_seconds,
    ordinary_seconds,
    peak,
    product_seconds,
    seconds,
    total_seconds,
)

MACHINE = Machine(
    memory=1e9, memory_rate=1e10, products=1e9, link_rate=1e6, latency=1e-3, normal=2e-9, draw=1e-7, draw_bytes=100.0
)
RUN = Run(parameters=1e6, microbatch=8, positions=10, kept_bytes=1000.0, groups=4, group=3e5, largest=2e5)


def test_a_single_process_has_no_communication():
    assert messages(RUN) == []
    found = memory(RUN, MACHINE)
    assert found["weights"] == found["sums"] == 4e6
    assert found["inputs and gradients of layers"] == 80_000 and found["draw"] == 800
    assert found["sums in transit"] == found["gathered weights"] == found["noise of past steps"] == 0


def test_replicas_communicate_once_per_logical_batch_and_shards_once_per_pass():
    spread = replace(RUN, replicas=2, shards=2, passes=5)
    gather, scatter, total = messages(spread)
    assert (gather.kind, gather.count, gather.size) == ("all_gather", 7 * 5, 5 * 4 * (2e6 - 1e6 / 4))
    assert (scatter.kind, scatter.count, scatter.size) == ("reduce_scatter", 5, 5 * 4e6)
    assert (total.kind, total.count, total.size) == ("all_reduce", 1, 2e6)
    assert spread.logical == 8 * 5 * 4 and spread.ranks == 4


def test_sums_are_exchanged_in_buckets_of_25_mebibytes():
    (message,) = messages(Run(parameters=1e7, microbatch=1, replicas=2))
    assert (message.count, message.size) == (2, 4e7)


def test_buckets_do_not_split_large_tensors():
    large = Run(parameters=1e9, microbatch=1, shards=2, tensors=3)
    assert [message.count for message in messages(large)] == [1, 3]
    assert messages(replace(large, tensors=1000))[1].count == 153


def test_near_messages_use_the_near_link_rate_if_the_machine_has_one():
    machine = replace(MACHINE, near_rate=1e7)
    message = Message("all_gather", ranks=2, count=0, size=2e6)
    assert exchange_seconds(message, machine) == pytest.approx(1.0)
    assert exchange_seconds(replace(message, near=True), machine) == pytest.approx(0.1)
    assert exchange_seconds(replace(message, near=True), MACHINE) == pytest.approx(1.0)


def test_the_large_runs_have_the_stated_numbers_of_parameters_ranks_and_samples():
    for layout in LAYOUTS:
        assert layout.run.parameters == pytest.approx(1e11, rel=0.01)
        assert layout.run.ranks == 1000 and layout.run.logical in (128_000, 1_024_000)
    assert "| memory: inputs and gradients of layers |" in large_tables()


def test_split_layers_exchange_three_numbers_per_sample_and_sixteen_per_pass():
    ordinary, norms = messages(replace(RUN, splits=2, passes=3, split_bytes=64.0, split_messages=12))
    assert (ordinary.count, ordinary.size, ordinary.private) == (36, 3 * 8 * 10 * 64, False)
    assert (norms.count, norms.size, norms.private) == (3, 3 * 8 * (3 * 8 + 16), True)


@pytest.mark.parametrize(
    ("kind", "scatters", "hops"),
    [("all_gather", True, 3), ("reduce_scatter", True, 3), ("all_reduce", True, 6), ("reduce_scatter", False, 6)],
)
def test_ring_collectives_take_one_message_per_hop(kind, scatters, hops):
    machine = replace(MACHINE, scatters=scatters)
    found = exchange_seconds(Message(kind, ranks=4, count=2, size=4e6), machine)
    assert found == pytest.approx(hops * (2 * 1e-3 + 1.0))


def test_ranks_divide_the_noise_and_each_band_adds_a_read():
    assert noise_seconds(RUN, MACHINE) == pytest.approx(2e-3)
    for spread in ({"replicas": 4}, {"shards": 4}, {"replicas": 2, "splits": 2}):
        assert noise_seconds(replace(RUN, **spread), MACHINE) == pytest.approx(2e-3 / 4)
        state = memory(replace(RUN, bands=9, **spread), MACHINE)["noise of past steps"]
        assert state == pytest.approx(8 * 4e6 / 4)
    assert noise_seconds(replace(RUN, bands=9), MACHINE) == pytest.approx(2e-3 + 1e6 * 4 * 12 / 1e10)


def test_the_cost_of_a_draw_depends_on_the_batch_size_and_not_on_the_size_of_the_data_set():
    few, many = (draw_seconds(replace(RUN, examples=n), MACHINE) for n in (1e6, 1e9))
    assert few == many == pytest.approx(8 * 1e-7)


def test_a_pass_takes_six_operations_per_parameter_and_position_plus_those_of_the_norms():
    assert product_seconds(RUN, MACHINE) == pytest.approx(6 * 1e6 * 80 / 1e9)
    normed = replace(RUN, norm_products=1e6)
    assert product_seconds(normed, MACHINE) == pytest.approx((6 * 1e6 * 80 + 8e6) / 1e9)
    assert product_seconds(normed, MACHINE, private=False) == product_seconds(RUN, MACHINE)


def test_overlapping_communication_and_computation_cost_the_longer_of_the_two():
    spread = replace(RUN, replicas=2)
    apart = seconds(spread, MACHINE)
    serial = total_seconds(spread, MACHINE)
    assert serial == pytest.approx(sum(apart.values()))
    less = min(apart["products"], apart["exchange"])
    assert total_seconds(spread, replace(MACHINE, overlaps=True)) == pytest.approx(serial - less)


def test_a_private_step_adds_noise_norms_and_the_draw_to_an_ordinary_step():
    spread = replace(RUN, splits=2, split_bytes=64.0, split_messages=12, norm_products=1e6)
    gained = seconds(spread, MACHINE)
    privacy = gained["noise"] + gained["draw"] + gained["exchange of norms"] + 8 * 1e6 / 2 / 1e9
    assert total_seconds(spread, MACHINE) - ordinary_seconds(spread, MACHINE) == pytest.approx(privacy)


def test_the_bottleneck_is_memory_if_the_run_does_not_fit_and_else_the_slowest_part():
    assert first_to_bind(RUN, MACHINE) == "products"
    assert first_to_bind(replace(RUN, shards=2), MACHINE) == "exchange"
    assert first_to_bind(replace(RUN, kept_bytes=1e9), MACHINE) == "memory: inputs and gradients of layers"


def test_the_maximum_number_of_positions_fills_the_memory():
    positions = max_positions(RUN, MACHINE)
    filled = replace(RUN, positions=1, microbatch=8, kept_bytes=RUN.kept_bytes * positions / 8)
    assert peak(filled, MACHINE) == pytest.approx(MACHINE.memory, rel=1e-5)


def test_sums_in_transit_are_limited_to_a_few_buckets_and_gathered_weights_are_freed_first():
    found = memory(replace(RUN, parameters=1e9, shards=10), MACHINE)
    bucket = 25 * 2**20 + 4 * 2e5
    assert found["sums in transit"] == 3 * bucket + 4e8
    assert found["gathered weights"] == 2 * 4 * 3e5
    run = replace(RUN, shards=2)  # at most all sums, plus one bucket
    found = memory(run, MACHINE)
    assert found["sums in transit"] == 4e6 + 4e6 + 2e6
    assert peak(run, MACHINE) == sum(found.values()) - found["gathered weights"]
