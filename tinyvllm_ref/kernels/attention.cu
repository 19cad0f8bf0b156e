// Causal attention of one request, plainly: all scores of a query, their softmax, the weighted sum of the values.
//
// Launch: grid (n, Hq), any one-dimensional block, 4 bytes of dynamic shared memory a thread. A block works on one
// query of one head; thread t takes the keys t, t + blockDim.x, ..., and then columns of the values.
// Reads q (n, Hq, D) float32, k and v (m, Hk, D) bf16. Writes scores (n, Hq, m) float32, which it needs for itself,
// and out (n, Hq, D) bf16. Query i sees keys j <= m - n + i; query head h reads KV head h / (Hq / Hk).
#include "common.cuh"

extern "C" __global__ void attention(const float* q, const bf16* k, const bf16* v, float* scores, bf16* out,
                                     float scale, int n, int m, int kv_heads, int head_dim) {
    extern __shared__ float scratch[];
    int i = blockIdx.x, head = blockIdx.y, heads = gridDim.y, kv_head = head / (heads / kv_heads);
    int keys = m - n + i + 1;
    size_t row = (size_t)i * heads + head;
    const float* query = q + row * head_dim;
    float* score = scores + row * m;
    float peak = -infinity();
    for (int j = threadIdx.x; j < keys; j += blockDim.x) {
        const bf16* key = k + ((size_t)j * kv_heads + kv_head) * head_dim;
        float dot = 0.0f;
        for (int d = 0; d < head_dim; d++) dot += query[d] * bf16_to_float(key[d]);
        score[j] = dot * scale;
        peak = fmaxf(peak, score[j]);
    }
    peak = block_max(peak, scratch);
    float sum = 0.0f;
    for (int j = threadIdx.x; j < keys; j += blockDim.x) {
        score[j] = expf(score[j] - peak);
        sum += score[j];
    }
    sum = block_sum(sum, scratch);  // its barriers also make all scores visible to all threads
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float total = 0.0f;
        for (int j = 0; j < keys; j++)
            total += score[j] * bf16_to_float(v[((size_t)j * kv_heads + kv_head) * head_dim + d]);
        out[row * head_dim + d] = float_to_bf16(total / sum);
    }
}
