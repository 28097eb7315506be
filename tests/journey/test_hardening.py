"""Whatever a client sends, it is refused with a reason, and everybody else is served as before."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from support import tiny
from support.daemon import Daemon, assert_refused, binary_floats, binary_request
from support.processes import eventually, marked

from appliance.bench.damage import mutated

pytestmark = pytest.mark.journey

MIB = 2**20
LIMIT = 16 * MIB
INFER = "/v2/models/linear/infer"
PREDICT = "/v1/models/blank/predict"
X = np.random.default_rng(5).random((2, 16), np.float32)


@pytest.fixture(autouse=True)
def nothing_happened(tiny_daemon: Daemon) -> Iterator[None]:
    """After each test the daemon is ready, no worker was restarted, and answers are right."""
    yield
    assert tiny_daemon.http.get("/v2/health/ready").status_code == 200
    assert {worker["restarts"] for worker in tiny_daemon.status()["workers"]} == {0}
    assert np.allclose(binary_floats(tiny_daemon.infer("linear", X)), X @ tiny.WEIGHTS, rtol=1e-4)
    assert tiny_daemon.http.post(PREDICT, content=tiny.picture(32, 32)).json()["lines"] == []


def png_header(width: int, height: int) -> bytes:
    """A PNG file that is whole in form and claims a size that its data does not fill."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def document(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """A JSON request for the linear model with one input that has `changes`."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.0] * 16}
    return {"inputs": [{**tensor, **changes}]}


def talk(daemon: Daemon, content: bytes, *, then_leave: bool = False) -> bytes:
    """Send bytes over a connection of their own and return what comes back before the daemon closes it."""
    url = httpx.URL(daemon.url)
    answer = b""
    with socket.create_connection((url.host, url.port or 0), timeout=10) as sock:
        with contextlib.suppress(ConnectionError):  # the daemon may stop listening before all was sent
            sock.sendall(content)
        if then_leave:
            return b""
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(65536):
                answer += piece
    return answer


def status_of(answer: bytes) -> int:
    """Status of a raw answer."""
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    ("content", "status"),
    [
        pytest.param(tiny.jpeg(640, 480)[:-2000], 400, id="jpeg cut short"),
        pytest.param(tiny.jpeg(640, 480)[:20], 400, id="jpeg of twenty bytes"),
        pytest.param(tiny.picture(64, 64)[:-40], 400, id="png cut short"),
        pytest.param(b"this is text, whatever its name ends in\n", 400, id="text named jpg"),
        pytest.param(png_header(20_000, 20_000), 413, id="png of 400 million pixels"),
        pytest.param(png_header(2**31 - 1, 2**31 - 1), 413, id="png of absurd size"),
        pytest.param(png_header(0, 10), 400, id="png without width"),
        pytest.param(png_header(100, 100), 400, id="png without pixels"),
        pytest.param(b"", 400, id="empty body"),
        pytest.param(b"GIF89a" + bytes(100), 400, id="gif"),
        pytest.param(bytes(17 * MIB), 413, id="17 MiB"),
    ],
)
def test_a_picture_that_is_none_is_refused(tiny_daemon: Daemon, content: bytes, status: int) -> None:
    assert_refused(tiny_daemon.http.post(PREDICT, content=content, headers={"content-type": "image/jpeg"}), status)


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=x; charset=no-such-charset",
        "multipart/form-data; boundary=" + "x" * 5000,
        "MULTIPART/FORM-DATA; boundary=x",
    ],
)
@pytest.mark.parametrize("content", [b"", b"--x\r\n", b"--x\r\n\r\nno headers\r\n--x--", b"\x00\xff" * 50])
def test_a_form_that_is_none_is_refused(tiny_daemon: Daemon, content_type: str, content: bytes) -> None:
    assert_refused(tiny_daemon.http.post(PREDICT, content=content, headers={"content-type": content_type}), 400)


@pytest.mark.parametrize("query", ["deadline_ms=0", "deadline_ms=soon", "deadline_ms=nan", "priority=11", "priority=x"])
def test_query_values_out_of_range_are_refused(tiny_daemon: Daemon, query: str) -> None:
    assert_refused(tiny_daemon.http.post(f"{PREDICT}?{query}", content=tiny.picture(32, 32)), 400)


