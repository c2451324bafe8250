"""Choice of algorithms: equal norms and sums, memory budget, independence of data, and saved tables."""

import json
import weakref

import pytest
import torch
from inside_parts import GradientsOfRows
from torch import nn

from dpengine.capture import LayerCall, Use
from dpengine.grad_modes import choose_method
from dpengine.grad_modes.choose_method import MethodTable, time_algorithms
from dpengine.grad_modes.entry import Entry
from dpengine.grad_modes.method import Algorithm, Choice, Method
from dpengine.grad_samplers.table import BUILTIN
from dpengine.kernels import products

LINEAR, CONV = BUILTIN[nn.Linear], BUILTIN[nn.Conv2d]
ALGORITHMS = {
    "linear": [Algorithm(Method.GHOST, "gram"), Algorithm(Method.KEEP, "direct"), Algorithm(Method.DISCARD, "direct")],
    "conv": [
        *(Algorithm(Method.GHOST, name) for name in ("gram", "shifted gram", "compiled")),
        *(
            Algorithm(method, name)
            for method in (Method.KEEP, Method.DISCARD)
            for name in ("grouped", "unfold", "loop", "compiled")
        ),
    ],
}


def linear_call(rows, time, inside, outside):
    layer = nn.Linear(inside, outside)
    return LayerCall(layer, (torch.randn(rows, time, inside),), torch.randn(rows, time, outside), name="layer")


def conv_call(rows, inside, outside, size):
    layer = nn.Conv2d(inside, outside, 3, padding=1)
    inputs, grads = torch.randn(rows, inside, size, size), torch.randn(rows, outside, size, size)
    return LayerCall(layer, (inputs,), grads, name="layer")


def entry_of(call, samplers, name="weight"):
    return Entry(Use(getattr(call.layer, name), f"layer.{name}"), [(call, samplers[name])])


class Forced:
    version = 0
    keep_budget = 0

    def __init__(self, algorithm):
        self.algorithm = algorithm

    def plan(self, entries, rows):
        return {e.use.parameter: Choice(e.use.name, "", self.algorithm, "", None, 0) for e in entries}


def planned(call, samplers=LINEAR, **settings):
    table = MethodTable(**settings)
    (choice,) = table.plan([entry_of(call, samplers)], call.batch_size).values()
    return choice


def test_the_table_of_algorithms_is_complete():
    assert {a.name for a in ALGORITHMS["conv"]} == CONV["weight"].grads.keys() | CONV["weight"].sq_norms.keys()
    assert {a.name for a in ALGORITHMS["linear"]} == LINEAR["weight"].grads.keys() | LINEAR["weight"].sq_norms.keys()


@pytest.mark.parametrize("algorithm", ALGORITHMS["linear"] + ALGORITHMS["conv"], ids=str)
@pytest.mark.parametrize("built", [True, False], ids=["", "not-built"])
def test_every_algorithm_gives_the_same_norms_and_sums(monkeypatch, algorithm, built):
    if not built:  # nor is it here in a run whose table of methods is from elsewhere
        monkeypatch.setattr(products, "native_library", lambda: None)
    torch.manual_seed(0)
    kind = "linear" if algorithm in ALGORITHMS["linear"] else "conv"
    call, samplers = (linear_call(5, 7, 6, 4), LINEAR) if kind == "linear" else (conv_call(5, 3, 4, 6), CONV)
    weight = call.layer.weight
    found = GradientsOfRows(Forced(algorithm))
    found.receive(call, {"weight": Use(weight, "layer.weight")}, samplers)
    truth_B = []
    for row in range(5):
        output = call.layer.double()(call.inputs[0][row : row + 1].double())
        truth_B.append(torch.autograd.grad(output, weight, call.grad_output[row : row + 1].double())[0])
    call.layer.float()
    per_row = torch.stack(truth_B)
    norms = found.sq_norms([weight], 2.0)
    torch.testing.assert_close(norms, 4 * per_row.flatten(1).norm(dim=1) ** 2, rtol=1e-5, atol=0)
    factors = torch.rand(5, 1)
    sums = found.weighted_sums([weight], factors, 3.0)
    truth = 3 * torch.tensordot(factors[:, 0].double(), per_row, dims=1)
    torch.testing.assert_close(sums[weight].double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("time", "width", "budget", "expected"),
    [
        (1, 64, 10**9, Method.GHOST),  # one position: the norm is a product of two norms
        (16, 256, 10**9, Method.GHOST),  # few positions, many features
        (400, 256, 10**9, Method.KEEP),  # many positions: the Gram costs more than the gradient
        (400, 256, 0, Method.DISCARD),  # the same, and no memory to keep it
        (80, 256, 10**9, Method.KEEP),  # the Gram needs fewer operations, but KEEP saves the weighted product
        (80, 256, 0, Method.GHOST),
    ],
)
def test_estimated_choice_depends_on_shape_and_budget(time, width, budget, expected):
    call = linear_call(2, time, width, width)
    assert planned(call, keep_budget=budget, timed=False).algorithm.method is expected


