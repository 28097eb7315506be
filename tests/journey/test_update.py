"""From `provision publish` to a device that serves the new version, or goes back by itself, while requests flow.

Past 400 lines because every test is one fate of an update, with the same mirror, device and traffic.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny
from support.broker import Listener, Mosquitto, needs_mosquitto
from support.daemon import Daemon, StartDaemon, appliance, binary_floats
from support.mirror import Mirror
from support.processes import clean_environment, eventually, new_mark
from support.workshop import PROVISION

pytestmark = [pytest.mark.journey, pytest.mark.timeout(240)]

X = np.full((2, 5), 3, np.float32)
ENDS = {"good", "refused", "undone"}
DEVICE = "press-7"


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    """An empty repository that is served."""
    with Mirror(tmp_path / "published") as served:
        yield served


def follow(start_daemon: StartDaemon, mirror: Mirror, bundle: Path, folder: str = "daemon", **settings: str) -> Daemon:
    """Start a daemon that serves `bundle` and follows the channel stable; trials are short.

    `settings` are those of updates, by their last name, or whole variables.
    """
    chosen = {
        "TRIAL_S": "1",
        "SHADOW_S": "3",
        "SHADOW_REQUESTS": "5",
        "CHECK_S": "3600",
        "RESERVE_BYTES": "0",
        "TRIAL_RATIO": "50",
    } | settings
    env = {key if key.startswith("APPLIANCE_") else f"APPLIANCE_UPDATE__{key}": value for key, value in chosen.items()}
    return (
        start_daemon(
            "--bundle",
            str(bundle),
            folder=folder,
            APPLIANCE_RUNTIME="null",
            APPLIANCE_CLOCK__ASSUME_SYNCED="true",
            APPLIANCE_UPDATE__URL=mirror.url,
            APPLIANCE_UPDATE__ROOT=str(mirror.root),
            **env,
        )
        .wait_serving()
        .wait_ready()
    )


def order(daemon: Daemon, command: str, **args: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Give an order by HTTP."""
    document = {"id": new_mark(), "command": command, "args": args}
    answer = daemon.http.post("/v1/commands", json=document, headers=daemon.authorized("admin"))
    return dict(answer.raise_for_status().json())


def deployments(daemon: Daemon) -> list[dict[str, Any]]:
    return list(daemon.http.get("/v1/deployments").raise_for_status().json()["deployments"])


def ended(daemon: Daemon, count: int = 1) -> dict[str, Any]:
    """The newest of `count` deployments, once it has ended."""

    def look() -> dict[str, Any] | None:
        found = deployments(daemon)
        return found[0] if len(found) >= count and found[0]["step"] in ENDS else None

    found = eventually(look, "the deployment has ended", 60)
    assert found
    return found


@contextmanager
def traffic(daemon: Daemon) -> Iterator[Counter[str]]:
    """Requests all the time; none may fail, and each answer is of the version that it names."""
    enough, seen = threading.Event(), Counter[str]()

    def ask() -> None:
        while not enough.is_set():
            answer = daemon.infer("scale.g", X)
            scale = binary_floats(answer)[0, 0] / X[0, 0]
            assert answer.headers["appliance-version"] == f"{scale:g}.0.0"
            seen[f"{scale:g}.0.0"] += 1

    clients = [daemon.run_later(ask) for _ in range(2)]
    try:
        yield seen
    finally:
        enough.set()
    for client in clients:
        client.result(20)


