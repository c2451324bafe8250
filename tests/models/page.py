"""Writes docs/models.md from the results of a test run."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

PACKAGES = ("torch", "transformers", "peft", "torchvision", "timm")
DTYPES = ("torch.float32", "torch.bfloat16")
HEAD = """# Models of other libraries

Small random models of each architecture, trained by an ordinary loop after `make_private(...)` in the default mode.
*Exact* means that in each of three steps the clipped sums of all parameters were those of a loop over single samples
on a copy, with a clipping norm between the norms of the samples: in float32 to 1e-3, in bfloat16 to 5e-2. Some
models have errors of up to 2e-2 in float32, where rounding moves an activation across a kink; they are exact to 1e-5 in
float64. Dropout is off. *Not supported* means that the library cannot run the model in this precision. `make models`
writes this page.

The last column says what computed the per-sample gradients: the rules of single layers, or units, which are modules of
which each sample runs alone ([DPE028](errors.md#dpe028)), chosen by the default mode. `whole_model` marks a model that
only `grad_sample_mode="whole_model"` accepts. What to do before `make_private` is named: `dpengine.fix`, or a forward
pass that fills a cache.

"""


def write(path: Path, results: list[list[str]]) -> None:
    """Writes the page.

    Args:
        path: The file to write.
        results: For each row and dtype: group, name, dtype, state, gradient algorithm, and rejection reason.
    """
    groups: dict[str, dict[str, dict[str, list[str]]]] = {}
    # The workers that run the tests finish in any order.
    for group, name, dtype, *rest in sorted(results, key=lambda row: (row[0], row[1].lower())):
        groups.setdefault(group, {}).setdefault(name, {})[dtype] = rest
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    counts = ["| group | models | exact in float32 | exact in bfloat16 |", "|---|---|---|---|"]
    for group, rows in groups.items():
        exact = [sum(row[dtype][0] == "exact" for row in rows.values() if dtype in row) for dtype in DTYPES]
        counts.append(f"| {group} | {len(rows)} | {exact[0]} | {exact[1]} |")
    parts = [f"{HEAD}Versions: {versions}.\n\n" + "\n".join(counts) + "\n"]
    for group, rows in groups.items():
        lines = [f"\n## {group}\n", "| model | float32 | bfloat16 | by |", "|---|---|---|---|"]
        for name, row in rows.items():
            states = [row[dtype][0] if dtype in row else "" for dtype in DTYPES]
            _, by, _ = row.get(DTYPES[0]) or row[DTYPES[1]]
            lines.append(f"| {name} | {states[0]} | {states[1]} | {by} |")
        parts.append("\n".join(lines) + "\n")
        reasons = {name: next(iter(row.values()))[2] for name, row in rows.items()}
        parts += [f"\n{name}: {reason}\n" for name, reason in reasons.items() if reason]
    path.write_text("".join(parts), encoding="utf-8")
