"""Small training scripts in common styles, and the fix that an error message suggests.

Each step equals that of a loop over samples, or the script is rejected and is exact with the suggested fix.
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
    DictDataset,
    N,
    T,
    TwoEncoders,
    accelerate_loop,
    bag_of_words,
    bpr_loss,
    closure_loop,
    cnn,
    cox_loss,
    ctc_loss,
    denoiser,
    distillation_loss,
    elbo,
    floats,
    fully_convolutional,
    glue_loss,
    gpt,
    graph_network,
    in_batch_negatives_loss,
    integers,
    language_loss,
    lora,
    loss_of_outputs,
    loss_of_two_inputs,
    masked_patch_loss,
    masked_patch_loss_per_sample,
    matrix_factorization,
    mixup_loss,
    mlp,
    padded_labels,
    padding_mask,
    per_token_loss,
    plain_loop,
    policy_loss,
    policy_loss_of_raw_returns,
    recurrent_network,
    sim_clr_loss,
    soft_dice,
    span_loss,
    style_loss,
    timm_loop,
    trainer_loop,
    triplet_loss,
    two_headed_network,
    two_task_loss,
    variational_autoencoder,
    with_float_targets,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012.*NOT PRIVATE", "ignore:.*DPE006")
BATCH, MAX_NORM = 8, 0.5

# By name: model, data, loss and loop. For rejected scripts also the fix: another loss, or options of make_private.
EXACT = {
    "mnist": (
        cnn,
        lambda: (floats(1, 6, 6), integers()),
        lambda m, b: F.nll_loss(m(b[0]).log_softmax(1), b[1]),
        plain_loop,
    ),
    "mnist rnn": (
        lambda: recurrent_network(out=CLASSES, last=True),
        lambda: (integers(WORDS, T), integers()),
        loss_of_outputs(),
        plain_loop,
    ),
    "word language model": (
        recurrent_network,
        lambda: (integers(WORDS, T), integers(WORDS, T)),
        language_loss,
        plain_loop,
    ),
    "gru language model": (
        lambda: recurrent_network(nn.GRU),
        lambda: (integers(WORDS, T), integers(WORDS, T)),
        language_loss,
        timm_loop,
    ),
    "super resolution": (
        fully_convolutional,
        lambda: (floats(1, 4, 4), floats(1, 4, 4)),
        loss_of_outputs(F.mse_loss),
        plain_loop,
    ),
    "siamese": (
        lambda: TwoEncoders(mlp(5), mlp(5), lambda a, b: (a - b).abs(), nn.Linear(5, 1)),
        lambda: (floats(4), floats(4), integers(2)),
        loss_of_two_inputs(with_float_targets(BCE)),
        plain_loop,
    ),
    "regression": (
        lambda: nn.Linear(4, 1),
        lambda: (floats(4), floats(1)),
        loss_of_outputs(F.smooth_l1_loss),
        plain_loop,
    ),
    "discriminator": (
        lambda: mlp(1),
        lambda: (floats(4), integers(2)),
        loss_of_outputs(with_float_targets(BCE)),
        plain_loop,
    ),
    "time sequence": (recurrent_network, lambda: (integers(WORDS, T), integers(WORDS, T)), language_loss, closure_loop),
    "imagenet": (
        lambda: nn.Sequential(*fully_convolutional(4), nn.Flatten(), nn.Linear(64, CLASSES)),
        lambda: (floats(1, 4, 4), integers()),
        loss_of_outputs(nn.CrossEntropyLoss()),
        timm_loop,
    ),
    "label smoothing": (
        cnn,
        lambda: (floats(1, 6, 6), integers()),
        loss_of_outputs(nn.CrossEntropyLoss(label_smoothing=0.1)),
        timm_loop,
    ),
    "graph": (
        graph_network,
        lambda: (floats(5, 4), (floats(5, 5) > 0).float(), integers()),
        loss_of_two_inputs(F.cross_entropy),
        plain_loop,
    ),
    "mingpt": (gpt, lambda: (integers(WORDS, T), integers(WORDS, T)), language_loss, trainer_loop),
    "nanogpt": (gpt, lambda: (integers(WORDS, T), integers(WORDS, T)), language_loss, timm_loop),
    "tabular": (
        lambda: mlp(1),
        lambda: (floats(4), integers(2)),
        loss_of_outputs(with_float_targets(nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)))),
        plain_loop,
    ),
    "multi-label": (
        mlp,
        lambda: (floats(4), integers(2, CLASSES).float()),
        loss_of_outputs(nn.MultiLabelSoftMarginLoss()),
        plain_loop,
    ),
    "glue": (bag_of_words, lambda: (integers(WORDS, T), padding_mask(), integers()), glue_loss, accelerate_loop),
    "ratings": (
        matrix_factorization,
        lambda: (integers(7), integers(9), floats()),
        loss_of_two_inputs(F.mse_loss),
        plain_loop,
    ),
    "ranking of pairs": (matrix_factorization, lambda: (integers(7), integers(9), integers(9)), bpr_loss, plain_loop),
    "diffusion": (denoiser, lambda: (floats(4), torch.rand(N), floats(4)), loss_of_two_inputs(F.mse_loss), plain_loop),
    "distillation": (mlp, lambda: (floats(4), integers()), distillation_loss, plain_loop),
    "two tasks": (two_headed_network, lambda: (floats(4), integers(), floats()), two_task_loss, trainer_loop),
    "speech": (
        recurrent_network,
        lambda: (integers(WORDS, T), integers(WORDS - 1, T) + 1, integers(3) + 1),
        ctc_loss,
        plain_loop,
    ),
    "questions": (
        lambda: recurrent_network(out=2),
        lambda: (integers(WORDS, T), integers(T), integers(T)),
        span_loss,
        accelerate_loop,
    ),
    "autoencoder": (lambda: mlp(4), lambda: (floats(4), floats(4)), lambda m, b: F.mse_loss(m(b[0]), b[0]), plain_loop),
    "triplets": (mlp, lambda: (floats(4), floats(CLASSES), floats(CLASSES)), triplet_loss, plain_loop),
    "forecasting": (lambda: mlp(2), lambda: (floats(4), floats(2)), loss_of_outputs(nn.L1Loss()), closure_loop),
    "style": (lambda: fully_convolutional(2), lambda: (floats(1, 4, 4), floats(2, 2)), style_loss, plain_loop),
    "segmentation": (
        fully_convolutional,
        lambda: (floats(1, 4, 4), integers(2, 1, 4, 4).float()),
        loss_of_outputs(BCE),
        timm_loop,
    ),
}

REJECTED = {
    "variational sum": (
        variational_autoencoder,
        lambda: (floats(4), floats(2)),
        elbo,
        plain_loop,
        {"loss_reduction": "sum"},
    ),
    "policy gradient": (
        mlp,
        lambda: (floats(4), integers(), floats()),
        policy_loss,
        plain_loop,
        policy_loss_of_raw_returns,
    ),
    "translation": (
        recurrent_network,
        lambda: (integers(WORDS, T), padded_labels()),
        language_loss,
        plain_loop,
        per_token_loss,
    ),
    "lora": (lora, lambda: (integers(WORDS, T), padded_labels()), language_loss, trainer_loop, per_token_loss),
    "tagging": (
        lambda: recurrent_network(nn.GRU),
        lambda: (integers(WORDS, T), padded_labels()),
        language_loss,
        accelerate_loop,
        per_token_loss,
    ),
    "weighted classes": (
        mlp,
        lambda: (floats(4), integers()),
        loss_of_outputs(WEIGHTED),
        plain_loop,
        loss_of_outputs(per_example(WEIGHTED)),
    ),
    "mixup": (mlp, lambda: (floats(4), integers()), mixup_loss, timm_loop, loss_of_outputs()),
    "negatives of the batch": (
        matrix_factorization,
        lambda: (integers(7), integers(9), integers(9)),
        in_batch_negatives_loss,
        plain_loop,
        bpr_loss,
    ),
    "dice": (
        fully_convolutional,
        lambda: (floats(1, 4, 4), integers(2, 4, 4).float()),
        loss_of_outputs(soft_dice),
        timm_loop,
        loss_of_outputs(per_example(soft_dice)),
    ),
    "ignored pixels": (
        lambda: fully_convolutional(CLASSES),
        lambda: (floats(1, 4, 4), integers(CLASSES, 4, 4)),
        loss_of_outputs(nn.CrossEntropyLoss(ignore_index=0)),
        plain_loop,
        loss_of_outputs(per_example(lambda o, y: F.cross_entropy(o, y, ignore_index=0))),
    ),
    "masked patches": (
        lambda: mlp(4),
        lambda: (floats(4), (torch.rand(N, 4) > 0.4).double() + torch.eye(4)[0]),
        masked_patch_loss,
        plain_loop,
        masked_patch_loss_per_sample,
    ),
    "contrastive": (
        mlp,
        lambda: (floats(4), floats(4)),
        sim_clr_loss,
        plain_loop,
        None,
    ),  # no variant of this loss is private for each sample
    "survival": (lambda: mlp(1), lambda: (floats(4), floats()), cox_loss, plain_loop, None),
    "sum": (
        mlp,
        lambda: (floats(4), integers()),
        loss_of_outputs(nn.CrossEntropyLoss(reduction="sum")),
        plain_loop,
        {"loss_reduction": "sum"},
    ),
}


def clipped_sum_over_samples(model, batch, loss_of, divisor):
    """Returns the sum of the clipped gradients of single samples, divided by ``divisor``."""
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


class RecordedLoader:
    """A loader that records its batches."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return self.batches()


