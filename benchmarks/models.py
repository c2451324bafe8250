"""Models to benchmark, in ordinary PyTorch code that was not written for private training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(in_features: int = 784, width: int = 1024, depth: int = 2) -> nn.Module:
    """A multilayer perceptron with ``depth`` hidden layers; 784-1024-1024-10 by default."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(in_features, width), nn.ReLU()]
        in_features = width
    return nn.Sequential(*layers, nn.Linear(in_features, 10))


def cnn() -> nn.Module:
    """The 26,010-parameter tanh network that is common for private training on MNIST."""
    return nn.Sequential(
        *[nn.Conv2d(1, 16, 8, 2, 3), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.Tanh()],
        *[nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)],
    )


class Block(nn.Module):
    """A pre-activation residual block with group norm."""

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(16, in_channels), nn.GroupNorm(16, out_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.skip = (
            nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            if in_channels != out_channels
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(x))
        skipped = self.skip(out if isinstance(self.skip, nn.Conv2d) else x)
        return self.conv2(F.relu(self.norm2(self.conv1(out)))) + skipped


def wide_resnet() -> nn.Module:
    """WRN-16-4 with group norm, for 32 x 32 images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
    in_channels = 16
    for out_channels, stride in ((64, 1), (128, 2), (256, 2)):
        layers += [Block(in_channels, out_channels, stride), Block(out_channels, out_channels, 1)]
        in_channels = out_channels
    tail = [nn.GroupNorm(16, 256), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)]
    return nn.Sequential(*layers, *tail)


class Bottleneck(nn.Module):
    """A residual block of ResNet-50 with group norm."""

    def __init__(self, in_channels: int, width: int, stride: int):
        super().__init__()
        out_channels = 4 * width
        self.body = nn.Sequential(
            *[nn.Conv2d(in_channels, width, 1, bias=False), nn.GroupNorm(width // 4, width), nn.ReLU()],
            *[nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.GroupNorm(width // 4, width), nn.ReLU()],
            *[nn.Conv2d(width, out_channels, 1, bias=False), nn.GroupNorm(width // 4, out_channels)],
        )
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or in_channels != out_channels:
            self.skip = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.GroupNorm(width // 4, out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet_50(width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """ResNet-50 with group norm, ten classes."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.GroupNorm(width // 4, width), nn.ReLU()]
    layers += [nn.MaxPool2d(3, 2, 1)]
    in_channels = width
    for stage, depth in enumerate(depths):
        for i in range(depth):
            layers += [Bottleneck(in_channels, width << stage, 2 if stage > 0 and i == 0 else 1)]
            in_channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, 10))


def bottlenecks(width: int = 4, depth: int = 16) -> nn.Module:
    """A model with as many blocks as ResNet-50, all of one small width: as many layer calls, little arithmetic."""
    blocks = [Bottleneck(4 * width, width, 1) for _ in range(depth)]
    return nn.Sequential(
        nn.Conv2d(3, 4 * width, 3, bias=False), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)
    )


