"""Performs a plan: one run at a time on a BSP folder, boards in parallel, every word kept, going on after a stop.

A run has a folder of its own:

    plan.json     what it does; a folder goes on only with the same
    run.json      what became of each board
    ticket.json   what the image carries; secret
    keys/         the key that logs in on each board; secret
    logs/         what the tools said, without secrets

What was done to the BSP folder is noted there, because a run of another plan undoes it. Locks: the run's folder, the
BSP folder, and where boards are written the host, because NVIDIA's flasher takes every board in recovery mode.
Past 400 lines, because writing and waiting are two halves of the state of one run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from models import schema
from models.callhome import Report, Ticket
from models.errors import ConfigError, WorkshopError
from models.folder import write_file
from provisioning.flash import failures, rootfs, tool
from provisioning.flash.boards import Attached, State, attached
from provisioning.flash.checks import known_issue
from provisioning.flash.exports import guarded
from provisioning.flash.facts import read_package, users
from provisioning.flash.failures import FAILURES, Failure
from provisioning.flash.home import Exam, Expected, Home, listening, new_ticket
from provisioning.flash.plan import OVERLAY, PASSWORD, TICKET, Plan, Step, make

_LOCK, _DONE = ".appliance-flash.lock", ".appliance-flash.json"
"""In the BSP folder; the first in the run's own, too, and in /run of the host."""
_LOG = re.compile(r"flash_(\d+-[\d.]+)_.*\.log")
"""Of one board, by NVIDIA's flasher, with its port."""
_POLL_S, _PATIENCE_S = 0.2, 3.0
"""How often it looks, and how long it waits for the guard of a run that was killed."""
_TAIL_BYTES = 2**16
"""Of a log, where it says what goes on; thirty of them are looked at every time."""
_PARTLY = {"--external-only", "-k"}
"""Options of NVIDIA's flasher with which it leaves the boot firmware as it is."""
_LAST_WORD = {"wrong_release", "not_armed"}
"""Verdicts that no patience changes."""
_STAGES: Mapping[str, str] = {
    "generate flash packages": "making images",
    "boot the device with flash initrd": "booting the flashing system",
    "waiting for target to boot-up": "waiting for the flashing system",
    "waiting for device to expose ssh": "waiting for its network",
    "starting to flash to": "writing",
    "flashing success": "written",
}
"""What a tool's log says -> where it is."""

Tell = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BoardRun:
    """One board of a run."""

    port: str
    state: str
    """flashing, written, good or failed."""
    failure: str = ""
    serial: str = ""
    log: str = ""
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class RunState:
    """What became of each board so far."""

    run: str
    boards: tuple[BoardRun, ...] = ()


def digest(plan: Plan) -> str:
    """Identity of a plan."""
    return hashlib.sha256(json.dumps(schema.dump(plan), sort_keys=True).encode()).hexdigest()


def read_plan(file: Path) -> Plan:
    """A plan that `provision flash plan --out` wrote; raises ConfigError when it cannot be read."""
    return _read(file, Plan, "plan", "`provision flash plan --out`")


def read_state(folder: Path) -> RunState:
    """What became of a run; raises ConfigError where there is none."""
    return _read(folder / "run.json", RunState, "run", "`provision flash run --run`")


def _read_ticket(file: Path) -> Ticket:
    return _read(file, Ticket, "ticket", "`provision flash run --run`")


