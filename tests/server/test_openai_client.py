"""The `openai` client against the server: what it gets is to the bit what the engine says to one prompt alone."""

from __future__ import annotations

import math

import openai
import pytest

from .serving import MODEL, alone

PROMPTS = ["Once upon a time", "The dog", "One sunny morning, a girl named Mia", "Tim was sad because"]
CHAT = [{"role": "user", "content": "Tell me a story about a cat."}]
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "seed": -3},
    {"temperature": 0.7, "seed": 5, "presence_penalty": 1.5, "frequency_penalty": -0.5},
]


@pytest.fixture(scope="module")
def client(shared_server):
    with shared_server.openai() as client:
        yield client


def streamed(chunks):
    """(text, finish reason, chunks) of each choice of a text completion's stream."""
    texts, reasons, found = {}, {}, list(chunks)
    for chunk in found:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                assert choice.index not in reasons, "a choice ends once"
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, found


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_completion_is_what_the_engine_says_alone(server, client, reference, prompt, settings):
    expected = alone(reference, prompt, max_tokens=24, **settings).outputs[0]
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, **settings)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.model == MODEL
    assert answer.usage.prompt_tokens == len(reference.tokenizer.encode(prompt))
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_stream_is_the_whole_text_in_pieces(server, client, settings):
    asked = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 40, **settings}
    whole = client.completions.create(**asked)
    texts, reasons, chunks = streamed(client.completions.create(**asked, stream=True))
    assert texts == {0: whole.choices[0].text}
    assert reasons == {0: whole.choices[0].finish_reason}
    assert len(chunks) > 20, "it came in pieces"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_in_a_stream_comes_last_and_only_when_asked_for(server, client):
    asked = {"model": MODEL, "prompt": PROMPTS, "n": 2, "max_tokens": 5, "seed": 1}
    whole = client.completions.create(**asked)
    options = {"include_usage": True}
    chunks = list(client.completions.create(**asked, stream=True, stream_options=options))
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 8 * 5


def test_chat_is_what_the_engine_says_alone(server, client, reference):
    (expected,) = reference.chat(CHAT, _params(max_tokens=30, temperature=0.0))
    asked = {"model": MODEL, "messages": CHAT, "temperature": 0}
    whole = client.chat.completions.create(**asked, max_tokens=30)
    message = whole.choices[0].message
    assert (message.role, message.content) == ("assistant", expected.outputs[0].text)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    chunks = list(client.chat.completions.create(**asked, max_completion_tokens=30, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_a_chat_may_go_on_to_the_model_s_own_end(server, client, reference):
    (expected,) = reference.chat(CHAT, _params(max_tokens=None, temperature=0.0))
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_content_in_parts_and_the_developer_s_role_are_what_they_stand_for(server, client):
    plain = [{"role": "system", "content": "Tell it."}, {"role": "user", "content": "A cat."}]
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "Tell it."}]},
        {"role": "user", "content": [{"type": "text", "text": "A "}, {"type": "text", "text": "cat."}]},
    ]
    answers = [
        client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=20)
        for messages in (plain, parts)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage == answers[1].usage


def _params(**options):
    from tinyvllm_ref import SamplingParams

    return SamplingParams(**options)


# ---------------- stop


def test_stop_strings_that_lie_across_tokens(server, client, reference):
    text = alone(reference, PROMPTS[0], max_tokens=60, temperature=0.0).outputs[0].text
    for stop in (text[7:12], text[21:34], text[40:41], [text[30:36], text[15:22]], text[-9:]):
        asked = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 60, "temperature": 0, "stop": stop}
        expected = text[: min(text.index(one) for one in ([stop] if isinstance(stop, str) else stop))]
        whole = client.completions.create(**asked).choices[0]
        assert (whole.text, whole.finish_reason) == (expected, "stop")
        texts, reasons, _ = streamed(client.completions.create(**asked, stream=True))
        assert (texts.get(0, ""), reasons[0]) == (expected, "stop")
        messages = [{"role": "user", "content": PROMPTS[0]}]
        client.chat.completions.create(model=MODEL, messages=messages, stop=stop, max_tokens=5)


