// Softmax of rows, and its logarithm. The largest value is subtracted first, so that no exponential overflows.
//
// Launch: grid (R), any one-dimensional block, 4 bytes of dynamic shared memory a thread. A block works on a row;
// thread t takes the columns t, t + blockDim.x, ..., three times: maximum, sum, result.
// Reads x (R, V) float32. Writes out (R, V) float32; it may be x. A row of which nothing is finite becomes NaN.
#include "common.cuh"

// The maximum of a row and the sum of exp(x - maximum).
__device__ __forceinline__ void row_statistics(const float* row, int width, float* scratch, float* peak, float* sum) {
    float largest = -infinity(), total = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) largest = fmaxf(largest, row[c]);
    largest = block_max(largest, scratch);
    for (int c = threadIdx.x; c < width; c += blockDim.x) total += expf(row[c] - largest);
    *peak = largest;
    *sum = block_sum(total, scratch);
}

extern "C" __global__ void softmax(const float* x, float* out, int width) {
    extern __shared__ float scratch[];
    const float* row = x + (size_t)blockIdx.x * width;
    float* to = out + (size_t)blockIdx.x * width;
    float peak, sum;
    row_statistics(row, width, scratch, &peak, &sum);
    for (int c = threadIdx.x; c < width; c += blockDim.x) to[c] = expf(row[c] - peak) / sum;
}

extern "C" __global__ void log_softmax(const float* x, float* out, int width) {
    extern __shared__ float scratch[];
    const float* row = x + (size_t)blockIdx.x * width;
    float* to = out + (size_t)blockIdx.x * width;
    float peak, sum;
    row_statistics(row, width, scratch, &peak, &sum);
    float log_sum = logf(sum);
    for (int c = threadIdx.x; c < width; c += blockDim.x) to[c] = row[c] - peak - log_sum;
}
