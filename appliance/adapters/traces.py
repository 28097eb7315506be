"""Spans of requests for an OpenTelemetry collector: the extra `traces`, imported only where an endpoint is set.

Nothing is measured for it: a request's times are known at its end, and its spans are made of them then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance import __version__
from models.errors import ConfigError

if TYPE_CHECKING:
    from appliance.recorder import Flight

_PARTS = {"queue": "queue", "decode": "preprocess", "inference": "inference", "processing": "postprocess"}
"""Part of an answer's timing -> name of its span. `processing` is all that a task does around its graphs, which it
may do before them, too."""
_NS = 1e9


class Exporter:
    """Has the spans of requests sent to a collector, in a thread and a while later."""

    def __init__(self, endpoint: str, device_id: str) -> None:
        """Send to `endpoint` in the name of `device_id`. Raises ConfigError where OpenTelemetry is not installed."""
        try:
            from opentelemetry import trace  # noqa: PLC0415 - an extra
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator  # noqa: PLC0415
        except ImportError as error:
            msg = f"traces.endpoint is set, and OpenTelemetry is not there ({error}): install edge-appliance[traces]"
            raise ConfigError(msg) from error

        class Ids(RandomIdGenerator):
            """Gives the first span of a request the id that its caller was told."""

            told = 0

            def generate_span_id(self) -> int:
                span_id, self.told = self.told or super().generate_span_id(), 0
                return span_id

        self._ids, self._trace = Ids(), trace
        resource = Resource.create(
            {"service.name": "edge-appliance", "service.version": __version__, "service.instance.id": device_id}
        )
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("appliance")

    def __call__(self, flight: Flight) -> None:
        """Make the spans of one request that its caller traces."""
        trace, context = self._trace, flight.trace
        if context is None:
            return
        parent = trace.SpanContext(
            int(context.trace_id, 16),
            int(context.parent_id, 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        end_ns = int(flight.at * _NS)
        at_ns = end_ns - int(flight.seconds * _NS)
        self._ids.told = int(context.span_id, 16)
        whole = self._tracer.start_span(
            "request",
            trace.set_span_in_context(trace.NonRecordingSpan(parent)),
            kind=trace.SpanKind.SERVER,
            start_time=at_ns,
            attributes={"model_id": flight.model_id, "version": flight.version, "request_id": flight.request_id},
        )
        inside = trace.set_span_in_context(whole)
        for part, name in _PARTS.items():
            if part in flight.timing_ms:
                span = self._tracer.start_span(name, inside, start_time=at_ns)
                at_ns += int(flight.timing_ms[part] * 1e6)
                span.end(at_ns)
        if flight.error:
            whole.set_status(trace.Status(trace.StatusCode.ERROR, f"{flight.error}: {flight.reason}"))
        whole.end(end_ns)

    def close(self) -> None:
        """Send what waits; blocks for some seconds where nobody answers."""
        self._provider.shutdown()
