"""The upstream's database on SQLite and on PostgreSQL: what is reported counts once, what is wished for is told.

Past 400 lines because all of it runs on both.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, event, func, select, text
from support.postgres import POSTGRES, Cluster
from support.reporting import Reporter, deployment, order, running

from appliance.upstream import tables as t
from appliance.upstream.callers import Tokens
from appliance.upstream.campaigns import Campaigns
from appliance.upstream.database import Database
from appliance.upstream.fleet import Bound, Fleet, Keeping
from appliance.upstream.ingest import Ingest
from appliance.upstream.samples import Samples
from models import schema, sync
from models.errors import BadInput, ConfigError, Conflict, Forbidden, NotFound, Unauthenticated, Unavailable
from models.sync import ROW_BYTES, Answer, Batch, Opinion, Part, Sample

pytestmark = pytest.mark.contract

DAY_S = 86400.0
CAMPAIGN = {"name": "n", "model": "m", "version": "2", "waves": [{"percent": 30, "canary": True}, {"percent": 100}]}
MONTH = Bound(30 * DAY_S, 1000, 1000)
KEEP = Keeping(MONTH, MONTH, MONTH, lives=Bound(of_device=3), doings=Bound(of_device=7), actions=Bound())
NESTED = b'{"a": %b%b}' % (b"[" * 300, b"]" * 300)
"""JSON that orjson reads and does not write."""
WIDE = b", ".join(b'"%d": 1' % n for n in range(ROW_BYTES // 8))
"""Inside of a JSON object: more than a row holds, and no part of it is large."""


@dataclass
class Upstream:
    """One replica, with a clock that stands still until it is moved."""

    database: Database
    clock: list[float] = field(default_factory=lambda: [1.8e9])

    def __post_init__(self) -> None:
        now = lambda: self.clock[0]  # noqa: E731 - a clock
        self.fleet = Fleet(self.database, now, online_s=180.0)
        self.campaigns = Campaigns(self.database, self.fleet, now)
        self.tokens = Tokens(self.database, self.fleet, now)
        self.samples = Samples(self.database, now)
        self.ingest = Ingest(self.database, now, lambda: 30.0)

    def exchange(self, batch: Batch) -> Answer:
        return self.ingest.exchange(batch.device_id, batch, 1000)

    def device(self, device_id: str, incarnation: str = "life-1") -> Reporter:
        return Reporter(device_id, self.exchange, incarnation)

    def devices(self, count: int) -> dict[str, Reporter]:
        """That many, which have reported."""
        found = {f"d{i}": self.device(f"d{i}") for i in range(count)}
        for device in found.values():
            device.report()
        return found

    def rows(self, table: Any) -> int:  # noqa: ANN401 - a table
        with self.database.reading() as tx:
            return int(tx.execute(select(func.count()).select_from(table)).scalar_one())


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a database that holds nothing yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'upstream.db'}"
    if POSTGRES is None:
        pytest.skip("condition postgresql: the database is not installed")
    address: str = request.getfixturevalue("cluster").database()
    return address


@pytest.fixture(scope="session")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite database of this version's shape, to be copied."""
    path = tmp_path_factory.mktemp("shaped") / "upstream.db"
    Database(f"sqlite:///{path}").close()
    return path


@pytest.fixture(scope="session")
def shared(cluster: Cluster) -> Iterator[tuple[str, Database]]:
    """A PostgreSQL database of this version's shape, which each test finds without rows."""
    url = cluster.database()
    database = Database(url)
    yield url, database
    database.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a database without rows."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("shaped"), tmp_path / "upstream.db")
        return f"sqlite:///{tmp_path / 'upstream.db'}"
    if POSTGRES is None:
        pytest.skip("condition postgresql: the database is not installed")
    address, database = request.getfixturevalue("shared")
    with database.writing() as tx:
        tx.execute(text(f"TRUNCATE {', '.join(t.metadata.tables)} RESTART IDENTITY"))
    return str(address)


@pytest.fixture
def upstream(url: str) -> Iterator[Upstream]:
    database = Database(url)
    yield Upstream(database)
    database.close()


# The database itself


