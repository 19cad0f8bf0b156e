"""Lesson 24: its oracles against the reference's server and template, other right answers, and the server for real."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import textwrap
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from tests.course.taken import pass_all
from tinyvllm_ref import LLM, SamplingParams, emulation
from tinyvllm_ref.course import clients, my_engine, serving
from tinyvllm_ref.course.answers import make_answer
from tinyvllm_ref.course.engine_card import engine_report
from tinyvllm_ref.course.exercises import exercise_of, lesson_of
from tinyvllm_ref.course.judging import cases_of, judge
from tinyvllm_ref.course.lessons import solution_cell
from tinyvllm_ref.server import build_app as reference_app

QUESTION = [{"role": "user", "content": "Tell me a story about a little fox named Pip."}]


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYVLLM_MY_ENGINE", str(tmp_path / "my_engine"))


def verdict(id: str, source: str, seed: int = 0) -> Any:
    exercise = exercise_of(id)
    before = {other: solution_cell(other) for other in exercise.builds_on}
    answer = make_answer(exercise, textwrap.dedent(source), emulation, before=before)
    return judge(exercise, answer, emulation, seed)


def passes(id: str, source: str) -> None:
    for seed in range(3):
        found = verdict(id, source, seed)
        assert found.passed, (seed, found.first_failure)


# ---------------- oracles


def test_a_conversation_is_what_the_engine_is_given_for_it():
    """LLM.chat, of which the engine's tests say that it is transformers', and the lesson's oracle."""
    exercise = exercise_of("24.1")
    seen = []
    llm = LLM("tiny-stories", num_blocks=64)
    add = llm.engine.add_request
    llm.engine.add_request = lambda request, text: (seen.append(request.prompt_token_ids), add(request, text))
    checked = 0
    for case, expected in cases_of(exercise, 0):
        if case.inputs["settings"]["bos_token"] == "<|bos|>":
            llm.chat(case.inputs["messages"], SamplingParams(max_tokens=1), use_tqdm=False)
            assert seen.pop() == expected["ids"]
            assert expected["ids"].count(llm.tokenizer.bos_token_id) == 1
            checked += 1
    assert checked >= 3


class _ForTheReference:
    """What the reference's application uses of an engine beyond what the lesson's does."""

    refusing = None
    stats = SimpleNamespace(running=0, waiting=0, blocks_used=0, blocks_total=0, preemptions=0)
    llm = SimpleNamespace(tokenizer=SimpleNamespace(token_bytes=None, stream=lambda: None))

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def check_room(self, completions: int) -> None:
        """There is always room."""

    async def submit_many(self, prompts: Any) -> list[Any]:
        streams = [await self.engine.submit(ids, params) for ids, params in prompts]
        for stream, (_, params) in zip(streams, prompts, strict=True):
            stream.prompt_logprobs, stream.params = None, params
        return streams


def test_the_reference_s_server_gives_what_is_expected():
    """The expected answers of 24.5 are those of a server whose own tests use OpenAI's client and schema."""
    exercise = exercise_of("24.5")
    for case, expected in cases_of(exercise, 0):
        answer = lambda engine: reference_app(_ForTheReference(engine))  # noqa: E731
        found = exercise.run(answer, case.inputs, None)
        assert {name: found[name] for name in expected} == expected, case.label


def test_events_are_read_as_the_standard_says():
    """Examples of the standard's section, in our own words: line ends of three kinds, several lines, no blank line."""
    assert clients.read_events(b"data: a\ndata: b\n\ndata:c\r\n\r\n: a remark\rdata\r\rdata: cut off\n") == [
        "a\nb",
        "c",
        "",
    ]


# ---------------- the harness itself


def test_a_loop_that_nobody_will_wake_is_given_up():
    async def waits() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(clients.NobodyWakes, match="nothing is left"):
        clients.in_a_loop(waits)


def test_a_loop_may_wait_for_a_thread():
    async def waits() -> int:
        gate = threading.Event()
        asyncio.get_running_loop().call_later(0.01, gate.set)
        await asyncio.to_thread(gate.wait)
        return 7

    assert clients.in_a_loop(waits) == 7