def _read(file: Path, kind: type[T], what: str, writer: str) -> T:
    try:
        return schema.load(kind, json.loads(file.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        msg = f"{file} holds no {what} ({error}): give what {writer} wrote"
        raise ConfigError(msg) from error


def hand_over(workshop: Path, package: Path, folder: Path) -> Plan:
    """Begin a run in `folder` that writes a package, made by the run in `workshop`; its plan.

    Raises ConfigError where that run made none, `package` is none, or `folder` has a run already.
    """
    made, ticket = read_plan(workshop / "plan.json"), workshop / "ticket.json"
    if not made.wish.images_only or made.wish.boards < 2:  # noqa: PLR2004 - one is no package
        msg = f"{workshop} made no package: plan one with --images-only and --boards 2 or more"
        raise ConfigError(msg)
    if (folder / "plan.json").exists():
        msg = f"{folder} has a run already: go on with that, or give another folder with --run"
        raise ConfigError(msg)
    wish = replace(made.wish, images_only=False, package=True, pkc="", sbk="", uefi_keys="")
    plan = make(wish, read_package(package, made.release))
    secret = schema.dump(_read_ticket(ticket))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_file(folder / "ticket.json", json.dumps(secret).encode(), mode=0o600)
    write_file(folder / "plan.json", json.dumps(schema.dump(plan), indent=1).encode())
    return plan


class Run:
    """One run; the same folder and plan go on where it stopped."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        *,
        urls: tuple[str, ...],
        exam: Exam,
        keep: Callable[[dict[str, Any]], None] = lambda _record: None,
    ) -> None:
        """Begin, or go on; raises ConfigError where the folder holds a run of another plan, bundle or other `urls`.

        Boards call one of `urls` (none: those that the run has), and answer the question of `exam`. `keep` is given
        the record of each board that gets its last word, before the run itself takes note of that: what is cut
        between gives a second record, never none.
        """
        self._folder, self.plan, self._exam, self._keep = folder, plan, exam, keep
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._mine():  # of two that begin at once, the second goes on with what the first has begun
            shown = json.dumps(schema.dump(plan), indent=1).encode()
            file = folder / "plan.json"
            if not file.exists():
                write_file(file, shown)
            elif file.read_bytes() != shown:
                msg = f"{folder} holds a run of another plan: give another folder with --run, or the same options"
                raise ConfigError(msg)
            self.ticket = self._ticket(urls)
            known = (folder / "run.json").exists()
            self.state = read_state(folder) if known else RunState(self.ticket.run)
        self._password = secrets.token_urlsafe(24)
        self._bsp = Path(plan.bsp)

    def _ticket(self, urls: tuple[str, ...]) -> Ticket:
        file = self._folder / "ticket.json"
        if file.exists():
            ticket = _read_ticket(file)
            if schema.dump(ticket.question) != schema.dump(self._exam.question):
                msg = f"{self._folder} holds a run that asks for another bundle: give that with --bundle"
                raise ConfigError(msg)
            if urls and urls != ticket.urls:
                known = " and ".join(ticket.urls)
                msg = f"{self._folder} holds a run whose boards call {known}: give that with --call-home"
                raise ConfigError(msg)
            return ticket
        ticket = new_ticket(secrets.token_hex(8), urls, self.plan.wish.user, self._exam)
        write_file(file, json.dumps(schema.dump(ticket)).encode(), mode=0o600)
        return ticket

    @property
    def waiting(self) -> bool:
        """Whether boards are written and have not called home."""
        return any(one.state == "written" for one in self.state.boards)

    # Writing boards

    def write(self, sysroot: Path, tell: Tell, ready: Callable[[], Sequence[Attached]]) -> None:
        """Prepare the BSP folder, make images, and write them to the boards that `ready` gives, which are in recovery.

        Boards that are not written are in the state with their failure; a failure before any board raises
        WorkshopError, and ConfigError when another run uses the BSP folder.
        """
        flashes = any(step.flashes for step in self.plan.steps)
        used = f"another run uses {self._bsp}: wait for it, or unpack a second BSP folder"
        busy = "another run writes boards from this host, and would take yours too: wait for it"
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._alone())
            locks = [stack.enter_context(_locked(self._bsp / _LOCK, used))]
            if flashes:
                locks += [stack.enter_context(_locked(sysroot / "run" / _LOCK.removeprefix("."), busy))]
            watch = stack.enter_context(guarded(sysroot if flashes else None, locks))
            if not self.plan.wish.overlay:
                rootfs.take_back(self._bsp)
            for step in self.plan.steps:
                if step.flashes:
                    self._flash(step, ready(), sysroot, tell, watch)
                elif step.name not in self._done() and step.account not in users(self._bsp):
                    tell(f"{step.name}: {step.why}")
                    self._prepare(step, watch)
                    self._note_done(step.name)

    def _mine(self) -> contextlib.AbstractContextManager[int]:
        return _locked(self._folder / _LOCK, f"another command uses the run {self._folder}: wait for it")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else has this run, whose state is that on disk; boards that were cut while written have failed."""
        with self._mine():
            if (self._folder / "run.json").exists():
                self.state = read_state(self._folder)
            for one in self.state.boards:
                if one.state == "flashing":
                    self._settle(one, replace(one, state="failed", failure="interrupted"), None)
            yield

    def _done(self) -> list[str]:
        """Steps whose effect the BSP folder has now, by this run."""
        try:
            noted = json.loads((self._bsp / _DONE).read_bytes())
            return list(noted["done"]) if noted["run"] == self.ticket.run else []
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def _note_done(self, name: str) -> None:
        noted = {"run": self.ticket.run, "done": [*self._done(), name]}
        write_file(self._bsp / _DONE, json.dumps(noted).encode())

    def _prepare(self, step: Step, watch: Callable[[int], None]) -> None:
        if step.file:
            write_file(self._bsp / step.file, step.content.encode())
            return
        if step.name == OVERLAY:
            rootfs.make_way(self._bsp, Path(self.plan.wish.overlay), self.plan.wish.overlay_sha256)
        ended = self._call(step, watch, lambda: None)
        if ended.code:
            failure, log = failures.of_tool(ended.said, ended.code), self._folder / "logs" / f"{step.name}.log"
            msg = f"{step.name} failed with exit code {ended.code} ({failure.what}): {failure.remedy}; {log} has it all"
            raise WorkshopError(msg)

    def _flash(
        self, step: Step, ready: Sequence[Attached], sysroot: Path, tell: Tell, watch: Callable[[int], None]
    ) -> None:
        ports = [one.port for one in ready]
        for port in ports:
            self._begin(port)
        tell(f"{step.name}: {step.why} ({', '.join(ports)})")
        old = set((self._bsp / "initrdlog").glob("*"))
        look = self._looking(old, tell)
        try:
            ended = self._call(step, watch, look)
        except BaseException:
            for port in ports:
                self._end(port, FAILURES["interrupted"], "")
            raise
        if ended.lost:
            tell(f"what the tool said could not all be kept ({ended.lost.strerror})")
        logs, there = self._logs(old), {one.port for one in attached(sysroot)}
        late = sorted(logs.keys() - set(ports))  # they came after we looked, and before the tool did
        for port in late:
            self._begin(port)
        alone, outcomes = len(ports) + len(late) == 1, dict[str, Failure | None]()
        for port in (*ports, *late):
            outcomes[port] = self._judge(_text(logs.get(port)), ended, alone=alone)
            failure = outcomes[port]
            if failure and failure.name in {"unknown", "not_started"} and port not in there:
                outcomes[port] = FAILURES["unplugged"]
        # Those that were written first: a record of another that cannot be kept must not take that from them.
        for port, failure in sorted(outcomes.items(), key=lambda item: item[1] is not None):
            self._end(port, failure, self._keep_log(port, _text(logs.get(port)) or ended.said))
            tell(f"{port}: {self._said(failure) if failure else 'written'}")

    def _looking(self, old: set[Path], tell: Tell) -> Callable[[], None]:
        """What tells of each board where it is, when that has changed."""
        stages: dict[str, str] = {}

        def look() -> None:
            for port, log in self._logs(old).items():
                stage = _stage(_text(log, _TAIL_BYTES))
                if stage and stage != stages.get(port):
                    stages[port] = stage
                    tell(f"{port}: {stage}")

        return look

    def _said(self, failure: Failure) -> str:
        issue = known_issue(self.plan, failure.name)
        return "; ".join(part for part in (failure.what, failure.remedy, issue) if part)

    def _judge(self, own: str, whole: tool.Ended, *, alone: bool) -> Failure | None:
        """What became of one board: by its own log, or where there is none by that of the whole."""
        firmware = not _PARTLY & set(self.plan.wish.options)
        if alone:
            return failures.of_log(f"{whole.said}\n{own}", whole.code, firmware=firmware)
        if own:
            return failures.of_log(own, firmware=firmware)
        failure = failures.of_tool(whole.said, whole.code)
        return FAILURES["not_started"] if failure.name == "unknown" else failure

    def _keep_log(self, port: str, said: str) -> str:
        """Where what was said of a board is kept; empty on a full disk, on which its outcome must not hang."""
        log = self._folder / "logs" / f"{port}.log"
        try:
            log.write_text(self._redacted(said))
        except OSError:
            return ""
        return str(log)

    def _logs(self, old: set[Path]) -> dict[str, Path]:
        """By port, what NVIDIA's flasher has written of each board in this attempt."""
        new = sorted(set((self._bsp / "initrdlog").glob("*")) - old)
        return {found[1]: file for file in new if (found := _LOG.fullmatch(file.name))}

    def _call(self, step: Step, watch: Callable[[int], None], look: Callable[[], None]) -> tool.Ended:
        """Run a command to its end; what it says is in a log, without secrets."""
        places = {PASSWORD: self._password, TICKET: str((self._folder / "ticket.json").resolve())}
        argv = [places.get(argument, argument) for argument in step.argv]
        log = self._folder / "logs" / f"{step.name}.log"
        log.parent.mkdir(exist_ok=True)
        kept = log.open("a", buffering=1)
        try:
            return tool.call(argv, self._bsp, lambda line: kept.write(self._redacted(line)), watch, look)
        finally:
            with contextlib.suppress(OSError):  # what a full disk did not take is known from the call
                kept.close()

    def _redacted(self, text: str) -> str:
        return text.replace(self._password, "***").replace(self.ticket.nonce, "***")

    # What became of boards

    def _begin(self, port: str) -> None:
        """A board at this port is written to: the one that failed there, or a new one."""
        last = self._last(port)
        if last is None or last.state in {"good", "written"}:
            self._save((*self.state.boards, BoardRun(port, "flashing", attempts=1)))
        else:
            self._change(last, BoardRun(port, "flashing", attempts=last.attempts + 1))

    def _last(self, port: str) -> BoardRun | None:
        return next((one for one in reversed(self.state.boards) if one.port == port), None)

    def _end(self, port: str, failure: Failure | None, log: str) -> None:
        board = next(one for one in self.state.boards if one.port == port and one.state == "flashing")
        if failure:
            self._settle(board, replace(board, state="failed", failure=failure.name, log=log), None)
        else:
            self._change(board, replace(board, state="written", log=log))

    def _settle(self, board: BoardRun, ended: BoardRun, report: Report | None) -> None:
        self._keep(self._record(ended, report))
        self._change(board, ended)

    def _change(self, board: BoardRun, ended: BoardRun) -> None:
        self._save(tuple(ended if one is board else one for one in self.state.boards))

    def _save(self, boards: tuple[BoardRun, ...]) -> None:
        self.state = replace(self.state, boards=boards)
        write_file(self._folder / "run.json", json.dumps(schema.dump(self.state), indent=1).encode())

    # Waiting until they call home

    def verify(self, listen: tuple[str, int], sysroot: Path, wait_s: float, tell: Tell) -> None:
        """Wait until each written board has called home, or the time is over.

        Raises ConfigError where another command has this run, WorkshopError where a board's key cannot be kept.
        """
        expected = Expected(self.plan.release, self.plan.wish.ab, self._exam)
        home = Home(self.ticket, expected, self._folder / "keys")
        until, settled = time.monotonic() + wait_s, set[str]()
        with self._alone(), listening(home, *listen):
            while waiting := [one for one in self.state.boards if one.state == "written"]:
                if home.trouble:
                    raise WorkshopError(home.trouble)
                over = time.monotonic() >= until
                now = {one.port: one for one in attached(sysroot)}
                for board in waiting:
                    there = now.get(board.port) if board is self._last(board.port) else None
                    heard = self._heard_of(there, waiting, settled, home)
                    final, failure = _last_word(heard, there, over=over)
                    if not final:
                        continue
                    ended = replace(
                        board,
                        state="failed" if failure else "good",
                        failure=failure.name if failure else "",
                        serial=heard[0].serial if heard else "",
                    )
                    settled.add(ended.serial)
                    self._settle(board, ended, heard[0] if heard else None)
                    tell(f"{board.port}: {self._said(failure) if failure else 'good'}")
                time.sleep(_POLL_S)

    def _record(self, board: BoardRun, told: Report | None) -> dict[str, Any]:
        """What the inventory keeps of a board that got its last word; `at` is wall time in Unix seconds."""
        wish, report = self.plan.wish, told or Report(self.ticket.run, board.serial)
        return {
            "at": round(time.time()),
            "run": self.ticket.run,
            "plan": digest(self.plan),
            "port": board.port,
            "serial": report.serial,
            "board": wish.board,
            "module": wish.module,
            "storage": wish.storage,
            "model": report.model,
            "l4t": report.l4t,
            "slots": dict(report.slots),
            "appliance": report.appliance,
            "bundles": [dict(bundle) for bundle in report.bundles],
            "verdict": board.failure or "good",
        }

    def _heard_of(
        self, there: Attached | None, waiting: Sequence[BoardRun], settled: set[str], home: Home
    ) -> tuple[Report, Failure | None] | None:
        """The report of the board that is `there`: by the serial number that it shows on USB, or as the only one.

        One report is of one board: a second that shows the serial number of one in `settled` is not believed.
        """
        heard = home.heard()
        if there and there.state is State.BOOTED and there.serial:
            return None if there.serial in settled else heard.get(there.serial)
        claimed = {one.serial for one in self.state.boards if one.serial}
        free = [told for serial, told in heard.items() if serial not in claimed]
        return free[0] if len(waiting) == 1 and len(free) == 1 else None


@contextlib.contextmanager
def _locked(file: Path, taken: str) -> Iterator[int]:
    """Hold the lock `file`, and give its descriptor; raises ConfigError, saying `taken`, where another does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + _PATIENCE_S
    with file.open("a+") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() >= until:
                    raise ConfigError(taken) from error
                time.sleep(_POLL_S)
        yield lock.fileno()


def _last_word(
    heard: tuple[Report, Failure | None] | None, there: Attached | None, *, over: bool
) -> tuple[bool, Failure | None]:
    """Whether the last word on a written board is spoken, and what is wrong with it then."""
    if heard:
        failure = heard[1]
        return over or failure is None or failure.name in _LAST_WORD, failure
    if there and there.state is State.RECOVERY:
        return over, FAILURES["still_in_recovery"]
    return over, FAILURES["old_system" if there and there.state is State.BOOTED else "not_called_home"]


def _stage(log: str) -> str:
    """Where a tool is, by the last thing that its log says of that."""
    text = log.lower()
    places = {stage: text.rfind(mark) for mark, stage in _STAGES.items()}
    last = max(places, key=lambda stage: places[stage])
    return last if places[last] >= 0 else ""


def _text(file: Path | None, most_bytes: int = 2**40) -> str:
    """The end of a file that may grow; empty where it is not."""
    if file is None:
        return ""
    try:
        with file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - most_bytes))
            return log.read().decode(errors="replace")
    except OSError:
        return ""