def test_replicas_that_start_together_bring_one_database_to_the_shape_of_the_tables(empty: str) -> None:
    replicas = 1 if empty.startswith("sqlite") else 3
    with ThreadPoolExecutor(replicas) as pool:
        databases = list(pool.map(Database, [empty] * replicas))
    with databases[0].reading() as tx:
        assert compare_metadata(MigrationContext.configure(tx), t.metadata) == []
    for database in databases:
        database.close()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nonsense", "'nonsense', cannot be used"),
        ("mysql://u:secret@h/d", "cannot be used"),
        ("sqlite:////no/such/folder/u.db", "unable to open database file"),
        ("postgresql+psycopg://u:secret@127.0.0.1:1/d", r"u:\*\*\*@127.0.0.1:1/d', cannot be used"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_without_its_password(address: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        Database(address)
    assert "secret" not in str(refused.value)


def test_who_waits_too_long_for_another_that_writes_is_told_so(
    tmp_path: Path, shaped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.upstream.database._WAIT_S", 0.05)
    shutil.copy(shaped, tmp_path / "upstream.db")
    database = Database(f"sqlite:///{tmp_path / 'upstream.db'}")
    with database.writing(), pytest.raises(Unavailable, match="busy"), database.writing():
        pass
    with database.writing() as tx:
        tx.execute(select(t.items))
    database.close()


# Exactly once


def test_the_same_batch_again_changes_nothing_and_gets_the_same_answer(upstream: Upstream) -> None:
    device = upstream.device("d")
    device.tell("alarm", text="hot")
    device.tell("telemetry", uptime_s=1)
    batch = device.batch()
    first = upstream.exchange(batch)
    assert first.received == ((1, 2),)
    assert upstream.exchange(batch) == first
    assert upstream.rows(t.items) == 2
    assert upstream.fleet.device("d")["timeline"][0]["text"] == "hot"


def test_batches_that_overlap_or_come_in_another_order_are_taken_once(upstream: Upstream) -> None:
    device = upstream.device("d")
    for i in range(5):
        device.tell("alarm", text=f"a{i}")
    late = device.batch()
    device.tell("alarm", text="a5")
    upstream.exchange(device.batch())
    assert upstream.exchange(late).received == ((1, 5),)
    assert upstream.rows(t.items) == 6


def test_an_item_whose_row_was_deleted_is_not_taken_again(upstream: Upstream) -> None:
    device = upstream.device("d")
    device.tell("telemetry", uptime_s=1)
    batch = device.batch()
    upstream.exchange(batch)
    upstream.clock[0] += 31 * DAY_S
    assert upstream.fleet.forget(KEEP)["telemetry"] == 1
    assert upstream.exchange(batch).received == ((1, 1),)
    assert upstream.rows(t.items) == 0


def test_a_batch_that_fails_in_its_middle_leaves_nothing(upstream: Upstream) -> None:
    device = upstream.device("d")
    device.tell("alarm", text="hot")
    device.tell("sample", sample_id="s")
    with pytest.raises(BadInput, match="a sample cannot be used: model is missing"):
        device.report()
    assert upstream.rows(t.items) == upstream.rows(t.devices) == 0


def test_a_batch_of_another_device_is_refused(upstream: Upstream) -> None:
    with pytest.raises(Forbidden, match="the batch is that of 'd'"):
        upstream.ingest.exchange("other", upstream.device("d").batch(), 1000)


def test_two_senders_of_one_batch_at_once_are_one(upstream: Upstream) -> None:
    device = upstream.device("d")
    for i in range(20):
        device.tell("command_result", id=str(i), status="done")
    batch, together = device.batch(), threading.Barrier(4)

    def send(_number: int) -> Answer:
        together.wait(30)
        return upstream.exchange(batch)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(send, range(4)))
    assert {answer.received for answer in answers} == {((1, 20),)}
    assert {answer.exchange for answer in answers} == {1}
    assert upstream.rows(t.items) == 20


# Who reports


def test_a_device_that_was_flashed_anew_under_its_name_counts_from_one_again(upstream: Upstream) -> None:
    old = upstream.device("d")
    old.tell("alarm", text="before")
    old.report()
    stray = old.batch()
    new = upstream.device("d", "life-2")
    new.state = running("2")
    new.tell("alarm", text="after")
    assert new.report().received == ((1, 1),)
    upstream.fleet.command("ann", {"device": "d"}, [order("d", "o-1")])
    heard = upstream.exchange(stray)  # what the old one had still on its way
    assert (heard.commands, heard.desired, heard.send_state) == ((), None, False)
    shown = upstream.fleet.device("d")
    assert (shown["incarnation"], shown["versions"]["m"]["version"]) == ("life-2", "2")
    assert {event["text"].partition(":")[0] for event in shown["timeline"]} >= {"before", "after", "flashed anew"}


def test_a_state_that_was_held_back_on_its_way_does_not_undo_a_newer_one(upstream: Upstream) -> None:
    device = upstream.device("d")
    stale = device.batch()
    for version in ("2", "3"):
        device.state = running(version)
        device.report()
    assert upstream.exchange(stale).send_state
    assert upstream.fleet.device("d")["versions"]["m"]["version"] == "3"


def test_a_state_is_taken_though_the_answer_to_the_one_before_was_lost(upstream: Upstream) -> None:
    device = upstream.device("d")
    upstream.exchange(device.batch())
    device.state = running("2")
    assert not device.report().send_state
    assert upstream.fleet.device("d")["versions"]["m"]["version"] == "2"


def test_a_device_that_started_anew_and_knows_of_no_answer_is_believed(upstream: Upstream) -> None:
    device = upstream.device("d")
    for _ in range(3):
        device.report()
    again = replace(device.batch(), exchange=0, sent_at=2.0, state=running("2"))
    assert not upstream.exchange(again).send_state
    assert upstream.fleet.device("d")["versions"]["m"]["version"] == "2"


def test_devices_are_listed_in_pages_and_chosen_by_group_and_label(upstream: Upstream) -> None:
    upstream.devices(5)
    upstream.fleet.change("ann", "d3", {"groups": ["line"], "labels": {"hall": "2"}})
    first = upstream.fleet.devices(limit=3)
    assert [one["device_id"] for one in first["devices"]] == ["d0", "d1", "d2"]
    rest = upstream.fleet.devices(after=first["next"], limit=3)
    assert ([one["device_id"] for one in rest["devices"]], rest["next"]) == (["d3", "d4"], None)
    for chosen in ({"group": "line"}, {"label": "hall=2"}):
        assert [one["device_id"] for one in upstream.fleet.devices(**chosen)["devices"]] == ["d3"]
    assert upstream.fleet.devices(group="none")["devices"] == []


def test_a_device_that_was_not_heard_for_long_is_shown_as_away(upstream: Upstream) -> None:
    upstream.devices(1)
    assert upstream.fleet.device("d0")["online"]
    upstream.clock[0] += 200
    assert not upstream.fleet.device("d0")["online"]


def test_labels_that_an_operator_sets_win_over_those_that_a_device_reports(upstream: Upstream) -> None:
    device = upstream.device("d")
    device.state = {**running("1"), "labels": {"hall": "1", "line": "a"}}
    device.report()
    upstream.fleet.change("ann", "d", {"labels": {"hall": "2"}})
    device.state = {**running("1"), "labels": {"hall": "3", "line": "b"}}
    assert device.report().desired is None or device.report()
    assert upstream.fleet.device("d")["labels"] == {"hall": "2", "line": "b"}


def test_a_retired_device_is_refused_until_that_is_taken_back(upstream: Upstream) -> None:
    device = upstream.devices(1)["d0"]
    token = upstream.tokens.create("ann", "t", "device", "d0")["token"]
    upstream.fleet.change("ann", "d0", {"retired": True})
    assert upstream.fleet.devices()["devices"] == []
    assert upstream.tokens.opened(token) is None
    with pytest.raises(Forbidden, match="was retired"):
        device.report()
    with pytest.raises(NotFound):
        upstream.fleet.device("d0")
    upstream.fleet.change("ann", "d0", {"retired": False})
    device.report()


def test_a_wish_that_cannot_be_used_is_refused_and_changes_nothing(upstream: Upstream) -> None:
    upstream.devices(1)
    before = upstream.fleet.device("d0")
    wishes: dict[str, dict[str, Any]] = {
        "nothing is to be set": {},
        "no 'colour' to set": {"colour": "red"},
        "groups is a list": {"groups": "line"},
        "groups is a list of up": {"groups": ["a/b"]},
        "labels is an object": {"labels": {"hall": 2}},
        "pins is an object": {"pins": {"m": ""}},
        "paused is true or false": {"paused": "yes"},
    }
    for why, wish in wishes.items():
        with pytest.raises(BadInput, match=why):
            upstream.fleet.change("ann", "d0", wish)
    assert upstream.fleet.device("d0") == before


# What it is told


def test_what_a_device_should_be_like_is_told_once_until_it_changes(upstream: Upstream) -> None:
    device = upstream.devices(1)["d0"]
    assert device.report().desired is None
    upstream.fleet.change(
        "ann", "d0", {"pins": {"m": "7"}, "paused": True, "labels": {"hall": "2"}, "groups": ["line"]}
    )
    told = device.report().desired
    assert told
    assert (told.pins, told.paused, told.labels, told.groups) == ({"m": "7"}, True, {"hall": "2"}, ("line",))
    assert device.report().desired is None
    upstream.fleet.change("ann", "d0", {"pins": {"m": None}})
    device.report()
    assert device.pins == {}


def test_an_order_is_brought_until_it_is_acknowledged_and_its_answer_is_shown(upstream: Upstream) -> None:
    devices = upstream.devices(2)
    made = upstream.fleet.command("ann", {"device": "d0"}, [order("d0", "o-1")])
    batch = devices["d0"].batch()
    assert [ordered.id for ordered in upstream.exchange(batch).commands] == ["o-1"]  # and the answer is lost
    assert [ordered.id for ordered in devices["d0"].report().commands] == ["o-1"]
    (waiting,) = upstream.fleet.command_results(int(made["id"]))["devices"]
    assert waiting["status"] == "waiting"
    assert devices["d0"].report().commands == ()
    assert devices["d1"].report().commands == ()
    (done,) = upstream.fleet.command_results(int(made["id"]))["devices"]
    assert (done["device_id"], done["status"]) == ("d0", "done")
    assert devices["d0"].effects == {"o-1": 1}


def test_orders_to_a_group_are_those_of_its_devices_and_of_nobody_else(upstream: Upstream) -> None:
    upstream.devices(3)
    for name in ("d0", "d1"):
        upstream.fleet.change("ann", name, {"groups": ["line"]})
    both = [order("d0", "o-1"), order("d1", "o-2")]
    made = upstream.fleet.command("ann", {"group": "line"}, both)
    assert made["devices"] == ["d0", "d1"]
    with pytest.raises(BadInput, match="'d2', which is no device of"):
        upstream.fleet.command("ann", {"group": "line"}, [order("d2", "o-3")])
    with pytest.raises(Conflict, match="was handed in before"):
        upstream.fleet.command("ann", {"group": "line"}, both)


def test_an_order_that_expired_is_brought_to_nobody(upstream: Upstream) -> None:
    device = upstream.devices(1)["d0"]
    made = upstream.fleet.command("ann", {"device": "d0"}, [order("d0", "o-1", upstream.clock[0] + 60)])
    upstream.clock[0] += 61
    assert device.report().commands == ()
    (shown,) = upstream.fleet.command_results(int(made["id"]))["devices"]
    assert shown["status"] == "expired"


def test_what_is_no_signed_order_is_refused(upstream: Upstream) -> None:
    upstream.devices(1)
    signed, to = order("d0", "o"), {"device": "d0"}
    for target, envelope, why in (
        ({}, signed, "a target is one of"),
        (to, {"id": "o"}, "cannot be read"),
        (to, {**signed, "signatures": []}, "no signed order"),
        (to, {**signed, "payload": "%"}, "cannot be read"),
    ):
        with pytest.raises(BadInput, match=why):
            upstream.fleet.command("ann", target, [envelope])
    assert upstream.rows(t.deliveries) == 0


# Campaigns


def test_a_campaign_goes_wave_by_wave_to_its_end(upstream: Upstream) -> None:
    devices = upstream.devices(4)
    begun = upstream.campaigns.begin("ann", CAMPAIGN)
    number = int(begun["id"])
    assert (begun["state"], begun["wave"]) == ("running", 1)
    canaries = {one["device_id"] for one in begun["devices"] if one["wave"] == 1}
    for name, device in devices.items():
        device.report()
        assert device.pins == ({"m": "2"} if name in canaries else {})
        device.obey()
        device.report()
    upstream.campaigns.step_all()
    assert upstream.campaigns.one(number)["wave"] == 2
    for device in devices.values():
        device.report()
        device.obey()
        device.report()
    upstream.campaigns.step_all()
    ended = upstream.campaigns.one(number)
    assert (ended["state"], ended["reason"]) == ("done", "4 of 4 devices committed")
    assert {row["desired"]["m"] for row in upstream.fleet.devices()["devices"]} == {"2"}


def test_a_bad_version_is_stopped_at_its_canary_and_everybody_gets_back_what_they_had(upstream: Upstream) -> None:
    devices = upstream.devices(4)
    upstream.fleet.change("ann", "d0", {"pins": {"m": "1"}})
    begun = upstream.campaigns.begin("ann", {**CAMPAIGN, "waves": [{"percent": 50}, {"percent": 100}]})
    for device in devices.values():
        device.report()
        device.obey(good=False)
        device.report()
    upstream.campaigns.step_all()
    ended = upstream.campaigns.one(int(begun["id"]))
    assert ended["state"] == "stopped"
    assert ended["reason"] == "wave 1: 2 of 2 devices rolled back (100%), and 10% may"
    assert {reason for one in ended["devices"] if (reason := one["reason"])} == {"it reads worse"}
    assert {one["device_id"]: one["desired"] for one in upstream.fleet.devices()["devices"]} == {
        "d0": {"m": "1"},
        **{f"d{i}": {} for i in range(1, 4)},
    }
    actions = [entry["action"] for entry in upstream.fleet.audited()["audit"]]
    assert actions[0] == "campaign stopped"


def test_a_device_that_runs_the_version_already_has_committed(upstream: Upstream) -> None:
    devices = upstream.devices(1)
    devices["d0"].state = running("2")
    devices["d0"].report()
    begun = upstream.campaigns.begin("ann", CAMPAIGN)
    devices["d0"].report()
    upstream.campaigns.step_all()
    assert upstream.campaigns.one(int(begun["id"]))["state"] == "done"


def test_a_version_that_is_still_on_trial_has_not_committed(upstream: Upstream) -> None:
    device = upstream.devices(1)["d0"]
    begun = upstream.campaigns.begin("ann", CAMPAIGN)
    trial = {"latest": {"name": "m", "version": "2", "step": "trial", "committed": False}}
    device.state = {**running("2"), "update": trial}
    device.report()
    upstream.campaigns.step_all()
    assert upstream.campaigns.one(int(begun["id"]))["counts"][0]["waiting"] == 1
    device.tell("deployment", **deployment("2", good=True))
    device.report()
    upstream.campaigns.step_all()
    assert upstream.campaigns.one(int(begun["id"]))["state"] == "done"


def test_silent_devices_are_stuck_after_the_patience_and_count_when_they_come_back(upstream: Upstream) -> None:
    devices = upstream.devices(10)
    begun = upstream.campaigns.begin("ann", {**CAMPAIGN, "waves": [{"percent": 100}], "patience_s": 60})
    number, silent = int(begun["id"]), devices["d4"]
    for device in devices.values():
        device.report()
        if device is not silent:
            device.obey()
            device.report()
    upstream.campaigns.step_all()
    assert "1 may still answer" in upstream.campaigns.one(number)["reason"]
    upstream.clock[0] += 61
    upstream.campaigns.step_all()
    ended = upstream.campaigns.one(number)
    assert (ended["state"], ended["counts"][0]["stuck"]) == ("done", 1)


def test_a_paused_campaign_asks_nobody_until_it_goes_on_and_an_aborted_one_gives_back(upstream: Upstream) -> None:
    devices = upstream.devices(4)
    number = int(upstream.campaigns.begin("ann", CAMPAIGN)["id"])
    assert upstream.campaigns.turn("ann", number, "pause")["state"] == "paused"
    for device in devices.values():
        device.report()
        device.obey()
        device.report()
    upstream.campaigns.step_all()
    assert upstream.campaigns.one(number)["wave"] == 1
    assert upstream.campaigns.turn("ann", number, "resume")["wave"] == 2
    aborted = upstream.campaigns.turn("ann", number, "abort")
    assert (aborted["state"], aborted["reason"]) == ("aborted", "by ann")
    assert {tuple(one["desired"]) for one in upstream.fleet.devices()["devices"]} == {()}
    with pytest.raises(Conflict, match="is aborted"):
        upstream.campaigns.turn("ann", number, "resume")


def test_latency_and_agreement_that_got_worse_stop_a_campaign_with_the_numbers(upstream: Upstream) -> None:
    devices = upstream.devices(2)
    slow = {"before_p95_ms": 10.0, "new_p95_ms": 25.0}
    wish = {**CAMPAIGN, "waves": [{"percent": 100}], "stop": {"latency_ratio": 2.0}}
    number = int(upstream.campaigns.begin("ann", wish)["id"])
    devices["d0"].report()
    devices["d0"].obey(**slow)
    devices["d0"].report()
    upstream.campaigns.step_all()
    stopped = upstream.campaigns.one(number)
    assert stopped["state"] == "stopped"
    assert "2.50 times as long" in stopped["reason"]


def test_a_device_that_registers_later_joins_a_campaign_that_is_for_all(upstream: Upstream) -> None:
    upstream.devices(2)
    wish = {**CAMPAIGN, "waves": [{"percent": 100}]}
    number = int(upstream.campaigns.begin("ann", wish)["id"])
    upstream.clock[0] += 1
    late = upstream.device("late")
    late.report()
    upstream.campaigns.step_all()
    late.report()
    assert late.pins == {"m": "2"}
    assert upstream.campaigns.one(number)["counts"][0]["wanted"] == 3


def test_there_is_one_campaign_on_a_model_at_a_time_and_none_on_nobody(upstream: Upstream) -> None:
    with pytest.raises(BadInput, match="no wave takes any device"):
        upstream.campaigns.begin("ann", CAMPAIGN)
    upstream.devices(1)
    upstream.campaigns.begin("ann", CAMPAIGN)
    with pytest.raises(Conflict, match="on 'm' has not ended"):
        upstream.campaigns.begin("ann", CAMPAIGN)
    with pytest.raises(BadInput, match="unknown key 'wave'; did you mean 'waves'"):
        upstream.campaigns.begin("ann", {"wave": []})


def test_of_two_who_begin_a_campaign_on_a_model_at_once_one_does(upstream: Upstream) -> None:
    upstream.devices(2)
    together = threading.Barrier(4)

    def begin(_number: int) -> bool:
        together.wait(30)
        try:
            upstream.campaigns.begin("ann", CAMPAIGN)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(begin, range(4))) == [False, False, False, True]


def test_replicas_that_step_at_the_same_time_do_each_step_once(upstream: Upstream, url: str) -> None:
    devices = upstream.devices(8)
    number = int(upstream.campaigns.begin("ann", {**CAMPAIGN, "waves": [{"percent": 50}, {"percent": 100}]})["id"])
    for device in devices.values():
        device.report()
        device.obey()
        device.report()
    others = [Upstream(Database(url), upstream.clock) for _ in range(3)]
    together = threading.Barrier(4)

    def step(replica: Upstream) -> None:
        together.wait(30)
        for _ in range(5):
            replica.campaigns.step_all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(step, [upstream, *others]))
    for replica in others:
        replica.database.close()
    assert upstream.campaigns.one(number)["wave"] == 2
    for device in devices.values():
        device.report()
        device.obey()
        device.report()
    upstream.campaigns.step_all()
    upstream.campaigns.step_all()
    actions = [entry["action"] for entry in upstream.fleet.audited()["audit"]]
    assert actions.count("campaign done") == 1


