"""What a process takes, measured by itself."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from support import tiny

from appliance import wire
from appliance.adapters import host
from appliance.core.budget import need_of
from appliance.gauge import Gauge, trim
from appliance.model import Model
from appliance.runtime.null import NullRuntime, NullSession

pytestmark = pytest.mark.unit

MIB = 2**20


def test_what_the_gpu_has_taken_meanwhile_counts_where_its_memory_is_that_of_the_machine() -> None:
    held_bytes = 100 * MIB
    gauge = Gauge(lambda: held_bytes)
    before_bytes = gauge.resident_bytes()
    held_bytes += 700 * MIB
    for seen_bytes in (gauge.resident_bytes(), gauge.peak_bytes()):
        assert 690 * MIB < seen_bytes - before_bytes < 800 * MIB


def test_the_need_of_a_model_holds_what_the_gpu_took_while_it_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_bytes, open_null = 100 * MIB, NullRuntime.open

    def open_on_gpu(self: NullRuntime, graph: bytes, *, threads: int, few_shapes: bool = True) -> NullSession:
        nonlocal held_bytes
        held_bytes += 700 * MIB
        return open_null(self, graph, threads=threads, few_shapes=few_shapes)

    monkeypatch.setattr(NullRuntime, "open", open_on_gpu)
    monkeypatch.setattr(host, "memory_bytes", lambda: {"nvmap": held_bytes})
    gc.collect()
    trim()  # what other tests have left would be given back meanwhile
    model = Model(wire.Open(name="null", runtime="null", onnx=str(tiny.null_model(tmp_path / "null.json"))))
    need = need_of(model.memory, overhead_bytes=0, file_bytes=0, runs=1)
    assert 690 * MIB < need.terms["weights"] < 800 * MIB
