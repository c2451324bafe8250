"""Small training scripts in the forms in which people write them, and the fix that a message names.

Each step is what a loop over samples gives, or the script is rejected, and is exact once the fix is applied.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.errors import BatchDependentLossError, ReductionError
from dpengine.losses import per_token_mean
from dpengine.validation import per_example

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012.*NOT PRIVATE", "ignore:.*DPE006")
N, BATCH, WORDS, T, CLASSES, MAX_NORM = 40, 8, 11, 6, 3, 0.5


# Loops, as in examples, notebooks and trainers


def plain(model, optimizer, loader, loss_of, steps):
    model.train()
    for i, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        if i + 1 == steps:
            return


def with_closure(model, optimizer, loader, loss_of, steps):
    for _, batch in zip(range(steps), loader, strict=False):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)


class Trainer:
    """A trainer with callbacks, as in minGPT."""

    def __init__(self, model, optimizer, loader, loss_of, steps):
        self.model, self.optimizer, self.loader, self.loss_of, self.steps = model, optimizer, loader, loss_of, steps
        self.callbacks, self.iter_num = (
            {"on_batch_end": [lambda trainer: trainer.losses.append(trainer.loss.item())]},
            0,
        )
        self.losses = []

    def run(self):
        self.model.train()
        data_iter = iter(self.loader)
        while self.iter_num < self.steps:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(self.loader)
                batch = next(data_iter)
            self.loss = self.loss_of(self.model, batch)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            for callback in self.callbacks["on_batch_end"]:
                callback(self)
            self.iter_num += 1


def trainer(*arguments):
    Trainer(*arguments).run()


def with_meters(model, optimizer, loader, loss_of, steps):
    """Runs a loop as in timm: the loss is logged before the backward pass, and a scheduler follows."""
    scheduler, total = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10), 0.0
    for i, batch in enumerate(loader):
        loss = loss_of(model, batch)
        total += loss.item()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if i + 1 == steps:
            return


def accelerated(model, optimizer, loader, loss_of, steps):
    """Runs a loop as with accelerate: an object runs the backward pass."""
    accelerator = SimpleNamespace(backward=lambda loss, **kwargs: loss.backward(**kwargs))
    for step, batch in enumerate(loader):
        outputs_loss = loss_of(model, {**batch} if isinstance(batch, dict) else batch)
        accelerator.backward(outputs_loss)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 >= steps:
            break


# Models


class Both(nn.Module):
    """Two encoders and a head for what ``join`` makes of their outputs."""

    def __init__(self, one, other, join, head):
        super().__init__()
        self.one, self.other, self.join, self.head = one, other, join, head

    def forward(self, a, b):
        return self.head(self.join(self.one(a), self.other(b)))


class Function(nn.Module):
    """Layers and the function that calls them."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def mlp(out=CLASSES):
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, out))


def cnn(out=CLASSES):
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, out))


def to_map(out=1):
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.ReLU(), nn.Conv2d(3, out, 1))


def gpt():
    block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
    mask = torch.full((T, T), float("-inf")).triu(1)
    forward = lambda m, x: m.head(m.block(m.words(x) + m.places(torch.arange(T)[None]), src_mask=mask))  # noqa: E731
    layers = {"words": nn.Embedding(WORDS, 8), "places": nn.Embedding(T, 8), "block": block}
    return Function(forward, **layers, head=nn.Linear(8, WORDS, bias=False))


def recurrent(kind=nn.LSTM, out=WORDS, *, last=False):
    forward = lambda m, x: m.head(m.rnn(m.words(x))[0][:, -1] if last else m.rnn(m.words(x))[0])  # noqa: E731
    return Function(forward, words=nn.Embedding(WORDS, 5), rnn=kind(5, 6, batch_first=True), head=nn.Linear(6, out))


