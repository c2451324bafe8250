"""Loops, models, data and losses of small training scripts in common styles."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpengine.losses import per_token_mean

N, WORDS, T, CLASSES = 40, 11, 6, 3


# Training loops of examples, notebooks and trainers


def plain_loop(model, optimizer, loader, loss_of, steps):
    model.train()
    for i, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        if i + 1 == steps:
            return


def closure_loop(model, optimizer, loader, loss_of, steps):
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


def trainer_loop(*arguments):
    Trainer(*arguments).run()


def timm_loop(model, optimizer, loader, loss_of, steps):
    """Runs a loop as in timm: the loss is logged before the backward pass, and a scheduler steps last."""
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


def accelerate_loop(model, optimizer, loader, loss_of, steps):
    """Runs a loop as with accelerate, whose ``Accelerator`` object runs the backward pass."""
    accelerator = SimpleNamespace(backward=lambda loss, **kwargs: loss.backward(**kwargs))
    for step, batch in enumerate(loader):
        outputs_loss = loss_of(model, {**batch} if isinstance(batch, dict) else batch)
        accelerator.backward(outputs_loss)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 >= steps:
            break


# Models


class TwoEncoders(nn.Module):
    """Two encoders, and a head that gets their outputs combined by ``join``."""

    def __init__(self, one, other, join, head):
        super().__init__()
        self.one, self.other, self.join, self.head = one, other, join, head

    def forward(self, a, b):
        return self.head(self.join(self.one(a), self.other(b)))


class FunctionModule(nn.Module):
    """Module with the given layers, whose forward pass is ``function``."""

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


def fully_convolutional(out=1):
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.ReLU(), nn.Conv2d(3, out, 1))


def gpt():
    block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
    mask = torch.full((T, T), float("-inf")).triu(1)
    forward = lambda m, x: m.head(m.block(m.words(x) + m.places(torch.arange(T)[None]), src_mask=mask))  # noqa: E731
    layers = {"words": nn.Embedding(WORDS, 8), "places": nn.Embedding(T, 8), "block": block}
    return FunctionModule(forward, **layers, head=nn.Linear(8, WORDS, bias=False))


def recurrent_network(kind=nn.LSTM, out=WORDS, *, last=False):
    forward = lambda m, x: m.head(m.rnn(m.words(x))[0][:, -1] if last else m.rnn(m.words(x))[0])  # noqa: E731
    return FunctionModule(
        forward, words=nn.Embedding(WORDS, 5), rnn=kind(5, 6, batch_first=True), head=nn.Linear(6, out)
    )


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


def bag_of_words(out=CLASSES):
    """Averages the embeddings of unmasked words, as a sentence classifier does."""
    forward = lambda m, x, mask: m.head((m.words(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))  # noqa: E731
    return FunctionModule(forward, words=nn.Embedding(WORDS, 6), head=nn.Linear(6, out))


def graph_network():
    forward = lambda m, x, a: m.head((a @ m.one(x)).relu().mean(1))  # noqa: E731
    return FunctionModule(forward, one=nn.Linear(4, 6), head=nn.Linear(6, CLASSES))


def matrix_factorization():
    forward = lambda m, user, item: (m.users(user) * m.items(item)).sum(-1)  # noqa: E731
    return FunctionModule(forward, users=nn.Embedding(7, 4), items=nn.Embedding(9, 4))


def variational_autoencoder():
    def forward(m, x, noise):
        mean, log_variance = m.encoder(x).chunk(2, 1)
        return m.decoder(mean + noise * (0.5 * log_variance).exp()), mean, log_variance

    return FunctionModule(forward, encoder=nn.Linear(4, 4), decoder=nn.Linear(2, 4))


def denoiser():
    forward = lambda m, x, t: m.net(torch.cat([x, t[:, None]], 1))  # noqa: E731
    return FunctionModule(forward, net=nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 4)))


def two_headed_network():
    def forward(m, x):
        body = m.body(x).tanh()
        return m.a(body), m.b(body)

    return FunctionModule(forward, body=nn.Linear(4, 5), a=nn.Linear(5, CLASSES), b=nn.Linear(5, 1))


# Data


def floats(*shape):
    return torch.randn(N, *shape)


def integers(classes=CLASSES, *shape):
    return torch.randint(classes, (N, *shape))


def padded_labels():
    found = integers(WORDS, T)
    found[torch.arange(T) >= torch.randint(2, T + 1, (N, 1))] = -100
    return found


def padding_mask():
    return (torch.arange(T) < torch.randint(2, T + 1, (N, 1))).float()


class DictDataset(TensorDataset):
    def __getitem__(self, i):
        return dict(zip(("input_ids", "attention_mask", "labels"), super().__getitem__(i), strict=True))


# Losses


def loss_of_outputs(loss=F.cross_entropy):
    return lambda model, batch: loss(model(batch[0]), batch[1])


def loss_of_two_inputs(loss):
    return lambda model, batch: loss(model(batch[0], batch[1]), batch[2])


def language_loss(model, batch):
    logits = model(batch[0])
    return F.cross_entropy(logits.view(-1, logits.size(-1)), batch[1].view(-1), ignore_index=-100)


def per_token_loss(model, batch):
    return per_token_mean(model(batch[0]), batch[1])


def elbo(model, batch):
    reconstruction, mean, log_variance = model(*batch)
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return F.binary_cross_entropy_with_logits(reconstruction, batch[0].sigmoid(), reduction="sum") + divergence


def glue_loss(model, batch):
    return F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]), batch["labels"])


def soft_dice(o, y):
    p = o.sigmoid()[:, 0]
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


def policy_loss(model, batch):
    returns = (batch[2] - batch[2].mean()) / (batch[2].std() + 1e-6)
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * returns).mean()


def policy_loss_of_raw_returns(model, batch):
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * batch[2]).mean()


def distillation_loss(model, batch):
    teacher = torch.linspace(-1, 1, 12, dtype=batch[0].dtype).view(4, 3)
    with torch.no_grad():
        target = (batch[0] @ teacher).div(2).softmax(1)
    soft = F.kl_div(model(batch[0]).div(2).log_softmax(1), target, reduction="batchmean")
    return 4 * soft


def two_task_loss(model, batch):
    a, b = model(batch[0])
    return F.cross_entropy(a, batch[1]) + 0.5 * F.mse_loss(b.squeeze(1), batch[2])


def bpr_loss(model, batch):
    user, good, bad = batch
    return -F.logsigmoid(model(user, good) - model(user, bad)).mean()


def in_batch_negatives_loss(model, batch):
    user, good, _ = batch
    scores = model(user[:, None], good[None])
    return F.cross_entropy(scores, torch.arange(len(user)))


def sim_clr_loss(model, batch):
    z = F.normalize(torch.cat([model(batch[0]), model(batch[1])]), dim=1)
    scores = (z @ z.T).fill_diagonal_(-9.0) / 0.5
    return F.cross_entropy(scores, torch.arange(len(z)).roll(len(z) // 2))


def triplet_loss(model, batch):
    return F.triplet_margin_loss(model(batch[0]), batch[1], batch[2])


def ctc_loss(model, batch):
    logs = model(batch[0]).log_softmax(2).transpose(0, 1)
    sizes = torch.full((len(batch[0]),), T)
    return F.ctc_loss(logs, batch[1][:, :3], sizes, batch[2], zero_infinity=True)


def span_loss(model, batch):
    start, end = model(batch[0]).split(1, dim=-1)
    return (F.cross_entropy(start.squeeze(-1), batch[1]) + F.cross_entropy(end.squeeze(-1), batch[2])) / 2


def cox_loss(model, batch):
    order = batch[1].argsort(descending=True)
    risk = model(batch[0])[order, 0]
    return -(risk - risk.logcumsumexp(0)).mean()


def mixup_loss(model, batch):
    order = torch.randperm(len(batch[0]))
    return F.cross_entropy(model(0.7 * batch[0] + 0.3 * batch[0][order]), batch[1])


def masked_patch_loss(model, batch):
    loss = (model(batch[0]) - batch[0]).square()
    return (loss * batch[1]).sum() / batch[1].sum()


def masked_patch_loss_per_sample(model, batch):
    loss = (model(batch[0]) - batch[0]).square()
    return ((loss * batch[1]).sum(1) / batch[1].sum(1)).mean()


def style_loss(model, batch):
    o = model(batch[0]).flatten(2)
    return F.mse_loss(torch.bmm(o, o.transpose(1, 2)) / o.size(2), batch[1])


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
BCE = nn.BCEWithLogitsLoss()
with_float_targets = lambda loss: lambda o, y: loss(o.squeeze(1), y.float())  # noqa: E731
