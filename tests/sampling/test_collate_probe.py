"""Collate functions that make each row from one example, that mix examples, and that cannot be decided."""

import copy
import functools
import random
import types
import uuid
import warnings
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot, pad
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data.dataloader import default_collate, default_convert

from dpengine import PrivacyEngine
from dpengine.errors import BatchDependentLossError, BatchMismatchError, PrivacyWarning
from dpengine.sampling import ExternalBatches
from dpengine.sampling.collate_probe import check_collate

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
    """An object that adds noise from its own generator."""

    def __init__(self, generator):
        self.generator = generator

    def __call__(self, batch):
        x, y = stacked(batch)
        return x + torch.randn(x.shape, generator=self.generator), y

    def of_numpy(self, batch):
        x, y = stacked(batch)
        return x + torch.from_numpy(self.generator.normal(size=x.shape)).float(), y


class LateCollator(Collator):
    """Makes its generator when it is first called."""

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


def check(data, collate, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        check_collate(DataLoader(copy.deepcopy(data), batch_size=4, collate_fn=collate), **options)


@pytest.mark.one_in(3, "name", others="slow")
@pytest.mark.parametrize("name", ORDINARY)
def test_functions_that_make_each_row_of_one_example_pass(name):
    check(*ORDINARY[name])


@pytest.mark.parametrize("name", TIME_FIRST)
def test_functions_with_the_batch_in_axis_one_pass(name):
    check(*TIME_FIRST[name], batch_first=False)


@pytest.mark.parametrize("rows", range(1, 8))
@pytest.mark.parametrize("name", ["stack", "padded", "sorted", "flipped", "masked one by one"])
def test_small_data_sets_pass(name, rows):
    data, collate = ORDINARY[name]
    check(data[:rows], collate)


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


@pytest.mark.parametrize("name", MIXED)
def test_functions_that_mix_examples_are_rejected(name):
    data, collate, path = MIXED[name]
    with pytest.raises(BatchDependentLossError, match="depending on other examples of the batch") as raised:
        check(data, collate)
    assert f" in {path} was" in str(raised.value)
    assert raised.value.fix


OTHER_NUMBERS = {
    "one left out": (lambda b: stacked([o for o in b if not o[0].equal(VALUES[9])]), r"3 rows in batch\[0\] for 4"),
    "two views": (lambda b: torch.cat([stacked(b)[0]] * 2), "returned 8 rows in batch for 4 examples"),
    "each twice": (lambda b: stacked([one for one in b for _ in "ab"]), r"8 rows in batch\[0\] for 4"),
    "the first left out": (lambda b: stacked(b[1:]), r"3 rows in batch\[0\] for 4"),
    "rare ones repeated": (oversampled, r"rows in batch\[0\] for 4"),
    "a class left out": (lambda b: stacked([one for one in b if one[1] != 3]), r"rows in batch\[0\] for 4"),
}


@pytest.mark.parametrize("name", OTHER_NUMBERS)
def test_another_number_of_rows_is_rejected(name):
    collate, says = OTHER_NUMBERS[name]
    with pytest.raises(BatchMismatchError, match=says):
        check(VECTORS, collate)


def needs_four(batch):
    if len(batch) % 2:
        raise ValueError(batch)
    return stacked(batch)


def noisy_after_the_one_before(batch):
    """Adds noise, and to an example of class 1 the one before it."""
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


@pytest.mark.parametrize("name", UNDECIDED)
def test_undecidable_checks_give_one_notice(name):
    data, collate, says = UNDECIDED[name]
    loader = DataLoader(data, batch_size=4, collate_fn=collate)
    with pytest.warns(PrivacyWarning, match=says) as shown:
        check_collate(loader)
        check_collate(loader)
    assert len(shown) == 1
    assert "[DPE012] It could not be checked whether collate_fn=" in str(shown[0].message)
    assert "Return one row for each example" in str(shown[0].message)


class Observed(Dataset):
    """Counts its reads, and draws random numbers."""

    def __init__(self, rows=1000):
        self.rows, self.reads = rows, []

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        self.reads.append(index)
        random.random(), np.random.rand(), torch.rand(1)
        return VALUES[index % 30], index % 4


class ByLists(Observed):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def states():
    return [torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in np.random.get_state()]]


@pytest.mark.parametrize("collate", [stacked, flipped, noisy, standardized, mixup, needs_four])
def test_the_random_generators_are_as_before(collate):
    before = states()
    loader = DataLoader(Observed(), batch_size=4, collate_fn=collate)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_collate(loader)
    except BatchDependentLossError:
        pass
    assert states() == before


@pytest.mark.parametrize("generator", [torch.Generator(), np.random.default_rng(0)])
def test_generators_of_the_function_are_as_before(generator):
    collator = Collator(generator)
    draw = (lambda: torch.rand(1, generator=generator)) if isinstance(generator, torch.Generator) else generator.random
    kept = copy.deepcopy(generator) if not isinstance(generator, torch.Generator) else generator.clone_state()
    check(VECTORS, collator if isinstance(generator, torch.Generator) else collator.of_numpy)
    expected = torch.rand(1, generator=kept) if isinstance(generator, torch.Generator) else kept.random()
    assert draw() == expected


def make_private(dataset, collate, **options):
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset, batch_size=50, collate_fn=collate)
    PrivacyEngine().make_private(model, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0, **options)
    return model


@pytest.mark.parametrize("kind", [Observed, ByLists])
@pytest.mark.parametrize("collate", [stacked, flipped, sorted_and_noisy, lambda batch: stacked(batch)])
def test_at_most_eight_examples_are_read(kind, collate):
    dataset = kind()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_private(dataset, collate)
    assert 2 <= len(dataset.reads) <= 8
    assert {0, 999} <= set(dataset.reads)


def test_make_private_rejects_a_function_that_mixes_examples():
    with pytest.raises(BatchDependentLossError, match="collate_fn=standardized changes an example"):
        make_private(Observed(), standardized)


@pytest.mark.parametrize("collate", [default_collate, default_convert])
def test_nothing_is_read_for_the_functions_of_torch(collate):
    dataset = Observed()
    check_collate(DataLoader(dataset, batch_size=4, collate_fn=collate))
    assert not dataset.reads


def test_a_function_that_a_user_registered_with_torch_is_called(monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, Own, lambda batch, **_: standardized([one.example for one in batch]))
    with pytest.raises(BatchDependentLossError, match="default_collate changes"):
        check([Own(example) for example in VECTORS], default_collate)


class Own:
    def __init__(self, example):
        self.example = example


def test_batches_of_the_loop_are_not_checked():
    dataset = Observed()
    model = make_private(dataset, standardized, sampling=ExternalBatches(expected_batch_size=50), target_delta=1e-6)
    assert not dataset.reads
    assert model.weight.shape == (4, 3)


def test_messages_do_not_hold_values_of_examples():
    secret = [(torch.full((3,), 4321.5 + i), i % 4) for i in range(12)]
    with pytest.raises(BatchDependentLossError) as raised:
        check(secret, standardized)
    assert "43" not in str(raised.value)