@pytest.mark.parametrize(
    "request_body",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"inputs": []}, id="no inputs"),
        pytest.param({"inputs": "x"}, id="inputs of text"),
        pytest.param({"inputs": [7]}, id="inputs of numbers"),
        pytest.param(document(name="z"), id="unknown name"),
        pytest.param(document(name=None), id="no name"),
        pytest.param(document(datatype="FP64"), id="wrong datatype"),
        pytest.param(document(datatype="FLOAT"), id="unknown datatype"),
        pytest.param(document(datatype="FP16"), id="half precision in JSON"),
        pytest.param(document(shape=[16]), id="wrong rank"),
        pytest.param(document(shape=[2, 8]), id="wrong shape"),
        pytest.param(document(shape=[1, -16]), id="negative size"),
        pytest.param(document(shape=[2**40, 2**40]), id="product overflows"),
        pytest.param(document(shape=[2**62, 16]), id="absurd size"),
        pytest.param(document(shape=[1.0, 16]), id="broken size"),
        pytest.param(document(shape=[True, 16]), id="size of truth"),
        pytest.param(document(shape=[1] * 100_000), id="100,000 dimensions"),
        pytest.param(document(data=[0.0] * 15), id="too few values"),
        pytest.param(document(data=[[0.0] * 8, [0.0] * 7]), id="ragged values"),
        pytest.param(document(data=["a"] * 16), id="values of text"),
        pytest.param(document(data=[None] * 16), id="no values"),
        pytest.param(document(data={}), id="values as object"),
        pytest.param({"inputs": document()["inputs"] * 2}, id="input given twice"),
        pytest.param({"inputs": document()["inputs"] * 5000}, id="input given 5,000 times"),
        pytest.param(document(name="x" * 300_000), id="name of 300,000 characters"),
        pytest.param(document() | {"outputs": [{"name": "none"}]}, id="unknown output"),
        pytest.param(document() | {"outputs": [{"name": "y"}] * 2}, id="output asked for twice"),
        pytest.param(document() | {"outputs": [{"name": "y" * 300_000}]}, id="output name of 300,000 characters"),
        pytest.param(document() | {"outputs": 1}, id="outputs is a number"),
        pytest.param(document() | {"id": 7}, id="id is a number"),
        pytest.param(document() | {"parameters": []}, id="parameters is a list"),
        pytest.param(document() | {"parameters": {"timeout": -1}}, id="negative timeout"),
        pytest.param(document() | {"parameters": {"priority": "high"}}, id="priority of text"),
        pytest.param(document(parameters={"binary_data_size": 64}), id="both forms of data"),
        pytest.param([1, 2, 3], id="a list"),
    ],
)
def test_a_document_that_does_not_fit_is_refused(tiny_daemon: Daemon, request_body: object) -> None:
    sentence = assert_refused(tiny_daemon.http.post(INFER, json=request_body), 400, 413)
    assert len(sentence) < 2500


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="half"),
        pytest.param(b"\xff\xfe", id="no UTF-8"),
        pytest.param(b"\x00" * 1000, id="zeros"),
        pytest.param(b"[" * 100_000, id="100,000 open brackets"),
        pytest.param(b'{"inputs":' * 50_000, id="50,000 open objects"),
        pytest.param(
            json.dumps(document()).replace("[0.0", "[" * 500 + "0.0").replace("0.0]", "0.0" + "]" * 500).encode(),
            id="values 500 deep",
        ),
        pytest.param(json.dumps(document()).replace('"x"', '"\\ud800"').encode(), id="half a character"),
        pytest.param(json.dumps(document()).replace("[1, 16]", "[1, 1" + "0" * 5000 + "]").encode(), id="huge number"),
        pytest.param(json.dumps(document()).replace("0.0", "NaN").encode(), id="no number"),
    ],
)
def test_bytes_that_are_no_document_are_refused(tiny_daemon: Daemon, content: bytes) -> None:
    assert_refused(tiny_daemon.http.post(INFER, content=content), 400)


