"""Schedules noise, clipping norm and learning rate during training on census records."""

import argparse
import json
import time

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from dpengine.compat.opacus import PrivacyEngine
from dpengine.compat.opacus.schedulers import ExponentialNoise, StepGradClip
from dpengine.data import load_adult

MODES = ("hooks", "functorch", "ew", "ghost")


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--sigma", type=float, default=2.5, help="at the beginning")
    parser.add_argument("--noise-gamma", type=float, default=0.9, help="factor of sigma after each epoch")
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--max-grad-norm", type=float, default=0.4, help="at the beginning; halved every third epoch")
    parser.add_argument("--mode", default="hooks", choices=MODES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="three epochs of larger batches")
    args = parser.parse_args(argv)
    if args.quick:
        args.epochs, args.batch_size = 3, 2048
    return args


def load(args):
    adult = load_adult()
    print(adult.describe())
    return TensorDataset(adult.train_inputs, adult.train_labels), TensorDataset(adult.test_inputs, adult.test_labels)


def build(args):
    return nn.Sequential(nn.Linear(107, 64), nn.Tanh(), nn.Linear(64, 2)), nn.CrossEntropyLoss()


def accuracy(model, dataset):
    inputs, labels = dataset.tensors
    with torch.no_grad():
        return (model(inputs).argmax(1) == labels).float().mean().item()


def main(argv=None):
    args = parse(argv)
    torch.manual_seed(args.seed)
    train, test = load(args)
    model, criterion = build(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loader = DataLoader(train, batch_size=args.batch_size)

    privacy_engine = PrivacyEngine()
    private = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        criterion=criterion,
        noise_multiplier=args.sigma,
        max_grad_norm=args.max_grad_norm,
        grad_sample_mode=args.mode,
    )
    if args.mode == "ghost":
        model, optimizer, criterion, loader = private
    else:
        model, optimizer, loader = private
    noise_scheduler = ExponentialNoise(optimizer, gamma=args.noise_gamma)
    clip_scheduler = StepGradClip(optimizer, step_size=3, gamma=0.5)
    rate_scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs)

    steps, seconds = 0, 0.0
    for epoch in range(1, args.epochs + 1):
        rate = optimizer.param_groups[0]["lr"]
        print(
            f"epoch {epoch}: sigma {optimizer.noise_multiplier:.3f}, C {optimizer.max_grad_norm:.3f}, rate {rate:.3f}"
        )
        start = time.perf_counter()
        for inputs, targets in loader:
            criterion(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        seconds += time.perf_counter() - start
        noise_scheduler.step()
        clip_scheduler.step()
        rate_scheduler.step()
        print(f"    test {accuracy(model, test):.1%}, epsilon {privacy_engine.get_epsilon(args.delta):.2f}")

    result = {
        "example": "schedulers",
        "steps": steps,
        "seconds": seconds,
        "accuracy": accuracy(model, test),
        "epsilon": privacy_engine.get_epsilon(args.delta),
        "noise_multiplier": optimizer.noise_multiplier,
    }
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
