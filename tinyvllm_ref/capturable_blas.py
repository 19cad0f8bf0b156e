"""bfloat16 products that a CUDA graph can hold: cuBLAS through ctypes, with a handle and a workspace of its own.

CuPy refuses to call cuBLAS while a stream is being captured, for its handle is shared and allocates its workspace
where the graph could not keep it. A handle that nobody else uses, whose stream and workspace are set by hand,
may be captured (cuBLAS documentation, "CUDA Graphs Support").

The emulation has no graphs; there the same class calls the product of :mod:`tinyvllm_ref.emulation.cublas`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .device import cp, is_gpu
from .installing import pip_install
from .kernels.launch import Contract

# cublas_api.h and library_types.h
_OP_N, _OP_T = 0, 1
_R_32F, _R_16BF = 0, 14
_COMPUTE_32F, _GEMM_DEFAULT = 68, -1
# A product whose sum over K is split among blocks is added up in float32 even where out is bfloat16.
_NO_REDUCED_PRECISION_REDUCTION = 16

# What cuBLAS asks for by compute capability (cublasSetWorkspace, "recommended size"), in MiB.
_WORKSPACE_MIB = {9: 32, 10: 32, 12: 12}
_OLDER_WORKSPACE_MIB = 4

_STATUS = {
    1: "CUBLAS_STATUS_NOT_INITIALIZED",
    3: "CUBLAS_STATUS_ALLOC_FAILED",
    7: "CUBLAS_STATUS_INVALID_VALUE",
    8: "CUBLAS_STATUS_ARCH_MISMATCH",
    11: "CUBLAS_STATUS_MAPPING_ERROR",
    13: "CUBLAS_STATUS_EXECUTION_FAILED",
    14: "CUBLAS_STATUS_INTERNAL_ERROR",
    15: "CUBLAS_STATUS_NOT_SUPPORTED",
    16: "CUBLAS_STATUS_LICENSE_ERROR",
}

# cuBLAS reads these from host memory at every call.
_ONE, _ZERO = np.array(1, np.float32), np.array(0, np.float32)
_ONE_AT, _ZERO_AT = _ONE.ctypes.data, _ZERO.ctypes.data

_to_float = Contract("Products", x="bf16 T K", w="bf16 N K", out="float32 T N")
_to_bf16 = Contract("Products", x="bf16 T K", w="bf16 N K", out="bf16 T N")


class CublasError(RuntimeError):
    """cuBLAS could not be loaded, or refused a call; the message names the call and the status."""


class Products:
    """Products x w^T in bfloat16 with a cuBLAS handle and a workspace of their own.

    One object serves one stream at a time. What was captured keeps using the workspace: keep the object as long
    as the graph. Call each shape once before it is captured, because cuBLAS loads a kernel when it is first used.

    Parameters
    ----------
    stream : cupy.cuda.Stream, optional
        The stream that products run on; by default, the current one.
    workspace_bytes : int, optional
        Device memory for cuBLAS; by default, what it recommends for the card (32 MiB on Hopper).

    Raises
    ------
    CublasError
        There is no libcublas, or it cannot be used.
    ValueError
        workspace_bytes is negative.

    Examples
    --------
    >>> products = Products()
    >>> products(x, w, out)  # doctest: +SKIP
    >>> products(x, w, residual, accumulate=True)  # doctest: +SKIP
    """

    def __init__(self, stream: Any = None, workspace_bytes: int | None = None) -> None:
        size = _recommended_workspace() if workspace_bytes is None else workspace_bytes
        if size < 0:
            raise ValueError(f"Products: workspace_bytes is {size}; it must be 0 or more")
        self._blas: _Blas = _Cublas(size) if is_gpu else _EmulatedBlas()
        self._finalizer = weakref.finalize(self, self._blas.destroy)
        self._stream: Any = None
        try:
            self.set_stream(cp.cuda.get_current_stream() if stream is None else stream)
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether the handle was given back."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Give the handle and the workspace back. Once is enough, more does nothing; no stream may be capturing."""
        self._finalizer()

    def __enter__(self) -> Products:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def set_stream(self, stream: Any) -> None:
        """Run the products to come on `stream`.

        Parameters
        ----------
        stream : cupy.cuda.Stream
            For a capture: the stream that will capture, set before it begins.

        Raises
        ------
        CublasError
            cuBLAS refused, or the object is closed.
        """
        self._check_open()
        if self._stream is None or stream.ptr != self._stream.ptr:
            self._blas.set_stream(stream.ptr)
            self._stream = stream  # kept alive: cuBLAS holds its address

    def __call__(self, x: Any, w: Any, out: Any, accumulate: bool = False) -> Any:
        """out = x w^T, or out += x w^T.

        How row-major arrays are given to column-major cuBLAS is told in :func:`tinyvllm_ref.blas.linear_cublas`.
        Sums are in float32 whatever `out` is.

        Parameters
        ----------
        x : (T, K) bf16
        w : (N, K) bf16
            As checkpoints store it: a row an output.
        out : (T, N) float32, or bf16 (uint16)
        accumulate : bool
            Add to what is in `out`, which must be float32: straight into the residual stream.

        Returns
        -------
        out

        Raises
        ------
        ValueError
            A shape, dtype or layout is wrong.
        CublasError
            cuBLAS refused, or the object is closed.
        """
        self._check_open()
        rounded = getattr(out, "dtype", None) == np.uint16
        sizes = (_to_bf16 if rounded else _to_float)(x, w, out)
        _to_float.check("out", "bfloat16", not (accumulate and rounded), "float32 where accumulate is True")
        tokens, outputs, depth = sizes["T"], sizes["N"], sizes["K"]
        if depth == 0:
            if not accumulate:
                with self._stream:
                    out.fill(0)
        elif tokens and outputs:
            self._blas.gemm(
                (outputs, tokens, depth), w.data.ptr, x.data.ptr, out.data.ptr,
                _R_16BF if rounded else _R_32F, _ONE_AT if accumulate else _ZERO_AT,
            )  # fmt: skip
        return out

    def _check_open(self) -> None:
        if self.closed:
            raise CublasError("Products: this object was closed; make another one")


