"""Small training scripts in common styles, and the fix that an error message suggests.

Each step is what a loop over samples gives, or the script is rejected, and is exact once the fix is applied.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.errors import BatchDependentLossError, ReductionError
from dpengine.validation import per_example

from .scripts import (
    BCE,
    CLASSES,
    WEIGHTED,
    WORDS,
    Both,
    Dicts,
    N,
    T,
    accelerated,
    bag,
    bpr,
    classified,
    cnn,
    cox,
    ctc,
    denoiser,
    distilled,
    elbo,
    factors,
    float_of,
    glue,
    gpt,
    graph,
    in_batch_negatives,
    labels,
    language,
    lora,
    mask,
    masked_patches,
    masked_patches_apart,
    mixup,
    mlp,
    padded,
    paired,
    plain,
    policy,
    policy_apart,
    recurrent,
    rows,
    sim_clr,
    soft_dice,
    spans,
    style,
    to_map,
    tokens_apart,
    trainer,
    triplets,
    two_heads,
    two_tasks,
    variational,
    with_closure,
    with_meters,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012.*NOT PRIVATE", "ignore:.*DPE006")
BATCH, MAX_NORM = 8, 0.5

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
    """A loader that records its batches."""

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

    def recorded_batches():
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
    loop(model, optimizer, Iterated(recorded_batches), loss_of, steps)
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
