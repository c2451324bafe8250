"""Image features without learned parameters: wavelet moduli and averages (Bruna and Mallat 2013).

The features of an image depend on that image only, so they have no privacy cost. At a small epsilon, a linear model on
them is more accurate than a network that must learn to find edges (Tramèr and Boneh 2021).

Axes: N images, C maps, S side of a map.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 500  # images per chunk, because intermediate results are many times larger
_FINE, _COARSE = (7, 0.8, 3 * math.pi / 4), (13, 1.6, 3 * math.pi / 8)  # side, width of the envelope, frequency


def fixed_features(images: Tensor, directions: int = 4) -> Tensor:
    """Computes responses of fixed filters, normalized within each image.

    Args:
        images: ``(N, 1, 28, 28)``.
        directions: Number of edge directions.

    Returns:
        ``(N, F)`` with F = 49 (1 + 2 directions + directions squared): averages over 7 x 7 positions of the image, of
        its edges at two scales, and of the edges of its fine edges. Each of these maps has mean 0 and variance 1.
    """
    fine, coarse = (_wavelets(*scale, directions).to(images.device) for scale in (_FINE, _COARSE))
    return torch.cat([_features(chunk, fine, coarse) for chunk in images.split(_CHUNK)])


def _features(images_N1SS: Tensor, fine: Tensor, coarse: Tensor) -> Tensor:
    edges = _edges(images_N1SS, fine, stride=1)
    maps = [
        _blurred(images_N1SS, width=3.2, stride=4),
        _blurred(edges, width=3.2, stride=4),
        _blurred(_edges(images_N1SS, coarse, stride=2), width=1.6, stride=2),
        _blurred(_edges(edges, coarse, stride=2), width=1.6, stride=2),
    ]
    features_NCSS = torch.cat(maps, dim=1)
    return F.group_norm(features_NCSS, features_NCSS.shape[1]).flatten(1)


def _edges(maps_NCSS: Tensor, wavelets: Tensor, *, stride: int) -> Tensor:
    """Returns the moduli of complex wavelet responses, with those of each map in successive channels."""
    real, imaginary = _filtered(maps_NCSS, wavelets, stride).chunk(2, dim=2)
    return (real.square() + imaginary.square()).sqrt().flatten(1, 2)


def _blurred(maps_NCSS: Tensor, *, width: float, stride: int) -> Tensor:
    radius = int(2 * width)
    gaussian = torch.exp(-(torch.arange(-radius, radius + 1.0, device=maps_NCSS.device) ** 2) / (2 * width**2))
    gaussian = gaussian / gaussian.sum()
    return _filtered(maps_NCSS, torch.outer(gaussian, gaussian)[None, None], stride).squeeze(2)


def _filtered(maps_NCSS: Tensor, filters: Tensor, stride: int) -> Tensor:
    """Applies each filter to each map. Returns axes N, C, filter, S, S."""
    radius = filters.shape[-1] // 2
    padded = F.pad(maps_NCSS, [radius] * 4, mode="reflect")
    return F.conv2d(padded.flatten(0, 1).unsqueeze(1), filters, stride=stride).unflatten(0, maps_NCSS.shape[:2])


def _wavelets(side: int, width: float, frequency: float, directions: int) -> Tensor:
    """Returns Morlet wavelets in several directions: the real parts, then the imaginary parts."""
    ticks = torch.arange(side) - side // 2.0
    y, x = torch.meshgrid(ticks, ticks, indexing="ij")
    waves = []
    for direction in range(directions):
        angle = math.pi * direction / directions
        along, across = math.cos(angle) * x + math.sin(angle) * y, math.cos(angle) * y - math.sin(angle) * x
        slant = 4 / directions
        envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * width**2))
        wave = envelope * torch.exp(1j * frequency * along)
        # With mean 0, so that a constant area has no response.
        wave = wave - envelope * (wave.sum() / envelope.sum())
        waves.append(wave * slant / (2 * math.pi * width**2))
    stacked = torch.stack(waves)
    return torch.cat([stacked.real, stacked.imag]).unsqueeze(1)
