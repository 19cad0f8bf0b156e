// Drawing tokens from logits: penalties, then temperature, top-k, top-p and min-p over rows sorted from the largest.
//
// Launch of apply_penalties: grid (any), any one-dimensional block. A thread takes entries a grid's width apart; an
// entry is a token that a row's request has seen, and stands once.
// Reads rows, tokens, counts (P,) int32: counts says how often the completion has the token, 0 where only the prompt
// does; repetition, presence, frequency (R,) float32. Changes logits (R, V) float32.
//
// Launch of sample_sorted: grid (R), block (128). A block draws for one row.
// Reads values (R, V) float32, sorted from the largest, and their ids (R, V) int64; temperature, top_p, min_p (R,)
// float32, top_k, steps (R,) int32, seeds (R,) uint64. Writes out (R,) int32.
#include "common.cuh"

extern "C" __global__ void apply_penalties(float* logits, const int* rows, const int* tokens, const int* counts,
                                           const float* repetition, const float* presence, const float* frequency,
                                           int entries, int vocab) {
    for (int p = blockIdx.x * blockDim.x + threadIdx.x; p < entries; p += gridDim.x * blockDim.x) {
        int row = rows[p];
        float* logit = logits + (size_t)row * vocab + tokens[p];
        float x = *logit;
        x = x > 0.0f ? x / repetition[row] : x * repetition[row];
        if (counts[p] > 0) x -= presence[row] + frequency[row] * (float)counts[p];
        *logit = x;
    }
}

#define THREADS 128
#define EACH 32                  // entries of a thread, side by side
#define CHUNK (THREADS * EACH)   // entries of the block at a time

// A number that looks random, from any number: splitmix64's finaliser (Steele, Lea and Flood, 2014).
__device__ __forceinline__ unsigned long long mix(unsigned long long x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

// 0 <= u < 1, in steps of 2^-24, from the seed of a request and the number of its token: nothing else matters.
__device__ __forceinline__ float uniform(unsigned long long seed, int step) {
    unsigned long long stream = mix(seed + 0x9e3779b97f4a7c15ull);
    unsigned long long bits = mix(stream + ((unsigned long long)step + 1) * 0x9e3779b97f4a7c15ull);
    return (float)(unsigned)(bits >> 40) * (1.0f / 16777216.0f);
}

// A sorted row of logits as weights: exp((logit - largest) / temperature), from 1 downwards; a NaN weighs nothing.
struct Row {
    const float* values;
    float temperature;
    __device__ __forceinline__ float weight(int j) const {
        float weight = expf((values[j] - values[0]) / temperature);
        return weight >= 0.0f ? weight : 0.0f;
    }
};

struct Found {
    int index;
    float sum;  // of the weights up to it, its own included
};

// The first of `limit` entries with which the sum of the weights reaches the threshold (passes it, where `beyond`);
// the last one if none does. All threads of the block call it and get the answer.
__device__ Found search(Row row, int limit, float threshold, bool beyond) {
    __shared__ float before[THREADS];  // sums of the threads, then what comes before each thread's entries
    __shared__ float carry, sum;
    __shared__ int found;
    int t = threadIdx.x;
    if (t == 0) {
        carry = 0.0f;
        found = limit;
    }
    for (int start = 0; start < limit; start += CHUNK) {
        int begin = min(limit, start + t * EACH), end = min(limit, begin + EACH);
        float mine = 0.0f;
        for (int j = begin; j < end; j++) mine += row.weight(j);
        before[t] = mine;
        __syncthreads();
        if (t == 0)
            for (int s = 0; s < THREADS; s++) {
                float next = carry + before[s];
                before[s] = carry;
                carry = next;
            }
        __syncthreads();
        int index = limit;
        float running = before[t];
        for (int j = begin; j < end && index == limit; j++) {
            running += row.weight(j);
            if (beyond ? running > threshold : running >= threshold) index = j;
        }
        if (index < limit) atomicMin(&found, index);
        __syncthreads();
        bool last = found < limit || start + CHUNK >= limit;
        if (found < limit ? index == found : begin < end && end == limit) sum = running;
        __syncthreads();
        if (last) break;
    }
    Found result = {min(found, limit - 1), sum};
    __syncthreads();
    return result;
}

extern "C" __global__ void sample_sorted(const float* values, const long long* ids, const float* temperature,
                                         const int* top_k, const float* top_p, const float* min_p,
                                         const unsigned long long* seeds, const int* steps, int* out, int vocab) {
    __shared__ float scratch[THREADS];
    int r = blockIdx.x;
    ids += (size_t)r * vocab;
    Row row = {values + (size_t)r * vocab, temperature[r]};
    int most = top_k[r] > 0 ? min(top_k[r], vocab) : vocab, chosen = 0;
    if (row.temperature > 0.0f) {  // 0 takes the most probable
        float sum = 0.0f, kept = 0.0f;
        for (int j = threadIdx.x; j < most; j += THREADS) {
            float weight = row.weight(j);
            sum += weight;
            kept += weight > 0.0f && weight >= min_p[r] ? 1.0f : 0.0f;  // exact: a vocabulary is below 2^24
        }
        sum = block_sum(sum, scratch);
        int limit = (int)block_sum(kept, scratch);
        if (limit > 0) {  // else the largest logit is infinite or no number
            Found nucleus = search(row, limit, top_p[r] < 1.0f ? top_p[r] * sum : infinity(), false);
            float target = uniform(seeds[r], steps[r]) * nucleus.sum;
            chosen = search(row, nucleus.index + 1, target, true).index;
        }
    }
    if (threadIdx.x == 0) out[r] = (int)ids[chosen];
}
