"""The report of a build or a verification: one HTML file that needs nothing else, and the same as plain data.

Plots are inline SVG in the colours of the page, which follows the reader's light or dark setting. No script, no
font, no address. All texts are escaped: names of sources come from whoever made the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeAlias

from models import schema
from models.bundle import Check

Comparison: TypeAlias = Mapping[str, Any]
"""What `accuracy.compare` or `accuracy.compare_pages` says."""
Cost: TypeAlias = Mapping[str, Mapping[str, float]]
"""Graph -> "original" or precision -> a number."""

ORIGINAL = "original"
"""Stands where a precision stands, for the graph as published."""
_WIDTH = 760
_LABEL = 190
_NUMBER = 150
_ROW = 24
_MOST_SOURCES = 20
_TICKS = 4

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --faint: #66707f; --line: #d5dae1; --paper: #ffffff;
  --original: #8b95a5; --packed: #2563c9; --other: #b06a12; --bad: #c0262d; --good: #1b7f4b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --faint: #97a1b0; --line: #38414e; --paper: #14181e;
  --original: #7c8798; --packed: #6aa2ff; --other: #e0a04a; --bad: #ff7b7b; --good: #5fcf95; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 860px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--faint); font-weight: 600; } td { overflow-wrap: break-word; }
.missed { color: var(--bad); font-weight: 600; } .met { color: var(--good); } .faint { color: var(--faint); }
svg { width: 100%; height: auto; display: block; margin: .6rem 0; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); } svg .faint { fill: var(--faint); }
.axis { stroke: var(--line); } .zero { stroke: var(--faint); } .limit { stroke: var(--bad); stroke-dasharray: 4 3; }
.range { stroke: var(--packed); stroke-width: 3; stroke-linecap: round; } .point { fill: var(--packed); }
.original { fill: var(--original); } .packed { fill: var(--packed); } .other { fill: var(--other); }
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured, ready to be shown."""

    title: str
    facts: Mapping[str, str]
    lines: Mapping[str, Comparison]
    """Graph and precision, in words -> how its reading of lines compares with the original's."""
    pages: Mapping[str, Comparison]
    """What was packed, in words -> how the reading of whole pages compares with the original's."""
    checks: Sequence[tuple[str, Check]]
    latency_ms: Cost
    size_bytes: Cost
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Graph and precision, in words -> the reason why it was not packed."""
    notes: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data; shares between 0 and 1."""
        data: dict[str, Any] = schema.dump(self)
        limits = [{"graph": label} | schema.dump(check) | {"resolved": check.resolved} for label, check in self.checks]
        return {name: value for name, value in data.items() if name != "checks"} | {"limits": limits}

    def to_html(self) -> str:
        """One page."""
        sections = [
            _table(
                ("", ""),
                [(f"<span class=faint>{escape(name)}</span>", escape(text)) for name, text in self.facts.items()],
            ),
            self._limits(),
            self._lines(),
            self._sources("Exact match by source", self.lines, "exact", "lines"),
            self._pages(),
            self._sources("Page texts found by source", self.pages, "found", "texts"),
            self._cost(),
            self._notes(),
        ]
        return (
            f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{escape(self.title)}</title>\n"
            '<meta name=viewport content="width=device-width, initial-scale=1">\n'
            f"<style>{_STYLE}</style>\n<h1>{escape(self.title)}</h1>\n"
            + "\n".join(filter(None, sections))
            + "\n</html>\n"
        )

    def _limits(self) -> str:
        rows = [
            (
                escape(label),
                escape(check.name),
                _percent(check.limit),
                _percent(check.measured),
                " to ".join(map(_percent, check.interval)),
                "<span class=met>met</span>" if check.met else "<span class=missed>missed</span>",
                ("" if check.resolved else "<span class=missed>not resolved by</span> ") + escape(check.on),
            )
            for label, check in self.checks
        ]
        rows += [
            (escape(label), "<span class=missed>left out</span>", "", "", "", "", escape(reason))
            for label, reason in self.left_out.items()
        ]
        if not rows:
            return ""
        said = (
            "A limit called a drop holds for the loss against the original, another for the share that must be kept. "
            "The point estimate decides. The 95 % interval is paired; a limit below one standard error is marked."
        )
        head = ("graph", "limit", "allowed", "measured", "95 % interval", "", "measured on")
        return f"<h2>Limits</h2><p>{said}</p>" + _table(head, rows)

    def _lines(self) -> str:
        if not self.lines:
            return ""
        rows = []
        for label, one in self.lines.items():
            original, packed = one["original"], one["packed"]
            rows += [
                (
                    escape(f"{label.partition(' ')[0]} original"),
                    _percent(original["exact"]),
                    _percent(original["cer"]),
                    str(original["lines"]),
                    "",
                ),
                (
                    escape(label),
                    _percent(packed["exact"]),
                    _percent(packed["cer"]),
                    str(packed["lines"]),
                    _percent(one["agreement"]),
                ),
            ]
        exact = [self._change(label, one, "exact", "exact_drop", -1) for label, one in self.lines.items()]
        cer = [self._change(label, one, "cer", "cer_drop", 1) for label, one in self.lines.items()]
        return (
            "<h2>Reading lines</h2>"
            + _table(("", "exact match", "character error rate", "lines", "read alike"), dict.fromkeys(rows))
            + _forest("Change of exact match, points; right is better", exact)
            + _forest("Change of character error rate, points; left is better", cer)
        )

    def _pages(self) -> str:
        if not self.pages:
            return ""
        rows = []
        for label, one in self.pages.items():
            for what, name in (("original", "all graphs original"), ("packed", label)):
                rows.append((escape(name), _percent(one[what]["found"]), str(one[what]["lines"])))
        changes = [self._change(label, one, "found", "found_drop", -1) for label, one in self.pages.items()]
        return (
            "<h2>Reading pages</h2><p>Share of the labelled texts that the whole reading task finds. "
            "A row that names one graph has all others as published.</p>"
            + _table(("", "found", "labelled texts"), dict.fromkeys(rows))
            + _forest("Change of texts found, points; right is better", changes)
        )

    def _change(self, label: str, one: Comparison, what: str, limit: str, sign: int) -> _Range:
        """A row of a forest plot; the limit is shown where one check of this graph has it."""
        low, high = one["interval"][what]
        allowed = [check.limit for graph, check in self.checks if check.name == limit and graph == label]
        return _Range(
            label, one["packed"][what] - one["original"][what], low, high, sign * allowed[0] if allowed else None
        )

    def _sources(self, title: str, compared: Mapping[str, Comparison], what: str, of: str) -> str:
        if not compared:
            return ""
        shown = []
        sources: Mapping[str, Any] = next(iter(compared.values()))["by_source"]
        rows = []
        for source, both in sources.items():
            others = {label: one["by_source"][source]["packed"][what] for label, one in compared.items()}
            bars = [("original", both["original"][what], "original")]
            bars += [
                (label, share, "packed" if i % 2 == 0 else "other") for i, (label, share) in enumerate(others.items())
            ]
            count = both["original"]["lines"]
            shown.append((count, source, bars))
            rows.append((escape(source), str(count), *(_percent(share) for _, share, _ in bars)))
        most = sorted(shown, key=lambda one: -one[0])[:_MOST_SOURCES]
        left = (
            f"<p class=faint>The {_MOST_SOURCES} largest of {len(shown)} sources.</p>" if len(shown) > len(most) else ""
        )
        groups = [
            (f"{source} ({count})", [(name, share, _percent(share), kind) for name, share, kind in bars])
            for count, source, bars in most
        ]
        head = ("source", of, "original", *compared)
        return f"<h2>{escape(title)}</h2>" + _bars(title, groups, 1.0) + left + _table(tuple(map(escape, head)), rows)

    def _cost(self) -> str:
        parts = []
        for title, cost, unit, scale in (
            ("Latency of one run on one thread", self.latency_ms, "ms", 1.0),
            ("Bytes of the graph", self.size_bytes, "MB", 1e-6),
        ):
            groups = [
                (
                    graph,
                    [
                        (
                            name,
                            value * scale,
                            f"{value * scale:.2f} {unit}",
                            "original" if name == ORIGINAL else "packed",
                        )
                        for name, value in numbers.items()
                    ],
                )
                for graph, numbers in cost.items()
            ]
            if groups:
                parts.append(f"<h2>{escape(title)}</h2>" + _bars(title, groups, None))
        said = "<p>The best of several runs, measured in turn on the machine above; on any other it means nothing.</p>"
        return "".join(parts) + (said if self.latency_ms else "")

    def _notes(self) -> str:
        rows = [(escape(name), escape(text)) for name, text in self.notes.items()]
        return "<h2>Provenance and notes</h2>" + _table(("", ""), rows) if rows else ""


