"""Needs of a private run in each process: memory, messages, noise, products and sampling, as arithmetic.

What is said of the engine: sums and noise are float32; each process draws the noise of its own share; sums travel once
for each logical batch over replicas, and once for each pass over shards, in buckets; the inputs and output gradients of
all layers are kept until the norms are known; each process draws the whole logical batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOAT = 4  # bytes
BUCKET_BYTES = 25 * 2**20
ON_THEIR_WAY = 2  # buckets of whole sums that are held while they are exchanged


@dataclass(frozen=True)
class Machine:
    """Resources of one process while all others run too.

    Attributes:
        memory: Bytes.
        memory_rate: Bytes read or written in a second.
        products: Floating-point operations in a second, in matrix products.
        link_rate: Bytes that it sends in a second.
        near_rate: The same to those that hold parts of the same layers; None where they are no nearer than others.
        latency: Seconds for one hop of a message.
        normal: Seconds for one normal number.
        draw: Seconds for one index of a batch.
        draw_bytes: Bytes for one index, while a batch is drawn.
        overlaps: Whether messages travel beside matrix products.
        scatters: Whether a reduce-scatter sends each process its part alone; gloo sends the whole to all.
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
    """A run and how it is spread. Places are those of a row: tokens, or 1 where rows are vectors.

    Attributes:
        parameters: All of them.
        rows: Of one pass of those processes that share its rows.
        passes: In a logical batch.
        examples: In the data set.
        replicas: Processes that hold the same parameters, for other rows.
        shards: Processes that hold parts of one copy, for other rows.
        splits: Processes that hold parts of each layer, for the same rows.
        places: Of a row.
        kept_bytes: Inputs and output gradients of all layers, of one place on one process.
        ordinary_bytes: What an ordinary backward pass holds of one place.
        norm_products: Operations for the norm of one row, beside those of an ordinary pass.
        split_bytes: What split layers exchange for one place, in an ordinary pass.
        split_messages: In how many messages.
        tensors: Parameters as tensors, of which a bucket holds whole ones.
        groups: Calls of ``fully_shard``.
        group: Parameters of the largest of them.
        largest: Numbers of the largest parameter.
        weight_bytes: Of a parameter, and of what is gathered of it.
        optimizer_bytes: Of the optimizer's state of a parameter.
        bands: Of the noise; 1 where it is independent.
    """

    parameters: float
    rows: int
    passes: int = 1
    examples: float = 1e6
    replicas: int = 1
    shards: int = 1
    splits: int = 1
    places: int = 1
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
        """Processes."""
        return self.replicas * self.shards * self.splits

    @property
    def logical(self) -> int:
        """Rows of a logical batch."""
        return self.rows * self.passes * self.replicas * self.shards

    @property
    def formed(self) -> float:
        """Numbers that a process sums."""
        return self.parameters / self.splits

    @property
    def held(self) -> float:
        """Numbers that it keeps of them."""
        return self.formed / self.shards


@dataclass(frozen=True)
class Message:
    """Messages of one kind that a process takes part in, in one logical batch.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"``.
        ranks: Who take part.
        count: How many.
        size: Bytes of all of them: of what is summed, or of what has been gathered.
        near: Whether they stay among those that hold parts of the same layers.
        private: Whether privacy alone needs them.
    """

    kind: str
    ranks: int
    count: int
    size: float
    near: bool = False
    private: bool = False


def memory(run: Run, machine: Machine) -> dict[str, float]:
    """Bytes of a process by what they are for. See `peak`."""
    whole = FLOAT * run.formed if run.shards > 1 else 0.0
    bucket = min(whole, BUCKET_BYTES + FLOAT * run.largest / run.splits)
    places = run.rows * run.places
    return {
        "weights": run.weight_bytes * run.held,
        "optimizer": run.optimizer_bytes * run.held,
        "sums": FLOAT * run.held,
        "noise of past steps": FLOAT * (run.bands - 1) * run.held / run.replicas,
        "sums on their way": min(ON_THEIR_WAY * bucket, whole) + bucket + whole / run.shards,
        "gathered weights": 2 * run.weight_bytes * run.group / run.splits if run.shards > 1 else 0.0,
        "inputs and gradients of layers": max(run.kept_bytes, run.ordinary_bytes) * places,
        "draw": machine.draw_bytes * run.logical,
    }


def peak(run: Run, machine: Machine) -> float:
    """A bound on the bytes of a process. Weights are gathered until the norms are known, and sums leave after that."""
    found = memory(run, machine)
    return sum(found.values()) - min(found["sums on their way"], found["gathered weights"])


