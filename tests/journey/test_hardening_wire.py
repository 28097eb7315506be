"""Bodies and documents made to exhaust a server or to get around its checks: each ends, and nobody else notices."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from support import tiny
from support.daemon import Daemon, assert_refused, binary_floats, binary_request
from support.processes import eventually, resident_bytes

pytestmark = pytest.mark.journey

MIB = 2**20
INFER = "/v2/models/linear/infer"
X = np.random.default_rng(5).random((2, 16), np.float32)
CHUNKED = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % INFER.encode()


@pytest.fixture(autouse=True)
def nothing_happened(tiny_daemon: Daemon) -> Iterator[None]:
    """After each test the daemon is ready, answers rightly, holds no connection, and no worker was restarted."""
    sockets = tiny_daemon.sockets()
    yield
    assert np.allclose(binary_floats(tiny_daemon.infer("linear", X)), X @ tiny.WEIGHTS, rtol=1e-4)
    assert {worker["restarts"] for worker in tiny_daemon.status()["workers"]} == {0}
    eventually(lambda: tiny_daemon.sockets() <= sockets + 1, "the connections of the test are gone")


def flood(daemon: Daemon, first: bytes, pieces: Iterable[bytes]) -> bytes:
    """Send until the daemon hangs up or nothing is left; what it said meanwhile."""
    url = httpx.URL(daemon.url)
    answer = b""
    with socket.create_connection((url.host, url.port or 0), timeout=20) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(first)
            for piece in pieces:
                sock.sendall(piece)
        with contextlib.suppress(ConnectionError):
            while part := sock.recv(65536):
                answer += part
    return answer


def status_and_error(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), str(json.loads(body)["error"])


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        pytest.param(b"", b"1\r\n \r\n" * 10_000, id="chunks of one byte without end"),
        pytest.param(b"1;a=", b"b" * 60_000, id="a chunk's extension without end"),
        pytest.param(b"", b"1;" + b"a" * 1000 + b"\r\n \r\n", id="chunks with extensions"),
        pytest.param(b"1\r\n[\r\n0\r\n", b"A: b\r\n" * 10_000, id="trailers without end"),
        pytest.param(b"1\r\n[\r\n0\r\nA: ", b"b" * 60_000, id="a trailer without end"),
        pytest.param(b"1\r\n[\r\n" + b"0" * 30, b"0" * 60_000, id="a size of zeros without end"),
    ],
)
def test_a_body_that_is_mostly_frame_is_cut_off_within_a_megabyte(
    tiny_daemon: Daemon, first: bytes, piece: bytes
) -> None:
    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        while sent < 64 * MIB:
            sent += len(piece)
            yield piece

    answer = flood(tiny_daemon, CHUNKED + first, pieces())
    assert sent < 32 * MIB  # what lies in the buffers of both ends counts as sent
    if answer:  # whoever goes on sending may find the connection reset before the answer
        status, error = status_and_error(answer)
        assert status in {400, 413}
        assert error


def test_a_storm_of_chunks_is_refused_with_the_reason(tiny_daemon: Daemon) -> None:
    status, error = status_and_error(flood(tiny_daemon, CHUNKED, [b"1\r\n \r\n" * 220_000]))
    assert (status, error) == (413, "over 1048576 bytes frame the body: send it in fewer chunks")


def test_a_body_in_as_many_chunks_as_a_real_client_makes_is_taken(tiny_daemon: Daemon) -> None:
    x = np.random.default_rng(1).random((60_000, 16), np.float32)
    content, headers = binary_request({"x": x})
    pieces = (content[at : at + 64] for at in range(0, len(content), 64))
    answer = tiny_daemon.http.post(INFER, content=pieces, headers=headers)
    assert binary_floats(answer).shape == (60_000, 16)


def test_who_goes_on_sending_after_a_refusal_is_hung_up_on(tiny_daemon: Daemon) -> None:
    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        piece = b"10000\r\n" + bytes(65_536) + b"\r\n"
        while sent < 512 * MIB:
            sent += len(piece)
            yield piece

    flood(tiny_daemon, CHUNKED, pieces())
    assert sent < 128 * MIB


def test_a_compressed_bomb_is_refused_and_never_unpacked(tiny_daemon: Daemon) -> None:
    bomb = gzip.compress(bytes(128 * MIB), 1)
    before = resident_bytes(tiny_daemon.pid)
    for path in (INFER, "/v1/models/blank/predict"):
        answer = tiny_daemon.http.post(path, content=bomb, headers={"content-encoding": "gzip"})
        assert "compressed bodies are not accepted" in assert_refused(answer, 415)
    assert resident_bytes(tiny_daemon.pid) < before + 32 * MIB


def document(**more: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """A JSON request for the linear model with `more` keys."""
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.0] * 16}], **more}


@pytest.mark.parametrize(
    "parameters",
    [
        {"runtime": "tensorrt", "precision": "fp64", "trust": "signed", "degraded": "no"},
        {"model_name": "other", "model_version": "9", "binary_data_size": 7},
        {"triton_enable_empty_final_response": True, "headers": "x", "__class__": "y"},
    ],
)
def test_parameters_of_a_request_shadow_nothing_of_the_answer(tiny_daemon: Daemon, parameters: dict[str, Any]) -> None:
    plain = tiny_daemon.http.post(INFER, json=document())
    headers = {"appliance-runtime": "tensorrt", "appliance-version": "9"}
    answer = tiny_daemon.http.post(INFER, json=document(parameters=parameters), headers=headers)
    assert answer.json() == plain.json()
    assert answer.headers["appliance-runtime"] == plain.headers["appliance-runtime"] == "onnxruntime-cpu"
    assert answer.headers["appliance-version"] == "1"


@pytest.mark.parametrize(
    "request_body",
    [
        document(parameters={"sequence_id": 7, "sequence_start": True}),
        document(parameters={"priority": 11}),
        document(outputs=[{"name": "y", "parameters": {"classification": 3}}]),
        document(outputs=[{"name": "y", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 64}}]),
        {
            "inputs": [
                {
                    "name": "x",
                    "datatype": "FP32",
                    "shape": [1, 16],
                    "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 64},
                }
            ]
        },
    ],
    ids=["sequence", "priority", "classification", "shared output", "shared input"],
)
def test_what_would_change_the_answer_and_is_not_offered_is_refused(tiny_daemon: Daemon, request_body: Any) -> None:  # noqa: ANN401 - JSON
    assert_refused(tiny_daemon.http.post(INFER, json=request_body), 400)


@pytest.mark.parametrize("order", ["load", "unload"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"config": '{"backend": "python"}'},
        {"file:1/model.py": "cHJpbnQoMSk="},
        {"file:../../../../etc/cron.d/x": "eA=="},
        {"unload_dependents": "yes"},
        ["config"],
    ],
)
def test_a_model_cannot_be_brought_along_with_an_order(tiny_daemon: Daemon, order: str, parameters: object) -> None:
    answer = tiny_daemon.http.post(
        f"/v2/repository/models/linear/{order}",
        json={"parameters": parameters},
        headers=tiny_daemon.authorized("admin"),
    )
    assert_refused(answer, 400)


@pytest.mark.parametrize("name", ["..%2f..%2fetc%2fpasswd", "%2e%2e", "linear%00", "none", "linear%2f..%2flinear"])
def test_only_names_that_are_known_can_be_loaded(tiny_daemon: Daemon, name: str) -> None:
    headers = tiny_daemon.authorized("admin")
    assert_refused(tiny_daemon.http.post(f"/v2/repository/models/{name}/load", headers=headers), 404)


def test_a_page_under_another_name_gets_nothing_from_a_running_daemon(tiny_daemon: Daemon) -> None:
    rebound = {"host": "evil.example"}
    assert "evil.example" in assert_refused(tiny_daemon.http.get("/v1/status", headers=rebound), 403)
    foreign = {"origin": "https://evil.example"}
    assert "another site" in assert_refused(tiny_daemon.http.post(INFER, json=document(), headers=foreign), 403)


@pytest.mark.parametrize("rows", [2, 100_000], ids=["while it is idle", "in the middle of an answer"])
def test_a_connection_that_the_client_resets_costs_nothing_but_itself(tiny_daemon: Daemon, rows: int) -> None:
    url = httpx.URL(tiny_daemon.url)
    body, headers = binary_request({"x": np.ones((rows, 16), np.float32)})
    lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\n%scontent-length: %d\r\n\r\n" % (INFER.encode(), lines, len(body))
    pid, logged = tiny_daemon.pid, len(tiny_daemon.log())
    for _ in range(5):
        with socket.create_connection((url.host, url.port or 0), timeout=20) as sock:
            sock.sendall(head + body)
            assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets it
    tiny_daemon.wait_ready()
    assert (tiny_daemon.process.poll(), tiny_daemon.pid) == (None, pid)
    assert not [line for line in tiny_daemon.log()[logged:] if line["level"] in {"error", "critical"}]
