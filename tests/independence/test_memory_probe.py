"""The run-time check for state across batches: attributes that carry data to the next batch are rejected."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from faults.neighbours import CLASSES, FEATURES, tensors
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import GradSampleModule, PrivacyEngine
from dpengine.errors import BufferUpdateError, PrivacyWarning

MODES = ["auto", "ghost"]
STEPS = 4


class StatefulModel(nn.Module):
    """Model with a body, a head, the given forward function, and attributes for state on model and layer."""

    def __init__(self, run):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.run, self.kept, self.rows = run, None, []
        self.table = {"seen": []}
        self.mean = torch.zeros(8)
        self.calls = 0

    def forward(self, inputs):
        return self.run(self, inputs)


def plain_step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def run_training(model, step=plain_step, *, mode="auto", steps=STEPS, samples=6):
    """Trains on batches of different data."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(samples * steps, FEATURES), torch.arange(samples * steps) % CLASSES)
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sampling": "shuffle", "grad_sample_mode": mode}
    loader = DataLoader(data, batch_size=samples)
    model, optimizer, loader = PrivacyEngine(seed=0).make_private(model, optimizer, loader, **settings)
    for inputs, targets in loader:
        step(model, optimizer, inputs, targets)


# State that is read


def last_batch(model, inputs):
    hidden = torch.tanh(model.body(inputs))
    before, model.kept = model.kept, hidden.detach().mean(dim=0)
    return model.head(hidden if before is None else hidden - before)


def with_graph(model, inputs):
    hidden = torch.tanh(model.body(inputs))
    before, model.kept = model.kept, hidden
    return model.head(hidden if before is None else hidden + before.detach()[:1])


def one_sample(model, inputs):
    hidden = torch.tanh(model.body(inputs))
    before, model.kept = model.kept, hidden[0].detach()
    return model.head(hidden if before is None else hidden * (1 + before))


def running_mean(model, inputs):
    hidden, before = torch.tanh(model.body(inputs)), model.mean.clone()
    model.mean.mul_(0.9).add_(hidden.detach().mean(dim=0), alpha=0.1)
    return model.head(hidden - before)


def through_data(model, inputs):
    hidden, before = torch.tanh(model.body(inputs)), model.mean.clone()
    model.mean.data.copy_(hidden.detach().mean(dim=0))
    return model.head(hidden - before)


def growing_list(model, inputs):
    hidden, before = torch.tanh(model.body(inputs)), list(model.rows)
    model.rows.append(hidden.detach())
    return model.head(hidden + sum(part.mean(dim=0) for part in before))


def list_in_a_dict(model, inputs):
    hidden, before = torch.tanh(model.body(inputs)), list(model.table["seen"])
    model.table["seen"].append(hidden.detach().sum(dim=0))
    return model.head(hidden + sum(before))


def tensor_in_a_dict(model, inputs):
    hidden = torch.tanh(model.body(inputs))
    before, model.table["last"] = model.table.get("last"), hidden.detach().amax(dim=0)
    return model.head(hidden if before is None else hidden / (1 + before.abs()))


def number(model, inputs):
    before, model.kept = model.kept, inputs.abs().max().item()
    return model.head(torch.tanh(model.body(inputs / (before or 1.0))))


def array(model, inputs):
    before, model.kept = model.kept, inputs.mean(dim=0).numpy()
    shift = torch.zeros(FEATURES) if before is None else torch.from_numpy(before)
    return model.head(torch.tanh(model.body(inputs - shift)))


@dataclasses.dataclass
class Statistics:
    mean: torch.Tensor


def field_of_an_object(model, inputs):
    hidden = torch.tanh(model.body(inputs))
    before, model.kept = model.kept, Statistics(hidden.detach().mean(dim=0))
    return model.head(hidden if before is None else hidden - before.mean)


def layer_attribute(model, inputs):
    hidden = torch.tanh(model.body(inputs))
    before, model.body.last = getattr(model.body, "last", None), hidden.detach().mean(dim=0)
    return model.head(hidden if before is None else hidden - before)


READ_STATE = {
    last_batch: "kept", with_graph: "kept", one_sample: "kept", running_mean: "mean", through_data: "mean",
    growing_list: "rows", list_in_a_dict: "table", tensor_in_a_dict: "table", number: "kept", array: "kept",
    field_of_an_object: "kept", layer_attribute: "last",
}  # fmt: skip


@pytest.mark.one_in(2, "mode", "run", others="slow")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("run", READ_STATE, ids=lambda run: run.__name__)
def test_attribute_that_carries_data_to_the_next_batch_is_rejected(run, mode):
    where = r"of layer 'body' \(Linear\)" if run is layer_attribute else r"of the model \(StatefulModel\)"
    with pytest.raises(
        BufferUpdateError, match=rf"DPE026.*Attribute '{READ_STATE[run]}' {where} holds data of a batch"
    ):
        run_training(StatefulModel(run), mode=mode)


def test_state_first_used_after_several_batches_is_found_by_a_later_check():
    def late(model, inputs):
        model.calls += 1
        return last_batch(model, inputs) if model.calls > 5 else model.head(model.body(inputs))

    run_training(StatefulModel(late), steps=8)
    with pytest.raises(BufferUpdateError, match="'kept'"):
        run_training(StatefulModel(late), steps=9)


