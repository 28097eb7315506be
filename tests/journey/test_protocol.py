"""The Open Inference Protocol as the stock `tritonclient` speaks it, and as raw bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.http as triton
from support import tiny
from support.daemon import Daemon, StartDaemon, assert_refused, binary_floats, binary_request
from support.processes import eventually
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.journey

SAMPLES: dict[str, npt.NDArray[Any]] = {
    "BOOL": np.array([True, False, True]),
    "UINT8": np.array([0, 7, 2**8 - 1], np.uint8),
    "UINT16": np.array([0, 7, 2**16 - 1], np.uint16),
    "UINT32": np.array([0, 7, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 7, 2**64 - 1], np.uint64),
    "INT8": np.array([-(2**7), 0, 2**7 - 1], np.int8),
    "INT16": np.array([-(2**15), 0, 2**15 - 1], np.int16),
    "INT32": np.array([-(2**31), 0, 2**31 - 1], np.int32),
    "INT64": np.array([-(2**63), 0, 2**63 - 1], np.int64),
    "FP16": np.array([-1.5, 0, 65504], np.float16),
    "FP32": np.array([-1.5, 0, 3.4e38], np.float32),
    "FP64": np.array([-1.5, 0, 1e300], np.float64),
    "BYTES": np.array([b"", "größer 発".encode(), b"x" * 300], np.object_),
}
"""The ends of each datatype's range."""

PERF_ANALYZER = shutil.which("perf_analyzer", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

A, B = np.array([1, 2, 3, 4], np.float32), np.array([10, 20, 30, 40], np.float32)


@pytest.fixture
def client(tiny_daemon: Daemon) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(tiny_daemon.url.removeprefix("http://"), concurrency=8) as stock:
        yield stock


def inputs(arrays: dict[str, npt.NDArray[Any]], *, binary: bool) -> list[triton.InferInput]:
    """Inputs of a stock request, named and typed by their keys unless a key is no datatype."""
    found = []
    for name, array in arrays.items():
        tensor = triton.InferInput(name, list(array.shape), name if name in SAMPLES else "FP32")
        tensor.set_data_from_numpy(array, binary_data=binary)
        found.append(tensor)
    return found


def wanted(*names: str, binary: bool) -> list[triton.InferRequestedOutput]:
    return [triton.InferRequestedOutput(name, binary_data=binary) for name in names]


def test_the_stock_client_finds_the_server_live_and_its_models_ready(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("linear")
    assert client.is_model_ready("linear", "1")
    assert not client.is_model_ready("linear", "2")
    assert not client.is_model_ready("no such model")


def test_the_server_says_that_it_takes_binary_tensors(client: triton.InferenceServerClient) -> None:
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]


def test_metadata_names_the_tensors_of_a_model(client: triton.InferenceServerClient) -> None:
    assert client.get_model_metadata("linear") == {
        "name": "linear",
        "versions": ["1"],
        "platform": "onnx_onnxv1",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 16]}],
    }


def test_a_bundle_is_a_model_of_pictures_and_its_graphs_are_models_of_tensors(
    client: triton.InferenceServerClient,
) -> None:
    bundle = client.get_model_metadata("blank", "1.0.0")
    assert bundle["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
    assert bundle["outputs"] == [{"name": "result", "datatype": "BYTES", "shape": [-1]}]
    assert client.get_model_metadata("blank.det")["inputs"][0]["shape"] == [1, 3, -1, -1]


def test_the_repository_index_lists_every_model_with_its_state(client: triton.InferenceServerClient) -> None:
    index = client.get_model_repository_index()
    assert {model["name"] for model in index} == {"linear", "types", "text", "pair", "blank", "blank.det"}
    assert {model["state"] for model in index} == {"READY"}


def test_the_stock_client_reads_configuration_by_name_and_version(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config("linear")
    assert (config["name"], config["platform"], config["max_batch_size"]) == ("linear", "onnx_onnxv1", 0)
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 16]}]
    assert config["output"] == [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1, 16]}]
    assert client.get_model_config("linear", "1") == config
    assert client.get_model_config("text")["input"][0]["data_type"] == "TYPE_STRING"
    assert client.get_model_config("types")["input"][0] == {"name": "BOOL", "data_type": "TYPE_BOOL", "dims": [-1]}
    for wrong in (("linear", "2"), ("none", "")):
        with pytest.raises(InferenceServerException, match=r"no version|no model"):
            client.get_model_config(*wrong)