def test_the_choice_does_not_depend_on_data():
    """Nonfinite or denormal inputs do not change the choice, because random tensors are timed."""
    seen = []
    call = conv_call(4, 8, 8, 12)
    for value in (1.0, float("nan"), 1e-42, 1e30):
        other = call.replace(inputs=(torch.full_like(call.inputs[0], value),))
        timed = choose_method._random(other, 8)
        seen.append(timed.inputs[0])
        assert planned(other, CONV, timed=False) == planned(call, CONV, timed=False)
    assert all(torch.equal(seen[0], inputs) for inputs in seen[1:])


def test_timing_does_not_advance_the_generators():
    entry, before = entry_of(linear_call(3, 5, 6, 7), LINEAR), torch.get_rng_state()
    time_algorithms(entry, ALGORITHMS["linear"], 3)
    assert torch.equal(before, torch.get_rng_state())


def test_the_fastest_measured_algorithm_is_chosen(monkeypatch):
    call = linear_call(64, 64, 256, 256)
    for fastest in ALGORITHMS["linear"]:
        monkeypatch.setattr(
            choose_method,
            "time_algorithms",
            lambda _, algorithms, rows, copies, f=fastest: {str(a): 1.0 + (a != f) for a in algorithms},
        )
        choice = planned(call)
        assert choice.algorithm == fastest and choice.why == "timed" and choice.seconds == 1.0


def test_each_kind_of_call_is_timed_once_and_sizes_are_rounded(monkeypatch):
    timed = []
    monkeypatch.setattr(
        choose_method,
        "time_algorithms",
        lambda _, algorithms, rows, copies: timed.append(rows) or {str(a): 1.0 for a in algorithms},
    )
    table = MethodTable()
    for rows in (64, 60, 70, 64, 66):
        table.plan([entry_of(linear_call(rows, 64, 256, 256), LINEAR)], rows)
    assert timed == [64]
    table.plan([entry_of(linear_call(200, 64, 256, 256), LINEAR)], 200)
    assert timed == [64, 200]


def test_a_small_layer_is_not_timed(monkeypatch):
    monkeypatch.setattr(choose_method, "time_algorithms", lambda *args: pytest.fail("timed"))
    assert planned(linear_call(8, 4, 16, 16)).why == "too small to time"


def test_times_are_those_of_norm_and_sum_on_this_machine():
    """A Gram matrix of 2000 positions is much slower than a product of 8 by 8."""
    entry = entry_of(linear_call(4, 2000, 8, 8), LINEAR)
    seconds = time_algorithms(entry, ALGORITHMS["linear"], 4)
    assert seconds["ghost: gram"] > 3 * seconds["keep: direct"]
    assert entry.kept is None and len(entry.calls) == 1  # timing does not change the recorded pass


def test_the_budget_is_spent_on_the_most_time_saved_per_byte(monkeypatch):
    wide, narrow = linear_call(8, 64, 512, 512), linear_call(8, 64, 256, 256)
    saving = {512: 2.0, 256: 1.5}  # the narrow layer needs a quarter of the memory
    monkeypatch.setattr(
        choose_method,
        "time_algorithms",
        lambda entry, algorithms, rows, copies: {
            str(algorithm): 1.0 if algorithm.method is Method.KEEP else 1.0 + saving[entry.use.parameter.shape[0]]
            for algorithm in algorithms
        },
    )
    entries = [entry_of(wide, LINEAR), entry_of(narrow, LINEAR)]
    for budget, kept in (
        (8 * 256 * 256 * 4, [256]),
        (8 * 512 * 512 * 4, [256]),
        (8 * (512**2 + 256**2) * 4, [512, 256]),
    ):
        plan = MethodTable(keep_budget=budget).plan(entries, 8)
        assert [p.shape[0] for p, choice in plan.items() if choice.algorithm.method is Method.KEEP] == kept
        assert sum(choice.kept_bytes for choice in plan.values()) <= budget


def test_a_saved_table_is_used_instead_of_timing(tmp_path, monkeypatch):
    call = linear_call(64, 64, 256, 256)
    table = MethodTable()
    table.plan([entry_of(call, LINEAR)], 64)
    (signature,) = table.seconds
    assert "Linear(in_features=256" in signature and ".weight" in signature and "64 rows" in signature
    table.seconds[signature] = {"discard: direct": 1e-9, "keep: direct": 1.0}
    table.save(tmp_path / "methods.json")
    monkeypatch.setattr(choose_method, "time_algorithms", lambda *args: pytest.fail("timed"))
    loaded = MethodTable.load(tmp_path / "methods.json")
    (choice,) = loaded.plan([entry_of(call, LINEAR)], 64).values()
    assert choice.algorithm == Algorithm(Method.DISCARD, "direct") and loaded.seconds == table.seconds


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "[" * 100_000),
        '{"version": 1, "seconds": {"a": {"hover: gram": 1}}}',
        '{"version": 1, "seconds": {"a": {"keep": "fast"}}}',
        '{"version": 99, "seconds": {}}',
    ],
)
def test_a_file_without_a_table_is_rejected(tmp_path, text):
    (tmp_path / "methods.json").write_text(text)
    with pytest.raises(ValueError, match="is not a saved MethodTable"):
        MethodTable.load(tmp_path / "methods.json")


