"""The judge's end of a contained process: questions and replies, with limits on time, size and memory."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from types import TracebackType
from typing import Any

import psutil

from . import wire
from .containment import Place, user_of
from .limits import Limits

_LOOK_EVERY = 0.2  # seconds between two looks at the memory
_KEPT = 2000  # bytes of what a process says on standard error


class Stopped(RuntimeError):
    """The process gave no reply. `kind` is a word, the message a sentence for the report."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Process:
    """A contained process, from its start to its end; nothing of it is left afterwards."""

    def __init__(self, where: Place, limits: Limits) -> None:
        self._limits = limits
        self._uid = where.uid
        self.peak_bytes = 0
        self.said = b""
        self._process = subprocess.Popen(
            where.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=where.environment,
            cwd=where.folder,
            start_new_session=True,
        )
        for file in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert file is not None
            os.set_blocking(file.fileno(), False)

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def ask(self, message: Any, seconds: float) -> Any:
        """Send a message and wait for the reply.

        Raises
        ------
        Stopped
            None came: the process ended, took too long, too much memory, or replied with what is no message.
        """
        received = self._exchange(wire.pack(message), time.monotonic() + seconds, seconds)
        document, _ = wire.HEADER.unpack(received[: wire.HEADER.size])
        body = received[wire.HEADER.size :]
        try:
            reply = wire.unpack(body[:document], body[document:])
        except wire.WireError as error:
            raise Stopped("bad reply", f"the process replied with what is no result ({error})") from None
        if not isinstance(reply, dict):
            raise Stopped("bad reply", "the process replied with what is no result")
        return reply

    def _exchange(self, out: bytes, deadline: float, seconds: float) -> bytes:
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        got, wanted, look = bytearray(), wire.HEADER.size, 0.0
        rest = memoryview(out)
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            selector.register(stderr, selectors.EVENT_READ)
            selector.register(stdin, selectors.EVENT_WRITE)
            while True:
                now = time.monotonic()
                if now > deadline:
                    raise Stopped("timeout", f"no result within {seconds:.0f} s; the process was stopped")
                if now > look:
                    self._watch_memory()
                    look = time.monotonic() + _LOOK_EVERY
                for key, _ in selector.select(min(_LOOK_EVERY, max(0.0, deadline - now))):
                    if key.fileobj is stdin:
                        rest = self._write(rest)
                        if not rest:
                            selector.unregister(stdin)
                    elif key.fileobj is stderr:
                        data = self._read(stderr.fileno(), 1 << 16)
                        self.said = (self.said + data)[:_KEPT]
                        if not data:
                            selector.unregister(stderr)
                    else:
                        data = self._read(stdout.fileno(), min(1 << 20, wanted - len(got)))
                        if not data:
                            raise self._ended()
                        got += data
                        if len(got) == wire.HEADER.size == wanted:
                            wanted += self._length(bytes(got))
                        if len(got) == wanted:
                            return bytes(got)

    def _length(self, header: bytes) -> int:
        length: int = sum(wire.HEADER.unpack(header))
        if length > self._limits.reply_bytes:
            raise Stopped(
                "too much output",
                f"a result of {length:,} bytes; at most {self._limits.reply_bytes:,} are taken",
            )
        return length

    def _write(self, rest: memoryview) -> memoryview:
        assert self._process.stdin
        try:
            return rest[os.write(self._process.stdin.fileno(), rest[: 1 << 16]) :]
        except BlockingIOError:
            return rest
        except OSError:
            return rest[len(rest) :]  # it has ended; reading says so

    @staticmethod
    def _read(file: int, size: int) -> bytes:
        try:
            return os.read(file, size)
        except OSError:
            return b""

    def _ended(self) -> Stopped:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        if code is None:
            return Stopped("ended", "the process closed its output before it gave a result")
        # bubblewrap and shells tell of a signal by 128 + its number.
        number = -code if code < 0 else code - 128 if code > 128 else 0
        if number == signal.SIGXCPU:
            return Stopped("timeout", f"the process used its {self._limits.cpu_seconds} s of processor time")
        if number:
            name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
            return Stopped("crash", f"the process was ended by {name} before it gave a result")
        return Stopped("ended", f"the process ended itself (exit code {code}) before it gave a result")

    def _watch_memory(self) -> None:
        total = 0
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        self.peak_bytes = max(self.peak_bytes, total)
        if total > self._limits.memory_bytes:
            raise Stopped(
                "memory",
                f"the process took {total / 2**30:.1f} GiB of memory; "
                f"{self._limits.memory_bytes / 2**30:.1f} GiB are allowed",
            )

    def cpu_seconds(self) -> float:
        """Processor time of it and of all that it started, up to now."""
        total = 0.0
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:4])  # its own and of children that ended: user, system
        return total

    def _family(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.Error:
            return []

    def kill(self) -> None:
        """End it and all that it started."""
        family = self._family()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                file.close()  # type: ignore[union-attr]
        if self._uid is not None:
            user_of(self._uid)
