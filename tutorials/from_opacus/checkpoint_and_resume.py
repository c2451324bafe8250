"""Saves a half-finished run, and resumes it with new objects: weights, optimizer, schedule and privacy cost."""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine.compat.opacus import PrivacyEngine
from dpengine.compat.opacus.schedulers import StepNoise
from dpengine.data import load_adult

MODES = ("hooks", "functorch", "ew", "ghost")


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8, help="half of them before the checkpoint")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--sigma", type=float, default=1.5)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--mode", default="hooks", choices=MODES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="two epochs of larger batches")
    args = parser.parse_args(argv)
    if args.quick:
        args.epochs, args.batch_size = 2, 2048
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


class Run:
    """Objects of a training process."""

    def __init__(self, args, train):
        model, self.criterion = build(args)
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        self.privacy_engine = PrivacyEngine()
        private = self.privacy_engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(train, batch_size=args.batch_size),
            criterion=self.criterion,
            noise_multiplier=args.sigma,
            max_grad_norm=args.max_grad_norm,
            grad_sample_mode=args.mode,
        )
        if args.mode == "ghost":
            self.model, self.optimizer, self.criterion, self.loader = private
        else:
            self.model, self.optimizer, self.loader = private
        self.noise_scheduler = StepNoise(self.optimizer, step_size=2, gamma=0.9)

    def train(self, epochs):
        steps, start = 0, time.perf_counter()
        for _ in range(epochs):
            for inputs, targets in self.loader:
                self.criterion(self.model(inputs), targets).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                steps += 1
            self.noise_scheduler.step()
        return steps, time.perf_counter() - start

    def save(self, path, epoch):
        self.privacy_engine.save_checkpoint(
            path=path,
            module=self.model,
            optimizer=self.optimizer,
            noise_scheduler=self.noise_scheduler,
            checkpoint_dict={"epoch": epoch, "noise_multiplier": self.optimizer.noise_multiplier},
        )

    def resume(self, path):
        checkpoint = self.privacy_engine.load_checkpoint(
            path=path, module=self.model, optimizer=self.optimizer, noise_scheduler=self.noise_scheduler
        )
        self.optimizer.noise_multiplier = checkpoint["noise_multiplier"]
        return checkpoint["epoch"]


def main(argv=None):
    args = parse(argv)
    torch.manual_seed(args.seed)
    train, test = load(args)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        run = Run(args, train)
        steps, seconds = run.train(args.epochs // 2)
        spent, found = run.privacy_engine.get_epsilon(args.delta), accuracy(run.model, test)
        run.save(path, epoch=args.epochs // 2)
        print(f"epoch {args.epochs // 2}: test {found:.1%}, epsilon {spent:.2f}; saved")
        del run

        run = Run(args, load(args)[0])  # a new process would start here
        epoch = run.resume(path)
        assert accuracy(run.model, test) == found
        assert run.privacy_engine.get_epsilon(args.delta) == spent
        more_steps, more_seconds = run.train(args.epochs - epoch)

    result = {
        "example": "checkpoint_and_resume",
        "steps": steps + more_steps,
        "seconds": seconds + more_seconds,
        "accuracy": accuracy(run.model, test),
        "epsilon": run.privacy_engine.get_epsilon(args.delta),
        "noise_multiplier": run.optimizer.noise_multiplier,
    }
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
