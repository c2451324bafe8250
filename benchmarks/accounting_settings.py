"""Settings on which accountants are compared: classes of them, and random candidates with fixed seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PATH = Path(__file__).with_name("accounting_truths.json")

Kind = tuple[float, float, int]  # rate, noise multiplier, steps

_MAX_CANDIDATES = 8  # for each required setting
_DELTAS = (1e-5, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10)


@dataclass(frozen=True)
class Setting:
    """Run whose epsilon an accountant computes.

    Attributes:
        kinds: Rate, noise multiplier and number of steps of each kind of release.
        delta: Delta at which epsilon is computed.
        relation: "add_remove" or "replace_one".
        rare: Whether large privacy losses are so rare that the central limit theorem is useless.
    """

    kinds: tuple[Kind, ...]
    delta: float
    relation: str = "add_remove"
    rare: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns the setting as in the file of truths."""
        return {"kinds": self.kinds, "delta": self.delta, "relation": self.relation}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Setting:
        """Restores a setting from the result of `as_json`."""
        return cls(tuple((q, sigma, steps) for q, sigma, steps in row["kinds"]), row["delta"], row["relation"])

    @property
    def key(self) -> str:
        """Returns the key that identifies a setting."""
        return json.dumps(self.as_json())

    def __str__(self) -> str:
        """Describes the setting."""
        kinds = " and ".join(f"q={q:g}, σ={sigma:g}, {steps:,} steps" for q, sigma, steps in self.kinds)
        return f"{kinds}, δ={self.delta:g}{', replace-one' if self.relation == 'replace_one' else ''}"


@dataclass(frozen=True)
class Class:
    """Class of settings: the required number, and a function that draws one at random."""

    required: int
    draw: Callable[[np.random.Generator], Setting]


def candidates(name: str) -> Iterator[Setting]:
    """Yields settings of a class whose epsilon may be in range; always the same ones."""
    rng = np.random.default_rng([20, list(CLASSES).index(name)])
    kind, tried = CLASSES[name], 0
    while tried < _MAX_CANDIDATES * kind.required:
        setting = kind.draw(rng)
        if setting.rare or 3e-4 < _rough_epsilon(setting) < 3e3:
            tried += 1
            yield setting


def _rough_epsilon(setting: Setting) -> float:
    """Returns epsilon by the central limit theorem, to skip settings that are far out of range."""
    square = 0.0
    for rate, sigma, steps in setting.kinds:
        square += steps * rate**2 * math.expm1(min(sigma**-2, 300)) if rate < 1 else steps / sigma**2
        square = min(square, sum(count / noise**2 for _, noise, count in setting.kinds))
    return square / 2 + math.sqrt(square * 2 * math.log(1 / setting.delta)) if square > 1e-14 else 1.0


def _log(rng: np.random.Generator, low: float, high: float) -> float:
    """Returns a log-uniform number, rounded to three digits."""
    return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")


def _kind(rng: np.random.Generator, rate: tuple, sigma: tuple, steps: tuple) -> Kind:
    return _log(rng, *rate), _log(rng, *sigma), round(_log(rng, *steps))


def _any_delta(rng: np.random.Generator) -> float:
    return float(f"1e-{int(rng.choice([2, 3, 5, 5, 6, 8, 10, 12, 15, 20, 40, 70, 100]))}")


def _usual_delta(rng: np.random.Generator) -> float:
    return float(rng.choice(_DELTAS))


def _plain(rate: tuple, sigma: tuple, steps: tuple, delta: Callable = _usual_delta, rare: bool = False) -> Callable:
    return lambda rng: Setting((_kind(rng, rate, sigma, steps),), delta(rng), rare=rare)


def _with_epsilon(low: float, high: float, draw: Callable) -> Callable:
    """Draws again until epsilon is roughly in the range."""

    def drawn(rng: np.random.Generator) -> Setting:
        while not low < _rough_epsilon(setting := draw(rng)) < high:
            pass
        return setting

    return drawn


def _tiny_delta(rng: np.random.Generator) -> float:
    return float(f"1e-{int(rng.choice([15, 20, 30, 40, 60, 80, 100]))}")


def _large_delta(rng: np.random.Generator) -> float:
    return float(rng.choice([1e-2, 5e-3, 2e-3, 1e-3]))


def _histories(rng: np.random.Generator) -> Setting:
    """Draws two or three kinds of releases; one of them may be over the full batch."""
    kinds = [_kind(rng, (1e-3, 0.2), (0.6, 8), (50, 5e3)) for _ in range(int(rng.integers(2, 4)))]
    if rng.random() < 0.4:
        kinds[-1] = (1.0, _log(rng, 5, 100), round(_log(rng, 1, 30)))
    return Setting(tuple(kinds), _usual_delta(rng))


def _replacements(rng: np.random.Generator) -> Setting:
    """Draws a single step, a full-batch run, or an ordinary run."""
    choice = rng.random()
    if choice < 0.2:
        kind = _log(rng, 1e-3, 0.9), _log(rng, 0.3, 10), 1
    elif choice < 0.4:
        kind = 1.0, _log(rng, 1, 300), round(_log(rng, 1, 1e4))
    else:
        kind = _kind(rng, (1e-3, 0.3), (0.7, 10), (30, 2e4))
    return Setting((kind,), _usual_delta(rng), "replace_one")


_ORDINARY = (1e-3, 0.1), (0.5, 5.0), (100, 5e4)

CLASSES = {
    "single step": Class(55, _plain((1e-7, 0.99), (0.1, 100), (1, 1), _any_delta)),
    "full batch": Class(45, _plain((1.0, 1.0), (0.1, 1000), (1, 1e6), _any_delta)),
    "ordinary": Class(45, _plain(*_ORDINARY)),
    "epsilon below 0.01": Class(25, _with_epsilon(1e-3, 8e-3, _plain((1e-6, 0.3), (1, 1000), (50, 1e5)))),
    "epsilon above 50": Class(25, _with_epsilon(60, 1500, _plain((1e-3, 0.9), (0.3, 20), (50, 1e6), _any_delta))),
    "many steps": Class(25, _plain((1e-6, 0.3), (0.5, 300), (1e5, 1e6))),
    "tiny noise": Class(20, _plain((1e-4, 0.5), (0.1, 0.4), (2, 1e3))),
    "tiny delta": Class(25, _plain((1e-3, 0.5), (0.6, 100), (100, 1e5), _tiny_delta)),
    "tiny rate": Class(15, _plain((1e-7, 1e-4), (0.3, 3), (300, 1e6), rare=True)),
    "large rate": Class(25, _plain((0.3, 0.99), (1, 100), (2, 1e4), _any_delta)),
    "few steps, rare losses": Class(
        25, _plain((1e-7, 1e-5), (0.3, 4), (2, 60), lambda rng: max(_tiny_delta(rng), 1e-80), rare=True)
    ),
    "large delta": Class(20, _plain((1e-3, 0.5), (0.6, 30), (30, 1e5), _large_delta)),
    "several kinds": Class(25, _histories),
    "replace-one": Class(25, _replacements),
}
