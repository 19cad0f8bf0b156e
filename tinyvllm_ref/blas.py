"""``linear(x, w, out)``: the matrix products of the model, through cuBLAS where it has them.

Two paths give the same product. ``"cublas"`` is cublasGemmEx. ``"kernel"`` is ``kernels/linear.cu``: cuBLAS
multiplies bfloat16 matrices on compute capability 8.0 and above only, and the free card of hosted notebooks
(T4) has 7.5. :func:`best_path` chooses for the device at hand, and either can be asked for by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .device import cp, is_gpu
from .kernels.linear import LINEAR, linear_kernel

PATHS = ("cublas", "kernel")
_MIN_CAPABILITY = 80  # ten times the compute capability from which cuBLAS has BF16 products

# cublas_api.h and library_types.h
_OP_N, _OP_T = 0, 1
_R_32F, _R_16BF = 0, 14
_COMPUTE_32F, _GEMM_DEFAULT = 68, -1
# cuBLAS reads these from host memory at every call.
_ONE, _ZERO = np.array(1, np.float32), np.array(0, np.float32)


@functools.cache
def best_path() -> str:
    """``"cublas"`` or ``"kernel"``: what this device is given."""
    old = is_gpu and int(cp.cuda.Device().compute_capability) < _MIN_CAPABILITY
    return "kernel" if old else "cublas"


def linear_of(path: str) -> Callable[[Any, Any, Any], Any]:
    """The function of one path.

    Raises
    ------
    ValueError
        `path` is none of :data:`PATHS`.
    """
    if path not in PATHS:
        raise ValueError(f"linear: path is {path!r}; it must be one of: {', '.join(PATHS)}")
    return linear_cublas if path == "cublas" else linear_kernel


def linear(x: Any, w: Any, out: Any) -> Any:
    """out = x w^T, by the path that suits the device.

    Parameters
    ----------
    x : (T, K) bf16
    w : (N, K) bf16
        As checkpoints store it: a row an output.
    out : (T, N) float32

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    return linear_of(best_path())(x, w, out)


def linear_cublas(x: Any, w: Any, out: Any) -> Any:
    """:func:`linear` through cublasGemmEx, without moving a byte.

    cuBLAS is column-major: it takes the bytes of a row-major (rows, columns) array for a (columns, rows)
    matrix whose columns lie one after the other. To it our three arrays are

    ====== ============ ================ =================
    array  row-major    cuBLAS sees      leading dimension
    ====== ============ ================ =================
    x      (T, K)       x^T, (K, T)      K
    w      (N, K)       w^T, (K, N)      K
    out    (T, N)       out^T, (N, T)    N
    ====== ============ ================ =================

    and what it must write is out^T = (x w^T)^T = w x^T. So w comes first, transposed back (``OP_T``), then
    x^T as it is seen (``OP_N``); the result has N rows and T columns, and K is summed over.

    Parameters
    ----------
    x : (T, K) bf16
    w : (N, K) bf16
    out : (T, N) float32

    Returns
    -------
    out

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    sizes = LINEAR(x, w, out)
    tokens, outputs, depth = sizes["T"], sizes["N"], sizes["K"]
    if depth == 0:
        out.fill(0)
    elif tokens and outputs:
        cp.cuda.cublas.gemmEx(
            cp.cuda.device.get_cublas_handle(), _OP_T, _OP_N, outputs, tokens, depth,
            _ONE.ctypes.data, w.data.ptr, _R_16BF, depth, x.data.ptr, _R_16BF, depth,
            _ZERO.ctypes.data, out.data.ptr, _R_32F, outputs, _COMPUTE_32F, _GEMM_DEFAULT,
        )  # fmt: skip
    return out
