"""Ordinary models, losses and loops are neither rejected nor warned about by the run-time check of loss and loop."""

import warnings

import inside
import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from independence.training import private
from torch import nn
from torch.distributions import Normal
from torch.utils.data import TensorDataset

from dpengine.errors import PrivacyWarning, forget_notices
from dpengine.losses import per_token_mean

CLASSES, WORDS, LENGTH = 3, 9, 6
PROTOTYPES = torch.linspace(-1, 1, 9).view(CLASSES, CLASSES)
WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


def per_sample(o, y):
    return F.cross_entropy(o, y, reduction="none")


def one_hot(y):
    return F.one_hot(y, CLASSES).float()


def signs(y):
    return 2 * one_hot(y) - 1


def focal(o, y):
    loss = per_sample(o, y)
    return (WEIGHTS[y] * (1 - torch.exp(-loss)) ** 2 * loss).mean()


def symmetric_cross_entropy(o, y):
    clipped = one_hot(y).clamp(1e-4, 1).log()
    return F.cross_entropy(o, y) - (o.softmax(1) * clipped).sum(1).mean()


def distillation(o, y):
    teacher = PROTOTYPES[y].div(2).softmax(1)
    return 0.5 * F.cross_entropy(o, y) + 2 * F.kl_div(o.div(2).log_softmax(1), teacher, reduction="batchmean")


def loss_over_list(o, y):
    losses = [F.cross_entropy(a[None], b[None]) for a, b in zip(o.unbind(), y.unbind(), strict=True)]
    return torch.stack(losses).mean()


def with_logging(o, y):
    assert 0 <= (o.argmax(1) == y).float().mean().item() <= 1
    loss = F.cross_entropy(o, y)
    assert loss.item() > 0
    return loss


def vae_like(o, y):
    mean, log_var = o[:, :1], o[:, 1:2]
    draw = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
    divergence = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1)
    return F.mse_loss(draw[:, 0], y.float()) + 0.1 * divergence.mean()


def targets_by_index(o, y):
    targets = torch.zeros(len(y), CLASSES)
    for i in range(len(y)):
        targets[i, y[i]] = 1
    return F.mse_loss(o, targets)


def with_finite_check(o, y):
    loss = F.cross_entropy(o, y)
    if not torch.isfinite(loss):
        raise RuntimeError
    return loss


