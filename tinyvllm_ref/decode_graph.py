"""Sequences of launches that are recorded once and then started with one call: CUDA graphs.

A step of a small batch is some hundred launches, each a few microseconds for the card and more for Python. A graph
holds them with their arguments; starting it costs what one launch does. So nothing in it may depend on the host:
addresses and sizes stay as they were, and what changes from step to step stands in arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .device import cp, is_gpu


def can_record() -> bool:
    """Whether this device has graphs. The emulation has none."""
    return is_gpu and hasattr(cp.cuda.runtime, "graphInstantiate")


class Recording:
    """Launches that have been started once and can be started again.

    Parameters
    ----------
    stream : Stream
        Not the default one, and one that waits for it.
    launches : callable
        Starts them on the current stream. It must neither allocate nor wait, and not look at what is on the
        device. It is called twice and not kept: once for real, which also compiles what it launches, and once to be
        recorded.

    Notes
    -----
    A graph has addresses and keeps no array alive: whoever makes it keeps what it uses.
    """

    def __init__(self, stream: Any, launches: Callable[[], None]) -> None:
        self._stream = stream
        with stream:
            launches()
            stream.synchronize()
            # Other threads may allocate meanwhile.
            stream.begin_capture(cp.cuda.runtime.streamCaptureModeThreadLocal)
            try:
                launches()
            except BaseException:
                with suppress(Exception):  # that the capture is not valid is no news
                    stream.end_capture()
                raise
            self._graph = stream.end_capture()

    def start(self) -> None:
        """Start the launches, behind what is on the stream."""
        self._graph.launch(self._stream)
