# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 20 · Online softmax
#
# **At the end you have** `attention_tiled`: the attention of lessons 10 and 12, for a text of any length and without a matrix of scores; and `merge_attention`, which makes one result of
# two that were computed apart.
#
# **About 60 minutes** · builds on 09 (tiles in shared memory), 10 (attention) and 12 (KV heads)
#
# **In vLLM** this is what FlashAttention does, which vLLM calls as a library (`vllm/v1/attention/backends/flash_attn.py`). Merging is a kernel of its own there too, in `csrc/attention/merge_attn_states.cu`,
# by the same formula. What differs: FlashAttention computes its tiles of scores with tensor cores and brings the next tile while it works on this one.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, earlier, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, solution
from tinyvllm_ref.device import describe

print(describe())
BF16_CUDA = earlier("BF16_CUDA")

# %% [markdown]
# > **Fast track.** You know the running maximum and sum? Do [20.3](#20.3-·-Two-partial-results-become-one:-a-part), minding the empty parts, and
# > [20.4](#20.4-·-Attention-in-tiles:-a-part).

# %% [markdown]
# ## The question
#
# The attention of lesson 10 goes over the scores three times: for the largest, for the sum of the exponentials, for the weighted values. So it must keep them. For one head and $n$ tokens these are $n^2$ numbers of 4 bytes, and for 131,072
# tokens 69 GB a head.
#
# Could one look at each score once, use it, and forget it? The trouble is the maximum. The weight of the first key is $e^{s_0 - m}$, and $m$, the largest score of all, may come last. But suppose that we have used the largest score *so far*, $m$, and
# a larger one, $m'$, turns up. Then every old term is wrong, and all by one and the same factor:
#
# $$e^{s - m'} = e^{s - m} \cdot e^{m - m'}$$
#
# So nothing needs to be computed again. We keep the largest score so far $m$, the sum so far $\ell = \sum e^{s_j - m}$ and the weighted values so far $o = \sum e^{s_j - m} v_j$. When score $s$ with value $v$ comes:
#
# $$m' = \max(m, s) \qquad \ell' = \ell\, e^{m - m'} + e^{s - m'} \qquad o' = o\, e^{m - m'} + e^{s - m'} v$$
#
# and after the last one, $o / \ell$ is the result. This is the **online softmax**. Begin with $m = -\infty$, $\ell = 0$, $o = 0$: then the first factor is $e^{-\infty} = 0$, and all is well.
#
# **By hand.** Scores 1, 3, 2 and values 10, 20, 30:
#
# | comes | $m'$ | $e^{m - m'}$ | $e^{s - m'}$ | $\ell'$ | $o'$ |
# |---|---|---|---|---|---|
# | 1, 10 | 1 | 0 | 1 | 1 | 10 |
# | 3, 20 | 3 | 0.135 | 1 | 0.135 + 1 = 1.135 | 1.35 + 20 = 21.35 |
# | 2, 30 | 3 | 1 | 0.368 | 1.135 + 0.368 = 1.503 | 21.35 + 11.04 = 32.39 |
#
# The result is $32.39 / 1.503 = 21.55$. The softmax that we know says the same:

# %%
scores, values = np.array([1.0, 3.0, 2.0]), np.array([10.0, 20.0, 30.0])
weights = np.exp(scores - scores.max())
(weights @ values / weights.sum()).round(2)

# %% [markdown]
# ## 20.1 · One pass
#
# Write it in Python. `pairs` gives one score and its value (an array of a few columns) after the other, as a stream does: you can go through it once. `value` is a buffer that the next pair overwrites, so use it and keep nothing of it. Return
# the largest score, the sum, and the weighted mean.

# %%
# Exercise 20.1 - one pass
def one_pass(pairs):
    """pairs of a score and a value (D,) -> the largest score, the sum of exp(score - largest), the mean (D,)"""
    peak, total, out = -np.inf, 0.0, 0.0
    # BEGIN SOLUTION (7 lines): for each pair: the new maximum, the factor for what is old, the new terms
    for score, value in pairs:
        new_peak = max(peak, score)
        shrink = np.exp(peak - new_peak)
        weight = np.exp(score - new_peak)
        total = total * shrink + weight
        out = out * shrink + weight * value
        peak = new_peak
    return peak, total, out / total
    # STUB return peak, total, out  # replace this line
    # END SOLUTION

# %%
check("20.1", one_pass)

# %% tags=["nbval-ignore-output"]
show("20.1")

