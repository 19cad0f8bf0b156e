"""The engine card: what a lesson's mistakes and its dial do to the text, computed."""

import dataclasses

import numpy as np
import pytest

from tinyvllm_ref.course.engine_card import engine_report
from tinyvllm_ref.course.exercise import EngineCard, Lesson, Setting
from tinyvllm_ref.course.exercises import lesson_of
from tinyvllm_ref.course.reports import EngineReport, WrongStory


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYVLLM_MY_ENGINE", str(tmp_path / "my_engine"))


def report(**fields):
    card = {
        "lesson": "02", "title": "A lesson", "own": (), "total": 3, "runs": (), "missing": (), "prompt": "Once",
        "text": "Once upon", "reference_text": "Once upon", "same_tokens": 4, "tokens": 4, "logit_error": 0.0,
    }  # fmt: skip
    return EngineReport(**card, **fields)


def test_a_dial_is_shown_in_both_forms():
    setting = WrongStory("3 <bits>", "Coarse & rough.", "Once a", 2, 0.25)
    made = report(dial=(setting,), dial_title="Fewer bits")
    assert "Fewer bits: 3 <bits>" in str(made)
    assert "The first 2 of 4 tokens agree; token 3 differs. Relative error of the logits: 0.25." in str(made)
    html = made._repr_html_()
    assert "3 &lt;bits&gt;" in html
    assert "Coarse &amp; rough." in html
    assert "Fewer bits" not in report()._repr_html_()


def test_a_text_that_goes_on_behind_the_reference_s_is_not_called_the_same():
    wrong = WrongStory("no end", "It writes on.", "Once upon a time", 4, None)
    made = report(mistakes=(wrong, WrongStory("slow", "It shows nowhere.", "Once upon", 4, 0.0)))
    assert "All 4 tokens are the reference's, and behind them the text goes on." in str(made)
    assert "All 4 tokens are the reference's. The logits are equal to the bit." in str(made)


def small(lesson: Lesson, **card) -> Lesson:
    """The lesson with another card, of eight tokens."""
    return dataclasses.replace(lesson, engine=EngineCard(**card, max_tokens=8))


def test_a_setting_changes_the_engine_and_may_stop_it():
    def refuse(parts):
        raise ValueError("no such setting")

    def zeros(parts):
        return {"float_to_bf16": lambda x: np.zeros(np.shape(x), np.uint16)}

    dial = (
        Setting("as it is", "", lambda parts: {}),
        Setting("refused", "", refuse),
        Setting("unused", "", zeros),
    )
    same, stopped, unused = engine_report(small(lesson_of("03"), dial=dial)).dial
    assert same.same_tokens == 8
    assert same.logit_error == 0
    assert stopped.error == "ValueError: no such setting"
    assert unused.text == same.text  # tiny-stories is BF16 already


def test_mistakes_run_before_anything_has_passed():
    """What a mistake builds on comes from the solution as long as the learner has none."""
    mistakes = (("03.5", "symbols shown instead of bytes"), ("01.2", "offsets from the start of the file"))
    symbols, noise = engine_report(small(lesson_of("03"), mistakes=mistakes)).mistakes
    assert symbols.error == noise.error == ""
    assert "Ġ" in symbols.text
    assert noise.same_tokens < 8
    assert not noise.logit_error < 1


def test_a_story_may_be_drawn_and_share_its_batch():
    """What stands beside a prompt changes nothing of its story, and a seed fixes what is drawn."""
    sampling = {"temperature": 1.0, "seed": 17}
    alone, beside = (
        engine_report(small(lesson_of("03"), sampling=sampling, beside=others))
        for others in ((), ("The fox",))
    )
    assert alone.text == beside.text
    assert alone.text != engine_report(small(lesson_of("03"))).text


def test_logits_are_not_called_equal_where_the_tokens_differ():
    """A batch laid out wrongly does not show in the logits of one story by itself, and a draw in no logits."""
    batch, draw = (lesson_of(number).engine for number in ("18", "17"))
    for card, names in ((batch, ("positions run on",)), (draw, ("the step left out",))):
        mistakes = tuple(one for one in card.mistakes if one[1] in names)
        lesson = dataclasses.replace(
            lesson_of("03"), engine=dataclasses.replace(card, mistakes=mistakes, max_tokens=8)
        )
        (found,) = engine_report(lesson).mistakes
        assert found.error == ""
        assert found.same_tokens < 8
        assert found.logit_error is None


@pytest.mark.slow
def test_fewer_fraction_bits_are_less_exact():
    dial = engine_report(small(lesson_of("02"), dial=lesson_of("02").engine.dial)).dial
    errors = [setting.logit_error for setting in dial]
    assert [setting.name for setting in dial] == [f"{kept} fraction bits" for kept in (7, 5, 3, 2)]
    assert errors[0] == 0
    assert 0 < 2 * errors[1] < errors[2] < 4 * errors[3]
    assert errors == sorted(errors)
