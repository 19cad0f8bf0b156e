"""The fast path beside the simple one: the same tokens whatever comes, a step that runs ahead, and its refusals.

Everything here runs in the emulation, which computes what a card does but records nothing; the tests at the end need
a card.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import re
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import TINY, EngineConfig, GoldenModel, Parts, greedy, load, run, tiny_folder

from tinyvllm_ref import LLM, capturable_blas, decode_graph, fast_path, staging
from tinyvllm_ref.config import ConfigError
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.engine import Engine
from tinyvllm_ref.fast_path import decode_sizes, step_size, table_size, unsupported
from tinyvllm_ref.kernels.sampling import sample_specification
from tinyvllm_ref.kv_cache import KVCache, OutOfCacheMemory
from tinyvllm_ref.model_runner import all_logits
from tinyvllm_ref.request import Request
from tinyvllm_ref.sampling_params import SamplingParams
from tinyvllm_ref.scheduler import Scheduler

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPTS = [line for line in (REPOSITORY / "data/prompts.txt").read_text("utf-8").split("\n") if line]
SMALL = GoldenModel(
    "small",
    {
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2},
        **{"head_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512},
    },
    seed=101,
)
# Activations are rounded to bfloat16 after sums in another order, so logits differ: here by 0.027 at most, beside a
# standard deviation of 1. A request whose first two are always further apart than CLEAR must give the same tokens.
TOLERANCE, CLEAR = 0.04, 0.05
LENGTH = 16  # of completions
emulated = pytest.mark.skipif(is_gpu, reason="runs in the emulation; a card's tests are marked gpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("small"), SMALL)


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


def make(model, fast="on", **options):
    options = {"num_blocks": 400, "max_num_seqs": 8} | options
    return Engine(model, model.parts, EngineConfig(fast_path=fast, **options))


@pytest.fixture(scope="module")
def clear(model):
    """Ragged prompts with what the simple path makes of them; no step of it is near a tie."""
    rng = np.random.default_rng(0)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 90] * 20
    prompts = [rng.integers(0, 64, length).tolist() for length in lengths]
    outputs = run(
        make(model, "off", max_num_seqs=64, num_blocks=2000), [(p, greedy(LENGTH)) for p in prompts]
    )
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        logits = np.sort(all_logits(model, model.parts, prompt + tokens)[len(prompt) - 1 : -1], axis=1)
        if (logits[:, -1] - logits[:, -2]).min() > CLEAR:
            found.append((prompt, tokens))
    assert len(found) >= 16
    assert {len(prompt) for prompt, _ in found} >= {1, 16, 32, 64}
    return found


class Watched:
    """Counts what a fast path does."""

    def __init__(self, engine):
        self.engine, self.fast, self.counts = engine, engine.runner.fast, Counter()
        for name in ("decode", "forward", "_start", "_seat"):
            setattr(self.fast, name, self._counting(name, getattr(self.fast, name)))

    def _counting(self, name, inner):
        @functools.wraps(inner)
        def call(*args):
            self.counts[name] += 1
            return inner(*args)

        return call

    @property
    def used_ahead(self):
        """Steps that had been started before they were asked for."""
        return self.counts["decode"] - self.counts["_seat"]

    @property
    def dropped(self):
        """Steps that were started, and that nobody wanted; so far."""
        return self.counts["_start"] - self.counts["decode"] - (self.fast._ahead is not None)


def finish(engine):
    """All that is left to do; outputs by id. Nothing may be lost on the way."""
    done = {}
    while engine.has_work:
        done.update({output.request_id: output for output in engine.step() if output.finished})
        engine.blocks.check()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert not engine.scheduler.has_work
    return done


def tokens_of(output):
    return [completion.token_ids for completion in output.outputs]


# ---------------- greedy tokens
OPTIONS = (
    {},
    {"max_num_seqs": 1},
    {"max_num_seqs": 5},
    {"max_num_seqs": 64},
    {"max_num_batched_tokens": 37},
    {"max_num_batched_tokens": 5, "max_num_seqs": 9},  # not even one token for each
    {"batching": "static"},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 128, "max_model_len": 128},
    {"num_blocks": 12},
    {"num_blocks": 10, "max_num_batched_tokens": 20},
    {"num_blocks": 50, "block_size": 3},
    {"num_blocks": 130, "block_size": 1},
    {"num_blocks": 3, "block_size": 256},
)


@emulated
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()) or "-")
def test_greedy_tokens_are_those_of_the_simple_path(model, clear, options):
    watched = Watched(make(model, **options))
    requests = [(prompt, greedy(1 + number % LENGTH)) for number, (prompt, _) in enumerate(clear)]
    for number, (prompt, params) in enumerate(requests):
        watched.engine.add_request(Request(str(number), prompt, params))
    done = finish(watched.engine)
    for number, (_, want) in enumerate(clear):
        assert tokens_of(done[str(number)]) == [want[: 1 + number % LENGTH]], f"request {number}"
    preempted = sum(output.num_preemptions for output in done.values())
    assert (preempted > 0) == (options.get("num_blocks", 400) in (12, 10, 50, 130))
    assert watched.counts["forward"]
    assert watched.used_ahead


@emulated
def test_one_by_one(model, clear):
    engine = make(model)
    for prompt, want in clear[:6]:
        (output,) = run(engine, [(prompt, greedy(LENGTH))])
        assert tokens_of(output) == [want]


@emulated
def test_one_request_without_the_persistent_kernel(model, clear, monkeypatch):
    """Models whose rows are too long for it, and cards that are too old."""
    monkeypatch.setattr(fast_path.DecodeStep, "unsupported", staticmethod(lambda *_: "too long"))
    monkeypatch.setattr(fast_path.FastPath, "_launch_persistent", None)
    watched = Watched(make(model))
    for prompt, want in clear[:3]:
        (output,) = run(watched.engine, [(prompt, greedy(LENGTH))])
        assert tokens_of(output) == [want]
    assert watched.used_ahead == 3 * (LENGTH - 2)


@emulated
def test_with_every_access_checked(model, clear, monkeypatch):
    """No kernel of a step reads what nobody wrote, or outside of its arrays."""
    monkeypatch.setenv("TINYVLLM_CHECKS", "full")
    outputs = run(make(model, block_size=3), [(prompt, greedy(5)) for prompt, _ in clear[:3]])
    assert [tokens_of(output) for output in outputs] == [[want[:5]] for _, want in clear[:3]]
    (alone,) = run(make(model, max_num_seqs=1), [(clear[1][0], greedy(4))])
    assert tokens_of(alone) == [clear[1][1][:4]]


@emulated
def test_a_sequence_that_fills_the_cache_and_the_context(model):
    """To the last slot of the last block, with no block to look ahead to."""
    prompt, options = list(range(40)), {"num_blocks": 4, "max_num_seqs": 2}
    (want,) = run(make(model, "off", **options), [(prompt, greedy(24))])
    watched = Watched(make(model, **options))
    assert watched.engine.max_model_len == 64
    (got,) = run(watched.engine, [(prompt, greedy(24))])
    same = _same_until_a_near_tie(model, prompt, tokens_of(got)[0], tokens_of(want)[0])
    assert same > 4
    assert got.num_preemptions == 0
    assert watched.dropped == 0


def _same_until_a_near_tie(model, prompt, got, want):
    """How many tokens are the same; after them the simple path's logits of the two must be close."""
    assert len(got) == len(want)
    same = next((k for k, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), len(want))
    if same < len(want):
        row = all_logits(model, model.parts, [*prompt, *want[:same]])[-1]
        assert abs(row[want[same]] - row[got[same]]) < CLEAR, same
    return same


