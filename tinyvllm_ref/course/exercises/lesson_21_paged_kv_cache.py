"""Lesson 21: a cache in pages. Who owns which block, where a token lies, and how a leak is found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tinyvllm_ref.bf16 import float_to_bf16
from tinyvllm_ref.block_manager import BlockManager
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
    Work,
    with_changes,
)


def _changed(text: str, *changes: tuple[str, str]) -> str:
    return with_changes(text, changes)


# ---------------- 21.1: what contiguous caches waste

LENGTHS = (30, 100, 17, 250, 64, 500, 33, 128)
"""Tokens that eight requests hold at some moment; printed in the lesson."""


def _empty_slots(block_size: int) -> int:
    """Reserved slots without a token, counted by asking a block manager."""
    blocks = BlockManager(num_blocks=8 * 1024 // block_size, block_size=block_size)
    for number, length in enumerate(LENGTHS):
        assert blocks.allocate(str(number), length)
    reserved = sum(len(blocks.table(str(number))) for number in range(len(LENGTHS))) * block_size
    return reserved - sum(LENGTHS)


_WASTE = Prediction(
    id="21.1",
    title="how much is wasted?",
    quantities={
        "contiguous": Quantity("empty slots, 1,024 reserved for each request", lambda: _empty_slots(1024)),
        "paged": Quantity("empty slots, in blocks of 16", lambda: _empty_slots(16)),
    },
    explains="The eight requests hold 1,122 tokens. In one piece each they reserve 8 x 1,024 = 8,192 slots, and 7,070 of these, "
    "86 %, hold nothing: memory that is taken, empty, and no one else's. In blocks of 16 a request wastes at most 15 slots, the "
    "rest of its last block: 74 blocks are 1,184 slots, and 62 of them, 5 %, are empty. A request whose length is a multiple of "
    "16, such as 64, wastes none.",
    hints=Hints(
        question="A request of 17 tokens: how many blocks of 16 does it need, and how many of their slots stay empty?",
        rule="Contiguous: 1,024 less the length, added up. Paged: round each length up to a multiple of 16, and subtract it. By "
        "hand: 30 tokens need 2 blocks, 32 slots, 2 of them empty; 17 tokens need 2 blocks, 15 of their slots empty.",
        code="contiguous = 8 * 1024 - ____\npaged = 2 + 12 + 15 + ____",
    ),
)


# ---------------- 21.2: from a token to its slot


def _slot_cases(rng: np.random.Generator) -> list[Case]:
    def case(
        label: str, spans: list[tuple[int, int]], size: int, group: str, tables: Any = None, spare: int = 0
    ) -> Case:
        """`spans`: (first position, number of tokens) of each request."""
        most = max(-(-(start + count) // size) for start, count in spans) + spare
        if tables is None:
            blocks = rng.permutation(most * len(spans)).astype(np.int32)
            tables = np.full((len(spans), most), -1, np.int32)
            for row, (start, count) in enumerate(spans):
                need = -(-(start + count) // size)
                tables[row, :need] = blocks[row * most : row * most + need]
        return Case(
            label,
            {
                "positions": np.concatenate([np.arange(s, s + c) for s, c in spans]).astype(np.int32),
                "requests": np.repeat(np.arange(len(spans)), [c for _, c in spans]).astype(np.int32),
                "block_tables": np.asarray(tables, np.int32),
                "block_size": size,
            },
            group,
        )

    ragged = [(0, int(n)) for n in rng.integers(20, 90, 7)]
    decode = [(int(n), 1) for n in rng.integers(3, 200, 9)]
    return [
        case("5 tokens, blocks of 4, table 2, 0", [(0, 5)], 4, "small", [[2, 0]]),
        case("3 and 4 tokens, blocks of 2", [(0, 3), (0, 4)], 2, "small", [[3, 1], [4, 0]]),
        case("7 ragged prompts, blocks of 16", ragged, 16, "awkward", spare=2),
        case("9 decode steps, blocks of 3", decode, 3, "awkward", spare=1),
        case("blocks of 1", [(0, 6), (0, 4)], 1, "awkward", spare=1),
        case(
            "blocks 200,000,000 and 150,000,000 of a huge cache", [(14, 4)], 16, "awkward", [[200_000_000, 150_000_000]]
        ),
    ]  # fmt: skip


def _run_slots(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    tokens, max_blocks = len(inputs["positions"]), inputs["block_tables"].shape[1]
    arrays = [lab.input(name, inputs[name]) for name in ("positions", "requests", "block_tables")]
    slots = lab.output(tokens, np.int64)
    sizes = (np.int32(tokens), np.int32(max_blocks), np.int32(inputs["block_size"]))
    answer((-(-tokens // 128),), (128,), (*arrays, slots, *sizes))
    return {"slots": lab.get(slots)}


def _expect_slots(inputs: Mapping[str, Any]) -> dict[str, Any]:
    positions, size = inputs["positions"].astype(np.int64), inputs["block_size"]
    blocks = inputs["block_tables"].astype(np.int64)[inputs["requests"], positions // size]
    return {"slots": blocks * size + positions % size}


_SLOT_LINES = """    if (t < tokens) {
        const int* table = block_tables + requests[t] * max_blocks;
        int position = positions[t];
        slots[t] = (long long)table[position / block_size] * block_size + position % block_size;
    }"""
_SLOT_VALUE = "(long long)table[position / block_size] * block_size + position % block_size"


def _slots(*changes: tuple[str, str]) -> str:
    return _changed(
        f'''find_slots = cp.RawKernel(r"""
