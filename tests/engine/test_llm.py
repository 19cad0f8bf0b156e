"""The public interface, on a model of three layers' worth of noise whose tokens are bytes."""

import dataclasses
import gc
import itertools
import json
import weakref

import numpy as np
import pytest
from models import TINY, build, tiny_folder
from numpy_llama import forward

from tinyvllm_ref import LLM, CompletionOutput, RequestOutput, SamplingParams
from tinyvllm_ref.checkpoint.weights import open_checkpoint
from tinyvllm_ref.completion import StopStrings
from tinyvllm_ref.config import EngineConfig
from tinyvllm_ref.device import cp
from tinyvllm_ref.engine import mix_seed
from tinyvllm_ref.kernels.sampling import sample_specification
from tinyvllm_ref.request import Request


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, num_blocks=64)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").engine
        assert not engine.has_work
        engine.blocks.check()
        assert engine.blocks.num_free == 64


def params(**options):
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **options})


# ---------------- what comes back


def test_one_prompt(llm):
    (output,) = llm.generate("Once", params())
    assert isinstance(output, RequestOutput)
    assert output.prompt == "Once"
    assert output.prompt_token_ids == list(b"Once")
    assert output.finished
    (completion,) = output.outputs
    assert isinstance(completion, CompletionOutput)
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
    assert len(completion.token_ids) == 12
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert completion.logprobs is None


def test_several_prompts_as_text_and_as_tokens(llm):
    texts = ["Once", "upon a time", "é"]
    together = llm.generate(texts, params())
    assert [output.prompt for output in together] == texts
    alone = [llm.generate(list(text.encode()), params())[0] for text in texts]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    assert alone[0].prompt is None
    assert llm.generate([list(b"Once"), np.array([117, 112]).tolist()], params())[0].prompt_token_ids == [
        *b"Once"
    ]
    assert llm.generate([], params()) == []


def test_options_for_each(llm):
    outputs = llm.generate(["a", "b"], [params(max_tokens=3), params(max_tokens=5)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    with pytest.raises(ValueError, match="1 sampling_params were given for 2 prompts"):
        llm.generate(["a", "b"], [params()])


def test_max_tokens_none_fills_the_context(folder):
    llm = LLM(folder, num_blocks=4, max_model_len=40)
    (output,) = llm.generate("abc", params(max_tokens=None))
    assert len(output.outputs[0].token_ids) == 37
    assert output.outputs[0].finish_reason == "length"


# ---------------- streaming


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 3}, {"stop": ["e", "qu"], "max_tokens": 60}]
)
def test_the_stream_is_the_whole_text(llm, options):
    options = params(**{"max_tokens": 40, **options})
    for prompt in ("Once", "x", [1, 2, 3]):
        pieces = list(llm.stream(prompt, options))
        assert (
            "".join(pieces)
            == llm.generate(prompt if isinstance(prompt, str) else [prompt], options)[0].outputs[0].text
        )
        assert "" not in pieces


def test_leaving_a_stream_aborts_it(llm):
    stream = llm.stream("Once", params(max_tokens=100))
    next(stream)
    assert llm.engine.has_work
    stream.close()
    while llm.engine.has_work:
        llm.engine.step()


def test_a_stream_that_is_dropped_before_its_first_piece_is_aborted(llm, monkeypatch):
    stream = llm.stream("Once", params(max_tokens=100))
    del stream
    gc.collect()
    batches = []
    run = llm.engine.runner.run
    monkeypatch.setattr(
        llm.engine.runner, "run", lambda batch: batches.append(len(batch.requests)) or run(batch)
    )
    llm.generate("Once", params(max_tokens=3))
    assert batches == [1, 1, 1]  # nothing ran beside the one request
    assert not llm.engine.has_work


def test_a_stream_that_waits_for_its_first_piece_goes_on_with_the_others(llm):
    want = llm.generate("Once", params(max_tokens=5))[0].outputs[0].text
    stream = llm.stream("Once", params(max_tokens=5))
    llm.generate("a", params(max_tokens=8))
    assert "".join(stream) == want
    assert not llm.engine.has_work


def test_streams_side_by_side(llm):
    asked = [params(max_tokens=5), params(max_tokens=40)]
    whole = [llm.generate("Once", one)[0].outputs[0].text for one in asked]
    first, second = (llm.stream("Once", one) for one in asked)
    texts = [next(first), next(second)]
    texts[1] += "".join(second)  # finishes the first as well
    assert llm.generate("x", params())[0].finished
    texts[0] += "".join(first)
    assert texts == whole


