"""Parameter tables of the tests: each built-in layer with its edge cases, and small models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from case_inputs import (
    bag_alone,
    batch,
    batch_second,
    channels_last,
    expanded,
    flat_bags,
    floats,
    indices,
    sliced,
    transposed,
)
from case_models import MODELS, ModelCase
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

__all__ = ["CASES", "MODELS", "Case", "ModelCase"]


class Conv1D(nn.Module):
    """Has the name and the parameters of the linear layer of GPT-2 in transformers."""

    def __init__(self, out_features: int, in_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features))
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"


@dataclass(frozen=True)
class Case:
    """A layer and its inputs.

    Attributes:
        id: The edge case.
        make: The layer.
        inputs: ``(rows, dtype) -> `` inputs of that many samples.
        keywords: Names of the last inputs, which are passed by keyword.
        row: ``(inputs, i) -> `` inputs of sample i; None to slice axis 0.
    """

    id: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.dtype], tuple[Any, ...]]
    keywords: tuple[str, ...] = ()
    row: Callable[[tuple[Any, ...], int], tuple[Any, ...]] | None = None

    def split(self, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Returns the positional and the keyword inputs."""
        first = len(inputs) - len(self.keywords)
        return inputs[:first], dict(zip(self.keywords, inputs[first:], strict=True))


def _linear() -> list[Case]:
    linear = nn.Linear
    return [
        Case("linear", lambda: linear(3, 4), batch(floats(3))),
        Case("linear-no-bias", lambda: linear(3, 4, bias=False), batch(floats(3))),
        Case("linear-sequence", lambda: linear(3, 4), batch(floats(7, 3))),
        Case("linear-sequence-shorter-than-wide", lambda: linear(32, 24), batch(floats(5, 32))),
        Case("linear-features-in-several-blocks", lambda: linear(150, 70), batch(floats(3, 150))),
        Case("linear-many-positions-in-tiles", lambda: linear(3, 2), batch(floats(130, 3))),
        Case("linear-four-axes", lambda: linear(3, 4), batch(floats(2, 5, 3))),
        Case("linear-five-axes-one-input", lambda: linear(1, 4), batch(floats(2, 1, 3, 1))),
        Case("linear-no-positions", lambda: linear(3, 4), batch(floats(0, 3))),
        Case("linear-batch-second-in-memory", lambda: linear(3, 4), batch(floats(7, 3, layout=batch_second))),
        Case("linear-sliced", lambda: linear(3, 4), batch(floats(7, 3, layout=sliced))),
        Case("linear-expanded", lambda: linear(3, 4), batch(floats(7, 3, layout=expanded))),
        Case("linear-by-keyword", lambda: linear(3, 4), batch(floats(3)), keywords=("input",)),
        Case("linear-of-attention", lambda: NonDynamicallyQuantizableLinear(3, 4), batch(floats(2, 3))),
        Case("linear-transposed", lambda: Conv1D(4, 3), batch(floats(7, 3))),
        Case("linear-transposed-flat", lambda: Conv1D(4, 3), batch(floats(3))),
        Case("linear-transposed-narrowing", lambda: Conv1D(24, 32), batch(floats(5, 32))),
        Case("linear-transposed-by-keyword", lambda: Conv1D(4, 3), batch(floats(7, 3)), keywords=("x",)),
        Case("bilinear", lambda: nn.Bilinear(3, 4, 2), batch(floats(3), floats(4))),
        Case("bilinear-sequence", lambda: nn.Bilinear(3, 4, 2), batch(floats(5, 3), floats(5, 4))),
        Case("bilinear-wide", lambda: nn.Bilinear(8, 7, 9, bias=False), batch(floats(2, 3, 8), floats(2, 3, 7))),
        Case("bilinear-by-keyword", lambda: nn.Bilinear(3, 4, 2), batch(floats(3), floats(4)), keywords=("input2",)),
        Case("prelu", nn.PReLU, batch(floats(3, 4))),
        Case("prelu-vector", nn.PReLU, batch(floats())),
        Case("prelu-per-channel", lambda: nn.PReLU(3), batch(floats(3, 4, 5, layout=channels_last))),
        Case("prelu-per-channel-flat", lambda: nn.PReLU(3), batch(floats(3))),
    ]


