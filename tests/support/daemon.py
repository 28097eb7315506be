"""The daemon as its users see it: a process that is started by command, spoken to over HTTP and ended by signal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from appliance.adapters.tokens import Role, TokenFile
from support.processes import clean_environment, end_marked, eventually, marked, new_mark, open_files

T = TypeVar("T")

APPLIANCE = Path(sys.executable).with_name("appliance")

Floats = npt.NDArray[np.float32]


def appliance(
    *arguments: str, env: Mapping[str, str] | None = None, within_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run an `appliance` command to its end."""
    return subprocess.run(
        [str(APPLIANCE), *arguments],
        env=clean_environment() | dict(env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )


class Daemon:
    """One `appliance run`, from start to the last trace of it.

    As a context it is ready inside, and after it has ended cleanly and left nothing behind.
    """

    def __init__(
        self, folder: Path, *arguments: str, env: Mapping[str, str] | None = None, command: Path = APPLIANCE
    ) -> None:
        """Start it with a state folder and a log inside `folder`, on a free port of the loopback address."""
        folder.mkdir(parents=True, exist_ok=True)
        nothing = folder / "config.toml"
        nothing.touch()  # keeps the settings of this machine's own daemon out
        self.state_dir = folder / "state"
        self.mark = new_mark()
        self._tokens: dict[str, str] = {}
        self._log_path = folder / f"log-{self.mark}.jsonl"
        self._pool = ThreadPoolExecutor(max_workers=100)
        own = ["--config", str(nothing), "--state-dir", str(self.state_dir), "--http", "127.0.0.1:0"]
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [str(command), "run", *own, *arguments],
                env=clean_environment(self.mark) | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.pid = self.process.pid
        self.http = httpx.Client(trust_env=False, timeout=60.0, limits=httpx.Limits(max_connections=None))

    def __enter__(self) -> Self:
        """Wait until it is ready."""
        try:
            return self.wait_serving().wait_ready()
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Stop it; after a failure only see it gone."""
        try:
            if error is None:
                self.stop()
        finally:
            self.close()

    # What it says

    @property
    def log_text(self) -> str:
        """Everything it wrote so far."""
        return self._log_path.read_text()

    def log(self, event: str = "") -> list[dict[str, Any]]:
        """Log lines, all or those of one event; fails on a line that is no JSON."""
        lines = [json.loads(line) for line in self.log_text.splitlines()]
        return [line for line in lines if event in ("", line["event"])]

    def wait_serving(self, within_s: float = 10.0) -> Self:
        """Wait for the log line that names its address."""

        def serving() -> bool:
            assert self.process.poll() is None, f"it ended with {self.process.poll()}: {self.log_text}"
            return '"serving"' in self.log_text

        eventually(serving, "the daemon says where it serves", within_s)
        self.url = str(self.log("serving")[0]["http"])
        self.http.base_url = httpx.URL(self.url)
        return self

    def wait_ready(self, within_s: float = 60.0) -> Self:
        """Wait until every model has proven itself."""
        eventually(lambda: self.http.get("/v2/health/ready").status_code == 200, "the daemon is ready", within_s)
        return self

    def status(self) -> dict[str, Any]:
        """The status document."""
        answer: dict[str, Any] = self.http.get("/v1/status").raise_for_status().json()
        return answer

    def worker(self, model: str = "") -> dict[str, Any]:
        """Status of the worker of `model`, or of the only one."""
        (found,) = (worker for worker in self.status()["workers"] if model in ("", worker["bundle"]))
        return dict(found)

    def model(self, name: str) -> dict[str, Any]:
        """Status of one model."""
        (found,) = (model for model in self.status()["models"] if model["name"] == name)
        return dict(found)

    def worker_pid(self, model: str = "") -> int:
        """Process id of a worker that is there."""
        return int(eventually(lambda: self.worker(model)["pid"], "there is a worker"))

    def descriptors(self) -> list[str]:
        """What its descriptors point to, without their numbers, the connections of clients and what it just saves."""
        passing = ("socket:", str(self.state_dir / "process_overhead.json"), str(self.state_dir / "engines"))
        return [name.partition("[")[0] for name in open_files(self.pid) if not name.startswith(passing)]

    def sockets(self) -> int:
        """How many sockets it holds."""
        return sum(name.startswith("socket:") for name in open_files(self.pid))

    # What is asked of it

    def authorized(self, role: str) -> dict[str, str]:
        """Headers that show a token of `role`."""
        return {"authorization": f"Bearer {self.token(role)}"}

    def token(self, role: str) -> str:
        """A token of `role`, made for this daemon at the first call."""
        if role not in self._tokens:
            self._tokens[role] = TokenFile(self.state_dir).create(new_mark(), Role.of(role))
        return self._tokens[role]

    def run_later(self, call: Callable[..., T], *arguments: object) -> Future[T]:
        """Call something in another thread that lives no longer than this daemon."""
        return self._pool.submit(call, *arguments)

    def later(self, method: str, path: str, **request: Any) -> Future[httpx.Response]:  # noqa: ANN401 - httpx's own
        """Send a request from another thread."""
        return self._pool.submit(lambda: self.http.request(method, path, **request))

    def infer(self, model: str, x: Floats) -> httpx.Response:
        """Send one FP32 tensor `x` in binary; the answer comes in binary too."""
        content, headers = binary_request({"x": x})
        return self.http.post(f"/v2/models/{model}/infer", content=content, headers=headers)

    def infer_later(self, model: str, x: Floats) -> Future[httpx.Response]:
        """`infer` from another thread."""
        return self.run_later(self.infer, model, x)

    def running_and_waiting(self, model: str) -> tuple[int, int]:
        """Requests that the worker holds and that wait for it."""
        status = self.model(model)
        return status["running"], status["waiting"]

    # How it ends

    def stop(self, within_s: float = 30.0) -> None:
        """End it as systemd does; it must say so with status 0, in JSON lines, and leave nothing behind."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(within_s) == 0, self.log_text
        eventually(lambda: not marked(self.mark), "no process of the daemon is left")
        assert self.log()[-1]["event"] == "stopped"

    def kill(self) -> None:
        """End it as a power cut does; its workers must notice by themselves."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        end_marked(self.mark)
        self.http.close()


StartDaemon = Callable[..., Daemon]
"""What the fixtures that start daemons give to a test."""


def binary_request(tensors: Mapping[str, npt.NDArray[Any]], **more: Any) -> tuple[bytes, dict[str, str]]:  # noqa: ANN401 - JSON
    """Body and headers of an infer request in the binary extension that wants its answer likewise.

    Tensors are FP32; `more` are further keys of the document.
    """
    document = {
        "parameters": {"binary_data_output": True},
        "inputs": [
            {
                "name": name,
                "datatype": "FP32",
                "shape": list(array.shape),
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, array in tensors.items()
        ],
        **more,
    }
    head = json.dumps(document).encode()
    body = head + b"".join(array.tobytes() for array in tensors.values())
    return body, {"inference-header-content-length": str(len(head))}


def binary_floats(response: httpx.Response) -> Floats:
    """The one FP32 tensor of a binary answer."""
    assert response.status_code == 200, response.text
    length = int(response.headers["inference-header-content-length"])
    (output,) = json.loads(response.content[:length])["outputs"]
    floats: Floats = np.frombuffer(response.content[length:], np.float32).reshape(output["shape"])
    return floats


def assert_refused(response: httpx.Response, *statuses: int) -> str:
    """The answer has one of `statuses` and says why in one sentence, which is returned."""
    assert response.status_code in statuses, f"{response.status_code}: {response.text[:500]}"
    document = response.json()
    assert list(document) == ["error"]
    sentence = document["error"]
    assert isinstance(sentence, str)
    assert sentence.strip()
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    return sentence
