"""The kernels through every way to the driver, on a stream that somebody else made, and as plugins, on a real GPU.

    PYTHONPATH=tests:. python tests/device/backends.py KERNELS --backend pycuda --json FILE

KERNELS is a folder of kernels.compile. Neck and head run on a stream of PyTorch (its handle is all that is passed),
once as they are and once captured in a CUDA graph, and are held against float64; so do both plugins of
`kernels.plugin`, called as TensorRT calls them, with the classes of the test's double in the place of TensorRT's.
Rows are added to FILE.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from doubles import plugins as double
from doubles.cuda import StandInCuda
from doubles.tensorrt import StandInTensorRt

from kernels import bench as checks
from kernels import plugin
from kernels.backends import BACKENDS, open_driver
from kernels.launch import HeadRunner, NeckRunner, pack_head_for, pack_neck_for, read_kernels
from kernels.reference import WIDTH, Neck, linear_ctc_head
from kernels.timing import Bench

SPEC = Neck("v4", 2)
BATCH, STEPS, CLASSES = 3, 40, 6625
CALLS = 200  # fewer than the driver queues before it waits
Row = dict[str, Any]


class ForeignBench(Bench):
    """A bench on a stream that PyTorch made."""

    def __init__(self, driver: Any) -> None:  # noqa: ANN401 - any of three
        import torch  # noqa: PLC0415 - whose stream it is

        self.driver = driver
        self._stream = torch.cuda.Stream()
        self.stream = int(self._stream.cuda_stream)


def head_error(bench: Bench, out: int, x_NC: Any, w_CK: Any, b_K: Any) -> float:  # noqa: ANN401 - arrays
    """Largest relative error of a probability; infinite when a class is wrong that is no near tie."""
    count = len(x_NC)
    index = bench.download(out, (count,), np.int64)
    probability = bench.download(out + _after(count), (count,), np.float32)
    truth, expected = linear_ctc_head(x_NC, w_CK, b_K)
    if np.mean(index == truth) < 0.98:  # FP16 cannot tell near ties apart
        return float("inf")
    return float(np.max(np.abs(probability / expected - 1)))


def _after(count: int) -> int:
    return -(-count // 2) * 16


def replay(bench: Bench, call: Callable[[], object]) -> None:
    """Capture `call` on the foreign stream, and run it from the graph."""
    driver, stream = bench.driver, ctypes.c_void_p(bench.stream)
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    driver.call("cuStreamBeginCapture_v2", stream, 2)
    call()
    driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
    driver.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
    driver.call("cuGraphLaunch", executable, stream)
    bench.wait()


def host_us(bench: Bench, call: Callable[[], object]) -> float:
    """What it costs the processor to queue one call."""
    bench.wait()
    start_s = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent_s = time.perf_counter() - start_s
    bench.wait()
    return spent_s / CALLS * 1e6


def measure(backend: Any, folder: Path) -> list[Row]:  # noqa: ANN401 - one of BACKENDS
    """Rows of one backend; an error above the limits of the benchmark ends the program."""
    driver = open_driver(backend)
    kernels = read_kernels(folder)
    rng = np.random.default_rng()
    weights = checks.random_weights(SPEC, rng)
    w_CK = (3 * rng.standard_normal((WIDTH, CLASSES)) / np.sqrt(WIDTH)).astype(np.float16)
    b_K = rng.standard_normal(CLASSES).astype(np.float16)
    x_NC = rng.standard_normal((BATCH * STEPS, WIDTH)).astype(np.float16)
    rows: list[Row] = []
    for whose, bench in (("its own", Bench(driver)), ("of PyTorch", ForeignBench(driver))):
        case = checks.NeckCase(bench, SPEC, weights, BATCH, STEPS)
        neck = NeckRunner(driver, kernels, SPEC, pack_neck_for(driver.arch, SPEC, weights))
        head = HeadRunner(driver, kernels, pack_head_for(driver.arch, w_CK, b_K), max_rows=len(x_NC))
        x, out = driver.upload(x_NC.tobytes()), driver.allocate(2 * _after(len(x_NC)))

        queue_neck = case.run(neck)

        def run_neck(queue: Callable[[int], int] = queue_neck, stream: int = bench.stream) -> None:
            queue(stream)

        def run_head(head: HeadRunner = head, x: int = x, out: int = out, stream: int = bench.stream) -> None:
            head(x, out, out + _after(len(x_NC)), len(x_NC), stream)

        for op, call, error in (
            ("neck", run_neck, case.error),
            ("head", run_head, lambda b=bench, o=out: head_error(b, o, x_NC, w_CK, b_K)),
        ):
            call()
            plain = error()
            replay(bench, call)
            rows.append({"op": op, "stream": whose, "error": max(plain, error()), "host_us": host_us(bench, call)})
        neck.close()
        head.close()
    return rows + plugins(driver, folder, weights, (w_CK, b_K, x_NC))


def plugins(driver: Any, folder: Path, weights: Any, ends: tuple[Any, Any, Any]) -> list[Row]:  # noqa: ANN401 - as above
    """The two plugins on the foreign stream, as TensorRT would call them."""
    trt, kernels, (w_CK, b_K, x_NC) = StandInTensorRt(StandInCuda()), read_kernels(folder), ends
    bench = ForeignBench(driver)
    case = checks.NeckCase(bench, SPEC, weights, BATCH, STEPS)
    x, out = driver.upload(x_NC.tobytes()), driver.allocate(2 * _after(len(x_NC)))
    fields = {
        plugin._ConvAttention: {  # noqa: SLF001 - both operators, as create_plugin takes them
            "form": b"v4",
            "kv_heads": (2).to_bytes(4, "little"),
            "payload": plugin.neck_payload(driver.arch, SPEC, weights, kernels).encode(),
        },
        plugin._CtcHead: {"payload": plugin.head_payload(driver.arch, w_CK, b_K, kernels).encode()},  # noqa: SLF001
    }
    rows = []
    for (operator, held), channels, given, results, error in zip(
        fields.items(),
        (SPEC.channels, WIDTH),
        (case.x, x),
        ([case.out], [out, out + _after(len(x_NC))]),
        (case.error, lambda: head_error(bench, out, x_NC, w_CK, b_K)),
        strict=True,
    ):
        shared = plugin._Shared(operator, held)  # noqa: SLF001 - as above
        made = plugin._plugin(trt)(shared).clone().attach_to_context(None)  # noqa: SLF001
        described = [double.PluginTensorDesc((BATCH, STEPS, channels), trt.DataType["HALF"])]

        def enqueue(made: Any = made, given: int = given, results: Any = results, described: Any = described) -> None:  # noqa: ANN401
            made.enqueue(described, [], [given], results, 0, bench.stream)

        enqueue()
        plain = error()
        replay(bench, enqueue)
        rows.append(
            {
                "op": f"plugin {operator.NAME}",
                "stream": "of PyTorch",
                "error": max(plain, error()),
                "host_us": host_us(bench, enqueue),
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 when a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", type=Path)
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    package = {"pycuda": "pycuda", "cuda-bindings": "cuda-bindings"}.get(given.backend)
    rows = measure(given.backend, given.kernels)
    common = checks.environment(open_driver("ctypes"), read_kernels(given.kernels)) | {"backend": given.backend}
    if package:
        common["versions"] |= {package: metadata.version(package)}
    rows = [common | row for row in rows]
    for row in rows:
        told = f"error {row['error']:.2g}  {row['host_us']:.1f} us to queue"
        print(f"{row['backend']:14}{row['op']:22}{row['stream']:12} {told}")
    if given.json:
        earlier = json.loads(given.json.read_bytes())["rows"] if given.json.exists() else []
        given.json.write_text(json.dumps({"rows": earlier + rows}, indent=1) + "\n")
    return 0 if all(row["error"] < (1e-3 if "eck" in row["op"] or "Conv" in row["op"] else 2e-2) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
