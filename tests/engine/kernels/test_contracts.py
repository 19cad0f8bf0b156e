"""Every launch function refuses wrong shapes, dtypes and layouts, and says which array and what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinyvllm_ref.blas import linear_cublas
from tinyvllm_ref.device import cp
from tinyvllm_ref.kernels.add_rms_norm import add_rms_norm
from tinyvllm_ref.kernels.argmax import argmax
from tinyvllm_ref.kernels.attention import attention
from tinyvllm_ref.kernels.convert import to_bf16, to_float
from tinyvllm_ref.kernels.embedding import embedding
from tinyvllm_ref.kernels.flash_attention import flash_attention
from tinyvllm_ref.kernels.gather_kv import gather_kv
from tinyvllm_ref.kernels.gather_rows import gather_rows
from tinyvllm_ref.kernels.kv_write import kv_write
from tinyvllm_ref.kernels.linear import linear_kernel
from tinyvllm_ref.kernels.merge_attention import merge_attention
from tinyvllm_ref.kernels.paged_attention import paged_attention
from tinyvllm_ref.kernels.paged_prefill import paged_prefill
from tinyvllm_ref.kernels.rms_norm import rms_norm
from tinyvllm_ref.kernels.rope import rope
from tinyvllm_ref.kernels.sampling import apply_penalties, sample_rows
from tinyvllm_ref.kernels.silu_mul import silu_mul
from tinyvllm_ref.kernels.softmax import log_softmax, softmax
from tinyvllm_ref.kernels.split_qkv import split_qkv

F32, BF16, I32, I64, U64 = np.float32, np.uint16, np.int32, np.int64, np.uint64
Spec = tuple[tuple[int, ...], Any]

# Function, and its arguments: (shape, dtype) of an array, or a number.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "embedding": (embedding, {"ids": ((3,), I32), "table": ((5, 8), BF16), "out": ((3, 8), F32)}),
    "rms_norm": (rms_norm, {"x": ((3, 8), F32), "weight": ((8,), BF16), "eps": 1e-5, "out": ((3, 8), BF16)}),
    "add_rms_norm": (
        add_rms_norm,
        {
            "x": ((3, 8), F32),
            "residual": ((3, 8), F32),
            "weight": ((8,), BF16),
            "eps": 1e-5,
            "out": ((3, 8), BF16),
        },
    ),
    "silu_mul": (silu_mul, {"gate_up": ((3, 14), F32), "out": ((3, 7), BF16)}),
    "rope": (
        rope,
        {"q": ((3, 4, 6), F32), "k": ((3, 2, 6), F32), "positions": ((3,), I32), "inv_freq": ((3,), F32)},
    ),
    "softmax": (softmax, {"x": ((3, 8), F32), "out": ((3, 8), F32)}),
    "log_softmax": (log_softmax, {"x": ((3, 8), F32), "out": ((3, 8), F32)}),
    "argmax": (argmax, {"logits": ((3, 8), F32), "out": ((3,), I32)}),
    "split_qkv": (
        split_qkv,
        {"qkv": ((3, 48), F32), "q": ((3, 4, 6), F32), "k": ((3, 2, 6), F32), "v": ((3, 2, 6), F32)},
    ),
    "kv_write": (
        kv_write,
        {
            **{"k": ((3, 2, 6), F32), "v": ((3, 2, 6), F32), "slots": ((3,), I64)},
            **{"key_cache": ((5, 4, 2, 6), BF16), "value_cache": ((5, 4, 2, 6), BF16)},
        },
    ),
    "gather_kv": (
        gather_kv,
        {
            **{
                "key_cache": ((5, 4, 2, 6), BF16),
                "value_cache": ((5, 4, 2, 6), BF16),
                "block_table": ((2,), I32),
            },
            **{"k": ((7, 2, 6), BF16), "v": ((7, 2, 6), BF16)},
        },
    ),
    "gather_rows": (gather_rows, {"x": ((7, 8), F32), "rows": ((3,), I32), "out": ((3, 8), F32)}),
    "to_bf16": (to_bf16, {"x": ((3, 8), F32), "out": ((3, 8), BF16)}),
    "to_float": (to_float, {"x": ((3, 8), BF16), "out": ((3, 8), F32)}),
    "linear_cublas": (linear_cublas, {"x": ((3, 8), BF16), "w": ((5, 8), BF16), "out": ((3, 5), F32)}),
    "linear_kernel": (linear_kernel, {"x": ((3, 8), BF16), "w": ((5, 8), BF16), "out": ((3, 5), F32)}),
    **{
        function.__name__: (
            function,
            {
                **{"q": ((3, 4, 8), F32), "k": ((5, 2, 8), BF16), "v": ((5, 2, 8), BF16), "scale": 0.5},
                **{"out": ((3, 4, 8), BF16)},
            },
        )
        for function in (attention, flash_attention)
    },
    "paged_attention": (
        paged_attention,
        {
            **{"q": ((3, 4, 8), F32), "key_cache": ((5, 4, 2, 8), BF16), "value_cache": ((5, 4, 2, 8), BF16)},
            **{
                "block_tables": ((3, 2), I32),
                "context_lens": ((3,), I32),
                "scale": 0.5,
                "out": ((3, 4, 8), BF16),
            },
        },
    ),
    "paged_prefill": (
        paged_prefill,
        {
            **{"q": ((6, 4, 8), F32), "key_cache": ((5, 4, 2, 8), BF16), "value_cache": ((5, 4, 2, 8), BF16)},
            **{"block_tables": ((3, 2), I32), "query_starts": ((4,), I32), "context_lens": ((3,), I32)},
            **{"max_queries": 2, "scale": 0.5, "out": ((6, 4, 8), BF16)},
        },
    ),
    "merge_attention": (
        merge_attention,
        {
            "out_a": ((3, 4, 8), F32),
            "lse_a": ((3, 4), F32),
            "out_b": ((3, 4, 8), F32),
            "lse_b": ((3, 4), F32),
        },
    ),
    "apply_penalties": (
        apply_penalties,
        {
            **{"logits": ((3, 8), F32), "rows": ((2,), I32), "tokens": ((2,), I32), "counts": ((2,), I32)},
            **{"repetition": ((3,), F32), "presence": ((3,), F32), "frequency": ((3,), F32)},
        },
    ),
    "sample_rows": (
        sample_rows,
        {
            **{
                "logits": ((3, 8), F32),
                "temperature": ((3,), F32),
                "top_k": ((3,), I32),
                "top_p": ((3,), F32),
            },
            **{"min_p": ((3,), F32), "seeds": ((3,), U64), "steps": ((3,), I32), "out": ((3,), I32)},
        },
    ),
}
ARRAYS = [
    (name, array)
    for name, (_, specs) in CALLS.items()
    for array, spec in specs.items()
    if isinstance(spec, tuple)
]


def _arguments(name: str) -> dict[str, Any]:
    specs = CALLS[name][1]
    made = {key: cp.zeros(*spec) if isinstance(spec, tuple) else spec for key, spec in specs.items()}
    if name in ("paged_attention", "paged_prefill"):
        made["context_lens"] += 2
    if name == "paged_prefill":
        made["query_starts"] = cp.arange(4, dtype=I32) * 2
    if name == "kv_write":
        made["slots"] = cp.arange(3, dtype=I64)
    if name == "apply_penalties":
        made["tokens"] = cp.arange(2, dtype=I32)
    return made


def _call(name: str, **changed: Any) -> Any:
    return CALLS[name][0](*(_arguments(name) | changed).values())


@pytest.mark.parametrize("name", CALLS)
def test_right_arguments_pass(name: str) -> None:
    _call(name)


def _refused(name: str, array: str, value: Any) -> str:
    with pytest.raises(ValueError, match=rf"\b{array}\b|the width of|the number of|head_dim") as caught:
        _call(name, **{array: value})
    message = str(caught.value)
    assert "must be" in message
    return message


@pytest.mark.parametrize(("name", "array"), ARRAYS)
def test_wrong_dtype(name: str, array: str) -> None:
    shape, dtype = CALLS[name][1][array]
    wrong = np.float64 if dtype in (F32, BF16) else np.int16
    message = _refused(name, array, cp.zeros(shape, wrong))
    assert np.dtype(wrong).name in message


@pytest.mark.parametrize(("name", "array"), ARRAYS)
def test_wrong_number_of_dimensions(name: str, array: str) -> None:
    shape, dtype = CALLS[name][1][array]
    message = _refused(name, array, cp.zeros((*shape, 1), dtype))
    assert str((*shape, 1)) in message


@pytest.mark.parametrize(("name", "array"), ARRAYS)
def test_a_view_with_gaps(name: str, array: str) -> None:
    shape, dtype = CALLS[name][1][array]
    message = _refused(name, array, cp.zeros((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2])
    assert "contiguous" in message


@pytest.mark.parametrize(("name", "array"), ARRAYS)
def test_an_array_on_the_host(name: str, array: str) -> None:
    assert "NumPy" in _refused(name, array, np.zeros(*CALLS[name][1][array]))


def _misfits() -> list[tuple[str, str, int]]:
    """Every axis of every array that some other array, or a rule, pins."""
    free = {("gather_rows", "x", 0), ("gather_rows", "rows", 0), ("gather_kv", "block_table", 0)}
    free |= {("embedding", "table", 0), ("rope", "q", 1), ("rope", "k", 1)}
    free |= {("argmax", "logits", 1), ("apply_penalties", "logits", 1), ("sample_rows", "logits", 1)}
    free |= {("paged_attention", "block_tables", 1), ("paged_prefill", "block_tables", 1)}
    found = []
    for name, array in ARRAYS:
        for axis in range(len(CALLS[name][1][array][0])):
            if (name, array, axis) not in free:
                found.append((name, array, axis))
    return found


@pytest.mark.parametrize(("name", "array", "axis"), _misfits())
def test_a_size_that_does_not_fit(name: str, array: str, axis: int) -> None:
    shape, dtype = CALLS[name][1][array]
    longer = tuple(size + 3 * (k == axis) for k, size in enumerate(shape))
    with pytest.raises(ValueError, match="must be"):
        _call(name, **{array: cp.zeros(longer, dtype)})


def test_the_message_says_it_all() -> None:
    with pytest.raises(ValueError, match="rms_norm: weight") as caught:
        _call("rms_norm", weight=cp.zeros(7, F32))
    assert str(caught.value) == (
        "rms_norm: weight has shape (7,) and dtype float32; "
        "it must be uint16 (bfloat16 bits) of shape (H,) = (8,)"
    )


def test_more_queries_than_keys() -> None:
    with pytest.raises(
        ValueError, match="the number of queries is 3; it must be at most that of the keys, 2"
    ):
        _call("flash_attention", k=cp.zeros((2, 2, 8), BF16), v=cp.zeros((2, 2, 8), BF16))


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="the number of query heads is 4; it must be a multiple of the 3 KV"):
        _call("flash_attention", k=cp.zeros((5, 3, 8), BF16), v=cp.zeros((5, 3, 8), BF16))


def test_an_array_that_vectors_can_not_read() -> None:
    shifted = cp.zeros(5 * 2 * 8 + 1, BF16)[1:].reshape(5, 2, 8)
    with pytest.raises(ValueError, match=r"flash_attention: k starts at address .* multiple of 16 bytes"):
        _call("flash_attention", k=shifted)


def test_a_table_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="the number of tokens is 7; it must be at most 4"):
        _call("gather_kv", block_table=cp.zeros(1, I32))


@pytest.mark.parametrize("name", ["argmax", "sample_rows"])
def test_no_vocabulary(name: str) -> None:
    with pytest.raises(ValueError, match="the width of logits is 0; it must be at least 1"):
        _call(name, logits=cp.zeros((3, 0), F32))


@pytest.mark.parametrize(
    "name", ["embedding", "rms_norm", "silu_mul", "linear_cublas", "linear_kernel", "argmax"]
)
def test_no_tokens(name: str) -> None:
    """Nothing to do is no error, and launches nothing."""
    empty = {
        key: cp.zeros((0, *spec[0][1:]), spec[1])
        for key, spec in CALLS[name][1].items()
        if isinstance(spec, tuple) and spec[0][0] == 3
    }
    out = _call(name, **empty)
    assert out.shape[0] == 0
