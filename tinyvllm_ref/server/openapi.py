"""The server's own description, at ``/openapi.json``."""

from __future__ import annotations

import functools
from typing import Any

from pydantic.json_schema import models_json_schema

from .protocol import ChatRequest, CompletionRequest

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_OBJECT = {"type": "object"}
_REFUSALS = {
    "400": "The request is wrong, or can never fit.",
    "401": "The key is missing or wrong.",
    "403": "The Host header is not one of this server's names.",
    "404": "There is no such model.",
    "408": "The body was too slow.",
    "413": "The body is too long.",
    "415": "The body is not sent as JSON.",
    "429": "The queue is full; Retry-After says when to ask again.",
    "503": "The server is shutting down.",
}


@functools.cache
def schema() -> dict[str, Any]:
    """OpenAPI 3.1."""
    pairs: Any = [(CompletionRequest, "validation"), (ChatRequest, "validation")]
    _, definitions = models_json_schema(pairs, ref_template="#/components/schemas/{model}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "tinyvllm", "version": "1", "description": "A part of OpenAI's API."},
        "paths": {
            "/v1/completions": {"post": _post("Complete texts.", "CompletionRequest")},
            "/v1/chat/completions": {"post": _post("Answer a conversation.", "ChatRequest")},
            "/v1/models": {"get": _get("The models: one.", {"401", "403"})},
            "/v1/models/{model}": {
                "get": _get("One model.", {"401", "403", "404"})
                | {
                    "parameters": [
                        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
                    ]
                }
            },
            "/health": {"get": _get("Whether requests are taken.", {"403", "503"}) | {"security": []}},
            "/metrics": {"get": _get("For Prometheus.", {"401", "403"}, "text/plain", {"type": "string"})},
        },
        "components": {
            "schemas": {"Error": _ERROR, **definitions["$defs"]},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _refusals(statuses: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": _REFUSALS[status], "content": content} for status in sorted(statuses)}


def _get(
    summary: str, refusals: set[str], media: str = "application/json", answer: dict[str, Any] = _OBJECT
) -> dict[str, Any]:
    good = {"description": summary, "content": {media: {"schema": answer}}}
    return {"summary": summary, "responses": {"200": good, **_refusals(refusals)}}


def _post(summary: str, body: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body}"}}}
    answers = {"application/json": {"schema": _OBJECT}, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": summary, "content": answers}, **_refusals(_REFUSALS)},
    }
