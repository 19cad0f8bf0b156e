"""The products of ``cupy.cuda.cublas`` with CuPy's signatures; the arithmetic is in runtime/gemm.cpp.

Matrices are column-major, as in BLAS: element (i, j) of a matrix with leading dimension ``ld`` lies
``i + j * ld`` elements from its first. alpha and beta are addresses of host memory and are read as float32,
whatever the caller meant, because that is what cuBLAS does with ``COMPUTE_32F``. Products are added in float32, in
an order that depends on k alone. On processors with instructions for bfloat16, a bfloat16 below 1.2e-38 (a subnormal
number) counts as zero in a product of bfloat16 matrices.

Checked are the arguments that cuBLAS checks, and then what cuBLAS could not check: that each matrix lies
inside a live allocation.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from typing import Any, NoReturn

import numpy as np

from . import memory, native
from .errors import CUBLASError, CUDARuntimeError, OutOfMemoryError

CUBLAS_OP_N = 0
CUBLAS_OP_T = 1
CUBLAS_OP_C = 2
CUBLAS_POINTER_MODE_HOST = 0
CUBLAS_POINTER_MODE_DEVICE = 1
CUBLAS_DEFAULT_MATH = 0
CUBLAS_TENSOR_OP_MATH = 1
CUBLAS_COMPUTE_32F = 68
CUBLAS_GEMM_DEFAULT = -1
CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99

_ITEM_BYTES = {0: 4, 2: 2, 14: 2}  # cudaDataType: CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
_TYPES = "0 (CUDA_R_32F), 2 (CUDA_R_16F) or 14 (CUDA_R_16BF)"
_INVALID, _NOT_SUPPORTED, _NOT_INITIALIZED = 7, 15, 1

_new_handle = itertools.count(0xB1A5_0000, 16)
_math_modes: dict[int, int] = {}  # live handles
_streams: dict[int, int] = {}

_int, _long, _wide, _pointer = ctypes.c_int, ctypes.c_long, ctypes.c_longlong, ctypes.c_void_p


@functools.cache
def _gemm() -> Any:
    """``emu_gemm`` of the runtime library."""
    function = native.runtime().emu_gemm
    operand: list[Any] = [_pointer, _int, _long, _wide]
    sizes: list[Any] = [_int, _int, _long, _long, _long]
    scalar: list[Any] = [ctypes.c_float]
    function.argtypes = [*sizes, *scalar, *operand, *operand, *scalar, *operand, _long, _int]
    function.restype = _int
    return function


def _threads() -> int:
    """How many threads a product may use: ``set_workers``, by default one a core."""
    return int(native.runtime().emu_workers())


# ---------------- handles


def create() -> int:
    """Make a handle."""
    handle = next(_new_handle)
    _math_modes[handle] = CUBLAS_DEFAULT_MATH
    _streams[handle] = 0
    return handle


def destroy(handle: int) -> None:
    """Give a handle back."""
    _check_handle("destroy", handle)
    del _math_modes[handle], _streams[handle]


@functools.cache
def default_handle() -> int:
    """The handle of the device, ``cupy.cuda.device.get_cublas_handle()``."""
    return create()


def getVersion(handle: int) -> int:
    """0: there is no cuBLAS here."""
    _check_handle("getVersion", handle)
    return 0


def setStream(handle: int, stream: int) -> None:
    """Set the stream of a handle."""
    _check_handle("setStream", handle)
    _streams[handle] = stream


def getStream(handle: int) -> int:
    """The stream of a handle."""
    _check_handle("getStream", handle)
    return _streams[handle]


def setMathMode(handle: int, mode: int) -> None:
    """Set the math mode of a handle; products are computed in float32 in each of them."""
    _check_handle("setMathMode", handle)
    _math_modes[handle] = mode


def getMathMode(handle: int) -> int:
    """The math mode of a handle."""
    _check_handle("getMathMode", handle)
    return _math_modes[handle]


def setPointerMode(handle: int, mode: int) -> None:
    """Only CUBLAS_POINTER_MODE_HOST: alpha and beta are in host memory."""
    _check_handle("setPointerMode", handle)
    if mode != CUBLAS_POINTER_MODE_HOST:
        raise CUBLASError(
            _NOT_SUPPORTED, "setPointerMode: the emulation has alpha and beta in host memory only"
        )


def getPointerMode(handle: int) -> int:
    """Always CUBLAS_POINTER_MODE_HOST."""
    _check_handle("getPointerMode", handle)
    return CUBLAS_POINTER_MODE_HOST


# ---------------- products


def gemmEx(
    handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int,
    A: int, Atype: int, lda: int, B: int, Btype: int, ldb: int, beta: int,
    C: int, Ctype: int, ldc: int, computeType: int, algo: int,
) -> None:  # fmt: skip
    """C = alpha op(A) op(B) + beta C, with the types of each matrix given.

    Parameters
    ----------
    handle : int
        ``cp.cuda.device.get_cublas_handle()``.
    transa, transb : int
        CUBLAS_OP_N or CUBLAS_OP_T: what op() is.
    m, n, k : int
        op(A) is (m, k), op(B) is (k, n) and C is (m, n), column-major.
    alpha, beta : int
        Host addresses of a float32 each. Where beta is 0, C is not read.
    A, B, C : int
        Device addresses.
    Atype, Btype, Ctype : int
        0 (float32), 2 (float16) or 14 (bfloat16); Btype is Atype.
    lda, ldb, ldc : int
        Leading dimensions, in elements: from one column to the next.
    computeType : int
        68, CUBLAS_COMPUTE_32F.
    algo : int
        -1 or 99.

    Raises
    ------
    CUBLASError
        7 for an argument that cuBLAS refuses, 15 for a combination of types that it has not.
    CUDARuntimeError
        For a matrix that does not lie in a live allocation (a card would read or write past it).
    """
    _product(
        "gemmEx", handle, transa, transb, m, n, k, alpha, A, Atype, lda, 0, B, Btype, ldb, 0, beta,
        C, Ctype, ldc, 0, 1, computeType, algo,
    )  # fmt: skip


def gemmStridedBatchedEx(
    handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int,
    A: int, Atype: int, lda: int, strideA: int, B: int, Btype: int, ldb: int, strideB: int, beta: int,
    C: int, Ctype: int, ldc: int, strideC: int, batchCount: int, computeType: int, algo: int,
) -> None:  # fmt: skip
    """:func:`gemmEx` for `batchCount` triples of matrices, strideA, strideB, strideC elements apart."""
    _product(
        "gemmStridedBatchedEx", handle, transa, transb, m, n, k, alpha, A, Atype, lda, strideA,
        B, Btype, ldb, strideB, beta, C, Ctype, ldc, strideC, batchCount, computeType, algo,
    )  # fmt: skip


def sgemm(
    handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int,
    A: int, lda: int, B: int, ldb: int, beta: int, C: int, ldc: int,
) -> None:  # fmt: skip
    """:func:`gemmEx` with float32 throughout."""
    _product(
        "sgemm", handle, transa, transb, m, n, k, alpha, A, 0, lda, 0, B, 0, ldb, 0, beta, C, 0, ldc, 0, 1,
        CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip


def sgemmStridedBatched(
    handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int,
    A: int, lda: int, strideA: int, B: int, ldb: int, strideB: int, beta: int,
    C: int, ldc: int, strideC: int, batchCount: int,
) -> None:  # fmt: skip
    """:func:`gemmStridedBatchedEx` with float32 throughout."""
    _product(
        "sgemmStridedBatched", handle, transa, transb, m, n, k, alpha, A, 0, lda, strideA, B, 0, ldb, strideB,
        beta, C, 0, ldc, strideC, batchCount, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip


def _product(
    name: str, handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int,
    A: int, Atype: int, lda: int, strideA: int, B: int, Btype: int, ldb: int, strideB: int, beta: int,
    C: int, Ctype: int, ldc: int, strideC: int, batch: int, compute: int, algo: int,
) -> None:  # fmt: skip
    _check_handle(name, handle)
    A, B, C = (_address(name, which, value) for which, value in (("A", A), ("B", B), ("C", C)))
    _check_numbers(name, transa, transb, m, n, k, lda, ldb, ldc, batch)
    _check_types(name, Atype, Btype, Ctype, compute, algo)
    if m == 0 or n == 0 or batch == 0:
        return
    alpha_value, beta_value = _read_scalar(name, "alpha", alpha), _read_scalar(name, "beta", beta)
    rows_a, columns_a = (m, k) if transa == CUBLAS_OP_N else (k, m)
    rows_b, columns_b = (k, n) if transb == CUBLAS_OP_N else (n, k)
    if k and alpha_value:
        _check_matrix(name, "A", A, Atype, rows_a, columns_a, lda, strideA, batch)
        _check_matrix(name, "B", B, Btype, rows_b, columns_b, ldb, strideB, batch)
    _check_matrix(name, "C", C, Ctype, m, n, ldc, strideC, batch)
    if batch > 1 and abs(strideC) < ldc * (n - 1) + m:
        _invalid(name, f"strideC is {strideC}: the results overlap; it must be {ldc * (n - 1) + m} or more")
    status = _gemm()(
        int(transa != CUBLAS_OP_N), int(transb != CUBLAS_OP_N), m, n, k,
        alpha_value, A, Atype, lda, strideA, B, Btype, ldb, strideB,
        beta_value, C, Ctype, ldc, strideC, batch, _threads(),
    )  # fmt: skip
    if status:
        raise OutOfMemoryError(4 << 20, int(native.runtime().emu_live_bytes()))
    _mark_written(C, Ctype, m, n, ldc, strideC, batch)


def _mark_written(C: int, Ctype: int, m: int, n: int, ldc: int, strideC: int, batch: int) -> None:
    """Tell the checks that each column of each result was written."""
    item = _ITEM_BYTES[Ctype]
    mark = native.runtime().emu_mark_initialized
    for b in range(batch):
        start = C + b * strideC * item
        if ldc == m:
            mark(start, m * n * item)
            continue
        for j in range(n):
            mark(start + j * ldc * item, m * item)


# ---------------- checks


def _invalid(name: str, detail: str) -> NoReturn:
    raise CUBLASError(_INVALID, f"{name}: {detail}")


def _check_handle(name: str, handle: int) -> None:
    if handle not in _math_modes:
        raise CUBLASError(
            _NOT_INITIALIZED,
            f"{name}: handle {handle!r} is not a live handle; use cp.cuda.device.get_cublas_handle()",
        )


def _check_numbers(
    name: str, transa: int, transb: int, m: int, n: int, k: int, lda: int, ldb: int, ldc: int, batch: int
) -> None:
    """The checks of sizes and leading dimensions that cuBLAS makes."""
    for argument, value in (("transa", transa), ("transb", transb)):
        if value not in (CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_OP_C):
            _invalid(name, f"{argument} is {value}; it must be 0 (CUBLAS_OP_N), 1 (_T) or 2 (_C)")
    for argument, value in (("m", m), ("n", n), ("k", k), ("batchCount", batch)):
        if value < 0:
            _invalid(name, f"{argument} is {value}; it must be 0 or more")
    for argument, value, rows, why in (
        ("lda", lda, m if transa == CUBLAS_OP_N else k, "m" if transa == CUBLAS_OP_N else "k"),
        ("ldb", ldb, k if transb == CUBLAS_OP_N else n, "k" if transb == CUBLAS_OP_N else "n"),
        ("ldc", ldc, m, "m"),
    ):
        if value < max(1, rows):
            _invalid(
                name,
                f"{argument} is {value}; it must be at least {max(1, rows)}, the rows of "
                f"{argument[-1].upper()} as it is stored (column-major, {why} = {rows})",
            )


def _check_types(name: str, Atype: int, Btype: int, Ctype: int, compute: int, algo: int) -> None:
    """The combinations of types that cuBLAS has with float32 arithmetic."""
    for argument, value in (("Atype", Atype), ("Btype", Btype), ("Ctype", Ctype)):
        if value not in _ITEM_BYTES:
            raise CUBLASError(_NOT_SUPPORTED, f"{name}: {argument} is {value}; the emulation has {_TYPES}")
    if compute != CUBLAS_COMPUTE_32F:
        raise CUBLASError(
            _NOT_SUPPORTED, f"{name}: computeType is {compute}; the emulation has 68 (CUBLAS_COMPUTE_32F)"
        )
    if Atype != Btype:
        raise CUBLASError(_NOT_SUPPORTED, f"{name}: Btype is {Btype}; it must be Atype, {Atype}")
    if Ctype not in (0, Atype):
        raise CUBLASError(
            _NOT_SUPPORTED, f"{name}: Ctype is {Ctype}; with Atype {Atype} it must be 0 or {Atype}"
        )
    if not -1 <= algo <= 115:
        _invalid(name, f"algo is {algo}; use -1 (CUBLAS_GEMM_DEFAULT)")


def _address(name: str, which: str, value: Any) -> int:
    """A device address; CuPy takes whole numbers alone, too."""
    if not isinstance(value, int | np.integer):
        raise TypeError(
            f"{name}: {which} must be an address of device memory (array.data.ptr), not {type(value)}"
        )
    return int(value)


def _read_scalar(name: str, argument: str, address: int) -> float:
    """The float32 at a host address."""
    if not isinstance(address, int):
        raise TypeError(
            f"{name}: {argument} must be the address of a float32 in host memory (array.ctypes.data), "
            f"not {type(address)}"
        )
    if address < 4096 or memory.is_device(address):
        where = "device memory" if address >= 4096 else "no address"
        _invalid(
            name,
            f"{argument} is {address:#x}, {where}; it must be the address of a float32 in host memory "
            f"(alpha = np.array(1, np.float32); alpha.ctypes.data)",
        )
    return float(struct.unpack("f", ctypes.string_at(address, 4))[0])


def _check_matrix(
    name: str, which: str, address: int, kind: int, rows: int, columns: int, ld: int, stride: int, batch: int
) -> None:
    """Check that every element of every matrix of a batch lies in the allocation that `address` is in."""
    item = _ITEM_BYTES[kind]
    one = ld * (columns - 1) + rows
    first = min(0, stride * (batch - 1))
    last = max(0, stride * (batch - 1)) + one
    if address % item:
        raise CUDARuntimeError(
            1, f"{name}: {which} is at {address:#x}, not a multiple of its {item} byte elements"
        )
    shape = f"{rows} x {columns} elements of {item} bytes, ld{which.lower()} = {ld}"
    if batch > 1:
        shape += f", {batch} of them {stride} apart"
    try:
        memory.check_device_range(address + first * item, (last - first) * item, f"{name}: {which} ({shape})")
    except CUDARuntimeError as error:
        raise CUDARuntimeError(error.status, str(error).partition("invalid argument: ")[2]) from None