class EncoderLayer(nn.Module):
    """A pre-norm transformer layer; ``causal`` masks later positions."""

    def __init__(self, width: int, heads: int, *, causal: bool = False):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """BERT-mini with a classifier over the mean of all positions."""

    def __init__(self, words: int = 8000, width: int = 256, depth: int = 4, heads: int = 4, time: int = 128):
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(time, width)
        self.layers = nn.Sequential(*[EncoderLayer(width, heads) for _ in range(depth)])
        self.head = nn.Linear(width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        return self.head(self.layers(self.words(ids) + self.positions(positions)).mean(dim=1))


class TiedDecoder(nn.Module):
    """GPT-mini: a causal language model whose head and word embedding are one parameter."""

    def __init__(self, words: int = 8000, width: int = 256, depth: int = 4, heads: int = 4, time: int = 256):
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(time, width)
        nn.init.normal_(self.words.weight, std=0.02)  # as GPT-2: with std 1 the tied logits are of size sqrt(width)
        self.layers = nn.Sequential(*[EncoderLayer(width, heads, causal=True) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        return self.head(self.norm(self.layers(self.words(ids) + self.positions(positions))))


class BiasedAttention(nn.Module):
    """T5 attention: unscaled, with a relative position bias that all layers share."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.pairs = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        nn.init.normal_(self.query.weight, std=width**-0.5 * (width // heads) ** -0.5)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None = None) -> Tensor:
        split = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # noqa: E731
        q, (k, v) = split(self.query(x)), map(split, self.pairs(memory).chunk(2, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.out(attended.transpose(1, 2).flatten(2))


class BiasedLayer(nn.Module):
    """A T5 1.1 layer: self-attention, optional cross-attention, and a gated feed-forward network."""

    def __init__(self, width: int, heads: int, *, has_cross_attention: bool):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3 if has_cross_attention else 2))
        self.attention = BiasedAttention(width, heads)
        self.cross_attention = BiasedAttention(width, heads) if has_cross_attention else None
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((width, 2 * width), (width, 2 * width), (2 * width, width))
        )

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, bias)
        if self.cross_attention is not None and memory is not None:
            x = x + self.cross_attention(self.norms[1](x), memory)
        normed = self.norms[-1](x)
        return x + self.down(F.gelu(self.gate(normed)) * self.up(normed))


class BiasedStack(nn.Module):
    """T5 encoder or decoder, with its relative position biases."""

    def __init__(self, width: int, depth: int, heads: int, *, decodes: bool):
        super().__init__()
        self.table, self.norm, self.decodes = nn.Embedding(32, heads), nn.RMSNorm(width), decodes
        self.layers = nn.ModuleList(BiasedLayer(width, heads, has_cross_attention=decodes) for _ in range(depth))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        position = torch.arange(x.shape[1], device=x.device)
        distance = position[None] - position[:, None]
        bias = self.table(distance.clamp(-16, 15) + 16).permute(2, 0, 1).unsqueeze(0)
        if self.decodes:
            bias = bias + torch.zeros(len(x), 1, *distance.shape, device=x.device).masked_fill(distance > 0, -1e9)
        for layer in self.layers:
            x = layer(x, bias, memory)
        return self.norm(x)


class SequenceToSequence(nn.Module):
    """T5-small 1.1 with a smaller vocabulary. Encoder and decoder get the same sequence."""

    def __init__(self, words: int = 8000, width: int = 512, depth: int = 6, heads: int = 8):
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        nn.init.normal_(self.words.weight, std=0.1)
        self.encoder = BiasedStack(width, depth, heads, decodes=False)
        self.decoder = BiasedStack(width, depth, heads, decodes=True)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.words(ids)
        return self.head(self.decoder(embedded, self.encoder(embedded)))


class VisionTransformer(nn.Module):
    """ViT-Ti/4 for 32 x 32 images: class token and position embedding are parameters of the model itself."""

    def __init__(self, width: int = 192, depth: int = 6, heads: int = 3, *, side: int = 32, patch: int = 4):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + (side // patch) ** 2, width))
        self.layers = nn.Sequential(*[EncoderLayer(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1) + self.pos_embed
        return self.head(self.norm(self.layers(tokens))[:, 0])


class Recurrent(nn.Module):
    """An LSTM classifier over vectors."""

    def __init__(self, width: int = 256):
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class WordAverage(nn.Module):
    """A linear classifier over the mean of word embeddings."""

    def __init__(self, words: int = 20_000, width: int = 128):
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).mean(dim=1))


class LowRankLinear(nn.Module):
    """A frozen linear layer plus a trained low-rank product of two others (LoRA, Hu et al. 2022)."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        # LoRA initializes `up` to zero, but then `down` would have no gradient to compare before the first step.
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def lora(rank: int = 8) -> nn.Module:
    """BERT-mini, frozen, with low-rank updates on all linear layers."""
    model = Encoder().requires_grad_(False)
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, module in linears:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, LowRankLinear(module, rank))
    return model


def bitfit() -> nn.Module:
    """BERT-mini in which only the biases and the head are trained (Ben Zaken et al. 2022)."""
    model = Encoder()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or name.startswith("head."))
    return model


class Maxout(nn.Module):
    """The largest of several linear maps (Goodfellow et al. 2013): a layer for which no library has a grad sampler."""

    def __init__(self, in_features: int, out_features: int, pieces: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(pieces, in_features, out_features) * in_features**-0.5)
        self.bias = nn.Parameter(torch.zeros(pieces, out_features))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.einsum("bti,pio->btpo", x, self.weight) + self.bias).amax(dim=2)


class MaxoutNet(nn.Module):
    """Two maxout layers over a sequence, and a linear head over its mean."""

    def __init__(self, width: int = 128, pieces: int = 4):
        super().__init__()
        self.layers = nn.Sequential(Maxout(width, width, pieces), Maxout(width, width, pieces))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(dim=1))


class OneLayer(nn.Module):
    """A transformer layer and a head, for the scaling curves."""

    def __init__(self, width: int = 256, heads: int = 4):
        super().__init__()
        self.layer, self.head = EncoderLayer(width, heads), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(dim=1))
