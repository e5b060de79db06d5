"""What an integration says where its third party is not installed, and that nobody pays who doesn't use it."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    """Run some code in an interpreter of its own and give its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("integration", "needed", "extra"),
    [
        ("opentelemetry", "opentelemetry", "opentelemetry"),
        ("prometheus", "prometheus_client", "prometheus"),
    ],
)
def test_the_extra_is_named(integration: str, needed: str, extra: str) -> None:
    """In an ImportError that says how to install it."""
    code = f"""
import sys
sys.modules[{needed!r}] = None
try:
    import resilience_pipeline.integrations.{integration}
except ImportError as error:
    print(error)
"""
    assert run(code).endswith(f"pip install 'resilience-pipeline[{extra}]'")


def test_they_are_imported_by_their_users_alone() -> None:
    """The package, its telemetry and its testing kit bring neither."""
    code = """
import sys
import resilience_pipeline.integrations, resilience_pipeline.testing, resilience_pipeline.telemetry
resilience_pipeline.ResiliencePipelineRegistry()
print([each for each in ("opentelemetry", "prometheus_client") if each in sys.modules])
"""
    assert run(code) == "[]"
