// Causal attention of one request, tile by tile (FlashAttention's online softmax): no n x m matrix, any length.
//
// Launch: grid (ceil(n / 64), Hq), block (64). A block works on 64 queries of a head, a thread on one: flash.cuh.
// Reads q (n, Hq, D) float32, k and v (m, Hk, D) bf16. Writes out (n, Hq, D) bf16. Query i sees keys j <= m - n + i.
#include "flash.cuh"

extern "C" __global__ void flash_attention(const float* q, const bf16* k, const bf16* v, bf16* out, float scale, int n,
                                           int m, int q_heads, int kv_heads) {
    flash(q, k, v, Contiguous{}, out, scale, blockIdx.x * QUERIES, n, m, blockIdx.y, q_heads, kv_heads);
}