@pytest.fixture(scope="module")
def stories():
    """The model that comes with the repository, both ways."""
    options = {"max_num_seqs": 16, "num_blocks": 400, "max_num_batched_tokens": 200}
    return {fast: LLM("tiny-stories", fast_path=fast, **options) for fast in ("off", "on")}


def _compare_stories(stories, prompts, max_tokens, margin):
    """Greedy tokens of both; returns how many completions are the same to their end."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    want, got = (stories[fast].generate(prompts, params) for fast in ("off", "on"))
    simple, whole = stories["off"], 0
    for a, b in zip(want, got, strict=True):
        (one,), (other,) = tokens_of(a), tokens_of(b)
        pairs = zip(one, other, strict=False)
        same = next((k for k, (x, y) in enumerate(pairs) if x != y), min(len(one), len(other)))
        if same == len(one) == len(other):
            whole += 1
            assert a.outputs[0].text == b.outputs[0].text
            assert a.outputs[0].finish_reason == b.outputs[0].finish_reason
        else:
            row = simple.logits([*a.prompt_token_ids, *one[:same]])[-1]
            assert abs(row[one[same]] - row[other[same]]) < margin, (a.prompt, same)
    return whole


@emulated
def test_stories_are_the_same(stories):
    assert _compare_stories(stories, PROMPTS, 12, 0.1) >= 0.9 * len(PROMPTS)


@emulated
@pytest.mark.slow
def test_whole_stories_are_the_same(stories):
    assert _compare_stories(stories, PROMPTS, 150, 0.1) >= 0.8 * len(PROMPTS)
    for prompt in PROMPTS[:8]:
        _compare_stories(stories, [prompt], 40, 0.1)


@emulated
def test_completions_of_one_prompt(model, clear):
    engine = make(model, block_size=4)
    for number, (prompt, _) in enumerate(clear[:6]):
        engine.add_request(Request(str(number), prompt, greedy(9, n=3)))
    done = finish(engine)
    for number, (_, want) in enumerate(clear[:6]):
        assert tokens_of(done[str(number)]) == [want[:9]] * 3


@emulated
@pytest.mark.parametrize("fast", ["on", "off"])
@pytest.mark.parametrize(("seats", "length"), [(1, 1), (8, 1), (2, 9)])
def test_a_prompt_with_many_completions_is_computed_once(model, clear, fast, seats, length):
    """Also where they do not all have seats at a time, or end with their first token."""
    prompt, want = next(pair for pair in clear if len(pair[0]) == 65)
    engine = make(model, fast, max_num_seqs=seats)
    inner, computed = engine.runner.run, []
    engine.runner.run = lambda batch: computed.append(batch.total_tokens) or inner(batch)
    engine.add_request(Request("a", prompt, greedy(length, n=5)))
    assert tokens_of(finish(engine)["a"]) == [want[:length]] * 5
    # Four begin behind the four full blocks.
    assert sum(computed) == 65 + 4 * 1 + 5 * (length - 1)


@emulated
def test_stop_tokens(model, clear):
    """A request that ends while the next step runs already: the others' tokens are taken from that step."""
    watched = Watched(make(model))
    for number, (prompt, want) in enumerate(clear[:8]):
        params = greedy(LENGTH, stop_token_ids=[want[3 + number]])
        watched.engine.add_request(Request(str(number), prompt, params))
    done = finish(watched.engine)
    for number, (_, want) in enumerate(clear[:8]):
        (completion,) = done[str(number)].outputs
        first = want.index(want[3 + number])
        assert completion.token_ids == want[: first + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", want[first])
    assert watched.dropped <= 1  # the last one's
    assert watched.used_ahead


@emulated
def test_stop_strings(stories):
    params = [
        SamplingParams(max_tokens=20, temperature=0.0, stop=stop)
        for stop in (".", "was a", ["named", ","], "e")
    ]
    prompts = PROMPTS[:4]
    outputs = [stories[fast].generate(prompts, params) for fast in ("off", "on")]
    for simple, fast in zip(*outputs, strict=True):
        assert dataclasses.asdict(simple.outputs[0]) == dataclasses.asdict(fast.outputs[0])
    assert "stop" in {output.outputs[0].finish_reason for output in outputs[0]}


# ---------------- recorded launches
class Graph:
    """A graph as a card has it: kernels and products with the arguments that they had, and nothing else."""

    recording: list | None = None

    def __init__(self, stream, launches):
        launches()
        self.calls, self.starts = [], 0
        Graph.recording = self.calls
        try:
            with cp.cuda.using_allocator(self._refuse):
                launches()
        finally:
            Graph.recording = None

    def start(self):
        self.starts += 1
        for call in self.calls:
            call()

    @staticmethod
    def _refuse(size):
        raise AssertionError(f"{size} bytes are allocated while launches are recorded")

    @classmethod
    def recorded(cls, inner):
        def call(*args, **options):
            if cls.recording is None:
                inner(*args, **options)
            else:
                cls.recording.append(functools.partial(inner, *args, **options))

        return call


@pytest.fixture
def graphs(monkeypatch):
    for owner, name in ((cp.RawKernel, "__call__"), (capturable_blas._EmulatedBlas, "gemm")):
        monkeypatch.setattr(owner, name, Graph.recorded(getattr(owner, name)))
    monkeypatch.setattr(fast_path, "Recording", Graph)
    monkeypatch.setattr(fast_path, "can_record", lambda: True)


@emulated
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 37}, {"num_blocks": 12}, {"max_num_seqs": 1}, {"block_size": 1}],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()) or "-",
)
def test_recorded_launches_depend_on_their_size_alone(model, clear, graphs, options):
    """What was recorded for other requests, contexts, blocks and options serves these."""
    engine, chosen = make(model, **options), clear[:12]
    for turn in range(2):
        for number, (prompt, _) in enumerate(chosen):
            params = greedy(1 + (3 * number + turn) % LENGTH, prompt_logprobs=None if number % 5 else 0)
            engine.add_request(Request(str(number), prompt, params))
            if number % 4 == turn:
                company = SamplingParams(max_tokens=5, ignore_eos=True, seed=turn, temperature=0.9)
                engine.add_request(Request(f"company {number}", prompt, company))
        done = finish(engine)
        for number, (_, want) in enumerate(chosen):
            assert tokens_of(done[str(number)]) == [want[: 1 + (3 * number + turn) % LENGTH]], (turn, number)
    recordings = engine.runner.fast._recordings
    assert {key[0] for key in recordings} == {"decode", "step", "draw"}
    assert sum(graph.starts for graph in recordings.values()) > 2 * len(recordings)
    assert all(graph.calls for graph in recordings.values())


