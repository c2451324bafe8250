"""Trains an LSTM that predicts the library of a docstring from its beginning."""

import argparse
import json
import time

import documentation
import torch
from torch import nn
from torch.utils.data import DataLoader

from dpengine.compat.opacus import PrivacyEngine
from dpengine.compat.opacus.validators import ModuleValidator

MODES = ("hooks", "functorch", "ew", "ghost")


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000, help="docstrings of each library")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    parser.add_argument("--mode", default="hooks", choices=MODES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one epoch over fewer rows")
    args = parser.parse_args(argv)
    if args.quick:
        args.epochs, args.rows, args.batch_size = 1, 250, 64
    return args


def load(args):
    return documentation.load(args.rows)


class Reader(nn.Module):
    """Word embedding, LSTM, and a linear head over the mean of its outputs."""

    def __init__(self, width=48):
        super().__init__()
        self.words = nn.Embedding(documentation.BUCKETS, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, len(documentation.LIBRARIES))

    def forward(self, tokens):
        outputs, _ = self.lstm(self.words(tokens))
        return self.head(outputs.mean(dim=1))


def build(args):
    """Returns the model and the loss. `fix` replaces the LSTM by one with per-sample gradients."""
    return ModuleValidator.fix(Reader()), nn.CrossEntropyLoss()


def main(argv=None):
    args = parse(argv)
    torch.manual_seed(args.seed)
    train, test = load(args)
    model, criterion = build(args)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)

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

    steps, seconds = 0, 0.0
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        for tokens, libraries in loader:
            loss = criterion(model(tokens), libraries)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        seconds += time.perf_counter() - start
        epsilon = privacy_engine.get_epsilon(delta=args.delta)
        print(f"epoch {epoch}: loss {loss.item():.3f}, epsilon {epsilon:.2f} (delta {args.delta:g})")

    result = {
        "example": "text_lstm",
        "steps": steps,
        "seconds": seconds,
        "accuracy": documentation.accuracy(model, test),
        "epsilon": privacy_engine.get_epsilon(delta=args.delta),
        "noise_multiplier": optimizer.noise_multiplier,
    }
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
