"""Tokens, certificates and limits of a running daemon, from the command that makes a token to the request it opens."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import trustme
from support import tiny
from support.daemon import Daemon, StartDaemon, appliance, assert_refused, binary_floats, binary_request
from support.processes import eventually
from tritonclient.http.auth import BasicAuth
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.journey

X = np.random.default_rng(3).random((2, 16), np.float32)


def new_token(state_dir: Path, name: str, role: str) -> str:
    """A token made by the command."""
    made = appliance("token", "create", name, "--role", role, "--state-dir", str(state_dir))
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


class Guarded:
    """A daemon that every network reaches, with TLS, an authority of its own, and a token of each role."""

    def __init__(self, folder: Path) -> None:
        self.authority, self.folder = trustme.CA(), folder
        self.ca, self.own = folder / "ca.pem", folder / "own.pem"
        self.authority.cert_pem.write_to_path(str(self.ca))
        self.authority.issue_cert("127.0.0.1", "localhost").private_key_and_cert_chain_pem.write_to_path(str(self.own))
        state = folder / "daemon" / "state"
        self.tokens = {role: new_token(state, f"the-{role}", role) for role in ("infer", "operate", "admin")}
        self.model = tiny.linear_model(folder / "linear.onnx")

    def environment(self) -> dict[str, str]:
        return {
            "APPLIANCE_HTTP__TLS_CERTIFICATE": str(self.own),
            "APPLIANCE_HTTP__CLIENT_CA": str(self.ca),
            "APPLIANCE_HTTP__CLIENT_ROLES": json.dumps({"camera": "infer"}),
        }

    def client(self, role: str = "", certificate: str = "", authority: trustme.CA | None = None) -> httpx.Client:
        """A client that shows a token, or a certificate with this common name, or neither."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if certificate:
            shown = (authority or self.authority).issue_cert("a.example", common_name=certificate)
            path = self.folder / f"{certificate}.pem"
            shown.private_key_and_cert_chain_pem.write_to_path(str(path))
            context.load_cert_chain(path)
        headers = bearer(self.tokens[role]) if role else {}
        return httpx.Client(base_url=self.url, verify=context, trust_env=False, headers=headers)

    url = ""
    port = 0


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    guarded = Guarded(tmp_path_factory.mktemp("guarded"))
    arguments = ["--http", "0.0.0.0:0", "--onnx", f"linear={guarded.model}"]
    daemon = Daemon(guarded.folder / "daemon", *arguments, env=guarded.environment())
    try:
        daemon.wait_serving()
        assert daemon.url.startswith("https://0.0.0.0:")
        guarded.port = int(daemon.url.rpartition(":")[2])
        guarded.url = f"https://127.0.0.1:{guarded.port}"
        with guarded.client("infer") as client:
            eventually(lambda: client.get("/v2/health/ready").status_code == 200, "it is ready", 30)
        yield guarded
        daemon.stop()
        for token in guarded.tokens.values():
            assert token.partition(".")[2] not in daemon.log_text
    finally:
        daemon.close()


def infer(client: httpx.Client) -> httpx.Response:
    content, headers = binary_request({"x": X})
    return client.post("/v2/models/linear/infer", content=content, headers=headers)


def test_off_loopback_a_token_opens_inference_over_tls_and_nothing_else_does(guarded: Guarded) -> None:
    with guarded.client() as nobody, guarded.client("infer") as camera:
        for path in ("/", "/v2/health/live", "/v1/status", "/metrics", "/openapi.json"):
            assert_refused(nobody.get(path), 401)
        assert_refused(infer(nobody), 401)
        assert np.allclose(binary_floats(infer(camera)), X @ tiny.WEIGHTS, rtol=1e-4)


def test_each_role_may_do_its_part_on_a_running_daemon(guarded: Guarded) -> None:
    load = "/v2/repository/models/linear/load"
    with guarded.client("infer") as camera, guarded.client("operate") as operator, guarded.client("admin") as admin:
        assert "has role infer, and this needs operate" in assert_refused(camera.post(load), 403)
        assert "this needs admin" in assert_refused(operator.post("/v1/commands"), 403)
        for client in (operator, admin):
            answer = client.post(load, params={"dry_run": "true"})
            assert answer.status_code == 200, answer.text
            assert answer.json().keys() == {"fits", "need_bytes", "have_bytes", "would_evict"}


def test_a_client_certificate_opens_what_its_name_was_given(guarded: Guarded) -> None:
    with guarded.client(certificate="camera") as camera:
        assert np.allclose(binary_floats(infer(camera)), X @ tiny.WEIGHTS, rtol=1e-4)
        assert_refused(camera.post("/v2/repository/models/linear/unload"), 403)
    with guarded.client(certificate="stranger") as stranger:
        assert "http.client_roles" in assert_refused(stranger.get("/v2"), 403)


def test_a_certificate_of_another_authority_does_not_even_get_an_answer(guarded: Guarded) -> None:
    with guarded.client(certificate="camera", authority=trustme.CA()) as forger, pytest.raises(httpx.TransportError):
        forger.get("/v2")


def test_without_tls_and_with_old_tls_there_is_no_answer(guarded: Guarded) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=10) as plain:
        plain.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not plain.recv(1000).startswith(b"HTTP/")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(guarded.ca)
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSVersion"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", guarded.port), timeout=10) as plain,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        old.wrap_socket(plain, server_hostname="127.0.0.1")