def test_a_published_version_is_fetched_proven_and_serves_and_the_next_start_serves_it_too(
    start_daemon: StartDaemon, mirror: Mirror, tmp_path: Path
) -> None:
    one, two = (tiny.scale_bundle(tmp_path / f"v{n}", n, null=True) for n in (1, 2))
    daemon = follow(start_daemon, mirror, one)
    with traffic(daemon) as seen:
        digest = mirror.add(two)
        assert order(daemon, "update")["status"] == "done"
        done = ended(daemon)
        eventually(lambda: seen["2.0.0"] > 10, "the new version answers")
    assert seen["1.0.0"] > 10
    assert (done["step"], done["digest"], done["committed"]) == ("good", digest, True), done
    steps = " ".join(verdict["step"] for verdict in done["verdicts"])
    assert steps == "check reserve fetch verify compile prove memory latency shadow switch trial"
    figures = {verdict["step"]: verdict["figures"] for verdict in done["verdicts"]}
    assert figures["shadow"] == {"compared": 5.0, "agreement": 1.0}
    assert figures["trial"]["requests"] > 10
    assert figures["trial"]["errors"] == 0
    assert daemon.model("scale")["trust"] == "signed"
    daemon.stop()
    again = follow(start_daemon, mirror, one)
    assert (again.model("scale")["version"], again.model("scale")["trust"]) == ("2.0.0", "signed")
    assert order(again, "rollback")["result"]["to"] == "as it was given"
    eventually(lambda: deployments(again)[0]["step"] == "undone", "the version before is back")
    undone = ended(again)
    assert again.model("scale")["version"] == "1.0.0"
    assert "rolled back by order" in undone["reason"]
    order(again, "update")
    eventually(lambda: "rolled back by order" in (again.status()["update"]["problem"] or ""), "it is not taken again")
    for _ in range(10):  # also while the channel is looked at anew, there is a reason
        order(again, "update")
        problem = again.status()["update"]["problem"]
        assert "rolled back by order" in problem
        assert "failed" not in problem  # it was wanted
    again.stop()


@pytest.mark.long
def test_a_version_that_is_slower_or_wrong_is_refused_before_it_serves(
    start_daemon: StartDaemon, mirror: Mirror, tmp_path: Path
) -> None:
    one = tiny.scale_bundle(tmp_path / "v1", 1, null=True)
    slow = tiny.scale_bundle(tmp_path / "v2", 2, null=True, delay_s=0.1)
    wrong = tiny.scale_bundle(tmp_path / "v3", 3, null=True, proven=False)
    daemon = follow(start_daemon, mirror, one)
    with traffic(daemon) as seen:
        for number, (bundle, step, reason) in enumerate(
            [(slow, "latency", "g takes 1"), (wrong, "prove", "golden answer 'y'")], 1
        ):
            mirror.add(bundle)
            order(daemon, "update")
            done = ended(daemon, number)
            assert (done["step"], done["failed_step"]) == ("refused", step), done
            assert reason in done["reason"]
    assert set(seen) == {"1.0.0"}
    eventually(lambda: not list((daemon.state_dir / "slots").iterdir()), "nothing of them is left")
    daemon.stop()


def test_a_version_whose_worker_dies_on_trial_is_taken_back_by_itself(
    start_daemon: StartDaemon, mirror: Mirror, tmp_path: Path
) -> None:
    one, two = (tiny.scale_bundle(tmp_path / f"v{n}", n, null=True) for n in (1, 2))
    daemon = follow(start_daemon, mirror, one, TRIAL_S="60", SHADOW_REQUESTS="0")
    mirror.add(two)
    order(daemon, "update")
    eventually(lambda: daemon.model("scale")["version"] == "2.0.0", "it serves on trial", 30)
    os.kill(daemon.worker_pid("scale"), signal.SIGKILL)
    done = ended(daemon)
    assert (done["step"], done["failed_step"], done["committed"]) == ("undone", "trial", False), done
    assert daemon.model("scale")["version"] == "1.0.0"
    assert binary_floats(daemon.infer("scale.g", X))[0, 0] == 3
    daemon.stop()


@pytest.mark.long
def test_a_version_that_is_slower_on_live_requests_is_taken_back_by_itself_and_no_request_is_lost(
    start_daemon: StartDaemon, mirror: Mirror, tmp_path: Path
) -> None:
    one = tiny.scale_bundle(tmp_path / "v1", 1, null=True, delay_s=0.002)
    two = tiny.scale_bundle(tmp_path / "v2", 2, null=True, delay_s=0.15)
    daemon = follow(start_daemon, mirror, one, LATENCY_RATIO="100", TRIAL_RATIO="1", TRIAL_S="6")
    with traffic(daemon) as seen:
        eventually(lambda: seen["1.0.0"] > 100, "it is known how fast the version before is")
        mirror.add(two)
        order(daemon, "update")
        done = ended(daemon)
        before = seen["1.0.0"]
        eventually(lambda: seen["1.0.0"] > before + 10, "the version before answers again")
    assert (done["step"], done["failed_step"]) == ("undone", "trial"), done
    assert "ms on trial and took" in done["reason"]
    assert seen["2.0.0"] > 20
    assert daemon.model("scale")["version"] == "1.0.0"
    daemon.stop()