# %% [markdown]
# ## 20.2 · How much memory do the scores take?
#
# Plain attention keeps a score in float32 for each head, query and key. How many bytes are that for 512 tokens and 4 heads? And how many *times* as many for 1,024 tokens?

# %%
# Exercise 20.2 - how much memory do the scores take?
# BEGIN SOLUTION (2 lines): two numbers
bytes = 4194304
times = 4
# STUB bytes = None
# STUB times = None
# END SOLUTION
predict("20.2", bytes=bytes, times=times)

# %% tags=["nbval-ignore-output"]
measure("20.2")

# %% [markdown]
# ## 20.3 · Two partial results become one: a part
#
# One step further: let two workers go over different keys of one query, each by itself, and join what they found. The first comes back with $m_a, \ell_a$ and its mean $o_a / \ell_a$, the second with the same for $b$. Both sums can be measured against the larger maximum, and then added.
#
# It is customary to pack $m$ and $\ell$ into one number, the **log-sum-exp**: $\mathrm{lse} = m + \log \ell = \log \sum_j e^{s_j}$. Its exponential is the weight that a part deserves. So with $p = \max(\mathrm{lse}_a, \mathrm{lse}_b)$:
#
# $$a = e^{\mathrm{lse}_a - p} \qquad b = e^{\mathrm{lse}_b - p} \qquad \mathrm{out} = \frac{a\, \mathrm{out}_a + b\, \mathrm{out}_b}{a + b} \qquad \mathrm{lse} = p + \log(a + b)$$
#
# **By hand.** Cut the example above after the second score. Part a has the scores 1, 3: $\mathrm{lse}_a = 3 + \log 1.135 = 3.127$, and the mean $21.35 / 1.135 = 18.81$. Part b has the score 2 alone: $\mathrm{lse}_b = 2$, mean 30. Then $a = 1$, $b = e^{-1.127} = 0.324$, and the merged mean is
# $(18.81 + 9.72) / 1.324 = 21.55$.
#
# Merging is associative: three parts give the same in any order, up to rounding. And a part may be **empty**, because its keys are all masked or because there are none. Its sum is 0, so its lse is $-\infty$; its values may be anything, NaN too. Merged with another part it must change nothing. And two empty ones merge to an empty one: zeros, with an lse of $-\infty$.
# Take care: $-\infty - (-\infty)$ is NaN.
#
# The rows are (query, head) pairs; one block of threads a row, and its threads share the columns. `bool` is C++'s type for true and false.

# %%
# Exercise 20.3 - two partial results become one: a part
merge_kernel = cp.RawKernel(r"""
#define MINUS_INFINITY __uint_as_float(0xFF800000u)

// out_a, out_b, out: (rows, width); lse_a, lse_b, lse: (rows,); all float32; a block a row
extern "C" __global__ void merge_kernel(const float* out_a, const float* lse_a,
                                        const float* out_b, const float* lse_b,
                                        float* out, float* lse, int width) {
    size_t row = blockIdx.x;
    // BEGIN SOLUTION (11 lines): the weights, 0 for an empty part; the columns; the new lse
    float peak = fmaxf(lse_a[row], lse_b[row]);
    bool empty = peak == MINUS_INFINITY;
    float a = empty ? 0.0f : expf(lse_a[row] - peak);
    float b = empty ? 0.0f : expf(lse_b[row] - peak);
    for (int d = threadIdx.x; d < width; d += blockDim.x) {
        float total = 0.0f;
        if (a > 0.0f) total += a * out_a[row * width + d];    // the values of an empty part are not touched
        if (b > 0.0f) total += b * out_b[row * width + d];
        out[row * width + d] = empty ? 0.0f : total / (a + b);
    }
    if (threadIdx.x == 0) lse[row] = empty ? MINUS_INFINITY : peak + logf(a + b);
    // STUB if (threadIdx.x == 0) lse[row] = MINUS_INFINITY;  // replace this line
    // END SOLUTION
}
""", "merge_kernel")


def merge_attention(out_a, lse_a, out_b, lse_b):
    """out_a, out_b (..., D) and lse_a, lse_b (...), all float32 -> the merged out and lse, in new arrays."""
    width = out_a.shape[-1]
    out, lse = cp.empty(out_a.shape, np.float32), cp.empty(lse_a.shape, np.float32)
    if lse.size:
        merge_kernel((lse.size,), (64,), (out_a, lse_a, out_b, lse_b, out, lse, np.int32(width)))
    return out, lse

