"""Sums over the ranks of a process group, in two processes."""

import torch
from launch import launched

from dpengine.functional import clipped_grad

DATA = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 2.0], [0.1, 0.0]])


def loss(p, x):
    return (p * x).sum()


def _rank():
    grad = clipped_grad(loss, l2_clip_norm=1.0, normalize_by=2.0, process_group=torch.distributed.group.WORLD)
    mine = DATA[:3] if torch.distributed.get_rank() == 0 else DATA[3:]  # ranks may hold different numbers of examples
    return grad(torch.ones(2), mine).tolist(), grad.sensitivity()


def test_every_rank_has_the_sum_over_all_and_the_same_sensitivity():
    found = launched(2, _rank)
    alone = clipped_grad(loss, l2_clip_norm=1.0, normalize_by=2.0)(torch.ones(2), DATA)
    for total, sensitivity in found:
        torch.testing.assert_close(torch.tensor(total), alone)
        assert sensitivity == 0.5