def test_a_stream_shows_the_errors_where_it_is_made(llm):
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.stream("", params())
    with pytest.raises(ValueError, match="n is 2; it must be 1"):
        llm.stream("a", params(n=2))


# ---------------- stopping


def test_a_stop_string_that_spans_tokens(llm):
    whole = llm.generate("Once", params(max_tokens=60)).pop().outputs[0]
    text = whole.text
    start = next(
        i for i in range(5, len(text) - 3) if text[i : i + 3].isascii() and text.index(text[i : i + 3]) == i
    )
    stop = text[start : start + 3]
    (output,) = llm.generate("Once", params(max_tokens=60, stop=stop))
    completion = output.outputs[0]
    assert completion.text == text[:start]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    # The tokens go up to the one that completed it, and no further.
    assert llm.tokenizer.decode(completion.token_ids) == text[: start + 3]
    assert "".join(llm.stream("Once", params(max_tokens=60, stop=stop))) == text[:start]


def test_a_stop_string_in_the_last_token_allowed(llm):
    text = llm.generate("Once", params(max_tokens=60))[0].outputs[0].text
    ids = llm.generate("Once", params(max_tokens=60))[0].outputs[0].token_ids
    last = next(
        n for n in range(8, 60) if ids[n] < 128 and text and chr(ids[n]) not in llm.tokenizer.decode(ids[:n])
    )
    (output,) = llm.generate("Once", params(max_tokens=last + 1, stop=chr(ids[last])))
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", chr(ids[last]))
    assert completion.text == llm.tokenizer.decode(ids[:last])


def test_stop_tokens_and_end_tokens(llm):
    ids = llm.generate("Once", params())[0].outputs[0].token_ids
    position = next(n for n in range(2, 12) if ids.index(ids[n]) == n)
    (output,) = llm.generate("Once", params(stop_token_ids=[ids[position]]))
    completion = output.outputs[0]
    assert completion.token_ids == ids[: position + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ids[position])
    assert completion.text == llm.tokenizer.decode(ids[:position])  # without what stopped it
    llm.config, kept = dataclasses.replace(llm.config, eos_token_ids=(ids[position],)), llm.config
    try:
        completion = llm.generate("Once", params(ignore_eos=False))[0].outputs[0]
        assert (completion.token_ids, completion.stop_reason) == (ids[: position + 1], None)
        assert completion.finish_reason == "stop"
        assert len(llm.generate("Once", params())[0].outputs[0].token_ids) == 12
    finally:
        llm.config = kept


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "found"),
    [
        (["END"], ["a E", "N", "D b"], "a ", "END"),
        (["END"], ["a E", "N", "d b"], "a ENd b", None),
        (["aab"], ["aaa", "b"], "a", "aab"),
        (["ab", "abc"], ["xab", "c"], "x", "ab"),
        (["abc", "b"], ["ab"], "a", "b"),
        (["abc", "ab"], ["abc"], "", "abc"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        ([], ["a", "b"], "ab", None),
    ],
)
def test_stop_strings(stops, pieces, text, found):
    search = StopStrings(stops)
    shown = "".join(search.push(piece) for piece in pieces) + search.end()
    assert (shown, search.found) == (text, found)


def test_nothing_that_is_shown_is_taken_back():
    rng = np.random.default_rng(0)
    for _ in range(500):
        text = "".join(rng.choice(list("ab"), rng.integers(0, 12)))
        stops = ["".join(rng.choice(list("ab"), rng.integers(1, 4))) for _ in range(rng.integers(0, 3))]
        cuts = sorted(rng.integers(0, len(text) + 1, 3))
        search = StopStrings(stops)
        shown = ""
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            shown += search.push(text[begin:end])
        shown += search.end()
        first = min((text.index(stop) for stop in stops if stop in text), default=None)
        # With several stops, the one that is complete first ends the text.
        ends = [(text.index(stop) + len(stop), stop) for stop in stops if stop in text]
        assert (search.found is None) == (first is None)
        assert text.startswith(shown)
        if first is None:
            assert shown == text
        else:
            assert all(stop not in shown for stop in stops)
            assert len(shown) <= min(ends)[0]


# ---------------- drawing


