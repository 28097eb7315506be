"""What waits for the broker, or for upstream: what is sent when, what is dropped for whom, when to try again. Pure.

Results (of orders, of deployments) and alarms are never dropped. Telemetry and samples are: the oldest first when there
is too much, samples before telemetry, and what is older than anybody wants. After an outage results go first, then
telemetry in the order in which it was made, at a limited pace. No more than a window of publications is ever
unacknowledged, and while a connection stands none is sent twice: so a slow broker gets no storm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from appliance.core.clock import RELEASED_AT

FIRST_RETRY_S, LEAST_RETRY_S = 1.0, 0.1
_ONE = 1 - 1e-6
"""Less than one token by rounding is one."""
_TOPIC_BYTES = 64
"""What a publication takes besides its payload, about."""


class Kind(str, Enum):
    """What a publication is worth; the more, the earlier it is sent."""

    DEPLOYMENT = "deployment"
    ALARM = "alarm"
    RESULT = "result"
    TELEMETRY = "telemetry"
    SAMPLE = "sample"


SPARE = (Kind.SAMPLE, Kind.TELEMETRY)
"""They make room for others, the first first."""


@dataclass(frozen=True, slots=True)
class Publication:
    """One that waits. `number` grows with each."""

    number: int
    kind: Kind
    topic: str
    payload: bytes
    at: float
    """When it was made, in Unix seconds."""
    correlation: bytes | None = None
    traceparent: str = ""
    """Where it stands in somebody's trace, for whoever reads it; empty where it does in none."""

    @property
    def size_bytes(self) -> int:
        """What it counts for."""
        return len(self.payload) + _TOPIC_BYTES


@dataclass(frozen=True, slots=True)
class Rules:
    """What an operator allows."""

    most_bytes: int = 16 * 2**20
    """Of all that waits; telemetry and samples make room."""
    age_s: float = 7 * 86400.0
    """Older telemetry is dropped."""
    sample_age_s: float = 86400.0
    """Older samples are dropped."""
    window: int = 16
    """Publications that may be unacknowledged; below the 20 that brokers usually take."""
    replay_per_s: float = 50.0
    """Pace of telemetry after an outage."""


class Outbox:
    """What waits. Moments of sending are monotonic seconds; ages are counted in Unix seconds."""

    def __init__(self, rules: Rules = Rules(), waiting: Iterable[Publication] = ()) -> None:
        """Go on with what waited before, by number."""
        self._rules = rules
        self._waiting: dict[Kind, dict[int, Publication]] = {kind: {} for kind in Kind}
        self._in_flight: set[int] = set()
        self.size_bytes = 0
        self.dropped: Counter[str] = Counter()
        """Telemetry and samples that were given up, by reason: `full`, `old`."""
        self._tokens, self._filled_at = float(rules.window), 0.0
        for publication in waiting:
            self._add(publication)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Publication]:
        """In the order in which they are sent."""
        for kind in Kind:
            yield from self._waiting[kind].values()

    def __contains__(self, number: int) -> bool:
        return any(number in waiting for waiting in self._waiting.values())

    def count(self, kind: Kind) -> int:
        """How many of a kind wait, those in flight included."""
        return len(self._waiting[kind])

    @property
    def in_flight(self) -> int:
        """How many were sent and are not acknowledged."""
        return len(self._in_flight)

    def put(self, publication: Publication) -> list[int]:
        """One more; the numbers of those that were dropped for it, which may be its own."""
        self._add(publication)
        return self._trimmed()

    def aged(self, wall: float) -> list[int]:
        """Drop telemetry and samples that are too old; their numbers.

        What was made while the clock showed a time that is known to be past (a board without a battery begins in
        1970) has no known age, and waits for room only.
        """
        ages_s = {Kind.TELEMETRY: self._rules.age_s, Kind.SAMPLE: self._rules.sample_age_s}
        old = [
            number
            for kind, age_s in ages_s.items()
            for number, one in self._waiting[kind].items()
            if RELEASED_AT <= one.at < wall - age_s and number not in self._in_flight
        ]
        for number in old:
            self._remove(number)
        self.dropped["old"] += len(old)
        return old

    def take(
        self, now: float, window: int, kinds: Collection[Kind] = tuple(Kind), most_bytes: float = math.inf
    ) -> list[Publication]:
        """What is to be sent now, which is in flight from then on; `window` is the broker's, where it is smaller.

        Of `kinds` only, and no more than `most_bytes` together: what does not fit lets smaller ones pass.
        """
        self._fill(now)
        room = min(window, self._rules.window) - len(self._in_flight)
        taken: list[Publication] = []
        for publication in self:
            if len(taken) >= room:
                break
            if publication.number in self._in_flight or publication.kind not in kinds:
                continue
            if publication.size_bytes > most_bytes:
                continue
            if publication.kind is Kind.TELEMETRY:
                if self._tokens < _ONE:
                    break
                self._tokens -= 1
            most_bytes -= publication.size_bytes
            taken.append(publication)
        self._in_flight |= {publication.number for publication in taken}
        return taken

    def wait_s(self, now: float, window: int) -> float | None:
        """Seconds until `take` has more; None while only an acknowledgement, or something new, can bring it."""
        if len(self) == len(self._in_flight) or len(self._in_flight) >= min(window, self._rules.window):
            return None
        self._fill(now)
        return max(0.0, (1 - self._tokens) / self._rules.replay_per_s)

    def settled(self, number: int) -> None:
        """The broker has it, or will never take it."""
        self._in_flight.discard(number)
        self._remove(number)

    def disconnected(self) -> list[int]:
        """What was in flight waits again, in its place: nobody knows whether the broker has it.

        The numbers of what is dropped, because now it may be.
        """
        self._in_flight.clear()
        return self._trimmed()

    def _fill(self, now: float) -> None:
        passed_s = max(0.0, now - self._filled_at)
        self._tokens = min(float(self._rules.window), self._tokens + passed_s * self._rules.replay_per_s)
        self._filled_at = now

    def _trimmed(self) -> list[int]:
        dropped = []
        spare = (one for kind in SPARE for one in self._waiting[kind].values())
        free = (one for one in spare if one.number not in self._in_flight)  # the broker may have the others
        over_bytes = self.size_bytes - self._rules.most_bytes
        while over_bytes > 0 and (one := next(free, None)) is not None:
            dropped.append(one.number)
            over_bytes -= one.size_bytes
        for number in dropped:
            self._remove(number)
        self.dropped["full"] += len(dropped)
        return dropped

    def _add(self, publication: Publication) -> None:
        self._waiting[publication.kind][publication.number] = publication
        self.size_bytes += publication.size_bytes

    def _remove(self, number: int) -> None:
        for waiting in self._waiting.values():
            gone = waiting.pop(number, None)
            if gone:
                self.size_bytes -= gone.size_bytes


@dataclass(frozen=True, slots=True)
class Reconnect:
    """How often in a row a connection came to nothing."""

    failures: int = 0

    def after(self, up_s: float, longest_s: float) -> Reconnect:
        """After one more connection, which was up for `up_s`; one that lasted forgives what was before.

        One that a broker accepts and closes at once is none, and neither is one that another device takes away.
        """
        return Reconnect(1 if up_s > longest_s else self.failures + 1)

    def wait_s(self, chance: float, longest_s: float) -> float:
        """Before the next try, by a `chance` from 0 to 1: a fleet that lost its broker must not return all at once."""
        most_s = min(longest_s, FIRST_RETRY_S * 2.0 ** min(self.failures - 1, 30))
        return LEAST_RETRY_S + chance * max(0.0, most_s - LEAST_RETRY_S)
