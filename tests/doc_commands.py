"""The commands of a Markdown page: taken out of its fenced blocks and its running text, and understood by rule.

A block is commands, a Python script, data, or what the block in front of it prints; what is none of these is an error,
and so is a command of a program that :data:`PROGRAMS` does not know. ``test_docs_commands.py`` executes them.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from packaging.requirements import Requirement

from tinyvllm_ref.cli import app

REPOSITORY = Path(__file__).parents[1]

SHELL = ("sh", "bash", "shell", "console", "zsh")
PYTHON = ("python", "py")
DATA: dict[str, Callable[[str], Any]] = {"toml": tomllib.loads, "json": json.loads}
TEXT = ("text", "csv", "mermaid", "cpp", "c", "cuda", "diff", "markdown", "yaml", "html")

# Commands that are only parsed here: why, and what executes them. Each is still taken apart and its parts are checked.
STAND_INS = {
    "make lab": "it opens a browser: course/test_browser.py goes through it",
    "make notebook": "it opens a browser: course/test_browser.py goes through it",
    "make setup": "it installs from the network: test_setup.py, test_rehearsal.py",
    "make test": "it is what runs this",
    "make test-slow": "it takes an hour",
    "make lint": "make test runs it first",
    "make bench": "it takes minutes",
    "make grade": "it takes minutes: course/grading/",
    "make solutions": "it writes to solutions/: course/test_build.py",
    "make lessons": "it writes to lessons/: course/test_build.py",
    "make progress": "tinyvllm progress, whose output is the person's own: course/test_checking.py",
    "make doctor": "tinyvllm doctor, which runs as itself",
    "make clean": "it deletes the environment that this runs in",
    "tinyvllm grade": "it takes minutes: course/grading/",
    "tinyvllm submit": "it needs a learner's notebooks: course/grading/",
    "tinyvllm run-solutions": "it writes to solutions/: course/test_build.py",
    "tinyvllm build-lessons": "it writes to lessons/: course/test_build.py, course/grading/test_class_copy.py",
    "tinyvllm serve": "it does not end: it is started for the requests of the page",
    "pip install": "it needs the network: test_setup.py resolves the requirements",
    "uv": "it needs the network, and is not on every machine",
    "conda": "it needs the network, and is not on every machine: test_setup.py",
    "git clone": "it needs the network",
    "pytest": "the notebooks' tests run it; here its files and options are tried by --collect-only",
    "jupyter lab": "it does not end: course/test_browser.py",
    "code": "an editor",
    "sudo": "it changes the machine",
    "a download": "it needs the network",
}
_PACKAGE_MANAGERS = {"apt-get", "apt", "dnf", "pacman", "apk", "brew", "wsl", "xcode-select"}
_HOSTS = {"astral.sh"}  # that a page may download from, beside this machine
_PLAIN = {
    "cd",
    "export",
    "echo",
    "ls",
    "cat",
    "head",
    "tail",
    "grep",
    "jq",
    "mkdir",
    "cp",
    "unzip",
    "wc",
    "sleep",
}
LOCAL = re.compile(
    r"https?://(?:localhost|127\.0\.0\.1|0\.0\.0\.0)(?::\d+)?|\b(?:localhost|127\.0\.0\.1):\d+"
)


class NotUnderstood(Exception):
    """A block or a command that no rule knows; the message says what to do."""


@dataclass(frozen=True)
class Block:
    """A fenced block: the page, the line of its fence, the word after the fence, the text."""

    page: Path
    line: int
    label: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


@dataclass
class Script:
    """What a block of commands comes to.

    Attributes
    ----------
    lines : list of str
        Bash, where what is only parsed has become a no-op.
    stand_ins : list of str
        What was only parsed.
    output : list of str
        Lines of a console that the commands are to print.
    """

    lines: list[str] = field(default_factory=list)
    stand_ins: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)

    @property
    def runs_something(self) -> bool:
        return any(not line.startswith(":") for line in self.lines)

    @property
    def asks_a_server(self) -> bool:
        return any(LOCAL.search(line) for line in self.lines)


# ---------------- pages
def pages() -> list[Path]:
    """README.md and docs/*.md."""
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, indented ones of lists among them."""
    found: list[Block] = []
    fence, lines, start, label = "", [], 0, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        mark = re.match(r"\s*(`{3,}|~{3,})\s*([\w+-]*)", line)
        if fence and mark and mark[1].startswith(fence) and not mark[2]:
            found.append(Block(page, start, label, _without_indent(lines)))
            fence = ""
        elif fence:
            lines.append(line)
        elif mark:
            fence, lines, start, label = mark[1], [], number, mark[2].lower()
    if fence:
        raise NotUnderstood(f"{page.name}:{start}: the block does not end")
    return found


def _without_indent(lines: Sequence[str]) -> str:
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[indent:] for line in lines)


def inline_commands(page: Path) -> list[tuple[int, str]]:
    """Commands of `tinyvllm`, make and pip in the running text, with their lines."""
    text = re.sub(r"^\s*```.*?^\s*```", lambda m: "\n" * m[0].count("\n"), page.read_text(encoding="utf-8"),
                  flags=re.MULTILINE | re.DOTALL)  # fmt: skip
    found = []
    for match in re.finditer(r"(?<!`)`([^`\n]+)`(?!`)", text):
        if re.match(r"(\S*bin/)?(tinyvllm|make|pip|uv) \S", match[1]):
            found.append((text[: match.start()].count("\n") + 1, match[1]))
    return found


# Programs of the environment: a shell finds them where it is active, and in JupyterLab's terminal, not elsewhere.
_OF_THE_ENVIRONMENT = ("tinyvllm", "python", "python3", "pytest", "jupyter", "ruff", "mypy", "jupytext")


def not_found_in_a_shell(page: Path) -> list[str]:
    """Commands of a page that a shell of one's own would not find: those without ``.venv/bin/`` in front.

    They may be bare below a line that activates an environment, and in a paragraph on JupyterLab's terminal.
    """
    found = []
    for block in blocks(page):
        if kind_of(block) == "shell":
            is_console = bool(re.search(r"^\$ ", block.text, re.MULTILINE))
            for line in logical_lines(block.text, is_console, []):
                if re.search(r"\b(activate|conda|mamba)\b", line):
                    break
                if any(_program_word(words) in _OF_THE_ENVIRONMENT for words in simple_commands(line)):
                    found.append(f"{block.name}: {line}")
    return found + [f"{page.name}: {command}" for command in bare_in_text(page.read_text(encoding="utf-8"))]


def _program_word(words: Sequence[str]) -> str:
    return next((word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word, re.DOTALL)), "")


def bare_in_text(markdown: str) -> list[str]:
    """Commands in backticks in running text, without ``.venv/bin/`` and not in a paragraph on JupyterLab's terminal."""
    text = re.sub(r"^\s*```.*?^\s*```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    names = "|".join(_OF_THE_ENVIRONMENT)
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\||- |\d+\. )", text):
        if not re.search(r"JupyterLab's terminal|terminal of JupyterLab", paragraph.replace("\n", " ")):
            found += re.findall(rf"(?<!`)`!?((?:{names}) [^`\n]+)`(?!`)", paragraph)
    return found


def kind_of(block: Block) -> str:
    """``"shell"``, ``"python"``, ``"data"``, ``"text"``; ``"output"`` for a plain block that holds no command."""
    if block.label in SHELL:
        return "shell"
    if block.label in PYTHON:
        return "python"
    if block.label in DATA:
        return "data"
    if block.label in TEXT:
        return "text"
    if block.label:
        raise NotUnderstood(f"{block.name}: a block of {block.label!r} is not known")
    words = block.text.split()
    first = next((word for word in words if word != "$" and not re.match(r"[A-Z_]+=", word)), "")
    return "shell" if _program(first) in PROGRAMS or words[:1] == ["$"] else "output"


# ---------------- lines of commands
def understand(block: Block) -> Script:
    """The commands of a block, each of which a rule knows.

    Raises
    ------
    NotUnderstood
        A command is unknown, or names an option, a file, a target or an extra that there is not.
    """
    script = Script()
    is_console = bool(re.search(r"^\$ ", block.text, re.MULTILINE))
    for line in logical_lines(block.text, is_console, script.output):
        try:
            reasons = [reason for command in simple_commands(line) if (reason := examine(command))]
        except NotUnderstood as error:
            raise NotUnderstood(f"{block.name}: `{line}`: {error}") from None
        if reasons:
            script.stand_ins += reasons
            script.lines.append(_no_op(line))
        else:
            script.lines.append(line)
    return script


def _no_op(line: str) -> str:
    """A line that is only parsed, for the shell: a clone becomes a link to this checkout."""
    match = re.search(r"git clone\s+(<[^>]*>|\S+)(?:\s+([\w./-]+))?", line)
    if match is None:
        return ": only parsed"
    is_address = "/" in match[1] and not match[1].startswith("<")
    name = match[2] or (Path(match[1].strip("\"'")).name.removesuffix(".git") if is_address else "tinyvllm")
    rest = line[match.end() :].lstrip(" &;")
    return f'ln -sfn "$CHECKOUT" {shlex.quote(name)}' + (f" && {rest}" if rest.startswith("cd ") else "")


def logical_lines(text: str, is_console: bool, output: list[str]) -> Iterator[str]:
    """Lines with their continuations, open quotes among them; of a console those after ``$``, the rest is output."""
    pending = ""
    for line in text.splitlines():
        if is_console and not pending:
            if not line.startswith("$ "):
                output.append(line)
                continue
            line = line[2:]
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quote is still open
            pending += "\n"
            continue
        if words:
            yield pending.strip()
        pending = ""
    if pending.strip():
        raise NotUnderstood(f"`{pending.strip()}` does not end")


def simple_commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a line, without redirections and comments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    skip = False
    for token in lexer:
        if token in ("&&", "||", ";", "|", "&"):
            if words:
                yield words
            words = []
        elif set(token) <= set("<>&") and token:
            skip = True
        elif skip:
            skip = False
        else:
            words.append(token)
    if words:
        yield words


def _program(word: str) -> str:
    """``tinyvllm`` of ``.venv/bin/tinyvllm``."""
    name = Path(word).name if "/" in word else word
    return "python" if re.fullmatch(r"python3?(\.\d+)?", name) else name


def examine(words: Sequence[str]) -> str:
    """Check one command; "" where it can be executed here, else why not.

    Raises
    ------
    NotUnderstood
        As :func:`understand` says.
    """
    words = list(words)
    while words and (match := re.fullmatch(r"([A-Z_]+)=(.*)", words[0], re.DOTALL)):
        _setting(match[1], match[2])
        words.pop(0)
    if not words:
        return ""
    program = _program(words[0])
    if program not in PROGRAMS:
        raise NotUnderstood(f"no rule knows the program {program!r}; add one to tests/doc_commands.py")
    return PROGRAMS[program](words[1:])


def _setting(name: str, value: str) -> None:
    if name.startswith("TINYVLLM_") and name not in known_settings():
        raise NotUnderstood(f"{name} is no setting of the package")


def known_settings() -> set[str]:
    """The environment variables that the package reads."""
    texts = (path.read_text(encoding="utf-8") for path in (REPOSITORY / "tinyvllm_ref").rglob("*.py"))
    return {name for text in texts for name in re.findall(r"TINYVLLM_[A-Z_]+", text)}


# ---------------- programs
def _tinyvllm(arguments: Sequence[str]) -> str:
    command = tinyvllm_command(arguments)
    try:
        command.make_context(arguments[0], list(arguments[1:]))
    except typer.Exit:  # --help
        return ""
    except Exception as error:  # click's UsageError; which click, only typer knows
        raise NotUnderstood(str(getattr(error, "message", "") or error)) from None
    if arguments[0] == "build-lessons" and "--class" in arguments and "--course" not in arguments:
        return ""  # it writes to the folder that is named
    return STAND_INS.get(f"tinyvllm {arguments[0]}", "")


def tinyvllm_command(arguments: Sequence[str]) -> Any:
    """The click command of ``tinyvllm ...``."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    if not arguments or arguments[0] not in commands:
        raise NotUnderstood(f"tinyvllm has no command {' '.join(arguments[:1])!r}")
    return commands[arguments[0]]


def tinyvllm_commands() -> list[str]:
    """The names of tinyvllm's commands."""
    return sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def make_targets() -> set[str]:
    """The targets that the Makefile declares for people."""
    text = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)[0].split())


def _make(arguments: Sequence[str]) -> str:
    targets = [word for word in arguments if "=" not in word]
    for target in targets:
        if target not in make_targets():
            raise NotUnderstood(f"the Makefile has no target {target!r}")
    variables = [word for word in arguments if "=" in word]
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for variable in variables:
        if f"$({variable.split('=')[0]})" not in makefile:
            raise NotUnderstood(f"the Makefile has no variable {variable.split('=')[0]}")
    done = subprocess.run(
        ["make", "-n", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        raise NotUnderstood(f"make -n says: {done.stderr.strip()}")
    return next((STAND_INS[f"make {target}"] for target in targets if f"make {target}" in STAND_INS), "")


def _pip(arguments: Sequence[str]) -> str:
    if list(arguments[:1]) != ["install"]:
        raise NotUnderstood(f"pip {' '.join(arguments[:1])} is not known here")
    queue = list(arguments[1:])
    while queue:
        word = queue.pop(0)
        if word in ("-r", "--requirement"):
            _file(queue.pop(0))
        elif word not in ("-e", "--editable", "-q", "--quiet", "-U", "--upgrade", "--no-deps"):
            requirement(word)
    return STAND_INS["pip install"]


def requirement(text: str) -> None:
    """Check what pip is to install: this project with extras that it has, or what it declares."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    local = re.fullmatch(r"(?P<path>[^\[\]=<>]*[./][^\[\]=<>]*|tinyvllm)(\[(?P<extras>[\w, -]+)\])?", text)
    if local and ":" not in text:
        named = {extra.strip() for extra in (local["extras"] or "").split(",") if extra.strip()}
    else:
        wanted = Requirement(text)
        lines = itertools.chain(project["dependencies"], *extras.values())
        declared = {Requirement(line).name for line in lines}
        if wanted.name not in declared | {project["name"]}:
            raise NotUnderstood(f"{wanted.name} is nothing that pyproject.toml declares")
        named = wanted.extras if wanted.name == project["name"] else set()
    if named - set(extras):
        raise NotUnderstood(f"there is no extra {', '.join(sorted(named - set(extras)))}")


def _uv(arguments: Sequence[str]) -> str:
    words = list(arguments)
    if words[:1] == ["pip"]:
        _pip([word for word in words[1:] if word != "--system"])
    elif words[:1] in (["sync"], ["run"]):
        extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        rest = words[1:]
        while rest and rest[0].startswith("-"):
            option = rest.pop(0)
            if option == "--extra" and (extra := rest.pop(0)) not in extras:
                raise NotUnderstood(f"there is no extra {extra}")
            if option in ("--with", "--python", "-p"):
                rest.pop(0)
            elif option not in ("--extra", "--all-extras", "--frozen", "--no-sync"):
                raise NotUnderstood(f"uv's option {option} is not known here")
        if words[0] == "run":
            examine(rest)
    elif words[:1] not in (["venv"], ["python"]):
        raise NotUnderstood(f"uv {' '.join(words[:1])} is not known here")
    return STAND_INS["uv"]


def _conda(arguments: Sequence[str]) -> str:
    environment = (REPOSITORY / "environment.yml").read_text(encoding="utf-8")
    words = list(arguments)
    if words[:2] in (["env", "create"], ["env", "update"]) and "-f" in words:
        _file(words[words.index("-f") + 1])
    elif words[:1] == ["activate"] and len(words) == 2:
        if f"\nname: {words[1]}\n" not in environment:
            raise NotUnderstood(f"environment.yml does not make an environment {words[1]!r}")
    else:
        raise NotUnderstood(f"conda {' '.join(words)} is not known here")
    return STAND_INS["conda"]


def _git(arguments: Sequence[str]) -> str:
    if list(arguments[:1]) != ["clone"]:
        raise NotUnderstood(f"git {' '.join(arguments[:1])} is not known here")
    return STAND_INS["git clone"]


def _pytest(arguments: Sequence[str]) -> str:
    for word in arguments:
        if "/" in word and not word.startswith("-"):
            _file(word.split("::")[0])
    return ""  # a wrapper adds --collect-only


def _python(arguments: Sequence[str]) -> str:
    words = list(arguments)
    if words[:1] == ["-m"] and words[1] in ("tinyvllm_ref", "pip", "pytest"):
        return examine(["tinyvllm" if words[1] == "tinyvllm_ref" else words[1], *words[2:]])
    if words[:2] == ["-m", "venv"] or words[:1] == ["-c"]:
        return "" if words[0] == "-c" else STAND_INS["pip install"]
    if words and words[0].startswith("my_engine/"):  # the capstone writes it there
        _file(words[0].replace("my_engine/", "tinyvllm_ref/course/given/", 1))
        return "it needs a finished course: course/test_capstone.py runs it"
    if words and words[0].endswith(".py"):
        compile(_file(words[0]).read_text(encoding="utf-8"), words[0], "exec")
        return "it takes minutes, or a card: its file is there and compiles"
    raise NotUnderstood(f"python {' '.join(words[:2])} is not known here")


def _jupyter(arguments: Sequence[str]) -> str:
    if not arguments or arguments[0] not in ("lab", "notebook"):
        raise NotUnderstood(f"jupyter {' '.join(arguments[:1])} is not known here")
    for word in arguments[1:]:
        if not word.startswith("-"):
            _file(word)
    return STAND_INS["jupyter lab"]


def _curl(arguments: Sequence[str]) -> str:
    addresses = [word for word in arguments if re.match(r"\w+://|localhost|127\.", word)]
    if not addresses:
        raise NotUnderstood("curl is given no address")
    for address in addresses:
        if LOCAL.match(address):
            continue
        host = re.match(r"https://([\w.-]+)/", address)
        if host is None or host[1] not in _HOSTS:
            raise NotUnderstood(
                f"{address} is neither this machine (with http://) nor a host that pages may name"
            )
        return STAND_INS["a download"]
    data = [arguments[k + 1] for k, word in enumerate(arguments[:-1]) if word in ("-d", "--data", "--json")]
    for body in data:
        json.loads(body)
    return ""


def _source(arguments: Sequence[str]) -> str:
    if list(arguments) != [".venv/bin/activate"]:
        raise NotUnderstood(
            f"{' '.join(arguments)} is not the environment that `make` makes, .venv/bin/activate"
        )
    return "the environment is the one that this runs in"


def _file(name: str) -> Path:
    path = REPOSITORY / name
    if not path.exists():
        raise NotUnderstood(f"there is no {name}")
    return path


def _changes_the_machine(arguments: Sequence[str]) -> str:
    if not arguments:
        raise NotUnderstood("what is to be installed is not said")
    return STAND_INS["sudo"]


def _sudo(arguments: Sequence[str]) -> str:
    if not arguments or arguments[0] not in _PACKAGE_MANAGERS:
        raise NotUnderstood(f"sudo {' '.join(arguments)} is not a package manager's")
    return STAND_INS["sudo"]


def _as_it_is(_: Sequence[str]) -> str:
    return ""


PROGRAMS: dict[str, Callable[[Sequence[str]], str]] = {
    "tinyvllm": _tinyvllm,
    "make": _make,
    "pip": _pip,
    "uv": _uv,
    "conda": _conda,
    "mamba": _conda,
    "git": _git,
    "pytest": _pytest,
    "python": _python,
    "jupyter": _jupyter,
    "curl": _curl,
    "source": _source,
    ".": _source,
    "sudo": _sudo,
    "sh": lambda arguments: STAND_INS["a download"],  # behind a pipe from a download
    "code": lambda arguments: STAND_INS["code"],
    **dict.fromkeys(_PACKAGE_MANAGERS, _changes_the_machine),
    **dict.fromkeys(_PLAIN, _as_it_is),
}


def check_inline(command: str) -> None:
    """A command in the running text, where arguments may be left out: its name, target and options exist.

    Raises
    ------
    NotUnderstood
        One does not.
    """
    words = shlex.split(re.sub(r"[\[\]|]", " ", command), comments=True)
    program, rest = _program(words[0]), words[1:]
    if program == "tinyvllm":
        options = {name for one in tinyvllm_command(rest).params for name in (*one.opts, *one.secondary_opts)}
        for word in rest[1:]:
            if word.startswith("--") and word.split("=")[0] not in options | {"--help"}:
                raise NotUnderstood(f"tinyvllm {rest[0]} has no option {word}")
    elif program == "make":
        for word in rest:
            if "=" not in word and word not in make_targets():
                raise NotUnderstood(f"the Makefile has no target {word!r}")
    else:
        examine(shlex.split(command, comments=True))


def matches(expected: Sequence[str], printed: str) -> str:
    """The first line of `expected` that is not in `printed`, in order; "" if all are. ``...`` stands for anything."""
    lines = printed.splitlines()
    at = 0
    for line in expected:
        if not line.strip() or line.strip() == "...":
            continue
        found = next((k for k in range(at, len(lines)) if line.rstrip() in lines[k]), None)
        if found is None:
            return line
        at = found + 1
    return ""