class Stream:
    """Notes what is asked of it."""

    def __init__(self):
        self.notes = []

    def __enter__(self):
        self.notes.append("enter")

    def __exit__(self, *exception):
        self.notes.append("exit")

    def synchronize(self):
        self.notes.append("synchronize")

    def begin_capture(self, mode):
        self.notes.append(f"begin {mode}")

    def end_capture(self):
        self.notes.append("end")
        if "failed" in self.notes:
            raise ValueError("the capture is not valid")
        return SimpleNamespace(launch=lambda stream: self.notes.append("graph"))


def test_what_a_recording_asks_of_its_stream(monkeypatch):
    runtime = SimpleNamespace(streamCaptureModeThreadLocal="thread")
    monkeypatch.setattr(decode_graph, "cp", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    stream = Stream()
    recording = decode_graph.Recording(stream, lambda: stream.notes.append("launch"))
    recording.start()
    recording.start()
    started = ["enter", "launch", "synchronize", "begin thread"]
    assert stream.notes == [*started, "launch", "end", "exit", "graph", "graph"]

    failing = Stream()

    def launches():
        if "launch" in failing.notes:
            failing.notes.append("failed")
            raise LaunchFailed("no such kernel")
        failing.notes.append("launch")

    with pytest.raises(LaunchFailed, match="no such kernel"):
        decode_graph.Recording(failing, launches)
    assert failing.notes == [*started, "failed", "end", "exit"]


@emulated
def test_another_cache_needs_other_recordings(model, clear, graphs):
    engine, (prompt, want) = make(model), clear[0]
    assert tokens_of(run(engine, [(prompt, greedy(5))])[0]) == [want[:5]]
    runner = engine.runner
    runner.kv_cache = KVCache(model.config, runner.num_blocks, 16)
    runner.fast.use(runner.kv_cache)
    assert tokens_of(run(engine, [(prompt, greedy(5))])[0]) == [want[:5]]


# ---------------- steps with prompts
@emulated
@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 37}, {"num_blocks": 14}, {"max_num_seqs": 3}]
)
@pytest.mark.parametrize("recorded", [False, True])
def test_tokens_of_steps_with_prompts_are_drawn_on_the_device(model, clear, options, recorded, request):
    """Greedy or by chance, beside decodes, chunks and prompts that are computed again: as the specification says."""
    if recorded:
        request.getfixturevalue("graphs")
    engine, drawn = make(model, **options), []
    engine.runner._sampler = None  # not asked
    fast = engine.runner.fast
    launch, draw = fast._launch, fast.draw

    def draw_and_note(batch):
        drawing = [one for one, samples in zip(batch.requests, batch.samples, strict=True) if samples]
        numbers = [one.num_output_tokens for one in drawing]
        fast._launch = functools.partial(launch_and_note, list(zip(drawing, numbers, strict=True)))
        return draw(batch)

    def launch_and_note(drawing, key, *args):
        launch(key, *args)
        if key[0] == "draw":
            tokens = fast._chosen.get().tolist()
            rows = fast._logits.get()
            drawn.extend((*one, row, token) for one, row, token in zip(drawing, rows, tokens, strict=False))

    fast.draw = draw_and_note
    params = [
        SamplingParams(
            **{"max_tokens": 1 + 3 * n % 7, "ignore_eos": True, "seed": 2**63 + n},
            **{"temperature": n % 3 * 0.7, "top_k": [0, 2**40, 5][n // 2 % 3]},
            **{"top_p": [1, 0.8][n // 3 % 2], "min_p": n % 4 / 40},
        )
        for n in range(12)
    ]
    outputs = run(engine, [(prompt, one) for (prompt, _), one in zip(clear, params, strict=False)])
    firsts = {}
    for one, number, row, token in drawn:
        options = one.params
        *kept, seed = options.top_k, options.top_p, options.min_p, options.seed
        assert token == sample_specification(row, options.temperature, *kept, seed, number)
        assert token == one.output_token_ids[number]
        simple = all_logits(model, model.parts, one.token_ids[: one.num_prompt_tokens + number])[-1]
        assert np.abs(row - simple).max() < TOLERANCE
        firsts[one.request_id] = firsts.get(one.request_id, False) or number == 0
    assert all(firsts[str(number)] for number in range(12))
    for output, (_, want), one in zip(outputs, clear, params, strict=False):
        if one.greedy:
            assert tokens_of(output) == [want[: one.max_tokens]]


@emulated
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_step_with_prompts_is_one_copy_each_way_and_two_graphs(
    model, clear, graphs, monkeypatch, temperature
):
    """Whatever the number of requests: what else is asked of the device, the card waits for."""
    engine, copies = make(model, max_num_batched_tokens=80), []
    fast, memcpy = engine.runner.fast, cp.cuda.runtime.memcpyAsync
    params = SamplingParams(max_tokens=3, temperature=temperature, seed=1, ignore_eos=True)
    short = [prompt for prompt, _ in clear if len(prompt) < 17][:4]

    def steps():
        """A prompt in three pieces, of which two draw nothing; then four prompts beside its decode."""
        engine.add_request(Request("long", [9] * 200, params))
        yield from (engine.step() for _ in range(3))
        for number, prompt in enumerate(short):
            engine.add_request(Request(str(number), prompt, params))
        yield engine.step()

    assert [len(outputs) for outputs in steps()] == [0, 0, 1, 5]  # all is recorded now
    finish(engine)

    def counting(to, source, size, kind, stream):
        copies.append(kind)
        memcpy(to, source, size, kind, stream)

    with monkeypatch.context() as patch:
        patch.setattr(cp.cuda.runtime, "memcpyAsync", counting)
        patch.setattr(cp, "asarray", None)
        for name in ("get", "set", "tolist", "fill", "copy", "__setitem__"):
            patch.setattr(cp.ndarray, name, None)
        before, seen = 0, []
        for outputs in steps():
            starts = sum(graph.starts for graph in fast._recordings.values())
            seen.append((len(outputs), sorted(copies), starts - before))
            before, copies = starts, []
    to_device, to_host = 1, 2
    drawing = [to_device, to_host]
    assert [one[:2] for one in seen] == [(0, [to_device])] * 2 + [(1, drawing), (5, drawing)]
    assert [started for *_, started in seen[1:]] == [1, 2, 2]
    finish(engine)


@emulated
def test_requests_that_end_with_their_first_token(model, clear):
    """By their length, or by a stop token; the others' decodes follow."""
    watched = Watched(make(model))
    for number, (prompt, want) in enumerate(clear[:8]):
        stop = [want[0]] if number % 4 == 1 else None
        params = greedy(1 if number % 4 == 0 else 5, stop_token_ids=stop)
        watched.engine.add_request(Request(str(number), prompt, params))
    done = finish(watched.engine)
    for number, (_, want) in enumerate(clear[:8]):
        (completion,) = done[str(number)].outputs
        assert completion.token_ids == (want[:1] if number % 4 < 2 else want[:5])
        reason = ("stop", want[0]) if number % 4 == 1 else ("length", None)
        assert (completion.finish_reason, completion.stop_reason) == reason
    assert watched.counts["decode"] == 4


@emulated
def test_inputs_of_a_step_wait_for_no_copy_but_their_own(monkeypatch):
    """A card that copies as late as it may gets the arrays of every step, though the host waits for no step."""
    queue, done, seen = [], [], []

    def run_until(length):
        while len(done) < length:
            done.append(queue[len(done)])
            done[-1]()

    class Event:
        def __init__(self, disable_timing):
            self._length = 0

        def record(self, stream):
            self._length = len(queue)

        def synchronize(self):
            run_until(self._length)

    memcpy = cp.cuda.runtime.memcpyAsync
    runtime = SimpleNamespace(memcpyAsync=lambda *args: queue.append(functools.partial(memcpy, *args)))
    cuda = SimpleNamespace(alloc_pinned_memory=cp.cuda.alloc_pinned_memory, Event=Event, runtime=runtime)
    monkeypatch.setattr(staging, "cp", SimpleNamespace(zeros=cp.zeros, cuda=cuda))
    staged = staging.Staged({"a": (3, np.int32), "b": (5, np.uint64), "c": (2, np.float32)})
    stream = cp.cuda.Stream.null
    for step in range(7):
        arrays = staged.host()
        # The copy of the step before the last is made, and nothing after it.
        assert len(done) == max(0, 2 * (step - 1) - 1)
        for name, array in arrays.items():
            array[:] = 10 * step + len(name)
        staged.send("b", 4, stream)
        queue.append(
            lambda: seen.append({name: array.get().tolist() for name, array in staged.device.items()})
        )
    run_until(len(queue))
    for step, arrays in enumerate(seen):
        assert arrays == {"a": [10 * step + 1] * 3, "b": [10 * step + 1] * 4 + [0], "c": [0.0] * 2}
    assert len(seen) == 7


# ---------------- the step that runs ahead
@emulated
@pytest.mark.parametrize("together", [1, 2, 7])
def test_in_a_steady_decode_every_step_but_the_first_is_started_ahead(model, clear, together):
    watched = Watched(make(model))
    outputs = run(watched.engine, [(prompt, greedy(LENGTH)) for prompt, _ in clear[:together]])
    assert [tokens_of(output) for output in outputs] == [[want] for _, want in clear[:together]]
    # The prompts gave the first tokens; after the last ones nothing is started.
    assert watched.counts == {"forward": 1, "decode": LENGTH - 1, "_start": LENGTH - 1, "_seat": 1}
    assert watched.fast._ahead is None


@emulated
def test_across_many_block_borders_nothing_is_dropped(model, clear):
    watched = Watched(make(model, block_size=1))
    run(watched.engine, [(prompt, greedy(LENGTH)) for prompt, _ in clear[:3]])
    assert watched.used_ahead == LENGTH - 2
    assert watched.dropped == 0


@emulated
def test_without_free_blocks_a_step_is_not_started_ahead(model, clear):
    """Five blocks of four for 17 + 3 tokens: the last of them is full when the request ends."""
    prompt, want = next(pair for pair in clear if len(pair[0]) == 17)
    watched = Watched(make(model, num_blocks=5, block_size=4))
    watched.engine.scheduler.lookahead = 0
    (output,) = run(watched.engine, [(prompt, greedy(3))])
    assert tokens_of(output) == [want[:3]]
    other = Watched(make(model, block_size=4))
    other.engine.scheduler.lookahead = 0  # each block comes when its first token does
    (output,) = run(other.engine, [(prompt, greedy(LENGTH))])
    assert tokens_of(output) == [want]
    borders = sum((17 + k) % 4 == 0 for k in range(1, LENGTH - 1))
    assert other.counts["_seat"] == 1 + borders
    assert other.dropped == 0


@emulated
@pytest.mark.parametrize("what", ["join", "abort", "abort_all", "finish"])
def test_a_step_is_dropped_where_another_request_joins_and_no_other_is_left(model, clear, what):
    watched, names = Watched(make(model)), "abc"
    engine, done = watched.engine, {}
    for name, (prompt, _) in zip(names, clear, strict=False):
        engine.add_request(Request(name, prompt, greedy(LENGTH)))

    def steps(count):
        for _ in range(count):
            done.update({output.request_id: output for output in engine.step() if output.finished})
            engine.blocks.check()

    steps(5)
    assert watched.dropped == 0
    assert watched.fast._ahead is not None
    gone = []
    if what == "join":
        engine.add_request(Request("d", clear[3][0], greedy(LENGTH)))
        names = "abcd"
    elif what == "finish":
        assert engine.scheduler.finish("b", "stop", "x")
        engine._close_finished(engine._prompts["b"])
        gone = ["b"]
    else:
        gone = list("abc") if what == "abort_all" else ["b"]
        for name in gone:
            assert engine.abort(name)
    if what == "abort_all":  # and another one takes their blocks
        engine.add_request(Request("d", clear[3][0], greedy(LENGTH)))
        names = "abcd"
    steps(2)
    dropped = int(what in ("join", "abort_all"))
    assert watched.dropped == dropped
    done |= finish(engine)
    for name, (_, want) in zip(names, clear, strict=False):
        if name in gone:
            if what != "finish":
                assert tokens_of(done[name]) == [want[:5]]
        else:
            assert tokens_of(done[name]) == [want], name
    assert watched.dropped == dropped


@emulated
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_run_ahead_past_the_ends_of_requests(model, clear, graphs, temperature):
    """Rows of those that have ended pad the steps, until a smaller step holds the others: they are seated anew."""
    lengths = [5, 16, 9, 3, 12, 7, 14]

    def requests(lengths):
        params = [
            SamplingParams(max_tokens=length, temperature=temperature, seed=row, ignore_eos=True)
            for row, length in enumerate(lengths)
        ]
        return [(prompt, one) for (prompt, _), one in zip(clear, params, strict=False)]

    whole = [tokens_of(output)[0] for output in run(make(model), requests([LENGTH] * 7))]
    watched = Watched(make(model))
    outputs = run(watched.engine, requests(lengths))
    for output, want, length in zip(outputs, whole, lengths, strict=True):
        assert tokens_of(output) == [want[:length]]
    assert watched.counts["decode"] == 15
    assert watched.counts["_seat"] == len([8, 4, 2, 1])
    assert watched.dropped == 0


@emulated
def test_a_row_whose_request_has_ended_writes_to_nobody_s_blocks(model, clear):
    """The blocks of those that end go to those that go on, in the step behind the one that runs ahead."""
    short = [(prompt, want) for prompt, want in clear if len(prompt) <= 17]
    lengths = [2, 3, 2, 16, 4, 16, 16][: len(short)]
    most = sum(-(-(len(prompt) + length) // 2) for (prompt, _), length in zip(short, lengths, strict=False))
    watched = Watched(make(model, block_size=2, num_blocks=most - 12))
    params = [greedy(length) for length in lengths]
    outputs = run(watched.engine, [(p, one) for (p, _), one in zip(short, params, strict=False)])
    for output, (_, want), length in zip(outputs, short, lengths, strict=False):
        assert tokens_of(output) == [want[:length]]
    assert watched.used_ahead > 8


@emulated
def test_where_others_wait_for_the_seat_of_one_that_ends_no_step_runs_ahead_for_nothing(model, clear):
    watched = Watched(make(model, max_num_seqs=3))
    outputs = run(watched.engine, [(prompt, greedy(3 + k)) for k, (prompt, _) in enumerate(clear[:9])])
    for k, (output, (_, want)) in enumerate(zip(outputs, clear, strict=False)):
        assert tokens_of(output) == [want[: 3 + k]]
    assert watched.dropped == 0
    assert watched.used_ahead


@emulated
def test_an_abort_while_a_step_is_computed(model, clear, monkeypatch):
    """Its token is not taken, and another request gets its blocks while a step ahead still writes to them."""
    watched = Watched(make(model, num_blocks=12, block_size=4))
    engine, short = watched.engine, [(p, w) for p, w in clear if len(p) <= 17][:3]
    for name, (prompt, _) in zip("ab", short, strict=False):
        engine.add_request(Request(name, prompt, greedy(6)))
    for _ in range(3):
        engine.step()
    inner = fast_path._Result.wait

    def wait(self):
        monkeypatch.setattr(fast_path._Result, "wait", inner)
        assert engine.abort("a")
        engine.add_request(Request("c", short[2][0], greedy(6)))
        return inner(self)

    monkeypatch.setattr(fast_path._Result, "wait", wait)
    done = {output.request_id: output for output in engine.step() if output.finished} | finish(engine)
    assert [tokens_of(done[name]) for name in "abc"] == [
        [want[:count]] for (_, want), count in zip(short, (3, 6, 6), strict=True)
    ]
    assert watched.dropped == 1


@emulated
def test_a_step_ahead_does_not_outlive_one_with_a_prompt(model, clear):
    """Its tokens would come to where those of the prompt's step come."""
    watched = Watched(make(model))
    watched.engine.add_request(Request("a", clear[0][0], greedy(LENGTH)))
    for _ in range(3):
        watched.engine.step()
    assert watched.fast._ahead is not None
    watched.engine.add_request(Request("b", clear[1][0], greedy(LENGTH)))
    watched.engine.step()
    assert watched.fast._ahead is None
    done = finish(watched.engine)
    assert [tokens_of(done[name]) for name in "ab"] == [[want] for _, want in clear[:2]]


@emulated
def test_a_step_ahead_does_not_outlive_one_that_the_model_s_parts_run(model, clear):
    """Log probabilities of more tokens than requests may run: such a step has no room on the fast path."""
    watched = Watched(make(model, max_num_seqs=2))
    watched.engine.add_request(Request("a", clear[0][0], greedy(LENGTH)))
    for _ in range(3):
        watched.engine.step()
    assert watched.fast._ahead is not None
    before = watched.counts["forward"]
    prompt = next(prompt for prompt, _ in clear if len(prompt) == 16)
    watched.engine.add_request(Request("b", prompt, greedy(1, prompt_logprobs=0)))
    watched.engine.step()
    assert watched.counts["forward"] == before
    assert watched.fast._ahead is None
    done = finish(watched.engine)
    assert tokens_of(done["a"]) == [clear[0][1]]


@emulated
def test_requests_that_join_and_leave_at_every_step(model, clear):
    watched = Watched(make(model, max_num_seqs=6))
    engine, done, waiting = watched.engine, {}, list(enumerate(clear * 3))
    lengths = {}
    while waiting or engine.has_work:
        if waiting:
            number, (prompt, _) = waiting.pop(0)
            lengths[number] = 1 + number * 7 % LENGTH
            engine.add_request(Request(str(number), prompt, greedy(lengths[number])))
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.blocks.check()
    for number, (_, want) in enumerate(clear * 3):
        assert tokens_of(done[str(number)]) == [want[: lengths[number]]]
    assert engine.blocks.num_free == engine.blocks.num_blocks


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(0, 15),  # which prompt
            st.integers(1, LENGTH),  # completion
            st.sampled_from(["greedy", "greedy", "greedy", "n", "stop", "logprobs", "prompt", "random"]),
        ),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 11)),
    ),
    min_size=1,
    max_size=24,
)


def _params(kind, length, want):
    special = {
        "greedy": {},
        "n": {"n": 3},
        "stop": {"stop_token_ids": [want[length - 1]]},
        "logprobs": {"logprobs": 1},
        "prompt": {"prompt_logprobs": 0},
        "random": {},
    }
    params = greedy(LENGTH if kind == "stop" else length, **special[kind])
    return dataclasses.replace(params, temperature=1.0, seed=length) if kind == "random" else params


@emulated
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    actions=ACTIONS,
    num_blocks=st.integers(8, 40),
    block_size=st.sampled_from([4, 7, 16]),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.sampled_from([8, 33, 256]),
    batching=st.sampled_from(["continuous", "static"]),
)
def test_whatever_comes_the_tokens_are_those_of_the_simple_path(model, clear, actions, **options):
    engine = make(model, **options)
    sent, done = {}, {}

    def step():
        done.update({output.request_id: output for output in engine.step() if output.finished})
        engine.blocks.check()

    for action, *values in actions:
        if action == "add":
            which, length, kind = values
            prompt, want = clear[which]
            params, name = _params(kind, length, want), str(len(sent))
            if len(prompt) + params.max_tokens <= engine.max_model_len:
                engine.add_request(Request(name, prompt, params))
                sent[name] = (want[: want.index(want[length - 1]) + 1] if kind == "stop" else want, params)
        elif action == "step":
            for _ in range(values[0]):
                step()
        elif str(values[0]) in sent and str(values[0]) not in done:
            engine.abort(str(values[0]))
            engine.blocks.check()
    done |= finish(engine)
    assert set(done) == set(sent)
    for name, output in done.items():
        want, params = sent[name]
        for completion in output.outputs:
            tokens = completion.token_ids
            if params.greedy:
                assert tokens == want[: len(tokens)]
            if completion.finish_reason != "abort":
                assert len(tokens) == (len(want) if params.stop_token_ids else params.max_tokens)