def lora():
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.down, self.up = nn.Linear(8, WORDS), nn.Linear(8, 2, bias=False), nn.Linear(2, WORDS)
            self.base.requires_grad_(False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    words = nn.Embedding(WORDS, 8).requires_grad_(False)
    return nn.Sequential(words, nn.LayerNorm(8), Lora())


def bag(out=CLASSES):
    """Pools words under a mask, as a classifier of sentences does."""
    forward = lambda m, x, mask: m.head((m.words(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))  # noqa: E731
    return Function(forward, words=nn.Embedding(WORDS, 6), head=nn.Linear(6, out))


def graph():
    forward = lambda m, x, a: m.head((a @ m.one(x)).relu().mean(1))  # noqa: E731
    return Function(forward, one=nn.Linear(4, 6), head=nn.Linear(6, CLASSES))


def factors():
    forward = lambda m, user, item: (m.users(user) * m.items(item)).sum(-1)  # noqa: E731
    return Function(forward, users=nn.Embedding(7, 4), items=nn.Embedding(9, 4))


def variational():
    def forward(m, x, noise):
        mean, spread = m.encoder(x).chunk(2, 1)
        return m.decoder(mean + noise * (0.5 * spread).exp()), mean, spread

    return Function(forward, encoder=nn.Linear(4, 4), decoder=nn.Linear(2, 4))


def denoiser():
    forward = lambda m, x, t: m.net(torch.cat([x, t[:, None]], 1))  # noqa: E731
    return Function(forward, net=nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 4)))


def two_heads():
    def forward(m, x):
        body = m.body(x).tanh()
        return m.a(body), m.b(body)

    return Function(forward, body=nn.Linear(4, 5), a=nn.Linear(5, CLASSES), b=nn.Linear(5, 1))


# Data


def rows(*shape):
    return torch.randn(N, *shape)


def labels(classes=CLASSES, *shape):
    return torch.randint(classes, (N, *shape))


def padded():
    found = labels(WORDS, T)
    found[torch.arange(T) >= torch.randint(2, T + 1, (N, 1))] = -100
    return found


def mask():
    return (torch.arange(T) < torch.randint(2, T + 1, (N, 1))).float()


class Dicts(TensorDataset):
    def __getitem__(self, i):
        return dict(zip(("input_ids", "attention_mask", "labels"), super().__getitem__(i), strict=True))


# Losses


def classified(loss=F.cross_entropy):
    return lambda model, batch: loss(model(batch[0]), batch[1])


def paired(loss):
    return lambda model, batch: loss(model(batch[0], batch[1]), batch[2])


def language(model, batch):
    logits = model(batch[0])
    return F.cross_entropy(logits.view(-1, logits.size(-1)), batch[1].view(-1), ignore_index=-100)


def tokens_apart(model, batch):
    return per_token_mean(model(batch[0]), batch[1])


def elbo(model, batch):
    again, mean, spread = model(*batch)
    divergence = -0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
    return F.binary_cross_entropy_with_logits(again, batch[0].sigmoid(), reduction="sum") + divergence


def glue(model, batch):
    return F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]), batch["labels"])


def soft_dice(o, y):
    p = o.sigmoid()[:, 0]
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


def policy(model, batch):
    returns = (batch[2] - batch[2].mean()) / (batch[2].std() + 1e-6)
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * returns).mean()


def policy_apart(model, batch):
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * batch[2]).mean()


def distilled(model, batch):
    teacher = torch.linspace(-1, 1, 12, dtype=batch[0].dtype).view(4, 3)
    with torch.no_grad():
        target = (batch[0] @ teacher).div(2).softmax(1)
    soft = F.kl_div(model(batch[0]).div(2).log_softmax(1), target, reduction="batchmean")
    return 4 * soft


def two_tasks(model, batch):
    a, b = model(batch[0])
    return F.cross_entropy(a, batch[1]) + 0.5 * F.mse_loss(b.squeeze(1), batch[2])


