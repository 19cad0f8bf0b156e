"""What goes wrong: clients that vanish, bodies that are no requests, more than can be served. Nothing is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import struct

import httpx
import pytest

from tinyvllm_ref import LLM
from tinyvllm_ref.server import Settings

from .serving import MODEL, Served, alone, served, wait_for

SECRET = "xyzzy-plugh"  # stands in every prompt here, and must stand in no error and no log
LONG = {"model": MODEL, "prompt": SECRET, "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(autouse=True)
def nothing_is_told(caplog):
    """No log of any test here has a prompt, a traceback or a path."""
    caplog.set_level(logging.INFO)
    yield
    log = caplog.text + "".join(str(record.exc_info or "") for record in caplog.records)
    assert SECRET not in log
    assert "Traceback" not in log
    assert "site-packages" not in log


def post(body: bytes, content_type: str = "application/json", length: int | None = None, path="completions"):
    """A request as it goes over the wire."""
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


@contextlib.contextmanager
def connection(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as found:
        yield found


def error_of(answer: httpx.Response, status: int) -> dict:
    """The error, in OpenAI's shape and without what the client had written."""
    assert answer.status_code == status, answer.text
    assert SECRET not in answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "/" not in error["message"].replace("/openapi.json", "").replace("application/json", "")
    return error


# ---------------- clients that vanish


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_a_client_that_is_killed_frees_its_blocks(server, stream, reset):
    with connection(server) as client:
        client.sendall(post(json.dumps({**LONG, "n": 2, "stream": stream}).encode()))
        if stream:
            assert b"200 OK" in client.recv(4096)
        wait_for(lambda: server.engine.stats.blocks_used > 0)
        if reset:  # as a killed process's system may do
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.check_idle()


@pytest.mark.parametrize("complete", [True, False])
def test_a_client_that_goes_is_no_error_of_the_server(complete):
    """Whether it waits for its answer or is in the midst of its body: neither the log nor the metrics say 500."""
    with served(LLM(MODEL, num_blocks=256)) as server, server.http() as http:
        body = json.dumps(LONG).encode()
        with connection(server) as client:
            client.sendall(post(body) if complete else post(body, length=len(body) + 1))
            if complete:
                wait_for(lambda: server.engine.stats.running == 1)
            else:
                wait_for(lambda: server.connections >= 1)
        count = 'tinyvllm_http_responses_total{status="499"} 1.0'
        wait_for(lambda: count in http.get("/metrics").text)
        assert 'status="500"' not in http.get("/metrics").text


