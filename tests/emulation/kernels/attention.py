"""Attention: causal rows, online softmax over tiles, and decode over a block table."""

from __future__ import annotations

import numpy as np

from .case import (
    BF16_CUDA,
    BF16_TOLERANCE,
    BLOCK_SUM_CUDA,
    KernelCase,
    empty,
    f64,
    from_bf16,
    normal,
    to_bf16,
)

CAUSAL = (
    BF16_CUDA
    + BLOCK_SUM_CUDA
    + r"""
// q (n, heads, dim) float32, k and v (m, kv_heads, dim) bfloat16: query i sees keys j <= m - n + i.
// A block a (query, head): scores of all keys in shared memory, then a column of the values a thread.
extern "C" __global__ void attention(const float* q, const bf16* k, const bf16* v, bf16* out, float scale,
                                     int n, int m, int kv_heads, int dim) {
    extern __shared__ float memory[];
    float *scores = memory, *scratch = memory + m;
    int i = blockIdx.x, head = blockIdx.y, heads = gridDim.y, kv = head / (heads / kv_heads);
    int keys = m - n + i + 1, t = threadIdx.x;
    const float* query = q + ((size_t)i * heads + head) * dim;
    float peak = -3.0e38f;
    for (int j = t; j < keys; j += blockDim.x) {
        const bf16* key = k + ((size_t)j * kv_heads + kv) * dim;
        float dot = 0.0f;
        for (int d = 0; d < dim; d++) dot += query[d] * bf16_to_float(key[d]);
        scores[j] = dot * scale;
        peak = fmaxf(peak, scores[j]);
    }
    scratch[t] = peak;
    __syncthreads();
    for (int j = 0; j < blockDim.x; j++) peak = fmaxf(peak, scratch[j]);
    __syncthreads();
    float sum = 0.0f;
    for (int j = t; j < keys; j += blockDim.x) {
        scores[j] = expf(scores[j] - peak);
        sum += scores[j];
    }
    sum = block_sum(sum, scratch);
    for (int d = t; d < dim; d += blockDim.x) {
        float total = 0.0f;
        const bf16* column = v + (size_t)kv * dim + d;
        for (int j = 0; j < keys; j++) total += scores[j] * bf16_to_float(column[(size_t)j * kv_heads * dim]);
        out[((size_t)i * heads + head) * dim + d] = float_to_bf16(total / sum);
    }
}
"""
)

PAGED = (
    BF16_CUDA
    + r"""
#define TILE 32
// One query a request. A block a (head, request), one warp; online softmax over tiles of 32 keys: a lane a
// key for the scores, a lane some columns for the values. caches (blocks, BLOCK_SIZE, kv_heads, dim).
template <int BLOCK_SIZE, int MAX_DIM>
__device__ void decode(const float* q, const bf16* keys, const bf16* values, const int* table, int length,
                       float scale, int kv_heads, int kv, int dim, bf16* out) {
    __shared__ float query[MAX_DIM], weights[TILE];
    const int lane = threadIdx.x;
    for (int d = lane; d < dim; d += TILE) query[d] = q[d] * scale;
    __syncwarp();
    float peak = -3.0e38f, sum = 0.0f, total[(MAX_DIM + TILE - 1) / TILE] = {};
    for (int start = 0; start < length; start += TILE) {
        int j = start + lane;
        float score = -3.0e38f;
        if (j < length) {
            size_t slot = (size_t)table[j / BLOCK_SIZE] * BLOCK_SIZE + j % BLOCK_SIZE;
            const bf16* key = keys + (slot * kv_heads + kv) * dim;
            score = 0.0f;
            for (int d = 0; d < dim; d++) score += query[d] * bf16_to_float(key[d]);
        }
        float tile_peak = score;
        for (int mask = 16; mask; mask >>= 1)
            tile_peak = fmaxf(tile_peak, __shfl_xor_sync(~0u, tile_peak, mask));
        float new_peak = fmaxf(peak, tile_peak), shrink = __expf(peak - new_peak);
        float weight = j < length ? __expf(score - new_peak) : 0.0f;
        weights[lane] = weight;
        for (int mask = 16; mask; mask >>= 1) weight += __shfl_xor_sync(~0u, weight, mask);
        sum = sum * shrink + weight;
        peak = new_peak;
        __syncwarp();
        for (int c = 0; c * TILE + lane < dim; c++) {
            int d = c * TILE + lane;
            total[c] *= shrink;
            for (int k = 0; k < TILE && start + k < length; k++) {
                int slot = table[(start + k) / BLOCK_SIZE] * BLOCK_SIZE + (start + k) % BLOCK_SIZE;
                total[c] += weights[k] * bf16_to_float(values[((size_t)slot * kv_heads + kv) * dim + d]);
            }
        }
        __syncwarp();
    }
    for (int c = 0; c * TILE + lane < dim; c++) out[c * TILE + lane] = float_to_bf16(total[c] / sum);
}
extern "C" __global__ void paged_attention(const float* q, const bf16* key_cache, const bf16* value_cache,
                                           const int* block_tables, const int* context_lens, bf16* out,
                                           float scale, int max_blocks, int kv_heads, int dim) {
    int head = blockIdx.x, request = blockIdx.y, heads = gridDim.x;
    size_t row = ((size_t)request * heads + head) * dim;
    decode<5, 64>(q + row, key_cache, value_cache, block_tables + request * max_blocks, context_lens[request],
                  scale, kv_heads, head / (heads / kv_heads), dim, out + row);
}
"""
)