def _conv() -> list[Case]:
    one, two, three = nn.Conv1d, nn.Conv2d, nn.Conv3d
    odd = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}
    cases = [
        Case("conv1d", lambda: one(3, 4, 3), batch(floats(3, 9))),
        Case("conv1d-all-settings", lambda: one(4, 6, 3, 2, 2, 2, 2), batch(floats(4, 11))),
        Case("conv1d-same-even-kernel", lambda: one(5, 6, 4, padding="same"), batch(floats(5, 9))),
        Case("conv1d-sliced", lambda: one(3, 4, 3, padding=1), batch(floats(3, 9, layout=sliced))),
        Case("conv2d", lambda: two(3, 4, 3), batch(floats(3, 7, 6))),
        Case("conv2d-no-bias", lambda: two(3, 4, 3, bias=False), batch(floats(3, 7, 6))),
        Case("conv2d-five-channels", lambda: two(5, 6, 3, padding=1), batch(floats(5, 7, 6))),
        Case("conv2d-all-settings", lambda: two(10, 6, (3, 2), groups=2, **odd), batch(floats(10, 8, 7))),
        Case("conv2d-few-channels-in-groups", lambda: two(4, 12, (3, 2), groups=2, **odd), batch(floats(4, 8, 7))),
        Case("conv2d-depthwise", lambda: two(6, 6, 3, padding=1, groups=6), batch(floats(6, 7, 6))),
        Case("conv2d-depthwise-wider", lambda: two(3, 9, 3, groups=3), batch(floats(3, 7, 6))),
        Case("conv2d-small-map", lambda: two(8, 16, 3, padding=1), batch(floats(8, 2, 2))),
        Case("conv2d-small-map-groups", lambda: two(32, 32, 3, groups=2), batch(floats(32, 4, 4))),
        Case("conv2d-one-position", lambda: two(5, 6, 3), batch(floats(5, 3, 3))),
        Case("conv2d-one-by-one", lambda: two(6, 5, 1, stride=2), batch(floats(6, 5, 5))),
        Case("conv2d-stride-leaves-a-rest", lambda: two(5, 6, 3, stride=3), batch(floats(5, 8, 10))),
        Case("conv2d-valid", lambda: two(5, 6, 3, padding="valid"), batch(floats(5, 7, 6))),
        Case("conv2d-same", lambda: two(5, 6, (3, 4), padding="same", dilation=(1, 2)), batch(floats(5, 7, 6))),
        Case(
            "conv2d-one-sample-of-memory", lambda: two(5, 6, 3, padding=1), batch(floats(5, 7, 6, layout=batch_second))
        ),
        Case("conv3d", lambda: three(3, 4, 2), batch(floats(3, 4, 3, 5))),
        Case("conv3d-all-settings", lambda: three(10, 4, 2, (1, 2, 1), 1, (2, 1, 1), 2), batch(floats(10, 4, 3, 5))),
        Case("conv3d-same", lambda: three(5, 6, (2, 3, 2), padding="same"), batch(floats(5, 4, 3, 5))),
        Case("conv3d-channels-last", lambda: three(6, 6, 2), batch(floats(6, 4, 3, 5, layout=channels_last))),
        Case("conv2d-by-keyword", lambda: two(3, 4, 3), batch(floats(3, 7, 6)), keywords=("input",)),
    ]
    for layout in (channels_last, transposed, sliced, expanded):
        name = layout.__name__.replace("_", "-")
        cases.append(Case(f"conv2d-{name}", lambda: two(5, 6, 3, padding=1), batch(floats(5, 7, 6, layout=layout))))
        cases.append(
            Case(f"conv2d-small-{name}", lambda: two(9, 16, 3, padding=1), batch(floats(9, 2, 2, layout=layout)))
        )
    for mode in ("reflect", "replicate", "circular"):
        settings = {"padding_mode": mode, "padding": 2}
        cases += [
            Case(f"conv1d-{mode}", lambda s=settings: one(5, 6, 3, **s), batch(floats(5, 7))),
            Case(f"conv2d-{mode}", lambda s=settings: two(5, 6, 3, stride=(1, 2), **s), batch(floats(5, 7, 6))),
            Case(f"conv3d-{mode}", lambda s=settings: three(5, 6, 2, **s), batch(floats(5, 4, 3, 5))),
            Case(f"conv2d-small-{mode}", lambda s=settings: two(8, 16, 5, **s), batch(floats(8, 3, 3))),
            Case(
                f"conv2d-same-{mode}",
                lambda m=mode: two(5, 6, 4, padding="same", padding_mode=m),
                batch(floats(5, 7, 6)),
            ),
            Case(
                f"conv2d-groups-{mode}-channels-last",
                lambda s=settings: two(6, 4, 3, groups=2, **s),
                batch(floats(6, 7, 6, layout=channels_last)),
            ),
        ]
    return cases


