"""A forward pass that writes data to a buffer is rejected by name; writes that do not depend on data are accepted."""

import pytest
import torch
import torch.nn.functional as F
from faults.neighbours import CLASSES, FEATURES, mlp, plain_step, private, tensors
from inside_parts import copied_buffers
from torch import nn

from dpengine.capture.buffers import BufferWatch
from dpengine.capture.module_tables import ModuleTables
from dpengine.errors import BufferUpdateError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")


class ModelWithWrites(nn.Module):
    """Model that writes its own buffer, without a torch layer that does so."""

    def __init__(self, write, *, start=None, persistent=True):
        super().__init__()
        self.net = mlp()
        self.write = write
        self.register_buffer("kept", torch.zeros(FEATURES) if start is None else start, persistent=persistent)

    def forward(self, inputs):
        self.write(self, inputs.detach())
        return self.net(inputs)


def in_place(model, inputs):
    model.kept.mul_(0.9).add_(inputs.sum(dim=0), alpha=0.1)


def replaced(model, inputs):
    model.kept = 0.9 * model.kept + 0.1 * inputs.sum(dim=0)


def through_data(model, inputs):
    model.kept.data.copy_(inputs.sum(dim=0))


def data_replaced(model, inputs):
    model.kept.data = inputs.sum(dim=0)


def without_grad(model, inputs):
    with torch.no_grad():
        model.kept += inputs.sum(dim=0)


def grown(model, inputs):
    model.kept = torch.cat([model.kept, inputs.flatten()])


def one_entry(model, inputs):
    model.kept[1] = inputs[0, 1] if len(inputs) else 1.0


def registered(model, inputs):
    if "later" not in model._buffers:
        model.register_buffer("later", inputs.sum(dim=0))


def removed(model, inputs):
    model.kept = None


def registered_on_a_child(model, inputs):
    if not hasattr(model.net[1], "seen"):
        model.net[1].register_buffer("seen", inputs.sum(dim=0))


def count_samples(model, inputs):
    model.kept += len(inputs)


WRITES = [
    in_place, replaced, through_data, data_replaced, without_grad, grown, one_entry, registered, removed,
    registered_on_a_child, count_samples,
]  # fmt: skip


def count_calls(model, inputs):
    model.kept += 1


def count_calls_out_of_place(model, inputs):
    model.kept = model.kept + 1


def equal_values(model, inputs):
    model.kept.fill_(3.0)
    model.kept.zero_()


def cast_and_back(model, inputs):
    model.kept = model.kept.to(torch.float64).to(torch.float32)


def no_write(model, inputs):
    assert model.kept is not None


COUNTER = torch.zeros((), dtype=torch.long)
HARMLESS = [
    (count_calls, COUNTER),
    (count_calls_out_of_place, COUNTER),
    (equal_values, None),
    (cast_and_back, None),
    (no_write, None),
]


def watched_pass(watch, model, inputs):
    watch.note()
    model(inputs)
    watch.check_not_written()


@pytest.mark.parametrize("write", [in_place, replaced, registered, removed], ids=lambda write: write.__name__)
@pytest.mark.hazard("M3")
def test_a_buffer_write_in_a_later_pass_is_found(write):
    calls = []

    def late(model, inputs):
        calls.append(1)
        if len(calls) > 6:
            write(model, inputs)

    model = ModelWithWrites(late)
    watch = BufferWatch(ModuleTables(model))
    for _ in range(6):
        watched_pass(watch, model, tensors()[0])
    with pytest.raises(BufferUpdateError, match="'later'" if write is registered else "'kept'"):
        watched_pass(watch, model, tensors()[0])


@pytest.mark.hazard("M3")
def test_writes_that_do_not_change_the_version_are_found_at_the_next_comparison_of_values():
    calls = []

    def late(model, inputs):
        calls.append(1)
        if len(calls) > 4:
            through_data(model, len(calls) * inputs)

    model = ModelWithWrites(late)
    watch = BufferWatch(ModuleTables(model))
    with pytest.raises(BufferUpdateError, match="'kept'"):
        for _ in range(8):
            watched_pass(watch, model, tensors()[0])
    assert len(calls) <= 8


