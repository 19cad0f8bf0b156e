"""What a log may say of an error: its kind and its place in the code, nothing of a file system or a prompt."""

from __future__ import annotations

import traceback

from ..lost_device import DeviceLost


def where(error: BaseException) -> str:
    """Kind, module, line and function of an error, innermost of this project's code; of a lost device all it says.

    >>> try:
    ...     1 / 0
    ... except ZeroDivisionError as error:
    ...     where(error)
    'ZeroDivisionError'
    """
    kind = type(error).__name__
    if isinstance(error, DeviceLost):
        return f"{kind}: {error}"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("tinyvllm_ref", "my_engine_")):
            return f"{kind} in {module}.{frame.f_code.co_name}, line {line}"
    return kind
