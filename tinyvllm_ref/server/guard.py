"""What stands in front of the application: key, host, size and time of the body, errors, one line of log.

It is plain ASGI, so that it guards a learner's application as well.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, internal
from .failures import where
from .settings import Settings

log = logging.getLogger("tinyvllm.server")

OPEN_PATHS = frozenset({"/", "/health"})  # need no key
CLIENT_GONE = 499  # nginx's number for a client that goes before its answer begins
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./-]{0,80}")


class Guard:
    """An ASGI application around another.

    Parameters
    ----------
    app : ASGI application
    settings : Settings
    on_answer : callable, optional
        Called with the status of every answer.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, on_answer: Callable[[int], None] | None = None
    ) -> None:
        self.app = app
        self.settings = settings
        self._on_answer = on_answer or (lambda status: None)
        self._key = None if settings.api_key is None else settings.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:  # a WebSocket: there are none here
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        body = _LimitedBody(receive, headers, self.settings)
        answer = _Answer(send, body, uuid.uuid4().hex)
        began = time.perf_counter()
        try:
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            await self.app(scope, body, answer.send)
        except ClientDisconnect:
            pass
        except ApiError as error:
            await answer.fail(error, scope, receive)
        except Exception as error:
            if body.refusal is None:
                log.error("request %s failed: %s", answer.request_id, where(error))
            await answer.fail(body.refusal or internal(), scope, receive)
        answer.status = answer.status or (CLIENT_GONE if body.gone else 500)
        path = scope["path"] if _PLAIN_PATH.fullmatch(scope["path"]) else "(another path)"
        seconds = time.perf_counter() - began
        log.info("%s %s %s %s %.3f s", answer.request_id, scope["method"], path, answer.status, seconds)
        self._on_answer(answer.status)

    def _check_host(self, headers: Headers) -> None:
        allowed = self.settings.allowed_hosts
        name = headers.get("host", "").rsplit("]", 1)
        host = name[0].removeprefix("[") if len(name) == 2 else name[0].partition(":")[0]
        if allowed and host.lower() not in allowed:
            raise ApiError(
                403,
                "this server answers to its own names only; see --allowed-host",
                code="host_not_allowed",
            )

    def _check_key(self, path: str, headers: Headers) -> None:
        """Compared in constant time, so that a guess learns nothing from how long it takes."""
        if self._key is None or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._key)
        if not (same and scheme.lower() == "bearer"):
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


class _LimitedBody:
    """`receive` of a body that may be neither too long nor too slow.

    `refusal` says why it was not read, `gone` that the client has gone.
    """

    def __init__(self, receive: Receive, headers: Headers, settings: Settings) -> None:
        self._receive = receive
        self._limit = settings.max_body_bytes
        self._deadline = time.monotonic() + settings.body_seconds
        self._seconds = settings.body_seconds
        self._declared = headers.get("content-length", "")
        self._size = 0
        self._complete = False
        self.refusal: ApiError | None = None
        self.gone = False

    async def __call__(self) -> Message:
        if self._complete:
            return self._seen(await self._receive())  # waits until the client goes
        if self._declared.isdigit() and int(self._declared) > self._limit:
            raise self._refused(self._too_large())
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise self._refused(self._too_slow()) from None
        self._size += len(message.get("body", b""))
        if self._size > self._limit:
            raise self._refused(self._too_large())
        self._complete = not message.get("more_body", False)
        return self._seen(message)

    def _seen(self, message: Message) -> Message:
        self.gone = self.gone or message["type"] == "http.disconnect"
        return message

    def _refused(self, error: ApiError) -> ApiError:
        self.refusal = error
        return error

    def _too_slow(self) -> ApiError:
        return ApiError(
            408,
            f"the body did not come within {self._seconds:g} s",
            code="body_timeout",
            headers={"Connection": "close"},
        )

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self._limit:,} bytes, which is this server's limit",
            code="body_too_large",
            headers={"Connection": "close"},
        )


class _Answer:
    """`send`, with what has been sent noted and the request's id in it."""

    def __init__(self, send: Send, body: _LimitedBody, request_id: str) -> None:
        self._send = send
        self._body = body
        self.request_id = request_id
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._body.refusal is not None:  # the application may not make another error of it
                raise self._body.refusal
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self._send(message)

    async def fail(self, error: ApiError, scope: Scope, receive: Any) -> None:
        """Answer with an error, unless an answer has begun: that one just breaks off."""
        self._body.refusal = None
        if not self.status:
            await error.response()(scope, receive, self.send)
