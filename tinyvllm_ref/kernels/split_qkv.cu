// The product of the stacked query, key and value weights, taken apart: three arrays without gaps.
//
// Launch: grid (T), any one-dimensional block. A block copies the row of one token; a thread takes columns of it.
// Reads qkv (T, Q + 2K) float32. Writes q (T, Q), k (T, K), v (T, K) float32; Q = Hq * D, K = Hk * D.
extern "C" __global__ void split_qkv(const float* qkv, float* q, float* k, float* v, int q_size, int kv_size) {
    const float* row = qkv + (size_t)blockIdx.x * (q_size + 2 * kv_size);
    q += (size_t)blockIdx.x * q_size;
    k += (size_t)blockIdx.x * kv_size;
    v += (size_t)blockIdx.x * kv_size;
    for (int c = threadIdx.x; c < q_size; c += blockDim.x) q[c] = row[c];
    for (int c = threadIdx.x; c < kv_size; c += blockDim.x) {
        k[c] = row[q_size + c];
        v[c] = row[q_size + kv_size + c];
    }
}
