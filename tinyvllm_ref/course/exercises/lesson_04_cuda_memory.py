"""Lesson 04: device memory, and the one arena that holds all weights."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tinyvllm_ref import emulation
from tinyvllm_ref.bf16 import float_to_bf16
from tinyvllm_ref.checkpoint.names import resolve
from tinyvllm_ref.checkpoint.weights import open_checkpoint, tensor_shapes, weight_plan
from tinyvllm_ref.config import ModelConfig, RopeScaling
from tinyvllm_ref.course import figures
from tinyvllm_ref.course.exercise import (
    Case,
    EngineCard,
    Exercise,
    Hints,
    Lesson,
    Mistake,
    Prediction,
    Quantity,
    Tolerance,
    Work,
    with_changes,
)

_ALIGNMENT = 256  # bytes


# ---------------- 04.1: the plan


def _plan_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, groups: list[list[int]], group: str) -> Case:
        return Case(label, {"groups": groups}, group)

    drawn = [[2 * int(n) for n in rng.integers(1, 700, rng.integers(1, 4))] for _ in range(9)]
    return [
        case("two groups: [100, 60] and [300]", [[100, 60], [300]], "small"),
        case("one group of three: [512, 256, 256]", [[512, 256, 256]], "small"),
        case("[256], [2] and [256]", [[256], [2], [256]], "awkward"),
        case("no group at all", [], "awkward"),
        case("[384], [122,880], [384]", [[384], [122_880], [384]], "awkward"),
        case("nine groups of odd sizes", drawn, "awkward"),
    ]


def _run_plan(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    offsets, end = answer([list(group) for group in inputs["groups"]])
    for number in (end, *(offset for group in offsets for offset in group)):
        if not isinstance(number, int | np.integer):
            raise TypeError(
                f"the plan has a {type(number).__name__}, {float(number)}; memory is asked for and sliced by whole numbers (int)"
            )
    return {"offsets": [[int(offset) for offset in group] for group in offsets], "end": int(end)}


def _expect_plan(inputs: Any) -> dict[str, Any]:
    sizes = np.array([sum(group) for group in inputs["groups"]], np.int64)
    padded = np.ceil(sizes / _ALIGNMENT).astype(np.int64) * _ALIGNMENT
    starts = np.concatenate([[0], np.cumsum(padded)])
    offsets = [
        [int(start + inner) for inner in np.cumsum([0, *group[:-1]])]
        for start, group in zip(starts, inputs["groups"], strict=False)
    ]
    return {"offsets": offsets, "end": int(starts[-1])}


def _plan(*changes: tuple[str, str]) -> str:
    text = """def plan_arena(groups):
    offsets, end = [], 0
    for sizes in groups:
        starts = []
        for size in sizes:
            starts.append(end)
            end += size
        end = (end + 255) // 256 * 256
        offsets.append(starts)
    return offsets, end
"""
    return with_changes(text, changes)


_ROUND = "        end = (end + 255) // 256 * 256\n"

_PLAN = Exercise(
    id="04.1",
    title="a plan for the arena",
    answer="plan_arena",
    kind="function",
    arguments=("groups",),
    cases=_plan_cases,
    run=_run_plan,
    expected=_expect_plan,
    points={"small": 1, "awkward": 1},
    hints=Hints(
        question="Take {case}. At which byte does each tensor begin, and at which byte does the first group end? What is the "
        "next multiple of 256?",
        rule="Walk through all tensors with the first free byte in a variable. A tensor begins there and moves it on by its "
        "size. After the last tensor of a group, round it up to a multiple of 256; a number that is a multiple already "
        "stays. What you have at the end is the size of the arena.\n\n"
        "By hand, [[100, 60], [300]]: tensors at 0 and 100; the group ends at 160, rounded up to 256; the next tensor is at "
        "256 and ends at 556, rounded up to 768. So ([[0, 100], [256]], 768).",
        code="""end = 0