def test_a_client_that_reads_nothing_holds_nobody_up(server, reference):
    with connection(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(post(json.dumps({**LONG, "n": 8, "stream": True, "logprobs": 20}).encode()))
        wait_for(lambda: server.engine.stats.running == 8)
        with server.openai() as other:
            answer = other.completions.create(model=MODEL, prompt="Once", max_tokens=8, temperature=0)
        assert (
            answer.choices[0].text == alone(reference, "Once", max_tokens=8, temperature=0.0).outputs[0].text
        )
    server.check_idle()


def test_a_client_that_is_gone_before_its_turn_is_never_computed():
    llm = LLM(MODEL, num_blocks=256, max_num_seqs=1)
    with served(llm) as server, connection(server) as first:
        first.sendall(post(json.dumps({**LONG, "stream": True}).encode()))
        wait_for(lambda: server.engine.stats.running == 1)
        computed = []
        run = llm.engine.runner.run
        llm.engine.runner.run = lambda batch: (
            computed.extend(r.request_id for r in batch.requests) or run(batch)
        )
        with connection(server) as second:
            second.sendall(post(json.dumps({**LONG, "stream": True}).encode()))
            wait_for(lambda: server.engine.stats.waiting == 1)
        wait_for(lambda: server.engine.stats.waiting == 0)
        assert server.engine.stats.running == 1
        assert len(set(computed)) == 1


def test_a_client_that_goes_in_the_midst_of_its_body(server):
    for body in (b"", b'{"model": "tiny-stories", "prom'):
        with connection(server) as client:
            client.sendall(post(body, length=500))
        with connection(server) as client:
            client.sendall(post(body, length=500)[:30])  # in the midst of the head
    with server.openai() as client:
        client.completions.create(model=MODEL, prompt="Once", max_tokens=1)


def test_a_body_that_does_not_come_is_not_waited_for_for_ever(reference):
    settings = Settings(body_seconds=0.3)
    with served(LLM(MODEL, num_blocks=64), settings) as server, connection(server) as client:
        client.sendall(post(b'{"model": "tiny', length=500))
        answer = b""
        while piece := client.recv(4096):
            answer += piece
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_timeout" in answer


# ---------------- bodies that are no requests


@pytest.fixture(scope="module")
def http(shared_server):
    with shared_server.http() as client:
        yield client


def big(size: int) -> bytes:
    return json.dumps({"model": MODEL, "prompt": SECRET * (size // len(SECRET))}).encode()


def test_a_body_too_large(server, http):
    error = error_of(http.post("/v1/completions", content=big(3 << 20), headers=JSON), 413)
    assert "1,048,576 bytes" in error["message"]


def test_a_body_too_large_that_does_not_say_so(server, http):
    """Sent in chunks, without a length."""
    body = big(3 << 20)
    pieces = (body[start : start + 65536] for start in range(0, len(body), 65536))
    error = error_of(http.post("/v1/completions", content=pieces, headers=JSON), 413)
    assert error["code"] == "body_too_large"


JSON = {"Content-Type": "application/json"}


def test_json_may_say_its_character_set(server, http):
    headers = {"Content-Type": "application/json; charset=utf-8"}
    body = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 1})
    assert http.post("/v1/completions", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_a_wrong_content_type(server, http, kind):
    """A web page may send these to any server without asking it first: that is why they are refused."""
    headers = {} if kind is None else {"Content-Type": kind}
    body = json.dumps({"model": MODEL, "prompt": SECRET}).encode()
    error_of(http.post("/v1/completions", content=body, headers=headers), 415)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "tiny-stories", "prompt": "xyzzy-plugh"',
        b"xyzzy-plugh",
        b"\xff\xfe{}",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"model": "tiny-stories", "prompt": "Once", "temperature": NaN}',
        b'{"model": "tiny-stories", "prompt": "Once", "temperature": -Infinity}',
        b'{"model": "tiny-stories", "prompt": "Once", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny-stories", "prompt": "xyzzy-plugh \\ud800"}',
        b'{"model": "tiny-stories", "prompt": "xyzzy-plugh", "xyzzy-plugh"}',
        b'{"model": "tiny-stories", "prompt": "xyzzy-plugh \xed\xa0\x80"}',  # half of a surrogate pair, as UTF-8
        '{"model": "tiny-stories", "prompt": "xyzzy-plugh \\ud800"}'.encode("utf-16"),
        b'{"model": "tiny-stories", "prompt": "Once", "prompt": "xyzzy-plugh"}',
        json.dumps({"model": MODEL, "prompt": "Once"} | {f"xyzzy-plugh{k}": k for k in range(2000)}).encode(),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_invalid_json(server, http, path, body):
    error = error_of(http.post(path, content=body, headers=JSON), 400)
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize("body", ["[]", "null", "3", '"xyzzy-plugh"', '["xyzzy-plugh"]', "true"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_json_that_is_no_object(server, http, path, body):
    error_of(http.post(path, content=body, headers=JSON), 400)


WRONG = [
    (
        "prompt",
        [None, 3, 1.5, True, {}, [], [[]], [None], ["a", 3], [3, "a"], [1.5], [True], [-1], [[2, -2]], [{}]],
    ),
    ("prompt", [[10**30], [2048], [[5], [99999]]]),
    ("max_tokens", [-1, 1.5, "16", True, [], 10**30, 1e400]),
    ("temperature", [-0.1, 2.1, "1", True, [], 1e400, -1e400]),
    ("top_p", [0, -1, 1.01, "1", 1e400]),
    ("n", [0, -1, 129, 1.5, "2", True, 10**30]),
    ("stop", ["", [""], 3, ["a", 3], ["a"] * 5, {}, [["a"]]]),
    ("seed", [1.5, "1", True, 2**63, -(2**63) - 1, 10**40]),
    ("presence_penalty", [-2.1, 2.1, "1", 1e400]),
    ("frequency_penalty", [-2.1, 2.1, "x"]),
    ("logprobs", [-1, 21, "1", True, 1.5]),
    ("stream", [1, "true", "yes", {}]),
    ("echo", [1, "true"]),
    ("stream_options", [{"include_usage": True}, 3, "x", {"other": 1}]),
    ("model", [None, 3, ["tiny-stories"], {}]),
    ("best_of", [2, "1"]),
    ("suffix", ["xyzzy-plugh", 3]),
    ("logit_bias", [{"5": 1}, 3, []]),
    ("user", [3, {}]),
    ("stop_token_ids", [[-1], 3, ["a"], [10**20], [5] * 1025]),
    ("top_k", [-2, 1.5, 10**20]),
    ("min_p", [-0.1, 1.1]),
    ("repetition_penalty", [0, -1, 1e400]),
    ("xyzzy", [1]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG for value in values])
def test_a_wrong_field_is_named(server, http, field, value):
    body = {"model": MODEL, "prompt": SECRET, "max_tokens": 1, field: value}
    text = json.dumps(body).replace("Infinity", "1e400")  # which is JSON, and no number that a computer has
    error = error_of(http.post("/v1/completions", content=text, headers=JSON), 400)
    assert error["param"].split(".")[0].split("[")[0] == field
    assert field in error["message"] or field == "prompt"


MESSAGE = {"role": "user", "content": SECRET}
WRONG_CHATS = [
    ("messages", [None, [], "xyzzy-plugh", {}, [3], [None], [[]], ["xyzzy-plugh"]]),
    (
        "messages",
        [[{"role": "user"}], [{"content": SECRET}], [{**MESSAGE, "role": "tool"}], [{**MESSAGE, "role": 3}]],
    ),
    (
        "messages",
        [[{**MESSAGE, "content": c}] for c in (None, 3, [], {}, [3], [{"type": "text"}], [{"text": SECRET}])],
    ),
    ("messages", [[{**MESSAGE, "content": [{"type": "image_url", "image_url": {"url": SECRET}}]}]]),
    ("messages", [[{**MESSAGE, "tool_calls": []}]]),
    ("max_tokens", [0, -1, "3"]),
    ("max_completion_tokens", [0, -1, "3"]),
    ("logprobs", [1, "true"]),
    ("top_logprobs", [3, -1, 21]),
    ("tools", [[{"type": "function"}], {}]),
    ("tool_choice", ["required", {"type": "function"}]),
    ("response_format", [{"type": "json_object"}, "text"]),
    ("prompt", [SECRET]),
]


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG_CHATS for value in values]
)
def test_a_wrong_field_of_a_chat_is_named(server, http, field, value):
    body = {"model": MODEL, "messages": [MESSAGE], field: value}
    error = error_of(http.post("/v1/chat/completions", json=body), 400)
    assert error["param"].split(".")[0].split("[")[0] == field


def test_a_prompt_too_long(server, http):
    for body in (
        {"prompt": f"{SECRET} " * 2000},
        {"prompt": [5] * 1024},
        {"prompt": [5] * 1020, "max_tokens": 5},
    ):
        error = error_of(http.post("/v1/completions", json={"model": MODEL, **body}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "at most 1024" in error["message"]
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"{SECRET} " * 2000}]}
    assert error_of(http.post("/v1/chat/completions", json=body), 400)["code"] == "context_length_exceeded"
    assert http.post(
        "/v1/completions", json={"model": MODEL, "prompt": [5] * 1020, "max_tokens": 4}
    ).is_success


def test_more_at_once_than_can_ever_wait(server, http):
    body = {"model": MODEL, "prompt": [SECRET] * 10, "n": 128, "max_tokens": 1}
    error = error_of(http.post("/v1/completions", json=body), 400)
    assert "at most 320" in error["message"]


def test_what_is_refused_anyway_is_not_made_tokens_of(server, http, monkeypatch):
    """It takes seconds for a megabyte, during which other clients get no answer."""
    encoded = []
    monkeypatch.setattr(server.llm.tokenizer, "encode", lambda text, **options: encoded.append(text) or [5])
    many = {"model": MODEL, "prompt": [SECRET] * 321}
    assert "at most 320" in error_of(http.post("/v1/completions", json=many), 400)["message"]
    for path, field in (
        ("/v1/completions", {"prompt": SECRET * 50_000}),
        ("/v1/chat/completions", {"messages": [{**MESSAGE, "content": SECRET * 50_000}]}),
    ):
        error = error_of(http.post(path, json={"model": MODEL, **field}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "550," in error["message"]
    assert encoded == []


def test_the_longest_text_that_fits_is_not_refused_for_its_length(server, http):
    """1,023 times the token with the most bytes."""
    tokenizer = server.llm.tokenizer
    longest = max((tokenizer.decode([token]) for token in range(server.llm.config.vocab_size)), key=len)
    (token,) = tokenizer.encode(longest, add_special_tokens=False)
    assert len(longest.encode()) == len(tokenizer.token_bytes(token))
    count = 1024
    while len(tokenizer.encode(longest * count)) > 1023:
        count -= 1
    assert count > 900
    body = {"model": MODEL, "prompt": longest * count, "max_tokens": 1}
    assert http.post("/v1/completions", json=body).is_success


def test_unknown_paths_and_methods(server, http):
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        error_of(http.request(method, "/v1/nothing"), 404)
        error_of(http.request(method, "/v1/completions/"), 404)
    assert http.head("/v1/nothing").status_code == 404
    assert http.head("/health").status_code == 200
    answer = http.get("/v1/completions")
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert (
        "access-control-allow-origin" not in http.get("/v1/models", headers={"Origin": "http://a.b"}).headers
    )


# ---------------- more than can be served


async def burst(url: str, count: int) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        body = {"model": MODEL, "max_tokens": 8, "temperature": 1.0}
        return await asyncio.gather(
            *(
                client.post("/v1/completions", json={**body, "prompt": SECRET, "seed": k})
                for k in range(count)
            )
        )


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_burst_beyond_the_queue(reference, count):
    with served(LLM(MODEL, num_blocks=64, max_num_seqs=8), max_queue=16) as server:
        answers = asyncio.run(burst(server.url, count))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 24
        for seed, answer in enumerate(answers):
            if answer.status_code == 429:
                assert error_of(answer, 429)["code"] == "queue_full"
                assert int(answer.headers["retry-after"]) >= 1
            elif seed < 100:
                expected = alone(reference, SECRET, max_tokens=8, temperature=1.0, seed=seed)
                assert answer.json()["choices"][0]["text"] == expected.outputs[0].text
        server.check_idle()
        with server.openai(max_retries=10) as client:  # which does as Retry-After says
            client.completions.create(model=MODEL, prompt="Once", max_tokens=1)


def test_a_pool_of_few_blocks_serves_everyone_in_the_end(reference):
    """12 clients, blocks for two or three of them: requests lose their blocks, and no token is another's."""
    with served(LLM(MODEL, num_blocks=12, max_num_seqs=8)) as server:
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 60, "temperature": 1.0}

        async def ask():
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                asked = [client.post("/v1/completions", json={**body, "seed": seed}) for seed in range(12)]
                return await asyncio.gather(*asked)

        for seed, answer in enumerate(asyncio.run(ask())):
            expected = alone(reference, "Once upon a time", max_tokens=60, temperature=1.0, seed=seed)
            assert answer.json()["choices"][0]["text"] == expected.outputs[0].text
        assert server.engine.stats.preemptions > 0
        with server.http() as http:
            error = error_of(http.post("/v1/completions", json={**body, "max_tokens": 200}), 400)
        assert "at most 192" in error["message"]  # 12 blocks of 16


# ---------------- an engine that fails


def test_a_failed_step_is_an_error_for_everyone_and_the_server_says_that_it_is_ill(caplog):
    llm = LLM(MODEL, num_blocks=64)
    with contextlib.ExitStack() as stack:
        server = Served(llm)
        stack.callback(server.close)
        http = stack.enter_context(server.http())
        steps = iter(range(5))
        run = llm.engine.runner.run

        def fail(batch):
            if next(steps, None) is None:
                raise RuntimeError(f"{SECRET} in /a/path")
            return run(batch)

        llm.engine.runner.run = fail
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert answer.status_code == 200
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["message"] == "the engine has failed"
        assert len(lines) > 1
        error_of(http.post("/v1/completions", json=LONG), 503)
        assert http.get("/health").status_code == 503
    assert "the engine has failed: RuntimeError" in caplog.text
