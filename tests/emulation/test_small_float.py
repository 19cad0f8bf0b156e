"""The emulation's half and bfloat16 headers: every bit against numpy.float16 and ml_dtypes.bfloat16.

The headers are compiled by themselves, without the emulation, with each C++ compiler that this machine has.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tinyvllm_ref.emulation

# NumPy warns of the NaNs and infinities that these tests are made of.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INCLUDE = Path(tinyvllm_ref.emulation.__file__).parent / "runtime" / "include"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# What the emulation compiles kernels with, as far as numbers go.
FLAGS = [
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
    "-Werror",
]

SOURCE = r"""
#define EMU_CUDA_SHIM
struct alignas(8) float2 { float x, y; };
#include <cuda_bf16.h>

// One loop over n numbers for each function; T is the type, S its name's ending.
#define EXPORT extern "C" __attribute__((visibility("default"))) void
#define UNARY(S, NAME, OUT, IN, EXPRESSION)                                                \
    EXPORT S##_##NAME(int n, const IN *x, const IN *, const IN *, OUT *out) {              \
        for (int i = 0; i < n; i++) { IN a = x[i]; out[i] = EXPRESSION; }                  \
    }
#define TERNARY(S, T, NAME, OUT, EXPRESSION)                                               \
    EXPORT S##_##NAME(int n, const T *x, const T *y, const T *z, OUT *out) {               \
        for (int i = 0; i < n; i++) {                                                      \
            T a = x[i], b = y[i], c = z[i];                                                \
            (void)b, (void)c;                                                              \
            out[i] = EXPRESSION;                                                           \
        }                                                                                  \
    }