def _conv_transpose() -> list[Case]:
    one, two, three = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
    odd = {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "dilation": (1, 2)}
    return [
        Case("conv-transpose1d", lambda: one(3, 4, 3), batch(floats(3, 5))),
        Case("conv-transpose1d-all-settings", lambda: one(4, 6, 3, 2, 2, 1, 2, True, 2), batch(floats(4, 6))),
        Case("conv-transpose1d-dilation-above-stride", lambda: one(6, 5, 2, 1, 1, 2, dilation=3), batch(floats(6, 5))),
        Case("conv-transpose2d", lambda: two(6, 5, 3), batch(floats(6, 4, 3))),
        Case("conv-transpose2d-no-bias", lambda: two(6, 5, 3, padding=1, bias=False), batch(floats(6, 4, 3))),
        Case("conv-transpose2d-all-settings", lambda: two(6, 10, (3, 2), groups=2, **odd), batch(floats(6, 4, 3))),
        Case("conv-transpose2d-few-channels", lambda: two(6, 2, 4, stride=2, padding=1), batch(floats(6, 4, 3))),
        Case("conv-transpose2d-depthwise", lambda: two(6, 6, 3, groups=6), batch(floats(6, 4, 3))),
        Case("conv-transpose2d-small-map", lambda: two(16, 8, 3), batch(floats(16, 2, 2))),
        Case("conv-transpose2d-channels-last", lambda: two(6, 5, 3), batch(floats(6, 4, 3, layout=channels_last))),
        Case("conv-transpose3d", lambda: three(5, 6, 2), batch(floats(5, 3, 2, 3))),
        Case(
            "conv-transpose3d-all-settings",
            lambda: three(4, 6, (2, 3, 2), (2, 1, 2), 1, (1, 0, 1), 2, True, (1, 2, 1)),
            batch(floats(4, 3, 2, 3)),
        ),
        Case(
            "conv-transpose2d-output-size",
            lambda: two(6, 5, 3, stride=2),
            lambda rows, dtype: (torch.randn(rows, 6, 4, 3, dtype=dtype), [10, 8]),
            keywords=("output_size",),
        ),
    ]


def _embedding() -> list[Case]:
    bag = nn.EmbeddingBag
    cases = [
        Case("embedding", lambda: nn.Embedding(5, 3), batch(indices(5, 7))),
        Case("embedding-one-index", lambda: nn.Embedding(5, 3), batch(indices(5))),
        Case("embedding-two-axes", lambda: nn.Embedding(5, 3), batch(indices(5, 2, 4))),
        Case("embedding-no-index", lambda: nn.Embedding(5, 3), batch(indices(5, 0))),
        Case("embedding-padding", lambda: nn.Embedding(3, 4, padding_idx=1), batch(indices(3, 7))),
        Case("embedding-last-is-padding", lambda: nn.Embedding(3, 4, padding_idx=-1), batch(indices(3, 7))),
        Case("embedding-int32", lambda: nn.Embedding(5, 3), batch(indices(5, 7, dtype=torch.int32))),
        Case("embedding-sparse", lambda: nn.Embedding(5, 3, sparse=True), batch(indices(5, 7))),
        Case("embedding-transposed", lambda: nn.Embedding(5, 3), lambda rows, _: (torch.randint(5, (7, rows)).T,)),
        Case("embedding-by-keyword", lambda: nn.Embedding(5, 3), batch(indices(5, 7)), keywords=("input",)),
    ]
    for mode in ("sum", "mean", "max"):
        cases += [
            Case(f"bag-{mode}", lambda m=mode: bag(4, 3, mode=m), batch(indices(4, 6))),
            Case(f"bag-{mode}-padding", lambda m=mode: bag(3, 4, mode=m, padding_idx=1), batch(indices(3, 3))),
            Case(f"bag-{mode}-offsets", lambda m=mode: bag(4, 3, mode=m), flat_bags(4), row=bag_alone()),
            Case(
                f"bag-{mode}-offsets-padding-by-keyword",
                lambda m=mode: bag(3, 4, mode=m, padding_idx=-1),
                flat_bags(3),
                keywords=("offsets",),
                row=bag_alone(),
            ),
            Case(
                f"bag-{mode}-last-offset",
                lambda m=mode: bag(4, 3, mode=m, include_last_offset=True),
                flat_bags(4, end=True),
                row=bag_alone(end=True),
            ),
        ]
    return [
        *cases,
        Case("bag-sparse", lambda: bag(4, 3, mode="sum", sparse=True), batch(indices(4, 6))),
        Case(
            "bag-weights",
            lambda: bag(4, 3, mode="sum"),
            lambda rows, dtype: (torch.randint(4, (rows, 6)), None, torch.randn(rows, 6, dtype=dtype)),
            keywords=("offsets", "per_sample_weights"),
        ),
        Case("bag-weights-offsets", lambda: bag(4, 3, mode="sum"), flat_bags(4, weights=True), row=bag_alone()),
        Case(
            "bag-weights-padding",
            lambda: bag(3, 4, mode="sum", padding_idx=0),
            flat_bags(3, weights=True),
            row=bag_alone(),
        ),
    ]