def compare_script(make, data, loss_of, loop, *, steps=3, **options):
    """Trains without noise, and compares each update with a loop over samples."""
    torch.manual_seed(0)
    model, tensors = make().double(), [t.double() if t.is_floating_point() else t for t in data()]
    dataset = (DictDataset if loss_of is glue_loss else TensorDataset)(*tensors)
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
        expected = clipped_sum_over_samples(reference, batches[-1], loss_of, divisor)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(
                    parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
                )
        compared.append(len(batches))

    optimizer.register_step_post_hook(compare)
    loop(model, optimizer, RecordedLoader(recorded_batches), loss_of, steps)
    assert len(compared) == steps


@pytest.mark.one_in(6, "name", others="slow")
@pytest.mark.one_in(3, "name")
@pytest.mark.parametrize("name", EXACT)
def test_a_script_is_exact(name):
    compare_script(*EXACT[name])


@pytest.mark.one_in(6, "name", others="slow")
@pytest.mark.one_in(3, "name")
@pytest.mark.parametrize("name", REJECTED)
def test_a_script_that_is_rejected_is_exact_with_the_fix(name):
    make, data, loss_of, loop, fix = REJECTED[name]
    with pytest.raises((BatchDependentLossError, ReductionError)) as caught:
        compare_script(make, data, loss_of, loop)
    if isinstance(fix, dict):
        assert f'loss_reduction="{fix["loss_reduction"]}"' in str(caught.value)
        compare_script(make, data, loss_of, loop, **fix)
    elif fix is not None:
        compare_script(make, data, fix, loop)