#define BOTH(S, T, N)                                                                      \
    UNARY(S, widen, float, T, (float)a)                                                    \
    UNARY(S, narrow, T, float, (T)a)                                                       \
    UNARY(S, rz, T, float, __float2##N##_rz(a))                                            \
    UNARY(S, rd, T, float, __float2##N##_rd(a))                                            \
    UNARY(S, ru, T, float, __float2##N##_ru(a))                                            \
    UNARY(S, from_double, T, double, __double2##N(a))                                      \
    UNARY(S, from_long, T, long long, (T)a)                                                \
    UNARY(S, to_int, int, T, (int)a)                                                       \
    UNARY(S, to_int_rn, int, T, __##N##2int_rn(a))                                         \
    UNARY(S, to_uchar, unsigned char, T, (unsigned char)a)                                 \
    TERNARY(S, T, add, T, a + b)                                                           \
    TERNARY(S, T, sub, T, a - b)                                                           \
    TERNARY(S, T, mul, T, a * b)                                                           \
    TERNARY(S, T, div, T, a / b)                                                           \
    TERNARY(S, T, fma, T, __hfma(a, b, c))                                                 \
    TERNARY(S, T, lt, unsigned char, a < b)                                                \
    TERNARY(S, T, le, unsigned char, a <= b)                                               \
    TERNARY(S, T, eq, unsigned char, a == b)                                               \
    TERNARY(S, T, ne, unsigned char, a != b)                                               \
    TERNARY(S, T, hne, unsigned char, __hne(a, b))                                         \
    TERNARY(S, T, ltu, unsigned char, __hltu(a, b))                                        \
    TERNARY(S, T, max, T, __hmax(a, b))                                                    \
    TERNARY(S, T, min_nan, T, __hmin_nan(a, b))                                            \
    TERNARY(S, T, neg, T, -a)                                                              \
    TERNARY(S, T, abs, T, __habs(a))                                                       \
    TERNARY(S, T, sqrt, T, hsqrt(a))                                                       \
    TERNARY(S, T, add_sat, T, __hadd_sat(a, b))                                            \
    TERNARY(S, T, atomic, T, (atomicAdd(&a, b), a))                                        \
    TERNARY(S, T, pair_high, T, __high2##N(__hadd2(__halves2##N##2(b, a), __##N##2##N##2(c))))
BOTH(f16, __half, half)
BOTH(bf16, __nv_bfloat16, bfloat16)
EXPORT sizes(int *out) {
    out[0] = sizeof(half), out[1] = sizeof(half2);
    out[2] = sizeof(nv_bfloat16), out[3] = sizeof(nv_bfloat162);
    out[4] = alignof(half), out[5] = alignof(half2);
    out[6] = __is_trivially_copyable(half), out[7] = __is_trivially_copyable(nv_bfloat162);
}
"""


def _compilers() -> list[list[str]]:
    """Commands of the C++ compilers on this machine."""
    found = [[name] for name in ("g++", "clang++") if shutil.which(name)]
    spec = importlib.util.find_spec("ziglang")
    if spec is not None and spec.origin is not None:
        found.append([str(Path(spec.origin).parent / "zig"), "c++", "-fno-sanitize=undefined", "-nostdlib++"])
    return found


@pytest.fixture(scope="module", params=_compilers(), ids=lambda command: Path(command[0]).name)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("small_float")
    source, target = folder / "source.cpp", folder / "small_float.so"
    source.write_text(SOURCE)
    command = [
        *request.param,
        *FLAGS,
        "-I",
        str(INCLUDE),
        "-shared",
        "-fPIC",
        str(source),
        "-o",
        str(target),
        "-lm",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(target))


class Format:
    """One format: what the library calls it, its oracle's dtype, and how to call the library."""

    def __init__(self, library: ctypes.CDLL, name: str, dtype: np.dtype) -> None:
        self.library, self.name, self.dtype = library, name, dtype

    def __call__(self, function: str, out: np.dtype | type, *operands: np.ndarray) -> np.ndarray:
        """What `function` gives for each element."""
        operands = tuple(np.ascontiguousarray(operand) for operand in operands)
        operands += (operands[0],) * (3 - len(operands))
        result = np.empty(operands[0].size, out)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*operands, result)]
        getattr(self.library, f"{self.name}_{function}")(ctypes.c_int(result.size), *pointers)
        return result

    def all_patterns(self) -> np.ndarray:
        """All 65,536 numbers of the format."""
        return np.arange(65536, dtype=np.uint16).view(self.dtype)

    def pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Triples of numbers: random bits, and numbers near to each other so that sums round."""
        rng = np.random.default_rng(4)
        bits = rng.integers(0, 65536, (3, 200_000), dtype=np.uint16).view(self.dtype)
        near = rng.standard_normal((3, 200_000)).astype(self.dtype)
        a, b, c = np.concatenate([bits, near], axis=1)
        return a, b, c


@pytest.fixture(params=["f16", "bf16"])
def fmt(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Format:
    return Format(library, request.param, np.dtype(np.float16) if request.param == "f16" else BFLOAT16)


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Equal to the bit, zeros' signs too; any NaN is as good as another."""
    bits = np.uint16 if got.dtype.itemsize == 2 else np.uint32
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(got.view(bits)[~nan], want.view(bits)[~nan])


def floats_of_interest(dtype: np.dtype) -> np.ndarray:
    """float32: every number of the format, every tie between two, their neighbours, and random bits."""
    with np.errstate(all="ignore"):
        numbers = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
        finite = np.sort(numbers[np.isfinite(numbers)])
        ties = (finite[1:].astype(np.float64) + finite[:-1]) / 2
        ties = ties.astype(np.float32)
        around = [np.nextafter(ties, np.float32(sign * np.inf)) for sign in (-1, 1)]
    random = np.random.default_rng(3).integers(0, 2**32, 400_000, dtype=np.uint32).view(np.float32)
    special = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0x7F7FFFFF, 1, 0x80000001], np.uint32)
    return np.concatenate([numbers, ties, *around, random, special.view(np.float32)])


def test_layout(library: ctypes.CDLL) -> None:
    sizes = (ctypes.c_int * 8)()
    library.sizes(sizes)
    assert list(sizes) == [2, 4, 2, 4, 2, 4, 1, 1]


def test_widen_every_pattern(fmt: Format) -> None:
    assert_same_bits(fmt("widen", np.float32, fmt.all_patterns()), fmt.all_patterns().astype(np.float32))


def test_narrow_nearest_even(fmt: Format) -> None:
    x = floats_of_interest(fmt.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_bits(fmt("narrow", fmt.dtype, x), x.astype(fmt.dtype))


def test_nan_is_made_the_cards_nan(fmt: Format) -> None:
    nans = np.array([0x7F800001, 0x7FC00000, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert fmt("narrow", fmt.dtype, nans).view(np.uint16).tolist() == [0x7FFF] * 3


@pytest.mark.parametrize("mode", ["rz", "rd", "ru"])
def test_narrow_directed(fmt: Format, mode: str) -> None:
    x = floats_of_interest(fmt.dtype)
    x = x[np.isfinite(x)]
    got = fmt(mode, fmt.dtype, x).astype(np.float64)
    exact = x.astype(np.float64)
    with np.errstate(over="ignore"):
        nearest = x.astype(fmt.dtype)
    representable = nearest.astype(np.float64) == exact
    assert (got[representable] == exact[representable]).all()
    bound = {"rz": np.abs(got) <= np.abs(exact), "rd": got <= exact, "ru": got >= exact}[mode]
    assert bound.all()
    # And it is the nearest such number: the next one toward x has passed it.
    rounded = fmt(mode, fmt.dtype, x)
    toward = np.nextafter(rounded, np.where(got < exact, np.inf, -np.inf).astype(fmt.dtype)).astype(
        np.float64
    )
    inexact = got != exact
    assert (np.where(got < exact, toward > exact, toward < exact)[inexact]).all()


def test_double_is_rounded_once(fmt: Format) -> None:
    numbers = fmt.all_patterns().astype(np.float64)
    finite = np.sort(numbers[np.isfinite(numbers)])
    ties = (finite[1:] + finite[:-1]) / 2
    # A hair beside a tie: rounding to float first would fall back onto the tie.
    x = np.concatenate([ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)])
    above = np.concatenate([finite[1:]] * 3)
    below = np.concatenate([finite[:-1]] * 3)
    got = fmt("from_double", fmt.dtype, x).astype(np.float64)
    tie = np.arange(len(x)) < len(ties)
    beyond = np.arange(len(x)) < 2 * len(ties)
    want = np.where(beyond, above, below)
    assert (got[~tie] == want[~tie]).all()
    even = got[tie].astype(fmt.dtype).view(np.uint16) & 1
    assert not even.any()


def test_long_is_rounded_once(fmt: Format) -> None:
    rng = np.random.default_rng(6)
    x = rng.integers(-(2**53), 2**53, 50_000) >> rng.integers(0, 53, 50_000)
    # A double holds these, and how one is rounded is tested above.
    assert_same_bits(fmt("from_long", fmt.dtype, x), fmt("from_double", fmt.dtype, x.astype(np.float64)))
    if fmt.name == "bf16":
        # 2^62 + 2^54 is a tie of bfloat16; one more is not, which no double can say.
        x = np.array([2**62 + 2**54, 2**62 + 2**54 + 1, 2**62 + 2**54 - 1, -(2**63), 0, -1])
        got = fmt("from_long", fmt.dtype, x).astype(np.float64)
        assert [int(value) for value in got] == [2**62, 2**62 + 2**55, 2**62, -(2**63), 0, -1]


def test_to_integers_saturates(fmt: Format) -> None:
    x = fmt.all_patterns()
    value = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        for function, rounded in (("to_int", np.trunc(value)), ("to_int_rn", np.rint(value))):
            want = np.where(np.isnan(value), 0, np.clip(rounded, -(2**31), 2**31 - 1)).astype(np.int64)
            np.testing.assert_array_equal(fmt(function, np.int32, x), want)
        want = np.where(np.isnan(value), 0, np.clip(np.trunc(value), 0, 255)).astype(np.int64)
    np.testing.assert_array_equal(fmt("to_uchar", np.uint8, x), want)


@pytest.mark.parametrize(
    ("function", "oracle"),
    [("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div", np.divide), ("atomic", np.add)],
)
def test_arithmetic_is_rounded_once(fmt: Format, function: str, oracle: Callable[..., np.ndarray]) -> None:
    a, b, _ = fmt.pairs()
    with np.errstate(all="ignore"):
        exact = oracle(a.astype(np.float64), b.astype(np.float64))  # exact but for a quotient's 53rd bit
        want = exact.astype(np.float32).astype(fmt.dtype)
    # bfloat16 numbers span so much that a double can not hold every sum, nor a float every subnormal product.
    subnormal = np.abs(exact) < 2.0**-126
    assert_same_bits(fmt(function, fmt.dtype, a, b)[~subnormal], want[~subnormal])


def test_fma_is_rounded_once(fmt: Format) -> None:
    from fractions import Fraction

    a, b, c = (operand[-3000:] for operand in fmt.pairs())
    # Products that are ties of the format, and an addend too small for a double to see beside them.
    one_and_a_bit = (
        np.array([1 + 2.0**-6] * 2, fmt.dtype)
        if fmt.name == "bf16"
        else np.array([1 + 2.0**-9] * 2, fmt.dtype)
    )
    other = np.array([1 + 2.0**-2] * 2, fmt.dtype)
    tiny = np.array([2.0**-24, -(2.0**-24)] if fmt.name == "f16" else [2.0**-100, -(2.0**-100)], fmt.dtype)
    a, b, c = np.append(a, one_and_a_bit), np.append(b, other), np.append(c, tiny)
    got = fmt("fma", fmt.dtype, a, b, c)
    for x, y, z, result in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        up, down = (np.nextafter(result, fmt.dtype.type(s * np.inf)) for s in (1, -1))
        error = abs(Fraction(float(result)) - exact)
        assert error <= abs(Fraction(float(up)) - exact), (x, y, z, result)
        assert error <= abs(Fraction(float(down)) - exact), (x, y, z, result)


def test_comparisons(fmt: Format) -> None:
    a, b, _ = fmt.pairs()
    a[::7] = b[::7]
    x, y = a.astype(np.float32), b.astype(np.float32)
    nan = np.isnan(x) | np.isnan(y)
    for function, want in {
        "lt": x < y, "le": x <= y, "eq": x == y, "ne": x != y, "hne": (x != y) & ~nan, "ltu": (x < y) | nan,
    }.items():  # fmt: skip
        np.testing.assert_array_equal(fmt(function, np.uint8, a, b), want, err_msg=function)


def test_maximum_and_minimum(fmt: Format) -> None:
    a, b, _ = fmt.pairs()
    a[:3] = [0.0, -0.0, np.nan]
    b[:3] = [-0.0, 0.0, 2.0]
    assert_same_bits(fmt("max", fmt.dtype, a, b)[:3], np.array([0.0, 0.0, 2.0], fmt.dtype))
    x, y = a.astype(np.float32), b.astype(np.float32)
    got = fmt("max", fmt.dtype, a, b).astype(np.float32)
    np.testing.assert_array_equal(got, np.fmax(x, y))
    got = fmt("min_nan", fmt.dtype, a, b).astype(np.float32)
    np.testing.assert_array_equal(got, np.minimum(x, y))


def test_unary(fmt: Format) -> None:
    x = fmt.all_patterns()
    bits = x.view(np.uint16)
    np.testing.assert_array_equal(fmt("neg", fmt.dtype, x).view(np.uint16), bits ^ 0x8000)
    np.testing.assert_array_equal(fmt("abs", fmt.dtype, x).view(np.uint16), bits & 0x7FFF)
    with np.errstate(invalid="ignore"):
        assert_same_bits(
            fmt("sqrt", fmt.dtype, x), np.sqrt(x.astype(np.float64)).astype(np.float32).astype(fmt.dtype)
        )


def test_saturation_and_pairs(fmt: Format) -> None:
    a, b, c = fmt.pairs()
    with np.errstate(all="ignore"):
        total = fmt("add", fmt.dtype, a, b).astype(np.float32)
        want = np.where(np.isnan(total), 0, np.clip(total, 0, 1))
        np.testing.assert_array_equal(fmt("add_sat", fmt.dtype, a, b).astype(np.float32), want)
    assert_same_bits(fmt("pair_high", fmt.dtype, a, b, c), fmt("add", fmt.dtype, a, c))