def test_state_shared_by_two_attributes_is_rejected():
    def shared(model, inputs):
        hidden = torch.tanh(model.body(inputs))
        model.rows.append(hidden.detach().mean(dim=0))
        return model.head(model.reads(hidden))

    model = StatefulModel(shared)
    model.reads = Parts(lambda m, hidden: hidden + sum(m.rows[:-1]), rows=model.rows)
    with pytest.raises(BufferUpdateError, match="'rows'"):
        run_training(model)


@pytest.mark.filterwarnings("ignore:.*DPE012.*later one")
def test_a_wrapped_model_is_checked():
    wrapped = GradSampleModule(StatefulModel(last_batch), loss_reduction="sum")
    with pytest.raises(BufferUpdateError, match="'kept'"):
        for seed in range(2):
            torch.manual_seed(seed)
            wrapped(torch.randn(5, FEATURES)).square().sum().backward()


# Attributes that are not state across batches


def kept_for_inspection(model, inputs):
    model.kept = torch.tanh(model.body(inputs))
    return model.head(model.kept)


def detached_for_inspection(model, inputs):
    hidden = torch.tanh(model.body(inputs))
    model.rows.append(hidden.detach())
    model.table["norm"] = hidden.norm(dim=1).mean().item()
    return model.head(hidden)


def written_before_it_is_read(model, inputs):
    model.kept = inputs * 2
    return model.head(torch.tanh(model.body(model.kept)))


def cleared_at_the_start(model, inputs):
    model.rows.clear()
    for part in inputs.split(2, dim=1):
        model.rows.append(part)
    return model.head(torch.tanh(model.body(torch.cat(model.rows, dim=1))))


def mask_by_shape(model, inputs):
    if model.kept is None or model.kept.shape != inputs.shape:
        model.kept = torch.ones(inputs.shape)
    return model.head(torch.tanh(model.body(inputs * model.kept)))


def rotary_table(model, inputs):
    if inputs.shape[1] not in model.table:
        model.table[inputs.shape[1]] = torch.arange(inputs.shape[1]).cos()
    return model.head(torch.tanh(model.body(inputs * model.table[inputs.shape[1]])))


def counter(model, inputs):
    model.calls += 1
    return model.head(torch.tanh(model.body(inputs)) / model.calls)


def counted_rows(model, inputs):
    model.calls += len(inputs)
    return model.head(torch.tanh(model.body(inputs)))


def generator(model, inputs):
    if model.kept is None:
        model.kept = torch.Generator().manual_seed(0)
    hidden = model.body(inputs)
    return model.head(hidden + torch.randn(hidden.shape, generator=model.kept))


def memoized(model, inputs):
    """Caches the results of a pure function of the data."""
    key = float(inputs[0, 0].detach())
    model.table[key] = inputs.detach().tanh()
    return model.head(model.body(model.table[key]))


def penalty_of_the_pass(model, inputs):
    hidden = torch.tanh(model.body(inputs))
    model.kept = hidden.square().mean(dim=1)
    return model.head(hidden)


def modules_in_a_list(model, inputs):
    model.rows[:] = [model.body, model.head]
    return model.rows[1](torch.tanh(model.rows[0](inputs)))


def dropped_hidden(model, inputs):
    hidden = F.dropout(torch.tanh(model.body(inputs)), 0.5, model.training)
    model.kept = hidden.detach()
    return model.head(hidden)


def previous_weights(model, inputs):
    """Stores weights, which are already private."""
    before, model.kept = model.kept, model.body.weight.detach().clone()
    shift = 0.0 if before is None else before.mean()
    return model.head(torch.tanh(model.body(inputs) - shift))


SOUND = [
    kept_for_inspection, detached_for_inspection, written_before_it_is_read, cleared_at_the_start, mask_by_shape,
    rotary_table, counter, counted_rows, generator, memoized, penalty_of_the_pass, modules_in_a_list, dropped_hidden,
    previous_weights,
]  # fmt: skip


@pytest.mark.one_in(2, "mode", "run", others="slow")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("run", SOUND, ids=lambda run: run.__name__)
def test_an_attribute_that_is_not_read_later_or_holds_no_data_is_accepted(run, mode):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*DPE012.*attribute")
        run_training(StatefulModel(run), mode=mode)


