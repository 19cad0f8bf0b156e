"""HTTP as it goes over the wire: heads that do not come, answers that nobody takes, several requests in one go."""

from __future__ import annotations

import json
import re
import socket
import time

import pytest

from tinyvllm_ref import LLM
from tinyvllm_ref.server.connection import TimedConnection

from .serving import MODEL, alone, served, wait_for
from .test_faults import connection, post


class Hasty(TimedConnection):
    head_seconds = 0.5
    take_seconds = 0.5


@pytest.fixture(scope="module")
def hasty_server():
    with served(LLM(MODEL, num_blocks=1024), connection=Hasty) as server:
        yield server


def everything(client: socket.socket) -> bytes:
    """Until the server closes."""
    found = b""
    while piece := client.recv(65536):
        found += piece
    return found


def trickle(client: socket.socket, data: bytes) -> None:
    for byte in data:
        client.sendall(bytes([byte]))
        time.sleep(0.02)


# ---------------- heads that do not come


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_a_head_that_does_not_come_is_not_waited_for_for_ever(hasty_server, sent):
    with connection(hasty_server) as client:
        client.sendall(sent)
        assert everything(client) == b""
    wait_for(lambda: hasty_server.connections == 0)


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_head_that_comes_byte_by_byte_gains_no_time(hasty_server, before):
    """Of the first request, and of one after another on the same connection."""
    with connection(hasty_server) as client:
        client.sendall(before)
        if before:
            assert client.recv(4096).startswith(b"HTTP/1.1 200 OK")
        with pytest.raises(ConnectionError):
            trickle(client, b"GET /health HTTP/1.1\r\nX-Slow: " + b"a" * 1000)
    wait_for(lambda: hasty_server.connections == 0)


def test_an_answer_may_take_longer_than_a_head(hasty_server, reference):
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 900, "temperature": 0, "ignore_eos": True}
    with hasty_server.http() as http:
        began = time.monotonic()
        answer = http.post("/v1/completions", json=body)
        while time.monotonic() - began < 2 * Hasty.head_seconds:  # on a fast machine, several
            answer = http.post("/v1/completions", json=body)
    expected = alone(reference, "Once", max_tokens=900, temperature=0.0, ignore_eos=True)
    assert answer.json()["choices"][0]["text"] == expected.outputs[0].text


# ---------------- answers that nobody takes


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_takes_nothing_of_its_answer_is_dropped(hasty_server, stream):
    """What waits for it would else be in memory for ever."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", hasty_server.port))
        body = {"model": MODEL, "prompt": [5] * 200, "max_tokens": 300, "n": 16, "ignore_eos": True}
        client.sendall(post(json.dumps({**body, "logprobs": 20, "stream": stream, "echo": True}).encode()))
        wait_for(lambda: hasty_server.engine.stats.running > 0)
        wait_for(lambda: hasty_server.connections == 0, 120)
    hasty_server.check_idle()


def test_a_slow_client_that_goes_on_taking_gets_everything(hasty_server):
    body = {"model": MODEL, "prompt": [5] * 500, "max_tokens": 2, "n": 8, "ignore_eos": True}
    body |= {"echo": True, "logprobs": 20, "seed": 1}
    with hasty_server.http() as http:
        whole = http.post("/v1/completions", json=body)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(30)
        client.connect(("127.0.0.1", hasty_server.port))
        began = time.monotonic()
        client.sendall(post(json.dumps(body).encode()))
        found = b""
        while not found.endswith(b"}}"):
            time.sleep(0.002)
            piece = client.recv(16384)
            assert piece, "it is cut off"
            found += piece
        assert time.monotonic() - began > 2 * Hasty.take_seconds, "it was not slow"
    answer = json.loads(found.partition(b"\r\n\r\n")[2])
    assert answer["choices"] == whole.json()["choices"]


# ---------------- the protocol


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # without a Host
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: application/json\r\n\r\nxyz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
    ],
)
def test_what_is_no_http_is_an_error_like_all_others(server, sent):
    with connection(server) as client:
        client.sendall(sent)
        head, _, body = everything(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_requests_in_one_go_are_answered_in_turn(server, reference):
    body = {"model": MODEL, "prompt": "Once", "temperature": 0}
    counts = (3, 30, 1, 12)
    with connection(server) as client:
        client.sendall(b"".join(post(json.dumps({**body, "max_tokens": count}).encode()) for count in counts))
        found = b""
        while found.count(b"HTTP/1.1 200 OK") < len(counts) or not found.endswith(b"}}"):
            found += client.recv(65536)
    texts = [json.loads(one)["choices"][0]["text"] for one in re.findall(rb"\r\n\r\n(\{.*?\}\})", found)]
    assert texts == [
        alone(reference, "Once", max_tokens=count, temperature=0.0).outputs[0].text for count in counts
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_http_1_0(server, reference, stream):
    """An answer without a length ends with its connection."""
    asked = json.dumps(
        {"model": MODEL, "prompt": "Once", "max_tokens": 9, "temperature": 0, "stream": stream}
    )
    with connection(server) as client:
        client.sendall(post(asked.encode()).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = everything(client).partition(b"\r\n\r\n")
    assert b" 200 OK" in head
    assert b"chunked" not in head.lower()
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    if stream:
        assert events.pop() == b"[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert text == alone(reference, "Once", max_tokens=9, temperature=0.0).outputs[0].text
