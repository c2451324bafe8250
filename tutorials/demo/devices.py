"""The default device, and its description."""

import torch


def best_device() -> torch.device:
    """Returns the first of CUDA, MPS and CPU that is available."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def device_text(device: torch.device) -> str:
    """Describes a device, with the model of a CUDA device or the number of threads of the CPU."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)" if device.type == "cpu" else device.type
