"""Large run: its model, its machine, and layouts over processes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.scale_model import (
    Machine,
    Run,
    first_to_bind,
    max_positions,
    memory,
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
# 400 Gbit/s for each, 900 GB/s of links inside a node in both directions together. Assumptions: 90 % of the memory, 40
# % of the products, 80 % of the rates, 10 microseconds per hop, and 10 ps per normal number, four times the time to
# read and write it. Drawing an index takes as long as measured here on the CPU.
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
class Layout:
    """Layout of the large run over processes.

    Attributes:
        title: Description.
        run: The run.
    """

    title: str
    run: Run


def transformer(
    *, microbatch: int, shards: int, replicas: int = 1, splits: int = 1, bands: int = 1, **more: int
) -> Run:
    """Returns a run of the large model: layers of width ``WIDTH``, each a group of FSDP, with AdamW.

    Of the inputs and output gradients of a layer, 8 widths per position are whole, and 12 are split: products split
    along their outputs have whole inputs, products split along their inputs have whole outputs, and the two norms are
    whole.

    Returns:
        A run with the number of passes for a logical batch of ``LOGICAL`` samples.
    """
    layer = 12 * WIDTH**2
    samples = microbatch * shards * replicas
    return Run(
        parameters=LAYERS * layer,
        microbatch=microbatch,
        passes=max(1, round(more.pop("logical", LOGICAL) / samples)),
        examples=EXAMPLES,
        replicas=replicas,
        shards=shards,
        splits=splits,
        positions=TOKENS,
        kept_bytes=HALF * LAYERS * WIDTH * (8 + 12 / splits),
        # 34 bytes per width, for attention that stores no matrix; 10 of them are of tensors that are not split.
        ordinary_bytes=LAYERS * WIDTH * (10 + 24 / splits),
        # Squared norms by products of positions: 16 widths per layer, half of a symmetric matrix of 2,048 positions.
        norm_products=LAYERS * 16 * WIDTH * TOKENS**2,
        split_bytes=4 * LAYERS * WIDTH * HALF,
        split_messages=4 * LAYERS,
        tensors=4 * LAYERS,  # and small ones, which share their buckets
        groups=LAYERS,
        group=layer,
        largest=4 * WIDTH**2,
        optimizer_bytes=8,
        bands=bands,
    )


LAYOUTS = (
    Layout("1,000 shards, 1 sample a pass", transformer(microbatch=1, shards=1000)),
    Layout("the same, logical batch 1,024,000", transformer(microbatch=1, shards=1000, logical=1_024_000)),
    Layout("the same, 16 bands", transformer(microbatch=1, shards=1000, bands=16)),
    Layout("8 replicas of 125 shards", transformer(microbatch=1, shards=125, replicas=8)),
    Layout("layers split by 8, 125 shards, 1 sample", transformer(microbatch=1, shards=125, splits=8)),
    Layout("layers split by 8, 125 shards, 2 samples", transformer(microbatch=2, shards=125, splits=8)),
    Layout("the same, 16 bands", transformer(microbatch=2, shards=125, splits=8, bands=16)),
    Layout(
        "2 samples and independent noise, weights in 2 bytes",
        replace(transformer(microbatch=2, shards=125, splits=8), weight_bytes=2),
    ),
)


def large_tables() -> str:
    """Returns memory, time and limit of each layout as Markdown."""
    names = list(memory(LAYOUTS[0].run, H100))
    stored = [f"| GB of a process | {' | '.join(names)} | peak | max tokens a pass |", "|" + "---|" * (len(names) + 3)]
    parts = list(seconds(LAYOUTS[0].run, H100))
    times = ["| seconds of a step | passes | " + " | ".join(parts) + " | sum | ratio to ordinary | limit |"]
    times.append("|" + "---|" * (len(parts) + 5))
    for layout in LAYOUTS:
        found, taken = memory(layout.run, H100), seconds(layout.run, H100)
        total, ordinary = total_seconds(layout.run, H100), ordinary_seconds(layout.run, H100)
        each = " | ".join(f"{found[name] / _GB:.2g}" for name in names)
        positions = max_positions(layout.run, H100)
        stored.append(f"| {layout.title} | {each} | {peak(layout.run, H100) / _GB:.0f} | {positions:,} |")
        each = " | ".join(f"{taken[name]:.3g}" for name in parts)
        ratio = f"{total / ordinary:.2f}"
        limit = first_to_bind(layout.run, H100)
        times.append(f"| {layout.title} | {layout.run.passes} | {each} | {total:.0f} | {ratio} | {limit} |")
    return "\n".join(stored) + "\n\n" + "\n".join(times) + "\n\n" + recomputing()


def recomputing() -> str:
    """Describes the time of an ordinary run that stores only the inputs of layers, and runs each forward pass again."""
    run = transformer(microbatch=16, shards=1000)
    again = run.summed_numel * 2 * run.positions * run.microbatch * run.passes / H100.products
    kept = (LAYERS * HALF + 34) * WIDTH * run.microbatch * run.positions
    return (
        f"An ordinary run on {run.shards:,} shards that runs the forward pass of each layer twice can use passes of "
        f"{run.microbatch} samples, with {kept / _GB:.0f} GB of activations, "
        f"and takes {ordinary_seconds(run, H100) + again:.0f} s per step."
    )
