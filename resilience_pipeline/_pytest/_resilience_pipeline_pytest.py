"""Fixtures for pytest, which finds them by the entry point of the package.

pytest loads this whenever it starts, in every environment the package is installed in. So it is no
part of the package, whose import it would bring about: when installed it is a module beside it (see
`sources` in pyproject.toml). The library itself is imported by the first test that uses a fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from resilience_pipeline.telemetry import TelemetryEvent
    from resilience_pipeline.testing import VirtualClock


@pytest.fixture
def virtual_clock() -> VirtualClock:
    """A `resilience_pipeline.testing.VirtualClock(autojump=True)` of the test's own, for `clock=`."""
    from resilience_pipeline.testing import VirtualClock

    return VirtualClock(autojump=True)


@pytest.fixture
def resilience_events() -> Iterator[list[TelemetryEvent]]:
    """The events of all pipelines during the test, see `resilience_pipeline.testing.capture_events`."""
    from resilience_pipeline.testing import capture_events

    with capture_events() as events:
        yield events


@pytest.fixture
def resilience_instant() -> Iterator[list[float]]:
    """Waits of all pipelines take no time; the list of them, see `resilience_pipeline.testing.instant`."""
    from resilience_pipeline.testing import instant

    with instant() as waits:
        yield waits