@pytest.mark.parametrize("length", ["999999", "99999999999999999999999", "-1", "1e3", "0x10", "", "²", "5, 5", "3"])
def test_a_wrong_length_of_the_document_is_refused(tiny_daemon: Daemon, length: str) -> None:
    body, _headers = binary_request({"x": X})
    headers = {b"inference-header-content-length": length.encode()}
    assert_refused(tiny_daemon.http.post(INFER, content=body, headers=headers), 400)


@pytest.mark.parametrize("size", [0, 1, 127, 129, 2**31, 2**63, -1, "128", True])
def test_a_wrong_length_of_a_tensor_is_refused(tiny_daemon: Daemon, size: object) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 16], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    assert_refused(tiny_daemon.http.post(INFER, content=head + X.tobytes(), headers=headers), 400)


def test_a_body_over_the_limit_is_refused_by_its_announced_length(tiny_daemon: Daemon) -> None:
    assert "16 MiB" in assert_refused(tiny_daemon.http.post(INFER, content=bytes(17 * MIB)), 413)


def test_a_body_over_the_limit_is_refused_without_an_announced_length(tiny_daemon: Daemon) -> None:
    pieces = (bytes(MIB) for _ in range(17))
    with contextlib.suppress(httpx.WriteError):  # it may hang up on who goes on sending
        assert_refused(tiny_daemon.http.post(INFER, content=pieces), 413)


def test_a_body_in_very_many_pieces_is_taken_or_refused_but_not_waited_for(tiny_daemon: Daemon) -> None:
    head = (
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        % INFER.encode()
    )
    answer = talk(tiny_daemon, head + b"1\r\n[\r\n" * 100_000 + b"0\r\n\r\n")
    assert status_of(answer) in {400, 413}


NAMES = [
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e%2f%2e%2e%2fetc",
    "..",
    "%00",
    "linear%00",
    "%ff%fe",
    "%ed%a0%80",
    "%E2%80%AE",
    "x" * 10_000,
    "%20",
    "linear%2f",
    "linear.model",
    "Linear",
    "'%20OR%201=1",
    "{model}",
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
@pytest.mark.parametrize(
    "path", ["/v2/models/{}/infer", "/v2/models/linear/versions/{}/infer", "/v1/models/{}/predict"]
)
def test_a_name_that_is_none_is_not_found(tiny_daemon: Daemon, path: str, name: str) -> None:
    head = f"POST {path.format(name)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    answer = talk(tiny_daemon, head.encode())
    assert status_of(answer) in {400, 404, 405, 414}
    error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
    assert len(error) < 1000
    assert "root:" not in error


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), id="TLS"),
        pytest.param(b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n", id="path of bytes"),
        pytest.param(b"GET  HTTP/1.1\r\n\r\n", id="no path"),
        pytest.param(b"FETCH /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n", id="unknown verb"),
        pytest.param(b"GET /v2 HTTP/9.9\r\nHost: localhost\r\n\r\n", id="unknown version"),
        pytest.param(b"POST /v2 HTTP/1.1\r\nContent-Length: -5\r\n\r\n", id="negative length"),
        pytest.param(b"POST /v2 HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345", id="two lengths"),
        pytest.param(
            b"POST /v2 HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="smuggling"
        ),
        pytest.param(b"POST /v2 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", id="broken chunk"),
        pytest.param(b"GET /v2 HTTP/1.1\r\nno colon\r\n\r\n", id="broken header"),
        pytest.param(b"GET /v2 HTTP/1.1\r\nA: \x00\r\n\r\n", id="header with NUL"),
        pytest.param(b"GET /" + b"a" * MIB + b" HTTP/1.1\r\n\r\n", id="path of 1 MiB"),
        pytest.param(b"GET /v2 HTTP/1.1\r\n" + b"A: b\r\n" * 100_000 + b"\r\n", id="100,000 headers"),
        pytest.param(b"GET /v2 HTTP/1.1\r\nA: " + b"b" * MIB + b"\r\n\r\n", id="header of 1 MiB"),
        pytest.param(b"GET /v2 HTTP/1.1\r\nA: " + b"b" * (20 * MIB), id="header without end"),
    ],
)
def test_what_is_no_http_is_refused_with_a_reason_too(tiny_daemon: Daemon, content: bytes) -> None:
    answer = talk(tiny_daemon, content)
    assert status_of(answer) in {400, 414, 431}, answer[:200]
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]