# %%
check("20.3", merge_attention)

# %% [markdown]
# ## 20.4 · Attention in tiles: a part
#
# Now the kernel. A thread works on **one query** of one head and keeps its own $m$, $\ell$ and $o$: it is 20.1, and no thread needs another one's numbers. A block has 64 threads, so 64 neighbouring queries.
#
# But those 64 queries read nearly the same keys. So let the block bring them to shared memory once for all, a **tile** of 16 keys and values at a time, as in lesson 09. For each tile:
#
# 1. *Bring it.* All threads share the work, also those without a query. A barrier in front, a barrier behind.
# 2. *Use it.* A query sees the keys below its `seen`; so of this tile, `count = min(TILE, seen - start)`. That may be 16, fewer, or (0 or less) none. There is your causal mask. First the scores and the new maximum; then `shrink` **once** for the whole tile, and the tile's terms.
#
# How far must the block go? Its last query sees the most: up to `last`. All threads go through all tiles up to there, because of the barriers; for most of them the last tiles hold nothing.
#
# Three things in the stub are new. An array in a function, `float query[HEAD_DIM]`, is each thread's own; its size must be known when the kernel is compiled. So `HEAD_DIM` is no argument but an option of the compiler, `-DHEAD_DIM=64`, and there is a compiled
# kernel for each size. `float keys[TILE][HEAD_DIM]` is an array of two dimensions: `keys[j][d]`. And `(int)` in front of a number makes an `int` of it: `blockIdx.x` is unsigned, and `min` wants two numbers of one type.

# %%
# Exercise 20.4 - attention in tiles: a part
TILED_CUDA = BF16_CUDA + r"""
#define MINUS_INFINITY __uint_as_float(0xFF800000u)
#define TILE 16
#define QUERIES 64

// q: (n, q_heads, HEAD_DIM) float32; k, v: (m, kv_heads, HEAD_DIM) bf16; out: (n, q_heads, HEAD_DIM) bf16
// A block of QUERIES threads for as many queries of one head; a thread has a query, or (i >= n) none.
extern "C" __global__ void tiled(const float* q, const bf16* k, const bf16* v, bf16* out,
                                 float scale, int n, int m, int q_heads, int kv_heads) {
    __shared__ float keys[TILE][HEAD_DIM], values[TILE][HEAD_DIM];
    int i = blockIdx.x * QUERIES + threadIdx.x, head = blockIdx.y;
    int kv_head = head / (q_heads / kv_heads);
    int seen = i < n ? m - n + i + 1 : 0;                            // keys that this query sees
    int last = m - n + min(n, (int)(blockIdx.x + 1) * QUERIES);      // that the block's last query sees
    size_t row = ((size_t)i * q_heads + head) * HEAD_DIM;
    float query[HEAD_DIM], total[HEAD_DIM], peak = MINUS_INFINITY, sum = 0.0f;
    for (int d = 0; d < HEAD_DIM; d++) {
        query[d] = i < n ? q[row + d] * scale : 0.0f;                // scaled once, not once a key
        total[d] = 0.0f;
    }
    for (int start = 0; start < last; start += TILE) {
        // BEGIN SOLUTION (8 lines): bring the tile's keys and values, 0 from `last` on; two barriers
        __syncthreads();
        for (int c = threadIdx.x; c < TILE * HEAD_DIM; c += QUERIES) {
            int j = c / HEAD_DIM, d = c % HEAD_DIM;
            size_t place = ((size_t)(start + j) * kv_heads + kv_head) * HEAD_DIM + d;
            keys[j][d] = start + j < last ? bf16_to_float(k[place]) : 0.0f;
            values[j][d] = start + j < last ? bf16_to_float(v[place]) : 0.0f;
        }
        __syncthreads();
        // STUB keys[0][0] = values[0][0] = kv_head;  // replace this line
        // END SOLUTION
        int count = min(TILE, seen - start);
        float score[TILE], new_peak = peak;
        // BEGIN SOLUTION (14 lines): scores and the new maximum; shrink what there is; add the tile's terms
        for (int j = 0; j < count; j++) {
            score[j] = 0.0f;
            for (int d = 0; d < HEAD_DIM; d++) score[j] += query[d] * keys[j][d];
            new_peak = fmaxf(new_peak, score[j]);
        }
        float shrink = expf(peak - new_peak);
        sum *= shrink;
        for (int d = 0; d < HEAD_DIM; d++) total[d] *= shrink;
        for (int j = 0; j < count; j++) {
            float weight = expf(score[j] - new_peak);
            sum += weight;
            for (int d = 0; d < HEAD_DIM; d++) total[d] += weight * values[j][d];
        }
        // STUB score[0] = query[0] * count;  // replace this line
        // STUB sum += score[0];  // and this one
        // END SOLUTION
        peak = new_peak;
    }
    if (i < n)
        for (int d = 0; d < HEAD_DIM; d++) out[row + d] = float_to_bf16(total[d] / sum);
}
"""
tiled_kernels = {}  # head_dim -> the kernel compiled for it