class _Blas(Protocol):
    """What there is of a BLAS: a handle, whose calls may fail."""

    def set_stream(self, stream: int) -> None:
        """Run what comes on the stream of this address."""

    def gemm(self, sizes: tuple[int, int, int], w: int, x: int, out: int, out_type: int, beta: int) -> None:
        """out = x w^T + beta out, all by address; sizes are (N, T, K)."""

    def destroy(self) -> None:
        """Give the handle back."""


class _Cublas:
    """libcublas by ctypes."""

    def __init__(self, workspace_bytes: int) -> None:
        self._library = _library()
        handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(handle))
        self._handle = handle.value
        try:
            self._call("cublasSetMathMode", self._handle, _NO_REDUCED_PRECISION_REDUCTION)
            self._workspace_bytes = workspace_bytes
            self._workspace = cp.cuda.alloc(workspace_bytes) if workspace_bytes else None
        except BaseException:
            self._library.cublasDestroy_v2(self._handle)
            raise

    def set_stream(self, stream: int) -> None:
        self._call("cublasSetStream_v2", self._handle, stream)
        # Setting the stream takes the workspace away, so it is given again each time.
        address = self._workspace.ptr if self._workspace is not None else None
        self._call("cublasSetWorkspace_v2", self._handle, address, self._workspace_bytes)

    def gemm(self, sizes: tuple[int, int, int], w: int, x: int, out: int, out_type: int, beta: int) -> None:
        outputs, tokens, depth = sizes
        status = self._library.cublasGemmEx(
            self._handle, _OP_T, _OP_N, outputs, tokens, depth,
            _ONE_AT, w, _R_16BF, depth, x, _R_16BF, depth,
            beta, out, out_type, outputs, _COMPUTE_32F, _GEMM_DEFAULT,
        )  # fmt: skip
        if status:
            what = f"cublasGemmEx of ({tokens}, {depth}) by ({outputs}, {depth}) transposed"
            raise CublasError(f"{what}: {_status_name(status)}")

    def destroy(self) -> None:
        self._library.cublasDestroy_v2(self._handle)
        self._workspace = None

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            raise CublasError(f"{name}: {_status_name(status)}")


