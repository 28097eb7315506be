"""Moves bundles to the versions that their channel holds, step by step, and back when they are worse.

What comes next is decided in `core.deployment`, whether a version is good enough in `core.gates`, and what may be
installed by the repository's signatures. This file performs the steps, and has the ledger write each down before and
after. One deployment at a time; requests are served meanwhile as if nothing happened.

Past 400 lines because every step is here, and each is short: the table that orders them is in the core.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import structlog

from appliance import rehearsal
from appliance.adapters.journal import Facts
from appliance.core import clock, gates
from appliance.core import deployment as rules
from appliance.core.command import Command
from appliance.core.deployment import Deployment, Event, SlotState, Step
from appliance.core.gates import Judged, Tally
from appliance.ledger import Ledger
from appliance.outside import outside
from appliance.service import Bundle, Candidate, Outcome, Service
from appliance.settings import Update
from models.bundle import TASKS, Manifest
from models.errors import (
    ApplianceError,
    BadInput,
    BundleError,
    InsufficientMemory,
    NotFound,
    NotReady,
    Overloaded,
    Unreachable,
    UntrustedUpdate,
    UpdateError,
)
from models.folder import BundleFolder, blob_path

if TYPE_CHECKING:
    from appliance.adapters.repository import Accepted, Release, Repository
    from appliance.engines import Engines

log = structlog.get_logger()

_WATCH_S = 0.2
_FAULTY_LOOKS = 3
"""In a row at which the worker on trial is not well."""
_RETRY_S = 30.0
"""After something that should not happen."""

Work: TypeAlias = Callable[[Deployment], Awaitable[Judged]]


@dataclass(frozen=True, slots=True)
class Time:
    """What the machine says of the time."""

    wall: float
    """Unix seconds."""
    synced: bool


@dataclass(frozen=True, slots=True)
class Given:
    """What the daemon was given to serve under a name, before any update."""

    folder: Path
    digest: str


class Updater:
    """The loop of one device."""

    def __init__(  # noqa: PLR0913 - its seams
        self,
        service: Service,
        config: Update,
        ledger: Ledger,
        slots: Path,
        *,
        followed: Mapping[str, Given],
        repository: Callable[[], Repository],
        open_bundle: Callable[[Path], Bundle],
        now: Callable[[], Time],
        engines: Engines | None = None,
    ) -> None:
        """Update the bundles `followed`, by name, in folders below `slots`.

        `repository` is called in a thread when it is needed first, and `open_bundle`, which opens the bundle in a
        folder. `engines` makes those of new versions; None where nothing is compiled.
        """
        self._service, self._config, self._ledger, self._slots = service, config, ledger, slots
        self._followed, self._repository, self._open, self._now = followed, repository, open_bundle, now
        self._engines = engines
        self._rules = gates.Rules(
            config.latency_ratio, config.shadow_agreement, config.trial_errors, config.trial_ratio
        )
        self._opened: Repository | None = None
        self._fetched_bytes = 0
        self._share: Callable[[], float] | None = None
        """How far the present step is, from 0 to 1, where that is known."""
        self._looked_at: float | None = None
        self._looking = False
        """Whether something is being done, or is going to be at once."""
        self._wanted = asyncio.Event()
        self._forced: dict[str, str] = {}
        """Bundle -> id of the order that wants its condemned version tried again."""
        self._wanted_back: tuple[int, str] | None = None
        """Deployment that an operator wants undone, and the reason to be told."""
        self._aborted: tuple[int, str] | None = None
        """Deployment that an operator does not want any more, and the reason to be told."""
        self._paused: bool | None = None
        """What an operator has ordered and is not written down yet."""
        self._held = False
        """Whether upstream wants no deployment begun or continued here."""
        self._working: asyncio.Task[Judged] | None = None
        self._interrupted = False
        """Whether an order, not the end of the daemon, has cancelled `_working`."""
        self._tallies = {name: Tally() for name in followed}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; called on the event loop."""
        self._service.observers.append(self._observe)
        self._service.orders |= {
            "update": self._order_update,
            "rollback": self._order_rollback,
            "pause": lambda _order: self._order_pause(paused=True),
            "resume": lambda _order: self._order_pause(paused=False),
            "abort": self._order_abort,
        }
        self._service.deployments = lambda: [rules.document(one) for one in self._ledger.deployments]
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Leave off where it is: the journal knows where to go on."""
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])

    def configure(self, config: Update) -> None:
        """Go on by other settings: of channel, pins, window and how often to look."""
        self._config = config
        self._want()

    def hold(self, held: bool) -> None:
        """Begin and continue nothing for upstream, as if paused, or do so again."""
        self._held = held
        if held:
            self._interrupt()
        self._want()

    def status(self) -> dict[str, Any]:
        """For operators."""
        active = self._ledger.active
        return {
            "url": self._config.url,
            "channel": self._config.channel,
            "problem": self._ledger.problem or None,
            "looked_s_ago": None if self._looked_at is None else round(time.monotonic() - self._looked_at, 1),
            "looking": self._looking,
            "paused": self._ledger.facts.paused or self._held,
            "pins": dict(self._config.pins),
            "deployment": active.id if active else None,
            "step": active.step if active else None,
            "share": round(self._share(), 3) if active and self._share else None,
            "fetched_bytes": self._fetched_bytes if active and active.at is Step.FETCH else None,
            "latest": _brief(self._ledger.deployments),
            "slots": [
                {"name": slot.name, "version": slot.version, "digest": slot.digest, "state": slot.state}
                for slot in self._ledger.slots
            ],
        }

    # Orders

    def _order_update(self, order: Command) -> dict[str, Any]:
        """Look for versions now; `name`, `force`: take that bundle's also if it failed here before."""
        name = self._named(order)
        if order.args.get("force"):
            self._forced |= dict.fromkeys([name] if name else self._followed, order.id)
        self._want()
        active = self._ledger.active
        return {"channel": self._config.channel, "deployment": active.id if active else None}

    def _order_rollback(self, order: Command) -> dict[str, Any]:
        """Go back to the version before the one that serves, which may be on trial."""
        name = self._named(order) or next(iter(self._followed), "")
        latest = self._ledger.brought(self._service.serving(name).digest)
        if latest is None:
            msg = f"{name} was not updated by this device, so there is no version to go back to"
            raise BadInput(msg)
        active = self._ledger.active
        if active and active.id != latest.id:
            msg = f"deployment {active.id} of {active.name} is under way: wait until it has ended"
            raise Overloaded(msg)
        self._wanted_back = (latest.id, f"rolled back by order {order.id}")
        self._want()
        return {"deployment": latest.id, "to": self._before(latest)[1]}

    def _order_pause(self, *, paused: bool) -> dict[str, Any]:
        """Begin and continue nothing, or do so again; a trial and a way back go on."""
        self._paused = paused
        if paused:
            self._interrupt()
        self._want()
        return {"paused": paused}

    def _order_abort(self, order: Command) -> dict[str, Any]:
        """Give up the deployment that is under way."""
        active = self._ledger.active
        if active is None:
            raise BadInput("no deployment is under way")
        if active.at not in rules.INTERRUPTIBLE:
            msg = f"deployment {active.id} is at {active.step}: order a rollback when it serves"
            raise BadInput(msg)
        self._aborted = (active.id, f"aborted by order {order.id}")
        self._interrupt()
        self._want()
        return {"deployment": active.id}

    def _interrupt(self) -> None:
        """End the work of a step that can be done again."""
        active = self._ledger.active
        if self._working and active and active.at in rules.INTERRUPTIBLE:
            self._interrupted = self._working.cancel()

    def _want(self) -> None:
        self._looking = True
        self._wanted.set()

    def _named(self, order: Command) -> str:
        name = order.args.get("name", "")
        if name and name not in self._followed:
            msg = f"{name!r} is no bundle that is updated here; those are {', '.join(self._followed) or 'none'}"
            raise NotFound(msg)
        return str(name)

    # The loop

    async def _run(self) -> None:
        while not self._service.settled:  # noqa: ASYNC110 - an update must not compete with the start
            await asyncio.sleep(_WATCH_S)
        await self._tidy()
        while True:
            self._looking = True
            wait_s = await self._turn()
            if wait_s:
                self._looking = self._wanted.is_set()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wanted.wait(), wait_s)
                self._wanted.clear()

    async def _turn(self) -> float:
        """Do what is due; seconds until there is something again, unless an order comes."""
        jitter = random.uniform(0.8, 1.2)  # noqa: S311 - not for secrets; a fleet must not ask all at once
        try:
            await self._obey()
            active = self._ledger.active
            if (self._ledger.facts.paused or self._held) and (
                active is None or active.at not in {Step.TRIAL, Step.BACK}
            ):
                return rules.LONGEST_WAIT_S
            if active is None:
                return 0.0 if await self._look() else self._config.check_s * jitter
            wait_s = min(active.not_before - self._now().wall, rules.LONGEST_WAIT_S)
            if active.at is Step.PROVE:
                wait_s = max(wait_s, clock.until_window(self._config.window, self._now().wall))
            if wait_s > 0:
                return wait_s
            await self._advance(active)
        except ApplianceError as error:
            self._ledger.say(str(error))
            return min(_RETRY_S, self._config.check_s) * jitter
        except Exception:  # whatever it is, the device must find the next version, which may mend it
            log.exception("updater_fault")
            self._ledger.say("a fault of the updater itself: see the log")
            return _RETRY_S
        return 0.0

    async def _obey(self) -> None:
        """Write down what orders have asked for."""
        await self._note_pause()
        back, aborted = self._wanted_back, self._aborted
        self._wanted_back = self._aborted = None
        for wanted, event in ((back, Event.FAILED), (aborted, Event.ABORTED)):
            if wanted:
                number, reason = wanted
                await self._ledger.note(rules.after(self._ledger.of(number), event, self._now().wall, reason=reason))

    async def _note_pause(self) -> None:
        if self._paused is not None:
            paused, self._paused = self._paused, None
            await self._ledger.learn(replace(self._ledger.facts, paused=paused))

    async def _accepted(self) -> Accepted:
        """Fresh signed metadata; raises UntrustedUpdate also while the clock is not believed."""
        known, time_ = self._ledger.facts, self._now()
        doubt = clock.distrust(time_.wall, known.time_floor, synced=time_.synced)
        if doubt:
            raise Unreachable(doubt)
        accepted, signed = await outside(self._refresh, time_.wall)
        floor = clock.raised(known.time_floor, accepted.signed_at, time_.wall)
        await self._ledger.learn(
            replace(known, time_floor=floor, revoked={**known.revoked, **signed.revoked}, commanders=signed.commanders)
        )
        self._looked_at = time.monotonic()
        return accepted

    def _refresh(self, now: float) -> tuple[Accepted, Facts]:
        if self._opened is None:
            self._opened = self._repository()
        accepted = self._opened.refresh(now)
        return accepted, Facts(revoked=accepted.revoked(), commanders=accepted.commanders())

    async def _look(self) -> bool:
        """Begin a deployment where the channel holds another version, or a way back from one that was revoked.

        Whether one was begun.
        """
        accepted, problems = await self._accepted(), list[str]()
        for name in self._followed:
            serving = self._service.serving(name).digest or ""
            brought, revoked = self._ledger.brought(serving), self._ledger.facts.revoked
            if brought and serving in revoked:
                reason = f"revoked: {revoked[serving]}"
                await self._ledger.note(rules.after(brought, Event.REVOKED, self._now().wall, reason=reason))
                self._ledger.say("")
                return True
            release = await self._offered(accepted, name)
            forced = self._forced.pop(name, "")
            if release is None and name in self._config.pins:
                problems.append(f"{name} is pinned to {self._config.pins[name]}, which is not published")
            if release is None or release.pointer.digest == serving:
                continue
            pointer = release.pointer
            why_not = rules.condemned(self._ledger.deployments, pointer.digest)
            if pointer.digest in revoked:
                problems.append(f"channel {self._config.channel} holds {name} {pointer.version}, which was revoked")
            elif why_not and not forced:
                known = f"{name} {pointer.version} is not taken again by itself ({why_not})"
                problems.append(f"{known}: `appliance update --force` takes it")
            else:
                begun = Deployment(
                    id=self._ledger.next_id,
                    name=name,
                    version=pointer.version,
                    digest=pointer.digest,
                    previous=serving,
                    started_at=self._now().wall,
                    ordered_by=forced,
                )
                await self._ledger.note(begun)
                self._ledger.say("")
                return True
        self._ledger.say("; ".join(problems))  # once, at the end: whoever asks meanwhile is told what was found before
        return False

    async def _advance(self, active: Deployment) -> None:
        """Perform the step that is due."""
        works: Mapping[Step, Work] = {
            Step.CHECK: self._check,
            Step.RESERVE: self._reserve,
            Step.FETCH: self._fetch,
            Step.VERIFY: self._verify,
            Step.COMPILE: self._compile,
            Step.TRIAL: self._trial,
            Step.BACK: self._back,
        }
        if active.at is Step.PROVE:
            await self._try(active)
        else:
            await self._perform(active, works[active.at])
        if self._ledger.of(active.id).ended:
            await self._tidy()

    async def _try(self, active: Deployment) -> None:
        """From loading a candidate to the switch: it leaves when any of these steps does not pass."""
        async with contextlib.AsyncExitStack() as stack:
            candidates: list[Candidate] = []

            async def prove(deployment: Deployment) -> Judged:
                with contextlib.suppress(Unreachable, UntrustedUpdate):  # it may have waited long for its window
                    await self._release(deployment)
                fresh = await asyncio.to_thread(self._open, self._folder(deployment.digest))
                candidates.append(await stack.enter_async_context(self._service.candidate(fresh)))
                return Judged()

            async def memory(_deployment: Deployment) -> Judged:
                return rehearsal.memory(candidates[0])

            async def latency(deployment: Deployment) -> Judged:
                folder = await asyncio.to_thread(BundleFolder, self._folder(deployment.digest))
                return await rehearsal.latency(candidates[0], folder, self._rules)

            async def shadow(_deployment: Deployment) -> Judged:
                asked, limit_s = self._config.shadow_requests, self._config.shadow_s
                self._share = _elapsed(limit_s)
                return await rehearsal.shadow(self._service, candidates[0], asked, limit_s, self._rules)

            async def switch(_deployment: Deployment) -> Judged:
                swap = await candidates[0].switch()
                return Judged("", {"switch_us": round(swap.switch_s * 1e6, 1), "gap_s": round(swap.gap_s, 3)})

            following: Deployment | None = active
            for work in (prove, memory, latency, shadow, switch):
                following = following and await self._perform(following, work)
            for candidate in candidates:  # where it serves, that is too late to matter
                candidate.refuse(self._ledger.of(active.id).reason or "it is put off")

    async def _perform(self, active: Deployment, work: Work) -> Deployment | None:
        """Begin a step, do it, end it; the deployment when it passed, else None."""
        begun = rules.begin(active, self._now().wall)
        await self._ledger.note(begun)
        if begun.at is not active.at:
            return None
        event, judged = Event.PASSED, Judged()
        try:
            self._working = asyncio.ensure_future(work(begun))
            judged = await self._working
            event = Event.FAILED if judged.reason else Event.PASSED
        except asyncio.CancelledError:
            if not self._interrupted:
                raise
            event, judged = Event.LATER, Judged("an order came between")
        except (Unreachable, InsufficientMemory, Overloaded, OSError) as error:
            event, judged = Event.LATER, Judged(str(error))
            self._ledger.say(str(error))
        except _EndedElsewhereError as error:
            event, judged = error.event, Judged(str(error))
        except ApplianceError as error:
            event, judged = Event.FAILED, Judged(str(error))
        finally:
            self._working, self._interrupted, self._share = None, False, None
        if (begun.at, event) not in rules.TABLE:  # this step cannot be put off
            event = Event.FAILED
        ended = rules.after(begun, event, self._now().wall, reason=judged.reason, figures=judged.figures)
        await self._ledger.note(ended)
        return ended if event is Event.PASSED else None

    # Steps

    async def _check(self, deployment: Deployment) -> Judged:
        try:
            manifest = await self._release(deployment)
        except UntrustedUpdate as error:  # of which this version is innocent
            raise Unreachable(str(error)) from error
        known = manifest.task.kind in TASKS
        return Judged("" if known else f"task {manifest.task.kind!r} is not known here: update the appliance first")

    async def _release(self, deployment: Deployment) -> Manifest:
        """The signed manifest of a deployment, if that is still what its channel holds."""
        accepted = await self._accepted()
        self._ledger.say("")
        revoked = self._ledger.facts.revoked.get(deployment.digest)
        if revoked is not None:
            raise _EndedElsewhereError(Event.REVOKED, f"revoked: {revoked}")
        release = await self._offered(accepted, deployment.name)
        if release is None or release.pointer.digest != deployment.digest:
            holds = release.pointer.version if release else "nothing"
            raise _EndedElsewhereError(Event.SUPERSEDED, f"{deployment.name} should run {holds} now")
        return release.manifest

    async def _offered(self, accepted: Accepted, name: str) -> Release | None:
        """What this device should run of a bundle: what it is pinned to, else what its channel holds."""
        return await outside(accepted.release, self._config.channel, name, self._config.pins.get(name, ""))

    async def _reserve(self, deployment: Deployment) -> Judged:
        """The slot was marked bad when this step was written down."""
        await asyncio.to_thread(self._folder(deployment.digest).mkdir, parents=True, exist_ok=True)
        return Judged()

    async def _fetch(self, deployment: Deployment) -> Judged:
        manifest = await self._release(deployment)
        self._fetched_bytes, ready_bytes, gone = 0, 0, threading.Event()
        whole_bytes = sum(blob.size_bytes for blob in manifest.blobs())
        self._share = lambda: min(1.0, ready_bytes / whole_bytes)  # a damaged blob comes twice

        def count(packed: int, ready: int) -> None:
            nonlocal ready_bytes
            self._fetched_bytes += packed
            ready_bytes += ready

        def fetch() -> None:
            if self._opened:
                self._opened.fetch(manifest, self._folder(deployment.digest), self._blobs_here(), count, gone)

        try:
            await outside(fetch)
        finally:
            gone.set()
        return Judged("", {"fetched_bytes": float(self._fetched_bytes)})

    def _blobs_here(self) -> Mapping[str, Path]:
        """Files that other bundles on this device have; they are checked before they are used."""
        given = [one.folder for one in self._followed.values()]
        found: dict[str, Path] = {}
        for folder in (*given, *(self._folder(slot.digest) for slot in self._ledger.slots)):
            with contextlib.suppress(BundleError):
                for blob in BundleFolder(folder).manifest.blobs():
                    found.setdefault(blob.sha256, blob_path(folder, blob))
        return found

    async def _verify(self, deployment: Deployment) -> Judged:
        from appliance.adapters.repository import matches  # noqa: PLC0415 - the daemon starts without TUF

        folder = self._folder(deployment.digest)

        def damaged() -> list[str]:
            manifest = BundleFolder(folder).manifest
            if manifest.digest != deployment.digest:
                return ["manifest.json"]
            return [blob.sha256 for blob in manifest.blobs() if not matches(blob_path(folder, blob), blob)]

        bad = await asyncio.to_thread(damaged)
        return Judged(f"{len(bad)} files on disk are not what was fetched, the first is {bad[0][:13]}" if bad else "")

    async def _compile(self, deployment: Deployment) -> Judged:
        folder = self._folder(deployment.digest)
        if self._engines and self._engines.missing(deployment.digest, folder):
            await self._engines.make(deployment.digest, folder)
        return Judged()

    async def _trial(self, deployment: Deployment) -> Judged:
        """Watch the version that serves now, until its time is over or it has failed."""
        name = deployment.name
        if self._service.serving(name).digest != deployment.digest:
            return Judged("it does not serve: its folder could not be opened at the start")
        before, tally = self._tallies[name], Tally()
        self._tallies[name] = tally
        faulty = 0
        until, self._share = time.monotonic() + self._config.trial_s, _elapsed(self._config.trial_s)
        while True:
            await self._note_pause()  # a trial is long, and a restart must not forget it
            if self._service.serving(name).digest != deployment.digest:
                return Judged("another version was put in its place")
            if self._wanted_back and self._wanted_back[0] == deployment.id:
                (_number, reason), self._wanted_back = self._wanted_back, None
                raise NotReady(reason)
            fault, over = self._service.fault(name), time.monotonic() >= until
            faulty = faulty + 1 if fault else 0
            if faulty >= _FAULTY_LOOKS or (fault and over):
                return Judged(f"its worker is not well on trial: {fault}")
            again = self._service.serving(
                name
            ).supervisor.health.restarts  # since it was loaded: it was on trial at once
            if again > 0:
                return Judged("its worker had to be started anew on trial", {"restarts": float(again)})
            judged = gates.trial(before, tally, self._rules, over=over)
            if judged:
                return judged
            await asyncio.sleep(min(_WATCH_S, max(0.0, until - time.monotonic())))

    async def _back(self, deployment: Deployment) -> Judged:
        """Serve the version before again."""
        folder, version = self._before(deployment)
        bundle = await asyncio.to_thread(self._open, folder)
        if self._service.serving(deployment.name).digest != bundle.digest:
            await self._service.swap(bundle)
        self._tallies[deployment.name] = Tally()
        log.warning("rolled_back", model=deployment.name, version=version, reason=deployment.reason)
        return Judged()

    def _before(self, deployment: Deployment) -> tuple[Path, str]:
        """Folder and version of what served before a deployment, or where that is gone, of the latest good one."""
        given = self._followed[deployment.name]
        slot = rules.to_go_back_to(deployment, self._ledger.slots, self._ledger.facts.revoked)
        if slot is None or deployment.previous == given.digest:
            return given.folder, "as it was given"
        return self._folder(slot.digest), slot.version

    # Files

    def _folder(self, digest: str) -> Path:
        return self._slots / digest

    async def _tidy(self) -> None:
        """Remove the files of slots that nobody needs any more."""
        serving = [self._service.serving(name).digest or "" for name in self._followed]
        stay = rules.kept(self._ledger.slots, self._ledger.deployments, serving)
        stay |= {given.digest for given in self._followed.values()}  # in an image, that is a slot too
        for slot in self._ledger.slots:
            if slot.digest not in stay and slot.state != SlotState.BAD.value:
                await self._ledger.spoil(replace(slot, state=SlotState.BAD.value))

        def remove() -> None:
            for folder in self._slots.iterdir() if self._slots.is_dir() else ():
                if folder.name not in stay:
                    shutil.rmtree(folder, ignore_errors=True)
            if self._engines:
                self._engines.keep_only({*stay, *(one.digest for one in self._followed.values())})

        await asyncio.to_thread(remove)

    def _observe(self, outcome: Outcome) -> None:
        with contextlib.suppress(NotFound):  # a graph that a switch has just taken away
            tally = self._tallies.get(self._service.serving(outcome.model).name)
            if tally:
                tally.count(outcome.seconds, outcome.error)


def _elapsed(limit_s: float) -> Callable[[], float]:
    """The share of `limit_s`, from now on, that is over."""
    began = time.monotonic()
    return lambda: min(1.0, (time.monotonic() - began) / limit_s) if limit_s else 1.0


def _brief(deployments: Sequence[Deployment]) -> dict[str, Any] | None:
    """What a campaign must know of the latest deployment, if there was one."""
    keys = ("id", "name", "version", "digest", "step", "committed", "reason")
    return {key: rules.document(deployments[0])[key] for key in keys} if deployments else None


class _EndedElsewhereError(UpdateError):
    """A version that the repository does not want here any more."""

    def __init__(self, event: Event, reason: str) -> None:
        super().__init__(reason)
        self.event = event