@emulated
def test_two_engines_take_turns(model, clear):
    engines = [make(model), make(model, block_size=5, max_num_seqs=3)]
    for number, (prompt, _) in enumerate(clear[:5]):
        for engine in engines:
            engine.add_request(Request(str(number), prompt, greedy(LENGTH)))
    done = [{}, {}]
    while any(engine.has_work for engine in engines):
        for engine, outputs in zip(engines, done, strict=True):
            outputs.update({output.request_id: output for output in engine.step() if output.finished})
    for outputs in done:
        assert [tokens_of(outputs[str(k)]) for k in range(5)] == [[want] for _, want in clear[:5]]


# ---------------- logits, chance, and what goes by the host
@emulated
@pytest.mark.parametrize("together", [1, 3, 7])
def test_every_logit_and_every_draw(model, clear, monkeypatch, together):
    """Logits of each step as the simple path has them, and of these the token that the specification draws."""
    drawn = {}
    engine = make(model)
    inner = fast_path.sample_rows

    def sample_rows(logits, temperature, top_k, top_p, min_p, seeds, steps, out, **how):
        result = inner(logits, temperature, top_k, top_p, min_p, seeds, steps, out, **how)
        seats = engine.runner.fast._seats  # rows beyond these pad the batch
        columns = [array.get().tolist() for array in (temperature, top_k, top_p, min_p, seeds, steps, result)]
        for number, seat in enumerate(seats):
            *options, token = (column[number] for column in columns)
            row = logits.get()[number]
            drawn[seat.request.request_id, options[-1]] = (row, options, token)
        return result

    monkeypatch.setattr(fast_path, "sample_rows", sample_rows)
    requests = [
        (
            prompt,
            SamplingParams(
                **{"max_tokens": 12, "ignore_eos": True, "seed": number, "temperature": 0.7 + number / 10},
                **{"top_k": [0, 20][number % 2], "top_p": [1, 0.9, 0.8][number % 3], "min_p": number / 100},
            )
            if number != 1
            else greedy(12),
        )
        for number, (prompt, _) in enumerate(clear[:together])
    ]
    outputs = run(engine, requests)
    for number, ((prompt, params), output) in enumerate(zip(requests, outputs, strict=True)):
        (tokens,) = tokens_of(output)
        simple = all_logits(model, model.parts, prompt + tokens)[len(prompt) - 1 :]
        for step in range(1, 12):  # the prompt's step gave the first
            row, options, token = drawn[str(number), step]
            assert np.abs(row - simple[step]).max() < TOLERANCE
            wanted = [params.temperature, params.top_k, params.top_p, params.min_p, params.seed or 0, step]
            if number != 1:
                np.testing.assert_allclose(options, wanted, rtol=1e-6)
            assert tokens[step] == token == sample_specification(row, *options)
        if number == 1:
            assert tokens == clear[1][1][:12]


