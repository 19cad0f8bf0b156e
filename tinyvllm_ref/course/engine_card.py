"""``show_engine``: the learner's parts at work in the engine, and what this lesson's mistakes would do to the text."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyvllm_ref import LLM, SamplingParams, device, emulation
from tinyvllm_ref.checkpoint.names import REPOSITORY
from tinyvllm_ref.emulation import report as launch_reports
from tinyvllm_ref.kernels import source as kernel_source
from tinyvllm_ref.parts import LESSONS, Parts

from . import my_engine, notebook
from .answers import make_namespace
from .exercise import EngineCard, Exercise, Lesson
from .exercises import exercise_of, lesson_of
from .lessons import solution_cell
from .reports import EngineReport, WrongStory
from .wiring import wired

MODEL = "tiny-stories"
_WITHOUT_ENGINE = ("build_app",)
# Parts without a share in the logits of given tokens.
_TEXT_ALONE = frozenset({"Tokenizer", "Scheduler", "Engine", "build_app"})


@dataclass(frozen=True)
class Story:
    """What an engine wrote: token ids, text, and how often each part of the learner's ran."""

    ids: tuple[int, ...]
    text: str
    runs: dict[str, int]


@dataclass(frozen=True)
class Task:
    """What an engine is to write; see :class:`~tinyvllm_ref.course.exercise.EngineCard`."""

    prompt: str
    max_tokens: int
    sampling: tuple[tuple[str, Any], ...]
    beside: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()
    write: Callable[[Any, Any], tuple[Any, str]] | None = None

    @classmethod
    def of(cls, card: EngineCard) -> Task:
        """The task of a lesson's card: greedy, where the card does not say otherwise."""
        sampling = {"temperature": 0.0, **card.sampling}
        options = tuple(card.options.items())
        return cls(card.prompt, card.max_tokens, tuple(sampling.items()), card.beside, options, card.write)


def show_engine(number: str) -> None:
    """Write a story with the learner's parts inside, beside the reference's and beside this lesson's mistakes.

    Parameters
    ----------
    number : str
        The lesson: ``"06"``.
    """
    notebook.display(engine_report(lesson_of(number)))


def engine_report(lesson: Lesson) -> EngineReport:
    """The card, computed."""
    card = lesson.engine
    own = my_engine.own_parts()
    owners = own.owners()
    left_out: dict[str, Any] = {name: None for name in card.without if name in owners}
    own = own.replace(**left_out)
    task = Task.of(card)
    right = reference_story(task)
    mine = write_story(own, task) if owners else right
    in_lesson = [part for part, lessons in LESSONS.items() if lesson.number in lessons]
    left_out_of_count = () if card.write is not None else _WITHOUT_ENGINE
    return EngineReport(
        lesson=lesson.number,
        title=lesson.title,
        own=tuple(name for name in owners if name not in left_out_of_count),
        total=len([name for name in LESSONS if name not in left_out_of_count]),
        runs=tuple((part, _runs_of(part, own, mine)) for part in in_lesson if part in owners),
        missing=tuple(part for part in in_lesson if part not in owners),
        prompt=card.prompt,
        text=mine.text,
        reference_text=right.text,
        same_tokens=_same_tokens(mine, right),
        tokens=len(right.ids),
        logit_error=_error(in_lesson, own, right) if owners else 0.0,
        mistakes=tuple(_wrong_story(id, name, own, task, right) for id, name in card.mistakes),
        note=card.note if any(part in owners for part in in_lesson) else "",
        dial=tuple(
            _story_with(
                setting.name,
                setting.says,
                own,
                functools.partial(setting.change, own),
                task,
                right,
            )
            for setting in card.dial
        ),
        dial_title=card.dial_title,
    )


def _runs_of(part: str, own: Parts, story: Story) -> int | None:
    """How often a part ran; None for a device function on a card, where launches are not reported."""
    uncounted = device.is_gpu and isinstance(getattr(own, part), str)
    return None if uncounted else story.runs.get(part, 0)


@functools.lru_cache(maxsize=8)
def reference_story(task: Task) -> Story:
    """The reference's story, computed once a process."""
    return write_story(Parts(), task)


def write_story(parts: Parts, task: Task) -> Story:
    """Go on with a prompt with these parts in the engine."""
    runs: dict[str, int] = {}
    counted = parts.replace(
        **{
            name: _counting(getattr(parts, name), name, runs)
            for name in parts.owners()
            if callable(getattr(parts, name))
        }
    )
    if task.write is not None:
        with _engine_checks(), wired(counted):
            ids, text = task.write(counted, task)
        return Story(tuple(ids), text, runs)
    launches: list[Any] = []
    with _engine_checks(), wired(counted), launch_reports.collect(launches):
        llm = LLM(MODEL, parts=counted, **dict(task.options))
        params = SamplingParams(max_tokens=task.max_tokens, **dict(task.sampling))
        output = llm.generate([*task.beside, task.prompt], params, use_tqdm=False)[-1]
    for part, function in (
        ("BLOCK_SUM_CUDA", "block_sum"),
        ("BF16_CUDA", "float_to_bf16|bf16_to_float|load8"),
    ):
        if getattr(parts, part) is not None and not device.is_gpu:
            using = _kernels_that_call(function)
            runs[part] = sum(report.kernel in using for report in launches)
    completion = output.outputs[0]
    return Story(tuple(completion.token_ids), task.prompt + completion.text, runs)


