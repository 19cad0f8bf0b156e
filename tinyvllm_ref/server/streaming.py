"""Answers that wait for the engine: piece by piece as server-sent events, or whole. A client that goes aborts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from .async_engine import EngineStopped, OutputStream
from .deltas import Delta
from .errors import internal, stopped

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or a proxy in front would keep the pieces until it has many
]
DONE = b"data: [DONE]\n\n"
_to_json = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode


def event(data: Any) -> bytes:
    """One server-sent event. Escaped to ASCII, so that no reader can cut a character or a line in two.

    >>> event({"text": "caf\\u00e9"})
    b'data: {"text":"caf\\\\u00e9"}\\n\\n'
    """
    return b"data: " + _to_json(data).encode() + b"\n\n"


async def merged(streams: Sequence[OutputStream]) -> AsyncIterator[tuple[int, Delta]]:
    """(number of the stream, delta) of several streams, as they come."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

    async def pump(number: int, stream: OutputStream) -> None:
        try:
            async for delta in stream:
                queue.put_nowait((number, delta))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        for _ in streams:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
    finally:
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def aborted_with_the_client(
    receive: Receive, streams: Sequence[OutputStream]
) -> AsyncIterator[Callable[[], bool]]:
    """While inside, a client that goes ends its requests; leaving in any way ends what is left of them.

    Gives a function that says whether the client has gone.
    """
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        for stream in streams:
            stream.abort()

    watcher = asyncio.create_task(watch())
    try:
        yield lambda: gone
    finally:
        watcher.cancel()
        for stream in streams:
            stream.abort()


class EventStream:
    """An ASGI answer of server-sent events.

    Parameters
    ----------
    streams : sequence of OutputStream
        What is aborted when the client goes.
    objects : async generator of dict
        The objects to send, each as one event.
    retry_seconds : int
        For the error of an engine that stops.
    """

    def __init__(
        self,
        streams: Sequence[OutputStream],
        objects: AsyncGenerator[dict[str, Any], None],
        retry_seconds: int,
    ) -> None:
        self._streams = streams
        self._objects = objects
        self._retry_seconds = retry_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aborted_with_the_client(receive, self._streams) as gone:
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            try:
                async with contextlib.aclosing(self._objects) as objects:
                    async for found in objects:
                        await send({"type": "http.response.body", "body": event(found), "more_body": True})
                last = DONE
            except EngineStopped as error:
                last = event(stopped(str(error), self._retry_seconds).body)
            except OSError:
                return
            except Exception:
                await send({"type": "http.response.body", "body": event(internal().body), "more_body": False})
                raise
            if gone():
                return
            await send({"type": "http.response.body", "body": last, "more_body": False})


class WholeAnswer:
    """An ASGI answer of one JSON object, when all of it is there.

    Parameters
    ----------
    streams : sequence of OutputStream
    make : callable
        Gives the answer: awaited while the client is watched.
    retry_seconds : int
    """

    def __init__(
        self, streams: Sequence[OutputStream], make: Callable[[], Awaitable[Any]], retry_seconds: int
    ) -> None:
        self._streams = streams
        self._make = make
        self._retry_seconds = retry_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aborted_with_the_client(receive, self._streams) as gone:
            try:
                response = await self._make()
            except EngineStopped as error:
                response = stopped(str(error), self._retry_seconds).response()
            if gone():
                return  # an error would become an answer with 500, in the metrics and the log
        await response(scope, receive, send)
