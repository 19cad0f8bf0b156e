"""An OpenAI-compatible HTTP server over the engine. What it needs is in the extra ``serve``.

>>> app = build_app(AsyncEngine(LLM("tiny-stories")))  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import build_app
    from .async_engine import AsyncEngine
    from .settings import Settings

__all__ = ["AsyncEngine", "Settings", "build_app"]

_HOMES = {"AsyncEngine": "async_engine", "Settings": "settings", "build_app": "app"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: the async engine needs no web framework."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
