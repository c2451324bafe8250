"""Models in mode ``whole_model``, and steps that count how often activations are stored and samples run again."""

import torch
from reference import clipped_sum, per_sample_gradients
from torch import nn
from torch.nn import functional as F

from dpengine import Flat, PerSampleGradientClipper
from dpengine.grad_samplers import functional, per_sample_forward

WIDTH, WORDS = 6, 11


F64 = torch.float64


class Tied(nn.Module):
    """Holds one layer and one weight under two names, and a buffer. Returns integers, too."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight
        self.one, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)
        self.two = nn.Sequential(self.one, nn.Tanh())
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, words):
        hidden = self.two(self.one(self.words(words)) * self.scale)
        return {"logits": self.head(hidden), "best": hidden.argmax(-1), "tanh": hidden}


class Noisy(nn.Module):
    """Returns the noise that it draws, or takes it as an input."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, inputs, mask=None):
        hidden = self.one(inputs)
        mask = F.dropout(torch.ones_like(hidden), 0.5) if mask is None else mask
        return {"logits": self.two((hidden * mask).sin()), "mask": mask}


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, inputs):
        return {"logits": self.two((self.one(inputs) * self.scale).sigmoid()).sigmoid()}


class ReturnsItsLoss(Plain):
    def forward(self, inputs):
        return super().forward(inputs)["logits"].square().sum()


class ReturnsHalfPrecision(Plain):
    def forward(self, inputs):
        return {"logits": super().forward(inputs)["logits"].bfloat16()}


def words(rows):
    return torch.randint(WORDS, (rows, 4))


def features(rows):
    return torch.randn(rows, 4, WIDTH, dtype=F64)


def loss(output, weights):
    return sum((output[key].flatten(1).sin().sum(1) * weights).sum() for key in ("logits", "tanh") if key in output)


def weights(rows):
    return torch.logspace(-1, 1, rows, dtype=F64)


class Setting:
    """A model and its clipper.

    Attributes:
        replays: Number of runs of samples in backward passes.
        stored: Whether each forward pass stored activations.
    """

    def __init__(self, model, monkeypatch):
        self.model, self.replays, self.stored, self.max_norm = model, 0, [], 1.0
        self.clipper = PerSampleGradientClipper(
            model, Flat(self.max_norm), loss_reduction="sum", grad_sample_mode="whole_model"
        )
        call_with_tensors = functional.call_with_tensors

        def counted(*args):
            self.replays += 1
            return call_with_tensors(*args)

        monkeypatch.setattr(functional, "call_with_tensors", counted)
        by_rows = per_sample_forward.PerSampleForward.__call__

        def noted(*args):
            output, drawn = by_rows(*args)
            self.stored.append(drawn is not None and bool(drawn.pullbacks))
            return output, drawn

        monkeypatch.setattr(per_sample_forward.PerSampleForward, "__call__", noted)

    def finish(self, expected, tolerance=1e-6):
        """Compares the clipped sum with the expected one, and makes a step."""
        self.clipper.clip_and_accumulate()
        self.clipper.pre_step()
        for name, total in expected.items():
            grad = self.model.get_parameter(name).grad
            torch.testing.assert_close(grad.double(), total, rtol=tolerance, atol=tolerance)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.05)
        self.model.zero_grad()

    def step(self, inputs, tolerance=1e-6, forward=None):
        """Makes a step, and compares its clipped sum with that of a loop over samples."""
        output = (forward or self.model)(inputs)
        given = (inputs, output["mask"].detach()) if "mask" in output else (inputs,)
        expected = expected_sum(self.model, given, self.max_norm)
        loss(output, weights(len(inputs)).to(output["logits"].dtype)).backward()
        self.finish(expected, tolerance)


def expected_sum(model, inputs, max_norm):
    return clipped_sum(per_sample_gradients(unhooked(model), loss, inputs, weights(len(inputs[0]))), max_norm)


def unhooked(model):
    """Returns a model of the same class with the same parameters and buffers, without the hooks of the clipper."""
    other = type(model)().double()
    other.load_state_dict(model.state_dict())
    for parameter, own in zip(other.parameters(), model.parameters(), strict=True):
        parameter.requires_grad_(own.requires_grad)
    return other
