"""Streams and events, under CuPy's names. Work is done when it is asked for: there is nothing to wait for.

What there is not without a card is refused or not a number: CUDA graphs raise, times between events are NaN.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from .errors import CUDARuntimeError

__all__ = ["Event", "ExternalStream", "Graph", "Stream", "get_current_stream", "get_elapsed_time"]

NO_TIMES = (
    "tinyvllm emulation: no GPU code ran. Times between events are NaN, because the time that a CPU takes "
    "says nothing about a kernel's speed on a card."
)
_NO_GRAPHS = (
    "CUDA graphs need a card: the emulation runs each operation when it is asked for and records nothing. "
    "Run the same operations one by one"
)

_handles = itertools.count(
    0x1000, 0x10
)  # of streams and events; never 0, 1 or 2, which are CUDA's own streams
_thread = threading.local()


class Stream:
    """A stream. Every one is always done; :attr:`ptr` is only a name.

    Parameters
    ----------
    null : bool
        The default stream; better ``Stream.null``.
    non_blocking : bool
        On a card: not to synchronise with the default stream.
    ptds : bool
        The default stream of this thread; better ``Stream.ptds``.
    priority : int, optional
        Without effect.
    """

    null: Stream
    ptds: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        if null and ptds:
            raise ValueError("null and ptds cannot both be true: they name different streams")
        self.ptr = 0 if null else 2 if ptds else next(_handles)
        self.device_id = -1 if null or ptds else 0
        self.is_non_blocking = non_blocking and not null and not ptds
        self.priority = priority or 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return hash(self.ptr)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ptr} (device {self.device_id})>"

    def __enter__(self) -> Stream:
        stack = getattr(_thread, "before", None)
        if stack is None:
            stack = _thread.before = []
        stack.append(get_current_stream())
        return self.use()

    def __exit__(self, *exception: object) -> None:
        _thread.current = _thread.before.pop()

    def use(self) -> Stream:
        """Make this the current stream of this thread."""
        _thread.current = self
        return self

    @property
    def done(self) -> bool:
        """Always true."""
        return True

    @property
    def is_capturing(self) -> bool:
        """Always false."""
        return False

    def synchronize(self) -> None:
        """Wait until the stream is done, which it is."""

    def record(self, event: Event | None = None) -> Event:
        """Record an event, a new one by default, and return it."""
        if event is None:
            event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let work that is asked for later wait for an event."""
        _require_event(event)

    def add_callback(self, callback: Callable[[Stream, int, Any], None], arg: Any) -> None:
        """Call ``callback(stream, 0, arg)``: at once, since the stream is done."""
        callback(self, 0, arg)

    def launch_host_func(self, callback: Callable[[Any], None], arg: Any) -> None:
        """Call ``callback(arg)``: at once, since the stream is done."""
        callback(arg)

    def begin_capture(self, mode: int | None = None) -> NoReturn:
        """Refused: CUDA graphs need a card."""
        raise NotImplementedError(f"Stream.begin_capture: {_NO_GRAPHS}.")

    def end_capture(self) -> NoReturn:
        """Refused: CUDA graphs need a card."""
        raise NotImplementedError(f"Stream.end_capture: {_NO_GRAPHS}.")


class ExternalStream(Stream):
    """A stream that someone else made, by its handle."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        super().__init__()
        self.ptr = ptr
        self.device_id = device_id


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)


class Graph:
    """Refused: CUDA graphs need a card."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"Graph: {_NO_GRAPHS}.")


class Event:
    """An event: a point of a stream that others can wait for.

    Parameters
    ----------
    block : bool
        Without effect.
    disable_timing : bool
        Make an event that has no time.
    interprocess : bool
        Must come with `disable_timing`, as in CUDA.
    """

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        if interprocess and not disable_timing:
            raise ValueError("Timing must be disabled for interprocess events")
        self.ptr = next(_handles)
        self.disable_timing = disable_timing
        self.recorded = False

    @property
    def done(self) -> bool:
        """Always true."""
        return True

    def record(self, stream: Stream | None = None) -> None:
        """Record the event on a stream, by default the current one."""
        if stream is not None and not isinstance(stream, Stream):
            raise TypeError(f"an event is recorded on a Stream, not on {type(stream)}")
        self.recorded = True

    def synchronize(self) -> None:
        """Wait for the event, which has happened."""


def _require_event(event: Any) -> None:
    if not isinstance(event, Event):
        raise TypeError(f"an Event is needed, not {type(event)}")


def get_current_stream(device_id: int = -1) -> Stream:
    """The current stream of this thread."""
    return getattr(_thread, "current", Stream.null)


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """The milliseconds from one recorded event to another: always NaN here.

    Raises
    ------
    CUDARuntimeError
        As on a card: if an event was not recorded, or was made with ``disable_timing=True``.
    """
    from .report import notice

    for name, event in (("start", start_event), ("end", end_event)):
        _require_event(event)
        if event.disable_timing:
            raise CUDARuntimeError(400, f"the {name} event was made with disable_timing=True")
        if not event.recorded:
            raise CUDARuntimeError(
                400, f"the {name} event was not recorded: call {name}_event.record() first"
            )
    notice(NO_TIMES)
    return float("nan")
