"""Draws docs/kernels.svg from the committed rows: `python docs/plot_kernels.py`."""

from __future__ import annotations

import json
from pathlib import Path

from kernels.predict import RESULTS
from provisioning.plot import Panel, svg

_LINES = {"ours": ("ours",), "torch compile": ("torch compile",), "torch graph": ("torch graph",)}
"""Name of a line -> how the names of the rows start of which it shows the fastest."""


def draw() -> str:
    """Neck and head at T = 40 over the batch, in microseconds."""
    found = json.loads((RESULTS / "h200-t40.json").read_bytes())
    rows = [row for row in found["rows"] if not row["implementation"].startswith("ours,")]
    batches = sorted({row["batch"] for row in rows})
    panels = []
    for op, title in (("neck", "neck, us"), ("head", "CTC head, us")):
        lines = {
            name: [
                min(
                    row["us"]
                    for row in rows
                    if (row["op"], row["batch"]) == (op, batch) and row["implementation"].startswith(starts)
                )
                for batch in batches
            ]
            for name, starts in _LINES.items()
        }
        panels.append(Panel(title, lines, ".0f"))
    title = "T = 40, 2 KV heads, H200, medians of CUDA-graph replays"
    return svg(title, "batch", [str(batch) for batch in batches], panels)


if __name__ == "__main__":
    Path(__file__).with_name("kernels.svg").write_text(draw())
