"""Draws line charts as inline SVG. Classes of the page set the colors, for its light and its dark scheme."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Points = tuple[tuple[float, float], ...]

_WIDTH, _HEIGHT = 520.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 76.0, 24.0, 18.0, 48.0
_TICKS = 5


@dataclass(frozen=True)
class Axis:
    """Axis: its label, its range, and the format of its numbers."""

    label: str
    low: float
    high: float
    form: Callable[[float], str]

    def ticks(self) -> list[float]:
        """Returns about five round numbers inside the range."""
        span = self.high - self.low
        unit = 10.0 ** math.floor(math.log10(span / _TICKS))
        step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= _TICKS)
        count = math.floor(span / step + 1e-9)
        return [self.low + step * i for i in range(count + 1)]


@dataclass(frozen=True)
class Line:
    """Line of a chart; ``style`` is a class of the page: "line", "reference" or "target"."""

    points: Points
    style: str
    label: str = ""


def line_chart(title: str, x: Axis, y: Axis, lines: list[Line], area_under: Line | None = None) -> str:
    """Returns a chart as an SVG element."""
    frame = _Frame(x, y)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{title}"><title>{title}</title>',
        *_axis_x(frame),
        *_axis_y(frame),
    ]
    if area_under is not None and area_under.points:
        (first, _), (last, _) = area_under.points[0], area_under.points[-1]
        outline = (*area_under.points, (last, y.low), (first, y.low))
        parts.append(f'<polygon class="area" points="{frame.path(outline)}"/>')
    for line in lines:
        parts.append(f'<polyline class="{line.style}" points="{frame.path(line.points)}"/>')
        if line.label:
            parts.append(_label(frame, line))
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Frame:
    x: Axis
    y: Axis

    def at(self, x: float, y: float) -> tuple[float, float]:
        share_x = (x - self.x.low) / (self.x.high - self.x.low)
        share_y = (y - self.y.low) / (self.y.high - self.y.low)
        inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + share_x * inner_width, _HEIGHT - _BOTTOM - share_y * inner_height

    def path(self, points: Points) -> str:
        return " ".join(f"{px:.1f},{py:.1f}" for px, py in (self.at(x, y) for x, y in points))


def _axis_x(frame: _Frame) -> list[str]:
    base = _HEIGHT - _BOTTOM
    parts = [f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>']
    for tick in frame.x.ticks():
        px, _ = frame.at(tick, frame.y.low)
        parts.append(
            f'<text class="tick" x="{px:.1f}" y="{base + 18}" text-anchor="middle">{frame.x.form(tick)}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="name" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{frame.x.label}</text>')
    return parts


def _axis_y(frame: _Frame) -> list[str]:
    parts = []
    for tick in frame.y.ticks():
        _, py = frame.at(frame.x.low, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{py + 4:.1f}" text-anchor="end">{frame.y.form(tick)}</text>'
        )
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text class="name" transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{frame.y.label}</text>'
    )
    return parts


def _label(frame: _Frame, line: Line) -> str:
    x, y = line.points[-1]
    px, py = frame.at(x, y)
    dot = f'<circle class="dot" cx="{px:.1f}" cy="{py:.1f}" r="3.5"/>' if line.style == "line" else ""
    # Above the end of the line if it fits there, else below.
    below = py < _TOP + 18
    text_y = py + (18 if below else -9)
    return f'{dot}<text class="value" x="{px - 6:.1f}" y="{text_y:.1f}" text-anchor="end">{line.label}</text>'
