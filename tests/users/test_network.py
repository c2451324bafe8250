"""Nothing in the suite reaches the network. These tests are on the guard itself, which is in conftest.py."""

import socket
import urllib.request

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset


def test_connections_are_rejected(network_refused):
    with socket.socket(socket.AF_INET) as client, pytest.raises(network_refused, match=r"127\.0\.0\.1"):
        client.connect(("127.0.0.1", 9))


def test_name_lookups_are_rejected(network_refused):
    with pytest.raises(network_refused, match=r"example\.org"):
        socket.getaddrinfo("example.org", 443)


def test_datagrams_are_rejected(network_refused):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender, pytest.raises(network_refused):
        sender.sendto(b"x", ("127.0.0.1", 9))


def test_urllib_is_rejected(network_refused):
    with pytest.raises(network_refused):
        urllib.request.urlopen("http://example.org", timeout=1)


def test_pairs_of_local_sockets_still_work():
    left, right = socket.socketpair()
    with left, right:
        left.sendall(b"x")
        assert right.recv(1) == b"x"


def test_workers_of_a_data_loader_still_work():
    data = TensorDataset(torch.arange(6.0))
    batches = list(DataLoader(data, batch_size=2, num_workers=2))
    assert [batch.tolist() for (batch,) in batches] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
