"""``tinyvllm serve`` as a person runs it: its words, its signals, its end."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from .serving import MODEL, alone, process, wait_for

LONG = {"model": MODEL, "prompt": "xyzzy-plugh", "max_tokens": 900, "ignore_eos": True, "stream": True}


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    return float(re.search(rf"^tinyvllm_{name} (\S+)$", text, re.MULTILINE)[1])


def refused_until_closed(url: str, body: dict) -> None:
    for _ in range(1000):
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 503


def test_sigterm_lets_what_runs_finish_and_exits_with_0(reference):
    expected = alone(reference, "Once", max_tokens=300, temperature=0.0, ignore_eos=True).outputs[0].text
    with process() as server:
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        answers = []

        def ask(stream):
            answers.append(
                httpx.post(f"{server.url}/v1/completions", json={**body, "stream": stream}, timeout=60)
            )

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        wait_for(lambda: metric(server.url, "requests_running") == 2)
        server.terminate()
        with pytest.raises(httpx.HTTPError):  # no connection, or one that is closed: nothing new is begun
            refused_until_closed(server.url, body)
        for thread in threads:
            thread.join()
        assert server.wait() == 0
        whole = next(a for a in answers if a.headers["content-type"] == "application/json")
        assert whole.json()["choices"][0]["text"] == expected
        (stream,) = (a for a in answers if a is not whole)
        events = [line[6:] for line in stream.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == expected
        assert "Traceback" not in server.log


def test_what_takes_too_long_after_sigterm_is_aborted():
    """64 long requests under way, and no time for any of them."""
    with process("--shutdown-seconds", "0.5") as server, httpx.Client(timeout=60) as client:
        endings = []

        def ask():
            with client.stream("POST", f"{server.url}/v1/completions", json=LONG) as answer:
                endings.append([line for line in answer.iter_lines() if line][-1])

        threads = [threading.Thread(target=ask) for _ in range(64)]
        for thread in threads:
            thread.start()
        wait_for(lambda: metric(server.url, "requests_running") == 64)
        server.terminate()
        assert server.wait(30) == 0
        for thread in threads:
            thread.join()
        errors = [json.loads(ending.removeprefix("data: "))["error"] for ending in endings]
        assert len(errors) == 64
        assert {error["code"] for error in errors} == {"unavailable"}
        assert "Traceback" not in server.log
        assert "xyzzy" not in server.log


def test_a_client_that_reads_nothing_does_not_hold_the_end_up():
    with process("--shutdown-seconds", "0.5") as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        asked = {**LONG, "prompt": [5] * 500, "max_tokens": 8, "n": 16, "echo": True, "logprobs": 20}
        body = json.dumps(asked).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        wait_for(lambda: metric(server.url, "requests_running") > 0)
        wait_for(lambda: metric(server.url, "requests_running") == 0, 60)  # its answer waits for it
        server.terminate()
        assert server.wait(30) == 0
        assert "Traceback" not in server.log
        assert "xyzzy" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("swallowed", [False, True])
def test_a_signal_while_the_model_loads_ends_the_process_with_0(number, swallowed):
    """Also where some code of the loading lets no exception through, as a C library's callback does."""
    code = (
        "import sys, time; from tinyvllm_ref.server import lifecycle; LLM = lifecycle.LLM\n"
        "def load(*a, **k):\n"
        "    print('loading', flush=True)\n"
        "    try: time.sleep(60)\n"
        f"    except BaseException:\n        if not {swallowed}: raise\n"
        "    return LLM(*a, **k)\n"
        "lifecycle.LLM = load\n"
        f"from tinyvllm_ref.cli import main; sys.argv = ['tinyvllm', 'serve', '{MODEL}', '--port', '0']; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout.readline() == "loading\n"
        server.send_signal(number)
        said, errors = server.communicate(timeout=60)
    assert (said, errors, server.returncode) == ("", "", 0)


@pytest.mark.parametrize("where", ["0.0.0.0", "127.0.0.1"])
@pytest.mark.parametrize("key", ["", "a-key"])
def test_a_wider_bind_without_a_key_is_warned_of(where, key):
    with (
        process("--host", where, TINYVLLM_API_KEY=key or "unused", **{})
        if key
        else process("--host", where) as server
    ):
        warned = any(line.startswith("Warning: everyone who reaches 0.0.0.0") for line in server.said)
        assert warned is (where == "0.0.0.0" and not key)
        assert key not in "".join(server.said) or not key
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == (401 if key else 200)
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer a-key"}).status_code == 200
        server.terminate()
        assert server.wait() == 0


def test_the_log_has_a_line_for_each_request_and_no_prompt():
    with process("--served-model-name", "stories") as server:
        body = {"model": "stories", "prompt": "xyzzy-plugh", "max_tokens": 2}
        answers = [
            httpx.post(f"{server.url}/v1/completions", json=body),
            httpx.post(f"{server.url}/v1/completions", json={**body, "stream": True}),
            httpx.post(f"{server.url}/v1/completions", json={**body, "stop": 3}),
            httpx.get(f"{server.url}/v1/models/xyzzy%20plugh%0aINFO", headers={"x-request-id": "xyzzy"}),
        ]
        assert answers[0].json()["model"] == "stories"
        server.terminate()
        assert server.wait() == 0
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == len(ids)
    lines = [line.split(" INFO ")[1] for line in server.log.splitlines()]
    assert [re.sub(r"[\d.]+ s$", "", line) for line in lines] == [
        f"{ids[0]} POST /v1/completions 200 ",
        f"{ids[1]} POST /v1/completions 200 ",
        f"{ids[2]} POST /v1/completions 400 ",
        f"{ids[3]} GET (another path) 404 ",
    ]
    assert "xyzzy" not in server.log


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-model"], "no-such-model"),
        ([MODEL, "--port", "70000"], "port is 70000; it must be from 0 to 65535"),
        ([MODEL, "--host", "256.1.1.1"], "cannot listen at 256.1.1.1"),
        ([MODEL, "--max-num-seqs", "0"], "max_num_seqs is 0"),
        ([MODEL, "--api-key", ""], "the API key must be"),
        ([MODEL, "--max-body-bytes", "0"], "max_body_bytes is 0"),
        ([MODEL, "--max-queue", "-1"], "max_queue is -1"),
        ([MODEL, "--shutdown-seconds", "-1"], "shutdown_seconds is -1.0"),
    ],
)
def test_what_cannot_be_is_said_plainly(arguments, words):
    done = subprocess.run(
        [sys.executable, "-m", "tinyvllm_ref", "serve", "--port", "0", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("tinyvllm: ")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_small_pieces_go_out_at_once():
    """Nagle's algorithm is off on what the server accepts; it would keep the first token for 40 ms."""
    import asyncio

    from tinyvllm_ref.server.lifecycle import _listen

    async def main():
        accepted = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda r, w: accepted.set_result(w), sock=_listen("127.0.0.1", 0))
        async with server:
            _, ours = await asyncio.open_connection(*server.sockets[0].getsockname())
            theirs = await accepted
            found = theirs.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            ours.close()
            theirs.close()
        return found

    assert asyncio.run(main())


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "tinyvllm_ref", "serve", MODEL, "--port", port],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == f"tinyvllm: cannot listen at 127.0.0.1, port {port}: Address already in use\n"