def test_reset_state_is_accepted_and_detached_state_is_rejected():
    class Steps(nn.Module):
        """A recurrent model that the loop calls for each time step."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.cell, self.head, self.state = nn.Linear(1 + 4, 4), nn.Linear(4, CLASSES), None

        def forward(self, inputs):
            state = torch.zeros(len(inputs), 4) if self.state is None else self.state
            self.state = torch.tanh(self.cell(torch.cat([inputs, state], dim=1)))
            return self.head(self.state)

    def over_time(end):
        def step(model, optimizer, inputs, targets):
            optimizer.zero_grad()
            if end == "reset":
                model.state = None
            loss = 0.0
            for t in range(FEATURES):
                loss = loss + F.cross_entropy(model(inputs[:, t : t + 1]), targets)
            loss.backward()
            optimizer.step()
            model.state = model.state.detach()

        return step

    run_training(Steps(), over_time("reset"))
    with pytest.raises(BufferUpdateError, match="'state'"):
        run_training(Steps(), over_time("detach"))


def test_a_momentum_encoder_is_accepted():
    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)
            self.register_buffer("average", self.body.weight.detach().clone())
            self.attribute = self.body.weight.detach().clone()

        def forward(self, inputs):
            return self.head(torch.tanh(self.body(inputs)) + inputs @ self.average.T + inputs @ self.attribute.T)

    def step(model, optimizer, inputs, targets):
        plain_step(model, optimizer, inputs, targets)
        with torch.no_grad():
            model.average.mul_(0.9).add_(model.body.weight, alpha=0.1)
            model.attribute = 0.9 * model.attribute + 0.1 * model.body.weight

    run_training(Momentum(), step)


def test_memory_check_does_not_modify_attributes():
    model = StatefulModel(detached_for_inspection)
    run_training(model, steps=3)
    assert len(model.rows) == 3 and [len(rows) for rows in model.rows] == [6, 6, 6]


def test_changing_attribute_is_reported_if_the_forward_pass_cannot_be_repeated():
    def run(m, inputs):
        m.kept = inputs.mean()
        if not torch.equal(inputs, m.first):
            raise RuntimeError("other data")
        return m.body(inputs)

    model = Parts(run, body=nn.Linear(FEATURES, CLASSES), kept=None, first=tensors()[0])
    with pytest.warns(PrivacyWarning, match=r"DPE012.*attribute of the model changed.*could not run with other data"):
        GradSampleModule(model, loss_reduction="sum")(model.first.clone()).square().sum().backward()


# Buffers that the loop writes


def centered():
    torch.manual_seed(0)
    run = lambda m, inputs: m.net(inputs * m.net[0].scale) - m.center  # noqa: E731
    m = Parts(run, net=nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)))
    m.register_buffer("center", torch.zeros(CLASSES))
    m.net[0].register_buffer("scale", torch.ones(()))
    return m


def set_center(model, value):
    model.center = value


def step_with_write(write):
    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, targets)
        with torch.no_grad():
            write(model, inputs, outputs.detach())
        loss.backward()
        optimizer.step()

    return step


LOOP_WRITES = {
    "in_place": ("Buffer 'center'", lambda m, x, o: m.center.mul_(0.9).add_(o.mean(dim=0), alpha=0.1)),
    "replaced": ("Buffer 'center'", lambda m, x, o: set_center(m, 0.9 * m.center + 0.1 * o.mean(dim=0))),
    "part_of_it": ("Buffer 'center'", lambda m, x, o: m.center[1].copy_(o[0, 1])),
    "past_the_version": ("Buffer 'center'", lambda m, x, o: m.center.data.copy_(o.mean(dim=0))),
    "by_the_input": ("Buffer 'net.0.scale'", lambda m, x, o: m.net[0].scale.copy_(1 / x.abs().max())),
    "into_out": ("Buffer 'center'", lambda m, x, o: torch.mean(o, dim=0, out=m.center)),
    "a_frozen_parameter": ("Parameter 'net.0.bias'", lambda m, x, o: m.net[0].bias.copy_(-x.mean().expand(8))),
}


@pytest.mark.parametrize(("name", "write"), LOOP_WRITES.values(), ids=LOOP_WRITES)
def test_buffer_written_from_the_batch_is_rejected(name, write):
    with pytest.raises(BufferUpdateError, match=rf"DPE026.*{name} was written by the loop"):
        run_training(centered(), step_with_write(write))


OTHER_WRITES = {
    "a_constant": lambda m, x, o: m.center.add_(0.1),
    "a_schedule": lambda m, x, o: m.center.fill_(float(np.cos(len(x)))),
    "noise": lambda m, x, o: m.center.normal_(),
    "weights": lambda m, x, o: m.center.mul_(0.9).add_(m.net[2].bias, alpha=0.1),
    "a_copy_of_its_own": lambda m, x, o: m.center.clone().add_(o.mean(dim=0)),
}


@pytest.mark.parametrize("write", OTHER_WRITES.values(), ids=OTHER_WRITES)
def test_buffer_written_from_data_independent_values_is_accepted(write):
    run_training(centered(), step_with_write(write))


def registers_hook(model, inputs):
    """Registers a hook in the first forward pass, as libraries with optional hidden states do."""
    if model.calls == 0:
        model.body.register_forward_hook(lambda module, args, output: model.rows.append(output))
    model.calls = 1
    model.rows = []
    model.body(inputs)
    (hidden,) = model.rows
    model.rows = []
    return model.head(hidden.tanh())


@pytest.mark.parametrize("mode", [*MODES, "whole_model"])
def test_hook_registered_in_the_forward_pass_is_added_once(mode):
    model = StatefulModel(registers_hook)
    run_training(model, mode=mode, samples=8)
    assert len(model.body._forward_hooks) == 1
