"""Trains on logical batches of 2,048 census records in physical batches of 256."""

import argparse
import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine.compat.opacus import PrivacyEngine
from dpengine.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
from dpengine.data import load_adult

MODES = ("hooks", "functorch", "ew")


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--max-physical-batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=4.0)
    parser.add_argument("--sigma", type=float, default=2.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--mode", default="hooks", choices=MODES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one epoch")
    args = parser.parse_args(argv)
    if args.quick:
        args.epochs = 1
    return args


def load(args):
    adult = load_adult()
    print(adult.describe())
    return TensorDataset(adult.train_inputs, adult.train_labels), TensorDataset(adult.test_inputs, adult.test_labels)


def build(args):
    model = nn.Sequential(
        nn.Linear(107, args.width), nn.Tanh(), nn.Linear(args.width, args.width), nn.Tanh(), nn.Linear(args.width, 2)
    )
    return model, nn.CrossEntropyLoss()


def train_epoch(args, model, criterion, optimizer, loader):
    """Trains for one epoch. `step` updates the parameters only after the last physical batch of a logical batch."""
    losses, physical_batches = [], 0
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=args.max_physical_batch_size, optimizer=optimizer
    ) as memory_safe_loader:
        for inputs, targets in memory_safe_loader:
            assert len(inputs) <= args.max_physical_batch_size
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            physical_batches += 1
    return sum(losses) / len(losses), physical_batches


def accuracy(model, dataset):
    inputs, labels = dataset.tensors
    with torch.no_grad():
        return (model(inputs).argmax(1) == labels).float().mean().item()


def main(argv=None):
    args = parse(argv)
    torch.manual_seed(args.seed)
    train, test = load(args)
    model, criterion = build(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = DataLoader(train, batch_size=args.batch_size)

    privacy_engine = PrivacyEngine()
    model, optimizer, loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=args.sigma,
        max_grad_norm=args.max_grad_norm,
        grad_sample_mode=args.mode,
    )
    seconds = 0.0
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        loss, physical_batches = train_epoch(args, model, criterion, optimizer, loader)
        seconds += time.perf_counter() - start
        epsilon = privacy_engine.get_epsilon(args.delta)
        batches = f"{len(loader)} batches in {physical_batches} physical batches"
        print(f"epoch {epoch}: loss {loss:.3f}, {batches}, epsilon {epsilon:.2f}")

    result = {
        "example": "limited_memory",
        "steps": args.epochs * len(loader),
        "seconds": seconds,
        "accuracy": accuracy(model, test),
        "epsilon": privacy_engine.get_epsilon(args.delta),
        "noise_multiplier": optimizer.noise_multiplier,
    }
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