def bpr(model, batch):
    user, good, bad = batch
    return -F.logsigmoid(model(user, good) - model(user, bad)).mean()


def in_batch_negatives(model, batch):
    user, good, _ = batch
    scores = model(user[:, None], good[None])
    return F.cross_entropy(scores, torch.arange(len(user)))


def sim_clr(model, batch):
    z = F.normalize(torch.cat([model(batch[0]), model(batch[1])]), dim=1)
    scores = (z @ z.T).fill_diagonal_(-9.0) / 0.5
    return F.cross_entropy(scores, torch.arange(len(z)).roll(len(z) // 2))


def triplets(model, batch):
    return F.triplet_margin_loss(model(batch[0]), batch[1], batch[2])


def ctc(model, batch):
    logs = model(batch[0]).log_softmax(2).transpose(0, 1)
    sizes = torch.full((len(batch[0]),), T)
    return F.ctc_loss(logs, batch[1][:, :3], sizes, batch[2], zero_infinity=True)


def spans(model, batch):
    start, end = model(batch[0]).split(1, dim=-1)
    return (F.cross_entropy(start.squeeze(-1), batch[1]) + F.cross_entropy(end.squeeze(-1), batch[2])) / 2


def cox(model, batch):
    order = batch[1].argsort(descending=True)
    risk = model(batch[0])[order, 0]
    return -(risk - risk.logcumsumexp(0)).mean()


def mixup(model, batch):
    order = torch.randperm(len(batch[0]))
    return F.cross_entropy(model(0.7 * batch[0] + 0.3 * batch[0][order]), batch[1])


def masked_patches(model, batch):
    loss = (model(batch[0]) - batch[0]).square()
    return (loss * batch[1]).sum() / batch[1].sum()


def masked_patches_apart(model, batch):
    loss = (model(batch[0]) - batch[0]).square()
    return ((loss * batch[1]).sum(1) / batch[1].sum(1)).mean()


def style(model, batch):
    o = model(batch[0]).flatten(2)
    return F.mse_loss(torch.bmm(o, o.transpose(1, 2)) / o.size(2), batch[1])


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
BCE = nn.BCEWithLogitsLoss()
float_of = lambda loss: lambda o, y: loss(o.squeeze(1), y.float())  # noqa: E731

# name: model, data, loss, loop, and what the fix changes: the loss, or options of make_private
EXACT = {
    "mnist": (cnn, lambda: (rows(1, 6, 6), labels()), lambda m, b: F.nll_loss(m(b[0]).log_softmax(1), b[1]), plain),
    "mnist rnn": (lambda: recurrent(out=CLASSES, last=True), lambda: (labels(WORDS, T), labels()), classified(), plain),
    "word language model": (recurrent, lambda: (labels(WORDS, T), labels(WORDS, T)), language, plain),
    "gru language model": (
        lambda: recurrent(nn.GRU),
        lambda: (labels(WORDS, T), labels(WORDS, T)),
        language,
        with_meters,
    ),
    "super resolution": (to_map, lambda: (rows(1, 4, 4), rows(1, 4, 4)), classified(F.mse_loss), plain),
    "siamese": (
        lambda: Both(mlp(5), mlp(5), lambda a, b: (a - b).abs(), nn.Linear(5, 1)),
        lambda: (rows(4), rows(4), labels(2)),
        paired(float_of(BCE)),
        plain,
    ),
    "regression": (lambda: nn.Linear(4, 1), lambda: (rows(4), rows(1)), classified(F.smooth_l1_loss), plain),
    "discriminator": (lambda: mlp(1), lambda: (rows(4), labels(2)), classified(float_of(BCE)), plain),
    "time sequence": (recurrent, lambda: (labels(WORDS, T), labels(WORDS, T)), language, with_closure),
    "imagenet": (
        lambda: nn.Sequential(*to_map(4), nn.Flatten(), nn.Linear(64, CLASSES)),
        lambda: (rows(1, 4, 4), labels()),
        classified(nn.CrossEntropyLoss()),
        with_meters,
    ),
    "label smoothing": (
        cnn,
        lambda: (rows(1, 6, 6), labels()),
        classified(nn.CrossEntropyLoss(label_smoothing=0.1)),
        with_meters,
    ),
    "graph": (graph, lambda: (rows(5, 4), (rows(5, 5) > 0).float(), labels()), paired(F.cross_entropy), plain),
    "mingpt": (gpt, lambda: (labels(WORDS, T), labels(WORDS, T)), language, trainer),
    "nanogpt": (gpt, lambda: (labels(WORDS, T), labels(WORDS, T)), language, with_meters),
    "tabular": (
        lambda: mlp(1),
        lambda: (rows(4), labels(2)),
        classified(float_of(nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)))),
        plain,
    ),
    "multi-label": (
        mlp,
        lambda: (rows(4), labels(2, CLASSES).float()),
        classified(nn.MultiLabelSoftMarginLoss()),
        plain,
    ),
    "glue": (bag, lambda: (labels(WORDS, T), mask(), labels()), glue, accelerated),
    "ratings": (factors, lambda: (labels(7), labels(9), rows()), paired(F.mse_loss), plain),
    "ranking of pairs": (factors, lambda: (labels(7), labels(9), labels(9)), bpr, plain),
    "diffusion": (denoiser, lambda: (rows(4), torch.rand(N), rows(4)), paired(F.mse_loss), plain),
    "distillation": (mlp, lambda: (rows(4), labels()), distilled, plain),
    "two tasks": (two_heads, lambda: (rows(4), labels(), rows()), two_tasks, trainer),
    "speech": (recurrent, lambda: (labels(WORDS, T), labels(WORDS - 1, T) + 1, labels(3) + 1), ctc, plain),
    "questions": (lambda: recurrent(out=2), lambda: (labels(WORDS, T), labels(T), labels(T)), spans, accelerated),
    "autoencoder": (lambda: mlp(4), lambda: (rows(4), rows(4)), lambda m, b: F.mse_loss(m(b[0]), b[0]), plain),
    "triplets": (mlp, lambda: (rows(4), rows(CLASSES), rows(CLASSES)), triplets, plain),
    "forecasting": (lambda: mlp(2), lambda: (rows(4), rows(2)), classified(nn.L1Loss()), with_closure),
    "style": (lambda: to_map(2), lambda: (rows(1, 4, 4), rows(2, 2)), style, plain),
    "segmentation": (to_map, lambda: (rows(1, 4, 4), labels(2, 1, 4, 4).float()), classified(BCE), with_meters),
}

