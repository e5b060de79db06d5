"""Errors as users derive them, in a module that worker processes can import too."""

from __future__ import annotations

from typing import Any

from resilience_pipeline import (
    BrokenCircuitError,
    ExecutionRejectedError,
    MisuseError,
    OptionsError,
    TimeoutRejectedError,
)


class MyBrokenCircuitError(BrokenCircuitError):
    """Adds nothing."""


class HostError(ExecutionRejectedError):
    """Has required arguments, makes its own message and keeps a field of its own."""

    def __init__(self, host: str, port: int, **fields: Any) -> None:
        super().__init__(f"{host}:{port} refuses", **fields)
        self.host = host
        self.port = port


class SlowHostError(TimeoutRejectedError):
    """The same, of the error that is also a builtin one."""

    def __init__(self, host: str, *, timeout: float) -> None:
        super().__init__(f"{host} is slow", timeout=timeout)
        self.host = host


class MyMisuseError(MisuseError):
    def __init__(self, place: str, line: int) -> None:
        super().__init__(place, line)
        self.line = line


class MyOptionsError(OptionsError):
    def __init__(self, option: str) -> None:
        super().__init__(f"bad {option}", (option,))
        self.option = option


def raise_it(error: BaseException) -> None:
    raise error
