"""`appliance run` with `recorder.c` preloaded, which also says in its log what it promises and who asks for a sync.

A promise is a mark after a call has returned: from then on its effect must survive a power cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from appliance import start
from appliance.adapters import repository
from appliance.adapters.journal import Journal
from appliance.adapters.repository import Repository
from appliance.adapters.store import Store
from support.device import accepted, content


def mark(text: str) -> None:
    """Write into the log."""
    ctypes.CDLL(None).record_mark(text.encode())


def _announce_syncs() -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        frame, said = sys._getframe(1), []  # noqa: SLF001 - who asks is what this is for
        while len(said) < 2:
            if frame.f_code.co_name != "sync_folder":
                said.append(frame.f_code.co_name)
            assert frame.f_back
            frame = frame.f_back
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink()).removeprefix(os.environ["RECORD_ROOT"])
        role = re.sub("[0-9a-f]{64}", "DIGEST", path)
        role = re.sub(r"/repository/.*\.json\.new", "/repository/FILE", role)
        mark(f"sync {said[0]} for {said[1]}: {role or '/'}")
        real(descriptor)

    os.fsync = fsync


def _promise() -> None:
    opened, writing, device_id = Journal.__init__, Journal._writing, Store.device_id  # noqa: SLF001 - what is promised
    refresh, blob = Repository.refresh, Repository._blob  # noqa: SLF001 - likewise

    @functools.wraps(opened)
    def open_journal(self: Journal, path: Path) -> None:
        opened(self, path)
        mark(f"written {content(self._database)}")

    @contextlib.contextmanager
    def write_journal(self: Journal) -> Iterator[None]:
        mark("writing")
        with writing(self):
            yield
        mark(f"written {content(self._database)}")

    def promising(call: Callable[..., Any], said: Callable[..., str]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - as in `call`
            result = call(*given, **named)
            mark(said(result, *given))
            return result

        return wrapped

    Journal.__init__, Journal._writing = open_journal, write_journal  # type: ignore[method-assign] # noqa: SLF001
    Store.device_id = promising(device_id, lambda name, _store: f"named {name}")  # type: ignore[method-assign]
    Repository.refresh = promising(  # type: ignore[method-assign]
        refresh,
        lambda _accepted, ours, _now: "accepted {} {}".format(*accepted(ours._metadata)),  # noqa: SLF001
    )
    Repository._blob = promising(blob, lambda _done, _ours, one, *_: f"fetched {one.sha256}")  # type: ignore[method-assign] # noqa: SLF001


if __name__ == "__main__":
    repository._CHUNK_BYTES = 16 * 1024  # noqa: SLF001 - a small bundle has several, too
    _announce_syncs()
    _promise()
    sys.exit(start.main(sys.argv[2:]))  # after "run"