REJECTED = {
    "variational sum": (variational, lambda: (rows(4), rows(2)), elbo, plain, {"loss_reduction": "sum"}),
    "policy gradient": (mlp, lambda: (rows(4), labels(), rows()), policy, plain, policy_apart),
    "translation": (recurrent, lambda: (labels(WORDS, T), padded()), language, plain, tokens_apart),
    "lora": (lora, lambda: (labels(WORDS, T), padded()), language, trainer, tokens_apart),
    "tagging": (lambda: recurrent(nn.GRU), lambda: (labels(WORDS, T), padded()), language, accelerated, tokens_apart),
    "weighted classes": (
        mlp,
        lambda: (rows(4), labels()),
        classified(WEIGHTED),
        plain,
        classified(per_example(WEIGHTED)),
    ),
    "mixup": (mlp, lambda: (rows(4), labels()), mixup, with_meters, classified()),
    "negatives of the batch": (factors, lambda: (labels(7), labels(9), labels(9)), in_batch_negatives, plain, bpr),
    "dice": (
        to_map,
        lambda: (rows(1, 4, 4), labels(2, 4, 4).float()),
        classified(soft_dice),
        with_meters,
        classified(per_example(soft_dice)),
    ),
    "ignored pixels": (
        lambda: to_map(CLASSES),
        lambda: (rows(1, 4, 4), labels(CLASSES, 4, 4)),
        classified(nn.CrossEntropyLoss(ignore_index=0)),
        plain,
        classified(per_example(lambda o, y: F.cross_entropy(o, y, ignore_index=0))),
    ),
    "masked patches": (
        lambda: mlp(4),
        lambda: (rows(4), (torch.rand(N, 4) > 0.4).double() + torch.eye(4)[0]),
        masked_patches,
        plain,
        masked_patches_apart,
    ),
    "contrastive": (mlp, lambda: (rows(4), rows(4)), sim_clr, plain, None),  # has no form with this guarantee
    "survival": (lambda: mlp(1), lambda: (rows(4), rows()), cox, plain, None),
    "sum": (
        mlp,
        lambda: (rows(4), labels()),
        classified(nn.CrossEntropyLoss(reduction="sum")),
        plain,
        {"loss_reduction": "sum"},
    ),
}


