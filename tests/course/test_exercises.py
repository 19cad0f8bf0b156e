"""Every exercise of the course, by discovery: its solution passes, its mistakes are rejected and named, its stub is
refused kindly, and its kernels compile for a card."""

import inspect
import signal
import tracemalloc

import numpy as np
import pytest

from tests.nvrtc import compile_source
from tinyvllm_ref import emulation
from tinyvllm_ref.course import cells
from tinyvllm_ref.course.answers import NotFilledIn, make_namespace
from tinyvllm_ref.course.diagnosis import find_mistake, same_signature
from tinyvllm_ref.course.exercise import CLEAN, Exercise, Prediction
from tinyvllm_ref.course.exercises import lessons
from tinyvllm_ref.course.judging import cases_of, judge, judge_case
from tinyvllm_ref.course.lab import Lab
from tinyvllm_ref.course.lessons import solution_cell, stub_cell
from tinyvllm_ref.course.runner import run_case

EXERCISES = [
    exercise
    for lesson in lessons().values()
    for exercise in lesson.exercises
    if isinstance(exercise, Exercise)
]
PREDICTIONS = [
    exercise
    for lesson in lessons().values()
    for exercise in lesson.exercises
    if isinstance(exercise, Prediction)
]
MISTAKES = [
    (exercise, mistake, answer)
    for exercise in EXERCISES
    for mistake in exercise.mistakes
    for answer in mistake.answers
]


def _id(value):
    return getattr(value, "id", None) or getattr(value, "name", None) or str(value)


each_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=_id)
each_mistake = pytest.mark.parametrize(
    ("exercise", "mistake", "answer"),
    MISTAKES,
    ids=[f"{e.id}-{m.name}-{m.answers.index(a)}" for e, m, a in MISTAKES],
)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    """Nothing of the person who runs the tests takes part."""
    monkeypatch.setenv("TINYVLLM_MY_ENGINE", str(tmp_path / "my_engine"))


def solution(id):
    text = solution_cell(id)
    assert text is not None, f"solutions/ has no cell that begins with # Exercise {id}"
    return text


def answer_of(exercise, source):
    before = {id: solution(id) for id in exercise.builds_on}
    return make_namespace(exercise, source, emulation, before=before)[exercise.answer]


def verdict_of(exercise, source, seed=0):
    return judge(exercise, answer_of(exercise, source), emulation, seed)


@each_exercise
@pytest.mark.parametrize("seed", range(3))
def test_the_solution_passes(exercise, seed):
    verdict = verdict_of(exercise, solution(exercise.id), seed)
    assert verdict.passed, verdict.first_failure
    assert verdict.points == sum(exercise.points.values())


@pytest.mark.slow
@each_exercise
def test_the_solution_passes_under_twenty_seeds(exercise):
    for seed in range(20):
        verdict = verdict_of(exercise, solution(exercise.id), seed)
        assert verdict.passed, (seed, verdict.first_failure)


def state_of_the_process():
    """What a run that fails must not leave behind."""
    return tracemalloc.is_tracing(), signal.getsignal(signal.SIGALRM), emulation.current_mode()


@each_mistake
def test_a_mistake_is_rejected_and_named(exercise, mistake, answer):
    process = state_of_the_process()
    verdict = verdict_of(exercise, answer)
    assert state_of_the_process() == process
    assert not verdict.passed, "the check accepts it"
    assert verdict.points < sum(exercise.points.values())
    before = {id: solution(id) for id in exercise.builds_on}
    found = find_mistake(verdict, before=before)
    assert found is not None, verdict.first_failure
    assert found.name == mistake.name


@pytest.mark.slow
@each_mistake
def test_a_mistake_is_rejected_under_other_seeds(exercise, mistake, answer):
    for seed in (1, 2, 3):
        assert not verdict_of(exercise, answer, seed).passed, seed