def test_it_runs_within_a_loop():
    """As in a notebook, whose kernel has one."""

    async def outer() -> bool:
        return verdict("24.3", solution_cell("24.3")).passed

    assert asyncio.run(outer())


# ---------------- other right answers

_OTHER_LOOPS = {
    "cleared before the wait": (
        "            await self.wake.wait()\n                self.wake.clear()\n",
        "            self.wake.clear()\n                await self.wake.wait()\n",
    ),
    "another loop instead of continue": (
        "            if not self.engine.has_work:\n                await self.wake.wait()\n"
        "                self.wake.clear()\n"
        "                continue\n",
        "            while not self.engine.has_work:\n                await self.wake.wait()\n"
        "                self.wake.clear()\n"
        "                self.carry_out_orders()\n",
    ),
    "aborted in any case": (
        '            if not finished:\n                self.order("abort", request.request_id)',
        '            self.order("abort", request.request_id)',
    ),
}


@pytest.mark.parametrize("name", _OTHER_LOOPS)
def test_small_changes_of_the_loop(name):
    source, (old, new) = solution_cell("24.3"), _OTHER_LOOPS[name]
    assert old in source
    passes("24.3", source.replace(old, new))


def test_nothing_on_stderr_for_a_coroutine_that_nobody_awaited():
    source = solution_cell("24.5").replace("return await engine.submit(", "return engine.submit(")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert not verdict("24.5", source).passed
        gc.collect()
    assert not [one for one in said if "never awaited" in str(one.message)]


@pytest.mark.parametrize(
    "source",
    [
        # plain Jinja, and the tokenizer's way of adding taken out of the tokenizer
        """
        import jinja2

        def refuse(message):
            raise ValueError(message)

        def encode_chat(messages, settings, tokenizer):
            values = dict(settings, messages=messages, add_generation_prompt=True, raise_exception=refuse)
            values["bos_token"] = values["bos_token"] or ""
            text = jinja2.Template(settings["chat_template"]).render(values)
            return list(tokenizer.encode(text, None, False, False).ids)
        """,
        # all that the settings have, less what is None
        """
        import jinja2.sandbox

        def refuse(message):
            raise ValueError(message)

        def encode_chat(messages, settings, tokenizer):
            environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            environment.globals["raise_exception"] = refuse
            template = environment.from_string(settings["chat_template"])
            names = {name: value for name, value in settings.items() if value is not None}
            text = template.render({**names, "messages": messages, "add_generation_prompt": True})
            return tokenizer.encode(text, add_special_tokens=False).ids
        """,
    ],
)
def test_other_ways_to_encode_a_conversation(source):
    passes("24.1", source)


@pytest.mark.parametrize(
    "source",
    [
        # events of nothing, characters as they are, line ends of the other kind
        """
        import json

        def events(ids, stream):
            for id in ids:
                yield ("data: " + json.dumps({"text": stream.push(id)}, ensure_ascii=False) + "\\r\\n\\r\\n").encode()
            yield b'data:{"text": ' + json.dumps(stream.end()).encode() + b"}\\n\\n"
            yield b"data: [DONE]\\n\\n"
        """,
        # bytes collected by hand
        """
        import codecs, json

        def events(ids, stream):
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            for id in ids:
                if text := decoder.decode(stream.tokens[id]):
                    yield b"data: %s\\n\\n" % json.dumps({"text": text}).encode()
            if text := decoder.decode(b"", True):
                yield b"data: %s\\n\\n" % json.dumps({"text": text}).encode()
            yield b"data: [DONE]\\n\\n"
        """,
    ],
)
def test_other_ways_to_make_events(source):
    passes("24.2", source)


