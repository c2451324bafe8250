"""Models of transformers with padded labels and the loss that the error suggests; a training loop with accelerate."""

import re

import pytest
import torch
import torch.nn.functional as F
from loops import SLACK
from reference import clipped_sum, flat_norms, per_sample_gradients
from torch.utils.data import DataLoader, Dataset

import dpengine
from dpengine import PrivacyEngine, PrivacyWarning
from dpengine.errors import BatchDependentLossError, BatchMismatchError
from dpengine.losses import per_token_mean

pytestmark = pytest.mark.nightly
transformers = pytest.importorskip("transformers")

WORDS, LENGTH, EXAMPLES, BATCH = 64, 12, 64, 8
SMALL = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}


def gpt2():
    zero = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, **zero, **SMALL)
    return transformers.GPT2LMHeadModel(config)


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, max_position_embeddings=16, **SMALL)
    return transformers.LlamaForCausalLM(config)


MODELS = pytest.mark.parametrize("make", [gpt2, llama])
MAX_NORM = {gpt2: 2.0, llama: 3.3}  # about the median gradient norm


class Texts(Dataset):
    """Texts with labels. If padded, only the first 4 to 11 labels of a text are not ignored."""

    def __init__(self, *, padded=True):
        generator = torch.Generator().manual_seed(1)
        self.words = torch.randint(1, WORDS, (EXAMPLES, LENGTH), generator=generator)
        self.labels = self.words.clone()
        if padded:
            for i in range(EXAMPLES):
                self.labels[i, 4 + i % 8 :] = -100

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, i):
        return {"input_ids": self.words[i], "labels": self.labels[i]}


def train_private(make, loss_of, *, steps=3, padded=True, noise=1.0, max_norm=1.0):
    """Trains a few steps; returns the model, its weights before the last step, and the last batch."""
    torch.manual_seed(0)
    model = make().train()
    optimizer, engine = torch.optim.SGD(model.parameters(), lr=1.0), PrivacyEngine(seed=1)
    loader = DataLoader(Texts(padded=padded), batch_size=BATCH)
    model, optimizer, loader = engine.make_private(
        model, optimizer, loader, noise_multiplier=noise, max_grad_norm=max_norm
    )
    for step, batch in enumerate(loader, 1):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if step == steps:
            return model, before, batch
    raise AssertionError("The loader ended.")


def built_in_loss(model, batch):
    return model(**batch).loss


def loss_by_item_count(model, batch):
    return model(**batch, num_items_in_batch=(batch["labels"] != -100).sum()).loss


def loss_of_logits(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@MODELS
@pytest.mark.parametrize(
    ("loss_of", "cause"),
    [
        (built_in_loss, "different numbers of labels"),
        (loss_by_item_count, "num_items_in_batch="),
        (loss_of_logits, "The loss mixes samples"),
    ],
)
def test_a_mean_over_the_tokens_of_a_batch_is_rejected(make, loss_of, cause):
    with pytest.raises(BatchDependentLossError, match=f"DPE010.*{cause}.*per_token_mean"):
        train_private(make, loss_of)


@MODELS
def test_the_loss_that_the_message_names_trains_and_is_exact(make):
    with pytest.raises(BatchDependentLossError) as seen:
        train_private(make, built_in_loss)
    named = re.search(r"outputs\.loss by (dpengine\.losses\.\w+\(.*?\)), after (import [\w.]+)\.", str(seen.value))
    scope = {}
    exec(named.group(2), scope)

    def loss_of(model, batch):
        return eval(named.group(1), scope | {"outputs": model(**batch), "labels": batch["labels"]})

    model, before, batch = train_private(make, loss_of, noise=0.0, max_norm=MAX_NORM[make])
    assert_exact(make, model, before, batch, MAX_NORM[make])


def assert_exact(make, model, before, batch, max_norm):
    """Asserts that the last step moved the weights by the clipped sum of a loop over samples."""
    plain = make()
    plain.load_state_dict(before, strict=False)
    rows = per_sample_gradients(
        plain,
        lambda outputs, labels: per_token_mean(outputs.logits, labels, shift=True),
        {"input_ids": batch["input_ids"]},
        batch["labels"],
    )
    norms_B = flat_norms(rows)
    assert norms_B.min() < max_norm < norms_B.max(), norms_B
    truth = clipped_sum(rows, (1 - SLACK) * max_norm)
    moved = {name: BATCH * (before[name] - p.detach()) for name, p in model.named_parameters()}
    scale = torch.cat([total.flatten() for total in truth.values()]).norm()
    assert max(float((moved[name] - truth[name]).norm()) for name in truth) < 1e-5 * scale


@MODELS
@pytest.mark.parametrize("loss_of", [built_in_loss, loss_by_item_count])
def test_the_loss_that_the_message_names_can_be_installed_and_is_exact(make, loss_of):
    with pytest.raises(BatchDependentLossError, match="causal_lm_loss") as seen:
        train_private(make, loss_of)
    line = re.search(r"model\.loss_function = [\w.]+\w", str(seen.value)).group()

    def installed():
        model = make()
        exec(line, {"model": model, "dpengine": dpengine})
        return model

    model, before, batch = train_private(installed, loss_of, noise=0.0, max_norm=MAX_NORM[make])
    assert_exact(make, model, before, batch, MAX_NORM[make])


@MODELS
def test_the_built_in_loss_of_the_model_is_accepted_for_texts_of_equal_length(make):
    train_private(make, built_in_loss, padded=False)


@pytest.mark.parametrize("when", ["before make_private", "after make_private"])
def test_the_loader_of_accelerate_trains_by_the_remedy_of_its_message(when):
    accelerate = pytest.importorskip("accelerate")
    accelerator, engine = accelerate.Accelerator(cpu=True), PrivacyEngine(seed=1)
    model = torch.nn.Linear(4, 2)
    parts = model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.randn(64, 4), batch_size=BATCH)
    if when == "before make_private":
        parts = accelerator.prepare(*parts)
    parts = engine.make_private(*parts, noise_multiplier=1.0, max_grad_norm=1.0)
    if when == "after make_private":
        parts = accelerator.prepare(*parts)
        with pytest.raises(BatchMismatchError, match=r"DPE018.*fetched ahead") as seen, pytest.warns(PrivacyWarning):
            train_epoch(accelerator, *parts)
        model = torch.nn.Linear(4, 2)
        parts = model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.randn(64, 4), batch_size=BATCH)
        engine = PrivacyEngine(seed=1)
        parts = engine.make_private(*parts, noise_multiplier=1.0, max_grad_norm=1.0)
        exec(
            re.search(r"dpengine\.engine\.fetch_ahead\(engine, 1\)", str(seen.value)).group(),
            {"dpengine": dpengine, "engine": engine},
        )
        parts = accelerator.prepare(*parts)
    assert train_epoch(accelerator, *parts) == engine.ledger.steps == EXAMPLES // BATCH


def train_epoch(accelerator, model, optimizer, loader):
    """Trains an epoch; returns the number of steps."""
    steps = 0
    for inputs in loader:
        optimizer.zero_grad()
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        steps += 1
    return steps
