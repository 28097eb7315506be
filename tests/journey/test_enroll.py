"""From `provision enroll init` to a device whose certificate opens the broker and another device, until it is revoked.

Every step is the real command; authority, service, device, daemon and broker are processes of their own.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import ssl
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from support import tiny
from support.broker import Mosquitto, needs_mosquitto
from support.daemon import Daemon, StartDaemon, appliance, assert_refused
from support.processes import clean_environment, end_marked, eventually, new_mark
from support.workshop import PROVISION

from appliance.doctor_tls import Trust, check_tls

pytestmark = [pytest.mark.journey, pytest.mark.long, pytest.mark.timeout(240)]

SECRET = {"PROVISION_PASSPHRASE": "correct horse"}
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="condition cc: no C compiler is installed")

WOKE_UP_IN_1970 = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
time_t time(time_t *at) { if (at) *at = 60; return 60; }
int clock_gettime(clockid_t clock, struct timespec *at) {
  int failed = syscall(SYS_clock_gettime, clock, at);
  if (clock == CLOCK_REALTIME) { at->tv_sec = 60; }
  return failed;
}
"""
"""Put before the system's library, it has a whole process believe that a minute of 1970 has passed."""


def provision(*arguments: str) -> str:
    """What a `provision enroll` command prints; it must succeed."""
    run = subprocess.run(
        [str(PROVISION), "enroll", *arguments],
        env=clean_environment() | SECRET,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


class Workshop:
    """An authority and its service."""

    def __init__(self, folder: Path) -> None:
        """Make the authority, and serve it at `url`."""
        self.folder, self.authority = folder, str(folder / "authority")
        self.ca = folder / "authority" / "authority.pem"
        self.mark, self.log = new_mark(), folder / "serve.log"
        assert "fingerprint: " in provision("init", self.authority, "--name", "press fleet")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(PROVISION), "enroll", "serve", self.authority, "--port", "0", "--name", "127.0.0.1"],
                env=clean_environment(self.mark) | SECRET | {"PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        eventually(lambda: "enrolling at" in self.log.read_text(), "the service says where it is", 30)
        words = self.log.read_text().split()
        self.url, self.fingerprint = words[2].rstrip(","), words[4]

    def token(self, device: str, *also: str) -> str:
        """A token for `device`, whose certificate is `also` for these addresses."""
        more = [word for address in also for word in ("--also", address)]
        return provision("token", self.authority, "--device", device, *more)

    def enrol(self, state: Path, device: str, token: str, *trust: str) -> subprocess.CompletedProcess[str]:
        """Run `appliance enroll` for a device that keeps its state in `state`."""
        known = trust or ("--ca", str(self.ca))
        return appliance(
            *("enroll", "--url", self.url, *known, "--name", device, "--state-dir", str(state), "--json"),
            env={"APPLIANCE_ENROLMENT_TOKEN": token},
        )

    def close(self) -> None:
        """End the service, as an operator would."""
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert self.process.wait(20) == 0
        end_marked(self.mark)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    made = Workshop(tmp_path_factory.mktemp("workshop"))
    yield made
    made.close()


class StrictMosquitto(Mosquitto):
    """A broker that lets in whom the authority certified and did not revoke, each to its own topics."""

    def __init__(self, folder: Path, authority: Path) -> None:
        """Take key and certificate from `folder`/server.pem."""
        super().__init__(folder)
        server, acl = folder / "server.pem", folder / "acl"
        acl.write_text("pattern readwrite appliance/%u/#\n")
        with self._config.open("a") as config:
            config.write(
                f"cafile {authority / 'authority.pem'}\ncertfile {server}\nkeyfile {server}\n"
                f"crlfile {authority / 'revoked.pem'}\nrequire_certificate true\nuse_identity_as_username true\n"
                f"acl_file {acl}\n"
            )


@needs_mosquitto
def test_an_enrolled_device_serves_and_speaks_under_its_certificate_until_that_is_revoked(
    workshop: Workshop, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    state = tmp_path / "daemon" / "state"
    enrolled = workshop.enrol(state, "press-7", workshop.token("press-7", "127.0.0.1"))
    assert enrolled.returncode == 0, enrolled.stderr
    assert json.loads(enrolled.stdout)["name"] == "press-7"
    camera = tmp_path / "camera"
    fingerprint = ("--fingerprint", workshop.fingerprint)
    assert workshop.enrol(camera, "camera-1", workshop.token("camera-1"), *fingerprint).returncode == 0
    broker = tmp_path / "broker"
    broker.mkdir()
    provision("server", workshop.authority, "127.0.0.1", "localhost", "--out", str(broker / "server.pem"))
    mosquitto = StrictMosquitto(broker, Path(workshop.authority)).start()
    try:
        daemon = start_daemon(
            *("--onnx", f"null={tiny.null_model(tmp_path / 'null.json', 0)}", "--mqtt", mosquitto.address),
            APPLIANCE_RUNTIME="null",
            APPLIANCE_IDENTITY__HTTP="true",
            APPLIANCE_IDENTITY__MQTT="true",
            APPLIANCE_IDENTITY__CHECK_S="1",
            APPLIANCE_HTTP__ANONYMOUS="false",
            APPLIANCE_HTTP__CLIENT_ROLES=json.dumps({"camera-1": "infer", "press-7": "infer"}),
            APPLIANCE_MQTT__LONGEST_RETRY_S="0.5",
        )
        daemon.wait_serving(30)
        assert daemon.url.startswith("https://")

        asked = partial(ask, daemon, workshop.ca)
        assert_refused(asked(None), 401)
        eventually(lambda: asked(camera).json()["mqtt"]["connected"], "it is connected to its broker", 30)
        eventually(lambda: asked(state).json()["identity"].get("name") == "press-7", "it knows who it is", 30)
        assert asked(state).json()["identity"]["problem"] is None
        assert "appliance-press-7" in mosquitto.log
        heard = mqtt_as(state, mosquitto.port, "appliance/press-7/availability", workshop.ca)
        assert (heard.returncode, heard.stdout.strip()) == (0, "online")

        # A renewal by command is taken up by the running daemon, and so is a revocation.
        before = (state / "identity" / "identity.pem").read_bytes()
        renewed = appliance("enroll", "--renew", "--state-dir", str(state))
        assert renewed.returncode == 0, renewed.stderr
        assert (state / "identity" / "identity.pem").read_bytes() != before
        eventually(lambda: daemon.log("identity_taken_up"), "the daemon has noticed", 30)
        provision("revoke", workshop.authority, "camera-1")
        eventually(lambda: refused(lambda: asked(camera)), "the daemon refuses the camera", 60)
        assert asked(state).status_code == 200
        port = int(daemon.url.rpartition(":")[2])
        why = check_tls("daemon", "127.0.0.1", port, Trust(workshop.ca, camera / "identity" / "identity.pem"))
        assert why.reason == f"127.0.0.1:{port} hung up on seeing our certificate of camera-1"

        provision("revoke", workshop.authority, "press-7")
        mosquitto.stop()
        mosquitto.start()  # it reads its crlfile when it starts
        told = mqtt_as(state, mosquitto.port, "appliance/press-7/availability", workshop.ca)
        assert told.returncode != 0
        why = check_tls("broker", "127.0.0.1", mosquitto.port, Trust(workshop.ca, state / "identity" / "identity.pem"))
        assert why.reason == f"our certificate was revoked, says 127.0.0.1:{mosquitto.port}"
        again = appliance("enroll", "--renew", "--state-dir", str(state))
        assert (again.returncode, "counts no more: enrol anew with a token" in again.stderr) == (1, True), again.stderr
        daemon.stop()
        for text in (daemon.log_text, workshop.log.read_text()):
            assert "PRIVATE KEY" not in text
    finally:
        mosquitto.close()


def ask(daemon: Daemon, ca: Path, who: Path | None) -> httpx.Response:
    """The daemon's status, asked for with the identity in the state folder `who`."""
    context = ssl.create_default_context(cafile=str(ca))
    if who:
        context.load_cert_chain(who / "identity" / "identity.pem")
    with httpx.Client(base_url=daemon.url, verify=context, trust_env=False, timeout=20) as client:
        return client.get("/v1/status")


def refused(look: Callable[[], object]) -> bool:
    """Whether the other side ends the handshake because of the certificate."""
    try:
        look()
    except httpx.TransportError as error:
        return any(word in str(error).lower() for word in ("revoked", "disconnected", "eof", "reset"))
    return False


def mqtt_as(state: Path, port: int, topic: str, ca: Path) -> subprocess.CompletedProcess[str]:
    """The retained message on `topic`, asked for by mosquitto's own client with the identity in `state`."""
    own = str(state / "identity" / "identity.pem")
    return subprocess.run(
        [
            *("mosquitto_sub", "-V", "5", "-h", "127.0.0.1", "-p", str(port), "-t", topic, "-C", "1", "-W", "20"),
            *("--cafile", str(ca), "--cert", own, "--key", own),
        ],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )


def test_a_token_opens_one_enrolment_of_one_name(workshop: Workshop, tmp_path: Path) -> None:
    token = workshop.token("press-8")
    stolen = workshop.enrol(tmp_path / "thief", "thief", token)
    assert (stolen.returncode, stolen.stdout) == (1, "")
    assert "this token is for another device than thief" in stolen.stderr
    assert workshop.enrol(tmp_path / "own", "press-8", token).returncode == 0
    again = workshop.enrol(tmp_path / "other", "press-8", token)
    assert "this token was used already" in again.stderr
    assert "used already" in workshop.log.read_text()
    for ended in (stolen, again):
        assert token not in ended.stderr
        assert "Traceback" not in ended.stderr
    shown = json.loads(provision("status", workshop.authority, "--json"))
    assert "press-8" in {one["name"] for one in shown["certificates"].values()}
    assert "press-8" in provision("status", workshop.authority)


def test_a_device_without_a_network_is_enrolled_by_files(workshop: Workshop, tmp_path: Path) -> None:
    state, stick = str(tmp_path / "state"), tmp_path / "stick"
    stick.mkdir()
    asked = appliance("enroll", "--request", str(stick / "request.csr"), "--name", "press-9", "--state-dir", state)
    assert asked.returncode == 0, asked.stderr
    answer = str(stick / "answer")
    provision("sign", workshop.authority, str(stick / "request.csr"), "--device", "press-9", "--out", answer)
    kept = appliance("enroll", "--answer", answer, "--ca", str(workshop.ca), "--state-dir", state)
    assert (kept.returncode, "press-9 has a certificate until" in kept.stdout) == (0, True), kept.stderr
    assert not any(b"PRIVATE" in path.read_bytes() for path in stick.iterdir())
    assert "press-9 has a certificate" in appliance("enroll", "--state-dir", state).stdout


@NEEDS_COMPILER
def test_a_board_that_woke_up_in_1970_is_told_that_its_clock_is_wrong(workshop: Workshop, tmp_path: Path) -> None:
    source, shim = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(WOKE_UP_IN_1970)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(shim), str(source)], check=True)
    ended = appliance(
        *("enroll", "--url", workshop.url, "--ca", str(workshop.ca), "--name", "press-10"),
        *("--state-dir", str(tmp_path / "state")),
        env={"LD_PRELOAD": str(shim), "APPLIANCE_ENROLMENT_TOKEN": "any"},
    )
    assert ended.returncode == 1
    assert "the clock of this machine says 1970-01-01 00:01 UTC" in ended.stderr
    assert "set the clock" in ended.stderr
