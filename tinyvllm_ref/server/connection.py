"""How long a connection may take: for the head of a request, and for taking what it is sent."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError


class TimedConnection(H11Protocol):
    """uvicorn's HTTP/1.1, which has no such limits: a client that sends half a head, or takes nothing of a long
    answer, would hold its connection and memory for ever.

    Attributes
    ----------
    head_seconds : float
        From the connection, or from the first byte after the answer before, to the end of a request's head.
    take_seconds : float
        While something is left to send: the longest time in which the client takes no byte of it.
    """

    head_seconds: ClassVar[float] = 30.0
    take_seconds: ClassVar[float] = 60.0
    _head_timer: asyncio.TimerHandle | None = None
    _take_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause_writing comes as soon as the client is behind
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_taking(left=self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._take_timer is not None:
            self._take_timer.cancel()
            self._take_timer = None

    def send_400_response(self, msg: str) -> None:
        """As all errors here."""
        error = ApiError(400, "this is no HTTP request", code="invalid_http").response()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = [*error.raw_headers, (b"connection", b"close")]
            head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=bytes(error.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch_head(self) -> None:
        """A timer runs while a head is awaited; further bytes of it do not start it anew."""
        if self._answering:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self._answering:
            self.transport.close()

    def _watch_taking(self, left: int) -> None:
        self._take_timer = self.loop.call_later(self.take_seconds, self._look_at_taking, left)

    def _look_at_taking(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._watch_taking(left)
        else:
            self.transport.abort()  # closing would wait until all is taken

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._take_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._take_timer = None
