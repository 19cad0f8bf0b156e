"""Random schedules: steps that run ahead, requests that share a prompt, and everything that may come between.

The tokens of every request must be those that it has alone on the simple path, each of them once and in order, and the
blocks must be free at the end. The fast path's sums are taken in another order, so only such requests are used as keep
their tokens when every logit is moved by more than that can move it.
"""

from __future__ import annotations

import random
from contextlib import contextmanager

import numpy as np
import pytest
from models import EngineConfig, GoldenModel, greedy, load, run, tiny_folder

from tinyvllm_ref import fast_path
from tinyvllm_ref.block_manager import BlockManager
from tinyvllm_ref.device import cp, is_gpu
from tinyvllm_ref.engine import Engine
from tinyvllm_ref.request import Request
from tinyvllm_ref.sampling_params import SamplingParams
from tinyvllm_ref.scheduler import Scheduler
from tinyvllm_ref.tokenizer import Tokenizer

SMALL = GoldenModel(
    "small",
    {
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2},
        **{"head_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512},
    },
    seed=101,
)
EOS = (2,)
MARGIN = 0.05  # beside a standard deviation of the logits of 1; both paths differ by 0.027 at most
emulated = pytest.mark.skipif(is_gpu, reason="runs in the emulation")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A model and its tokenizer."""
    folder = tiny_folder(tmp_path_factory.mktemp("small"), SMALL)
    return load(folder), Tokenizer(folder)


def make(parts, fast="on", **options):
    model, tokenizer = parts
    options = {"num_blocks": 400, "max_num_seqs": 8} | options
    return Engine(model, model.parts, EngineConfig(fast_path=fast, **options), tokenizer)


# ---------------- requests whose tokens are clear
def some_options(rng):
    """Greedy or by chance, one completion or more, with or without what goes by the host."""
    options = {"max_tokens": rng.randint(1, 14), "ignore_eos": rng.random() < 0.6, "temperature": 0.0}
    if rng.random() < 0.5:
        options |= {"temperature": rng.choice([0.3, 0.5]), "seed": rng.randrange(10**6)}
        options |= {"top_k": rng.choice([0, 1, 10]), "top_p": rng.choice([1.0, 0.9])}
        options |= {"min_p": rng.choice([0.0, 0.1])}
    host = {"logprobs": 2, "prompt_logprobs": 1, "repetition_penalty": 1.3, "frequency_penalty": 0.7}
    options |= {name: value for name, value in host.items() if rng.random() < 0.06}
    return options | {"n": rng.choice([1, 1, 1, 2, 3])}


def told(output):
    """What is compared of a prompt's completions."""
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]


def with_a_stop(rng, options, tokens, tokenizer):
    """The same, and mostly a token or a text that ends it."""
    kind = rng.choice(["token", "text", "none"])
    if kind == "none" or len(tokens) < 3:
        return options
    place = rng.randrange(1, len(tokens) - 1)
    if kind == "token":
        return options | {"stop_token_ids": [tokens[place]]}
    return options | {"stop": [tokenizer.decode(tokens[place : place + 2]) or "?", "never"]}


@contextmanager
def noise(engine, rng):
    """Every logit is moved, up or down."""
    inner = engine.runner._forward

    def forward(inputs):
        logits = inner(inputs).get()
        return cp.asarray(logits + rng.choice([-MARGIN, MARGIN], logits.shape).astype(np.float32))

    engine.runner._forward = forward
    yield engine
    engine.runner._forward = inner


@pytest.fixture(scope="module")
def clear(parts):
    """(prompt, options, what the simple path alone makes of them), where noise changes nothing."""
    rng, signs = random.Random(5), np.random.default_rng(5)
    simple = make(parts, "off", max_num_seqs=64, num_blocks=2000)
    lengths = [1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 90]
    prompts = [[rng.randrange(64) for _ in range(rng.choice(lengths))] for _ in range(100)]
    options = [some_options(rng) for _ in prompts]
    outputs = run(simple, [(p, SamplingParams(**o)) for p, o in zip(prompts, options, strict=True)])
    options = [
        with_a_stop(rng, one, output.outputs[0].token_ids, parts[1])
        for one, output in zip(options, outputs, strict=True)
    ]
    found = list(zip(prompts, options, strict=True))
    wanted = [told(run(simple, [(prompt, SamplingParams(**one))])[0]) for prompt, one in found]
    kept = [True] * len(found)
    with noise(simple, signs):
        for _ in range(3):
            outputs = run(simple, [(prompt, SamplingParams(**one)) for prompt, one in found])
            kept = [
                same and told(output) == want
                for same, output, want in zip(kept, outputs, wanted, strict=True)
            ]
    left = [(*one, want) for one, want, same in zip(found, wanted, kept, strict=True) if same]
    assert len(left) >= 20
    for name in ("stop", "stop_token_ids", "seed"):
        assert sum(name in one for _, one, _ in left) >= 3, name
    assert sum(one["n"] > 1 for _, one, _ in left) >= 3
    return left


