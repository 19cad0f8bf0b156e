"""What a case of the corpus is, how it runs on CuPy or on what has its names, and how it is compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

Inputs = dict[str, Any]
Geometry = tuple[int, ...]


@dataclass(frozen=True)
class Empty:
    """An argument that the kernel fills: made by ``cp.empty``, so reading it first is a fault."""

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class Constant:
    """An array that is copied into a ``__constant__`` variable of its name before the launch."""

    value: np.ndarray


@dataclass(frozen=True)
class ByValue:
    """A struct that the kernel takes by value: one element of a structured NumPy array, as CuPy has it."""

    value: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Program:
    """A kernel and one launch of it.

    Attributes
    ----------
    name : str
        Unique in the corpus.
    code, kernel_name : str
        CUDA C++ and the kernel in it; with `name_expressions` an instance of a template.
    make : callable
        Draws the arguments: name -> NumPy array, `Empty`, `ByValue`, NumPy scalar or Python int, in the order
        of the kernel's parameters; `Constant` for a ``__constant__`` array of the module.
    grid, block : tuple of int
        Launch geometry.
    shared_mem : int
        Dynamic shared memory, bytes.
    options : tuple of str
        Compiler options.
    name_expressions : tuple of str
        For ``RawModule``.
    min_arch : int
        The compute capability, times ten, from which the functions exist that it calls.
    """

    name: str
    code: str
    kernel_name: str
    make: Callable[[np.random.Generator], Inputs]
    grid: Geometry
    block: Geometry
    shared_mem: int = 0
    options: tuple[str, ...] = ()
    name_expressions: tuple[str, ...] = ()
    min_arch: int = 75

    def inputs(self) -> Inputs:
        """The arguments, the same at every call."""
        seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "little")
        return self.make(np.random.default_rng(seed))

    def marked_lines(self, mark: str) -> list[int]:
        """Lines of the source, from 1, that end in the comment ``// mark``."""
        lines = self.code.split("\n")
        return [number for number, line in enumerate(lines, 1) if line.rstrip().endswith(f"// {mark}")]

    def launch(self, cp: ModuleType, inputs: Inputs) -> dict[str, np.ndarray]:
        """Compile and run on `cp` (CuPy, or what has its names); the arrays afterwards, by name."""
        constants = {name: value.value for name, value in inputs.items() if isinstance(value, Constant)}
        arguments = {
            name: _to_device(cp, value) for name, value in inputs.items() if not isinstance(value, Constant)
        }
        kernel = self._kernel(cp, constants)
        kernel(self.grid, self.block, tuple(arguments.values()), shared_mem=self.shared_mem)
        cp.cuda.Device().synchronize()
        return {name: cp.asnumpy(value) for name, value in arguments.items() if isinstance(value, cp.ndarray)}

    def _kernel(self, cp: ModuleType, constants: dict[str, np.ndarray]) -> Any:
        if not self.name_expressions and not constants:
            return cp.RawKernel(self.code, self.kernel_name, options=self.options)
        names = list(self.name_expressions) or None
        module = cp.RawModule(code=self.code, options=self.options, name_expressions=names)
        for name, value in constants.items():
            target = cp.ndarray(value.shape, value.dtype, module.get_global(name))
            target[...] = cp.asarray(value)
        return module.get_function(self.kernel_name)


def _to_device(cp: ModuleType, value: Any) -> Any:
    if isinstance(value, Empty):
        return cp.empty(value.shape, value.dtype)
    if isinstance(value, ByValue):
        return value.value
    return cp.asarray(value) if isinstance(value, np.ndarray) else value


