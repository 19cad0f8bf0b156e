"""Every command and every script of README.md and docs/*.md is executed, or parsed where doc_commands.py says why."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tinyvllm_ref import emulation
from tinyvllm_ref.checkpoint.fetch import SOURCES
from tinyvllm_ref.course import exercise as parts_of_exercises
from tinyvllm_ref.course.judging import judge
from tinyvllm_ref.emulation import cache

from . import doc_commands as doc
from .doc_commands import REPOSITORY, Block, NotUnderstood

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ALL = [block for page in doc.pages() for block in doc.blocks(page)]


def kind_of(block: Block) -> str:
    """As doc_commands says; a Python block that is a part of a lesson's module is an ``"exercise"``."""
    kind = doc.kind_of(block)
    is_part = re.search(r"\bExercise\(", block.text) and "import Exercise" not in block.text
    return "exercise" if kind == "python" and is_part else kind


def of_kind(kind: str) -> pytest.MarkDecorator:
    """The blocks of a kind; one that is of none fails in the test of the kinds."""
    found = []
    for block in ALL:
        try:
            found += [block] if kind_of(block) == kind else []
        except NotUnderstood:
            continue
    return pytest.mark.parametrize("block", found, ids=lambda block: block.name)


# ---------------- a machine for the commands
# Quick: few tokens, a short measurement; pytest only collects.
_TINYVLLM = """#!/bin/sh
case "$1" in
    generate|chat) exec {python} -m tinyvllm_ref "$@" --max-tokens 8 ;;
    bench) exec {python} -m tinyvllm_ref "$@" --batch 1,2 --prompt 8 --tokens 4 ;;
    *) exec {python} -m tinyvllm_ref "$@" ;;
esac
"""
_PYTEST = """#!/bin/sh
exec {python} -m pytest -p no:cacheprovider --collect-only -q "$@"
"""