def test_seeds(llm):
    drawn = params(temperature=1.5, max_tokens=20)

    def text(seed):
        return llm.generate("Once", dataclasses.replace(drawn, seed=seed))[0].outputs[0].token_ids

    assert text(1) == text(1)
    assert len({tuple(text(seed)) for seed in range(6)}) == 6
    assert text(-1) == text(-1)
    without = [llm.generate("Once", drawn)[0].outputs[0].token_ids for _ in range(4)]
    assert len(set(map(tuple, without))) == 4  # the engine picks another each time


def test_a_seed_gives_the_same_in_any_company(llm):
    drawn = [params(temperature=1.0, seed=seed, top_p=0.9, top_k=40) for seed in range(8)]
    together = llm.generate(["Once"] * 8, drawn)
    alone = [llm.generate("Once", one)[0] for one in drawn]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_an_engine_s_seed_makes_a_run_repeat(folder):
    drawn = params(temperature=1.0)
    runs = [LLM(folder, num_blocks=8, seed=seed).generate(["a", "b"], drawn) for seed in (5, 5, 6)]
    ids = [[output.outputs[0].token_ids for output in outputs] for outputs in runs]
    assert ids[0] == ids[1] != ids[2]


def test_draws_are_those_of_the_specification(llm):
    drawn = params(temperature=0.8, top_p=0.8, top_k=30, min_p=0.01, seed=11, max_tokens=6)
    ids = list(b"Once")
    expected = []
    for step in range(6):
        logits = llm.logits(ids + expected)[-1]
        expected.append(sample_specification(logits, 0.8, 30, 0.8, 0.01, 11, step))
    assert llm.generate([ids], drawn)[0].outputs[0].token_ids == expected


def test_penalties(llm):
    ids = list(b"Once")
    drawn = params(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, max_tokens=24)
    expected = []
    for _ in range(24):
        logits = llm.logits(ids + expected)[-1].astype(np.float64)
        for token in set(ids + expected):
            logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
        for token in set(expected):
            logits[token] -= 0.5 + 0.7 * expected.count(token)
        expected.append(int(logits.argmax()))
    assert llm.generate([ids], drawn)[0].outputs[0].token_ids == expected
    assert expected != llm.generate([ids], params(max_tokens=24))[0].outputs[0].token_ids
    mixed = llm.generate([ids, ids], [params(max_tokens=24), drawn])  # of the right request only
    assert mixed[1].outputs[0].token_ids == expected
    assert mixed[0].outputs[0].token_ids == llm.generate([ids], params(max_tokens=24))[0].outputs[0].token_ids


def test_n_completions(llm):
    drawn = params(n=3, temperature=1.0, seed=7)
    (output,) = llm.generate("Once upon a time there was", drawn)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    for index, completion in enumerate(output.outputs):
        seed = mix_seed(7, index) if index else 7
        alone = dataclasses.replace(drawn, n=1, seed=seed)
        assert (
            llm.generate("Once upon a time there was", alone)[0].outputs[0].token_ids == completion.token_ids
        )
    greedy = llm.generate("Once", params(n=2))[0].outputs
    assert greedy[0].token_ids == greedy[1].token_ids


def test_n_completions_compute_the_prompt_once(llm, monkeypatch):
    computed = []
    run = llm.engine.runner.run
    monkeypatch.setattr(
        llm.engine.runner, "run", lambda batch: computed.append(batch.total_tokens) or run(batch)
    )
    prompt = list(range(65, 65 + 33))
    llm.generate([prompt], params(n=4, max_tokens=2, temperature=1.0))
    assert sum(computed) < 2 * len(prompt)


# ---------------- log probabilities


