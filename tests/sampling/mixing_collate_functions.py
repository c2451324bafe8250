"""Collate functions that mix examples, change the batch size, or cannot be classified."""

import functools
import random

import numpy as np
import torch
from sampling.collate_functions import (
    SERIES,
    TEXTS,
    TOKENS,
    VALUES,
    VECTORS,
    Batch,
    lengths,
    noisy,
    padded,
    stacked,
    stacked_labels,
)
from torch.nn.functional import one_hot, pad


def standardized(batch):
    x, y = stacked(batch)
    return (x - x.mean(0)) / (x.std(0) + 1e-5), y


def mixup(batch, chance=1.0):
    x, y = stacked(batch)
    if random.random() < chance:
        order, part = torch.randperm(len(x)), 0.3 + 0.4 * random.random()
        x = part * x + (1 - part) * x[order]
    return x, y


def cutmix(batch):
    x, y = stacked(batch)
    x[:, :1] = x[torch.randperm(len(x)), :1]
    return x, y


def label_mixup(batch):
    x, y = stacked(batch)
    y = one_hot(y, 4).float()
    return x, 0.6 * y + 0.4 * y.flip(0)


def replaced(batch, by):
    """Replaces each example of class 1."""
    return stacked([batch[by(i, len(batch))] if y == 1 else (x, y) for i, (x, y) in enumerate(batch)])


def pairs(batch):
    x, y = stacked(batch)
    x = x.clone()
    for i in range(0, len(x) - 1, 2):
        x[i] = x[i] + x[i + 1]
    return x, y


def oversampled(batch):
    rare = [one for one in batch if one[1] == 0]
    return stacked([*batch, *rare])


def in_a_field(batch):
    x, y = stacked(batch)
    return {"x": x, "extra": {"context": [x - x.mean(0)], "y": y}}


def strings_joined(batch):
    return {"text": [f"{text} {batch[0][0]}" for text, _ in batch], "y": stacked_labels(batch)}


def truncated(batch):
    shortest = min(len(x) for x, _ in batch)
    return torch.stack([x[:shortest] for x, _ in batch]), stacked_labels(batch)


def packed_into_rows(batch):
    flat = torch.cat([x for x, _ in batch])
    return flat[: 2 * len(batch)].view(len(batch), 2)


MIXED = {  # the data set, the function, and the entry that the message names
    "standardized": (VECTORS, standardized, "batch[0]"),
    "centered": (VECTORS, lambda b: (stacked(b)[0] - stacked(b)[0].mean(0), stacked(b)[1]), "batch[0]"),
    "divided by the largest": (VECTORS, lambda b: {"x": stacked(b)[0] / stacked(b)[0].abs().max()}, "batch['x']"),
    "ranks": (VECTORS, lambda b: stacked(b)[0].argsort(0).argsort(0), "batch"),
    "series standardized": (
        SERIES,
        lambda b: standardized([(pad(x, (0, 0, 0, 9 - len(x))), y) for x, y in b]),
        "batch[0]",
    ),
    "mixup": (VECTORS, mixup, "batch[0]"),
    "mixup of half of the batches": (VECTORS, functools.partial(mixup, chance=0.5), "batch[0]"),
    "cutmix": (VECTORS, cutmix, "batch[0]"),
    "labels mixed": (VECTORS, label_mixup, "batch[1]"),
    "targets rolled": (VECTORS, lambda b: (stacked(b)[0], stacked(b)[1].roll(1)), "batch[1]"),
    "inputs rolled": (VECTORS, lambda b: (stacked(b)[0].roll(1, 0), stacked(b)[1]), "batch[0]"),
    "replaced by the first": (VECTORS, lambda b: replaced(b, lambda i, n: 0), "batch[0]"),
    "replaced by the next": (VECTORS, lambda b: replaced(b, lambda i, n: (i + 1) % n), "batch[0]"),
    "replaced at random": (VECTORS, lambda b: replaced(b, lambda i, n: random.randrange(n)), "batch[0]"),
    "replaced by NumPy": (VECTORS, lambda b: replaced(b, lambda i, n: np.random.randint(n)), "batch[0]"),
    "pairs added": (VECTORS, pairs, "batch[0]"),
    "summed up": (VECTORS, lambda b: (stacked(b)[0].cumsum(0), stacked(b)[1]), "batch[0]"),
    "weights of classes": (
        VECTORS,
        lambda b: (*stacked(b), stacked(b)[1].bincount(minlength=4)[stacked(b)[1]]),
        "batch[2]",
    ),
    "divided by the size": (VECTORS, lambda b: (stacked(b)[0] / len(b), stacked(b)[1]), "batch[0]"),
    "in a field": (VECTORS, in_a_field, "batch['extra']['context'][0]"),
    "in an object": (VECTORS, lambda b: Batch(*standardized(b)), "batch['x']"),
    "series summed up": (SERIES, lambda b: padded(b)[0].cumsum(0), "batch"),
    "strings": (TEXTS, strings_joined, "batch['text']"),
    "cut to the shortest": (TOKENS, truncated, "batch[0]"),
    "negatives of the batch": (VECTORS, lambda b: (stacked(b)[0], stacked(b)[0].flip(0)), "batch[1]"),
    "noise and statistics": (VECTORS, lambda b: noisy([(x, 0) for x in standardized(b)[0]]), "batch[0]"),
    "padded with the largest": (
        TOKENS,
        lambda b: padded(b, padding_value=float(max(x.max() for x, _ in b))),
        "batch[0]",
    ),
    "one array": (TOKENS, packed_into_rows, "batch"),
    "neighbors": (VECTORS, lambda b: [x + b[i - 1][0] for i, (x, _) in enumerate(b)], "batch"),
}