def test_clients_that_leave_in_the_middle_leave_nothing_behind(tiny_daemon: Daemon) -> None:
    sockets = tiny_daemon.sockets()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (INFER.encode(), LIMIT)
    for _ in range(20):
        talk(tiny_daemon, head + bytes(MIB), then_leave=True)
    eventually(lambda: tiny_daemon.sockets() <= sockets, "their connections are gone")
    body, headers = binary_request({"x": X})
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    whole = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body
    for _ in range(20):
        talk(tiny_daemon, whole, then_leave=True)
    eventually(lambda: tiny_daemon.sockets() <= sockets, "their connections are gone")
    eventually(lambda: tiny_daemon.running_and_waiting("linear") == (0, 0), "nothing runs for them any more")


def test_clients_that_send_half_a_request_and_wait_do_not_keep_others_waiting(tiny_daemon: Daemon) -> None:
    url = httpx.URL(tiny_daemon.url)
    with contextlib.ExitStack() as waiting:
        for _ in range(50):
            sock = waiting.enter_context(socket.create_connection((url.host, url.port or 0)))
            sock.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhalf" % INFER.encode())
        assert np.allclose(binary_floats(tiny_daemon.infer("linear", X)), X @ tiny.WEIGHTS, rtol=1e-4)


def test_requests_that_look_alike_at_once_do_not_get_each_others_answers(tiny_daemon: Daemon) -> None:
    good = [np.full((2, 16), value, np.float32) for value in range(30)]
    bad = [tiny_daemon.later("POST", INFER, json=document(shape=[2, 8])) for _ in range(30)]
    asked = [tiny_daemon.infer_later("linear", x) for x in good]
    for x, answer in zip(good, asked, strict=True):
        assert np.allclose(binary_floats(answer.result(30)), x @ tiny.WEIGHTS, atol=1e-4)
    for answer in bad:
        assert_refused(answer.result(30), 400)


def damaged_requests_are_answered_or_refused(daemon: Daemon, count: int, seed: int) -> None:
    """Send `count` requests that are a little damaged; each is refused for its own fault, and no worker restarts."""
    chance = random.Random(seed)  # noqa: S311 - to be repeatable
    binary, headers = binary_request({"x": X})
    asked = document() | {"id": "7", "outputs": [{"name": "y"}], "parameters": {"priority": 1, "timeout": 10**7}}
    texts = {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [2], "data": ["größer", "発"]}]}
    originals: list[tuple[str, bytes, dict[str, str]]] = [
        (INFER, binary, headers),
        (INFER, json.dumps(asked).encode(), {}),
        (INFER, X.tobytes(), {"inference-header-content-length": "0"}),
        ("/v2/models/text/versions/1/infer", json.dumps(texts).encode(), {}),
        ("/v2/repository/index", b'{"ready": true}', {}),
        (PREDICT, tiny.jpeg(64, 48), {}),
        (PREDICT, tiny.picture(48, 64), {}),
    ]
    pids = marked(daemon.mark)
    for number in range(count):
        path, content, more = chance.choice(originals)
        damaged = mutated(content, chance)
        answer = daemon.http.post(path, content=damaged, headers=more)
        if answer.status_code == 504:
            assert b"timeout" in damaged, (seed, number)  # a digit less, and the request asks for microseconds
        elif answer.status_code == 500:
            assert "NaN or infinite" in assert_refused(answer, 500), (seed, number)  # a float near the largest there is
        elif answer.status_code != 200:
            assert_refused(answer, 400, 413)
    assert sorted(marked(daemon.mark)) == sorted(pids)


def test_three_hundred_damaged_requests_are_answered_or_refused_and_never_break_anything(tiny_daemon: Daemon) -> None:
    damaged_requests_are_answered_or_refused(tiny_daemon, 300, seed=300)


@pytest.mark.long
def test_a_thousand_damaged_requests_are_answered_or_refused_and_never_break_anything(tiny_daemon: Daemon) -> None:
    damaged_requests_are_answered_or_refused(tiny_daemon, 1000, seed=1000)
