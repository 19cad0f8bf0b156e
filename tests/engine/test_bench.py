"""``tinyvllm bench``: what is counted, what is printed, and models of known sizes with random weights."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from models import tiny_folder
from typer.testing import CliRunner

from tinyvllm_ref import LLM, SamplingParams, bench, random_model
from tinyvllm_ref.bench import Settings
from tinyvllm_ref.bf16 import bf16_to_float
from tinyvllm_ref.checkpoint.weights import tensor_shapes, weight_plan
from tinyvllm_ref.cli import app
from tinyvllm_ref.config import EngineConfig, ModelConfig, RopeScaling
from tinyvllm_ref.device import cp
from tinyvllm_ref.kv_cache import KVCache
from tinyvllm_ref.outputs import CompletionOutput, RequestOutput
from tinyvllm_ref.random_model import PRESETS, preset_config, random_llm, random_weights
from tinyvllm_ref.speed import beside, card, report, timing
from tinyvllm_ref.speed.timing import Measurement
from tinyvllm_ref.speed.traffic import decode_bytes, parameters, prefill_flops

# What the hub's pages of these models count in their safetensors files.
PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
}
SMALL = {
    **{"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 56},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"max_position_embeddings": 128, "rope_theta": 10000.0, "rms_norm_eps": 1e-5},
}
TIED, UNTIED = (ModelConfig.from_dict(SMALL | {"tie_word_embeddings": tied}) for tied in (True, False))


@pytest.fixture
def small(monkeypatch):
    """A preset that is quick to make."""
    monkeypatch.setitem(random_model.PRESETS, "small", SMALL | {"tie_word_embeddings": True})
    return "small"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("tiny")))


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


# ---------------- sizes and weights
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_its_model(name):
    config = preset_config(name)
    assert parameters(config) == PUBLISHED[name]
    assert sum(math.prod(shape) for shape in tensor_shapes(config).values()) == PUBLISHED[name]
    assert config.q_size == config.hidden_size  # true of all of these


def test_every_preset_has_a_published_count():
    assert set(PRESETS) == set(PUBLISHED)


def test_an_unknown_preset_lists_those_that_there_are():
    with pytest.raises(ValueError, match=r"by the name 'llama-4'; there are llama-3.2-1b, .*tinyllama-1.1b"):
        random_llm("llama-4")


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
def test_random_weights(config):
    weights = random_weights(config, seed=5)
    assert {name: weight.shape for name, weight in weights.items()} == {
        group.name: group.shape for group in weight_plan(config)
    }
    values = {name: bf16_to_float(cp.asnumpy(weight)) for name, weight in weights.items()}
    matrices = {name: value.ravel() for name, value in values.items() if value.ndim == 2}
    for name, value in values.items():
        if value.ndim == 1:
            assert (value == 1).all(), name
    everything = np.concatenate(list(matrices.values())).astype(np.float64)
    assert abs(everything.std() / 0.02 - 1) < 0.03
    assert abs(everything.mean()) < 5 * 0.02 / math.sqrt(everything.size)
    first = {name: tuple(value[:16]) for name, value in matrices.items()}
    assert len(set(first.values())) == len(matrices)  # no two matrices alike

    again, other = random_weights(config, seed=5), random_weights(config, seed=6)
    for name, weight in weights.items():
        assert (cp.asnumpy(again[name]) == cp.asnumpy(weight)).all()
        assert weight.ndim == 1 or (cp.asnumpy(other[name]) != cp.asnumpy(weight)).any()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range(seed):
    with pytest.raises(ValueError, match=rf"random_weights: seed is {seed}; it must be from 0"):
        random_weights(TIED, seed)


def test_a_random_model_generates():
    llm = random_llm(UNTIED, seed=3, max_num_seqs=2, num_blocks=16)
    assert llm.config is UNTIED
    assert set(llm.parts.owners().values()) == {"reference"}
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([[1, 2, 3], [4, 5]], params)
    # The same tokens one by one, by the logits of the whole sequence: no cache, no batch.
    for output, ids in zip(outputs, ([1, 2, 3], [4, 5]), strict=True):
        for token in output.outputs[0].token_ids:
            logits = llm.logits(ids)[-1]
            assert logits[token] >= logits.max() - 1e-3
            ids = [*ids, token]
        assert output.outputs[0].text == ""


def test_what_needs_a_tokenizer_says_so():
    llm = random_llm(TIED, num_blocks=8)
    assert (llm.tokenizer, llm.folder) == (None, None)
    for ask in (
        lambda: llm.generate("Once"),
        lambda: llm.stream([1, 2]),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
    ):
        with pytest.raises(ValueError, match="this LLM has no tokenizer; give token ids to generate"):
            ask()


def test_a_model_in_memory_answers_like_its_folder(folder):
    params = SamplingParams(max_tokens=12, temperature=0.0)
    llm = LLM(folder, num_blocks=32)
    want = llm.generate("Once", params)[0].outputs[0]
    made = LLM.from_model(llm.model, llm.tokenizer, config=EngineConfig(num_blocks=32))
    got = made.generate("Once", params)[0].outputs[0]
    assert (got.text, list(got.token_ids)) == (want.text, list(want.token_ids))
    with pytest.raises(ValueError, match="config and num_blocks were given"):
        LLM.from_model(llm.model, config=EngineConfig(), num_blocks=3)


# ---------------- what a step moves and computes
@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize(("batch", "contexts"), [(1, [5]), (3, [17, 2, 40])])
def test_bytes_of_a_step_are_those_of_the_arrays(config, batch, contexts):
    """Counted over the arrays that a step reads and writes, slice by slice."""
    weights = random_weights(config)
    cache = KVCache(config, num_blocks=4 * batch, block_size=16)
    total = 0
    for name, weight in weights.items():
        if name == "embed_tokens":
            total += weight[:batch].nbytes  # a row for each token
        else:
            total += weight.nbytes
    if config.tie_word_embeddings:
        total += weights["embed_tokens"].nbytes  # as LM head
    for context in contexts:
        for layer in range(config.num_hidden_layers):
            for part in cache.layer(layer):
                slots = part.reshape(-1, *part.shape[2:])
                total += slots[: context - 1].nbytes + slots[context - 1 : context].nbytes  # read, written
    assert decode_bytes(config, batch, sum(contexts) / batch) == pytest.approx(total, rel=1e-12)


def test_bytes_of_a_large_model_s_step():
    """Llama 3.2 1B reads its 2.4715 GB of weights; the cache of a token is 32 KiB."""
    config = preset_config("llama-3.2-1b")
    assert decode_bytes(config, 1, 0) == 2 * PUBLISHED["llama-3.2-1b"] + 2 * 2048
    assert decode_bytes(config, 1, 101) - decode_bytes(config, 1, 1) == 100 * 32768


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize(("batch", "prompt"), [(1, 1), (1, 9), (4, 33)])
def test_operations_of_a_prompt(config, batch, prompt):
    """Two for each number of a matrix and each row that it multiplies; of the attention, those below the diagonal."""
    weights = random_weights(config)
    layers = sum(w.size for name, w in weights.items() if w.ndim == 2 and name.startswith("layers."))
    head = weights.get("lm_head", weights["embed_tokens"]).size
    seen = int(np.tril(np.ones((prompt, prompt))).sum())
    attention = config.num_hidden_layers * config.num_attention_heads * 2 * (2 * config.head_dim * seen)
    want = batch * (2 * layers * prompt + 2 * head + attention)
    assert prefill_flops(config, batch, prompt) == want


# ---------------- timing
class _Clock:
    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


class _Engine:
    """Gives outputs by a script: of each step its seconds and the requests that get a token."""

    def __init__(self, clock, script):
        self._clock, self._script = clock, list(script)
        self._outputs = {}

    @property
    def has_work(self):
        return bool(self._script)

    def add_request(self, request):
        completion = CompletionOutput(0, "", [])
        self._outputs[request.request_id] = RequestOutput(request.request_id, None, [], [completion])

    def step(self):
        seconds, numbers = self._script.pop(0)
        self._clock.now += seconds
        return [self._outputs[f"bench/{number}"] for number in numbers]


def _timed(monkeypatch, script, batch, prompt=10, tokens=4):
    clock = _Clock()
    monkeypatch.setattr(timing, "time", clock)
    return timing.run_once(_Engine(clock, script), [[1] * prompt] * batch, tokens)


def test_times_of_one_request(monkeypatch):
    found = _timed(monkeypatch, [(5.0, [0]), (1.0, [0]), (2.0, [0]), (6.0, [0])], 1)
    assert (found.seconds, found.first_token, found.per_token) == (14.0, 5.0, 3.0)
    assert found.context == (11 + 12 + 13) / 3
    assert found.tokens_per_second == 4 / 14
    assert found.decode_tokens_per_second == 1 / 3


def test_a_step_ahead(monkeypatch):
    """The first step gives nothing yet, and the last one only what was computed before."""
    script = [(5.0, []), (1.0, [0, 1]), (1.5, [0, 1]), (1.5, [0, 1]), (0.5, [0, 1])]
    found = _timed(monkeypatch, script, 2)
    assert (found.first_token, found.seconds) == (6.0, 9.5)
    assert found.per_token == pytest.approx(3.5 / 3)
    assert found.context == 12


def test_prompts_over_several_steps(monkeypatch):
    """Only the steps in which both get a token are steady."""
    script = [(1.0, [0]), (2.0, [0, 1]), (3.0, [0, 1]), (5.0, [0, 1]), (7.0, [1])]
    found = _timed(monkeypatch, script, 2)
    assert (found.seconds, found.first_token, found.per_token) == (18.0, 3.0, 4.0)
    # At the first steady step request 0 has 10 + 2 tokens and request 1 10 + 1; at the second, one more each.
    assert found.context == (11.5 + 12.5) / 2


def test_no_steady_step(monkeypatch):
    found = _timed(monkeypatch, [(1.0, [0]), (1.0, [0]), (1.0, [1]), (1.0, [1])], 2, tokens=2)
    assert (found.per_token, found.context, found.decode_tokens_per_second) == (None, None, None)
    assert found.decode_bytes_per_second(TIED) is None
    assert found.seconds == 4.0


def test_medians():
    runs = [Measurement(1, 8, 4, s, s / 2, p, 10.0) for s, p in ((3.0, 0.3), (9.0, None), (1.0, 0.1))]
    assert timing.median(runs) == Measurement(1, 8, 4, 3.0, 1.5, pytest.approx(0.2), 10.0)


def test_rates_and_shares():
    config = preset_config("llama-3.2-1b")
    subject = report.Subject("x", True, config, read_bandwidth=4.0e12, matrix_rate=8.0e14)
    found = Measurement(8, 128, 128, 0.2, 0.01, 0.001, 192.0)
    entry = subject.entry("tinyvllm", found)
    moved = 2 * PUBLISHED["llama-3.2-1b"] + 8 * 2 * 2048 + 8 * 192 * 32768
    assert entry["decode_bytes"] == moved
    assert entry["decode_bytes_per_second"] == pytest.approx(moved / 0.001)
    assert entry["share_of_read_bandwidth"] == pytest.approx(moved / 0.001 / 4.0e12)
    assert entry["share_of_matrix_rate"] == pytest.approx(prefill_flops(config, 8, 128) / 0.01 / 8.0e14)
    table = report.Table(subject)
    assert table.heading().split()[-6:] == ["GB/s", "of", "read", "TFLOP/s", "of", "matrix"]
    cells = table.row(found).split()
    assert cells[:8] == ["8", "128", "128", "5120.0", "10.0", "ms", "1.000", "ms"]
    assert cells[8] == f"{moved / 0.001 / 1e9:,.0f}"
    assert cells[9:11] == [f"{moved / 0.001 / 4.0e10:.0f}", "%"]
    # Without BF16 products there is no share of them.
    without = dataclasses.replace(subject, matrix_rate=None)
    assert without.entry("x", found)["share_of_matrix_rate"] is None
    assert report.Table(without).row(found).split()[-1] == "-"
    assert "TFLOP/s" in subject.rates()
    assert "TFLOP/s" not in without.rates()


# ---------------- the command
def test_the_table_and_the_json(small, tmp_path):
    file = tmp_path / "figures.json"
    options = ["--batch", "1,3", "--prompt", "9", "--tokens", "5", "--repeats", "2", "--json", str(file)]
    result = run("--random", small, *options)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[1].startswith("small (random weights): 0.0 million parameters")
    assert "median of 2 runs" in lines[2]
    heading = next(n for n, line in enumerate(lines) if line.split()[:2] == ["batch", "prompt"])
    assert [line.split()[:3] for line in lines[heading + 1 : heading + 3]] == [
        ["1", "9", "5"],
        ["3", "9", "5"],
    ]
    assert "GB/s, TFLOP/s and their shares" in lines[-1]

    found = json.loads(file.read_text())
    assert set(found) == {
        *("device", "gpu", "model", "read_bandwidth", "matrix_rate", "prompt", "tokens", "batching"),
        *("max_num_batched_tokens", "repeats", "results", "notes"),
    }
    assert (found["gpu"], found["read_bandwidth"], found["notes"], found["repeats"]) == (False, None, [], 2)
    assert found["model"]["random_weights"] is True
    assert found["model"]["parameters"] == parameters(TIED)
    assert found["model"]["config"]["hidden_size"] == 32
    assert [entry["batch"] for entry in found["results"]] == [1, 3]
    for entry in found["results"]:
        assert entry["engine"] == "tinyvllm"
        assert 0 < entry["per_token"] < entry["seconds"]
        assert 0 < entry["first_token"] < entry["seconds"]
        assert entry["tokens_per_second"] == pytest.approx(entry["batch"] * 5 / entry["seconds"])
        # Four steps, contexts 10 to 13.
        assert entry["decode_bytes"] == decode_bytes(TIED, entry["batch"], 11.5)
        for name in ("decode_bytes_per_second", "share_of_read_bandwidth", "prefill_flops_per_second"):
            assert entry[name] is None


def test_one_token(small):
    result = run("--random", small, "--batch", "2", "--prompt", "4", "--tokens", "1")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-2].split()[-2:] == ["-", "-"]


def test_a_prompt_longer_than_a_step(small):
    options = ["--prompt", "40", "--tokens", "9", "--batch", "3", "--max-num-batched-tokens", "16"]
    assert run("--random", small, *options).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a MODEL, or --random with the name"),
        (["TINY", "--random", "llama-3.2-1b"], "--random llama-3.2-1b were given; give one of them"),
        (
            ["--random", "gpt-2"],
            "no sizes are known by the name 'gpt-2'; there are llama-3.2-1b, llama-3.2-3b",
        ),
        (["TINY", "--repeats", "0"], "--repeats is 0; it must be at least 1"),
        (["TINY", "--max-num-batched-tokens", "0"], "--max-num-batched-tokens is 0"),
        (["TINY", "--prompt", "500", "--tokens", "20"], "the prompt has 500 tokens and 20 are to follow"),
        (["TINY", "--json", "/no/such/folder/x.json"], "the folder /no/such/folder does not exist"),
        (["TINY", "--json", "/"], "--json is /, a folder; it must be a file to write"),
        (["TINY", "--compiled", "--no-transformers"], "--compiled measures transformers"),
        (["TINY", "--compiled"], "--compiled: transformers compiles for a card"),
        (["TINY", "--batch", "1000000", "--tokens", "100"], "GB are free: choose a smaller model"),
    ],
)
def test_errors_are_one_message(folder, arguments, message):
    result = run(*[folder if argument == "TINY" else argument for argument in arguments])
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_the_table_of_a_card(small, monkeypatch, tmp_path):
    """What only a card has, with rates put in their places: the columns, and why transformers is missing."""
    monkeypatch.setattr(bench, "is_gpu", True)
    monkeypatch.setattr(card, "read_bandwidth", lambda: 4.0e12)
    monkeypatch.setattr(card, "matrix_rate", lambda: 8.0e14)
    monkeypatch.setattr(beside, "missing", lambda: "torch not installed")
    file = tmp_path / "figures.json"
    result = run("--random", small, "--batch", "2", "--prompt", "6", "--tokens", "4", "--json", str(file))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "median of 3 runs" in lines[2]
    assert lines[3].startswith("This device, measured now: reads 4,000 GB/s, multiplies")
    assert lines[5].split()[-6:] == ["GB/s", "of", "read", "TFLOP/s", "of", "matrix"]
    assert lines[6].split()[:3] == ["2", "6", "4"]
    assert lines[7:] == ["transformers is not measured beside it: torch not installed"]
    found = json.loads(file.read_text())
    (entry,) = found["results"]
    moved = decode_bytes(TIED, 2, 8.0) / entry["per_token"]
    assert entry["share_of_read_bandwidth"] == pytest.approx(moved / 4.0e12)
    assert entry["share_of_matrix_rate"] == pytest.approx(
        prefill_flops(TIED, 2, 6) / entry["first_token"] / 8.0e14
    )
    assert "not measured" not in run("--random", small, "--tokens", "2", "--no-transformers").stdout


# ---------------- transformers beside it
def test_transformers_that_is_not_there(folder, monkeypatch):
    monkeypatch.setattr(beside.importlib.util, "find_spec", lambda name: None)
    result = run(folder, "--transformers")
    assert result.exit_code == 1
    assert "transformers can not be measured: torch and transformers not installed" in result.stderr


class _Theirs:
    """Stands for transformers: half as fast, and with no memory for a batch of two."""

    alive = 0

    def __init__(self, config, folder):
        self.config, self.folder = config, folder
        _Theirs.alive += 1

    def __del__(self):
        _Theirs.alive -= 1

    def measure(self, batch, prompt, tokens, repeats, mode):
        if batch == 2:
            raise RuntimeError("out of memory\nand much more")
        return beside.from_two_runs(batch, prompt, tokens, 7.0, 1.0)


def test_transformers_beside_it(small, tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "missing", lambda: "")
    monkeypatch.setattr(beside, "version", lambda: "transformers 0, torch 0")
    through = beside.measure_beside
    monkeypatch.setattr(beside, "measure_beside", lambda *a: through(*a, make=_Theirs))
    file = tmp_path / "figures.json"
    options = ("--batch", "1,2", "--prompt", "4", "--tokens", "3", "--transformers", "--json", str(file))
    result = run("--random", small, *options)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("transformers 0, torch 0, eager"))
    ours = float(next(line for line in lines if line.split()[:1] == ["1"]).split()[3])
    row = lines[at + 2].split()
    assert row[:4] == ["1", "4", "3", f"{3 / 7:.1f}"]
    assert float(row[-1].rstrip("x")) == pytest.approx(ours / (3 / 7), rel=0.01, abs=0.5)
    assert lines[at + 3] == "transformers, eager: batch 2: RuntimeError: out of memory"
    found = json.loads(file.read_text())
    assert found["notes"] == [lines[at + 3]]
    assert [e["engine"] for e in found["results"]] == ["tinyvllm", "tinyvllm", "transformers eager"]
    assert found["results"][2]["per_token"] == 3.0
    assert _Theirs.alive == 0


def test_a_model_that_transformers_can_not_make(monkeypatch):
    def make(config, folder):
        raise OSError("no such file")

    assert list(beside.measure_beside(TIED, "x", (1,), 4, 3, 1, ["eager"], make)) == [
        ("eager", "the model: OSError: no such file")
    ]


def test_what_two_runs_say():
    assert beside.from_two_runs(2, 8, 5, 3.0, 1.0) == Measurement(2, 8, 5, 3.0, 1.0, 0.5, 10.5)
    assert beside.from_two_runs(2, 8, 1, 3.0, 1.0).per_token is None
    assert beside.from_two_runs(2, 8, 5, 1.0, 1.1).per_token is None  # noise


@pytest.mark.parametrize(
    "config",
    [
        *[preset_config(name) for name in PRESETS],
        dataclasses.replace(UNTIED, rope_scaling=RopeScaling("linear", 4.0)),
    ],
    ids=lambda config: str(config.hidden_size),
)
def test_transformers_gets_the_same_sizes(config):
    fields = beside.hugging_face_fields(config) | {"model_type": "llama"}
    assert ModelConfig.from_dict(fields) == dataclasses.replace(config, eos_token_ids=())


def test_settings_are_checked_when_they_are_made():
    with pytest.raises(ValueError, match="--tokens is 0"):
        Settings(model="x", tokens=0)
