"""What the README and docs/serving.md say of the server, done as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tinyvllm_ref.server.openapi import schema

from .serving import alone, process

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
GUIDE = REPOSITORY / "docs" / "serving.md"


def section(text: str) -> str:
    """That of the heading "Serving"."""
    found = re.search(r"^## Serving\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, "the README has no section Serving"
    return found[1]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def text_of_stream(said: str) -> str:
    """The text of the events that curl printed."""
    *events, done = [line[6:] for line in said.splitlines() if line]
    assert done == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)


def test_the_examples_of_the_readme(reference, tmp_path):
    from tinyvllm_ref import SamplingParams

    text = section(README.read_text())
    (start,) = re.findall(r"^\.venv/bin/tinyvllm serve (\S+)$", blocks(text, "")[0], re.MULTILINE)
    assert start == "tiny-stories"
    with process() as server:  # at a port that is free, which is all that is changed

        def run(command: list[str]) -> str:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            return done.stdout

        (shell,) = blocks(text, "sh")
        commands = [c.replace("http://127.0.0.1:8000", server.url) for c in shell.strip().split("\n\n")]
        assert all(command.startswith("curl ") for command in commands)
        whole, streamed, metrics = (run(["sh", "-c", f"curl --silent {c[5:]}"]) for c in commands)

        expected = alone(reference, "Once upon a time", max_tokens=24, temperature=0.0)
        assert json.loads(whole)["choices"][0]["text"] == expected.outputs[0].text
        question = [{"role": "user", "content": "Tell me a story about a cat."}]
        (answer,) = reference.chat(question, SamplingParams(max_tokens=40, seed=1))
        assert text_of_stream(streamed) == answer.outputs[0].text
        found = {family.name for family in text_string_to_metric_families(metrics)}
        named = set(re.findall(r"`(tinyvllm_\w+?)(?:_total)?(?:\{\w+\})?`", GUIDE.read_text()))
        assert named <= found | {"tinyvllm_kv_blocks"}
        assert len(named) > 8

        (program,) = blocks(text, "python")
        said = run([sys.executable, "-c", program.replace("http://127.0.0.1:8000", server.url)])
        assert len(said) > 20


def test_the_program_of_the_guide(tmp_path):
    (program,) = blocks(GUIDE.read_text(), "python")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 20


def test_the_guide_names_every_path_and_status():
    text = GUIDE.read_text()
    for path in schema()["paths"]:
        assert path.replace("{model}", "NAME") in text
    statuses = {
        status
        for path in schema()["paths"].values()
        for kind in path.values()
        for status in kind["responses"]
    }
    for status in statuses - {"200"}:
        assert re.search(rf"^\| [\d, ]*{status}", text, re.MULTILINE), status