@dataclass(frozen=True, kw_only=True)
class KernelCase(Program):
    """A correct kernel.

    Attributes
    ----------
    expected : callable
        From the arguments (as attributes) to name -> array: integers or bools that must be equal, or float64
        that must be near. A uint16 array of the kernel holds bfloat16 bits where float64 is expected of it.
    tolerance : float
        Largest error that passes, as `errors` measures it.
    by_column : bool
        The columns of an output are different quantities: each is measured by its own size.
    prints : tuple of str
        The lines that the kernel prints, in any order.
    """

    expected: Callable[[SimpleNamespace], dict[str, np.ndarray]]
    tolerance: float = 2e-6
    by_column: bool = False
    prints: tuple[str, ...] = ()

    def errors(self, outputs: dict[str, np.ndarray]) -> dict[str, float]:
        """Largest error of each expected array: |got - want| over the larger of |want| and want's RMS.

        Infinite where integers differ, a shape is wrong, or NaN or infinity stands on one side alone.
        """
        want_arrays = self.expected(SimpleNamespace(**self.inputs()))
        return {name: self._error(outputs[name], np.asarray(want)) for name, want in want_arrays.items()}

    def _error(self, got: np.ndarray, want: np.ndarray) -> float:
        if self.by_column and got.shape == want.shape and want.ndim == 2:
            return max(_error(got[:, k], want[:, k]) for k in range(want.shape[1]))
        return _error(got, want)


def _error(got: np.ndarray, want: np.ndarray) -> float:
    if got.shape != want.shape:
        return float("inf")
    if want.dtype.kind in "iub":
        return 0.0 if np.array_equal(got.astype(want.dtype), want) else float("inf")
    values = from_bf16(got) if got.dtype == np.uint16 else got
    values, want = values.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    if (
        not np.array_equal(values[~finite], want[~finite], equal_nan=True)
        or not np.isfinite(values[finite]).all()
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = np.sqrt(np.mean(want[finite] ** 2)) or 1.0
    return float(np.max(np.abs(values[finite] - want[finite]) / np.maximum(np.abs(want[finite]), scale)))


@dataclass(frozen=True, kw_only=True)
class BugCase(Program):
    """A kernel with one fault, on the lines marked ``// BUG`` (the other side of a race: ``// OTHER``).

    Attributes
    ----------
    kind : str
        The class of the error: "OutOfBounds", "UninitializedRead", "DataRace", "BarrierDivergence",
        "KernelTimeout", "KernelAssertion" or "KernelFault".
    array : str, tuple of str or None
        What the report must call the array, or one of several; None where none is involved.
    index : int or None
        Element of the array, where only one can be reported.
    thread, block_index : tuple of int or None
        threadIdx and blockIdx, where only one can be reported.
    """

    kind: str
    array: str | tuple[str, ...] | None = None
    index: int | None = None
    thread: tuple[int, int, int] | None = None
    block_index: tuple[int, int, int] | None = None


# ------------------------------------------------------------------------------------------ for the families
def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """float32 numbers of the standard normal distribution."""
    return rng.standard_normal(shape).astype(np.float32)


def empty(*shape: int, dtype: Any = np.float32) -> Empty:
    """An output array."""
    return Empty(shape, np.dtype(dtype))


def f64(x: np.ndarray) -> np.ndarray:
    """The same numbers in float64."""
    return np.asarray(x).astype(np.float64)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Finite float32 -> bfloat16 bits, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits -> float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


# A bfloat16 has 8 significant bits: rounding to it errs by at most 2^-9 of the number, and a float32 sum that
# fell on the other side of a tie by one place, 2^-8.
BF16_TOLERANCE = 2.0**-8
HALF_TOLERANCE = 2.0**-11

# bfloat16 by bits, as kernels without a CUDA header have it.
BF16_CUDA = r"""
typedef unsigned short bf16;
__device__ __forceinline__ float bf16_to_float(bf16 x) { return __uint_as_float((unsigned)x << 16); }
__device__ __forceinline__ bf16 float_to_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)(bits >> 16 | 0x40u);
    return (bf16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
"""

# Sum of one value a thread, for any block size; scratch holds blockDim.x floats. Safe to call twice in a row.
BLOCK_SUM_CUDA = r"""
__device__ float block_sum(float value, float* scratch) {
    unsigned t = threadIdx.x;
    scratch[t] = value;
    __syncthreads();
    for (unsigned active = blockDim.x; active > 1;) {
        unsigned half = (active + 1) / 2;
        if (t + half < active) scratch[t] += scratch[t + half];
        __syncthreads();
        active = half;
    }
    float total = scratch[0];
    __syncthreads();
    return total;
}
"""