def test_a_table_with_times_of_keep_only_respects_the_budget(monkeypatch):
    call = linear_call(64, 64, 256, 256)
    table = MethodTable(keep_budget=0)
    table.plan([entry_of(call, LINEAR)], 64)
    (signature,) = table.seconds
    table.seconds[signature] = {"keep: direct": 1e-9}
    (choice,) = table.plan([entry_of(call, LINEAR)], 64).values()
    assert choice.algorithm.method is not Method.KEEP


def test_the_budget_holds_for_the_largest_batch_that_a_plan_is_for():
    """Batches with up to a fifth more samples share a plan."""
    one = 256 * 256 * 4
    call = linear_call(64, 300, 256, 256)
    assert planned(call, keep_budget=64 * one, timed=False).algorithm.method is not Method.KEEP
    assert planned(call, keep_budget=77 * one, timed=False).algorithm.method is Method.KEEP


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("here"), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_without_memory_for_timing_estimates_decide(monkeypatch, error):
    def fails(*args):
        raise error

    monkeypatch.setattr(choose_method, "time_algorithms", fails)
    assert planned(linear_call(64, 64, 256, 256)).why == "no memory to time"


def test_errors_in_timing_other_than_out_of_memory_are_raised(monkeypatch):
    def fails(*args):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(choose_method, "time_algorithms", fails)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        planned(linear_call(64, 64, 256, 256))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_single_large_image_uses_no_gram_matrix(rows):
    call = conv_call(rows, 64, 64, 112)
    algorithms = []
    choose = planned(call, CONV, keep_budget=0, timed=False)
    algorithms = MethodTable(timed=False)._options(entry_of(call, CONV), rows).seconds
    assert "ghost: shifted gram" not in algorithms
    assert choose.algorithm != Algorithm(Method.GHOST, "gram")
    assert any(algorithm.startswith("discard") for algorithm in algorithms)


def test_a_gradient_without_a_weighted_sum_kernel_is_kept_despite_the_budget():
    call = linear_call(64, 3, 8, 50_000)
    (choice,) = MethodTable(keep_budget=0).plan([entry_of(call, LINEAR, "bias")], 64).values()
    assert choice.algorithm.method is Method.KEEP


def test_a_table_with_unknown_algorithms_only_is_measured_again(tmp_path):
    """Another version may have written the table."""
    call = linear_call(64, 64, 256, 256)
    table = MethodTable()
    table.plan([entry_of(call, LINEAR)], 64)
    (signature,) = table.seconds
    stored = {"version": 1, "seconds": {signature: {"ghost: by magic": 1e-9}}}
    (tmp_path / "methods.json").write_text(json.dumps(stored))
    choice = MethodTable.load(tmp_path / "methods.json").plan([entry_of(call, LINEAR)], 64)[call.layer.weight]
    assert choice.algorithm.name in {"gram", "direct"}


def test_a_repeated_shape_is_planned_again_only_after_the_times_change(monkeypatch):
    planned_rows = []
    table = MethodTable(timed=False)
    plan = table.plan
    monkeypatch.setattr(table, "plan", lambda entries, rows: planned_rows.append(rows) or plan(entries, rows))
    found = GradientsOfRows(table)
    call = linear_call(9, 5, 6, 4)
    for rows in (9, 9, 3, 9, 0):
        table.version += rows == 0
        part = call.replace(inputs=(call.inputs[0][: rows or 9],), grad_output=call.grad_output[: rows or 9])
        found.receive(part, {"weight": Use(call.layer.weight, "layer.weight")}, LINEAR)
        found.sq_norms([call.layer.weight], 1.0)
        found.clear()
    assert planned_rows == [9, 3, 9]


def test_a_plan_key_keeps_its_parameters_alive_so_that_their_ids_are_not_reused():
    def key_of_a_dead_layer():
        entry = entry_of(linear_call(2, 1, 3, 4), LINEAR)
        parameter = weakref.ref(entry.use.parameter)
        return choose_method.plan_key([entry], 2), choose_method.plan_key([entry], 2), parameter

    key, again, parameter = key_of_a_dead_layer()
    assert key == again and hash(key) == hash(again)
    assert parameter() is not None
    assert choose_method.plan_key([entry_of(linear_call(2, 1, 3, 4), LINEAR)], 2) not in {key: None}


def test_shared_tables_use_a_budget_that_does_not_depend_on_gpu_memory(monkeypatch):
    call, own = linear_call(64, 300, 256, 256), MethodTable(timed=False)
    chosen = []
    for memory in (0, 2**40):
        monkeypatch.setattr(choose_method, "memory_for", lambda device, on_cpu, *, most=0, memory=memory: memory)
        for table in (own, own.untimed({})):
            (choice,) = table.plan([entry_of(call, LINEAR)], 64).values()
            chosen.append(choice.algorithm.method is Method.KEEP)
    assert chosen == [False, True, True, True]  # the first is the choice of a GPU without free memory
