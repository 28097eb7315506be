"""Engines that this device makes of its bundles: in a child process, under a lease, while models serve.

    <state>/engines/<digest of the bundle>/<target>/    as `provision compile` writes them (see `models.engine`)

The workshop's command makes them. It is part of the same wheel, and the daemon imports nothing of it. No engine has
been executed yet: docs/engines.md lists what was tried and how.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import structlog

from appliance import settings, wire
from appliance.service import Bundle
from models.engine import ENGINES, PASSPORT
from models.errors import ApplianceError, BundleError, InsufficientMemory
from models.targets import BACKENDS

log = structlog.get_logger()

COMMAND = (sys.executable, "-I", "-m", "provisioning", "compile")
MEANWHILE = "its engines are being made"
_LONGEST_LINE_BYTES = 2**24
_LONGEST_SAID = 1000
_END_S = 5.0
"""What compiles has so long to end by itself."""
_LOOK_S = 10.0
"""How often bundles without engines are looked for; memory that was not free may be then."""

Lend: TypeAlias = "Callable[[str, Mapping[str, int]], AbstractAsyncContextManager[object]]"
"""Memory for work that is no model; raises InsufficientMemory."""


class Engines:
    """What compiles on this device, where its runtime runs compiled plans and it was told what it is."""

    def __init__(self, config: settings.Settings, lend: Lend, command: Sequence[str] = COMMAND) -> None:
        """Make engines with `command` in memory that `lend` gives."""
        self._config, self._lend, self._command = config.engines, lend, command
        self._backend = config.runtime
        self._all = config.state_dir / ENGINES
        self._turn = asyncio.Lock()
        self._doing: dict[str, Any] | None = None

    @property
    def makes(self) -> bool:
        """Whether this device makes engines."""
        return bool(self._config.target) and self._backend in BACKENDS

    def folder(self, digest: str) -> Path:
        """Where the engines of the bundle `digest` are, or will be."""
        return self._all / digest

    def missing(self, digest: str, bundle: Path) -> bool:
        """Whether there is none of the bundle in that folder; whether one fits, its runtime will judge."""
        return self.makes and not any(
            any(where.glob(f"*/*{PASSPORT}")) for where in (self.folder(digest), bundle / ENGINES)
        )

    async def make(self, digest: str, bundle: Path) -> None:
        """Compile all graphs of a bundle, one bundle at a time; those that are there already are replaced.

        Raises InsufficientMemory while there is no room to compile, BundleError when it cannot be done or kept.
        """
        limits = self._config
        await asyncio.to_thread(_check_writable, self.folder(digest))
        async with self._turn, self._lend(f"compile {bundle.name[:40]}", {"compile": limits.memory_limit_bytes}):
            self._doing = {"bundle": str(bundle), "says": None}
            began = time.monotonic()
            try:
                reason = await self._run(bundle, self.folder(digest))
            finally:
                self._doing = None
        if reason:
            msg = f"its engines could not be made for {limits.target}: {reason}"
            raise BundleError(msg)
        log.info("engines_made", bundle=str(bundle), target=limits.target, took_s=round(time.monotonic() - began, 1))

    async def remake(self, order: wire.Open) -> None:
        """`make` for a worker that could not open what was made."""
        await self.make(order.digest, Path(order.bundle))

    async def catch_up(
        self, wanting: Callable[[], Iterable[Bundle]], then: Callable[[Bundle], Awaitable[object]]
    ) -> None:
        """Make, for ever, the engines of bundles that serve meanwhile without them, and call `then` with each.

        What cannot be made is tried once, and said in `Bundle.meanwhile`. `wanting` is asked again after the engines
        of one were made: another version may serve by then.
        """
        given_up: set[str] = set()
        while True:
            for bundle in wanting():
                if bundle.digest and bundle.folder and bundle.digest not in given_up:
                    try:
                        if self.missing(bundle.digest, bundle.folder):
                            await self.make(bundle.digest, bundle.folder)
                        if bundle in wanting():
                            await then(bundle)
                    except InsufficientMemory as error:
                        bundle.meanwhile = f"{MEANWHILE}: {error}"
                    except (ApplianceError, OSError) as error:
                        given_up.add(bundle.digest)
                        bundle.meanwhile = str(error)
                        log.warning("engines_not_made", bundle=str(bundle.folder), reason=str(error))
            await asyncio.sleep(_LOOK_S)

    def keep_only(self, digests: Collection[str]) -> None:
        """Remove the engines of all other bundles; in a thread."""
        for folder in self._all.iterdir() if self._all.is_dir() else ():
            if folder.name not in digests:
                shutil.rmtree(folder, ignore_errors=True)

    def status(self) -> dict[str, Any] | None:
        """What is being compiled, and what the compiler said last; None while nothing is."""
        return self._doing

    async def _run(self, bundle: Path, out: Path) -> str:
        """Run the command to its end; why it failed, empty when it did not."""
        limits = self._config
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *(str(bundle), "--target", limits.target, "--backend", self._backend, "--out", str(out)),
            *("--time-limit-s", str(limits.time_limit_s)),
            *("--memory-limit-mib", str(limits.memory_limit_bytes // 2**20)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE_BYTES,
            env={**os.environ, "XDG_CACHE_HOME": str(self._all.parent / "cache")},
        )
        assert process.stderr  # noqa: S101 - a pipe was asked for
        said = ""
        try:
            while line := await process.stderr.readline():
                said = line.decode(errors="replace").strip()[-_LONGEST_SAID:] or said
                if self._doing:
                    self._doing["says"] = said
            status = await process.wait()
        except BaseException:  # the daemon ends, or the version is not wanted any more
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), _END_S)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        return "" if status == 0 else said or f"the compiler ended with status {status}"


def _check_writable(folder: Path) -> None:
    """Make `folder`; raises BundleError, before minutes are spent on what could not be kept, where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        msg = f"engines cannot be written to {folder}: let it belong to the user that the daemon runs as"
        raise BundleError(msg)
