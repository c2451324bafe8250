"""Collate functions that keep examples independent, mix examples, or cannot be classified."""

import functools
import random
import types
import uuid
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import one_hot, pad
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_sequence
from torch.utils.data.dataloader import default_collate, default_convert

VALUES = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))


LENGTHS = [5, 3, 8, 2, 6, 4, 9, 7, 3, 5, 2, 6]


WORDS = [[(7 * i + 3 * j) % 19 + 1 for j in range(length)] for i, length in enumerate(LENGTHS)]


VECTORS = [(VALUES[i], i % 4) for i in range(12)]


TOKENS = [(torch.tensor(words), i % 4) for i, words in enumerate(WORDS)]


DICTS = [{"input_ids": words, "labels": i % 4} for i, words in enumerate(WORDS)]


TEXTS = [(" ".join("ab"[w % 2] * w for w in words), i % 4) for i, words in enumerate(WORDS)]


IMAGES = [(torch.randn(2, 3 + i % 3, 4 + i % 2, generator=torch.Generator().manual_seed(i)), i % 4) for i in range(12)]


BOXES = [(VALUES[i], {"boxes": VALUES[: i % 3 + 1], "name": f"image {i}"}) for i in range(12)]


SERIES = [
    (torch.randn(length, 2, generator=torch.Generator().manual_seed(length)), i % 4) for i, length in enumerate(LENGTHS)
]


def longest_first(batch):
    return sorted(batch, key=lambda one: -len(one[0]))


def columns(batch):
    return [list(column) for column in zip(*batch, strict=True)]


def stacked(batch):
    x, y = columns(batch)
    return torch.stack(x), torch.tensor(y)


def padded(batch, **options):
    x, y = columns(batch)
    return pad_sequence(x, batch_first=True, **options), torch.tensor(y)


def lengths(batch):
    return torch.tensor([len(x) for x, _ in batch])


def with_mask(batch):
    ids, y = padded(batch)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": y}


def lists_padded(batch, side="right"):
    longest = max(len(one["input_ids"]) for one in batch)
    rows = []
    for one in batch:
        fill = [0] * (longest - len(one["input_ids"]))
        rows.append(one["input_ids"] + fill if side == "right" else fill + one["input_ids"])
    return {"input_ids": torch.tensor(rows), "labels": torch.tensor([one["labels"] for one in batch])}


def tokenized(batch):
    texts, y = columns(batch)
    ids = [torch.tensor([len(word) for word in text.split()]) for text in texts]
    return pad_sequence(ids, batch_first=True), torch.tensor(y)


def tokenized_with_positions(batch):
    ids, y = tokenized(batch)
    return {"ids": ids, "positions": torch.arange(ids.shape[1]).expand_as(ids), "y": y}


def causal_masks(batch):
    ids, y = tokenized(batch)
    return ids, (ids != 0)[:, None, :] & torch.ones(ids.shape[1], ids.shape[1]).tril().bool(), y


def bags(batch):
    x, y = columns(batch)
    return torch.cat(x), torch.tensor([0, *map(len, x)][:-1]).cumsum(0), torch.tensor(y)


def popped(batch):
    y = torch.tensor([one.pop("labels") for one in batch])
    return lists_padded([one | {"labels": 0} for one in batch])["input_ids"], y


def packed(batch):
    x, y = columns(longest_first(batch))
    return pack_sequence(x), torch.tensor(y)


def packed_unsorted(batch):
    x, y = padded(batch)
    return pack_padded_sequence(x, lengths(batch), batch_first=True, enforce_sorted=False), y


def with_order(batch):
    order = sorted(range(len(batch)), key=lambda i: -len(batch[i][0]))
    return (*padded([batch[i] for i in order]), torch.tensor(order))


Pair = namedtuple("Pair", "x y")


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor

    def pin_memory(self):
        return self


class Holder:
    def __init__(self, batch):
        self.x, self.y = stacked(batch)


class Collator:
    """Collator that adds noise from its own generator."""

    def __init__(self, generator):
        self.generator = generator

    def __call__(self, batch):
        x, y = stacked(batch)
        return x + torch.randn(x.shape, generator=self.generator), y

    def of_numpy(self, batch):
        x, y = stacked(batch)
        return x + torch.from_numpy(self.generator.normal(size=x.shape)).float(), y


class LateCollator(Collator):
    """Creates its generator at the first call."""

    def __init__(self):
        super().__init__(None)

    def __call__(self, batch):
        self.generator = self.generator or torch.Generator().manual_seed(1)
        return super().__call__(batch)


def mixed_shapes(batch):
    height, width = (max(x.shape[axis] for x, _ in batch) for axis in (1, 2))
    return [pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x, _ in batch]


