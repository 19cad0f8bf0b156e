"""Lesson 01: a model is a file. Its header, its tensors without a copy, its faults, its parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from tinyvllm_ref.checkpoint.names import REPOSITORY, resolve
from tinyvllm_ref.checkpoint.weights import tensor_shapes
from tinyvllm_ref.config import ModelConfig
from tinyvllm_ref.course import figures
from tinyvllm_ref.course.exercise import Case, EngineCard, Exercise, Hints, Lesson, Mistake, Work

_SMALL = REPOSITORY / "data" / "small"
_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I32": 4, "BF16": 2, "F16": 2, "F32": 4, "I64": 8, "F64": 8}

Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape."""


def _nbytes(tensor: Tensor) -> int:
    return _ITEM_BYTES[tensor[1]] * int(np.prod(tensor[2], dtype=np.int64))


def _entries(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The header of tensors that lie one after the other."""
    header, position = {}, 0
    for tensor in tensors:
        end = position + _nbytes(tensor)
        header[tensor[0]] = {
            "dtype": tensor[1],
            "shape": list(tensor[2]),
            "data_offsets": [position, end],
        }
        position = end
    return header


def _file_bytes(header: Any, data: bytes, *, multiple: int = 8, length: int | None = None) -> bytes:
    """A file; its header is filled up with blanks to a multiple of some bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % multiple)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def _by_library(content: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Name and tensor of a file's bytes, by the safetensors library."""
    return list(safetensors.deserialize(content))  # type: ignore[no-untyped-call]


def _shuffled(header: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    names = list(header)
    rng.shuffle(names)
    return {name: header[name] for name in names}


def _array(content: bytes) -> Any:
    return np.frombuffer(content, np.uint8)


def _tensors(rng: np.random.Generator) -> list[Tensor]:
    rows, columns = (int(n) for n in rng.integers(2, 40, 2))
    return [
        ("größe", "F32", (3,)),
        ("embed", "BF16", (rows, columns)),
        ("scalar", "F32", ()),
        ("none", "I32", (4, 0)),
        ("mask", "BOOL", (columns,)),
        ("norm", "F16", (rows,)),
    ]


def _good_file(rng: np.random.Generator) -> bytes:
    """A whole file whose header names the tensors in another order than their bytes come."""
    tensors = _tensors(rng)
    header = _shuffled(_entries(tensors), rng)
    meta = {"__metadata__": {"format": "pt", "note": "naïve"}}
    return _file_bytes({**header, **meta}, rng.bytes(sum(map(_nbytes, tensors))))


# ---------------- 01.1: the header


def _header_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, content: bytes, group: str) -> Case:
        return Case(label, {"file": _array(content)}, group)

    one = _file_bytes(_entries([("w", "F32", (2,))]), bytes(8))
    model = (resolve("tiny-stories") / "model.safetensors").read_bytes()[:20_000]
    return [
        case("one tensor, no metadata", one, "small"),
        case("data/small/three_tensors.safetensors", (_SMALL / "three_tensors.safetensors").read_bytes(), "small"),
        case("names that are not ASCII", _good_file(rng), "awkward"),
        case("the first 20,000 bytes of tiny-stories", model, "awkward"),
    ]  # fmt: skip


def _run_header(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    from tinyvllm_ref.course.lab import WrongAnswerType

    returned = answer(memoryview(inputs["file"].tobytes()))
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        what = type(returned).__name__
        raise WrongAnswerType(
            f"read_header gave back {what}; it must give back two things: return header, start"
        )
    header, start = returned
    return {"header": header, "start": start}


def _expect_header(inputs: Mapping[str, Any]) -> dict[str, Any]:
    content = inputs["file"].tobytes()
    length = int(inputs["file"][:8].view("<u8")[0])
    header = json.loads(content[8 : 8 + length].decode("utf-8"))
    header.pop("__metadata__", None)
    return {"header": header, "start": 8 + length}


def _header_answer(
    order: str = "little",
    text: str = "bytes(data[8 : 8 + length])",
    pop: str = 'header.pop("__metadata__", None)',
    start: str = "8 + length",
) -> str:
    return f"""import json

def read_header(data):
    length = int.from_bytes(data[:8], "{order}")
    text = {text}
    header = json.loads(text)
    {pop}
    return header, {start}
"""


_HEADER = Exercise(
    id="01.1",
    title="read the header",
    answer="read_header",
    kind="function",
    arguments=("data",),
    cases=_header_cases,
    run=_run_header,
    expected=_expect_header,
    points={"small": 1, "awkward": 1},
    hints=Hints(
        question="Take {case}. Write its first eight bytes down. Which of them is worth the most, the first or the last?",
        rule="Three steps. The first eight bytes are an integer, lowest byte first: int.from_bytes(..., 'little'). So many "
        "bytes after them are JSON, in UTF-8. The tensors begin right after these, at byte 8 + length. __metadata__ is no "
        "tensor: take it out.\n\nBy hand: d0 01 00 00 00 00 00 00 is 0xd0 + 256 x 0x01 = 208 + 256 = 464, and the tensors "
        "begin at byte 472.",
        code="""length = int.from_bytes(data[:____], ____)
header = json.loads(bytes(data[____ : ____]))
header.pop(____, None)
return header, ____""",
    ),
    mistakes=(
        Mistake(
            "length read with the highest byte first",
            _header_answer(order="big"),
            "The format stores integers with the lowest byte first (little endian), as x86, ARM and GPUs have them in memory. "
            "Read the other way, a header of some hundred bytes becomes one of more bytes than any disk has.",
            "Your length has how many digits? Which end of the eight bytes holds the large ones?",
        ),
        Mistake(
            "a window given to json.loads",
            _header_answer(text="data[8 : 8 + length]"),
            "A slice of a memoryview is another memoryview: a window, and no bytes of its own. json.loads wants bytes, so "
            "copy these few: bytes(...).",
            "What is the type of data[8:20], if data is a memoryview?",
        ),
        Mistake(
            "the header cut off eight bytes early",
            _header_answer(text="bytes(data[8:length])"),
            "A slice names where it begins and where it ends, both counted from the start of the file. The header begins at "
            "byte 8, so it ends at byte 8 + length.",
            "How many bytes are in data[8:20]?",
        ),
        Mistake(
            "__metadata__ taken for granted",
            _header_answer(pop='del header["__metadata__"]'),
            "A file need not have __metadata__, and `del` and `pop` with one argument raise KeyError where the key is "
            "missing. pop takes a second argument: what to give back in that case.",
            "Does the header of this file have a __metadata__?",
            variants=(_header_answer(pop='header.pop("__metadata__")'),),
        ),
        Mistake(
            "header and start exchanged",
            _header_answer().replace("return header, 8 + length", "return 8 + length, header"),
            "Whoever calls it writes header, start = read_header(data): the first of the two is the header.",
            "In which order does the exercise ask for the two?",
        ),
        Mistake(
            "the start left out of what is given back",
            _header_answer().replace("return header, 8 + length", "return header"),
            "Whoever reads the tensors must know where they begin, too: return header, start.",
            "How many values does the exercise ask for?",
        ),
        Mistake(
            "__metadata__ kept as a tensor",
            _header_answer(pop="pass"),
            "__metadata__ holds free text about the file. It has no dtype, shape or offsets, and whoever walks over the "
            "tensors would trip over it.",
            "Which key of your header has no data_offsets?",
        ),
        Mistake(
            "the eight bytes of the length not counted",
            _header_answer(start="length"),
            "The tensors come after the length *and* the header. The length counts the JSON alone.",
            "How many bytes of the file lie in front of the first character of the JSON?",
        ),
        Mistake(
            "characters counted instead of bytes",
            _header_answer(
                text='bytes(data[8 : 8 + length]).decode("utf-8")',
                start="8 + len(text)",
            ),
            "In UTF-8 a letter such as ö takes two bytes, so the text has fewer characters than the file has bytes of it. "
            "Count in bytes: the length says how many.",
            "How many bytes is the letter ö in UTF-8?",
        ),
        Mistake(
            "decoded as Latin-1",
            _header_answer(text='bytes(data[8 : 8 + length]).decode("latin-1")'),
            "Latin-1 takes each byte for a character, so a letter of two bytes becomes two letters. JSON is UTF-8; json.loads "
            "does that for bytes by itself.",
            "How do the two bytes c3 b6 read in Latin-1, and how in UTF-8?",
        ),
    ),
)


# ---------------- 01.2: the part


def _read_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, content: bytes, group: str) -> Case:
        return Case(label, {"file": _array(content)}, group)

    large: list[Tensor] = [("small", "BF16", (5,)), ("large", "BF16", (1024, 2048)), ("last", "F32", (7,))]
    return [
        case("one tensor", _file_bytes(_entries([("w", "F32", (2,))]), rng.bytes(8)), "small"),
        case("data/small/three_tensors.safetensors", (_SMALL / "three_tensors.safetensors").read_bytes(), "small"),
        case("six tensors, named in another order than they lie", _good_file(rng), "awkward"),
        case("a tensor of 4 MiB", _file_bytes(_entries(large), rng.bytes(sum(map(_nbytes, large)))), "awkward"),
    ]  # fmt: skip


def _run_read(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import os
    import tempfile
    import tracemalloc

    import numpy as np

    from tinyvllm_ref.course.lab import WrongAnswerType

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        inputs["file"].tofile(path)
        already = tracemalloc.is_tracing()
        tracemalloc.start()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            views = answer(path)
            peak = tracemalloc.get_traced_memory()[1] - before
        finally:
            if not already:
                tracemalloc.stop()
    if not isinstance(views, dict):
        what = type(views).__name__
        raise WrongAnswerType(f"read_safetensors gave back {what}; it must be a dict: name -> Tensor")
    tensors, types = {}, {}
    for name, view in views.items():
        if not all(hasattr(view, field) for field in ("dtype", "shape", "data")):
            what = type(view).__name__
            raise WrongAnswerType(f"the entry {name!r} is a {what}; it must be a Tensor(dtype, shape, data)")
        types[name] = {"shape": type(view.shape).__name__, "data": type(view.data).__name__}
        tensors[name] = {
            "dtype": view.dtype,
            "shape": view.shape if isinstance(view.shape, (list, tuple)) else str(view.shape),
            "bytes": np.array(bytearray(view.data), np.uint8),
        }
    return {
        "tensors": tensors,
        "types": types,
        "file in memory": len(inputs["file"]) > 1 << 20 and peak > len(inputs["file"]) // 2,
    }


def _expect_read(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tensors": {
            name: {
                "dtype": tensor["dtype"],
                "shape": list(tensor["shape"]),
                "bytes": np.frombuffer(bytes(tensor["data"]), np.uint8),
            }
            for name, tensor in _by_library(inputs["file"].tobytes())
        }
    }


_WANTED_TYPES = {"shape": "tuple", "data": "memoryview"}


def _no_copy(inputs: Mapping[str, Any], outputs: dict[str, Any], observed: Any) -> str | None:
    for name, types in outputs["types"].items():
        for field, wanted in _WANTED_TYPES.items():
            if types[field] != wanted:
                return (
                    f"Every tensor is right, but for a type: the {field} of {name!r} is a {types[field]}; it must "
                    f"be a {wanted}"
                )
    if not outputs["file in memory"]:
        return None
    return (
        f"Every tensor is right, and to get them the function took as much memory as the file of {len(inputs['file']):,} "
        "bytes has. Map the file (mmap): only what is looked at is read"
    )


def _read_answer(
    mapped: str = "memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))",
    shape: str = 'tuple(entry["shape"])',
    data: str = "mapped[start + begin : start + end]",
    inside: str = "",
) -> str:
    return f"""import mmap
from typing import NamedTuple

class Tensor(NamedTuple):
    dtype: str
    shape: tuple
    data: memoryview

def read_safetensors(path):
    with open(path, "rb") as file:
        mapped = {mapped}
{inside}    header, start = read_header(mapped)
    tensors = {{}}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = Tensor(entry["dtype"], {shape}, {data})
    return tensors
"""


_READ = Exercise(
    id="01.2",
    title="tensors without a copy",
    answer="read_safetensors",
    kind="function",
    arguments=("path",),
    cases=_read_cases,
    run=_run_read,
    expected=_expect_read,
    verify=_no_copy,  # types as well: what they hold is right
    points={"small": 1, "awkward": 2},
    builds_on=("01.1",),
    makes={"read_safetensors": "read_safetensors"},
    file="read_safetensors.py",
    hints=Hints(
        question="Take {case}. At which byte of the *file* does the first tensor begin, and at which does it end?",
        rule="Map the file, take a memoryview of the map, and call read_header on it. data_offsets are [begin, end), counted "
        "from the first byte after the header: in the file, start + begin to start + end. Slicing a memoryview copies "
        "nothing.\n\nBy hand: the header ends at byte 248, and a tensor has data_offsets [12, 24]. Its bytes are those from "
        "260 to 271.",
        code="""with open(path, "rb") as file:
    mapped = memoryview(mmap.mmap(file.fileno(), 0, access=____))
header, start = read_header(mapped)
tensors = {}
for name, entry in header.items():
    begin, end = entry[____]
    tensors[name] = Tensor(entry["dtype"], ____(entry["shape"]), mapped[____ : ____])
return tensors""",
    ),
    mistakes=(
        Mistake(
            "offsets from the start of the file",
            _read_answer(data="mapped[begin:end]"),
            "data_offsets count from the first byte after the header, so that the header can grow without changing them. "
            "Taken from the start of the file, the first tensor is made of the header's own text.",
            "Which bytes of the file lie at offset 0 to 7, and can they be a tensor?",
        ),
        Mistake(
            "offsets read as start and length",
            _read_answer(data="mapped[start + begin : start + begin + end]"),
            "The second number is where the tensor ends, not how long it is. For the first tensor, which begins at 0, both "
            "are the same; for all others the view is too long.",
            "The second tensor has data_offsets [12, 24]. How many bytes is it?",
        ),
        Mistake(
            "the length's eight bytes counted twice",
            _read_answer(data="mapped[8 + start + begin : 8 + start + end]"),
            "read_header gives the byte of the *file* at which the tensors begin: 8 plus the header's length. The eight are "
            "in it already.",
            "The header of the small file takes bytes 8 to 247. What is start?",
        ),
        Mistake(
            "the byte at the end taken as well",
            _read_answer(data="mapped[start + begin : start + end + 1]"),
            "[begin, end) goes up to and not including end, just as Python's slices do. There is nothing to add.",
            "How many bytes are [0, 12), and how many do you take?",
        ),
        Mistake(
            "no Tensor around the three",
            _read_answer().replace(
                'Tensor(entry["dtype"], tuple(entry["shape"]), mapped[start + begin : start + end])',
                '(entry["dtype"], tuple(entry["shape"]), mapped[start + begin : start + end])',
            ),
            "The engine asks a tensor for its .dtype, its .shape and its .data. A plain tuple or dict has no such names, and a "
            "Tensor has: the class at the top of the cell is there for that.",
            "What does the class at the top of the cell give names to?",
            variants=(
                _read_answer().replace(
                    'Tensor(entry["dtype"], tuple(entry["shape"]), mapped[start + begin : start + end])',
                    "entry",
                ),
            ),
        ),
        Mistake(
            "the whole file read into memory",
            _read_answer(mapped="memoryview(file.read())"),
            "file.read() copies every byte of the file before the first tensor is asked for. A map costs nothing until a page "
            "is looked at.",
            "How much memory does your function take for a file of 16 GB?",
        ),
        Mistake(
            "each tensor copied out of the map",
            _read_answer(data="bytes(mapped[start + begin : start + end])"),
            "bytes(...) makes a copy. A slice of a memoryview is a view of the same bytes: nothing is read until someone looks.",
            "Which of the two copies: slicing a memoryview, or bytes()?",
        ),
        Mistake(
            "the shape left as a list",
            _read_answer(shape='entry["shape"]'),
            "JSON has lists only. The engine compares shapes with tuples, as NumPy's are, and [2, 3] == (2, 3) is False.",
            "What is `[2, 3] == (2, 3)` in Python?",
        ),
        Mistake(
            "the map closed while views of it are in use",
            _read_answer(
                mapped="None",
                inside="""        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as closing:
            mapped = memoryview(closing)
            header, start = read_header(mapped)
            return {
                name: Tensor(entry["dtype"], tuple(entry["shape"]),
                             mapped[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]])
                for name, entry in header.items()
            }
""",
            ),
            "`with mmap.mmap(...)` closes the map at its end, and the views would look at nothing: Python refuses. The *file* "
            "may be closed; the map must stay, and it goes by itself when the last view is gone.",
            "Who still needs the map when your function returns?",
        ),
    ),
)


# ---------------- 01.3: the kernel


def _widen_cases(rng: np.random.Generator) -> list[Case]:
    def case(n: int, before: int, multiple: int, group: str) -> Case:
        """A tensor of n numbers, with a tensor of `before` bytes in front of it."""
        first: Tensor = ("first", "U8", (before,))
        second: Tensor = ("second", "BF16", (n,))
        numbers = rng.standard_normal(n).astype(ml_dtypes.bfloat16)
        content = _file_bytes(
            _entries([first, second]), rng.bytes(before) + numbers.tobytes(), multiple=multiple
        )
        start = len(content) - before - 2 * n
        label = f"{n:,} number{'s' if n > 1 else ''} from byte {start + before:,} of the file"
        return Case(label, {"file": _array(content), "start": start, "begin": before, "n": n}, group)

    return [
        case(4, 0, 8, "small"),
        case(256, 12, 8, "small"),
        case(1, 3, 8, "awkward"),
        case(1000, 2**12 + 2, 8, "awkward"),
        case(int(rng.integers(300, 700)), 7, 8, "awkward"),
        case(6, 2, 8, "awkward"),
    ]  # fmt: skip


def _run_widen(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    n = inputs["n"]
    file, out = lab.input("file", inputs["file"]), lab.output(n)
    arguments = (file, np.int64(inputs["start"]), np.int64(inputs["begin"]), out, np.int32(n))
    answer((-(-n // 128),), (128,), arguments)
    return {"out": lab.get(out)}


def _expect_widen(inputs: Mapping[str, Any]) -> dict[str, Any]:
    at = inputs["start"] + inputs["begin"]
    content = inputs["file"][at : at + 2 * inputs["n"]].tobytes()
    return {"out": np.frombuffer(content, ml_dtypes.bfloat16).astype(np.float32)}


_AT = "file + start + begin + 2 * (size_t)i"
_BITS = "unsigned bits = at[0] | (unsigned)at[1] << 8;"
_FLOAT = "out[i] = __uint_as_float(bits << 16);"


def _widen_answer(at: str = _AT, bits: str = _BITS, store: str = _FLOAT, guard: str = "if (i < n) ") -> str:
    return f'''widen = cp.RawKernel(r"""
extern "C" __global__ void widen(const unsigned char* file, long long start, long long begin, float* out, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    {guard}{{
        const unsigned char* at = {at};
        {bits}
        {store}
    }}
}}
""", "widen")
'''


_WIDEN = Exercise(
    id="01.3",
    title="a tensor on the device",
    answer="widen",
    kind="kernel",
    cases=_widen_cases,
    run=_run_widen,
    expected=_expect_widen,
    points={"small": 1, "awkward": 1, "clean": 1},
    hints=Hints(
        question="Take {case}. At which byte does the last of them begin? And which of the two bytes there holds the "
        "sign?",
        rule="Element i begins at byte start + begin + 2i. Its two bytes, lowest first, make 16 bits: at[0] + 256 x at[1], "
        "written with | and <<. These are the upper 16 bits of a float: shift them up by 16, and read the 32 bits as a "
        "float with __uint_as_float.\n\nBy hand: the bytes 20 40 are 0x4020; shifted up, 0x40200000, which is 2.5.",
        code="""if (i < ____) {
    const unsigned char* at = file + ____ + ____ + 2 * (size_t)i;
    unsigned bits = at[0] | (unsigned)at[1] << ____;
    out[i] = __uint_as_float(bits << ____);
}""",
    ),
    mistakes=(
        Mistake(
            "the header not counted",
            _widen_answer(at="file + begin + 2 * (size_t)i"),
            "begin counts from the first byte after the header, and the array holds the whole file: the kernel reads the "
            "header's text as numbers. Add start.",
            "What lies at byte 0 of the uploaded file?",
        ),
        Mistake(
            "the tensor's own offset left out",
            _widen_answer(at="file + start + 2 * (size_t)i"),
            "At start the first tensor begins. This one begins `begin` bytes after that, and in the first case the two happen "
            "to be the same.",
            "Which tensor lies at byte `start` of this file?",
        ),
        Mistake(
            "the length's eight bytes counted twice",
            _widen_answer(at="file + 8 + start + begin + 2 * (size_t)i"),
            "start is the byte of the *file* at which the tensors begin, with the eight bytes of the length in it.",
            "At which byte does the tensor begin, by the case's own words, and at which do you begin?",
        ),
        Mistake(
            "offset taken in elements",
            _widen_answer(
                at="file + 2 * (start + begin + i)",
            ),
            "start and begin are bytes. If they are added to an index of two-byte elements, they count double.",
            "start is 88. Does your kernel go 88 bytes forward, or 88 elements?",
        ),
        Mistake(
            "one byte an element",
            _widen_answer(at="file + start + begin + i"),
            "A BF16 takes two bytes, so element i begins 2i bytes on. With steps of one, every second number is made of halves "
            "of two.",
            "At which byte does element 1 begin, if element 0 begins at 88?",
        ),
        Mistake(
            "highest byte first",
            _widen_answer(bits="unsigned bits = at[1] | (unsigned)at[0] << 8;"),
            "The file is little endian, the numbers as well as the length: the first of the two bytes is the lower one.",
            "1.0 in BF16 is 0x3F80. In which order do its bytes lie in the file?",
            variants=(_widen_answer(bits="unsigned bits = at[1] + 256 * at[0];"),),
        ),
        Mistake(
            "two bytes loaded at once, at an odd address",
            _widen_answer(bits="unsigned bits = *(const unsigned short*)at;"),
            "A GPU can load two bytes at once only from an even address. The format does not promise one: a tensor may follow "
            "one with an odd number of bytes.",
            "Is the address of this tensor even, in every case?",
            variants=(
                _widen_answer(
                    at="file + start + begin", bits="unsigned bits = ((const unsigned short*)at)[i];"
                ),
            ),
        ),
        Mistake(
            "only the lower of the two bytes",
            _widen_answer(bits="unsigned char bits = at[0] | at[1] << 8;"),
            "Of the 16 bits only the lower eight arrive, so sign and exponent are gone. An unsigned char has room for no more "
            "than eight; unsigned has 32. And at[0] alone is half of the number.",
            "How many bits has the variable that you put the two bytes into?",
            variants=(_widen_answer(bits="unsigned bits = at[0];"),),
        ),
        Mistake(
            "read as float16",
            _widen_answer(
                store="""unsigned s = bits >> 15, e = bits >> 10 & 31, f = bits & 1023;
        float v = e == 0 ? ldexpf((float)f, -24) : ldexpf((float)(1024 + f), (int)e - 25);
        out[i] = s ? -v : v;"""
            ),
            "F16 and BF16 both have 16 bits and mean different things by them. The header says BF16: float32's upper half.",
            "What does the header say of this tensor's dtype?",
        ),
        Mistake(
            "the number of the pattern instead of its bits",
            _widen_answer(store="out[i] = (float)bits;"),
            "A cast converts a value: the pattern 0x3F80 becomes 16,256.0. The same bits are to be read as a float, by "
            "__uint_as_float.",
            "Your first result is a whole number. Where does it come from?",
            variants=(_widen_answer(store="out[i] = bits;"),),
        ),
        Mistake(
            "shifted, then converted",
            _widen_answer(store="out[i] = (float)(bits << 16);"),
            "The 32 bits are right. The cast then turns the integer that they are into a float of the same *value*, and "
            "0x3F800000 becomes 1,065,353,216. __uint_as_float reads the bits as they are.",
            "Your results are huge. Which integer has the bits of 1.0f?",
            variants=(_widen_answer(store="out[i] = bits << 16;"),),
        ),
        Mistake(
            "moved by eight bits",
            _widen_answer(store="out[i] = __uint_as_float(bits << 8);"),
            "Two bytes are 16 bits, and they must come to the top of 32: shift by 16. (8 is for putting the second byte above "
            "the first.)",
            "How many bits lie above the sign of your number, and how many should?",
        ),
        Mistake(
            "four bytes read as a float",
            _widen_answer(bits="", store="out[i] = *(const float*)at;"),
            "A float* reads four bytes, from an address that is a multiple of 4. A BF16 has two, anywhere in the file.",
            "How many bytes of the file belong to one number?",
        ),
        Mistake(
            "put into the lower half",
            _widen_answer(store="out[i] = __uint_as_float(bits);"),
            "The 16 bits are the *upper* half of a float. In the lower one they are the end of a fraction, and such a number "
            "is next to nothing.",
            "Your results are tiny. Where in the 32 bits of a float are its sign and its exponent?",
        ),
        Mistake(
            "no bounds guard",
            _widen_answer(guard=""),
            "The last block has more threads than there are elements left, and these write behind the end of out.",
            "How many threads run, and how many elements are there?",
        ),
    ),
)


# ---------------- 01.4: name the fault

_SIX = ("hole", "bad_json", "shape_disagrees", "header_over_100_mb", "unknown_dtype", "overlap")


def six_broken_files() -> dict[str, bytes]:
    """A letter -> the bytes of a file with one fault; the letter does not give it away."""
    folder = _SMALL / "broken"
    return {
        letter: (folder / f"{name}.safetensors").read_bytes()
        for letter, name in zip("ABCDEF", _SIX, strict=True)
    }


def _broken(kind: str, rng: np.random.Generator) -> bytes:
    """A file of six tensors with one fault."""
    tensors = _tensors(rng)
    header: Any = _entries(tensors)
    data = rng.bytes(sum(map(_nbytes, tensors)))
    if kind == "overlap":
        header["norm"]["data_offsets"] = [offset - 2 for offset in header["norm"]["data_offsets"]]
        data = data[:-2]
    elif kind == "hole":
        header["norm"]["data_offsets"] = [offset + 3 for offset in header["norm"]["data_offsets"]]
        data = data[:-3] + bytes(6)
    elif kind == "hole in front":
        for entry in header.values():
            entry["data_offsets"] = [offset + 4 for offset in entry["data_offsets"]]
        data = bytes(4) + data
    elif kind == "trailing":
        data += b"\0"
    elif kind == "truncated":
        data = data[:-1]
    elif kind == "shape":
        header["mask"]["shape"] = [header["mask"]["shape"][0] + 1]
    elif kind == "dtype":
        header["embed"]["dtype"] = "bfloat16"
    header = _shuffled(header, rng)
    if kind == "latin-1":
        header = json.dumps(header, ensure_ascii=False).encode("latin-1")
    content = _file_bytes(header, data, length=10_000_000 if kind == "past the end" else None)
    if kind == "header cut off":
        content = content[: 8 + int.from_bytes(content[:8], "little") - 3]
    return content


def _described(content: bytes) -> dict[str, Any]:
    """What a person who looks at a file sees; it stands in the report, and no answer gets it."""
    length = int.from_bytes(content[:8], "little")
    shown: dict[str, Any] = {"bytes of the file": len(content), "length in the first 8": length}
    try:
        header = json.loads(content[8 : 8 + length])
    except ValueError:
        return {**shown, "header begins": str(content[8:36])[:60]}
    tensors = {
        f"tensor {name}": f"{entry['dtype']} {entry['shape']} at {entry['data_offsets']}"
        for name, entry in header.items()
        if name != "__metadata__"
    }
    return {**shown, "bytes after the header": len(content) - 8 - length, **tensors}


def _fault_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, content: bytes, group: str) -> Case:
        return Case(label, {"file": _array(content), **_described(content)}, group)

    small = [case("three_tensors", (_SMALL / "three_tensors.safetensors").read_bytes(), "small")]
    small += [case(f"file {letter}", content, "small") for letter, content in six_broken_files().items()]
    kinds = (
        *("overlap", "hole", "trailing", "truncated", "shape", "dtype", "past the end"),
        *("hole in front", "latin-1", "header cut off"),
    )
    awkward = [
        case(f"random file {k}", _broken(kind, rng), "awkward") for k, kind in enumerate(("none", *kinds), 1)
    ]
    return [*small, *awkward, case("four bytes", b"\0\0\0\0", "awkward")]


def _run_fault(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    return {"fault": answer(inputs["file"].tobytes())}


def _expect_fault(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """By what the reference's reader says of the file; the `safetensors` library must agree that it is broken."""
    import tempfile
    from pathlib import Path

    from tinyvllm_ref.checkpoint.safetensors import SafetensorsError, read_safetensors

    content = inputs["file"].tobytes()
    try:
        _by_library(content)
        whole = True
    except safetensors.SafetensorError:
        whole = False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(content)
        try:
            read_safetensors(path)
            said = ""
        except SafetensorsError as error:
            said = str(error).partition(".safetensors: ")[2]
    words = {
        "header claims": "length",
        "takes 8": "length",
        "not valid JSON": "json",
        "not valid UTF-8": "json",
        "unknown dtype": "dtype",
        "data_offsets give it": "size",
        "overlap": "overlap",
        "a hole": "hole",
        "belong to no tensor": "hole",
        "truncated": "truncated",
    }
    found = next((word for piece, word in words.items() if piece in said), said or "ok")
    if whole != (found == "ok"):
        raise AssertionError(f"the safetensors library and the reference disagree on a file: {said}")
    return {"fault": found}


def _fault_answer(
    length: str = "len(data) < 8 or length > 100_000_000 or 8 + length > len(data)",
    order: str = 'sorted(header.values(), key=lambda entry: entry["data_offsets"])',
    elements: str = "math.prod(entry['shape'])",
    item: str = "BYTES[entry['dtype']]",
    overlap: str = "begin < position",
    last: str = "position < len(data) - 8 - length",
    first: str = "0",
    dtype: str = "entry['dtype'] not in BYTES",
    caught: str = "ValueError",
    pop: str = 'header.pop("__metadata__", None)',
    overlap_is: str = "overlap",
) -> str:
    return f"""import json
import math

BYTES = {{"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4,
         "I64": 8, "U64": 8, "F64": 8}}

def fault_in(data):
    length = int.from_bytes(data[:8], "little")
    if {length}:
        return "length"
    try:
        header = json.loads(data[8 : 8 + length])
    except {caught}:
        return "json"
    {pop}
    position = {first}
    for entry in {order}:
        begin, end = entry["data_offsets"]
        if {dtype}:
            return "dtype"
        if {elements} * {item} != end - begin:
            return "size"
        if {overlap}:
            return "{overlap_is}"
        if begin > position:
            return "hole"
        position = end
    if position > len(data) - 8 - length:
        return "truncated"
    return "hole" if {last} else "ok"
"""


_FAULTS = Exercise(
    id="01.4",
    title="name the fault",
    answer="fault_in",
    kind="function",
    arguments=("data",),
    cases=_fault_cases,
    run=_run_fault,
    expected=_expect_fault,
    points={"small": 2, "awkward": 2},
    hints=Hints(
        question="Take {case}: the report shows what is in its header. Write the tensors down in the order of their bytes. "
        "Which rule of the list is the first that does not hold?",
        rule="Go through the rules from the front of the file to its end. The length, before anything is sliced. The JSON. "
        "Then the tensors *in the order of their bytes* (sort by data_offsets; the header may name them in any order), with "
        "a position that starts at 0: a tensor must begin exactly there. Before it is an overlap, behind it a hole. At the "
        "end, the position must be the number of bytes after the header.\n\nBy hand: tensors [0, 12], [12, 24], [20, 36]. "
        "The third begins at 20, and the position is 24: overlap.",
        code="""if len(data) < 8 or length > ____ or 8 + length > ____:
    return "length"
...
for entry in sorted(header.values(), key=lambda entry: ____):
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in BYTES: return "dtype"
    if math.prod(entry["shape"]) * ____ != ____: return "size"
    if begin < position: return ____
    if begin > position: return ____
    position = ____
rest = len(data) - 8 - length
return "truncated" if position > rest else ____""",
    ),
    mistakes=(
        Mistake(
            "tensors taken in the header's order",
            _fault_answer(order="header.values()"),
            "A header is a JSON object: its keys may come in any order, and the bytes of the tensors in another. Sort by "
            "data_offsets before you look for overlaps and holes.",
            "Does the first tensor that the header names begin at byte 0?",
        ),
        Mistake(
            "bytes after the last tensor not noticed",
            _fault_answer(last="False"),
            "Every byte of the file must belong to a tensor, the last ones too. Else two programs can see two different models "
            "in one file.",
            "Where does the last tensor end, and where the file?",
        ),
        Mistake(
            "the eight bytes of the length not counted",
            _fault_answer(length="len(data) < 8 or length > 100_000_000 or length > len(data)"),
            "The header begins at byte 8, so it ends at byte 8 + length. That must not be behind the end of the file.",
            "Of a file of 100 bytes, how many are left for the header?",
        ),
        Mistake(
            "a header past the end of the file not noticed",
            _fault_answer(length="len(data) < 8 or length > 100_000_000"),
            "Slicing past the end gives fewer bytes and no error, and the fault then looks like bad JSON. Compare the length "
            "with the size of the file first.",
            "How long is the slice that you get, and how long should it be?",
        ),
        Mistake(
            "text that is not UTF-8 not caught",
            _fault_answer(caught="json.JSONDecodeError"),
            "Bytes are decoded before they are parsed, and bytes that are no UTF-8 raise UnicodeDecodeError. Both it and "
            "json.JSONDecodeError are kinds of ValueError.",
            "Which error was raised, and by which of the two steps: bytes to text, or text to a dict?",
        ),
        Mistake(
            "bad JSON not caught",
            _fault_answer(caught="KeyError"),
            "json.loads raises an error where a text is no JSON. A reader of strangers' files catches it, and says what is "
            "wrong.",
            "Which error does json.loads raise for a text that is no JSON?",
        ),
        Mistake(
            "__metadata__ taken for a tensor",
            _fault_answer(pop="pass"),
            "__metadata__ is free text about the file and has no data_offsets. Take it out before you walk over the tensors.",
            "Which key of this header has no data_offsets?",
        ),
        Mistake(
            "bytes looked up before the dtype is known",
            _fault_answer(dtype="BYTES[entry['dtype']] == 0"),
            "BYTES[...] raises KeyError for a dtype that it does not have. Ask first whether it is in there.",
            "Is the dtype of every tensor of this file in BYTES?",
        ),
        Mistake(
            "the first tensor not compared with byte 0",
            _fault_answer(first="min(entry['data_offsets'][0] for entry in header.values())"),
            "Each tensor was compared with the one before it, and the first has none before it. It must begin at byte 0: "
            "whatever lies in front of it belongs to nobody.",
            "At which byte after the header does the first tensor begin?",
        ),
        Mistake(
            "an overlap called a hole",
            _fault_answer(overlap_is="hole"),
            "If a tensor does not begin where the one before ended, there are two cases: it begins later, and bytes between "
            "belong to nobody; or earlier, and some bytes belong to both.",
            "Does the tensor begin before or behind the end of the one in front of it?",
        ),
        Mistake(
            "a header that cannot be, called truncated",
            _fault_answer(length="len(data) < 8 or 8 + length > len(data)").replace(
                'return "length"', 'return "truncated"', 1
            ),
            "A length that cannot be is a fault of the header. Only a tensor that ends behind the end of the file makes it "
            "truncated.",
            "Which rule is about the length of the header, and what is its word?",
        ),
        Mistake(
            "a scalar counted as no element",
            _fault_answer(elements="(math.prod(entry['shape']) if entry['shape'] else 0)"),
            "The shape [] is that of a single number: the product of no factors is 1. A tensor without elements has a 0 in its "
            "shape.",
            "What is math.prod([])?",
        ),
        Mistake(
            "two bytes an element, whatever the dtype",
            _fault_answer(item="2"),
            "How many bytes an element takes is the dtype's business: 1 for BOOL, 4 for F32 and I32.",
            "How many bytes are three F32?",
        ),
        Mistake(
            "overlaps not looked for",
            _fault_answer(overlap="False"),
            "Two tensors that share bytes are no accident of rounding: someone's offsets are wrong, and both would be loaded "
            "with no error.",
            "Can a tensor begin before the one in front of it has ended?",
        ),
    ),
)


# ---------------- 01.5: parameters from the config

_LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
_KEYS = tuple(_LLAMA_1B)


def _count_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, config: Mapping[str, Any], group: str) -> Case:
        return Case(label, dict(config), group)  # key by key, so that a report shows them

    tiny = json.loads((resolve("tiny-stories") / "config.json").read_text(encoding="utf-8"))
    draw = [int(n) for n in rng.integers(1, 9, 6)]
    odd = {
        "vocab_size": 100 + draw[0], "hidden_size": 16 * draw[1], "intermediate_size": 10 + draw[2],
        "num_hidden_layers": draw[3], "num_attention_heads": 4 * draw[4], "num_key_value_heads": draw[4],
        "head_dim": 2 * draw[5] + 30, "tie_word_embeddings": False,
    }  # fmt: skip
    plain = {key: value for key, value in _LLAMA_1B.items() if key not in ("num_key_value_heads", "head_dim")}
    return [
        case("tiny-stories", {key: tiny[key] for key in _KEYS}, "small"),
        case("Llama 3.2 1B", _LLAMA_1B, "small"),
        case("an LM head of its own", {**_LLAMA_1B, "tie_word_embeddings": False}, "awkward"),
        case("heads of an unusual size", odd, "awkward"),
        case("no num_key_value_heads and no head_dim", plain, "awkward"),
        case(
            "no tie_word_embeddings", {k: v for k, v in odd.items() if k != "tie_word_embeddings"}, "awkward"
        ),
    ]


def _run_count(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    return {"parameters": answer(dict(inputs))}


def _expect_count(inputs: Mapping[str, Any]) -> dict[str, Any]:
    base = json.loads((resolve("tiny-stories") / "config.json").read_text(encoding="utf-8"))
    for key in _KEYS:
        base.pop(key)
    config = ModelConfig.from_dict({**base, "bos_token_id": 0, "eos_token_id": 0, **inputs})
    return {
        "parameters": sum(int(np.prod(shape, dtype=np.int64)) for shape in tensor_shapes(config).values())
    }


def _count_answer(
    kv: str = 'config.get("num_key_value_heads", heads)',
    size: str = 'config.get("head_dim", hidden // heads)',
    norms: str = "2 * hidden",
    ffn: str = "3",
    head: str = '0 if config.get("tie_word_embeddings", False) else vocab * hidden',
    final: str = "hidden",
    queries: str = "2 * heads * size * hidden",
    times: str = 'config["num_hidden_layers"] * ',
    table: str = "vocab * hidden + ",
) -> str:
    return f"""def count_parameters(config):
    vocab, hidden, heads = config["vocab_size"], config["hidden_size"], config["num_attention_heads"]
    kv_heads = {kv}
    size = {size}
    attention = {queries} + 2 * kv_heads * size * hidden
    feed_forward = {ffn} * config["intermediate_size"] * hidden
    layers = {times}(attention + feed_forward + {norms})
    head = {head}
    return {table}layers + {final} + head
"""


_COUNT = Exercise(
    id="01.5",
    title="parameters from config.json",
    answer="count_parameters",
    kind="function",
    arguments=("config",),
    cases=_count_cases,
    run=_run_count,
    expected=_expect_count,
    points={"small": 1, "awkward": 2},
    hints=Hints(
        question="Take {case}. Which tensor of the table do you count too often, too seldom or in another shape?",
        rule="Add up the table: the embedding once; for each layer four attention matrices, three feed-forward matrices and "
        "two norms; one last norm; and the LM head, unless it is tied to the embedding. Q and O have "
        "num_attention_heads x head_dim rows or columns, K and V num_key_value_heads x head_dim.\n\nBy hand, one layer of "
        "Llama 3.2 1B: Q and O 2,048 x 2,048 each, K and V 512 x 2,048 each, gate, up and down 8,192 x 2,048 each, two norms "
        "of 2,048: 60,821,504.",
        code="""attention = 2 * heads * size * hidden + 2 * ____ * size * hidden
feed_forward = ____ * config["intermediate_size"] * hidden
layers = config["num_hidden_layers"] * (attention + feed_forward + ____)
head = 0 if ____ else vocab * hidden
return vocab * hidden + layers + ____ + head""",
    ),
    mistakes=(
        Mistake(
            "a tied LM head counted twice",
            _count_answer(head="vocab * hidden"),
            "With tie_word_embeddings the LM head is the embedding table once more: one tensor in the file, used at both ends.",
            "Does the file of tiny-stories have an lm_head.weight?",
        ),
        Mistake(
            "tied by default",
            _count_answer(head='0 if config.get("tie_word_embeddings", True) else vocab * hidden'),
            "Where a config does not speak of it, the LM head is *not* tied.",
            "Which keys does this config leave out, and what holds then?",
        ),
        Mistake(
            "tied, whatever the config says",
            _count_answer(head="0"),
            "The two models that you know by now are tied. Others have a table of their own at the end, as large as the "
            "first: the config says which.",
            "What does this config say of tie_word_embeddings?",
        ),
        Mistake(
            "a key taken for granted",
            _count_answer(kv='config["num_key_value_heads"]'),
            "Some configs leave keys out, and config[...] raises KeyError for these. config.get(key, default) gives the "
            "default.",
            "Which key is missing, and what holds where it is?",
            variants=(
                _count_answer(size='config["head_dim"]'),
                _count_answer(head='0 if config["tie_word_embeddings"] else vocab * hidden'),
            ),
        ),
        Mistake(
            "one layer only",
            _count_answer(times=""),
            "The table says how many there are of each: most come once in every layer.",
            "How many layers has this model?",
        ),
        Mistake(
            "one norm a layer",
            _count_answer(norms="hidden"),
            "A layer has two norms: input_layernorm in front of attention, post_attention_layernorm in front of the "
            "feed-forward block.",
            "Which tensors of layer 0 have a single dimension?",
        ),
        Mistake(
            "q_proj or o_proj as H x H",
            _count_answer(queries="heads * size * hidden + hidden * hidden"),
            "In most models heads times head_dim is hidden_size, and both matrices are square. The table says what holds "
            "where it is not.",
            "What is num_attention_heads x head_dim in this config, and what hidden_size?",
            variants=(_count_answer(queries="2 * hidden * hidden"),),
        ),
        Mistake(
            "k_proj or v_proj forgotten",
            _count_answer(queries="(2 * heads - kv_heads) * size * hidden"),
            "Attention has four matrices in a layer: for queries, keys, values and the output.",
            "Which of the names q_proj, k_proj, v_proj, o_proj have you counted?",
        ),
        Mistake(
            "the embedding left out",
            _count_answer(table=""),
            "The embedding table is in every model, and is one of its largest tensors. What may be missing is the LM head.",
            "Which tensor of the table has V rows, and is always there?",
        ),
        Mistake(
            "K and V as wide as Q",
            _count_answer(kv="heads"),
            "Several query heads share one key/value head: k_proj and v_proj have num_key_value_heads x head_dim rows.",
            "What is the shape of k_proj in the table above, and what that of q_proj?",
        ),
        Mistake(
            "norms left out",
            _count_answer(norms="0", final="0"),
            "Each layer has two norms with hidden_size weights, and there is one at the end. They are few, and they are there.",
            "Which tensors of the table have only one dimension?",
        ),
        Mistake(
            "the last norm left out",
            _count_answer(final="0"),
            "After the last layer comes model.norm.weight, which belongs to no layer.",
            "Which tensor of the table has no layer's number and is not the embedding?",
        ),
        Mistake(
            "two feed-forward matrices instead of three",
            _count_answer(ffn="2"),
            "A Llama's feed-forward has gate, up and down. Two, up and down, are the older kind.",
            "Which three names stand after mlp. in the table?",
        ),
        Mistake(
            "head_dim always hidden_size / num_attention_heads",
            _count_answer(size="hidden // heads"),
            "Where the config says head_dim, that is what holds. The division is only the default: in some models the heads "
            "together are wider than the hidden state.",
            "Does this config have a head_dim, and what does it say?",
        ),
    ),
)


# ---------------- what is drawn and measured

_KINDS = (("embed", "embedding"), ("self_attn", "attention"), ("mlp", "feed-forward"), ("norm", "norms"))


def _short_name(name: str) -> str:
    """``0.gate_proj`` for ``model.layers.0.mlp.gate_proj.weight``: what tells it from its neighbours."""
    pieces = name.removesuffix(".weight").split(".")
    return f"{pieces[2]}.{pieces[-1]}" if pieces[1] == "layers" else pieces[-1]


def _picture(answer: Any, cp: Any) -> Any:
    """The file of tiny-stories to scale, from where the learner's views lie in the map."""
    views = answer(resolve("tiny-stories") / "model.safetensors")
    whole = np.frombuffer(next(iter(views.values())).data.obj, np.uint8)
    base = whole.ctypes.data
    segments = []
    for name, view in views.items():
        begin = np.frombuffer(view.data, np.uint8).ctypes.data - base
        kind = next((kind for piece, kind in _KINDS if piece in name), "other")
        segments.append(figures.Segment(_short_name(name), begin, begin + len(view.data), kind))
    first = min(segment.start for segment in segments)
    header = [figures.Segment("length", 0, 8, "header"), figures.Segment("JSON", 8, first, "header")]
    zoom = (0, min(len(whole), 3 * first))
    return figures.byte_strip(
        [*header, *segments], title="model.safetensors of tiny-stories, to scale", zoom=zoom
    )


def _make_widen(n: int) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        file, out = cp.zeros(64 + 2 * n, np.uint8), cp.empty(n, np.float32)
        arguments = (file, np.int64(64), np.int64(0), out, np.int32(n))
        return lambda: answer((-(-n // 256),), (256,), arguments)

    return make


_LARGE_N, _SMALL_N = 1 << 26, 1 << 13
_WORK = Work(
    label=f"{_LARGE_N:,} numbers widened",
    make=_make_widen(_LARGE_N),
    read_bytes=2 * _LARGE_N,
    write_bytes=4 * _LARGE_N,
    small=_make_widen(_SMALL_N),
    small_read_bytes=2 * _SMALL_N,
    small_write_bytes=4 * _SMALL_N,
    small_label=f"{_SMALL_N:,} numbers widened",
)

LESSON = Lesson(
    number="01",
    slug="safetensors",
    title="A model is a file",
    part=1,
    minutes=70,
    exercises=(_HEADER, _READ, _WIDEN, _FAULTS, _COUNT),
    engine=EngineCard(
        mistakes=(
            ("01.2", "offsets from the start of the file"),
            ("01.2", "offsets read as start and length"),
        ),
        note="Your read_safetensors runs once, before the first token: all weights of this story came through it.",
    ),
    pictures={"01.2": _picture},
    works={"01.3": _WORK},
)
