"""An LLM inference engine to read, to import and to learn from.

>>> from tinyvllm_ref import LLM, SamplingParams
>>> llm = LLM("tiny-stories")  # doctest: +SKIP
>>> llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .llm import LLM
    from .outputs import CompletionOutput, RequestOutput
    from .sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: `import tinyvllm_ref` loads nothing heavy."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