@dataclass(frozen=True)
class Machine:
    """A working folder that looks like this checkout, and an environment with homes of its own."""

    checkout: Path
    environment: dict[str, str]

    def run(self, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.checkout, env=self.environment, input=text, capture_output=True, text=True, timeout=300
        )  # fmt: skip


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    root = tmp_path_factory.mktemp("docs")
    checkout, home = root / "tinyvllm", root / "home"
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (home / "models").mkdir(parents=True)
    for path in REPOSITORY.iterdir():
        if path.name != ".git" and not path.name.startswith((".venv", "my_engine", "report")):
            (checkout / path.name).symlink_to(path)
    programs = checkout / ".venv" / "bin"
    for name in ("python", "python3", "jupyter", "ruff"):
        (programs / name).symlink_to(Path(sys.executable).parent / name)
    for name, text in (("tinyvllm", _TINYVLLM), ("pytest", _PYTEST)):
        (programs / name).write_text(text.format(python=sys.executable))
        (programs / name).chmod(0o755)
    kernels = cache.folder()  # those of the other tests, so that little is compiled
    (home / "kernels").symlink_to(kernels)
    for name in SOURCES:
        stand_in_model(home / "models" / name)
    unset = ("VIRTUAL_ENV", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {
        "PATH": f"{programs}:{os.environ.get('PATH', '')}",
        "CHECKOUT": str(checkout),
        "HOME": str(home),
        "TINYVLLM_HOME": str(home),
        "TINYVLLM_MY_ENGINE": str(root / "my_engine"),
        "TINYVLLM_DEVICE": "cpu",
    }
    return Machine(checkout, environment)


def stand_in_model(folder: Path) -> None:
    """What a fetched model stands for here: the one that comes with the repository, with a chat template."""
    shutil.copytree(
        REPOSITORY / "data" / "tiny-stories", folder, ignore=shutil.ignore_patterns("*.py", "*.npz")
    )
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    settings["chat_template"] = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    path.write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def address(machine: Machine) -> Iterator[str]:
    """Where the server answers that the pages start, with the first `tinyvllm serve` in them."""
    line = next((line for line in _lines_of_pages() if "tinyvllm serve" in line), None)
    if line is None:
        pytest.fail("a page asks a server on this machine, and none says how it is started (tinyvllm serve)")
    words = next(words for words in doc.simple_commands(line) if "serve" in words)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tinyvllm_ref", *words[words.index("serve") :], "--port", str(port)]
    log = machine.checkout.parent / "serve.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=machine.checkout, env=machine.environment, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        _wait_for(port, process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    pytest.fail(f"the server does not answer: {log.read_text()[-2000:]}")


def _lines_of_pages() -> list[str]:
    return [
        line
        for block in ALL
        if doc.kind_of(block) == "shell"
        for line in doc.logical_lines(block.text, "$ " in block.text, [])
    ]


# ---------------- the pages
@pytest.mark.parametrize("block", ALL, ids=lambda block: block.name)
def test_the_block_is_of_a_kind_that_is_known(block):
    kind = doc.kind_of(block)
    if kind == "data":
        assert doc.DATA[block.label](block.text) is not None
    if kind == "output":
        before = [other for other in ALL if other.page == block.page and other.line < block.line]
        assert before, f"{block.name}: no command stands in front of this block; label it (text, json, ...)"
        assert doc.kind_of(before[-1]) in ("shell", "python"), (
            f"{block.name}: a block without a label holds commands, or what the block in front of it prints; "
            "label it (text, json, ...) if it is neither"
        )


@of_kind("shell")
def test_the_commands_run(block, machine, request):
    script = doc.understand(block)
    if "tinyvllm serve" in block.text:
        request.getfixturevalue("address")  # it starts and answers
    if not script.runs_something:
        assert script.stand_ins
        return
    text = "\n".join(script.lines)
    if script.asks_a_server:
        text = doc.LOCAL.sub(request.getfixturevalue("address"), text)
    expected = script.output + _output_after(block)
    # curl says nothing of an answer of 404 by itself.
    text = f'set -e -o pipefail\ncurl() {{ command curl --fail-with-body --max-time 120 "$@"; }}\n{text}'
    done = machine.run("bash", "-c", text, text="Once\n\n")
    assert done.returncode == 0, f"{block.name}\n{text}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr
    if not script.stand_ins:
        assert doc.matches(expected, done.stdout + done.stderr) == ""


# Packages of others that a page may show; where one is not installed, its script is only compiled.
NOT_OURS = [name for name in ("openai", "vllm", "transformers") if importlib.util.find_spec(name) is None]


@of_kind("python")
def test_the_script_runs(block, machine, request):
    text = block.text
    if any(re.search(rf"^(import|from) {name}\b", text, re.MULTILINE) for name in NOT_OURS):
        compile(text, block.name, "exec")
        return
    if doc.LOCAL.search(text):
        text = doc.LOCAL.sub(request.getfixturevalue("address"), text)
    path = (
        machine.checkout.parent / f"script_{block.line}.py"
    )  # a file: where source lines are shown, they are read
    path.write_text(text)
    done = machine.run(sys.executable, str(path))
    output = _output_after(block)
    if done.returncode:
        assert output, f"{block.name}\n{done.stderr}"
        assert not doc.matches(output, done.stderr), (
            f"{block.name} stops otherwise than the page says:\n{done.stderr}"
        )
    else:
        assert done.stderr == ""
        assert doc.matches(output, done.stdout) == "", f"{block.name}:\n{done.stdout}"


def _output_after(block: Block) -> list[str]:
    """The lines of the plain block that follows, which is what this one prints."""
    after = [other for other in ALL if other.page == block.page and other.line > block.line]
    return after[0].text.splitlines() if after and doc.kind_of(after[0]) == "output" else []


# An answer that passes, for an exercise that a page shows, by the name of the answer.
ANSWERS = {
    "double": """double = cp.RawKernel(r'''
extern "C" __global__ void twice(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2.0f * x[i];
}
''', "twice")""",
}


@of_kind("exercise")
def test_an_exercise_on_a_page_can_be_solved(block):
    """A part of a lesson's module, below the imports that those have."""
    names = dict(vars(parts_of_exercises)) | {"np": np}
    exec(compile(block.text, block.name, "exec"), names)
    made = [value for value in names.values() if isinstance(value, parts_of_exercises.Exercise)]
    assert made, block.name
    for exercise in made:
        assert exercise.answer in ANSWERS, f"add an answer that passes for {exercise.answer!r} to ANSWERS"
        namespace = {"cp": emulation, "np": np}
        exec(ANSWERS[exercise.answer], namespace)
        assert judge(exercise, namespace[exercise.answer], emulation, 0).passed


@pytest.mark.parametrize("page", doc.pages(), ids=lambda page: page.name)
def test_commands_in_the_running_text_exist(page):
    for line, command in doc.inline_commands(page):
        try:
            doc.check_inline(command)
        except NotUnderstood as error:
            pytest.fail(f"{page.name}:{line}: `{command}`: {error}")


@pytest.mark.parametrize("page", doc.pages(), ids=lambda page: page.name)
def test_a_shell_of_one_s_own_finds_the_commands(page):
    assert doc.not_found_in_a_shell(page) == []


@pytest.mark.parametrize("path", sorted((REPOSITORY / "solutions").glob("*.py")), ids=lambda path: path.stem)
def test_the_lessons_commands_are_found(path):
    cells = re.split(r"^# %%", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = [
        re.sub(r"^# ?", "", cell, flags=re.MULTILINE) for cell in cells if cell.startswith(" [markdown]")
    ]
    assert [command for text in texts for command in doc.bare_in_text(text)] == []


def test_messages_name_the_program_as_it_is_found():
    """What the package prints says `installing.typed("tinyvllm")`; the program's own help may say its plain name."""
    commands = "|".join(doc.tinyvllm_commands())
    found = []
    for path in (REPOSITORY / "tinyvllm_ref").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bodies = [node.body for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and node.body]
        documents = {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            is_bare = re.search(rf"(?<![\w/.])tinyvllm ({commands})\b", text) and path.name != "cli.py"
            if is_bare and id(node) not in documents:
                found.append(f"{path.name}:{node.lineno}: {text[:80]}")
    assert found == []


def test_what_a_shell_does_not_find_is_told(tmp_path):
    page = tmp_path / "page.md"
    in_jupyterlab = "In JupyterLab's terminal say `tinyvllm progress`."
    page.write_text(f"Say `tinyvllm doctor`.\n\n{in_jupyterlab}\n\n`.venv/bin/tinyvllm doctor`")
    assert doc.not_found_in_a_shell(page) == ["page.md: tinyvllm doctor"]
    assert doc.bare_in_text("| a | `tinyvllm doctor` |\n| b | JupyterLab's terminal |") == ["tinyvllm doctor"]


@pytest.mark.parametrize("page", doc.pages(), ids=lambda page: page.name)
def test_settings_and_links_exist(page):
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"TINYVLLM_[A-Z_]+", text)) <= doc.known_settings()
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


# ---------------- the rules themselves
def block_of(text: str, label: str = "sh") -> Block:
    return Block(REPOSITORY / "README.md", 1, label, text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("frobnicate --all", "no rule knows the program 'frobnicate'"),
        ("tinyvllm generat x", "tinyvllm has no command 'generat'"),
        ("tinyvllm generate x --max-token-count 3", "No such option"),
        ("tinyvllm generate", "Missing parameter: prompt"),
        (".venv/bin/tinyvllm grade a.zip", "Missing parameter: report"),
        ("make labs", "no target 'labs'"),
        ("make grade SUBMISSION=x", "no variable SUBMISSION"),
        ('pip install -e ".[corse]"', "no extra corse"),
        ("pip install flask", "flask is nothing that pyproject.toml declares"),
        ("uv sync --extra corse", "no extra corse"),
        ("conda env create -f environment.yaml", "there is no environment.yaml"),
        ("conda activate tiny", "does not make an environment 'tiny'"),
        ("pytest lessons/no_such.ipynb", "there is no lessons/no_such.ipynb"),
        ("jupyter lab lessons/no.ipynb", "there is no lessons/no.ipynb"),
        ("curl https://example.com/x | sh", "example.com"),
        ("cd lessons && frobnicate", "frobnicate"),
        ("TINYVLLM_SPEED=9 tinyvllm doctor", "TINYVLLM_SPEED is no setting"),
        ("python -m http.server", "python -m http.server is not known"),
        ("git push", "git push is not known"),
        ("sudo rm -rf /", "is not a package manager's"),
        ("echo 'open", "does not end"),
    ],
)
def test_what_no_rule_knows_fails(text, says):
    with pytest.raises(NotUnderstood, match=re.escape(says)):
        doc.understand(block_of(text))


