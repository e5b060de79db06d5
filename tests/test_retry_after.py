"""Reading HTTP statuses and `Retry-After` off anybody's errors, and what a retry makes of it."""

from __future__ import annotations

import calendar
import io
import math
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from http import HTTPStatus
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_pipeline import (
    BrokenCircuitError,
    RateLimiterRejectedError,
    ResiliencePipelineBuilder,
    RetryEvent,
    TimeoutRejectedError,
    TokenBucket,
    handle_result,
)
from resilience_pipeline._predicates import (
    demanded_wait,
    http_status,
    is_permanent,
    parse_retry_after,
)
from resilience_pipeline.testing import VirtualClock
from support.scripted import Closable, Scripted, raised_by

B = ResiliencePipelineBuilder

SEVEN = float(calendar.timegm((2026, 10, 21, 7, 0, 0)))
"""The wall clock of these tests: 21 October 2026, 07:00:00 UTC, a Wednesday."""


@pytest.fixture
def seven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the wall clock at seven."""
    monkeypatch.setattr(time, "time", lambda: SEVEN)


# ---- errors in the shape of the usual clients ---------------------------------------------------

Headers = Mapping[str, str]


def httpx_error(status: int, headers: Headers) -> Exception:
    request = httpx.Request("GET", "https://example.org")
    response = httpx.Response(status, headers=headers, request=request)
    return httpx.HTTPStatusError("no", request=request, response=response)


def openai_error(status: int, headers: Headers) -> Exception:
    request = httpx.Request("POST", "https://example.org")
    # `Any`: which httpx these errors are typed with depends on the openai that is installed.
    response: Any = httpx.Response(status, headers=headers, request=request)
    return openai.APIStatusError("no", response=response, body=None)


def urllib_error(status: int, headers: Headers) -> Exception:
    message = Message()
    for name, value in headers.items():
        message[name] = value
    return urllib.error.HTTPError("https://example.org", status, "no", message, io.BytesIO())


class _CaseInsensitive(Mapping[str, str]):
    """As requests and aiohttp have it: a mapping that is no dict."""

    def __init__(self, headers: Headers) -> None:
        self._headers = headers

    def __getitem__(self, name: str) -> str:
        return next(value for key, value in self._headers.items() if key.lower() == name.lower())

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)


class _Response:
    def __init__(self, status_code: int, headers: Headers) -> None:
        self.status_code = status_code
        self.headers = _CaseInsensitive(headers)


class _RequestsError(OSError):
    """requests.HTTPError: everything is on the response."""

    def __init__(self, status: int, headers: Headers) -> None:
        super().__init__("no")
        self.response = _Response(status, headers)
        self.request = None


class _AiohttpError(Exception):
    """aiohttp.ClientResponseError: status and headers on the error itself."""

    def __init__(self, status: int, headers: Headers) -> None:
        super().__init__(status)
        self.status = status
        self.headers = _CaseInsensitive(headers)


class _BotocoreError(Exception):
    """botocore's ClientError: a dict with the metadata of the response."""

    def __init__(self, status: int, headers: Headers) -> None:
        super().__init__("no")
        self.response = {
            "Error": {"Code": "Throttling"},
            "ResponseMetadata": {
                "HTTPStatusCode": status,
                "HTTPHeaders": {name.lower(): value for name, value in headers.items()},
            },
        }


SHAPES: dict[str, Callable[[int, Headers], Exception]] = {
    "httpx": httpx_error,
    "openai": openai_error,
    "urllib": urllib_error,
    "requests": _RequestsError,
    "aiohttp": _AiohttpError,
    "botocore": _BotocoreError,
}

each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


async def waited(error: Exception, **options: Any) -> float:
    """Give the virtual seconds that a retry waits after `error` before its second attempt succeeds."""
    clock = VirtualClock(autojump=True)
    options = {"max_retry_attempts": 1, "delay": 1, "max_retry_after": math.inf} | options
    pipeline = B(clock=clock).add_retry(**options).build()
    assert await pipeline.execute(Scripted(error, "ok")) == "ok"
    return clock.now()


# ---- statuses -----------------------------------------------------------------------------------


