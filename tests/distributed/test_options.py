"""Options of wrappers of a model: the run equals that of one process, or is rejected by name."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from case_models import Parts
from launch import launched
from spread_runs import VOCABULARY, WIDTH, Block, Words, data, difference, plain, whole_weights, wrapped
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from dpengine import PrivacyEngine
from dpengine.grad_samplers.table import sampler_for


def itself(model):
    return model


def fully(**options):
    """Shards each block and the rest."""

    def wrap(model):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, **options)
        return model

    return wrap


def each_layer(model):
    """Shards every layer separately, which changes its class."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):
        if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm)):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def mixed(reduce_dtype):
    return fully(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype))


def copies(**options):
    return lambda model: nn.parallel.DistributedDataParallel(model, **options)


def kept(model):
    """Checkpoints each block, so that it runs again in the backward pass."""
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


class Recomputed(Words):
    """The blocks run again in the backward pass."""

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def padded():
    """An embedding with a padding index, which has no gradient."""
    model = Words()
    model.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
    return model


def softmax_scaled(x, weight):
    """Multiplies samples by the result of an operation that no rule covers."""
    return x * weight.softmax(0)


class HoldsSoftmax(Words):
    """Has the parameter in a separate module."""

    def __init__(self):
        super().__init__()
        weight = nn.Parameter(torch.arange(WIDTH) / WIDTH)
        self.softmax = Parts(lambda m, x: softmax_scaled(x, m.weight), weight=weight)

    def forward(self, words):
        return super().forward(words) + self.head(self.softmax(self.embedding(words)))


class IsSoftmax(Words):
    """Has the parameter next to layers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(WIDTH) / WIDTH)

    def forward(self, words):
        return super().forward(words) + self.head(softmax_scaled(self.embedding(words), self.weight))


def split(model):
    return wrapped(model, "tp")


def sequences(model):
    """Applies sequence parallelism to the norms."""
    given = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan = {"embedding": given, "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    for i in range(len(model.blocks)):
        plan[f"blocks.{i}.norm"] = SequenceParallel()
        plan[f"blocks.{i}.inner"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{i}.outer"] = RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


@contextlib.contextmanager
def without_gradient_sync(model, chunk):
    model.set_requires_gradient_sync(chunk % 3 == 2)
    yield


def without_sync(model, chunk):
    return contextlib.nullcontext() if chunk % 3 == 2 else model.no_sync()


@dataclass(frozen=True)
class Case:
    """An option.

    Attributes:
        wrap: Wraps the model.
        make: Returns the model.
        around: Context of each forward and backward pass, given the model and the chunk.
        more: Arguments of ``make_private``.
        says: Expected error; None if the run equals that of one process.
    """

    wrap: Callable[[Any], Any]
    make: Callable[[], Any] = plain
    around: Callable[[Any, int], Any] = lambda model, chunk: contextlib.nullcontext()
    more: dict[str, Any] = field(default_factory=dict)
    says: str | None = None


THREE_CHUNKS = {"accumulation_steps": 3}
AGAIN = "UnsupportedLayerError.*runs the model again"
CASES = {
    "fsdp-checkpoint-wrapper-inside": Case(lambda model: fully()(kept(model))),
    "fsdp-checkpoint-wrapper-outside": Case(lambda model: kept(fully()(model))),
    "fsdp-checkpoint-non-reentrant": Case(fully(), make=Recomputed),
    "fsdp-without-gradient-sync": Case(fully(), around=without_gradient_sync, more=THREE_CHUNKS),
    "fsdp-offload": Case(fully(offload_policy=CPUOffloadPolicy(pin_memory=False))),  # pinning needs an accelerator
    "fsdp-each-layer": Case(each_layer),
    "fsdp-no-reshard": Case(fully(reshard_after_forward=False)),
    "fsdp-hooks": Case(fully(), more={"grad_sample_mode": "hooks"}),
    "fsdp-functorch": Case(fully(), more={"grad_sample_mode": "functorch"}),
    "fsdp-ghost": Case(fully(), more={"grad_sample_mode": "ghost"}, says=AGAIN),
    "fsdp-ew": Case(fully(), more={"grad_sample_mode": "ew"}, says=AGAIN),
    "fsdp-separate-module": Case(fully(), make=HoldsSoftmax),
    "fsdp-own-parameter": Case(
        fully(), make=IsSoftmax, says=r"UnsupportedLayerError.*'weight'.*Freeze it, or move it to a separate module"
    ),
    "ddp-checkpoint-wrapper": Case(lambda model: copies()(kept(model))),
    "ddp-checkpoint-non-reentrant": Case(copies(), make=Recomputed),
    "ddp-no-sync": Case(copies(), around=without_sync, more=THREE_CHUNKS),
    "ddp-find-unused": Case(copies(find_unused_parameters=True)),
    "ddp-static-graph": Case(copies(static_graph=True)),
    "ddp-bucket-view": Case(copies(gradient_as_bucket_view=True)),
    "ddp-hooks": Case(copies(), more={"grad_sample_mode": "hooks"}),
    "ddp-functorch": Case(copies(), more={"grad_sample_mode": "functorch"}),
    "ddp-ghost": Case(copies(), more={"grad_sample_mode": "ghost"}),
    "ddp-ew": Case(copies(), more={"grad_sample_mode": "ew"}),
    "split-padding": Case(split, make=padded),
    "split-sequences": Case(sequences, says=r"UnsupportedLayerError.*'blocks.0.norm' \(LayerNorm\)"),
}
EXACT = [name for name, case in CASES.items() if case.says is None]
REJECTED = [name for name, case in CASES.items() if case.says is not None]


def run(case, steps=6):
    """Returns the weights at the end, or the error."""
    torch.manual_seed(0)
    try:
        model = case.wrap(case.make())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        loader = DataLoader(data(), batch_size=12)
        options = {"noise_multiplier": 0.8, "max_grad_norm": 0.7, **case.more}
        model, optimizer, loader = PrivacyEngine(seed=1).make_private(model, optimizer, loader, **options)
        taken = 0
        for chunk, (words, following) in enumerate(loader):
            optimizer.zero_grad()
            with case.around(model, chunk):
                F.cross_entropy(model(words).flatten(0, 1), following.flatten()).backward()
            optimizer.step()
            taken += not optimizer.step_was_skipped
            if taken == steps:
                break
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return {name.replace("_checkpoint_wrapped_module.", ""): w for name, w in whole_weights(model).items()}


def all_runs(names):
    return {name: run(CASES[name]) for name in names}


def mixed_runs():
    """Returns runs in bfloat16 whose sums are exchanged in float32 and in bfloat16."""
    return [run(Case(mixed(dtype))) for dtype in (torch.float32, torch.bfloat16)]


@pytest.fixture(scope="module")
def of_ranks(request):
    """Results of the runs of two processes that the chosen tests need. The processes start once."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    return launched(2, results, [name for name in CASES if {"name": name} in params])


