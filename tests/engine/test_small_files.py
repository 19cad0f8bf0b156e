"""The small safetensors files against the safetensors library, which is the oracle of what is a fault."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open

SMALL = Path(__file__).parents[2] / "data" / "small"
BROKEN = sorted((SMALL / "broken").glob("*.safetensors"))

# What the library says of each fault.
REASONS = {
    "header_over_100_mb": "header too large",
    "header_past_the_end": "invalid header length",
    "bad_json": "invalid JSON in header",
    "bad_utf8": "invalid UTF-8 in header",
    "overlap": "invalid offset for tensor `table`",
    "hole": "invalid offset for tensor `table`",
    "backwards_offsets": "invalid offset for tensor `scale`",
    "shape_disagrees": "invalid shape, data type, or offset for tensor",
    "unknown_dtype": "unknown variant `INT32`",
    "negative_shape": "invalid value: integer `-2`",
    "truncated": "file not fully covered",
    "trailing_bytes": "file not fully covered",
}
# Faults that the library lets pass: it keeps the last of two equal keys.
ACCEPTED = {"duplicate_key"}


def _make_files() -> ModuleType:
    """data/small/make_files.py as a module."""
    spec = importlib.util.spec_from_file_location("make_files", SMALL / "make_files.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_good_file_opens_with_the_values_that_were_written() -> None:
    make_files = _make_files()
    with safe_open(SMALL / "three_tensors.safetensors", framework="numpy") as file:
        assert file.keys() == ["embedding", "scale", "table"]
        assert file.metadata() == {"made_by": "data/small/make_files.py"}
        np.testing.assert_array_equal(file.get_tensor("scale"), np.float32(make_files.F32_VALUES))
        np.testing.assert_array_equal(file.get_tensor("table").ravel(), np.int32(make_files.I32_VALUES))
        embedding = file.get_slice("embedding")
        assert (embedding.get_dtype(), embedding.get_shape()) == ("BF16", [2, 3])


def test_stored_files_are_what_the_script_writes() -> None:
    make_files = _make_files()
    expected = make_files.broken_files()
    assert {path.stem: path.read_bytes() for path in BROKEN} == expected
    good = make_files.pack(make_files.good_header(), make_files.tensor_bytes())
    assert (SMALL / "three_tensors.safetensors").read_bytes() == good


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_library_refuses_each_broken_file(path: Path) -> None:
    if path.stem in ACCEPTED:
        with safe_open(path, framework="numpy") as file:
            assert len(file.keys()) == 3
        return
    with pytest.raises(SafetensorError, match=REASONS[path.stem]), safe_open(path, framework="numpy"):
        pass


def test_each_broken_file_differs_from_the_good_one() -> None:
    good = (SMALL / "three_tensors.safetensors").read_bytes()
    contents = [path.read_bytes() for path in BROKEN]
    assert good not in contents
    assert len(set(contents)) == len(contents) >= 12
