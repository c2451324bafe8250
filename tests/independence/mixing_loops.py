"""Training loops in which one sample changes the gradients of others, as found in practice.

They were written from the specification, independently of the code of the check. `VECTORS`, `TOKENS` and `MAPS`
are tables of functions ``(model, x, y, state)`` that return the loss, by kind of data; ``state`` is a dict that is kept
during the training. Loops of one line are in tables by the value that they change: losses, outputs or inputs.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 3


def sample_losses(o, y):
    return F.cross_entropy(o, y, reduction="none")


def token_losses(o, y):
    return F.cross_entropy(o.transpose(1, 2), y, ignore_index=-100, reduction="none")


def pixel_losses(o, y):
    return F.binary_cross_entropy_with_logits(o[:, 0], y, reduction="none")


def counts(y):
    return torch.bincount(y, minlength=CLASSES).float()


def one_hot(y):
    return F.one_hot(y, CLASSES).float()


def similarity(o):
    z = F.normalize(o, dim=1)
    return z @ z.T


def batch_normalized(o):
    return F.batch_norm(o, None, None, training=True)


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o):
        return o.clone()

    @staticmethod
    def backward(ctx, grad):
        return -grad + grad.mean(0)


LOSS_REDUCTIONS = {  # functions of the losses of samples (B,) and of the labels
    "hard_negatives": lambda loss, y: loss[loss > loss.mean()].sum() / len(y),
    "ohem": lambda loss, y: loss.topk(max(1, len(y) // 2)).values.mean(),
    "largest_by_sort": lambda loss, y: loss.sort(descending=True).values[: len(loss) // 3 + 1].mean(),
    "quantile_clip": lambda loss, y: torch.minimum(loss, loss.detach().quantile(0.7)).mean(),
    "median_scaled": lambda loss, y: (loss / loss.detach().median()).mean(),
    "curriculum": lambda loss, y: (loss * torch.softmax(-loss.detach(), 0)).sum(),
    "rank_weights": lambda loss, y: (loss * (1 + loss.detach().argsort().argsort().float() / len(loss))).mean(),
    "effective_number": lambda loss, y: (loss * ((1 - 0.9) / (1 - 0.9 ** counts(y).clamp(min=1)))[y]).mean(),
    "weights_over_their_sum": lambda loss, y: torch.einsum("b,b->", loss, (1.0 + y.float()) / (1.0 + y.float()).sum()),
    "scatter_mean": lambda loss, y: (torch.zeros(CLASSES).scatter_add(0, y, loss) / counts(y).clamp(min=1)).mean(),
    "per_class_list": lambda loss, y: torch.stack(
        [loss[y == c].mean() for c in range(CLASSES) if (y == c).any()]
    ).mean(),
    "log_sum_exp": lambda loss, y: torch.logsumexp(loss, 0),
    "root_mean_square": lambda loss, y: loss.square().mean().sqrt(),
    "generalized_mean": lambda loss, y: loss.pow(3).mean().pow(1 / 3),
    "norm_of_losses": lambda loss, y: torch.linalg.vector_norm(loss),
    "worst_group": lambda loss, y: torch.stack([loss[y == c].sum() for c in range(CLASSES)]).max() / len(y),
    "item_scale": lambda loss, y: loss.mean() / loss.detach().mean().item(),
    "cumulative": lambda loss, y: loss.cumsum(0).mean(),
    "where_of_mean": lambda loss, y: torch.where(loss > loss.mean(), 2 * loss, loss).mean(),
    "root_of_size": lambda loss, y: loss.sum() / len(y) ** 0.5,
    "trimmed_mean": lambda loss, y: (loss.sum() - loss.max()) / (len(loss) - 1),
    "median_of_means": lambda loss, y: torch.stack([part.mean() for part in loss.tensor_split(3)]).median(),
    "means_of_chunks": lambda loss, y: torch.stack([part.mean() for part in loss.split(4)]).mean(),
    "weights_by_position": lambda loss, y: (loss * torch.linspace(1, 0.5, len(y))).mean(),
    "alternating_weights": lambda loss, y: (loss * torch.tensor([1.0 if i % 2 else 0.5 for i in range(len(y))])).mean(),
    "mean_over_positive_labels": lambda loss, y: loss.sum() / (len(y) - (y == 0).sum()).clamp(min=1),
}
OUTPUT_LOSSES = {  # functions of outputs (B, CLASSES) and labels that replace the cross entropy
    "class_balanced": lambda o, y: F.cross_entropy(o, y, weight=1 / counts(y).clamp(min=1), reduction="sum") / len(y),
    "smoothing_by_frequency": lambda o, y: F.cross_entropy(o, 0.9 * one_hot(y) + 0.1 * counts(y) / len(y)),
    "logit_adjustment": lambda o, y: F.cross_entropy(o + (counts(y) / len(y) + 1e-3).log(), y),
    "boolean_indexing": lambda o, y: F.cross_entropy(o[y != 0], y[y != 0]),
    "float_of_max": lambda o, y: F.cross_entropy(o / float(o.detach().abs().max()), y),
    "temperature_of_batch": lambda o, y: F.cross_entropy(o / o.std(), y),
    "centered_logits": lambda o, y: F.cross_entropy(o - o.mean(0, keepdim=True), y),
    "batch_normed_outputs": lambda o, y: F.cross_entropy(batch_normalized(o), y),
    "triplet_of_neighbors": lambda o, y: F.triplet_margin_loss(o, o.roll(1, 0), o.roll(2, 0)),
    "list_net": lambda o, y: F.cross_entropy(o[:, 0][None], y.float().softmax(0)[None]),
    "self_attention_over_batch": lambda o, y: F.cross_entropy(
        F.scaled_dot_product_attention(o[None], o[None], o[None])[0], y
    ),
    "loss_only_mixup": lambda o, y: F.cross_entropy(o, 0.9 * one_hot(y) + 0.1 * one_hot(y.roll(1))),
    "matmul_of_targets": lambda o, y: F.mse_loss(o.T @ o, one_hot(y).T @ one_hot(y)),
    "temperature_of_size": lambda o, y: F.cross_entropy(o / len(y) ** 0.5, y),
    "log_of_mean": lambda o, y: -o.softmax(1).gather(1, y[:, None]).mean().log(),
    "columns_normalized": lambda o, y: F.cross_entropy(F.normalize(o, dim=0), y),
    "label_propagation": lambda o, y: F.cross_entropy(o, torch.softmax(similarity(o.detach()) / 0.1, 1) @ one_hot(y)),
    "saturating_mean": lambda o, y: 5 * torch.tanh(F.cross_entropy(o, y) / 5),
    "flooding": lambda o, y: (F.cross_entropy(o, y) - 1.1).abs() + 1.1,
    "gradient_reversal": lambda o, y: F.cross_entropy(Reversal.apply(o), y),
}
PENALTIES = {  # functions of outputs and labels, added to the cross entropy
    "entropy_of_mean": lambda o, y: (o.softmax(1).mean(0) * o.softmax(1).mean(0).log()).sum(),
    "diversity": lambda o, y: 0.1 * torch.cdist(o, o).mean(),
    "orthogonality": lambda o, y: (o.T @ o / len(o) - torch.eye(CLASSES)).square().sum(),
    "maximum_mean_discrepancy": lambda o, y: (o[: len(o) // 2].mean(0) - o[len(o) // 2 :].mean(0)).square().sum(),
    "covariance_penalty": lambda o, y: torch.cov(o.T).fill_diagonal_(0).square().sum(),
    "uniformity": lambda o, y: torch.pdist(F.normalize(o)).square().mul(-2).exp().mean().log(),
    "consistency_of_order": lambda o, y: F.mse_loss(o[1:], o[:-1]),
    "einsum_gram": lambda o, y: torch.einsum("bi,ci->bc", o, o).square().mean(),
    "penalty_over_size": lambda o, y: o.square().mean() / len(o),
}
INPUT_CHANGES = {  # functions of the inputs (B, 4) of the model
    "whitened": lambda x: (x - x.mean(0)) / (x.std(0) + 1e-3),
    "scaled_by_largest": lambda x: x / x.abs().max(),
    "imputed_by_batch": lambda x: torch.where(x > 1.0, x.masked_fill(x > 1.0, 0).mean(0), x),
    "sorted_by_length": lambda x: x[x[:, 0].argsort()],
    "previous_sample_as_context": lambda x: x + 0.1 * torch.cat([x[:1], x[:-1]]),
    "by_principal_axes": lambda x: x @ torch.linalg.svd(x, full_matrices=False)[2].T,
    "adversarial_of_batch": lambda x: x + 0.1 * (x - x.mean(0)).sign(),
}


def focal_batch_alpha(m, x, y, s):
    loss = sample_losses(m(x), y)
    alpha = 1 - (counts(y) / len(y))[y]
    return (alpha * (1 - torch.exp(-loss)) ** 2 * loss).mean()


def focal_normalized(m, x, y, s):
    loss = sample_losses(m(x), y)
    modulating = (1 - torch.exp(-loss)) ** 2
    return (modulating * loss).sum() / modulating.detach().sum()


def index_add_mean(m, x, y, s):
    loss = sample_losses(m(x), y)
    totals = torch.zeros(CLASSES).index_add_(0, y, loss)
    present = torch.zeros(CLASSES).index_fill_(0, y.unique(), 1.0)
    return totals.sum() / present.sum()


def masked_by_nonzero(m, x, y, s):
    loss = sample_losses(m(x), y) * (x[:, 0] > 0)
    return loss.sum() / max(1, len(loss.detach().nonzero()))


def masked_by_count(m, x, y, s):
    mask = x[:, 0] > 0
    return (sample_losses(m(x), y) * mask).sum() / mask.count_nonzero().clamp(min=1)


def selected_before_model(m, x, y, s):
    o = m(x)
    confident = o.softmax(1).amax(1) > 0.36
    return F.cross_entropy(o[confident], y[confident]) if confident.any() else o.sum() * 0


def pseudo_labels(m, x, y, s):
    o = m(x)
    certainty = o.detach().softmax(1).amax(1)
    mask = (certainty > certainty.mean()).float()
    return (sample_losses(o, o.detach().argmax(1)) * mask).sum() / mask.sum()


def python_list(m, x, y, s):
    labels = y.tolist()
    weight = torch.tensor([len(labels) / labels.count(label) for label in labels])
    return (sample_losses(m(x), y) * weight).mean()


def numpy_weights(m, x, y, s):
    share = np.bincount(y.numpy(), minlength=CLASSES) / len(y)
    return (sample_losses(m(x), y) * torch.from_numpy(1 - share).float()[y]).mean()


def comprehension(m, x, y, s):
    loss = sample_losses(m(x), y)
    return sum(loss[i] for i in range(len(y)) if y[i] > 0) / sum(1 for one in y if one > 0)


def counted_in_python(m, x, y, s):
    kept = [i for i, label in enumerate(y.tolist()) if label]
    return sample_losses(m(x), y)[kept].sum() / max(1, len(kept))


def numpy_temperature(m, x, y, s):
    return F.cross_entropy(m(x) / (1 + np.std(x.numpy())), y)


def normalized_targets(m, x, y, s):
    target = y.float()
    return F.mse_loss(m(x)[:, 0], (target - target.mean()) / (target.std() + 1e-3))


def r_squared(m, x, y, s):
    target = y.float()
    return (m(x)[:, 0] - target).square().sum() / (target - target.mean()).square().sum().clamp(min=0.1)


def pearson(m, x, y, s):
    o, target = m(x)[:, 0], y.float()
    return -F.cosine_similarity(o - o.mean(), target - target.mean(), dim=0)


def concordance(m, x, y, s):
    o, target = m(x)[:, 0], y.float()
    covariance = ((o - o.mean()) * (target - target.mean())).mean()
    return 1 - 2 * covariance / (o.var() + target.var() + (o.mean() - target.mean()) ** 2 + 1e-3)


def fairness_gap(m, x, y, s):
    o = m(x)
    group = x[:, 0] > 0
    gap = o[group].mean(0) - o[~group].mean(0)
    return F.cross_entropy(o, y) + gap.nan_to_num().abs().sum()


def load_balance(m, x, y, s):
    gates = m(x).softmax(1)
    used = F.one_hot((x[:, 0] > 0).long(), CLASSES).float().mean(0)
    return F.nll_loss(gates.log(), y) + CLASSES * (used * gates.mean(0)).sum()


def sinkhorn(m, x, y, s):
    o = m(x)
    plan = o.detach().exp()
    for _ in range(3):
        plan = plan / plan.sum(0, keepdim=True)
        plan = plan / plan.sum(1, keepdim=True)
    return F.cross_entropy(o, plan)


def nt_xent(m, x, y, s):
    z = torch.cat([m(x), m(x + 0.1)])
    sim = similarity(z).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e4) / 0.5
    return F.cross_entropy(sim, torch.arange(len(z)).roll(len(x)))


def clip_loss(m, x, y, s):
    logits = F.normalize(m(x), dim=1) @ F.normalize(m(x.flip(1)), dim=1).T
    target = torch.arange(len(x))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def supervised_contrastive(m, x, y, s):
    sim = similarity(m(x)).fill_diagonal_(-1e4)
    same = (y[:, None] == y).float().fill_diagonal_(0)
    return -(sim.log_softmax(1) * same).sum(1).div(same.sum(1).clamp(min=1)).mean()


def batch_hard_triplet(m, x, y, s):
    distance = torch.cdist(m(x), m(x))
    same = y[:, None] == y
    hardest = distance.masked_fill(~same, 0).amax(1) - distance.masked_fill(same, 1e4).amin(1)
    return F.relu(hardest + 1).mean()


def pairwise_ranking(m, x, y, s):
    score = m(x)[:, 0]
    worse = (y[:, None] > y[None]).float()
    return (F.softplus(score[None] - score[:, None]) * worse).sum() / worse.sum().clamp(min=1)


def margin_of_consecutive(m, x, y, s):
    score = m(x)[:, 0]
    sign = (y[1:] > y[:-1]).float() * 2 - 1
    return F.margin_ranking_loss(score[1:], score[:-1], sign)


def cox(m, x, y, s):
    risk = m(x)[:, 0]
    order = x[:, 0].argsort(descending=True)
    risk = risk[order]
    return -(risk - risk.logcumsumexp(0)).mean()


def center_loss(m, x, y, s):
    o = m(x)
    centers = torch.zeros(CLASSES, CLASSES).index_add(0, y, o) / counts(y).clamp(min=1)[:, None]
    return F.cross_entropy(o, y) + (o - centers[y]).square().mean()


def barlow_twins(m, x, y, s):
    a, b = (F.batch_norm(m(view), None, None, training=True) for view in (x, x + 0.1))
    cross = a.T @ b / len(x)
    return (cross - torch.eye(CLASSES)).square().sum()


def vicreg(m, x, y, s):
    a, b = m(x), m(x * 0.9)
    variance = F.relu(1 - a.var(0).add(1e-4).sqrt()).mean()
    return F.mse_loss(a, b) + variance


def deep_cluster(m, x, y, s):
    o = m(x)
    centers = o.detach()[:2].clone()
    for _ in range(2):
        near = torch.cdist(o.detach(), centers).argmin(1)
        centers = torch.stack([o.detach()[near == c].mean(0) if (near == c).any() else centers[c] for c in range(2)])
    return (o - centers[near]).square().sum(1).mean()


def graph_smoothness(m, x, y, s):
    o = m(x)
    near = torch.cdist(x, x).topk(min(3, len(x)), largest=False).indices
    return F.cross_entropy(o, y) + (o[:, None] - o[near]).square().mean()


def relational_distillation(m, x, y, s):
    student, teacher = m(x), (x @ torch.ones(4, CLASSES)).tanh()
    return F.mse_loss(torch.cdist(student, student), torch.cdist(teacher, teacher))


def batch_normed_teacher(m, x, y, s):
    teacher = s.setdefault("teacher", nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, CLASSES)))
    with torch.no_grad():
        target = teacher(x).softmax(1)
    return F.kl_div(m(x).log_softmax(1), target, reduction="batchmean")


def manifold_mixup(m, x, y, s):
    o = m(x)
    order = torch.randperm(len(x))
    return 0.8 * F.cross_entropy(0.8 * o + 0.2 * o[order], y) + 0.2 * F.cross_entropy(o, y[order])


def convolution_over_batch(m, x, y, s):
    o = m(x)
    smooth = F.conv1d(o.T[:, None], torch.full((1, 1, 3), 1 / 3), padding=1)[:, 0].T
    return F.cross_entropy(smooth, y)


def unique_labels(m, x, y, s):
    o = m(x)
    values, inverse = y.unique(return_inverse=True)
    sums = torch.zeros(len(values), CLASSES).index_add(0, inverse, o)
    return F.cross_entropy(sums, values)


def moving_average_scale(m, x, y, s):
    loss = sample_losses(m(x), y)
    s["average"] = 0.5 * s.get("average", 1.0) + 0.5 * loss.detach().mean()
    return (loss / s["average"]).mean()


def uncertainty_of_batch(m, x, y, s):
    o = m(x)
    a, b = F.cross_entropy(o, y), o.square().mean()
    return a / a.detach() + b / b.detach()


def dynamic_weight_average(m, x, y, s):
    o = m(x)
    losses = torch.stack([F.cross_entropy(o, y), (o[:, 0] - y).square().mean()])
    return (losses * torch.softmax(losses.detach(), 0)).sum()


def grad_norm(m, x, y, s):
    o = m(x)
    a, b = F.cross_entropy(o, y), (o[:, 0] - y).square().mean()
    (of_a,), (of_b,) = (torch.autograd.grad(loss, o, retain_graph=True) for loss in (a, b))
    return a / of_a.norm() + b / of_b.norm()


def normalized_gradient(m, x, y, s):
    o = m(x)
    o.register_hook(lambda grad: grad / grad.norm())
    return F.cross_entropy(o, y)


def gradient_penalty_on_outputs(m, x, y, s):
    o = m(x)
    loss = F.cross_entropy(o, y)
    (grad,) = torch.autograd.grad(loss, o, create_graph=True)
    return loss + grad.norm()


def branch_on_loss(m, x, y, s):
    loss = F.cross_entropy(m(x), y)
    return 2 * loss if loss > 1.1 else loss


def mixup(m, x, y, s):
    share, order = np.random.beta(1, 1), torch.randperm(len(x))
    o = m(share * x + (1 - share) * x[order])
    return share * F.cross_entropy(o, y) + (1 - share) * F.cross_entropy(o, y[order])


def cutmix(m, x, y, s):
    x = x.clone()
    x[:, :2] = x.flip(0)[:, :2]
    return F.cross_entropy(m(x), y)


def numpy_shuffle(m, x, y, s):
    order = np.random.permutation(len(x))
    return F.cross_entropy(m(torch.from_numpy(x.numpy()[order])), torch.from_numpy(y.numpy()[order]))


def balanced_resampling(m, x, y, s):
    chosen = torch.multinomial(1 / counts(y)[y], len(y), replacement=True)
    return F.cross_entropy(m(x[chosen]), y[chosen])


def labels_swapped(m, x, y, s):
    other = y[torch.randperm(len(y))]
    return F.cross_entropy(m(x), torch.where(torch.rand(len(y)) < 0.3, other, y))


def focusing_by_accuracy(m, x, y, s):
    o = m(x)
    gamma, loss = 2 * (o.argmax(1) == y).float().mean(), sample_losses(o, y)
    return ((1 - torch.exp(-loss)) ** gamma * loss).mean()


def histogram_weights(m, x, y, s):
    loss = sample_losses(m(x), y)
    heights = torch.histc(loss.detach(), 5, 0, 3)
    return (loss / heights[(loss.detach() / 0.6).long().clamp(0, 4)].clamp(min=1)).mean()


def queue_of_outputs(m, x, y, s):
    z = F.normalize(m(x), dim=1)
    known = torch.cat([z.detach(), s.get("queue", torch.zeros(4, CLASSES))])
    s["queue"] = z.detach()[:4]
    return F.cross_entropy(z @ known.T, torch.arange(len(z)))


def soft_f1(m, x, y, s):
    p, target = m(x).softmax(1), F.one_hot(y, CLASSES).float()
    return 1 - (2 * (p * target).sum(0) / (p.sum(0) + target.sum(0) + 1e-6)).mean()


def value_at_risk(m, x, y, s):
    loss = sample_losses(m(x), y)
    bound = loss.detach().quantile(0.8)
    return bound + F.relu(loss - bound).mean() / 0.2


TOKEN_LOSSES = {  # functions of scores (B, T, words) and labels (B, T), where -100 means no label
    "token_mean": lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()),
    "token_sum_over_count": lambda o, y: token_losses(o, y).sum() / (y != -100).sum(),
    "tokens_by_item": lambda o, y: (
        F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="sum") / (y != -100).sum().item()
    ),
    "packed": lambda o, y: F.cross_entropy(o[y != -100], y[y != -100]),
    "longest_of_batch": lambda o, y: (token_losses(o, y).sum(1) / (y != -100).sum(1).max()).mean(),
    "token_importance": lambda o, y: (
        token_losses(o, y) * torch.softmax(token_losses(o, y).detach().flatten(), 0).view_as(y)
    ).sum(),
    "z_loss_of_batch": lambda o, y: (token_losses(o, y).sum(1) / 5).mean() + torch.logsumexp(o, -1).mean() ** 2,
}
PROBABILITY_LOSSES = {  # functions of the probabilities of pixels (B, 4, 4) and of masks
    "batch_dice": lambda p, y: 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1),
    "dice_over_axes": lambda p, y: 1 - 2 * torch.einsum("bhw,bhw->", p, y) / (p.square().sum() + y.square().sum() + 1),
    "tversky": lambda p, y: (
        1 - ((p * y).sum() + 1) / ((p * y).sum() + 0.3 * (p * (1 - y)).sum() + 0.7 * ((1 - p) * y).sum() + 1)
    ),
    "jaccard": lambda p, y: 1 - (p * y).sum() / (p.sum() + y.sum() - (p * y).sum()),
    "lovasz_like": lambda p, y: (
        (p - y).abs().flatten().sort(descending=True).values * torch.linspace(1, 0, y.numel())
    ).mean(),
}
PIXEL_LOSS_REDUCTIONS = {  # functions of the losses of pixels and of masks
    "pixels_of_foreground": lambda loss, y: loss[y > 0].mean() + loss[y == 0].mean(),
    "hardest_pixels": lambda loss, y: loss.flatten().topk(12).values.mean(),
}
MAP_LOSSES = {
    "positive_weight_of_batch": lambda o, y: F.binary_cross_entropy_with_logits(
        o[:, 0], y, pos_weight=(1 - y).sum() / y.sum().clamp(min=1)
    ),
    "style": lambda o, y: torch.einsum("bchw,bdhw->cd", o, o).square().mean(),
}


def _functions(first, last):
    names = [name for name, value in globals().items() if getattr(value, "__module__", None) == __name__]
    return {name: globals()[name] for name in names[names.index(first) : names.index(last) + 1]}


def _loops(table, loss_of):
    """Returns the loops of a table; ``loss_of(f, m, x, y)`` is the loss with function ``f`` of the table."""
    return {name: lambda m, x, y, s, f=f: loss_of(f, m, x, y) for name, f in table.items()}


VECTORS = {
    **_functions("focal_batch_alpha", "value_at_risk"),
    **_loops(LOSS_REDUCTIONS, lambda f, m, x, y: f(sample_losses(m(x), y), y)),
    **_loops(OUTPUT_LOSSES, lambda f, m, x, y: f(m(x), y)),
    **_loops(PENALTIES, lambda f, m, x, y: (lambda o: F.cross_entropy(o, y) + f(o, y))(m(x))),
    **_loops(INPUT_CHANGES, lambda f, m, x, y: F.cross_entropy(m(f(x)), y)),
}
TOKENS = _loops(TOKEN_LOSSES, lambda f, m, x, y: f(m(x), y))
MAPS = {
    **_loops(PROBABILITY_LOSSES, lambda f, m, x, y: f(m(x).sigmoid()[:, 0], y)),
    **_loops(PIXEL_LOSS_REDUCTIONS, lambda f, m, x, y: f(pixel_losses(m(x), y), y)),
    **_loops(MAP_LOSSES, lambda f, m, x, y: f(m(x), y)),
}
