"""An export is read and served by a real tritonserver, where the wheel nvidia-pytriton is installed.

That wheel carries the Python backend only, so the graphs are run by a few lines of Python in place of the backend
`onnxruntime`; layout, config, batches, warm-up and versions are Triton's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from support import tiny
from support.processes import clean_environment, eventually, free_port

from models.folder import BundleFolder
from models.spec import ModelSpec, TensorSpec
from provisioning import triton

pytestmark = [pytest.mark.journey, pytest.mark.long]

PEER = Path(os.environ.get("PEERS_DIR", "peers"), "triton").absolute()
SERVER = next(PEER.glob("lib/python*/site-packages/pytriton/tritonserver/bin/tritonserver"), None)
BACKEND = """
import os
import onnxruntime
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        path = os.path.join(args["model_repository"], args["model_version"], "model.onnx")
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        replies = []
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            names = [output.name for output in self.session.get_outputs()]
            values = self.session.run(names, inputs)
            replies.append(pb.InferenceResponse([pb.Tensor(*pair) for pair in zip(names, values)]))
        return replies
"""


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    """The Python backend with the stub of its own interpreter."""
    assert SERVER
    packed = SERVER.parent.parent
    version = next(PEER.glob("lib/python*")).name.removeprefix("python")
    shutil.copytree(packed / "backends", tmp_path / "backends")
    shutil.copy(packed / f"python_backend_stubs/{version}/triton_python_backend_stub", tmp_path / "backends/python")
    return tmp_path / "backends"


def lines_bundle(path: Path, scale: float) -> BundleFolder:
    """`scale_bundle` whose requests may share a run."""
    folder = BundleFolder(tiny.scale_bundle(path, scale))
    x, y = (TensorSpec(name, "FP32", (-1, -1), "NC") for name in "xy")
    graphs = {name: replace(graph, spec=ModelSpec((x,), (y,))) for name, graph in folder.manifest.graphs.items()}
    (path / "manifest.json").write_bytes(replace(folder.manifest, graphs=graphs).to_bytes())
    return BundleFolder(path)


def run_by_python(repository: Path) -> None:
    """Let the Python backend run what was exported for the backend `onnxruntime`."""
    for config in repository.glob("*/config.pbtxt"):
        text = config.read_text()
        assert 'backend: "onnxruntime"' in text
        config.write_text(text.replace('backend: "onnxruntime"', 'backend: "python"'))
        for version in config.parent.glob("[0-9]*"):
            (version / "model.py").write_text(BACKEND)


@pytest.mark.skipif(SERVER is None, reason="condition triton: no tritonserver in PEERS_DIR")
def test_a_real_tritonserver_serves_an_export_with_its_batches_warm_up_and_newest_version(
    tmp_path: Path, backends: Path
) -> None:
    repository = tmp_path / "models"
    for scale in (2, 3):
        triton.export(lines_bundle(tmp_path / str(scale), scale), repository, gpu=False)
    run_by_python(repository)
    site, port = SERVER.parents[3] if SERVER else tmp_path, free_port()
    libraries = subprocess.run(
        [PEER / "bin/python", "-c", "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    env = clean_environment() | {
        "LD_LIBRARY_PATH": f"{site / 'nvidia_pytriton.libs'}:{libraries}",
        "PATH": f"{PEER / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(site),
    }
    command = [str(SERVER), "--model-repository", str(repository), "--backend-directory", str(backends)]
    doors = [
        "--http-address",
        "127.0.0.1",
        "--http-port",
        str(port),
        "--allow-grpc",
        "false",
        "--allow-metrics",
        "false",
    ]
    log = tmp_path / "log"
    with log.open("wb") as said:
        server = subprocess.Popen([*command, *doors, "--log-verbose", "1"], env=env, stdout=said, stderr=said)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:

            def ready() -> bool:
                assert server.poll() is None, log.read_text()
                try:
                    return client.get("/v2/models/scale.g/ready").status_code == 200
                except httpx.TransportError:
                    return False

            eventually(ready, "tritonserver serves the export", 60)
            assert client.get("/v2/models/scale.g").json()["versions"] == ["2"]
            config = client.get("/v2/models/scale.g/config").json()
            assert config["max_batch_size"] == 8
            assert config["dynamic_batching"]["default_queue_policy"]["max_queue_size"] == 256
            assert config["parameters"]["bundle_version"] == {"string_value": "3.0.0"}
            (warm_up,) = config["model_warmup"]
            assert warm_up["batch_size"] == 2
            tensor = {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [1, 2, 3, 4, 5, 6]}
            answer = client.post("/v2/models/scale.g/infer", json={"inputs": [tensor]}).raise_for_status().json()
            assert np.allclose(answer["outputs"][0]["data"], np.arange(1, 7) * 3)
        assert "warmup" in log.read_text().lower()
    finally:
        server.terminate()
        server.wait(30)