@pytest.mark.long
def test_an_operator_sees_how_far_an_update_is_and_takes_it_back_by_hand_while_requests_flow(
    start_daemon: StartDaemon, mirror: Mirror, tmp_path: Path
) -> None:
    one, two = (tiny.scale_bundle(tmp_path / f"v{n}", n, null=True) for n in (1, 2))
    daemon = follow(start_daemon, mirror, one, TRIAL_S="15")
    env = {"APPLIANCE_URL": daemon.url, "APPLIANCE_TOKEN": daemon.token("admin")}
    with traffic(daemon) as seen:
        mirror.add(two)
        updated = appliance("update", "--wait", env=env)
        assert (updated.returncode, updated.stdout) == (0, "deployment 1: scale 2.0.0 is good\n"), updated
        told = updated.stderr.splitlines()
        assert any(re.fullmatch(r"deployment 1 is at trial, [1-9]0 %", line) for line in told), told
        eventually(lambda: seen["2.0.0"] > 10, "the new version answers")
        back = appliance("rollback", "--wait", "--json", env=env)
        assert json.loads(back.stdout)["deployment"]["step"] == "undone"
        before = seen["1.0.0"]
        eventually(lambda: seen["1.0.0"] > before + 10, "the version before answers again")
    assert back.returncode == 0
    again = appliance("update", "--wait", env=env)
    assert again.returncode == 1
    assert again.stdout.startswith("scale 2.0.0 is not taken again by itself")
    order(daemon, "pause")
    held = appliance("update", "--wait", env=env)
    assert (held.returncode, held.stdout) == (1, "updates are paused: the order resume lets them go on\n")
    daemon.stop()


@pytest.mark.long
def test_a_link_that_cuts_corrupts_and_replays_delays_an_update_and_no_more(
    start_daemon: StartDaemon, mirror: Mirror, tmp_path: Path
) -> None:
    one, two = (tiny.scale_bundle(tmp_path / f"v{n}", n, null=True) for n in (1, 2))
    mirror.add(one)
    shutil.copytree(mirror.folder / "metadata", tmp_path / "old")
    daemon = follow(start_daemon, mirror, one, SHADOW_REQUESTS="0")
    with traffic(daemon) as seen:
        mirror.add(two)
        mirror.bodies["/blobs/"] = b"corrupted on the way"
        order(daemon, "update")
        assert "is not what was signed" in ended(daemon)["reason"]
        assert set(seen) == {"1.0.0"}
        mirror.bodies.clear()
        mirror.bodies["timestamp.json"] = (tmp_path / "old" / "timestamp.json").read_bytes()
        order(daemon, "update")
        eventually(lambda: "BadVersionNumber" in (daemon.status()["update"]["problem"] or ""), "a replay is told")
        mirror.bodies.clear()
        mirror.cuts["/blobs/"] = 40
        order(daemon, "update")
        assert ended(daemon, 2)["step"] == "good"
        eventually(lambda: seen["2.0.0"] > 10, "the new version answers")
    daemon.stop()


@pytest.mark.long
def test_a_daemon_stops_at_once_while_a_download_hangs_and_goes_on_with_it_after_its_next_start(
    start_daemon: StartDaemon, mirror: Mirror, tmp_path: Path
) -> None:
    one, two = (tiny.scale_bundle(tmp_path / f"v{n}", n, null=True) for n in (1, 2))
    daemon = follow(start_daemon, mirror, one)
    mirror.stalled = "/blobs/"
    mirror.add(two)
    order(daemon, "update")
    eventually(lambda: daemon.status()["update"]["step"] == "fetch", "it fetches")
    eventually(lambda: any("/blobs/" in path for path, _range in mirror.asked), "it hangs")
    began = time.monotonic()
    daemon.stop()
    assert time.monotonic() - began < 8
    mirror.mended.set()
    again = follow(start_daemon, mirror, one, SHADOW_REQUESTS="0")
    done = ended(again)
    assert (done["step"], done["begins"]["fetch"]) == ("good", 2)
    again.stop()