@emulated
def test_a_seed_gives_the_same_again(model, clear):
    params = [SamplingParams(max_tokens=10, ignore_eos=True, seed=s, n=1 + s % 2) for s in range(4)]
    requests = [(prompt, one) for (prompt, _), one in zip(clear, params, strict=False)]
    first, again = (list(map(tokens_of, run(make(model), requests))) for _ in range(2))
    assert first == again
    assert len({tuple(tokens) for row in first for tokens in row}) == 6


@emulated
@pytest.mark.parametrize("options", [{"frequency_penalty": 1.5}, {"repetition_penalty": 1.3, "logprobs": 2}])
def test_penalties_and_log_probabilities_go_by_the_host(model, clear, options):
    rows, watched = [], Watched(make(model))
    inner = watched.engine.runner._sampler

    def sampler(logits, requests):
        raw = logits.get().copy()
        sampled = inner(logits, requests)
        best = logits.get().argmax(axis=1).tolist()  # of what the penalties made of them
        assert sampled.ids == best
        rows.append((raw, sampled.logprobs))
        return sampled

    watched.engine.runner._sampler = sampler
    for number, (prompt, _) in enumerate(clear[:3]):
        watched.engine.add_request(Request(str(number), prompt, greedy(10, **options)))
    done = finish(watched.engine)
    assert watched.counts == {"forward": 10}
    changed = 0
    for number, (prompt, _) in enumerate(clear[:3]):
        (tokens,) = tokens_of(done[str(number)])
        simple = all_logits(model, model.parts, prompt + tokens)[len(prompt) - 1 : -1]
        for step, (raw, logprobs) in enumerate(rows):
            assert np.abs(raw[number] - simple[step]).max() < TOLERANCE
            if "logprobs" in options:
                exact = simple[step].astype(np.float64)
                exact -= np.log(np.exp(exact).sum())
                for token, found in logprobs[number].items():
                    assert abs(found.logprob - exact[token]) < 2 * TOLERANCE
        changed += tokens != clear[number][1][:10]
    assert changed