@pytest.mark.parametrize(
    "source",
    [
        # a thread of its own, and a lock: what the reference does
        """
        import asyncio
        import threading

        class AsyncEngine:
            def __init__(self, engine):
                self.engine, self.loop = engine, asyncio.get_running_loop()
                self.changed = threading.Condition()
                self.added, self.aborted, self.queues, self.ends = [], [], {}, False

            async def run(self):
                thread = threading.Thread(target=self.work, daemon=True)
                thread.start()
                try:
                    await self.loop.create_future()
                finally:
                    with self.changed:
                        self.ends = True
                        self.changed.notify()

            def work(self):
                while True:
                    with self.changed:
                        while not (self.engine.has_work or self.added or self.aborted or self.ends):
                            self.changed.wait()
                        added, aborted, self.added, self.aborted = self.added, self.aborted, [], []
                        if self.ends:
                            return
                    for request in added:
                        try:
                            self.engine.add_request(request)
                        except ValueError as error:
                            self.loop.call_soon_threadsafe(self.put, request.request_id, error)
                    for id in aborted:
                        self.engine.abort(id)
                    if self.engine.has_work:
                        for output in self.engine.step():
                            self.loop.call_soon_threadsafe(self.put, output.request_id, output)

            def put(self, id, item):
                if id in self.queues:
                    self.queues[id].put_nowait(item)

            async def stream(self, request):
                queue = self.queues[request.request_id] = asyncio.Queue()
                with self.changed:
                    self.added.append(request)
                    self.changed.notify()
                read, finished = 0, False
                try:
                    while not finished:
                        output = await queue.get()
                        if isinstance(output, ValueError):
                            raise output
                        finished = output.finished
                        for token in output.outputs[0].token_ids[read:]:
                            read += 1
                            yield token
                finally:
                    self.queues.pop(request.request_id)
                    if not finished:
                        with self.changed:
                            self.aborted.append(request.request_id)
                            self.changed.notify()
        """,
        # adds first and then aborts, a sentinel in the queue, an executor
        """
        import asyncio

        class AsyncEngine:
            def __init__(self, engine):
                self.engine, self.new, self.gone, self.readers = engine, [], set(), {}
                self.wake = asyncio.Event()

            async def run(self):
                loop = asyncio.get_running_loop()
                while True:
                    new, self.new = self.new, []
                    gone, self.gone = self.gone, set()
                    for request in new:
                        if request.request_id in gone:
                            continue
                        try:
                            self.engine.add_request(request)
                        except ValueError as error:
                            self.readers[request.request_id].put_nowait(error)
                    for id in gone:
                        self.engine.abort(id)
                    if self.engine.has_work:
                        for output in await loop.run_in_executor(None, self.engine.step):
                            reader = self.readers.get(output.request_id)
                            if reader:
                                reader.put_nowait((list(output.outputs[0].token_ids), output.finished))
                    else:
                        self.wake.clear()
                        await self.wake.wait()

            async def stream(self, request):
                id, count = request.request_id, 0
                self.readers[id] = asyncio.Queue()
                self.new.append(request)
                self.wake.set()
                try:
                    while True:
                        item = await self.readers[id].get()
                        if isinstance(item, Exception):
                            raise item
                        tokens, finished = item
                        while count < len(tokens):
                            count += 1
                            yield tokens[count - 1]
                        if finished:
                            break
                except BaseException:
                    self.gone.add(id)
                    self.wake.set()
                    raise
                finally:
                    del self.readers[id]
        """,
    ],
)
def test_other_loops(source):
    passes("24.3", source)


@pytest.mark.parametrize(
    "source",
    [
        # two tasks, and whoever is first
        """
        import asyncio

        async def follow(stream, receive, take):
            async def read():
                async for delta in stream:
                    await take(delta)

            async def listen():
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return

            reader, listener = asyncio.ensure_future(read()), asyncio.ensure_future(listen())
            try:
                await asyncio.wait([reader, listener], return_when=asyncio.FIRST_COMPLETED)
                if listener.done() and not reader.done():
                    return False
                await reader
                return True
            finally:
                reader.cancel()
                listener.cancel()
                stream.abort()
        """,
        # a task group
        """
        import asyncio

        class Gone(Exception):
            pass

        async def follow(stream, receive, take):
            async def listen():
                while (await receive())["type"] != "http.disconnect":
                    pass
                raise Gone

            try:
                async with asyncio.TaskGroup() as group:
                    listener = group.create_task(listen())
                    async for delta in stream:
                        await take(delta)
                    listener.cancel()
            except ExceptionGroup as errors:
                if isinstance(errors.exceptions[0], Gone):
                    return False
                raise errors.exceptions[0]
            finally:
                stream.abort()
            return True
        """,
    ],
)
def test_other_ways_to_follow(source):
    passes("24.4", source)