for sizes in groups:
    starts = []
    for size in sizes:
        starts.append(____)
        end += ____
    end = (end + ____) // 256 * ____
    offsets.append(starts)""",
    ),
    mistakes=(
        Mistake(
            "unaligned groups",
            _plan((_ROUND, "")),
            "Each group must begin at a multiple of 256 bytes. Kernels that read 16 bytes at a time need aligned addresses, "
            "and a group that begins anywhere is read in more pieces than it has to be.",
            "At which byte does your second group begin? Is it a multiple of 256?",
        ),
        Mistake(
            "each tensor aligned",
            _plan(
                (_ROUND, ""),
                ("            end += size\n", "            end = (end + size + 255) // 256 * 256\n"),
            ),
            "Groups are aligned, tensors within a group are not: query, key and value must follow each other without a gap, so "
            "that they are the rows of one matrix.",
            "How many bytes lie between the end of the first tensor of a group and the beginning of its second?",
        ),
        Mistake(
            "256 more, also where none was needed",
            _plan((_ROUND, "        end = (end // 256 + 1) * 256\n")),
            "A group that ends at a multiple of 256 needs no padding. Adding 255 before the division rounds up, and leaves a "
            "multiple as it is.",
            "A group of exactly 1,024 bytes begins at 0. Where may the next one begin?",
        ),
        Mistake(
            "rounded down",
            _plan((_ROUND, "        end = end // 256 * 256\n")),
            "Rounding down gives the next group bytes that belong to this one. The first free byte must be rounded up.",
            "The first group ends at byte 160. Which multiple of 256 is free?",
        ),
        Mistake(
            "each group begins at 0",
            _plan(("        starts = []\n", "        starts, end = [], 0\n")),
            "All groups share one arena, so a group begins where the one before it ended, rounded up.",
            "Which bytes of the arena does your second group take, and whose are they?",
            variants=(
                _plan(
                    (
                        "            starts.append(end)\n            end += size\n",
                        "            starts.append(sum(sizes[: len(starts)]))\n",
                    ),
                    (_ROUND, "        end += sum(sizes)\n" + _ROUND),
                ),
            ),
        ),
        Mistake(
            "the last group not rounded up",
            _plan(
                ("        starts = []\n", "        starts = []\n" + _ROUND),
                (_ROUND + "        offsets", "        offsets"),
            ),
            "Rounding at the beginning of each group places all groups right, and leaves the arena's own size as it falls. It is "
            "rounded up as well: 768 in the example.",
            "Where does your last group end, and what is the next multiple of 256?",
        ),
        Mistake(
            "ends instead of beginnings",
            _plan(
                (
                    "            starts.append(end)\n            end += size\n",
                    "            end += size\n            starts.append(end)\n",
                )
            ),
            "An offset says where a tensor begins. Note it down before the tensor's own size is added.",
            "The first tensor of all begins at byte 0. What is your first offset?",
        ),
        Mistake(
            "numbers that are not whole",
            _plan((_ROUND, "        end = np.ceil(end / 256) * 256\n")),
            "np.ceil and / give floats, and nothing can be sliced or allocated by a float. // divides whole numbers, and int(...) "
            "makes one of a float.",
            "What is the type of end after your rounding?",
            variants=(_plan((_ROUND, "        end = -(-end / 256 // 1) * 256\n")),),
        ),
        Mistake(
            "offsets in elements",
            _plan(("            end += size\n", "            end += size // 2\n")),
            "The sizes are bytes, and so are the offsets. A bfloat16 has two of them, so counting elements puts every tensor "
            "on the second half of the one before.",
            "The first tensor takes 100 bytes. Which is the first byte behind it?",
        ),
    ),
)


# ---------------- 04.3: many tensors in one launch


def _move_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, counts: list[int], group: str) -> Case:
        """The tensors lie in the file in the order of `counts`, and in the arena in the opposite one."""
        file = rng.integers(0, 1 << 16, sum(counts)).astype(np.uint16)
        source = np.cumsum([0, *counts[:-1]]) * 2
        padded = [-(-2 * n // _ALIGNMENT) * _ALIGNMENT for n in counts]
        behind = np.cumsum([0, *padded[::-1]])
        target = behind[:-1][::-1]
        return Case(
            label,
            {
                "file": file, "source": source.astype(np.int64), "target": target.astype(np.int64).copy(),
                "count": np.array(counts, np.int64), "arena_elements": int(behind[-1]) // 2,
            },
            group,
        )  # fmt: skip

    return [
        case("2 tensors of 4 and 3 elements", [4, 3], "small"),
        case("3 tensors of 256 elements", [256, 256, 256], "small"),
        case("5 tensors of 1 to 700 elements", [1, 700, 257, 128, 33], "awkward"),
        case("8 tensors of any size", [int(n) for n in rng.integers(1, 900, 8)], "awkward"),
    ]


def _run_move(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    count = inputs["count"]
    file = lab.input("file", inputs["file"])
    source, target, counts = (lab.input(name, inputs[name]) for name in ("source", "target", "count"))
    arena = lab.inout(np.full(inputs["arena_elements"], 0xABCD, np.uint16))
    answer((-(-int(count.max()) // 256), len(count)), (256,), (file, arena, source, target, counts))
    return {"arena": lab.get(arena)}


def _expect_move(inputs: Any) -> dict[str, Any]:
    arena = np.full(inputs["arena_elements"], 0xABCD, np.uint16)
    for source, target, count in zip(inputs["source"], inputs["target"], inputs["count"], strict=True):
        arena.view(np.uint8)[target : target + 2 * count] = inputs["file"].view(np.uint8)[
            source : source + 2 * count
        ]
    return {"arena": arena}


def _move(old: str = "", new: str = "") -> str:
    text = '''move_tensors = cp.RawKernel(r"""
