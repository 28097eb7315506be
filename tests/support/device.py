"""A device without workers: the real store, journal, updater and repository client on a state folder, in this process.

Its models are opened and proven here, by the null runtime, so that it is up in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import urllib3
from structlog.testing import capture_logs
from tuf.api.exceptions import DownloadHTTPError

from appliance import wire
from appliance.adapters import repository
from appliance.adapters.journal import Journal
from appliance.adapters.store import Store
from appliance.core.budget import Admission
from appliance.core.deployment import SlotState, to_serve
from appliance.core.limits import Limits
from appliance.engines import Engines
from appliance.memory import Standing
from appliance.model import prove
from appliance.runtime.null import NullRuntime
from appliance.service import Bundle, Candidate, Service
from appliance.settings import Clock, Settings, Update
from appliance.swap import Swap
from appliance.updates import Updates
from models.errors import BundleError
from models.folder import BundleFolder

_WITHIN_S = 30.0
_UNLOADED = Swap(Admission(True, 0, 0, ()), 0.0, 0.0, 0.0)


class FromFolder(repository.Fetcher):
    """Brings the files of a repository from its folder, as a web server of it would, and remembers which."""

    def __init__(self, folder: Path) -> None:
        """Read below `folder`."""
        super().__init__()
        self._folder = folder
        self.asked: list[str] = []

    def open(self, url: str, start: int = 0) -> urllib3.BaseHTTPResponse:
        """See `Fetcher.open`."""
        path = self._folder / urlsplit(url).path.lstrip("/")
        self.asked.append(path.name)
        if not path.is_file():
            raise DownloadHTTPError("there is no such file", 404)
        rest = path.read_bytes()[start:]
        status = 200 if not start else 206 if rest else 416
        return urllib3.HTTPResponse(io.BytesIO(rest), status=status, preload_content=False)


class InThisProcess(Service):
    """The service with models that are opened, proven and let go."""

    def start(self) -> None:
        """Open every model; raises BundleError or ModelError where one cannot be served."""
        for bundle in self._bundles:
            _open(bundle)

    @property
    def settled(self) -> bool:
        """Nothing is ever loading."""
        return True

    def fault(self, name: str) -> str:
        """What is open is well; raises NotFound."""
        self.serving(name)
        return ""

    async def swap(self, fresh: Bundle) -> Swap:
        """Serve `fresh`."""
        await asyncio.to_thread(_open, fresh)
        return self._take(fresh)

    @contextlib.asynccontextmanager
    async def candidate(self, fresh: Bundle) -> AsyncIterator[Candidate]:
        """Open `fresh`, with nothing beside it to be compared with."""
        await asyncio.to_thread(_open, fresh)

        async def switch() -> Swap:
            await candidate.decision
            return self._take(fresh)

        switching = asyncio.ensure_future(switch())
        candidate = Candidate(self.serving(fresh.name), fresh, Standing(0, 0, beside=False), switching)
        try:
            yield candidate
        finally:
            candidate.refuse("it was not taken")
            await asyncio.wait([switching])
            switching.exception()

    def _take(self, fresh: Bundle) -> Swap:
        self._bundles[self._bundles.index(self.serving(fresh.name))] = fresh
        self._by_model.update(dict.fromkeys(fresh.names, fresh))
        return _UNLOADED


@dataclass(frozen=True)
class Recovered:
    """What became of a device that was switched on."""

    fault: str = ""
    """Why it serves nothing, or does not come to an end; the rest is then not known."""
    name: str = ""
    journal: str = ""
    """See `content`; as it was found."""
    accepted: tuple[int, int] = (0, 0)
    """See `accepted`."""
    torn: tuple[str, ...] = ()
    """Versions whose files are not whole although that is written down."""
    wanted: str = ""
    """Digest that the journal says is to be served; empty for what the device was given."""
    first: str = ""
    """Digest that served at once, proven."""
    last: str = ""
    """Digest that served when all had ended."""
    steps: tuple[str, ...] = ()
    """In which deployments have ended."""
    asked: frozenset[str] = field(default_factory=frozenset)
    """Files that were asked of the repository."""


@dataclass(frozen=True)
class Wishes:
    """What a device's own settings and upstream wish for."""

    own: Mapping[str, str] = field(default_factory=dict)
    pins: Mapping[str, str] = field(default_factory=dict)
    paused: bool = False


def recover(
    state_dir: Path,
    given: Path,
    url: str,
    root: Path,
    published: Path | None = None,
    wishes: Wishes = Wishes(),
) -> Recovered:
    """Switch the device on whose state is in `state_dir`, and let it do what it has to.

    It was given the bundle in the folder `given`, and asks the repository at `url`, or where that lies in a folder,
    `published`. Nothing is left running.
    """
    update = Update(url=url, root=root, trial_s=0, shadow_requests=0, reserve_bytes=0, pins=wishes.own)
    config = Settings(bundles=(given,), state_dir=state_dir, update=update, clock=Clock(assume_synced=True))
    fetcher = FromFolder(published) if published else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(capture_logs())
        if fetcher:
            stack.enter_context(mock.patch.object(repository, "Fetcher", return_value=fetcher))
        loop = _AtOnce()
        stack.callback(loop.close)
        try:
            return loop.run_until_complete(_recover(config, fetcher, wishes))
        except Exception as error:  # whatever it is, the device serves nothing
            return Recovered(f"{type(error).__name__}: {error}")


