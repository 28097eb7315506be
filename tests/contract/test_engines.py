"""Engines that the device makes itself: by a child, in leased memory, while the bundle serves without them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from support import tiny

from appliance import settings, wire
from appliance.core.limits import Limits
from appliance.engines import MEANWHILE, Engines
from appliance.service import Bundle, InferRequest, Service
from models.errors import BundleError, InsufficientMemory
from models.spec import Tensor

pytestmark = pytest.mark.contract

DIGEST = "d" * 64
COMPILER = """
import pathlib, sys, time
arguments = dict(zip(sys.argv[2::2], sys.argv[3::2]))
out = pathlib.Path(arguments["--out"], arguments["--target"])
out.mkdir(parents=True)
pathlib.Path({here!r}, "pid").write_text(str(__import__("os").getpid()))
print("  1.0 s  rec: compiling", file=sys.stderr, flush=True)
{does}
(out / "rec.passport.json").write_text(" ".join(sys.argv[1:]))
"""


class Room:
    """Memory that is lent, or not."""

    def __init__(self, have_bytes: int = 1 << 40) -> None:
        self.have_bytes, self.lent_bytes, self.log = have_bytes, 0, list[tuple[str, Mapping[str, int]]]()

    @contextlib.asynccontextmanager
    async def lend(self, holder: str, terms: Mapping[str, int]) -> AsyncIterator[None]:
        self.log.append((holder, terms))
        if sum(terms.values()) > self.have_bytes:
            raise InsufficientMemory("no room")
        self.lent_bytes += sum(terms.values())
        try:
            yield
        finally:
            self.lent_bytes -= sum(terms.values())


def engines_of(tmp_path: Path, room: Room, does: str = "", *, target: str = "orin-nano") -> Engines:
    """Engines of a device, made by a stand-in for the compiler that `does` something before it writes."""
    script = tmp_path / "compiler.py"
    script.write_text(COMPILER.format(here=str(tmp_path), does=does))
    config = settings.Settings(
        state_dir=tmp_path / "state", runtime="tensorrt", engines={"target": target, "memory_limit_bytes": 3 << 20}
    )
    return Engines(config, room.lend, [sys.executable, str(script)])


def test_engines_are_made_in_the_state_folder_in_leased_memory_that_is_given_back(tmp_path: Path) -> None:
    room, bundle = Room(), tmp_path / "slot"
    engines = engines_of(tmp_path, room)
    assert engines.missing(DIGEST, bundle)
    asyncio.run(engines.make(DIGEST, bundle))
    assert not engines.missing(DIGEST, bundle)
    made = tmp_path / "state" / "engines" / DIGEST / "orin-nano" / "rec.passport.json"
    assert made.read_text().startswith(f"{bundle} --target orin-nano --backend tensorrt --out ")
    assert "--memory-limit-mib 3" in made.read_text()
    assert room.log == [("compile slot", {"compile": 3 << 20})]
    assert room.lent_bytes == 0
    assert engines.status() is None


def test_a_device_that_was_not_told_what_it_is_makes_none(tmp_path: Path) -> None:
    engines = engines_of(tmp_path, Room(), target="")
    assert not engines.makes
    assert not engines.missing(DIGEST, tmp_path)


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    engines = engines_of(tmp_path, Room(), "sys.exit('provision: layer 7: no such operator')")
    with pytest.raises(BundleError, match="could not be made for orin-nano: provision: layer 7: no such operator"):
        asyncio.run(engines.make(DIGEST, tmp_path))
    assert engines.missing(DIGEST, tmp_path)


def test_nothing_is_compiled_that_could_not_be_kept(tmp_path: Path) -> None:
    engines = engines_of(tmp_path, room := Room())
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / "engines").write_text("in the way")
    with pytest.raises(BundleError, match=r"engines cannot be written to .*: let it belong to the user"):
        asyncio.run(engines.make(DIGEST, tmp_path / "slot"))
    assert room.log == []
    assert not (tmp_path / "pid").exists()


def test_a_compiler_that_is_not_wanted_any_more_is_ended_and_its_memory_given_back(tmp_path: Path) -> None:
    room = Room()
    engines = engines_of(tmp_path, room, "time.sleep(60)")

    async def scenario() -> None:
        making = asyncio.ensure_future(engines.make(DIGEST, tmp_path))
        while not (status := engines.status()) or not status["says"]:  # noqa: ASYNC110 - it is another process's doing
            await asyncio.sleep(0.01)
        assert status["says"] == "1.0 s  rec: compiling"
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making

    asyncio.run(scenario())
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert room.lent_bytes == 0


def test_engines_of_other_bundles_are_removed(tmp_path: Path) -> None:
    engines = engines_of(tmp_path, Room())
    for digest in ("a", "b"):
        engines.folder(digest).mkdir(parents=True)
    engines.keep_only({"b"})
    assert not engines.folder("a").exists()
    assert engines.folder("b").exists()


def provisional(path: Path) -> Bundle:
    """A bundle that serves, and is not served as it will be."""
    order = wire.Open("null", "null", onnx=str(tiny.null_model(path)), digest=DIGEST)
    bundle = Bundle(
        [order], Limits(body_bytes=1024), manifest=None, on_ready=lambda _ready: None, folder=path.parent / "slot"
    )
    bundle.meanwhile = MEANWHILE
    return bundle


@pytest.mark.parametrize("may", [True, False])
def test_a_bundle_serves_degraded_until_its_engines_are_made_and_says_so_when_they_cannot_be(
    tmp_path: Path, may: bool
) -> None:
    engines = engines_of(tmp_path, Room(), "" if may else "sys.exit('no such operator')")
    service = Service([provisional(tmp_path / "null.json")], device_id="d", facts=dict)
    request = InferRequest("null", [Tensor.from_array("x", np.ones((1, 3), np.float32))])

    def wanting() -> list[Bundle]:
        return [bundle for bundle in [service.serving("null")] if bundle.meanwhile]

    async def then(bundle: Bundle) -> None:
        fresh = provisional(tmp_path / "null.json")
        fresh.meanwhile = ""
        await service.swap(fresh, only_for=bundle)

    async def scenario() -> None:
        service.start()
        await service.load("null")
        assert (await service.infer(request)).origin.degraded == MEANWHILE
        making = asyncio.ensure_future(engines.catch_up(wanting, then))
        wanted = None if may else "its engines could not be made for orin-nano: no such operator"
        while (degraded := (await service.infer(request)).origin.degraded) != wanted:
            assert degraded == MEANWHILE
            await asyncio.sleep(0.01)
        making.cancel()
        await service.stop(5)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_version_that_was_replaced_while_its_engines_were_made_does_not_come_back(tmp_path: Path) -> None:
    engines, bundle = engines_of(tmp_path, Room()), provisional(tmp_path / "null.json")
    asked = iter([[bundle]])  # and nobody serves without engines when it asks again
    taken: list[Bundle] = []

    async def then(one: Bundle) -> None:
        taken.append(one)

    async def scenario() -> None:
        making = asyncio.ensure_future(engines.catch_up(lambda: next(asked, []), then))
        while engines.missing(DIGEST, tmp_path / "slot") or engines.status():  # noqa: ASYNC110 - another process's doing
            await asyncio.sleep(0.01)
        making.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert taken == []