def test_an_application_by_starlette():
    """A learner may know a framework: what is asked for is an ASGI application."""
    passes(
        "24.5",
        """
        import json

        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        from tinyvllm_ref import SamplingParams

        def build_app(engine):
            head = {"id": "x", "created": 1, "model": engine.model_name}

            def wrong(status, text):
                return JSONResponse({"error": {"message": text, "type": "invalid_request_error"}}, status)

            async def models(request):
                return JSONResponse({"object": "list", "data": [{"id": engine.model_name, "object": "model"}]})

            async def missing(request, error):
                return wrong(404, "no such path")

            async def complete(request):
                chat = "chat" in request.url.path
                try:
                    asked = await request.json()
                except ValueError:
                    return wrong(400, "no JSON")
                if asked["model"] != engine.model_name:
                    return wrong(404, "no such model")
                try:
                    ids = engine.encode_chat(asked["messages"]) if chat else engine.encode(asked["prompt"])
                    given = {k: asked[k] for k in ("temperature", "top_p", "seed", "stop") if k in asked}
                    params = SamplingParams(max_tokens=asked.get("max_tokens", None if chat else 16), **given)
                    stream = await engine.submit(ids, params)
                except (ValueError, KeyError) as error:
                    return wrong(400, repr(error))
                return Answer(stream, chat, asked.get("stream", False))

            class Answer:
                def __init__(self, stream, chat, streamed):
                    self.stream, self.chat, self.streamed = stream, chat, streamed

                def choice(self, text, reason, name, role):
                    said = {"content": text} | ({"role": "assistant"} if role else {})
                    return {"index": 0, "finish_reason": reason} | ({name: said} if self.chat else {"text": text})

                async def __call__(self, scope, receive, send):
                    kind = "chat.completion" if self.chat else "text_completion"
                    if self.streamed:
                        headers = [(b"Content-Type", b"text/event-stream")]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        if self.chat:
                            await self.send(send, kind, self.choice("", None, "delta", True))
                    text, count, reason = "", 0, None

                    async def take(delta):
                        nonlocal text, count, reason
                        text, count, reason = text + delta.text, count + len(delta.token_ids), delta.finish_reason
                        if self.streamed and (delta.text or reason):
                            await self.send(send, kind, self.choice(delta.text, reason, "delta", False))

                    if not await follow(self.stream, receive, take):
                        return
                    if self.streamed:
                        await send({"type": "http.response.body", "body": DONE})
                        return
                    prompt = len(self.stream.prompt_token_ids)
                    usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
                    whole = {**head, "object": kind, "usage": usage}
                    choices = [self.choice(text, reason, "message", True)]
                    await JSONResponse({**whole, "choices": choices})(scope, receive, send)

                async def send(self, send, kind, choice):
                    kind += ".chunk" if self.chat else ""
                    body = event({**head, "object": kind, "choices": [choice]})
                    await send({"type": "http.response.body", "body": body, "more_body": True})

            return Starlette(
                routes=[
                    Route("/v1/models", models),
                    Route("/v1/completions", complete, methods=["POST"]),
                    Route("/v1/chat/completions", complete, methods=["POST"]),
                ],
                exception_handlers={404: missing},
            )
        """,
    )


# ---------------- the part at work