class _AtOnce(asyncio.SelectorEventLoop):
    """A loop that does itself what is given to threads: nobody waits here, and handing over takes longer than most."""

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *given: Any) -> asyncio.Future[Any]:  # noqa: ANN401 - as in the library
        """Call `func` now."""
        done = self.create_future()
        try:
            done.set_result(func(*given))
        except Exception as error:
            done.set_exception(error)
        return done


async def _recover(config: Settings, fetcher: FromFolder | None, wishes: Wishes) -> Recovered:
    with contextlib.closing(Store(config.state_dir)) as store:
        name = store.device_id()
        with contextlib.closing(Journal(config.state_dir / "journal.db")) as journal:
            written, known = content(journal._database), journal.read()  # noqa: SLF001 - all of it, whatever it is
        slots = config.state_dir / "slots"
        torn = [
            slot.version
            for slot in known.slots
            if slot.state != SlotState.BAD.value and not _whole(slots / slot.digest)
        ]
        was_accepted = accepted(config.state_dir / "repository")
        with contextlib.closing(Updates(config, time.time)) as updates:
            goes_on = updates._known or known  # noqa: SLF001 - a trial that was begun too often is over
            wanted = to_serve(goes_on.slots, BundleFolder(config.bundles[0]).manifest.name, known.facts.revoked)
            open_bundle = partial(_bundle, updates)
            service = InThisProcess(
                [updates.present(folder, open_bundle) for folder in config.bundles], device_id=name, facts=dict
            )
            service.start()
            updates.desire(wishes.pins, paused=wishes.paused)
            (first,) = _serving(service)
            updates.start(service, open_bundle, Engines(config, lambda *_asked: contextlib.nullcontext()))
            fault = await _ended(updates)
            await updates.stop()
            (last,) = _serving(service)
        return Recovered(
            fault=fault,
            name=name,
            journal=written,
            accepted=was_accepted,
            torn=tuple(torn),
            wanted=wanted.digest if wanted else "",
            first=first,
            last=last,
            steps=tuple(one["step"] for one in service.deployments()),
            asked=frozenset(fetcher.asked if fetcher else ()),
        )


async def _ended(updates: Updates) -> str:
    """Wait until nothing is left to do; what keeps the device from that."""
    until = time.monotonic() + _WITHIN_S
    while time.monotonic() < until:
        status = updates.status() or {}
        if status["paused"] and not status["looking"]:
            return "paused"
        if not status["looking"] and (status["problem"] or status["looked_s_ago"] is not None):
            if status["deployment"] is None and status["looked_s_ago"] is not None:
                return ""
            return f"it waits at {status['step']}: {status['problem']}"
        await asyncio.sleep(0.004)
    return f"it is at {status['step']} for ever"


def content(database: sqlite3.Connection) -> str:
    """The same for databases that hold the same."""
    return hashlib.sha256("\n".join(database.iterdump()).encode()).hexdigest()


def accepted(metadata: Path) -> tuple[int, int]:
    """Versions of the timestamp and of the newest root that a device has accepted; 0 for what it does not know."""

    def version(path: Path) -> int:
        try:
            return int(json.loads(path.read_bytes())["signed"]["version"])
        except (OSError, ValueError):
            return 0

    roots = (metadata / "root_history").glob("*.root.json")
    return version(metadata / "timestamp.json"), max(map(version, roots), default=0)


def _serving(service: InThisProcess) -> Sequence[str]:
    return [bundle.digest or "" for bundle in service._bundles]  # noqa: SLF001 - what it serves, by whatever name


def _bundle(updates: Updates, folder: Path) -> Bundle:
    """As the daemon opens it."""
    manifest = BundleFolder(folder).manifest
    order = wire.Open(manifest.name, "null", bundle=str(folder), digest=manifest.digest)
    updates.trusts(folder, manifest.digest)
    return Bundle([order], Limits(), manifest=manifest, on_ready=lambda _ready: None, folder=folder)


def _open(bundle: Bundle) -> None:
    """As a worker opens it: every byte is checked, and the golden vectors are answered."""
    assert bundle.folder
    folder = BundleFolder(bundle.folder)
    folder.check_content()
    for graph in folder.manifest.graphs.values():
        for variant in graph.variants.values():
            prove(NullRuntime().open(folder.read(variant.graph), threads=1), folder, variant.golden)


def _whole(path: Path) -> bool:
    try:
        folder = BundleFolder(path)
        folder.check_content()
    except BundleError:
        return False
    return folder.manifest.digest == path.name
