"""Providers of OpenTelemetry's SDK that hold in memory what comes to them."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from resilience_pipeline.integrations.opentelemetry import OpenTelemetryListener


class Telemetry:
    """Two providers of the SDK and what has come to them."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meter_provider = MeterProvider([self.reader])
        self.tracer = self.tracer_provider.get_tracer("user")

    @property
    def options(self) -> dict[str, Any]:
        return {"tracer_provider": self.tracer_provider, "meter_provider": self.meter_provider}

    def listener(self, **options: Any) -> OpenTelemetryListener:
        return OpenTelemetryListener(**self.options, **options)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def span(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def points(self, name: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        if data is None:
            return []
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]

    def unit(self, name: str) -> str | None:
        data = self.reader.get_metrics_data()
        assert data is not None
        (unit,) = {
            metric.unit
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
        }
        return unit


def attributes(thing: Any) -> dict[str, Any]:
    return dict(thing.attributes or {})
