"""Lesson 24's server at work: the learner's application over the learner's engine, and real clients that talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tinyvllm_ref import LLM, SamplingParams, emulation
from tinyvllm_ref.installing import install_extra
from tinyvllm_ref.parts import Parts
from tinyvllm_ref.server.async_engine import AsyncEngine

from . import my_engine
from .clients import Connection, in_a_loop, text_of
from .wiring import wired

MODEL = "tiny-stories"
QUESTION = "Tell me a story about a little fox named Pip."
_SCOPE = {
    "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
    "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b"", "root_path": "",
    "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    "server": ("localhost", 8000), "client": ("localhost", 50000),
}  # fmt: skip


def answer_by_server(parts: Parts, task: Any) -> tuple[list[int], str]:
    """What a client reads that asks a question, for the engine card; without a learner's server, what it should read.

    Parameters
    ----------
    parts : Parts
        With ``build_app``, or without.
    task : Task
        Its prompt is the question.

    Returns
    -------
    tuple of (list of int, str)
        The answer's tokens, and question and answer.
    """
    llm = LLM(MODEL, parts=parts, **dict(task.options))
    messages = [{"role": "user", "content": task.prompt}]
    asked = {"max_tokens": task.max_tokens, **dict(task.sampling)}
    if parts.build_app is None:
        text = llm.chat(messages, SamplingParams(**asked), use_tqdm=False)[0].outputs[0].text
    else:
        text = _through_the_app(
            parts.build_app, llm, {"model": MODEL, "messages": messages, "stream": True, **asked}
        )
    return _tokens_of(text), f"{task.prompt} {text}"


def _tokens_of(text: str) -> list[int]:
    from tinyvllm_ref.checkpoint.names import resolve
    from tinyvllm_ref.tokenizer import Tokenizer

    return Tokenizer(resolve(MODEL)).encode(text, add_special_tokens=False)


def _through_the_app(build_app: Any, llm: LLM, asked: dict[str, Any]) -> str:
    """One request in this process, without a network."""
    engine = AsyncEngine(_quick(llm), model_name=MODEL)
    connection = Connection([json.dumps(asked).encode()])

    async def main() -> None:
        await build_app(engine)(dict(_SCOPE), connection.receive, connection.send)

    try:
        in_a_loop(main, patience=None)
    finally:
        engine.close()
    body = b"".join(connection.packets)
    if connection.status != 200:
        raise RuntimeError(f"status {connection.status}: {body.decode(errors='replace')}")
    return text_of(body)


def _quick(llm: LLM) -> LLM:
    """The same, with steps that run without full checks in any thread: a learner's engine does not choose a mode."""
    step = llm.engine.step

    def quick_step() -> Any:
        with emulation.checks("fast"):
            return step()

    llm.engine.step = quick_step
    return llm


# ---------------- a server, and clients that talk to it


class Serving:
    """The learner's application behind uvicorn, on a free port of this computer.

    Attributes
    ----------
    url : str
        ``"http://127.0.0.1:PORT/v1"``.
    llm : LLM
        The engine's thread has it; its numbers may be looked at.
    steps : int
        How many the engine has made.
    """

    def __init__(self, build_app: Any, parts: Parts, **options: Any) -> None:
        import uvicorn

        self.llm = _quick(LLM(MODEL, parts=parts, **options))
        self.llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=2, temperature=0.0), use_tqdm=False)
        self.steps = 0
        self._count_steps()
        self.engine = AsyncEngine(self.llm, model_name=MODEL)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        config = uvicorn.Config(
            build_app(self.engine),
            log_config=None,
            log_level="critical",
            access_log=False,
            ws="none",
            lifespan="off",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[self._socket])), daemon=True
        )
        self._thread.start()

    def _count_steps(self) -> None:
        step = self.llm.engine.step

        def counted() -> Any:
            self.steps += 1
            return step()

        self.llm.engine.step = counted

    @property
    def blocks_in_use(self) -> int:
        """Blocks that belong to somebody."""
        return int(self.llm.engine_config.num_blocks or 0) - int(self.llm.engine.blocks.num_free)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()
        self.engine.close()


