"""Servers for the tests: in this process, where a test can look into the engine, and in one of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import uvicorn

from tinyvllm_ref import LLM, SamplingParams
from tinyvllm_ref.server import AsyncEngine, Settings, build_app
from tinyvllm_ref.server.connection import TimedConnection

MODEL = "tiny-stories"


class Served:
    """A server in a thread of this process."""

    def __init__(
        self,
        llm: LLM,
        settings: Settings | None = None,
        connection: type[TimedConnection] = TimedConnection,
        **options: Any,
    ) -> None:
        self.llm = llm
        self.engine = AsyncEngine(llm, **options)
        app = build_app(self.engine, settings)
        self._server = uvicorn.Server(
            uvicorn.Config(app, port=0, http=connection, log_config=None, access_log=False, ws="none")
        )
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()))
        self._thread.start()
        wait_for(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60} | options
        )

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._server.server_state.connections)

    def check_idle(self) -> None:
        """Nothing waits or runs, and every block is free, at once or within moments."""
        blocks = self.llm.engine.blocks
        wait_for(lambda: self.engine.in_hand == 0 and blocks.num_free == blocks.num_blocks)
        blocks.check()
        assert not self.llm.engine.scheduler.has_work
        assert self.engine.stats.blocks_used == self.engine.stats.running == self.engine.stats.waiting == 0

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def served(llm: LLM | None = None, settings: Settings | None = None, **options: Any) -> Iterator[Served]:
    """A server that is idle at the end."""
    server = Served(llm or LLM(MODEL, num_blocks=1024), settings, **options)
    try:
        yield server
        server.check_idle()
    finally:
        server.close()


class Process:
    """``tinyvllm serve`` as a person starts it."""

    def __init__(
        self, *arguments: str, start: Sequence[str] = ("-m", "tinyvllm_ref"), **environment: str
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *start, "serve", MODEL, "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        )
        self.said: list[str] = []
        self._errors: list[str] = []
        self._reader = threading.Thread(target=lambda: self._errors.extend(self._process.stderr or ()))
        self._reader.start()
        self.url = self._wait_until_ready()

    def _wait_until_ready(self) -> str:
        for line in self._process.stdout or ():
            self.said.append(line)
            found = re.search(r"is served at (http://\S+)", line)
            if found:
                return found[1]
        self._reader.join()
        raise RuntimeError("".join(self._errors))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def memory(self) -> int:
        """Resident bytes."""
        with open(f"/proc/{self.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def log(self) -> str:
        return "".join(self._errors)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = 60) -> int:
        code = self._process.wait(timeout)
        self._reader.join(10)
        return code

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join(10)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()


@contextlib.contextmanager
def process(*arguments: str, **options: Any) -> Iterator[Process]:
    """A server in a process of its own, which is gone at the end."""
    server = Process(*arguments, **options)
    try:
        yield server
    finally:
        server.kill()


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    """Until it holds; a test that waits for what never comes fails."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come about"
        time.sleep(0.005)


def alone(llm: LLM, prompt: Any, **options: Any) -> Any:
    """What the engine says to a prompt when nobody else is there: the oracle of what a client must get."""
    (output,) = llm.generate(prompt, SamplingParams(**options))
    return output