def test_the_stock_client_reads_statistics_that_count_what_was_asked(client: triton.InferenceServerClient) -> None:
    def linear(version: str = "") -> dict[str, Any]:
        (model,) = client.get_inference_statistics("linear", version)["model_stats"]
        return dict(model)

    before = linear()
    for _ in range(3):
        client.infer("linear", inputs({"x": tiny.WEIGHTS}, binary=True))
    with pytest.raises(InferenceServerException):
        client.infer("linear", inputs({"x": A}, binary=True))
    after = linear("1")

    def grown(part: str, what: str = "count") -> int:
        return int(after["inference_stats"][part][what] - before["inference_stats"][part][what])

    assert after["inference_count"] - before["inference_count"] == 3
    assert after["execution_count"] - before["execution_count"] == 3
    assert [grown(part) for part in ("success", "fail", "queue", "compute_infer")] == [3, 1, 3, 3]
    assert grown("success", "ns") > grown("compute_infer", "ns") > 0
    everything = client.get_inference_statistics()["model_stats"]
    assert {model["name"] for model in everything} >= {"linear", "pair", "blank", "blank.det"}
    with pytest.raises(InferenceServerException, match="no version"):
        client.get_inference_statistics("linear", "2")


def test_the_stock_client_asks_whether_a_model_would_fit(
    tiny_daemon: Daemon, client: triton.InferenceServerClient
) -> None:
    with pytest.raises(InferenceServerException, match="appliance token create NAME --role operate"):
        client.load_model("linear")
    operator = tiny_daemon.authorized("operate")
    client.load_model("linear", headers=operator, query_params={"dry_run": "true"})
    with pytest.raises(InferenceServerException, match="there is no model 'none'"):
        client.load_model("none", headers=operator)
    with pytest.raises(InferenceServerException, match="loaded as it was installed"):
        client.load_model("linear", headers=operator, config="{}", files={"file:1/model.onnx": b"x"})


def test_the_stock_client_unloads_a_model_and_loads_it_again(
    tiny_daemon: Daemon, client: triton.InferenceServerClient
) -> None:
    def state() -> str:
        return next(str(model["state"]) for model in client.get_model_repository_index() if model["name"] == "pair")

    operator = tiny_daemon.authorized("operate")
    client.unload_model("pair", headers=operator)
    assert state() == "UNAVAILABLE"
    assert not client.is_model_ready("pair")
    with pytest.raises(InferenceServerException, match="pair"):
        client.infer("pair", inputs({"a": A, "b": B}, binary=True))
    client.load_model("pair", headers=operator)
    assert state() == "READY"
    assert np.array_equal(client.infer("pair", inputs({"a": A, "b": B}, binary=True)).as_numpy("sum"), A + B)


@pytest.mark.long
@pytest.mark.skipif(not PERF_ANALYZER, reason="perf_analyzer is not installed")
@pytest.mark.parametrize(
    "model", [("-m", "pair"), ("-m", "linear", "--shape", "x:1,16"), ("-m", "text", "--shape", "x:1")], ids=" ".join
)
def test_perf_analyzer_runs_unchanged(tiny_daemon: Daemon, model: tuple[str, ...]) -> None:
    # It shall run, not measure: a hundred requests, however they vary.
    short = ["--measurement-mode", "count_windows", "--measurement-request-count", "100", "-s", "999"]
    command = [str(PERF_ANALYZER), *model, "-u", tiny_daemon.url.removeprefix("http://"), *short]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Throughput:" in run.stdout, run.stdout + run.stderr
    assert "Avg request latency:" in run.stdout  # from the statistics


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("answered_in_binary", [True, False], ids=["binary", "json"])
def test_values_of_every_datatype_come_back_unchanged(
    client: triton.InferenceServerClient, binary: bool, answered_in_binary: bool
) -> None:
    half = {"FP16": SAMPLES["FP16"]}  # has no form in JSON
    rest = {name: array for name, array in SAMPLES.items() if name not in half}
    names = [*rest, *(half if answered_in_binary else ())]
    answer = client.infer(
        "types",
        [*inputs(rest, binary=binary), *inputs(half, binary=True)],
        outputs=wanted(*(f"{name}_out" for name in names), binary=answered_in_binary),
    )
    for name in names:
        have = answer.as_numpy(f"{name}_out")
        assert have is not None
        if name == "BYTES" and not answered_in_binary:
            have = np.array([text.encode() for text in have], np.object_)
        assert np.array_equal(have, SAMPLES[name]), name
        assert have.dtype == SAMPLES[name].dtype, name


def test_a_stock_request_without_outputs_gets_all_of_them(client: triton.InferenceServerClient) -> None:
    answer = client.infer("pair", inputs({"a": A, "b": B}, binary=True))
    assert np.array_equal(answer.as_numpy("sum"), A + B)
    assert np.array_equal(answer.as_numpy("difference"), A - B)