# ---------------- random schedules
class Run:
    """An engine, what was sent to it, and what came."""

    def __init__(self, engine):
        self.engine, self.sent, self.done, self.aborted = engine, {}, {}, set()
        self._seen = {}

    @property
    def open(self):
        return [name for name in self.sent if name not in self.done and name not in self.aborted]

    def send(self, prompt, options, want):
        name = str(len(self.sent))
        self.sent[name] = (prompt, options, want)
        self.engine.add_request(Request(name, prompt, SamplingParams(**options), EOS))

    def abort(self, name):
        self.aborted.add(name)
        assert self.engine.abort(name)
        self.engine.blocks.check()

    def step(self):
        outputs = self.engine.step()
        self.engine.blocks.check()
        for output in outputs:
            assert output.request_id not in self.done, "an output after the last"
            for completion in output.outputs:
                key = output.request_id, completion.index
                before = self._seen.get(key, [])
                assert completion.token_ids[: len(before)] == before, "tokens were taken back"
                assert len(completion.token_ids) <= len(before) + 1, "two tokens in one step"
                self._seen[key] = list(completion.token_ids)
            if output.finished:
                self.done[output.request_id] = output

    def check(self):
        """Of each request all that it has alone, or as much as it had when it was aborted; and nothing is left."""
        assert set(self.done) == set(self.sent)
        for name, output in self.done.items():
            prompt, options, want = self.sent[name]
            for got, alone in zip(told(output), want, strict=True):
                if got[2] == "abort":
                    assert name in self.aborted
                    assert got[0] == alone[0][: len(got[0])], name
                else:
                    assert got == alone, (name, options)
            if options.get("logprobs") is not None:
                assert all(len(c.logprobs) == len(c.token_ids) for c in output.outputs)
            if options.get("prompt_logprobs") is not None and output.outputs[0].token_ids:
                pairs = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
                assert all(token in logprobs for token, logprobs in pairs)
        assert self.engine.blocks.num_free == self.engine.blocks.num_blocks
        scheduler = self.engine.scheduler
        lists = scheduler.running, scheduler.waiting, scheduler._kept, scheduler._parents
        assert [len(left) for left in (*lists, self.engine._prompts, self.engine._completions)] == [0] * 6


@contextmanager
def in_the_next_wait(what):
    """Once, while the host waits for tokens and the next step runs already."""
    inner = fast_path._Result.wait

    def wait(result):
        fast_path._Result.wait = inner
        what()
        return inner(result)

    fast_path._Result.wait = wait
    try:
        yield
    finally:
        fast_path._Result.wait = inner


def interrupt():
    raise KeyboardInterrupt


def some_engine(parts, rng):
    block_size = rng.choice([1, 2, 3, 4, 7, 16])
    options = {
        "num_blocks": rng.choice([112, 160, 240, 400, 6400]) // block_size,
        "block_size": block_size,
        "max_num_seqs": rng.randint(1, 8),
        "max_num_batched_tokens": rng.choice([4, 9, 33, 256]),
        "batching": rng.choice(["continuous", "continuous", "static"]),
    }
    if rng.random() < 0.2:
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 128}
    return make(parts, **options)


def play(engine, clear, rng):
    """Requests that come at any time; steps, aborts and interruptions between them, and in their midst."""
    played, left = Run(engine), rng.randint(4, 14)
    arrival = rng.choice(
        [0.3, 0.94, 1.0]
    )  # the more of them come at once, the longer steps run ahead afterwards
    if rng.random() < 0.6:  # company that goes by the host keeps steps from running ahead
        host = {"logprobs", "prompt_logprobs", "repetition_penalty", "frequency_penalty"}
        clear = [one for one in clear if not host & one[1].keys()]
    while left or engine.has_work:
        what = rng.random()
        if left and (rng.random() < arrival or not engine.has_work):
            left -= 1
            prompt, options, want = rng.choice(clear)
            if len(prompt) + options["max_tokens"] <= engine.scheduler._limit:
                played.send(prompt, options, want)
            continue
        if what < 0.04 and played.open:
            played.abort(rng.choice(played.open))
        elif what < 0.08 and played.open:
            name = rng.choice(played.open)
            with in_the_next_wait(lambda name=name: played.abort(name)):
                played.step()
        elif what < 0.14:
            with in_the_next_wait(interrupt):
                try:
                    played.step()
                except KeyboardInterrupt:
                    engine.blocks.check()
        for _ in range(rng.choice([1, 1, 1, 5])):
            if engine.has_work:
                played.step()
    played.check()
    return played


