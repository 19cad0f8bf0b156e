"""The ``tinyvllm`` command, as a user types it."""

import os
import subprocess
import sys

import pytest
from models import tiny_folder
from typer.testing import CliRunner

from tinyvllm_ref import LLM, SamplingParams, cli
from tinyvllm_ref.cli import app

# Imported for a message on a terminal only, or not at all by commands that load no model.
HEAVY = ("numpy", "tokenizers", "jinja2", "requests", "tqdm", "tinyvllm_ref.device", "tinyvllm_ref.emulation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("tiny")))


def run(*arguments, text=None):
    return CliRunner().invoke(app, list(arguments), input=text)


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "tinyvllm_ref", *arguments],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, **environment},
        timeout=120,
    )


def expected(folder, prompt, **options):
    params = SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **options})
    return LLM(folder, num_blocks=64).generate(prompt, params)[0].outputs[0].text


def test_generate_prints_the_prompt_and_what_follows(folder):
    result = run("generate", "--model", folder, "Once", "--max-tokens", "20")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"Once{expected(folder, 'Once')}\n"


def test_generate_with_options(folder):
    options = ["--temperature", "1.0", "--top-p", "0.9", "--seed", "5", "--max-tokens", "20"]
    result = run("generate", "-m", folder, "Once", *options)
    assert result.stdout == f"Once{expected(folder, 'Once', temperature=1.0, top_p=0.9, seed=5)}\n"


def test_generate_in_a_process_of_its_own(folder):
    result = command("generate", "--model", folder, "Once", "--max-tokens", "8")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"Once{expected(folder, 'Once', max_tokens=8)}\n"


def test_generate_streams(folder, monkeypatch):
    pieces = []
    monkeypatch.setattr(cli.typer, "echo", lambda text="", **options: pieces.append(text))
    cli.generate("Once", model=folder, max_tokens=20)
    assert len(pieces) > 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "-m", "no-such-model", "x"], "tinyvllm: no model 'no-such-model'"),
        (["generate", "-m", "TINY", ""], "the prompt is empty"),
        (
            ["generate", "-m", "TINY", "x", "--max-tokens", "0"],
            "max_tokens is 0; it must be an integer of at least 1",
        ),
        (["generate", "-m", "TINY", "x", "--temperature", "nan"], "temperature is nan"),
        (["generate", "-m", "TINY", "x" * 600], "the prompt has 600 tokens; at most"),
        (["bench", "TINY", "--batch", "1,x"], "--batch is '1,x'; it must be positive integers"),
        (["bench", "TINY", "--tokens", "0"], "--tokens is 0"),
        (["bench", "TINY", "--prompt", "600"], "the prompt has 600 tokens"),
        (["fetch", "gpt2"], "fetch does not know 'gpt2'; it knows smollm2-135m-instruct"),
    ],
)
def test_errors_are_one_message(folder, arguments, message):
    result = run(*[folder if argument == "TINY" else argument for argument in arguments])
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_chat(folder):
    result = run("chat", "--model", folder, "--max-tokens", "6", text="hi\nand?\n\n")
    assert result.exit_code == 0, result.output
    llm = LLM(folder, num_blocks=64)
    params = SamplingParams(max_tokens=6, temperature=0.0)
    messages, lines = [], []
    for question in ("hi", "and?"):
        messages.append({"role": "user", "content": question})
        lines.append(llm.chat(messages, params)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": lines[-1]})
    assert result.stdout == "".join(f"{line}\n" for line in lines)


def test_a_model_is_named_by_its_place_or_by_the_option(folder):
    """-m is in all of them; the first word is the model in those that have no prompt."""
    options = ("--max-tokens", "6")
    by_option = run("chat", "-m", folder, *options, text="hi\n\n")
    by_place = run("chat", folder, *options, text="hi\n\n")
    assert by_place.exit_code == by_option.exit_code == 0, by_place.output
    assert by_place.stdout == by_option.stdout != ""
    assert run("chat", folder, "-m", folder, *options, text="hi\n\n").stdout == by_option.stdout
    bench = ("--batch", "1", "--prompt", "4", "--tokens", "3")
    assert run("bench", "-m", folder, *bench).exit_code == 0


@pytest.mark.parametrize("command", ["chat", "bench", "serve"])
def test_two_models_are_one_too_many(command):
    result = run(command, "a", "-m", "b")
    assert result.exit_code == 1
    assert "two models are named, 'a' and by -m 'b'; name one" in result.stderr


def test_a_server_needs_a_model():
    result = run("serve")
    assert result.exit_code == 1
    assert "which model? tinyvllm serve MODEL, such as tinyvllm serve tiny-stories" in result.stderr


def test_bench(folder):
    result = run("bench", folder, "--batch", "1,4", "--prompt", "16", "--tokens", "8")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    heading = next(n for n, line in enumerate(lines) if line[:4] == ["batch", "prompt", "tokens", "tokens/s"])
    first, second = lines[heading + 1], lines[heading + 2]
    assert (first[:3], second[:3]) == (["1", "16", "8"], ["4", "16", "8"])
    assert first[4] == "1.00"
    # Ratios of one run: four requests at once take less than four times one.
    rates = [float(line[3]) for line in (first, second)]
    assert rates[1] > rates[0] > 0
    assert float(second[4]) == pytest.approx(rates[1] / rates[0], rel=0.02)


def test_bench_static(folder):
    assert run("bench", folder, "--batch", "2", "--prompt", "4", "--tokens", "3", "--static").exit_code == 0


def test_doctor_in_ten_lines():
    result = command("doctor")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 10


def test_help_names_every_command():
    result = run("--help")
    for name in ("generate", "chat", "fetch", "bench", "doctor"):
        assert name in result.output


def test_help_loads_nothing_heavy():
    code = f"import sys, tinyvllm_ref.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert found.stdout.strip() == "[]"


def test_full_checks_when_asked_for(folder):
    """TINYVLLM_CHECKS=full checks every access of the engine's kernels too; the text is the same."""
    result = command(
        "generate", "-m", folder, "On", "--max-tokens", "2", TINYVLLM_CHECKS="full", TINYVLLM_DEVICE="cpu"
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"On{expected(folder, 'On', max_tokens=2)}\n"


@pytest.mark.gpu
def test_generate_on_a_card_gives_the_emulation_s_tokens():
    arguments = ("generate", "Once upon a time", "--max-tokens", "100")
    here, emulated = (command(*arguments, TINYVLLM_DEVICE=device) for device in ("cuda", "cpu"))
    assert here.stdout == emulated.stdout
