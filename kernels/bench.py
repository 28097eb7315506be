"""Checks the shipped kernels on this GPU, then times them: `python -m kernels.bench --json FILE`.

No time is printed before the result of that very call was held against float64. With PyTorch the same operators are
timed beside ours: eager, under a CUDA graph, and torch.compile max-autotune under a CUDA graph; without it ours alone,
through the driver API, so the command is the same on a device. Everything starts from the channel-last layout; what the
transpose into it costs is a row of its own. Random inputs and weights, new ones in every run.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime as dt
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernels import predict
from kernels.backends import BACKENDS, open_driver
from kernels.launch import Driver, HeadRunner, Kernels, NeckRunner, pack_head_for, pack_neck_for, read_kernels
from kernels.plan import ARCHS, source_digest
from kernels.reference import WIDTH, Neck, linear_ctc_head
from kernels.reference import neck as reference_neck
from kernels.timing import Bench
from models.errors import ApplianceError, ModelError
from models.spec import Array

CLASSES = 6625
# T and batch off the tiles, both sides of every border of the plan.
CHECKS = (
    (1, 1),
    (3, 7),
    (2, 14),
    (1, 15),
    (5, 40),
    (22, 40),
    (23, 40),
    (90, 40),
    (1, 64),
    (1, 65),
    (4, 80),
    (3, 161),
    (2, 512),
    (1024, 2),
)
EXTREMES = ((3, 40), (2, 80))
FEW_CHECKS = ((1, 15), (2, 40), (23, 40), (1, 65))  # under compute-sanitizer a launch takes seconds
LIMIT = 1e-3  # of the neck's error on ordinary input; kernels.baseline holds it to twice PyTorch's
HEAD_CHECKS = (1, 63, 65, 320, 1280, 2117, 16900)
Row = dict[str, Any]
TOLD = ("device", "cuda_driver", "max_clock_mhz", "versions", "date", "source_digest")  # with every row


def random_weights(spec: Neck, rng: np.random.Generator) -> dict[str, Array]:
    """Weights that keep activations near 1, nothing of them zero; FP16 values, so that all start from the same."""
    weights = {}
    for name, shape in spec.shapes().items():
        values = rng.standard_normal(shape)
        if name.endswith(".w"):
            values /= np.sqrt(np.prod(shape[:-1]))
        elif name.endswith("gamma"):
            values = 1 + 0.2 * values
        else:
            values *= 0.2
        weights[name] = values.astype(np.float16)
    return weights


def relative_error(value: Array, truth: Array) -> float:
    """Norm of the difference over the norm of the truth; what was never written is NaN and fails every limit."""
    return float(np.linalg.norm(value.astype(np.float64) - truth) / np.linalg.norm(truth))


class NeckCase:
    """One shape with inputs on the device, a poisoned output, and the truth."""

    def __init__(
        self, bench: Bench, spec: Neck, weights: dict[str, Array], batch: int, steps: int, *, extreme: bool = False
    ) -> None:
        rng = np.random.default_rng()
        self.bench, self.batch, self.steps = bench, batch, steps
        self.x_BTC = rng.standard_normal((batch, steps, spec.channels)).astype(np.float16)
        if extreme:
            self.x_BTC[0] = 0
            self.x_BTC[-1] *= 30
        self.truth = reference_neck(spec, weights, self.x_BTC)
        self.x = bench.driver.upload(self.x_BTC.tobytes())
        self.out = bench.driver.allocate(batch * steps * WIDTH * 2)  # every byte 0xFF: NaN

    def run(self, runner: NeckRunner) -> Callable[[int], int]:
        """The call to time."""
        return lambda stream: runner(self.x, self.out, self.batch, self.steps, stream)

    def error(self) -> float:
        """Of what lies in the output now."""
        return relative_error(self.bench.download(self.out, self.truth.shape, np.float16), self.truth)

    def close(self) -> None:
        """Free the device's memory."""
        self.bench.driver.free(self.x)
        self.bench.driver.free(self.out)