def centered(batch):
    x = torch.zeros(len(batch), max(map(len, (x for x, _ in batch))), 2)
    for row, (one, _) in zip(x, batch, strict=True):
        start = (len(row) - len(one)) // 2
        row[start : start + len(one)] = one
    return x


def flipped(batch):
    return torch.stack([x.flip(0) if random.random() < 0.5 else x for x, _ in batch]), torch.tensor(
        [y for _, y in batch]
    )


def cropped(batch):
    x, y = columns(batch)
    starts = [random.randint(0, len(one) - 2) for one in x]
    return torch.stack([one[start : start + 2] for one, start in zip(x, starts, strict=True)]), torch.tensor(y)


def masked(batch):
    ids = lists_padded(batch)["input_ids"]
    labels, chance = ids.clone(), torch.full(ids.shape, 0.15).masked_fill(ids == 0, 0.0)
    chosen = torch.bernoulli(chance).bool()
    labels[~chosen] = -100
    ids[torch.bernoulli(torch.full(ids.shape, 0.8)).bool() & chosen] = 20
    swapped = torch.bernoulli(torch.full(ids.shape, 0.5)).bool() & chosen
    return {"input_ids": torch.where(swapped, torch.randint(1, 20, ids.shape), ids), "labels": labels}


def masked_one_by_one(batch):
    ids = [torch.where(torch.rand(len(x)) < 0.15, 20, x) for x, _ in batch]
    return pad_sequence(ids, batch_first=True), torch.tensor([y for _, y in batch])


def noisy(batch):
    x, y = stacked(batch)
    return x + 0.1 * torch.randn_like(x), y


def noisy_numpy(batch):
    return torch.stack([x + torch.from_numpy(np.random.randn(3)) for x, _ in batch])


def shuffled(batch):
    random.shuffle(batch)
    return stacked(batch)


def with_scale(batch):
    return {"x": stacked(batch)[0] * random.uniform(0.5, 1.5), "y": stacked(batch)[1], "lr": 0.1}


def as_lists(batch):
    return {"images": [x for x, _ in batch], "targets": [y for _, y in batch]}


def array(batch):
    return np.stack([x.numpy() for x, _ in batch]), np.array([str(y) for _, y in batch], dtype=object)


def sparse(batch):
    return torch.stack([x for x, _ in batch]).to_sparse(), torch.tensor([y for _, y in batch])


def time_first(batch):
    x, y = columns(batch)
    return pad_sequence(x), torch.tensor(y)


def time_first_with_mask(batch):
    x, y = time_first(batch)
    return x, (x != 0).T, y


def without_none(batch):
    return stacked([one for one in batch if one is not None])


def multiple_of_four(batch):
    x, y = padded(batch)
    return pad(x, (0, -x.shape[1] % 4)), y