def test_an_engine_that_fails_ends_the_process_with_1():
    """Whoever watches it can start it anew."""
    code = (
        "import sys; from tinyvllm_ref.model_runner import ModelRunner; run = ModelRunner.run; steps = []\n"
        "def fail(self, batch):\n"
        "    steps.append(batch)\n"
        "    if len(steps) > 12: raise RuntimeError('xyzzy-plugh')\n"
        "    return run(self, batch)\n"
        "ModelRunner.run = fail\n"
        "from tinyvllm_ref.cli import main; sys.argv = ['tinyvllm', *sys.argv[1:]]; main()"
    )
    with process(start=["-c", code]) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as answer:
            last = [line for line in answer.iter_lines() if line][-1]
        assert "the engine has failed" in last
        assert server.wait() == 1
    assert "the engine has failed: RuntimeError in tinyvllm_ref" in server.log
    assert "xyzzy" not in server.log
    assert "Traceback" not in server.log


LEARNERS_APP = """
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from tinyvllm_ref import SamplingParams

def build_app(engine):
    async def text(request):
        prompt = (await request.body()).decode()
        if prompt == "fail":
            raise KeyError("xyzzy-plugh")
        stream = await engine.submit(engine.encode(prompt), SamplingParams(max_tokens=12, temperature=0.0))
        return PlainTextResponse("".join([delta.text async for delta in stream]))
    return Starlette(routes=[Route("/text", text, methods=["POST"])])
"""


