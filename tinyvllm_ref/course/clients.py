"""What lesson 24's answers are run with: an event loop, engines that follow a script, and clients that come and go.

Nothing here judges by time. What an answer does is put down in steps of the engine; a clock is only looked at where
nothing happens any more, so that an answer that waits for ever is told so.

The process that runs an answer sees this module.
"""

from __future__ import annotations

import asyncio
import codecs
import ctypes
import inspect
import itertools
import json
import re
import selectors
import threading
import traceback
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

PATIENCE = 1.0
"""Seconds without anything to do, after which an event loop is given up."""
_MOST_STEPS = 60
_TURNS = 30  # of the event loop, in which whoever can go on does


class NobodyWakes(RuntimeError):
    """Every coroutine waits, and nothing is left that could wake one of them."""


class LoopBlocked(RuntimeError):
    """A coroutine goes round and round, and nobody else can run."""


class TooManySteps(RuntimeError):
    """An engine was asked for steps again and again, after it had nothing left to do."""


# ---------------- an event loop


def in_a_loop(main: Callable[[], Coroutine[Any, Any, Any]], patience: float | None = PATIENCE) -> Any:
    """Run a coroutine in an event loop of its own, beside one that may run here (a notebook's does).

    Parameters
    ----------
    main : callable
        Gives the coroutine.
    patience : float, optional
        Seconds without anything to do; None where a thread may take as long as it likes.

    Raises
    ------
    NobodyWakes
        Or whatever the coroutine raises.
    """
    found: list[tuple[Any, BaseException | None]] = []

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: _PatientLoop(patience)) as runner:
                found.append((runner.run(main()), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # "coroutine was never awaited": the check says what is wrong
        thread.start()
        try:
            thread.join()
        except BaseException:  # the time is up: an answer that never comes back is stopped there, too
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
            )
            raise
    value, error = found[0]
    if error is not None:
        _close_what_never_ran(error)
        raise error
    return value


def _close_what_never_ran(error: BaseException) -> None:
    """A coroutine that an answer forgot to await says so on stderr when it is thrown away; closed, it is silent."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in list(frame.f_locals.values()):
            if inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == inspect.CORO_CREATED:
                value.close()


class _PatientSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type, unused-ignore]
    """Where the loop has nothing to do and no appointment, it may wait for a thread; but not for ever."""

    def __init__(self, patience: float | None) -> None:
        super().__init__()
        self._patience = patience
        self.turns = 0

    def select(self, timeout: float | None = None) -> Any:
        self.turns += 1
        events = super().select(self._patience if timeout is None else timeout)
        if timeout is None and not events and self._patience is not None:
            raise NobodyWakes(
                "every coroutine waits, and nothing is left that could wake one of them: who should have put something "
                "into a queue, set an event, or ended a wait?"
            )
        return events


class _PatientLoop(asyncio.SelectorEventLoop):
    def __init__(self, patience: float | None) -> None:
        self.patient = _PatientSelector(patience)
        super().__init__(self.patient)
        # An answer's forgotten tasks are its own business, and nothing is written to stderr.
        self.set_exception_handler(lambda loop, context: None)


async def is_busy() -> bool:
    """Whether somebody asks again and again instead of waiting.

    In such a moment the loop turns a few times, or thousands.
    """
    loop: Any = asyncio.get_running_loop()
    before = loop.patient.turns
    await asyncio.sleep(0.02)
    return bool(loop.patient.turns - before > 200)


async def settle() -> None:
    """Let everyone go on who can."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


# ---------------- lesson 23's engine, by a script


class StepEngine:
    """The engine of lesson 23 as whoever drives it sees it; who says what is written down beforehand.

    Parameters
    ----------
    script : mapping of str to list of int, or None
        Request id -> the tokens that it gets; None where the engine refuses it.
    seats : int
        How many requests run at once.
    during : callable
        ``await during(step)`` is run by the event loop while that step is computed.

    Attributes
    ----------
    rows : list of str
        Who ran in each step.
    seating : list of list
        ``seating[step][seat]``: who sat there, or None.
    held_up : list of int
        Steps in which the event loop could not run.
    disturbed : list of str
        What was called while a step was being computed.
    """

    def __init__(
        self,
        script: Mapping[str, Sequence[int] | None],
        seats: int,
        during: Callable[[int], Awaitable[None]],
    ) -> None:
        self.script, self.during = script, during
        self.waiting: list[str] = []
        self.seated: list[str | None] = [None] * seats
        self.said: dict[str, int] = {}
        self.rows: list[str] = []
        self.seating: list[list[str | None]] = []
        self.held_up: list[int] = []
        self.disturbed: list[str] = []
        self._loop: Any = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._computes = False
        self._gave_up = False
        self._questions, self._turns = 0, -1

    @property
    def has_work(self) -> bool:
        turns = self._loop.patient.turns
        self._questions = self._questions + 1 if turns == self._turns else 0
        self._turns = turns
        if self._questions > 1000:
            raise LoopBlocked(
                "has_work was asked 1,000 times, and the event loop could run nobody else meanwhile; to await what has "
                "come already is not to wait"
            )
        return bool(self.waiting) or any(self.seated)

    def left(self) -> list[str]:
        """Who still waits or runs."""
        return [*self.waiting, *(id for id in self.seated if id is not None)]

    async def run_out(self) -> None:
        """Wait until nobody is left, or no more steps come: what an answer does for nobody is seen to its end."""
        steps, patience = -1, PATIENCE
        while self.left() and patience > 0:
            patience = PATIENCE if steps != len(self.rows) else patience - 0.01
            steps = len(self.rows)
            await asyncio.sleep(0.01)

    def add_request(self, request: Any) -> None:
        self._undisturbed("add_request")
        if self.script[request.request_id] is None:
            raise ValueError(f"request {request.request_id!r} can never fit")
        self.waiting.append(request.request_id)
        self.said[request.request_id] = 0

    def abort(self, id: str) -> None:
        self._undisturbed("abort")
        self.waiting = [other for other in self.waiting if other != id]
        self.seated = [None if other == id else other for other in self.seated]

    def step(self) -> list[Any]:
        self._undisturbed("step")
        if len(self.rows) == _MOST_STEPS:
            raise TooManySteps(f"step() was called {_MOST_STEPS + 1} times; the script ends long before")
        for seat, id in enumerate(self.seated):
            if id is None and self.waiting:
                self.seated[seat] = self.waiting.pop(0)
        self.seating.append(list(self.seated))
        running = [id for id in self.seated if id is not None]
        self.rows.append(" ".join(sorted(running)) or "nobody")
        self._computes = True
        self._let_the_loop_run(len(self.rows))
        self._computes = False
        return [self._output(id) for id in running]

    def _output(self, id: str) -> Any:
        """One more token for a request that ran, whoever may have left meanwhile."""
        self.said[id] += 1
        tokens = list(self.script[id] or ())[: self.said[id]]
        finished = len(tokens) == len(self.script[id] or ())
        if finished:
            self.seated = [None if other == id else other for other in self.seated]
        completion = SimpleNamespace(
            index=0, text="", token_ids=tokens, finish_reason="length" if finished else None
        )
        return SimpleNamespace(request_id=id, finished=finished, outputs=[completion])

    def _undisturbed(self, what: str) -> None:
        if self._computes:
            self.disturbed.append(f"{what} in step {len(self.rows)}")

    def _let_the_loop_run(self, step: int) -> None:
        """Hold the step until the event loop has had its turns; where the loop itself computes, it has none."""
        if threading.get_ident() == self._thread:
            self.held_up.append(step)
            self._loop.create_task(self._meanwhile(step))
            return
        ran = threading.Event()

        def start() -> None:
            self._loop.create_task(self._meanwhile(step)).add_done_callback(lambda task: ran.set())

        self._loop.call_soon_threadsafe(start)
        if self._gave_up or not ran.wait(PATIENCE):
            self._gave_up = True
            self.held_up.append(step)

    async def _meanwhile(self, step: int) -> None:
        await self.during(step)
        await settle()


class ByteStream:
    """A tokenizer's stream whose tokens are bytes, as lesson 03's: never half a character.

    Attributes
    ----------
    tokens : list of bytes
        ``tokens[id]``: what a token stands for.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = list(tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        return self._utf8.decode(self.tokens[id])

    def end(self) -> str:
        return self._utf8.decode(b"", final=True)


# ---------------- the server's engine, by a script


class Stopped(Exception):
    """The stream of a request that was aborted has been read on."""


class ScriptedStream:
    """What :meth:`ServedScript.submit` gives; see :class:`tinyvllm_ref.parts.ServedStream`."""

    def __init__(self, engine: ServedScript, request_id: str, prompt_token_ids: list[int]) -> None:
        self.engine, self.request_id, self.prompt_token_ids = engine, request_id, prompt_token_ids
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        item = await self.queue.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item

    def abort(self) -> None:
        self.engine.abort(self.request_id)


class ServedScript:
    """An engine for an event loop, :class:`tinyvllm_ref.parts.ServedEngine`; its steps come when they are asked for.

    Parameters
    ----------
    script : mapping of str to list of str
        A prompt's text -> the pieces of text that it gets, one a step; "" where a character is not complete.
    seats : int
        How many requests run at once.
    max_model_len : int
        A prompt and its completion can have so many tokens.

    Attributes
    ----------
    asked : list of dict
        Of each request: the prompt's text, and the options that it came with.
    rows : list of str
        Who ran in each step.
    """

    model_name = "scripted"

    def __init__(self, script: Mapping[str, Sequence[str]], seats: int = 4, max_model_len: int = 200) -> None:
        self.script, self.seats, self.max_model_len = script, seats, max_model_len
        self.asked: list[dict[str, Any]] = []
        self.rows: list[str] = []
        self.waiting: list[tuple[ScriptedStream, list[str], str]] = []
        self.running: list[tuple[ScriptedStream, list[str], str]] = []
        self.has_request = asyncio.Event()
        self._numbers = itertools.count()

    def encode(self, text: str) -> list[int]:
        return [256, *text.encode()]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        for message in messages:
            if message["role"] not in ("system", "user", "assistant"):
                raise ValueError(f"the chat template refuses this conversation: role {message['role']}")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return [256, *f"{text}<assistant>".encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id for id in ids if id < 256).decode(errors="replace")

    async def submit(self, prompt_token_ids: Sequence[int], params: Any) -> ScriptedStream:
        ids = list(prompt_token_ids)
        most = params.max_tokens
        if len(ids) + (most or 1) > self.max_model_len:
            raise ValueError(
                f"{len(ids)} tokens and {most} new ones; the context length is {self.max_model_len}"
            )
        await asyncio.sleep(0)
        text = {0: "(no BOS) ", 1: ""}.get(ids.count(256), f"({ids.count(256)} BOS) ") + self.decode(ids)
        names = ("max_tokens", "temperature", "top_p", "seed")
        given = {name: getattr(params, name) for name in names}
        self.asked.append({"prompt": text, **given, "stop": list(params.stop_strings)})
        pieces = list(self.script.get(text, ["?"]))
        reason = "stop" if most is None or len(pieces) <= most else "length"
        stream = ScriptedStream(self, f"{next(self._numbers)}", ids)
        self.waiting.append((stream, pieces[:most], reason))
        self.has_request.set()
        return stream

    def abort(self, request_id: str) -> None:
        for queue in (self.waiting, self.running):
            for entry in [one for one in queue if one[0].request_id == request_id]:
                queue.remove(entry)
                entry[0].queue.put_nowait(Stopped("the request was aborted"))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def left(self) -> list[str]:
        """Who still waits or runs."""
        return [stream.request_id for stream, *_ in (*self.running, *self.waiting)]

    def step(self) -> None:
        """One more piece for everyone who has a seat."""
        while self.waiting and len(self.running) < self.seats:
            self.running.append(self.waiting.pop(0))
        self.rows.append(" ".join(stream.request_id for stream, *_ in self.running))
        for entry in list(self.running):
            stream, pieces, reason = entry
            piece, last = pieces.pop(0), not pieces
            stream.queue.put_nowait(
                SimpleNamespace(
                    index=0,
                    text=piece,
                    token_ids=(len(pieces),),
                    logprobs=None,
                    finish_reason=reason if last else None,
                )
            )
            if last:
                self.running.remove(entry)
                stream.queue.put_nowait(None)


# ---------------- a client, as the server's network side


class Connection:
    """The `receive` and `send` that a server gives an ASGI application for one request.

    Parameters
    ----------
    body : sequence of bytes
        What the client sends, in packets.
    engine : ServedScript, optional
        Whose steps are noted with what is sent.

    Attributes
    ----------
    packets : list of bytes
        What was sent to the client.
    steps : list of int
        For each packet, how many steps the engine had made.
    late : list of bytes
        What was sent after the client had gone.
    """

    def __init__(self, body: Sequence[bytes] = (), engine: ServedScript | None = None) -> None:
        self.engine = engine
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.packets: list[bytes] = []
        self.steps: list[int] = []
        self.late: list[bytes] = []
        self.complete = self.gone = self.broken = False
        for number, part in enumerate(body, 1):
            more = number < len(body)
            self.incoming.put_nowait({"type": "http.request", "body": part, "more_body": more})

    async def receive(self) -> dict[str, Any]:
        return await self.incoming.get()

    async def send(self, message: Mapping[str, Any]) -> None:
        await asyncio.sleep(0)
        if self.broken:
            raise OSError("the connection is broken")
        if message["type"] == "http.response.start":
            self._start(message)
            return
        if message["type"] != "http.response.body":
            raise ValueError(f"send() got a message of type {message['type']!r}")
        body = message.get("body", b"")
        if self.status is None:
            raise RuntimeError("send() got a body, and http.response.start has not been sent")
        if self.complete:
            raise RuntimeError("send() got a body after the last one (more_body was False or missing)")
        if not isinstance(body, bytes):
            raise TypeError(f"send() got a body of type {type(body).__name__}; it must be bytes")
        if self.gone:
            self.late.append(body)
        else:
            self.packets.append(body)
            self.steps.append(len(self.engine.rows) if self.engine else 0)
        if not message.get("more_body", False):
            self.complete = True
            self.incoming.put_nowait({"type": "http.disconnect"})

    def _start(self, message: Mapping[str, Any]) -> None:
        if self.status is not None:
            raise RuntimeError("send() got http.response.start twice")
        self.status = int(message["status"])
        for name, value in message.get("headers", ()):
            if not (isinstance(name, bytes) and isinstance(value, bytes)):
                raise TypeError("send() got a header that is not a pair of bytes")
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def leave(self) -> None:
        """The client goes."""
        self.gone = True
        self.incoming.put_nowait({"type": "http.disconnect"})


async def drive(
    task: asyncio.Task[Any], engine: ServedScript, meanwhile: Callable[[int], Any] = lambda step: None
) -> None:
    """Make the engine's steps until `task`, which waits for them, has ended and nothing is left to do.

    ``meanwhile(step)`` is called before each step but the first: what happens on the network between two steps.
    """
    asked = asyncio.ensure_future(engine.has_request.wait())
    await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    for step in range(_MOST_STEPS):
        await settle()
        meanwhile(step)
        await settle()
        if engine.has_work:
            engine.step()
        elif task.done():
            return
        else:
            await asyncio.wait({task})
    raise TooManySteps(f"{_MOST_STEPS} steps were made, and the answer has not ended")


async def exchange(
    app: Any,
    engine: ServedScript,
    method: str,
    path: str,
    body: Sequence[bytes] = (),
    leaves_at: int | None = None,
) -> Connection:
    """One request to an application, and its answer; the client may leave before a step of the engine."""
    connection = Connection(body or [b""], engine)
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "raw_path": path.encode(), "query_string": b"", "headers": [(b"content-type", b"application/json")],
        "scheme": "http", "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 50000), "root_path": "",
    }  # fmt: skip

    async def answer() -> None:
        await app(scope, connection.receive, connection.send)

    task = asyncio.ensure_future(answer())
    await drive(task, engine, lambda step: connection.leave() if step == leaves_at else None)
    if not connection.gone:
        task.result()
    return connection


def read_events(data: bytes) -> list[str]:
    """The data of each event of a stream, as a browser reads it (WHATWG HTML, "Server-sent events")."""
    events, lines = [], list[str]()
    for line in re.split("\r\n|\n|\r", data.decode("utf-8", errors="replace"))[
        :-1
    ]:  # the last has no end yet
        if line == "":
            if lines:
                events.append("\n".join(lines))
            lines = []
        elif line == "data" or line.startswith("data:"):
            lines.append(line[5:].removeprefix(" "))
    return events  # what no empty line ends is no event


def parsed(data: str) -> Any:
    """An event's data as JSON; in words where it is none."""
    try:
        return json.loads(data)
    except ValueError:
        return f"no JSON: {data}"


def text_of(body: bytes) -> str:
    """The text of an answer's body, be it streamed or whole, of a chat or not: for pictures and stories."""
    found = ""
    objects = [json.loads(one) for one in read_events(body) if one != "[DONE]"] or [json.loads(body)]
    for choice in itertools.chain.from_iterable(one["choices"] for one in objects):
        part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        found += part.get("content") or ""
    return found