# Restored from a copy


def test_a_copy_of_the_database_loses_no_device_and_repeats_no_order(
    upstream: Upstream, url: str, copied: Callable[[str], str], request: pytest.FixtureRequest
) -> None:
    devices = upstream.devices(2)
    upstream.fleet.command("ann", {"device": "d0"}, [order("d0", "o-1")])
    upstream.database.close()
    if request.node.callspec.params["url"] == "postgresql":
        request.getfixturevalue("shared")[1].close()  # nobody may use what is copied
    restored = Upstream(Database(copied(url)), upstream.clock)
    live = Upstream(Database(url), upstream.clock)
    late = live.device("late")
    late.report()
    for device in (*devices.values(), late):
        device.send = live.exchange
        device.state = running("2")
        device.tell("alarm", text="since the copy")
        device.report()
        device.report()
    assert devices["d0"].effects == {"o-1": 1}
    live.database.close()
    for device in (*devices.values(), late):
        device.send = restored.exchange
        device.tell("alarm", text="after it")
        first = device.report()
        assert first.send_state
        assert first.desired is None
        device.report()
        device.report()
    shown = restored.fleet.devices()["devices"]
    assert {one["device_id"]: one["versions"]["m"]["version"] for one in shown} == {"d0": "2", "d1": "2", "late": "2"}
    assert devices["d0"].effects == {"o-1": 1}
    assert devices["d0"].report().commands == ()
    assert "after it" in {event["text"] for event in restored.fleet.device("late")["timeline"]}
    restored.database.close()


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    """Makes a copy of a database that nobody uses, and says where."""

    def copy(url: str) -> str:
        if url.startswith("sqlite"):
            target = tmp_path / "copy.db"
            target.write_bytes((tmp_path / "upstream.db").read_bytes())
            return f"sqlite:///{target}"
        address: str = request.getfixturevalue("cluster").database(like=url.partition("@/")[2].partition("?")[0])
        return address

    return copy


