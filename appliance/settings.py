"""What an operator may set: flags, then `APPLIANCE_*` variables, then one TOML file, then a profile.

A nested key is written `http.port` in messages, `[http] port` in the file, and
`APPLIANCE_HTTP__PORT` in the environment.

Past 400 lines because each setting has its sentence here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from appliance import hardware
from appliance.core.limits import Limits as ModelLimits
from appliance.runtime import RuntimeName
from models.enrolment import IdentityFiles
from models.errors import BadInput, ConfigError

ENV_PREFIX = "APPLIANCE_"
PROFILES = Path(__file__).parent / "profiles"
CLIENT_VARIABLES = frozenset(f"{ENV_PREFIX}{name}" for name in ("URL", "TOKEN", "CA", "ENROLMENT_TOKEN"))
"""Read by the client commands: no setting, and no typing error either."""
SYSTEM_CONFIG = Path("/etc/appliance/config.toml")
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_LIMITS = ModelLimits()
_WINDOW = r"^(([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d)?$"
"""From one time of day to another."""


def default_state_dir() -> Path:
    """/var/lib/appliance for root, the user's state folder otherwise."""
    if os.geteuid() == 0:
        return Path("/var/lib/appliance")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "appliance"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Http(_Part):
    """The local HTTP door."""

    host: str = Field(default="127.0.0.1", description="address to listen on; off loopback only with TLS and tokens")
    port: int = Field(default=8080, ge=0, le=65535, description="0 takes a free port and prints it")
    body_limit_bytes: int = Field(default=_LIMITS.body_bytes, gt=0, le=1024**3, description="larger bodies are refused")
    bodies_limit_bytes: int = Field(
        default=256 * 1024 * 1024, gt=0, le=1024**4, description="all bodies in hand together; others are told to retry"
    )
    silence_s: float = Field(
        default=30.0, gt=0, le=3600, description="a client that stops amid a request or answer is given up after this"
    )
    hosts: frozenset[str] = Field(
        default=frozenset(), description="further names that clients on loopback may call this appliance by"
    )
    anonymous: bool = Field(
        default=True, description="on loopback anybody may run models and read; off loopback nobody ever may"
    )
    tls_certificate: Path | None = Field(default=None, description="PEM file with the chain; needed off loopback")
    tls_key: Path | None = Field(default=None, description="PEM file, when the key is not in tls_certificate")
    client_ca: Path | None = Field(default=None, description="PEM file of the authority that signs client certificates")
    client_crl: Path | None = Field(default=None, description="PEM file of certificates that client_ca has revoked")
    client_roles: Mapping[str, Literal["infer", "operate", "admin"]] = Field(
        default={}, description="common name of a client certificate -> what it may do"
    )
    client_requests_per_s: float = Field(default=0.0, ge=0, le=1e6, description="of one client; 0 is no limit")
    client_concurrency: int = Field(default=512, gt=0, description="requests of one client at the same time")
    requests_per_s: float = Field(default=0.0, ge=0, le=1e6, description="of all clients; 0 is no limit")
    concurrency: int = Field(default=1024, gt=0, description="requests of all clients at the same time")

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the door."""
        return self.host in LOOPBACK


class Mqtt(_Part):
    """The fleet's broker; no host means no MQTT."""

    host: str = Field(default="", description="broker to connect to")
    port: int = Field(default=1883, ge=1, le=65535, description="of the broker")
    username: str = Field(default="", description="none means that the broker asks for none")
    password: SecretStr = Field(default=SecretStr(""), description="of that user; better in the environment or a file")
    keepalive_s: int = Field(default=30, ge=5, le=3600, description="a silent broker is given up after 1.5 times this")
    longest_retry_s: float = Field(default=60.0, gt=0, description="longest wait between two tries to connect")
    tls: bool = Field(default=False, description="speak TLS; brokers usually have another port for it, 8883")
    ca: Path | None = Field(default=None, description="PEM file of who signed the broker's certificate")
    certificate: Path | None = Field(default=None, description="PEM file of our own, when the broker asks for one")
    key: Path | None = Field(default=None, description="PEM file, when the key is not in certificate")
    session_expiry_s: int = Field(
        default=86400, ge=0, le=2**32 - 2, description="the broker keeps orders for a device that is away so long"
    )
    telemetry_s: float = Field(default=60.0, ge=0, le=86400, description="between two telemetry messages; 0 is none")
    results: frozenset[str] = Field(default=frozenset(), description="bundles whose answers are published, too")
    spool_bytes: int = Field(
        default=16 * 2**20, ge=2**16, le=2**30, description="what may wait for the broker, in memory and on disk"
    )
    spool_age_s: float = Field(default=7 * 86400.0, gt=0, le=10 * 365 * 86400, description="older telemetry is dropped")
    replay_per_s: float = Field(default=50.0, gt=0, le=10_000, description="pace of telemetry after an outage")