@pytest.mark.hazard("M3")
def test_put_back_restores_buffers_after_an_interrupted_pass():
    model = ModelWithWrites(in_place)
    watch = BufferWatch(ModuleTables(model))
    watch.note()
    with pytest.raises(RuntimeError):
        model(tensors()[0][:, :2].repeat(1, 2)[:, :3])
    assert watch.put_back() in ([], [("kept", model)])
    assert not model.kept.any()


@pytest.mark.hazard("M3")
def test_changes_between_passes_are_accepted():
    model = ModelWithWrites(no_write)
    watch = BufferWatch(ModuleTables(model))
    for value in (1.0, 2.0, 3.0, 4.0):
        model.kept.fill_(value)
        watched_pass(watch, model, tensors()[0])
    model.load_state_dict({**model.state_dict(), "kept": torch.full((FEATURES,), 5.0)})
    watched_pass(watch, model, tensors()[0])
    assert model.kept[0] == 5


@pytest.mark.hazard("M3")
def test_an_unmodified_nan_buffer_is_accepted():
    model = ModelWithWrites(no_write, start=torch.tensor([float("nan"), 1.0]))
    watched_pass(BufferWatch(ModuleTables(model)), model, tensors()[0])


# In a private run


@pytest.mark.one_in(2, "mode", "write", "persistent", others="slow")
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.hazard("M3")
def test_a_buffer_that_is_written_in_any_form_is_rejected_and_restored(mode, write, persistent):
    model = ModelWithWrites(write, persistent=persistent, start=COUNTER.clone() if write is count_samples else None)
    before = {name: value.clone() for name, value in model.named_buffers()}
    name = {registered: "later", registered_on_a_child: "net.1.seen"}.get(write, "kept")
    engine, model, optimizer, loader = private(model, tensors(), mode=mode, noise_multiplier=1.0)
    with pytest.raises(BufferUpdateError, match=rf"DPE026.*Buffer '{name}'.*without noise"):
        plain_step(model, optimizer, *next(iter(loader)))
    engine.detach(model)
    assert [charge.kind for charge in engine.ledger.history] == ["void"]
    after = dict(model.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.one_in(2, "mode", "write", others="slow")
@pytest.mark.parametrize(("write", "start"), HARMLESS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("mode", ["auto", "functorch", "ghost"])
@pytest.mark.hazard("M3")
def test_writes_that_do_not_depend_on_the_batch_are_accepted(mode, write, start):
    model = ModelWithWrites(write, start=None if start is None else start.clone())
    _, model, optimizer, loader = private(model, tensors(), mode=mode)
    for _ in range(9):
        for batch in loader:
            plain_step(model, optimizer, *batch)


@pytest.mark.hazard("M3")
def test_an_evaluation_may_write_buffers():
    _, model, optimizer, loader = private(ModelWithWrites(in_place), tensors())
    model.eval()
    F.cross_entropy(model(tensors()[0]), torch.zeros(6, dtype=torch.long) % CLASSES)
    model.write = no_write
    model.train()
    for batch in loader:
        plain_step(model, optimizer, *batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_write_to_a_large_parameter_that_bypasses_its_version_is_found_by_its_digest(dtype):
    class ParameterWriter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.writes = nn.Parameter(torch.randn(300, 300, dtype=dtype)), False

        def forward(self, inputs):
            if self.writes:
                self.weight.data[7, 3] += 0.5
            return inputs @ self.weight

    model = ParameterWriter()
    watch = BufferWatch(ModuleTables(model))
    for writes in (False, True):
        model.writes = writes
        watch.note()
        model(torch.ones(2, 300, dtype=dtype))
        if not writes:
            watch.check_not_written()
    assert copied_buffers(watch) == 0
    with pytest.raises(BufferUpdateError, match="'weight'"):
        watch.check_not_written()
