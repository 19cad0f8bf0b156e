"""The safetensors format: a length, a JSON header, and the bytes of all tensors one after the other.

::

    byte 0        8                      8 + n                                 end
    | n (u64, le) | JSON header, n bytes | tensor | tensor | ...          tensor |

The header maps a tensor's name to ``{"dtype": "BF16", "shape": [49152, 576], "data_offsets": [begin, end]}``,
with offsets counted from the first byte after the header. The key ``__metadata__`` holds free text.

A file is data from a stranger, so it is read by the rules of the format
(https://github.com/huggingface/safetensors#format): every byte after the header belongs to exactly one
tensor, and a file that breaks a rule is refused by a message that says which one.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

MAX_HEADER_BYTES = 100_000_000
_MAX_U64 = 2**64 - 1
_QUOTED_CHARACTERS = 120  # of a name or a value that a message repeats

DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

# BF16 has no NumPy dtype: its bits are given as uint16.
_NUMPY_DTYPES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "BF16": "<u2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "C64": "<c8",
    "F64": "<f8",
    "I64": "<i8",
    "U64": "<u8",
}


class SafetensorsError(ValueError):
    """A safetensors file breaks a rule of the format; the message names file, tensor and fault."""


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor of a file: what the header says of it, and a read-only view of its bytes.

    Attributes
    ----------
    dtype : str
        The name that the header uses: ``"BF16"``, ``"F16"``, ``"F32"``, ...
    shape : tuple of int
        ``()`` for a scalar.
    data : memoryview
        The bytes, C order, little-endian, inside the file's map: nothing is copied. The view keeps the map
        open.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.data.nbytes

    def numpy(self) -> np.ndarray:
        """The same bytes as a read-only NumPy array of this shape; BF16 as the ``uint16`` of its bits.

        Raises
        ------
        ValueError
            For a dtype that NumPy cannot hold (the 4-, 6- and 8-bit floating-point ones).
        """
        if self.dtype not in _NUMPY_DTYPES:
            raise ValueError(f"dtype {self.dtype} has no NumPy dtype; one of {', '.join(_NUMPY_DTYPES)} has")
        return np.frombuffer(self.data, dtype=_NUMPY_DTYPES[self.dtype]).reshape(self.shape)


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, TensorView]:
    """Read the header of a safetensors file and map its tensors, without copying a byte of them.

    Parameters
    ----------
    path : str or PathLike
        The file.

    Returns
    -------
    dict of str to TensorView
        In the order of their bytes in the file. All views share one read-only map of the file.

    Raises
    ------
    SafetensorsError
        The file breaks a rule of the format.
    OSError
        The file cannot be opened.

    Examples
    --------
    >>> views = read_safetensors("model.safetensors")  # doctest: +SKIP
    >>> views["model.norm.weight"].shape  # doctest: +SKIP
    (576,)
    """
    path = Path(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            _fail(path, f"the file has {size} bytes; the length of the header alone takes 8")
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    (header_bytes,) = struct.unpack_from("<Q", mapped)
    if header_bytes > MAX_HEADER_BYTES:
        _fail(path, f"the header claims {header_bytes:,} bytes; at most {MAX_HEADER_BYTES:,} are allowed")
    if 8 + header_bytes > size:
        _fail(path, f"the header claims {header_bytes:,} bytes, but only {size - 8:,} follow its length")
    header = _parse_header(path, bytes(mapped[8 : 8 + header_bytes]))
    return _map_tensors(path, header, mapped[8 + header_bytes :])


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    chunks: Iterable[bytes | memoryview],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file tensor by tensor, so that only one of them needs to be in memory.

    Parameters
    ----------
    path : str or PathLike
        The file to make.
    tensors : mapping of str to (dtype, shape)
        What the file will hold, in the order of the bytes.
    chunks : iterable of bytes-like
        The bytes of each tensor (C order, little-endian), in the same order; consumed one at a time.
    metadata : mapping of str to str, optional
        Free text for ``__metadata__``.

    Raises
    ------
    ValueError
        The bytes of a tensor are not as many as its dtype and shape say, or there are too few or too many.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    sizes = []
    offset = 0
    for name, (dtype, shape) in tensors.items():
        sizes.append(_checked_nbytes(Path(path), name, dtype, shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + sizes[-1]]}
        offset += sizes[-1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor starts at a multiple of 8 bytes
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, size), chunk in zip(zip(tensors, sizes, strict=True), chunks, strict=True):
            nbytes = file.write(chunk)
            if nbytes != size:
                raise ValueError(
                    f"tensor {name!r}: {nbytes:,} bytes were given; {tensors[name]} takes {size:,}"
                )


def _fail(path: Path, fault: str, tensor: str | None = None) -> NoReturn:
    where = f"{path}: " if tensor is None else f"{path}: tensor {_quote(tensor)}: "
    raise SafetensorsError(where + fault)


def _quote(value: object) -> str:
    """The value as a message repeats it: escaped, and short however long it is."""
    text = ascii(value)
    return text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + "..."


class _DuplicateKey(Exception):
    """An object of the header has a key twice; JSON's usual readers keep the last without a word."""


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return unique


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    """The header as a dict of tensors, without ``__metadata__`` (which is checked)."""
    if raw[:1] != b"{":
        _fail(path, f"the header must begin with '{{'; it begins with {_quote(raw[:8])}")
    try:
        text = raw.decode("utf-8")
        header = json.loads(text, object_pairs_hook=_unique_object, parse_constant=_refuse_constant)
        if "\\u" in text:  # an escape such as \ud800 passes both, and makes a string that is no Unicode text
            json.dumps(header, ensure_ascii=False).encode("utf-8")
    except _DuplicateKey as error:
        _fail(path, f"the header has the key {_quote(error.args[0])} twice")
    except UnicodeError as error:
        _fail(path, f"the header is not valid UTF-8: {error}")
    except RecursionError:
        _fail(path, "the header's JSON is nested too deeply")
    except ValueError as error:
        _fail(path, f"the header is not valid JSON: {error}")
    assert isinstance(header, dict)  # it begins with '{'
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _fail(path, "__metadata__ must be an object whose values are all strings")
    return header


