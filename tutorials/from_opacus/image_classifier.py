"""Trains a convolutional network on handwritten digits, for a given privacy budget."""

import argparse
import json
import time

import torch
from image_data import load_images
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine.compat.opacus import PrivacyEngine
from dpengine.compat.opacus.validators import ModuleValidator

MODES = ("hooks", "functorch", "ew", "ghost")


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits", help="digits, mnist5k or fashion-mnist")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--epsilon", type=float, default=5.0)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--mode", default="hooks", choices=MODES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one epoch")
    args = parser.parse_args(argv)
    if args.quick:
        args.epochs = 1
    return args


def load(args):
    data = load_images(args.data)
    print(data.describe())
    return TensorDataset(data.train_inputs, data.train_labels), TensorDataset(data.test_inputs, data.test_labels)


def build(args):
    """Returns the model and the loss. `fix` replaces BatchNorm, which is not private, by GroupNorm."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    return ModuleValidator.fix(model), nn.CrossEntropyLoss()


def accuracy(model, dataset):
    model.eval()
    right = 0
    with torch.no_grad():
        for inputs, targets in DataLoader(dataset, batch_size=500):
            right += (model(inputs).argmax(1) == targets).sum().item()
    model.train()
    return right / len(dataset)


def main(argv=None):
    args = parse(argv)
    torch.manual_seed(args.seed)
    train, test = load(args)
    model, criterion = build(args)
    ModuleValidator.validate(model, strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)

    privacy_engine = PrivacyEngine()
    private = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        criterion=criterion,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        epochs=args.epochs,
        max_grad_norm=args.max_grad_norm,
        grad_sample_mode=args.mode,
    )
    if args.mode == "ghost":
        model, optimizer, criterion, loader = private
    else:
        model, optimizer, loader = private
    print(f"sigma = {optimizer.noise_multiplier:.3f}, C = {optimizer.max_grad_norm}")

    steps, seconds = 0, 0.0
    for epoch in range(1, args.epochs + 1):
        model.train()
        start = time.perf_counter()
        for inputs, targets in loader:
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        seconds += time.perf_counter() - start
        epsilon = privacy_engine.get_epsilon(args.delta)
        print(f"epoch {epoch}: loss {loss.item():.3f}, epsilon {epsilon:.2f} (delta {args.delta:g})")

    result = {
        "example": "image_classifier",
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
