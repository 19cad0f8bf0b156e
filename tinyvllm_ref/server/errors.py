"""Errors as OpenAI's API gives them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse


class ApiError(Exception):
    """An answer that is an error.

    Parameters
    ----------
    status : int
        Of HTTP.
    message : str
        For a person; without paths, tracebacks or prompts.
    param : str, optional
        The field of the request that is wrong.
    code : str, optional
        For a program, such as ``"model_not_found"``.
    headers : mapping, optional
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object, of an answer or of an event in the midst of a stream."""
        error = {
            "message": self.message,
            "type": _kind(self.status),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        return JSONResponse(self.body, self.status, self.headers)


def _kind(status: int) -> str:
    """OpenAI's word for errors of a status."""
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def stopped(reason: str, retry_seconds: int) -> ApiError:
    """The engine takes no requests."""
    return ApiError(
        503,
        f"{reason}",
        code="unavailable",
        headers={"Retry-After": str(retry_seconds), "Connection": "close"},
    )


def busy(message: str, retry_seconds: int) -> ApiError:
    """The queue is full."""
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(retry_seconds)})


def internal() -> ApiError:
    """Something failed here; what it was stands in the log and is nobody else's business."""
    return ApiError(500, "the server failed on this request; its log says where", code="internal_error")
