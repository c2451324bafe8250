"""Computes the resources that a private run needs in each process: memory, messages, noise, products and sampling.

Assumptions about the engine: sums and noise are float32; each process generates the noise of its own share; sums are
exchanged in buckets, once per logical batch between replicas and once per pass between shards; the inputs and output
gradients of all layers are stored until the norms are known; each process draws the whole logical batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOAT = 4  # bytes
BUCKET_BYTES = 25 * 2**20
BUCKETS_IN_TRANSIT = 2  # number of buckets of sums that are stored while they are exchanged


@dataclass(frozen=True)
class Machine:
    """Resources of one process while all processes run.

    Attributes:
        memory: Bytes.
        memory_rate: Bytes read or written per second.
        products: Floating-point operations of matrix products per second.
        link_rate: Bytes sent per second.
        near_rate: Bytes sent per second between processes that split the same layers; None for ``link_rate``.
        latency: Seconds per hop of a message.
        normal: Seconds per normal number.
        draw: Seconds per drawn index of a batch.
        draw_bytes: Bytes per index while a batch is drawn.
        overlaps: Whether messages overlap with matrix products.
        scatters: Whether a reduce-scatter sends each process only its part; gloo sends the whole to all.
    """

    memory: float
    memory_rate: float
    products: float
    link_rate: float
    latency: float
    normal: float
    draw: float
    near_rate: float | None = None
    draw_bytes: float = 80.0
    overlaps: bool = False
    scatters: bool = True


@dataclass(frozen=True)
class Run:
    """Run, and its distribution over processes.

    Attributes:
        parameters: Number of all parameters.
        microbatch: Number of samples of one pass.
        passes: Number of passes of a logical batch.
        examples: Number of examples in the data set.
        replicas: Number of copies of the model, which process different samples.
        shards: Number of processes that store the shards of one copy and process different samples.
        splits: Number of processes that split each layer and process the same samples.
        positions: Number of positions of a sample: tokens, or 1 for vectors.
        kept_bytes: Bytes of inputs and output gradients of all layers, per position and process.
        ordinary_bytes: Bytes that an ordinary backward pass stores per position.
        norm_products: Floating-point operations for the norm of one sample, in addition to an ordinary pass.
        split_bytes: Bytes that split layers exchange per position in an ordinary pass.
        split_messages: Number of messages for ``split_bytes``.
        tensors: Number of parameter tensors. A bucket contains whole tensors.
        groups: Number of calls of ``fully_shard``.
        group: Number of parameters of the largest group.
        largest: Number of elements of the largest parameter tensor.
        weight_bytes: Bytes of a stored or gathered parameter.
        optimizer_bytes: Bytes of the optimizer state per parameter.
        bands: Number of bands of the noise; 1 for independent noise.
    """

    parameters: float
    microbatch: int
    passes: int = 1
    examples: float = 1e6
    replicas: int = 1
    shards: int = 1
    splits: int = 1
    positions: int = 1
    kept_bytes: float = 0.0
    ordinary_bytes: float = 0.0
    norm_products: float = 0.0
    split_bytes: float = 0.0
    split_messages: int = 0
    tensors: int = 1
    groups: int = 1
    group: float = 0.0
    largest: float = 0.0
    weight_bytes: int = FLOAT
    optimizer_bytes: int = 0
    bands: int = 1

    @property
    def ranks(self) -> int:
        """Returns the number of processes."""
        return self.replicas * self.shards * self.splits

    @property
    def logical(self) -> int:
        """Returns the number of samples of a logical batch."""
        return self.microbatch * self.passes * self.replicas * self.shards

    @property
    def summed_numel(self) -> float:
        """Returns the number of gradient elements that a process sums."""
        return self.parameters / self.splits

    @property
    def stored_numel(self) -> float:
        """Returns the number of these elements that it stores."""
        return self.summed_numel / self.shards


@dataclass(frozen=True)
class Message:
    """Messages of one kind in which a process takes part, during one logical batch.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"``.
        ranks: Number of processes that take part.
        count: Number of messages.
        size: Bytes of all sums or gathered tensors.
        near: Whether only processes that split the same layers take part.
        private: Whether only private training needs them.
    """

    kind: str
    ranks: int
    count: int
    size: float
    near: bool = False
    private: bool = False


def memory(run: Run, machine: Machine) -> dict[str, float]:
    """Returns the bytes of a process by purpose. See `peak`."""
    whole = FLOAT * run.summed_numel if run.shards > 1 else 0.0
    bucket = min(whole, BUCKET_BYTES + FLOAT * run.largest / run.splits)
    positions = run.microbatch * run.positions
    return {
        "weights": run.weight_bytes * run.stored_numel,
        "optimizer": run.optimizer_bytes * run.stored_numel,
        "sums": FLOAT * run.stored_numel,
        "noise of past steps": FLOAT * (run.bands - 1) * run.stored_numel / run.replicas,
        "sums in transit": min(BUCKETS_IN_TRANSIT * bucket, whole) + bucket + whole / run.shards,
        "gathered weights": 2 * run.weight_bytes * run.group / run.splits if run.shards > 1 else 0.0,
        "inputs and gradients of layers": max(run.kept_bytes, run.ordinary_bytes) * positions,
        "draw": machine.draw_bytes * run.logical,
    }


def peak(run: Run, machine: Machine) -> float:
    """Returns a bound on the bytes of a process. Sums are exchanged after the gathered weights are freed."""
    found = memory(run, machine)
    return sum(found.values()) - min(found["sums in transit"], found["gathered weights"])


def messages(run: Run) -> list[Message]:
    """Returns the messages of a process in a logical batch."""
    found: list[Message] = []
    if run.shards > 1:
        gathers = 2 * run.groups - 1  # the outermost group stays gathered after the forward pass
        size = run.weight_bytes * (2 * run.summed_numel - run.summed_numel / run.groups)
        found.append(Message("all_gather", run.shards, gathers * run.passes, size * run.passes))
        size = FLOAT * run.summed_numel
        found.append(
            Message("reduce_scatter", run.shards, min(_buckets(size), run.tensors) * run.passes, size * run.passes)
        )
    if run.replicas > 1:
        size = FLOAT * run.stored_numel
        found.append(Message("all_reduce", run.replicas, _buckets(size), size))
    if run.splits > 1:
        positions = run.microbatch * run.passes * run.positions
        count = run.split_messages * run.passes
        found.append(Message("all_reduce", run.splits, count, run.split_bytes * positions, near=True))
        norms = 8 * (3 * run.microbatch + 16) * run.passes
        found.append(Message("all_reduce", run.splits, run.passes, norms, near=True, private=True))
    return found


def _buckets(size: float) -> int:
    return math.ceil(size / BUCKET_BYTES)


def exchange_seconds(message: Message, machine: Machine) -> float:
    """Returns the seconds of messages in rings: per hop, the latency and the time to send one part."""
    halves = 2 if message.kind == "all_reduce" or (message.kind == "reduce_scatter" and not machine.scatters) else 1
    hops = halves * (message.ranks - 1)
    rate = machine.near_rate if message.near and machine.near_rate is not None else machine.link_rate
    return hops * (message.count * machine.latency + message.size / message.ranks / rate)


def noise_seconds(run: Run, machine: Machine) -> float:
    """Returns the seconds for the noise of a step, for the share of one process."""
    share = run.stored_numel / run.replicas
    # Each band is read once; the other passes read or write four numbers.
    read_bytes = FLOAT * (run.bands + 3) if run.bands > 1 else 0
    return share * (machine.normal + read_bytes / machine.memory_rate)


def product_seconds(run: Run, machine: Machine, *, private: bool = True) -> float:
    """Returns the seconds for the matrix products of a logical batch: forward, both gradients, and norms."""
    samples = run.microbatch * run.passes
    each = 6 * run.summed_numel * run.positions + (run.norm_products / run.splits if private else 0.0)
    return samples * each / machine.products


def pass_seconds(run: Run, machine: Machine) -> float:
    """Returns the seconds for passes over memory: sums of each backward pass, and the update of the weights."""
    sums = FLOAT * run.summed_numel * (1 if run.passes == 1 and run.shards == 1 else 3) * run.passes
    copies = (
        4 * FLOAT * run.summed_numel * run.passes if run.shards > 1 else 0.0
    )  # into buckets, and of gathered weights
    update = (3 * FLOAT + 2 * run.optimizer_bytes) * run.stored_numel
    return (sums + copies + update) / machine.memory_rate


def draw_seconds(run: Run, machine: Machine) -> float:
    """Returns the seconds to draw a logical batch, which do not depend on the number of examples."""
    return machine.draw * run.logical


def seconds(run: Run, machine: Machine) -> dict[str, float]:
    """Returns the seconds of a logical batch by purpose."""
    sent = messages(run)
    return {
        "products": product_seconds(run, machine),
        "exchange": sum(exchange_seconds(one, machine) for one in sent),
        "exchange of norms": sum(exchange_seconds(one, machine) for one in sent if one.private),
        "noise": noise_seconds(run, machine),
        "passes over memory": pass_seconds(run, machine),
        "draw": draw_seconds(run, machine),
    }


def total_seconds(run: Run, machine: Machine) -> float:
    """Returns the seconds of a logical batch; of overlapping parts, only the longer one counts."""
    found = seconds(run, machine)
    both = found["products"], found["exchange"]
    return (max if machine.overlaps else sum)(both) + found["noise"] + found["passes over memory"] + found["draw"]


def ordinary_seconds(run: Run, machine: Machine) -> float:
    """Returns the seconds of the ordinary step in the same layout, without sampling."""
    sent = sum(exchange_seconds(one, machine) for one in messages(run) if not one.private)
    both = product_seconds(run, machine, private=False), sent
    return (max if machine.overlaps else sum)(both) + pass_seconds(run, machine)


def first_to_bind(run: Run, machine: Machine) -> str:
    """Returns the limit of a run: memory if it does not fit, else the part that takes the longest."""
    if peak(run, machine) > machine.memory:
        return "memory: " + max(memory(run, machine).items(), key=lambda item: item[1])[0]
    return max(seconds(run, machine).items(), key=lambda item: item[1])[0]


def max_positions(run: Run, machine: Machine) -> int:
    """Returns the number of positions (samples times tokens) of a pass that fit into memory; below 1 if none fits."""
    found = memory(run, machine)
    free = machine.memory - peak(run, machine) + found["inputs and gradients of layers"]
    return math.floor(free / max(run.kept_bytes, run.ordinary_bytes))
