"""``tinyvllm build-lessons --class DIR``: the repository as a class gets it, without what answers the exercises."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from .class_readme import class_readme
from .lessons import build_lessons
from .source import discover

# Folders and files that only an instructor has, or who changes the course. Tests that read golden values go with them.
LEFT_OUT = (".ci/", "benchmarks/", "data/submissions/", "docs/instructors.md", "solutions/", "tests/")
# What stays of them: reports that lessons and pages give as the source of a figure, and what `make bench` runs.
STAYS = (
    "benchmarks/decode_ladder.md",
    "benchmarks/emulation.py",
    "benchmarks/gpu_agreement.md",
    "benchmarks/memory_levels.md",
    "benchmarks/safetensors_open.md",
    "benchmarks/sanitizers.md",
)


def make_class(
    root: Path, folder: Path, say: Callable[[str], None] = print, open_lessons: Iterable[str] = ()
) -> None:
    """Copy what git tracks, without `LEFT_OUT` but for `STAYS`, with a README for learners and lessons freshly made.

    Without its source in ``solutions/``, ``solution("06.2")`` says that the solution is not in this copy.

    Parameters
    ----------
    root : Path
        The repository.
    folder : Path
        Made; must not be there yet, or be empty.
    say : callable
        Given a line at the end.
    open_lessons : iterable of str
        Lessons whose solutions come along all the same, because they are past their due time.

    Raises
    ------
    ValueError
        `root` is no git repository, a tracked file is missing, or `folder` has something in it.
    LessonError
        A source breaks a rule.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--class {folder}: it has something in it; name a folder that is new or empty")
    tracked = _tracked(root)
    missing = [name for name in tracked if not os.path.lexists(root / name)]
    if missing:
        raise ValueError(
            f"{missing[0]} is tracked by git and is not there: `git restore {missing[0]}` brings it back"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and moved there when it is whole.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as work:
        made = Path(work) / folder.name
        made.mkdir()
        for name in tracked:
            _copy(root / name, made / name)
        opened = sorted(set(open_lessons))
        for source in discover(root, opened) if opened else []:
            _copy(source, made / "solutions" / source.name)
        readme = made / "README.md"
        if readme.exists():
            readme.write_text(class_readme(readme.read_text(encoding="utf-8"), opened), encoding="utf-8")
        build_lessons(root, into=made, say=lambda line: None)
        if folder.exists():
            folder.rmdir()
        os.rename(made, folder)
    lessons = len(list((folder / "lessons").glob("*.ipynb")))
    say(f"{folder}: {len(tracked)} files and {lessons} lessons, without {', '.join(LEFT_OUT)}")
    if opened:
        say(f"with the solutions of {', '.join(opened)}")


def _tracked(root: Path) -> list[str]:
    """Names of what is copied. Notebooks of lessons are not: somebody may have worked in them."""
    try:
        done = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise ValueError(f"{root} is not a git repository: what belongs to it is read from git") from None
    names = sorted(set(os.fsdecode(done.stdout).split("\0")) - {""})
    return [
        name
        for name in names
        if (name in STAYS or not name.startswith(LEFT_OUT))
        and not (name.startswith("lessons/") and name.endswith(".ipynb"))
    ]


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        os.symlink(os.readlink(source), target)
    elif source.is_dir():  # a submodule: its files are another repository's
        target.mkdir(exist_ok=True)
    else:
        shutil.copy2(source, target)
