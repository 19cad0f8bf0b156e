"""Layer by layer against transformers: right engines agree, and of a wrong one the first wrong operation is named."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.course.test_figures import texts_drawn
from tinyvllm_ref import LLM, SamplingParams, emulation
from tinyvllm_ref.checkpoint.names import resolve
from tinyvllm_ref.course.answers import make_namespace
from tinyvllm_ref.course.compare_layers import (
    IN_LAYER,
    TOLERANCE,
    activations,
    compare,
    golden,
    in_words,
    relative_error,
    show_layers,
)
from tinyvllm_ref.course.exercises import exercise_of
from tinyvllm_ref.course.figures.layers import layer_errors
from tinyvllm_ref.course.figures.stack import model_stack
from tinyvllm_ref.course.lessons import solution_cell
from tinyvllm_ref.device import cp
from tinyvllm_ref.parts import Parts

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
LEARNERS = ("13.3", "13.4", "14.2", "14.3")


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYVLLM_MY_ENGINE", str(tmp_path / "my_engine"))


def parts_of(id, source=None):
    """The parts of an exercise, from its solution or from another answer."""
    exercise = exercise_of(id)
    before = {other: solution_cell(other) for other in exercise.builds_on}
    namespace = make_namespace(exercise, source or solution_cell(id), cp, before=before)
    return {part: namespace[name] for part, name in exercise.makes.items()}


def mistake(id, name):
    return parts_of(id, next(one.answer for one in exercise_of(id).mistakes if one.name == name))


@pytest.fixture(scope="module")
def solutions():
    return Parts().replace(**{part: value for id in LEARNERS for part, value in parts_of(id).items()})


# ---------------- the golden values


def test_the_golden_values_are_those_of_the_tests():
    """Two scripts, with hooks of their own, wrote the two files."""
    other = np.load(GOLDEN / "tiny_stories_layers.npz")
    mine = golden()
    assert list(mine.ids) == other["ids"].tolist()
    record = next(
        one
        for one in json.loads((GOLDEN / "tiny_stories.json").read_text())["prompts"]
        if one["prompt"] == mine.prompt
    )
    assert list(mine.new_ids) == record["new_ids"]
    assert np.allclose(mine.margins, record["margins"], atol=1e-6)
    pairs = {"embedding": "embedding", "final_norm": "final_norm", "logits": "logits"}
    for layer in range(5):
        pairs |= {
            f"layers.{layer}.{ours}": f"layer_{layer}_{theirs}"
            for ours, theirs in (
                ("input_norm", "attention_norm"), ("o_proj", "attention"), ("post_norm", "feed_forward_norm"),
                ("down_proj", "feed_forward"), ("stream", "output"),
            )
        }  # fmt: skip
    for ours, theirs in pairs.items():
        assert relative_error(mine.activations[ours], other[theirs]) < 1e-3, ours


def test_every_operation_has_a_golden_value_and_they_are_in_order():
    inside = [f"layers.{layer}.{what}" for layer in range(5) for what in IN_LAYER]
    assert list(golden().activations) == ["embedding", *inside, "final_norm", "logits"]


# ---------------- right engines


def test_the_reference_agrees():
    report = compare(activations())
    assert report.first is None
    assert max(report.errors.values()) < TOLERANCE / 3
    assert str(report).startswith("All 53 operations agree")


def test_the_solutions_of_the_lessons_agree(solutions):
    report = compare(activations(solutions))
    assert report.first is None, str(report)


def test_the_solutions_give_the_greedy_ids_of_transformers(solutions):
    wanted = golden()
    options = SamplingParams(max_tokens=len(wanted.new_ids), temperature=0.0)
    with emulation.checks("fast"):
        (output,) = LLM("tiny-stories", parts=solutions).generate([list(wanted.ids)], options, use_tqdm=False)
    got = list(output.outputs[0].token_ids)
    first = next((i for i, (a, b) in enumerate(zip(got, wanted.new_ids, strict=False)) if a != b), None)
    assert first is None or wanted.margins[first] < 0.1
    assert got[:16] == list(wanted.new_ids[:16])


@pytest.mark.slow
def test_the_solutions_agree_on_a_larger_model(solutions, monkeypatch):
    """SmolLM2-135M: 30 layers, 9 query and 3 KV heads; logits and greedy tokens as transformers has them."""
    monkeypatch.delenv("TINYVLLM_HOME", raising=False)
    name = "smollm2-135m-instruct"
    try:
        folder = resolve(name)
    except FileNotFoundError:
        pytest.skip(f"{name} has not been fetched")
    stored = np.load(GOLDEN / "smollm2.npz")
    prompts = json.loads((GOLDEN / "golden.json").read_text())["smollm2"]["prompts"][:3]
    options = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with emulation.checks("fast"):
        llm = LLM(folder, parts=solutions)
        for index, prompt in enumerate(prompts):
            wanted = stored[f"{index}/logits"]
            logits = llm.logits(prompt["ids"])[-1]
            assert np.abs(logits - wanted).max() / np.abs(wanted).max() < 2e-2, prompt["text"]
            (output,) = llm.generate([prompt["ids"]], options, use_tqdm=False)
            different = np.flatnonzero(
                np.array(output.outputs[0].token_ids) != stored[f"{index}/tokens"][:12]
            )
            assert len(different) == 0 or stored[f"{index}/margins"][different[0]] < 0.5, prompt["text"]


# ---------------- wrong ones


@pytest.mark.parametrize(
    ("id", "name", "first"),
    [
        ("13.3", "gate and up swapped", "layers.0.silu_mul"),
        ("13.3", "first all tokens' gates, then all ups", "layers.0.silu_mul"),
        ("13.4", "attention never added", "layers.0.post_norm"),
        ("13.4", "queries and keys not rotated", "layers.0.rope"),
        ("13.4", "the layer before never added", "layers.1.input_norm"),
        ("13.4", "layer 0's weights in every layer", "layers.1.input_norm"),
        ("13.4", "one norm's weight for both", "layers.0.post_norm"),
        ("14.3", "the last layer never added", "final_norm"),
        ("14.3", "one layer too few", "layers.4.input_norm"),
        ("14.3", "LM head transposed", None),
    ],
)
def test_the_first_wrong_operation_is_named(id, name, first, solutions):
    parts = solutions.replace(**mistake(id, name))
    if first is None:
        with pytest.raises(ValueError, match="linear"):
            activations(parts)
        return
    report = compare(activations(parts))
    assert report.first == first, str(report)
    assert in_words(first) in str(report)


@pytest.mark.parametrize(
    "name",
    [
        "embedding",
        "layers.2.input_norm",
        "layers.0.qkv",
        "layers.3.rope",
        "layers.4.attention",
        "layers.1.gate_up",
        "layers.2.silu_mul",
        "layers.4.down_proj",
    ],
)
def test_a_planted_operation_is_named(name):
    def nothing(*args):
        args[0 if name.endswith("rope") else -1].fill(0)

    assert compare(activations(planted={name: nothing})).first == name


def test_what_is_not_finite_is_named():
    def nan(gate_up, out):
        out.fill(0x7FC0)

    report = compare(activations(planted={"layers.1.silu_mul": nan}))
    assert report.first == "layers.1.silu_mul"
    assert "not finite" in str(report)


def test_an_operation_that_did_not_run_is_named():
    mine = activations()
    del mine["layers.2.rope"]
    report = compare(mine)
    assert report.first == "layers.2.rope"
    assert "did not run" in str(report)


# ---------------- in a notebook


def test_show_layers_says_where(capsys):
    show_layers(Parts().replace(**mistake("13.3", "no activation")))
    assert "layers.0.silu_mul" in capsys.readouterr().out


def test_show_layers_needs_an_exercise_that_makes_a_part():
    with pytest.raises(LookupError, match="makes no part"):
        show_layers("13.1")
    with pytest.raises(LookupError, match=r"Exercise 14\.3"):
        show_layers("14.3")


ODD_ERRORS = (0, 0.1, 1, 2e9, np.inf, np.nan)
FIGURES = {
    "right": lambda: layer_errors(compare(activations()).errors, TOLERANCE),
    "wrong": lambda: layer_errors(
        {f"layers.{i}.{what}": ODD_ERRORS[k % 6] for i in range(40) for k, what in enumerate(IN_LAYER)}
        | {"final_norm": np.nan, "logits": 999.0},
        0.03,
    ),
    "one": lambda: layer_errors({"logits": 0.0}, 0.03),
    "stack": lambda: model_stack(tokens=10, hidden=192, ffn=512, q_size=192, kv_size=64, vocab=2048, layers=5),
    "large": lambda: model_stack(
        tokens=131_072, hidden=16_384, ffn=53_248, q_size=16_384, kv_size=1024, vocab=128_256, layers=126, rows=131_072
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_figure(name, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = FIGURES[name]()
        figure.set_dpi(100)
        boxes = texts_drawn(figure, monkeypatch)
    assert figure.alt_text.endswith(".")
    width, height = figure.get_size_inches() * 100
    for text, box in boxes:
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
        assert inside, f"{text!r} leaves it"
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or down <= 1.5, f"{one!r} and {other!r} overlap"


def test_wrong_input_of_a_figure_is_named():
    with pytest.raises(ValueError, match="operation"):
        layer_errors({}, 0.03)
    with pytest.raises(ValueError, match="layers is 0"):
        model_stack(tokens=1, hidden=1, ffn=1, q_size=1, kv_size=1, vocab=1, layers=0)