def logit_error(parts: Parts, story: Story) -> float:
    """Relative error of the logits of a story's tokens with these parts, against the reference's."""
    right = _reference_logits(story.ids)
    with _engine_checks(), wired(parts):
        wrong = LLM(MODEL, parts=parts).logits(list(story.ids))
    with np.errstate(invalid="ignore", over="ignore"):  # what a mistake makes of weights can be anything
        off = wrong.astype(np.float64) - right
    return float(np.linalg.norm(off) / np.linalg.norm(right))


def _error(changed: Iterable[str], parts: Parts, story: Story) -> float | None:
    """The error of the logits; None where what changed has no share in them."""
    names = set(changed)
    return None if names and names <= _TEXT_ALONE else logit_error(parts, story)


@functools.lru_cache(maxsize=4)
def _reference_logits(ids: tuple[int, ...]) -> Any:
    """The reference's logits of a story, computed once for all that is compared with it."""
    with _engine_checks():
        return LLM(MODEL).logits(list(ids))


def _engine_checks() -> Any:
    return emulation.checks("fast")


def _counting(part: Any, name: str, runs: dict[str, int]) -> Any:
    """The same part; how often it is called is counted."""
    if isinstance(part, type):
        return _counting_class(part, name, runs)

    @functools.wraps(part)
    def call(*args: Any, **kwargs: Any) -> Any:
        runs[name] = runs.get(name, 0) + 1
        return part(*args, **kwargs)

    return call


def _counting_class(part: type, name: str, runs: dict[str, int]) -> type:
    """A subclass whose public methods are counted together."""

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            runs[name] = runs.get(name, 0) + 1
            return method(self, *args, **kwargs)

        return call

    methods = {
        key: counted(value)
        for key, value in vars(part).items()
        if callable(value) and not key.startswith("_")
    }
    return type(part.__name__, (part,), methods)


@functools.cache
def _kernels_that_call(function: str) -> frozenset[str]:
    """Names of the reference's ``__global__`` functions in whose files a device function is called."""
    calls = re.compile(rf"\b(?:{function})\s*\(")
    found: set[str] = set()
    for name in kernel_source.names():
        text = kernel_source.read(f"{name}.cu")
        if calls.search(text):
            found |= set(
                re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(", text)
            )
    return frozenset(found)


def _same_tokens(one: Story, other: Story) -> int:
    """How many tokens agree from the start."""
    for count, (a, b) in enumerate(zip(one.ids, other.ids, strict=False)):
        if a != b:
            return count
    return min(len(one.ids), len(other.ids))


def _wrong_story(id: str, name: str, own: Parts, task: Task, right: Story) -> WrongStory:
    """The text with one mistake of the lesson in the engine."""
    exercise = exercise_of(id)
    assert isinstance(exercise, Exercise)
    mistake = next(one for one in exercise.mistakes if one.name == name)

    def change() -> Mapping[str, Any]:
        # What it builds on is the learner's, or the solution's as long as that has not passed.
        before = {id: my_engine.answer(id) or solution_cell(id) or "" for id in exercise.builds_on}
        namespace = make_namespace(exercise, mistake.answer, device.cp, before=before)
        return {part: namespace[variable] for part, variable in exercise.makes.items()}

    return _story_with(name, mistake.says, own, change, task, right)


def _story_with(
    name: str,
    says: str,
    own: Parts,
    change: Callable[[], Mapping[str, Any]],
    task: Task,
    right: Story,
) -> WrongStory:
    """The text with some parts exchanged."""
    try:
        changed = change()
        parts = own.replace(**changed)
        story = write_story(parts, task)
        error = _error(changed, parts, right)
        if error == 0 and story.ids != right.ids:
            # The logits are those of the story by itself: what is wrong is in the batch, or in the draw.
            error = None
        return WrongStory(name, says, story.text, _same_tokens(story, right), error, "")
    except Exception as failure:  # a mistake may well stop the engine: that is what it does to the text
        said = str(failure).replace(f"{REPOSITORY}{os.sep}", "")  # a notebook names no folder of the machine
        return WrongStory(name, says, "", 0, float("nan"), f"{type(failure).__name__}: {said}")