extern "C" __global__ void move_tensors(const unsigned short* file, unsigned short* arena,
                                        const long long* source, const long long* target, const long long* count) {
    int tensor = blockIdx.y;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count[tensor]) arena[target[tensor] / 2 + i] = file[source[tensor] / 2 + i];
}
""", "move_tensors")
'''
    assert old in text, old
    return text.replace(old, new) if old else text


_MOVE = Exercise(
    id="04.3",
    title="all tensors in one launch",
    answer="move_tensors",
    kind="kernel",
    cases=_move_cases,
    run=_run_move,
    expected=_expect_move,
    points={"small": 1, "awkward": 1, "clean": 1},
    hints=Hints(
        question="Take {case}. Which block and which thread move element 2 of the second tensor? From which element of the file "
        "does it come, and to which element of the arena does it go?",
        rule="blockIdx.y says which tensor, i says which of its elements. source and target are bytes, and file and arena "
        "are arrays of two-byte elements: half as many. The grid is as wide as the longest tensor needs, so for all others "
        "there are threads too many.\n\n"
        "By hand: a tensor of 3 elements at byte 8 of the file goes to byte 256 of the arena: elements 4, 5, 6 go to elements "
        "128, 129, 130.",
        code="if (i < ____) arena[____ / 2 + i] = file[____ / 2 + i];",
    ),
    mistakes=(
        Mistake(
            "byte offsets used as elements",
            _move(
                "arena[target[tensor] / 2 + i] = file[source[tensor] / 2 + i]",
                "arena[target[tensor] + i] = file[source[tensor] + i]",
            ),
            "source and target count bytes. An index counts elements, and an unsigned short has two bytes, so everything "
            "lies twice as far out as it should.",
            "A tensor begins at byte 8 of the file. How many two-byte elements lie before it?",
        ),
        Mistake(
            "no bounds guard",
            _move("if (i < count[tensor]) ", ""),
            "The grid is wide enough for the longest tensor. For a shorter one the threads behind its end go on into what "
            "belongs to others.",
            "The second tensor has fewer elements than the grid has threads for it. What do the others do?",
        ),
        Mistake(
            "guard lets one too many through",
            _move("i < count[tensor]", "i <= count[tensor]"),
            "Elements are numbered from 0, so the last is count - 1. With <= one more is moved, and it is not this tensor's.",
            "A tensor of 3 elements has elements 0, 1 and 2. What does i = 3 move?",
        ),
        Mistake(
            "i halved as well",
            _move(
                "arena[target[tensor] / 2 + i] = file[source[tensor] / 2 + i]",
                "arena[(target[tensor] + i) / 2] = file[(source[tensor] + i) / 2]",
            ),
            "Only source and target are bytes. i counts elements already: halved with them, two threads move one and the same "
            "element, and half of the tensor stays behind.",
            "Which element of the tensor does the thread with i = 1 move?",
        ),
        Mistake(
            "the count is taken for bytes",
            _move("i < count[tensor]", "i < count[tensor] / 2"),
            "count is already in elements; only source and target are bytes. Half of each tensor stays behind.",
            "What are the units of count, of source, and of i?",
        ),
        Mistake(
            "source and target swapped",
            _move("arena[target[tensor] / 2 + i] = file[source[tensor] / 2 + i]",
                  "arena[source[tensor] / 2 + i] = file[target[tensor] / 2 + i]"),
            "source says where a tensor lies in the file, target where it goes in the arena.",
            "Which of the two arrays do you write to, and whose offset do you use for it?",
        ),
        Mistake(
            "one tensor a block of 256 elements",
            _move("blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x"),
            "threadIdx.x runs from 0 to 255 in every block. Which 256 elements a block moves, its blockIdx.x must say.",
            "The blocks (0, 1) and (1, 1) work on one tensor. Which elements does each of them move?",
        ),
    ),
)  # fmt: skip


# ---------------- 04.4: how long did it take?


def _time_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, work: float, queued: float, compiling: float, group: str) -> Case:
        return Case(label, {"work": work, "queued": queued, "compiling": compiling}, group)

    return [
        case("a kernel of 2 ms", 0.002, 0.0, 0.0, "small"),
        case("a kernel of 1 ms, compiled at its first call", 0.001, 0.0, 0.3, "small"),
        case("a kernel of 3 ms behind 20 ms of other work", 0.003, 0.02, 0.0, "awkward"),
        case("all of it", float(rng.uniform(0.001, 0.01)), 0.05, 0.25, "awkward"),
    ]


def _run_time(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    # A card as the host sees it: a launch returns at once, and the work is done later, in order. Time is simulated, so
    # that the result does not depend on the machine.
    now, busy_until, compiled = 100.0, 100.0 + inputs["queued"], False

    def launch() -> None:
        nonlocal now, busy_until, compiled
        now += 5e-6 if compiled else 5e-6 + inputs["compiling"]
        compiled = True
        busy_until = max(now, busy_until) + inputs["work"]

    def synchronize() -> None:
        nonlocal now
        now = max(now, busy_until) + 1e-6

    def clock() -> float:
        nonlocal now
        now += 1e-7
        return now

    return {"seconds": float(answer(launch, clock, synchronize))}


def _time(*lines: str, value: str = "clock() - start") -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"def seconds_of(launch, clock, synchronize):\n{body}    return {value}\n"


_TIME = Exercise(
    id="04.4",
    title="how long did it take?",
    answer="seconds_of",
    kind="function",
    arguments=("launch", "clock", "synchronize"),
    cases=_time_cases,
    run=_run_time,
    expected=lambda inputs: {"seconds": inputs["work"]},
    points={"small": 1, "awkward": 1},
    tolerance=Tolerance(0.02, 0.0, "a launch and a synchronise cost some microseconds themselves"),
    hints=Hints(
        question="Take {case}. Write down, in order, what the host does and what the card does while your function runs. When is "
        "the clock read, and what has the card finished by then?",
        rule="A launch only puts work into a queue. So: launch once, and let that pass (the first call compiles); synchronize, so "
        "that the queue is empty; read the clock; launch; synchronize, so that the work is done; read the clock again.\n\n"
        "By hand: launched at 0 ms, the call returns at 0.005 ms, the card is done at 2 ms. Reading the clock right after the "
        "launch gives 0.005 ms, whatever the kernel does.",
        code="""launch()
