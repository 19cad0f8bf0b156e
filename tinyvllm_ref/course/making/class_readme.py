"""The README of a class's copy: for a learner, without what is an instructor's or an engineer's, and how to hand in."""

from __future__ import annotations

import re

# Sections of the repository's README that are true in the copy as they stand.
KEPT = ("With and without a GPU", "Other ways to set it up", "When something goes wrong")

_BEGINNING = """\
# tinyvllm

A numbered course of Jupyter notebooks in which you build an LLM inference engine, one CUDA kernel at a time, from the
bytes of a weight file to paged, continuously batched generation and a server. A GPU is not needed: your CUDA C++ runs
on the CPU too, with a sanitizer that names the array, the index, the thread and the source line.

```
make lab      # sets up .venv on first use and opens JupyterLab on lessons/00_welcome.ipynb
```

Linux or macOS with Python 3.11 or newer (or [uv](https://docs.astral.sh/uv/)) and make; on Windows, use WSL. A C++
compiler is used if there is one, and otherwise comes with the installation.

## The course

Your first kernel runs after some five minutes. A lesson is one idea, and takes from half an hour to two. Each exercise
has a stub to fill, a check that names what went wrong and often the idea that led there, and three hints. What you pass
is kept in `my_engine/`, and the engine runs it from then on. `make progress` draws the map. {solutions}

"""

_HANDING_IN = """
## Handing in

Save the notebook, then, in this folder:

```
.venv/bin/tinyvllm submit 06 --learner NAME
```

The number is the lesson's (several may stand there), and NAME is what your class calls you. It lists what will be
graded of each exercise, and what is not filled in. It writes `NAME_lesson_06.zip`, which you hand in where your class
does, and beside it a receipt to keep. Your answers are graded on other numbers than the notebook shows, so a check that
passes there is a good sign and no promise.

"""


def class_readme(text: str, opened: list[str]) -> str:
    """The copy's README.

    Parameters
    ----------
    text : str
        The repository's.
    opened : list of str
        Lessons whose solutions are in the copy.
    """
    solutions = "The solutions are not in this copy"
    solutions += f", but for those of lesson {', '.join(opened)}, in `solutions/`." if opened else "."
    table = re.findall(r"^\|.*\n", _section(text, "The course"), re.MULTILINE)
    kept = [f"## {name}\n{body}" for name in KEPT if (body := _section(text, name))]
    return (
        _BEGINNING.format(solutions=solutions) + "".join(table) + _HANDING_IN + "".join(kept).rstrip() + "\n"
    )


def _section(text: str, name: str) -> str:
    """What stands under a heading, up to the next one; empty where there is none."""
    found = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""
