"""Tests of the guard in conftest.py that blocks network access."""

import socket
import urllib.request

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset


def connect():
    with socket.socket(socket.AF_INET) as client:
        client.connect(("127.0.0.1", 9))


def send():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", ("127.0.0.1", 9))


@pytest.mark.parametrize(
    ("access", "message"),
    [
        (connect, r"127\.0\.0\.1"),
        (send, r"127\.0\.0\.1"),
        (lambda: socket.getaddrinfo("example.org", 443), r"example\.org"),
        (lambda: urllib.request.urlopen("http://example.org", timeout=1), r"example\.org"),
    ],
    ids=["connection", "datagram", "name", "urllib"],
)
def test_network_access_raises(network_refused, access, message):
    with pytest.raises(network_refused, match=message):
        access()


def test_pairs_of_local_sockets_still_work():
    left, right = socket.socketpair()
    with left, right:
        left.sendall(b"x")
        assert right.recv(1) == b"x"


def test_workers_of_a_data_loader_still_work():
    data = TensorDataset(torch.arange(6.0))
    batches = list(DataLoader(data, batch_size=2, num_workers=2))
    assert [batch.tolist() for (batch,) in batches] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
