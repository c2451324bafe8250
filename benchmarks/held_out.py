"""Cells with architectures for which no method was tuned, from torchvision, timm, transformers and torch.

They need ``pip install -c constraints.txt -e '.[test-models]'``. `dpengine.fix` replaces batch norm in the private and
in the plain step, and dropout is switched off.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.cells import CELLS, Batch, Cell, TokenLoss, next_words, text, vectors

_FIELDS, _WORDS = 26, 1000  # of a table: categorical columns, and values of each


class Logits(nn.Module):
    """Returns the logits of a model of transformers."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Returns logits ``(B, T, V)`` or ``(B, classes)``."""
        return self.model(ids_BT).logits


class Gated(nn.Module):
    """Two layers of GRU over embedded words, and a linear layer on the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5000, 128)
        self.layers = nn.GRU(128, 192, num_layers=2, batch_first=True)
        self.head = nn.Linear(192, 2)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Returns logits ``(B, 2)``."""
        return self.head(self.layers(self.words(ids_BT))[0][:, -1])


class Table(nn.Module):
    """Embeds categorical columns, concatenates numbers, and applies an MLP, as for click rates."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.ModuleList([nn.Embedding(_WORDS, 16) for _ in range(_FIELDS)])
        self.body = models.mlp(_FIELDS * 16 + 13, 512, 2)

    def forward(self, row_BF: Tensor) -> Tensor:
        """Returns logits ``(B, 10)`` for rows of 26 categories and 13 numbers."""
        embedded = [column(row_BF[:, i].long()) for i, column in enumerate(self.columns)]
        return self.body(torch.cat([*embedded, row_BF[:, _FIELDS:]], dim=1))


def _table_rows(size: int) -> Batch:
    categories = torch.randint(0, _WORDS, (size, _FIELDS)).float()
    return torch.cat([categories, torch.randn(size, 13)], dim=1), torch.randint(0, 10, (size,))


def _vision(library: str, name: str, **options: Any) -> Callable[[], nn.Module]:
    """Returns a function that makes a model of torchvision or timm without batch norm."""

    def make() -> nn.Module:
        import dpengine

        if library == "timm":
            model = importlib.import_module("timm").create_model(name, num_classes=10, **options)
        else:
            model = getattr(importlib.import_module("torchvision.models"), name)(num_classes=10, **options)
        return _without_dropout(dpengine.fix(model)[0])

    return make


def _words(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """Returns a function that makes a model of transformers."""

    def make() -> nn.Module:
        library = importlib.import_module("transformers")
        return _without_dropout(Logits(getattr(library, name)(getattr(library, config)(**options))))

    return make


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name in ("p", "dropout", "drop_prob", "drop_path_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


_GPT = {"vocab_size": 4000, "n_positions": 128, "n_embd": 256, "n_layer": 4, "n_head": 4}
_LLAMA = {"vocab_size": 4000, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
_LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
_ALBERT = {"vocab_size": 4000, "embedding_size": 128, "hidden_size": 256, "num_hidden_layers": 4}
_ALBERT |= {"num_attention_heads": 4, "intermediate_size": 1024}

HELD_OUT = {
    "wide mlp": Cell(lambda: models.mlp(1024, 2048, 3), vectors(1024), 256),
    "convnext": Cell(_vision("torchvision", "convnext_tiny"), vectors(3, 64, 64), 32),
    "vit tiny": Cell(_vision("timm", "vit_tiny_patch16_224"), vectors(3, 224, 224), 8),
    "swin": Cell(_vision("torchvision", "swin_t"), vectors(3, 112, 112), 8),
    "mixer": Cell(_vision("timm", "mixer_s32_224"), vectors(3, 224, 224), 16),
    "mobilenet": Cell(_vision("torchvision", "mobilenet_v3_small"), vectors(3, 96, 96), 32),
    "efficientnet": Cell(_vision("torchvision", "efficientnet_b0"), vectors(3, 64, 64), 16),
    "gpt2, tied": Cell(_words("GPT2LMHeadModel", "GPT2Config", **_GPT), next_words(4000, 128), 8, loss=TokenLoss),
    "llama": Cell(_words("LlamaForCausalLM", "LlamaConfig", **_LLAMA), next_words(4000, 128), 8, loss=TokenLoss),
    "albert, shared layers": Cell(
        _words("AlbertForSequenceClassification", "AlbertConfig", **_ALBERT), text(4000, 128), 16
    ),
    "gru": Cell(Gated, text(5000, 64), 32),
    "table": Cell(Table, _table_rows, 1024),
}
ALL = {**CELLS, **HELD_OUT}