extern "C" __global__ void find_slots(const int* positions, const int* requests, const int* block_tables,
                                      long long* slots, int tokens, int max_blocks, int block_size) {{
    int t = blockIdx.x * blockDim.x + threadIdx.x;
{_SLOT_LINES}
}}
""", "find_slots")
''',
        *changes,
    )


_SLOTS = Exercise(
    id="21.2",
    title="from a token to its slot",
    answer="find_slots",
    kind="kernel",
    cases=_slot_cases,
    run=_run_slots,
    expected=_expect_slots,
    points={"small": 1, "awkward": 1, "clean": 1},
    hints=Hints(
        question="Take {case}. The token at the last position: which entry of its request's table names its block, and how "
        "many tokens lie before it in that block?",
        rule="The table of request r is row r of block_tables, so it begins r * max_blocks entries in. A token at position p "
        "lies in the block table[p / block_size], at the offset p % block_size. Before that block lie `block` whole blocks of "
        "block_size slots each. The product can be larger than an int holds: make one factor a long long first.\n\n"
        "By hand, blocks of 4 and the table 2, 0: position 3 lies in block 2 at offset 3, slot 2 * 4 + 3 = 11. Position 4 lies "
        "in block 0 at offset 0, slot 0.",
        code="""if (t < ____) {
    const int* table = block_tables + ____;
    int position = positions[t];
    slots[t] = (long long)table[____] * ____ + ____;
}""",
    ),
    mistakes=(
        Mistake(
            "slot without block x size",
            _slots((_SLOT_VALUE, "table[position / block_size] + position % block_size")),
            "A block number counts blocks, and a slot counts tokens: block 2 begins block_size x 2 slots in, not 2. So the blocks "
            "overlap, and tokens of different requests get the same slot.",
            "With blocks of 4, which slots belong to block 2?",
        ),
        Mistake(
            "table indexed by token",
            _slots(("table[position / block_size]", "table[position]")),
            "The table has one entry a block, not one a token. The block's place in the table is position / block_size.",
            "How many entries of the table does a request of 5 tokens use, with blocks of 4?",
        ),
        Mistake(
            "quotient and remainder exchanged",
            _slots((_SLOT_VALUE, "(long long)table[position % block_size] * block_size + position / block_size")),
            "position / block_size is the block's place in the table, and position % block_size the offset within the block; you have "
            "them the other way round.",
            "With blocks of 4, which place in the table does position 3 have: 0 or 3?",
            variants=(_slots(("table[position / block_size]", "table[position % block_size]")),),
        ),
        Mistake(
            "logical block used as physical",
            _slots(("table[position / block_size]", "(position / block_size)")),
            "position / block_size says which block of the *request* it is: the first, the second. Where that block lies in the "
            "cache only the table knows. Without it all requests write to the same place.",
            "Two requests both have a token at position 0. Which slot does each get from your kernel?",
        ),
        Mistake(
            "offset forgotten",
            _slots((" + position % block_size", "")),
            "All tokens of a block get the block's first slot. The offset within the block is position % block_size.",
            "Positions 0 and 1 lie in the same block. Do they have the same slot?",
        ),
        Mistake(
            "offset counted from the text's start",
            _slots(("+ position % block_size", "+ position")),
            "The offset is counted from the start of the block: position % block_size. From the second block on, `position` "
            "runs past the end of the block.",
            "With blocks of 4, how many tokens of its block lie before position 5?",
        ),
        Mistake(
            "the first request's table for all",
            _slots(("block_tables + requests[t] * max_blocks", "block_tables")),
            "Each request has a row of its own in block_tables, and request r's begins r * max_blocks entries in.",
            "Where in block_tables does the table of request 1 begin?",
        ),
        Mistake(
            "a product too large for an int",
            _slots(("(long long)table", "table")),
            "int times int is an int, and 200,000,000 x 16 does not fit into one: the sign flips before the result is stored. "
            "Make one factor a long long first.",
            "What is the largest number that an int holds?",
            variants=(_slots(("(long long)table[position / block_size] * block_size", "(long long)(table[position / block_size] * block_size)")),),
        ),
        Mistake(
            "no bounds guard",
            _slots(("t < tokens", "true")),
            "The grid is rounded up to whole blocks of threads, so some threads have no token.",
            "How many threads run for 5 tokens, in blocks of 128?",
        ),
    ),
)  # fmt: skip


# ---------------- 21.3: keys and values into their slots


def _write_cases(rng: np.random.Generator) -> list[Case]:
    def case(tokens: int, heads: int, dim: int, blocks: int, size: int, group: str, skipped: int = 0) -> Case:
        slots = rng.permutation(blocks * size)[:tokens].astype(np.int64)
        slots[rng.permutation(tokens)[:skipped]] = -1
        inputs: dict[str, Any] = {
            "k": rng.standard_normal((tokens, heads, dim)).astype(np.float32),
            "v": rng.standard_normal((tokens, heads, dim)).astype(np.float32),
            "slots": slots,
            "key_cache": float_to_bf16(rng.standard_normal((blocks, size, heads, dim)).astype(np.float32)),
            "value_cache": float_to_bf16(rng.standard_normal((blocks, size, heads, dim)).astype(np.float32)),
        }
        label = f"{tokens} token{'s' if tokens > 1 else ''} of {heads} x {dim}, {blocks} blocks of {size}"
        return Case(label + (f", {skipped} skipped" if skipped else ""), inputs, group)

    return [
        case(2, 1, 2, 2, 2, "small"),
        case(5, 2, 32, 3, 4, "small"),
        case(1, 1, 1, 1, 1, "awkward"),
        case(7, 3, 33, 5, 3, "awkward", skipped=2),
        case(20, 3, 400, 2, 16, "awkward"),
        case(int(rng.integers(40, 60)), 2, 20, 70, 1, "awkward", skipped=1),
    ]


def _run_write(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    k, v, slots = (lab.input(name, inputs[name]) for name in ("k", "v", "slots"))
    key_cache, value_cache = lab.inout(inputs["key_cache"]), lab.inout(inputs["value_cache"])
    answer(k, v, slots, key_cache, value_cache)
    return {"key_cache": lab.get(key_cache), "value_cache": lab.get(value_cache)}


def _expect_write(inputs: Mapping[str, Any]) -> dict[str, Any]:
    expected = {}
    for name, new in (("key_cache", "k"), ("value_cache", "v")):
        cache = inputs[name].copy()
        rows = cache.reshape(-1, *cache.shape[2:])
        there = inputs["slots"] >= 0
        rows[inputs["slots"][there]] = float_to_bf16(inputs[new])[there]
        expected[name] = cache
    return expected


def _writes_are_neighbours(inputs: Any, outputs: Any, observed: Any) -> str | None:
    if not observed.launches:
        return "The values are right, and no kernel has run: they were computed in Python. Here a kernel is asked for"
    tokens, heads, dim = inputs["k"].shape
    if heads * dim < 1000:
        return None
    sectors, fewest = observed.total("global_sectors"), 2 * tokens * heads * dim * 6 / 32
    if sectors > 4 * fewest:
        return (
            f"The caches are right, and {sectors:,} sectors were touched where about {fewest:,.0f} are enough: threads side by "
            "side should write columns side by side"
        )
    return None


_WRITE_LINES = """    long long slot = slots[blockIdx.x];
    if (slot < 0) return;
    size_t from = (size_t)blockIdx.x * width, to = (size_t)slot * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        key_cache[to + c] = float_to_bf16(k[from + c]);
        value_cache[to + c] = float_to_bf16(v[from + c]);
    }"""


def _write(*changes: tuple[str, str], threads: int = 128) -> str:
    return _changed(
        f'''kv_write_kernel = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void kv_write_kernel(const float* k, const float* v, const long long* slots,
                                           bf16* key_cache, bf16* value_cache, int width, int block_size) {{
{_WRITE_LINES}
}}
""", "kv_write_kernel")