def test_the_card_shows_the_server_s_text():
    """With the server alone passed: its story is the reference's, and each mistake shows in its own way."""
    exercise = exercise_of("24.5")
    for id in exercise.builds_on:
        my_engine.save(exercise_of(id), solution_cell(id), {})
    my_engine.save(exercise, solution_cell("24.5"), {})
    card = engine_report(lesson_of("24"))
    assert card.own == ("build_app",)
    assert card.runs == (("build_app", 1),)
    assert card.text == card.reference_text
    assert card.same_tokens == card.tokens > 40
    glued, second_bos, all_text = card.mistakes
    assert not any(mistake.error for mistake in card.mistakes)
    assert all(mistake.text != card.text for mistake in card.mistakes)
    assert 5 < second_bos.same_tokens < card.tokens, "it goes wrong late, and reads well"
    assert all_text.text.count("One sunny") > 10 or len(all_text.text) > 4 * len(card.text)
    assert glued.same_tokens < 5


def test_without_an_answer_the_cells_say_one_line(capsys):
    serving.talk()
    serving.crowd()
    serving.hang_up()
    assert capsys.readouterr().out.splitlines() == ["nothing to serve yet: 24.5 has not passed"] * 3
    assert engine_report(lesson_of("24")).own == ()


def test_everything_of_the_learner_s_serves(tmp_path, capsys):
    """Parts of all lessons, the learner's server in front of the learner's engine, and real clients of it."""
    folder = tmp_path / "my_engine"
    pass_all(folder, last="24")
    assert "build_app" in my_engine.own_parts().owners()
    serving.talk("Tell me a story about a little fox named Pip.", "Who is the story about?")
    said = capsys.readouterr().out
    llm = LLM(
        "tiny-stories", parts=my_engine.own_parts(), num_blocks=128
    )  # it may part from the reference at a tie
    params = SamplingParams(max_tokens=60, temperature=0.0)
    story = llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0].text
    talk = [
        *QUESTION,
        {"role": "assistant", "content": story},
        {"role": "user", "content": "Who is the story about?"},
    ]
    answer = llm.chat(talk, params, use_tqdm=False)[0].outputs[0].text
    assert story in said
    assert answer in said
    serving.crowd(12, max_tokens=12)
    alike, steps = capsys.readouterr().out.splitlines()
    assert alike == "12 of 12 clients got the text that they get when nobody else is there"
    together, alone = (int(number) for number in re.findall(r"\d+", steps))
    assert 12 <= together <= 40
    assert alone > 3 * together
    serving.hang_up(max_tokens=300)
    before, after = capsys.readouterr().out.splitlines()
    assert "blocks in use 0" not in before
    assert "after it had gone: blocks in use 0, steps made" in after
    assert int(after.rsplit(" ", 1)[1]) < 300


@pytest.mark.slow
def test_tinyvllm_serve_mine(tmp_path, monkeypatch):
    """From the command line, behind the guard, for openai's client."""
    from tests.server.serving import process

    pass_all(tmp_path / "my_engine", last="24")
    llm = LLM("tiny-stories", parts=my_engine.own_parts())
    story = llm.chat(QUESTION, SamplingParams(max_tokens=24, temperature=0.0), use_tqdm=False)
    with process("--mine", "--api-key", "k", TINYVLLM_MY_ENGINE=str(tmp_path / "my_engine")) as server:
        http = openai.DefaultHttpxClient(trust_env=False)
        with openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="k", max_retries=0, http_client=http
        ) as client:
            whole = client.chat.completions.create(
                model="tiny-stories", messages=QUESTION, max_tokens=24, temperature=0
            )
            assert whole.choices[0].message.content == story[0].outputs[0].text
            assert whole.usage.completion_tokens == 24
            pieces = client.completions.create(model="tiny-stories", prompt="Once", max_tokens=4, stream=True)
            assert [chunk.object for chunk in pieces] == ["text_completion"] * 4
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="another", prompt="Once")
            with pytest.raises(openai.BadRequestError, match="temperature"):
                client.completions.create(model="tiny-stories", prompt="Once", temperature=-1)
        server.terminate()
        assert server.wait() == 0
    assert "Traceback" not in server.log


def test_what_a_check_says_fits_into_json():
    """The inputs travel to another process where a class is graded."""
    for exercise in lesson_of("24").exercises:
        for case, _ in cases_of(exercise, 0):
            json.dumps(case.inputs)