@emulated
@pytest.mark.parametrize("max_num_seqs", [1, 4, 40, 64])
@pytest.mark.parametrize("together", [1, 9])
def test_log_probabilities_of_a_prompt(model, clear, max_num_seqs, together):
    """More rows of logits than requests, and more than there is room for."""
    prompts = [prompt for prompt, _ in clear[:9]]
    results = []
    for fast in ("off", "on"):
        engine, outputs = make(model, fast, max_num_seqs=max_num_seqs), []
        for first in range(0, 9, together):
            chosen = prompts[first : first + together]
            outputs += run(engine, [(prompt, greedy(3, prompt_logprobs=2)) for prompt in chosen])
        results.append(outputs)
    for (prompt, want), simple, ours in zip(clear[:9], *results, strict=True):
        assert tokens_of(ours) == [want[:3]]
        assert len(ours.prompt_logprobs) == len(prompt)
        for position, (a, b) in enumerate(zip(simple.prompt_logprobs, ours.prompt_logprobs, strict=True)):
            assert (a is None) == (b is None) == (position == 0)
            if a is not None:
                assert prompt[position] in b
                for token in a.keys() & b.keys():
                    assert abs(a[token].logprob - b[token].logprob) < 2 * TOLERANCE


# ---------------- errors
class LaunchFailed(RuntimeError):
    """What a launch raises."""


@contextmanager
def raising(target, name, at):
    """The `at`-th call of a method raises."""
    inner, calls = getattr(target, name), iter(range(10**6))

    def call(*args, **options):
        if next(calls) == at:
            raise LaunchFailed
        return inner(*args, **options)

    setattr(target, name, call)
    yield
    setattr(target, name, inner)


@emulated
@pytest.mark.parametrize("name", ["_launch", "_seat", "_start", "_extend_tables", "_products"])
@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_after_an_error_in_a_step_the_engine_goes_on(model, clear, name, at):
    """As with the simple path: what was scheduled is computed by the next step."""
    engine = make(model, block_size=4)
    for number, (prompt, _) in enumerate(clear[:3]):
        engine.add_request(Request(str(number), prompt, greedy(LENGTH)))
    done, errors = {}, 0
    with raising(engine.runner.fast, name, at):
        for _ in range(LENGTH + 9):
            try:
                done |= {output.request_id: output for output in engine.step() if output.finished}
            except LaunchFailed:
                errors += 1
            engine.blocks.check()
    assert errors == (name != "_seat" or at == 0)
    done |= finish(engine)
    assert [tokens_of(done[str(k)]) for k in range(3)] == [[want] for _, want in clear[:3]]


