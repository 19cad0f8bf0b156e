"""The ``tinyvllm`` command. What a command needs is imported when it runs, so that the others start at once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from .llm import LLM
    from .sampling_params import SamplingParams

DEFAULT_MODEL = "tiny-stories"
DEFAULT_CHAT_MODEL = "smollm2-135m-instruct"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="tinyvllm: an LLM inference engine to read, to use and to learn from.",
)

_A_MODEL = "tiny-stories, a name that `tinyvllm fetch` knows, or a folder (./NAME)."
Model = Annotated[str, typer.Option("--model", "-m", help=_A_MODEL)]
# A command without a prompt takes its model as the first word as well; -m means the same in all of them.
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_A_MODEL, show_default=False)]
ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="The same as MODEL.", show_default=False)
]
MaxTokens = Annotated[int, typer.Option(help="The most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the most probable token.")]
TopP = Annotated[float, typer.Option(help="Keep the most probable tokens up to this share.")]
Seed = Annotated[
    int | None, typer.Option(help="The same seed gives the same text; the default is a fixed one.")
]
Numbers = Annotated[list[str] | None, typer.Argument(help="Lessons, such as 06; all by default.")]
Root = Annotated[
    Path | None, typer.Option(help="The folder that has solutions/ and lessons/.", show_default=False)
]
Mine = Annotated[bool, typer.Option("--mine", help="Use the parts in my_engine/.")]


@app.callback()
def _root() -> None:
    """Commands come below; this keeps them named even while there is only one."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on with.")],
    model: Model = DEFAULT_MODEL,
    max_tokens: MaxTokens = 200,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    mine: Mine = False,
) -> None:
    """Go on with a text; it is printed as it comes."""
    with _plain_errors():
        params = _params(max_tokens, temperature, top_p, seed)
        pieces = _load(model, mine).stream(prompt, params)
        _print_pieces([prompt])
        _print_pieces(pieces)
        typer.echo()


@app.command()
def chat(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help=_A_MODEL, show_default=DEFAULT_CHAT_MODEL)
    ] = None,
    same_model: ModelOption = None,
    system: Annotated[str, typer.Option(help="A first message that tells the model how to be.")] = "",
    max_tokens: MaxTokens = 400,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    mine: Mine = False,
) -> None:
    """Talk with a model. An empty line or Ctrl-D ends it."""
    with _plain_errors():
        params = _params(max_tokens, temperature, top_p, seed)
        llm = _load(_one_model(model, same_model) or DEFAULT_CHAT_MODEL, mine)
        messages = [{"role": "system", "content": system}] if system else []
        for line in _questions():
            messages.append({"role": "user", "content": line})
            answer = _print_pieces(llm.stream(messages, params))
            messages.append({"role": "assistant", "content": answer})
            typer.echo()


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m-instruct or llama-3.2-1b-instruct.")],
    force: Annotated[bool, typer.Option(help="Fetch it again even if it is there.")] = False,
) -> None:
    """Download a model, to where every command finds it by its name."""
    from .checkpoint.fetch import fetch as fetch_model

    with _plain_errors():
        typer.echo(str(fetch_model(name, force=force)))


