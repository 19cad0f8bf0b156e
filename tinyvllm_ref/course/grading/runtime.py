"""What a contained process may import of this project: copies of a few files, in folders made for one grading.

The `runner` tree has the emulation and the modules that run an answer; where an exercise uses earlier parts that are
Python, also the files that these need. The `notebook` tree is for nbval: all that a lesson imports, the lessons and
the data, and no solutions. Neither has this folder's judging.
"""

from __future__ import annotations

import ast
import atexit
import compileall
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...checkpoint.names import REPOSITORY

PACKAGE = Path(__file__).resolve().parents[2]

_ALWAYS = (
    "__init__.py",
    "device.py",
    "installing.py",
    "course/__init__.py",
    "course/cells.py",
    "course/exercise.py",
    "course/kinds.py",
    "course/lab.py",
    "course/runner.py",
    "course/grading/__init__.py",
    "course/grading/limits.py",
    "course/grading/runner_process.py",
    "course/grading/wire.py",
)
_MADE = "TINYVLLM_GRADING_MADE"  # where the process that started this one keeps what it made
# Not even where something else would import it.
_NEVER = ("course/exercises/", "course/grading/")


@functools.cache
def _base() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tinyvllm-grading-"))
    folder.chmod(0o755)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def runner_tree(modules: frozenset[str] = frozenset()) -> Path:
    """A folder with ``tinyvllm_ref``, as a runner gets it.

    Parameters
    ----------
    modules : frozenset of str
        Further modules, such as ``"tinyvllm_ref.kernels.rms_norm"``; what they import comes with them.
    """
    files = {name for name in _ALWAYS} | {
        str(path.relative_to(PACKAGE)) for path in (PACKAGE / "emulation").rglob("*") if _is_source(path)
    }
    return _copy(files | needed_files(modules), "runner")


@functools.cache
def notebook_tree() -> Path:
    """A folder with ``tinyvllm_ref``, ``lessons`` and ``data``, as a notebook's kernel gets it under nbval."""
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*") if _is_source(path)}
    tree = _copy({name for name in files if name not in ("course/grading/judge.py",)}, "notebook")
    for name in ("lessons", "data"):
        if (REPOSITORY / name).is_dir():
            shutil.copytree(
                REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("submissions", ".*")
            )
    _open(tree)
    return tree


@functools.cache
def runner_seed() -> Path:
    """What a runner's home begins with: the emulation's own runtime, compiled."""
    return _seed("runner-seed", "from tinyvllm_ref.course.runner import warm_up; warm_up()")


@functools.cache
def notebook_seed() -> Path:
    """What a notebook's home begins with: also the reference's kernels, and matplotlib's list of fonts."""
    write_a_story = """
from tinyvllm_ref.course.runner import warm_up
warm_up()
from tinyvllm_ref import LLM, SamplingParams
LLM("tiny-stories").generate(["Once"], SamplingParams(max_tokens=2, temperature=0.0))
import matplotlib.font_manager
"""
    return _seed("notebook-seed", write_a_story)


@contextmanager
def shared_with_children(notebooks: bool) -> Iterator[None]:
    """Let the processes that this one starts take the seeds that it made, for each takes seconds to make.

    Parameters
    ----------
    notebooks : bool
        Whether they run notebooks.
    """
    runner_seed()
    if notebooks:
        notebook_seed()
    os.environ[_MADE] = str(_base())
    try:
        yield
    finally:
        del os.environ[_MADE]


def _seed(name: str, code: str) -> Path:
    """A home that this code leaves; it is the project's own and no learner's."""
    made = os.environ.get(_MADE)
    if made and (Path(made) / name).is_dir():
        return Path(made) / name
    home = _base() / name
    home.mkdir()
    environment = {**os.environ, "TINYVLLM_HOME": str(home), "TINYVLLM_MY_ENGINE": str(home / "none")}
    environment |= {
        "TINYVLLM_DEVICE": "cpu",
        "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *filter(None, sys.path)]),
        "MPLCONFIGDIR": str(home),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ValueError(f"the emulation does not start here: {_error_of(done.stderr)}")
    _open(home)
    return home


def _error_of(said: str) -> str:
    """The error at the end of a traceback, without the traceback."""
    lines = said.strip().split("\n")
    begin = max(
        (k for k, line in enumerate(lines) if re.match(r"[\w.]+(Error|NotFound|Exception)\b", line)),
        default=0,
    )
    return "\n".join(lines[begin:])[:1000]


@functools.cache
def version() -> str:
    """A hash of the code that grades, but for the exercises, whose own text is hashed by each."""
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted(PACKAGE.rglob("*")):
        name = path.relative_to(PACKAGE).as_posix()
        if _is_source(path) and not name.startswith("course/exercises/lesson_"):
            digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def needed_files(modules: Iterable[str]) -> set[str]:
    """The files of this project that modules need, by their imports; kernels bring their CUDA files."""
    wanted, found = list(modules), set[str]()
    while wanted:
        path = _file_of(wanted.pop())
        if path is None or (name := path.relative_to(PACKAGE).as_posix()) in found:
            continue
        if name.startswith(_NEVER):
            continue
        found.add(name)
        wanted += _imports(path)
        if name.startswith("kernels/") and path.with_suffix(".cu").exists():
            found.add(str(Path(name).with_suffix(".cu")))
    if any(name.startswith("kernels/") for name in found):
        found |= {f"kernels/{path.name}" for path in (PACKAGE / "kernels").glob("*.cuh")}
    for name in list(found):  # a module needs its packages
        found |= {f"{parent}/__init__.py" for parent in Path(name).parents if str(parent) != "."}
    return {name for name in found if (PACKAGE / name).exists()}


def _imports(path: Path) -> list[str]:
    """Modules of this project that a file imports, anywhere in it."""
    return imports_of(path.read_text(encoding="utf-8"), _module_of(path), path.name == "__init__.py")


def imports_of(source: str, module: str = "", is_package: bool = False) -> list[str]:
    """Modules of this project that a source imports, those inside of functions too."""
    package = module if is_package else module.rpartition(".")[0]
    found = []
    for node in _walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return [name for name in found if name == "tinyvllm_ref" or name.startswith("tinyvllm_ref.")]


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING:``, which never run."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack += node.orelse
        else:
            stack += ast.iter_child_nodes(node)


def _file_of(module: str) -> Path | None:
    place = PACKAGE.joinpath(*module.split(".")[1:])
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file() and PACKAGE in path.parents:
            return path
    return None


def _module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so")


def _copy(files: Iterable[str], name: str) -> Path:
    tree = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_base()))
    for file in files:
        target = tree / "tinyvllm_ref" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / file, target)
    compileall.compile_dir(tree, quiet=2)  # once, and not in each of the processes that may not write there
    _open(tree)
    return tree


def _open(tree: Path) -> None:
    """Everyone may read it: the runner may be another user."""
    for path in [tree, *tree.rglob("*")]:
        path.chmod(0o755 if path.is_dir() or path.suffix == ".so" else 0o644)