@pytest.mark.long
def test_a_download_is_paused_goes_on_and_is_aborted_by_order_and_a_pause_outlives_the_daemon(
    start_daemon: StartDaemon, mirror: Mirror, tmp_path: Path
) -> None:
    one, two = (tiny.scale_bundle(tmp_path / f"v{n}", n, null=True) for n in (1, 2))
    daemon = follow(start_daemon, mirror, one, SHADOW_REQUESTS="0")

    def fetching() -> bool:
        return bool(daemon.status()["update"]["step"] == "fetch" and any("/blobs/" in path for path, _ in mirror.asked))

    mirror.stalled = "/blobs/"
    mirror.add(two)
    order(daemon, "update")
    eventually(fetching, "it fetches")
    assert order(daemon, "pause")["status"] == "done"
    eventually(lambda: daemon.status()["update"]["paused"], "it has stopped")
    assert deployments(daemon)[0]["verdicts"][-1]["reason"] == "an order came between"
    daemon.stop()
    mirror.asked.clear()
    daemon = follow(start_daemon, mirror, one, SHADOW_REQUESTS="0")
    assert daemon.status()["update"]["paused"]
    order(daemon, "resume")
    eventually(fetching, "it fetches again", 20)
    assert order(daemon, "abort")["status"] == "done"
    done = ended(daemon)
    assert done["step"] == "refused"
    assert done["reason"].startswith("aborted by order")
    assert order(daemon, "abort")["reason"] == "no deployment is under way"
    mirror.mended.set()
    order(daemon, "update")
    assert ended(daemon, 2)["step"] == "good"
    daemon.stop()