@each_shape
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422, 499])
@pytest.mark.anyio
async def test_a_client_error_is_not_retried(
    shape: Callable[[int, Headers], Exception], status: int
) -> None:
    """The default predicate leaves alone what a repetition cannot mend."""
    error = shape(status, {})
    fn = Scripted(error)
    assert await raised_by(B().add_retry(delay=0).build().execute, fn) is error
    assert fn.calls == 1


@each_shape
@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 599])
@pytest.mark.anyio
async def test_a_transient_status_is_retried(
    shape: Callable[[int, Headers], Exception], status: int
) -> None:
    """408, 429 and the 5xx are handled by default."""
    fn = Scripted(shape(status, {}))
    await raised_by(B().add_retry(delay=0).build().execute, fn)
    assert fn.calls == 4


@each_shape
def test_the_status_is_read_off_every_client(shape: Callable[[int, Headers], Exception]) -> None:
    """Whichever client raised it, the status is found without importing it."""
    assert http_status(shape(418, {})) == 418


class _AttributesError(Exception):
    """An error with attributes of any name."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__("no")
        vars(self).update(attributes)


class _Plain:
    """An object with attributes of any name."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@pytest.mark.parametrize(
    ("attributes", "status"),
    [
        ({"status": 404}, 404),
        ({"status_code": 404}, 404),
        ({"code": 404}, 404),
        ({"status": HTTPStatus.NOT_FOUND}, 404),
        ({"response": _Plain(status=404)}, 404),
        ({"response": _Plain(status_code=404)}, 404),
        ({"response": {"ResponseMetadata": {"HTTPStatusCode": 404}}}, 404),
        ({"status": 100}, 100),
        ({"status": 599}, 599),
        ({"status": 99}, None),
        ({"status": 600}, None),
        ({"status": True}, None),
        ({"status": "404"}, None),
        ({"status": 404.0}, None),
        ({"status": "closed", "code": 404}, 404),
        ({"code": "invalid_request", "status_code": 404}, 404),
        ({"code": "rate_limited"}, None),
        ({"code": 7, "response": _Plain(status=503)}, 503),
        ({"response": None}, None),
        ({"response": {}}, None),
        ({"response": {"ResponseMetadata": None}}, None),
        ({"response": "404"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_where_a_status_is_looked_for(attributes: dict[str, Any], status: int | None) -> None:
    """`status`, `status_code`, `code`, then the response; an int from 100 to 599 or nothing."""
    assert http_status(_AttributesError(**attributes)) == status


class _HostileError(Exception):
    """An error whose attributes raise when they are read."""

    @property
    def status(self) -> int:
        raise RuntimeError("no status before the response is read")

    @property
    def response(self) -> object:
        raise RuntimeError("no response")

    @property
    def headers(self) -> object:
        raise RuntimeError("no headers")


@pytest.mark.anyio
async def test_an_error_whose_attributes_raise_is_an_ordinary_failure() -> None:
    """Reading somebody else's properties never fails the call."""
    error = _HostileError("down")
    assert http_status(error) is None
    assert demanded_wait(error) is None
    assert await waited(error) == 1.0


class _GrpcCode:
    def __init__(self, name: str) -> None:
        self.name = name


class _GrpcError(Exception):
    """grpc's RpcError: `code()` is a method that gives an enum member."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._name = name

    def code(self) -> _GrpcCode:
        return _GrpcCode(self._name)


@pytest.mark.parametrize(
    ("name", "permanent"),
    [
        ("UNAVAILABLE", False),
        ("RESOURCE_EXHAUSTED", False),
        ("DEADLINE_EXCEEDED", False),
        ("ABORTED", False),
        ("INTERNAL", False),
        ("UNKNOWN", False),
        ("DATA_LOSS", False),
        ("INVALID_ARGUMENT", True),
        ("NOT_FOUND", True),
        ("ALREADY_EXISTS", True),
        ("PERMISSION_DENIED", True),
        ("UNAUTHENTICATED", True),
        ("FAILED_PRECONDITION", True),
        ("OUT_OF_RANGE", True),
        ("UNIMPLEMENTED", True),
        ("CANCELLED", True),
    ],
)
def test_grpc_codes(name: str, permanent: bool) -> None:
    """Grpc's transient codes are handled by default, those that blame the call are not."""
    assert is_permanent(_GrpcError(name)) is permanent


def test_a_code_method_of_another_library_means_nothing() -> None:
    """A `code()` that raises, or wants arguments, leaves the error an ordinary one."""

    class BrokenError(Exception):
        def code(self, required: int) -> int:
            return required

    assert is_permanent(BrokenError()) is False


# ---- the grammar --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        ("007", 7.0),
        (" 120\t", 120.0),
        ("86400", 86_400.0),
        ("9" * 400, math.inf),
        ("0" * 400, 0.0),
        ("0" * 400 + "5", 5.0),
        ("Wed, 21 Oct 2026 07:02:00 GMT", 120.0),
        ("Wednesday, 21-Oct-26 07:02:00 GMT", 120.0),
        ("Wed Oct 21 07:02:00 2026", 120.0),
        ("Sun Nov  1 07:00:00 2026", 11 * 86_400.0),
        ("Wed, 21 Oct 2026 07:00:00 GMT", 0.0),
        ("Wed, 21 Oct 2026 06:59:59 GMT", 0.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 0.0),
        ("Sun Nov  6 08:49:37 1994", 0.0),
        ("Wed, 21 Oct 2026 07:00:60 GMT", 60.0),  # a leap second is in the grammar
        ("Thu, 29 Feb 2024 00:00:00 GMT", 0.0),
    ],
)
def test_headers_that_are_in_the_grammar(header: str, seconds: float) -> None:
    """Whole seconds or one of the three date forms; a date in the past is 0."""
    assert parse_retry_after(header, wall_time=SEVEN) == seconds


BAD_HEADERS = [
    "",
    " ",
    "soon",
    "-1",
    "+1",
    "1.5",
    "1e3",
    "inf",
    "nan",
    "0x10",
    "1_000",
    "1,000",
    "١٢٠",
    "120 s",
    "120s",
    "5, 5",
    "120\n",
    "\u00a0120",
    "2026-10-21T07:02:00Z",
    "Wed, 21 Oct 2026 07:02:00",
    "Wed, 21 Oct 2026 07:02:00 UTC",
    "Wed, 21 Oct 2026 07:02:00 +0000",
    "Wed, 21 Oct 26 07:02:00 GMT",
    "Wed, 1 Oct 2026 07:02:00 GMT",
    "wed, 21 oct 2026 07:02:00 gmt",
    "Wed, 21 Okt 2026 07:02:00 GMT",
    "Wed, 31 Nov 2026 07:02:00 GMT",
    "Mon, 29 Feb 2027 07:02:00 GMT",
    "Wed, 00 Oct 2026 07:02:00 GMT",
    "Wed, 21 Oct 2026 24:00:00 GMT",
    "Wed, 21 Oct 2026 07:60:00 GMT",
    "Wed, 21 Oct 2026 07:02:61 GMT",
    "Wed, 21 Oct 0000 07:02:00 GMT",
    "Wed, 21 Oct 2026 7:02:00 GMT",
    "Wed, 21-Oct-26 07:02:00 GMT",
    "Wednesday, 21 Oct 2026 07:02:00 GMT",
    "Wed Oct 21 07:02:00 2026 GMT",
    "Wed Oct 1 07:02:00 2026",
]


@pytest.mark.parametrize("header", BAD_HEADERS)
def test_headers_that_are_not_in_the_grammar(header: str) -> None:
    """What is neither is no demand; a lenient reader would wait for what nobody asked for."""
    assert parse_retry_after(header, wall_time=SEVEN) is None


@pytest.mark.parametrize(
    ("now", "digits", "year"),
    [
        ((2026, 10, 21), "26", 2026),
        ((2026, 10, 21), "75", 2075),
        ((2026, 10, 21), "77", 1977),
        ((2026, 10, 21), "99", 1999),
        ((2099, 12, 31), "00", 2100),
        ((2099, 12, 31), "99", 2099),
        ((2080, 1, 1), "79", 2079),
    ],
)
def test_two_digits_of_a_year(now: tuple[int, int, int], digits: str, year: int) -> None:
    """RFC 9110, 5.6.7: what would be more than fifty years ahead is in the past."""
    wall_time = float(calendar.timegm((*now, 0, 0, 0)))
    header = f"Friday, 01-Jan-{digits} 00:00:00 GMT"
    moment = calendar.timegm((year, 1, 1, 0, 0, 0))
    assert parse_retry_after(header, wall_time=wall_time) == max(0.0, moment - wall_time)


@given(header=st.text(max_size=40))
def test_no_header_ever_raises_or_gives_a_bad_number(header: str) -> None:
    """Whatever a server sends: nothing, or seconds that are neither negative nor NaN."""
    seconds = parse_retry_after(header, wall_time=SEVEN)
    assert seconds is None or seconds >= 0


@given(header=st.from_regex(r"(Wed|Wednesday),? [0-9]{2}[ -]Oct[ -]([0-9]{2}){1,2} 07:02:00 GMT"))
def test_no_date_ever_raises_or_gives_a_bad_number(header: str) -> None:
    """The same for what nearly is a date."""
    seconds = parse_retry_after(header, wall_time=SEVEN)
    assert seconds is None or seconds >= 0


# ---- what a retry waits -------------------------------------------------------------------------

FORMS = [
    "120",
    "Wed, 21 Oct 2026 07:02:00 GMT",
    "Wednesday, 21-Oct-26 07:02:00 GMT",
    "Wed Oct 21 07:02:00 2026",
]


@each_shape
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("seven")
@pytest.mark.anyio
async def test_case_rt_07_every_form_on_every_client_is_waited(
    shape: Callable[[int, Headers], Exception], form: str
) -> None:
    """Case RT-07: seconds and all three dates, against the wall clock, waited on the monotonic one."""
    assert await waited(shape(429, {"Retry-After": form})) == 120.0


@pytest.mark.parametrize("name", ["Retry-After", "retry-after", "RETRY-AFTER", "rEtRy-aFtEr"])
@pytest.mark.anyio
async def test_case_rt_07_the_headers_name_is_read_in_any_case(name: str) -> None:
    """Case RT-07: a plain dict with any spelling will do."""
    assert await waited(_AttributesError(status=429, headers={name: "120"})) == 120.0
    assert (
        await waited(_AttributesError(response=_Plain(status=429, headers={name: "120"}))) == 120.0
    )


@pytest.mark.parametrize("status", [408, 429, 500, 503])
@pytest.mark.anyio
async def test_any_handled_status_may_carry_it(status: int) -> None:
    """The header is not only read from 429 and 503."""
    assert await waited(httpx_error(status, {"Retry-After": "7"})) == 7.0


@pytest.mark.usefixtures("seven")
@pytest.mark.parametrize("header", BAD_HEADERS)
@pytest.mark.anyio
async def test_a_bad_header_is_ignored(header: str) -> None:
    """The computed delay is waited."""
    assert await waited(_AttributesError(status=429, headers={"Retry-After": header})) == 1.0


@pytest.mark.parametrize("value", [120, 120.0, None, b"120", ["120"]], ids=repr)
@pytest.mark.anyio
async def test_a_header_that_is_no_text_is_ignored(value: Any) -> None:
    """Headers are text; anything else under the name was not read from a response."""
    assert await waited(_AttributesError(status=429, headers={"Retry-After": value})) == 1.0


@pytest.mark.parametrize(
    "headers", [None, "Retry-After: 120", [("Retry-After", "120")], 5], ids=repr
)
@pytest.mark.anyio
async def test_headers_that_are_no_mapping_are_ignored(headers: Any) -> None:
    """`headers` may mean something else on somebody's error."""
    assert await waited(_AttributesError(status=429, headers=headers)) == 1.0


@pytest.mark.usefixtures("seven")
@pytest.mark.parametrize("form", ["0", "1", "Wed, 21 Oct 2026 06:00:00 GMT"])
@pytest.mark.anyio
async def test_a_demand_no_longer_than_the_computed_delay_changes_nothing(form: str) -> None:
    """It is waited only where it is longer; a date in the past is 0."""
    assert await waited(httpx_error(429, {"Retry-After": form}), delay=2) == 2.0


@pytest.mark.anyio
async def test_a_demand_is_waited_in_full_whatever_max_delay_says() -> None:
    """Never sooner than the server asked."""
    assert await waited(httpx_error(429, {"Retry-After": "50"}), max_delay=3) == 50.0


@pytest.mark.anyio
async def test_a_demand_is_not_jittered() -> None:
    """Jitter spreads computed delays, not what a server asked for."""
    error = httpx_error(429, {"Retry-After": "50"})
    assert await waited(error, use_jitter=True) == 50.0
    assert await waited(error, use_jitter="full") == 50.0


@pytest.mark.anyio
async def test_the_event_shows_the_demand() -> None:
    """Hook and wait see the same number."""
    delays: list[float] = []
    error = httpx_error(429, {"Retry-After": "50"})
    await waited(error, on_retry=lambda event: delays.append(event.delay))
    assert delays == [50.0]


@pytest.mark.parametrize("given", [0, 3, "90s"])
@pytest.mark.anyio
async def test_a_generated_delay_wins(given: Any) -> None:
    """`delay_generator`, when it gives a value, is not overruled, be the demand longer or shorter."""
    expected = {"90s": 90.0}.get(given, given)
    error = httpx_error(429, {"Retry-After": "50"})
    assert await waited(error, delay_generator=lambda event: given) == expected


@pytest.mark.anyio
async def test_a_generated_delay_wins_over_a_demand_beyond_the_limit() -> None:
    """The user's own answer is waited where the demand alone would have ended the call."""
    error = httpx_error(429, {"Retry-After": "3600"})
    assert await waited(error, max_retry_after=60, delay_generator=lambda event: 5) == 5.0


@pytest.mark.parametrize("given", [None, -1])
@pytest.mark.anyio
async def test_a_generator_that_declines_leaves_the_demand(given: Any) -> None:
    """Without a generated value the server is heard."""
    error = httpx_error(429, {"Retry-After": "50"})
    assert await waited(error, delay_generator=lambda event: given) == 50.0


@pytest.mark.anyio
async def test_respect_retry_after_can_be_switched_off() -> None:
    """Then neither headers nor rejections change the computed delay."""
    for error in (
        httpx_error(429, {"Retry-After": "3600"}),
        BrokenCircuitError("open", retry_after=3600),
    ):
        assert await waited(error, respect_retry_after=False, max_retry_after=60) == 1.0


@pytest.mark.anyio
async def test_each_attempt_has_its_own_demand() -> None:
    """A demand holds for the wait after its attempt only."""
    clock = VirtualClock(autojump=True)
    fn = Scripted(
        httpx_error(429, {"Retry-After": "30"}),
        ConnectionError,
        httpx_error(503, {"Retry-After": "20"}),
        "ok",
        clock=clock,
    )
    await B(clock=clock).add_retry(delay=1).build().execute(fn)
    assert fn.starts == [0.0, 30.0, 31.0, 51.0]


# ---- rejections ---------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_rejections_demand_is_waited() -> None:
    """`retry_after` of any rejection, this pipeline's own or another's."""
    assert await waited(BrokenCircuitError("elsewhere", retry_after=12.5)) == 12.5


@pytest.mark.anyio
async def test_a_rejection_without_a_demand_leaves_the_computed_delay() -> None:
    """`None` means that nobody can tell."""
    assert await waited(TimeoutRejectedError("elsewhere", timeout=3)) == 1.0


@pytest.mark.anyio
async def test_a_rate_limiters_demand_is_waited() -> None:
    """The limiter inside knows when a permit can be had; the retry waits just that long."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B(clock=clock)
        .add_retry(delay=0.01)
        .add_rate_limiter(TokenBucket(capacity=1, refill_rate=1, per="10s"))
        .build()
    )
    fn = Scripted("ok", clock=clock)
    await pipeline.execute(fn)
    await pipeline.execute(fn)
    assert fn.starts == pytest.approx([0.0, 10.0])


# ---- max_retry_after ----------------------------------------------------------------------------


@pytest.mark.usefixtures("seven")
@pytest.mark.parametrize(
    "form",
    [
        "60",
        "Wed, 21 Oct 2026 07:01:00 GMT",
        "Wednesday, 21-Oct-26 07:01:00 GMT",
        "Wed Oct 21 07:01:00 2026",
    ],
)
@pytest.mark.anyio
async def test_a_demand_of_exactly_the_limit_is_waited(form: str) -> None:
    """Small print: `max_retry_after` is inclusive."""
    assert await waited(httpx_error(429, {"Retry-After": form}), max_retry_after=60) == 60.0


@pytest.mark.anyio
async def test_a_rejections_demand_of_exactly_the_limit_is_waited() -> None:
    """The same for a rejection."""
    assert await waited(BrokenCircuitError("open", retry_after=60.0), max_retry_after=60) == 60.0


@each_shape
@pytest.mark.usefixtures("seven")
@pytest.mark.parametrize(
    ("form", "demand"),
    [
        ("61", 61.0),
        ("Wed, 21 Oct 2026 07:01:01 GMT", 61.0),
        ("Wednesday, 21-Oct-26 08:00:00 GMT", 3600.0),
        ("Wed Oct 21 08:00:00 2026", 3600.0),
        ("9" * 400, math.inf),
    ],
)
@pytest.mark.anyio
async def test_a_longer_demand_comes_out_at_once_and_can_be_read(
    shape: Callable[[int, Headers], Exception], form: str, demand: float
) -> None:
    """Beyond `max_retry_after` nothing is waited; the demand is the error's `retry_after`."""
    clock = VirtualClock(autojump=True)
    events: list[RetryEvent] = []
    error: Any = shape(429, {"Retry-After": form})
    fn = Scripted(error)
    pipeline = B(clock=clock).add_retry(on_retry=events.append).build()
    raised = await raised_by(pipeline.execute, fn)
    assert error.retry_after == demand
    assert raised is error
    assert fn.calls == 1
    assert clock.now() == 0.0
    assert events == []


@pytest.mark.anyio
async def test_a_longer_demand_of_a_rejection_comes_out_at_once() -> None:
    """The rejection already carries its `retry_after`, and keeps it."""
    clock = VirtualClock(autojump=True)
    error = RateLimiterRejectedError("elsewhere", retry_after=60.001)
    fn = Scripted(error)
    assert await raised_by(B(clock=clock).add_retry().build().execute, fn) is error
    assert error.retry_after == 60.001
    assert fn.calls == 1
    assert clock.now() == 0.0


@pytest.mark.parametrize("given", [90, "90s", "1m30s"])
@pytest.mark.anyio
async def test_the_limit_takes_any_duration_form(given: Any) -> None:
    """Both sides of a limit of 90 seconds."""
    assert await waited(httpx_error(429, {"Retry-After": "90"}), max_retry_after=given) == 90.0
    fn = Scripted(httpx_error(429, {"Retry-After": "91"}))
    await raised_by(B().add_retry(delay=0, max_retry_after=given).build().execute, fn)
    assert fn.calls == 1


@pytest.mark.anyio
async def test_a_limit_below_the_computed_delay_is_no_reason_to_give_up() -> None:
    """Only a demand longer than the computed delay is a demand at all."""
    error = httpx_error(429, {"Retry-After": "20"})
    assert await waited(error, delay=30, max_retry_after=10) == 30.0


class _ReadOnlyError(Exception):
    """An error with a `retry_after` of its own that can't be set."""

    status = 429
    headers: Headers = {"Retry-After": "3600"}  # noqa: RUF012 - a fixed answer

    @property
    def retry_after(self) -> str:
        return "mine"


@pytest.mark.anyio
async def test_an_error_that_can_not_be_written_on_comes_out_all_the_same() -> None:
    """Making the demand readable never fails the call."""
    error: Any = _ReadOnlyError("busy")
    raised = await raised_by(B().add_retry(delay=0).build().execute, Scripted(error))
    assert error.retry_after == "mine"
    assert raised is error


# ---- responses that are handled as results ------------------------------------------------------


def _response(status: int, headers: Headers) -> Any:
    return httpx.Response(status, headers=headers)


@pytest.mark.anyio
async def test_a_handled_response_is_asked_too() -> None:
    """A response that is handled as a result carries its demand like an error."""
    clock = VirtualClock(autojump=True)
    busy = handle_result(lambda response: response.status_code == 429)
    pipeline = B(clock=clock).add_retry(delay=1, should_handle=busy).build()
    fn = Scripted(_response(429, {"Retry-After": "30"}), _response(200, {}))
    response = await pipeline.execute(fn)
    assert response.status_code == 200
    assert clock.now() == 30.0


@pytest.mark.anyio
async def test_a_handled_response_with_too_long_a_demand_comes_out_open() -> None:
    """It is the outcome, so it is neither waited for nor closed."""
    clock = VirtualClock(autojump=True)
    result: Any = Closable()
    result.headers = {"Retry-After": "3600"}
    pipeline = B(clock=clock).add_retry(should_handle=handle_result(lambda value: True)).build()
    assert await pipeline.execute(Scripted(result)) is result
    assert result.closed == 0
    assert clock.now() == 0.0
