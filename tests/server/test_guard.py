"""What stands in front of the application: key, host, and the metrics that it leaves."""

from __future__ import annotations

import hmac
import re

import httpx
import pytest

from tinyvllm_ref import LLM
from tinyvllm_ref.server import Settings, guard

from .serving import MODEL, served, wait_for


@pytest.fixture(scope="module")
def llm():
    return LLM(MODEL, num_blocks=64)


def test_a_key_is_asked_for_everywhere_but_for_health_and_the_page(monkeypatch):
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    with served(LLM(MODEL, num_blocks=64), Settings(api_key="sk-right")) as server, server.http() as http:
        for path in ("/health", "/"):
            assert http.get(path).status_code == 200
        assert compared == []
        wrong = [
            "Bearer",
            "Bearer x y",
            "Bearer sk-wrong",
            "Bearer sk-right2",
            "Basic sk-right",
            "sk-right",
            "Bearer é",
        ]
        for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/completions", "/nothing"):
            for value in wrong:
                answer = http.get(path, headers={"Authorization": value.encode("latin-1")})
                assert answer.status_code == 401, (path, value)
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "sk-" not in answer.text
        assert len(compared) == 5 * len(wrong), "each key is compared in constant time"
        with server.openai(api_key="sk-right") as client:
            assert client.models.list().data[0].id == MODEL


def test_a_wrong_key_is_refused_before_the_body_is_read(llm):
    with served(llm, Settings(api_key="sk-right")) as server, server.http() as http:
        assert http.post("/v1/completions", content=b"{" * (2 << 20)).status_code == 401


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example:8000", False),
        ("", False),
    ],
)
def test_names_that_a_server_on_loopback_answers_to(host, allowed):
    import asyncio

    statuses = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    settings = Settings(allowed_hosts=("localhost", "127.0.0.1", "::1"))
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", host.encode())]}
    asyncio.run(guard.Guard(app, settings)(scope, receive, send))
    assert statuses == [200 if allowed else 403]


@pytest.mark.parametrize("key", ["", " ", "a b", "é", "a\n"])
def test_keys_that_no_client_could_send(key):
    with pytest.raises(ValueError, match="printable ASCII"):
        Settings(api_key=key)


def test_the_key_is_not_in_what_is_printed_of_the_settings():
    assert "sk-secret" not in repr(Settings(api_key="sk-secret"))


# ---------------- metrics


def read(http: httpx.Client) -> dict[str, float]:
    """Values by name and labels; the format is checked by Prometheus's own parser."""
    from prometheus_client.parser import text_string_to_metric_families

    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        sample.name + "".join(f"{{{k}={v}}}" for k, v in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_metrics_count_what_happened(llm):
    with served(llm) as server, server.http() as http:
        before = read(http)
        assert before["tinyvllm_kv_blocks_total"] == 64
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 10, "ignore_eos": True, "n": 2}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.post("/v1/completions", json={**body, "n": 0}).status_code == 400
        after = read(http)
        assert after["tinyvllm_prompt_tokens_total"] == 3
        assert after["tinyvllm_generation_tokens_total"] == 20
        assert after["tinyvllm_completions_total{finish_reason=length}"] == 2
        assert after["tinyvllm_time_to_first_token_seconds_count"] == 2
        assert after["tinyvllm_time_per_output_token_seconds_count"] == 18
        assert after["tinyvllm_request_seconds_count"] == 1
        assert after["tinyvllm_http_responses_total{status=400}"] == 1
        assert after["tinyvllm_time_to_first_token_seconds_sum"] > 0
        with http.stream("POST", "/v1/completions", json={**body, "max_tokens": 500, "stream": True}):
            wait_for(lambda: read(http)["tinyvllm_requests_running"] == 2)
            assert read(http)["tinyvllm_kv_blocks_used"] > 0
        wait_for(lambda: read(http).get("tinyvllm_completions_total{finish_reason=abort}") == 2)
        # An abort is counted when it is ordered; the engine's thread carries it out after its step.
        for name in ("requests_running", "requests_waiting", "kv_blocks_used"):
            wait_for(lambda name=name: read(http)[f"tinyvllm_{name}"] == 0)
        assert re.search(r"^# HELP tinyvllm_requests_running ", http.get("/metrics").text, re.MULTILINE)
