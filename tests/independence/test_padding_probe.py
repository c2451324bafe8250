"""The run-time check for padding: models whose results depend on the longest sample of a batch are rejected."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from case_models import model_of
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

from dpengine import GradSampleModule, PrivacyEngine
from dpengine.errors import BatchDependentLossError, PrivacyWarning

WORDS, CLASSES, WIDTH, LONGEST = 50, 3, 8, 12
PADDING_ERROR = r"DPE010.*depends on padding.*different lengths.*attention_mask"


def texts(*, count=32, shortest=3):
    """Returns texts of different lengths. The longest text in each group of eight has a unique length."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        longest = LONGEST - 2 * (i // 8)
        size = longest if i % 8 == 0 else int(torch.randint(shortest, longest - 1, (), generator=generator))
        found.append((torch.randint(1, WORDS, (size,), generator=generator), i % CLASSES))
    return found


def padding_collate(*, length=None, left=False, floats=False, value=0):
    """Returns a collate function that pads to the longest or a fixed length: ids, mask, lengths, targets."""

    def collate(rows):
        ids = [row[0] for row in rows]
        size = torch.tensor([len(one) for one in ids])
        batch = pad_sequence(ids, batch_first=True, padding_value=value)
        if length is not None:
            batch = F.pad(batch, (0, length - batch.shape[1]), value=value)
        if left:
            batch = torch.stack([one.roll(batch.shape[1] - int(n)) for one, n in zip(batch, size, strict=True)])
        mask = torch.arange(batch.shape[1]) < size[:, None]
        if floats:
            batch = F.one_hot(batch, WORDS).float() * mask[..., None]
        return batch, mask.flip(1) if left else mask, size, torch.tensor([row[1] for row in rows])

    return collate


def classify(model, ids, mask, size, targets):
    return F.cross_entropy(model(ids, mask, size), targets)


def run_training(model, loss_of=classify, *, collate=None, mode="auto", passes=1):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(texts(), batch_size=8, collate_fn=collate or padding_collate())
    model, optimizer, loader = PrivacyEngine(seed=0).make_private(
        *(model, optimizer, loader), noise_multiplier=1.0, max_grad_norm=1.0, sampling="shuffle", grad_sample_mode=mode
    )
    lengths = set()
    for _ in range(passes):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()
            lengths.add(batch[0].shape[1])
    return lengths


class PaddingModel(nn.Module):
    """Model with an embedding, further submodules, a head, and the given forward function."""

    def __init__(self, run, **parts):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
        for name, make in parts.items():
            self.add_module(name, make())
        self.run = run

    def forward(self, ids, mask, size):
        return self.run(self, ids, mask, size)


def mean_over_mask(hidden, mask):
    return (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)


def masked_mean(m, ids, mask, size):
    return m.head(mean_over_mask(m.embed(ids).tanh(), mask))


def mask_by_id(m, ids, mask, size):
    return m.head(mean_over_mask(m.embed(ids), ids != 0))


def sum_with_padding_idx(m, ids, mask, size):
    return m.head(m.none(ids).sum(dim=1))


def mean_by_size(m, ids, mask, size):
    return m.head(m.none(ids).sum(dim=1) / size[:, None])


def masked_max(m, ids, mask, size):
    return m.head(m.embed(ids).masked_fill(~mask[..., None], -1e9).amax(dim=1))


def bag_of_words(m, ids, mask, size):
    counts = F.one_hot(ids, WORDS).float() * mask[..., None]
    return m.head(m.bag(counts.sum(dim=1)))


def attention(m, ids, mask, size):
    hidden = m.embed(ids)
    out, _ = m.attend(hidden, hidden, hidden, key_padding_mask=~mask, need_weights=False)
    return m.head(mean_over_mask(out, mask))


def encoder(m, ids, mask, size):
    return m.head(m.encoder(m.embed(ids), src_key_padding_mask=~mask)[:, 0])


def square_mask(m, ids, mask, size):
    hidden = m.embed(ids)
    seen = mask[:, None, None, :].expand(-1, 2, mask.shape[1], -1)
    parts = hidden.unflatten(2, (2, -1)).transpose(1, 2)
    out = F.scaled_dot_product_attention(parts, parts, parts, attn_mask=seen)
    return m.head(mean_over_mask(out.transpose(1, 2).flatten(2), mask))


