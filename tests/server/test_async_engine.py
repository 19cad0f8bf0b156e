"""The engine behind an event loop, without a server: what lesson 24's learner builds on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from tinyvllm_ref import LLM, SamplingParams
from tinyvllm_ref.assembly import Parts
from tinyvllm_ref.engine import Engine
from tinyvllm_ref.server.async_engine import AsyncEngine, EngineBusy, EngineStopped

from .serving import MODEL, alone

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def run(llm, use, **options):
    """Use an engine within an event loop; nothing is in hand afterwards."""

    async def main():
        engine = AsyncEngine(llm, **options)
        try:
            return await use(engine)
        finally:
            assert await asyncio.to_thread(engine.close)
            blocks = llm.engine.blocks
            blocks.check()
            assert blocks.num_free == blocks.num_blocks
            assert engine.in_hand == 0

    return asyncio.run(main())


async def text_of(stream):
    return "".join([delta.text async for delta in stream])


@pytest.fixture
def llm():
    return LLM(MODEL, num_blocks=128)


def test_many_coroutines_each_get_their_own(llm, reference):
    prompts = ["Once", "The dog", "Tim was", "Mia and Ben went", "It was"] * 4

    async def use(engine):
        streams = [await engine.submit(engine.encode(prompt), GREEDY) for prompt in prompts]
        return await asyncio.gather(*map(text_of, streams))

    expected = [alone(reference, p, max_tokens=12, temperature=0.0).outputs[0].text for p in prompts]
    assert run(llm, use) == expected


def test_the_event_loop_never_waits_for_a_step(llm):
    """A step that takes until the loop has turned 20 times: it would never end if the loop stood still for it."""
    turned = threading.Event()
    step = llm.engine.step

    def slow_step():
        assert turned.wait(30), "the event loop stood still during a step"
        return step()

    llm.engine.step = slow_step

    async def turn():
        for _ in range(20):
            await asyncio.sleep(0)
        turned.set()

    async def use(engine):
        stream = await engine.submit(engine.encode("Once"), GREEDY)
        await turn()
        return await text_of(stream)

    assert run(llm, use)


def test_an_aborted_request_is_in_one_more_step_at_most(llm):
    steps = 0
    step = llm.engine.step

    def counted():
        nonlocal steps
        steps += 1
        return step()

    llm.engine.step = counted

    async def use(engine):
        long = SamplingParams(max_tokens=900, ignore_eos=True, n=2)
        for _ in range(5):
            stream = await engine.submit(engine.encode("Once"), long)
            async for _ in stream:
                break
            stream.abort()
            at_abort = steps
            while engine.in_hand or engine.stats.blocks_used:
                await asyncio.sleep(0)
            assert steps - at_abort <= 1
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    run(llm, use)


def test_abort_of_a_request_that_waits_or_is_on_its_way_or_has_ended():
    async def use(engine):
        long = SamplingParams(max_tokens=900, ignore_eos=True)
        running = await engine.submit(engine.encode("Once"), long)
        waiting = await engine.submit(engine.encode("Once"), long)
        waiting.abort()
        task = asyncio.create_task(engine.submit(engine.encode("Once"), long))
        await asyncio.sleep(0)  # it is on its way to the engine's thread
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        running.abort()
        ended = await engine.submit(engine.encode("Once"), GREEDY)
        assert await text_of(ended)
        ended.abort()
        engine.abort("no such request")
        while engine.in_hand:
            await asyncio.sleep(0.001)

    run(LLM(MODEL, num_blocks=128, max_num_seqs=1), use)


def test_leaving_the_block_aborts(llm):
    async def use(engine):
        params = SamplingParams(max_tokens=900, ignore_eos=True)
        async with await engine.submit(engine.encode("Once"), params) as stream:
            await anext(aiter(stream))
        while engine.in_hand:
            await asyncio.sleep(0.001)

    run(llm, use)


def test_a_full_queue_and_what_never_fits():
    async def use(engine):
        long = SamplingParams(max_tokens=900, ignore_eos=True)
        streams = [await engine.submit(engine.encode("Once"), long) for _ in range(3)]
        with pytest.raises(EngineBusy, match="3 completions wait or run"):
            await engine.submit(engine.encode("Once"), long)
        with pytest.raises(ValueError, match="4 completions were asked for at once; at most 3"):
            await engine.submit(engine.encode("Once"), SamplingParams(n=4))
        for ids, message in (([], "empty"), ([5] * 1025, "1024"), ([2048], "2048"), ([-1], "-1")):
            with pytest.raises(ValueError, match=message):
                await engine.submit(ids)
        for stream in streams:
            stream.abort()

    run(LLM(MODEL, num_blocks=128, max_num_seqs=1), use, max_queue=2)


def test_what_waits_when_the_engine_closes_is_told_so(llm):
    async def use(engine):
        stream = await engine.submit(engine.encode("Once"), SamplingParams(max_tokens=900, ignore_eos=True))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineStopped):
            await text_of(stream)
        with pytest.raises(EngineStopped, match="shutting down"):
            await engine.submit(engine.encode("Once"), GREEDY)

    run(llm, use)


def test_a_request_that_comes_while_another_thread_closes_is_refused(llm, monkeypatch):
    async def use(engine):
        check = engine.check_room

        def check_and_close(completions):
            check(completions)
            engine.close()

        engine.check_room = check_and_close
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(engine.submit([5], GREEDY), 30)

    run(llm, use)


@pytest.mark.parametrize("what", ["abort", "output"])
def test_whatever_fails_in_the_engine_s_thread_everyone_is_told(llm, what):
    """An engine's `abort` that raises, and an output that cannot be read, after another stream's last one."""
    short, long = (SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (4, 900))

    class Broken:
        request_id = "1"

        @property
        def outputs(self):
            raise RuntimeError("broken")

    def fail(request_id):
        raise RuntimeError("broken")

    step = llm.engine.step

    def broken_step():
        outputs = step()
        finished = [output for output in outputs if output.finished]
        return [*finished, Broken()] if finished else outputs

    async def main():
        engine = AsyncEngine(llm)
        streams = await engine.submit_many([([5], short), ([6], long), ([7], long)])
        tasks = [asyncio.create_task(text_of(stream)) for stream in streams]
        if what == "abort":
            engine.llm.engine.abort = fail
            engine.abort(streams[1].request_id)
        else:
            engine.llm.engine.step = broken_step
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert [isinstance(end, EngineStopped) for end in ends[1:]] == [True, True]
        assert engine.failed
        assert engine.in_hand == 0
        with pytest.raises(EngineStopped):
            await engine.submit([5], short)
        assert await asyncio.to_thread(engine.close)
        return ends[0]

    end = asyncio.run(main())
    if what == "output":
        assert isinstance(end, str), "it had ended before"


def test_an_event_loop_that_is_gone_leaves_nothing_behind(llm):
    async def leave(engine):
        await engine.submit(engine.encode("Once"), SamplingParams(max_tokens=900, ignore_eos=True))

    engine = AsyncEngine(llm)
    asyncio.run(leave(engine))

    async def wait():
        while engine.in_hand:
            await asyncio.sleep(0.001)
        return await text_of(await engine.submit(engine.encode("Once"), GREEDY))

    assert asyncio.run(asyncio.wait_for(wait(), 30))
    assert engine.close()
    assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks


class TokensOnly:
    """A learner's engine: it knows tokens, and of stop strings nothing."""

    def __init__(self, model, parts, config):
        self._engine = Engine(model, parts, config)
        self.blocks, self.scheduler, self.runner = (
            self._engine.blocks,
            self._engine.scheduler,
            self._engine.runner,
        )
        self.abort = self._engine.abort

    @property
    def has_work(self):
        return self._engine.has_work

    def add_request(self, request):
        import dataclasses

        request.params = dataclasses.replace(request.params, stop=None)
        self._engine.add_request(request)

    def step(self):
        return self._engine.step()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stop", [None, " was", ["nothing of the kind", " a k"]])
def test_a_learner_s_engine_gets_text_and_stop_strings(reference, stop, n):
    llm = LLM(MODEL, parts=Parts().replace(Engine=TokensOnly), num_blocks=128)
    params = {"max_tokens": 40, "temperature": 1.0, "seed": 4, "stop": stop, "n": n}

    async def use(engine):
        stream = await engine.submit(engine.encode("Once upon a time"), SamplingParams(**params))
        texts, reasons = [""] * n, [None] * n
        async for delta in stream:
            texts[delta.index] += delta.text
            reasons[delta.index] = delta.finish_reason
        return list(zip(texts, reasons, strict=True))

    expected = alone(reference, "Once upon a time", **params).outputs
    assert run(llm, use) == [(output.text, output.finish_reason) for output in expected]


def test_the_async_engine_needs_no_web_framework():
    code = (
        "import sys; from tinyvllm_ref.server import AsyncEngine;"
        " print([n for n in ('starlette', 'uvicorn', 'pydantic', 'prometheus_client') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
