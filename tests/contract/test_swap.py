"""Hot swaps with real workers: who answers what, what happens when memory is short or something breaks meanwhile.

Past 400 lines because every case is a scenario around the same service, load and two versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny
from support.processes import children, resident_bytes
from typing_extensions import Self

from appliance import wire
from appliance.core.limits import Limits
from appliance.core.pressure import Bounds
from appliance.memory import Keeper, ModelState, Rules
from appliance.service import Bundle, InferRequest, InferResponse, Service
from appliance.swap import Swap
from appliance.worker import BEHIND
from models.errors import DeadlineExceeded, InsufficientMemory, NotFound, NotReady
from models.folder import BundleFolder
from models.spec import Tensor

pytestmark = pytest.mark.contract

MIB = 2**20
WEIGHTS_BYTES = 100 * MIB
ROOM_FOR_ONE, ROOM_FOR_TWO = 270 * MIB, 2000 * MIB
"""Budgets for versions of WEIGHTS_BYTES; nothing was measured before, so their need is a guess at first."""
X = np.full((1, 3), 2, np.float32)


def opened(folder: Path, runtime: str = "null") -> Bundle:
    """The bundle in `folder`."""
    manifest = BundleFolder(folder).manifest
    order = wire.Open("scale", runtime, bundle=str(folder), digest=manifest.digest, concurrency=2)
    limits = Limits(body_bytes=1024, queue=1000)
    return Bundle([order], limits, manifest=manifest, on_ready=lambda _ready: None, file_bytes=1, folder=folder)


def reread(bundle: Bundle) -> Bundle | None:
    """As the daemon does it."""
    assert bundle.folder
    found = opened(bundle.folder)
    return None if found.digest == bundle.digest else found


@contextlib.asynccontextmanager
async def serving(bundle: Bundle, budget_bytes: int = ROOM_FOR_TWO) -> AsyncIterator[Service]:
    """A service of `bundle` that is ready; when it is stopped nothing is left of it."""
    rules = Rules(budget_bytes, Bounds(0, 0), idle_unload_s=float("inf"), spare=False)
    keeper = Keeper([bundle], rules)
    service = Service([bundle], device_id="d", facts=dict, keeper=keeper, reread=reread)
    before = children()
    service.start()
    try:
        await service.load("scale")
        yield service
    finally:
        await service.stop(5)
        assert children() == before


async def ask(service: Service, graph: str = "g", **how: Any) -> InferResponse:  # noqa: ANN401 - of InferRequest
    """Ask a graph; the answer is that of the version that it names, or the test fails."""
    response = await service.infer(InferRequest(f"scale.{graph}", [Tensor.from_array("x", X)], **how))
    scale = float(response.origin.version.partition(".")[0])
    assert np.array_equal(response.tensors[0].to_array(), X * scale), response
    return response


@dataclass
class Load:
    """Clients that ask again and again, and what they got."""

    service: Service
    clients: int = 4
    versions: Counter[str] = field(default_factory=Counter)

    async def __aenter__(self) -> Self:
        self._enough = False
        self._tasks = [asyncio.ensure_future(self._ask()) for _ in range(self.clients)]
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._enough = True
        await asyncio.gather(*self._tasks)  # raises for any request that failed or was answered wrongly

    async def _ask(self) -> None:
        while not self._enough:
            self.versions[(await ask(self.service)).origin.version] += 1
            await asyncio.sleep(0.01)  # much of the machine is left to those who load


def versions(folder: Path, **sizes: float) -> list[Path]:
    """Folders of two versions of a bundle of the null runtime."""
    return [tiny.scale_bundle(folder / f"v{scale}", scale, null=True, **sizes) for scale in (1, 2)]


def run(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(scenario())


async def until(look: Callable[[], object], within_s: float = 20) -> None:
    end_at = time.monotonic() + within_s
    while not look():
        assert time.monotonic() < end_at
        await asyncio.sleep(0.005)


async def swap_under_load(folder: Path, swaps: int) -> tuple[list[Swap], float]:
    """Swap to and fro; every request is answered by the version that it names.

    With the swaps the memory of all processes after them, over that after the first tenth.
    """
    one, two = versions(folder)
    done: list[Swap] = []
    asked: Counter[str] = Counter()
    sizes_bytes: list[int] = []
    async with serving(opened(one)) as service:
        for end in (swaps // 10, swaps):
            async with Load(service) as load:
                while len(done) < end:
                    done.append(await service.swap(opened((two, one)[len(done) % 2])))
            asked += load.versions
            await until(lambda: not service.status()["workers_aside"])
            sizes_bytes.append(sum(map(resident_bytes, {os.getpid(), *children()})))
        (status,) = service.status()["models"]
        assert status["swaps"]["beside"] == swaps
    assert min(asked["1.0.0"], asked["2.0.0"]) > swaps / 2
    switches_us = [swap.switch_s * 1e6 for swap in done]
    print(
        f"{asked.total()} requests during {swaps} swaps; switch in microseconds: median "
        f"{statistics.median(switches_us):.1f}, longest {max(switches_us):.1f}; memory in MiB "
        f"{[round(size / MIB, 1) for size in sizes_bytes]}"
    )
    return done, sizes_bytes[1] / sizes_bytes[0]


def test_swaps_under_load_fail_no_request_and_every_answer_is_of_the_version_it_names(tmp_path: Path) -> None:
    asyncio.run(swap_under_load(tmp_path, 10))


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_thousand_swaps_under_load_fail_no_request_99_in_100_switch_in_100_microseconds_and_memory_stays(
    tmp_path: Path,
) -> None:
    done, grown = asyncio.run(swap_under_load(tmp_path, 1000))
    assert not any(swap.gap_s for swap in done)
    over = [swap.switch_s for swap in done if swap.switch_s >= 100e-6]
    # The switch is a few assignments on the event loop; a longer one is one during which this process had no core.
    assert len(over) <= len(done) // 100, over
    assert max(over, default=0.0) < 5e-3
    assert grown < 1.02


def test_requests_that_wait_or_run_are_answered_by_the_version_they_came_to(tmp_path: Path) -> None:
    one, two = versions(tmp_path, delay_s=0.2)

    async def scenario() -> None:
        async with serving(opened(one)) as service:
            swapping = asyncio.ensure_future(service.swap(opened(two)))
            await until(lambda: service.status()["workers_aside"])
            early: list[asyncio.Future[InferResponse]] = []
            while not swapping.done():
                if sum(not each.done() for each in early) < 20:  # always some that run and many that wait
                    early.append(asyncio.ensure_future(ask(service)))
                await asyncio.sleep(0.001)
            waiting = [each for each in early if not each.done()]
            assert len(waiting) >= 10
            late = await ask(service)
            assert late.origin.version == "2.0.0"
            answers = await asyncio.gather(*waiting)
            assert sum(answer.origin.version == "1.0.0" for answer in answers) >= 10

    run(scenario)


def test_a_version_that_cannot_be_proven_leaves_the_one_before_serving_and_the_reason_is_told(tmp_path: Path) -> None:
    (one, _two), wrong = versions(tmp_path), tiny.scale_bundle(tmp_path / "v3", 3, null=True, proven=False)

    async def scenario() -> None:
        async with serving(opened(one)) as service:
            (pid,) = [worker["pid"] for worker in service.status()["workers"]]
            async with Load(service) as load:
                with pytest.raises(NotReady, match=r"scale stays at version 1\.0\.0: version 3\.0\.0 is not proven"):
                    await service.swap(opened(wrong))
            status = service.status()
            assert [worker["pid"] for worker in status["workers"]] == [pid]
            assert status["workers"][0]["restarts"] == 0
            assert status["workers_aside"] == []
            assert "golden answer 'y' is off" in status["models"][0]["swaps"]["refusal"]
            assert set(load.versions) == {"1.0.0"}

    run(scenario)


def test_where_memory_holds_only_one_requests_wait_during_the_gap_and_its_length_is_told(tmp_path: Path) -> None:
    one, two = versions(tmp_path, weights_bytes=WEIGHTS_BYTES)

    async def scenario() -> None:
        async with serving(opened(one), ROOM_FOR_ONE) as service:
            two_now = opened(two)
            two_now.supervisor.memory = opened_memory(service)
            async with Load(service) as load:
                swapping = asyncio.ensure_future(service.swap(two_now))
                await until(lambda: next(one.state for one in service.repository()) is ModelState.LOADING)
                with pytest.raises(DeadlineExceeded):
                    await ask(service, deadline_ms=1)
                swap = await swapping
            assert load.versions["2.0.0"]
            assert not swap.admission.fits
            assert swap.admission.need_bytes > swap.admission.have_bytes
            assert swap.admission.would_evict[0] == "scale"
            assert 0 < swap.gap_s < 20
            counts = service.status()["models"][0]["swaps"]
            assert (counts["with_gap"], counts["last_gap_s"]) == (1, swap.gap_s)

    run(scenario)


def opened_memory(service: Service) -> Any:  # noqa: ANN401 - of the keeper's own kind
    """What the version that serves was measured to take: the next one takes as much."""
    return service._bundles[0].supervisor.memory  # noqa: SLF001 - a store would carry it


def test_after_a_gap_in_which_the_next_version_fails_the_one_before_is_loaded_again(tmp_path: Path) -> None:
    one = tiny.scale_bundle(tmp_path / "v1", 1, null=True, weights_bytes=WEIGHTS_BYTES)
    wrong = tiny.scale_bundle(tmp_path / "v3", 3, null=True, proven=False, weights_bytes=WEIGHTS_BYTES)

    async def scenario() -> None:
        others = children()  # as a database that other tests have started
        async with serving(opened(one), ROOM_FOR_ONE) as service:
            bad, first = opened(wrong), children() - others
            bad.supervisor.memory = opened_memory(service)
            async with Load(service) as load:
                with pytest.raises(NotReady, match=r"stays at version 1\.0\.0: version 3\.0\.0 is not proven"):
                    await service.swap(bad)
                assert children().isdisjoint(first)
                before = load.versions.total()
                await until(lambda: load.versions.total() > before)
            assert set(load.versions) == {"1.0.0"}
            assert service.ready

    run(scenario)


def test_a_version_that_would_not_fit_even_alone_is_refused_with_the_figures_and_nothing_stops(tmp_path: Path) -> None:
    one, _two = versions(tmp_path)
    large = tiny.scale_bundle(tmp_path / "v3", 3, null=True)

    async def scenario() -> None:
        async with serving(opened(one), ROOM_FOR_ONE) as service:
            too_large = opened(large)
            too_large.file_bytes = 10 * ROOM_FOR_ONE
            async with Load(service):
                with pytest.raises(InsufficientMemory) as refused:
                    await service.swap(too_large)
            assert refused.value.need_bytes > ROOM_FOR_ONE > refused.value.have_bytes
            assert service.status()["workers"][0]["restarts"] == 0

    run(scenario)


def test_graphs_that_a_version_adds_or_leaves_out_come_and_go_with_it_at_once(tmp_path: Path) -> None:
    one = tiny.scale_bundle(tmp_path / "v1", 1, ["g", "old"], null=True, delay_s=0.3)
    two = tiny.scale_bundle(tmp_path / "v2", 2, ["g", "new"], null=True)

    async def scenario() -> None:
        async with serving(opened(one)) as service:
            assert {info.name for info in service.models()} == {"scale", "scale.g", "scale.old"}
            runs: asyncio.Future[InferResponse] | None = None
            swapping = asyncio.ensure_future(service.swap(opened(two)))
            while not swapping.done():
                if runs is None or runs.done():
                    runs = asyncio.ensure_future(ask(service, "old"))
                await asyncio.sleep(0.001)
            assert {info.name for info in service.models()} == {"scale", "scale.g", "scale.new"}
            with pytest.raises(NotFound, match=r"no model 'scale\.old'; served are scale, scale\.g, scale\.new"):
                await ask(service, "old")
            assert (await ask(service, "new")).origin.version == "2.0.0"
            assert runs
            with contextlib.suppress(NotFound):  # the last one may have begun after the switch
                assert (await runs).origin.version == "1.0.0"

    run(scenario)


def test_a_version_whose_worker_is_killed_while_it_loads_is_refused(tmp_path: Path) -> None:
    one, two = versions(tmp_path)

    async def scenario() -> None:
        async with serving(opened(one)) as service:
            async with Load(service):
                swapping = asyncio.ensure_future(service.swap(opened(two)))
                await until(lambda: service.status()["workers_aside"])
                os.kill(service.status()["workers_aside"][0]["pid"], signal.SIGKILL)
                with pytest.raises(NotReady, match="it was ended by SIGKILL"):
                    await swapping
            assert (await ask(service)).origin.version == "1.0.0"

    run(scenario)


def test_a_version_whose_worker_is_killed_while_the_next_one_loads_recovers_or_is_replaced(tmp_path: Path) -> None:
    one, two = versions(tmp_path)

    async def scenario() -> None:
        async with serving(opened(one)) as service:
            swapping = asyncio.ensure_future(service.swap(opened(two)))
            await until(lambda: service.status()["workers_aside"])
            os.kill(service.status()["workers"][0]["pid"], signal.SIGKILL)
            await swapping
            assert (await ask(service)).origin.version == "2.0.0"

    run(scenario)


def nices(pid: int) -> list[int]:
    """Priorities of the threads of a process, its main thread first; 0 is the usual one, 19 the lowest."""
    try:
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))
        return [int((task / "stat").read_text().rpartition(")")[2].split()[16]) for task in tasks]
    except OSError:  # it or one of its threads has ended meanwhile
        return []


def test_the_next_version_is_loaded_at_a_low_priority_and_serves_at_that_of_the_one_before(tmp_path: Path) -> None:
    one, two = versions(tmp_path)

    async def scenario() -> None:
        async with serving(opened(one)) as service:
            old, usual = service.status()["workers"][0]["pid"], os.getpriority(os.PRIO_PROCESS, 0)
            await until(lambda: sum(nice > usual for nice in nices(old)) == 2)  # the threads that compute
            computing = max(nices(old))
            swapping = asyncio.ensure_future(service.swap(opened(two)))
            await until(lambda: service.status()["workers_aside"])
            pid = service.status()["workers_aside"][0]["pid"]
            await until(lambda: any(nice > computing for nice in nices(pid)))
            await swapping
            await until(lambda: nices(pid).count(computing) == 2)
            assert nices(pid)[0] == usual

    run(scenario)


@pytest.mark.skipif(not importlib.util.find_spec("openvino"), reason="OpenVINO has no wheel for this machine")
def test_threads_of_openvino_compute_at_the_same_priority_however_their_model_was_loaded(tmp_path: Path) -> None:
    one, two = (tiny.scale_bundle(tmp_path / f"v{scale}", scale) for scale in (1, 2))

    async def scenario() -> None:
        computing = os.getpriority(os.PRIO_PROCESS, 0) + BEHIND
        async with serving(opened(one, "openvino")) as service:
            for fresh in (None, opened(two, "openvino")):
                if fresh:
                    await service.swap(fresh)
                pid = service.status()["workers"][0]["pid"]
                await until(lambda pid=pid: nices(pid).count(computing) >= 2 + 2)  # those of the worker, and its own

    run(scenario)


def test_two_swaps_of_one_model_happen_one_after_the_other(tmp_path: Path) -> None:
    one, two = versions(tmp_path)
    three = tiny.scale_bundle(tmp_path / "v3", 3, null=True)

    async def scenario() -> None:
        async with serving(opened(one)) as service:
            async with Load(service) as load:
                await asyncio.gather(service.swap(opened(two)), service.swap(opened(three)))
            assert (await ask(service)).origin.version == "3.0.0"
            assert service.status()["models"][0]["swaps"]["beside"] == 2
            assert load.versions["2.0.0"]

    run(scenario)


def test_a_model_that_is_unloaded_during_a_swap_is_unloaded_after_it_and_stays_away(tmp_path: Path) -> None:
    one, two = versions(tmp_path)

    async def scenario() -> None:
        async with serving(opened(one)) as service:
            swapping = asyncio.ensure_future(service.swap(opened(two)))
            await until(lambda: service.status()["workers_aside"])
            await service.unload("scale")
            await swapping
            assert service.repository()[0].version == "2.0.0"
            with pytest.raises(NotReady, match="unloaded by request"):
                await ask(service)

    run(scenario)


def test_a_model_that_is_not_loaded_is_swapped_by_loading_the_next_version(tmp_path: Path) -> None:
    one, two = versions(tmp_path)

    async def scenario() -> None:
        async with serving(opened(one)) as service:
            await service.unload("scale")
            swap = await service.swap(opened(two))
            assert swap.gap_s == 0
            assert (await ask(service)).origin.version == "2.0.0"

    run(scenario)


def test_a_stop_during_a_swap_leaves_no_process(tmp_path: Path) -> None:
    one, two = versions(tmp_path)

    async def scenario() -> None:
        async with serving(opened(one)) as service:
            swapping = asyncio.ensure_future(service.swap(opened(two)))
            await until(lambda: service.status()["workers_aside"])
            await service.stop(5)
            with contextlib.suppress(asyncio.CancelledError):
                await swapping
            with pytest.raises(NotReady):
                await ask(service)

    run(scenario)


def test_loading_a_model_whose_folder_holds_another_version_swaps_it(tmp_path: Path) -> None:
    link = tmp_path / "scale"
    one, two = versions(tmp_path)
    link.symlink_to(one)

    async def scenario() -> None:
        async with serving(opened(link)) as service:
            await service.load("scale")
            assert service.status()["models"][0]["swaps"]["beside"] == 0
            link.unlink()
            link.symlink_to(two)
            dry = await service.load("scale.g", dry_run=True)
            assert dry.fits
            assert (await ask(service)).origin.version == "1.0.0"
            assert (await service.load("scale.g")).fits
            assert (await ask(service)).origin.version == "2.0.0"

    run(scenario)


def test_a_folder_that_holds_nothing_usable_leaves_the_version_that_serves(tmp_path: Path) -> None:
    folder = tiny.scale_bundle(tmp_path / "v1", 1, null=True)

    async def scenario() -> None:
        async with serving(opened(folder)) as service:
            (folder / "manifest.json").write_text("damaged")
            with pytest.raises(NotReady, match=r"scale stays at version 1\.0\.0"):
                await service.load("scale")
            assert (await ask(service)).origin.version == "1.0.0"

    run(scenario)