@emulated
def test_an_error_while_drawing(model, clear, monkeypatch):
    engine, failing = make(model), [False]
    inner = fast_path.sample_rows

    def sample_rows(*args, **how):
        if failing[0]:
            raise MemoryError("no room to draw")
        return inner(*args, **how)

    monkeypatch.setattr(fast_path, "sample_rows", sample_rows)
    params = SamplingParams(max_tokens=9, seed=5, ignore_eos=True)
    requests = [Request(str(number), prompt, params) for number, (prompt, _) in enumerate(clear[:2])]
    want = run(make(model), [(r.prompt_token_ids, params) for r in requests])
    for request in requests:
        engine.add_request(request)
    for _ in range(3):
        engine.step()
    failing[0] = True
    with pytest.raises(MemoryError, match="no room to draw"):
        engine.step()
    failing[0] = False
    done = finish(engine)
    assert [tokens_of(done[name]) for name in "01"] == [tokens_of(output) for output in want]


@emulated
def test_a_step_that_was_interrupted_is_computed_again(model, clear, monkeypatch):
    """Ctrl-C while the host waits for tokens: the step that runs ahead is not taken for the one that was lost."""
    engine, (prompt, want) = make(model), clear[0]
    engine.add_request(Request("a", prompt, greedy(LENGTH)))
    for _ in range(4):
        engine.step()
    inner = fast_path._Result.wait

    def wait(self):
        monkeypatch.setattr(fast_path._Result, "wait", inner)
        raise KeyboardInterrupt

    monkeypatch.setattr(fast_path._Result, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert tokens_of(finish(engine)["a"]) == [want]


# ---------------- where it can not be
class Own(Scheduler):
    """A scheduler of a learner's own."""


def test_where_the_fast_path_is_used(model):
    assert make(model, "off").runner.fast is None
    assert (make(model, "auto").runner.fast is not None) == is_gpu
    assert make(model, "off").scheduler.lookahead == 0
    with pytest.raises(ConfigError, match="fast_path is 'maybe'; it must be 'auto', 'on' or 'off'"):
        EngineConfig(fast_path="maybe")


@emulated
def test_on_names_what_is_in_the_way(model, tmp_path):
    assert make(model, "on").scheduler.lookahead == 1
    own = model.parts.replace(Scheduler=Own)
    with pytest.raises(ValueError, match=r"fast_path is 'on', and it can not be: parts .*: Scheduler$"):
        Engine(model, own, EngineConfig(num_blocks=9, fast_path="on"))
    assert Engine(model, own, EngineConfig(num_blocks=9)).runner.fast is None
    odd = load(tiny_folder(tmp_path, TINY))
    with pytest.raises(ValueError, match="not made for 4 heads on 2 of 12 columns"):
        make(odd, "on")
    learners = load(tmp_path, Parts().replace(argmax=lambda logits, out: out))
    with pytest.raises(ValueError, match="parts are not the reference's: argmax"):
        make(learners, "on")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"fast_path": "off"}, "fast_path is 'off'"),
        ({"num_attention_heads": 3}, "its kernels are not made for 3 heads on 2 of 16 columns"),
        ({"num_attention_heads": 64, "num_key_value_heads": 1}, "not made for 64 heads on 1 of 16"),
        ({"head_dim": 24}, "not made for 4 heads on 2 of 24 columns"),
        ({"head_dim": 256}, "not made for 4 heads on 2 of 256 columns"),
        ({"hidden_size": 68}, "hidden_size is 68; it must be a multiple of 8"),
        ({"intermediate_size": 4}, "intermediate_size is 4; it must be a multiple of 8"),
        ({}, ""),
    ],
)
@emulated
def test_reasons(model, changed, reason):
    config = EngineConfig(fast_path=changed.get("fast_path", "on"))
    sizes = {name: value for name, value in changed.items() if name != "fast_path"}
    stub = SimpleNamespace(config=dataclasses.replace(model.config, **sizes), parts=model.parts)
    found = unsupported(stub, config)
    assert reason in found
    assert bool(found) == bool(reason)


@emulated
@pytest.mark.parametrize(("capability", "graphs"), [("75", True), ("80", True), ("90", True), ("90", False)])
def test_reasons_of_a_card(model, monkeypatch, capability, graphs):
    monkeypatch.setattr(fast_path, "is_gpu", True)
    monkeypatch.setattr(fast_path, "can_record", lambda: graphs)
    monkeypatch.setattr(cp.cuda.Device, "compute_capability", capability)
    want = "" if graphs else "this device has no CUDA graphs"
    if capability == "75":
        want = "compute capability is 75; it must be 80 or more"
    assert unsupported(model, EngineConfig()) == want


