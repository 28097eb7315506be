"""What a benchmark found, as one HTML file that needs nothing else, and as plain data.

Plots are inline SVG in the colours of the page, which follows the reader's light or dark setting. No script, no
font, no address; all texts are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from appliance.bench.elasticity import Point, Verdict
from appliance.bench.measure import LATEST_S, Findings

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 760, 240, 70, 36, 16
_TICKS = 4
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --faint: #66707f; --line: #d5dae1; --paper: #fff; --have: #2563c9;
  --law: #b06a12; --bad: #c0262d; --good: #1b7f4b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --faint: #97a1b0; --line: #38414e; --paper: #14181e;
  --have: #6aa2ff; --law: #e0a04a; --bad: #ff7b7b; --good: #5fcf95; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 860px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th, .faint { color: var(--faint); } .pass { color: var(--good); } .fail { color: var(--bad); font-weight: 600; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--faint); }
.axis { stroke: var(--line); } .limit { stroke: var(--bad); stroke-dasharray: 4 3; } .have { fill: var(--have); }
.law { fill: none; stroke: var(--law); stroke-width: 2; }
"""


def number(value: float) -> str:
    """Three digits that count, and no more places than they need."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    return f"{value:,.{min(max(2 - math.floor(math.log10(abs(value))), 0), 6)}f}"


def cells(verdict: Verdict) -> tuple[str, str, str, str, str]:
    """What, have, the pass line, the verdict and the note, as text."""
    unit = f" {verdict.unit}" if verdict.unit else ""
    have = "left out" if verdict.have is None else number(verdict.have) + unit
    if verdict.have is not None and verdict.unit == "%":
        have = f"{verdict.have:.3f} %"  # near 100 the places after the point are what counts
    sign = "at least" if verdict.at_least else "at most"
    line = "" if verdict.limit is None else f"{sign} {verdict.limit:g}{unit}"
    return verdict.what, have, line, {True: "pass", False: "FAIL", None: "-"}[verdict.passed], verdict.note


def to_json(found: Findings) -> dict[str, Any]:
    """Everything as plain data; what JSON has no number for is null."""
    return {
        "passed": found.passed,
        "facts": found.facts,
        "dimensions": {
            one.name: [
                {**asdict(verdict), "have": _finite(verdict.have), "passed": verdict.passed} for verdict in one.verdicts
            ]
            for one in found.dimensions
        },
        "rates": [{"per_s": one.load, "p99_ms": _finite(one.p99_ms)} for one in found.rates],
        "poisson": [asdict(one) for one in found.poisson],
    }


def to_html(found: Findings) -> str:
    """One page."""
    facts = "".join(f"<tr><td class=faint>{escape(key)}<td>{escape(text)}" for key, text in found.facts.items())
    said = "<p class=pass>Everything that was measured passes." if found.passed else "<p class=fail>Something failed."
    parts = [f"<h1>Benchmark</h1>{said}<table>{facts}</table>"]
    for one in found.dimensions:
        rows = "".join(map(_row, one.verdicts))
        parts.append(
            f"<h2>{escape(one.name)}</h2><table><tr><th><th>measured<th>pass line<th><th>{rows}</table>"
            + _plot(one.name, found)
        )
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8><title>Benchmark</title>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"
    )


def _row(verdict: Verdict) -> str:
    what, have, line, mark, note = map(escape, cells(verdict))
    return f'<tr><td>{what}<td>{have}<td>{line}<td class="{mark.lower()}">{mark}<td class=faint>{note}'


def _plot(name: str, found: Findings) -> str:
    if name == "Speed" and found.rates:
        points = sorted(found.rates, key=lambda one: one.load)
        return _curve("P99 in ms by requests a second", points, "{:.0f}/s", LATEST_S * 1e3)
    if name == "Elasticity" and found.poisson:
        return _curve("P99 in ms by load: measured (dots), M/D/c (line)", found.poisson, "{:.0%}")
    return ""


def _curve(title: str, points: Sequence[Point], form: str, limit: float | None = None) -> str:
    """Dots of what was measured over their loads, the law as a line; what is above the plot is drawn at its top."""
    laws = [one.law_ms for one in points if one.law_ms is not None]
    measured = [one.p99_ms for one in points if math.isfinite(one.p99_ms)]
    top = 2.5 * limit if limit else 1.15 * max(laws + measured, default=1.0)
    right = 1.05 * max(one.load for one in points)

    def x(load: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _TOP) * load / right

    def y(ms: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - min(ms, top) / top)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role=img><title>{escape(title)}</title>']
    for i in range(_TICKS + 1):
        at, load = top * i / _TICKS, right * i / _TICKS
        parts += [
            f'<line class=axis x1={_LEFT} x2={_WIDTH - _TOP} y1="{y(at):.1f}" y2="{y(at):.1f}"/>',
            f'<text x={_LEFT - 8} y="{y(at) + 4:.1f}" text-anchor=end>{number(at)}</text>',
            f'<text x="{x(load):.1f}" y={_HEIGHT - _BOTTOM + 18} text-anchor=middle>{form.format(load)}</text>',
        ]
    if limit:
        parts.append(f'<line class=limit x1={_LEFT} x2={_WIDTH - _TOP} y1="{y(limit):.1f}" y2="{y(limit):.1f}"/>')
    if laws:
        line = " ".join(f"{x(one.load):.1f},{y(one.law_ms):.1f}" for one in points if one.law_ms is not None)
        parts.append(f'<polyline class=law points="{line}"/>')
    parts += [
        f'<circle class=have r=4 cx="{x(one.load):.1f}" cy="{y(one.p99_ms):.1f}"><title>'
        f"{form.format(one.load)}: {number(one.p99_ms)} ms</title></circle>"
        for one in points
    ]
    return f"<p class=faint>{escape(title)}</p>" + "".join(parts) + "</svg>"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
