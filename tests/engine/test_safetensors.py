"""The safetensors reader: the format's rules one by one, and mutated files; the library is the oracle."""

import json
import struct
import tracemalloc

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyvllm_ref.checkpoint.safetensors import (
    DTYPE_BITS,
    SafetensorsError,
    read_safetensors,
    write_safetensors,
)


def make_file(header, data=b"", length=None):
    """The bytes of a file; the header as an object or as raw bytes, the length as it should be or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def read_bytes(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return read_safetensors(path)


def test_it_reads_what_the_library_writes(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "a.weight": rng.standard_normal((3, 5), dtype=np.float32),
        "b": rng.integers(0, 255, (7,), dtype=np.uint8),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 4), np.int16),
        "half": rng.standard_normal((2, 2, 2)).astype(np.float16),
        "ünïcode ☃": np.array([True, False]),
    }
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"format": "np"})
    views = read_safetensors(path)
    assert views.keys() == arrays.keys()
    for name, array in arrays.items():
        assert views[name].shape == array.shape
        assert views[name].nbytes == array.nbytes
        np.testing.assert_array_equal(views[name].numpy(), array)
        assert not views[name].numpy().flags.writeable


def test_bf16_is_given_as_its_bits(tmp_path):
    views = read_bytes(tmp_path, make_file({"x": entry("BF16", [2], 0, 4)}, b"\x80\x3f\x00\xc0"))
    assert views["x"].numpy().tolist() == [0x3F80, 0xC000]
    views = read_bytes(tmp_path, make_file({"x": entry("F8_E4M3", [4], 0, 4)}, WORD))
    with pytest.raises(ValueError, match="F8_E4M3 has no NumPy dtype"):
        views["x"].numpy()


def test_views_share_one_map_and_copy_nothing(tmp_path):
    path = tmp_path / "big.safetensors"
    size = 64 << 20
    write_safetensors(path, {"a": ("U8", (size,)), "b": ("U8", (size,))}, [bytes(size), bytes(size)])
    tracemalloc.start()
    views = read_safetensors(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
    assert views["a"].data.obj is views["b"].data.obj
    assert views["a"].data.readonly


def test_views_outlive_everything_else(tmp_path):
    view = read_bytes(tmp_path, make_file({"x": entry("U8", [3], 0, 3)}, b"abc"))["x"]
    (tmp_path / "model.safetensors").unlink()
    assert bytes(view.data) == b"abc"


def test_the_library_reads_what_we_write(tmp_path):
    path = tmp_path / "model.safetensors"
    bits = np.arange(6, dtype=np.uint16)
    floats = np.arange(4, dtype=np.float32).reshape(2, 2)
    tensors = {"b": ("BF16", (2, 3)), "a": ("F32", (2, 2))}
    write_safetensors(path, tensors, [bits.tobytes(), memoryview(floats)], {"made_by": "a test"})
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"made_by": "a test"}
        np.testing.assert_array_equal(file.get_tensor("a"), floats)
    loaded = {name: fields for name, fields in safetensors.deserialize(path.read_bytes())}
    assert (loaded["b"]["dtype"], loaded["b"]["shape"]) == ("BF16", [2, 3])
    assert bytes(loaded["b"]["data"]) == bits.tobytes()
    assert list(read_safetensors(path)) == ["b", "a"]
    with pytest.raises(ValueError, match="6 bytes were given"):
        write_safetensors(path, {"a": ("F32", (2,))}, [bytes(6)])
    with pytest.raises(ValueError, match="shorter"):
        write_safetensors(path, {"a": ("F32", (2,))}, [])


def test_every_dtype_of_the_library_is_known():
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(make_file({"x": entry("?", [1], 0, 1)}))
    assert {f"`{name}`" for name in DTYPE_BITS} == set(
        str(caught.value).split("one of ")[1].split(" at ")[0].split(", ")
    )


F32_PAIR = {"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 8, 12)}

BYTE = json.dumps(entry("U8", [1], 0, 1)).encode()
WORD = bytes(4)

FAULTS = [
    ("empty file", b"", "the file has 0 bytes"),
    ("shorter than a length", b"\x01" * 7, "the file has 7 bytes; the length of the header alone takes 8"),
    ("header beyond the file", make_file({}, length=100), "claims 100 bytes, but only 2 follow"),
    (
        "header over 100 MB",
        make_file({}, length=100_000_001),
        "claims 100,000,001 bytes; at most 100,000,000",
    ),
    ("huge header", make_file({}, length=2**64 - 1), "at most 100,000,000"),
    ("big-endian length", struct.pack(">Q", 2) + b"{}", "at most 100,000,000"),
    ("no header", make_file(b""), "must begin with '{'"),
    ("not an object", make_file(b"[]"), "must begin with '{'"),
    ("leading space", make_file(b" {}"), "must begin with '{'"),
    ("byte order mark", make_file(b"\xef\xbb\xbf{}"), "must begin with '{'"),
    ("cut JSON", make_file(b'{"a":'), "not valid JSON"),
    ("two values", make_file(b"{}{}"), "not valid JSON"),
    ("NaN", make_file(b'{"a": NaN}'), "NaN is not JSON"),
    ("nested too deeply", make_file(b'{"a":' * 200_000), "nested too deeply"),
    ("huge number", make_file(b'{"a":' + b"9" * 10_000 + b"}"), "not valid JSON"),
    ("not UTF-8", make_file(b'{"\xff": 1}'), "not valid UTF-8"),
    ("half a surrogate pair", make_file(b'{"\\ud800": 1}'), "not valid UTF-8"),
    ("duplicate tensor", make_file(b'{"a":%b,"a":%b}' % (BYTE, BYTE), b"x"), "key 'a' twice"),
    ("duplicate field", make_file(b'{"a":{"dtype":"U8","dtype":"U8"}}'), "key 'dtype' twice"),
    ("metadata not of strings", make_file({"__metadata__": {"n": 1}}), "__metadata__ must be"),
    ("metadata a list", make_file({"__metadata__": ["x"]}), "__metadata__ must be"),
    ("entry a number", make_file({"a": 5}), "tensor 'a': must be an object"),
    ("no dtype", make_file({"a": {"shape": [1], "data_offsets": [0, 4]}}, WORD), "tensor 'a': has no dtype"),
    ("no shape", make_file({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, WORD), "has no shape"),
    ("no offsets", make_file({"a": {"dtype": "F32", "shape": [1]}}, WORD), "has no data_offsets"),
    ("unknown dtype", make_file({"a": entry("F31", [1], 0, 4)}, WORD), "tensor 'a': unknown dtype 'F31'"),
    ("dtype in lower case", make_file({"a": entry("f32", [1], 0, 4)}, WORD), "unknown dtype 'f32'"),
    ("dtype a number", make_file({"a": entry(32, [1], 0, 4)}, WORD), "unknown dtype 32"),
    ("dtype a list", make_file({"a": entry(["F32"], [1], 0, 4)}, WORD), "unknown dtype"),
    (
        "negative extent",
        make_file({"a": entry("F32", [-1, -1], 0, 4)}, WORD),
        "shape must be a list of non-neg",
    ),
    ("extent a float", make_file({"a": entry("F32", [1.0], 0, 4)}, WORD), "shape must be a list"),
    ("extent a bool", make_file({"a": entry("F32", [True], 0, 4)}, WORD), "shape must be a list"),
    ("shape a number", make_file({"a": entry("F32", 1, 0, 4)}, WORD), "shape must be a list"),
    ("extent over 64 bits", make_file({"a": entry("F32", [2**64], 0, 4)}, WORD), "shape must be a list"),
    ("overflowing shape", make_file({"a": entry("F32", [2**33, 2**33], 0, 4)}, WORD), "overflows 64 bits"),
    ("overflowing bytes", make_file({"a": entry("F64", [2**62], 0, 4)}, WORD), "overflows 64 bits"),
    ("overflow before a zero", make_file({"a": entry("U8", [2**63, 2, 0], 0, 0)}), "overflows 64 bits"),
    (
        "long overflowing shape",
        make_file({"a": entry("U8", [2**63] * 50_000, 0, 4)}, WORD),
        "overflows 64 bits",
    ),
    ("half a byte", make_file({"a": entry("F4", [3], 0, 2)}, bytes(2)), "does not end at a byte"),
    (
        "three offsets",
        make_file({"a": {**entry("U8", [4], 0, 4), "data_offsets": [0, 4, 4]}}, WORD),
        "two non-neg",
    ),
    ("negative offset", make_file({"a": entry("U8", [4], -4, 0)}, WORD), "two non-negative"),
    ("float offset", make_file({"a": entry("U8", [4], 0, 4.0)}, WORD), "two non-negative"),
    ("backwards", make_file({"a": entry("F32", [1], 4, 0)}, WORD), "data_offsets run backwards: 4 to 0"),
    (
        "dtype times shape disagrees",
        make_file({"a": entry("F16", [2, 2], 0, 16)}, bytes(16)),
        "tensor 'a': F16 of shape [2, 2] takes 8 bytes; data_offsets give it 16",
    ),
    (
        "truncated",
        make_file(F32_PAIR, bytes(11)),
        "tensor 'b': ends at byte 12 of the data; the file, truncated, holds 11",
    ),
    (
        "bytes after the last",
        make_file(F32_PAIR, bytes(13)),
        "the last 1 bytes of the file belong to no tensor",
    ),
    ("bytes and no tensor", make_file({}, WORD), "the last 4 bytes"),
    (
        "overlap",
        make_file({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, bytes(8)),
        "tensor 'b': starts at byte 4, but tensor 'a' ends at 8: overlap",
    ),
    (
        "the same bytes twice",
        make_file({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, WORD),
        "overlap",
    ),
    (
        "hole",
        make_file({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 3, 4)}, WORD),
        "tensor 'b': starts at byte 3: a hole, the 2 bytes",
    ),
    ("hole at the start", make_file({"a": entry("U8", [1], 3, 4)}, WORD), "a hole, the 3 bytes"),
]

# What we refuse on purpose though the library takes it: duplicate keys hide a tensor, and the format's text
# (not the library) demands that the header begin with '{'. The others the library reads more generously than
# the format says.
STRICTER_THAN_THE_LIBRARY = {"leading space", "duplicate tensor"}


@pytest.mark.parametrize(
    ("content", "message"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
def test_each_fault_is_refused_by_name(tmp_path, content, message):
    with pytest.raises(SafetensorsError) as caught:
        read_bytes(tmp_path, content)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "model.safetensors"))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("name", "content"), [fault[:2] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
def test_the_library_refuses_the_same(name, content):
    if name in STRICTER_THAN_THE_LIBRARY:
        safetensors.deserialize(content)
    else:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(content)


@pytest.mark.parametrize(
    "content",
    [
        make_file({}),
        make_file({"__metadata__": {"format": "pt"}}),
        make_file(json.dumps(F32_PAIR).encode() + b"   \n", bytes(12)),
        make_file({"b": F32_PAIR["b"], "a": F32_PAIR["a"]}, bytes(12)),
        make_file({"s": entry("F32", [], 0, 4)}, WORD),
        make_file({"z": entry("F32", [0, 2**40], 0, 0), "a": entry("U8", [1], 0, 1)}, bytes(1)),
        make_file({"f4": entry("F4", [4], 0, 2)}, bytes(2)),
        make_file({"a": {**entry("U8", [1], 0, 1), "comment": "ignored"}}, bytes(1)),
    ],
)
def test_what_is_allowed_reads_as_the_library_reads_it(tmp_path, content):
    ours = {
        name: (view.dtype, list(view.shape), bytes(view.data))
        for name, view in read_bytes(tmp_path, content).items()
    }
    theirs = {
        name: (fields["dtype"], fields["shape"], bytes(fields["data"]))
        for name, fields in safetensors.deserialize(content)
    }
    assert ours == theirs


BASE = make_file(
    {
        "__metadata__": {"format": "pt"},
        "w.0": entry("F32", [2, 3], 0, 24),
        "b": entry("BF16", [4], 24, 32),
        "e": entry("U8", [0], 32, 32),
    },
    bytes(range(32)),
)
TOKENS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"0",
    b"-",
    b"1e9",
    b"18446744073709551616",
    b"null",
    b"\\u0000",
    b"F32",
    b"F16",
    b"__metadata__",
    b"dtype",
    b"shape",
    b"data_offsets",
    b"w.0",
    b" ",
    b"\xff",
    b"\x00",
    b"[" * 5000,
]


@st.composite
def mutated_files(draw):
    """A good file after one to six changes; in half of the cases the header's length is mended."""
    content = bytearray(BASE)
    for _ in range(draw(st.integers(1, 6))):
        position = draw(st.integers(0, max(0, len(content) - 1)))
        match draw(st.sampled_from(["byte", "insert", "delete", "token", "swap", "truncate"])):
            case "byte" if content:
                content[position] = draw(st.integers(0, 255))
            case "insert":
                content[position:position] = draw(st.binary(max_size=6))
            case "delete":
                del content[position : position + draw(st.integers(1, 12))]
            case "token":
                token = draw(st.sampled_from(TOKENS))
                content[position : position + draw(st.sampled_from([0, len(token)]))] = token
            case "swap":
                other = draw(st.integers(0, max(0, len(content) - 1)))
                size = draw(st.integers(1, 8))
                piece = bytes(content[other : other + size])
                content[position : position + size] = piece
            case "truncate" if draw(st.integers(0, 3)) == 0:
                del content[position:]
    if draw(st.booleans()) and len(content) > 8:
        end = bytes(content).rfind(b"}}") + 2
        if end > 8:
            content[:8] = struct.pack("<Q", end - 8)
    return bytes(content)


def library_accepts(content):
    try:
        return {name: bytes(fields["data"]) for name, fields in safetensors.deserialize(content)}
    except safetensors.SafetensorError:
        return None


@settings(max_examples=5000, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=mutated_files())
def test_mutated_files_never_crash_hang_or_allocate(tmp_path, content):
    path = tmp_path / "mutated.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        views = read_safetensors(path)
        message = None
    except SafetensorsError as error:
        views, message = None, str(error)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Parsed JSON takes more than its text, by a bounded factor; a claimed size must never be allocated.
    assert peak < 50_000 + 20 * len(content)
    theirs = library_accepts(content)
    if views is not None:
        assert theirs is not None, "we accept what the library refuses"
        assert {name: bytes(view.data) for name, view in views.items()} == theirs
        assert sum(view.nbytes for view in views.values()) < len(content)
    else:
        assert theirs is None or any(
            reason in message
            for reason in ("twice", "must begin with '{'", "__metadata__ must", "must be an object")
        ), message
