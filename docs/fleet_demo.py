"""What `make fleet-demo` runs: an upstream, a broker and three devices here; a good version rolled out, a bad one not.

Every step is a command that a user would type. The model is a chain of matrix products, so that it is made in a
moment: version 1 and 2 have few of them, version 3 so many that it is slow.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from demo import BIN, ROOT, WORK, await_port, broker, console, free_port, serving, step
from onnx import TensorProto, helper, numpy_helper

from models.bundle import Blob, Golden, Graph, Manifest, Provenance, TaskSpec, Variant
from models.folder import pack_arrays, write_bundle
from models.spec import ModelSpec, TensorSpec

MODEL = "matcher"
WIDTH = 512
FEW, MANY = 16, 1000
"""Products: less than 1 ms and some 25 ms on a PC."""
FIRST = ("appliance", "token", "create", "me", "--role", "admin")
"""Opens the fleet's paths, too: so its first tokens are made."""
DEVICES = {"press-1": "canary", "press-2": "hall-1", "press-3": "hall-2"}
WITHIN_S = 60.0


def main() -> None:
    """Run the demo; exit status 1 with a sentence when a step fails."""
    began = time.monotonic()
    shutil.rmtree(WORK / "fleet", ignore_errors=True)
    folder = WORK / "fleet"
    folder.mkdir(parents=True)
    os.environ["PROVISION_PASSPHRASE"] = "only a demo"  # noqa: S105 - its keys are made anew each time
    step(f"Publishing three versions of {MODEL}")
    bundles = [bundle(folder / f"{MODEL}-{n}", f"{n}.0.0", products) for n, products in ((1, FEW), (2, FEW), (3, MANY))]
    repository, keys = str(folder / "repository"), str(folder / "keys")
    run("provision", "publish", "init", repository, "--keys", keys)
    for made, channel in zip(bundles, ("stable", "dev", "dev"), strict=True):
        run("provision", "publish", "add", repository, str(made), "--channel", channel, "--keys", keys)
    with contextlib.ExitStack() as cleanup:
        port = cleanup.enter_context(broker())
        mirror = cleanup.enter_context(published(repository))
        step("Starting the upstream")
        state = folder / "upstream"
        home = cleanup.enter_context(
            serving("upstream", "--role", "upstream", "--state-dir", state, "--mqtt", f"127.0.0.1:{port}")
        )
        os.environ |= {"APPLIANCE_URL": home, "APPLIANCE_TOKEN": run(*FIRST, "--state-dir", str(state))}
        step("Starting three devices, each with a token of its own")
        for device, group in DEVICES.items():
            token = folder / f"{device}.token"
            token.write_text(
                run("appliance", "fleet", "tokens", "create", device, "--role", "device", "--device", device)
            )
            given = ["--bundle", bundles[0], "--state-dir", folder / device, "--mqtt", f"127.0.0.1:{port}"]
            cleanup.enter_context(serving(device, *given, **settings(device, home, token, mirror, Path(repository))))
            eventually(f"{device} has reported", lambda device=device: heard(device))
            run("appliance", "fleet", "device", device, "--group", group)
        run("appliance", "fleet", "devices", shown=True)
        step("What version 2 costs in accuracy")
        run("provision", "parity", str(bundles[1]), str(bundles[0]), shown=True)
        step("Rolling version 2 out: the canary, then everybody")
        good = rolled_out("2.0.0", bundles[1], wanted="done")
        step("Rolling version 3 out, which is slow")
        bad = rolled_out("3.0.0", bundles[2], wanted="stopped")
        step("What the canary has to tell")
        run("appliance", "fleet", "device", "press-1", shown=True)
        eventually("every device serves version 2", lambda: set(versions().values()) == {"2.0.0"})
        run("appliance", "fleet", "devices", shown=True)
        step(f"The fleet page is at {home} while the upstream runs; stopping everything")
        serve = versions()
    step("Summary")
    console.print(f"  version 2.0.0: {good['state']}, {good['reason']}")
    console.print(f"  version 3.0.0: {bad['state']}, {bad['reason']}")
    console.print(f"  devices serve {', '.join(f'{device} {version}' for device, version in sorted(serve.items()))}")
    console.print(f"  all of it took {time.monotonic() - began:.0f} s, and nothing is left running")


def run(command: str, *arguments: str, shown: bool = False, wanted: int = 0) -> str:
    """Run one of our own commands; what it prints."""
    console.print(f"  $ {command} {' '.join(arguments)}".replace(f"{ROOT}/", ""), style="dim", markup=False)
    try:
        ended = subprocess.run(  # noqa: S603 - our own command
            [BIN / command, *arguments], cwd=ROOT, check=False, text=True, capture_output=True, timeout=2 * WITHIN_S
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"{command} {' '.join(arguments[:3])} does not end")
    if ended.returncode != wanted:
        sys.exit(f"{command} {arguments[0]} ended with {ended.returncode}: {ended.stderr or ended.stdout}")
    if shown:
        console.print((ended.stderr + ended.stdout).replace(f"{ROOT}/", ""), end="", markup=False)
    return ended.stdout.strip()


