"""Engines of the stand-in TensorRT, made by the real builder, with real passports."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from doubles.cuda import StandInCuda
from doubles.tensorrt import StandInTensorRt

from appliance.runtime import tensorrt
from kernels.launch import Driver
from kernels.plugin import PLUGINS
from models.bundle import Blob
from models.engine import NEVER, Passport, Shapes
from models.targets import SERVE
from provisioning.engines import builder

ANY = Shapes((0, 0), (8, 8), (512, 512))
FIRST, LAST = Shapes((1, 1), (2, 2), (4, 4)), Shapes((1, 5), (2, 8), (4, 16))
WORKSPACE_BYTES = 1 << 20


def install(monkeypatch: pytest.MonkeyPatch, **options: Any) -> StandInTensorRt:  # noqa: ANN401 - those of the double
    """Put the stand-ins where `tensorrt` and libcuda would be found."""
    cuda, load = StandInCuda(), ctypes.CDLL
    trt = StandInTensorRt(cuda, **options)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *rest: cuda if name == "libcuda.so.1" else load(name, *rest))
    monkeypatch.setitem(sys.modules, trt.__name__, trt)
    return trt


def order(
    graph: Path, plan: Path, *profiles: Mapping[str, Shapes], sm: str = "8.7", caches: str = "", plugins: bool = False
) -> builder.Order:
    """What `provision compile` would order."""
    return builder.Order("tensorrt", str(graph), str(plan), sm, profiles, WORKSPACE_BYTES, caches, plugins)


def engine(
    trt: StandInTensorRt, folder: Path, graph: bytes, *profiles: Mapping[str, Shapes], exported: bytes = b""
) -> Path:
    """Build `graph`, or `exported` in its place, and lay plan and passport where a bundle has them; where that is."""
    out = folder / "orin-nano"
    out.mkdir(parents=True, exist_ok=True)
    (out / "g.onnx").write_bytes(exported or graph)
    here = tensorrt.here(trt.__name__, trt, Driver())
    outcome = builder.build(
        trt, order(out / "g.onnx", out / "g.plan", *profiles, plugins=bool(exported)), here, lambda _event: None
    )
    trt.logger = None  # building is for another process, and each has a logger of its own
    passport = Passport(
        graph="g",
        precision="fp32",
        target="orin-nano",
        valid_for=outcome.valid_for,
        graph_sha256=hashlib.sha256(graph).hexdigest(),
        plan=Blob.of((out / "g.plan").read_bytes()),
        profiles=outcome.profiles,
        memory_bytes=outcome.memory_bytes,
        flags=outcome.flags,
        plugins=dict.fromkeys(PLUGINS, Blob.of(exported).sha256) if exported else {},
        timing_cache_sha256=outcome.timing_cache_sha256,
        purpose=SERVE,
        executed=NEVER,
    )
    path = out / "g.passport.json"
    path.write_bytes(passport.to_bytes())
    return path