ORDINARY = {
    "default": (VECTORS, default_collate),
    "convert": (VECTORS, lambda batch: default_convert(stacked(batch))),
    "calls default": (VECTORS, lambda batch: default_collate(batch)),
    "partial": (TOKENS, functools.partial(padded, padding_value=-1)),
    "stack": (VECTORS, stacked),
    "as a dict": (VECTORS, lambda batch: dict(zip("xy", stacked(batch), strict=True))),
    "as a user dict": (VECTORS, lambda batch: UserDict(zip("xy", stacked(batch), strict=True))),
    "as a named tuple": (VECTORS, lambda batch: Pair(*stacked(batch))),
    "as a dataclass": (VECTORS, lambda batch: Batch(*stacked(batch))),
    "as an object": (VECTORS, Holder),
    "as a namespace": (VECTORS, lambda batch: types.SimpleNamespace(x=stacked(batch)[0])),
    "x alone": (VECTORS, lambda batch: stacked(batch)[0]),
    "the list": (VECTORS, lambda batch: batch),
    "a tuple of tuples": (VECTORS, lambda batch: tuple(zip(*batch, strict=True))),
    "nested": (VECTORS, lambda batch: {"in": {"x": [stacked(batch)[0]]}, "out": (stacked(batch)[1],)}),
    "one-hot": (VECTORS, lambda batch: (stacked(batch)[0], one_hot(stacked(batch)[1], 4).float())),
    "constants": (VECTORS, lambda batch: {"x": stacked(batch)[0], "weight": torch.ones(7), "name": "train", "n": 3}),
    "the size": (VECTORS, lambda batch: {"x": stacked(batch)[0], "n": len(batch)}),
    "scaled": (VECTORS, lambda batch: ((stacked(batch)[0] - 0.5) / 0.25, stacked(batch)[1])),
    "bfloat16": (VECTORS, lambda batch: (stacked(batch)[0].bfloat16(), stacked(batch)[1])),
    "standardized by row": (VECTORS, lambda batch: torch.nn.functional.layer_norm(stacked(batch)[0], (3,))),
    "products": (VECTORS, lambda batch: stacked(batch)[0] @ torch.ones(3, 50)),
    "arrays": (VECTORS, array),
    "lists": (IMAGES, as_lists),
    "strings": (TEXTS, lambda batch: columns(batch)),
    "detection": (BOXES, lambda batch: tuple(zip(*batch, strict=True))),
    "images and boxes": (BOXES, lambda batch: (torch.stack([x for x, _ in batch]), [boxes for _, boxes in batch])),
    "images padded": (IMAGES, lambda batch: torch.stack(mixed_shapes(batch))),
    "images padded and sizes": (IMAGES, lambda b: (torch.stack(mixed_shapes(b)), [list(x.shape) for x, _ in b])),
    "padded": (TOKENS, padded),
    "padded with -100": (TOKENS, lambda batch: padded(batch, padding_value=-100)),
    "padded and lengths": (TOKENS, lambda batch: (*padded(batch), lengths(batch))),
    "padded and the longest": (TOKENS, lambda batch: (*padded(batch), int(lengths(batch).max()))),
    "padded and masked": (TOKENS, with_mask),
    "padded to a multiple": (TOKENS, multiple_of_four),
    "padded to a constant": (TOKENS, lambda batch: pad(padded(batch)[0], (0, 20 - padded(batch)[0].shape[1]))),
    "cut to a constant": (TOKENS, lambda batch: padded(batch)[0][:, :4]),
    "padded by lists": (DICTS, lists_padded),
    "padded in front": (DICTS, lambda batch: lists_padded(batch, side="left")),
    "lists of lists": (DICTS, lambda batch: {key: value.tolist() for key, value in lists_padded(batch).items()}),
    "padded on both sides": (SERIES, centered),
    "series": (SERIES, padded),
    "labels shifted": (TOKENS, lambda batch: (padded(batch)[0][:, :-1], padded(batch)[0][:, 1:])),
    "labels of tokens": (DICTS, lambda b: {**lists_padded(b), "labels": lists_padded(b)["input_ids"] * 2 - 1}),
    "popped": (DICTS, popped),
    "tokenized": (TEXTS, tokenized),
    "tokenized, positions": (TEXTS, tokenized_with_positions),
    "tokenized, causal masks": (TEXTS, causal_masks),
    "positions": (TOKENS, lambda batch: (padded(batch)[0], torch.arange(padded(batch)[0].shape[1]))),
    "bags with offsets": (TOKENS, bags),
    "nested tensor": (SERIES, lambda batch: (torch.nested.nested_tensor([x for x, _ in batch]), stacked_labels(batch))),
    "sparse": (VECTORS, sparse),
    "packed": (TOKENS, packed),
    "packed, not sorted": (TOKENS, packed_unsorted),
    "sorted": (TOKENS, lambda batch: padded(longest_first(batch))),
    "sorted, with lengths": (TOKENS, lambda b: (*padded(longest_first(b)), lengths(longest_first(b)))),
    "sorted, with the order": (TOKENS, with_order),
    "reversed": (VECTORS, lambda batch: stacked(batch[::-1])),
    "none left out": (VECTORS, without_none),
    "numbers of rows": (VECTORS, lambda batch: (stacked(batch)[0], torch.arange(len(batch)))),
    "flipped": (VECTORS, flipped),
    "cropped": (SERIES, cropped),
    "noise": (VECTORS, noisy),
    "noise of NumPy": (VECTORS, noisy_numpy),
    "noise of torch's own generator": (VECTORS, Collator(torch.Generator().manual_seed(1))),
    "noise of NumPy's own generator": (VECTORS, Collator(np.random.default_rng(1)).of_numpy),
    "noise of a generator made late": (VECTORS, LateCollator()),
    "scaled at random": (VECTORS, with_scale),
    "shuffled": (VECTORS, shuffled),
    "masked language modeling": (DICTS, masked),
    "masked one by one": (TOKENS, masked_one_by_one),
    "new names": (VECTORS, lambda b: {"x": stacked(b)[0], "id": [uuid.uuid4().hex for _ in b]}),
    "new names and noise": (VECTORS, lambda b: {"x": noisy(b)[0], "id": tuple(uuid.uuid4() for _ in b)}),
    "masked, longest first": (TOKENS, lambda batch: masked_one_by_one(longest_first(batch))),
}


TIME_FIRST = {"padded": (SERIES, time_first), "with a mask": (TOKENS, time_first_with_mask), "packed": (SERIES, packed)}


def stacked_labels(batch):
    return torch.tensor([y for _, y in batch])