class Limits(_Part):
    """Bounds of each model."""

    queue: int = Field(default=_LIMITS.queue, gt=0, description="requests that may wait for one model")
    queue_bytes: int = Field(default=_LIMITS.queue_bytes, gt=0, description="payloads that may wait for one model")
    predicted_wait_s: float = Field(
        default=_LIMITS.predicted_wait_s,
        ge=0,
        description="a request that would wait longer is refused; 0: longer than is usual at 90 % load",
    )
    wait_s: float = Field(default=_LIMITS.wait_s, gt=0, description="a request that waits longer is given up")
    ageing_s: float = Field(default=_LIMITS.ageing_s, ge=0, description="waiting that is worth one step of priority")
    batch: int = Field(
        default=_LIMITS.batch, gt=0, le=64, description="most requests in one run, where that is cheaper"
    )
    concurrency: int = Field(default=_LIMITS.concurrency, gt=0, le=64, description="runs at the same time in a worker")
    hang_s: float = Field(default=_LIMITS.hang_s, gt=0, description="a run silent for longer is taken for hung")
    picture_pixels: int = Field(default=_LIMITS.picture_pixels, gt=0, description="larger pictures are refused unread")
    prove_idle_s: float = Field(
        default=_LIMITS.prove_idle_s, gt=0, description="an idle worker answers a golden vector again after this"
    )
    calm_s: float = Field(default=_LIMITS.calm_s, gt=0, description="faults are forgiven after this long without one")
    quarantine_s: float = Field(default=_LIMITS.quarantine_s, gt=0, description="what cannot load is tried this rarely")


class Memory(_Part):
    """One budget for all models."""

    budget_bytes: int | None = Field(
        default=None, gt=0, description="for all models together; all there is less the reserve when left out"
    )
    reserve_bytes: int | None = Field(
        default=None, ge=0, description="left to the system; an eighth, but 256 MiB to 2 GiB, when left out"
    )
    low_available_bytes: int | None = Field(
        default=None, ge=0, description="load is shed while less is available; a quarter of the reserve when left out"
    )
    idle_unload_s: float = Field(default=1800.0, gt=0, description="a model nobody used for so long is unloaded")
    idle_trim_s: float = Field(default=5.0, gt=0, description="a worker without work for so long gives memory back")
    sample_s: float = Field(default=0.5, gt=0, le=60, description="how often memory is looked at")
    spare_worker: bool = Field(
        default=True, description="keep a worker started while a model is unloaded, so that it is back sooner"
    )
    priorities: Mapping[str, Annotated[int, Field(ge=1, le=10)]] = Field(
        default={}, description="by model, 1 (most important) to 10, default 5: who is unloaded for whom"
    )


class Gpu(_Part):
    """How workers use an NVIDIA card; nothing of it is for the GPU of a Jetson."""

    policy: Literal["prefer", "require"] = Field(
        default="prefer",
        description="of onnxruntime-cuda; require: no node of a graph on the CPU, and no fallback to it after faults",
    )
    share: Literal["", "mig", "mps"] = Field(
        default="",
        description="mig: a worker an instance, where the card is cut; mps: a share of it; empty: workers take turns",
    )
    parts: int = Field(
        default=1, ge=1, le=48, description="instances that the doctor cuts a card into, or equal shares of it"
    )
    devices: tuple[str, ...] = Field(
        default=(),
        description="each worker's CUDA_VISIBLE_DEVICES is one of them; none: of all instances, or as the daemon's",
    )
    memory_bytes: int = Field(
        default=0, ge=0, description="of a card, for the runs of one worker (onnxruntime-cuda, mps); 0 is no limit"
    )