def pooled_by_attention(m, ids, mask, size):
    hidden = m.embed(ids)
    score = m.score(hidden).squeeze(2).masked_fill(~mask, -1e9).softmax(dim=1)
    return m.head((score[..., None] * hidden).sum(dim=1))


def packed(m, ids, mask, size):
    packed = pack_padded_sequence(m.embed(ids), size.cpu(), batch_first=True, enforce_sorted=False)
    _, (last, _) = m.lstm(packed)
    return m.head(last[-1])


def packed_both_ways(m, ids, mask, size):
    packed = pack_padded_sequence(m.embed(ids), size.cpu(), batch_first=True, enforce_sorted=False)
    out, _ = pad_packed_sequence(m.both(packed)[0], batch_first=True)
    return m.head(mean_over_mask(out, mask))


def forward_rnn_at_the_last(m, ids, mask, size):
    out, _ = m.lstm(m.embed(ids))
    return m.head(out[torch.arange(len(ids)), size - 1])


def masked_convolution(m, ids, mask, size):
    hidden = m.embed(ids) * mask[..., None]
    hidden = m.conv(hidden.transpose(1, 2)).transpose(1, 2).relu() * mask[..., None]
    return m.head(mean_over_mask(hidden, mask))


def with_positions(m, ids, mask, size):
    positions = torch.arange(ids.shape[1])[None]
    return m.head(mean_over_mask(m.embed(ids) + m.place(positions), mask))


def with_dropout(m, ids, mask, size):
    return m.head(mean_over_mask(F.dropout(m.embed(ids), 0.3, m.training), mask))


def first_position(m, ids, mask, size):
    return m.head(m.lstm(m.embed(ids))[0][:, 0])


def layer():
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True), 2, enable_nested_tensor=False
    )


PARTS = {
    sum_with_padding_idx: {"none": lambda: nn.Embedding(WORDS, WIDTH, padding_idx=0)},
    mean_by_size: {"none": lambda: nn.Embedding(WORDS, WIDTH, padding_idx=0)},
    bag_of_words: {"bag": lambda: nn.Linear(WORDS, WIDTH)},
    attention: {"attend": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True)},
    encoder: {"encoder": layer},
    pooled_by_attention: {"score": lambda: nn.Linear(WIDTH, 1)},
    packed: {"lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True)},
    packed_both_ways: {"both": lambda: nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)},
    forward_rnn_at_the_last: {"lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True)},
    masked_convolution: {"conv": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1)},
    with_positions: {"place": lambda: nn.Embedding(LONGEST, WIDTH)},
    first_position: {"lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True)},
}
MASKED = [
    masked_mean, mask_by_id, sum_with_padding_idx, mean_by_size, masked_max, bag_of_words, attention, encoder,
    square_mask, pooled_by_attention, packed, packed_both_ways, forward_rnn_at_the_last, masked_convolution,
    with_positions, with_dropout, first_position,
]  # fmt: skip


def make_model(run, parts=None):
    parts = PARTS.get(run, {}) if parts is None else parts
    model = PaddingModel(run, **parts)
    unused = [name for name in ("embed",) if run in (sum_with_padding_idx, mean_by_size, bag_of_words)]
    for name in unused:
        model.get_submodule(name).requires_grad_(False)
    return model


