"""The large run: its model, its machine, and ways to spread it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.scale_model import (
    Machine,
    Run,
    first_to_bind,
    memory,
    most_places,
    ordinary_seconds,
    peak,
    seconds,
    total_seconds,
)

WIDTH, LAYERS, TOKENS = 10_240, 80, 2_048
HALF = 2  # bytes of an activation
EXAMPLES, LOGICAL, PROCESSES = 1e9, 128_000, 1_000
_GB = 1e9

# H100 SXM as its vendor describes it: 80 GB at 3.35 TB/s, 989 TFLOP/s in bfloat16 without sparsity; and one adapter of
# 400 Gbit/s for each, 900 GB/s of links inside a node for both ways. Assumed: 90 % of the memory, 40 % of the products,
# 80 % of the rates, 10 microseconds for a hop, and normal numbers at 10 ps, four times what reading and writing takes.
# An index that is drawn costs what it costs here, on the CPU.
H100 = Machine(
    memory=0.9 * 80 * _GB,
    memory_rate=0.8 * 3.35e12,
    products=0.4 * 989e12,
    link_rate=0.8 * 50e9,
    near_rate=0.8 * 450e9,
    latency=10e-6,
    normal=10e-12,
    draw=60e-9,
    overlaps=True,
)


@dataclass(frozen=True)
class Way:
    """A way to spread the large run.

    Attributes:
        title: What it changes.
        run: The run.
    """

    title: str
    run: Run


def transformer(*, rows: int, shards: int, replicas: int = 1, splits: int = 1, bands: int = 1, **more: int) -> Run:
    """The large model: layers of width ``WIDTH``, each sharded by itself, with AdamW.

    A layer's inputs and output gradients: those of the products that are cut along their outputs have whole inputs,
    those cut along their inputs whole outputs, and the two norms are whole: 8 widths whole and 12 cut, for each place.

    Returns:
        The run, with so many passes that a logical batch has ``LOGICAL`` rows.
    """
    layer = 12 * WIDTH**2
    together = rows * shards * replicas
    return Run(
        parameters=LAYERS * layer,
        rows=rows,
        passes=max(1, round(more.pop("logical", LOGICAL) / together)),
        examples=EXAMPLES,
        replicas=replicas,
        shards=shards,
        splits=splits,
        places=TOKENS,
        kept_bytes=HALF * LAYERS * WIDTH * (8 + 12 / splits),
        # 34 bytes a width, with attention that keeps no matrix; of these 10 are of what split layers hold whole.
        ordinary_bytes=LAYERS * WIDTH * (10 + 24 / splits),
        # Squared norms by products of places: 16 widths a layer, half of a symmetric matrix of 2,048 places.
        norm_products=LAYERS * 16 * WIDTH * TOKENS**2,
        split_bytes=4 * LAYERS * WIDTH * HALF,
        split_messages=4 * LAYERS,
        tensors=4 * LAYERS,  # and small ones, which travel with these
        groups=LAYERS,
        group=layer,
        largest=4 * WIDTH**2,
        optimizer_bytes=8,
        bands=bands,
    )


WAYS = (
    Way("1,000 shards, 1 row a pass", transformer(rows=1, shards=1000)),
    Way("the same, logical batch 1,024,000", transformer(rows=1, shards=1000, logical=1_024_000)),
    Way("the same, 16 bands", transformer(rows=1, shards=1000, bands=16)),
    Way("8 replicas of 125 shards", transformer(rows=1, shards=125, replicas=8)),
    Way("layers split by 8, 125 shards, 1 row", transformer(rows=1, shards=125, splits=8)),
    Way("layers split by 8, 125 shards, 2 rows", transformer(rows=2, shards=125, splits=8)),
    Way("the same, 16 bands", transformer(rows=2, shards=125, splits=8, bands=16)),
    Way(
        "2 rows and independent noise, weights in 2 bytes",
        replace(transformer(rows=2, shards=125, splits=8), weight_bytes=2),
    ),
)


def large_tables() -> str:
    """Memory, time and what binds, for each way, as Markdown."""
    names = list(memory(WAYS[0].run, H100))
    held = [f"| GB of a process | {' | '.join(names)} | peak | most tokens a pass |", "|" + "---|" * (len(names) + 3)]
    parts = list(seconds(WAYS[0].run, H100))
    took = ["| seconds of a step | passes | " + " | ".join(parts) + " | sum | over ordinary | first to bind |"]
    took.append("|" + "---|" * (len(parts) + 5))
    for way in WAYS:
        found, taken = memory(way.run, H100), seconds(way.run, H100)
        total, ordinary = total_seconds(way.run, H100), ordinary_seconds(way.run, H100)
        each = " | ".join(f"{found[name] / _GB:.2g}" for name in names)
        places = most_places(way.run, H100)
        held.append(f"| {way.title} | {each} | {peak(way.run, H100) / _GB:.0f} | {places:,} |")
        each = " | ".join(f"{taken[name]:.3g}" for name in parts)
        ratio = f"{total / ordinary:.2f}"
        took.append(
            f"| {way.title} | {way.run.passes} | {each} | {total:.0f} | {ratio} | {first_to_bind(way.run, H100)} |"
        )
    return "\n".join(held) + "\n\n" + "\n".join(took) + "\n\n" + recomputing()


def recomputing() -> str:
    """Returns the time of an ordinary run that keeps the inputs of layers alone, and runs each forward once more."""
    run = transformer(rows=16, shards=1000)
    again = run.formed * 2 * run.places * run.rows * run.passes / H100.products
    kept = (LAYERS * HALF + 34) * WIDTH * run.rows * run.places
    return (
        f"An ordinary run on {run.shards:,} shards that runs the forward pass of each layer twice takes {run.rows} "
        f"rows a pass with {kept / _GB:.0f} GB of activations, and {ordinary_seconds(run, H100) + again:.0f} s a step."
    )
