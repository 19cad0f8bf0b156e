"""bfloat16 on the host: float32 cut to its upper 16 bits, kept as uint16.

>>> float_to_bf16(np.array([1.0, 3.14159265], np.float32))
array([16256, 16457], dtype=uint16)
>>> bf16_to_float(np.array([16457], np.uint16))
array([3.140625], dtype=float32)
"""

from __future__ import annotations

from typing import Any

import numpy as np

_EXPONENT = np.uint32(0x7F800000)
_QUIET = np.uint32(0x40)
_BLOCK = 1 << 18  # elements at a time: temporary arrays stay in the cache, however large the weight


def float_to_bf16(x: Any) -> np.ndarray:
    """Round to bfloat16: to nearest, ties to even.

    Parameters
    ----------
    x : array_like of float32, any shape
        float64 and float16 are rounded to float32 first.

    Returns
    -------
    uint16, of x's shape
        What is too large becomes infinity, a NaN stays a NaN.
    """
    values = np.asarray(x)
    if values.dtype != np.float32:
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    out = np.empty(flat.size, np.uint16)
    for start in range(0, flat.size, _BLOCK):
        bits = flat[start : start + _BLOCK]
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)
        nan = (bits & np.uint32(0x7FFFFFFF)) > _EXPONENT
        if nan.any():
            rounded = np.where(nan, bits >> np.uint32(16) | _QUIET, rounded)
        out[start : start + _BLOCK] = rounded
    return out.reshape(values.shape)


def bf16_to_float(u: Any) -> np.ndarray:
    """Widen bfloat16 bits to float32, exactly.

    Parameters
    ----------
    u : array_like of uint16, any shape

    Returns
    -------
    float32, of u's shape

    Raises
    ------
    TypeError
        The bits are not uint16.
    """
    bits = np.asarray(u)
    if bits.dtype != np.uint16:
        raise TypeError(f"bf16_to_float: the bits are {bits.dtype}; they must be uint16")
    return np.asarray(bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