def train_without_warnings(model, *args, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*DPE012.*(padd|lengths|independent)")
        return run_training(model, *args, **options)


@pytest.mark.one_in(4, "run", "mode", others="slow")
@pytest.mark.one_in(2, "run", "mode")
@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("run", MASKED, ids=lambda run: run.__name__)
def test_a_model_that_masks_padding_is_accepted(run, mode):
    assert (
        len(train_without_warnings(make_model(run), mode=mode, passes=2)) > 1
    )  # two passes, so that a second batch is probed


# Models that do not mask padding


def plain_mean(m, ids, mask, size):
    return m.head(m.embed(ids).mean(dim=1))


def plain_max(m, ids, mask, size):
    return m.head(m.embed(ids).amax(dim=1))


def sum_with_padding(m, ids, mask, size):
    return m.head(m.embed(ids).sum(dim=1))


def mean_with_padding_idx(m, ids, mask, size):
    return m.head(m.none(ids).mean(dim=1))


def last_state(m, ids, mask, size):
    return m.head(m.lstm(m.embed(ids))[1][0][-1])


def attention_without_mask(m, ids, mask, size):
    hidden = m.embed(ids)
    return m.head(mean_over_mask(m.attend(hidden, hidden, hidden, need_weights=False)[0], mask))


def encoder_without_mask(m, ids, mask, size):
    return m.head(m.encoder(m.embed(ids))[:, 0])


def convolution_without_mask(m, ids, mask, size):
    return m.head(m.conv(m.embed(ids).transpose(1, 2)).relu().mean(dim=2))


def reversed_rnn(m, ids, mask, size):
    return m.head(m.both(m.embed(ids))[0][:, 0])


def normalized_over_time(m, ids, mask, size):
    hidden = m.embed(ids)
    return m.head(mean_over_mask(hidden - hidden.mean(dim=1, keepdim=True), mask))


PARTS |= {
    mean_with_padding_idx: PARTS[mean_by_size],
    last_state: PARTS[packed],
    attention_without_mask: PARTS[attention],
    encoder_without_mask: PARTS[encoder],
    convolution_without_mask: PARTS[masked_convolution],
    reversed_rnn: PARTS[packed_both_ways],
}
UNMASKED = [
    plain_mean, plain_max, sum_with_padding, mean_with_padding_idx, last_state, attention_without_mask,
    encoder_without_mask, convolution_without_mask, reversed_rnn, normalized_over_time,
]  # fmt: skip


def unmasked_model(run):
    model = make_model(run)
    if run is mean_with_padding_idx:
        model.embed.requires_grad_(False)
    return model


@pytest.mark.one_in(4, "run", "mode", others="slow")
@pytest.mark.one_in(2, "run", "mode")
@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("run", UNMASKED, ids=lambda run: run.__name__)
def test_a_model_that_does_not_mask_padding_is_rejected(run, mode):
    with pytest.raises(BatchDependentLossError, match=PADDING_ERROR):
        run_training(unmasked_model(run), mode=mode)


@pytest.mark.one_in(3, "run", others="slow")
@pytest.mark.parametrize("run", UNMASKED, ids=lambda run: run.__name__)
def test_padding_to_one_length_is_accepted(run):
    assert train_without_warnings(unmasked_model(run), collate=padding_collate(length=LONGEST), passes=3) == {LONGEST}


def test_left_padding_is_checked():
    def at_the_end(m, ids, mask, size):
        return m.head(m.lstm(m.embed(ids))[0][:, -1])

    collate = padding_collate(left=True)
    assert len(train_without_warnings(make_model(masked_mean), collate=collate)) > 1
    with pytest.raises(BatchDependentLossError, match=PADDING_ERROR):
        run_training(make_model(at_the_end, PARTS[packed]), collate=collate)


class FrameModel(nn.Module):
    def __init__(self, *, masks):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.masks = nn.Linear(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES), masks

    def forward(self, frames, mask, size):
        hidden = self.body(frames).tanh()
        return self.head(mean_over_mask(hidden, mask) if self.masks else hidden.mean(dim=1))


def test_zeros_after_frames_are_padding():
    assert len(train_without_warnings(FrameModel(masks=True), collate=padding_collate(floats=True))) > 1
    with pytest.raises(BatchDependentLossError, match=PADDING_ERROR):
        run_training(FrameModel(masks=False), collate=padding_collate(floats=True))


# Losses for each position


@model_of(
    lambda: {
        "embed": nn.Embedding(WORDS, WIDTH),
        "lstm": nn.LSTM(WIDTH, WIDTH, batch_first=True),
        "head": nn.Linear(WIDTH, WORDS),
    }
)
def tagger(m, ids):
    return m.head(m.lstm(m.embed(ids))[0])


def token_losses(model, ids, mask, *, ignored):
    following, real = F.pad(ids[:, 1:], (0, 1)), F.pad(mask[:, 1:], (0, 1))
    labels = following.masked_fill(~real, -100 if ignored else 0)
    loss_BT = F.cross_entropy(model(ids).transpose(1, 2), labels, reduction="none")
    return loss_BT, labels


def mean_of_real_tokens(model, ids, mask, size, targets):
    loss_BT, labels = token_losses(model, ids, mask, ignored=True)
    return (loss_BT.sum(dim=1) / (labels != -100).sum(dim=1)).mean()


def sum_of_real_tokens(model, ids, mask, size, targets):
    loss_BT, _ = token_losses(model, ids, mask, ignored=True)
    return (loss_BT.sum(dim=1) / LONGEST).mean()


def times_mask(model, ids, mask, size, targets):
    loss_BT, _ = token_losses(model, ids, mask, ignored=False)
    return ((loss_BT * mask).sum(dim=1) / size).mean()


def padding_counts(model, ids, mask, size, targets):
    loss_BT, _ = token_losses(model, ids, mask, ignored=False)
    return loss_BT.mean(dim=1).mean()


@pytest.mark.parametrize("loss_of", [mean_of_real_tokens, sum_of_real_tokens, times_mask], ids=lambda f: f.__name__)
def test_causal_model_with_a_loss_that_ignores_padding_is_accepted(loss_of):
    assert len(train_without_warnings(tagger(), loss_of)) > 1


def divides_by_the_padded_length(model, ids, mask, size, targets):
    loss_BT, _ = token_losses(model, ids, mask, ignored=True)
    return loss_BT.mean(dim=1).mean()


def mean_of_masked(model, ids, mask, size, targets):
    loss_BT, _ = token_losses(model, ids, mask, ignored=False)
    return (loss_BT * mask).mean(dim=1).mean()


@pytest.mark.parametrize("loss_of", [padding_counts, divides_by_the_padded_length, mean_of_masked])
def test_a_loss_that_counts_padding_is_rejected(loss_of):
    with pytest.raises(BatchDependentLossError, match=PADDING_ERROR):
        run_training(tagger(), loss_of)
    assert train_without_warnings(tagger(), loss_of, collate=padding_collate(length=LONGEST)) == {LONGEST}


# Inputs without padding, undecided models, and runs without a loader


def test_sequences_without_padding_are_accepted():
    def cut(rows):
        size = 2
        ids = torch.stack([row[0][:size] for row in rows])
        return ids, torch.ones_like(ids).bool(), torch.full((len(rows),), size), torch.tensor([r[1] for r in rows])

    train_without_warnings(make_model(plain_mean), collate=cut, passes=3)


def test_a_model_that_draws_random_numbers_for_positions_is_reported_once():
    def drawn(m, ids, mask, size):
        return masked_mean(m, ids, mask, size) * (1 + 0.1 * torch.rand(ids.shape).mean(dim=1, keepdim=True))

    with pytest.warns(PrivacyWarning, match=r"DPE012.*padded to different lengths.*not known whether padding"):
        run_training(make_model(drawn), passes=2)
    train_without_warnings(make_model(drawn), collate=padding_collate(length=LONGEST))


def with_attribute(model, ids, mask, size, targets):
    model.mask = mask
    return F.cross_entropy(model(ids, mask, size), targets)


@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_mask_stored_as_a_model_attribute_is_trimmed_with_the_batch(mode):
    train_without_warnings(
        make_model(lambda m, ids, mask, size: masked_mean(m, ids, m.mask, size)), with_attribute, mode=mode, passes=3
    )
    with pytest.raises(BatchDependentLossError, match=PADDING_ERROR):
        unused = lambda m, ids, mask, size: plain_mean(m, ids, m.mask, size) + 0 * m.mask.sum()  # noqa: E731
        run_training(make_model(unused), with_attribute, mode=mode, passes=3)


@pytest.mark.parametrize(("run", "rejected"), [(masked_mean, False), (plain_mean, True)])
def test_a_wrapped_model_is_checked_at_its_probed_passes(run, rejected):
    wrapped = GradSampleModule(make_model(run), loss_reduction="sum")

    def passes():
        for i in range(8):
            ids, mask, size, _ = padding_collate()(texts()[:8] if i < 7 else texts()[8:16])
            wrapped.zero_grad()
            wrapped(ids, mask, size).square().sum().backward()

    if not rejected:
        return passes()
    with pytest.raises(BatchDependentLossError, match=PADDING_ERROR):
        passes()
