"""Signed orders: whose count, and that none has its effect twice, whatever a broker repeats or a power cut takes."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from appliance.adapters.journal import Entry, Journal
from appliance.core.command import Command, CommandResult
from appliance.inbox import Inbox
from appliance.service import Service
from models.errors import NotFound, NotReady
from models.orders import PAYLOAD_TYPE, Commander

pytestmark = pytest.mark.unit

NOW = 1_800_000_000.0
ANN, EVE = CryptoSigner.generate_ed25519(), CryptoSigner.generate_ed25519()
ORDER = {"id": "1", "device_id": "d1", "command": "update", "expires_at": NOW + 60, "sequence": 5}


def signed(signer: CryptoSigner = ANN, kind: str = PAYLOAD_TYPE, without: str = "", **said: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """An envelope around `ORDER` as changed."""
    order = {key: value for key, value in (ORDER | said).items() if key != without}
    envelope = Envelope(json.dumps(order).encode(), kind, {})
    envelope.sign(signer)
    return dict(envelope.to_dict())


class Device:
    """A service with an inbox that believes ann, and what it has done."""

    def __init__(self, path: Path, floor: float = 0.0, boot_id: str = "first") -> None:
        self.done: list[str] = []
        self.journal = Journal(path)
        self.service = Service([], device_id="d1", facts=dict)
        known = {ANN.public_key.keyid: Commander(ANN.public_key.keyval["public"], "ann")}
        self.service.inbox = Inbox(lambda: self.journal, lambda: known, lambda: floor, lambda: boot_id)
        self.service.orders |= {"update": self.update, "reboot": self.reboot}

    def update(self, order: Command) -> dict[str, Any]:
        self.done.append(order.id)
        return {"deployment": len(self.done)}

    def reboot(self, order: Command) -> CommandResult:
        self.done.append(order.id)
        return CommandResult(order.id, "unknown", "it still runs")

    def answer(self, order_id: str) -> CommandResult:
        """What is known of an order that was given."""
        return asyncio.run(self.service.result(order_id))

    def take(self, payload: object, now: float = NOW, **how: bool) -> CommandResult:
        """Give it an order as a door does."""
        content = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        return asyncio.run(self.service.order(content, now=now, **how))

    def close(self) -> None:
        self.journal.close()


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    """One that was just made."""
    with closing(Device(tmp_path / "journal.db")) as made:
        yield made


def test_an_order_that_is_signed_by_whom_the_repository_names_is_carried_out(device: Device) -> None:
    assert device.take(signed()) == CommandResult("1", "done", result={"deployment": 1})
    assert device.done == ["1"]


def test_an_order_that_comes_again_has_the_first_answer_and_no_second_effect(device: Device, tmp_path: Path) -> None:
    first = device.take(signed())
    assert device.take(signed()) == first
    assert device.done == ["1"]
    device.close()
    with closing(Device(tmp_path / "journal.db")) as again:
        assert again.take(signed()) == first
        assert again.done == []


def test_an_older_order_is_refused_after_a_newer_one_also_after_a_restart_in_1970(
    device: Device, tmp_path: Path
) -> None:
    assert device.take(signed()).status == "done"
    device.close()
    with closing(Device(tmp_path / "journal.db")) as again:
        replayed = again.take(signed(id="0", sequence=5), now=0.0)
        assert (replayed.status, replayed.reason[:23]) == ("refused", "sequence 5 is not above")
        assert again.take(signed(id="2", sequence=6), now=0.0).status == "done"


def test_an_order_whose_end_a_power_cut_took_is_unknown_and_is_not_done_again(device: Device) -> None:
    order = Command("1", "update", {}, "d1", expires_at=NOW + 60, sequence=5)
    assert device.service.inbox
    asyncio.run(device.service.inbox.received(order, ANN.public_key.keyid))
    assert device.take(signed()).status == "unknown"
    assert device.done == []


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (ORDER, "changes the device: sign it with `provision command sign`"),
        (signed(EVE), "nobody who may order this device has signed"),
        (signed(device_id="d2"), "this order is for 'd2', this device is 'd1'"),
        (signed(without="device_id"), "a signed order names its device"),
        (signed(without="expires_at"), "a signed order expires"),
        (signed(expires_at=NOW - 1), "the order expired at"),
        (signed(without="sequence"), "a signed order has a sequence above 0"),
        (
            signed(kind="application/vnd.in-toto+json"),
            "the envelope holds 'application/vnd.in-toto+json', not an order",
        ),
        (signed() | {"payload": base64.b64encode(json.dumps(ORDER | {"id": "2"}).encode()).decode()}, "sign it anew"),
        (signed() | {"signatures": []}, "nobody who may order this device has signed"),
        (signed() | {"signatures": [{"keyid": 5}]}, "the envelope cannot be read"),
        (signed() | {"payload": "="}, "cannot be read"),
        ({"payloadType": None}, "the envelope cannot be read"),
    ],
)
def test_what_is_not_signed_for_this_device_is_refused_and_nothing_happens(
    device: Device, payload: object, reason: str
) -> None:
    answer = device.take(payload)
    assert answer.status == "refused"
    assert reason in answer.reason
    assert device.done == []


def test_a_signature_does_not_make_a_retained_order_taken(device: Device) -> None:
    assert "retained" in device.take(signed(), retained=True).reason


def test_an_order_that_is_known_to_have_expired_is_refused_whatever_the_clock_says(tmp_path: Path) -> None:
    with closing(Device(tmp_path / "journal.db", floor=NOW + 61)) as device:
        assert "expired" in device.take(signed(), now=0.0).reason


def test_one_id_stands_for_one_order(device: Device) -> None:
    device.take(signed())
    assert "another order had this id" in device.take(signed(sequence=6)).reason
    assert "another order had this id" in device.take(ORDER, authorized=True).reason


def test_an_administrators_order_needs_no_signature_and_is_remembered_too(device: Device) -> None:
    bare = {"id": "9", "command": "update"}
    first = device.take(bare, authorized=True)
    assert first.status == "done"
    assert device.take(bare, authorized=True) == first
    assert device.done == ["9"]


def test_an_order_that_cannot_be_written_down_is_not_carried_out(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(_entry: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(device.journal, "keep_order", full)
    answer = device.take(signed())
    assert (answer.status, device.done) == ("failed", [])


def test_an_order_whose_end_cannot_be_written_down_is_unknown_from_the_start(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = device.journal.keep_order

    async def full_later(entry: Entry) -> None:
        if entry.result:
            raise OSError(28, "No space left on device")
        await keep(entry)

    monkeypatch.setattr(device.journal, "keep_order", full_later)
    first = device.take(signed())
    assert (first.status, "was carried out" in first.reason, device.done) == ("unknown", True, ["1"])
    assert device.take(signed()).status == "unknown"
    assert device.done == ["1"]


def test_without_updates_set_up_there_is_nobody_whose_order_counts() -> None:
    service = Service([], device_id="d1", facts=dict)
    answer = asyncio.run(service.order(json.dumps(signed()).encode(), now=NOW))
    assert answer.status == "refused"


def test_a_reboot_is_done_when_the_machine_was_started_anew_and_is_not_done_again(
    device: Device, tmp_path: Path
) -> None:
    reboot = signed(command="reboot")
    assert device.take(reboot).status == "unknown"
    device.close()
    with closing(Device(tmp_path / "journal.db")) as only_the_daemon:
        assert only_the_daemon.take(reboot).status == "unknown"
        assert only_the_daemon.done == []
    with closing(Device(tmp_path / "journal.db", boot_id="second")) as again:
        assert again.answer("1") == CommandResult("1", "done", result={"started_anew": True})
        assert again.take(reboot).status == "done"
        assert again.done == []
    with closing(Device(tmp_path / "journal.db", boot_id="third")) as later:
        assert later.take(reboot).status == "done"


def test_the_answer_to_an_order_can_be_asked_for_after_a_restart(device: Device, tmp_path: Path) -> None:
    first = device.take(signed())
    device.close()
    with closing(Device(tmp_path / "journal.db")) as again:
        assert again.answer("1") == first
        with pytest.raises(NotFound, match="there is no order '2'"):
            again.answer("2")


def test_an_order_that_fails_by_a_fault_of_ours_is_answered_and_the_next_one_is_taken(device: Device) -> None:
    def broken(_order: Command) -> CommandResult:
        raise ZeroDivisionError

    device.service.orders["rollback"] = broken
    assert device.take(signed(command="rollback")).status == "failed"
    assert device.take(signed(id="2", sequence=6)).status == "done"


def test_an_order_that_is_too_large_is_refused_unread(device: Device) -> None:
    answer = device.take(b"[" * 1_000_000)
    assert (answer.status, answer.reason[:33]) == ("refused", "the order has 1000000 bytes: 2621")


def test_orders_for_the_same_effect_wait_for_each_other_and_status_for_none(device: Device) -> None:
    async def both() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(order: Command) -> dict[str, Any]:
            begun.set()
            await go_on.wait()
            return {"order": order.id}

        device.service.orders["load"] = slow
        load = {"id": "load", "command": "load"}
        first, second = (
            asyncio.ensure_future(device.service.order(json.dumps(load).encode(), now=NOW, authorized=True))
            for _ in range(2)
        )
        await begun.wait()
        status = await device.service.order(b'{"id": "s", "command": "status"}', now=NOW)
        assert status.status == "done"
        with pytest.raises(NotReady, match="being carried out"):
            await device.service.result("load")
        go_on.set()
        assert await first == await second == CommandResult("load", "done", result={"order": "load"})

    asyncio.run(both())


def test_what_steers_an_update_does_not_wait_for_a_model_that_is_loaded(device: Device) -> None:
    loaded = asyncio.Event()

    async def load(_order: Command) -> dict[str, Any]:
        await loaded.wait()
        return {"fits": True}

    async def scenario() -> tuple[CommandResult, ...]:
        def give(order: dict[str, Any]) -> asyncio.Future[CommandResult]:
            return asyncio.ensure_future(device.service.order(json.dumps(signed(**order)).encode(), now=NOW))

        device.service.orders["load"] = load
        loading = give({"id": "1", "command": "load", "sequence": 5, "args": {"name": "m"}})
        again = give({"id": "1", "command": "load", "sequence": 5, "args": {"name": "m"}})
        steering = await asyncio.wait_for(give({"id": "2", "command": "update", "sequence": 6}), 30)
        loaded.set()
        return steering, await loading, await again

    steering, first, again = asyncio.run(scenario())
    assert (steering.status, first.status, device.done) == ("done", "done", ["2"])
    assert again == first


def test_an_id_that_a_question_had_before_does_not_keep_an_order_from_its_effect(device: Device) -> None:
    question = {"id": "1", "device_id": "d1", "command": "status"}
    assert device.take(question).status == "done"
    assert device.take(signed()).result == {"deployment": 1}
    assert device.done == ["1"]


def test_a_device_that_has_not_read_the_repository_says_so_and_blames_no_key(tmp_path: Path) -> None:
    with closing(Device(tmp_path / "journal.db")) as device:
        device.service.inbox = Inbox(lambda: device.journal, dict, lambda: 0.0, lambda: "first")
        assert "it must read the repository first" in device.take(signed()).reason