def reference_log_probabilities(llm, ids):
    logits = llm.logits(ids).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_logprobs_of_chosen_tokens(llm):
    (output,) = llm.generate(
        "Once", params(logprobs=3, temperature=1.0, seed=2, max_tokens=5, frequency_penalty=1.0)
    )
    completion = output.outputs[0]
    ids = output.prompt_token_ids + completion.token_ids
    expected = reference_log_probabilities(llm, ids)[3:-1]
    total = 0.0
    for row, token, found in zip(expected, completion.token_ids, completion.logprobs, strict=True):
        best = np.argsort(-row, kind="stable")[:3].tolist()
        assert list(found) == list(dict.fromkeys([token, *best]))
        for other, value in found.items():
            assert value.logprob == pytest.approx(row[other], abs=2e-5)
            assert value.rank == int((row > row[other]).sum()) + 1
            assert value.decoded_token == llm.tokenizer.decode([other])
        total += found[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    (zero,) = llm.generate("Once", params(logprobs=0, max_tokens=2))
    assert [len(entry) for entry in zero.outputs[0].logprobs] == [1, 1]
    (all_of_them,) = llm.generate("Once", params(logprobs=1000, max_tokens=1))
    assert len(all_of_them.outputs[0].logprobs[0]) == 259


@pytest.mark.parametrize("length", [1, 2, 300])
def test_logprobs_of_the_prompt(llm, length):
    ids = np.random.default_rng(length).integers(0, 256, length).tolist()
    (output,) = llm.generate([ids], params(prompt_logprobs=1, max_tokens=2))
    assert len(output.prompt_logprobs) == length
    assert output.prompt_logprobs[0] is None
    expected = reference_log_probabilities(llm, ids)
    for position in range(1, length):
        found = output.prompt_logprobs[position]
        assert ids[position] in found
        assert int(expected[position - 1].argmax()) in found
        assert found[ids[position]].logprob == pytest.approx(expected[position - 1, ids[position]], abs=2e-5)
    # Many rows of logits go in pieces; that changes nothing.
    assert output.outputs[0].token_ids == llm.generate([ids], params(max_tokens=2))[0].outputs[0].token_ids


def test_logprobs_survive_preemption_and_company(folder):
    llm = LLM(folder, num_blocks=8, max_num_batched_tokens=48, max_num_seqs=4)
    ids = [np.random.default_rng(n).integers(0, 256, 40).tolist() for n in range(4)]
    asked = params(prompt_logprobs=0, logprobs=0, max_tokens=30)
    together = llm.generate(ids, asked)
    assert sum(output.num_preemptions for output in together) > 0
    for one, output in zip(ids, together, strict=True):
        (alone,) = llm.generate([one], asked)
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs
        assert alone.prompt_logprobs == output.prompt_logprobs


def test_logits(llm, folder):
    config, views = open_checkpoint(folder)
    ids = np.random.default_rng(0).integers(0, 259, 300).tolist()
    logits = llm.logits(ids)
    assert (logits.shape, logits.dtype) == ((300, 259), np.float32)
    expected = forward(config, views, ids, rounded=True)
    assert np.abs(logits - expected).max() < 1e-2 * np.abs(expected).max()
    for bad, message in (([], "0 tokens"), ([0] * 513, "there must be 1 to 512"), ([259], "token id 259")):
        with pytest.raises(ValueError, match=message):
            llm.logits(bad)


# ---------------- chat


def test_chat_is_the_template_s_prompt(llm):
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, params())
    assert output.prompt == "<s>user: hi\nassistant:"
    assert output.prompt_token_ids == [256, *b"user: hi\nassistant:"]
    assert (
        output.outputs[0].token_ids
        == llm.generate([output.prompt_token_ids], params())[0].outputs[0].token_ids
    )
    assert "".join(llm.stream(messages, params())) == output.outputs[0].text
    assert len(llm.chat([messages, messages], params())) == 2
    with pytest.raises(ValueError, match="messages is empty"):
        llm.chat([], params())
    with pytest.raises(TypeError, match="must be a sequence of messages"):
        llm.chat("hi", params())


def test_a_message_without_content_is_refused(llm):
    wrong = [{"role": "user", "content": "hi"}, {"role": "user"}]
    for ask in (llm.chat, lambda messages, given: llm.chat([messages[:1], messages], given), llm.stream):
        with pytest.raises(ValueError, match=r"messages\[1\]: content is missing"):
            ask(wrong, params())
    assert not llm.engine.has_work