@contextlib.contextmanager
def _serving(num_blocks: int = 256) -> Iterator[Serving | None]:
    """A server of all that the learner has; None where 24.5 has not passed, or a package is missing."""
    own = my_engine.own_parts()
    if own.build_app is None:
        print("nothing to serve yet: 24.5 has not passed")
        yield None
        return
    try:
        import openai
        import uvicorn  # noqa: F401
    except ImportError as error:
        print(f"{error.name} is not installed: {install_extra('course')}")
        yield None
        return
    with wired(own):
        serving = Serving(own.build_app, own, num_blocks=num_blocks, max_num_seqs=32)
        try:
            yield serving
        except (OSError, openai.APIError) as error:
            print(f"\nno answer from {serving.url}: {error}")
        finally:
            serving.close()


def talk(*questions: str, max_tokens: int = 60) -> None:
    """Ask the learner's server by the `openai` package, as any program would; the answers are printed as they come.

    Parameters
    ----------
    *questions : str
        Of one conversation: each is asked with all that was said before.
    max_tokens : int
    """
    with _serving() as serving:
        if serving is None:
            return
        import openai

        # Not by a proxy that the environment may name: the server is on this computer.
        with openai.OpenAI(
            base_url=serving.url,
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client:
            (model,) = client.models.list().data
            messages: list[Any] = []
            for question in questions or (QUESTION,):
                messages.append({"role": "user", "content": question})
                print(f"> {question}")
                stream = client.chat.completions.create(
                    model=model.id, messages=messages, max_tokens=max_tokens, temperature=0, stream=True
                )
                text = ""
                for chunk in stream:
                    piece = chunk.choices[0].delta.content or ""
                    text += piece
                    print(piece, end="", flush=True)
                print(f"\n    [{chunk.choices[0].finish_reason}]")
                messages.append({"role": "assistant", "content": text})


def crowd(count: int = 16, max_tokens: int = 16) -> None:
    """Many clients at once, and then one after the other: are they answered alike, and in how many steps?

    Parameters
    ----------
    count : int
        At most 40.
    max_tokens : int
        For each.
    """
    from .capstone import prompts

    with _serving() as serving:
        if serving is None:
            return
        asked = prompts()[:count]
        together = asyncio_run(_ask_all(serving.url, asked, max_tokens, at_once=len(asked)))
        steps = serving.steps
        alone = asyncio_run(_ask_all(serving.url, asked, max_tokens, at_once=1))
        same = sum(one == other for one, other in zip(together, alone, strict=True))
        print(f"{same} of {len(asked)} clients got the text that they get when nobody else is there")
        print(f"steps for all of them at once: {steps}; one after the other: {serving.steps - steps}")


async def _ask_all(url: str, prompts: Sequence[str], max_tokens: int, at_once: int) -> list[str]:
    import openai

    seats = asyncio.Semaphore(at_once)
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:

        async def ask(prompt: str) -> str:
            async with seats:
                stream = await client.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

        return list(await asyncio.gather(*map(ask, prompts)))


def asyncio_run(coroutine: Any) -> Any:
    """Run a coroutine, whether or not a loop runs here already."""

    async def main() -> Any:
        return await coroutine

    return in_a_loop(main, patience=None)


def hang_up(after: int = 5, max_tokens: int = 400) -> None:
    """A client reads some events of a long answer and closes its connection: what becomes of the blocks?

    Parameters
    ----------
    after : int
        Events that it reads.
    max_tokens : int
        Tokens that it asked for.
    """
    with _serving() as serving:
        if serving is None:
            return
        asked = {
            "model": MODEL,
            "prompt": "Once upon a time",
            "max_tokens": max_tokens,
            "stream": True,
            "temperature": 1,
            "seed": 1,
        }
        body = json.dumps(asked).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", serving.port), timeout=60) as client:
            client.sendall(head.encode() + body)
            read = b""
            while read.count(b"data: ") < after and (more := client.recv(4096)):
                read += more
            held, before = serving.blocks_in_use, serving.steps
        ends = time.monotonic() + 20
        while serving.engine.in_hand and time.monotonic() < ends:
            time.sleep(0.01)
        print(f"while it was read: blocks in use {held}, steps made {before}, tokens asked for {max_tokens}")
        print(f"after it had gone: blocks in use {serving.blocks_in_use}, steps made {serving.steps}")
