"""The server's side of the sync exchange, in memory: it commits, answers, repeats and refuses as a real one does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import orjson

from appliance.adapters.exchange import Reply
from models import schema, sync
from models.schema import SchemaError
from models.sync import Answer, Batch, Desired, Item, Opinion, Ordered, Refusal

DOWN = Reply(reason="connection refused")
LOST = Reply(reason="the connection broke", unsure=True, moved_bytes=1000)


class MemoryUpstream:
    """One server; devices are what they say, because whoever stands before it knows them."""

    def __init__(self) -> None:
        """It knows no device, and wants nothing."""
        self.items: dict[tuple[str, str, int], Item] = {}
        """What was committed, by device, incarnation and number."""
        self.states: dict[str, object] = {}
        self.batches: list[Batch] = []
        """Each that was committed, repeated ones again."""
        self.desired: dict[str, Desired] = {}
        self.wait_s, self.most_bytes = 0.0, sync.MOST_BYTES
        self.unknown_kinds: set[str] = set()
        """Kinds that this version does not understand."""
        self.faults: deque[Reply] = deque()
        """What comes of the next exchanges instead of an answer; `unsure` ones are committed all the same."""
        self.down = False
        self.moved: list[tuple[int, list[int]]] = []
        """Bytes and numbers of each batch that came, taken or not."""
        self._orders: dict[str, dict[str, Ordered]] = {}
        self._opinions: dict[str, dict[str, Opinion]] = {}
        self._exchanges: dict[str, int] = {}
        self._heard: dict[tuple[str, str], float] = {}
        """When the latest batch of each life was sent."""
        self._newest: dict[str, str] = {}
        """Incarnation of each device."""

    def order(self, device_id: str, ordered: Ordered) -> None:
        """Repeat an order until the device acknowledges it."""
        self._orders.setdefault(device_id, {})[ordered.id] = ordered

    def tell(self, device_id: str, opinion: Opinion) -> None:
        """Repeat an opinion until the device acknowledges it."""
        self._opinions.setdefault(device_id, {})[opinion.sample_id] = opinion

    def of(self, device_id: str, *kinds: str) -> list[Item]:
        """What a device has told, by number."""
        found = [
            (key, one) for key, one in self.items.items() if key[0] == device_id and one.kind in (kinds or sync.KINDS)
        ]
        return [one for _key, one in sorted(found, key=lambda pair: pair[0])]

    def pending(self, device_id: str) -> list[str]:
        """Ids of what is repeated to a device."""
        return [*self._orders.get(device_id, ()), *self._opinions.get(device_id, ())]

    def __call__(self, document: bytes) -> Reply:
        """One exchange, as the device's adapter makes it."""
        if self.down:
            return DOWN
        moved_bytes = len(document) + 600
        fault = self.faults.popleft() if self.faults else None
        if fault and not fault.unsure:
            return fault
        status, body = self.sync(orjson.loads(document), len(document))
        content = orjson.dumps(schema.dump(body))
        return fault or Reply(status, content, moved_bytes=moved_bytes + len(content))

    def sync(self, data: object, size_bytes: int = 0) -> tuple[int, Answer | Refusal]:
        """Status and body for the JSON of a batch that was `size_bytes` long."""
        if size_bytes > self.most_bytes:
            return 413, Refusal("too much at once", self.most_bytes)
        try:
            batch = sync.batch(data)
            self._check(batch.items)
        except SchemaError as error:
            return 400, Refusal(str(error))
        self.moved.append((size_bytes, [item.number for item in batch.items]))
        return 200, self.exchange(batch)

    def exchange(self, batch: Batch) -> Answer:
        """Commit a batch, and answer."""
        self.batches.append(batch)
        for item in batch.items:
            self.items.setdefault((batch.device_id, batch.incarnation, item.number), item)
        present = self._present(batch)
        if batch.state is not None and present:
            self.states[batch.device_id] = batch.state
        orders, opinions = (kept.setdefault(batch.device_id, {}) for kept in (self._orders, self._opinions))
        for gone in batch.acks.commands:
            orders.pop(gone, None)
        for gone in batch.acks.opinions:
            opinions.pop(gone, None)
        number = self._exchanges[batch.device_id] = max(self._exchanges.get(batch.device_id, 0), batch.exchange) + 1
        answer = Answer(
            received=sync.ranges(item.number for item in batch.items),
            wait_s=self.wait_s,
            most_bytes=self.most_bytes,
            exchange=number if present else batch.exchange,
        )
        if not present:
            return answer
        wished = self.desired.get(batch.device_id)
        return replace(
            answer,
            desired=wished if wished and wished.etag != batch.etag else None,
            commands=tuple(orders.values()),
            opinions=tuple(opinions.values()),
            send_state=batch.device_id not in self.states,
        )

    def _present(self, batch: Batch) -> bool:
        """Whether a batch is of its device's newest life, which one before is again when it has started anew since."""
        device_id, life = batch.device_id, (batch.device_id, batch.incarnation)
        newest = self._newest.get(device_id, "")
        later = batch.sent_at > self._heard.get((device_id, newest), 0.0)
        started = later and batch.clock_synced and not batch.exchange
        if batch.incarnation != newest and (started or life not in self._heard):
            self._newest[device_id] = batch.incarnation
            self.states.pop(device_id, None)
        self._heard[life] = max(batch.sent_at, self._heard.get(life, 0.0))
        return self._newest[device_id] == batch.incarnation

    def _check(self, items: Iterable[Item]) -> None:
        for i, item in enumerate(items):
            if item.kind in self.unknown_kinds:
                msg = f"items[{i}].kind must be another, not {item.kind!r}"
                raise SchemaError(msg)
