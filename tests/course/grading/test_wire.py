"""Messages: plain values come back as they were, and nothing else is taken."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_ref.course.grading import wire

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


def through(value):
    message = wire.pack(value)
    document, blob = wire.HEADER.unpack(message[: wire.HEADER.size])
    body = message[wire.HEADER.size :]
    assert len(body) == document + blob
    return wire.unpack(body[:document], body[document:])


@given(PLAIN)
def test_plain_values_come_back(value):
    assert through(value) == value


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "uint16", "int64", "bool", "complex64", ">f4"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_arrays_come_back_to_the_bit(dtype, shape):
    array = np.random.default_rng(1).integers(0, 255, (*shape, np.dtype(dtype).itemsize), np.uint8)
    array = (array % 2 if dtype == "bool" else array).view(dtype).reshape(shape)
    found = through({"x": [array]})["x"][0]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


def test_numbers_that_json_lacks():
    assert math.isnan(through(float("nan")))
    assert through([float("inf"), -math.inf]) == [math.inf, -math.inf]
    scalar = through(np.float32(1.5))
    assert (type(scalar), scalar) == (np.float32, 1.5)


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([None]), np.zeros(2, "M8[s]"), lambda: 0])
def test_other_things_are_not_sent(value):
    with pytest.raises(TypeError):
        wire.pack(value)


@pytest.mark.parametrize(
    "document",
    [
        {"a": ["O", [1], 0]},
        {"a": ["<f8", [2], 0]},
        {"a": ["<f8", [-1], 0]},
        {"a": ["<f8", [1 << 39, 1 << 39], 0]},
        {"a": ["<f8", [1], -8]},
        {"a": ["<f8", [True], 0]},
        {"a": 3},
        {"x": 1},
        {"a": [], "b": 1},
        {"b": "%%"},
        {"d": [[[], 1]]},
        {"d": [[{"d": []}, 1]]},
        {"f": "1e5"},
    ],
)
def test_what_is_no_message_is_refused(document):
    with pytest.raises(wire.WireError):
        wire.unpack(json.dumps(document).encode(), bytes(8))


@pytest.mark.parametrize("document", [b"", b"\xff", b"[" * 100_000, b"[" * 30 + b"]" * 30, b"1" * 10_000])
def test_documents_that_are_none(document):
    with pytest.raises(wire.WireError):
        wire.unpack(document, b"")