# Second opinions


def sample(number: int, keep_s: float = 3600.0, version: str = "1") -> dict[str, Any]:
    parts = (Part("/9j/", {"lines": []}),)
    document: dict[str, Any] = schema.dump(Sample(f"s-{number}", "m", version, keep_s=keep_s, parts=parts))
    return document


def test_a_sample_is_read_by_one_and_its_opinion_is_told_until_it_is_acknowledged(upstream: Upstream) -> None:
    device = upstream.devices(1)["d0"]
    device.tell("sample", **sample(1))
    device.report()
    (found,) = upstream.samples.waiting(10)
    assert (found.sample_id, found.parts[0].picture) == ("s-1", "/9j/")
    assert upstream.samples.waiting(10) == []
    upstream.clock[0] += 200  # whoever took it has died
    assert len(upstream.samples.waiting(10)) == 1
    upstream.samples.answered(Opinion("s-1", "m", "1", by="m-large 1", result={"lines": []}, agrees=False))
    upstream.samples.answered(Opinion("s-1", "m", "1", by="m-large 1", result={"lines": []}, agrees=True))
    (told,) = device.report().opinions
    assert (told.sample_id, told.agrees) == ("s-1", False)
    assert device.report().opinions == ()
    assert upstream.samples.agreement() == [
        {"model": "m", "version": "1", "opinions": 1, "agreement": 0.0, "waiting": 0}
    ]