def kv_write(k, v, slots, key_cache, value_cache):
    tokens, heads, head_dim = k.shape
    block_size = key_cache.shape[1]
    if tokens:
        arguments = (k, v, slots, key_cache, value_cache, np.int32(heads * head_dim), np.int32(block_size))
        kv_write_kernel((tokens,), ({threads},), arguments)
    return key_cache, value_cache
''',
        *changes,
    )


_WRITE = Exercise(
    id="21.3",
    title="keys and values into their slots: a part",
    answer="kv_write",
    kind="function",
    arguments=("k", "v", "slots", "key_cache", "value_cache"),
    uses=("BF16_CUDA",),
    cases=_write_cases,
    run=_run_write,
    expected=_expect_write,
    points={"small": 1, "awkward": 1, "clean": 1},
    verify=_writes_are_neighbours,
    makes={"kv_write": "kv_write"},
    file="kv_write.py",
    hints=Hints(
        question="Take {case}. Where in the cache, counted in numbers and not in slots, does the row of the first token begin?",
        rule="A slot is a row of heads * head_dim = width numbers, and the blocks lie one behind the other: the row of slot s "
        "begins s * width numbers in, whatever the block size is. The token's own row of k begins blockIdx.x * width in. The "
        "threads of the block share the columns, in a strided loop. A slot below 0 means: write nothing.\n\n"
        "By hand, width 2 and slot 3: columns 0 and 1 go to the numbers 6 and 7 of the cache.",
        code="""long long slot = slots[____];
if (slot < 0) return;
size_t from = (size_t)blockIdx.x * ____, to = (size_t)slot * ____;
for (int c = threadIdx.x; c < ____; c += blockDim.x) {
    key_cache[to + c] = float_to_bf16(____);
    value_cache[to + c] = ____;
}""",
    ),
    mistakes=(
        Mistake(
            "the slot as a place in numbers",
            _write(("(size_t)slot * width", "(size_t)slot")),
            "A slot counts tokens, and each takes `width` numbers: slot s begins s * width numbers in. So the rows of neighbours "
            "overlap.",
            "With a width of 2, which numbers of the cache does slot 3 own?",
        ),
        Mistake(
            "the slot taken for a block",
            _write(("(size_t)slot * width", "(size_t)slot * block_size * width")),
            "The slot has block x block_size in it already: it counts tokens from the start of the cache. Multiplied by block_size "
            "once more, it points far past its place.",
            "With blocks of 2, which slot is the second token of block 0?",
        ),
        Mistake(
            "written in the order of the batch",
            _write(("(size_t)slot * width", "(size_t)blockIdx.x * width")),
            "Token t of the batch is written to row t. The slots say where each one lies; in the next step other tokens would be "
            "written over these.",
            "Where does your kernel use `slot`?",
        ),
        Mistake(
            "a slot of -1 is not skipped",
            _write(("    if (slot < 0) return;\n", "")),
            "A slot of -1 belongs to a row that only pads the batch: nothing may be written for it. Row -1 lies in front of the "
            "cache.",
            "Which row of the cache is row -1?",
        ),
        Mistake(
            "slot 0 skipped too",
            _write(("if (slot < 0) return;", "if (slot <= 0) return;")),
            "Slot 0 is the first slot of block 0, and as good as any other. Only -1 marks a row that pads.",
            "Which slot is the first token of block 0 in?",
        ),
        Mistake(
            "converted to a whole number",
            _write(("float_to_bf16(k[from + c])", "(bf16)k[from + c]"), ("float_to_bf16(v[from + c])", "(bf16)v[from + c]")),
            "`bf16` is another name of a 16-bit whole number, so the cast cuts 1.9 down to 1. The bits of a BF16 come from float_to_bf16.",
            "Which bits has 1.0 in BF16, and which has the whole number 1?",
        ),
        Mistake(
            "only the first columns",
            _write(
                ("for (int c = threadIdx.x; c < width; c += blockDim.x) {", "int c = threadIdx.x;\n    if (c < width) {"),
                threads=32,
            ),
            "Each thread writes one column, and there are more columns than threads: the rest of the row keeps what was there. "
            "Walk on in steps of blockDim.x.",
            "How many columns has a row in your failing case, and how many threads has your block?",
            variants=(
                _write(("for (int c = threadIdx.x; c < width; c += blockDim.x) {", "int c = threadIdx.x;\n    if (c < width) {"), threads=64),
                _write(("for (int c = threadIdx.x; c < width; c += blockDim.x) {", "int c = threadIdx.x;\n    if (c < width) {")),
            ),
        ),
        Mistake(
            "keys written as values too",
            _write(("float_to_bf16(v[from + c])", "float_to_bf16(k[from + c])")),
            "The value cache gets the keys. Attention would find the right tokens and read the wrong thing from them.",
            "Which array does your second line read?",
        ),
        Mistake(
            "the upper half of the bits",
            _write(("float_to_bf16(k[from + c])", "(bf16)(__float_as_uint(k[from + c]) >> 16)"),
                   ("float_to_bf16(v[from + c])", "(bf16)(__float_as_uint(v[from + c]) >> 16)")),
            "Cutting off the lower 16 bits rounds towards 0, always. float_to_bf16 rounds to the nearest.",
            "Is 1.99 nearer to the number below it, or above?",
        ),
        Mistake(
            "slots read as 32-bit numbers",
            _write(("const long long* slots", "const int* slots")),
            "slots is int64: every number takes 8 bytes. Read as int, every second one you get is the upper half of a slot, which "
            "is 0.",
            "How many bytes lie between slots[0] and slots[1]?",
        ),
    ),
)  # fmt: skip


# ---------------- 21.4: the block manager


def _manager_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, blocks: int, size: int, script: str | list[str], group: str) -> Case:
        steps = script.split("; ") if isinstance(script, str) else script
        return Case(label, {"num_blocks": blocks, "block_size": size, "script": steps}, group)

    def fuzz(count: int) -> list[str]:
        script, live = [], set()
        for _ in range(count):
            name = "abcdef"[int(rng.integers(6))]
            if name in live and rng.random() < 0.35:
                script.append(f"free {name}")
                live.discard(name)
            elif name not in live and rng.random() < 0.15:
                script.append(f"free {name}")  # never asked for anything, or freed already
            else:
                # Whether it is refused is not known here: a free of one without blocks must raise, which is also a test.
                script.append(f"allocate {name} {int(rng.integers(1, 40))}")
                live.add(name)
        return script

    size, many = int(rng.integers(3, 6)), int(rng.integers(11, 17))
    return [
        case("4 blocks of 4, one request of 5 tokens", 4, 4, "allocate a 5", "small"),
        case("a request grows token by token", 4, 4, [f"allocate a {n}" for n in range(1, 14)], "small"),
        case("two requests, one ends", 4, 4, "allocate a 4; allocate b 6; free a; allocate b 13", "small"),
        case("the pool is full", 3, 2, "allocate a 2; allocate b 5; allocate b 4; allocate c 1; free a; free b; allocate a 6", "refusals"),
        case("freed twice", 3, 2, "allocate a 3; free a; free a; allocate b 6", "refusals"),
        case("freed and never allocated", 3, 2, "free a; allocate b 3", "refusals"),
        case("refused, and freed all the same", 3, 2, "allocate a 2; allocate b 5; free b; allocate b 4; free b", "refusals"),
        case("fewer tokens than it has room for", 8, 3, "allocate a 7; allocate a 2; allocate a 9; allocate b 15", "awkward"),
        case("blocks of 1", 5, 1, "allocate a 3; allocate b 3; allocate b 2; free a; allocate b 4", "awkward"),
        case("200 random steps", many, size, fuzz(200), "fuzz"),
        case("another 200", 7, 16, fuzz(200), "fuzz"),
        case("damaged on purpose: check() must say so", 4, 2, "allocate a 5; lose a; anew; allocate a 3; allocate b 3; share a b; anew; allocate a 3; both a", "check"),
    ]  # fmt: skip


def _run_manager(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    def said(call: Any, *arguments: Any) -> str:
        try:
            call(*arguments)
        except Exception:
            return "raises"
        return "passes"

    def wrong(blocks: Any, before: dict[str, list[int]]) -> str:
        """What no allocator may do, whatever blocks it chooses."""
        seen: dict[int, str] = {}
        for name in sorted(live):
            table = list(blocks.table(name))
            if table[: len(before.get(name, []))] != before.get(name, []):
                return f"; the blocks that {name} had are others now"
            for block in table:
                if block in seen:
                    return f"; block {block} belongs to {seen[block]} and {name}"
                if not 0 <= block < inputs["num_blocks"]:
                    return f"; there is no block {block}"
                seen[block] = name
        return ""

    blocks = answer(inputs["num_blocks"], inputs["block_size"])
    live: set[str] = set()
    answers = []
    for step in inputs["script"]:
        if step == "anew":
            blocks, live = answer(inputs["num_blocks"], inputs["block_size"]), set()
            continue
        what, name, *rest = step.split()
        before = {one: list(blocks.table(one)) for one in live}
        if what == "allocate":
            given = blocks.allocate(name, int(rest[0]))
            live |= {name} if given else set()
            held = f"{len(blocks.table(name))} blocks" if name in live else "no blocks"
            result = f"{given}, {name} has {held}"
        elif what == "free":
            result = said(blocks.free, name)
            live.discard(name)
            before.pop(name, None)
        else:
            table = blocks.tables[name]
            if what == "lose":
                table.pop()
            elif what == "share":
                blocks.tables[rest[0]][0] = table[0]
            else:
                free = blocks.free_blocks  # a set is as good as a list
                (free.add if isinstance(free, set) else free.append)(table[0])
            answers.append(f"{step}: check() {said(blocks.check)}")
            continue
        healthy = said(blocks.check)
        trouble = "" if healthy == "passes" else "; check() raises"
        answers.append(f"{step}: {result}, {blocks.num_free} free{wrong(blocks, before)}{trouble}")
    return {"steps": answers}


def _expect_manager(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """By counting alone: which blocks are taken is the allocator's own choice."""
    size, free, answers = inputs["block_size"], inputs["num_blocks"], list[str]()
    held: dict[str, int] = {}
    for step in inputs["script"]:
        if step == "anew":
            free, held = inputs["num_blocks"], {}
            continue
        what, name, *rest = step.split()
        if what == "allocate":
            missing = max(0, -(-int(rest[0]) // size) - held.get(name, 0))
            given = missing <= free
            if given:
                held[name] = held.get(name, 0) + missing
                free -= missing
            result = f"{given}, {name} has " + (f"{held[name]} blocks" if name in held else "no blocks")
        elif what == "free":
            result = "passes" if name in held else "raises"
            free += held.pop(name, 0)
        else:
            answers.append(f"{step}: check() raises")
            continue
        answers.append(f"{step}: {result}, {free} free")
    return {"steps": answers}


_MANAGER_TEXT = """class BlockManager:
    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free_blocks = list(range(num_blocks))
        self.tables = {}

    @property
    def num_free(self):
        return len(self.free_blocks)

    def allocate(self, id, num_tokens):
        table = self.tables.get(id, [])
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > len(self.free_blocks):
            return False
        self.tables[id] = table
        for _ in range(missing):
            table.append(self.free_blocks.pop())
        return True

    def free(self, id):
        if id not in self.tables:
            raise KeyError(f"request {id!r} has no blocks: never allocated, or freed already")
        self.free_blocks += self.tables.pop(id)

    def table(self, id):
        return self.tables[id]

    def check(self):
        everywhere = sorted(self.free_blocks + [block for table in self.tables.values() for block in table])
        if everywhere != list(range(self.num_blocks)):
            raise RuntimeError(f"blocks lost, doubled or foreign: {everywhere}")
"""


def _manager(*changes: tuple[str, str]) -> str:
    return _changed(_MANAGER_TEXT, *changes)


_MISSING = "missing = -(-num_tokens // self.block_size) - len(table)"
_REFUSE = "        if missing > len(self.free_blocks):\n            return False\n"

_MANAGER = Exercise(
    id="21.4",
    title="who owns which block: a part",
    answer="BlockManager",
    kind="class",
    arguments=(),
    cases=_manager_cases,
    run=_run_manager,
    expected=_expect_manager,
    points={"small": 1, "refusals": 1, "awkward": 1, "fuzz": 1, "check": 1},
    makes={"BlockManager": "BlockManager"},
    file="block_manager.py",
    hints=Hints(
        question="Take {case}. At the step that differs: how many blocks must the request have afterwards, how many has it "
        "already, and how many are free?",
        rule="num_tokens is how many tokens the request has in all, so it needs num_tokens / block_size blocks, rounded up; "
        "-(-n // s) rounds up in Python. Subtract what it has. If that is more than there are free, answer False before "
        "anything is changed. Else move that many from the free list to its table. free: an unknown id is an error; else all "
        "its blocks go back and its table is gone. check: the free list and all tables together must hold every block from 0 to "
        "num_blocks - 1 just once; sorted() makes that easy to compare.\n\n"
        "By hand, blocks of 4: 4 tokens need 1 block, 5 need 2, 8 need 2, 9 need 3.",
        code="""def allocate(self, id, num_tokens):
    table = self.tables.get(id, [])
    missing = ____ - len(table)
    if missing > ____:
        return False
    self.tables[id] = table
    for _ in range(missing):
        table.append(____)
    return True

def free(self, id):
    if id not in self.tables:
        raise KeyError(f"request {id!r} has no blocks: never allocated, or freed already")
    self.free_blocks += ____

def check(self):
    everywhere = sorted(self.free_blocks + [block for table in self.tables.values() for block in table])
    if everywhere != ____:
        raise RuntimeError(f"blocks lost, doubled or foreign: {everywhere}")""",
    ),
    mistakes=(
        Mistake(
            "what it has already is forgotten",
            _manager((_MISSING, "missing = -(-num_tokens // self.block_size)")),
            "num_tokens counts all tokens of the request, and it has blocks from before, the last of them perhaps half empty. Only "
            "what is missing may be taken: else every new token takes the whole text's blocks once more.",
            "A request has 2 blocks of 4 and its 6th token comes. How many new blocks does it need?",
        ),
        Mistake(
            "a block taken one token late",
            _manager((_MISSING, "missing = num_tokens // self.block_size - len(table)")),
            "Dividing rounds down, so a block that is begun is not counted: the 5th token of blocks of 4 has no place. Round up.",
            "How many blocks of 4 do 5 tokens need?",
        ),
        Mistake(
            "a block taken one token early",
            _manager((_MISSING, "missing = num_tokens // self.block_size + 1 - len(table)")),
            "n // size + 1 is one too many where n is a multiple of the size: 4 tokens fill one block of 4, and no second is begun.",
            "How many blocks of 4 do 4 tokens need?",
        ),
        Mistake(
            "a refusal keeps what it took",
            _manager(
                (_REFUSE, ""),
                ("            table.append(self.free_blocks.pop())", "            if not self.free_blocks:\n                return False\n            table.append(self.free_blocks.pop())"),
            ),
            "The blocks are taken one by one until none is left, and then the answer is no: the request keeps what it could get, "
            "and nobody can run. First see whether there are enough; a refusal changes nothing.",
            "After allocate has said False, how many blocks are free, and how many were free before?",
        ),
        Mistake(
            "the last free block is never given",
            _manager(("missing > len(self.free_blocks)", "missing >= len(self.free_blocks)")),
            "Two blocks are enough for a request that misses two. Refuse only where more are missing than there are.",
            "One block is free and one is missing. Is that enough?",
        ),
        Mistake(
            "an empty pool is an error",
            _manager((_REFUSE, "")),
            "With nothing left, pop raises an IndexError and the engine stops. That the pool is full is no error but an everyday "
            "answer: False, and the request waits.",
            "What does allocate do when fewer blocks are free than it needs?",
        ),
        Mistake(
            "the blocks are not given back",
            _manager(("self.free_blocks += self.tables.pop(id)", "self.tables.pop(id)")),
            "The table is gone and its blocks are in no list: a leak. After some requests the engine has no memory left and does not "
            "know why.",
            "After free, in which list are the blocks?",
        ),
        Mistake(
            "the table stays after free",
            _manager(("self.free_blocks += self.tables.pop(id)", "self.free_blocks += self.tables[id]")),
            "The blocks are free, and still in the request's table: it would go on to write to blocks that another request gets "
            "next. Its table must go.",
            "After free, what does table(id) say?",
        ),
        Mistake(
            "freed twice without a word",
            _manager(
                ('        if id not in self.tables:\n            raise KeyError(f"request {id!r} has no blocks: never allocated, or freed already")\n', ""),
                ("self.tables.pop(id)", "self.tables.pop(id, [])"),
            ),
            "A second free of the same request is a sign that something went wrong elsewhere, and it passes without a word. Raise an "
            "error, so that it is found where it happens.",
            "Who would call free for a request that has no blocks, and would you like to know?",
            variants=(_manager(("self.free_blocks += self.tables.pop(id)", "self.free_blocks += self.tables[id]\n        self.tables[id] = []")),),
        ),
        Mistake(
            "a refusal leaves an empty table",
            _manager(("self.tables.get(id, [])", "self.tables.setdefault(id, [])")),
            "The table is made before it is known whether there are enough blocks. After a refusal an empty one is left, so a free of this "
            "request passes without a word. A refusal changes nothing.",
            "After allocate has said False to a new request, is its id in `tables`?",
        ),
        Mistake(
            "fewer than none are missing",
            _manager(
                (_REFUSE, _REFUSE + "        taken, self.free_blocks = self.free_blocks[:missing], self.free_blocks[missing:]\n"),
                ("        self.tables[id] = table\n        for _ in range(missing):\n            table.append(self.free_blocks.pop())\n",
                 "        self.tables[id] = table + taken\n"),
            ),
            "A request may ask for fewer tokens than it has room for. Then a number below 0 is missing, and a slice up to -2 takes all "
            "blocks but two. Nothing is missing where the table is long enough.",
            "A request has 3 blocks and asks for as many tokens as fit in one. What is your number of missing blocks, and what is the slice?",
        ),
        Mistake(
            "blocks given back before the end",
            _manager(("        return True\n", "        for _ in range(-missing):\n            self.free_blocks.append(table.pop())\n        return True\n")),
            "allocate makes a table long enough, and never shorter: what lies in the blocks is still the request's. Only free gives back.",
            "A request has 3 blocks and asks for as many tokens as fit in one. Is its table long enough?",
        ),
        Mistake(
            "the same block given to all",
            _manager(("self.free_blocks.pop()", "self.free_blocks[0]")),
            "The block is read from the free list and stays in it, so the next one who asks gets it too, and both write to the same "
            "memory. Take it out: pop.",
            "After a block has been given, may it still be in the free list?",
        ),
        Mistake(
            "check() finds nothing",
            _manager(('            raise RuntimeError(f"blocks lost, doubled or foreign: {everywhere}")', "            return False")),
            "check must raise an error where free list and tables together do not hold every block just once. Who only returns "
            "something is easily not listened to.",
            "Which lists hold the blocks, and what must they be together?",
            variants=(_manager(("if everywhere != list(range(self.num_blocks)):", "if False:")),),
        ),
        Mistake(
            "check() does not see a lost block",
            _manager(("if everywhere != list(range(self.num_blocks)):", "if len(set(everywhere)) != len(everywhere):")),
            "No block is there twice: that is half of it. A block that is in no list at all is lost memory, and must be found too.",
            "A block is in no table and not free. Does your check notice?",
        ),
        Mistake(
            "check() only counts",
            _manager(("if everywhere != list(range(self.num_blocks)):", "if len(everywhere) != self.num_blocks:")),
            "The count is right also where one block is lost and another is there twice. Compare which blocks they are.",
            "Block 1 is in two tables and block 3 is in none. How many do you count?",
        ),
        Mistake(
            "check() compares sets",
            _manager(("if everywhere != list(range(self.num_blocks)):", "if set(everywhere) != set(range(self.num_blocks)):")),
            "A set holds everything once, so a block that is in a table and free as well looks right: it will be given to a second request. "
            "Compare how often each one is there, too.",
            "Block 1 is in a table and in the free list. What does a set make of it?",
        ),
    ),
)  # fmt: skip


# ---------------- 21.5: shrink a leaking trace


def _shrink_cases(rng: np.random.Generator) -> list[Case]:
    def case(fault: str, length: int, group: str) -> Case:
        inputs = {"fault": fault, "trace": _leaking_trace(rng, fault, length)}
        return Case(f"{length} steps, a manager that {fault}", inputs, group)

    fault = "keeps what a refusal took"
    by_hand = {
        "4 steps by hand": ["allocate a 4", "free a", "allocate b 16", "allocate c 20"],
        "other 4 steps by hand": ["allocate a 8", "free a", "allocate b 24", "allocate c 12"],
    }
    more = {
        "3 steps by hand": ["allocate a 4", "allocate b 16", "allocate c 20"],
        "4 steps, one of them twice": ["allocate a 4", "allocate b 32", "free a", "allocate a 4"],
    }
    return [
        *(Case(label, {"fault": fault, "trace": trace}, "small") for label, trace in by_hand.items()),
        case("keeps what a refusal took", 12, "small"),
        *(Case(label, {"fault": fault, "trace": trace}, "small") for label, trace in more.items()),
        case("loses a full last block in free", 16, "awkward"),
        case("loses a block when a table grows after a free", 20, "awkward"),
        case("keeps what a refusal took", 40, "awkward"),
    ]


def _leaking_trace(rng: np.random.Generator, fault: str, length: int) -> list[str]:
    """A random trace, drawn again until it leaks."""

    def trace() -> list[str]:
        steps: list[str] = []
        live: list[str] = []
        while len(steps) < length:
            if live and rng.random() < 0.4:
                steps.append(f"free {live.pop(int(rng.integers(len(live))))}")
            else:
                name = "abcdefgh"[int(rng.integers(8))]
                steps.append(f"allocate {name} {int(rng.integers(1, 25))}")
                live += [name] * (name not in live)
        return steps

    while True:
        drawn = trace()
        inputs = {"fault": fault, "trace": drawn}
        if _run_shrink(lambda trace, leaks: trace, inputs, None)["still leaks"]:
            return drawn


def _run_shrink(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    """A pool of 8 blocks of 4 with a planted fault; `leaks(trace)` plays a trace on a fresh one."""
    calls = 0

    def leaks(trace: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls > 20_000:
            raise RuntimeError(
                "leaks() was called more than 20,000 times: not all parts of a trace can be tried"
            )
        free, lost, freed = 8, 0, False
        held: dict[str, tuple[int, int]] = {}
        asked: set[str] = set()
        for step in trace:
            what, name, *rest = step.split()
            if what == "free":
                if name not in asked:
                    return False  # no engine would make such a trace
                asked.discard(name)
                if name in held:
                    tokens, blocks = held.pop(name)
                    keeps = inputs["fault"] == "loses a full last block in free" and tokens % 4 == 0
                    free, lost, freed = free + blocks - keeps, lost + keeps, True
                continue
            asked.add(name)
            tokens, blocks = int(rest[0]), held.get(name, (0, 0))[1]
            missing = max(0, -(-tokens // 4) - blocks)
            if missing > free:
                if inputs["fault"] == "keeps what a refusal took":
                    free, lost = 0, lost + free
                continue
            free -= missing
            held[name] = (max(tokens, held.get(name, (0, 0))[0]), blocks + missing)
            if (
                inputs["fault"] == "loses a block when a table grows after a free"
                and blocks
                and missing
                and freed
                and free
            ):
                free, lost = free - 1, lost + 1
            freed = False
        return lost > 0

    def without(steps: Any, *out: int) -> list[str]:
        return [step for i, step in enumerate(steps) if i not in out]

    trace = list(inputs["trace"])
    short = answer(trace, leaks)
    changed = trace != list(inputs["trace"])
    if not isinstance(short, list):
        raise TypeError(f"shrink gave {type(short).__name__}; it must give a list of steps")
    rest = iter(inputs["trace"])
    in_order = all(any(step == other for other in rest) for step in short)
    calls, n = 0, len(short)
    could_go = [short[i] for i in range(n) if leaks(without(short, i))]
    pairs = [(i, j) for i in range(n) for j in range(i) if not could_go and leaks(without(short, i, j))]
    return {
        "still leaks": leaks(short),
        "steps that could still go": could_go,
        "steps that could still go together": [f"{short[j]} and {short[i]}" for i, j in pairs[:1]],
        "a part of the trace, in order": in_order,
        "the given trace was changed": changed,
        "left": short,
    }  # fmt: skip


def _expect_shrink(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "still leaks": True,
        "steps that could still go": [],
        "steps that could still go together": [],
        "a part of the trace, in order": True,
        "the given trace was changed": False,
    }


_SHRINK_TEXT = """from itertools import combinations

def shrink(trace, leaks):
    def shorter(trace):
        for count in (1, 2):
            for out in combinations(range(len(trace)), count):
                rest = [step for i, step in enumerate(trace) if i not in out]
                if leaks(rest):
                    return rest
        return None

    while (rest := shorter(trace)) is not None:
        trace = rest
    return trace
"""
_SINGLES = """def shrink(trace, leaks):
    again = True
    while again:
        again = False
        for i in range(len(trace) - 1, -1, -1):
            shorter = trace[:i] + trace[i + 1 :]
            if leaks(shorter):
                trace, again = shorter, True
    return trace
"""
_ONCE = """def shrink(trace, leaks):
    i = 0
    while i < len(trace):
        shorter = trace[:i] + trace[i + 1 :]
        if leaks(shorter):
            trace = shorter
        else:
            i += 1
    return trace
"""

_RESTARTED = """def shrink(trace, leaks):
    i = 0
    while i < len(trace):
        shorter = trace[:i] + trace[i + 1 :]
        if leaks(shorter):
            trace, i = shorter, 0
        else:
            i += 1
    return trace
"""
_FORWARDS = """def shrink(trace, leaks):
    again = True
    while again:
        again, i = False, 0
        while i < len(trace):
            shorter = trace[:i] + trace[i + 1 :]
            if leaks(shorter):
                trace, again = shorter, True
            else:
                i += 1
    return trace
"""
_ONCE_BOTH = """from itertools import combinations

def shrink(trace, leaks):
    for count in (1, 2):
        for out in combinations(range(len(trace)), count):
            rest = [step for i, step in enumerate(trace) if i not in out]
            if leaks(rest):
                trace = rest
    return trace
"""

_SHRINK = Exercise(
    id="21.5",
    title="shrink a leaking trace",
    answer="shrink",
    kind="function",
    arguments=("trace", "leaks"),
    cases=_shrink_cases,
    run=_run_shrink,
    expected=_expect_shrink,
    points={"small": 1, "awkward": 1},
    hints=Hints(
        question="Take {case}. Leave one step out. Does the rest still leak? If so, what have you learned about that step?",
        rule="Try to leave out one step, then every two steps, and stop at the first try that still leaks: that is the new trace, and "
        "all begins again with it. When no try leaks any more, you have it. itertools.combinations(range(n), 2) gives all pairs of "
        "places.\n\n"
        "By hand: [allocate a, free a, X] leaks because of X. Without the allocate alone, the free makes no sense; without the free "
        "alone, a keeps its blocks, and X may find no leak. Without both it still leaks, so both go.",
        code="""def shorter(trace):
    for count in (1, ____):
        for out in combinations(range(len(trace)), count):
            rest = [step for i, step in enumerate(trace) if ____]
            if leaks(rest):
                return ____
    return None

while (rest := shorter(trace)) is not None:
    trace = ____
return trace""",
    ),
    mistakes=(
        Mistake(
            "single steps only",
            _SINGLES,
            "No single step can go, but an allocate and its free can go together: each of them needs the other, and the leak needs "
            "neither. Try pairs as well.",
            "Look for an allocate in your result that is freed again. What happens if both are left out?",
            variants=(_RESTARTED, _FORWARDS),
        ),
        Mistake(
            "one round only",
            _ONCE,
            "One round from front to back is not enough: a step that could not go at first may be able to go when a later one is "
            "gone. Begin again after each success, until nothing more can go. And pairs must be tried too.",
            "Which of the steps that are left can go now, and why could it not go when you tried it?",
            variants=(_ONCE_BOTH,),
        ),
        Mistake(
            "pairs only",
            _changed(_SHRINK_TEXT, ("for count in (1, 2)", "for count in (2,)")),
            "Two steps at a time are left out, and never one: a step whose neighbour is needed stays. Try single steps as well.",
            "Leave out one step of your result. Does the rest still leak?",
        ),
        Mistake(
            "a step known by its text",
            _changed(_SHRINK_TEXT, ("combinations(range(len(trace)), count)", "combinations(trace, count)"), ("if i not in out", "if step not in out")),
            "The same step may be there twice, and its text does not say which of them is meant. Leave out *places*: combinations of "
            "range(len(trace)).",
            "A step is there twice, and only one of them is needed. Which one does your function leave out?",
            variants=(
                _changed(_SHRINK_TEXT, ("combinations(range(len(trace)), count)", "combinations(trace, count)"),
                         ("[step for i, step in enumerate(trace) if i not in out]", "list(trace)\n                for step in out:\n                    rest.remove(step)")),
            ),
        ),
        Mistake(
            "all that could go alone goes together",
            """def shrink(trace, leaks):
    return [step for i, step in enumerate(trace) if not leaks(trace[:i] + trace[i + 1 :])]
""",
            "Each step was left out of the whole trace, and all that could go went at once. Two steps that can each stand in for the "
            "other are then both gone, and nothing leaks. After each removal, go on with what is left.",
            "Does your result still leak?",
        ),
        Mistake(
            "kept where it still leaks",
            _changed(_SHRINK_TEXT, ("if leaks(rest)", "if rest and not leaks(rest)")),
            "A step can go if the rest leaks *without* it: then the leak does not need it. The condition is the wrong way round.",
            "The trace without a step still leaks. Was that step needed for the leak?",
        ),
        Mistake(
            "only the end cut off",
            """def shrink(trace, leaks):
    while len(trace) > 1 and leaks(trace[:-1]):
        trace = trace[:-1]
    return trace
""",
            "The trace is cut behind the step that leaks, and all that happened before is still there, needed or not.",
            "Is every step in front of the last one needed?",
        ),
        Mistake(
            "the trace is returned as it came",
            """def shrink(trace, leaks):
    return trace
""",
            "Nothing has been left out.",
            "Which steps can be left out so that the rest still leaks?",
        ),
        Mistake(
            "the caller's list changed",
            """def shrink(trace, leaks):
    again = True
    while again:
        again = False
        for i in range(len(trace) - 1, -1, -1):
            if leaks(trace[:i] + trace[i + 1 :]):
                del trace[i]
                again = True
    return trace
""",
            "del takes the step out of the caller's own list, and the trace that came is gone. Make new lists.",
            "After your function, what is in the list that it was given?",
            variants=(
                _changed(_SHRINK_TEXT, ("        trace = rest\n", "        trace[:] = rest\n")),
            ),
        ),
    ),
)  # fmt: skip


# ---------------- what is drawn and measured

_MAX_LEN, _SLOTS_IN_ALL, _BLOCK = 64, 256, 16
_ARRIVING = [(9, 12), (21, 30), (5, 40), (30, 8), (14, 20), (3, 25), (40, 20), (11, 11), (26, 30), (7, 9), (18, 37), (12, 16)]  # fmt: skip


def _serve(manager: Any, block_size: int) -> list[list[figures.BlockUse | None]]:
    """Serve the requests (prompt, answer) first come, first served; by step, the use of each block of 16."""
    blocks = manager(_SLOTS_IN_ALL // block_size, block_size)
    waiting = [(f"r{i}", prompt, prompt + answer) for i, (prompt, answer) in enumerate(_ARRIVING)]
    running: dict[str, list[int]] = {}
    history: list[Any] = []
    while (waiting or running) and len(history) < 1000:
        for name in list(running):
            length, end = running[name]
            if length == end:
                blocks.free(name)
                del running[name]
            elif blocks.allocate(name, length + 1):
                running[name][0] += 1
        while waiting and blocks.allocate(waiting[0][0], waiting[0][1]):
            name, prompt, end = waiting.pop(0)
            running[name] = [prompt, end]
        row: list[figures.BlockUse | None] = [None] * (_SLOTS_IN_ALL // _BLOCK)
        for name, (length, _) in running.items():
            slots = [
                b * block_size + k * _BLOCK for b in blocks.table(name) for k in range(block_size // _BLOCK)
            ]
            for i, slot in enumerate(slots):
                row[slot // _BLOCK] = figures.BlockUse(name, min(max(length - i * _BLOCK, 0), _BLOCK))
        history.append(row)
    return history


def _map_picture(answer: Any, cp: Any) -> Any:
    """The learner's manager with one block a request, and with blocks of 16, in the same memory."""
    served = {}
    for name, size in (
        (f"contiguous: {_MAX_LEN} slots a request", _MAX_LEN),
        (f"paged: blocks of {_BLOCK}", _BLOCK),
    ):
        history = _serve(answer, size)
        served[f"{name}, all done after {len(history)} steps"] = history
    longest = max(map(len, served.values()))
    nothing: list[figures.BlockUse | None] = [None] * (_SLOTS_IN_ALL // _BLOCK)
    panels = {name: history + [nothing] * (longest - len(history)) for name, history in served.items()}
    return figures.memory_map(
        panels, _BLOCK, title=f"{len(_ARRIVING)} requests in {_SLOTS_IN_ALL} slots, by your BlockManager"
    )


def _shrink_picture(answer: Any, cp: Any) -> Any:
    """A leaking trace as it came and as the learner's function leaves it: what each step leaves of the pool."""
    trace = _leaking_trace(np.random.default_rng(3), "keeps what a refusal took", 40)
    shrunk = _run_shrink(answer, {"fault": "keeps what a refusal took", "trace": trace}, None)["left"]
    return figures.memory_map(
        {f"as it came: {len(trace)} steps": _play(trace), f"shrunk: {len(shrunk)} steps": _play(shrunk)}, 4,
        title="Your shrink leaves: " + "; ".join(shrunk), subtitle="A lost block is in no table and not free.",
    )  # fmt: skip


def _play(trace: list[str]) -> list[list[figures.BlockUse | None]]:
    """The pool after each step, with a manager that keeps what a refusal took."""
    free, lost, history = list(range(8)), list[int](), list[Any]()
    held: dict[str, list[int]] = {}
    tokens: dict[str, int] = {}
    for step in trace:
        what, name, *rest = step.split()
        if what == "free":
            free = sorted(free + held.pop(name, []))
        else:
            table = held.get(name, [])
            missing = -(-int(rest[0]) // 4) - len(table)
            if missing > len(free):
                lost, free = lost + free, []
            else:
                held[name] = table + [free.pop(0) for _ in range(missing)]
                tokens[name] = max(int(rest[0]), tokens.get(name, 0) if table else 0)
        row: list[figures.BlockUse | None] = [None] * 8
        for owner, table in held.items():
            for i, block in enumerate(table):
                row[block] = figures.BlockUse(owner, min(max(tokens[owner] - 4 * i, 0), 4))
        for block in lost:
            row[block] = figures.BlockUse("lost", 0)
        history.append(row)
    return history


def _make_write(tokens: int, heads: int, dim: int, blocks: int) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        k = cp.ones((tokens, heads, dim), np.float32)
        slots = cp.asarray(np.random.default_rng(0).permutation(blocks * 16)[:tokens].astype(np.int64))
        caches = [cp.zeros((blocks, 16, heads, dim), np.uint16) for _ in range(2)]
        return lambda: answer(k, k, slots, *caches)

    return make


_LARGE, _SMALL = (8192, 8, 64), (64, 8, 64)
_WORK = Work(
    label="8,192 tokens of 8 x 64 into shuffled slots",
    make=_make_write(*_LARGE, 1024),
    read_bytes=8 * int(np.prod(_LARGE)) + 8 * _LARGE[0],
    write_bytes=4 * int(np.prod(_LARGE)),
    small=_make_write(*_SMALL, 16),
    small_read_bytes=8 * int(np.prod(_SMALL)) + 8 * _SMALL[0],
    small_write_bytes=4 * int(np.prod(_SMALL)),
    small_label="64 tokens of 8 x 64 into shuffled slots",
    note="The slots are shuffled, and no sector is wasted: a row is far longer than a sector, so where the rows lie does not matter.",
)

LESSON = Lesson(
    number="21",
    slug="paged_kv_cache",
    title="A KV cache in pages",
    part=4,
    minutes=60,
    exercises=(_WASTE, _SLOTS, _WRITE, _MANAGER, _SHRINK),
    engine=EngineCard(
        mistakes=(
            ("21.4", "the same block given to all"),
            ("21.4", "a block taken one token late"),
            ("21.3", "the slot as a place in numbers"),
            ("21.3", "only the first columns"),
        ),
        note="Your BlockManager says in which blocks the story's keys and values lie, and your kv_write puts them there, once a "
        "layer and step. Beside your story another one is written, so that two requests share the cache.",
        beside=("The dragon was",),
    ),
    pictures={"21.4": _map_picture, "21.5": _shrink_picture},
    works={"21.3": _WORK},
)
