"""From a model's name to a process that serves it, and from SIGTERM to its end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ..assembly import Parts
from ..llm import LLM
from ..sampling_params import SamplingParams
from .app import build_app
from .async_engine import AsyncEngine
from .connection import TimedConnection
from .failures import where
from .guard import Guard
from .settings import Settings

log = logging.getLogger("tinyvllm.server")
_LAST_SECONDS = 5  # for what was aborted to say so, and for the engine's thread to end


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What ``tinyvllm serve`` was asked for.

    Attributes
    ----------
    model : str
        ``tiny-stories``, a name that ``tinyvllm fetch`` knows, or a folder (``./NAME``).
    host, port : str, int
        Where to listen; port 0 takes a free one.
    api_key : str or None
        What clients must send.
    model_name : str or None
        What clients call the model; by default its folder's name.
    max_queue : int
        Completions that may wait beyond those that run.
    max_body_bytes : int
        The longest body.
    allowed_hosts : sequence of str
        More names that the Host header may have.
    shutdown_seconds : float
        How long what runs may take to finish after SIGTERM.
    mine : bool
        Use the parts in my_engine/, lesson 24's application among them.
    engine : dict
        Fields of EngineConfig.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    model_name: str | None = None
    max_queue: int = 256
    max_body_bytes: int = 1 << 20
    allowed_hosts: Sequence[str] = ()
    shutdown_seconds: float = 30.0
    mine: bool = False
    engine: dict[str, Any] = field(default_factory=dict)


def serve(options: ServeOptions, say: Callable[[str], None] = print) -> bool:
    """Serve a model until SIGTERM or SIGINT.

    Then no more connections are taken, what runs may finish within ``options.shutdown_seconds``, what is left is
    aborted, and the function returns, at most 5 seconds later.

    Returns
    -------
    bool
        False where the end came because the engine had failed; the log says where.

    Raises
    ------
    ValueError, FileNotFoundError
        The model, an option or the address cannot be used.
    """
    if not options.shutdown_seconds >= 0:
        raise ValueError(f"shutdown_seconds is {options.shutdown_seconds}; it must be at least 0")
    settings = Settings(options.api_key, options.max_body_bytes, allowed_hosts=_allowed_hosts(options))
    signals = _Signals()
    try:
        return _serve(options, settings, signals, say)
    except _Ended:
        return True


def _serve(options: ServeOptions, settings: Settings, signals: _Signals, say: Callable[[str], None]) -> bool:
    with _listen(options.host, options.port) as listener:
        parts = Parts.mine() if options.mine else None
        llm = LLM(options.model, parts=parts, **options.engine)
        engine = AsyncEngine(llm, model_name=options.model_name, max_queue=options.max_queue)
        app = _application(engine, settings, parts)
        _warm_up(llm)
        _log_to_stderr()
        _warn(options, say)
        place = _address(options.host, listener)
        server = _Server(_uvicorn_config(app, options), engine, options.shutdown_seconds, signals)
        server.when_ready = lambda: say(f"{engine.model_name} is served at {place} (Ctrl-C ends it)")
        server.run_to_the_end(listener)
        engine.close(0.5)  # the reference's application has done so; a learner's need not
    return not engine.failed


class _Ended(BaseException):
    """A signal came before anything was served."""


class _Signals:
    """SIGTERM and SIGINT before uvicorn takes them over: they end what is being loaded.

    uvicorn raises a signal once more when it is done: for this handler, because a process that has done all that it
    was asked to exits with 0.
    """

    def __init__(self) -> None:
        self.came = False
        self._loading = True
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def loaded(self) -> None:
        """From now on a signal is noted only. One that some code had swallowed ends everything here."""
        self._loading = False
        if self.came:
            raise _Ended

    def _note(self, number: int, frame: Any) -> None:
        self.came = True
        if self._loading:
            raise _Ended


class _Server(uvicorn.Server):
    """uvicorn's server, with an engine that must end in good order, too."""

    def __init__(
        self, config: uvicorn.Config, engine: AsyncEngine, shutdown_seconds: float, signals: _Signals
    ) -> None:
        super().__init__(config)
        self._signals = signals
        self._engine = engine
        self._shutdown_seconds = shutdown_seconds
        self.when_ready: Callable[[], None] = lambda: None

    def run_to_the_end(self, listener: socket.socket) -> None:
        """Until a signal comes, and everything after it."""
        self._signals.loaded()
        self.run(sockets=[listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_log_loop_error)
        await super().startup(sockets)
        if self._signals.came:  # between the loading and uvicorn's own handlers
            self.should_exit = True
        else:
            self.when_ready()

    async def on_tick(self, counter: int) -> bool:
        if self._engine.failed:
            self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Refuse what is new; let what runs finish, but not forever."""
        self._engine.refuse()
        timer = threading.Timer(self._shutdown_seconds, self._engine.abort_all)
        timer.daemon = True
        timer.start()
        super().handle_exit(sig, frame)


def _application(engine: AsyncEngine, settings: Settings, parts: Any) -> ASGIApp:
    """The reference's, or a learner's behind the same guard."""
    if parts is not None and parts.build_app is not None:
        return Guard(parts.build_app(engine), settings)
    return build_app(engine, settings)


def _uvicorn_config(app: ASGIApp, options: ServeOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=TimedConnection,
        log_config=None,
        log_level="warning",
        access_log=False,  # the guard writes its own
        server_header=False,
        timeout_graceful_shutdown=int(options.shutdown_seconds) + _LAST_SECONDS - 2,
        ws="none",
        lifespan="on" if not options.mine else "auto",
    )


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port is {port}; it must be from 0 to 65535")
    _allow_many_connections()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # With its protocol named, as socket.create_server does not do it: only then does asyncio switch Nagle's
        # algorithm off, which keeps a stream's first token for 40 ms, until the headers have been acknowledged.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise ValueError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from None


def _allow_many_connections() -> None:
    """Each is an open file, of which a process may by default have few."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _allowed_hosts(options: ServeOptions) -> tuple[str, ...]:
    """Names in the Host header: where neither a key nor the network's owner keeps strangers out, loopback's."""
    if options.allowed_hosts or (_is_loopback(options.host) and options.api_key is None):
        names = ("localhost", "127.0.0.1", "::1", options.host, *options.allowed_hosts)
        return tuple(dict.fromkeys(name.lower() for name in names))
    return ()


def _address(host: str, listener: socket.socket) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"


def _warn(options: ServeOptions, say: Callable[[str], None]) -> None:
    if options.api_key is None and not _is_loopback(options.host):
        say(
            f"Warning: everyone who reaches {options.host} can use this server, for no API key is set"
            " (--api-key, or TINYVLLM_API_KEY)."
        )


def _warm_up(llm: LLM) -> None:
    """Kernels are compiled before the first client comes, and not while it waits."""
    for params in (SamplingParams(max_tokens=2, temperature=0), SamplingParams(max_tokens=2, logprobs=1)):
        with contextlib.suppress(ValueError):  # a context of two or three tokens
            llm.generate([[0], [0, 0]], params, use_tqdm=False)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(_without_traceback)
    for name, level in (("tinyvllm", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(handler)
            logger.setLevel(level)
            logger.propagate = False


def _without_traceback(record: logging.LogRecord) -> bool:
    """uvicorn would print one of an answer that it breaks off at the end."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        record.msg, record.args = f"{record.getMessage().strip()}: {where(error)}", ()
    record.exc_info = None
    return True


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio's own way would print a traceback."""
    error = context.get("exception")
    log.error("on the event loop: %s", context["message"] if error is None else where(error))
