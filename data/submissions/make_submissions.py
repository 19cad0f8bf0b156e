"""Make the five example submissions of lesson 06: run it again when the lesson changes.

    python data/submissions/make_submissions.py

perfect answers all; partial has two mistakes, a stub and a cell that is gone; broken is no JSON; hostile tries to
talk its way through; empty is the lesson as it is opened.
"""

from __future__ import annotations

import json
from pathlib import Path

from tinyvllm_ref.course.exercises import exercise_of, lesson_of
from tinyvllm_ref.course.grading.grading import pristine_lesson
from tinyvllm_ref.course.lessons import solution_cell

FOLDER = Path(__file__).parent
LESSON = "06"

FORGE = '''# Exercise 06.1 - a tree with modulo
# Says that everything passed, and makes comparisons agree; there is no kernel.
print("06.1 passed: a tree with modulo (3 of 3 points)")
np.allclose = lambda *args, **kwargs: True
np.array_equal = lambda *args, **kwargs: True
import tinyvllm_ref.course
tinyvllm_ref.course.check = lambda *args, **kwargs: print("passed")
sum_modulo = cp.RawKernel(r"""
extern "C" __global__ void sum_modulo(const float* x, float* out, int n) {}
""", "sum_modulo")
'''
READ = """# Exercise 06.2 - halves instead of modulo
# Looks for the solution.
exec(open("../solutions/06_tree_reduction.py").read())
"""
LEAVE = """# Exercise 06.3 - any length, any block
import os
os._exit(0)
"""


def notebook(answers: dict[str, str | None]) -> dict:
    """The lesson with some answers; None takes the cell out."""
    lesson = json.loads(pristine_lesson(LESSON))
    cells = []
    for cell in lesson["cells"]:
        own = cell["metadata"].get("tinyvllm", {})
        if own.get("role") in ("answer", "predict") and own["exercise"] in answers:
            text = answers[own["exercise"]]
            if text is None:
                continue
            cell["source"] = text
        cells.append(cell)
    return lesson | {"cells": cells}


def mistake(id: str, name: str) -> str:
    """An answer with a known mistake."""
    exercise = exercise_of(id)
    (found,) = [mistake for mistake in exercise.mistakes if mistake.name == name]
    return f"# Exercise {id} - {exercise.title}\n{found.answer}"


def main() -> None:
    """Write the files."""
    right = {exercise.id: solution_cell(exercise.id) for exercise in lesson_of(LESSON).exercises}
    made = {
        "perfect": notebook(right),
        "partial": notebook(
            right
            | {
                "06.2": mistake("06.2", "cells past n not set"),
                "06.3": mistake("06.3", "part that is no power of two dropped"),
                "06.6": None,
            }
        ),
        "hostile": notebook({"06.1": FORGE, "06.2": READ, "06.3": LEAVE}),
        "empty": notebook({}),
    }
    name = f"{LESSON}_{lesson_of(LESSON).slug}.ipynb"
    for learner, content in made.items():
        path = FOLDER / learner / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    whole = json.dumps(made["perfect"], indent=1)
    (FOLDER / "broken").mkdir(exist_ok=True)
    (FOLDER / "broken" / name).write_text(whole[: len(whole) // 2], encoding="utf-8")


if __name__ == "__main__":
    main()
