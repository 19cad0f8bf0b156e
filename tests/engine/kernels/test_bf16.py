"""bfloat16 on the host against ml_dtypes, and against the device functions."""

from __future__ import annotations

import numpy as np
import pytest

from tinyvllm_ref.bf16 import bf16_to_float, float_to_bf16

SPECIAL = np.array(
    [
        *(0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001),  # NaN
        *(
            0x7F800000,
            0xFF800000,
            0x7F7FFFFF,
            0x7F7F8000,
            0x7F7F7FFF,
        ),  # infinity, and what rounds to it or just not
        *(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF),  # ties and their neighbours
        *(0x00000001, 0x00008000, 0x00018000, 0x007FFFFF, 0x80000000, 0),  # subnormals and zeros
    ],
    np.uint32,
)


def test_a_million_floats_against_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    drawn = np.random.default_rng(0).integers(0, 2**32, 10**6).astype(np.uint32)
    values = np.concatenate([SPECIAL, drawn]).view(np.float32)
    with np.errstate(invalid="ignore"):  # ml_dtypes warns of the NaNs
        want = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    got = float_to_bf16(values)
    nan = np.isnan(values)
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert np.isnan(bf16_to_float(got[nan])).all()


def test_every_pattern_comes_back() -> None:
    patterns = np.arange(65536).astype(np.uint16)
    wide = bf16_to_float(patterns)
    np.testing.assert_array_equal(wide.view(np.uint32), patterns.astype(np.uint32) << 16)
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(float_to_bf16(wide)[number], patterns[number])


def test_shapes_and_dtypes() -> None:
    x = np.arange(24, dtype=np.float64).reshape(2, 3, 4)[:, ::2]
    assert float_to_bf16(x).shape == (2, 2, 4)
    np.testing.assert_array_equal(bf16_to_float(float_to_bf16(x)), x)
    assert float_to_bf16(np.float32(1)).shape == ()
    assert float_to_bf16(np.empty((0, 3), np.float32)).shape == (0, 3)
    assert bf16_to_float(np.uint16(0x3F80)) == 1
    with pytest.raises(TypeError, match="the bits are int64; they must be uint16"):
        bf16_to_float(np.arange(3))