def rolled_out(version: str, made: Path, wanted: str) -> dict[str, Any]:
    """A campaign, from its start to its end; as its status tells."""
    given = ("--canary", "group:canary", "--wave", "100%", "--bundle", str(made), "--yes", "--wait")
    run("appliance", "fleet", "campaign", "start", MODEL, version, *given, shown=True, wanted=int(wanted != "done"))
    latest = max(json.loads(run("appliance", "fleet", "campaign", "status", "--json")), key=lambda one: int(one["id"]))
    if latest["state"] != wanted:
        sys.exit(f"the campaign for {version} is {latest['state']}, not {wanted}: {latest['reason']}")
    return dict(latest)


def versions() -> dict[str, str]:
    """Device -> version that it serves."""
    found = json.loads(run("appliance", "fleet", "devices", "--json"))
    return {one["device_id"]: one["versions"].get(MODEL, {}).get("version", "-") for one in found}


def heard(device: str) -> bool:
    """Whether the upstream knows what a device serves."""
    return versions().get(device) == "1.0.0"


def eventually(what: str, holds: Any) -> None:  # noqa: ANN401 - a function without arguments
    """Wait until something holds."""
    until = time.monotonic() + WITHIN_S
    while not holds():
        if time.monotonic() > until:
            sys.exit(f"not within {WITHIN_S:.0f} s: {what}")
        time.sleep(0.5)


def settings(device: str, home: str, token: Path, mirror: str, repository: Path) -> dict[str, str]:
    """What a device is told by its environment. It waits for little here, so that a campaign takes seconds."""
    return {
        "APPLIANCE_DEVICE_ID": device,
        "APPLIANCE_UPSTREAM__URL": home,
        "APPLIANCE_UPSTREAM__TOKEN_FILE": str(token),
        "APPLIANCE_UPSTREAM__INTERVAL_S": "1",
        "APPLIANCE_UPDATE__URL": mirror,
        "APPLIANCE_UPDATE__ROOT": str(repository / "metadata" / "1.root.json"),
        "APPLIANCE_UPDATE__RESERVE_BYTES": "0",
        "APPLIANCE_UPDATE__SHADOW_REQUESTS": "0",  # nobody asks these devices anything
        "APPLIANCE_UPDATE__TRIAL_S": "3",
        "APPLIANCE_UPDATE__LATENCY_RATIO": "4",  # this machine is shared by four daemons
    }


@contextlib.contextmanager
def published(repository: str) -> Iterator[str]:
    """A web server of the repository; its URL."""
    port = free_port()
    step(f"Serving the repository on port {port}")
    process = subprocess.Popen(  # noqa: S603 - our own command
        [BIN / "provision", "publish", "serve", repository, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await_port(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def bundle(path: Path, version: str, products: int) -> Path:
    """A bundle of raw tensors: `y` is `x`, FP32 [N, 512], after so many products with a matrix that changes nothing."""
    names = ["x", *(f"same{i}" for i in range(products - 1)), "y"]
    value = {one: helper.make_tensor_value_info(one, TensorProto.FLOAT, ["N", WIDTH]) for one in ("x", "y")}
    nodes = [helper.make_node("MatMul", [have, "one"], [gets]) for have, gets in itertools.pairwise(names)]
    one = numpy_helper.from_array(np.eye(WIDTH, dtype=np.float32), "one")
    graph = helper.make_graph(nodes, MODEL, [value["x"]], [value["y"]], [one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    x = np.linspace(-1, 1, 2 * WIDTH, dtype=np.float32).reshape(2, WIDTH)
    content, inputs, outputs = model.SerializeToString(), pack_arrays({"x": x}), pack_arrays({"y": x})
    spec = ModelSpec((TensorSpec("x", "FP32", (-1, WIDTH)),), (TensorSpec("y", "FP32", (-1, WIDTH)),))
    golden = Golden(Blob.of(inputs), Blob.of(outputs), tolerance=1e-6)
    graphs = {"g": Graph(spec, {"fp32": Variant(Blob.of(content), golden)})}
    provenance = Provenance("0" * 64, {}, {}, (), ())
    manifest = Manifest(MODEL, version, "Apache-2.0", TaskSpec("tensors"), graphs, provenance)
    write_bundle(path, manifest, {Blob.of(one).sha256: one for one in (content, inputs, outputs)}, {})
    return path


if __name__ == "__main__":
    main()
