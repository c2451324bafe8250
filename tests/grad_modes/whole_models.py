"""Models that no rule of a layer covers: positions, experts, windows, graphs, and models that draw random numbers."""

import random

import numpy as np
import torch
from case_models import Parts
from grad_modes.unit_models import LENGTH, SAMPLES, WIDTH, Experts
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class RelativePositions(nn.Module):
    """Attention with a table of relative positions that all samples share, a class token and a tied output layer."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(11, WIDTH), nn.Embedding(9, 1)
        self.start, self.norm = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, words, mask=None):
        hidden = torch.cat([self.start.expand(len(words), -1, -1), self.words(words)], dim=1)
        place = torch.arange(hidden.shape[1])
        bias = self.positions((place[None] - place[:, None]).clamp(-4, 4) + 4).squeeze(-1)
        weights = (self.query(hidden) @ self.key(hidden).mT / self.temperature + bias).softmax(-1)
        hidden = self.norm(hidden + weights @ hidden)
        hidden = hidden if mask is None else hidden * mask[..., None]
        return {"logits": F.linear(hidden, self.words.weight), "start": hidden[:, 0]}


def experts():
    """Sends each token of the batch to one of several layers: `vmap` cannot run it."""
    run = lambda m, inputs: m.head(m.experts(inputs)).mean(1)  # noqa: E731
    return Parts(run, experts=Experts(), head=nn.Linear(WIDTH, 4))


class Windows(nn.Module):
    """Folds windows of each sample into the batch axis, and mixes their entries with a learned table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, 2))
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.GroupNorm(2, WIDTH)

    def forward(self, inputs):
        windows = self.table.softmax(-1) @ self.layer(inputs.reshape(-1, 2, WIDTH))
        return self.norm(windows.reshape(inputs.shape).mT).sum(2)


def shared_layer():
    """Holds one layer under three names."""
    m = Parts(lambda m, inputs: m.layer(m.two(m.one(inputs))), layer=nn.Linear(WIDTH, WIDTH))
    m.one, m.two = (nn.Sequential(m.layer, nn.Tanh()), nn.Sequential(m.layer, nn.Sigmoid()))
    return m


def given_positions():
    """Gets the positions that all samples share as an input."""
    run = lambda m, words, places: (m.words(words) + m.places(places)).sin()  # noqa: E731
    return Parts(run, words=nn.Embedding(11, WIDTH), places=nn.Embedding(9, WIDTH))


DRAWS = {
    "dropout": lambda ones: F.dropout(ones, 0.5),
    "dropout_in_half_precision": lambda ones: F.dropout(ones.bfloat16(), 0.3).to(ones.dtype),
    "dropout_in_a_checkpoint": lambda ones: checkpoint(F.dropout, ones, 0.5, use_reentrant=False),
    "skipped_by_python": lambda ones: ones * random.choice([0.5, 1.0, 2.0]),
    "skipped_by_numpy": lambda ones: ones * float(np.random.randint(1, 4)),
    "skipped_by_torch": lambda ones: ones * 2 if torch.rand(()) < 0.5 else ones * 0.5,  # `vmap` takes no branch
}


class Graphs:
    """The nodes of several graphs in one tensor, as PyTorch Geometric has them."""

    def __init__(self, nodes, edges, graph):
        self.nodes, self.edges, self.graph = nodes, edges, graph

    @classmethod
    def from_data_list(cls, graphs):
        starts = np.cumsum([0, *[len(one.nodes) for one in graphs]])
        edges = [one.edges + int(start) for one, start in zip(graphs, starts, strict=False)]
        graph = [torch.full((len(one.nodes),), i) for i, one in enumerate(graphs)]
        return cls(torch.cat([one.nodes for one in graphs]), torch.cat(edges, dim=1), torch.cat(graph))

    @property
    def num_graphs(self):
        return int(self.graph.max()) + 1

    def __len__(self):
        return self.num_graphs

    def get_example(self, i):
        mine = (self.graph == i).nonzero().flatten()
        edges = self.edges[:, (self.graph == i)[self.edges[0]]] - mine[0]
        return Graphs(self.nodes[mine], edges, torch.zeros_like(mine))


