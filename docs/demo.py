"""What `make demo` runs: build, serve, read two pictures, ask over MQTT, stop.

Every step is the command or request that a user would make; nothing here is special.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import paho.mqtt.client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from rich.console import Console

from models.tasks.text import edit_distance, normalise, source_of

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".demo"
PAGES = ROOT / "tests" / "data" / "ocr" / "pages"
BIN = Path(sys.executable).parent
DEVICE = "demo"
WAIT_S = 20.0

EMBEDDED_BROKER = """
id = 0

[router]
id = 0
max_connections = 16
max_outgoing_packet_count = 200
max_segment_size = 1048576
max_segment_count = 10

[v5.1]
name = "demo"
listen = "127.0.0.1:{port}"
next_connection_delay_ms = 1

[v5.1.connections]
connection_timeout_ms = 5000
max_payload_size = 262144
max_inflight_count = 100
dynamic_filters = true
"""

CLIENT = httpx.Client(timeout=60, trust_env=False)  # a proxy knows nothing of this machine's loopback

console = Console(highlight=False, soft_wrap=True)


def main() -> None:
    """Run the demo; exit status 1 with a sentence when a step fails."""
    WORK.mkdir(exist_ok=True)
    bundle = WORK / "ppocr-v4"
    step("Building the text-reading bundle from the PP-OCRv4 models")
    run("provision", "build", "models/zoo/ppocr-v4.toml", "--target", "cpu", "--out", str(bundle))
    with contextlib.ExitStack() as cleanup:
        broker_port = cleanup.enter_context(broker())
        step("Starting the daemon")
        url = cleanup.enter_context(daemon(bundle, broker_port))
        splits = dict(row.split("\t") for row in (PAGES.parent / "splits.tsv").read_text().splitlines())
        for label in (PAGES / "labels.jsonl").read_text().splitlines():
            page = json.loads(label)
            if splits[page["source"]] != "gate":  # the build has seen it
                continue
            step(f"Reading {(PAGES / page['file']).relative_to(ROOT)} over HTTP")
            read(url, PAGES / page["file"], [line["text"] for line in page["lines"] if not line["ignore"]])
        step("Asking for its status over MQTT")
        ask(broker_port)
        step("Stopping the daemon")
    console.print("  its worker has ended, and it exited with 0")
    step("What to try next")
    console.print(f"  .venv/bin/appliance run --bundle {bundle.relative_to(ROOT)} --state-dir .demo/state")
    console.print("  .venv/bin/appliance infer ppocr-v4 YOUR_PICTURE.jpg   (in another terminal)")
    console.print("  curl --data-binary @YOUR_PICTURE.jpg http://127.0.0.1:8080/v1/models/ppocr-v4/predict")
    console.print(f"  .venv/bin/provision inspect {bundle.relative_to(ROOT)}")
    console.print("  a browser at http://127.0.0.1:8080")


def step(title: str) -> None:
    """Say what happens now."""
    console.print(f"\n[bold]{title}[/]")


def run(command: str, *arguments: str) -> None:
    """Run one of our own commands with its output shown."""
    if subprocess.run([BIN / command, *arguments], cwd=ROOT, check=False).returncode:  # noqa: S603 - our own command
        sys.exit(f"{command} {arguments[0]} failed; its message is above")


def free_port() -> int:
    """A loopback port that nobody uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def broker() -> Iterator[int]:
    """An MQTT 5 broker on loopback: mosquitto when it is installed, else one that pip brought."""
    port = free_port()
    mosquitto = shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if mosquitto:
        config = WORK / "mosquitto.conf"
        step(f"Starting mosquitto on port {port}")
        # Started by root it would drop to a user that cannot read this folder; from others it ignores `user`.
        config.write_text(f"user root\nlistener {port} 127.0.0.1\nallow_anonymous true\n")
        process = subprocess.Popen(  # noqa: S603 - the system's mosquitto
            [mosquitto, "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            await_port(port)
            yield port
        finally:
            process.terminate()
            process.wait()
        return
    step(f"Starting an embedded broker on port {port} (mosquitto is not installed)")
    from iotcore import Broker  # noqa: PLC0415 - only where there is no mosquitto

    config = WORK / "broker.toml"
    config.write_text(EMBEDDED_BROKER.format(port=port))
    with Broker(config_path=str(config)):
        yield port


def await_port(port: int) -> None:
    """Wait until something listens on `port`."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    sys.exit(f"nothing listens on port {port} after {WAIT_S:.0f} s")


@contextlib.contextmanager
def daemon(bundle: Path, broker_port: int) -> Iterator[str]:
    """The daemon, ready; its URL."""
    given = ["--bundle", bundle, "--mqtt", f"127.0.0.1:{broker_port}", "--state-dir", WORK / "state"]
    with serving("daemon", *given, APPLIANCE_DEVICE_ID=DEVICE) as url:
        yield url


@contextlib.contextmanager
def serving(name: str, *arguments: str | Path, **environment: str) -> Iterator[str]:
    """`appliance run` with these arguments, ready, on a free port; its URL. It is called `name` here."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = WORK / f"{name}.log"
    started = time.monotonic()
    command = [BIN / "appliance", "run", "--http", f"127.0.0.1:{port}", *arguments]
    # A container's clock often reports itself unsynchronised for ever.
    told = os.environ | {"APPLIANCE_CLOCK__ASSUME_SYNCED": "true"} | environment
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output, env=told)  # noqa: S603 - our own command
    try:
        while not ready(url):
            if process.poll() is not None or time.monotonic() > started + WAIT_S:
                sys.exit(f"{name} did not become ready; see {log.relative_to(ROOT)}:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        console.print(f"  ready after {time.monotonic() - started:.1f} s at {url}; log in {log.relative_to(ROOT)}")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2 * WAIT_S)  # longer than the daemon's own grace period
        process.kill()
        status = process.wait()
    if status:
        sys.exit(f"{name} exited with status {status}; see {log.relative_to(ROOT)}")


def ready(url: str) -> bool:
    """Whether the daemon answers that it is ready."""
    try:
        return CLIENT.get(f"{url}/v2/health/ready").is_success
    except httpx.TransportError:
        return False


def read(url: str, picture: Path, labels: list[str]) -> None:
    """Send a picture, print its lines, and compare them with its labels."""
    response = CLIENT.post(f"{url}/v1/models/ppocr-v4/predict", content=picture.read_bytes())
    answer: dict[str, Any] = response.json()
    if response.is_error:
        sys.exit(f"the daemon refused the picture: {answer['error']}")
    for line in answer["lines"]:
        console.print(f"  {line['confidence']:.2f}  {line['text']}", markup=False)
    source = source_of(picture.name)
    read_lines = [normalise(line["text"], source) for line in answer["lines"]]
    wanted = [text for text in (normalise(label, source) for label in labels) if len(text) > 1]
    found = sum(
        any(text in line or edit_distance(text, line) <= len(text) / 5 for line in read_lines) for text in wanted
    )
    timing_ms = answer["timing_ms"]
    console.print(
        f"  {len(answer['lines'])} lines in {timing_ms['total']:.0f} ms"
        f" ({timing_ms['inference']:.0f} ms of it in the models, by {answer['runtime']});"
        f" {found} of {len(wanted)} labelled texts are among them, four fifths of their characters right or more",
        style="dim",
    )


def ask(port: int) -> None:
    """Send the order `status` and print the answer that comes back on our own topic."""
    answers: queue.Queue[bytes] = queue.Queue()
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    client.on_message = lambda _client, _userdata, message: answers.put(message.payload)
    client.connect("127.0.0.1", port)
    client.loop_start()
    client.subscribe("demo/answers", qos=1)
    properties = Properties(PacketTypes.PUBLISH)
    properties.ResponseTopic = "demo/answers"
    properties.CorrelationData = b"1"
    order = {"id": f"demo-{time.time_ns()}", "command": "status"}
    try:
        # The daemon may still be on its way to the broker: the order is repeated, its id makes that harmless.
        for _ in range(int(WAIT_S)):
            client.publish(f"appliance/{DEVICE}/cmd", json.dumps(order), qos=1, properties=properties)
            with contextlib.suppress(queue.Empty):
                show(json.loads(answers.get(timeout=1)))
                return
        sys.exit("no answer came over MQTT")
    finally:
        client.disconnect()
        client.loop_stop()


def show(answer: dict[str, Any]) -> None:
    """Print the part of a status answer that fits here."""
    result = answer["result"]
    console.print(f"  {answer['status']}: device {result['device_id']}, up {result['uptime_s']:.0f} s")
    for model in result["models"]:
        precision = ", ".join(f"{graph} {kind}" for graph, kind in model["precision"].items())
        state = "ready" if model["ready"] else model["reason"]
        console.print(f"  {model['name']} {model['version']}: {state}, {model['runtime']}, {precision}", markup=False)


if __name__ == "__main__":
    main()
