"""The flight recorder, the log lines of requests, trace contexts, and spans as a collector gets them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import structlog
from doubles.asgi import ECHO, INPUT, PREDICT, ask
from doubles.service import MemoryService
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from appliance.adapters import traces
from appliance.core.history import Happened
from appliance.core.trace import Trace, read
from appliance.recorder import Flight, Recorder, input_hash
from appliance.service import InferRequest
from models.errors import ModelError
from models.spec import Tensor, pack_bytes

pytestmark = pytest.mark.unit

TRACE, PARENT, OWN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
PICTURE = b"a picture"


def picture() -> Tensor:
    return Tensor("image", "BYTES", (1,), pack_bytes([PICTURE]))


def asked(service: MemoryService, folder: Path, *ids: str, per_s: int = 100, fault: bool = False) -> Recorder:
    """A recorder that has seen one request after the other, each with its id."""

    async def run() -> Recorder:
        recorder = Recorder(service, folder, per_s=per_s)  # type: ignore[arg-type] # its double
        for name in ids:
            with contextlib.suppress(ModelError):
                await service.infer(InferRequest("reader", [picture()], id=name, source="gate"))
        if fault:
            recorder.fault(Happened(0.0, "reader", "1.0", "crash", "it died", "restart"))
        await recorder.finish()
        return recorder

    return asyncio.run(run())


@pytest.fixture
def logged() -> Iterator[list[dict[str, Any]]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def test_a_request_is_told_in_one_line_with_the_hash_of_what_it_sent(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    asked(MemoryService(), tmp_path, "17")
    (line,) = logged
    assert (line["event"], line["log_level"]) == ("request", "info")
    assert (line["request_id"], line["model_id"], line["version"], line["source"]) == ("17", "reader", "1.0", "gate")
    assert line["input_hash"] == hashlib.blake2b(PICTURE, digest_size=8).hexdigest()
    assert line["timing_ms"]["inference"] == 10.0


def test_a_request_that_failed_is_told_with_the_error_and_its_cuda_code(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    fault = ModelError("the graph failed: CUDA error 700 (an illegal memory access was encountered)")
    asked(MemoryService(fault=fault), tmp_path, "17")
    (line,) = logged
    assert (line["log_level"], line["error"], line["cuda_error_code"]) == ("warning", "ModelError", 700)
    assert line["input_hash"]


def test_a_tensor_whose_bytes_are_none_takes_no_other_line_with_it(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    service = MemoryService(fault=ModelError("nonsense"))

    async def run() -> None:
        recorder = Recorder(service, tmp_path, per_s=100)  # type: ignore[arg-type] # its double
        for name, sent in (("1", Tensor("image", "BYTES", (2,), b"\xff")), ("2", picture())):
            with contextlib.suppress(ModelError):
                await service.infer(InferRequest("reader", [sent], id=name))
        await recorder.finish()

    asyncio.run(run())
    assert [line["request_id"] for line in logged] == ["1", "2"]


def test_lines_that_wait_keep_only_so_many_bytes_of_what_was_sent(
    tmp_path: Path, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.recorder._UNTOLD_BYTES", 2 * picture().size_bytes)
    asked(MemoryService(), tmp_path, "1", "2", "3")
    assert [(line["request_id"], "input_hash" in line) for line in logged] == [("1", True), ("2", True), ("3", False)]


def test_no_more_lines_are_written_than_wished_for_and_the_others_are_counted(
    tmp_path: Path, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([*[100.0] * 10, 101.0])
    monkeypatch.setattr("appliance.recorder.time.time", lambda: next(seconds))
    asked(MemoryService(), tmp_path, *map(str, range(11)), per_s=2)
    assert [(line["request_id"], line.get("left_out")) for line in logged] == [("0", None), ("1", None), ("10", 8)]
    logged.clear()
    monkeypatch.undo()
    asked(MemoryService(), tmp_path, "1", "2", per_s=0)
    assert logged == []


def test_the_last_requests_are_kept_without_what_they_carried(tmp_path: Path) -> None:
    service = MemoryService()
    asked(service, tmp_path, *map(str, range(300)), per_s=0)
    flights = service.flights()
    assert [flight.request_id for flight in flights[:2]] == ["299", "298"]  # type: ignore[attr-defined] # a Flight
    assert len(flights) == 256
    assert flights[0].inputs == [("image", "BYTES", (1,))]  # type: ignore[attr-defined] # a Flight
    assert PICTURE.decode() not in repr(flights)


def test_a_fault_leaves_a_file_with_the_requests_before_it_and_the_state_of_the_machine(tmp_path: Path) -> None:
    asked(MemoryService(), tmp_path / "flights", "1", "2", fault=True)
    (file,) = (tmp_path / "flights").iterdir()
    assert file.name.endswith("-reader-crash.json")
    document = json.loads(file.read_bytes())
    assert [one["request_id"] for one in document["requests"]] == ["2", "1"]
    assert document["requests"][0]["input_hash"] == input_hash([picture()])
    assert (document["faults"][0]["cause"], document["status"]["device_id"]) == ("crash", "memory")
    assert PICTURE not in file.read_bytes()
    assert file.stat().st_mode & 0o077 == 0


def test_old_files_make_room_and_a_disk_that_is_full_stops_nothing(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    for number in range(30):
        (tmp_path / f"2020{number:04}-old.json").touch()
    asked(MemoryService(), tmp_path, fault=True)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert (len(names), names[0]) == (20, "20200011-old.json")
    asked(MemoryService(), Path("/proc/nothing"), fault=True)
    assert logged[-1]["event"] == "flights_not_kept"


# Trace contexts


@pytest.mark.parametrize(
    "said",
    ["", "00-1-2-01", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{PARENT}-01", "x" * 9999],
)
def test_what_is_no_trace_context_is_none(said: str) -> None:
    assert read(said, OWN) is None


def test_a_trace_context_is_taken_and_given_on_with_our_span() -> None:
    assert read(TRACEPARENT, OWN) == Trace(TRACE, PARENT, OWN, sampled=True)
    later = read(f"01-{TRACE}-{PARENT}-00-more", OWN)
    assert later
    assert later.header == f"00-{TRACE}-{OWN}-00"


@pytest.mark.parametrize(("path", "body"), [(ECHO, {"json": {"inputs": [INPUT]}}), (PREDICT, {"content": PICTURE})])
def test_http_gives_back_the_request_id_and_the_trace_that_it_was_given(path: str, body: dict[str, Any]) -> None:
    service = MemoryService()
    headers = {"x-request-id": "cam-7/17", "traceparent": TRACEPARENT}
    answer = ask("POST", path, service, headers=headers, **body)
    assert answer.headers["x-request-id"] == "cam-7/17"
    given = read(answer.headers["traceparent"], "")
    assert given
    assert (given.trace_id, given.sampled) == (TRACE, True)
    assert given.parent_id != PARENT
    (request,) = service.requests
    assert request.id == "cam-7/17"
    assert request.trace
    assert request.trace.span_id == given.parent_id
    nowhere = ask("POST", path.replace("/models/", "/models/no-"), headers=headers, **body)
    assert (nowhere.status_code, nowhere.headers["x-request-id"]) == (404, "cam-7/17")
    plain = ask("POST", path, **body)
    assert not {"x-request-id", "traceparent"} & set(plain.headers)
    assert "x-request-id" not in ask("POST", path, headers={"x-request-id": "x" * 101}, **body).headers


# Spans


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """The address of a collector of spans, and what it got."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got = ExportTraceServiceRequest()
            got.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
            spans.extend(span for one in got.resource_spans for scope in one.scope_spans for span in scope.spans)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_parts: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        finally:
            server.shutdown()
            thread.join()


def test_a_collector_gets_the_request_as_its_callers_child_with_a_span_for_each_part() -> None:
    timing_ms = {"queue": 5.0, "decode": 2.0, "inference": 10.0, "processing": 1.0}
    trace = Trace(TRACE, PARENT, OWN, sampled=True)
    flight = Flight(1e9, "reader", "1.0", 0.02, timing_ms, 1, (), "17", "", trace)
    with collector() as (endpoint, spans):
        exporter = traces.Exporter(endpoint, "press-7")
        exporter(flight)
        exporter.close()
    by_name = {span.name: span for span in spans}
    assert sorted(by_name) == ["inference", "postprocess", "preprocess", "queue", "request"]
    whole = by_name["request"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex(), whole.span_id.hex()) == (TRACE, PARENT, OWN)
    assert (whole.end_time_unix_nano, whole.end_time_unix_nano - whole.start_time_unix_nano) == (10**18, 20_000_000)
    inference = by_name["inference"]
    assert inference.parent_span_id.hex() == OWN
    assert inference.start_time_unix_nano - whole.start_time_unix_nano == 7_000_000
    assert inference.end_time_unix_nano - inference.start_time_unix_nano == 10_000_000
