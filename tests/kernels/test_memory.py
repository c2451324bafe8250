"""Settings of the allocator of the C library, and the cases in which they are not changed."""

import subprocess
import sys

import pytest

CODE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import dpengine
from dpengine.kernels import memory
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=4)
dpengine.PrivacyEngine().make_private(model, optimizer, loader, noise_multiplier=1.0)
assert memory.keep_freed_memory.cache_info().currsize == 1
print(memory.keep_freed_memory())
"""


def printed(**environment):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
@pytest.mark.parametrize(
    "name",
    [
        "GLIBC_TUNABLES",
        pytest.param("MALLOC_TRIM_THRESHOLD_", marks=pytest.mark.nightly),
        pytest.param("MALLOC_MMAP_THRESHOLD_", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.slow
def test_allocator_settings_of_the_user_are_not_changed(name):
    value = "glibc.malloc.trim_threshold=65536" if name == "GLIBC_TUNABLES" else "65536"
    assert printed(**{name: value}) == "False"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
@pytest.mark.slow
def test_freed_memory_is_kept_once_a_model_on_the_cpu_is_private():
    assert printed() == "True"
