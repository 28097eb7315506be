"""A device that reports to upstream and follows it, over real HTTP: both are stopped, lost and started again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.upstream import MemoryUpstream
from support.daemon import Daemon, StartDaemon, appliance
from support.processes import eventually
from support.upstream import ServedUpstream

from appliance.adapters.exchange import Reply
from models.sync import Desired, Ordered

pytestmark = pytest.mark.journey

DEVICE = "dock-7"
LOST = Reply(reason="the connection broke", unsure=True)


@pytest.fixture
def upstream() -> Iterator[ServedUpstream]:
    with ServedUpstream(MemoryUpstream(), token="t-1") as served:  # noqa: S106 - of nobody
        yield served


def connect(start_null: StartDaemon, upstream: ServedUpstream, tmp_path: Path, **settings: str) -> Daemon:
    """A device that reports to `upstream` every second."""
    token = tmp_path / "token"
    token.write_text("t-1")
    told = {"URL": upstream.url, "TOKEN_FILE": str(token), "INTERVAL_S": "1", "TELEMETRY_S": "1", **settings}
    return start_null(
        APPLIANCE_DEVICE_ID=DEVICE, **{f"APPLIANCE_UPSTREAM__{name}": value for name, value in told.items()}
    )


def payloads(upstream: ServedUpstream, kind: str) -> list[Any]:
    """What the server has of one kind."""
    return [item.payload for item in upstream.memory.of(DEVICE, kind)]


def test_a_device_reports_obeys_and_follows_its_upstream(
    start_null: StartDaemon, upstream: ServedUpstream, tmp_path: Path
) -> None:
    memory = upstream.memory
    memory.order(DEVICE, Ordered("c-1", {"id": "c-1", "command": "status"}))
    memory.desired[DEVICE] = Desired("e-1", {"null": "2"}, labels={"site": "north"})
    daemon = connect(start_null, upstream, tmp_path)
    eventually(lambda: payloads(upstream, "telemetry"), "figures arrive", 30)
    eventually(lambda: payloads(upstream, "command_result"), "the order is answered", 30)
    eventually(lambda: not memory.pending(DEVICE), "the order is acknowledged", 30)
    eventually(lambda: memory.batches[-1].etag == "e-1", "it holds the desired state", 30)
    (result,) = payloads(upstream, "command_result")
    assert (result["id"], result["status"], result["result"]["device_id"]) == ("c-1", "done", DEVICE)
    eventually(lambda: memory.states[DEVICE]["ready"], "the state says that it is ready", 30)  # type: ignore[index] # JSON
    status = daemon.status()["sync"]
    assert (status["works"], status["reason"], status["desired"]["pins"]) == (True, None, {"null": "2"})
    assert "appliance_sync_works 1.0" in daemon.http.get("/metrics").text
    assert f"upstream {upstream.url}: works" in appliance("status", "--url", daemon.url).stdout


@pytest.mark.long
def test_what_happens_while_the_server_is_away_or_the_device_is_killed_arrives_once(
    start_null: StartDaemon, upstream: ServedUpstream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = upstream.memory
    upstream.token = "another"  # noqa: S105 - of nobody: it lets nobody in
    daemon = connect(start_null, upstream, tmp_path, LONGEST_RETRY_S="0.5")
    eventually(lambda: "give it a token" in (daemon.status()["sync"]["reason"] or ""), "it says what it lacks", 30)
    eventually(lambda: daemon.status()["sync"]["spool"]["waiting"]["telemetry"] >= 2, "figures wait", 30)
    daemon.kill()
    daemon = connect(start_null, upstream, tmp_path, LONGEST_RETRY_S="0.5")
    waiting = daemon.status()["sync"]["spool"]["waiting"]["telemetry"]
    assert waiting >= 1
    upstream.token = "t-1"  # noqa: S105
    eventually(lambda: len(payloads(upstream, "telemetry")) > waiting, "all of it arrives", 30)
    moments = [payload["at"] for payload in payloads(upstream, "telemetry")]
    assert len(moments) == len(set(moments))
    assert len({key[1] for key in memory.items}) == 1
    first = eventually(lambda: (now := daemon.status()["sync"])["exchanges"] and now, "exchanges come off", 30)
    last = eventually(
        lambda: (now := daemon.status()["sync"])["exchanges"] >= first["exchanges"] + 10 and now, "more of them", 60
    )
    moved_bytes = (last["moved_bytes"] - first["moved_bytes"]) / (last["exchanges"] - first["exchanges"])
    with capsys.disabled():
        print(f"\nsync: {moved_bytes:.0f} bytes an exchange with one telemetry item, 600 of them for headers")
    assert moved_bytes < 3000