def test_a_learner_s_application_is_served_behind_the_same_guard(tmp_path, reference):
    (tmp_path / "server.py").write_text(LEARNERS_APP)
    listing = {"version": 1, "parts": {"build_app": {"file": "server.py"}}}
    (tmp_path / "parts.json").write_text(json.dumps(listing))
    key = {"Authorization": "Bearer k"}
    with process("--mine", "--api-key", "k", TINYVLLM_MY_ENGINE=str(tmp_path)) as server:
        url = f"{server.url}/text"
        expected = alone(reference, "Once", max_tokens=12, temperature=0.0).outputs[0].text
        assert httpx.post(url, content="Once", headers=key).text == expected
        assert httpx.post(url, content="Once").status_code == 401
        assert httpx.post(url, content=b"a" * (2 << 20), headers=key).status_code == 413
        assert httpx.post(url, content="fail", headers=key).status_code == 500
        server.terminate()
        assert server.wait() == 0
    assert "KeyError in my_engine_" in server.log
    assert "xyzzy" not in server.log


@pytest.mark.slow
def test_bursts_leave_the_memory_where_it_was():
    """1,000 requests at once, again and again, half of whose clients go away: nothing stays."""
    from .test_faults import burst, connection, post

    with process("--max-num-seqs", "16", "--max-queue", "64") as server:
        server.port = int(server.url.rpartition(":")[2])

        def round_of_load():
            import asyncio

            statuses = [answer.status_code for answer in asyncio.run(burst(server.url, 1000))]
            assert set(statuses) <= {200, 429}
            for _ in range(200):
                with connection(server) as client:
                    client.sendall(post(json.dumps(LONG).encode()))
            wait_for(lambda: metric(server.url, "kv_blocks_used") == 0, 60)

        for _ in range(2):
            round_of_load()
        before = server.memory
        for _ in range(4):
            round_of_load()
        assert metric(server.url, "requests_running") == metric(server.url, "requests_waiting") == 0
        assert server.memory - before < 16 << 20
        server.terminate()
        assert server.wait() == 0
        assert "Traceback" not in server.log
        assert "xyzzy" not in server.log


@pytest.mark.slow
def test_sigterm_in_the_midst_of_a_burst():
    from .test_faults import burst

    with process("--max-num-seqs", "16", "--shutdown-seconds", "20") as server:

        def load():
            import asyncio

            try:
                asyncio.run(burst(server.url, 500))
            except httpx.HTTPError as error:
                failures.append(error)

        failures: list[Exception] = []
        thread = threading.Thread(target=load)
        thread.start()
        wait_for(lambda: metric(server.url, "requests_running") > 0)
        began = time.monotonic()
        server.terminate()
        assert server.wait(60) == 0
        assert time.monotonic() - began < 20 + 5
        thread.join()
        assert "Traceback" not in server.log