@pytest.mark.parametrize(("keep_s", "seen"), [(0.0, 1), (60.0, 0)])
def test_a_picture_is_kept_no_longer_than_its_device_allows(upstream: Upstream, keep_s: float, seen: int) -> None:
    device = upstream.devices(1)["d0"]
    device.tell("sample", **sample(1, keep_s))
    device.report()
    upstream.clock[0] += 61
    upstream.fleet.forget(KEEP)
    assert len(upstream.samples.waiting(10)) == seen  # 0: as long as it takes to answer
    upstream.samples.answered(Opinion("s-1", "m", "1", reason="" if seen else "too late"))
    with upstream.database.reading() as tx:
        assert tx.execute(select(t.samples.c.sample)).scalar_one() is None


def test_agreement_that_drops_stops_a_campaign(upstream: Upstream) -> None:
    device = upstream.devices(1)["d0"]
    wish = {**CAMPAIGN, "stop": {"agreement_drop": 0.2}}
    number = int(upstream.campaigns.begin("ann", wish)["id"])
    for i in range(40):
        device.tell("sample", **sample(i, version="1" if i < 20 else "2"))
    device.report()
    for found in upstream.samples.waiting(40):
        agrees = found.version == "1" or int(found.sample_id[2:]) < 32
        upstream.samples.answered(Opinion(found.sample_id, "m", found.version, by="large", agrees=agrees))
    upstream.campaigns.step_all()
    stopped = upstream.campaigns.one(number)
    assert stopped["reason"] == (
        "second opinions agree with 60.0% of its answers and agreed with 100.0% before; 20.0% less is allowed"
    )


