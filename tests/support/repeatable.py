"""Runs at random that repeat themselves: all lots follow from a seed, trio's order of ready tasks included.

What asyncio does follows from the test alone. Trio shuffles the tasks that are ready by lots of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest


class InOrder(Random):
    """What trio draws its order of ready tasks from: by age, the youngest or the oldest first in all of a run.

    Drawn one by one the lots would depend on whether some older run's last task is ready as well.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._youngest_first = seed % 2 == 1

    def shuffle(self, x: MutableSequence[Any]) -> None:
        """Take them in order; trio has sorted them."""
        if self._youngest_first:
            x.reverse()


@contextmanager
def repeatable(seed: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Random]:
    """Give the run's lots; trio's order of tasks follows from the seed, and garbage waits."""
    monkeypatch.setattr("trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING", True)
    monkeypatch.setattr("trio._core._run._r", InOrder(seed))
    gc.disable()
    gc.freeze()  # what was there before is not looked at again and again
    try:
        yield Random(seed)
    finally:
        gc.unfreeze()
        gc.enable()