def _play_many(parts, clear, seeds):
    ahead = aborted = 0
    for seed in seeds:
        rng = random.Random(seed)
        engine = some_engine(parts, rng)
        seated, inner = [], engine.runner.fast._seat
        engine.runner.fast._seat = lambda batch, inner=inner, seated=seated: seated.append(1) or inner(batch)
        decoded, decode = [], engine.runner.fast.decode
        engine.runner.fast.decode = lambda b, decode=decode, decoded=decoded: decoded.append(1) or decode(b)
        aborted += len(play(engine, clear, rng).aborted)
        ahead += len(decoded) - len(seated)
    return ahead, aborted


@emulated
def test_in_any_schedule_everyone_gets_what_it_gets_alone(parts, clear):
    ahead, aborted = _play_many(parts, clear, range(12))
    assert ahead > 50
    assert aborted > 3


@emulated
@pytest.mark.slow
def test_in_many_schedules_everyone_gets_what_it_gets_alone(parts, clear):
    ahead, aborted = _play_many(parts, clear, range(1000, 1150))
    assert ahead > 500
    assert aborted > 50


@emulated
def test_where_tokens_do_not_suffice_for_all_no_step_runs_ahead_for_nothing(parts):
    """Nobody is in the queue, but two of six have no part in a step of four tokens: they take the next place."""
    engine = make(parts, max_num_batched_tokens=4, batching="static")
    fast, started, used = engine.runner.fast, [], []
    start, decode = fast._start, fast.decode
    fast._start = lambda: started.append(1) or start()
    fast.decode = lambda batch: used.append(1) or decode(batch)
    outputs = run(engine, [([number], greedy(4 + number)) for number in range(6)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 5, 6, 7, 8, 9]
    assert len(started) == len(used)


# ---------------- what the blocks hold
class Cache:
    """What a device would have in each slot: the tokens up to the one whose keys and values are there."""

    def __init__(self, block_size):
        self._block_size, self._slots = block_size, {}

    def run(self, batch):
        """Read all that is before the batch's tokens, then write these."""
        rows = list(zip(batch.requests, batch.starts, batch.num_tokens, batch.block_tables, strict=True))
        for request, start, _, table in rows:
            for position in range(start):
                assert self._slots[self._slot(table, position)] == request.token_ids[: position + 1]
        written = set()
        for request, start, count, table in rows:
            for position in range(start, start + count):
                slot = self._slot(table, position)
                assert slot not in written
                written.add(slot)
                self._slots[slot] = request.token_ids[: position + 1]

    def _slot(self, table, position):
        return table[position // self._block_size] * self._block_size + position % self._block_size


def _add_some(scheduler, rng, name, limit):
    """A prompt with up to six completions, if it fits."""
    prompt = [rng.randrange(5) for _ in range(rng.randint(1, min(limit, rng.choice([3, 10, 30]))))]
    room = limit + 1 - len(prompt)
    tokens = rng.choice([1, rng.randint(1, min(room, 12))])
    params, requests = SamplingParams(max_tokens=tokens, stop_token_ids=[99]), []
    for index in range(rng.choice([1, 2, 3, 6])):
        parent = requests[0] if requests else None
        requests.append(Request(f"{name}#{index}", prompt, params, parent=parent))
        scheduler.add(requests[-1])
    return requests


@pytest.mark.parametrize("seed", range(8))
def test_what_a_completion_begins_behind_is_its_own_prompt(seed):
    """Whoever computed it, and whatever became of that one: ended, preempted, aborted."""
    for case in range(60):
        rng = random.Random(1000 * seed + case)
        blocks = BlockManager(rng.choice([4, 6, 9, 15, 30]), rng.choice([1, 2, 4, 8]))
        cache, requests, left = Cache(blocks.block_size), [], rng.randint(1, 8)
        scheduler = Scheduler(
            *(rng.randint(1, 8), rng.choice([1, 2, 5, 9, 40]), blocks),
            batching=rng.choice(["continuous", "continuous", "static"]),
            lookahead=rng.choice([0, 1, 3]),
        )
        while left or scheduler.has_work:
            what = rng.random()
            if left and (what < 0.3 or not scheduler.has_work):
                left -= 1
                limit = blocks.num_blocks * blocks.block_size - 1
                requests += _add_some(scheduler, rng, str(left), limit)
            elif what < 0.36 and requests:
                scheduler.finish(rng.choice(requests).request_id, "stop", "x")
            else:
                batch = scheduler.schedule()
                cache.run(batch)
                if what > 0.95:  # in the midst of the step
                    scheduler.abort(rng.choice(requests).request_id)
                drawn = [rng.choice([0, 1, 2, 3, 4] * 4 + [99]) for _ in range(sum(batch.samples))]
                scheduler.update(batch, drawn)
            blocks.check()
        assert blocks.num_free == blocks.num_blocks
        assert all(request.finished for request in requests)
        assert len(scheduler._kept) == len(scheduler._parents) == 0
