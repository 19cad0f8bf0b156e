// Picks rows of a matrix: those whose logits are wanted, mostly the last token of each request.
//
// Launch: grid (R), any one-dimensional block. A block copies one row; a thread takes columns of it.
// Reads x (T, H), rows (R,) int32 from 0 to T - 1. Writes out (R, H).
template <class T>
__device__ __forceinline__ void gather(const T* x, const int* rows, T* out, int hidden) {
    const T* from = x + (size_t)rows[blockIdx.x] * hidden;
    T* to = out + (size_t)blockIdx.x * hidden;
    for (int c = threadIdx.x; c < hidden; c += blockDim.x) to[c] = from[c];
}

extern "C" __global__ void gather_rows_float32(const float* x, const int* rows, float* out, int hidden) {
    gather(x, rows, out, hidden);
}

extern "C" __global__ void gather_rows_bf16(const unsigned short* x, const int* rows, unsigned short* out,
                                            int hidden) {
    gather(x, rows, out, hidden);
}
