"""A device and its upstream in handed-in time: whatever is lost on the way, nothing is missing or there twice.

Past 400 lines because each is a story of a few lines, and all need the same device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from doubles.upstream import DOWN, LOST, MemoryUpstream
from support.syncing import DEVICE, device, lived, told

from appliance.adapters.exchange import Reply
from appliance.core.outbox import Rules
from models.sync import MOST_ITEMS, Desired, Opinion, Ordered

pytestmark = pytest.mark.unit

DAY_S = 86400.0


@pytest.fixture
def upstream() -> MemoryUpstream:
    return MemoryUpstream()


@lived
async def test_what_a_device_has_to_tell_arrives_once_and_is_forgotten_here(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    with device(tmp_path, upstream) as one:
        for n in range(600):
            one.sync.put("telemetry", {"n": n})
        await one.live(120)
        assert told(upstream) == list(range(600))
        assert not any(one.sync.status()["spool"]["waiting"].values())
        assert one.sync.status()["works"]


@lived
async def test_what_matters_most_goes_first(tmp_path: Path, upstream: MemoryUpstream) -> None:
    with device(tmp_path, upstream) as one:
        for kind in ("sample", "telemetry", "command_result", "alarm", "deployment"):
            one.sync.put(kind, {"n": kind})
        await one.live(1)
        (first, *_rest) = upstream.batches
        assert [item.kind for item in first.items] == [
            "deployment",
            "alarm",
            "command_result",
            "telemetry",
            "sample",
        ]


@lived
async def test_what_no_row_would_hold_is_shortened_or_given_up_and_holds_up_nothing(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    safe: list[str] = []
    with device(tmp_path, upstream, labels={str(n): "x" * 90 for n in range(1000)}) as one:
        one.sync.put("command_result", {"n": 1, "result": {"log": "x" * 100_000}})
        one.sync.put("alarm", {"n": 2, **{f"key {i}": i for i in range(20_000)}}, safe=lambda: safe.append("alarm"))
        one.sync.put("telemetry", {"n": 3})
        await one.live(10)
        assert told(upstream) == [1, 3]
        (result,) = upstream.of(DEVICE, "command_result")
        assert result.payload == {"n": 1, "result": {}, "shortened": ["result"]}
        assert (safe, one.sync.status()["too_large"], one.sync.status()["works"]) == (["alarm"], 1, True)
        assert upstream.states[DEVICE]["shortened"] == ["labels"]  # type: ignore[index] # a table


@lived
async def test_what_is_urgent_does_not_wait_for_the_next_round(tmp_path: Path, upstream: MemoryUpstream) -> None:
    with device(tmp_path, upstream, interval_s=3600.0) as one:
        await one.live(10)
        one.sync.put("telemetry", {"n": 1})
        await one.live(10)
        assert told(upstream) == []
        one.sync.put("alarm", {"n": 2})
        await one.live(1)
        assert told(upstream) == [1, 2]


@lived
async def test_a_server_that_is_gone_for_days_is_asked_rarely_and_told_everything_that_must_not_be_lost(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    rules = Rules(most_bytes=100_000, window=MOST_ITEMS, replay_per_s=1e6)
    with device(tmp_path, upstream, rules=rules, longest_retry_s=900.0) as one:
        upstream.down = True
        asked = [0]
        exchange = one.sync._exchange  # noqa: SLF001 - counts what goes out

        def counted(document: bytes) -> Reply:
            asked[0] += 1
            return exchange(document)

        one.sync._exchange = counted  # noqa: SLF001
        for hour in range(48):
            one.sync.put("deployment", {"n": hour})
            for minute in range(60):
                one.sync.put("telemetry", {"n": hour * 60 + minute, "figures": "x" * 500})
            await one.live(3600)
        assert 48 <= asked[0] < 48 * 20
        status = one.sync.status()
        assert not status["works"]
        assert "does not answer (connection refused)" in status["reason"]
        assert status["spool"]["waiting"]["deployment"] == 48
        assert status["spool"]["waiting_bytes"] <= rules.most_bytes
        upstream.down = False
        await one.live(1200)
        assert told(upstream, "deployment") == list(range(48))
        newest = told(upstream, "telemetry")
        assert newest == list(range(48 * 60 - len(newest), 48 * 60))
        assert len(newest) > 100
        assert one.sync.status()["works"]


@lived
async def test_an_answer_that_is_lost_after_the_commit_has_the_same_batch_sent_again(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    with device(tmp_path, upstream) as one:
        upstream.faults.extend([LOST, LOST])
        one.sync.put("deployment", {"n": 1})
        await one.live(1)
        one.sync.put("deployment", {"n": 2})  # it may not slip into a batch that is known by its id already
        await one.live(30)
        first, second, third, *_more = upstream.batches
        assert first == second == third
        assert told(upstream) == [1, 2]


@lived
async def test_a_power_cut_before_the_answer_makes_nothing_come_twice(tmp_path: Path, upstream: MemoryUpstream) -> None:
    with device(tmp_path, upstream) as one:
        upstream.faults.append(LOST)
        for n in range(3):
            one.sync.put("deployment", {"n": n})
        await one.live(0.05)
        assert told(upstream) == [0, 1, 2]
    with device(tmp_path, upstream) as one:
        one.sync.put("deployment", {"n": 3})
        await one.live(10)
        assert told(upstream) == [0, 1, 2, 3]


@lived
async def test_numbers_never_come_twice_though_all_was_received_before_the_restart(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    for n in range(3):
        with device(tmp_path, upstream) as one:
            one.sync.put("telemetry", {"n": n})
            await one.live(10)
    assert told(upstream) == [0, 1, 2]
    assert len({key[1] for key in upstream.items}) == 1


@lived
async def test_a_board_that_was_flashed_anew_under_its_name_is_not_taken_for_what_it_was(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    for life in ("before", "after"):
        (tmp_path / life).mkdir()
        with device(tmp_path / life, upstream) as one:
            one.sync.put("alarm", {"n": life})
            await one.live(10)
    assert sorted(told(upstream)) == ["after", "before"]
    assert len({key[1] for key in upstream.items}) == 2


@pytest.mark.parametrize("step_s", [-50 * 365 * DAY_S, -3600.0, 3600.0, 50 * 365 * DAY_S])
@lived
async def test_a_step_of_the_clock_neither_stops_the_exchange_nor_floods_the_server(
    tmp_path: Path, upstream: MemoryUpstream, step_s: float
) -> None:
    with device(tmp_path, upstream, telemetry_s=60.0) as one:
        await one.live(600)
        before = len(upstream.batches)
        one.wall += step_s
        await one.live(600)
        assert 8 <= before <= 13
        assert 8 <= len(upstream.batches) - before <= 13
        assert len(upstream.of(DEVICE, "telemetry")) >= 16


@lived
async def test_the_bytes_of_a_day_are_kept_and_the_last_of_them_for_what_is_urgent(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    day_bytes = 200_000
    with device(tmp_path, upstream, day_bytes=day_bytes) as one:
        moved: list[tuple[float, int]] = []
        spend = one.sync._allowance.spend  # noqa: SLF001 - what is counted is what the double says was moved

        def spent(now: float, size_bytes: int) -> None:
            moved.append((now, size_bytes))
            spend(now, size_bytes)

        one.sync._allowance.spend = spent  # type: ignore[method-assign] # noqa: SLF001
        for hour in range(60):
            for minute in range(30):
                one.sync.put("telemetry", {"n": [hour, minute], "figures": "x" * 2000})
            if hour == 20:
                assert "kept for what is urgent" in one.sync.status()["held"]
                one.sync.put("alarm", {"n": "urgent"})
            await one.live(3600)
        assert told(upstream, "alarm") == ["urgent"]
        for start, _size in moved:
            in_a_day = sum(size for at, size in moved if start <= at < start + DAY_S)
            assert in_a_day <= day_bytes + 2000  # an answer is counted when it has come
        assert sum(size for _at, size in moved) > 1.2 * day_bytes


@lived
async def test_an_answer_that_is_lost_does_not_keep_an_alarm_waiting_for_the_bytes_of_the_next_day(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    with device(tmp_path, upstream, day_bytes=5_000_000, longest_retry_s=1.0, interval_s=3600.0) as one:
        upstream.faults.append(Reply(reason="the connection broke", unsure=True, moved_bytes=3_000_000))
        for n in range(3):
            one.sync.put("sample", {"n": n, "picture": "x" * 1_000_000})
        await one.sync.turn()
        one.sync.put("alarm", {"n": "hot"})
        await one.live(2)
        assert told(upstream, "alarm") == ["hot"]
        await one.live(2 * DAY_S)
        assert told(upstream, "sample") == [0, 1, 2]
        assert not any(one.sync.status()["spool"]["waiting"].values())


@lived
async def test_what_was_spent_of_a_day_is_not_forgotten_by_a_restart(tmp_path: Path, upstream: MemoryUpstream) -> None:
    with device(tmp_path, upstream, day_bytes=100_000) as one:
        for n in range(30):
            one.sync.put("telemetry", {"n": n, "figures": "x" * 2000})
        await one.live(600)
        spent = one.sync.status()["day_spent_bytes"]
        assert spent > 60_000
    with device(tmp_path, upstream, day_bytes=100_000) as one:
        assert one.sync.status()["day_spent_bytes"] >= spent - 100_000 / 16


@lived
async def test_telemetry_waits_for_the_window_and_alarms_do_not(tmp_path: Path, upstream: MemoryUpstream) -> None:
    with device(tmp_path, upstream, window="22:00-04:00") as one:
        one.wall = (one.wall // DAY_S) * DAY_S + 12 * 3600  # noon
        one.sync.put("telemetry", {"n": "figures"})
        one.sync.put("alarm", {"n": "hot"})
        await one.live(9 * 3600)
        assert told(upstream) == ["hot"]
        assert "window 22:00-04:00 opens in" in one.sync.status()["held"]
        await one.live(2 * 3600)
        assert sorted(told(upstream)) == ["figures", "hot"]
        assert one.sync.status()["held"] is None


@lived
async def test_a_clock_that_is_not_right_opens_no_window_and_that_is_said(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    with device(tmp_path, upstream, window="00:00-23:59") as one:
        one.synced = False
        one.sync.put("telemetry", {"n": 1})
        await one.live(600)
        assert told(upstream) == []
        assert "clock is not synchronised" in one.sync.status()["held"]
        one.synced = True
        await one.live(120)
        assert told(upstream) == [1]


@lived
async def test_the_server_says_how_fast_and_how_much(tmp_path: Path, upstream: MemoryUpstream) -> None:
    with device(tmp_path, upstream) as one:
        upstream.most_bytes, upstream.wait_s = 20_000, 30.0
        for n in range(100):
            one.sync.put("alarm", {"n": n, "text": "x" * 900})
        await one.live(1200)
        assert told(upstream) == list(range(100))
        assert all(size <= 20_000 for size, _numbers in upstream.moved)
        assert 6 <= len(upstream.batches) <= 1200 / 30 + 1


@lived
async def test_what_is_urgent_comes_sooner_than_the_server_asks_for_but_not_at_once_again(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    with device(tmp_path, upstream, interval_s=10.0) as one:
        upstream.wait_s = 300.0
        await one.live(1)
        for n in range(10):
            one.sync.put("alarm", {"n": n})
            await one.live(10)
        assert 3 <= len(upstream.batches) <= 5
        await one.live(30)
        assert told(upstream) == list(range(10))


@pytest.mark.parametrize("status", [429, 503])
@lived
async def test_a_server_that_asks_for_time_gets_it(tmp_path: Path, upstream: MemoryUpstream, status: int) -> None:
    with device(tmp_path, upstream) as one:
        upstream.faults.append(Reply(status, b'{"error": "busy"}', retry_after_s=120.0))
        one.sync.put("alarm", {"n": 1})
        await one.live(119)
        assert told(upstream) == []
        assert f"(HTTP {status}: busy)" in one.sync.status()["reason"]
        await one.live(60)
        assert told(upstream) == [1]


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (401, "give it a token"),
        (403, "does not let this device in"),
        (409, "known with another key"),
        (500, "HTTP 500"),
    ],
)
@lived
async def test_a_refusal_says_what_to_do_and_loses_nothing(
    tmp_path: Path, upstream: MemoryUpstream, status: int, sentence: str
) -> None:
    with device(tmp_path, upstream) as one:
        upstream.faults.extend([Reply(status, b"no json")] * 3)
        one.sync.put("alarm", {"n": 1})
        await one.live(0.2)
        assert sentence in one.sync.status()["reason"]
        await one.live(60)
        assert told(upstream) == [1]


@lived
async def test_an_item_that_the_server_does_not_understand_costs_no_other(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    with device(tmp_path, upstream, longest_retry_s=1.0) as one:
        upstream.unknown_kinds = {"sample"}
        for n in range(20):
            one.sync.put("telemetry", {"n": n})
        for n in range(3):
            one.sync.put("sample", {"n": n})
        one.sync.put("alarm", {"n": "hot"})
        await one.live(600)
        assert told(upstream, "telemetry") == list(range(20))
        assert told(upstream, "alarm") == ["hot"]
        assert one.sync.status()["spool"]["refused"] == 3
        assert one.sync.status()["works"]


@lived
async def test_a_server_that_understands_nothing_costs_no_item(tmp_path: Path, upstream: MemoryUpstream) -> None:
    with device(tmp_path, upstream, longest_retry_s=1.0) as one:
        upstream.faults.extend([Reply(400, b'{"error": "what?"}')] * 40)
        for n in range(5):
            one.sync.put("alarm", {"n": n})
        await one.live(600)
        assert told(upstream) == [0, 1, 2, 3, 4]


@lived
async def test_what_upstream_wishes_for_is_followed_kept_over_a_restart_and_not_sent_again(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    upstream.desired[DEVICE] = Desired("e-1", {"m": "2", "other": "1"}, paused=True)
    with device(tmp_path, upstream) as one:
        one.following.own = {"m": "1"}
        await one.live(70)
        assert (one.following.pins, one.following.paused) == ({"m": "2", "other": "1"}, True)
        assert one.sync.status()["desired"]["overruled"] == ["m"]
        assert [batch.etag for batch in upstream.batches] == ["", "e-1"]
    upstream.down = True
    with device(tmp_path, upstream) as one:
        assert (one.following.pins, one.following.paused) == ({"m": "2", "other": "1"}, True)


@lived
async def test_an_order_is_carried_out_once_however_often_it_is_repeated_and_its_answer_comes_back(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    with device(tmp_path, upstream) as one:
        upstream.order(DEVICE, Ordered("c-1", {"id": "c-1", "command": "status"}))
        upstream.faults.extend([LOST])
        await one.live(200)
        assert one.obeyed == ["c-1"]
        (result,) = upstream.of(DEVICE, "command_result")
        assert result.payload == {"id": "c-1", "status": "done", "result": {"well": True}}
        assert upstream.pending(DEVICE) == []
        upstream.order(DEVICE, Ordered("c-2", {"payloadType": "nonsense"}))
        await one.live(200)
        *_first, refused = upstream.of(DEVICE, "command_result")
        assert (refused.payload["id"], refused.payload["status"]) == ("c-2", "refused")
        assert upstream.pending(DEVICE) == []


@lived
async def test_an_opinion_has_its_effect_once_and_is_acknowledged_when_it_is_safe(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    with device(tmp_path, upstream) as one:
        heard: list[Callable[[], None]] = []
        one.sync.on_opinion = lambda _opinion, safe: heard.append(safe)
        upstream.tell(DEVICE, Opinion("s-1", "m", "1", result={"lines": []}))
        await one.live(200)
        assert len(heard) == 1
        assert upstream.pending(DEVICE) == ["s-1"]
        heard[0]()
        await one.live(200)
        assert len(heard) == 1
        assert upstream.pending(DEVICE) == []


@lived
async def test_the_state_is_told_when_it_has_changed_or_the_server_lacks_it(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    with device(tmp_path, upstream, labels={"site": "north"}) as one:
        await one.live(200)
        assert [batch.state is not None for batch in upstream.batches] == [True, False, False, False]
        one.hot = True
        await one.live(70)
        state = upstream.batches[-1].state or upstream.batches[-2].state
        assert state
        assert (state["labels"], state["throttled"]) == ({"site": "north"}, ["hot"])
        upstream.states.clear()
        await one.live(130)
        assert upstream.states


@lived
async def test_what_begins_and_ends_to_be_wrong_is_an_alarm(tmp_path: Path, upstream: MemoryUpstream) -> None:
    with device(tmp_path, upstream) as one:
        for hot in (False, True, True, False):
            one.hot = hot
            one.sync.look()
        await one.live(1)
        alarms = [item.payload for item in upstream.of(DEVICE, "alarm")]
        assert [(one["alarm"], one["over"], one["text"]) for one in alarms] == [
            ("throttled", False, "hot"),
            ("throttled", True, "hot"),
        ]


@lived
async def test_a_server_that_answers_nonsense_is_said_to_and_has_the_batch_again(
    tmp_path: Path, upstream: MemoryUpstream
) -> None:
    with device(tmp_path, upstream) as one:
        upstream.faults.extend([Reply(200, b"<html>"), DOWN])
        one.sync.put("alarm", {"n": 1})
        await one.sync.turn()
        assert "the answer cannot be read" in one.sync.status()["reason"]
        await one.live(60)
        assert told(upstream) == [1]