def check(bench: Bench, kernels: Kernels, spec: Neck, *, classes: int = CLASSES, few: bool = False) -> list[Row]:
    """Every form of the neck and the head on shapes off every border; raises at the first wrong result."""
    rng = np.random.default_rng()
    weights = random_weights(spec, rng)
    rows = check_necks(bench, kernels, spec, weights, FEW_CHECKS if few else CHECKS)
    if not few:
        weights["block0.q.w"] *= np.float16(40)  # logits so far apart that the softmax is one key
        rows += check_necks(bench, kernels, spec, weights, EXTREMES, extreme=True)
    w_CK = (3 * rng.standard_normal((WIDTH, classes)) / np.sqrt(WIDTH)).astype(np.float16)
    b_K = rng.standard_normal(classes).astype(np.float16)
    packed_head = pack_head_for(bench.driver.arch, w_CK, b_K)
    for one_launch in (True, False):
        head = HeadRunner(bench.driver, kernels, packed_head, max_rows=max(HEAD_CHECKS), one_launch=one_launch)
        told: Row = {"form": "one launch" if one_launch else "two launches"}
        rows += [
            check_head(bench, head, w_CK, b_K, count) | told for count in (HEAD_CHECKS[2:4] if few else HEAD_CHECKS)
        ]
        head.close()
    return rows


def check_necks(
    bench: Bench,
    kernels: Kernels,
    spec: Neck,
    weights: dict[str, Array],
    shapes: Sequence[tuple[int, int]],
    *,
    extreme: bool = False,
) -> list[Row]:
    """Every form of the neck on every shape; extreme input is held to twice what numpy's FP16 is off by."""
    packed = pack_neck_for(bench.driver.arch, spec, weights)
    rows = []
    for splits, one_launch in ((2, True), (1, True), (1, False)):
        within = {split: one for split, one in packed.items() if split <= splits}
        runner = NeckRunner(bench.driver, kernels, spec, within, one_launch=one_launch)
        form = f"{'one launch' if one_launch else 'phases'}, split up to {splits}"
        for batch, steps in shapes:
            case = NeckCase(bench, spec, weights, batch, steps, extreme=extreme)
            limit = LIMIT
            if extreme:
                limit = 2 * relative_error(reference_neck(spec, weights, case.x_BTC, np.float16), case.truth)
            launches = case.run(runner)(bench.stream)
            error = case.error()
            told: Row = {"op": "neck", "launched": form, "batch": batch, "steps": steps, "launches": launches}
            rows.append(told | {"error": error} | ({"extreme": True, "limit": limit} if extreme else {}))
            case.close()
            if not error < limit:
                msg = f"neck ({form}) at batch {batch}, {steps} tokens: error {error:g} against float64"
                raise ModelError(msg)
        runner.close()
    return rows