def test_what_might_have_been_a_stop_string_is_given_out_at_the_end(server, client, reference):
    text = alone(reference, PROMPTS[0], max_tokens=20, temperature=0.0).outputs[0].text
    stop = text[-6:] + "\x00"  # its beginning comes as the last thing, and then no more
    asked = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0, "stop": stop}
    texts, reasons, _ = streamed(client.completions.create(**asked, stream=True))
    assert (texts[0], reasons[0]) == (text, "length")


# ---------------- n, seeds, kinds of prompts


def test_n_completions_are_distinct_and_repeatable(server, client, reference):
    asked = {"model": MODEL, "prompt": PROMPTS[0], "n": 4, "max_tokens": 24, "seed": 11, "temperature": 1.0}
    first, second = (client.completions.create(**asked) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert [choice.text for choice in second.choices] == texts
    expected = alone(reference, PROMPTS[0], n=4, max_tokens=24, seed=11, temperature=1.0)
    assert texts == [output.text for output in expected.outputs]
    pieces, reasons, _ = streamed(client.completions.create(**asked, stream=True))
    assert [pieces[index] for index in range(4)] == texts
    assert len(reasons) == 4


def test_without_a_seed_answers_differ(server, client):
    asked = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 1.0}
    texts = {client.completions.create(**asked).choices[0].text for _ in range(4)}
    assert len(texts) > 1


def test_a_chat_of_n(server, client):
    asked = {"model": MODEL, "messages": CHAT, "n": 3, "max_tokens": 20, "seed": 3}
    whole = [choice.message.content for choice in client.chat.completions.create(**asked).choices]
    pieces = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == whole
    assert len(set(whole)) == 3


def test_the_four_kinds_of_prompts(server, client, reference):
    ids = [reference.tokenizer.encode(prompt) for prompt in PROMPTS]
    asked = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    one = [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in PROMPTS]
    for prompts in (PROMPTS, ids):
        answer = client.completions.create(prompt=prompts, **asked)
        assert [choice.text for choice in answer.choices] == one
        assert [choice.index for choice in answer.choices] == list(range(len(PROMPTS)))
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert client.completions.create(prompt=ids[1], **asked).choices[0].text == one[1]


# ---------------- log probabilities, echo


def test_logprobs_of_a_completion(server, client, reference):
    expected = alone(reference, PROMPTS[0], max_tokens=10, temperature=0.0, logprobs=3).outputs[0]
    asked = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 10, "temperature": 0, "logprobs": 3}
    choice = client.completions.create(**asked).choices[0]
    found = choice.logprobs
    assert len(found.tokens) == 10
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == [len("".join(found.tokens[:k])) for k in range(10)]
    for number, (token, values) in enumerate(zip(expected.token_ids, expected.logprobs, strict=True)):
        assert found.token_logprobs[number] == pytest.approx(values[token].logprob, abs=1e-12)
        assert len(found.top_logprobs[number]) == 3
        best = max(found.top_logprobs[number].values())
        assert best == pytest.approx(max(value.logprob for value in values.values()), abs=1e-12)
    chunks = list(client.completions.create(**asked, stream=True))
    pieces = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [value for piece in pieces for value in getattr(piece, name)] == getattr(found, name)


def test_the_logprobs_are_the_model_s_own(server, client, reference):
    """Against the logits, in float64."""
    import numpy as np

    ids = reference.tokenizer.encode(PROMPTS[2])
    logits = reference.logits(ids).astype(np.float64)
    rows = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    rows -= logits.max(1, keepdims=True)
    answer = client.completions.create(model=MODEL, prompt=ids, max_tokens=0, echo=True, logprobs=1)
    found = answer.choices[0].logprobs
    assert found.token_logprobs[0] is None
    expected = [rows[k, ids[k + 1]] for k in range(len(ids) - 1)]
    assert found.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert answer.choices[0].text == PROMPTS[2]
    assert answer.usage.completion_tokens == 0
    assert len(found.tokens) == len(ids)


