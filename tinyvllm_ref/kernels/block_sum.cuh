// The sum of one value a thread, given to every thread of a one-dimensional block of any size.
// scratch holds blockDim.x floats in shared memory. All threads of the block must call it; it may be called again
// right away. The order of the additions depends on blockDim.x alone.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
    unsigned t = threadIdx.x;
    scratch[t] = value;
    __syncthreads();
    for (unsigned active = blockDim.x; active > 1;) {
        unsigned half = (active + 1) / 2;  // an odd number leaves the middle one for the next round
        if (t + half < active) scratch[t] += scratch[t + half];
        __syncthreads();
        active = half;
    }
    float total = scratch[0];
    __syncthreads();  // nobody writes scratch again before all have read the total
    return total;
}
