"""How long a retry waits: the delay formulas, their jitter and their cap.

Knows no clock and no source of randomness: draws come from a function it is given. It doesn't
know why an attempt failed either; `Retry-After`, delay generators and budgets are the retry's.

Invariants, at any attempt number and any base delay: a delay is never negative and never NaN, no
arithmetic error comes out, and no delay exceeds `max_delay`, because the cap is applied last. What
is too large for a float is `math.inf`: wait for ever. At most one draw is made for each delay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

__all__ = ["Backoff", "BackoffType"]

BackoffType: TypeAlias = Literal["constant", "linear", "exponential"]

# Brings the median of the decorrelated formula down to about 2^attempt.
_MEDIAN_SCALE = 1.4

# 2.0 ** 1024 is the first power of two that no float holds.
_FIRST_TOO_LARGE = 1024


class Backoff:
    """The delays of one execution, attempt after attempt.

    Not to be shared by executions: decorrelated jitter remembers where the last delay ended.

    Args:
        delay: Base delay in seconds, 0 or more. 0 means no wait at any attempt, and no draw;
            `math.inf` means for ever.
        backoff_type: `"constant"` waits the base delay, `"linear"` its multiples 1, 2, 3, ...,
            `"exponential"` its multiples 1, 2, 4, ...
        jitter: `True` spreads constant and linear delays by a quarter either way and makes
            exponential ones decorrelated. `"full"` draws between 0 and the computed delay.
        max_delay: The longest delay in seconds, jitter included; `None` for no limit.
        random: Gives a float in [0, 1) at each call.

    Raises:
        ValueError: `backoff_type` is none of the three.
    """

    __slots__ = ("_cap", "_delay", "_growth", "_jitter", "_previous", "_random")

    def __init__(
        self,
        delay: float,
        backoff_type: BackoffType,
        jitter: bool | Literal["full"],
        max_delay: float | None,
        random: Callable[[], float],
    ) -> None:
        growth = _GROWTH.get(backoff_type)
        if growth is None:
            message = f"backoff_type must be one of {list(_GROWTH)}; got {backoff_type!r}"
            raise ValueError(message)
        self._delay = delay
        self._growth = growth
        self._jitter = jitter
        self._cap = math.inf if max_delay is None else max_delay
        self._random = random
        self._previous = 0.0

    def delay_for(self, attempt: int) -> float:
        """Compute the wait after a failed attempt.

        Args:
            attempt: Number of the attempt that failed, from 0. Numbers are asked in rising order.

        Returns:
            Seconds to wait; `math.inf` means for ever.
        """
        if self._delay == 0:
            return 0.0
        if not self._jitter:
            return min(self._growth(self._delay, attempt), self._cap)
        draw = self._random()
        if self._jitter == "full":
            bound = min(self._growth(self._delay, attempt), self._cap)
            # A draw of 0 times infinity would be NaN, and no share of "for ever" is shorter.
            return bound if bound == math.inf else draw * bound
        if self._growth is _exponential:
            return min(self._decorrelated(attempt, draw), self._cap)
        return min(self._growth(self._delay, attempt) * (0.75 + 0.5 * draw), self._cap)

    def _decorrelated(self, attempt: int, draw: float) -> float:
        """The second version of decorrelated jitter: smooth, and with no peak at the powers of two.

        Each delay is the step between two points of one rising curve, so a high draw makes this
        delay long and the next one short. The curve goes on uncapped while delays are capped.
        """
        point = _curve(attempt, draw)
        step = point - self._previous if point < math.inf else math.inf
        self._previous = point
        # An infinite base times an empty step would be NaN.
        if self._delay == math.inf:
            return math.inf
        return max(0.0, step / _MEDIAN_SCALE * self._delay)


def _curve(attempt: int, draw: float) -> float:
    # The number alone is compared first: adding a draw to a huge int would raise.
    if attempt >= _FIRST_TOO_LARGE:
        return math.inf
    time = attempt + draw
    # The sum may have been rounded up to the next whole number.
    if time >= _FIRST_TOO_LARGE:
        return math.inf
    return math.pow(2.0, time) * math.tanh(math.sqrt(4.0 * time))


def _constant(delay: float, _attempt: int) -> float:
    return delay


def _linear(delay: float, attempt: int) -> float:
    try:
        return (attempt + 1) * delay
    except OverflowError:  # the number alone is too large for a float
        return math.inf


def _exponential(delay: float, attempt: int) -> float:
    try:
        # Shifts the exponent, so that the power itself is never computed.
        return math.ldexp(delay, attempt)
    except OverflowError:
        return math.inf


_GROWTH: dict[BackoffType, Callable[[float, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "exponential": _exponential,
}
