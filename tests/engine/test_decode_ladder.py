"""``benchmarks/decode_ladder.py`` in the emulation: what it compares, what it counts, what it predicts and writes."""

from __future__ import annotations

import csv
import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tinyvllm_ref import random_model
from tinyvllm_ref.decode_products import FEW_ROWS
from tinyvllm_ref.device import cp
from tinyvllm_ref.emulation.raw_kernel import RawKernel
from tinyvllm_ref.model_runner import engine_checks
from tinyvllm_ref.random_model import preset_config

REPOSITORY = Path(__file__).resolve().parents[2]
FILE = REPOSITORY / "benchmarks" / "decode_ladder.py"
SMALL = {
    **{"model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 72},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 512, "rope_theta": 10000.0, "rms_norm_eps": 1e-5},
    **{"tie_word_embeddings": True},
}
SHORT = ["--random", "small", "--batch", "1,3", "--context", "17-34", "--prefill", "5,33", "--long", "70"]
RUNGS = ["simple path", "in a graph", "row kernels", "fused attention", "own products", "persistent"]


@pytest.fixture
def ladder(monkeypatch, tmp_path):
    """The script as a module, and sizes that are quick."""
    monkeypatch.setitem(random_model.PRESETS, "small", SMALL)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("decode_ladder", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "decode_ladder", module)
    spec.loader.exec_module(module)
    past = tmp_path / "history.csv"  # what was measured once is no part of these tests
    past.write_text("what,predicted,measured,date\n")
    monkeypatch.setattr(module, "HISTORY", past)
    return module


def tables_of(text):
    """By heading: the lines of the table below it, as lists of cells, the first one its head."""
    found = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        lines = [line for line in section.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        found[section.splitlines()[0]] = [cells[0], *cells[2:]]
    return found


def column(table, name):
    return [line[table[0].index(name)] for line in table[1:]]


def run(ladder, *options):
    """The status, and what it wrote."""
    return ladder.main([*SHORT, *options])


# ---------------- the rehearsal
def test_a_rehearsal_compares_every_rung_and_shows_no_times(ladder, tmp_path, capsys):
    file = tmp_path / "ladder.md"
    assert run(ladder, "--write", str(file)) == 0
    text = file.read_text()
    tables = tables_of(text)
    assert list(tables) == [
        "Decode, 1 request, context 25",
        "Decode, 3 requests, contexts 17 to 34, 26 on average",
        "The engine: prompts of 17 tokens, 17 generated greedily for each",
        "Prefill of one prompt",
        "Decode, 1 request, context 70",
    ]
    one, three, engine, prefill, long = tables.values()
    for table, rungs in ((one, [0, 1, 2, 3, 4, 5]), (three, [0, 1, 2, 3, 4]), (long, [0, 3, 5])):
        names = column(table, "rung")
        assert [int(name.split(".")[0]) for name in names] == rungs
        assert all(RUNGS[number] in name for number, name in zip(rungs, names, strict=True))
    assert column(engine, "fast path") == ["off", "off", "on", "on"]
    assert column(engine, "requests") == ["1", "3", "1", "3"]
    assert column(prefill, "tokens") == ["5", "33"]
    for table in tables.values():
        assert set(column(table, "verdict")) == {"right"}
        assert not {"measured us", "measured ms", "us a token", "GB/s"} & set(table[0])
    assert "A rehearsal: no GPU code ran" in text
    assert "All of it was right." in text
    printed = capsys.readouterr()
    assert text.split("\n\n")[0] in printed.out
    assert printed.err == ""


def test_a_model_from_a_folder_and_one_part(ladder, tmp_path):
    file = tmp_path / "ladder.md"
    folder = str(REPOSITORY / "data" / "tiny-stories")
    arguments = [
        "--model",
        folder,
        "--batch",
        "2",
        "--context",
        "20-40",
        "--part",
        "decode",
        "--write",
        str(file),
    ]
    assert ladder.main(arguments) == 0
    (table,) = tables_of(file.read_text()).values()
    assert set(column(table, "verdict")) == {"right"}
    assert "The model: tiny-stories" in file.read_text()


def test_keys_in_splits_take_the_fused_attention(ladder, tmp_path):
    file = tmp_path / "ladder.md"
    assert run(ladder, "--part", "decode", "--context", "270-290", "--batch", "2", "--write", str(file)) == 0
    assert "divides keys into 2 splits here and allocates for them" in file.read_text()
    (table,) = tables_of(file.read_text()).values()
    simple, recorded, *_ = map(int, column(table, "launches"))
    assert simple - recorded == SMALL["num_hidden_layers"] * 4  # split, rope, write, attend and merge, in one


# ---------------- what is wrong is found
@pytest.mark.parametrize(
    ("broken", "rungs"),
    [
        ("rope", {1, 2}),
        ("kv_write", {1, 2}),
        ("silu_mul", {1}),
        ("split_qkv", {1, 2}),
        ("paged_attention", {1, 2}),
        ("gather_rows", {1}),
    ],
)
def test_a_launch_left_out_is_named_and_gets_no_time(ladder, tmp_path, monkeypatch, broken, rungs):
    monkeypatch.setattr(ladder, broken, lambda *args: None)
    file = tmp_path / "ladder.md"
    assert run(ladder, "--part", "decode", "--write", str(file)) == 1
    for table in tables_of(file.read_text()).values():
        for name, verdict in zip(column(table, "rung"), column(table, "verdict"), strict=False):
            assert (verdict == "right") == (int(name[0]) not in rungs), (name, verdict)
    assert "**Not all of it was right.**" in file.read_text()


def test_a_wrong_choice_is_found(ladder, monkeypatch, capsys):
    monkeypatch.setattr(ladder.rows_, "argmax_rows", lambda logits, chosen, scratch: chosen.fill(7))
    assert run(ladder, "--part", "decode", "--batch", "2") == 1
    assert "token 7 was chosen" in capsys.readouterr().out


def test_a_rung_that_fails_is_named_and_the_others_go_on(ladder, monkeypatch, capsys):
    def fail(*args):
        raise RuntimeError("no such launch")

    monkeypatch.setattr(ladder, "rms_norm", fail)
    assert run(ladder, "--part", "decode", "--batch", "2") == 1
    out = capsys.readouterr().out
    assert "**wrong: RuntimeError: no such launch**" in out
    assert out.count("| right |") == 4


def test_a_part_that_fails_is_named_and_the_others_go_on(ladder, monkeypatch, capsys):
    def fail(*args):
        raise RuntimeError("no such part")

    monkeypatch.setattr(ladder, "climbed", fail)
    assert run(ladder) == 1
    out = capsys.readouterr().out
    assert "**wrong: decode: RuntimeError: no such part**" in out
    assert "## Prefill of one prompt" in out


def test_tokens_that_are_not_greedy_are_found(ladder):
    _, model = ladder.load(ladder.parse(SHORT))
    with engine_checks():
        logits = ladder.all_logits(model, model.parts, [1, 2, 3, 4])
        best = int(logits[3].argmax())
        assert ladder.unlikely(model, [1, 2, 3, 4], [best]) == ""
        worst = int(logits[3].argmin())
        assert "token 0 is" in ladder.unlikely(model, [1, 2, 3, 4], [worst])


# ---------------- counts and predictions
def launched(monkeypatch, start):
    """How many kernels and products `start` launches."""
    count = 0
    call, gemm = RawKernel.__call__, cp.cuda.cublas.gemmEx

    def counting(self, *args, **kwargs):
        nonlocal count
        count += 1
        return call(self, *args, **kwargs)

    def multiplying(*args):
        nonlocal count
        count += 1
        return gemm(*args)

    with monkeypatch.context() as patch:
        patch.setattr(RawKernel, "__call__", counting)
        patch.setattr(cp.cuda.cublas, "gemmEx", multiplying)
        start()
    return count


@pytest.mark.parametrize("context", [30, 300])
def test_launches_are_counted_right(ladder, monkeypatch, context):
    options = ladder.parse([*SHORT, "--batch", "1,2", "--context", f"{context}"])
    _, model = ladder.load(options)
    seen = set()
    with engine_checks():
        made = ladder.prepare(options, model)
        for batch in (1, 2):
            step = ladder.Step(model.config, made.cache.num_blocks, [context] * batch)
            made.poison(step.unread)
            for rung in made.rungs(step, range(6)):
                rung.prepare()
                assert launched(monkeypatch, rung.launch) == rung.counts.products + rung.counts.small, (
                    rung.name
                )
                seen.add(rung.number)
        inputs = ladder.host_inputs([[1, 2, 3]], [0], [[0]], [2], 0, ladder.BLOCK_SIZE)
        counts = ladder.prefill_counts(model.config)
        assert launched(monkeypatch, lambda: made.fast.forward(inputs)) == counts.products + counts.small
    assert seen == {0, 1, 2, 3, 4, 5}


def test_predictions_are_what_was_measured_where_nothing_is_added(ladder):
    """The model's constants give back the figures that they come from."""
    config = preset_config("llama-3.2-1b")
    for batch, seconds in ((1, 0.831e-3), (32, 0.882e-3), (128, 0.990e-3), (256, 1.158e-3)):
        alone = ladder.Counts(65, 0, 0)
        assert ladder.predicted(config, alone, batch, 0) == pytest.approx(seconds, rel=1e-3)
    one_by_one = ladder.Counts(65, 128, 0, recorded=False)
    assert ladder.predicted(config, one_by_one, 1, 0) == pytest.approx(1.9e-3)
    assert ladder.predicted(config, ladder.Counts(0, 0, 0), 1, 0) == pytest.approx(0.546e-3, rel=1e-3)
    # An 8,192-token context adds its keys and values at the same rate.
    longer = ladder.predicted(config, ladder.Counts(0, 0, 0), 1, 8192)
    assert longer - 0.546e-3 == pytest.approx(8192 * 16 * 2 * 512 * 2 / (2.4715e9 / 0.546e-3), rel=1e-2)


def test_no_rung_is_predicted_to_be_slower_than_the_one_before(ladder):
    config = preset_config("llama-3.2-1b")
    for batch in (1, 8, 32, 128):
        rungs = range(6 if batch == 1 else 5 if batch <= FEW_ROWS else 4)
        counts = [ladder.counts_of(config, rung, 1, batch) for rung in rungs]
        times = [ladder.predicted(config, each, batch, 192) for each in counts]
        assert times == sorted(times, reverse=True)


def test_the_row_bytes_of_a_simple_step_are_those_of_its_arrays(ladder):
    """Counted from the arrays that the simple kernels read and write, but for weights and cache."""
    config = preset_config("smollm2-135m")
    step = ladder.Step(config, 2, [20])
    b = {name: getattr(step.buffers, name).nbytes for name in step.buffers.__slots__}
    norms = 2 * (b["x"] + 2 * b["residual"] + b["normed"])
    split = b["qkv"] + b["q"] + b["k"] + b["v"]
    rotated = 2 * (b["q"] + b["k"])
    written = (b["k"] + b["v"]) * 3 // 2  # read, and written to the cache as bfloat16
    attended = b["q"] + b["attended"]
    activated = b["gate_up"] + b["activated"]
    layer = norms + split + rotated + written + attended + activated
    logits = step.logits.nbytes
    assert ladder.counts_of(config, 0, 1).row_bytes == config.num_hidden_layers * layer + logits


# ---------------- on a card, as far as that goes without one
def test_the_tables_with_times_can_be_made(ladder, tmp_path, monkeypatch):
    """A card's rates and clock that are made up: every cell that should have a number has one."""
    monkeypatch.setattr(ladder, "TIMED", True)
    monkeypatch.setattr(ladder.card, "read_bandwidth", lambda: 4e12)
    monkeypatch.setattr(ladder.card, "matrix_rate", lambda: 7e14)
    monkeypatch.setattr(cp.cuda, "get_elapsed_time", lambda begin, end: 0.25)
    file = tmp_path / "ladder.md"
    assert run(ladder, "--repeats", "2", "--write", str(file)) == 0
    text = file.read_text()
    assert "the card reads 4,000 GB/s" in text
    tables = tables_of(text)
    one, three, engine, prefill, long = tables.values()
    number = re.compile(r"-?[\d,]+(\.\d+)?%?")
    for table in (one, three, long):
        for name in ("predicted us", "measured us", "host us", "GB/s", "of read", "tokens/s"):
            assert all(number.fullmatch(cell) for cell in column(table, name)), name
        predicted = [float(cell.replace(",", "")) for cell in column(table, "predicted us")]
        saved = column(table, "predicted to save")
        assert saved[0] == ""
        np.testing.assert_allclose([float(cell) for cell in saved[1:]], -np.diff(predicted), atol=0.11)
    for name in ("predicted us", "us a token", "GB/s", "of read", "tokens/s, decode", "tokens/s, all"):
        assert all(number.fullmatch(cell) for cell in column(engine, name)), name
    assert [bool(cell) for cell in column(engine, "graph's share")] == [False, False, True, True]
    for name in ("predicted ms", "measured ms", "of matrix rate", "first token of the engine, ms"):
        assert all(number.fullmatch(cell) for cell in column(prefill, name)), name


# ---------------- the history, and what can not be
def test_the_history_of_the_kernels_is_shown(ladder, tmp_path, monkeypatch):
    with ladder.HISTORY.open(encoding="utf-8", newline="") as file:
        assert next(csv.reader(file)) == ladder.HISTORY_COLUMNS
    own = tmp_path / "history.csv"
    monkeypatch.setattr(ladder, "HISTORY", own)
    own.write_text("what,predicted,measured,date\n")
    assert list(ladder.history()) == []
    own.write_text('what,predicted,measured,date\n"a ring, 6 stages",700 us,712 us,2026-11-30\n')
    heading, table = ladder.history()
    assert heading.startswith("## The kernels, from change to change")
    assert "| a ring, 6 stages | 700 us | 712 us | 2026-11-30 |" in table
    own.write_text("what,measured\n")
    with pytest.raises(
        ValueError, match=r"its columns are \['what', 'measured'\]; they must be \['what', 'pred"
    ):
        list(ladder.history())
    own.write_text("what,predicted,measured,date\na,b\n")
    with pytest.raises(ValueError, match="line 2 has 2 values; it must have 4"):
        list(ladder.history())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", "0"], "every number must be at least 1"),
        (["--context", "9-4"], "must be LOW-HIGH"),
        (["--long", "0"], "--long is 0; it must be at least 1"),
        (["--write", "/nowhere/at/all.md"], "the folder /nowhere/at does not exist"),
        (["--long", "600"], "600 tokens of a request were asked for; this model's context has 512"),
        (["--random", "llama-9"], "no sizes are known by the name 'llama-9'"),
    ],
)
def test_options_that_can_not_be(ladder, capsys, options, said):
    with pytest.raises(SystemExit) as stopped:
        run(ladder, *options)
    assert said in str(stopped.value.code) + capsys.readouterr().err


def test_a_model_that_has_no_fast_path(ladder, monkeypatch):
    monkeypatch.setitem(random_model.PRESETS, "small", SMALL | {"head_dim": 12})
    with pytest.raises(
        SystemExit, match="there is no fast path to climb to: its kernels are not made for 4 heads"
    ):
        run(ladder)
