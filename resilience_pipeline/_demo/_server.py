"""A small server that fails on cue: real sockets, real HTTP/1.1, standard library only.

The owner scripts what happens to each request (`Refuse`, `Status`, `Stall`, `DieAfter`, `Tokens`);
the server plays one step a request, in order of arrival, and records what it did and whether the
client left early. Knows nothing of pipelines.

A connection is served by one task, which owns two more for as long as it runs: one plays the step,
one watches for the client's leaving. Whichever ends first ends the other. Nothing runs on after
`async with` (`with`, for `ThreadedFlakyServer`) has ended.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar

from ._content import Content, content_of
from ._steps import (
    DEFAULT_TOKENS,
    DieAfter,
    Ending,
    Refuse,
    RequestRecord,
    Stall,
    Status,
    Step,
    Tokens,
)
from ._wire import Answer, BadRequestError, ClientGoneError, Request, read_request

_T = TypeVar("_T")

USUAL = Tokens()


async def _watch(reader: asyncio.StreamReader) -> None:
    """Return when the client has closed its side; what it still sends is dropped."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(4096):
            pass


async def _sleep(seconds: float) -> None:
    """Sleep, for ever at infinity; 0 doesn't even give up the turn."""
    if math.isinf(seconds):
        await asyncio.get_running_loop().create_future()
    elif seconds > 0:
        await asyncio.sleep(seconds)


