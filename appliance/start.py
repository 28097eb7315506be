"""`appliance run` until the daemon is there: arguments, settings, the log.

What the daemon consists of takes half a second to import. The worker of the first model starts before, and loads its
libraries meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import structlog
import uvloop

import kernels
import models
from appliance import hardware, settings
from appliance.spare import Spare
from models.errors import ApplianceError, BundleError


def main(arguments: Sequence[str]) -> int:
    """Run the daemon until SIGTERM or SIGINT; 0 after a clean stop, 1 with a reason, 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    configure_log(sys.stderr.isatty())
    try:
        _refuse_foreign_packages()
        config = settings.load(profile=options.profile, config=options.config, flags=_flags(options))
        return uvloop.run(_run(config))
    except ApplianceError as error:
        print(f"appliance run: {error}", file=sys.stderr)
        return 1


async def _run(config: settings.Settings) -> int:
    spare = Spare(config.of_a_model, config.runtime, _seats(config.gpu))
    try:
        if config.memory.spare_worker and (config.bundles or config.onnx):
            spare.keep(gentle=False)
        from appliance import daemon  # noqa: PLC0415 - this is what takes long

        return await daemon.run(config, spare)
    finally:
        spare.drop()


def _seats(gpu: settings.Gpu) -> hardware.Seats:
    seats = hardware.seats(gpu.share, gpu.parts, gpu.devices, gpu.memory_bytes, hardware.cards)
    if gpu.share == "mig" and not seats:
        why = "no MIG instance was found, so workers share the whole card: see `appliance doctor`"
        structlog.get_logger().warning("card_not_cut", why=why)
    return seats


class _StandardError:
    """Where the log goes. What cannot be written is lost: a full disk or a reader that left must stop no daemon."""

    def write(self, text: str) -> None:
        """Write at once, because what waits in a buffer would fail again at the very end."""
        data = text.encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(sys.stderr.fileno(), data) :]

    def flush(self) -> None:
        """Nothing waits."""


def _refuse_foreign_packages() -> None:
    """`models` and `kernels` are common names: another package of that name would be silently used."""
    home = Path(__file__).parent.parent
    for package in (models, kernels):
        where = Path(package.__file__ or "").parent.parent
        if where != home:
            msg = (
                f"package {package.__name__!r} comes from {where}, not from {home}: "
                "install the appliance into an environment of its own"
            )
            raise BundleError(msg)


def configure_log(terminal: bool, device_id: str = "") -> None:
    """Log lines to standard error: for people on a terminal, else JSON; with the device's name once it is known."""

    def named(_logger: object, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if "model" in line:
            line["model_id"] = line["model"]
        return {**line, "device_id": device_id} if device_id else line

    stream: Any = _StandardError()
    renderer: Any = structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    stamps: list[Any] = [
        structlog.contextvars.merge_contextvars,
        named,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*stamps, renderer],
        logger_factory=structlog.WriteLoggerFactory(stream),
    )
    # Libraries (the server, the event loop) log through the standard library: the same kind of lines.
    libraries = logging.StreamHandler(stream)
    libraries.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *stamps],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[libraries], force=True)
    logging.captureWarnings(capture=True)


def _flags(options: argparse.Namespace) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    if options.bundle:
        flags["bundles"] = tuple(options.bundle)
    if options.onnx:
        flags["onnx"] = dict(options.onnx)
    if options.http:
        flags["http"] = dict(zip(("host", "port"), options.http, strict=True))
    if options.mqtt:
        flags["mqtt"] = dict(zip(("host", "port"), options.mqtt, strict=True))
    for name in ("state_dir", "precision", "role"):
        if getattr(options, name) is not None:
            flags[name] = getattr(options, name)
    return flags


def _address(text: str) -> tuple[str, int]:
    name, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        msg = f"{text!r} is not HOST:PORT"
        raise argparse.ArgumentTypeError(msg)
    return name.strip("[]"), int(port)


def _named_file(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        msg = f"{text!r} is not NAME=FILE"
        raise argparse.ArgumentTypeError(msg)
    return name, Path(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="appliance run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Serve models over local HTTP, and over MQTT when a broker is given.",
        epilog="Example: appliance run --bundle ./ppocr-v4 --state-dir ./state\n"
        "Then, in another terminal: appliance status\n\n"
        "Every setting can also stand in the file of --config, or in the environment (APPLIANCE_HTTP__PORT=8081).\n"
        "Exit codes: 0 stopped cleanly, 1 could not run (the reason is printed), 2 wrong usage.",
    )
    add = parser.add_argument
    add("--bundle", metavar="DIR", type=Path, action="append", help="bundle folder to serve; may be repeated")
    add("--onnx", metavar="NAME=FILE", type=_named_file, action="append", help="bare ONNX file to serve, unverified")
    add("--http", metavar="HOST:PORT", type=_address, help="address to listen on (default 127.0.0.1:8080)")
    add("--mqtt", metavar="HOST:PORT", type=_address, help="MQTT 5 broker to connect to (default: none)")
    add("--role", choices=("device", "upstream"), help="upstream: the fleet's home (default in profile a100)")
    add("--precision", choices=("auto", "fp32", "int8"), help="where it passed the gate (default auto)")
    add("--state-dir", metavar="DIR", type=Path, help="where the daemon keeps its state")
    add("--config", metavar="FILE", type=Path, help=f"settings (default {settings.SYSTEM_CONFIG} when it exists)")
    add("--profile", metavar="NAME", default="", help="defaults for a kind of machine (default: as it is)")
    return parser