@app.command()
def bench(
    model: ModelArgument = None,
    same_model: ModelOption = None,
    random: Annotated[
        str | None,
        typer.Option(
            help="Random weights of a known size and no files, such as llama-3.2-1b.", show_default=False
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Numbers of requests at once, with commas between.")] = "1,8",
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 128,
    static: Annotated[bool, typer.Option("--static", help="Batch statically, for comparison.")] = False,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="The most tokens in one step.", show_default="the engine's")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Runs of each batch.", show_default="3 on a card, else 1")
    ] = None,
    transformers: Annotated[
        bool | None,
        typer.Option(
            "--transformers/--no-transformers",
            help="Measure Hugging Face transformers beside it.",
            show_default="on a card, where it is installed",
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="That with torch.compile too; it takes minutes.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="A file for the figures.", show_default=False)] = None,
) -> None:
    """Measure how fast a model generates, and on a card how near to what the card can do."""
    from .bench import Settings
    from .bench import bench as measure

    with _plain_errors():
        settings = Settings(
            model=_one_model(model, same_model),
            random=random,
            batches=tuple(_positive_integers("batch", batch)),
            prompt=prompt,
            tokens=tokens,
            batching="static" if static else "continuous",
            max_num_batched_tokens=max_num_batched_tokens,
            repeats=repeats,
            transformers=transformers,
            compiled=compiled,
            json=json,
        )
        for line in measure(settings):
            typer.echo(line)


@app.command()
def serve(
    model: ModelArgument = None,
    same_model: ModelOption = None,
    host: Annotated[str, typer.Option(help="Where to listen; only this machine by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="TINYVLLM_API_KEY", show_default=False, help="What clients must send."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; its folder's name by default.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="The most completions that run at once.")] = 64,
    num_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the KV cache; what memory has room for by default.")
    ] = None,
    max_queue: Annotated[int, typer.Option(help="The most completions that wait beyond these.")] = 256,
    max_body_bytes: Annotated[int, typer.Option(help="The longest body of a request.")] = 1 << 20,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="One more name that the Host header may have.")
    ] = None,
    shutdown_seconds: Annotated[
        float, typer.Option(help="How long what runs may take to finish after SIGTERM.")
    ] = 30.0,
    mine: Mine = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does; a page to chat is at /."""
    with _plain_errors():
        named = _one_model(model, same_model)
        if named is None:
            raise ValueError(f"which model? tinyvllm serve MODEL, such as tinyvllm serve {DEFAULT_MODEL}")
        try:
            from .server.lifecycle import ServeOptions
            from .server.lifecycle import serve as serve_model
        except ModuleNotFoundError as error:
            from .installing import install_extra

            raise ValueError(f"{error.name} is missing: {install_extra('serve')}") from None
        options = ServeOptions(
            model=named,
            host=host,
            port=port,
            api_key=api_key,
            model_name=served_model_name,
            max_queue=max_queue,
            max_body_bytes=max_body_bytes,
            allowed_hosts=allowed_host or (),
            shutdown_seconds=shutdown_seconds,
            mine=mine,
            engine={"max_num_seqs": max_num_seqs, "num_blocks": num_blocks},
        )
        if not serve_model(options, say=typer.echo):
            raise typer.Exit(1)


@app.command()
def run_solutions(
    numbers: Numbers = None,
    check: Annotated[
        bool, typer.Option("--check", help="Execute nothing; fail where a notebook is out of step.")
    ] = False,
    restyle: Annotated[
        bool, typer.Option("--restyle", help="Execute nothing; put today's style sheet into saved outputs.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Notebooks at a time.")] = 2,
    root: Root = None,
) -> None:
    """Execute solutions/NN_topic.py into the notebook beside it."""
    with _plain_errors():
        if check and restyle:
            raise ValueError("--check and --restyle go one at a time")
        folder = _course_folder(root)
        from .course import build

        if check:
            build.check_solutions(folder, numbers or ())
            typer.echo("The solutions' notebooks are in step with their sources.")
        elif restyle:
            build.restyle(folder, numbers or (), say=typer.echo)
        else:
            build.run_solutions(folder, numbers or (), jobs=jobs, say=typer.echo)


@app.command()
def build_lessons(
    numbers: Numbers = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail where a lesson is out of step.")
    ] = False,
    class_: Annotated[
        Path | None, typer.Option("--class", help="Make a class's copy of the repository in this folder.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace lessons with work in them; they are kept.")
    ] = False,
    course: Annotated[
        Path | None,
        typer.Option(help="With --class: course.toml; solutions of lessons past their due time come along."),
    ] = None,
    root: Root = None,
) -> None:
    """Make lessons/NN_topic.ipynb from solutions/NN_topic.py."""
    with _plain_errors():
        if sum((check, class_ is not None, force)) > 1:
            raise ValueError("--check, --class and --force go one at a time")
        if class_ is not None and numbers:
            raise ValueError("--class takes all lessons; leave the numbers out")
        if course is not None and class_ is None:
            raise ValueError("--course goes with --class")
        folder = _course_folder(root)
        from .course import build
        from .course.making.classroom import make_class

        if check:
            build.check_lessons(folder, numbers or ())
            typer.echo("The lessons are in step with the solutions.")
        elif class_ is not None:
            make_class(folder, class_, say=typer.echo, open_lessons=_lessons_that_are_over(course))
        else:
            build.build_lessons(folder, numbers or (), force=force, say=typer.echo)


@app.command()
def grade(
    submissions: Annotated[Path, typer.Argument(help="A folder or a zip of what was handed in.")],
    report: Annotated[Path, typer.Option(help="The folder of the report.")],
    course: Annotated[
        Path | None, typer.Option(help="course.toml; roster.csv, overrides.csv and times.csv lie beside it.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Submissions at a time.")] = 1,
    exercise: Annotated[
        str | None,
        typer.Option(help="Grade this one again for everybody, such as 06.3; the rest stays as reported."),
    ] = None,
    learner: Annotated[
        str | None, typer.Option(help="Grade this learner again; the rest stays as reported.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Judge everything again.")] = False,
    nbval: Annotated[bool, typer.Option(help="Run nbval beside the judge.")] = True,
    containment: Annotated[
        str, typer.Option(help="auto, bubblewrap, user or limits: how answers are kept apart.")
    ] = "auto",
    scheduler: Annotated[
        str | None, typer.Option(help="Address of a Dask scheduler: tls://..., or on this machine.")
    ] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="For tls://: the authority's certificate.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="For tls://: this side's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="For tls://: its key.")] = None,
) -> None:
    """Grade a class: from notebooks that were handed in to a report (docs/instructors.md)."""
    with _plain_errors():
        tls = {"ca": tls_ca, "cert": tls_cert, "key": tls_key}
        if any(tls.values()) and not all(tls.values()):
            raise ValueError("--tls-ca, --tls-cert and --tls-key go together")
        from .course.grade import Options
        from .course.grade import grade as grade_class

        options = Options(
            submissions=submissions,
            report=report,
            course=course,
            jobs=jobs,
            scheduler=scheduler,
            tls={name: str(path) for name, path in tls.items()} if all(tls.values()) else None,
            containment=containment,
            nbval=nbval,
            exercise=exercise,
            learner=learner,
            fresh=fresh,
        )
        grade_class(options, say=typer.echo)


@app.command()
def submit(
    numbers: Annotated[
        list[str] | None, typer.Argument(help="Lessons, such as 06; all that have answers by default.")
    ] = None,
    learner: Annotated[str, typer.Option(help="Who you are, as your class calls you.")] = ...,  # type: ignore[assignment]
    out: Annotated[
        Path | None, typer.Option(help="The zip to write.", show_default="LEARNER_lesson_NN.zip here")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--lessons",
            help="The folder that has the notebooks.",
            show_default="this folder, or lessons/ in it",
        ),
    ] = None,
) -> None:
    """Pack your notebooks for handing in, and see what will be graded."""
    with _plain_errors():
        from .course.grading.submit import submit as pack

        pack(folder, numbers or (), learner=learner, out=out, say=typer.echo)


@app.command()
def progress() -> None:
    """Draw the map of the course, with what you have passed and where to go on."""
    from .course.course_progress import course_map

    with _plain_errors():
        typer.echo(str(course_map()))


@app.command()
def doctor() -> None:
    """Say what was found on this machine, and what to do about what was not."""
    from .doctor import examine

    for finding in examine():
        typer.echo(str(finding))


# By their names: the modules that have them are loaded only by commands that need them.
_OF_THE_MACHINE = ("CompilerNotFound", "DeviceLost", "NoDevice")


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What a user can mend is one message and not a traceback."""
    from .checkpoint.hub import FetchError

    try:
        yield
    except (ValueError, OSError, TypeError, LookupError, MemoryError, FetchError) as error:
        typer.echo(f"tinyvllm: {str(error) or type(error).__name__}", err=True)
        raise typer.Exit(1) from None
    except RuntimeError as error:
        if type(error).__name__ not in _OF_THE_MACHINE:
            raise
        typer.echo(f"tinyvllm: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo()
        raise typer.Exit(130) from None


def _course_folder(root: Path | None) -> Path:
    """Where the lessons are made; by default this repository."""
    from .checkpoint.names import REPOSITORY

    folder = REPOSITORY if root is None else root
    if not any((folder / "solutions").glob("*.py")):
        raise FileNotFoundError(f"{folder / 'solutions'} holds no lesson's source (NN_topic.py)")
    return folder.resolve()


def _lessons_that_are_over(course: Path | None) -> list[str]:
    """Lessons past everybody's due time, by a class's settings."""
    import datetime

    if course is None:
        return []
    from .course.grading.course_file import read_course

    settings = read_course(course, None)
    now = datetime.datetime.now(datetime.UTC)
    return [number for number in settings.due if settings.is_over(number, now)]


def _params(max_tokens: int, temperature: float, top_p: float, seed: int | None) -> SamplingParams:
    from .sampling_params import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)


def _one_model(argument: str | None, option: str | None) -> str | None:
    """The model that a command names by its place or by -m; None where neither does."""
    if argument is not None and option is not None and argument != option:
        raise ValueError(f"two models are named, {argument!r} and by -m {option!r}; name one")
    return option if argument is None else argument


def _load(model: str, mine: bool, **options: Any) -> LLM:
    """One request at a time is all that a terminal asks for."""
    from .assembly import Parts
    from .llm import LLM

    return LLM(model, parts=Parts.mine() if mine else None, max_num_seqs=1, **options)


def _print_pieces(pieces: Iterable[str]) -> str:
    """Print as they come, and give back the whole."""
    text = ""
    try:
        for piece in pieces:
            text += piece
            typer.echo(piece, nl=False)
            sys.stdout.flush()
    except Exception:
        typer.echo()  # what is said of it gets a line of its own
        raise
    return text


def _questions() -> Iterator[str]:
    """Lines from the terminal, or from a pipe."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def _positive_integers(name: str, text: str) -> list[int]:
    """``"1,8"`` -> [1, 8]."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ValueError(
            f"--{name} is {text!r}; it must be positive integers with commas between, such as 1,8"
        )
    return numbers


def main() -> None:
    """Entry point of the command."""
    app()
