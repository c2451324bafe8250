"""Private training script for one process or several.

    python train.py
    torchrun --nproc-per-node 2 train.py --wrap ddp
    torchrun --nproc-per-node 2 train.py --wrap fsdp
    torchrun --nproc-per-node 2 --max-restarts 3 train.py --wrap fsdp --folder run

With a seed, the first three commands are the same run: they have equal batches, noise, epsilon, and weights up to
rounding. The last command saves every 10 steps, and resumes if a process fails or the script is started again.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine, checkpoint
from dpengine.data import load_adult


class Network(nn.Module):
    """MLP with two hidden layers for census data."""

    def __init__(self, columns: int):
        super().__init__()
        self.hidden = nn.ModuleList([nn.Linear(columns, 64), nn.Linear(64, 64)])
        self.last = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits ``(B, 2)`` of inputs ``(B, columns)``."""
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.last(x)


def wrapped(model: Network, wrap: str) -> nn.Module:
    """Wraps the model in DDP or FSDP, as in a script without dpengine."""
    if wrap == "ddp":
        return DistributedDataParallel(model)
    if wrap == "fsdp":
        for layer in model.hidden:
            fully_shard(layer)
        fully_shard(model)
    return model


def main() -> None:
    """Trains, and prints the privacy cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrap", choices=["none", "ddp", "fsdp"], default="none")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, help="makes the noise reproducible, to compare runs; not private")
    parser.add_argument(
        "--folder", type=Path, help="folder for checkpoints, written every 10 steps, from which a run resumes"
    )
    arguments = parser.parse_args()
    is_distributed = "WORLD_SIZE" in os.environ  # torchrun sets it
    if is_distributed:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

    torch.manual_seed(0)  # every process starts with the same weights
    data = load_adult()
    model = wrapped(Network(data.train_inputs.shape[1]), arguments.wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    # Every process has the whole data set; 512 is the size of the global batch.
    loader = DataLoader(TensorDataset(data.train_inputs, data.train_labels), batch_size=512, shuffle=True)
    engine = PrivacyEngine(seed=arguments.seed)
    model, optimizer, loader = engine.make_private(
        model, optimizer, loader, target_epsilon=2.0, target_delta=1e-5, steps=arguments.steps, max_grad_norm=1.0
    )
    if arguments.folder is not None and checkpoint.exists(arguments.folder):
        checkpoint.load(arguments.folder, engine)  # the number of processes may differ from that of the saved run
    steps_taken = loader.position
    while steps_taken < arguments.steps:
        for x, y in loader:  # the part of this process, or a placeholder if it is empty
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps_taken += 1
            if arguments.folder is not None and steps_taken % 10 == 0:
                checkpoint.save(arguments.folder, engine)  # all processes must call it
            if steps_taken == arguments.steps:
                break

    model.eval()
    with torch.no_grad():
        accuracy = float((model(data.test_inputs).argmax(1) == data.test_labels).double().mean())
    if not is_distributed or dist.get_rank() == 0:
        print(f"accuracy {accuracy:.4f}")
        print(engine.report())
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