def expected(model, batch, loss_of, divisor):
    """The clipped gradients of single samples, added up."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in trainable.items()}
    size = len(pytree.tree_leaves(batch)[0])
    for i in range(size):
        one = pytree.tree_map(lambda tensor, i=i: tensor[i : i + 1], batch)
        found = torch.autograd.grad(
            loss_of(model, one), list(trainable.values()), materialize_grads=True, allow_unused=True
        )
        factor = min(1.0, MAX_NORM / float(torch.stack([g.norm() for g in found]).norm().clamp(min=1e-12)))
        for name, grad in zip(trainable, found, strict=True):
            sums[name] += factor * grad
    return {name: total / divisor for name, total in sums.items()}


class Iterated:
    """A loader of noted batches."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return self.batches()


def run(make, data, loss_of, loop, *, steps=3, **options):
    """Trains without noise, and compares each update with a loop over samples."""
    torch.manual_seed(0)
    model, tensors = make().double(), [t.double() if t.is_floating_point() else t for t in data()]
    dataset = (Dicts if loss_of is glue else TensorDataset)(*tensors)
    optimizer, reference = torch.optim.SGD(model.parameters(), lr=0.5), copy.deepcopy(model)
    model, optimizer, loader = PrivacyEngine(seed=5).make_private(
        *(model, optimizer, DataLoader(dataset, batch_size=BATCH)),
        noise_multiplier=0.0,
        max_grad_norm=MAX_NORM,
        **options,
    )
    divisor = BATCH if options.get("loss_reduction") != "sum" else 1
    batches, compared = [], []

    def noted():
        for batch in loader:
            batches.append(copy.deepcopy(batch))
            reference.load_state_dict(model.state_dict())
            yield batch

    def compare(*_):
        wanted = expected(reference, batches[-1], loss_of, divisor)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(
                    parameter.grad, wanted[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
                )
        compared.append(len(batches))

    optimizer.register_step_post_hook(compare)
    loop(model, optimizer, Iterated(noted), loss_of, steps)
    assert len(compared) == steps


@pytest.mark.one_in(6, "name", others="slow")
@pytest.mark.one_in(3, "name")
@pytest.mark.parametrize("name", EXACT)
def test_a_script_is_exact(name):
    run(*EXACT[name])


@pytest.mark.one_in(6, "name", others="slow")
@pytest.mark.one_in(3, "name")
@pytest.mark.parametrize("name", REJECTED)
def test_a_script_that_is_rejected_is_exact_with_the_fix(name):
    make, data, loss_of, loop, fix = REJECTED[name]
    with pytest.raises((BatchDependentLossError, ReductionError)) as caught:
        run(make, data, loss_of, loop)
    if isinstance(fix, dict):
        assert f'loss_reduction="{fix["loss_reduction"]}"' in str(caught.value)
        run(make, data, loss_of, loop, **fix)
    elif fix is not None:
        run(make, data, fix, loop)