def messages(run: Run) -> list[Message]:
    """Returns the messages of a process in a logical batch."""
    found: list[Message] = []
    if run.shards > 1:
        gathers = 2 * run.groups - 1  # the outermost group stays after the forward pass
        size = run.weight_bytes * (2 * run.formed - run.formed / run.groups)
        found.append(Message("all_gather", run.shards, gathers * run.passes, size * run.passes))
        size = FLOAT * run.formed
        found.append(
            Message("reduce_scatter", run.shards, min(_buckets(size), run.tensors) * run.passes, size * run.passes)
        )
    if run.replicas > 1:
        size = FLOAT * run.held
        found.append(Message("all_reduce", run.replicas, _buckets(size), size))
    if run.splits > 1:
        places = run.rows * run.passes * run.places
        count = run.split_messages * run.passes
        found.append(Message("all_reduce", run.splits, count, run.split_bytes * places, near=True))
        norms = 8 * (3 * run.rows + 16) * run.passes
        found.append(Message("all_reduce", run.splits, run.passes, norms, near=True, private=True))
    return found


def _buckets(size: float) -> int:
    return math.ceil(size / BUCKET_BYTES)


def exchange_seconds(message: Message, machine: Machine) -> float:
    """Seconds of messages in rings: each hop has its latency, and each process sends what the ring needs of it."""
    halves = 2 if message.kind == "all_reduce" or (message.kind == "reduce_scatter" and not machine.scatters) else 1
    hops = halves * (message.ranks - 1)
    rate = machine.near_rate if message.near and machine.near_rate is not None else machine.link_rate
    return hops * (message.count * machine.latency + message.size / message.ranks / rate)


def noise_seconds(run: Run, machine: Machine) -> float:
    """Seconds for the noise of a step, of a process's own share."""
    share = run.held / run.replicas
    rows = FLOAT * (run.bands + 3) if run.bands > 1 else 0  # each band is read once, and what is common takes four
    return share * (machine.normal + rows / machine.memory_rate)


def product_seconds(run: Run, machine: Machine, *, private: bool = True) -> float:
    """Seconds for the matrix products of a logical batch: forward, both gradients, and norms."""
    rows = run.rows * run.passes
    each = 6 * run.formed * run.places + (run.norm_products / run.splits if private else 0.0)
    return rows * each / machine.products


def pass_seconds(run: Run, machine: Machine) -> float:
    """Seconds for passes over memory: sums of each backward pass, and the update of the weights."""
    sums = FLOAT * run.formed * (1 if run.passes == 1 and run.shards == 1 else 3) * run.passes
    copies = 4 * FLOAT * run.formed * run.passes if run.shards > 1 else 0.0  # into buckets, and of what is gathered
    update = (3 * FLOAT + 2 * run.optimizer_bytes) * run.held
    return (sums + copies + update) / machine.memory_rate


def draw_seconds(run: Run, machine: Machine) -> float:
    """Seconds to draw a logical batch. The number of examples counts for nothing: what is passed over costs nothing."""
    return machine.draw * run.logical


def seconds(run: Run, machine: Machine) -> dict[str, float]:
    """Seconds of a logical batch by what they are for."""
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
    """Seconds of a logical batch: what overlaps counts once."""
    found = seconds(run, machine)
    both = found["products"], found["exchange"]
    return (max if machine.overlaps else sum)(both) + found["noise"] + found["passes over memory"] + found["draw"]


def ordinary_seconds(run: Run, machine: Machine) -> float:
    """Seconds of the ordinary step in the same topology, batches given."""
    sent = sum(exchange_seconds(one, machine) for one in messages(run) if not one.private)
    both = product_seconds(run, machine, private=False), sent
    return (max if machine.overlaps else sum)(both) + pass_seconds(run, machine)


def first_to_bind(run: Run, machine: Machine) -> str:
    """Returns the limit of a run: the memory if it does not fit, else the part that takes most of the time."""
    if peak(run, machine) > machine.memory:
        return "memory: " + max(memory(run, machine).items(), key=lambda item: item[1])[0]
    return max(seconds(run, machine).items(), key=lambda item: item[1])[0]


def most_places(run: Run, machine: Machine) -> int:
    """Places (rows times tokens) of a pass that fit into the memory of a process; below 1 if none does."""
    found = memory(run, machine)
    free = machine.memory - peak(run, machine) + found["inputs and gradients of layers"]
    return math.floor(free / max(run.kept_bytes, run.ordinary_bytes))
