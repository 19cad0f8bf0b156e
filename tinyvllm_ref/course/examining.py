"""``examine``: what the checks of the emulation find in an answer as it stands, with nothing counted or kept.

It runs in the emulation on a machine with a card as well: there a fault would end the process's CUDA context, and say
less. What works on the engine's own arrays runs where those are.
"""

from __future__ import annotations

from dataclasses import replace

from tinyvllm_ref import device, emulation

from . import cells, notebook
from .answers import make_namespace
from .checking import SEED, emulated_answer, report_of_error, report_of_verdict
from .exercise import Exercise
from .exercises import exercise_of
from .judging import judge
from .runner import time_limit


def examine(id: str) -> None:
    """Show what is wrong with the answer cell of an exercise as it was last run, be it still the stub.

    Parameters
    ----------
    id : str
        Such as ``"08.1"``.
    """
    exercise = exercise_of(id)
    if not isinstance(exercise, Exercise):
        raise TypeError(f"{id} asks for a prediction; there is nothing to examine")
    cells.install()
    source = cells.recorded(id)
    if source is None:
        print(f"nothing to examine yet: no cell that begins with `# Exercise {id}` has run")
        return
    try:
        with time_limit(exercise.seconds):
            answer, cp = emulated_answer(exercise, source), emulation
            if answer is None:
                answer, cp = make_namespace(exercise, source, device.cp)[exercise.answer], device.cp
        verdict = judge(exercise, answer, cp, SEED)
    except Exception as error:
        notebook.display(replace(report_of_error(exercise, error), next_step=""))
        return
    if verdict.passed:
        print(f"{id} examined: nothing found in {len(verdict.results)} cases")
        return
    notebook.display(replace(report_of_verdict(verdict, None), groups=(), next_step=""))
