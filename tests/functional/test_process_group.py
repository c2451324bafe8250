"""Sums over the ranks of a process group, in two processes."""

import socket

import torch

from dpengine.functional import clipped_grad

DATA = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 2.0], [0.1, 0.0]])


def loss(p, x):
    return (p * x).sum()


def _rank(rank, port, queue):
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    grad = clipped_grad(loss, l2_clip_norm=1.0, normalize_by=2.0, process_group=torch.distributed.group.WORLD)
    mine = DATA[:3] if rank == 0 else DATA[3:]  # ranks may hold different numbers of examples
    queue.put((grad(torch.ones(2), mine).tolist(), grad.sensitivity()))
    torch.distributed.destroy_process_group()


def test_every_rank_has_the_sum_over_all_and_the_same_sensitivity():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        queue = manager.Queue()
        processes = [context.Process(target=_rank, args=(rank, port, queue)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=120)
        found = [queue.get(timeout=10) for _ in range(2)]
    alone = clipped_grad(loss, l2_clip_norm=1.0, normalize_by=2.0)(torch.ones(2), DATA)
    for total, sensitivity in found:
        torch.testing.assert_close(torch.tensor(total), alone)
        assert sensitivity == 0.5