def results(names):
    return all_runs(names) | {"mixed": mixed_runs()}


def assert_no_differences(of_ranks):
    first, *others = of_ranks
    assert all(torch.equal(w, first[name]) for other in others for name, w in other.items())


@pytest.fixture(scope="module")
def of_one():
    """Runs of one process, by model and number of chunks."""
    keys = {(CASES[name].make, *(CASES[name].more.keys() & THREE_CHUNKS.keys())) for name in EXACT}
    return {(make, *chunks): run(Case(itself, make, more=THREE_CHUNKS if chunks else {})) for make, *chunks in keys}


@pytest.mark.one_in(5, "name", others="slow")
@pytest.mark.parametrize("name", EXACT)
def test_an_option_leaves_the_run_of_one_process(of_ranks, of_one, name):
    case, found = CASES[name], [one[name] for one in of_ranks]
    assert all(isinstance(one, dict) for one in found), found
    assert_no_differences(found)
    expected = of_one[(case.make, *(case.more.keys() & THREE_CHUNKS.keys()))]
    assert found[0].keys() == expected.keys()
    assert difference(found[0], expected) < 1e-6


def rules_of_sharded_layers():
    """Returns the rule of each kind of layer, unsharded and sharded."""
    layers = [nn.Linear(4, 4), nn.Embedding(4, 4), nn.LayerNorm(4)]
    before = [sampler_for(layer) for layer in layers]
    return [
        old is not None and sampler_for(fully_shard(layer)) is old for layer, old in zip(layers, before, strict=True)
    ]


def test_a_separately_sharded_layer_has_the_rule_of_its_class():
    assert launched(1, rules_of_sharded_layers) == [[True, True, True]]


@pytest.mark.parametrize("name", REJECTED)
def test_an_option_that_is_not_supported_is_rejected_by_name(of_ranks, name):
    for one in of_ranks:
        assert re.search(CASES[name].says, str(one[name])), one[name]


@pytest.mark.hazard("X4")
def test_mixed_precision_is_that_of_one_process_and_sums_are_exchanged_in_float32(of_ranks):
    """bfloat16 has 8 bits: the sum of each rank is rounded by 0.4 %, in an order that depends on the ranks."""
    of_two = [one["mixed"] for one in of_ranks]
    assert_no_differences([weights for weights, _ in of_two])
    assert_no_differences(of_two[0])
    ((alone, _),) = launched(1, mixed_runs)
    assert difference(of_two[0][0], alone) < 1e-3
    assert 1e-5 < difference(of_two[0][0], run(Case(itself))) < 1e-2  # rounded to bfloat16, and not much else