class Clock(_Part):
    """How far the wall clock is believed."""

    assume_synced: bool = Field(default=False, description="take the clock for synchronised; shown in status")


class Identity(_Part):
    """Where the certificate is used that `appliance enroll` brought."""

    http: bool = Field(
        default=False, description="serve over TLS with it, and take clients of the same authority (client_roles)"
    )
    mqtt: bool = Field(default=False, description="speak TLS with the broker, which must be of the same authority")
    upstream: bool = Field(default=False, description="show it to upstream, which must be of the same authority")
    check_s: float = Field(
        default=6 * 3600.0, ge=1, le=7 * 86400, description="how often the list of revoked certificates is fetched"
    )


class Update(_Part):
    """Where new versions of bundles come from, and what they must show; no url means no updates."""

    url: str = Field(default="", description="address of the repository that `provision publish` made")
    root: Path | None = Field(
        default=None, description="its root.json, the one thing that this device trusts by itself"
    )
    channel: Literal["dev", "canary", "stable"] = Field(default="stable", description="which versions this device runs")
    pins: Mapping[str, str] = Field(default={}, description="bundle -> the version it runs, whatever its channel holds")
    window: str = Field(
        default="",
        pattern=_WINDOW,
        description="UTC, like 22:00-04:30: new versions are tried and serve only then; downloads need no window",
    )
    check_s: float = Field(default=3600.0, ge=1, le=7 * 86400, description="how often the repository is asked")
    limit_bytes_per_s: float = Field(default=0.0, ge=0, description="for downloads; 0 is no limit")
    reserve_bytes: int = Field(default=256 * 2**20, ge=0, description="of free disk that updates leave alone")
    latency_ratio: float = Field(
        default=1.5, ge=1, le=100, description="on the same inputs a new version may be so much slower (P95)"
    )
    shadow_requests: int = Field(default=20, ge=0, le=10_000, description="live requests that both versions answer")
    shadow_s: float = Field(default=60.0, ge=0, le=86400, description="they are waited for no longer than this")
    shadow_agreement: float = Field(default=0.5, ge=0, le=1, description="share of their answers that must agree")
    trial_s: float = Field(default=600.0, ge=0, le=7 * 86400, description="a new version is watched for so long")
    trial_errors: float = Field(default=0.02, ge=0, le=1, description="share of its requests that may fail meanwhile")
    trial_ratio: float = Field(
        default=2.0, ge=1, le=100, description="live requests may be so much slower than before (P95)"
    )


class Upstream(_Part):
    """The server that a device reports to, and whose wishes it follows; no url means none."""

    url: str = Field(default="", pattern=r"^(https?://[^\s@]+)?$", description="address, without /v1/sync")
    token_file: Path | None = Field(default=None, description="file with this device's token; read at each exchange")
    ca: Path | None = Field(default=None, description="PEM file of who signed the server's certificate")
    certificate: Path | None = Field(default=None, description="PEM file of our own, in place of a token")
    key: Path | None = Field(default=None, description="PEM file, when the key is not in certificate")
    interval_s: float = Field(
        default=60.0, gt=0, le=86400, description="between two exchanges; what is urgent does not wait for the next"
    )
    longest_retry_s: float = Field(default=300.0, gt=0, le=86400, description="longest wait between two tries")
    day_bytes: int = Field(default=0, ge=0, description="most that is exchanged in any 24 hours; 0 is no limit")
    window: str = Field(
        default="",
        pattern=_WINDOW,
        description="UTC, like 22:00-04:30: telemetry and samples are sent only then; what is urgent needs no window",
    )
    telemetry_s: float = Field(default=300.0, ge=0, le=86400, description="between two telemetry items; 0 is none")
    spool_bytes: int = Field(
        default=16 * 2**20, ge=2**16, le=2**30, description="what may wait for the server, in memory and on disk"
    )
    spool_age_s: float = Field(default=7 * 86400.0, gt=0, le=10 * 365 * 86400, description="older telemetry is dropped")
    labels: Mapping[str, str] = Field(default={}, description="what the fleet may choose this device by")