def test_only_the_outputs_asked_for_are_answered_in_the_form_asked_for(client: triton.InferenceServerClient) -> None:
    answer = client.infer("pair", inputs({"a": A, "b": B}, binary=False), outputs=wanted("difference", binary=True))
    assert np.array_equal(answer.as_numpy("difference"), A - B)
    assert answer.get_output("sum") is None
    both = [*wanted("difference", binary=True), *wanted("sum", binary=False)]
    answer = client.infer("pair", inputs({"a": A, "b": B}, binary=True), outputs=both)
    assert "data" in answer.get_output("sum")
    assert "data" not in answer.get_output("difference")
    assert np.array_equal(answer.as_numpy("sum"), A + B)
    assert np.array_equal(answer.as_numpy("difference"), A - B)


def test_the_request_id_comes_back(client: triton.InferenceServerClient) -> None:
    assert client.infer("pair", inputs({"a": A, "b": B}, binary=True), request_id="4711").get_response()["id"] == "4711"


def test_an_answer_says_what_computed_it(tiny_daemon: Daemon, client: triton.InferenceServerClient) -> None:
    parameters = client.infer("linear", inputs({"x": tiny.WEIGHTS}, binary=True)).get_response()["parameters"]
    assert parameters == {
        "runtime": "onnxruntime-cpu",
        "precision": "as given",
        "trust": "unverified",
        "degraded": "",
    }
    assert tiny_daemon.infer("linear", tiny.WEIGHTS).headers["appliance-runtime"] == "onnxruntime-cpu"
    assert tiny_daemon.infer("linear", tiny.WEIGHTS).headers["appliance-precision"] == "as given"
    predicted = tiny_daemon.http.post("/v1/models/blank/predict", content=tiny.picture(64, 32)).json()
    assert predicted["precision"] == "det fp32"


def test_a_file_that_cannot_be_loaded_is_described_by_the_reason(start_daemon: StartDaemon, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("no model")
    daemon = start_daemon("--onnx", f"broken={broken}", APPLIANCE_RUNTIME="null").wait_serving()

    def sentence() -> str:
        return assert_refused(daemon.http.get("/v2/models/broken"), 503)

    eventually(lambda: "model 'broken' cannot be loaded: " in sentence(), "the reason is told")
    assert "not a null graph" in sentence()
    assert "retry shortly" not in sentence()


def test_requests_are_counted_by_what_became_of_them(tiny_daemon: Daemon) -> None:
    def counted(series: str) -> float:
        lines = tiny_daemon.http.get("/metrics").text.splitlines()
        (line,) = (line for line in lines if line.startswith(f"{series} "))
        return float(line.split()[-1])

    success = 'nv_inference_request_success{model="linear",version="1"}'
    failure = 'nv_inference_request_failure{model="linear",reason="OTHER",version="1"}'
    before = counted(success), counted(failure)
    binary_floats(tiny_daemon.infer("linear", tiny.WEIGHTS))
    assert_refused(tiny_daemon.infer("linear", tiny.WEIGHTS[:, :3]), 400)
    assert (counted(success), counted(failure)) == (before[0] + 1, before[1] + 1)


def test_many_stock_requests_at_once_get_each_their_own_answer(client: triton.InferenceServerClient) -> None:
    xs = [np.random.default_rng(seed).random((seed % 5 + 1, 16), np.float32) for seed in range(32)]
    asked = [client.async_infer("linear", inputs({"x": x}, binary=seed % 2 == 0)) for seed, x in enumerate(xs)]
    for x, answer in zip(xs, asked, strict=True):
        assert np.allclose(answer.get_result().as_numpy("y"), x @ tiny.WEIGHTS, atol=1e-5)


def test_the_stock_client_shows_the_reason_of_a_refusal(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="there is no model 'none'"):
        client.infer("none", inputs({"x": A}, binary=True))
    with pytest.raises(InferenceServerException, match=r"input 'x' has shape \[4\]"):
        client.infer("linear", inputs({"x": A}, binary=True))
    with pytest.raises(InferenceServerException, match="there is no output 'product'"):
        client.infer("pair", inputs({"a": A, "b": B}, binary=True), outputs=wanted("product", binary=True))
    with pytest.raises(InferenceServerException, match="datatype FP32, but this model takes BYTES"):
        client.infer("text", inputs({"x": A}, binary=True))


def test_what_is_not_spoken_here_is_refused_and_not_half_answered(client: triton.InferenceServerClient) -> None:
    for ask in (client.get_log_settings, client.get_trace_settings, client.get_system_shared_memory_status):
        with pytest.raises(InferenceServerException):
            ask()
    with pytest.raises(InferenceServerException, match="compressed bodies are not accepted"):
        client.infer("linear", inputs({"x": tiny.WEIGHTS}, binary=True), request_compression_algorithm="gzip")


def test_a_raw_body_is_the_one_input_and_the_answer_is_binary(tiny_daemon: Daemon) -> None:
    x = np.arange(48, dtype=np.float32).reshape(3, 16)
    raw = {"inference-header-content-length": "0"}
    answer = tiny_daemon.http.post("/v2/models/linear/infer", content=x.tobytes(), headers=raw)
    assert np.allclose(binary_floats(answer), x @ tiny.WEIGHTS, rtol=1e-5)
    text = tiny_daemon.http.post("/v2/models/text/infer", content="発".encode(), headers=raw)
    length = int(text.headers["inference-header-content-length"])
    assert text.content[length:] == b"\x03\x00\x00\x00" + "発".encode()
    assert "no multiple of" in assert_refused(
        tiny_daemon.http.post("/v2/models/linear/infer", content=b"12345", headers=raw), 400
    )
    assert "one input" in assert_refused(tiny_daemon.http.post("/v2/models/pair/infer", content=b"", headers=raw), 400)


def test_curl_style_json_is_enough(tiny_daemon: Daemon) -> None:
    request = {
        "inputs": [
            {"name": "a", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]},
            {"name": "b", "datatype": "FP32", "shape": [4], "data": [1, 1, 1, 1.5]},
        ]
    }
    answer = tiny_daemon.http.post("/v2/models/pair/versions/1/infer", json=request)
    assert answer.headers["content-type"] == "application/json"
    assert {output["name"]: output["data"] for output in answer.json()["outputs"]} == {
        "sum": [2.0, 3.0, 4.0, 5.5],
        "difference": [0.0, 1.0, 2.0, 2.5],
    }


