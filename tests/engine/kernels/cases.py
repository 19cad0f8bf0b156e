"""One launch of each kernel on awkward sizes, with what NumPy in float64 makes of it.

The same cases run in the emulation (``test_values.py``) and on a card (``test_gpu.py``, and
``benchmarks/gpu_kernels.py``, which has no pytest).
"""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tinyvllm_ref import bf16
from tinyvllm_ref.blas import linear_cublas
from tinyvllm_ref.device import cp, is_gpu
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
from tinyvllm_ref.kernels.sampling import apply_penalties, sample_rows, sample_specification
from tinyvllm_ref.kernels.silu_mul import silu_mul
from tinyvllm_ref.kernels.softmax import log_softmax, softmax
from tinyvllm_ref.kernels.split_qkv import split_qkv

# bfloat16 keeps 8 bits: rounding errs by at most 2^-9 of the number, and by 2^-8 where the float32 before it
# fell on the other side of a tie.
BF16 = 2.0**-8
FLOAT = 4e-6
EXACT = 0.0
EPS = 1e-5

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A launch and its result.

    Attributes
    ----------
    name : str
        Kernel and sizes.
    run : callable
        Launches; the outputs by name.
    want : callable
        The same outputs: float64, to be near; integers, to be equal.
    tolerance : float
        Largest error, as :func:`error` measures it.
    long : bool
        Too much work for a mode that checks every access.
    """

    name: str
    run: Callable[[], Arrays]
    want: Callable[[], Arrays]
    tolerance: float
    long: bool = False

    def errors(self) -> dict[str, float]:
        """Launch, and the error of each output."""
        got = self.run()
        return {name: error(got[name], want) for name, want in self.want().items()}

    def wrong(self) -> dict[str, float]:
        """The errors above the tolerance."""
        return {name: value for name, value in self.errors().items() if not value <= self.tolerance}


in_emulation = pytest.mark.skipif(is_gpu, reason="a test marked gpu runs these on a card")


@contextmanager
def checked(mode: str) -> Iterator[None]:
    """In the emulation, with these checks of accesses; and a warning is an error."""
    with warnings.catch_warnings(), cp.checks(mode):
        warnings.simplefilter("error")
        yield


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest |got - want| over the larger of |want| and the root mean square of want.

    Infinite where a shape or an integer differs, or where only one side is not a number.
    """
    if got.shape != want.shape:
        return float("inf")
    if want.dtype.kind in "iu":
        return 0.0 if np.array_equal(got, want) else float("inf")
    values = f64(bf16.bf16_to_float(got) if got.dtype == np.uint16 else got)
    finite = np.isfinite(want)
    if not np.array_equal(values[~finite], want[~finite], equal_nan=True):
        return float("inf")
    if not np.isfinite(values[finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    scale = np.sqrt(np.mean(want[finite] ** 2)) or 1.0
    values, want = values[finite], want[finite]
    return float(np.max(np.abs(values - want) / np.maximum(np.abs(want), scale)))


# ---------------- arrays
def random(*key: Any) -> np.random.Generator:
    """Numbers that depend on the case alone."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def bits(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """bfloat16 bits of normal numbers."""
    return bf16.float_to_bf16(normal(rng, *shape))


def f64(x: np.ndarray) -> np.ndarray:
    """The numbers in float64; of uint16, those that the bits mean."""
    return (bf16.bf16_to_float(x) if x.dtype == np.uint16 else x).astype(np.float64)


def poisoned(*shape: int, dtype: Any = np.float32) -> Any:
    """Memory that nobody has written, all bits set: NaN as a float, -1 as an integer."""
    array = cp.empty(shape, dtype)
    if is_gpu and array.size:
        array.view(np.uint8).fill(255)
    return array


def poisoned_bf16(*shape: int) -> Any:
    return poisoned(*shape, dtype=np.uint16)


# ---------------- row by row
def embedding_cases() -> Iterator[Case]:
    for tokens, vocab, hidden in ((1, 5, 7), (3, 11, 64), (2, 3, 1025), (4, 9, 2056)):
        rng = random("embedding", tokens, vocab, hidden)
        ids = rng.integers(0, vocab, tokens).astype(np.int32)
        ids[0] = vocab - 1
        table = bits(rng, vocab, hidden)

        def run(ids: np.ndarray = ids, table: np.ndarray = table) -> Arrays:
            out = poisoned(len(ids), table.shape[1])
            return {"out": cp.asnumpy(embedding(cp.asarray(ids), cp.asarray(table), out))}

        def want(ids: np.ndarray = ids, table: np.ndarray = table) -> Arrays:
            return {"out": f64(table)[ids]}

        yield Case(f"embedding T={tokens} H={hidden}", run, want, EXACT)


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return np.asarray(x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * f64(weight))


def norm_cases() -> Iterator[Case]:
    for tokens, hidden in ((1, 1), (3, 7), (2, 576), (2, 2049), (1, 4099)):
        rng = random("norm", tokens, hidden)
        x, weight, residual = normal(rng, tokens, hidden) + 2, bits(rng, hidden), normal(rng, tokens, hidden)
        x[-1] *= 1e-3
        residual[-1] *= 1e-3

        def run(x: np.ndarray = x, weight: np.ndarray = weight) -> Arrays:
            out = rms_norm(cp.asarray(x), cp.asarray(weight), EPS, poisoned_bf16(*x.shape))
            return {"out": cp.asnumpy(out)}

        def want(x: np.ndarray = x, weight: np.ndarray = weight) -> Arrays:
            return {"out": _norm(f64(x), weight, EPS)}

        yield Case(f"rms_norm T={tokens} H={hidden}", run, want, BF16)

        def run_add(
            x: np.ndarray = x, weight: np.ndarray = weight, residual: np.ndarray = residual
        ) -> Arrays:
            stream = cp.asarray(residual)
            out = add_rms_norm(cp.asarray(x), stream, cp.asarray(weight), EPS, poisoned_bf16(*x.shape))
            return {"out": cp.asnumpy(out), "residual": cp.asnumpy(stream)}

        def want_add(
            x: np.ndarray = x, weight: np.ndarray = weight, residual: np.ndarray = residual
        ) -> Arrays:
            total = f64(x) + f64(residual)
            return {"out": _norm(total, weight, EPS), "residual": total}

        yield Case(f"add_rms_norm T={tokens} H={hidden}", run_add, want_add, BF16)


def silu_cases() -> Iterator[Case]:
    for tokens, ffn in ((1, 1), (3, 7), (2, 130), (1, 1537)):
        gate_up = 3 * normal(random("silu", tokens, ffn), tokens, 2 * ffn)
        gate_up[0, 0] = -200.0  # exp(200) is too large for float32
        gate_up[-1, ffn - 1] = 200.0

        def run(gate_up: np.ndarray = gate_up) -> Arrays:
            out = poisoned_bf16(len(gate_up), gate_up.shape[1] // 2)
            return {"out": cp.asnumpy(silu_mul(cp.asarray(gate_up), out))}

        def want(gate_up: np.ndarray = gate_up) -> Arrays:
            gate, up = np.split(f64(gate_up), 2, axis=1)
            return {"out": gate / (1 + np.exp(-gate)) * up}

        yield Case(f"silu_mul T={tokens} F={ffn}", run, want, BF16)


def _rotated(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    a, b = np.split(f64(x), 2, axis=-1)
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)


def rope_cases() -> Iterator[Case]:
    for tokens, q_heads, k_heads, head_dim in ((1, 1, 1, 2), (3, 4, 2, 26), (2, 9, 3, 64), (5, 3, 1, 128)):
        rng = random("rope", head_dim)
        q, k = normal(rng, tokens, q_heads, head_dim), normal(rng, tokens, k_heads, head_dim)
        positions = rng.integers(0, 9000, tokens).astype(np.int32)
        positions[0] = 4097
        frequencies = (1e4 ** (-2 * np.arange(head_dim // 2) / head_dim)).astype(np.float32)
        arrays = (q, k, positions, frequencies)

        def run(arrays: tuple[np.ndarray, ...] = arrays) -> Arrays:
            q, k = rope(*map(cp.asarray, arrays))
            return {"q": cp.asnumpy(q), "k": cp.asnumpy(k)}

        def want(arrays: tuple[np.ndarray, ...] = arrays) -> Arrays:
            q, k, positions, frequencies = arrays
            angles = f64(
                positions.astype(np.float32)[:, None] * frequencies
            )  # a float32 product, as in the kernel
            return {"q": _rotated(q, angles), "k": _rotated(k, angles)}

        yield Case(f"rope T={tokens} Hq={q_heads} Hk={k_heads} D={head_dim}", run, want, FLOAT)


def softmax_cases() -> Iterator[Case]:
    for rows, width in ((1, 1), (3, 17), (2, 1025), (1, 5000)):
        x = 30 * normal(random("softmax", rows, width), rows, width) + 100
        if width > 2:
            x[0, 1] = -np.inf

        def run(x: np.ndarray = x) -> Arrays:
            a, b = softmax(cp.asarray(x), poisoned(*x.shape)), log_softmax(cp.asarray(x), poisoned(*x.shape))
            return {"softmax": cp.asnumpy(a), "log_softmax": cp.asnumpy(b)}

        def want(x: np.ndarray = x) -> Arrays:
            shifted = f64(x) - f64(x).max(axis=1, keepdims=True)
            total = np.exp(shifted).sum(axis=1, keepdims=True)
            return {"softmax": np.exp(shifted) / total, "log_softmax": shifted - np.log(total)}

        yield Case(f"softmax R={rows} V={width}", run, want, 2e-5)


def argmax_cases() -> Iterator[Case]:
    for rows, width in ((1, 1), (3, 17), (2, 4096), (3, 4097), (1, 9001)):
        x = normal(random("argmax", rows, width), rows, width) - 100
        x[0, width // 2 :] = x[0].max() + 1  # a tie over half of the row
        if rows > 2:
            x[1, 3], x[1, 5] = np.nan, np.nan
            x[2] = -np.inf

        def run(x: np.ndarray = x) -> Arrays:
            return {"out": cp.asnumpy(argmax(cp.asarray(x), poisoned(len(x), dtype=np.int32)))}

        def want(x: np.ndarray = x) -> Arrays:
            return {"out": np.argmax(x, axis=1)}

        yield Case(f"argmax R={rows} V={width}", run, want, EXACT, long=width > 5000)


# ---------------- copies
def copy_cases() -> Iterator[Case]:
    for tokens, q_heads, k_heads, head_dim in ((1, 1, 1, 2), (5, 4, 2, 26), (3, 9, 3, 64)):
        rng = random("copies", head_dim)
        qkv = normal(rng, tokens, (q_heads + 2 * k_heads) * head_dim)
        sizes = (tokens, q_heads, k_heads, head_dim)

        def run_split(qkv: np.ndarray = qkv, sizes: tuple[int, ...] = sizes) -> Arrays:
            t, hq, hk, d = sizes
            parts = split_qkv(cp.asarray(qkv), poisoned(t, hq, d), poisoned(t, hk, d), poisoned(t, hk, d))
            return dict(zip("qkv", map(cp.asnumpy, parts), strict=True))

        def want_split(qkv: np.ndarray = qkv, sizes: tuple[int, ...] = sizes) -> Arrays:
            t, hq, hk, d = sizes
            q, k, v = np.split(f64(qkv), [hq * d, (hq + hk) * d], axis=1)
            return {"q": q.reshape(t, hq, d), "k": k.reshape(t, hk, d), "v": v.reshape(t, hk, d)}

        yield Case(f"split_qkv T={tokens} D={head_dim}", run_split, want_split, EXACT)
        yield _kv_write_case(tokens, k_heads, head_dim)
        yield _gather_kv_case(2 * tokens + 1, k_heads, head_dim)
    for kind in (np.float32, np.uint16):
        rng = random("gather_rows", str(kind))
        x = bits(rng, 7, 131) if kind == np.uint16 else normal(rng, 7, 131)
        rows = np.array([6, 0, 0, 3], np.int32)

        def run_rows(x: np.ndarray = x, rows: np.ndarray = rows) -> Arrays:
            out = gather_rows(cp.asarray(x), cp.asarray(rows), poisoned(4, 131, dtype=x.dtype))
            return {"out": cp.asnumpy(out)}

        def want_rows(x: np.ndarray = x, rows: np.ndarray = rows) -> Arrays:
            return {"out": x[rows] if x.dtype == np.uint16 else f64(x[rows])}

        yield Case(f"gather_rows {np.dtype(kind)}", run_rows, want_rows, EXACT)


def _kv_write_case(tokens: int, heads: int, head_dim: int) -> Case:
    rng = random("kv_write", tokens, heads, head_dim)
    k, v = normal(rng, tokens, heads, head_dim), normal(rng, tokens, heads, head_dim)
    slots = rng.permutation(15)[:tokens].astype(np.int64)
    if tokens > 1:
        slots[1] = -1

    def run() -> Arrays:
        caches = [cp.asarray(np.full((3, 5, heads, head_dim), 0x7FC1, np.uint16)) for _ in range(2)]
        kv_write(cp.asarray(k), cp.asarray(v), cp.asarray(slots), *caches)
        return {"key_cache": cp.asnumpy(caches[0]), "value_cache": cp.asnumpy(caches[1])}

    def want() -> Arrays:
        expected = []
        for x in (k, v):
            cache = np.full((15, heads, head_dim), 0x7FC1, np.uint16)
            cache[slots[slots >= 0]] = bf16.float_to_bf16(x[slots >= 0])
            expected.append(cache.reshape(3, 5, heads, head_dim))
        return {"key_cache": expected[0], "value_cache": expected[1]}

    return Case(f"kv_write T={tokens} D={head_dim}", run, want, EXACT)


def _gather_kv_case(tokens: int, heads: int, head_dim: int) -> Case:
    rng = random("gather_kv", tokens, heads, head_dim)
    k, v = bits(rng, tokens, heads, head_dim), bits(rng, tokens, heads, head_dim)
    cache = PagedCache(rng, [k], [v], block_size=4)

    def run() -> Arrays:
        out = poisoned_bf16(*k.shape), poisoned_bf16(*k.shape)
        gather_kv(cp.asarray(cache.keys), cp.asarray(cache.values), cp.asarray(cache.tables[0]), *out)
        return {"k": cp.asnumpy(out[0]), "v": cp.asnumpy(out[1])}

    return Case(f"gather_kv m={tokens} D={head_dim}", run, lambda: {"k": k, "v": v}, EXACT)


def convert_cases() -> Iterator[Case]:
    patterns = np.arange(65536, dtype=np.uint32).astype(np.uint16).reshape(256, 256)
    special = [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0x7F7FFFFF, 0x3F808000, 0x3F818000]
    drawn = random("convert").integers(0, 2**32, 3000)
    numbers = np.concatenate([special, drawn]).astype(np.uint32).view(np.float32)
    wide = bf16.bf16_to_float(patterns).view(np.uint32)

    def run() -> Arrays:
        widened = to_float(cp.asarray(patterns), poisoned(256, 256))
        rounded = to_bf16(cp.asarray(numbers), poisoned_bf16(len(numbers)))
        return {"widened": cp.asnumpy(widened).view(np.uint32), "rounded": cp.asnumpy(rounded)}

    yield Case(
        "convert, all bit patterns",
        run,
        lambda: {"widened": wide, "rounded": bf16.float_to_bf16(numbers)},
        EXACT,
        long=True,
    )


# ---------------- products
def linear_cases() -> Iterator[Case]:
    for function, tokens, outputs, depth in (
        *(
            (linear_kernel, t, n, k)
            for t, n, k in ((1, 1, 1), (3, 65, 33), (5, 63, 40), (17, 70, 31), (65, 3, 9))
        ),
        *((linear_kernel, t, n, k) for t, n, k in ((2, 64, 0),)),
        *((linear_cublas, t, n, k) for t, n, k in ((1, 576, 576), (3, 65, 33), (17, 70, 31), (2, 64, 0))),
    ):
        rng = random("linear", tokens, outputs, depth)
        x, w = bits(rng, tokens, depth), bits(rng, outputs, depth)

        def run(function: Any = function, x: np.ndarray = x, w: np.ndarray = w) -> Arrays:
            return {"out": cp.asnumpy(function(cp.asarray(x), cp.asarray(w), poisoned(len(x), len(w))))}

        def want(x: np.ndarray = x, w: np.ndarray = w) -> Arrays:
            return {"out": f64(x) @ f64(w).T}

        yield Case(f"{function.__name__} T={tokens} N={outputs} K={depth}", run, want, FLOAT)


# ---------------- attention
class PagedCache:
    """The keys and values of several requests in shuffled blocks; every other slot holds NaN."""

    def __init__(
        self, rng: np.random.Generator, k: list[np.ndarray], v: list[np.ndarray], block_size: int
    ) -> None:
        needed = [-(-len(x) // block_size) for x in k]
        order = rng.permutation(sum(needed) + 2).astype(np.int32)
        shape = (len(order), block_size, *k[0].shape[1:])
        self.keys, self.values = np.full(shape, 0x7FC0, np.uint16), np.full(shape, 0x7FC0, np.uint16)
        self.tables = np.full((len(k), max(1, *needed)), -1, np.int32)
        self.lengths = np.array([len(x) for x in k], np.int32)
        start = 0
        for row, count in enumerate(needed):
            blocks = order[start : start + count]
            self.tables[row, :count] = blocks
            start += count
            for cache, x in ((self.keys, k[row]), (self.values, v[row])):
                for j in range(len(x)):
                    cache[blocks[j // block_size], j % block_size] = x[j]


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Causal attention of the last len(q) tokens, in float64."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    q, k, v = f64(q), np.repeat(f64(k), group, axis=1), np.repeat(f64(v), group, axis=1)
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    scores[:, np.arange(m) > m - n + np.arange(n)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(np.einsum("hij,jhd->ihd", weights / weights.sum(axis=-1, keepdims=True), v))


# (n, m, Hq, Hk, D)
ATTENTION_SIZES = (
    (1, 1, 1, 1, 2),
    (3, 5, 4, 4, 5),
    (5, 17, 2, 1, 26),
    (2, 64, 6, 2, 16),
    (1, 65, 8, 1, 48),
    (16, 16, 5, 1, 8),
    (65, 65, 2, 2, 26),
    (2, 3, 3, 1, 128),
    (3, 3, 7, 1, 80),
    (2, 9, 2, 1, 256),
)
LONG_ATTENTION_SIZES = ((3, 1025, 3, 1, 64), (65, 257, 4, 2, 80), (200, 600, 9, 3, 64), (1, 4097, 2, 1, 26))


def attention_cases() -> Iterator[Case]:
    for function in (attention, flash_attention):
        for size in (*ATTENTION_SIZES, *LONG_ATTENTION_SIZES):
            n, m, q_heads, k_heads, d = size
            rng = random("attention", *size)
            q, k, v = 3 * normal(rng, n, q_heads, d), bits(rng, m, k_heads, d), bits(rng, m, k_heads, d)
            q[0, 0] *= 30  # large scores
            arrays, scale = (q, k, v), d**-0.5

            def run(function: Any = function, arrays: Any = arrays, scale: float = scale) -> Arrays:
                out = poisoned_bf16(*arrays[0].shape)
                return {"out": cp.asnumpy(function(*map(cp.asarray, arrays), scale, out))}

            def want(arrays: Any = arrays, scale: float = scale) -> Arrays:
                return {"out": attend(*arrays, scale)}

            name = f"{function.__name__} n={n} m={m} Hq={q_heads} Hk={k_heads} D={d}"
            yield Case(name, run, want, 2 * BF16, long=size in LONG_ATTENTION_SIZES)


# (lengths, Hq, Hk, D, block size)
PAGED_SIZES = (
    ((1, 15, 16, 17), 2, 1, 26, 16),
    ((64, 1, 65), 3, 1, 16, 5),
    ((33,), 4, 4, 5, 1),
    ((7, 20), 8, 1, 80, 7),
    ((5,), 10, 2, 48, 64),
    ((9, 2), 14, 1, 128, 3),
    ((3,), 8, 1, 256, 16),
    ((0, 4), 6, 3, 64, 16),
)
LONG_PAGED_SIZES = (
    ((4097, 1, 255, 256, 257), 9, 3, 64, 16),
    ((1025, 64), 5, 1, 26, 11),
    ((700,), 16, 2, 128, 16),
)


def paged_cases() -> Iterator[Case]:
    for size in (*PAGED_SIZES, *LONG_PAGED_SIZES):
        lengths, q_heads, k_heads, d, block_size = size
        long = size in LONG_PAGED_SIZES
        rng = random("paged", *size)
        k, v = ([bits(rng, m, k_heads, d) for m in lengths] for _ in range(2))
        q = 3 * normal(rng, len(lengths), q_heads, d)
        cache, scale = PagedCache(rng, k, v, block_size), d**-0.5
        name = f"m={lengths} Hq={q_heads} Hk={k_heads} D={d} BS={block_size}".replace(" ", "", 0)

        def run(q: np.ndarray = q, cache: PagedCache = cache, scale: float = scale) -> Arrays:
            arrays = (q, cache.keys, cache.values, cache.tables, cache.lengths)
            out = paged_attention(*map(cp.asarray, arrays), scale, poisoned_bf16(*q.shape))
            return {"out": cp.asnumpy(out)}

        def want(q: np.ndarray = q, k: Any = k, v: Any = v, scale: float = scale) -> Arrays:
            rows = [
                attend(q[b : b + 1], k[b], v[b], scale)[0] if len(k[b]) else 0 * q[b] for b in range(len(q))
            ]
            return {"out": f64(np.stack(rows))}

        yield Case(f"paged_attention {name}", run, want, 2 * BF16, long=long)

        counts = [min(m, 1 + 3 * b + min(m, 300) // 3) for b, m in enumerate(lengths)]
        starts = np.cumsum([1, *counts]).astype(np.int32)  # a row of q before the first request's
        packed = 3 * normal(rng, int(starts[-1]), q_heads, d)

        def run_prefill(
            q: np.ndarray = packed,
            starts: np.ndarray = starts,
            cache: PagedCache = cache,
            scale: float = scale,
        ) -> Arrays:
            arrays = (q, cache.keys, cache.values, cache.tables, starts, cache.lengths)
            longest = int(np.diff(starts).max())
            out = paged_prefill(*map(cp.asarray, arrays), longest, scale, poisoned_bf16(*q.shape))
            return {"out": cp.asnumpy(out[1:])}

        def want_prefill(
            q: np.ndarray = packed, starts: np.ndarray = starts, k: Any = k, v: Any = v, scale: float = scale
        ) -> Arrays:
            parts = [
                attend(q[a:b], k[r], v[r], scale)
                for r, (a, b) in enumerate(itertools.pairwise(starts))
                if b > a
            ]
            return {"out": np.concatenate(parts)}

        yield Case(f"paged_prefill {name}", run_prefill, want_prefill, 2 * BF16, long=long)


def merge_cases() -> Iterator[Case]:
    rng = random("merge")
    scores, values = 5 * normal(rng, 4, 3, 40), normal(rng, 4, 3, 40, 26)
    cuts = np.array(
        [[0, 40, 7], [1, 39, 20], [3, 0, 40], [8, 16, 32]]
    )  # keys on the left side; 0 and 40 leave one empty

    def part(keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        kept = np.where(keep, f64(scores), -np.inf)
        weights = np.exp(kept - f64(scores).max())
        total = weights.sum(axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            out = np.einsum("abj,abjd->abd", weights, f64(values)) / total[..., None]  # NaN where empty
            return out, np.log(total) + f64(scores).max()

    def run() -> Arrays:
        left = np.arange(40) < cuts[..., None]
        sides = [x.astype(np.float32) for keep in (left, ~left) for x in part(keep)]
        out, lse = merge_attention(*map(cp.asarray, sides))
        empty = np.full((2, 3), -np.inf, np.float32)
        nothing = np.full((2, 3, 5), np.nan, np.float32)
        none, none_lse = merge_attention(*map(cp.asarray, (nothing, empty, nothing, empty)))
        got = {"out": out, "lse": lse, "none": none, "none_lse": none_lse}
        return {name: cp.asnumpy(value) for name, value in got.items()}

    def want() -> Arrays:
        out, lse = part(np.ones((4, 3, 40), bool))
        return {"out": out, "lse": lse, "none": np.zeros((2, 3, 5)), "none_lse": np.full((2, 3), -np.inf)}

    yield Case("merge_attention", run, want, 1e-5)


# ---------------- sampling
def sampling_cases() -> Iterator[Case]:
    for vocab in (1, 17, 4097):
        rng = random("sampling", vocab)
        rows = 12
        logits = 3 * normal(rng, rows, vocab)
        if vocab > 3:
            logits[3, 1] = -np.inf
            logits[4, :3] = np.inf
            logits[5, 2] = np.nan
        options = [
            np.array([0, 1, 0.7, 1, 1, 1.5, 1, 1, 0.01, 30, 1, 1], np.float32),  # temperature
            np.array([0, 0, 5, -1, 0, 0, 1, 0, 0, 0, 3000, 7], np.int32),  # top_k
            np.array([1, 1, 0.8, 0.5, 1, 0.9, 1, 1e-6, 1, 0.999, 1, 0.6], np.float32),  # top_p
            np.array([0, 0, 0, 0.1, 0, 0, 0, 0, 0, 0, 0.9, 0.05], np.float32),  # min_p
            rng.integers(0, 2**63, rows).astype(np.uint64) * np.uint64(2) + np.uint64(1),  # seeds
            np.arange(rows, dtype=np.int32) * 1000,  # steps
        ]

        def run(logits: np.ndarray = logits, options: Any = options) -> Arrays:
            out = poisoned(len(logits), dtype=np.int32)
            return {"out": cp.asnumpy(sample_rows(*map(cp.asarray, (logits, *options)), out))}

        def want(logits: np.ndarray = logits, options: Any = options) -> Arrays:
            drawn = []
            for r, row in enumerate(logits):
                order = np.argsort(-row, kind="stable")
                first = int(order[0])
                settings = [option[r].item() for option in options]
                infinite = not np.isfinite(row[first])
                clean = np.where(np.isnan(row), -np.inf, row)
                drawn.append(first if infinite else sample_specification(clean, *settings))
            return {"out": np.array(drawn)}

        yield Case(f"sample_rows V={vocab}", run, want, EXACT, long=vocab > 1000)


def penalty_cases() -> Iterator[Case]:
    rng = random("penalties")
    logits = normal(rng, 3, 50)
    rows, tokens = np.array([0, 0, 2, 2, 2], np.int32), np.array([49, 0, 7, 8, 9], np.int32)
    counts = np.array([0, 2, 1, 0, 300], np.int32)
    repetition, presence, frequency = (
        np.array(x, np.float32) for x in ((1.3, 1, 0.7), (0.5, 0, -1), (0, 2, 0.25))
    )

    def run() -> Arrays:
        arrays = (logits, rows, tokens, counts, repetition, presence, frequency)
        return {"logits": cp.asnumpy(apply_penalties(*map(cp.asarray, arrays)))}

    def want() -> Arrays:
        out = f64(logits)
        for row, token, count in zip(rows, tokens, counts, strict=True):
            x = out[row, token]
            x = x / f64(repetition)[row] if x > 0 else x * f64(repetition)[row]
            out[row, token] = x - (f64(presence)[row] + f64(frequency)[row] * count if count else 0)
        return {"logits": out}

    yield Case("apply_penalties", run, want, FLOAT)


def all_cases() -> list[Case]:
    """Every case."""
    families = (
        *(embedding_cases, norm_cases, silu_cases, rope_cases, softmax_cases, argmax_cases, copy_cases),
        *(
            convert_cases,
            linear_cases,
            attention_cases,
            paged_cases,
            merge_cases,
            sampling_cases,
            penalty_cases,
        ),
    )
    return [case for family in families for case in family()]