class Fleet(_Part):
    """The server role: `appliance run --role upstream`; it needs the extra `upstream`."""

    database: SecretStr = Field(
        default=SecretStr(""),
        description="like postgresql+psycopg://user@host/name, for replicas; empty: SQLite, upstream.db in state_dir",
    )
    exchange_s: float = Field(default=30.0, gt=0, le=86400, description="devices are told to report no more often")
    exchanges_per_s: float = Field(
        default=100.0, gt=0, le=1e6, description="with more devices than that takes they are told to report less often"
    )
    online_s: float = Field(default=180.0, gt=0, le=86400, description="a device that was heard since counts as online")
    telemetry_days: float = Field(default=30.0, gt=0, le=3660, description="older telemetry is deleted")
    telemetry_rows: int = Field(default=5_000_000, gt=0, description="most rows of it")
    sample_days: float = Field(default=90.0, gt=0, le=3660, description="older second opinions are deleted")
    sample_rows: int = Field(default=200_000, gt=0, description="most of them; pictures go when their device says so")
    history_days: float = Field(
        default=730.0, gt=0, le=36600, description="older deployments, alarms and answers to orders are deleted"
    )
    history_rows: int = Field(default=1_000_000, gt=0, description="most rows of each of these three")
    device_rows: int = Field(default=50_000, gt=0, description="most rows of each kind that one device may have")
    device_lives: int = Field(
        default=100, gt=0, description="a device may be flashed anew so often until reports of the first count anew"
    )
    audit_days: float = Field(default=3660.0, gt=0, le=36600, description="older entries of the audit log are deleted")
    audit_rows: int = Field(
        default=1_000_000, gt=0, description="most entries that devices make by themselves; those of people stay"
    )
    device_entries: int = Field(default=1000, gt=0, description="most of these of one device")


class SecondOpinion(_Part):
    """Doubtful pictures that a larger model upstream reads again; off until models are named."""

    models: frozenset[str] = Field(default=frozenset(), description="bundles whose doubtful pictures may leave")
    confidence: float = Field(default=0.8, ge=0, le=1, description="what was found with less is doubtful")
    pictures: Literal["crops", "whole"] = Field(
        default="crops", description="what leaves: only what surrounds the doubtful places, or whole pictures"
    )
    blur: bool = Field(default=False, description="make all but the doubtful places in it unrecognisable")
    keep_s: float = Field(
        default=86400.0, gt=0, le=365 * 86400, description="neither here nor upstream is a picture kept for longer"
    )
    per_hour: int = Field(default=60, gt=0, le=100_000, description="most samples an hour")
    wait_s: float = Field(default=10.0, gt=0, le=600, description="requests with escalate=wait wait no longer")


class Opinions(_Part):
    """The server role: who reads doubtful pictures of devices again; no url means nobody."""

    url: str = Field(
        default="",
        pattern=r"^(https?://[^\s@]+)?$",
        description="server of the Open Inference Protocol v2: this daemon, Triton, KServe; without /v2",
    )
    models: Mapping[str, str] = Field(
        default={}, description="bundle of a device -> the model that reads for it; the same name when left out"
    )
    token_file: Path | None = Field(default=None, description="file with a token for that server")
    ca: Path | None = Field(default=None, description="PEM file of who signed its certificate")


class Engines(_Part):
    """Engines for the runtimes that run compiled plans, made on the device itself."""

    target: Literal["", "orin-nano", "orin-nx", "agx-orin", "a100", "rtx"] = Field(
        default="", description="what this device is; empty: engines are only used, never made"
    )
    memory_limit_bytes: int = Field(default=2 * 2**30, gt=0, description="a build that holds more is stopped")
    time_limit_s: float = Field(default=1800.0, ge=1, description="a graph whose build takes longer is given up")


class Log(_Part):
    """What is told of requests."""

    requests_per_s: int = Field(
        default=20, ge=0, le=10_000, description="lines on answered requests, and as many on failed ones; 0 is none"
    )


class Traces(_Part):
    """Where traces of requests go; no endpoint means nowhere."""

    endpoint: str = Field(
        default="", pattern=r"^(https?://\S+)?$", description="OTLP over HTTP, like http://collector:4318/v1/traces"
    )