@dataclass(frozen=True, slots=True)
class _Range:
    """A row of a forest plot, as shares."""

    label: str
    change: float
    low: float
    high: float
    limit: float | None


def _percent(share: float) -> str:
    return f"{share * 100:.2f} %"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]] | Mapping[tuple[str, ...], None]) -> str:
    """A table of cells that are HTML already."""
    top = "<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>" if any(head) else ""
    return (
        "<table>"
        + top
        + "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        + "</table>"
    )


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role=img aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _forest(title: str, rows: Sequence[_Range]) -> str:
    """Changes with their intervals around zero; a dashed line is the limit."""
    most = max(0.001, *(abs(x) for row in rows for x in (row.change, row.low, row.high, row.limit or 0.0))) * 1.1
    left, right = _LABEL, _WIDTH - _NUMBER

    def at(share: float) -> float:
        return left + (share / most + 1) / 2 * (right - left)

    bottom = 26 + _ROW * len(rows)
    parts = [
        f"<text class=faint x=0 y=14>{escape(title)}</text>",
        f"<line class=zero x1={at(0):.1f} x2={at(0):.1f} y1=22 y2={bottom} />",
    ]
    for tick in range(-_TICKS, _TICKS + 1, 2):
        share = most * tick / _TICKS
        parts.append(
            f"<text class=faint text-anchor=middle x={at(share):.1f} y={bottom + 16}>{share * 100:+.2f}</text>"
        )
    for i, row in enumerate(rows):
        middle = 26 + _ROW * (i + 0.5)
        parts += [
            f"<text x=0 y={middle + 4}>{escape(_short(row.label))}</text>",
            f"<line class=range x1={at(row.low):.1f} x2={at(row.high):.1f} y1={middle} y2={middle} />",
            f"<circle class=point cx={at(row.change):.1f} cy={middle} r=5 />",
            (
                f"<text x={right + 10} y={middle + 4}>"
                f"{row.change * 100:+.2f} ({row.low * 100:+.2f}, {row.high * 100:+.2f})</text>"
            ),
        ]
        if row.limit is not None:
            parts.append(
                f"<line class=limit x1={at(row.limit):.1f} x2={at(row.limit):.1f} y1={middle - 10} y2={middle + 10} />"
            )
    return _svg(title, bottom + 24, parts)


def _bars(title: str, groups: Sequence[tuple[str, Sequence[tuple[str, float, str, str]]]], most: float | None) -> str:
    """Groups of horizontal bars: label, value, number in words, class; up to `most`, or the largest of the group."""
    parts = []
    y = 4.0
    left, right = _LABEL + 90, _WIDTH - _NUMBER
    for label, bars in groups:
        parts.append(f"<text x=0 y={y + 13}>{escape(_short(label))}</text>")
        full = most or max((value for _, value, _, _ in bars), default=0.0) or 1.0
        for name, value, said, kind in bars:
            width = max(value, 0.0) / full * (right - left)
            parts += [
                f"<text class=faint x={_LABEL - 20} y={y + 13}>{escape(_short(name, 16))}</text>",
                f"<rect class={kind} x={left} y={y + 3} width={width:.1f} height=13 rx=2 />",
                f"<text x={left + width + 6:.1f} y={y + 13}>{escape(said)}</text>",
            ]
            y += 19
        y += 8
    return _svg(title, y, parts)


def _short(label: str, most: int = 26) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"
