"""The capstone's run: forty prompts in a small cache, by the learner's engine, beside the reference and one by one."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinyvllm_ref import LLM, SamplingParams, device, emulation
from tinyvllm_ref.checkpoint.names import REPOSITORY, resolve
from tinyvllm_ref.config import EngineConfig
from tinyvllm_ref.installing import typed
from tinyvllm_ref.parts import Parts
from tinyvllm_ref.request import Request

from . import my_engine, notebook
from .figures import display_figure
from .reports import Table
from .wiring import wired

MODEL = "tiny-stories"
NUM_BLOCKS, BLOCK_SIZE, SEATS, NEW_TOKENS = 48, 16, 24, 24
"""The cache of the run, the most requests in a step, and what each prompt gets: too little room for all."""
LOGIT_ERROR = 0.25
"""What sums in another order change in a logit of this model, at most: 1.4 % of the largest, which are about 18."""
TEXTS = ("23.1", "23.2", "23.3")
_NO_ENGINE = ("build_app",)


@functools.cache
def prompts() -> tuple[str, ...]:
    """Forty prompts of ragged lengths, ``data/prompts.txt``."""
    return tuple((REPOSITORY / "data" / "prompts.txt").read_text(encoding="utf-8").splitlines())


@functools.cache
def _sequences() -> tuple[tuple[int, ...], ...]:
    """Their token ids."""
    from tinyvllm_ref.tokenizer import Tokenizer

    tokenizer = Tokenizer(resolve(MODEL))
    return tuple(tuple(tokenizer.encode(prompt)) for prompt in prompts())


def prompt_lengths() -> tuple[int, ...]:
    """Tokens of each."""
    return tuple(map(len, _sequences()))


def is_complete() -> bool:
    """Whether all that the program is made of has passed."""
    return all(my_engine.answer(id) is not None for id in TEXTS)


def save_program() -> None:
    """Write ``generate.py`` and what it needs into ``my_engine/``, once the lesson's answers have all passed."""
    from .exercise import Exercise
    from .exercises import exercise_of

    if is_complete():
        exercise = exercise_of(TEXTS[-1])
        assert isinstance(exercise, Exercise)
        my_engine.save_program(exercise, "text.py")


def show_program() -> None:
    """Say what lies in ``my_engine/``, and how it is run."""
    if not is_complete():
        print(f"no program yet: it is written when {', '.join(TEXTS)} have passed")
        return
    folder = my_engine.folder()
    files = sorted(path.name for path in folder.iterdir() if path.suffix in (".py", ".cu"))
    lines = sum(len((folder / name).read_text(encoding="utf-8").splitlines()) for name in files)
    owners = my_engine.parts().owners()
    mine = sum(who == "learner" for name, who in owners.items() if name not in _NO_ENGINE)
    total = sum(name not in _NO_ENGINE for name in Parts.names())
    print(f"{folder.name}/: {len(files)} files, {lines:,} lines; {mine} of {total} parts are yours")
    print(f'\n    {typed("python")} {folder.name}/generate.py "Once upon a time"')


# ---------------- a run


@dataclass
class Run:
    """What an engine did with some prompts.

    Attributes
    ----------
    tokens : list of list of int
        Of each prompt.
    seconds : float
        From the first request to the last token.
    first : list of float
        Seconds until each prompt had its first token.
    later : list of float
        Of each prompt, the mean seconds of a token after the first.
    steps, computed, preemptions : int
        Steps, tokens that they computed, and requests that lost their blocks.
    lost : int
        Blocks that were not free at the end.
    """

    tokens: list[list[int]]
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    steps: int = 0
    computed: int = 0
    preemptions: int = 0
    lost: int = 0

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all prompts over all seconds."""
        return sum(map(len, self.tokens)) / self.seconds


def run(
    parts: Parts, sequences: Sequence[Sequence[int]], *, seats: int = SEATS, num_blocks: int = NUM_BLOCKS
) -> Run:
    """Give each sequence :data:`NEW_TOKENS` tokens, greedily, all of them asked for at once.

    Parameters
    ----------
    parts : Parts
        Those that there are; the reference fills in.
    sequences : sequence of sequence of int
        The prompts' ids.
    seats : int
        The most requests in a step; 1 serves them one by one.
    num_blocks : int
        Of the cache, of 16 slots each.
    """
    options = EngineConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=seats)
    with emulation.checks("fast"), wired(parts):
        llm = LLM(MODEL, parts=parts, config=options)
        _drive(llm, [[1, 2, 3], [4, 5]], 2)  # compiles the kernels
        return _drive(llm, sequences, NEW_TOKENS)


def _drive(llm: LLM, sequences: Sequence[Sequence[int]], new: int) -> Run:
    engine = llm.engine
    found = Run([[] for _ in sequences])
    watched = _Watched(engine.scheduler, found)
    engine.scheduler = watched
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    began = time.perf_counter()
    for number, ids in enumerate(sequences):
        engine.add_request(Request(str(number), list(ids), params))
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter() - began
        for output in outputs:
            number = int(output.request_id)
            found.tokens[number] = list(output.outputs[0].token_ids)
            first.setdefault(number, now)
            last[number] = now
    found.seconds = time.perf_counter() - began
    engine.scheduler = watched.scheduler
    found.first = [first[number] for number in range(len(sequences))]
    found.later = [(last[number] - first[number]) / max(1, new - 1) for number in range(len(sequences))]
    num_free = engine.blocks.num_free
    found.lost = llm.engine_config.num_blocks - num_free if llm.engine_config.num_blocks else 0
    return found


class _Watched:
    """A scheduler that is looked at: its steps are counted, and nothing is changed."""

    def __init__(self, scheduler: Any, found: Run) -> None:
        self.scheduler, self.found = scheduler, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def schedule(self) -> Any:
        batch = self.scheduler.schedule()
        self.found.steps += bool(batch)
        self.found.computed += sum(batch.num_tokens)
        self.found.preemptions += len(batch.preempted)
        return batch


@functools.cache
def reference_run(seats: int = SEATS) -> Run:
    """The reference's run, once a process."""
    return run(Parts(), _sequences(), seats=seats)


