"""Durations in all their forms, and what is refused."""

from __future__ import annotations

import math
from datetime import timedelta
from enum import IntEnum
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_pipeline._durations import seconds


class _Level(IntEnum):
    TWO = 2


class _Measured(float):
    """Stands for the floats of numerical libraries."""


class _Unprintable:
    def __repr__(self) -> NoReturn:
        raise RuntimeError("no repr today")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0.0),
        (5, 5.0),
        (0.25, 0.25),
        (math.inf, math.inf),
        (10**400, math.inf),
        (_Level.TWO, 2.0),
        (_Measured(1.5), 1.5),
        (timedelta(0), 0.0),
        (timedelta(minutes=1, milliseconds=500), 60.5),
        (timedelta.max, timedelta.max.total_seconds()),
        ("500ms", 0.5),
        ("1ms", 0.001),
        ("0s", 0.0),
        ("10s", 10.0),
        ("1.5s", 1.5),
        ("2m", 120.0),
        ("0.5m", 30.0),
        ("1h", 3600.0),
        ("1m30s", 90.0),
        ("1h2m3s4ms", 3723.004),
        ("1h500ms", 3600.5),
        ("1m500ms", 60.5),
        ("007s", 7.0),
        ("999999h", 999999 * 3600.0),
        ("9" * 400 + "s", math.inf),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_every_form_is_read_as_seconds(value: object, expected: float) -> None:
    """Numbers, timedeltas and text come out as a plain float of seconds."""
    result = seconds(value)

    assert result == expected
    assert type(result) is float


def test_zero_has_no_sign() -> None:
    """Minus zero is a zero like any other, so that no message ever says -0.0."""
    assert math.copysign(1.0, seconds(-0.0)) == 1.0


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        math.nan,
        None,
        b"1s",
        [1],
        1j,
        object(),
        "",
        " ",
        "s",
        "10",
        "1.5",
        "inf",
        "nan",
        "ten seconds",
        "10 s",
        " 10s",
        "10s ",
        "10s\n",
        "1m 30s",
        "10S",
        "500MS",
        "1H",
        "30s1m",
        "5ms1s",
        "1s1s",
        "1m1m",
        "-1s",
        "+1s",
        "1.s",
        ".5s",
        "1..5s",
        "1e3s",
        "1_000s",
        "1,5s",
        "1d",
        "1min",
        "1sec",
        "١s",
        "１s",
        "PT1S",
    ],
    ids=repr,
)
@pytest.mark.parametrize("allow_negative", [False, True])
def test_what_is_no_duration_is_refused(value: object, *, allow_negative: bool) -> None:
    """Whatever is not one of the forms raises, whether or not negatives are allowed."""
    with pytest.raises(ValueError, match=r"must be a.* duration"):
        seconds(value, allow_negative=allow_negative)


NEGATIVES: list[tuple[object, float]] = [
    (-1, -1.0),
    (-0.001, -0.001),
    (timedelta(seconds=-2), -2.0),
    (-(10**400), -math.inf),
    (-math.inf, -math.inf),
]


@pytest.mark.parametrize(("value", "expected"), NEGATIVES)
def test_negatives_are_refused_unless_allowed(value: object, expected: float) -> None:
    """A number or timedelta below zero needs the caller's permission."""
    assert seconds(value, allow_negative=True) == expected
    with pytest.raises(ValueError, match="non-negative"):
        seconds(value)


def test_refusal_shows_the_forms_and_the_value() -> None:
    """The message says what a duration may be and what was got."""
    with pytest.raises(ValueError, match="must be") as caught:
        seconds("10 s")

    message = str(caught.value)
    for part in ("int or float", "math.inf", "timedelta", "'500ms'", "'1m30s'"):
        assert part in message
    assert message.endswith("got '10 s'")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("value", "ending"),
    [
        ("x" * 1000, "..."),
        (_Unprintable(), "an object of type _Unprintable"),
        (-(10**5000), "an object of type int"),  # Python refuses to print so many digits
    ],
    ids=["long", "broken", "huge"],
)
def test_refusal_survives_any_value(value: object, ending: str) -> None:
    """A value that prints long, or not at all, is still refused with a short message."""
    with pytest.raises(ValueError, match="must be") as caught:
        seconds(value)

    assert str(caught.value).endswith(ending)
    assert len(str(caught.value)) < 300


_PART = st.none() | st.integers(0, 10**6)


@given(hours=_PART, minutes=_PART, whole=_PART, thousandths=_PART)
def test_text_means_what_its_parts_mean(
    hours: int | None, minutes: int | None, whole: int | None, thousandths: int | None
) -> None:
    """Any selection of units in falling order is read as the sum of its parts."""
    parts = [(hours, "h"), (minutes, "m"), (whole, "s"), (thousandths, "ms")]
    text = "".join(f"{number}{unit}" for number, unit in parts if number is not None)
    exact = timedelta(
        hours=hours or 0, minutes=minutes or 0, seconds=whole or 0, milliseconds=thousandths or 0
    )

    if text:
        assert seconds(text) == pytest.approx(exact.total_seconds(), rel=1e-12)
    else:
        with pytest.raises(ValueError, match="must be"):
            seconds(text)


@given(
    st.one_of(
        st.text(alphabet="0123456789.hms -e"),
        st.text(),
        st.floats(),
        st.integers(),
        st.timedeltas(),
    )
)
def test_a_duration_or_a_value_error(value: object) -> None:
    """Nothing but a non-negative float comes out, and nothing but `ValueError` is raised."""
    try:
        result = seconds(value)
    except ValueError:
        return
    assert result >= 0
