"""What waits for the broker: in which order and at what pace it is sent, and what is given up."""

from __future__ import annotations

import pytest

from appliance.core.clock import RELEASED_AT
from appliance.core.outbox import Kind, Outbox, Publication, Reconnect, Rules

pytestmark = pytest.mark.unit

NOW = RELEASED_AT + 1e6
HOUR_S = 3600.0
WIDE = 2**16


def telemetry(number: int, at: float = NOW, size_bytes: int = 2000) -> Publication:
    return Publication(number, Kind.TELEMETRY, "t", b"x" * size_bytes, at)


def result(number: int, at: float = NOW) -> Publication:
    return Publication(number, Kind.RESULT, "r", b"{}", at)


def numbers(publications: list[Publication]) -> list[int]:
    return [one.number for one in publications]


def replayed(outbox: Outbox, began: float) -> list[tuple[float, int]]:
    """When what is sent to a broker that acknowledges at once, in seconds since the connection."""
    now, sent = began, []
    while len(outbox):
        for one in outbox.take(now, WIDE):
            sent.append((now - began, one.number))
            outbox.settled(one.number)
        now += outbox.wait_s(now, WIDE) or 0.0
    return sent


def test_a_night_without_a_link_is_told_in_the_morning_in_order_and_at_a_pace() -> None:
    outbox = Outbox(Rules(replay_per_s=50))
    minutes = range(12 * 60)
    for minute in minutes:
        outbox.put(telemetry(minute, NOW + minute * 60))
        outbox.aged(NOW + minute * 60)
    outbox.put(result(10_000, NOW))
    sent = replayed(outbox, began=12 * HOUR_S)
    assert [number for _at, number in sent] == [10_000, *minutes]
    for second in range(20):
        assert sum(second <= at < second + 1 for at, _number in sent) <= 50 + 16 + 1
    assert sent[-1][0] == pytest.approx((720 - 16) / 50, abs=0.1)
    assert not outbox.dropped.total()


def test_a_month_without_a_link_keeps_the_newest_telemetry_and_every_result() -> None:
    rules = Rules(most_bytes=2**20)
    outbox = Outbox(rules)
    for hour in range(30 * 24):
        outbox.put(telemetry(2 * hour, NOW + hour * HOUR_S))
        outbox.put(result(2 * hour + 1, NOW + hour * HOUR_S))
        outbox.aged(NOW + hour * HOUR_S)
    assert outbox.size_bytes <= rules.most_bytes
    assert outbox.count(Kind.RESULT) == 720
    ages_h = [720 - 1 - one.number // 2 for one in outbox if one.kind is Kind.TELEMETRY]
    assert ages_h == sorted(range(len(ages_h)), reverse=True)
    assert max(ages_h) <= rules.age_s / HOUR_S
    assert outbox.dropped["old"] + outbox.count(Kind.TELEMETRY) == 720


def test_room_is_made_by_the_oldest_telemetry_and_never_by_results() -> None:
    outbox = Outbox(Rules(most_bytes=5000))
    assert [outbox.put(one) for one in (result(1), telemetry(2), telemetry(3), telemetry(4))] == [[], [], [], [2]]
    assert [one.number for one in outbox] == [1, 3, 4]
    assert outbox.dropped["full"] == 1
    assert outbox.put(telemetry(5, size_bytes=6000)) == [3, 4, 5]


def test_what_was_made_before_the_clock_was_set_has_no_age() -> None:
    outbox = Outbox(Rules(age_s=60))
    outbox.put(telemetry(1, at=12.0))
    outbox.put(telemetry(2, at=NOW))
    assert outbox.aged(NOW + 61) == [2]
    assert len(outbox) == 1


def test_no_more_than_a_window_is_unacknowledged_however_slow_the_broker_is() -> None:
    outbox = Outbox(Rules(window=3), [result(number) for number in range(10)])
    assert numbers(outbox.take(0.0, WIDE)) == [0, 1, 2]
    assert outbox.take(1000.0, WIDE) == []
    assert outbox.wait_s(1000.0, WIDE) is None
    outbox.settled(1)
    assert numbers(outbox.take(1000.0, WIDE)) == [3]
    assert outbox.take(1000.0, 2) == []


def test_after_a_connection_is_lost_what_was_not_acknowledged_is_sent_again_in_its_place() -> None:
    outbox = Outbox(Rules(window=3), [result(number) for number in range(5)])
    outbox.take(0.0, WIDE)
    outbox.settled(1)
    outbox.disconnected()
    assert numbers(outbox.take(1.0, WIDE)) == [0, 2, 3]


def test_what_is_in_flight_is_not_dropped_because_the_broker_may_have_it() -> None:
    outbox = Outbox(Rules(most_bytes=5000, age_s=60))
    for number in (1, 2):
        outbox.put(telemetry(number))
    assert numbers(outbox.take(0.0, 1)) == [1]
    assert outbox.put(telemetry(3)) == [2]
    assert outbox.aged(NOW + 61) == [3]


def test_a_fleet_returns_spread_out_and_a_device_tries_for_ever() -> None:
    tries, longest = Reconnect(), 60.0
    most = []
    for _ in range(100):
        tries = tries.after(0.0, longest)
        most.append(tries.wait_s(1.0, longest))
        assert tries.wait_s(0.0, longest) == pytest.approx(0.1)
    assert most == pytest.approx([1, 2, 4, 8, 16, 32, *[60] * 94])


def test_a_broker_that_hangs_up_at_once_is_not_tried_faster_and_one_that_lasted_is() -> None:
    tries = Reconnect()
    for _ in range(5):
        tries = tries.after(2.0, 60.0)
    assert tries.wait_s(1.0, 60.0) == pytest.approx(16)
    assert tries.after(61.0, 60.0).wait_s(1.0, 60.0) == pytest.approx(1)


def test_a_longest_wait_below_the_first_is_kept() -> None:
    assert Reconnect().after(0.0, 0.05).wait_s(1.0, 0.05) <= 0.1
