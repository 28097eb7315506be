"""Lines over a few named positions, as an SVG file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("#2563c9", "#b06a12", "#8b95a5")
_WIDTH, _HEIGHT = 320, 220
"""Of one panel."""
_LEFT, _TOP, _BOTTOM, _RIGHT = 64, 34, 40, 16
_TITLE = 40
_TICKS = 4


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity."""

    title: str
    lines: Mapping[str, Sequence[float]]
    """Name of a line -> its value at each position."""
    format: str
    """Of the numbers at the axis: ".1%"."""


def svg(title: str, axis: str, positions: Sequence[str], panels: Sequence[Panel]) -> str:
    """Panels side by side, all over the same `positions`, which `axis` names."""
    width, height = _WIDTH * len(panels), _TITLE + _HEIGHT
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = dict(zip(names, _COLOURS, strict=False))
    legend = "".join(
        f'<rect x="{_LEFT + i * 150}" y="24" width="12" height="4" fill="{colour}"/>'
        f'<text x="{_LEFT + 18 + i * 150}" y="30">{escape(name)}</text>'
        for i, (name, colour) in enumerate(colours.items())
    )
    drawn = "".join(
        f'<g transform="translate({i * _WIDTH},{_TITLE})">{_panel(panel, axis, positions, colours)}</g>'
        for i, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#1c2430"><rect width="100%" height="100%" '
        f'fill="#ffffff"/><text x="{_LEFT}" y="15" font-size="14">{escape(title)}</text>{legend}{drawn}</svg>\n'
    )


def _panel(panel: Panel, axis: str, positions: Sequence[str], colours: Mapping[str, str]) -> str:
    values = [value for line in panel.lines.values() for value in line]
    low, high = min(values), max(values)
    margin = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    low, high = low - margin, high + margin

    def x(index: int) -> float:
        return round(_LEFT + (index + 0.5) * (_WIDTH - _LEFT - _RIGHT) / len(positions), 1)

    def y(value: float) -> float:
        return round(_TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = [f'<text x="{_LEFT}" y="{_TOP - 12}" font-weight="600">{escape(panel.title)}</text>']
    for tick in range(_TICKS + 1):
        value = low + (high - low) * tick / _TICKS
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value)}" y2="{y(value)}" stroke="#d5dae1"/>'
            f'<text x="{_LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{escape(format(value, panel.format))}</text>'
        )
    for index, position in enumerate(positions):
        parts.append(
            f'<text x="{x(index)}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{escape(position)}</text>'
        )
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle" fill="#66707f">{escape(axis)}</text>')
    for name, line in panel.lines.items():
        points = [(x(index), y(value)) for index, value in enumerate(line)]
        parts.append(
            f'<polyline fill="none" stroke="{colours[name]}" stroke-width="2" '
            f'points="{" ".join(f"{a},{b}" for a, b in points)}"/>'
        )
        parts += [f'<circle cx="{a}" cy="{b}" r="3" fill="{colours[name]}"/>' for a, b in points]
    return "".join(parts)