def test_values_that_json_cannot_carry_are_refused_in_json_and_kept_in_binary(tiny_daemon: Daemon) -> None:
    x = np.full((1, 16), np.nan, np.float32)
    assert np.isnan(binary_floats(tiny_daemon.infer("linear", x))).all()
    body, headers = binary_request({"x": x}, parameters={})
    answer = tiny_daemon.http.post("/v2/models/linear/infer", content=body, headers=headers)
    assert "ask for binary data" in assert_refused(answer, 500)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/linear/infer", 405),
        ("POST", "/v2/models/linear", 405),
        ("DELETE", "/v2", 405),
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models/none", 404),
        ("GET", "/v2/models/linear/versions/2", 404),
        ("GET", "/v2/models/linear/versions/2/ready", 404),
        ("POST", "/v2/models/linear/versions/2/infer", 404),
        ("POST", "/v1/models/none/predict", 404),
    ],
)
def test_wrong_paths_and_verbs_are_refused_with_a_reason(
    tiny_daemon: Daemon, method: str, path: str, status: int
) -> None:
    assert_refused(tiny_daemon.http.request(method, path), status)


def test_the_whole_bundle_answers_pictures_sent_as_tensors(
    tiny_daemon: Daemon, client: triton.InferenceServerClient
) -> None:
    pictures = np.array([tiny.picture(64, 32), tiny.picture(32, 64)], np.object_)
    image = triton.InferInput("image", [2], "BYTES")
    image.set_data_from_numpy(pictures)
    results = [json.loads(text) for text in client.infer("blank", [image]).as_numpy("result")]
    assert [result["lines"] for result in results] == [[], []]
    predicted = tiny_daemon.http.post("/v1/models/blank/predict", content=pictures[0]).json()
    assert predicted.keys() == results[0].keys()
    assert predicted["model"] == "blank"
    assert predicted["version"] == "1.0.0"
    assert predicted["runtime"] == "onnxruntime-cpu"


def test_a_picture_may_come_as_a_form(tiny_daemon: Daemon) -> None:
    form = {"image": ("shelf.png", tiny.picture(64, 32), "image/png")}
    answer = tiny_daemon.http.post("/v1/models/blank/predict", files=form)
    assert answer.status_code == 200, answer.text
    assert answer.json()["lines"] == []


def test_every_door_is_described_for_machines_and_people(tiny_daemon: Daemon) -> None:
    paths = tiny_daemon.http.get("/openapi.json").json()["paths"]
    assert {"/v2/models/{model}/infer", "/v1/models/{model}/predict", "/v1/status", "/metrics"} <= set(paths)
    assert "html" in tiny_daemon.http.get("/").headers["content-type"]
    metrics = tiny_daemon.http.get("/metrics").text
    assert 'appliance_model_ready{model="linear",version="1"} 1.0' in metrics


def test_answers_over_one_kept_connection_stay_in_step(tiny_daemon: Daemon) -> None:
    with httpx.Client(base_url=tiny_daemon.url, trust_env=False) as one:
        for value in range(20):
            answer = one.post(
                "/v2/models/text/infer",
                json={"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": [str(value)]}]},
            )
            assert answer.json()["outputs"][0]["data"] == [str(value)]