def test_logprobs_of_a_chat(server, client):
    asked = {"model": MODEL, "messages": CHAT, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=4).choices[0]
    content = whole.logprobs.content
    assert len(content) == 8
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == whole.message.content
    for entry in content:
        assert len(entry.top_logprobs) == 4
        values = [best.logprob for best in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert sum(map(math.exp, values)) <= 1 + 1e-6
    none = client.chat.completions.create(**asked, logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in none] == [[]] * 8
    stream = client.chat.completions.create(**asked, logprobs=True, top_logprobs=4, stream=True)
    pieces = [chunk.choices[0].logprobs for chunk in stream if chunk.choices[0].logprobs]
    assert [entry for piece in pieces for entry in piece.content] == content


@pytest.mark.parametrize("stream", [False, True])
def test_echo_gives_the_prompt_before_the_answer(server, client, stream):
    asked = {"model": MODEL, "prompt": PROMPTS[:2], "max_tokens": 6, "temperature": 0}
    plain = client.completions.create(**asked)
    if stream:
        texts, _, _ = streamed(client.completions.create(**asked, echo=True, stream=True))
    else:
        texts = {c.index: c.text for c in client.completions.create(**asked, echo=True).choices}
    assert texts == {c.index: PROMPTS[c.index] + c.text for c in plain.choices}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "prompt",
    [
        "Once upon a time",
        "Zoé 🙂 saw 東京",
        "<|user|>Tell me a story.<|end|><|assistant|>",
        "<|bos|>Once<|end|> upon",
        [1, 5, 260, 1, 5],
        [5, 1],
    ],
)
def test_each_token_s_place_is_where_its_text_begins(server, client, reference, prompt, n):
    """Of the prompt's tokens and the completion's; a text may spell special tokens, and echo gives it as it is."""
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "seed": 2, "n": n}
    choices = client.completions.create(**asked, echo=True, logprobs=1).choices
    token_bytes = reference.tokenizer.token_bytes
    ids = prompt if isinstance(prompt, list) else reference.tokenizer.encode(prompt)
    shown = reference.tokenizer.decode(ids) if isinstance(prompt, list) else prompt
    counted = [not isinstance(prompt, list) or reference.tokenizer.decode([token]) != "" for token in ids]
    counted[0] = counted[0] and shown.encode().startswith(token_bytes(ids[0]))
    expected, before = [], b""
    for token, counts in zip(ids, counted, strict=True):
        expected.append(len(before.decode(errors="ignore")))
        before += token_bytes(token) if counts else b""
    assert before.decode() == shown
    for choice in choices:
        assert choice.text.startswith(shown)
        offsets = choice.logprobs.text_offset
        assert offsets[: len(ids)] == expected
        assert offsets[len(ids)] == len(shown)
        for token, place in zip(choice.logprobs.tokens[len(ids) :], offsets[len(ids) :], strict=True):
            if not token.startswith(("bytes:", "<|")):
                assert choice.text[place:].startswith(token)


def test_max_tokens_0_gives_nothing(server, client):
    answer = client.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")
    assert answer.usage.completion_tokens == 0


# ---------------- models, errors


def test_models(server, client):
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another/model")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"model": "another"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"top_p": 0}, openai.BadRequestError, "top_p"),
        ({"max_tokens": 5000}, openai.BadRequestError, "prompt"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"stop": ["a"] * 5}, openai.BadRequestError, "stop"),
        ({"logit_bias": {"50": 1}}, openai.BadRequestError, "logit_bias"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature"),
    ],
)
def test_errors_are_what_the_client_knows(server, client, options, kind, param):
    with pytest.raises(kind) as caught:
        client.completions.create(**{"model": MODEL, "prompt": "Once", **options})
    assert caught.value.param == param
    assert param in str(caught.value)
    assert caught.value.request_id


def test_what_vllm_has_beyond_the_api(server, client, reference):
    body = {"top_k": 3, "min_p": 0.05, "repetition_penalty": 1.2, "ignore_eos": True, "stop_token_ids": [13]}
    answer = client.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=30, seed=2, extra_body=body)
    expected = alone(reference, PROMPTS[0], max_tokens=30, seed=2, **body).outputs[0]
    assert answer.choices[0].text == expected.text
