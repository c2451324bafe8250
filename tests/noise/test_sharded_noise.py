"""Noise of several ranks: each element gets noise once, and each message is sent after its noise is added."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from dpengine.distributed.local_shards import Box, LocalShard, ParameterLayout
from dpengine.distributed.ranks import SINGLE_PROCESS
from dpengine.distributed.topology import Topology
from dpengine.errors import MechanismMismatchError
from dpengine.grad_modes import flat_buffer
from dpengine.grad_modes.flat_buffer import FlatBuffer
from dpengine.noise import GaussianNoise, NoiseSource
from dpengine.noise.sharded_noise import add_noise, noised_positions

SHAPES = [(30, 7), (11,), (5, 4, 3), (1,), (200,), (13, 13)]


@dataclass
class Ranks:
    """One of several ranks. Records the messages that it would sum, and sums nothing."""

    rank: int
    size: int
    sent: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def all_reduce(self, tensor):
        self.sent.append((tensor, tensor.clone()))
        return lambda: None


@pytest.fixture
def small_messages(monkeypatch):
    monkeypatch.setattr(flat_buffer, "BUCKET_BYTES", 4 * 40)


def noised(ranks, held=None, dtypes=(torch.float32,)):
    """Returns the sums of a rank after its noise, if all sums are zero, and the buffer."""
    parameters = [nn.Parameter(torch.zeros(s, dtype=dtypes[i % len(dtypes)])) for i, s in enumerate(SHAPES)]
    layout = ParameterLayout() if held is None else ParameterLayout(local_shard=held)
    topology = Topology(replicas=ranks, layout=layout)
    buffer = FlatBuffer(parameters, topology)
    positions = noised_positions(buffer, ranks)
    taken, noise = buffer.drain(), GaussianNoise(NoiseSource.seeded(4))
    for flat in taken.flats.values():
        flat.zero_()
    try:
        add_noise(taken, noise, std=2.0, step=3, scale=0.5, replicas=ranks, fingerprint=("fingerprint",))
    except MechanismMismatchError:  # the fingerprints of the other ranks were not added
        assert ranks.size > 1
    return [flat.clone() for flat in taken.flats.values()], positions


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.float64)])
def test_each_number_gets_its_noise_from_one_rank(small_messages, size, dtypes):
    (alone, whole), of_ranks = (
        noised(SINGLE_PROCESS, dtypes=dtypes),
        [noised(Ranks(i, size), dtypes=dtypes) for i in range(size)],
    )
    for flat, parts in zip(alone, zip(*(flats for flats, _ in of_ranks), strict=True), strict=True):
        assert torch.equal(sum(parts), flat)
        assert ((torch.stack(parts) != 0).sum(dim=0) == 1).all()
    covered = sorted(
        n for _, positions in of_ranks for one in positions for n in range(one.start, one.start + one.count)
    )
    assert covered == list(range(sum(one.count for one in whole)))


@pytest.mark.parametrize("rank", [0, 1])
def test_messages_are_sent_once_complete_and_cover_all_sums(small_messages, rank):
    ranks = Ranks(rank, 2)
    flats, _ = noised(ranks)
    assert len(ranks.sent) > 2
    assert all(torch.equal(now, then) for now, then in ranks.sent)
    together = torch.cat([now for now, _ in ranks.sent])
    assert torch.equal(together[: len(flats[0])], flats[0]) and len(together) > len(flats[0])


def test_columns_of_a_parameter_get_the_noise_of_their_positions():
    def columns(number):
        def held(parameter):
            whole = Box.full(parameter.shape)
            part = whole.part(1, number, 3) if parameter.dim() > 1 else whole
            return LocalShard(tuple(parameter.shape), part, part)

        return held

    (alone,), _ = noised(SINGLE_PROCESS)
    found = [noised(SINGLE_PROCESS, columns(number))[0][0] for number in range(3)]
    at, starts = 0, [0, 0, 0]
    for shape in SHAPES:
        size = torch.Size(shape).numel()
        whole, parts = alone[at : at + size].view(shape), []
        for number, part in enumerate(whole.chunk(3, 1) if len(shape) > 1 else [whole] * 3):
            parts.append(found[number][starts[number] : starts[number] + part.numel()].view(part.shape))
            starts[number] += part.numel()
            assert torch.equal(parts[-1], part)
        at += size


@pytest.mark.parametrize("replica", [0, 1])
def test_the_noise_of_unsplit_parameters_comes_from_the_same_replica_on_all_ranks(replica):
    """Otherwise the sums of unsplit parameters would be added in another order, and rounded differently."""

    def unsplit_positions(split):
        def held(parameter):
            whole = Box.full(parameter.shape)
            part = whole.part(0, split, 2) if parameter.dim() > 1 else whole
            return LocalShard(tuple(parameter.shape), part, part)

        parameters = [nn.Parameter(torch.zeros(s)) for s in SHAPES]
        topology = Topology(
            replicas=Ranks(replica, 2), splits=Ranks(split, 2), layout=ParameterLayout(local_shard=held)
        )
        drawn = noised_positions(FlatBuffer(parameters, topology), Ranks(replica, 2))
        mine = {n for one in drawn for n in range(one.start, one.start + one.count)}
        sizes = [torch.Size(s).numel() for s in SHAPES]
        return [
            {n for n in mine if sum(sizes[:i]) <= n < sum(sizes[: i + 1])} for i, s in enumerate(SHAPES) if len(s) == 1
        ]

    first, second = unsplit_positions(0), unsplit_positions(1)
    assert first == second and any(first)


def test_a_rank_without_sums_sends_its_fingerprint():
    ranks, nothing = Ranks(0, 2), LocalShard((3,), Box.full((3,)), Box((3,), (0,)))
    topology = Topology(replicas=ranks, layout=ParameterLayout(local_shard=lambda parameter: nothing))
    taken, noise = FlatBuffer([nn.Parameter(torch.zeros(3))], topology).drain(), GaussianNoise(NoiseSource.seeded(4))
    with pytest.raises(MechanismMismatchError):  # the fingerprints of the other ranks were not added
        add_noise(taken, noise, std=1.0, step=0, scale=1.0, replicas=ranks, fingerprint=())
    assert [len(now) for now, _ in ranks.sent] == [16]
