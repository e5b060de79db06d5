"""Providers for each test of an integration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.otel import Telemetry


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    from support.otel import Telemetry

    made = Telemetry()
    yield made
    made.meter_provider.shutdown()
    made.tracer_provider.shutdown()