def race() -> None:
    """The forty prompts by the learner's engine, by the reference, and by the learner's engine one by one."""
    if not is_complete():
        print(f"nothing to measure yet: {', '.join(TEXTS)} have not all passed")
        return
    own = my_engine.own_parts()
    runs = {
        "your engine": run(own, _sequences()),
        "the reference": reference_run(),
        "your engine, one by one": run(own, _sequences(), seats=1),
    }
    notebook.display(_table(runs))
    mine, right = runs["your engine"], runs["the reference"]
    parted = partings(own, _sequences(), mine.tokens, right.tokens)
    same = len(right.tokens) - len(parted)
    print(f"{same} of {len(right.tokens)} completions have the reference's tokens; {mine.lost} blocks lost")
    for one in parted:
        print(
            f"prompt {one.prompt} parts from it at token {one.token}: the reference's two best logits are "
            f"{one.margin:.3g} apart there, and yours differ from them by up to {one.error:.3g}"
            + ("" if one.is_tie else ": that is no near tie, so look for a fault in a part")
        )
    if mine.tokens == runs["your engine, one by one"].tokens:
        print("Together, preempted or one by one: your engine gives each prompt the same tokens.")


@dataclass(frozen=True)
class Parting:
    """Where a completion takes another token than the reference's.

    Attributes
    ----------
    prompt, token : int
        Number of the prompt, and of the first token of its completion that differs.
    margin : float
        Between the reference's two best logits there.
    error : float
        The most that the other engine's logits differ from the reference's there.
    """

    prompt: int
    token: int
    margin: float
    error: float

    @property
    def is_tie(self) -> bool:
        """Whether sums in another order explain it: the two best are no further apart than both may have moved."""
        return self.margin <= 2 * self.error and self.error < LOGIT_ERROR


def partings(
    parts: Parts, sequences: Sequence[Sequence[int]], tokens: Sequence[list[int]], right: Sequence[list[int]]
) -> list[Parting]:
    """The completions that differ from the reference's, each at its first other token, with what decides there."""
    found: list[Parting] = []
    for number, (mine, wanted) in enumerate(zip(tokens, right, strict=True)):
        if mine == wanted:
            continue
        same = next(
            (k for k, (a, b) in enumerate(zip(mine, wanted, strict=False)) if a != b),
            min(len(mine), len(wanted)),
        )
        text = [*sequences[number], *wanted[:same]]
        with emulation.checks("fast"), wired(parts):
            theirs = LLM(MODEL, num_blocks=NUM_BLOCKS).logits(text)[-1]
            own = LLM(MODEL, parts=parts, num_blocks=NUM_BLOCKS).logits(text)[-1]
        second, first = np.sort(theirs)[-2:]
        found.append(Parting(number, same, float(first - second), float(np.abs(own - theirs).max())))
    return found


def _task() -> str:
    return f"{len(prompts())} prompts, {NEW_TOKENS} new tokens each, in {NUM_BLOCKS} blocks of {BLOCK_SIZE}"