# By MQTT


def told(
    upstream: Upstream,
    topic: str,
    document: Any,  # noqa: ANN401 - a message
    session: int = 1,
    device_id: str = "d",
    *,
    retained: bool = False,
) -> None:
    payload = document if isinstance(document, bytes) else orjson.dumps(document)
    upstream.ingest.told([(device_id, topic, payload, session, retained)])


def test_a_device_that_reports_by_mqtt_is_registered_and_each_report_counts_once(upstream: Upstream) -> None:
    told(upstream, "state", {**running("1"), "session": 5}, 5)
    told(upstream, "availability", b"online", 5)
    for _ in range(2):
        told(upstream, "deployments", deployment("1", good=True))
        told(upstream, "telemetry", {"at": 1.0, "uptime_s": 1})
    shown = upstream.fleet.device("d")
    assert (shown["versions"]["m"]["version"], shown["online"], shown["incarnation"]) == ("1", True, "")
    assert [event["kind"] for event in shown["timeline"]].count("deployment") == 1
    assert upstream.rows(t.items) == 2


def test_a_will_or_a_state_of_an_earlier_session_changes_nothing(upstream: Upstream) -> None:
    told(upstream, "state", {**running("2"), "session": 5}, 5)
    told(upstream, "availability", b"online", 5)
    told(upstream, "availability", b"offline", 4)
    told(upstream, "state", {**running("1"), "session": 4}, 4)
    upstream.clock[0] += 1000
    shown = upstream.fleet.device("d")
    assert (shown["online"], shown["versions"]["m"]["version"]) == (True, "2")
    told(upstream, "availability", b"offline", 5)
    assert not upstream.fleet.device("d")["online"]


def test_what_a_device_brings_by_sync_is_not_taken_from_mqtt_again(upstream: Upstream) -> None:
    upstream.devices(1)
    told(upstream, "telemetry", {"at": 1.0}, device_id="d0")
    assert upstream.rows(t.items) == 0
    for rubbish in (b"", b"[", b"[]", b"\xff"):
        told(upstream, "state", rubbish, device_id="d0")
    assert upstream.fleet.device("d0")["versions"]["m"]["version"] == "1"


def test_a_message_that_cannot_be_kept_keeps_no_other_from_being_taken(upstream: Upstream) -> None:
    odd: list[Any] = [{"models": 7, "update": [1], "labels": "x", "profile": {}}, {"models": [3, {"name": ["x"]}]}]
    upstream.ingest.told(
        [
            *(("d", "state", orjson.dumps({**document, "session": 1}), 1, False) for document in odd),
            ("d", "telemetry", b'{"at": "noon"}', 0, False),
            ("d", "deployments", b'{"verdicts": 1, "started_at": []}', 0, False),
            ("x" * 200, "telemetry", b"{}", 0, False),  # PostgreSQL takes no such name
            ("d", "telemetry", NESTED, 0, False),
            ("d", "telemetry", b'{"at": 1, %b}' % WIDE, 0, False),
            ("d", "state", b'{"ready": true, %b}' % WIDE, 0, False),
            ("e", "state", orjson.dumps({**running("1"), "session": 1}), 1, False),
        ]
    )
    assert upstream.fleet.device("e")["versions"]["m"]["version"] == "1"
    shown = upstream.fleet.device("d")
    assert (shown["versions"], shown["health"]) == ({"['x']": {"version": None, "digest": None}}, "not ready")
    assert upstream.rows(t.items) == (2 if upstream.database.is_shared else 3)


def test_what_a_database_cannot_hold_is_refused_as_the_devices_fault(upstream: Upstream) -> None:
    device = upstream.device("d")
    device.state = {**running("1"), "update": 7, "models": [{"name": "m", "version": "1", "digest": "d1"}, 5]}
    device.report()
    assert upstream.fleet.device("d")["versions"]["m"]["version"] == "1"
    device.tell("sample", **{**sample(1), "sample_id": "s" * 4000})
    if upstream.database.is_shared:
        with pytest.raises(BadInput, match="the database cannot hold that"):
            device.report()