class Faults(_Part):
    """Fault injection, for drills."""

    enabled: bool = Field(default=False, description="let administrators break this daemon on purpose")


class Settings(BaseSettings):
    """Everything the daemon is told, made once at start."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", frozen=True, extra="forbid", validate_default=True
    )

    profile: str = Field(
        default="", description="defaults for a kind of machine (see docs/server.md); none: as the machine is"
    )
    bundles: tuple[Path, ...] = Field(default=(), description="bundle folders to serve")
    onnx: Mapping[str, Path] = Field(default={}, description="bare ONNX files to serve by name, unverified")
    precision: Literal["auto", "fp32", "int8"] = Field(
        default="auto", description="auto: the fastest that passed the gate; fp32 or int8: that one where it passed"
    )
    runtime: RuntimeName = Field(default="onnxruntime-cpu", description="what runs the graphs")
    state_dir: Path = Field(default_factory=default_state_dir, description="everything the daemon keeps")
    device_id: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",  # it stands in MQTT topics
        description="name in the fleet; made and kept in state_dir when empty",
    )
    role: Literal["device", "upstream"] = Field(
        default="device", description="upstream: the fleet's home, as well as all that a device is"
    )
    shutdown_grace_s: float = Field(
        default=20.0, gt=0, le=3600, description="running work may take this long at the end"
    )
    reboot_command: tuple[str, ...] = Field(
        default=("systemctl", "reboot"), min_length=1, description="run by the order `reboot`"
    )
    http: Http = Http()
    mqtt: Mqtt = Mqtt()
    limits: Limits = Limits()
    memory: Memory = Memory()
    gpu: Gpu = Gpu()
    clock: Clock = Clock()
    identity: Identity = Identity()
    update: Update = Update()
    upstream: Upstream = Upstream()
    second_opinion: SecondOpinion = SecondOpinion()
    opinions: Opinions = Opinions()
    fleet: Fleet = Fleet()
    engines: Engines = Engines()
    log: Log = Log()
    traces: Traces = Traces()
    faults: Faults = Faults()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags and the files come in through `init_settings`, merged by `load`."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)

    @property
    def of_a_model(self) -> ModelLimits:
        """The bounds of each model."""
        return ModelLimits(**self.limits.model_dump(), body_bytes=self.http.body_limit_bytes)

    @property
    def identity_files(self) -> IdentityFiles:
        """Where `appliance enroll` keeps what it brought."""
        return IdentityFiles(self.state_dir / "identity")


def load(*, profile: str = "", config: Path | None, flags: Mapping[str, Any]) -> Settings:
    """Merge all sources; raises ConfigError naming the key, and the nearest known one for a typing error.

    Without `profile` it is the one that variables or file name, or else the one that suits this machine.
    """
    if config is not None and not config.is_file():
        msg = f"the configuration file {config} does not exist"
        raise ConfigError(msg)
    if config is None and SYSTEM_CONFIG.is_file():
        config = SYSTEM_CONFIG
    _refuse_unknown_variables()
    merged = _file(config) if config else {}
    merged = _merge(merged, _read("the environment", partial(EnvSettingsSource, Settings)))
    merged["profile"] = profile or merged.get("profile") or hardware.suited()[0]
    try:
        settings = Settings(**_merge(_merge(_profile(merged["profile"]), merged), flags))
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error
    settings = _with_identity(settings)
    _refuse_open_door(settings.http)
    if "@" in settings.update.url.partition("//")[2].partition("/")[0]:
        raise ConfigError(
            "update.url has a user or a password in it, which updates do not send and everybody sees: leave them out"
        )
    if settings.update.url and settings.update.root is None:
        raise ConfigError(
            "update.url is set and nothing says whom to trust: set update.root to the repository's root.json"
        )
    _refuse_open_upstream(settings)
    return settings


def _with_identity(settings: Settings) -> Settings:
    """The files of the device's identity, where it is to be used and no others are named."""
    files = settings.identity_files
    changes: dict[str, BaseModel] = {}
    if settings.identity.http:
        if not files.certificate.is_file():
            raise ConfigError(
                "identity.http is set and this device has no certificate: get one with `appliance enroll`"
            )
        http = settings.http
        own = http.tls_certificate is None
        changes["http"] = http.model_copy(
            update={
                "tls_certificate": files.certificate if own else http.tls_certificate,
                "client_ca": http.client_ca or files.authority,
                "client_crl": http.client_crl or (files.revoked if http.client_ca is None else None),
            }
        )
    if settings.identity.mqtt:
        mqtt = settings.mqtt
        update = {"tls": True, "ca": mqtt.ca or files.authority, "certificate": mqtt.certificate or files.certificate}
        changes["mqtt"] = mqtt.model_copy(update=update)
    if settings.identity.upstream:
        told = settings.upstream
        update = {"ca": told.ca or files.authority, "certificate": told.certificate or files.certificate}
        changes["upstream"] = told.model_copy(update=update)
    return settings.model_copy(update=changes)