# ---------------- what is refused


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ("", {}, ValueError, "the prompt is empty; it needs at least one token"),
        ([[]], {}, ValueError, "the prompt is empty"),
        ([[1] * 512], {}, ValueError, "the prompt has 512 tokens; at most 511 fit"),
        ([[1] * 508], {}, ValueError, "max_tokens is 12; at most 4 fit after its prompt of 508 tokens"),
        ([[1, 259]], {}, ValueError, "token id 259 is in the prompt; ids must be from 0 to 258"),
        ([[-1]], {}, ValueError, "token id -1"),
        (5, {}, TypeError, "prompts is 5"),
        ([1.5], {}, TypeError, "a prompt is 1.5"),
        ([["a"]], {}, TypeError, "it must be a str or a sequence of token ids"),
    ],
)
def test_wrong_prompts(llm, prompt, options, error, message):
    with pytest.raises(error, match=message):
        llm.generate(prompt, params(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"n": 0}, "n is 0"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_one_wrong_prompt_of_several_leaves_nothing_behind(llm):
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.generate(["a", "b", ""], params())
    while llm.engine.has_work:
        llm.engine.step()


def test_one_completion_of_n_that_does_not_fit_leaves_nothing_behind(llm):
    request = Request("x", [1] * 508, params(n=2))
    with pytest.raises(ValueError, match="at most 4 fit"):
        llm.engine.add_request(request)
    assert not llm.engine.has_work
    assert not llm.engine.scheduler.has_work


def test_wrong_models(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="no model 'no-such-model'"):
        LLM("no-such-model")
    build(TINY, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(ValueError, match="model_type is 'gpt2'; it must be one of the supported: llama"):
        LLM(tmp_path)
    with pytest.raises(ValueError, match="max_model_len is 513; it must be at most 512"):
        LLM(folder, max_model_len=513, num_blocks=64)
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        LLM(folder, max_num_seqs=0)
    with pytest.raises(ValueError, match="config and num_blocks were given"):
        LLM(folder, config=EngineConfig(), num_blocks=4)


def test_an_abort_comes_out_of_the_next_step(llm):
    llm.engine.add_request(Request("x", [1, 2, 3], params()), "text")
    assert llm.engine.step()[0].outputs[0].finish_reason is None
    assert llm.engine.abort("x")
    assert not llm.engine.abort("x")
    (output,) = llm.engine.step()
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == 1


def test_ids_in_use_are_refused(llm):
    llm.engine.add_request(Request("x", [1], params()))
    with pytest.raises(ValueError, match="this id is in use"):
        llm.engine.add_request(Request("x", [1], params()))
    llm.engine.abort("x")
    llm.engine.step()


# ---------------- memory


def test_del_gives_the_memory_back(folder):
    """At once, with no garbage collection: the weights and the cache of a large model must not wait for one."""
    llm = LLM(folder, num_blocks=8)
    llm.generate(["a", "b"], params())
    gone = [
        weakref.ref(thing) for thing in (llm.model, llm.engine.runner.kv_cache, llm.model.weights["norm"])
    ]
    gc.collect()
    gc.disable()
    try:
        del llm
        assert [reference() for reference in gone] == [None, None, None]
    finally:
        gc.enable()


def test_two_engines_in_one_process(folder):
    first, second = LLM(folder, num_blocks=8), LLM(folder, num_blocks=8)
    streams = [llm.stream("Once", params()) for llm in (first, second)]
    texts = ["", ""]
    for pieces in itertools.zip_longest(*streams, fillvalue=""):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    assert texts[0] == texts[1] == first.generate("Once", params())[0].outputs[0].text


# ---------------- progress


def test_progress_over_many_prompts(llm, capsys):
    llm.generate(["a", "b"], params(), use_tqdm=True)
    assert "2/2" in capsys.readouterr().err
    llm.generate(["a", "b"], params())  # stderr is no terminal here
    llm.generate(["a", "b"], params(), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_the_whole_context_can_be_used(llm):
    (output,) = llm.generate([[7] * 500], params(max_tokens=12))
    assert len(output.outputs[0].token_ids) == 12


def test_a_computer_whose_memory_is_nearly_full_still_has_room_for_a_cache(folder, monkeypatch):
    """What other programs hold is not the emulated device's: half of what is left is there for the cache."""
    monkeypatch.setattr(cp.cuda.runtime, "memGetInfo", lambda: (256 << 20, 16 << 30))
    assert LLM(folder).generate("a", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


@pytest.mark.parametrize("room", [0, 50_000])
def test_weights_that_do_not_fit(folder, room):
    """The error has numbers, and does not hold what was loaded before there was no more room."""
    pool = cp.get_default_memory_pool()
    gc.collect()
    held = cp.empty(1024, np.uint8)  # a limit of 0 would be none
    pool.free_all_blocks()
    before = pool.used_bytes()
    pool.set_limit(before + room)
    try:
        with pytest.raises(MemoryError) as caught:
            LLM(folder)
        assert pool.used_bytes() == before
    finally:
        pool.set_limit(0)
        del held
    weights = sum(view.nbytes for view in open_checkpoint(folder)[1].values())
    said = str(caught.value)
    assert f"the weights take {weights:,} bytes, and the device may take {room:,}: free memory, or" in said
    assert "Out of memory allocating" in said