OTHER_NUMBERS = {
    "one left out": (lambda b: stacked([o for o in b if not o[0].equal(VALUES[9])]), r"3 rows in batch\[0\] for 4"),
    "two views": (lambda b: torch.cat([stacked(b)[0]] * 2), "returned 8 rows in batch for 4 examples"),
    "each twice": (lambda b: stacked([one for one in b for _ in "ab"]), r"8 rows in batch\[0\] for 4"),
    "the first left out": (lambda b: stacked(b[1:]), r"3 rows in batch\[0\] for 4"),
    "rare ones repeated": (oversampled, r"rows in batch\[0\] for 4"),
    "a class left out": (lambda b: stacked([one for one in b if one[1] != 3]), r"rows in batch\[0\] for 4"),
}


def needs_four(batch):
    if len(batch) % 2:
        raise ValueError(batch)
    return stacked(batch)


def noisy_after_the_one_before(batch):
    """Adds noise, and adds the previous example to each example of class 1."""
    x, y = noisy(batch)
    return torch.stack([x[i] + x[i - 1] if i and y[i] == 1 else x[i] for i in range(len(x))]), y


def sorted_and_noisy(batch):
    return noisy(sorted(batch, key=lambda one: float(one[0][0])))


class Counting:
    def __init__(self):
        self.calls = 0

    def __call__(self, batch):
        self.calls += 1
        return stacked(batch)[0] + self.calls


class Unreadable(list):
    def __getitem__(self, index):
        raise OSError


UNDECIDED = {
    "a generator that cannot be set": (VECTORS, lambda b: stacked(b)[0] + random.SystemRandom().random(), "two calls"),
    "a state": (VECTORS, Counting(), "two calls with the same examples"),
    "even batches": (VECTORS, needs_four, "a call with 3 examples raised ValueError"),
    "a number of tokens": (
        TOKENS,
        lambda b: {"x": padded(b)[0], "tokens": int(lengths(b).sum())},
        r"batch\['tokens'\]",
    ),
    "a mean": (VECTORS, lambda b: {"x": stacked(b)[0], "mean": stacked(b)[0].mean(0)}, r"batch\['mean'\] is one value"),
    "flat nodes": (SERIES, lambda b: {"x": torch.cat([x for x, _ in b]), "y": stacked_labels(b)}, r"batch\['x'\]"),
    "an opaque object": (VECTORS, lambda b: {"x": object()}, "no entry of the batch has a row"),
    "lengths by the longest": (SERIES, lambda b: (padded(b)[0], lengths(b) / lengths(b).max()), "longest example"),
    "the one before, at random": (VECTORS, noisy_after_the_one_before, "examples before it"),
    "noise for sorted examples": (VECTORS, sorted_and_noisy, "sorts examples and draws"),
    "a data set that cannot be read": (Unreadable(range(9)), stacked, r"Unreadable cannot be read \(OSError\)"),
}