def attention_tiled(q, k, v, scale, out):
    """q (n, q_heads, head_dim) float32, k and v (m, kv_heads, head_dim) bf16 -> out, like q, bf16."""
    (n, q_heads, head_dim), (m, kv_heads) = q.shape, k.shape[:2]
    if head_dim not in tiled_kernels:
        tiled_kernels[head_dim] = cp.RawKernel(TILED_CUDA, "tiled", options=(f"-DHEAD_DIM={head_dim}",))
    sizes = (np.int32(n), np.int32(m), np.int32(q_heads), np.int32(kv_heads))
    tiled_kernels[head_dim]((-(-n // 64), q_heads), (64,), (q, k, v, out, np.float32(scale), *sizes))
    return out

# %%
check("20.4", attention_tiled)

# %% [markdown]
# Two of the texts that you have passed have 1,025 and 4,097 keys. What did the memory do? Below, plain attention and yours on shorter texts; only what they allocate beside their arguments counts.

# %% tags=["nbval-ignore-output"]
show("20.4")

# %% tags=["nbval-ignore-output"]
measure("20.4")

# %% [markdown]
# The work has not become less: every query still meets every key that it sees, $O(n^2 D)$. What has gone is the memory, and with it most of the traffic: the scores live for the time of a tile, in a thread's own variables.
#
# One weakness is left. In a decode step $n$ is 1, and 63 of the 64 threads of a block have nothing to do but bring tiles. Lesson 22 writes a kernel for just that case.
#
# ## Your parts in the engine
#
# Your attention reads the prompt now, and every new token too. Then four mistakes. The second one begins well, and goes wrong some tokens
# after the text has outgrown its first tile: only then is there anything to rescale.

# %% tags=["nbval-ignore-output"]
show_engine("20")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - When the maximum grows from $m$ to $m'$, everything summed so far is multiplied by $e^{m - m'}$: the sum *and* the weighted values. Divide once, at the end.
# - A partial result is a mean and its log-sum-exp. Two merge to one, in any order; an empty one has the lse $-\infty$ and changes nothing.
# - What is masked is not touched; a tile is used up to `seen - start`.
# - Rescale once a tile, not once a key. All threads bring tiles, whether they have a query or not.
# - Attention's memory need not grow with the square of the length. Its work does.
#
# ## To think about
#
# <details><summary>Does your kernel give a token the same numbers whether it is computed in a prompt of 100 tokens or alone, in a decode step?</summary>
#
# Yes, to the bit: a query's sums depend on its own keys alone, in tiles of 16 counted from key 0, one after the other. How many other queries there are changes nothing. That is worth having: the same text comes out however an engine groups its work.
# </details>
#
# <details><summary>For a long prompt the blocks of the last queries have far more tiles than those of the first. Is that a problem?</summary>
#
# Only at the end. Blocks are given to the multiprocessors as these become free, in the order of their numbers: the longest come last, and some multiprocessors wait for them. Started in the reverse order, the short ones fill the gaps.
# </details>
#
# <details><summary>Why does a thread not keep its query in shared memory?</summary>
#
# No other thread needs it. A thread's own arrays are kept in registers, as far as these suffice, and they are the fastest memory there is. For a head of 128 the query and the columns are 256 registers, more than the 255 that a thread may have: some then go to memory. FlashAttention therefore lets several threads share a query.
# </details>
#
# ## Further reading
#
# - Milakov and Gimelshein, *Online normalizer calculation for softmax* (2018): the running maximum and sum.
# - Rabe and Staats, *Self-attention Does Not Need O(n²) Memory* (2021).
# - Dao, Fu, Ermon, Rudra and Ré, *FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness* (NeurIPS 2022).
#
# **Next:** [lesson 21, A KV cache in pages](21_paged_kv_cache.ipynb).
