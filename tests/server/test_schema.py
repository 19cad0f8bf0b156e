"""schemathesis makes requests of all kinds from the server's own schema: none of them is answered by a 5xx."""

from __future__ import annotations

import json

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error

from tinyvllm_ref import LLM
from tinyvllm_ref.server.openapi import schema as description
from tinyvllm_ref.server.protocol import ChatRequest, CompletionRequest

from .serving import MODEL, Served, served

SCHEMA = schemathesis.openapi.from_dict(description())
FEW = schemathesis.openapi.from_dict(description())
FEW.config.phases.coverage.enabled = False  # it makes every case that the schema defines, hundreds of them
QUICK = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=300)


@pytest.fixture(scope="module")
def server():
    """Of a short context, so that no answer is long."""
    with served(LLM(MODEL, num_blocks=512, max_model_len=40)) as found:
        yield found


def check(server: Served, case: schemathesis.Case) -> None:
    """Answered as the schema says; what names a model, with the one that there is."""
    body = case.body
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = MODEL
        if isinstance(body.get("n"), int) and body["n"] > 4:
            body["n"] = 4
    response = case.call(base_url=server.url, timeout=60)
    case.validate_response(response, checks=[not_a_server_error])
    if response.status_code != 405:  # it tries methods that the schema does not have, too
        assert str(response.status_code) in case.operation.definition.raw["responses"], response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}


@FEW.parametrize()
@QUICK
def test_no_request_is_answered_by_a_server_error(case, server):
    check(server, case)


@pytest.mark.slow
@SCHEMA.parametrize()
@LONG
def test_none_of_many_requests_either(case, server):
    check(server, case)


def test_the_schema_has_every_field_that_is_taken(server):
    with server.http() as http:
        served = http.get("/openapi.json").json()
    assert served == json.loads(json.dumps(description()))
    for kind in (CompletionRequest, ChatRequest):
        assert set(served["components"]["schemas"][kind.__name__]["properties"]) == set(kind.model_fields)
    for path in served["paths"]:
        answer = httpx.options(server.url + path.replace("{model}", MODEL))
        assert answer.status_code == 405, "every path of the schema is there"
