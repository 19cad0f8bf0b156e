"""Server-sent events as bytes: no character and no line is ever cut, and a stop string is never shown."""

from __future__ import annotations

import json

import pytest

from .scripted import Script, scripted_llm, tiny_folder
from .serving import served

SCRIPT = Script()
TEXTS = [
    "plain",
    "café, naïve, 東京, 🙂👩‍👩‍👧 and so on",
    "two\nlines\r\nand\u2028others\u0085\x0b\x0c\x1c\x00 data: [DONE]\n\n",
    "\U0001f600" * 20,
    "ends within 東"[:-1],
]
BROKEN = [
    b"\xe6\x9d",
    b"ok \xf0\x9f\x99",
    b"\xff\xfe\x80abc",
    "é".encode()[:1] + b"z",
    b"\xed\xa0\x80",
    b"\xc3\xa9\xc3",
]


@pytest.fixture(scope="module")
def scripted_server(tmp_path_factory):
    folder = tiny_folder(tmp_path_factory.mktemp("tiny"))
    with served(scripted_llm(folder, SCRIPT), model_name="scripted") as server:
        yield server


def ask(server, data: bytes, **options):
    """(pieces of text, finish reason, raw bytes) of a streamed completion that says `data`."""
    SCRIPT.say(data)
    body = {
        "model": "scripted",
        "prompt": "x",
        "max_tokens": 300,
        "temperature": 0,
        "stream": True,
        **options,
    }
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        chunks = list(answer.iter_raw())
    raw = b"".join(chunks)
    *events, done, end = raw.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    objects = []
    for event in events:
        assert event.startswith(b"data: ")
        assert not set(event.decode("ascii")) & set("\n\r"), "one line each, and ASCII"
        objects.append(json.loads(event[6:]))
    for chunk in chunks:  # of the transport: whole events
        assert chunk.endswith(b"\n\n")
    choices = [choice for found in objects for choice in found["choices"]]
    return [c["text"] for c in choices], choices[-1]["finish_reason"], choices


@pytest.mark.parametrize("text", TEXTS)
def test_characters_are_never_split(scripted_server, text):
    pieces, reason, _ = ask(scripted_server, text.encode())
    assert "".join(pieces) == text
    assert reason == "stop"
    assert "\ufffd" not in "".join(pieces)
    assert len(pieces) >= len(text), "and none is held back for longer than it must"
    for piece in pieces:
        piece.encode()  # no half of a surrogate pair


@pytest.mark.parametrize("data", BROKEN)
def test_bytes_that_are_no_characters_become_replacement_characters(scripted_server, data):
    pieces, _, _ = ask(scripted_server, data)
    assert "".join(pieces) == data.decode(errors="replace")


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("say END and on", "END", "say "),
        ("E EN ENE END", "END", "E EN ENE "),
        ("ENENEND", "END", "ENEN"),
        ("東京 is a city", "京", "東"),
        ("a🙂b🙂🙂c", "🙂🙂", "a🙂b"),
        ("one\n\ntwo", "\n\n", "one"),
        ("first second", ["second", "first"], ""),
        ("abcabd", ["abd", "cab"], "ab"),
        ("never", "evening", "never"),
        ("nearly EN", "END", "nearly EN"),
    ],
)
def test_stop_strings_byte_by_byte(scripted_server, text, stop, expected):
    pieces, reason, _ = ask(scripted_server, text.encode(), stop=stop)
    assert "".join(pieces) == expected
    assert reason == "stop"
    SCRIPT.say(text.encode())
    body = {"model": "scripted", "prompt": "x", "max_tokens": 300, "temperature": 0, "stop": stop}
    with scripted_server.http() as http:
        whole = http.post("/v1/completions", json=body).json()["choices"][0]
    assert whole == {"index": 0, "text": expected, "logprobs": None, "finish_reason": "stop"}


def test_tokens_that_are_no_characters_have_bytes(scripted_server):
    _, _, choices = ask(scripted_server, "é!".encode(), logprobs=0)
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
    assert tokens == ["bytes:\\xc3", "bytes:\\xa9", "!", "</s>"]
    offsets = [
        place for choice in choices if choice["logprobs"] for place in choice["logprobs"]["text_offset"]
    ]
    assert offsets == [0, 0, 1, 2]
    SCRIPT.say("é!".encode())
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "x"}],
        "logprobs": True,
        "temperature": 0,
    }
    with scripted_server.http() as http:
        answer = http.post("/v1/chat/completions", json=body).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content][:3] == [[0xC3], [0xA9], [0x21]]
    assert len(content) == answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["message"]["content"] == "é!"


def test_a_model_without_a_template_has_no_chat(tmp_path):
    folder = tiny_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    with served(scripted_llm(folder, SCRIPT)) as server, server.http() as http:
        body = {"model": server.engine.model_name, "messages": [{"role": "user", "content": "x"}]}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]