@pytest.mark.parametrize("by_mqtt", [False, True])
def test_a_device_that_does_not_shorten_what_is_too_large_is_heard_all_the_same(
    upstream: Upstream, by_mqtt: bool
) -> None:
    large = {**running("1"), "text": "x" * ROW_BYTES}
    if by_mqtt:
        upstream.ingest.told([("d", "state", orjson.dumps({**large, "session": 1}), 1, False)])
    else:
        device = upstream.device("d")
        upstream.exchange(sync.batch(orjson.loads(orjson.dumps(schema.dump(replace(device.batch(), state=large))))))
    assert upstream.fleet.device("d")["versions"]["m"]["version"] == "1"


def test_what_can_be_read_but_not_written_again_is_refused_as_the_devices_fault(upstream: Upstream) -> None:
    device = upstream.device("d")
    device.tell("alarm", **orjson.loads(NESTED))
    with pytest.raises(BadInput, match="send what is nested less deeply"):
        device.report()
    assert upstream.rows(t.items) == 0


def test_what_a_broker_had_retained_is_no_news_of_a_device(upstream: Upstream) -> None:
    upstream.devices(1)
    told(upstream, "state", running("1"), device_id="e")
    before = [upstream.fleet.device(device_id) for device_id in ("d0", "e")]
    upstream.clock[0] += 1000
    for device_id in ("d0", "e"):
        told(upstream, "state", running("0"), device_id=device_id, retained=True)
    known, other = (upstream.fleet.device(device_id) for device_id in ("d0", "e"))
    assert [known["last_seen"], other["last_seen"]] == [one["last_seen"] for one in before]
    assert known["versions"] == before[0]["versions"]
    assert other["versions"]["m"]["version"] == "0"  # nothing else is heard of this one


def test_replicas_that_hear_of_the_same_devices_in_another_order_do_not_wait_for_each_other(upstream: Upstream) -> None:
    names, together = [f"d{i}" for i in range(8)], threading.Barrier(2)

    def hear(order: list[str]) -> None:
        for i in range(20):
            together.wait(30)
            upstream.ingest.told([(name, "telemetry", b'{"at": %d}' % i, 0, False) for name in order])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(hear, [names, names[::-1]]))
    assert upstream.rows(t.items) == 160


# Tokens and the log


def test_tokens_are_shown_once_kept_hashed_and_open_nothing_once_revoked(upstream: Upstream) -> None:
    made = upstream.tokens.create("ann", "screen", "viewer")
    assert upstream.tokens.opened(made["token"]) == ("screen", "viewer", "")
    assert upstream.tokens.opened("screen.wrong") is None
    with upstream.database.reading() as tx:
        kept = [str(row) for row in tx.execute(select(t.tokens))]
    assert made["token"].partition(".")[2] not in "".join(kept)
    with pytest.raises(Conflict):
        upstream.tokens.create("ann", "screen", "viewer")
    upstream.tokens.revoke("ann", "screen")
    assert upstream.tokens.opened(made["token"]) is None
    with pytest.raises(NotFound):
        upstream.tokens.revoke("ann", "screen")


def test_a_device_shows_its_own_token_or_its_certificate(upstream: Upstream) -> None:
    token = upstream.tokens.create("ann", "t", "device", "press-7")["token"]
    person = upstream.tokens.create("ann", "p", "admin")["token"]
    assert upstream.tokens.device({}, f"Bearer {token}") == "press-7"
    assert upstream.tokens.device({"client_certificate": "press-8"}, None) == "press-8"
    for scope, authorization, error in (
        ({}, None, Unauthenticated),
        ({}, "Bearer nobody.x", Unauthenticated),
        ({}, f"Bearer {person}", Forbidden),
        ({"client_certificate": "../x"}, None, Unauthenticated),
    ):
        with pytest.raises(error):
            upstream.tokens.device(scope, authorization)


def test_a_token_that_makes_no_sense_is_not_made(upstream: Upstream) -> None:
    for name, role, device_id in (
        ("a b", "viewer", ""),
        ("a", "king", ""),
        ("a", "device", ""),
        ("a", "viewer", "d"),
        ("a", "device", "a/b"),
    ):
        with pytest.raises(BadInput):
            upstream.tokens.create("ann", name, role, device_id)
    assert upstream.tokens.all() == []


def test_the_log_says_who_did_what_page_by_page(upstream: Upstream) -> None:
    upstream.devices(2)
    upstream.fleet.change("ann", "d0", {"paused": True})
    newest = upstream.fleet.audited(limit=1)
    assert newest["audit"][0] | {"id": 0, "at": 0} == {
        "id": 0,
        "at": 0,
        "by": "ann",
        "action": "changed",
        "device_id": "d0",
        "detail": {"paused": True},
    }
    rest = upstream.fleet.audited(before=newest["next"])
    assert [entry["action"] for entry in rest["audit"]] == ["registered", "registered"]


# What is forgotten


def test_more_telemetry_and_samples_than_are_kept_are_deleted_the_oldest_first(upstream: Upstream) -> None:
    device = upstream.devices(1)["d0"]
    for i in range(10):
        upstream.clock[0] += 1
        device.tell("telemetry", i=i)
        device.tell("sample", **sample(i))
        device.report()
    device.tell("alarm", text="kept")
    device.report()
    few = replace(KEEP, telemetry=Bound(30 * DAY_S, 3), samples=Bound(30 * DAY_S, 4))
    assert upstream.fleet.forget(few)["telemetry"] == 7
    with upstream.database.reading() as tx:
        kept = tx.execute(select(t.items.c.payload).where(t.items.c.kind == "telemetry")).scalars()
        assert sorted(row["i"] for row in kept) == [7, 8, 9]
    assert (upstream.rows(t.samples), upstream.rows(t.items)) == (4, 4)


