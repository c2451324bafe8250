"""Training loops in which one sample changes the gradients of others, in the forms in which people write them.

Each is a function ``(model, x, y, state)`` that returns the loss, by kind of data; ``state`` is a dict that lasts for
the training. They were written from the statement of what must hold, not from the code that checks it.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 3
PROTOTYPES = torch.linspace(-1, 1, 9).view(3, 3)


def each(o, y):
    return F.cross_entropy(o, y, reduction="none")


def counts(y):
    return torch.bincount(y, minlength=CLASSES).float()


def similarity(o):
    z = F.normalize(o, dim=1)
    return z @ z.T


# Reductions and weights


def class_balanced(m, x, y, s):
    weight = 1 / counts(y).clamp(min=1)
    return F.cross_entropy(m(x), y, weight=weight, reduction="sum") / len(y)


def effective_number(m, x, y, s):
    weight = (1 - 0.9) / (1 - 0.9 ** counts(y).clamp(min=1))
    return (each(m(x), y) * weight[y]).mean()


def weights_over_their_sum(m, x, y, s):
    weight = 1.0 + y.float()
    return torch.einsum("b,b->", each(m(x), y), weight / weight.sum())


def smoothing_by_frequency(m, x, y, s):
    prior = counts(y) / len(y)
    target = 0.9 * F.one_hot(y, CLASSES) + 0.1 * prior
    return F.cross_entropy(m(x), target)


def logit_adjustment(m, x, y, s):
    return F.cross_entropy(m(x) + (counts(y) / len(y) + 1e-3).log(), y)


def focal_batch_alpha(m, x, y, s):
    loss = each(m(x), y)
    alpha = 1 - (counts(y) / len(y))[y]
    return (alpha * (1 - torch.exp(-loss)) ** 2 * loss).mean()


def focal_normalized(m, x, y, s):
    loss = each(m(x), y)
    modulating = (1 - torch.exp(-loss)) ** 2
    return (modulating * loss).sum() / modulating.detach().sum()


def hard_negatives(m, x, y, s):
    loss = each(m(x), y)
    return loss[loss > loss.mean()].sum() / len(y)


def ohem(m, x, y, s):
    return each(m(x), y).topk(max(1, len(y) // 2)).values.mean()


def kept_by_sort(m, x, y, s):
    loss, _ = each(m(x), y).sort(descending=True)
    return loss[: len(loss) // 3 + 1].mean()


def quantile_clip(m, x, y, s):
    loss = each(m(x), y)
    return torch.minimum(loss, loss.detach().quantile(0.7)).mean()


def median_scaled(m, x, y, s):
    loss = each(m(x), y)
    return (loss / loss.detach().median()).mean()


def curriculum(m, x, y, s):
    loss = each(m(x), y)
    return (loss * torch.softmax(-loss.detach(), 0)).sum()


def rank_weights(m, x, y, s):
    loss = each(m(x), y)
    rank = loss.detach().argsort().argsort().float()
    return (loss * (1 + rank / len(rank))).mean()


def scatter_mean(m, x, y, s):
    sums = torch.zeros(CLASSES).scatter_add(0, y, each(m(x), y))
    return (sums / counts(y).clamp(min=1)).mean()


def index_add_mean(m, x, y, s):
    loss = each(m(x), y)
    totals = torch.zeros(CLASSES).index_add_(0, y, loss)
    present = torch.zeros(CLASSES).index_fill_(0, y.unique(), 1.0)
    return totals.sum() / present.sum()


def per_class_list(m, x, y, s):
    loss = each(m(x), y)
    return torch.stack([loss[y == c].mean() for c in range(CLASSES) if (y == c).any()]).mean()


def log_sum_exp(m, x, y, s):
    return torch.logsumexp(each(m(x), y), 0)


def root_mean_square(m, x, y, s):
    return each(m(x), y).square().mean().sqrt()


def generalized_mean(m, x, y, s):
    return each(m(x), y).pow(3).mean().pow(1 / 3)


def norm_of_losses(m, x, y, s):
    return torch.linalg.vector_norm(each(m(x), y))


def worst_group(m, x, y, s):
    loss = each(m(x), y)
    groups = [loss[y == c].sum() for c in range(CLASSES)]
    return torch.stack(groups).max() / len(y)


def masked_by_nonzero(m, x, y, s):
    loss = each(m(x), y) * (x[:, 0] > 0)
    return loss.sum() / max(1, len(loss.detach().nonzero()))


def masked_by_count(m, x, y, s):
    mask = x[:, 0] > 0
    return (each(m(x), y) * mask).sum() / mask.count_nonzero().clamp(min=1)


def boolean_indexing(m, x, y, s):
    keep = y != 0
    return F.cross_entropy(m(x)[keep], y[keep])


def selected_before_model(m, x, y, s):
    o = m(x)
    confident = o.softmax(1).amax(1) > 0.36
    return F.cross_entropy(o[confident], y[confident]) if confident.any() else o.sum() * 0


def pseudo_labels(m, x, y, s):
    o = m(x)
    certainty = o.detach().softmax(1).amax(1)
    mask = (certainty > certainty.mean()).float()
    return (each(o, o.detach().argmax(1)) * mask).sum() / mask.sum()


# Numbers


def item_scale(m, x, y, s):
    loss = each(m(x), y)
    return loss.mean() / loss.detach().mean().item()


def float_of_max(m, x, y, s):
    o = m(x)
    return F.cross_entropy(o / float(o.detach().abs().max()), y)


def python_list(m, x, y, s):
    labels = y.tolist()
    weight = torch.tensor([len(labels) / labels.count(label) for label in labels])
    return (each(m(x), y) * weight).mean()


def numpy_weights(m, x, y, s):
    share = np.bincount(y.numpy(), minlength=CLASSES) / len(y)
    return (each(m(x), y) * torch.from_numpy(1 - share).float()[y]).mean()


def comprehension(m, x, y, s):
    loss = each(m(x), y)
    return sum(loss[i] for i in range(len(y)) if y[i] > 0) / sum(1 for one in y if one > 0)


def counted_in_python(m, x, y, s):
    kept = [i for i, label in enumerate(y.tolist()) if label]
    return each(m(x), y)[kept].sum() / max(1, len(kept))


def numpy_temperature(m, x, y, s):
    return F.cross_entropy(m(x) / (1 + np.std(x.numpy())), y)


# Statistics of outputs


def temperature_of_batch(m, x, y, s):
    o = m(x)
    return F.cross_entropy(o / o.std(), y)


def centred_logits(m, x, y, s):
    o = m(x)
    return F.cross_entropy(o - o.mean(0, keepdim=True), y)


def batch_normed_outputs(m, x, y, s):
    return F.cross_entropy(F.batch_norm(m(x), None, None, training=True), y)


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


def entropy_of_mean(m, x, y, s):
    o = m(x)
    mean = o.softmax(1).mean(0)
    return F.cross_entropy(o, y) + (mean * mean.log()).sum()


def diversity(m, x, y, s):
    o = m(x)
    return F.cross_entropy(o, y) + 0.1 * torch.cdist(o, o).mean()


def orthogonality(m, x, y, s):
    o = m(x)
    return F.cross_entropy(o, y) + (o.T @ o / len(o) - torch.eye(CLASSES)).square().sum()


def fairness_gap(m, x, y, s):
    o = m(x)
    group = x[:, 0] > 0
    gap = o[group].mean(0) - o[~group].mean(0)
    return F.cross_entropy(o, y) + gap.nan_to_num().abs().sum()


def maximum_mean_discrepancy(m, x, y, s):
    o = m(x)
    half = len(o) // 2
    return F.cross_entropy(o, y) + (o[:half].mean(0) - o[half:].mean(0)).square().sum()


def covariance_penalty(m, x, y, s):
    o = m(x)
    return F.cross_entropy(o, y) + torch.cov(o.T).fill_diagonal_(0).square().sum()


def uniformity(m, x, y, s):
    o = m(x)
    return F.cross_entropy(o, y) + torch.pdist(F.normalize(o)).square().mul(-2).exp().mean().log()


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


# Between samples


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


def triplet_of_neighbours(m, x, y, s):
    o = m(x)
    return F.triplet_margin_loss(o, o.roll(1, 0), o.roll(2, 0))


def pairwise_ranking(m, x, y, s):
    score = m(x)[:, 0]
    worse = (y[:, None] > y[None]).float()
    return (F.softplus(score[None] - score[:, None]) * worse).sum() / worse.sum().clamp(min=1)


def list_net(m, x, y, s):
    return F.cross_entropy(m(x)[:, 0][None], y.float().softmax(0)[None])


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
    spread = F.relu(1 - a.var(0).add(1e-4).sqrt()).mean()
    return F.mse_loss(a, b) + spread


def deep_cluster(m, x, y, s):
    o = m(x)
    centers = o.detach()[:2].clone()
    for _ in range(2):
        near = torch.cdist(o.detach(), centers).argmin(1)
        centers = torch.stack([o.detach()[near == c].mean(0) if (near == c).any() else centers[c] for c in range(2)])
    return (o - centers[near]).square().sum(1).mean()


def label_propagation(m, x, y, s):
    o = m(x)
    affinity = torch.softmax(similarity(o.detach()) / 0.1, 1)
    return F.cross_entropy(o, affinity @ F.one_hot(y, CLASSES).float())


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


def self_attention_over_batch(m, x, y, s):
    o = m(x)[None]
    return F.cross_entropy(F.scaled_dot_product_attention(o, o, o)[0], y)


def manifold_mixup(m, x, y, s):
    o = m(x)
    order = torch.randperm(len(x))
    return 0.8 * F.cross_entropy(0.8 * o + 0.2 * o[order], y) + 0.2 * F.cross_entropy(o, y[order])


def loss_only_mixup(m, x, y, s):
    return F.cross_entropy(m(x), 0.9 * F.one_hot(y, CLASSES) + 0.1 * F.one_hot(y.roll(1), CLASSES))


def cumulative(m, x, y, s):
    return each(m(x), y).cumsum(0).mean()


def consistency_of_order(m, x, y, s):
    o = m(x)
    return F.cross_entropy(o, y) + F.mse_loss(o[1:], o[:-1])


def convolution_over_batch(m, x, y, s):
    o = m(x)
    smooth = F.conv1d(o.T[:, None], torch.full((1, 1, 3), 1 / 3), padding=1)[:, 0].T
    return F.cross_entropy(smooth, y)


def einsum_gram(m, x, y, s):
    o = m(x)
    return F.cross_entropy(o, y) + torch.einsum("bi,ci->bc", o, o).square().mean()


def matmul_of_targets(m, x, y, s):
    o = m(x)
    return F.mse_loss(o.T @ o, F.one_hot(y, CLASSES).float().T @ F.one_hot(y, CLASSES).float())


def unique_labels(m, x, y, s):
    o = m(x)
    values, inverse = y.unique(return_inverse=True)
    sums = torch.zeros(len(values), CLASSES).index_add(0, inverse, o)
    return F.cross_entropy(sums, values)


# State


def moving_average_scale(m, x, y, s):
    loss = each(m(x), y)
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


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o):
        return o.clone()

    @staticmethod
    def backward(ctx, grad):
        return -grad + grad.mean(0)


def gradient_reversal(m, x, y, s):
    return F.cross_entropy(Reversal.apply(m(x)), y)


def gradient_penalty_on_outputs(m, x, y, s):
    o = m(x)
    loss = F.cross_entropy(o, y)
    (grad,) = torch.autograd.grad(loss, o, create_graph=True)
    return loss + grad.norm()


def branch_on_loss(m, x, y, s):
    loss = F.cross_entropy(m(x), y)
    return 2 * loss if loss > 1.1 else loss


def where_of_mean(m, x, y, s):
    loss = each(m(x), y)
    return torch.where(loss > loss.mean(), 2 * loss, loss).mean()


def root_of_size(m, x, y, s):
    return each(m(x), y).sum() / len(y) ** 0.5


def temperature_of_size(m, x, y, s):
    return F.cross_entropy(m(x) / len(y) ** 0.5, y)


def penalty_over_size(m, x, y, s):
    o = m(x)
    return F.cross_entropy(o, y) + o.square().mean() / len(x)


# Before the model


def mixup(m, x, y, s):
    share, order = np.random.beta(1, 1), torch.randperm(len(x))
    o = m(share * x + (1 - share) * x[order])
    return share * F.cross_entropy(o, y) + (1 - share) * F.cross_entropy(o, y[order])


def cutmix(m, x, y, s):
    x = x.clone()
    x[:, :2] = x.flip(0)[:, :2]
    return F.cross_entropy(m(x), y)


def whitened(m, x, y, s):
    return F.cross_entropy(m((x - x.mean(0)) / (x.std(0) + 1e-3)), y)


def scaled_by_largest(m, x, y, s):
    return F.cross_entropy(m(x / x.abs().max()), y)


def imputed_by_batch(m, x, y, s):
    missing = x > 1.0
    mean = x.masked_fill(missing, 0).mean(0)
    return F.cross_entropy(m(torch.where(missing, mean, x)), y)


def numpy_shuffle(m, x, y, s):
    order = np.random.permutation(len(x))
    return F.cross_entropy(m(torch.from_numpy(x.numpy()[order])), torch.from_numpy(y.numpy()[order]))


def sorted_by_length(m, x, y, s):
    order = x[:, 0].argsort()
    return F.cross_entropy(m(x[order]), y)


def balanced_resampling(m, x, y, s):
    chosen = torch.multinomial(1 / counts(y)[y], len(y), replacement=True)
    return F.cross_entropy(m(x[chosen]), y[chosen])


def previous_sample_as_context(m, x, y, s):
    return F.cross_entropy(m(x + 0.1 * torch.cat([x[:1], x[:-1]])), y)


def by_principal_axes(m, x, y, s):
    return F.cross_entropy(m(x @ torch.linalg.svd(x, full_matrices=False)[2].T), y)


def labels_swapped(m, x, y, s):
    other = y[torch.randperm(len(y))]
    return F.cross_entropy(m(x), torch.where(torch.rand(len(y)) < 0.3, other, y))


# Written after the check could run with outputs far away


def focusing_by_accuracy(m, x, y, s):
    o = m(x)
    gamma, loss = 2 * (o.argmax(1) == y).float().mean(), each(o, y)
    return ((1 - torch.exp(-loss)) ** gamma * loss).mean()


def trimmed_mean(m, x, y, s):
    loss = each(m(x), y)
    return (loss.sum() - loss.max()) / (len(loss) - 1)


def median_of_means(m, x, y, s):
    return torch.stack([part.mean() for part in each(m(x), y).tensor_split(3)]).median()


def means_of_chunks(m, x, y, s):
    return torch.stack([part.mean() for part in each(m(x), y).split(4)]).mean()


def histogram_weights(m, x, y, s):
    loss = each(m(x), y)
    heights = torch.histc(loss.detach(), 5, 0, 3)
    return (loss / heights[(loss.detach() / 0.6).long().clamp(0, 4)].clamp(min=1)).mean()


def weights_by_place(m, x, y, s):
    return (each(m(x), y) * torch.linspace(1, 0.5, len(y))).mean()


def weights_in_turn(m, x, y, s):
    return (each(m(x), y) * torch.tensor([1.0 if i % 2 else 0.5 for i in range(len(y))])).mean()


def labels_that_count(m, x, y, s):
    return each(m(x), y).sum() / (len(y) - (y == 0).sum()).clamp(min=1)


def log_of_mean(m, x, y, s):
    return -m(x).softmax(1).gather(1, y[:, None]).mean().log()


def queue_of_outputs(m, x, y, s):
    z = F.normalize(m(x), dim=1)
    known = torch.cat([z.detach(), s.get("queue", torch.zeros(4, CLASSES))])
    s["queue"] = z.detach()[:4]
    return F.cross_entropy(z @ known.T, torch.arange(len(z)))


def columns_normalized(m, x, y, s):
    return F.cross_entropy(F.normalize(m(x), dim=0), y)


def soft_f1(m, x, y, s):
    p, target = m(x).softmax(1), F.one_hot(y, CLASSES).float()
    return 1 - (2 * (p * target).sum(0) / (p.sum(0) + target.sum(0) + 1e-6)).mean()


def value_at_risk(m, x, y, s):
    loss = each(m(x), y)
    bound = loss.detach().quantile(0.8)
    return bound + F.relu(loss - bound).mean() / 0.2


def saturating_mean(m, x, y, s):
    return 5 * torch.tanh(F.cross_entropy(m(x), y) / 5)


def flooding(m, x, y, s):
    return (F.cross_entropy(m(x), y) - 1.1).abs() + 1.1


def adversarial_of_batch(m, x, y, s):
    return F.cross_entropy(m(x + 0.1 * (x - x.mean(0)).sign()), y)


# Tokens: words and labels (B, T), with -100 for no label


def token_mean(m, x, y, s):
    return F.cross_entropy(m(x).flatten(0, 1), y.flatten())


def token_sum_over_count(m, x, y, s):
    loss = F.cross_entropy(m(x).transpose(1, 2), y, ignore_index=-100, reduction="none")
    return loss.sum() / (y != -100).sum()


def tokens_by_item(m, x, y, s):
    loss = F.cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="sum")
    return loss / (y != -100).sum().item()


def packed(m, x, y, s):
    keep = y != -100
    return F.cross_entropy(m(x)[keep], y[keep])


def longest_of_batch(m, x, y, s):
    loss = F.cross_entropy(m(x).transpose(1, 2), y, reduction="none")
    return (loss.sum(1) / (y != -100).sum(1).max()).mean()


def token_importance(m, x, y, s):
    loss = F.cross_entropy(m(x).transpose(1, 2), y, reduction="none")
    weight = torch.softmax(loss.detach().flatten(), 0).view_as(loss)
    return (loss * weight).sum()


def z_loss_of_batch(m, x, y, s):
    o = m(x)
    per_row = F.cross_entropy(o.transpose(1, 2), y, reduction="none").sum(1) / 5
    return per_row.mean() + torch.logsumexp(o, -1).mean() ** 2


# Maps: images (B, 1, 4, 4) and masks (B, 4, 4)


def batch_dice(m, x, y, s):
    p = m(x).sigmoid()[:, 0]
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


def dice_over_axes(m, x, y, s):
    p = m(x).sigmoid()[:, 0]
    both = torch.einsum("bhw,bhw->", p, y)
    return 1 - 2 * both / (p.square().sum() + y.square().sum() + 1)


def tversky(m, x, y, s):
    p = m(x).sigmoid()[:, 0]
    hit, over, miss = (p * y).sum(), (p * (1 - y)).sum(), ((1 - p) * y).sum()
    return 1 - (hit + 1) / (hit + 0.3 * over + 0.7 * miss + 1)


def jaccard(m, x, y, s):
    p = m(x).sigmoid()[:, 0].flatten()
    both = (p * y.flatten()).sum()
    return 1 - both / (p.sum() + y.sum() - both)


def positive_weight_of_batch(m, x, y, s):
    weight = (1 - y).sum() / y.sum().clamp(min=1)
    return F.binary_cross_entropy_with_logits(m(x)[:, 0], y, pos_weight=weight)


def pixels_of_foreground(m, x, y, s):
    loss = F.binary_cross_entropy_with_logits(m(x)[:, 0], y, reduction="none")
    return loss[y > 0].mean() + loss[y == 0].mean()


def hardest_pixels(m, x, y, s):
    loss = F.binary_cross_entropy_with_logits(m(x)[:, 0], y, reduction="none")
    return loss.flatten().topk(12).values.mean()


def lovasz_like(m, x, y, s):
    error = (m(x).sigmoid()[:, 0] - y).abs().flatten()
    ordered, _ = error.sort(descending=True)
    return (ordered * torch.linspace(1, 0, len(ordered))).mean()


def style(m, x, y, s):
    o = m(x)
    gram = torch.einsum("bchw,bdhw->cd", o, o)
    return gram.square().mean()


def _table(first, last):
    names = [name for name, value in globals().items() if getattr(value, "__module__", None) == __name__]
    return {name: globals()[name] for name in names[names.index(first) : names.index(last) + 1] if name != "Reversal"}


ROWS = _table("class_balanced", "adversarial_of_batch")
TOKENS = _table("token_mean", "z_loss_of_batch")
MAPS = _table("batch_dice", "style")