VECTOR_LOSSES = {
    "CrossEntropyLoss": nn.CrossEntropyLoss(),
    "label smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
    "soft targets": lambda o, y: F.cross_entropy(o, 0.9 * one_hot(y) + 0.1 / CLASSES),
    "NLLLoss": lambda o, y: nn.NLLLoss()(o.log_softmax(1), y),
    "MultiMarginLoss": nn.MultiMarginLoss(),
    "weighted MultiMarginLoss": nn.MultiMarginLoss(weight=WEIGHTS),
    "MultiLabelMarginLoss": lambda o, y: nn.MultiLabelMarginLoss()(o, F.pad(y[:, None], (0, CLASSES - 1), value=-1)),
    "MultiLabelSoftMarginLoss": lambda o, y: nn.MultiLabelSoftMarginLoss()(o, one_hot(y)),
    "SoftMarginLoss": lambda o, y: nn.SoftMarginLoss()(o, signs(y)),
    "BCELoss": lambda o, y: nn.BCELoss()(o.float().sigmoid(), one_hot(y)),
    "BCEWithLogitsLoss": lambda o, y: nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)(o, one_hot(y)),
    "MSELoss": lambda o, y: nn.MSELoss()(o, one_hot(y)),
    "L1Loss": lambda o, y: nn.L1Loss()(o, one_hot(y)),
    "SmoothL1Loss": lambda o, y: nn.SmoothL1Loss()(o, one_hot(y)),
    "HuberLoss": lambda o, y: nn.HuberLoss()(o, one_hot(y)),
    "PoissonNLLLoss": lambda o, y: nn.PoissonNLLLoss()(o[:, 0], y.float()),
    "GaussianNLLLoss": lambda o, y: nn.GaussianNLLLoss()(o[:, 0], y.float(), F.softplus(o[:, 1])),
    "KLDivLoss": lambda o, y: nn.KLDivLoss(reduction="batchmean")(o.log_softmax(1), PROTOTYPES[y].softmax(1)),
    "HingeEmbeddingLoss": lambda o, y: nn.HingeEmbeddingLoss()(o.square().sum(1), (2 * (y > 0) - 1).float()),
    "CosineEmbeddingLoss": lambda o, y: nn.CosineEmbeddingLoss()(o, PROTOTYPES[y], (2 * (y > 0) - 1).float()),
    "MarginRankingLoss": lambda o, y: nn.MarginRankingLoss(0.5)(o[:, 0], o[:, 1], (2 * (y > 0) - 1).float()),
    "TripletMarginLoss": lambda o, y: nn.TripletMarginLoss()(o, PROTOTYPES[y], PROTOTYPES[(y + 1) % CLASSES]),
    "TripletMarginWithDistanceLoss": lambda o, y: nn.TripletMarginWithDistanceLoss()(
        o, PROTOTYPES[y], PROTOTYPES[(y + 1) % CLASSES]
    ),
    "focal": focal,
    "symmetric": symmetric_cross_entropy,
    "generalized": lambda o, y: ((1 - o.softmax(1).gather(1, y[:, None]) ** 0.7) / 0.7).mean(),
    "poly": lambda o, y: (per_sample(o, y) + 1 - torch.exp(-per_sample(o, y))).mean(),
    "hinge": lambda o, y: F.relu(1 - o * signs(y)).mean(),
    "expectile": lambda o, y: ((o[:, 0] - y) ** 2 * torch.where(o[:, 0] > y, 0.3, 0.7)).mean(),
    "pinball": lambda o, y: torch.maximum(0.9 * (y - o[:, 0]), -0.1 * (y - o[:, 0])).mean(),
    "log cosh": lambda o, y: torch.log(torch.cosh(o[:, 0] - y)).mean(),
    "distillation": distillation,
    "penalty on outputs": lambda o, y: F.cross_entropy(o, y) + 0.01 * o.square().mean(),
    "entropy bonus": lambda o, y: F.cross_entropy(o, y) + 0.1 * (o.softmax(1) * o.log_softmax(1)).sum(1).mean(),
    "two tasks": lambda o, y: F.cross_entropy(o, y) + 0.3 * F.mse_loss(o[:, 0], y.float()),
    "weights of samples": lambda o, y: (per_sample(o, y) * WEIGHTS[y]).mean(),
    "masked sum": lambda o, y: (per_sample(o, y) * (y > 0)).sum() / len(y),
    "uncertain samples": lambda o, y: (per_sample(o, y) * (o.detach().softmax(1).amax(1) < 0.9)).mean(),
    "topk in a sample": lambda o, y: F.cross_entropy(o, y) + 0.1 * o.topk(2, dim=1).values.mean(),
    "sorted in a sample": lambda o, y: F.mse_loss(o.sort(1).values, one_hot(y).sort(1).values),
    "gumbel": lambda o, y: F.mse_loss(F.gumbel_softmax(o.float()), one_hot(y)),
    "dropout on outputs": lambda o, y: F.cross_entropy(F.dropout(o, 0.2), y),
    "noise on outputs": lambda o, y: F.cross_entropy(o + 0.1 * torch.randn_like(o), y),
    "variational": vae_like,
    "einsum": lambda o, y: -torch.einsum("bc,bc->b", o.log_softmax(1), one_hot(y)).mean(),
    "list of samples": loss_over_list,
    "logged numbers": with_logging,
    "entries by index": lambda o, y: -o.log_softmax(1)[torch.arange(len(y)), y].mean() + torch.ones(len(y)).mean(),
    "targets by index": targets_by_index,
    "shared noise": lambda o, y: F.cross_entropy(o + torch.empty(CLASSES).normal_(), y),
    "rounded outputs": lambda o, y: F.cross_entropy(o.bfloat16().float(), y),
    "rate of a Gamma": lambda o, y: (y / o[:, 0].exp() + o[:, 0]).mean(),
    "density": lambda o, y: -Normal(o[:, 0], o[:, 1].exp()).log_prob(y.float()).mean(),
    "a finite loss": with_finite_check,
    "sum over len": lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(y),
    "sum over shape": lambda o, y: per_sample(o, y).sum() / y.shape[0],
}


def per_sample_tokens(o, y):
    loss = F.cross_entropy(o.transpose(1, 2), y.masked_fill(y == 0, -100), reduction="none")
    return (loss.sum(1) / (y != 0).sum(1).clamp(min=1)).mean()


def ctc(o, y):
    lengths = torch.full((len(y),), LENGTH), torch.full((len(y),), 2)
    return F.ctc_loss(o.float().log_softmax(2).transpose(0, 1), y[:, :2].clamp(min=1), *lengths)


TOKEN_LOSSES = {
    "flat": lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()),
    "view": lambda o, y: F.cross_entropy(o.view(-1, o.size(-1)), y.view(-1)),
    "transposed": lambda o, y: F.cross_entropy(o.transpose(1, 2), y),
    "shifted": lambda o, y: F.cross_entropy(o[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "smoothing": lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "last token": lambda o, y: F.cross_entropy(o[:, -1], y[:, -1]),
    "mean over tokens": lambda o, y: F.cross_entropy(o.mean(1), y[:, 0]),
    "per_token_mean": lambda o, y: per_token_mean(o, y.masked_fill(y == 0, -100)),
    "own mean": per_sample_tokens,
    "sum over tokens": lambda o, y: F.cross_entropy(o.transpose(1, 2), y, reduction="none").sum(1).mean(),
    "z-loss": lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()) + 1e-3 * o.logsumexp(-1).square().mean(),
    "CTCLoss": ctc,
}


