"""Small networks that break naive hooks: in-place operations, concatenation and depthwise layers."""

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 3
IMAGE = (3, 6, 6)


class ResidualBlock(nn.Module):
    """Residual block with in-place activations and addition."""

    def __init__(self, width, norm):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x
        return self.relu(out)


class DenseBlock(nn.Module):
    """DenseNet block with in-place activations before each layer."""

    def __init__(self, width, norm):
        super().__init__()
        self.norms = nn.ModuleList([norm(width), norm(2 * width)])
        self.convs = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(2 * width, width, 1)])

    def forward(self, x):
        features = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(F.relu(norm(torch.cat(features, 1)), inplace=True)))
        return torch.cat(features, 1)


class InvertedBlock(nn.Module):
    """Inverted residual block with a depthwise convolution and in-place ReLU6."""

    def __init__(self, width, norm):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, 2 * width, 1, bias=False),
            norm(2 * width),
            nn.ReLU6(inplace=True),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width, bias=False),
            norm(2 * width),
            nn.Hardswish(inplace=True),
            nn.Conv2d(2 * width, width, 1, bias=False),
            norm(width),
        )

    def forward(self, x):
        return x + self.layers(x)


def network(block, *, norm=nn.BatchNorm2d, width=4, blocks=1):
    """Returns a network with a stem, blocks and a head, and batch norm by default."""
    torch.manual_seed(3)
    out = width * (3 if block is DenseBlock else 1)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        norm(width),
        nn.ReLU(inplace=True),
        *(block(width, norm) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(out, CLASSES),
    )


BLOCKS = {"resnet": ResidualBlock, "densenet": DenseBlock, "mobilenet": InvertedBlock}


def images(rows=12):
    """Returns small images and their classes."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(rows, *IMAGE, generator=generator)
    return torch.utils.data.TensorDataset(inputs, torch.randint(0, CLASSES, (rows,), generator=generator))