def _tracked(layer: nn.Module) -> nn.Module:
    """Sets eval mode and running statistics that differ from the defaults."""
    layer.running_mean.copy_(torch.arange(3.0))  # type: ignore[operator, union-attr]
    layer.running_var.fill_(0.5)  # type: ignore[operator, union-attr]
    return layer.eval()


def _norms() -> list[Case]:
    return [
        Case("layer-norm", lambda: nn.LayerNorm(6), batch(floats(6))),
        Case("layer-norm-sequence", lambda: nn.LayerNorm(6), batch(floats(4, 6))),
        Case("layer-norm-no-bias", lambda: nn.LayerNorm(6, bias=False), batch(floats(4, 6))),
        Case("layer-norm-two-axes-normed", lambda: nn.LayerNorm((4, 6)), batch(floats(2, 3, 4, 6))),
        Case("layer-norm-large-eps", lambda: nn.LayerNorm(6, eps=0.5), batch(floats(4, 6))),
        Case("layer-norm-transposed", lambda: nn.LayerNorm(6), batch(floats(4, 6, layout=transposed))),
        Case("layer-norm-by-keyword", lambda: nn.LayerNorm(6), batch(floats(4, 6)), keywords=("input",)),
        Case("rms-norm", lambda: nn.RMSNorm(6), batch(floats(6))),
        Case("rms-norm-sequence", lambda: nn.RMSNorm((4, 6), eps=0.1), batch(floats(2, 4, 6))),
        Case("group-norm", lambda: nn.GroupNorm(2, 6), batch(floats(6, 4, 5))),
        Case("group-norm-flat", lambda: nn.GroupNorm(2, 6), batch(floats(6))),
        Case("group-norm-3d", lambda: nn.GroupNorm(3, 6, eps=0.1), batch(floats(6, 4, 5, 2))),
        Case("group-norm-channels-last", lambda: nn.GroupNorm(2, 6), batch(floats(6, 4, 5, layout=channels_last))),
        Case("instance-norm1d", lambda: nn.InstanceNorm1d(3, affine=True), batch(floats(3, 5))),
        Case("instance-norm2d", lambda: nn.InstanceNorm2d(3, affine=True, eps=0.1), batch(floats(3, 5, 4))),
        Case(
            "instance-norm2d-channels-last",
            lambda: nn.InstanceNorm2d(3, affine=True),
            batch(floats(3, 5, 4, layout=channels_last)),
        ),
        Case("instance-norm3d", lambda: nn.InstanceNorm3d(3, affine=True), batch(floats(3, 5, 4, 2))),
        Case(
            "instance-norm2d-running-statistics",
            lambda: _tracked(nn.InstanceNorm2d(3, affine=True, track_running_stats=True)),
            batch(floats(3, 5, 4)),
        ),
    ]


CASES: list[Case] = [*_linear(), *_conv(), *_conv_transpose(), *_embedding(), *_norms()]
