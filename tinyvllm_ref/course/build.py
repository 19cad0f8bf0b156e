"""How notebooks are made: one hand-edited source a lesson, from which both of its notebooks come.

::

    solutions/06_tree_reduction.py      the source: Jupytext's percent format, edited by hand
    solutions/06_tree_reduction.ipynb   `tinyvllm run-solutions`: the same cells, executed, with outputs
    lessons/06_tree_reduction.ipynb     `tinyvllm build-lessons`: stubs for answers, no outputs

Never ``jupytext --sync`` or ``--update``: they can take the notebook's side.

**Cells.** ``# %%`` begins a code cell, ``# %% [markdown]`` a text cell, whose lines are comments. Metadata follows
on the same line: ``# %% tags=["nbval-ignore-output"]``, ``# %% [markdown] jupyter={"source_hidden": true}``. The
file is valid Python throughout: a magic is written as a comment that begins its line, ``# %matplotlib inline`` or
``# !ls``, and is a magic in the notebooks. (Jupytext would also take ``# cp is CuPy`` for the shell's ``cp``; here
such comments stay comments.)

**Exercises.** An answer cell begins with ``# Exercise 06.2 - sum a block with a tree`` and has at least one region
(:mod:`tinyvllm_ref.course.regions`). Below it, before the next answer, stands the cell that calls
``check("06.2", block_sum)``. A prediction is one cell: its first line is the same comment, it has a region, and it
calls ``predict("06.4", ...)``.

**Tags.** ``nbval-ignore-output``: the output differs from run to run or from machine to machine, and is not
compared. Cells that call ``measure``, ``show``, ``show_engine``, ``progress`` or ``generate`` must have it.
``solution-only``: the cell is left out of the lesson. ``raises-exception``: the cell is to raise.

**Metadata.** Each cell that belongs to an exercise says so: ``metadata.tinyvllm = {"exercise": "06.2", "role":
"answer"}``; the roles are ``answer`` and the names in :data:`~tinyvllm_ref.course.making.identity.ROLES`. A lesson's
cells also have ``sha256`` there, of their text as made: by it `build-lessons` sees what a learner changed. Both
notebooks have ``metadata.tinyvllm.source_sha256``, the hash of the .py that they were made from, and a lesson has
``metadata.tinyvllm.stubs``, by which a check tells a stub from an answer where there is no source.

**Ids.** A cell's id comes from what it is and not from where it stands: ``exercise-06-2``, ``check-06-2``, else
its first line, such as ``a-tree-of-sums``; equal ones are numbered. So a change in one cell leaves the other ids as
they are, and a cell has the same id in both notebooks.

**Outputs.** A solution's notebook must be the same whenever and wherever it is made: times and widgets are
stripped, and `run-solutions` fails on any error, on anything on stderr, on an address in memory in a compared
output, and on the name of a folder of this machine anywhere.
"""

from __future__ import annotations

from .making.lessons import build_lessons, check_lessons
from .making.restyle import restyle
from .making.solutions import check_solutions, run_solutions
from .making.source import Cell, Lesson, LessonError, Problem, discover, read

__all__ = [
    "Cell",
    "Lesson",
    "LessonError",
    "Problem",
    "build_lessons",
    "check_lessons",
    "check_solutions",
    "discover",
    "read",
    "restyle",
    "run_solutions",
]