def check_head(bench: Bench, head: HeadRunner, w_CK: Array, b_K: Array, count: int) -> Row:
    """The head on `count` tokens, a zero row and large logits among them."""
    rng = np.random.default_rng()
    x_NC = rng.standard_normal((count, WIDTH)).astype(np.float16)
    x_NC[0] = 0
    x_NC[-1] *= 30 if count > 1 else 1
    truth, probability = linear_ctc_head(x_NC, w_CK, b_K)
    x, out = bench.driver.upload(x_NC.tobytes()), bench.driver.allocate(count * 12 + 16)
    after = out + -(-count // 2) * 16
    launches = head(x, out, after, count, bench.stream)
    best, got = bench.download(out, (count,), np.int64), bench.download(after, (count,), np.float32)
    bench.driver.free(x)
    bench.driver.free(out)
    scores = x_NC.astype(np.float64) @ w_CK.astype(np.float64) + b_K.astype(np.float64)
    rows = np.arange(count)
    # A different class is right only where its score is as good as equal: FP16 cannot tell them apart.
    slack = float(
        np.max((scores[rows, truth] - scores[rows, np.clip(best, 0, len(b_K) - 1)]) / (1 + np.abs(scores).max(1)))
    )
    error = float(np.max(np.abs(got / probability - 1)))
    if not (slack < 2e-3 and error < 2e-2):  # noqa: PLR2004 (FP16 weights times log2 e, logits to about 100)
        msg = f"head at {count} tokens: a class {slack:g} worse than the best, probability off by {error:g}"
        raise ModelError(msg)
    agreement = float(np.mean(best == truth))
    return {"op": "head", "rows": count, "launches": launches, "error": error, "same_class": agreement}


def neck_cost(spec: Neck, weights: dict[str, Array], batch: int, steps: int) -> tuple[float, float]:
    """Compulsory bytes (input, output, weights once) and FLOPs of a call."""
    parameters = sum(value.size for value in weights.values())
    multiplied = sum(value.size for name, value in weights.items() if name.endswith(".w"))
    attention = 4 * WIDTH * steps * 2  # two blocks: scores and their product with the values, 2 FLOP each
    tokens = batch * steps
    return 2.0 * (tokens * (spec.channels + WIDTH) + parameters), tokens * (2.0 * multiplied + attention)


def measure(bench: Bench, kernels: Kernels, spec: Neck, given: argparse.Namespace) -> Iterator[tuple[list[Row], Row]]:
    """Times of both operators so far, after every batch and T asked for, and the limits measured in the same run."""
    rng = np.random.default_rng()
    weights = random_weights(spec, rng)
    packed = pack_neck_for(bench.driver.arch, spec, weights)
    runner = NeckRunner(bench.driver, kernels, spec, packed)
    phases = NeckRunner(bench.driver, kernels, spec, {1: packed[1]}, one_launch=False)
    w_CK = (3 * rng.standard_normal((WIDTH, given.classes)) / np.sqrt(WIDTH)).astype(np.float16)
    b_K = rng.standard_normal(given.classes).astype(np.float16)
    packed_head = pack_head_for(bench.driver.arch, w_CK, b_K)
    rows: list[Row] = []
    machine: Row = {}
    torch_rows = None
    if given.torch:
        from kernels.baseline import TorchRows  # noqa: PLC0415 (PyTorch is not everywhere)

        torch_rows = TorchRows(spec, weights, w_CK, b_K, given.compile)
        machine = torch_rows.limits()
    for steps in given.steps:
        for batch in given.batch:
            shape = {"batch": batch, "steps": steps}
            case = NeckCase(bench, spec, weights, batch, steps)
            moved, flops = neck_cost(spec, weights, batch, steps)
            common: Row = {
                "op": "neck",
                "form": spec.form,
                "kv_heads": spec.kv_heads,
                **shape,
                "bytes": moved,
                "flops": flops,
            }
            for name, one in (("ours", runner), ("ours, three launches", phases)):
                launches = case.run(one)(bench.stream)
                error = case.error()
                if not error < LIMIT:
                    msg = f"neck at {shape}: error {error:g} against float64; no time is given"
                    raise ModelError(msg)
                us = bench.time_us(case.run(one))
                rows.append(common | {"implementation": name, "us": us, "error": error, "launches": launches})
            if torch_rows:
                rows += [common | row for row in torch_rows.neck(case.x_BTC, case.truth, rows[-2]["error"])]
            case.close()
            head = HeadRunner(bench.driver, kernels, packed_head, max_rows=batch * steps)
            checked = check_head(bench, head, w_CK, b_K, batch * steps)
            x_NC = rng.standard_normal((batch * steps, WIDTH)).astype(np.float16)
            x, out = bench.driver.upload(x_NC.tobytes()), bench.driver.allocate(batch * steps * 12 + 16)
            after = out + -(-batch * steps // 2) * 16
            us = bench.time_us(lambda stream: head(x, out, after, batch * steps, stream))  # noqa: B023 (called here)
            common = {"op": "head", **shape, "classes": given.classes}
            common["bytes"] = 2.0 * (x_NC.size + w_CK.size) + 12.0 * batch * steps
            common["flops"] = 2.0 * batch * steps * w_CK.size
            rows.append(
                common
                | {"implementation": "ours", "us": us, "error": checked["error"], "launches": checked["launches"]}
            )
            head.close()
            if torch_rows:
                rows += [common | row for row in torch_rows.head(x_NC)]
            for row in rows:
                if machine and "floor_us" not in row:
                    row["floor_us"] = 1e6 * max(
                        row["bytes"] / machine["bytes_per_s"], row["flops"] / machine["flop_per_s"]
                    )
            print_rows([row for row in rows if row["batch"] == batch and row["steps"] == steps])
            yield rows, machine


def print_rows(rows: Sequence[Row]) -> None:
    """One line each."""
    for row in rows:
        name = f"{row['op']} {row['batch']:>3} x {row['steps']:<3} {row['implementation']}"
        error = f"  error {row['error']:.2g}" if "error" in row else ""
        floor = f"  floor {row['floor_us']:.2f}" if "floor_us" in row else ""
        print(f"{name:52}{row.get('us', float('nan')):>9.2f} us{floor}{error}", flush=True)


def write(path: Path | None, common: Row, checks: list[Row], rows: list[Row]) -> None:
    """Every row with the machine and the source it belongs to."""
    if path:
        told = {key: common[key] for key in TOLD}
        found = {"environment": common, "checks": checks, "rows": [row | told for row in rows]}
        path.write_text(json.dumps(found, indent=1) + "\n")


def environment(driver: Driver, kernels: Kernels) -> Row:
    """What every row carries, and more of the machine."""
    name = ctypes.create_string_buffer(100)
    driver.call("cuDeviceGetName", name, 100, driver.device)
    clock_khz = ctypes.c_int()
    driver.call("cuDeviceGetAttribute", ctypes.byref(clock_khz), 13, driver.device)  # CU_DEVICE_ATTRIBUTE_CLOCK_RATE
    built = json.loads(next(data for name, data in kernels.items() if name.endswith(".json")))
    versions = {key: built[key] for key in ("triton", "assembler")}
    if importlib.util.find_spec("torch"):
        import torch  # noqa: PLC0415 (PyTorch is not everywhere)

        versions["torch"] = torch.__version__
    return {
        "device": name.value.decode(),
        "arch": driver.arch,
        "multiprocessors": driver.multiprocessors,
        "max_clock_mhz": clock_khz.value // 1000,
        "cuda_driver": driver.version,
        "versions": versions,
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "source_digest": source_digest(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 done, 1 a wrong result or no device, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--kernels", type=Path, help="folder of kernels.compile; without it they are compiled first")
    parser.add_argument("--backend", choices=BACKENDS, default="ctypes", help="what calls the driver")
    parser.add_argument("--arch", choices=ARCHS, help="run the kernels of an older one, which the driver compiles anew")
    parser.add_argument("--form", choices=["v4", "v6"], default="v4", help="neck of PP-OCRv4 and v5, or of v6")
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--classes", type=int, default=CLASSES, help="18,710 in PP-OCRv6")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, nargs="+", default=[40, 80, 160])
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="ours alone")
    parser.add_argument("--compile", choices=["gemm", "sdpa", "softmax", ""], default="gemm", help="what is compiled")
    parser.add_argument("--few-checks", action="store_true", help="enough for a run under compute-sanitizer")
    parser.add_argument("--check-only", action="store_true", help="check every form, time nothing")
    parser.add_argument("--predict", action="store_true", help="only print what an Orin should take (kernels.predict)")
    given = parser.parse_args(arguments)
    if given.predict:
        print(predict.table(predict.committed()))
        return 0
    given.torch = given.torch and importlib.util.find_spec("torch") is not None
    spec = Neck(given.form, given.kv_heads)
    try:
        bench = Bench(open_driver(given.backend))
        bench.driver.arch = given.arch or bench.driver.arch  # its cubins are refused here, its PTX is not
        with tempfile.TemporaryDirectory() as made:
            folder = given.kernels or Path(made)
            if not given.kernels:
                from kernels.compile import compile_all  # noqa: PLC0415 (Triton is not on a device)

                compile_all(bench.driver.arch, [spec], folder)
            kernels = read_kernels(folder)
            checks = check(bench, kernels, spec, classes=given.classes, few=given.few_checks)
            worst = max(row["error"] for row in checks if row["op"] == "neck" and "extreme" not in row)
            print(f"{len(checks)} checks passed; largest error of the neck {worst:.2g}", flush=True)
            common = environment(bench.driver, kernels)
            if not given.check_only:
                for rows, machine in measure(bench, kernels, spec, given):
                    # After every shape: compiling the baselines can outlast the time a machine is lent for.
                    write(given.json, common | {"machine": machine}, checks, rows)
    except ApplianceError as error:
        print(error, file=sys.stderr)
        return 1
    if given.check_only:
        write(given.json, common, checks, [])
    return 0


if __name__ == "__main__":
    sys.exit(main())
