"""The HTTP door in memory: what every route answers, and what of a request reaches the service."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from doubles.asgi import ECHO, INPUT, PREDICT, READER, ask, asked, door, error_of
from doubles.service import MemoryService

from appliance.adapters.tokens import Role, TokenFile
from models.spec import pack_bytes, unpack_bytes

pytestmark = pytest.mark.unit

X = np.float32([[1, 2], [3, 4]])


# What is asked about


def test_the_server_says_what_it_speaks() -> None:
    answer = ask("GET", "/v2").json()
    assert answer["name"] == "edge-appliance"
    assert answer["extensions"] == [
        "binary_tensor_data",
        "schedule_policy",
        "model_configuration",
        "statistics",
        "model_repository",
    ]


def test_a_daemon_is_live_even_while_its_models_are_not_ready() -> None:
    service = MemoryService(unready={"echo": "loading"})
    assert ask("GET", "/v2/health/live", service).json() == {"live": True}


def test_readiness_names_every_model_that_is_not_ready_and_why() -> None:
    assert ask("GET", "/v2/health/ready").json() == {"ready": True}
    response = ask(
        "GET", "/v2/health/ready", MemoryService(unready={"echo": "loading", "reader": "waiting: it crashed"})
    )
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert error_of(response) == "echo: loading; reader: waiting: it crashed"


@pytest.mark.parametrize("version", ["", "/versions/1.0"])
def test_a_model_tells_its_tensors_and_whether_it_is_ready(version: str) -> None:
    document = ask("GET", f"/v2/models/echo{version}").json()
    assert document["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
    assert [output["name"] for output in document["outputs"]] == ["y", "sum"]
    assert ask("GET", f"/v2/models/echo{version}/ready").json() == {"name": "echo", "ready": True}
    response = ask("GET", f"/v2/models/echo{version}/ready", MemoryService(unready={"echo": "loading"}))
    assert (response.status_code, error_of(response)) == (503, "echo: loading")


def test_the_repository_index_lists_all_models_or_the_ready_ones() -> None:
    service = MemoryService(unready={"echo": "loading"})
    everything = ask("POST", "/v2/repository/index", service).json()
    assert everything == [
        {"name": "echo", "version": "1.0", "state": "LOADING", "reason": "loading"},
        {"name": "reader", "version": "1.0", "state": "READY", "reason": ""},
    ]
    assert ask("POST", "/v2/repository/index", service, json={"ready": True}).json() == everything[1:]


# The repository


def as_operator(service: MemoryService, tmp_path: Path) -> Callable[..., httpx.Response]:
    """How to ask `service` with a token of role operate."""
    tokens = TokenFile(tmp_path)
    headers = {"authorization": f"Bearer {tokens.create('operator', Role.OPERATE)}"}
    app = door(service, tokens=tokens)
    return lambda path, **request: asked(app, "POST", f"/v2/repository/models/{path}", headers=headers, **request)


def test_a_model_is_unloaded_and_loaded_again_by_an_operator(tmp_path: Path) -> None:
    service = MemoryService()
    order = as_operator(service, tmp_path)
    assert order("echo/unload", json={"parameters": {"unload_dependents": False}}).status_code == 200
    assert ask("POST", "/v2/repository/index", service).json()[0]["state"] == "UNAVAILABLE"
    assert order("echo/load").json() == {"fits": True, "need_bytes": 100, "have_bytes": 100, "would_evict": []}
    assert ask("POST", "/v2/repository/index", service, json={"ready": True}).json()[0]["name"] == "echo"


def test_a_load_that_memory_would_not_hold_is_507_with_the_figures(tmp_path: Path) -> None:
    service = MemoryService()
    order = as_operator(service, tmp_path)
    order("echo/unload")
    service.budget_bytes = 120
    response = order("echo/load")
    assert response.status_code == 507
    document = response.json()
    assert "echo needs" in document.pop("error")
    assert document == {"need_bytes": 100, "have_bytes": 20, "would_evict": []}


def test_a_dry_run_says_the_same_and_changes_nothing(tmp_path: Path) -> None:
    service = MemoryService()
    order = as_operator(service, tmp_path)
    order("echo/unload")
    for budget_bytes, fits in ((120, False), (200, True)):
        service.budget_bytes = budget_bytes
        response = order("echo/load?dry_run=true")
        figures = {"need_bytes": 100, "have_bytes": budget_bytes - 100, "would_evict": []}
        assert (response.status_code, response.json()) == (200, {"fits": fits, **figures})
    assert ask("POST", "/v2/repository/index", service).json()[0]["state"] == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("missing/load", b"", 404),
        ("missing/unload", b"", 404),
        ("echo/load", b"{", 400),
        ("echo/load", b"[]", 400),
        ("echo/load", b'{"parameters": {"config": "{}"}}', 400),
        ("echo/load", b'{"parameters": {"file:1/model.onnx": "eA=="}}', 400),
        ("echo/unload", b'{"parameters": {"unload_dependents": 1}}', 400),
        ("echo/load?dry_run=perhaps", b"", 400),
    ],
)
def test_an_order_that_cannot_be_followed_is_refused(tmp_path: Path, path: str, body: bytes, status: int) -> None:
    service = MemoryService()
    response = as_operator(service, tmp_path)(path, content=body)
    assert response.status_code == status
    error_of(response)
    assert [model["state"] for model in ask("POST", "/v2/repository/index", service).json()] == ["READY", "READY"]


# Documents in the form of Triton's


@pytest.mark.parametrize("version", ["", "/versions/1.0"])
def test_a_model_shows_its_configuration(version: str) -> None:
    config = ask("GET", f"/v2/models/echo{version}/config").json()
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 2]}]
    assert [output["name"] for output in config["output"]] == ["y", "sum"]
    assert config["max_batch_size"] == 0


@pytest.mark.parametrize("path", ["/v2/models/echo/stats", "/v2/models/echo/versions/1.0/stats", "/v2/models/stats"])
def test_statistics_count_what_was_asked_of_a_model(path: str) -> None:
    app = door(MemoryService())
    for _ in range(2):
        assert asked(app, "POST", ECHO, json={"inputs": [INPUT]}).status_code == 200
    statistics = asked(app, "GET", path).json()["model_stats"][0]
    assert (statistics["name"], statistics["version"], statistics["inference_count"]) == ("echo", "1.0", 2)
    assert statistics["inference_stats"]["compute_infer"] == {"count": 2, "ns": 20_000_000}


@pytest.mark.parametrize("what", ["config", "stats"])
@pytest.mark.parametrize("model", ["missing", "echo/versions/2"])
def test_configuration_and_statistics_of_what_is_not_served_are_404(model: str, what: str) -> None:
    assert ask("GET", f"/v2/models/{model}/{what}").status_code == 404


# The page, and documents for machines


def test_status_page_metrics_and_openapi_are_served() -> None:
    assert ask("GET", "/v1/status").json()["device_id"] == "memory"
    assert ask("GET", "/").text.lower().startswith("<!doctype html>")
    assert PREDICT.replace("reader", "{model}") in ask("GET", "/openapi.json").json()["paths"]
    text = ask("GET", "/metrics", MemoryService(unready={"echo": "loading"})).text
    assert 'appliance_model_ready{model="echo",version="1.0"} 0.0' in text
    assert 'appliance_model_ready{model="reader",version="1.0"} 1.0' in text
    assert 'appliance_worker_restarts_total{cause="crash",model="reader",version="1.0"} 2.0' in text


def test_the_status_page_may_be_asked_for_by_head() -> None:
    response = ask("HEAD", "/")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-length"] == str(len(ask("GET", "/").content))


def test_the_status_page_needs_nothing_from_outside() -> None:
    pages = {path: ask("GET", path) for path in ("/", "/page.css", "/parts.js", "/page.js")}
    assert {path: page.headers["content-type"].partition(";")[0] for path, page in pages.items()} == {
        "/": "text/html",
        "/page.css": "text/css",
        "/parts.js": "text/javascript",
        "/page.js": "text/javascript",
    }
    for page in pages.values():
        assert not re.findall(r"(?:https?:)?//[\w.-]+\.\w+", page.text)
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert page.headers["cache-control"] == "no-cache"
    assert len(pages["/"].text) < 10_000
    assert sum(len(page.text) for page in pages.values()) < 40_000


# Tensors


@pytest.mark.parametrize("path", [ECHO, "/v2/models/echo/versions/1.0/infer"])
def test_tensors_in_json_are_answered_in_json_with_what_computed_them(path: str) -> None:
    response = ask("POST", path, json={"id": "7", "inputs": [INPUT]})
    assert response.json() == {
        "id": "7",
        "model_name": "echo",
        "model_version": "1.0",
        "parameters": {"runtime": "memory", "precision": "fp32", "trust": "unverified-local", "degraded": ""},
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [2, 2], "data": [1.0, 2.0, 3.0, 4.0]},
            {"name": "sum", "datatype": "FP32", "shape": [2], "data": [3.0, 7.0]},
        ],
    }
    origin = {name: value for name, value in response.headers.items() if name.startswith("appliance-")}
    assert origin == {
        "appliance-runtime": "memory",
        "appliance-precision": "fp32",
        "appliance-version": "1.0",
        "appliance-trust": "unverified-local",
    }


@pytest.mark.parametrize("rows", [2, 20_000], ids=["small", "large"])
def test_tensors_in_binary_are_answered_in_binary(rows: int) -> None:
    x = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
    item = {"name": "x", "datatype": "FP32", "shape": [rows, 2], "parameters": {"binary_data_size": x.nbytes}}
    outputs = [{"name": "sum", "parameters": {"binary_data": True}}]
    head = orjson.dumps({"inputs": [item], "outputs": outputs})
    headers = {"Inference-Header-Content-Length": str(len(head))}
    response = ask("POST", ECHO, content=head + x.tobytes(), headers=headers)
    assert response.headers["content-type"] == "application/octet-stream"
    length = int(response.headers["inference-header-content-length"])
    (output,) = orjson.loads(response.content[:length])["outputs"]
    assert (output["name"], output["parameters"]) == ("sum", {"binary_data_size": 4 * rows})
    assert np.frombuffer(response.content[length:], np.float32).tolist() == x.sum(axis=1).tolist()


def test_a_raw_body_is_the_one_input_and_everything_is_answered_in_binary() -> None:
    response = ask("POST", ECHO, content=X.tobytes(), headers={"Inference-Header-Content-Length": "0"})
    length = int(response.headers["inference-header-content-length"])
    assert response.content[length:] == X.tobytes() + np.float32([3, 7]).tobytes()


def test_several_pictures_in_one_binary_tensor_are_answered_by_as_many_documents() -> None:
    payload = pack_bytes([b"\xff\xd8abc", b""])
    item = {"name": "image", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(payload)}}
    head = orjson.dumps({"inputs": [item], "parameters": {"binary_data_output": True}})
    response = ask("POST", READER, content=head + payload, headers={"Inference-Header-Content-Length": str(len(head))})
    length = int(response.headers["inference-header-content-length"])
    documents = unpack_bytes("result", response.content[length:], 2)
    assert [orjson.loads(document)["bytes"] for document in documents] == [5, 0]


def test_priority_timeout_and_outputs_of_a_request_reach_the_queue() -> None:
    service = MemoryService()
    parameters = {"priority": 2, "timeout": 1500}
    ask("POST", ECHO, service, json={"inputs": [INPUT], "parameters": parameters, "outputs": [{"name": "sum"}]})
    (request,) = service.requests
    assert (request.priority, request.deadline_ms, request.outputs) == (2, 1.5, ("sum",))


def test_priority_and_timeout_of_zero_mean_the_defaults() -> None:
    service = MemoryService()
    ask("POST", ECHO, service, json={"inputs": [INPUT], "parameters": {"priority": 0, "timeout": 0}})
    assert (service.requests[0].priority, service.requests[0].deadline_ms) == (5, None)


# Pictures


@pytest.mark.parametrize(
    "request_",
    [
        {"content": b"\xff\xd8abc"},
        {"content": b"\xff\xd8abc", "headers": {"content-type": "image/jpeg"}},
        {"files": {"image": ("a.jpg", b"\xff\xd8abc")}},
        {"files": {"anything": b"\xff\xd8abc"}, "data": {"note": "from the gate"}},
    ],
    ids=["raw", "typed", "form", "form-with-fields"],
)
def test_a_picture_may_be_the_body_or_a_file_of_a_form(request_: dict[str, Any]) -> None:
    response = ask("POST", PREDICT, **request_)
    assert response.json() == {
        "model": "reader",
        "version": "1.0",
        "runtime": "memory",
        "degraded": None,
        "bytes": 5,
    }


def test_a_form_is_recognised_in_any_spelling_of_its_type() -> None:
    body = b'--B\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\nabc\r\n--B--\r\n'
    response = ask("POST", PREDICT, content=body, headers={"content-type": "Multipart/Form-Data; boundary=B"})
    assert response.json()["bytes"] == 3


def test_deadline_priority_and_source_of_a_picture_reach_the_queue() -> None:
    service = MemoryService()
    ask("POST", f"{PREDICT}?deadline_ms=80.5&priority=1&source=gate-3", service, content=b"abc")
    (request,) = service.requests
    assert (request.deadline_ms, request.priority, request.source) == (80.5, 1, "gate-3")
    assert request.tensors[0].to_array().tolist() == [b"abc"]
