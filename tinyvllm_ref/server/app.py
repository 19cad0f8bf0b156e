"""The application: which path does what.

>>> app = build_app(AsyncEngine(LLM("tiny-stories")))  # doctest: +SKIP
>>> uvicorn.run(app)  # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..sampling_params import SamplingParams
from .answers import ChatAnswer, CompletionAnswer
from .async_engine import AsyncEngine, EngineBusy, EngineStopped, OutputStream
from .errors import ApiError, busy, internal, stopped
from .guard import CLIENT_GONE, Guard
from .metrics import CONTENT_TYPE, Metrics
from .openapi import schema
from .page import page
from .protocol import ChatRequest, CompletionRequest, Kind, parse_json, validate
from .settings import Settings
from .streaming import EventStream, WholeAnswer

Result = TypeVar("Result")


def build_app(engine: AsyncEngine, settings: Settings | None = None) -> ASGIApp:
    """A server of one engine.

    Parameters
    ----------
    engine : AsyncEngine
        Its thread starts with the first request, and ends with the application.
    settings : Settings, optional
        Limits and key; by default no key.

    Returns
    -------
    ASGI application
        With `/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/health`, `/metrics`, `/openapi.json` and a
        page to chat at `/`.
    """
    settings = settings or Settings()
    metrics = Metrics(engine)
    endpoints = _Endpoints(engine, settings, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close, 1.5)

    handlers: Any = {
        ApiError: _api_error,
        HTTPException: _http_error,
        ClientDisconnect: _client_gone,
        Exception: _other_error,
    }
    app = Starlette(
        routes=[
            Route("/", page),
            Route("/health", endpoints.health),
            Route("/metrics", endpoints.metrics),
            Route("/openapi.json", endpoints.openapi),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{model:path}", endpoints.model),
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        ],
        exception_handlers=handlers,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return Guard(app, settings, metrics.answered)


class _Endpoints:
    """What the paths do."""

    def __init__(self, engine: AsyncEngine, settings: Settings, metrics: Metrics) -> None:
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 while requests are taken."""
        reason = self._engine.refusing
        if reason is not None:
            return stopped(reason, self._settings.retry_seconds).response()
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(schema())

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> Any:
        """``POST /v1/completions``."""
        asked = await self._read(request, CompletionRequest)
        params = asked.sampling_params(
            max_tokens=16 if asked.max_tokens is None else max(asked.max_tokens, 1),
            logprobs=asked.logprobs,
            prompt_logprobs=asked.logprobs if asked.echo else None,
        )
        with self._refusals("prompt"):  # before its tokens cost anything
            self._engine.check_room(len(asked.prompts) * asked.count)
        ids = await self._off_the_loop("prompt", self._encode, asked.prompts)
        texts = []
        if asked.echo:
            texts = [p if isinstance(p, str) else self._engine.decode(p) for p in asked.prompts]
        streams = await self._submit("prompt", [(one, params) for one in ids])
        return self._answer(CompletionAnswer(self._engine, asked, streams, self._metrics, texts))

    async def chat(self, request: Request) -> Any:
        """``POST /v1/chat/completions``."""
        asked = await self._read(request, ChatRequest)
        params = asked.sampling_params(
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        )
        messages = [message.plain() for message in asked.messages]
        with self._refusals("messages"):
            self._engine.check_room(asked.count)
        ids = await self._off_the_loop("messages", self._engine.encode_chat, messages)
        streams = await self._submit("messages", [(ids, params)])
        return self._answer(ChatAnswer(self._engine, asked, streams, self._metrics))

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._engine.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "tinyvllm",
            "max_model_len": self._engine.max_model_len,
        }

    def _check_model(self, name: str) -> None:
        if name != self._engine.model_name:
            raise ApiError(
                404,
                f"this server has no model of that name; it serves {self._engine.model_name}",
                param="model",
                code="model_not_found",
            )

    async def _read(self, request: Request, kind: type[Kind]) -> Kind:
        """The request's body, checked."""
        media, _, _ = request.headers.get("content-type", "").partition(";")
        if media.strip().lower() != "application/json":
            raise ApiError(
                415, "the body must be sent as Content-Type: application/json", code="content_type"
            )
        asked = validate(kind, parse_json(await request.body()))
        self._check_model(asked.model)  # type: ignore[attr-defined]
        return asked

    def _encode(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        return [self._engine.encode(one) if isinstance(one, str) else one for one in prompts]

    async def _submit(
        self, field: str, prompts: Sequence[tuple[list[int], SamplingParams]]
    ) -> list[OutputStream]:
        with self._refusals(field):
            return await self._engine.submit_many(prompts)

    async def _off_the_loop(self, field: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run what may take long in a thread."""
        with self._refusals(field):
            return await asyncio.to_thread(function, *arguments)

    @contextlib.contextmanager
    def _refusals(self, field: str) -> Iterator[None]:
        """What the engine refuses, as answers that say why."""
        try:
            yield
        except ValueError as error:
            message = str(error)
            code = "context_length_exceeded" if "context length" in message else "invalid_value"
            raise ApiError(400, message, param=field, code=code) from None
        except EngineBusy as error:
            raise busy(str(error), self._settings.retry_seconds) from None
        except EngineStopped as error:
            raise stopped(str(error), self._settings.retry_seconds) from None

    def _answer(self, answer: CompletionAnswer | ChatAnswer) -> Any:
        if answer.asked.stream:
            return EventStream(answer.streams, answer.chunks(), self._settings.retry_seconds)

        async def whole() -> Response:
            return JSONResponse(await answer.whole())

        return WholeAnswer(answer.streams, whole, self._settings.retry_seconds)


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def _client_gone(request: Request, error: ClientDisconnect) -> Response:
    """In the midst of its body. Nobody gets this answer; it is for the log and the metrics."""
    return Response(status_code=CLIENT_GONE)


async def _other_error(request: Request, error: Exception) -> Response:
    """Starlette raises it again after this answer, and the guard logs it."""
    return internal().response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Starlette's own refusals: no such path, or not by this method."""
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        wrong = ApiError(405, f"this path takes {allowed}", code="method_not_allowed", headers=error.headers)
    elif error.status_code == 404:
        wrong = ApiError(404, "there is nothing at this path; see /openapi.json", code="not_found")
    else:
        wrong = ApiError(error.status_code, str(error.detail))
    return wrong.response()