class _EmulatedBlas:
    """The emulation's products, which need no workspace."""

    def __init__(self) -> None:
        self._handle = cp.cuda.cublas.create()

    def set_stream(self, stream: int) -> None:
        cp.cuda.cublas.setStream(self._handle, stream)

    def gemm(self, sizes: tuple[int, int, int], w: int, x: int, out: int, out_type: int, beta: int) -> None:
        outputs, tokens, depth = sizes
        cp.cuda.cublas.gemmEx(
            self._handle, _OP_T, _OP_N, outputs, tokens, depth,
            _ONE_AT, w, _R_16BF, depth, x, _R_16BF, depth,
            beta, out, out_type, outputs, _COMPUTE_32F, _GEMM_DEFAULT,
        )  # fmt: skip

    def destroy(self) -> None:
        cp.cuda.cublas.destroy(self._handle)


def _status_name(status: int) -> str:
    """``"CUBLAS_STATUS_INVALID_VALUE (7)"``."""
    return f"{_STATUS.get(status, 'an unknown cuBLAS status')} ({status})"


def _recommended_workspace() -> int:
    """Bytes that cuBLAS recommends for the current device; 0 in the emulation."""
    if not is_gpu:
        return 0
    major = int(cp.cuda.Device().compute_capability) // 10
    return _WORKSPACE_MIB.get(major, _OLDER_WORKSPACE_MIB) << 20


# ---------------- the library


@functools.cache
def _library() -> ctypes.CDLL:
    """libcublas, with the signatures of what is called.

    Raises
    ------
    CublasError
        It is not found.
    """
    tried = []
    for name in _candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            tried.append(f"{name} ({error})")
        else:
            return _with_signatures(library)
    raise CublasError(
        "libcublas cannot be loaded; install the CUDA libraries that CuPy uses: "
        f"{pip_install('cuda-toolkit[cublas]')}. Tried: {'; '.join(tried) or 'nothing'}"
    )


def _candidates() -> Iterator[str]:
    """Where libcublas may be, the one that CuPy itself has loaded first."""
    with contextlib.suppress(ImportError):
        _ = cp.cuda.cublas
    maps = Path("/proc/self/maps")
    if maps.is_file():
        yield from mapped_libraries(maps.read_text(encoding="utf-8", errors="replace"))
    with contextlib.suppress(Exception):  # not installed, or it finds none: what it raises differs by version
        yield importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("cublas").abs_path
    yield from ("libcublas.so.13", "libcublas.so.12")


def mapped_libraries(maps: str) -> list[str]:
    """The paths of libcublas in the text of ``/proc/self/maps``, each once."""
    found = re.findall(r"\s(/\S(?:.*/)?libcublas\.so(?:\.\d+)*)$", maps, re.MULTILINE)
    return list(dict.fromkeys(found))


def _with_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    address, number = ctypes.c_void_p, ctypes.c_int
    matrix = [address, number, number]  # where, type, leading dimension
    for name, arguments in {
        "cublasCreate_v2": [address],
        "cublasDestroy_v2": [address],
        "cublasSetStream_v2": [address, address],
        "cublasSetWorkspace_v2": [address, address, ctypes.c_size_t],
        "cublasSetMathMode": [address, number],
        "cublasGemmEx": [
            *(address, number, number, number, number, number),
            *(address, *matrix, *matrix, address, *matrix, number, number),
        ],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, number
    return library