def test_nothing_is_installed_while_the_clock_shows_a_time_that_is_past_and_nothing_before_its_window(
    start_daemon: StartDaemon, mirror: Mirror, tmp_path: Path
) -> None:
    one, two = (tiny.scale_bundle(tmp_path / f"v{n}", n, null=True) for n in (1, 2))
    hour = int(time.time() // 3600 + 12) % 24
    window = {"WINDOW": f"{hour:02}:00-{hour:02}:30", "PINS": '{"scale": "2.0.0"}'}
    daemon = follow(start_daemon, mirror, one, APPLIANCE_FAULTS__ENABLED="true", **window)

    def fault(name: str, **more: float) -> None:
        document = {"fault": name, **more}
        daemon.http.post("/v1/faults", json=document, headers=daemon.authorized("admin")).raise_for_status()

    def problem(part: str) -> None:
        order(daemon, "update")
        eventually(lambda: part in (daemon.status()["update"]["problem"] or ""), f"it says {part}")

    mirror.at = datetime.now(timezone.utc) + timedelta(days=100)
    mirror.add(one)
    fault("clock-step", amount=100 * 86400.0, for_s=600)
    problem("is pinned to 2.0.0, which is not published")
    fault("none")  # the battery was empty: the clock shows a time before the signature that was accepted
    mirror.add(two)
    problem("clock_not_trusted: the clock is 8")
    assert not deployments(daemon)
    assert binary_floats(daemon.infer("scale.g", X))[0, 0] == 3
    fault("clock-step", amount=100 * 86400.0, for_s=600)
    order(daemon, "update")
    eventually(lambda: daemon.status()["update"]["step"] == "prove", "all is fetched and waits for the window")
    daemon.stop()


def test_a_version_that_is_revoked_while_it_serves_is_left_for_the_one_before(
    start_daemon: StartDaemon, mirror: Mirror, tmp_path: Path
) -> None:
    one, two, three = (tiny.scale_bundle(tmp_path / f"v{n}", n, null=True) for n in (1, 2, 3))
    daemon = follow(start_daemon, mirror, one, SHADOW_REQUESTS="0", TRIAL_S="0")
    for number, version in enumerate((two, three), 1):
        mirror.add(version)
        order(daemon, "update")
        assert ended(daemon, number)["step"] == "good"
    mirror.repository.revoke("scale", "3.0.0", "reads 0 as O")
    order(daemon, "update")
    eventually(lambda: daemon.model("scale")["version"] == "2.0.0", "the version before serves", 30)
    eventually(lambda: deployments(daemon)[0]["reason"] == "revoked: reads 0 as O", "the reason is told")
    assert daemon.model("scale")["trust"] == "signed"
    daemon.stop()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_daemon_that_is_killed_at_any_moment_of_an_update_ends_with_the_old_or_the_new_version(
    start_daemon: StartDaemon, mirror: Mirror, tmp_path: Path
) -> None:
    one, two = (tiny.scale_bundle(tmp_path / f"v{n}", n, null=True) for n in (1, 2))
    mirror.add(two)
    seed = random.randrange(10**6)  # noqa: S311 - not for secrets
    print(f"seed {seed}")
    moments = random.Random(seed)  # noqa: S311 - not for secrets
    served: Counter[str] = Counter()
    for number in range(12):
        folder = f"daemon-{number % 3}"  # some go on where another was killed before
        started = time.monotonic()
        daemon = follow(start_daemon, mirror, one, folder=folder, TRIAL_S="0.5", SHADOW_S="0.3", CHECK_S="1")
        served[str(daemon.model("scale")["version"])] += 1
        assert binary_floats(daemon.infer("scale.g", X))[0, 0] in {3, 6}
        time.sleep(max(0.0, moments.uniform(0.0, 3.0) - (time.monotonic() - started)))
        daemon.kill()
    for number in range(3):
        daemon = follow(
            start_daemon, mirror, one, folder=f"daemon-{number}", TRIAL_S="0.5", SHADOW_S="0.3", CHECK_S="1"
        )
        eventually(lambda: deployments(daemon) and deployments(daemon)[0]["step"] in ENDS, "it ends", 60)  # noqa: B023
        found = deployments(daemon)[0]
        expected = "2.0.0" if found["step"] == "good" else "1.0.0"
        assert daemon.model("scale")["version"] == expected, found
        daemon.stop()
    print(f"served at the starts: {dict(served)}")


@needs_mosquitto
@pytest.mark.long
def test_an_operator_publishes_and_orders_from_a_shell_and_a_replay_of_the_order_does_nothing(
    start_daemon: StartDaemon, broker: Mosquitto, tmp_path: Path
) -> None:
    one, two = (tiny.scale_bundle(tmp_path / f"v{n}", n, null=True) for n in (1, 2))
    environment = clean_environment() | {"PROVISION_PASSPHRASE": "correct horse"}

    def provision(*arguments: str) -> str:
        run = subprocess.run(
            [str(PROVISION), *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    with Mirror(tmp_path / "served") as mirror:
        shutil.rmtree(mirror.folder)
        provision("publish", "init", str(mirror.folder), "--keys", "keys")
        provision("command", "new-key", "ann", "--keys", "commanders")
        provision("publish", "commanders", str(mirror.folder), "commanders/ann.pub.json", "--keys", "keys")
        provision("publish", "add", str(mirror.folder), str(one), "--keys", "keys")
        provision("publish", "promote", str(mirror.folder), "scale", "1.0.0", "stable", "--keys", "keys")
        mqtt = {"APPLIANCE_MQTT__HOST": "127.0.0.1", "APPLIANCE_MQTT__PORT": str(broker.start().port)}
        daemon = follow(start_daemon, mirror, one, SHADOW_REQUESTS="0", APPLIANCE_DEVICE_ID=DEVICE, **mqtt)
        eventually(lambda: daemon.status()["mqtt"]["connected"], "it is connected")
        eventually(lambda: daemon.status()["update"]["looked_s_ago"] is not None, "it knows who may order")
        provision("publish", "add", str(mirror.folder), str(two), "--keys", "keys", "--channel", "stable")
        sign = ("command", "sign", "update", "--device", DEVICE, "--key", "ann", "--keys", "commanders")
        payload = provision(*sign).strip()
        with Listener(broker.port) as listener:
            for correlation in (b"first", b"again"):
                listener.publish(f"appliance/{DEVICE}/cmd", payload.encode(), correlation=correlation)
            results = f"appliance/{DEVICE}/cmd/result"
            eventually(lambda: len(listener.on(results)) == 2, "both are answered")
            first, again = (message.document for message in listener.on(results))
            assert first["status"] == "done"
            assert first == again
            listener.publish(f"appliance/{DEVICE}/cmd", {"id": "bare", "command": "rollback"})
            assert "sign it" in listener.wait_for(results, id="bare", status="refused").document["reason"]
            good = ended(daemon)
            assert good["step"] == "good"
            report = listener.wait_for(f"appliance/{DEVICE}/deployments", id=good["id"])
            assert report.document == good | {"committed": True}
            assert not report.retained
            state = listener.wait_for(f"appliance/{DEVICE}/state", ready=True)
            assert state.document["models"]
        assert len(deployments(daemon)) == 1
        daemon.stop()