CONFIGURABLE = ("mqtt.telemetry_s", "update.channel", "update.check_s", "update.pins", "update.window")
"""What the order `configure` may change: where a daemon takes it up at once, and nobody can be locked out by it."""


def configured(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """`settings` with `changes` by their full names; raises BadInput for others than the configurable, and values."""
    merged = settings.model_dump()
    for key, value in changes.items():
        if key not in CONFIGURABLE:
            msg = f"{key[:100]} cannot be changed by order{_nearest(key, CONFIGURABLE)} ({', '.join(CONFIGURABLE)} can)"
            raise BadInput(msg)
        part, name = key.split(".")
        merged[part][name] = value
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise BadInput(_explain(error)) from error


def _refuse_open_door(http: Http) -> None:
    if not http.on_loopback and http.tls_certificate is None:
        msg = (
            f"http.host is {http.host!r}, which others can reach, and there is no TLS: set http.tls_certificate "
            "(and http.tls_key) to PEM files, or listen on loopback, 127.0.0.1"
        )
        raise ConfigError(msg)
    if http.client_ca is not None and http.tls_certificate is None:
        raise ConfigError("http.client_ca is set, but client certificates come over TLS only: set http.tls_certificate")
    if http.client_crl is not None and http.client_ca is None:
        raise ConfigError("http.client_crl is set and nobody's certificates are taken: set http.client_ca too")


def _refuse_open_upstream(settings: Settings) -> None:
    told = settings.upstream
    scheme, _, rest = told.url.partition("://")
    local = rest.startswith("[::1]") or rest.partition("/")[0].partition(":")[0] in LOOPBACK
    if scheme == "http" and not local:
        raise ConfigError(
            "upstream.url is plain HTTP beyond this machine, by which everybody on the way reads and changes what is "
            "said: use https"
        )
    if settings.second_opinion.models and not told.url:
        raise ConfigError("second_opinion.models is set, and there is nobody to ask: set upstream.url")


def _profile(name: object) -> dict[str, Any]:
    known = {path.stem: path for path in PROFILES.glob("*.toml")}
    if name not in known:
        msg = f"there is no profile {name!r}; known: {', '.join(sorted(known))}"
        raise ConfigError(msg)
    return _file(known[str(name)])


def _file(path: Path) -> dict[str, Any]:
    return _read(str(path), partial(TomlConfigSettingsSource, Settings, path))


def _read(what: str, source: Callable[[], PydanticBaseSettingsSource]) -> dict[str, Any]:
    try:
        return source()()
    except (OSError, ValueError, RecursionError) as error:
        msg = f"{what} cannot be read: {error}"
        raise ConfigError(msg) from error


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        both_tables = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both_tables else value
    return merged


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += _keys(field.annotation, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}")
    return found


def _refuse_unknown_variables() -> None:
    known = {f"{ENV_PREFIX}{key.replace('.', '__')}".upper() for key in _keys(Settings)}
    known |= {f"{ENV_PREFIX}{name}".upper() for name in Settings.model_fields}
    for variable in os.environ:
        if variable.startswith(ENV_PREFIX) and variable not in known | CLIENT_VARIABLES:
            msg = f"the environment sets {variable}, which is no setting{_nearest(variable, known)}"
            raise ConfigError(msg)


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{key} is no setting{_nearest(key, [*_keys(Settings), *Settings.model_fields])}"
    return f"{key}: {first['msg']}"


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
