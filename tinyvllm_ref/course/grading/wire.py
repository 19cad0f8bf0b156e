"""Plain values between the judge and a runner: JSON and raw bytes, nothing that runs when it is read.

A message is two lengths (8 bytes each, little-endian), a JSON document, and the bytes of the arrays in it. In the
document null, booleans, numbers and strings are themselves and lists are lists; everything else is an object with
one key: ``{"d": [[key, value], ...]}`` a dict, ``{"t": [...]}`` a tuple, ``{"a": [dtype, shape, offset]}`` an array,
``{"s": [...]}`` a NumPy scalar, ``{"b": base64}`` bytes, ``{"f": "nan"}`` a float that JSON lacks.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
from typing import Any

import numpy as np

HEADER = struct.Struct("<QQ")
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f(?:2|4|8|16)|c(?:8|16))")
_DEEPEST = 24


class WireError(ValueError):
    """What came is no message, or is longer than allowed."""


# ---------------- writing


def pack(value: Any) -> bytes:
    """A message.

    Raises
    ------
    TypeError
        Something in `value` is not plain.
    """
    blobs: list[bytes] = []
    document = json.dumps(_encode(value, blobs, [0]), separators=(",", ":")).encode("utf-8", "surrogatepass")
    blob = b"".join(blobs)
    return HEADER.pack(len(document), len(blob)) + document + blob


def _encode(value: Any, blobs: list[bytes], size: list[int]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float) and not isinstance(value, np.generic):
        return float(value) if math.isfinite(value) else {"f": str(float(value))}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value, order="C")
        if not _DTYPE.fullmatch(array.dtype.str):
            raise TypeError(f"an array of dtype {array.dtype} can not be sent")
        entry = [array.dtype.str, list(array.shape), size[0]]
        blobs.append(array.tobytes())
        size[0] += array.nbytes
        return {"s" if isinstance(value, np.generic) else "a": entry}
    if isinstance(value, list):
        return [_encode(item, blobs, size) for item in value]
    if isinstance(value, tuple):
        return {"t": [_encode(item, blobs, size) for item in value]}
    if isinstance(value, dict):
        return {"d": [[_encode(k, blobs, size), _encode(v, blobs, size)] for k, v in value.items()]}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"b": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, bool | int | str):  # of a subclass, such as an enumeration
        return int(value) if isinstance(value, int) else str.__str__(value)
    raise TypeError(f"{type(value).__name__} can not be sent; plain values can")


# ---------------- reading


def unpack(document: bytes, blob: bytes) -> Any:
    """The value of a message whose sender is not trusted.

    Raises
    ------
    WireError
    """
    try:
        return _decode(json.loads(document.decode("utf-8", "surrogatepass")), blob, 0)
    except WireError:
        raise
    except (ValueError, TypeError, RecursionError, OverflowError, MemoryError, binascii.Error) as error:
        raise WireError(f"not a message: {type(error).__name__}") from None


def _decode(value: Any, blob: bytes, depth: int) -> Any:
    if depth > _DEEPEST:
        raise WireError(f"nested more than {_DEEPEST} deep")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_decode(item, blob, depth + 1) for item in value]
    if len(value) != 1:
        raise WireError("an object with other than one key")
    ((tag, inside),) = value.items()
    if tag == "d":
        return {_key(_decode(k, blob, depth + 1)): _decode(v, blob, depth + 1) for k, v in inside}
    if tag == "t":
        return tuple(_decode(item, blob, depth + 1) for item in inside)
    if tag in ("a", "s"):
        array = _array(inside, blob)
        return array if tag == "a" else array[()]
    if tag == "b":
        return base64.b64decode(inside, validate=True)
    if tag == "f" and inside in ("nan", "inf", "-inf"):
        return float(inside)
    raise WireError(f"an unknown kind {tag!r:.20}")


def _key(value: Any) -> Any:
    if value is not None and not isinstance(value, bool | int | float | str | tuple):
        raise WireError("a key that is not plain")
    return value


def _array(entry: Any, blob: bytes) -> np.ndarray[Any, Any]:
    dtype, shape, offset = entry
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise WireError(f"an array of dtype {dtype!r:.20}")
    if not isinstance(shape, list) or len(shape) > 32:
        raise WireError("an array without a shape")
    if not all(type(n) is int and 0 <= n < 1 << 40 for n in [*shape, offset]):
        raise WireError("an array with an odd shape")
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if offset + size > len(blob):
        raise WireError("an array that is longer than the message")
    # A copy of its own: it may be written to.
    return np.frombuffer(blob[offset : offset + size], dtype).reshape(shape).copy()