# ---------------- sizes that are recorded
@given(st.integers(1, 3000))
def test_sizes_of_decode_steps(most):
    sizes = decode_sizes(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    for smaller, larger in itertools.pairwise(sizes):
        assert larger <= (2 if smaller < 8 else 1.5) * smaller
    assert len(sizes) <= 20 + most // 32


@given(st.integers(1, 20_000), st.integers(0, 20_000))
def test_sizes_of_other_steps(tokens, more):
    most = tokens + more
    size = step_size(tokens, most)
    assert tokens <= size <= most
    assert size - tokens < max(16, tokens / 4)
    assert step_size(size, most) == size
    assert step_size(min(most, tokens + 1), most) >= size
    assert len({step_size(t, 2048) for t in range(1025, 2049)}) == 4


@given(st.integers(1, 20_000), st.integers(0, 20_000))
def test_sizes_of_block_tables(blocks, more):
    most = blocks + more
    size = table_size(blocks, most)
    assert blocks <= size <= most
    assert size <= max(64, 4 * blocks)
    assert len({table_size(b, 8193) for b in range(1, 8194)}) == 5


# ---------------- memory
@contextmanager
def without_collector():
    """Only reference counts free memory, so that a cycle shows."""
    gc.collect()
    gc.disable()
    try:
        yield cp.get_default_memory_pool()
    finally:
        gc.enable()


@emulated
@pytest.mark.parametrize("steps", [0, 1, 4, None])
def test_memory_is_given_back_at_once(folder, clear, steps):
    with without_collector() as pool:
        before = pool.used_bytes()
        llm = LLM(folder, fast_path="on", num_blocks=100, max_num_seqs=4)
        held = pool.used_bytes() - before
        assert held > 100 * 16 * llm.config.kv_bytes_per_token
        for number, (prompt, _) in enumerate(clear[:3]):
            llm.engine.add_request(Request(str(number), prompt, greedy(LENGTH)))
        if steps is None:
            finish(llm.engine)
        for _ in range(steps or 0):
            llm.engine.step()
        del llm
        assert pool.used_bytes() == before


@emulated
def test_steps_allocate_nothing_that_stays(model, clear):
    engine = make(model)
    run(engine, [(prompt, greedy(4)) for prompt, _ in clear[:5]])
    with without_collector() as pool:
        used = pool.used_bytes()
        run(engine, [(prompt, greedy(LENGTH)) for prompt, _ in clear[:5]])
        assert pool.used_bytes() == used


@emulated
@pytest.mark.parametrize("room", [0, 20_000, 200_000, 390_000, 400_000, 410_000])
def test_too_little_memory_is_an_error_that_says_what_to_lower(model, room):
    with without_collector() as pool:
        before = pool.used_bytes()
        pool.free_all_blocks()
        pool.set_limit(before + room)
        try:
            with pytest.raises(MemoryError) as caught:
                make(model, max_num_batched_tokens=300, max_num_seqs=30)
            assert pool.used_bytes() == before  # though the error, with its traceback, is still there
        finally:
            pool.set_limit(0)
        message = str(caught.value)
        assert f"the fast path may take {room:,} bytes, and needs more: " in message
        assert "of max_num_batched_tokens = 300, 7,680 for the logits of max_num_seqs = 30, " in message
        assert "7,920 for their block tables (max_model_len = None): lower one of these" in message
        assert "Out of memory allocating" in message
        del caught
        make(model, max_num_batched_tokens=300, max_num_seqs=30)  # and with room it is made


@emulated
def test_the_bytes_that_an_error_names_are_those_that_are_taken(model):
    """A step of twice as many tokens takes so much more."""
    with without_collector() as pool:
        taken = []
        for tokens in (512, 1024):
            before = pool.used_bytes()
            engine = make(model, max_num_batched_tokens=tokens)
            taken.append(pool.used_bytes() - before)
            del engine
        more = fast_path.arena_bytes(model.config, 1024) - fast_path.arena_bytes(model.config, 512)
        assert more <= taken[1] - taken[0] <= more + 512 * (4 + 4 + 8) + 4 * 512


@emulated
@pytest.mark.parametrize("fast", ["on", "off"])
def test_a_cache_that_does_not_fit_leaves_nothing_behind(model, fast):
    """And the error says how large it may be: one of that size fits, one block more does not."""
    with without_collector() as pool:
        before = pool.used_bytes()
        pool.free_all_blocks()
        pool.set_limit(before + (8 << 20))
        try:
            with pytest.raises(OutOfCacheMemory) as caught:
                make(model, fast, num_blocks=100_000)
            size = 16 * model.config.kv_bytes_per_token
            said = str(caught.value)
            assert (
                f"needs {100_000 * size:,} for num_blocks = 100000 of block_size = 16: lower num_blocks to "
                in said
            )
            fits = int(re.search(r"lower num_blocks to (\d+) or less", said)[1])
            del caught
            assert make(model, fast, num_blocks=fits - 1).runner.num_blocks == fits - 1
            with pytest.raises(OutOfCacheMemory):
                make(model, fast, num_blocks=fits + 1)
        finally:
            pool.set_limit(0)
        assert pool.used_bytes() == before


def test_a_context_that_the_model_does_not_have_is_refused_by_its_name(model):
    with pytest.raises(ValueError, match="max_model_len is 1000000000000; it must be at most 512"):
        make(model, "auto" if is_gpu else "on", max_model_len=10**12)


# ---------------- on a card
on_a_card = pytest.mark.skipif(not is_gpu, reason="no NVIDIA GPU")


@pytest.fixture(scope="module")
def stories_on_a_card():
    options = {"max_num_seqs": 16, "num_blocks": 1000, "max_num_batched_tokens": 512}
    return {fast: LLM("tiny-stories", fast_path=fast, **options) for fast in ("off", "on")}


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("together", [1, 3, 40])
def test_stories_on_a_card(stories_on_a_card, together):
    """Sums are taken in another order, so that more near ties fall otherwise than in the emulation."""
    whole = 0
    for first in range(0, len(PROMPTS), together):
        whole += _compare_stories(stories_on_a_card, PROMPTS[first : first + together], 100, 0.5)
    assert whole >= 0.6 * len(PROMPTS)


@pytest.mark.gpu
@on_a_card
def test_graphs_repeat_to_the_bit(stories_on_a_card):
    """The first time launches are recorded, afterwards a graph is started: the same tokens, the same logits."""
    llm = stories_on_a_card["on"]
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=1, ignore_eos=True)
    first, *others = ([tokens_of(o) for o in llm.generate(PROMPTS[:5], params)] for _ in range(4))
    logprobs = SamplingParams(max_tokens=20, temperature=0.0, logprobs=3, ignore_eos=True)
    told, *again = (
        [output.outputs[0].logprobs for output in llm.generate(PROMPTS[:5], logprobs)] for _ in range(3)
    )
    assert all(other == first for other in others)
    assert all(other == told for other in again)
    assert llm.engine.runner.fast._recordings


@pytest.mark.gpu
@on_a_card
def test_two_engines_on_a_card(stories_on_a_card):
    llm, params = stories_on_a_card["on"], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS[:4]]
    other = Engine(
        llm.model, llm.parts, EngineConfig(fast_path="on", num_blocks=300, max_num_seqs=16, block_size=32)
    )
    want = [
        [tokens_of(output) for output in run(engine, [(p, params) for p in prompts])]
        for engine in (llm.engine, other)
    ]
    done = [{}, {}]
    for number, prompt in enumerate(prompts):
        for engine in (llm.engine, other):
            engine.add_request(Request(str(number), prompt, params))
    while llm.engine.has_work or other.has_work:
        for engine, outputs in zip((llm.engine, other), done, strict=True):
            outputs.update({output.request_id: output for output in engine.step() if output.finished})
    assert [[tokens_of(outputs[str(k)]) for k in range(4)] for outputs in done] == want


@pytest.mark.gpu
@on_a_card
def test_memory_is_given_back_on_a_card():
    def used():
        llm = LLM("tiny-stories", fast_path="on", num_blocks=1000, max_num_seqs=16)
        llm.generate(PROMPTS[:9], SamplingParams(max_tokens=9))
        return cp.get_default_memory_pool().used_bytes()

    used()  # what libraries keep, they have now
    with without_collector() as pool:
        before = pool.used_bytes()
        assert used() > before + (1 << 20)
        assert pool.used_bytes() == before


@pytest.mark.gpu
@on_a_card
def test_an_allocation_that_does_not_fit_on_a_card():
    with without_collector() as pool:
        before = pool.used_bytes()
        with pytest.raises(MemoryError, match=r"the fast path may take .* lower one of these"):
            LLM("tiny-stories", fast_path="on", num_blocks=100, max_num_batched_tokens=10**9)
    gc.collect()
    assert pool.used_bytes() < before + (64 << 20)
