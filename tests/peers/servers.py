"""Servers that `make bench` starts: ours, and every other one that it finds.

Programs of others are looked for in the environments below PEERS_DIR, beside this interpreter and on PATH. Each server
gets one model and as many workers as ours computes runs at a time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from appliance import __version__
from appliance.bench.question import Question, binary_answer
from models.answers import said
from models.spec import Array

HERE = Path(__file__).resolve().parent
WORKERS = "2"


@dataclass(frozen=True)
class Work:
    """What all servers are asked to do: tensors of an ONNX file with one input, or a JPEG of a bundle that reads."""

    name: str
    model: Path
    """The file, or the folder of the bundle."""
    inputs: Mapping[str, Array] = field(default_factory=dict)
    picture: bytes = b""


@dataclass(frozen=True)
class Server:
    """How one server is started and asked for one piece of work."""

    name: str
    command: Callable[[int], list[str]]
    """Of the port to listen on."""
    question: Callable[[bytes], Question]
    """Of the picture, where the work has one."""
    read: Callable[[httpx.Response], Any]
    """An answer as an FP32 array, or as a list of lines of text."""
    version: str
    env: Mapping[str, str] = field(default_factory=dict)


def ours(work: Work, folder: Path) -> Server:
    """The daemon beside this interpreter."""
    (folder / "config.toml").touch()
    own = ["--config", str(folder / "config.toml"), "--state-dir", str(folder / "state")]
    served = ["--onnx", f"{work.name}={work.model}"] if work.inputs else ["--bundle", str(work.model)]
    appliance = str(Path(sys.executable).with_name("appliance"))
    return Server(
        "ours",
        lambda port: [appliance, "run", *served, "--precision", "fp32", "--http", f"127.0.0.1:{port}", *own],
        lambda jpeg: (
            Question.of(work.name, work.inputs)
            if work.inputs
            else Question("/v1/models/ppocr-v6/predict", jpeg, {"content-type": "image/jpeg"}, {})
        ),
        _tensor if work.inputs else lambda answer: [text for text, _ in said(answer.json())],
        f"appliance {__version__}",
    )


def fastapi(work: Work, _folder: Path) -> Server | None:
    """What one would write by hand: raw bytes in and out, a few lines around onnxruntime. Always there."""
    if not work.inputs:
        return None
    (x,) = work.inputs.values()
    uvicorn = [sys.executable, "-m", "uvicorn", "fastapi_app:app", "--app-dir", str(HERE), "--workers", WORKERS]
    return Server(
        "fastapi",
        lambda port: [*uvicorn, "--port", str(port), "--no-access-log", "--log-level", "warning"],
        lambda _: Question("/", x.tobytes(), {"shape": ",".join(map(str, x.shape))}, {}),
        lambda answer: np.frombuffer(answer.content, np.float32),
        f"fastapi {version('fastapi')}",
        {"BENCH_MODEL": str(work.model)},
    )


def triton(work: Work, folder: Path) -> Server | None:
    """NVIDIA's server as the wheel nvidia-pytriton carries it: with its Python backend alone."""
    home = next((one for env in _environments() for one in env.glob("lib/python3*/site-packages/pytriton")), None)
    if not home or not work.inputs:
        return None
    packages, python = home.parent, home.parents[3] / "bin/python"
    asked = "import sysconfig as s; print(s.get_config_var('LIBDIR'), s.get_python_version())"
    libraries, release = subprocess.check_output([python, "-c", asked], text=True).split()
    backend = shutil.copytree(home / "tritonserver/backends/python", folder / "backends/python")
    stub = home / "tritonserver/python_backend_stubs" / release / "triton_python_backend_stub"
    Path(shutil.copy(stub, backend)).chmod(0o755)
    model = folder / "models" / work.name
    (model / "1").mkdir(parents=True)
    shutil.copy(HERE / "triton_model.py", model / "1/model.py")
    instances = f"instance_group [{{ kind: KIND_CPU, count: {WORKERS} }}]"
    (model / "config.pbtxt").write_text(f'backend: "python"\n{instances}\n')
    command = [str(home / "tritonserver/bin/tritonserver"), "--allow-grpc=false", "--allow-metrics=false"]
    command += [f"--model-repository={folder / 'models'}", f"--backend-directory={folder / 'backends'}"]
    return Server(
        "triton",
        lambda port: [*command, "--http-address=127.0.0.1", f"--http-port={port}"],
        lambda _: Question.of(work.name, work.inputs),
        _tensor,
        _version(home.parents[3], "nvidia-pytriton"),
        {
            "BENCH_MODEL": str(work.model),
            "LD_LIBRARY_PATH": f"{packages / 'nvidia_pytriton.libs'}:{libraries}",
            "PYTHONPATH": str(packages),
            "PATH": f"{python.parent}:{os.environ['PATH']}",
        },
    )


def rapidocr_api(work: Work, _folder: Path) -> Server | None:
    """The HTTP server over rapidocr, whose models the bundle `ppocr-v6` is made of."""
    program = _find("rapidocr_api")
    if not program or not work.picture:
        return None

    def question(jpeg: bytes) -> Question:
        form = httpx.Request("POST", "http://peer/ocr", files={"image_file": ("page.jpg", jpeg, "image/jpeg")})
        return Question("/ocr", form.read(), {"content-type": form.headers["content-type"]}, {})

    return Server(
        "rapidocr_api",
        lambda port: [program, "-ip", "127.0.0.1", "-p", str(port)],
        question,
        lambda answer: [line["rec_txt"] for line in answer.json().values()],
        _version(Path(program).parents[1], "rapidocr-api"),
    )


ALL = (ours, fastapi, triton, rapidocr_api)


def _environments() -> Iterable[Path]:
    """Those below PEERS_DIR, and this one."""
    below = os.environ.get("PEERS_DIR")
    return [*(sorted(Path(below).iterdir()) if below else ()), Path(sys.prefix)]


def _version(environment: Path, package: str) -> str:
    paths = [str(path) for path in environment.glob("lib/python3*/site-packages")]
    return next((f"{package} {one.version}" for one in distributions(name=package, path=paths)), f"some {package}")


def _find(program: str) -> str | None:
    folders = [str(environment / "bin") for environment in _environments()]
    return shutil.which(program, path=os.pathsep.join([*folders, os.environ["PATH"]]))


def _tensor(answer: httpx.Response) -> Array:
    (tensor,) = binary_answer(answer).values()
    return tensor.ravel()
