"""Whatever happens between a device and its upstream, all that matters arrives, each once, and in its order."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from doubles.upstream import LOST, MemoryUpstream
from hypothesis import given, settings
from hypothesis import strategies as st
from support.syncing import DEVICE, device

from appliance.adapters.exchange import Reply

pytestmark = pytest.mark.property

FAULTS = {
    "lost": LOST,
    "busy": Reply(503, b"{}", retry_after_s=30.0),
    "broken": Reply(500, b"oops"),
    "nonsense": Reply(200, b"<html>"),
    "too large": Reply(413, b'{"error": "too large", "most_bytes": 3000}'),
}
STARTS = st.lists(
    st.lists(st.sampled_from(["put", "put", "figures", "time", "away", "back", *FAULTS]), max_size=12),
    min_size=1,
    max_size=3,
)


async def lived(starts: list[list[str]], folder: Path, upstream: MemoryUpstream) -> dict[str, int]:
    """Start a device for each list and let its steps happen; how many of each kind were put."""
    count = {"deployment": 0, "telemetry": 0}
    for steps in [*starts, ["back", "end"]]:
        with device(folder, upstream, longest_retry_s=60.0, interval_s=600.0) as one:
            for step in steps:
                if step in {"put", "figures"}:
                    kind = "deployment" if step == "put" else "telemetry"
                    one.sync.put(kind, {"n": count[kind]})
                    count[kind] += 1
                elif step in FAULTS:
                    upstream.faults.append(FAULTS[step])
                elif step in {"away", "back"}:
                    upstream.down = step == "away"
                await one.live({"time": 100.0, "end": 4000.0}.get(step, 0.05))
    return count


@settings(max_examples=20)
@given(starts=STARTS)
def test_what_a_device_has_to_tell_arrives_once_and_in_order_through_faults_and_restarts(
    starts: list[list[str]],
) -> None:
    upstream = MemoryUpstream()
    with tempfile.TemporaryDirectory() as folder:
        count = asyncio.run(lived(starts, Path(folder), upstream))
    for kind, many in count.items():
        assert [item.payload["n"] for item in upstream.of(DEVICE, kind)] == list(range(many))