@pytest.mark.slow  # each is also named as itself, above
@each_exercise
def test_no_two_mistakes_coincide(exercise):
    answers = [answer_of(exercise, mistake.answer) for mistake in exercise.mistakes]
    pairs = cases_of(exercise, 0)
    results = [
        [judge_case(exercise, answer, case, wanted, emulation) for case, wanted in pairs]
        for answer in answers
    ]
    for i in range(len(results)):
        for j in range(i):
            if all(map(same_signature, results[i], results[j])):
                pytest.fail(
                    f"{exercise.mistakes[i].name!r} and {exercise.mistakes[j].name!r} can not be told apart"
                )


@each_exercise
def test_the_stub_is_refused(exercise):
    stub = stub_cell(exercise.id)
    assert stub is not None
    assert cells.fingerprint(stub) != cells.fingerprint(solution(exercise.id))
    assert cells.outside_names(stub, ["np", "cp", *exercise.uses]) == [] or exercise.builds_on
    try:
        verdict = verdict_of(exercise, stub)
    except NotFilledIn:
        return
    assert not verdict.passed, "the stub passes"
    fault = verdict.first_failure.outcome.fault
    assert fault is None or fault.kind != "CompileException", fault.message


@each_exercise
def test_it_is_made_as_the_guide_says(exercise):
    assert len(exercise.mistakes) >= 3
    assert len({mistake.name for mistake in exercise.mistakes}) == len(exercise.mistakes)
    assert all(mistake.says and mistake.question for mistake in exercise.mistakes)
    assert all((exercise.hints.question, exercise.hints.rule, exercise.hints.code))
    groups = {case.group for case, _ in cases_of(exercise, 0)}
    assert groups == set(exercise.points) - {CLEAN}
    assert all(points > 0 for points in exercise.points.values())
    labels = [case.label for case, _ in cases_of(exercise, 0)]
    assert len(set(labels)) == len(labels)
    assert cases_of(exercise, 0)[0][0].group == next(iter(exercise.points)), (
        "the first case is of the first group"
    )


@each_exercise
def test_its_run_needs_nothing_but_its_arguments(exercise):
    """Where a class is graded the source of `run` goes alone to the process that runs the answer."""
    import textwrap

    source = textwrap.dedent(inspect.getsource(exercise.run))
    namespace = {}
    exec("from __future__ import annotations\n" + source, namespace)
    run = namespace[exercise.run.__name__]
    case, expected = cases_of(exercise, 0)[0]
    outcome = run_case(run, answer_of(exercise, solution(exercise.id)), case, emulation, exercise.seconds)
    assert outcome.fault is None, outcome.fault
    assert set(outcome.outputs) >= set(expected)


class _Recording:
    """The emulation, with every kernel text kept that is given to it."""

    def __init__(self):
        self.sources = []

    def __getattr__(self, name):
        return getattr(emulation, name)

    def RawKernel(self, code, name, options=(), **kwargs):
        self.sources.append((code, tuple(options)))
        return emulation.RawKernel(code, name, options, **kwargs)


@each_exercise
def test_its_kernels_compile_for_a_card(exercise):
    recording = _Recording()
    before = {id: solution(id) for id in exercise.builds_on}
    namespace = make_namespace(exercise, solution(exercise.id), recording, before=before)
    case, _ = cases_of(exercise, 0)[0]
    inputs = {
        key: np.copy(value) if isinstance(value, np.ndarray) else value for key, value in case.inputs.items()
    }
    exercise.run(namespace[exercise.answer], inputs, Lab(recording))
    for code, options in dict.fromkeys(recording.sources):
        for arch in ("compute_75", "compute_90"):
            compiled = compile_source(code, arch, options)
            assert compiled.ok, compiled.log


@pytest.mark.parametrize("exercise", PREDICTIONS, ids=_id)
def test_a_prediction_is_measured(exercise):
    for quantity in exercise.quantities.values():
        assert np.isfinite(float(quantity.measure()))
    text = solution(exercise.id)
    namespace = {"np": np, "cp": emulation}
    said = {}
    namespace["predict"] = lambda id, **numbers: said.update(numbers)
    exec(text, namespace)
    measured = {name: quantity.measure() for name, quantity in exercise.quantities.items()}
    assert {name: float(number) for name, number in said.items()} == pytest.approx(measured, rel=0.05)


def test_there_are_exercises():
    assert EXERCISES
    assert PREDICTIONS
