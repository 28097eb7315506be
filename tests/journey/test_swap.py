"""Another version of a bundle, put into the folder of a running daemon and taken over by a load order."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
from support import tiny
from support.daemon import Daemon, StartDaemon, assert_refused, binary_floats
from support.processes import eventually, marked

from appliance.adapters.host import process_bytes

pytestmark = [pytest.mark.journey, pytest.mark.long]

X = np.full((2, 5), 3, np.float32)


def point(link: Path, folder: Path) -> None:
    """Let `link` name `folder`, at once."""
    fresh = link.with_name("fresh")
    fresh.symlink_to(folder)
    fresh.rename(link)


def load(daemon: Daemon, name: str = "scale", **query: str) -> httpx.Response:
    """Order a load by someone who may."""
    path = f"/v2/repository/models/{name}/load"
    return daemon.http.post(path, params=query, headers=daemon.authorized("operate"))


def version(daemon: Daemon, graph: str = "g") -> str:
    """The version that answers; its answer must be of that version."""
    answer = daemon.infer(f"scale.{graph}", X)
    scale = binary_floats(answer)[0, 0] / X[0, 0]
    assert answer.headers["appliance-version"] == f"{scale:g}.0.0"
    return str(answer.headers["appliance-version"])


def test_a_load_order_takes_over_the_version_that_the_folder_holds_now_and_no_request_notices(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    one, two = (tiny.scale_bundle(tmp_path / f"v{n}", n, ["g"]) for n in (1, 2))
    link = tmp_path / "scale"
    link.symlink_to(one)
    with start_daemon("--bundle", str(link)) as daemon:
        enough = threading.Event()
        seen: Counter[str] = Counter()

        def ask() -> None:
            while not enough.is_set():
                seen[version(daemon)] += 1

        clients = [daemon.run_later(ask) for _ in range(2)]
        try:
            assert load(daemon).json()["fits"]
            assert daemon.model("scale")["swaps"]["beside"] == 0
            pid = daemon.worker_pid("scale")
            point(link, two)
            assert load(daemon, dry_run="true").json()["fits"]
            assert daemon.model("scale")["version"] == "1.0.0"
            assert load(daemon, "scale.g").json()["fits"]
            assert daemon.model("scale")["version"] == "2.0.0"
            assert daemon.worker_pid("scale") != pid
            eventually(lambda: seen["2.0.0"] > 10, "the new version answers")
        finally:
            enough.set()
        for client in clients:
            client.result(20)
        assert seen["1.0.0"]
        assert daemon.http.get("/v2/models/scale/versions/2.0.0/ready").status_code == 200
        assert "has no version '1.0.0'" in assert_refused(daemon.http.get("/v2/models/scale/versions/1.0.0"), 404)
        metrics = daemon.http.get("/metrics", headers=daemon.authorized("operate")).text
        assert 'appliance_swaps_total{model="scale",outcome="beside"} 1.0' in metrics
        assert re.search(r'appliance_swap_seconds_sum{model="scale",part="switch"} \d', metrics)
        eventually(lambda: len(marked(daemon.mark)) == 2, "the old worker is gone")


def test_a_load_order_for_a_version_that_cannot_be_proven_says_why_and_changes_nothing(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    one = tiny.scale_bundle(tmp_path / "v1", 1, null=True)
    wrong = tiny.scale_bundle(tmp_path / "v2", 2, null=True, proven=False)
    link = tmp_path / "scale"
    link.symlink_to(one)
    with start_daemon("--bundle", str(link), APPLIANCE_RUNTIME="null") as daemon:
        point(link, wrong)
        sentence = assert_refused(load(daemon), 503)
        assert sentence.startswith("scale stays at version 1.0.0: version 2.0.0 is not proven: golden answer 'y'")
        assert version(daemon) == "1.0.0"
        assert daemon.model("scale")["swaps"]["refused"] == 1
        eventually(lambda: len(marked(daemon.mark)) == 2, "the worker that failed is gone")
        point(link, one)
        assert load(daemon).status_code == 200


@pytest.mark.long
@pytest.mark.timeout(900)
def test_memory_after_fifty_swaps_is_within_two_percent_of_memory_before(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    versions = [tiny.scale_bundle(tmp_path / f"v{n}", n) for n in (1, 2)]
    link = tmp_path / "scale"
    link.symlink_to(versions[0])
    with start_daemon("--bundle", str(link), APPLIANCE_MEMORY__IDLE_TRIM_S="1") as daemon:

        def swap(number: int) -> None:
            point(link, versions[(number + 1) % 2])
            assert load(daemon).status_code == 200
            for _ in range(20):
                assert version(daemon) == f"{(number + 1) % 2 + 1}.0.0"

        def size_bytes() -> int:
            """PSS of all processes, once it has not changed for a while: an idle worker gives some back."""
            eventually(lambda: not daemon.status()["workers_aside"], "the old worker is gone")
            seen: list[tuple[float, int]] = []

            def rests() -> int:
                seen.append((time.monotonic(), sum(process_bytes(pid) or 0 for pid in marked(daemon.mark))))
                lately = [size for at, size in seen if at > seen[-1][0] - 3]
                return lately[-1] if len(lately) < len(seen) and max(lately) < min(lately) * 1.002 else 0

            return eventually(rests, "memory does not change", 60)

        for number in range(2):
            swap(number)
        before = size_bytes()
        descriptors = daemon.descriptors()
        for number in range(50):
            swap(number)
        after = size_bytes()
        print(f"{before / 2**20:.1f} MiB before, {after / 2**20:.1f} MiB after 50 swaps: {after / before - 1:+.2%}")
        assert after < before * 1.02
        assert daemon.descriptors() == descriptors