KV_WRITE = (
    BF16_CUDA
    + r"""
// k and v (tokens, width) float32 -> caches by slot; slot -1 skips. A block a token.
extern "C" __global__ void kv_write(const float* k, const float* v, const long long* slots, bf16* key_cache,
                                    bf16* value_cache, int width) {
    long long slot = slots[blockIdx.x];
    if (slot < 0) return;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        key_cache[slot * width + c] = float_to_bf16(k[(size_t)blockIdx.x * width + c]);
        value_cache[slot * width + c] = float_to_bf16(v[(size_t)blockIdx.x * width + c]);
    }
}
"""
)


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """q (n, heads, dim), k and v (m, kv_heads, dim) in float64 -> (n, heads, dim), causal."""
    n, heads, _ = q.shape
    m, kv_heads, _ = k.shape
    k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    hidden = np.arange(m)[None, :] > m - n + np.arange(n)[:, None]
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(np.einsum("hij,jhd->ihd", weights / weights.sum(axis=-1, keepdims=True), v))


_LENGTHS = (1, 4, 5, 6, 37)


def _paged_inputs(rng: np.random.Generator) -> dict[str, object]:
    """Five requests over shuffled blocks of 5 slots; unused slots hold NaN."""
    block_size, kv_heads, dim, heads = 5, 2, 42, 6
    needed = [-(-length // block_size) for length in _LENGTHS]
    order = rng.permutation(sum(needed) + 2).astype(np.int32)
    tables = np.full((len(_LENGTHS), max(needed)), -1, np.int32)
    caches = np.full((2, len(order), block_size, kv_heads, dim), 0x7FC0, np.uint16)
    taken = 0
    for row, length in enumerate(_LENGTHS):
        tables[row, : needed[row]] = order[taken : taken + needed[row]]
        taken += needed[row]
        for j in range(length):
            slot = tables[row, j // block_size], j % block_size
            caches[:, slot[0], slot[1]] = to_bf16(normal(rng, 2, kv_heads, dim))
    return {
        "q": normal(rng, len(_LENGTHS), heads, dim),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_tables": tables,
        "context_lens": np.array(_LENGTHS, np.int32),
        "out": empty(len(_LENGTHS), heads, dim, dtype=np.uint16),
        "scale": np.float32(dim**-0.5),
        "max_blocks": np.int32(max(needed)),
        "kv_heads": np.int32(kv_heads),
        "dim": np.int32(dim),
    }


def _paged(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, tables: np.ndarray, scale: float
) -> np.ndarray:
    out = []
    for row, length in enumerate(_LENGTHS):
        used = tables[row][tables[row] >= 0]
        k, v = (f64(from_bf16(x[used])).reshape(-1, *x.shape[2:])[:length] for x in (keys, values))
        out.append(_attend(f64(q[row : row + 1]), k, v, scale)[0])
    return np.stack(out)


def _kv_write(cache: np.ndarray, x: np.ndarray, slots: np.ndarray) -> np.ndarray:
    written = cache.copy()
    written[slots[slots >= 0]] = to_bf16(x[slots >= 0])
    return written.astype(np.int64)


CASES = [
    KernelCase(
        name="attention_causal",
        code=CAUSAL,
        kernel_name="attention",
        make=lambda rng: {
            "q": 3 * normal(rng, 5, 4, 14),
            "k": to_bf16(3 * normal(rng, 9, 2, 14)),
            "v": to_bf16(normal(rng, 9, 2, 14)),
            "out": empty(5, 4, 14, dtype=np.uint16),
            "scale": np.float32(14**-0.5),
            "n": np.int32(5),
            "m": np.int32(9),
            "kv_heads": np.int32(2),
            "dim": np.int32(14),
        },
        grid=(5, 4),
        block=(11,),
        shared_mem=4 * (9 + 11),
        expected=lambda a: {
            "out": _attend(f64(a.q), f64(from_bf16(a.k)), f64(from_bf16(a.v)), float(a.scale))
        },
        tolerance=2 * BF16_TOLERANCE,
    ),
    KernelCase(
        name="attention_paged_decode",
        code=PAGED,
        kernel_name="paged_attention",
        make=_paged_inputs,
        grid=(6, 5),
        block=(32,),
        expected=lambda a: {
            "out": _paged(a.q, a.key_cache, a.value_cache, a.block_tables, float(a.scale)),
        },
        tolerance=2 * BF16_TOLERANCE,
    ),
    KernelCase(
        name="kv_write",
        code=KV_WRITE,
        kernel_name="kv_write",
        make=lambda rng: {
            "k": normal(rng, 6, 26),
            "v": normal(rng, 6, 26),
            "slots": np.array([3, -1, 0, 8, -1, 5], np.int64),
            "key_cache": np.full((9, 26), 0x7FC0, np.uint16),
            "value_cache": np.full((9, 26), 0x7FC0, np.uint16),
            "width": np.int32(26),
        },
        grid=(6,),
        block=(7,),
        expected=lambda a: {
            "key_cache": _kv_write(a.key_cache, a.k, a.slots),
            "value_cache": _kv_write(a.value_cache, a.v, a.slots),
        },
    ),
]