class FlakyServer:
    """The server, in the running asyncio loop: `async with FlakyServer(...) as server: server.url`.

    Args:
        *steps: The first script, see `script`.
        default: What a request gets when the script is used up.
        tokens: What is sent where a step brings no tokens of its own.

    Attributes:
        default: As given; may be changed at any time.
    """

    def __init__(
        self, *steps: Step, default: Step = USUAL, tokens: Sequence[str] = DEFAULT_TOKENS
    ) -> None:
        self.default: Step = default
        self._tokens = tuple(tokens)
        self._script = deque(steps)
        self._records: list[RequestRecord] = []
        self._server: asyncio.Server | None = None
        self._port = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._waiters: list[asyncio.Future[None]] = []
        self._stopping = False

    @property
    def url(self) -> str:
        """Scheme, host and port, no slash at the end; for OpenAI's clients add `/v1`."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        """Every request so far, in order of arrival; the records of running ones still change."""
        return tuple(self._records)

    @property
    def remaining(self) -> tuple[Step, ...]:
        """The steps not yet played."""
        return tuple(self._script)

    def script(self, *steps: Step) -> None:
        """Say what happens to the next requests, one step each; replaces what is left."""
        self._script = deque(steps)

    async def wait_requests(self, count: int, *, timeout: float = 30.0) -> None:
        """Wait until so many requests have arrived since the start.

        Raises:
            TimeoutError: They didn't, in time.
        """
        await self._wait_until(lambda: len(self._records) >= count, timeout)

    async def wait_ended(self, number: int, *, timeout: float = 30.0) -> RequestRecord:
        """Wait until the request of that number (0-based) has ended in any way.

        Raises:
            TimeoutError: It didn't, in time.
        """

        def ended() -> bool:
            return len(self._records) > number and self._records[number].ending is not None

        await self._wait_until(ended, timeout)
        return self._records[number]

    async def wait_closed_by_client(self, number: int, *, timeout: float = 30.0) -> RequestRecord:
        """Wait until the client has left the request of that number before its end.

        Raises:
            AssertionError: The request ended in another way.
            TimeoutError: It didn't end, in time.
        """
        record = await self.wait_ended(number, timeout=timeout)
        if not record.closed_by_client:
            message = f"request {number} was not closed by the client: {record}"
            raise AssertionError(message)
        return record

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        assert self._server is not None
        self._server.close()
        while self._connections:
            for task in self._connections:
                task.cancel()
            await asyncio.wait(self._connections)
        await self._server.wait_closed()

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopping:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = Answer(writer)
        try:
            request = await read_request(reader, writer)
            await self._exchange(request, reader, answer)
            writer.close()
            await writer.wait_closed()
        except BadRequestError as error:
            await self._turn_away(error, reader, writer, answer)
        except (ClientGoneError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    async def _turn_away(
        self,
        error: BadRequestError,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Answer,
    ) -> None:
        # Closing on bytes nobody has read would reset the connection, and might take the answer
        # from the client: so the rest of its request is read first, for a while.
        with contextlib.suppress(ConnectionError, TimeoutError):
            await self._play_status(answer, Status(error.status, message=str(error)))
            writer.write_eof()
            await asyncio.wait_for(_watch(reader), 1.0)

    async def _exchange(
        self, request: Request, reader: asyncio.StreamReader, answer: Answer
    ) -> None:
        content = content_of(request, len(self._records))
        step = None if isinstance(content, Status) else self._next_step()
        record = RequestRecord(len(self._records), request, step)
        self._records.append(record)
        self._wake()
        playing = asyncio.create_task(self._play(record, content, answer))
        watching = asyncio.create_task(_watch(reader))
        ending: Ending = "server_stopped"
        try:
            await asyncio.wait((playing, watching), return_when=asyncio.FIRST_COMPLETED)
            ending = "closed_by_client"
        finally:
            playing.cancel()
            watching.cancel()
            await asyncio.wait((playing, watching))
            record.status, record.bytes_sent = answer.status, answer.bytes_sent
            if answer.finished:
                ending = "completed"
            elif answer.aborted:
                ending = "dropped"
            record.ending = ending  # last: who sees this may rely on the rest
            self._wake()
        if not playing.cancelled():
            playing.result()

    def _next_step(self) -> Step:
        return self._script.popleft() if self._script else self.default

    async def _play(self, record: RequestRecord, content: Content | Status, answer: Answer) -> None:
        step = record.step
        if isinstance(content, Status):
            await self._play_status(answer, content)
        elif isinstance(step, Status):
            await self._play_status(answer, step)
        elif isinstance(step, Refuse):
            answer.abort(reset=True)
        else:
            await self._play_content(record, content, answer)

    async def _play_status(self, answer: Answer, step: Status) -> None:
        message = step.message or f"the server answers {step.status}"
        kind = "server_error" if step.status >= 500 else "invalid_request_error"
        error = {"message": message, "type": kind, "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        headers = {"Content-Type": "application/json", **step.headers}
        if step.retry_after is not None:
            headers["Retry-After"] = str(step.retry_after)
        await answer.head(step.status, headers, size=len(body))
        await answer.body(body, last=True)

    async def _play_content(self, record: RequestRecord, content: Content, answer: Answer) -> None:
        step = record.step
        stalled_after = step.after if isinstance(step, Stall) else None
        silence = step.seconds if isinstance(step, Stall) else 0.0
        interval = step.interval if isinstance(step, DieAfter | Tokens) else 0.0
        reply = content.reply(self._tokens_of(step, content))

        if stalled_after == "request":
            await _sleep(silence)
        if isinstance(reply, Status):
            await self._play_status(answer, reply)
            return
        await answer.head(reply.status, reply.headers, size=reply.size)
        if stalled_after == "headers":
            await _sleep(silence)
        if reply.preamble:
            await answer.body(reply.preamble)
        if stalled_after == "preamble":
            await _sleep(silence)
        dies_after = step.tokens if isinstance(step, DieAfter) else None
        for piece in reply.pieces[:dies_after]:
            if record.tokens_sent:
                await _sleep(interval)
            await answer.body(piece)
            record.tokens_sent += 1
        if isinstance(step, DieAfter):
            answer.abort(reset=step.reset)
            return
        await _sleep(interval)
        await answer.body(reply.end, last=True)

    def _tokens_of(self, step: Step | None, content: Content) -> tuple[str, ...]:
        if isinstance(step, DieAfter) and not content.has_end:
            times = -(-step.tokens // len(self._tokens))
            return (self._tokens * times)[: step.tokens]
        if isinstance(step, Tokens) and step.tokens is not None:
            return tuple(step.tokens)
        return self._tokens

    async def _wait_until(self, condition: Callable[[], bool], timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    waiter = asyncio.get_running_loop().create_future()
                    self._waiters.append(waiter)
                    await waiter
        except TimeoutError:
            message = f"waited {timeout} s in vain; requests so far: {self._records}"
            raise TimeoutError(message) from None

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class ThreadedFlakyServer:
    """The same server on an asyncio loop in a thread of its own, for clients on trio or on no loop.

    `with ThreadedFlakyServer(...) as server: server.url`. The waiting methods block the caller's
    thread; the server goes on meanwhile, so a test may call them in the middle of a coroutine once
    its client has done its part.

    Args:
        *steps: See `FlakyServer`, as the other two.
        default: What a request gets when the script is used up.
        tokens: What is sent where a step brings no tokens of its own.
    """

    def __init__(
        self, *steps: Step, default: Step = USUAL, tokens: Sequence[str] = DEFAULT_TOKENS
    ) -> None:
        self._server = FlakyServer(*steps, default=default, tokens=tokens)
        self._started: concurrent.futures.Future[asyncio.AbstractEventLoop]
        self._started = concurrent.futures.Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name="flaky server", daemon=True
        )

    @property
    def url(self) -> str:
        """Scheme, host and port, no slash at the end; for OpenAI's clients add `/v1`."""
        return self._server.url

    @property
    def default(self) -> Step:
        """What a request gets when the script is used up; may be changed at any time."""
        return self._server.default

    @default.setter
    def default(self, step: Step) -> None:
        self._server.default = step

    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        """Every request so far, in order of arrival; the records of running ones still change."""
        return self._server.requests

    @property
    def remaining(self) -> tuple[Step, ...]:
        """The steps not yet played."""
        return self._server.remaining

    def script(self, *steps: Step) -> None:
        """Say what happens to the next requests, one step each; replaces what is left."""
        self._server.script(*steps)

    def wait_requests(self, count: int, *, timeout: float = 30.0) -> None:
        """Block until so many requests have arrived since the start; else `TimeoutError`."""
        self._run(self._server.wait_requests(count, timeout=timeout))

    def wait_ended(self, number: int, *, timeout: float = 30.0) -> RequestRecord:
        """Block until that request has ended in any way; else `TimeoutError`."""
        return self._run(self._server.wait_ended(number, timeout=timeout))

    def wait_closed_by_client(self, number: int, *, timeout: float = 30.0) -> RequestRecord:
        """Block until the client has left that request early; else as `FlakyServer`'s raises."""
        return self._run(self._server.wait_closed_by_client(number, timeout=timeout))

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.result()
        return self

    def __exit__(self, *_: object) -> None:
        self._started.result().call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._started.result()).result()

    async def _main(self) -> None:
        try:
            await self._server.__aenter__()
        except BaseException as error:
            self._started.set_exception(error)
            raise
        try:
            self._started.set_result(asyncio.get_running_loop())
            await self._stop.wait()
        finally:
            await self._server.__aexit__()
