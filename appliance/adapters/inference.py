"""A request for inference between the door and the service: what its headers and body ask, and how it is answered."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from appliance.adapters import oip
from appliance.adapters.answers import LONGEST_ID, REQUEST_ID, Parts, request_id
from appliance.core import trace
from appliance.core.schedule import DEFAULT_PRIORITY
from appliance.core.trace import Trace
from appliance.service import InferRequest, InferResponse, Origin

INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
OFF_LOOP_BYTES = 64 * 1024
"""JSON larger than this is read and written in a thread, not on the event loop."""
_HEADER = oip.HEADER.encode()
_NOT_IN_HEADERS = re.compile(r"[\x00-\x20\x7f]+")


def header_length_in(known: Mapping[bytes, bytes]) -> str | None:
    """What the headers say of the JSON before binary tensors."""
    return known.get(_HEADER, b"").decode("latin-1") or None


def wanted_by(parsed: oip.Request, known: Mapping[bytes, bytes], model: str, version: str | None) -> InferRequest:
    """What a request asks of the service."""
    return InferRequest(
        model=model,
        version=version,
        tensors=parsed.tensors,
        outputs=parsed.outputs,
        deadline_ms=parsed.timeout_us / 1e3 if parsed.timeout_us else None,
        priority=parsed.priority or DEFAULT_PRIORITY,
        id=request_id(known) or (parsed.id or "")[:LONGEST_ID],
        trace=trace_in(known),
    )


def json_bytes_of(parsed: oip.Request, response: InferResponse) -> int:
    """How much of an answer is to be written as JSON, in the bytes of its tensors."""
    size_bytes = 0
    for one in response.tensors:
        if not parsed.wants_binary(one.name):
            size_bytes += one.size_bytes
    return size_bytes


def answer_of(
    parsed: oip.Request, known: Mapping[bytes, bytes], wanted: InferRequest, response: InferResponse
) -> Parts:
    """The answer to whoever sent `parsed` with the headers `known`; raises what `oip.render` does."""
    document, origin_headers = _said_of(response.origin)
    parts, json_length = oip.render(parsed, document, response.tensors)
    headers = [*origin_headers, *echoed(wanted, known)]
    if json_length is None:
        return Parts(parts, [*headers, (b"content-type", b"application/json")])
    return Parts(parts, [*headers, (_HEADER, b"%d" % json_length), (b"content-type", b"application/octet-stream")])


def trace_in(known: Mapping[bytes, bytes]) -> Trace | None:
    """Where a request stands in its caller's trace, if it does in any."""
    said = known.get(b"traceparent")
    return trace.read(said.decode("latin-1"), os.urandom(8).hex()) if said else None


def echoed(wanted: InferRequest, known: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Headers by which the caller knows the answer again, as far as it gave some."""
    headers = []
    if request_id(known):
        headers.append((REQUEST_ID, wanted.id.encode("latin-1")))
    if wanted.trace:
        headers.append((b"traceparent", wanted.trace.header.encode()))
    return headers


@lru_cache(maxsize=256)
def _said_of(origin: Origin) -> tuple[Mapping[str, Any], Sequence[tuple[bytes, bytes]]]:
    """What a tensor answer says of its origin, in its JSON and in its headers."""
    document = {
        "model_name": origin.model,
        "model_version": origin.version,
        "parameters": {
            "runtime": origin.runtime,
            "precision": origin.precision,
            "trust": origin.trust,
            "degraded": origin.degraded or "",
        },
    }
    headers = {
        "appliance-runtime": origin.runtime,
        "appliance-precision": origin.precision,
        "appliance-version": origin.version,
        "appliance-trust": origin.trust,
    }
    if origin.degraded:
        headers["appliance-degraded"] = origin.degraded
    said = {name: _NOT_IN_HEADERS.sub(" ", value) for name, value in headers.items()}
    return document, [(name.encode(), value.encode("latin-1", "replace")) for name, value in said.items()]