class SumsNeighbours(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layer, self.head, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), dropout

    def forward(self, graphs):
        hidden = F.dropout(self.layer(graphs.nodes), self.dropout)
        summed = hidden.index_add(0, graphs.edges[1], hidden[graphs.edges[0]]).sin()
        return self.head(hidden.new_zeros(graphs.num_graphs, WIDTH).index_add(0, graphs.graph, summed))


class MixesGraphs(SumsNeighbours):
    def forward(self, graphs):
        return super().forward(graphs) + self.layer(graphs.nodes).sum()


class FromTensors(SumsNeighbours):
    def forward(self, nodes, edges, graph):
        return super().forward(Graphs(nodes, edges, graph))


def graphs():
    sizes = [3, 1, 4, 2, 5]
    parts = [(torch.randn(n, WIDTH).double(), torch.randint(n, (2, 2 * n)), torch.zeros(n).long()) for n in sizes]
    return Graphs.from_data_list([Graphs(*part) for part in parts])


class Draws(nn.Module):
    """Multiplies by random numbers twice, and returns them. Takes them as an input instead, to run a sample again."""

    def __init__(self, draw, parts=None):
        super().__init__()
        self.draw = draw
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.parts = parts

    def forward(self, inputs, masks=None):
        one, two = (None, None) if masks is None else masks.unbind(-1)
        one = self.draw(torch.ones_like(inputs)) if one is None else one
        hidden = self.layer(inputs * one).sin() * self.scale
        two = self.draw(torch.ones_like(hidden)) if two is None else two
        hidden = hidden * two
        if self.parts is not None:
            hidden = self.parts(hidden)
        return {"hidden": hidden, "masks": torch.stack([one, two], -1)}


def own_generator():
    """Draws from a generator whose state is not that of torch."""
    run = lambda m, inputs: m.layer(inputs * torch.rand(inputs.shape[1:], generator=m.generator))  # noqa: E731
    return Parts(run, layer=nn.Linear(WIDTH, WIDTH), generator=torch.Generator())


def mixes_samples(dropout=0.0):
    run = lambda m, inputs: F.dropout(m.layer(inputs - inputs.mean(0)), dropout, m.training)  # noqa: E731
    return Parts(run, layer=nn.Linear(WIDTH, 3))


class ReturnsItsLoss(nn.Module):
    def __init__(self, reduce, dropout=0.0):
        super().__init__()
        self.layer, self.reduce, self.dropout = nn.Linear(WIDTH, 3), reduce, dropout

    def forward(self, inputs, masks=None):
        masks = F.dropout(torch.ones_like(inputs), self.dropout, self.training) if masks is None else masks
        values = self.layer(inputs * masks).sin()
        return {"loss": self.reduce(values.square().mean(dim=(1, 2))), "masks": masks}


def words():
    return torch.randint(11, (SAMPLES, LENGTH))


def features():
    return torch.randn(SAMPLES, LENGTH, WIDTH)


def as_many_positions_as_samples():
    return torch.randint(11, (SAMPLES, SAMPLES)), torch.arange(SAMPLES)


CASES = {
    "relative positions": (RelativePositions, lambda: {"words": words()}),
    "keyword mask, as many positions as samples": (
        RelativePositions,
        lambda: {"words": words(), "mask": torch.rand(SAMPLES, LENGTH + 1)},
    ),
    "shared positions": (given_positions, lambda: {"words": words(), "places": torch.arange(LENGTH)}),
    "as many shared positions as samples, on an axis of length 1": (
        given_positions,
        lambda: {"words": torch.randint(11, (SAMPLES, SAMPLES)), "places": torch.arange(SAMPLES).unsqueeze(0)},
    ),
    "experts": (experts, lambda: {"inputs": features()}),
    "windows": (Windows, lambda: {"inputs": features()}),
    "a layer of three names": (shared_layer, lambda: {"inputs": features()}),
}