____
start = clock()
____
____
return clock() - start""",
    ),
    mistakes=(
        Mistake(
            "clock read before the work was done",
            _time("launch()", "synchronize()", "start = clock()", "launch()"),
            "A launch returns as soon as the work is in the queue, so this is the time of launching: some microseconds, for "
            "any kernel. Wait for the card before reading the clock.",
            "When launch() returns, how much of the kernel has run?",
            variants=(
                _time("start = clock()", "launch()"),
                _time("launch()", "synchronize()", "start = clock()", "launch()", "spent = clock() - start", "synchronize()",
                      value="spent"),
                _time("synchronize()", "start = clock()", "launch()"),
            ),
        ),
        Mistake(
            "work that was queued before is counted",
            _time("launch()", "start = clock()", "launch()", "synchronize()"),
            "When the first clock is read the card may still be busy with what was launched before, and the second synchronise "
            "waits for that as well. Begin with an empty queue.",
            "What is in the queue at the moment at which you read the first clock?",
            variants=(
                _time("synchronize()", "launch()", "start = clock()", "launch()", "synchronize()"),
                _time("launch()", "start = clock()", "synchronize()", "launch()", "synchronize()"),
            ),
        ),
        Mistake(
            "first call counted",
            _time("synchronize()", "start = clock()", "launch()", "synchronize()"),
            "A RawKernel is compiled when it is first called, which takes much longer than the kernel. Call it once before, and "
            "time the second call.",
            "What does the very first call of a kernel do that later ones do not?",
            variants=(_time("start = clock()", "launch()", "synchronize()"),),
        ),
        Mistake(
            "both launches counted",
            _time("synchronize()", "start = clock()", "launch()", "synchronize()", "launch()", "synchronize()"),
            "The clock runs from before the first launch, so two kernels are counted, and the compiling with them.",
            "How many launches lie between your two readings of the clock?",
        ),
        Mistake(
            "milliseconds",
            _time("launch()", "synchronize()", "start = clock()", "launch()", "synchronize()",
                  value="(clock() - start) * 1e3"),
            "clock() counts seconds, and seconds are asked for.",
            "What is the unit of what you return?",
        ),
    ),
)  # fmt: skip


# ---------------- 04.5: the weights of a model in one arena


def _config(
    vocab: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, layers: int, tied: bool
) -> Any:
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": tied,
        "bos_token_id": None,
    }  # fmt: skip


def _model_config(fields: Any) -> ModelConfig:
    return ModelConfig(**fields, rope_scaling=RopeScaling(), eos_token_ids=())


def _load_cases(rng: np.random.Generator) -> list[Case]:
    def case(config: Any, dtype: str, group: str) -> Case:
        tensors = {}
        for name, shape in tensor_shapes(_model_config(config)).items():
            if dtype == "BF16":
                values: Any = rng.integers(0, 1 << 16, shape).astype(np.uint16)
            else:
                values = rng.standard_normal(shape).astype({"F32": np.float32, "F16": np.float16}[dtype])
            tensors[name] = {"dtype": dtype, "shape": list(shape), "data": values.reshape(-1).view(np.uint8)}
        layers, tied = config["num_hidden_layers"], config["tie_word_embeddings"]
        label = (
            f"{layers} layer{'s' if layers > 1 else ''} of hidden size {config['hidden_size']}, {dtype}, "
            f"{'tied' if tied else 'with an LM head of its own'}"
        )
        return Case(label, {"config": config, "tensors": tensors}, group)

    hidden = 2 * int(rng.integers(20, 40))
    return [
        case(_config(11, 8, 3, 1, 4, 10, 1, True), "BF16", "small"),
        case(_config(37, 36, 2, 1, 10, 50, 2, False), "BF16", "small"),
        case(_config(5, hidden, 3, 3, 6, 33, 3, True), "F32", "awkward"),
        case(_config(9, 130, 4, 2, 8, 21, 2, False), "F16", "awkward"),
    ]


def _run_load(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    from tinyvllm_ref.checkpoint.safetensors import TensorView
    from tinyvllm_ref.config import ModelConfig, RopeScaling

    config = ModelConfig(**inputs["config"], rope_scaling=RopeScaling(), eos_token_ids=())
    views = {
        name: TensorView(entry["dtype"], tuple(entry["shape"]), memoryview(entry["data"].tobytes()))
        for name, entry in inputs["tensors"].items()
    }
    copies = 0
    arrays = lab.cp.ndarray
    emulated = getattr(lab.cp, "is_emulation", False)
    if emulated:  # a card's array type can not be changed; there the copies are not counted
        original = arrays.set

        def counted(self: object, *args: object, **kwargs: object) -> None:
            nonlocal copies
            copies += 1
            original(self, *args, **kwargs)

        arrays.set = counted
    try:
        weights = answer(views, config)
    finally:
        if emulated:
            arrays.set = original
    if not isinstance(weights, dict):
        raise TypeError(
            f"load_weights gave {type(weights).__name__}; it must give a dict of name -> device array"
        )
    # Somebody else now asks for memory, and writes it. An arena that nobody holds any more would be given away here.
    held = [lab.get(array, name).nbytes for name, array in weights.items()]
    padded = sum(-(-size // 256) * 256 for size in held)
    lab.output(padded, np.uint8).fill(0xFF)
    starts = {name: int(array.data.ptr) for name, array in weights.items()}
    ends = [starts[name] + size for name, size in zip(weights, held, strict=True)]
    return {
        "weights": {name: lab.get(array, name) for name, array in weights.items()},
        "bytes past a multiple of 256": {name: start % 256 for name, start in starts.items()},
        "one arena": bool(weights) and max(ends) - min(starts.values()) <= padded,
        "copies": copies,
    }


def _expect_load(inputs: Any) -> dict[str, Any]:
    kinds = {"BF16": np.uint16, "F32": np.float32, "F16": np.float16}

    def bits(name: str) -> Any:
        entry = inputs["tensors"][name]
        values = entry["data"].view(kinds[entry["dtype"]]).reshape(entry["shape"])
        return values if entry["dtype"] == "BF16" else float_to_bf16(values.astype(np.float32))

    plan = weight_plan(_model_config(inputs["config"]))
    return {
        "weights": {group.name: np.concatenate([bits(name) for name in group.sources]) for group in plan},
        "bytes past a multiple of 256": {group.name: 0 for group in plan},
        "one arena": True,
    }


def _one_of_each(inputs: Any, outputs: Any, observed: Any) -> str | None:
    if observed.allocations != 1:
        return f"The weights are right, with {observed.allocations} allocations on the device. One is asked for: the arena"
    if outputs["copies"] > 1:
        return (
            f"The weights are right, with {outputs['copies']} copies from the host to the device. One is enough: put the "
            "tensors together on the host first"
        )
    return None


_LOAD_TEXT = """LAYER = {
    "input_layernorm": ["input_layernorm"],
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "o_proj": ["self_attn.o_proj"],
    "post_attention_layernorm": ["post_attention_layernorm"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down_proj": ["mlp.down_proj"],
}


def bf16_bits(view):
    if view.dtype == "BF16":
        return np.frombuffer(view.data, np.uint16)
    numbers = np.frombuffer(view.data, {"F16": np.float16, "F32": np.float32}[view.dtype])
    return float_to_bf16(numbers.astype(np.float32))


def load_weights(views, config):
    stacks = {"embed_tokens": ["model.embed_tokens.weight"]}
    for i in range(config.num_hidden_layers):
        for name, tensors in LAYER.items():
            stacks[f"layers.{i}.{name}"] = [f"model.layers.{i}.{tensor}.weight" for tensor in tensors]
    stacks["norm"] = ["model.norm.weight"]
    if not config.tie_word_embeddings:
        stacks["lm_head"] = ["lm_head.weight"]
    bits = {name: [bf16_bits(views[tensor]) for tensor in stack] for name, stack in stacks.items()}
    offsets, total = plan_arena([[part.nbytes for part in parts] for parts in bits.values()])
    host = np.zeros(total, np.uint8)
    for starts, parts in zip(offsets, bits.values()):
        for start, part in zip(starts, parts):
            host[start : start + part.nbytes] = part.view(np.uint8)
    arena = cp.asarray(host)
    weights = {}
    for (name, parts), starts in zip(bits.items(), offsets):
        size = sum(part.nbytes for part in parts)
        rows = arena[starts[0] : starts[0] + size].view(np.uint16)
        weights[name] = rows.reshape(-1, *views[stacks[name][0]].shape[1:])
    return weights
"""


def _load(*changes: tuple[str, str]) -> str:
    text = _LOAD_TEXT
    return with_changes(text, changes)


_UPLOAD = "    arena = cp.asarray(host)\n"
_PACK = """    host = np.zeros(total, np.uint8)
    for starts, parts in zip(offsets, bits.values()):
        for start, part in zip(starts, parts):
            host[start : start + part.nbytes] = part.view(np.uint8)
"""
_COPY_EACH = """    arena = cp.empty(total, np.uint8)
    for starts, parts in zip(offsets, bits.values()):
        for start, part in zip(starts, parts):
            arena[start : start + part.nbytes].set(part.view(np.uint8))
"""

_LOAD = Exercise(
    id="04.5",
    title="the weights in one arena",
    answer="load_weights",
    kind="function",
    arguments=("views", "config"),
    cases=_load_cases,
    run=_run_load,
    expected=_expect_load,
    points={"small": 1, "awkward": 2},
    verify=_one_of_each,
    builds_on=("04.1",),
    uses=("float_to_bf16",),
    makes={"load_weights": "load_weights"},
    file="load_weights.py",
    hints=Hints(
        question="Take {case}. Which tensors make \"layers.0.qkv\", in which order, and how many bytes does it take in the arena? "
        "Which bytes does it take?",
        rule="Five steps. Make the bits of every tensor, group by group. Give plan_arena their sizes in bytes. Make a host array of "
        "`total` bytes and put every tensor at its offset. Copy that array to the device, all at once. Cut the arena into "
        "views: bytes from a group's first offset to its end, seen as uint16, with as many columns as the group's tensors "
        "have.\n\n"
        "By hand: a group at offset 512 of two tensors (2, 8) and (1, 8) takes 3 * 8 * 2 = 48 bytes, arena[512:560]; as "
        "uint16 these are 24 elements, reshaped to (3, 8).",
        code="""bits = {name: [bf16_bits(views[tensor]) for tensor in stack] for name, stack in stacks.items()}
offsets, total = plan_arena([[part.____ for part in parts] for parts in bits.values()])
host = np.zeros(____, np.uint8)
for starts, parts in zip(offsets, bits.values()):
    for start, part in zip(starts, parts):
        host[____ : ____] = part.view(np.uint8)
arena = ____
weights = {}
for (name, parts), starts in zip(bits.items(), offsets):
    size = ____
    rows = arena[____ : ____].view(np.uint16)
    weights[name] = rows.reshape(-1, *views[stacks[name][0]].shape[1:])
return weights""",
    ),
    mistakes=(
        Mistake(
            "a copy per tensor",
            _load((_PACK, ""), (_UPLOAD, _COPY_EACH)),
            "The bytes arrive, in as many copies as there are tensors. Each copy has a fixed cost of some microseconds, and "
            "small ones never reach the speed of the bus. Put the tensors together on the host, and send once.",
            "How often does your function talk to the card?",
        ),
        Mistake(
            "an allocation per group",
            _load(
                (_PACK + _UPLOAD, ""),
                ("        rows = arena[starts[0] : starts[0] + size].view(np.uint16)\n",
                 "        rows = cp.asarray(np.concatenate(parts))\n"),
            ),
            "Every group has memory of its own. One arena is asked for: one allocation that can not fail half way, and one "
            "range of addresses.",
            "How many times do you ask the device for memory?",
        ),
        Mistake(
            "offsets in elements",
            _load(("[[part.nbytes for part in parts]", "[[part.size for part in parts]")),
            "The plan is in bytes, and it was given the numbers of elements, which are half as many: each tensor overwrites the "
            "second half of the one before it.",
            "plan_arena wants sizes in bytes. What did it get for a tensor of 8 bfloat16 numbers?",
        ),
        Mistake(
            "sizes taken from the file",
            _load(("[[part.nbytes for part in parts] for parts in bits.values()]",
                   "[[len(views[tensor].data) for tensor in stack] for stack in stacks.values()]")),
            "In a checkpoint of 32-bit numbers a tensor has four bytes a number, in the arena two. Planned with the file's sizes, "
            "the tensors of a group no longer touch each other.",
            "How many bytes has this tensor in the file, and how many after it became bfloat16?",
        ),
        Mistake(
            "up before gate",
            _load(('["mlp.gate_proj", "mlp.up_proj"]', '["mlp.up_proj", "mlp.gate_proj"]')),
            "gate_up holds the gate's rows first, then up's. Swapped, SiLU is applied to the wrong half of every product, and "
            "nothing complains: the shapes are the same.",
            "Which tensor does row 0 of gate_up come from?",
        ),
        Mistake(
            "query, value, key",
            _load(('"self_attn.k_proj", "self_attn.v_proj"', '"self_attn.v_proj", "self_attn.k_proj"')),
            "qkv is query, then key, then value. Key and value have the same shape, so that only the numbers tell them apart.",
            "Which tensor do the last rows of qkv come from?",
        ),
        Mistake(
            "a view that outlives its arena",
            _load(
                ("        rows = arena[starts[0] : starts[0] + size].view(np.uint16)\n",
                 "        memory = cp.cuda.UnownedMemory(arena.data.ptr + starts[0], size, None)\n"
                 "        rows = cp.ndarray((size // 2,), np.uint16, cp.cuda.MemoryPointer(memory, 0))\n"),
            ),
            "These arrays know an address and hold nothing. When the function returns, the last reference to the arena is gone, the "
            "pool gives its memory to whoever asks next, and the weights are theirs. A slice of the arena keeps it alive.",
            "After your function has returned, which object still refers to the arena?",
        ),
        Mistake(
            "LM head left out",
            _load(('    if not config.tie_word_embeddings:\n        stacks["lm_head"] = ["lm_head.weight"]\n', "")),
            "Where the embeddings are not tied the checkpoint has an LM head of its own, and the arena must have it too.",
            "What does this config say about tie_word_embeddings?",
        ),
        Mistake(
            "bits of the file taken as they are",
            _load(("    if view.dtype == \"BF16\":\n        return np.frombuffer(view.data, np.uint16)\n",
                   "    return np.frombuffer(view.data, np.uint16)\n")),
            "A float32 read as two 16-bit numbers gives twice as many numbers, and half of them are rubbish. What is not BF16 "
            "must be rounded first.",
            "This checkpoint is not in BF16. How many bfloat16 numbers does one of its numbers become?",
        ),
    ),
)  # fmt: skip


# ---------------- 04.2: predicted


@functools.cache
def _loaded(wrong: bool = False) -> tuple[dict[str, Any], int]:
    """tiny-stories through a loader, and how many copies it made."""
    config, views = open_checkpoint(resolve("tiny-stories"))
    namespace: dict[str, Any] = {"np": np, "cp": emulation}
    exec(_plan() + (_load((_PACK, ""), (_UPLOAD, _COPY_EACH)) if wrong else _load()), namespace)
    copies, original = [0], emulation.ndarray.set

    def counted(self: Any, *args: Any) -> None:
        copies[0] += 1
        original(self, *args)

    emulation.ndarray.set = counted
    try:
        weights = namespace["load_weights"](views, config)
    finally:
        emulation.ndarray.set = original
    return weights, copies[0]


def _padding() -> int:
    """Bytes of the arena that belong to no group."""
    weights, _ = _loaded()
    arena = next(iter(weights.values())).data.mem
    return int(arena.size) - sum(int(array.nbytes) for array in weights.values())


_PREDICTION = Prediction(
    id="04.2",
    title="copies and padding",
    quantities={
        "copies": Quantity("copies, if every tensor is sent by itself", lambda: _loaded(True)[1]),
        "padding": Quantity("padding in the arena", _padding, "bytes"),
    },
    explains="Five layers have 9 tensors each (q, k, v, o, gate, up, down and two norms); with the embedding table and the last norm "
    "that is 47. Of the groups only the 11 norms end off a multiple of 256: 192 numbers are 384 bytes, so each is followed by 128 "
    "bytes of nothing: 1,408 bytes of several million.",
    hints=Hints(
        question="Which groups of tiny-stories have a size that is no multiple of 256? How large is a norm, and how many norms "
        "are there?",
        rule="A norm has one number for each of the 192 columns: 384 bytes, and the next multiple of 256 is 512. Matrices have 192 or "
        "512 columns, and rows by the dozen: their sizes are multiples of 256. Count the tensors from the table: 9 a layer, and "
        "those that belong to no layer.",
        code="copies = 5 * ____ + ____\npadding = (5 * ____ + 1) * (512 - ____)",
    ),
)


# ---------------- what is drawn and measured


def _kind(name: str) -> str:
    last = name.split(".")[-1]
    return "norms" if "norm" in last else last


def _picture(answer: Any, cp: Any) -> Any:
    """The arena that the learner's loader made for tiny-stories, with its first layer magnified."""
    config, views = open_checkpoint(resolve("tiny-stories"))
    weights = answer(views, config)
    base = min(int(array.data.ptr) for array in weights.values())
    segments = []
    for name, array in weights.items():
        start = int(array.data.ptr) - base
        segments.append(figures.Segment(name, start, start + int(array.nbytes), _kind(name)))
    layer = [segment for segment in segments if segment.name.startswith("layers.0.")]
    return figures.byte_strip(
        segments,
        title="tiny-stories in your arena",
        end=-(-max(segment.stop for segment in segments) // _ALIGNMENT) * _ALIGNMENT,
        zoom=(min(segment.start for segment in layer), max(segment.stop for segment in layer)),
    )


def _make_move(tensors: int, elements: int) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        size = 2 * elements
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        file, arena = cp.zeros(tensors * elements, np.uint16), cp.empty(tensors * padded // 2, np.uint16)
        source = cp.asarray(np.arange(tensors, dtype=np.int64) * size)
        target = cp.asarray(np.arange(tensors, dtype=np.int64)[::-1] * padded)
        count = cp.asarray(np.full(tensors, elements, np.int64))
        grid = (-(-elements // 256), tensors)
        return lambda: answer(grid, (256,), (file, arena, source, target, count))

    return make


_LARGE, _SMALL = (64, 1_048_583), (3, 1100)
_WORK = Work(
    label=f"{_LARGE[0]} tensors of {_LARGE[1]:,} elements",
    make=_make_move(*_LARGE),
    read_bytes=2 * _LARGE[0] * _LARGE[1],
    write_bytes=2 * _LARGE[0] * _LARGE[1],
    small=_make_move(*_SMALL),
    small_read_bytes=2 * _SMALL[0] * _SMALL[1],
    small_write_bytes=2 * _SMALL[0] * _SMALL[1],
    small_label=f"{_SMALL[0]} tensors of {_SMALL[1]:,} elements",
    note="About half of the sectors carry source, target and count, which every warp reads anew for its 64 bytes of the "
    "tensor. A thread that moved more bytes would share them better.",
)

LESSON = Lesson(
    number="04",
    slug="cuda_memory",
    title="CUDA memory",
    part=2,
    minutes=55,
    exercises=(_PLAN, _PREDICTION, _MOVE, _TIME, _LOAD),
    engine=EngineCard(
        mistakes=(("04.5", "up before gate"), ("04.5", "query, value, key")),
        note="Your loader runs once, before the first token; every number that the engine multiplies by lies where it put it.",
    ),
    pictures={"04.5": _picture},
    works={"04.3": _WORK},
)
