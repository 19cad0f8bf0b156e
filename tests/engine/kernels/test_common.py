"""The device functions that kernels share, for any block size."""

from __future__ import annotations

import numpy as np
import pytest

from tinyvllm_ref.device import cp
from tinyvllm_ref.kernels import source

from .cases import bits, f64, normal, poisoned, random

_TWICE = (
    source.header("common.cuh")
    + r"""
extern "C" __global__ void twice(const float* x, float* out) {
    extern __shared__ float scratch[];
    float mine = x[threadIdx.x];
    float sum = block_sum(mine, scratch), again = block_sum(2.0f * mine, scratch);
    float most = block_max(mine, scratch), least = -block_max(-mine, scratch);
    float* to = out + 4 * threadIdx.x;
    to[0] = sum;
    to[1] = again;
    to[2] = most;
    to[3] = least;
}
"""
)
_LOADS = (
    source.header("common.cuh")
    + r"""
template <int N>
__device__ void copy(const bf16* x, float* out) {
    float columns[N];
    load_columns(x + N * threadIdx.x, columns);
    for (int k = 0; k < N; k++) out[N * threadIdx.x + k] = columns[k];
}
extern "C" __global__ void loads(const bf16* x, float* eight, float* two, float* one) {
    copy<8>(x, eight);
    copy<2>(x, two);
    copy<1>(x, one);
}
"""
)


@pytest.mark.parametrize("threads", [1, 2, 3, 31, 32, 37, 96, 255, 1000, 1024])
def test_block_sum_and_block_max(threads: int) -> None:
    """Every thread gets them, and calls may follow each other with the same scratch."""
    x = normal(random("block", threads), threads) - 2
    out = poisoned(threads, 4)
    kernel = cp.RawKernel(_TWICE, "twice")
    kernel((1,), (threads,), (cp.asarray(x), out), shared_mem=4 * threads)
    total = f64(x).sum()
    want = np.tile([total, 2 * total, x.max(), x.min()], (threads, 1))
    np.testing.assert_allclose(cp.asnumpy(out), want, rtol=1e-5)


def test_block_max_passes_over_nan_and_sees_infinity() -> None:
    x = np.array([np.nan, -np.inf, -3, np.nan, -5], np.float32)
    out = poisoned(5, 4)
    cp.RawKernel(_TWICE, "twice")((1,), (5,), (cp.asarray(x), out), shared_mem=20)
    np.testing.assert_array_equal(cp.asnumpy(out)[:, 2:], np.tile(np.float32([-3, -np.inf]), (5, 1)))


def test_vector_loads() -> None:
    x = bits(random("loads"), 32)
    x[3] = 0x7FC0
    outs = poisoned(32), poisoned(8), poisoned(4)
    cp.RawKernel(_LOADS, "loads")((1,), (4,), (cp.asarray(x), *outs))
    for out in outs:
        np.testing.assert_array_equal(cp.asnumpy(out), f64(x)[: out.size])
