"""Write the small safetensors files that the lessons and tests read: one good one, and broken ones.

Each broken file has exactly one fault; apart from it, it is the good file or nearly so. Every byte is
written here by hand, from the format's description (https://github.com/huggingface/safetensors#format): a
header length (unsigned 64-bit, little endian), a JSON header of that many bytes, and the tensors' bytes.

    python data/small/make_files.py
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

Header = dict[str, dict[str, Any]]

# A row of BF16 (1, 2.5, -0.15625, 0, infinity, the largest finite), three F32 and two by two I32.
BF16_BITS = (0x3F80, 0x4020, 0xBE20, 0x0000, 0x7F80, 0x7F7F)
F32_VALUES = (0.5, -2.0, 3.140625)
I32_VALUES = (1, -2, 3, 2**31 - 1)


def tensor_bytes() -> bytes:
    """The tensors' bytes, one after the other."""
    return struct.pack("<6H", *BF16_BITS) + struct.pack("<3f", *F32_VALUES) + struct.pack("<4i", *I32_VALUES)


def good_header() -> Header:
    """The header of the good file, in the order of the bytes."""
    return {
        "__metadata__": {"made_by": "data/small/make_files.py"},
        "embedding": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "scale": {"dtype": "F32", "shape": [3], "data_offsets": [12, 24]},
        "table": {"dtype": "I32", "shape": [2, 2], "data_offsets": [24, 40]},
    }


def pack(header: Header | bytes, data: bytes, length: int | None = None) -> bytes:
    """A whole file; `length` is what the file says its header's length is, if not the truth."""
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    if length is None:
        raw += b" " * (-len(raw) % 8)  # the tensors begin at a multiple of eight bytes
        length = len(raw)
    return struct.pack("<Q", length) + raw + data


def changed(name: str, **fields: Any) -> Header:
    """The good header with some fields of one tensor changed."""
    header = good_header()
    header[name] = {**header[name], **fields}
    return header


def broken_files() -> dict[str, bytes]:
    """File name (without suffix) -> bytes, each with the fault that its name says."""
    data = tensor_bytes()
    text = json.dumps(good_header(), separators=(",", ":"))
    twice = text[:-1] + ',"scale":{"dtype":"F32","shape":[3],"data_offsets":[12,24]}}'
    hole = good_header()
    hole["table"]["data_offsets"] = [28, 44]
    return {
        "header_over_100_mb": pack(good_header(), data, length=100_000_001),
        "header_past_the_end": pack(good_header(), data, length=8 * len(text)),
        "bad_json": pack(text.replace('"shape":[3]', '"shape":[3').encode(), data),
        "bad_utf8": pack(text.encode().replace(b"made_by", b"made\xffby"), data),
        "duplicate_key": pack(twice.encode(), data),
        "overlap": pack(changed("table", data_offsets=[20, 36]), data[:36]),
        "hole": pack(hole, data[:24] + bytes(4) + data[24:]),
        "backwards_offsets": pack(changed("scale", data_offsets=[24, 12]), data),
        "shape_disagrees": pack(changed("embedding", shape=[3, 3]), data),
        "unknown_dtype": pack(changed("table", dtype="INT32"), data),
        "negative_shape": pack(changed("embedding", shape=[-2, -3]), data),
        "truncated": pack(good_header(), data[:-4]),
        "trailing_bytes": pack(good_header(), data + bytes(4)),
    }


def main() -> None:
    """Write all of them."""
    (FOLDER / "three_tensors.safetensors").write_bytes(pack(good_header(), tensor_bytes()))
    (FOLDER / "broken").mkdir(exist_ok=True)
    for name, content in broken_files().items():
        (FOLDER / "broken" / f"{name}.safetensors").write_bytes(content)


if __name__ == "__main__":
    main()