def _table(runs: dict[str, Run]) -> Table:
    def row(label: str, value: Callable[[Run], str]) -> tuple[str, ...]:
        return (label, *(value(run) for run in runs.values()))

    return Table(
        title=f"{_task()}, at most {SEATS} at once",
        columns=("", *runs),
        rows=(
            row("new tokens a second", lambda run: f"{run.tokens_per_second:,.0f}"),
            row("time to first token, median", lambda run: f"{np.median(run.first) * 1e3:,.0f} ms"),
            row("time to first token, the last of all", lambda run: f"{max(run.first) * 1e3:,.0f} ms"),
            row("time of a later token, median", lambda run: f"{np.median(run.later) * 1e3:,.1f} ms"),
            row("steps: so often the weights are read", lambda run: f"{run.steps:,}"),
            row("tokens computed", lambda run: f"{run.computed:,}"),
            row("preemptions", lambda run: f"{run.preemptions:,}"),
        ),
        notes=(
            ()
            if device.is_gpu
            else (
                "No GPU code ran: these are times of this computer's processor. Compare them with one another; of a "
                "card they say nothing. The same on a card would be steps, tokens and preemptions.",
            )
        ),
    )


# ---------------- pictures


def draw_schedule(scheduler: Any) -> Any:
    """The forty prompts through a scheduler, and the cache meanwhile; what the tokens say does not matter here."""
    from tinyvllm_ref.block_manager import BlockManager

    from .figures.engine_run import Step, engine_run

    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    planner = scheduler(SEATS, 2048, blocks)
    requests = [
        Request(str(number), [0] * length, SamplingParams(max_tokens=NEW_TOKENS))
        for number, length in enumerate(prompt_lengths())
    ]
    for request in requests:
        planner.add(request)
    steps: list[Step] = []
    while not all(request.finished for request in requests) and len(steps) < 1000:
        batch = planner.schedule()
        computed = {
            int(request.request_id): int(count)
            for request, count in zip(batch.requests, batch.num_tokens, strict=True)
        }
        again = {
            int(request.request_id)
            for request, start, count in zip(batch.requests, batch.starts, batch.num_tokens, strict=True)
            if request.num_preemptions and start < request.num_tokens - 1
        }
        steps.append(
            Step(computed, frozenset(again), tuple(map(int, batch.preempted)), NUM_BLOCKS - blocks.num_free)
        )
        planner.update(batch, [0] * sum(batch.samples))
    return engine_run(steps, len(requests), NUM_BLOCKS, title=f"{_task()}, by your Scheduler")


_BATCHES = (1, 2, 4, 8, 16, 32)


def draw_throughput() -> None:
    """New tokens a second over the number of requests at once, by the learner's engine and by the reference."""
    if not is_complete():
        print(f"nothing to draw yet: {', '.join(TEXTS)} have not all passed")
        return
    from .figures import error_lines

    lines: dict[str, list[float]] = {}
    for name, parts in (("yours", my_engine.own_parts()), ("the reference", Parts())):
        lines[name] = []
        with emulation.checks("fast"), wired(parts):
            most = max(_BATCHES)
            options = EngineConfig(num_blocks=4 * most, block_size=BLOCK_SIZE, max_num_seqs=most)
            llm = LLM(MODEL, parts=parts, config=options)
            _drive(llm, [[1, 2, 3]], 2)
            lines[name] = [_drive(llm, [[7] * 8] * batch, 12).tokens_per_second for batch in _BATCHES]
    where = device.describe() if device.is_gpu else "times of this computer's processor, no GPU code ran"
    figure = error_lines(
        _BATCHES,
        lines,
        "requests at once",
        "new tokens a second",
        title="Throughput against batch",
        subtitle=f"tiny-stories, prompts of 8 tokens, 12 new ones each; {where}",
        log_x=True,
        log_y=True,
    )
    (axes,) = figure.axes
    low, high = axes.get_ylim()  # more ticks widen it
    axes.set_xticks(_BATCHES, [str(batch) for batch in _BATCHES])
    axes.set_xticks([], minor=True)
    axes.set_yticks([d * 10**n for n in range(6) for d in (1, 2, 5)])
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    display_figure(figure)


# ---------------- a story


def write_story(prompt: str, stop: Sequence[str] = (), max_tokens: int = 60) -> None:
    """Go on with a prompt by the learner's `generate` and engine, printed piece by piece as it comes.

    Parameters
    ----------
    prompt : str
    stop : sequence of str
        Stop strings.
    max_tokens : int
    """
    if not is_complete():
        print(f"no story yet: {', '.join(TEXTS)} have not all passed")
        return
    from .answers import make_answer
    from .exercise import Exercise
    from .exercises import exercise_of

    exercise = exercise_of(TEXTS[-1])
    assert isinstance(exercise, Exercise)
    generate = make_answer(exercise, my_engine.answer(exercise.id) or "", device.cp)
    own = my_engine.own_parts()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=list(stop))
    print(prompt, end="")
    with emulation.checks("fast"), wired(own):
        llm = LLM(MODEL, parts=own, num_blocks=NUM_BLOCKS)
        ((_, reason),) = generate(
            llm.engine,
            llm.tokenizer,
            [prompt],
            [params],
            lambda number, piece: print(piece, end="", flush=True),
        )
    print(f"\n    [{reason}]")
