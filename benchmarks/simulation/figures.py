"""What came of a run, second by second, and the figures that say it in short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen


@frozen
class Run:
    """What came of a run, second by second.

    Attributes:
        load: Calls that reached the service.
        answered: Calls that clients began then and that got an answer in the end.
        failed: Those that did not.
    """

    load: Sequence[int]
    answered: Sequence[int]
    failed: Sequence[int]

    @classmethod
    def of(
        cls,
        load: Mapping[int, int],
        answered: Mapping[int, int],
        failed: Mapping[int, int],
        length: int,
    ) -> Run:
        """Make it of what was counted by the second."""
        return cls(
            *([counted.get(at, 0) for at in range(length)] for counted in (load, answered, failed))
        )

    def share_answered(self, second: int) -> float:
        """The share of the calls begun in a second that got an answer."""
        return self.answered[second] / max(self.answered[second] + self.failed[second], 1)


@frozen
class Figures:
    """A run in short.

    Attributes:
        load: Calls a second that reached the service while it was down.
        factor: The same as a multiple of what it was before.
        peak: The most in one second that reached it afterwards.
        recovery: Seconds from the end of the outage until at least 95 % of calls were answered
            again, for good; `None` if that never was.
        failed: Calls of clients that failed, in the whole run.
    """

    load: float
    factor: float
    peak: int
    recovery: int | None
    failed: int


#: Seconds at the beginning that are left out of what load is like before the outage.
_WARM_UP = 5


def of(run: Run, down: int, up: int) -> Figures:
    """Give the figures of a run through an outage of all or some instances."""
    before = sum(run.load[_WARM_UP:down]) / (down - _WARM_UP)
    load = sum(run.load[down:up]) / (up - down)
    bad = [at for at in range(up, len(run.load)) if run.share_answered(at) < 0.95]
    recovery = max(bad, default=up - 1) + 1 - up
    return Figures(
        load=load,
        factor=load / before,
        peak=max(run.load[up:]),
        recovery=None if up + recovery >= len(run.load) else recovery,
        failed=sum(run.failed),
    )
