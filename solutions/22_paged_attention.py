# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 22 · Paged attention
#
# **At the end you have** `paged_attention`: for each request its newest token reads all keys and values where they lie, in the blocks of its table, in one
# launch for the whole batch. It is the kernel that gave vLLM its name among engines.
#
# **About 60 minutes** · builds on 12 (KV heads), 20 (a softmax in tiles) and 21 (block tables) · one *stretch* exercise
#
# **In vLLM** the kernel of this name is `paged_attention_kernel` in `csrc/attention/attention_kernels.cuh`, with one block of threads for each (head, sequence) as here.
# What differs: it keeps the scores of a whole text, or of one partition of it, in shared memory, and takes one maximum of them, where yours goes on tile by tile; its
# key cache is laid out so that a few threads side by side read a key 16 bytes at a time; and long texts are cut into partitions for several blocks of threads (version 2).
# Today's vLLM mostly hands block tables to FlashAttention or FlashInfer instead.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, earlier, examine, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, solution
from tinyvllm_ref.device import describe

print(describe())
BF16_CUDA, BLOCK_SUM_CUDA = earlier("BF16_CUDA", "BLOCK_SUM_CUDA")

# %% [markdown]
# > **Fast track.** You know online softmax and block tables? Mend [22.2](#22.2-·-Someone-was-faster,-and-something-was-not-there), whose cell the part builds on, and
# > write [22.3](#22.3-·-A-tile-at-a-time:-the-part).

# %% [markdown]
# ## The question
#
# Most of what an engine does is one thing: every request gets one more token. For the attention this means one query a request and head, and all keys and values that the
# request has. There is no mask, since the newest token sees everything. There is hardly any arithmetic: each number of the cache is read, used in one multiplication and
# one addition for each query head that shares it, and not again. So what counts is reading: the right bytes, and all of the card at work on it.
#
# Since lesson 21 the keys lie in blocks, anywhere in the cache. One way out is to gather them into one piece first and to call the attention of lesson 20. That reads
# every key, writes it, and reads it again: three times the traffic, for a kernel in which traffic is all there is. The better way is to let the kernel look up the table itself:
#
# $$\mathrm{slot}(j) = \mathrm{table}[\lfloor j / B \rfloor] \cdot B + j \bmod B, \qquad
# \mathrm{key}(j, g) \text{ begins at } (\mathrm{slot}(j) \cdot H_k + g) \cdot D$$
#
# for key $j$ and KV head $g$, with blocks of $B$ slots, $H_k$ KV heads and $D$ columns.
#
# **By hand.** Two requests in a cache of 4 blocks of 2 slots, one KV head:
#
# | request | length | table | key 0 | key 1 | key 2 |
# |---|---|---|---|---|---|
# | a | 3 | 3, 0 | slot 6 | slot 7 | slot 0 |
# | b | 2 | 1, −1 | slot 2 | slot 3 | |
#
# Slot 1 is the second half of a's last block: it belongs to a and holds no token. What is in it? What the block's last owner left, or bits that nobody ever
# wrote. They may read as NaN. And $0 \cdot \mathrm{NaN} = \mathrm{NaN}$: a weight of 0 does not protect you. **What is not a token must not be touched.**
#
# In NumPy, for one request and one head:


# %%
def paged_attention_in_numpy(query, keys, values, table, length, block_size):
    """query: (D,); keys, values: (blocks, block_size, D)"""
    j = np.arange(length)
    slots = np.array(table)[j // block_size] * block_size + j % block_size
    k, v = (cache.reshape(-1, len(query))[slots] for cache in (keys, values))
    scores = k @ query / np.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    return weights @ v / weights.sum()


keys = np.full((4, 2, 4), np.nan)  # NaN where no token is
keys[3, 0], keys[3, 1], keys[0, 0] = [0, 1, 1, -1], [1, 5, -1, 1], [1, 0, 1, 1]
values = np.full((4, 2, 4), np.nan)
values[3, 0], values[3, 1], values[0, 0] = [10, 0, 0, 0], [0, 10, 0, 0], [10, 10, 0, 0]
paged_attention_in_numpy(np.array([2, 0, 1, 1]), keys, values, [3, 0], 3, 2).round(1)

# %% [markdown]
# These are the three tokens of lesson 10, in pages now, and the result is the same 7.6 and 9.1.
#
# ## 22.1 · Scores over a block table
#
# Begin with the walk through the table alone. A block of 64 threads works on one head of one request: `blockIdx.x` is the query head, `blockIdx.y` the request. Its
# threads share the keys among them in a strided loop, a dot product each. Query head `head` reads KV head `head / (q_heads / kv_heads)`, as in lesson 12.
#
# `scores` is `(requests, q_heads, max_blocks * block_size)`. Only the first `length` of a row are yours; what is behind stays as it was.

# %%
# Exercise 22.1 - scores over a block table
paged_scores = cp.RawKernel(BF16_CUDA + r"""
// q: (requests, q_heads, head_dim) float32; key_cache: (blocks, block_size, kv_heads, head_dim) bf16;
// block_tables: (requests, max_blocks), padded with -1; context_lens: (requests,)
extern "C" __global__ void paged_scores(
    const float* q, const bf16* key_cache, const int* block_tables, const int* context_lens, float* scores,
    float scale, int max_blocks, int block_size, int q_heads, int kv_heads, int head_dim) {
    int head = blockIdx.x, request = blockIdx.y, length = context_lens[request];
    float* score = scores + (size_t)(request * q_heads + head) * max_blocks * block_size;
    // BEGIN SOLUTION (10 lines): this request's table, query and KV head; each thread's keys
    const int* table = block_tables + request * max_blocks;
    const float* query = q + (size_t)(request * q_heads + head) * head_dim;
    int kv_head = head / (q_heads / kv_heads);
    for (int j = threadIdx.x; j < length; j += blockDim.x) {
        long long slot = (long long)table[j / block_size] * block_size + j % block_size;
        const bf16* key = key_cache + (slot * kv_heads + kv_head) * head_dim;
        float dot = 0.0f;
        for (int d = 0; d < head_dim; d++) dot += query[d] * bf16_to_float(key[d]);
        score[j] = dot * scale;
    }
    // STUB if (threadIdx.x == 0) score[0] = length * scale;  // replace this line
    // END SOLUTION
}
""", "paged_scores")

# %%
check("22.1", paged_scores)

# %% [markdown]
# ## 22.2 · Someone was faster, and something was not there
#
# Somebody has gone on from there, for texts of at most 64 tokens: one **tile**, a key for each of the 64 threads. Thread `t` makes the score of key `t` and keeps its
# slot; `block_max` and `block_sum` make weights of the scores; then the threads change roles, and each takes a *column* of the output: it adds up weight times
# value over all keys. A thread without a key has a score of minus infinity, and so a weight of 0.
#
# It works in the author's tests. **Two faults** are in it. `examine` runs the cell as it stands, in the emulation with all its checks, as often as you like. Mend the kernel with as
# little as possible: two lines are enough. (The first text in the cell, `BLOCK_MAX_CUDA`, is that of lesson 10, and is right.)

# %%
# Exercise 22.2 - someone was faster, and something was not there
BLOCK_MAX_CUDA = r"""
#define MINUS_INFINITY __uint_as_float(0xFF800000u)

// The largest value of all threads, for every thread; scratch: blockDim.x floats of shared memory
__device__ __forceinline__ float block_max(float value, float* scratch) {
    int t = threadIdx.x;
    scratch[t] = value;
    __syncthreads();
    for (int active = blockDim.x; active > 1;) {
        int half = (active + 1) / 2;
        if (t + half < active) scratch[t] = fmaxf(scratch[t], scratch[t + half]);
        __syncthreads();
        active = half;
    }
    float peak = scratch[0];
    __syncthreads();
    return peak;
}
"""

one_tile = cp.RawKernel(BF16_CUDA + BLOCK_SUM_CUDA + BLOCK_MAX_CUDA + r"""
// Contexts of at most 64 tokens; a block of 64 threads for each (query head, request)
extern "C" __global__ void one_tile(
    const float* q, const bf16* key_cache, const bf16* value_cache,
    const int* block_tables, const int* context_lens, bf16* out,
    float scale, int max_blocks, int block_size, int q_heads, int kv_heads, int head_dim) {
    __shared__ float weight[64], scratch[64];
    __shared__ long long slot[64];
    int t = threadIdx.x, head = blockIdx.x, request = blockIdx.y, length = context_lens[request];
    int whole = (length + block_size - 1) / block_size * block_size;    // slots in the request's blocks
    const int* table = block_tables + request * max_blocks;
    const float* query = q + (size_t)(request * q_heads + head) * head_dim;
    int kv_head = head / (q_heads / kv_heads);
    if (t < whole) slot[t] = (long long)table[t / block_size] * block_size + t % block_size;
    float score = MINUS_INFINITY;
    if (t < length) {
        const bf16* key = key_cache + (slot[t] * kv_heads + kv_head) * head_dim;
        float dot = 0.0f;
        for (int d = 0; d < head_dim; d++) dot += query[d] * bf16_to_float(key[d]);
        score = dot * scale;
    }
    float peak = block_max(score, scratch);
    float exponential = expf(score - peak);
    float sum = block_sum(exponential, scratch);
    // BEGIN SOLUTION (6 lines): both faults are in what stands here
    weight[t] = exponential / sum;
    __syncthreads();
    for (int d = t; d < head_dim; d += blockDim.x) {
        float total = 0.0f;
        for (int j = 0; j < length; j++)
            total += weight[j] * bf16_to_float(value_cache[(slot[j] * kv_heads + kv_head) * head_dim + d]);
    // STUB weight[t] = exponential / sum;
    // STUB for (int d = t; d < head_dim; d += blockDim.x) {
    // STUB     float total = 0.0f;
    // STUB     for (int j = 0; j < whole; j++)
    // STUB         total += weight[j] * bf16_to_float(value_cache[(slot[j] * kv_heads + kv_head) * head_dim + d]);
    // END SOLUTION
        out[(size_t)(request * q_heads + head) * head_dim + d] = float_to_bf16(total);
    }
}
""", "one_tile")

# %% tags=["nbval-ignore-output"]
examine("22.2")

# %%
check("22.2", one_tile)

# %% [markdown]
# Why did the author see nothing? On a card the 32 threads of a warp mostly keep in step, so that the race shows once in a while. And fresh memory is often zeros: 0 times 0 is 0.
# The NaN comes on the day when a block is used for the second time, after someone whose numbers had gone wrong.
#
# ## 22.3 · A tile at a time: the part
#
# A text has more than 64 tokens. So go through it tile by tile, with the rule of lesson 20: keep the largest score so far, the sum, and the weighted values so far; when a tile brings a
# larger score, shrink what there is by $e^{\mathrm{old} - \mathrm{new}}$ and go on. For a tile with scores $s_j$ and values $v_j$:
#
# $$m' = \max(m, \max_j s_j) \qquad \ell' = \ell\, e^{m - m'} + \sum_j e^{s_j - m'} \qquad o' = o\, e^{m - m'} + \sum_j e^{s_j - m'} v_j$$
#
# and at the very end the result is $o / \ell$. Who keeps what?
#
# - $m$ is the same for all threads: `block_max` tells it to everyone. **One reduction a tile** is all we need.
# - Of $\ell$ each thread keeps the part that its own keys add, one key a tile. One `block_sum` at the end joins them.
# - $o$ has `head_dim` columns, perhaps more than there are threads: they are in shared memory, `total[d]`, and column `d` is touched by thread `d % TILE` alone.
#
# A tile needs two barriers besides those of `block_max`. Weights and slots are written by one thread and read by all: where does the first one go? And the next tile overwrites them. Hence
# the second.
#
# The kernel builds on your cell of 22.2 for `BLOCK_MAX_CUDA`. `extern __shared__ float total[]` gets its size at the launch: `4 * head_dim` bytes.

# %%
# Exercise 22.3 - a tile at a time: the part
paged_attention_kernel = cp.RawKernel(BF16_CUDA + BLOCK_SUM_CUDA + BLOCK_MAX_CUDA + r"""
#define TILE 64
// q, out: (requests, q_heads, head_dim) float32 and bf16; caches: (blocks, block_size, kv_heads, head_dim) bf16;
// a block of TILE threads for each (query head, request)
extern "C" __global__ void paged_attention_kernel(
    const float* q, const bf16* key_cache, const bf16* value_cache,
    const int* block_tables, const int* context_lens, bf16* out,
    float scale, int max_blocks, int block_size, int q_heads, int kv_heads, int head_dim) {
    __shared__ float weight[TILE], scratch[TILE];
    __shared__ long long slot[TILE];
    extern __shared__ float total[];                   // (head_dim,)
    int t = threadIdx.x, head = blockIdx.x, request = blockIdx.y, length = context_lens[request];
    const int* table = block_tables + request * max_blocks;
    const float* query = q + (size_t)(request * q_heads + head) * head_dim;
    bf16* to = out + (size_t)(request * q_heads + head) * head_dim;
    int kv_head = head / (q_heads / kv_heads);
    float peak = MINUS_INFINITY, sum = 0.0f;           // so far: the largest score; this thread's sum
    for (int d = t; d < head_dim; d += TILE) total[d] = 0.0f;
    // BEGIN SOLUTION (29 lines): tile by tile: scores, maximum, weights, columns; then the division
    for (int start = 0; start < length; start += TILE) {
        int count = min(TILE, length - start);
        float score = MINUS_INFINITY;
        if (t < count) {
            int j = start + t;
            slot[t] = (long long)table[j / block_size] * block_size + j % block_size;
            const bf16* key = key_cache + (slot[t] * kv_heads + kv_head) * head_dim;
            float dot = 0.0f;
            for (int d = 0; d < head_dim; d++) dot += query[d] * bf16_to_float(key[d]);
            score = dot * scale;
        }
        float new_peak = fmaxf(peak, block_max(score, scratch));
        float shrink = expf(peak - new_peak);
        weight[t] = expf(score - new_peak);            // 0 for a thread without a key
        sum = sum * shrink + weight[t];
        peak = new_peak;
        __syncthreads();                               // all weights and slots are there
        for (int d = t; d < head_dim; d += TILE) {
            float column = total[d] * shrink;
            for (int j = 0; j < count; j++) {
                const bf16* value = value_cache + (slot[j] * kv_heads + kv_head) * head_dim;
                column += weight[j] * bf16_to_float(value[d]);
            }
            total[d] = column;
        }
        __syncthreads();                               // all have read them: the next tile may come
    }
    sum = block_sum(sum, scratch);
    for (int d = t; d < head_dim; d += TILE) to[d] = float_to_bf16(total[d] / sum);
    // STUB if (t == 0) to[0] = float_to_bf16(scale);  // replace this line
    // END SOLUTION
}
""", "paged_attention_kernel")


def paged_attention(q, key_cache, value_cache, block_tables, context_lens, scale, out):
    """q (requests, q_heads, head_dim) float32, one query a request -> out, of the same shape, bf16."""
    requests, q_heads, head_dim = q.shape
    block_size, kv_heads = key_cache.shape[1:3]
    sizes = [np.int32(n) for n in (block_tables.shape[1], block_size, q_heads, kv_heads, head_dim)]
    arguments = (q, key_cache, value_cache, block_tables, context_lens, out, np.float32(scale), *sizes)
    paged_attention_kernel((q_heads, requests), (64,), arguments, shared_mem=4 * head_dim)
    return out

# %%
check("22.3", paged_attention)

# %% [markdown]
# One of the texts that you have passed has 4,097 tokens. No array of scores was made for it: the kernel's memory does not depend on the length.
#
# Here are the blocks that your kernel reads for three requests, drawn from its accesses.

# %% tags=["nbval-ignore-output"]
show("22.3")

# %% [markdown]
# ## 22.4 · How often is a key read?
#
# One request of 50 tokens, 8 query heads, 2 KV heads of 16, blocks of 16 in random order. Your kernel's grid has a block of threads for each query head.
#
# - How many times is each number of the key cache read?
# - How many more 32-byte sectors are touched than if the request's blocks lay in order, one behind the other?

# %%
# Exercise 22.4 - how often is a key read?
# BEGIN SOLUTION (2 lines): two numbers
times = 4
extra = 0
# STUB times = None
# STUB extra = None
# END SOLUTION
predict("22.4", times=times, extra=extra)

# %% tags=["nbval-ignore-output"]
measure("22.4")

# %% tags=["nbval-ignore-output"]
measure("22.3")

# %% [markdown]
# ## 22.5 · A warp for each key *(stretch)*
#
# In the table above little of what moved was needed, and the reason is in one line: `dot += query[d] * bf16_to_float(key[d])`. Side by side the threads of a warp read column `d` of
# 32 *different* keys: 32 sectors for 32 numbers.
#
# Turn it round. Let a whole **warp** take one key, and lane `l` the columns `l`, `l + 32`, …: then 32 lanes read 64 bytes in a row, two sectors. Each lane has a part of the dot product,
# and shuffles add the 32 parts up, as in 06.6. The same scores as in 22.1, the same arguments; the check counts your sectors.

# %%
# Exercise 22.5 - a warp for each key
warp_scores = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void warp_scores(
    const float* q, const bf16* key_cache, const int* block_tables, const int* context_lens, float* scores,
    float scale, int max_blocks, int block_size, int q_heads, int kv_heads, int head_dim) {
    int head = blockIdx.x, request = blockIdx.y, length = context_lens[request];
    float* score = scores + (size_t)(request * q_heads + head) * max_blocks * block_size;
    const int* table = block_tables + request * max_blocks;
    const float* query = q + (size_t)(request * q_heads + head) * head_dim;
    int kv_head = head / (q_heads / kv_heads);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // BEGIN SOLUTION (8 lines): a key for each warp in turn; a lane's columns; the sum by shuffles
    for (int j = warp; j < length; j += blockDim.x / 32) {
        long long slot = (long long)table[j / block_size] * block_size + j % block_size;
        const bf16* key = key_cache + (slot * kv_heads + kv_head) * head_dim;
        float dot = 0.0f;
        for (int d = lane; d < head_dim; d += 32) dot += query[d] * bf16_to_float(key[d]);
        for (int offset = 16; offset > 0; offset /= 2) dot += __shfl_down_sync(0xffffffff, dot, offset);
        if (lane == 0) score[j] = dot * scale;
    }
    // STUB if (lane + warp == 0) score[0] = query[0] * table[0] + kv_head;  // replace this line
    // END SOLUTION
}
""", "warp_scores")

# %%
check("22.5", warp_scores)

# %% tags=["nbval-ignore-output"]
measure("22.1", "22.5")

# %% [markdown]
# ## Your part in the engine
#
# Now every token after the prompt is read by your kernel. A second story is written beside yours, so that your request's blocks do not begin at 0. Then four mistakes; the first one reads
# blocks that are another's, or nobody's. Where the logits have become NaN the text goes on in `!`, which is token 0.

# %% tags=["nbval-ignore-output"]
show_engine("22")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - Decoding is reading: every key and value once, and little else. Read them where they lie.
# - A block of threads for each (query head, request): a thread a key for the scores, a thread a column for the values, one reduction a tile.
# - When the maximum grows, sum *and* columns shrink. Divide once, at the end.
# - What holds no token is not touched: a weight of 0 does not make a NaN harmless.
# - Where the blocks lie costs nothing, for a block is much larger than a sector.
#
# ## To think about
#
# <details><summary>With one request and 32 query heads the grid has 32 blocks of threads. How could a card with 132 multiprocessors be filled?</summary>
#
# Cut the keys into splits, and let a block of threads take each: then there are 32 times as many blocks as splits. Each leaves its weighted mean and the logarithm of its sum, and the merge of
# lesson 20 joins them. This project's own kernel does so, in splits of 256 keys.
# </details>
#
# <details><summary>Why does the reference take the query heads of one KV head together, in one block of threads?</summary>
#
# It reads each key once for all of them. That is the prediction of 22.4 made 1. In turn there are fewer blocks of threads, which is no loss where the keys are cut into splits.
# </details>
#
# <details><summary>The next token's request has 17 tokens in blocks of 16. Does it matter how many entries its row of block_tables has?</summary>
#
# Not for the result: the kernel looks at the first two. But the row is as long as that of the longest request of the batch, so that one array holds all. Its other entries are −1, and a kernel that
# read a key too many would find block −1, in front of the cache.
# </details>
#
# ## Further reading
#
# - Kwon and others, *Efficient Memory Management for Large Language Model Serving with PagedAttention* (SOSP 2023).
# - Dao, Haziza, Massa and Sizov, *Flash-Decoding for Long-Context Inference* (2023): the keys of one request cut into splits.
# - Ye and others, *FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving* (MLSys 2025).
#
# **Next:** [lesson 23, A batched generator](23_batched_generator.ipynb).