def test_a_device_that_tells_more_than_all_may_pushes_out_nothing_of_others(upstream: Upstream) -> None:
    for name, count in (("good", 3), ("rogue", 20)):
        device = upstream.device(name)
        for i in range(count):
            upstream.clock[0] += 1
            device.tell("alarm", n=i)
            device.report()
    assert upstream.fleet.forget(replace(KEEP, history=Bound(rows=10, of_device=5)))["alarm"] == 15
    told = [
        event["payload"]["n"]
        for name in ("good", "rogue")
        for event in upstream.fleet.device(name)["timeline"]
        if event["kind"] == "alarm"
    ]
    assert told == [2, 1, 0, 19, 18, 17, 16, 15]


def test_what_is_deleted_leaves_others_to_write_in_between(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.upstream.fleet._AT_ONCE", 2)
    device, deleted = upstream.device("d"), list[int]()
    for i in range(8):
        upstream.clock[0] += 1
        device.tell("alarm", n=i)
        device.report()
    upstream.clock[0] += 31 * DAY_S

    def count(_connection: Any, cursor: Any, statement: str, *_rest: Any) -> None:  # noqa: ANN401 - SQLAlchemy's
        if statement.startswith("DELETE FROM items"):
            deleted.append(cursor.rowcount)

    event.listen(Engine, "after_cursor_execute", count)
    try:
        assert upstream.fleet.forget(KEEP)["alarm"] == 8
    finally:
        event.remove(Engine, "after_cursor_execute", count)
    assert max(deleted) <= 3
    assert upstream.rows(t.items) == 0


def test_a_device_that_is_flashed_without_end_leaves_no_more_than_is_kept_and_pushes_out_nobody(
    upstream: Upstream,
) -> None:
    quiet = upstream.device("quiet")
    quiet.tell("alarm", n=-1)
    quiet.report()
    upstream.devices(1)
    upstream.fleet.change("d0", "d0", {"paused": True})  # a person whose token has the device's name
    keep, last, clock = replace(KEEP, history=Bound(30 * DAY_S, 1000, 9)), list[Batch](), upstream.clock
    for i in range(60):
        clock[0] += 1
        device = upstream.device("d0", f"life-{i}")
        device.tell("alarm", n=i)
        last = [*last[-2:], device.batch()]
        upstream.exchange(last[-1])
        if i % 20 == 19:
            upstream.fleet.forget(keep)
    assert upstream.rows(t.streams) == 1 + 1 + 3  # of the quiet one, the present life, and those before
    done = [entry["action"] for entry in upstream.fleet.audited()["audit"] if entry["device_id"] == "d0"]
    assert done == ["flashed anew"] * 7 + ["changed"]
    for batch in last:
        upstream.exchange(batch)
    told = [event["payload"]["n"] for event in upstream.fleet.device("d0")["timeline"] if event["kind"] == "alarm"]
    assert told == list(range(59, 50, -1))
    assert [event["kind"] for event in upstream.fleet.device("quiet")["timeline"]].count("alarm") == 1
    assert upstream.fleet.device("d0")["incarnation"] == "life-59"


def test_the_life_to_which_a_device_comes_back_is_remembered_however_often_its_disk_was_away(
    upstream: Upstream,
) -> None:
    own, clock = upstream.device("d"), upstream.clock
    own.tell("telemetry", n=1)
    first = own.batch()
    upstream.exchange(first)
    for i in range(8):
        for device in (upstream.device("d", f"without-disk-{i}"), upstream.device("d")):
            clock[0] += 5 * DAY_S
            upstream.exchange(replace(device.batch(), sent_at=clock[0], clock_synced=True))
        upstream.fleet.forget(KEEP)
    assert upstream.rows(t.items) == 0  # it is older than a month
    upstream.exchange(first)
    assert upstream.rows(t.items) == 0
    assert upstream.rows(t.streams) == 1 + 3


def test_a_database_of_the_version_before_is_brought_to_this_shape_and_keeps_what_was_taken(url: str) -> None:
    opened = Upstream(Database(url))
    device = opened.device("d")
    device.tell("alarm", text="hot")
    batch = device.batch()
    opened.exchange(batch)
    with opened.database.writing() as tx:
        tx.execute(text("ALTER TABLE streams RENAME COLUMN heard_at TO first_seen"))
        tx.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    opened.database.close()
    again = Upstream(Database(url))
    assert again.exchange(batch).received == ((1, 1),)
    assert again.rows(t.items) == 1
    again.database.close()


@pytest.mark.long
def test_thousands_of_starts_and_flashings_make_no_database_grow_without_end(tmp_path: Path) -> None:
    upstream = Upstream(Database(f"sqlite:///{tmp_path / 'upstream.db'}"))
    keep = replace(KEEP, telemetry=Bound(30 * DAY_S, 1000, 200), history=Bound(30 * DAY_S, 1000, 200))
    sizes = []
    for turn in range(5):
        for i in range(500):
            upstream.clock[0] += 60
            for name, life in (("starts", "one life"), ("flashed", f"life-{turn}-{i}")):
                device = upstream.device(name, life)
                device._number = 500 * turn + i  # noqa: SLF001 - it starts: its numbers go on
                device.tell("alarm", text="x" * 200)
                device.report()
        upstream.fleet.forget(keep)
        sizes.append((tmp_path / "upstream.db").stat().st_size)
    assert sizes[-1] <= sizes[1] * 1.1
    assert (upstream.rows(t.items), upstream.rows(t.streams)) == (400, 1 + 1 + 3)
    upstream.database.close()
