import pytest
import torch

from tutorials.demo.devices import best_device, device_text


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"),
    [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_the_order_is_cuda_mps_cpu(monkeypatch, cuda, mps, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert best_device().type == expected


def test_a_device_is_shown_with_what_tells_it_apart(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert device_text(torch.device("cpu")) == f"cpu ({torch.get_num_threads()} threads)"
    assert device_text(torch.device("cuda")) == "cuda (Some GPU)"
    assert device_text(torch.device("mps")) == "mps"
