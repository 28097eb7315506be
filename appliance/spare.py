"""One worker that is started ahead: its process runs and its libraries are loaded, but it holds no model yet.

Starting a process and importing takes longer than opening most models, so whoever gets this one is ready much sooner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from appliance import wire
from appliance.core.limits import Limits
from appliance.hardware import Seats
from appliance.life import Life

log = structlog.get_logger()


class Spare:
    """At most one waiting worker."""

    def __init__(self, limits: Limits, runtime: str, seats: Seats) -> None:
        """Workers take requests of models with those `limits`, run them with `runtime`, and sit on `seats`."""
        self._arena_bytes, self._runtime = wire.arena_bytes(limits), runtime
        self._new_life = partial(Life, seats=seats)
        self._life: Life | None = None

    @property
    def pid(self) -> int | None:
        """Its process; None when there is none."""
        return self._life.process.pid if self._life else None

    def keep(self, *, gentle: bool = True) -> None:
        """Start one unless there is one, `gentle` to those who serve; when none can be started there is none."""
        if self._life is None:
            try:
                self._life = self._new_life(
                    self._arena_bytes, self._runtime, on_data=self._spoke, on_end=self._ended, gentle=gentle
                )
            except OSError as error:
                log.warning("no_spare_worker", reason=str(error.strerror))
                return
            asyncio.get_running_loop().add_reader(self._life.pidfd, self._reap, self._life)

    def drop(self) -> None:
        """End it if there is one."""
        life, self._life = self._life, None
        if life:
            life.process.kill()  # `_reap` is told

    def start_life(
        self,
        arena_bytes: int,
        runtime: str,
        *,
        on_data: Callable[[Life, bytes], None],
        on_end: Callable[[Life], None],
        gentle: bool = False,
    ) -> Life:
        """The waiting worker if it is one of these, else a new one."""
        life, fits = self._life, (arena_bytes, runtime) == (self._arena_bytes, self._runtime)
        if life is None or not fits or life.ended or life.process.poll() is not None:
            return self._new_life(arena_bytes, runtime, on_data=on_data, on_end=on_end, gentle=gentle)
        self._life = None
        asyncio.get_running_loop().remove_reader(life.pidfd)
        life.on_data, life.on_end = on_data, on_end
        return life

    def _spoke(self, life: Life, _data: bytes) -> None:
        life.process.kill()  # it was asked nothing

    @staticmethod
    def _ended(life: Life) -> None:
        life.link.close()

    def _reap(self, life: Life) -> None:
        asyncio.get_running_loop().remove_reader(life.pidfd)
        life.wait()
        life.link.close()
        life.close()
        if self._life is life:
            self._life = None
