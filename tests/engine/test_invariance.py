"""A request's tokens and logits do not depend on what else is computed, when, or in how many pieces.

In the emulation that holds to the bit. And whatever comes in whatever order, no block is lost.
"""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import TINY, EngineConfig, load, run, tiny_folder

from tinyvllm_ref.device import is_gpu
from tinyvllm_ref.engine import Engine
from tinyvllm_ref.request import Request
from tinyvllm_ref.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(is_gpu, reason="on a card sums are taken in another order for another batch")

PROMPTS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tiny_folder(tmp_path_factory.mktemp("tiny"), TINY))


class Recorder:
    """An engine that keeps the logits of every draw, by request and number of the token."""

    def __init__(self, model, **options):
        self.engine = Engine(model, model.parts, EngineConfig(**options))
        self.logits = {}
        self.steps = []
        sampler, inner = self.engine.runner._sampler, self.engine.runner.run

        def sample(logits, requests):
            for row, request in zip(logits.get(), requests, strict=True):
                self.logits[request.request_id, request.num_output_tokens] = row
            return sampler(logits, requests)

        def run(batch):
            self.steps.append((len(batch.requests), batch.total_tokens, batch.num_decodes))
            self.engine.blocks.check()
            return inner(batch)

        self.engine.runner._sampler = sample
        self.engine.runner.run = run

    def check_empty(self):
        self.engine.blocks.check()
        assert self.engine.blocks.num_free == self.engine.blocks.num_blocks
        assert not self.engine.has_work
        assert not self.engine.scheduler.has_work


@pytest.fixture(scope="module")
def requests():
    """Ragged: prompts of 1 to 180 tokens, completions of 1 to 40, half of them greedy."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(PROMPTS):
        length = [1, 15, 16, 17, 63, 64, 65, 180][number] if number < 8 else int(rng.integers(1, 100))
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 40)),
            temperature=float(number % 2),
            top_p=0.95,
            seed=number,
            ignore_eos=True,
            frequency_penalty=0.5 * (number % 3),
        )
        made.append((rng.integers(0, 259, length).tolist(), params))
    return made


@pytest.fixture(scope="module")
def alone(model, requests):
    """One by one: tokens and logits of each."""
    found = []
    for ids, params in requests:
        recorder = Recorder(model, num_blocks=32)
        (output,) = run(recorder.engine, [(ids, params)])
        recorder.check_empty()
        logits = [recorder.logits["0", step] for step in range(len(output.outputs[0].token_ids))]
        found.append((output.outputs[0].token_ids, logits))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 1000},
        {"num_blocks": 1000, "max_num_batched_tokens": 37},
        {"num_blocks": 1000, "max_num_seqs": 7},
        {"num_blocks": 1000, "batching": "static", "max_num_seqs": 8},
        {
            "num_blocks": 1000,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": 256,
            "max_model_len": 256,
        },
        {"num_blocks": 26},
        {"num_blocks": 20, "max_num_batched_tokens": 50},
        {"num_blocks": 120, "block_size": 3},
        {"num_blocks": 3, "block_size": 256},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
def test_together_is_as_alone_to_the_bit(model, requests, alone, options):
    recorder = Recorder(model, **options)
    outputs = run(recorder.engine, requests)
    recorder.check_empty()
    for number, (tokens, logits) in enumerate(alone):
        assert outputs[number].outputs[0].token_ids == tokens, f"request {number}"
        for step, row in enumerate(logits):
            assert recorder.logits[str(number), step].tobytes() == row.tobytes(), (
                f"request {number}, token {step}"
            )
    preempted = sum(output.num_preemptions for output in outputs)
    assert (preempted > 0) == (options["num_blocks"] in (26, 20) or options.get("block_size") == 3)
    widest = max(count for count, _, _ in recorder.steps)
    assert widest > 1
    if "max_num_batched_tokens" in options:
        assert max(tokens for _, tokens, _ in recorder.steps) <= options["max_num_batched_tokens"]
    if options.get("batching") == "static":  # nobody joins while a batch runs: its size only falls
        assert widest == 8


def test_static_batches_never_grow(model, requests):
    recorder = Recorder(model, num_blocks=1000, batching="static", max_num_seqs=8)
    names = []
    inner = recorder.engine.runner.run
    recorder.engine.runner.run = lambda batch: (
        names.append({r.request_id for r in batch.requests}) or inner(batch)
    )
    run(recorder.engine, requests)
    for before, now in itertools.pairwise(names):
        assert now <= before or not now & before


# ---------------- anything in any order

ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(1, 60),  # prompt
            st.integers(1, 24),  # completion
            st.sampled_from([1, 1, 1, 3]),  # n
            st.sampled_from([0.0, 1.0]),
        ),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 11)),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    actions=ACTIONS,
    num_blocks=st.integers(12, 40),
    block_size=st.sampled_from([4, 7, 16]),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.sampled_from([8, 33, 256]),
    batching=st.sampled_from(["continuous", "static"]),
)
def test_no_block_is_lost(model, solo, actions, **options):
    engine = Engine(model, model.parts, EngineConfig(**options))
    sent, done = {}, {}

    def step():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        engine.blocks.check()

    for action, *values in actions:
        if action == "add":
            prompt, completion, n, temperature = values
            name = str(len(sent))
            params = SamplingParams(
                max_tokens=completion, n=n, temperature=temperature, seed=len(sent) % 4, ignore_eos=True
            )
            ids = [prompt % 7 + 3 * k % 250 for k in range(prompt)]
            if prompt + completion > options["num_blocks"] * options["block_size"]:
                with pytest.raises(ValueError, match="fit"):
                    engine.add_request(Request(name, ids, params))
            else:
                engine.add_request(Request(name, ids, params))
                sent[name] = (ids, params)
        elif action == "step":
            for _ in range(values[0]):
                step()
        elif str(values[0]) in sent and str(values[0]) not in done:
            engine.abort(str(values[0]))
            engine.blocks.check()
    steps = 0
    while engine.has_work:
        step()
        steps += 1
        assert steps < 5000, "the engine does not come to an end"
    assert set(done) == set(sent)
    assert engine.blocks.num_free == options["num_blocks"]
    assert not engine.scheduler.has_work
    for name, output in done.items():
        for completion in output.outputs:
            if completion.finish_reason != "abort":
                assert completion.token_ids == solo(*sent[name])[completion.index]


@pytest.fixture(scope="module")
def solo(model):
    """What a request gives with the engine to itself; kept, because hypothesis asks for the same again."""
    engine = Engine(model, model.parts, EngineConfig(num_blocks=64))
    kept = {}

    def tokens(ids, params):
        key = (len(ids), params)
        if key not in kept:
            (output,) = run(engine, [(ids, params)])
            kept[key] = [completion.token_ids for completion in output.outputs]
        return kept[key]

    return tokens