def test_the_stock_client_shows_a_token_with_its_own_means(guarded: Guarded) -> None:
    def stock(token: str) -> triton.InferenceServerClient:
        client = triton.InferenceServerClient(
            f"127.0.0.1:{guarded.port}",
            ssl=True,
            ssl_context_factory=lambda: ssl.create_default_context(cafile=str(guarded.ca)),
        )
        client.register_plugin(BasicAuth("anybody", token))
        return client

    tensor = triton.InferInput("x", [2, 16], "FP32").set_data_from_numpy(X)
    with stock(guarded.tokens["infer"]) as client:
        assert np.allclose(client.infer("linear", [tensor]).as_numpy("y"), X @ tiny.WEIGHTS, rtol=1e-4)
        with pytest.raises(InferenceServerException, match="this needs operate"):
            client.unload_model("linear")
    with stock("the-infer.wrong") as client, pytest.raises(InferenceServerException, match="not known here"):
        client.infer("linear", [tensor])


def test_client_commands_take_token_and_authority_from_the_environment(guarded: Guarded) -> None:
    known = {"APPLIANCE_URL": guarded.url, "APPLIANCE_CA": str(guarded.ca)}
    shown = appliance("status", "--json", env={**known, "APPLIANCE_TOKEN": guarded.tokens["infer"]})
    assert json.loads(shown.stdout)["ready"] is True
    refused = appliance("status", env=known)
    assert (refused.returncode, "appliance token create" in refused.stderr) == (1, True)
    wrong = appliance("status", env={**known, "APPLIANCE_CA": str(guarded.folder / "none.pem")})
    assert (wrong.returncode, "APPLIANCE_CA" in wrong.stderr) == (1, True)


def test_a_token_made_and_revoked_while_the_daemon_runs_counts_at_once(start_null: StartDaemon) -> None:
    daemon = start_null(APPLIANCE_HTTP__ANONYMOUS="true")
    load = "/v2/repository/models/null/load?dry_run=true"
    assert "`appliance token create NAME --role operate`" in assert_refused(daemon.http.post(load), 401)
    token = new_token(daemon.state_dir, "late", "operate")
    assert daemon.http.post(load, headers=bearer(token)).status_code == 200
    listed = appliance("token", "list", "--json", "--state-dir", str(daemon.state_dir))
    assert [(row["name"], row["role"]) for row in json.loads(listed.stdout)] == [("late", "operate")]
    assert token.partition(".")[2] not in listed.stdout
    assert appliance("token", "revoke", "late", "--state-dir", str(daemon.state_dir)).returncode == 0
    eventually(lambda: daemon.http.post(load, headers=bearer(token)).status_code == 401, "it opens nothing any more", 3)
    (line,) = daemon.log("repository_order")
    assert (line["order"], line["model"], line["by"]) == ("load", "null", "late")
    daemon.stop()
    assert token.partition(".")[2] not in daemon.log_text


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({}, "there is no TLS: set http.tls_certificate"),
        ({"APPLIANCE_HTTP__TLS_CERTIFICATE": "{own}"}, "nobody could be let in: make a token"),
        ({"APPLIANCE_HTTP__TLS_CERTIFICATE": "{ca}"}, "cannot be used"),
        ({"APPLIANCE_HTTP__TLS_CERTIFICATE": "/none.pem"}, "/none.pem cannot be used"),
    ],
    ids=["no TLS", "no token", "no key", "no file"],
)
def test_off_loopback_without_tls_or_without_anybody_to_let_in_it_does_not_start(
    tmp_path: Path, told: dict[str, str], reason: str
) -> None:
    authority = trustme.CA()
    files = {"ca": tmp_path / "ca.pem", "own": tmp_path / "own.pem"}
    authority.cert_pem.write_to_path(str(files["ca"]))
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(files["own"]))
    env = {name: value.format(**files) for name, value in told.items()}
    (tmp_path / "config.toml").touch()
    state = ["--config", str(tmp_path / "config.toml"), "--state-dir", str(tmp_path / "state")]
    ended = appliance("run", "--http", "0.0.0.0:0", *state, env=env)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]  # before it may stand log lines about the machine
    assert last.startswith("appliance run: ")
    assert reason in last


def test_limits_of_the_settings_hold_on_a_running_daemon(start_null: StartDaemon) -> None:
    daemon = start_null(APPLIANCE_HTTP__CLIENT_REQUESTS_PER_S="20")
    answers = [daemon.http.get("/v2") for _ in range(60)]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused
    for answer in refused:
        assert "20 requests a second" in assert_refused(answer, 429)
        assert answer.headers["retry-after"] == "1"
    eventually(lambda: daemon.http.get("/v2").status_code == 200, "who waits is taken again")


def test_the_commands_for_tokens_say_what_is_wrong_in_one_sentence(tmp_path: Path) -> None:
    state = ["--state-dir", str(tmp_path)]
    for arguments, code, reason in (
        (("create", "a b", "--role", "infer"), 2, "is no name of a token"),
        (("create", "a", "--role", "root"), 2, "there is no role 'root'; known: infer, operate, admin"),
        (("revoke", "a"), 1, "there is no token 'a'"),
    ):
        ended = appliance("token", *arguments, *state)
        assert (ended.returncode, reason in ended.stderr) == (code, True), ended.stderr
        assert "Traceback" not in ended.stderr
    assert "no tokens" in appliance("token", "list", *state).stdout