def test_blocks_are_told_apart():
    assert doc.kind_of(block_of("make lab", "")) == "shell"
    assert doc.kind_of(block_of("$ anything", "")) == "shell"
    assert doc.kind_of(block_of("TINYVLLM_DEVICE=cpu .venv/bin/tinyvllm doctor", "")) == "shell"
    assert doc.kind_of(block_of("OutOfBounds: kernel", "")) == "output"
    with pytest.raises(NotUnderstood, match="'fortran' is not known"):
        doc.kind_of(block_of("x", "fortran"))


def test_lines_are_joined_and_consoles_taken_apart():
    console = "$ tinyvllm generate \\\n    'Once\nupon'   # a comment\nOnce\n...\n$ tinyvllm doctor"
    script = doc.understand(block_of(console, "console"))
    assert script.lines == ["tinyvllm generate      'Once\nupon'   # a comment", "tinyvllm doctor"]
    assert script.output == ["Once", "..."]
    assert doc.matches(script.output, "x\nOnce upon\n") == ""
    assert doc.matches(["b", "a"], "a\nb\n") == "a"


def test_what_is_only_parsed_says_why():
    text = "git clone https://an.address/tinyvllm && cd tinyvllm\n"
    text += 'pip install -e ".[course,gpu]"\nuv run make help\nmake lab'
    script = doc.understand(block_of(text))
    assert script.stand_ins == [
        doc.STAND_INS[name] for name in ("git clone", "pip install", "uv", "make lab")
    ]
    assert script.lines == ['ln -sfn "$CHECKOUT" tinyvllm && cd tinyvllm', *[": only parsed"] * 3]
    download = doc.understand(block_of("curl -LsSf https://astral.sh/uv/install.sh | sh"))
    assert set(download.stand_ins) == {doc.STAND_INS["a download"]}
    local = doc.understand(block_of("curl -s http://localhost:8000/v1/models | jq .data"))
    assert local.asks_a_server
    assert not local.stand_ins