def _map_tensors(path: Path, header: dict[str, Any], data: memoryview) -> dict[str, TensorView]:
    """Check every entry, and that the tensors fill `data` with no overlap and no hole; then cut the views."""
    entries = [(*_checked_entry(path, name, entry, data.nbytes), name) for name, entry in header.items()]
    entries.sort(key=lambda entry: entry[:2])
    views = {}
    position = 0
    previous = ""
    for begin, end, dtype, shape, name in entries:
        if begin < position:
            fault = f"starts at byte {begin:,}, but tensor {_quote(previous)} ends at {position:,}: overlap"
            _fail(path, fault, name)
        if begin > position:
            fault = f"starts at byte {begin:,}: a hole, the {begin - position:,} bytes before are no tensor's"
            _fail(path, fault, name)
        views[name] = TensorView(dtype, shape, data[begin:end])
        position, previous = end, name
    if position != data.nbytes:
        _fail(path, f"the last {data.nbytes - position:,} bytes of the file belong to no tensor")
    return views


def _checked_entry(
    path: Path, name: str, entry: Any, available: int
) -> tuple[int, int, str, tuple[int, ...]]:
    """(begin, end, dtype, shape) of one entry of the header, each right by itself and in agreement."""
    if not isinstance(entry, dict):
        _fail(path, f"must be an object with dtype, shape and data_offsets, not {_quote(entry)}", name)
    for key in ("dtype", "shape", "data_offsets"):
        if key not in entry:
            _fail(path, f"has no {key}", name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not all(_is_u64(extent) for extent in shape):
        _fail(path, f"shape must be a list of non-negative 64-bit integers, not {_quote(shape)}", name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_u64(offset) for offset in offsets):
        _fail(path, f"data_offsets must be two non-negative 64-bit integers, not {_quote(offsets)}", name)
    begin, end = offsets
    if begin > end:
        _fail(path, f"data_offsets run backwards: {begin} to {end}", name)
    nbytes = _checked_nbytes(path, name, dtype, tuple(shape))
    if nbytes != end - begin:
        fault = (
            f"{dtype} of shape {_quote(shape)} takes {nbytes:,} bytes; data_offsets give it {end - begin:,}"
        )
        _fail(path, fault, name)
    if end > available:
        _fail(path, f"ends at byte {end:,} of the data; the file, truncated, holds {available:,}", name)
    return begin, end, dtype, tuple(shape)


def _checked_nbytes(path: Path, name: str, dtype: Any, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor, where dtype and shape are possible."""
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        _fail(path, f"unknown dtype {_quote(dtype)}; the format knows {', '.join(DTYPE_BITS)}", name)
    elements = 1
    for extent in shape:
        elements *= extent
        # Looked at in every step, because a long list of large extents would make a number of megabytes.
        if elements > _MAX_U64:
            break
    if elements * bits > _MAX_U64:
        _fail(path, f"shape {_quote(list(shape))} overflows 64 bits", name)
    if elements * bits % 8:
        _fail(path, f"{dtype} of shape {_quote(list(shape))} does not end at a byte", name)
    return elements * bits // 8


def _is_u64(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_U64