def dice(o, y):
    p = o.sigmoid()[:, 0].flatten(1)
    return (1 - 2 * (p * y.flatten(1)).sum(1) / (p.sum(1) + y.flatten(1).sum(1) + 1)).mean()


MAP_LOSSES = {
    "BCEWithLogitsLoss": lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y),
    "dice of samples": dice,
    "dice and BCE": lambda o, y: dice(o, y) + F.binary_cross_entropy_with_logits(o[:, 0], y),
    "total variation": lambda o, y: F.mse_loss(o[:, 0], y) + 0.1 * (o[..., 1:] - o[..., :-1]).abs().mean(),
    "per sample hardest": lambda o, y: (o[:, 0] - y).square().flatten(1).topk(3, dim=1).values.mean(),
    "L1": lambda o, y: F.l1_loss(o.squeeze(1), y),
    "two scales": lambda o, y: F.mse_loss(o[:, 0], y) + F.mse_loss(F.avg_pool2d(o, 2)[:, 0], F.avg_pool2d(y, 2)),
}


def residual_model():
    run = lambda m, x: m.last(x + m.norm(m.first(x)).relu())  # noqa: E731
    return Parts(run, first=nn.Linear(4, 4), norm=nn.LayerNorm(4), last=nn.Linear(4, CLASSES))


def recurrent_model():
    run = lambda m, x: m.head(m.gru(m.words(x))[0])  # noqa: E731
    return Parts(run, words=nn.Embedding(WORDS, 6), gru=nn.GRU(6, 6, batch_first=True), head=nn.Linear(6, WORDS))


def attention_model():
    run = lambda m, x: m.head(m.block(m.words(x)))  # noqa: E731
    return Parts(
        run,
        words=nn.Embedding(WORDS, 8),
        head=nn.Linear(8, WORDS),
        block=nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
    )


def conv(*last):
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), *last)


KINDS = {
    "rows": (
        VECTOR_LOSSES,
        lambda n: (torch.randn(n, 4), torch.randint(CLASSES, (n,))),
        {
            "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
            "dropout": lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, CLASSES)),
            "residual": residual_model,
        },
    ),
    "tokens": (
        TOKEN_LOSSES,
        lambda n: (torch.randint(WORDS, (n, LENGTH)), torch.randint(WORDS, (n, LENGTH))),
        {
            "embedding": lambda: nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)),
            "recurrent": recurrent_model,
            "attention": attention_model,
        },
    ),
    "maps": (
        MAP_LOSSES,
        lambda n: (torch.randn(n, 1, 4, 4), (torch.randn(n, 4, 4) > 0).float()),
        {
            "conv": lambda: conv(nn.Conv2d(4, 1, 1)),
            "deep": lambda: conv(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 1, 1)),
        },
    ),
}
LOOPS = ("plain", "autocast", "physical batches", "closure", "add-or-remove", "sum")
CASES = [
    (kind, model, loss) for kind, (losses, _, models) in KINDS.items() for loss in losses for model in models
]  # more than 1,000 combinations with LOOPS


def train(kind, model_name, loss_name, loop, steps=4):
    losses, data_of, models = KINDS[kind]
    torch.manual_seed(0)
    model, loss_fn, data = models[model_name](), losses[loss_name], TensorDataset(*data_of(60))
    options = {
        "physical batches": {"physical_batch_size": 6},
        "add-or-remove": {"sample_rate": 0.2, "expected_batch_size": 12},
        "sum": {"loss_reduction": "sum"},
    }.get(loop, {})
    engine, model, optimizer, loader = private(model, data, 12, seed=2, **options)

    def backward(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=loop == "autocast"):
            loss = loss_fn(model(x), y)
        (loss * len(x) if loop == "sum" else loss).backward()
        return loss

    for number, (x, y) in enumerate(loader):
        if loop == "closure":
            optimizer.step(lambda x=x, y=y: backward(x, y))
        else:
            backward(x, y)
            optimizer.step()
        if number == steps:
            break
    return engine


@pytest.mark.one_in(40, "case", "loop", others="slow")
@pytest.mark.one_in(20, "case", "loop")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("case", CASES, ids=["-".join(case).replace(" ", "_") for case in CASES])
def test_an_ordinary_loop_is_accepted_without_a_warning(case, loop):
    forget_notices()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        engine = train(*case, loop)
    texts = [str(one.message) for one in shown if issubclass(one.category, PrivacyWarning)]
    assert [text for text in texts if "could not be checked" in text or "DPE010" in text] == []
    assert inside.checked_loops(engine) > 0


def test_writes_to_parameter_rows_and_new_layers_in_the_loop_are_accepted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 4), nn.Flatten(), nn.Linear(4 * LENGTH, CLASSES))
    data = TensorDataset(torch.randint(0, WORDS, (40, LENGTH)), torch.arange(40) % CLASSES)
    _, _, optimizer, loader = private(model, data, 8, seed=2)
    for x, y in loader:
        optimizer.zero_grad()
        nn.Embedding(3, 4, padding_idx=0)  # zeroes a row
        with torch.no_grad():
            model[0].weight[0].zero_()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
