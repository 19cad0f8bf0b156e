# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12 · Grouped-query attention
#
# **At the end you have** `attention_gqa`: the attention of lesson 10 for models in which several query heads share
# one head of keys and values. From here on the engine copies nothing for you.
#
# **About 45 minutes** · builds on 10 (attention) · one *stretch* exercise
#
# **In vLLM** the first paged-attention kernel finds the shared head as you will:
# `csrc/attention/attention_kernels.cuh` divides the number of the query head by `num_queries_per_kv`. The Triton
# kernel in `vllm/v1/attention/ops/triton_unified_attention.py` goes further and lets one program serve all query
# heads of a KV head, so that keys and values are read once for the group: that is the stretch exercise.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, display_figure, earlier, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, solution
from tinyvllm_ref.device import describe

print(describe())
BF16_CUDA, BLOCK_SUM_CUDA = earlier("BF16_CUDA", "BLOCK_SUM_CUDA")

# %% [markdown]
# > **Fast track.** You know grouped-query attention? Pass [12.4](#12.4-·-No-copies:-the-part), which is three lines, and try the
# > [stretch](#12.5-·-Read-once-for-the-group-(stretch)).

# %% [markdown]
# ## The question
#
# To write the next token, its query needs the keys and values of *all* earlier tokens, in every layer. Nobody wants
# to compute them anew each time, so they are kept: the **KV cache** (lesson 15 builds it). It lies in the same memory
# as the weights, it grows with every token of every request, and for every new token all of the request's part of it
# is read.
#
# How large is it? What could make it smaller?
#
# ## 12.1 · Bytes of keys and values
#
# Derive it. A token keeps a key and a value in each layer, for each of `kv_heads` heads; each is `head_dim` numbers
# in BF16. How many bytes is that?

# %%
# Exercise 12.1 - bytes of keys and values
def kv_bytes_per_token(layers, kv_heads, head_dim):
    """Bytes of one token's keys and values, in all layers."""
    # BEGIN SOLUTION (1 line): keys and values, layers, heads, numbers, bytes
    return 2 * layers * kv_heads * head_dim * 2
    # STUB return 0
    # END SOLUTION


# %%
check("12.1", kv_bytes_per_token)

# %% [markdown]
# Llama 3.2 1B has 16 layers and 32 query heads of 64. With as many heads of keys and values, your formula gives
# 131,072 bytes for a token. A text of 16,384 tokens would take 2.1 GB, nearly as much as the weights (2.47 GB), and
# 32 requests of that length 69 GB.
#
# ## Sharing
#
# Which of the factors can be made smaller? Not the layers, and hardly `head_dim`. But must every query head have keys
# and values of its own? Queries are not kept, so many of them cost nothing in the cache. Three answers have been
# tried:
#
# - **multi-head attention** (MHA): each query head has its own KV head, as in lesson 10;
# - **multi-query attention** (MQA): all query heads share a single one. The cache shrinks as far as it can, and the
#   models get worse (Ainslie and others, 2023);
# - **grouped-query attention** (GQA): the query heads form groups, and each group shares one. Llama 3.2 1B has 8 KV
#   heads for 32 query heads, groups of 4.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course.exercises.lesson_12_gqa import draw_kinds

display_figure(draw_kinds())

# %% [markdown]
# What it does for the cache of Llama 3.2 1B:

# %%
for name, heads in (("MHA", 32), ("GQA", 8), ("MQA", 1)):
    per_token = 131_072 * heads // 32
    print(f"{name}: {heads:2} KV heads, {per_token:7,} bytes a token; 10 GB hold {10**10 // per_token:9,} tokens")

# %% [markdown]
# And over the length of a text, by your function:

# %% tags=["nbval-ignore-output"]
show("12.1")

# %% [markdown]
# Nothing changes in the formula of attention. Query head $h$ uses the keys and values of head $g(h)$:
#
# $$g(h) = \left\lfloor \frac{h}{\,H_q / H_k\,} \right\rfloor$$
#
# $H_q / H_k$ is the size of a group, a whole number. **By hand**, 6 query and 2 KV heads, as in *tiny-stories*:
# groups of 3; query heads 0, 1, 2 read KV head 0, and 3, 4, 5 read KV head 1. It is a convention, like the pairs of
# lesson 11: one could also deal them out in turn, $h \bmod H_k$. But the weights were trained with the groups side by
# side. In NumPy, the whole of it is one more line in front of lesson 10's specification:


# %%
def shared_heads_in_numpy(k, q_heads):
    """k: (m, kv_heads, D) -> (m, q_heads, D): for each query head, the keys that it reads"""
    group = q_heads // k.shape[1]
    return k[:, np.arange(q_heads) // group]


k = np.array([[[10, 11], [20, 21]]])  # one token, two KV heads of 2
print(shared_heads_in_numpy(k, 6)[0].tolist())

# %% [markdown]
# ## 12.2 · Copies for every head
#
# The plain way, and what the engine did for you until now: copy each KV head as often as it is needed, and call
# lesson 10. Write the copy as a kernel, a thread for each element of `out`. Thread $p$ makes `out[p]`; which $d$,
# which head and which token that is, follows by division, as in lesson 11. (A bf16 is only moved here, so it may stay
# an `unsigned short`.)

# %%
# Exercise 12.2 - copies for every head
repeat_heads = cp.RawKernel(r"""
// kv: (tokens, kv_heads, head_dim) -> out: (tokens, q_heads, head_dim)
extern "C" __global__ void repeat_heads(const unsigned short* kv, unsigned short* out,
                                        int tokens, int q_heads, int kv_heads, int head_dim) {
    int p = blockIdx.x * blockDim.x + threadIdx.x;
    // BEGIN SOLUTION (4 lines): the guard; d, query head and token of p; the head that is shared; the copy
    if (p >= tokens * q_heads * head_dim) return;
    int d = p % head_dim, head = p / head_dim % q_heads, token = p / (head_dim * q_heads);
    int kv_head = head / (q_heads / kv_heads);
    out[p] = kv[((size_t)token * kv_heads + kv_head) * head_dim + d];
    // STUB if (p == 0) out[0] = 0;  // replace this line
    // END SOLUTION
}
""", "repeat_heads")

# %%
check("12.2", repeat_heads)

# %% [markdown]
# ## 12.3 · What copying costs
#
# It works, and it throws away half of what sharing was for: the cache stays small, but each step makes the large
# arrays again, in every layer.
#
# Let *tiny-stories* (5 layers, 6 query and 2 KV heads of 32) go on with a prompt of 5 tokens for 48 tokens. In the
# first step there are 5 tokens, in the next 6, and 52 in the last. How many bytes of copies (keys and values) are
# made in one layer in the last step? And in all layers and all steps together?

# %%
# Exercise 12.3 - what copying costs
# BEGIN SOLUTION (2 lines): two numbers of bytes
last = 2 * 6 * 32 * 2 * 52
story = 2 * 6 * 32 * 2 * (5 + 52) * 48 // 2 * 5
# STUB last = None
# STUB story = None
# END SOLUTION
predict("12.3", last=last, story=story)

# %% tags=["nbval-ignore-output"]
measure("12.3")

# %% [markdown]
# ## 12.4 · No copies: the part
#
# The remedy is to copy nothing and to *look in the right place*. Below is the attention of lesson 10, whole, with
# `kv_heads` as one more size. As it stands it still takes for granted that each query head has keys and values of its
# own: it is right where `kv_heads` equals `q_heads`, and wrong elsewhere. Mend the three lines.
#
# Think about which of the two numbers belongs where. What is a query's (`q`, `score`, `out`) has `q_heads` rows for
# each token. What is a key's or a value's has `kv_heads`.

# %%
# Exercise 12.4 - no copies: the part
gqa_kernel = cp.RawKernel(BF16_CUDA + BLOCK_SUM_CUDA + r"""
#define MINUS_INFINITY __uint_as_float(0xFF800000u)

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

// q: (n, q_heads, head_dim) float32, k and v: (m, kv_heads, head_dim) bf16, scores: (n, q_heads, m) float32,
// out: (n, q_heads, head_dim) bf16; a block for each (query, query head)
extern "C" __global__ void gqa_kernel(const float* q, const bf16* k, const bf16* v, float* scores, bf16* out,
                                      float scale, int n, int m, int q_heads, int kv_heads, int head_dim) {
    extern __shared__ float scratch[];
    int i = blockIdx.x, head = blockIdx.y, keys = m - n + i + 1;
    size_t row = (size_t)i * q_heads + head;
    const float* query = q + row * head_dim;
    float* score = scores + row * m;
    // BEGIN SOLUTION (1 line): the KV head that this query head reads
    int kv_head = head / (q_heads / kv_heads);
    // STUB int kv_head = head;  // replace this line
    // END SOLUTION
    float peak = MINUS_INFINITY;
    for (int j = threadIdx.x; j < keys; j += blockDim.x) {
        // BEGIN SOLUTION (1 line): where key j of that head begins
        const bf16* key = k + ((size_t)j * kv_heads + kv_head) * head_dim;
        // STUB const bf16* key = k + ((size_t)j * q_heads + kv_head) * head_dim;  // replace this line
        // END SOLUTION
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
    sum = block_sum(sum, scratch);
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float total = 0.0f;
        for (int j = 0; j < keys; j++) {
            // BEGIN SOLUTION (1 line): where value j of that head begins
            const bf16* value = v + ((size_t)j * kv_heads + kv_head) * head_dim;
            // STUB const bf16* value = v + ((size_t)j * q_heads + kv_head) * head_dim;  // replace this line
            // END SOLUTION
            total += score[j] * bf16_to_float(value[d]);
        }
        out[row * head_dim + d] = float_to_bf16(total / sum);
    }
}
""", "gqa_kernel")


def attention_gqa(q, k, v, scale, out):
    """q (n, q_heads, head_dim) float32, k and v (m, kv_heads, head_dim) bf16 -> out, of q's shape, bf16."""
    n, q_heads, head_dim = q.shape
    m, kv_heads, threads = len(k), k.shape[1], 64
    scores = cp.empty((n, q_heads, m), np.float32)
    sizes = (np.int32(n), np.int32(m), np.int32(q_heads), np.int32(kv_heads), np.int32(head_dim))
    arguments = (q, k, v, scores, out, np.float32(scale), *sizes)
    gqa_kernel((n, q_heads), (threads,), arguments, shared_mem=4 * threads)
    return out

# %%
check("12.4", attention_gqa)

# %% [markdown]
# Who reads whom, from the accesses of your own run:

# %% tags=["nbval-ignore-output"]
show("12.4")

# %% [markdown]
# ## 12.5 · Read once for the group *(stretch)*
#
# The cache is small now, and nothing is copied. But the four query heads of a group are four blocks, and each reads
# the same keys by itself. On a card a cache may catch that, or may not. Better not to ask for them: let **one block
# serve a whole group**. It reads each element of a key once and multiplies it with the queries of all heads of the
# group, keeping a sum for each, in a small array of its own (`float dot[8]`; groups here have at most 8 heads). The
# softmax is done head by head. Then each element of a value is read once, and added to a total for each head.
#
# `block_max` stands in the cell, as above; the grid is `(n, kv_heads)`.

# %%
# Exercise 12.5 - read once for the group
group_kernel = cp.RawKernel(BF16_CUDA + BLOCK_SUM_CUDA + r"""
#define MINUS_INFINITY __uint_as_float(0xFF800000u)

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

// As gqa_kernel; a block for each (query, KV head), and groups of at most 8 query heads
extern "C" __global__ void group_kernel(const float* q, const bf16* k, const bf16* v, float* scores, bf16* out,
                                        float scale, int n, int m, int q_heads, int kv_heads, int head_dim) {
    extern __shared__ float scratch[];
    int i = blockIdx.x, kv_head = blockIdx.y, keys = m - n + i + 1;
    int group = q_heads / kv_heads;
    size_t first = (size_t)i * q_heads + kv_head * group;    // the row of the group's first query head
    const float* query = q + first * head_dim;               // query[g * head_dim + d]: head g of the group
    float* score = scores + first * m;                       // score[g * m + j]
    // BEGIN SOLUTION (30 lines): scores, each key read once; softmax, head by head; sums, each value read once
    float dot[8], sum[8], total[8];
    for (int j = threadIdx.x; j < keys; j += blockDim.x) {
        const bf16* key = k + ((size_t)j * kv_heads + kv_head) * head_dim;
        for (int g = 0; g < group; g++) dot[g] = 0.0f;
        for (int d = 0; d < head_dim; d++) {
            float x = bf16_to_float(key[d]);
            for (int g = 0; g < group; g++) dot[g] += query[g * head_dim + d] * x;
        }
        for (int g = 0; g < group; g++) score[(size_t)g * m + j] = dot[g] * scale;
    }
    for (int g = 0; g < group; g++) {
        float* row = score + (size_t)g * m;
        float peak = MINUS_INFINITY;
        for (int j = threadIdx.x; j < keys; j += blockDim.x) peak = fmaxf(peak, row[j]);
        peak = block_max(peak, scratch);
        sum[g] = 0.0f;
        for (int j = threadIdx.x; j < keys; j += blockDim.x) {
            row[j] = expf(row[j] - peak);
            sum[g] += row[j];
        }
        sum[g] = block_sum(sum[g], scratch);
    }
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
        for (int g = 0; g < group; g++) total[g] = 0.0f;
        for (int j = 0; j < keys; j++) {
            float x = bf16_to_float(v[((size_t)j * kv_heads + kv_head) * head_dim + d]);
            for (int g = 0; g < group; g++) total[g] += score[(size_t)g * m + j] * x;
        }
        for (int g = 0; g < group; g++) out[(first + g) * head_dim + d] = float_to_bf16(total[g] / sum[g]);
    }
    // STUB if (threadIdx.x == 0) score[0] = query[0] * scale * keys;  // replace this line
    // END SOLUTION
}
""", "group_kernel")


def attention_groups(q, k, v, scale, out):
    n, q_heads, head_dim = q.shape
    m, kv_heads, threads = len(k), k.shape[1], 64
    scores = cp.empty((n, q_heads, m), np.float32)
    sizes = (np.int32(n), np.int32(m), np.int32(q_heads), np.int32(kv_heads), np.int32(head_dim))
    arguments = (q, k, v, scores, out, np.float32(scale), *sizes)
    group_kernel((n, kv_heads), (threads,), arguments, shared_mem=4 * threads)
    return out

# %%
check("12.5", attention_groups)

# %% tags=["nbval-ignore-output"]
measure("12.4", "12.5")

# %% [markdown]
# The keys' and values' share of the traffic has gone down by the size of the group, and the sectors to less than a
# third. What is left is mostly queries and scores, read over and over; they are small and lie in a card's caches. The
# price: a quarter of the blocks, and so less to keep a card busy with. For one request with few KV heads that can
# cost more than it saves, which is why engines choose from case to case.
#
# ## Your part in the engine
#
# The engine now hands your function keys and values as they lie in the cache. Of the two mistakes, the first takes a
# remainder where the right answer divides.

# %% tags=["nbval-ignore-output"]
show_engine("12")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - A token's keys and values take $2 \cdot \text{layers} \cdot H_k \cdot D \cdot 2$ bytes: 32,768 for Llama 3.2 1B, a
#   quarter of what 32 KV heads would take.
# - Query head $h$ reads KV head $h / (H_q / H_k)$, an integer division. Groups lie side by side.
# - What belongs to a query has $H_q$ rows a token, what belongs to a key or value has $H_k$.
# - Sharing saves memory only if nobody copies, and reading only if somebody reads for the whole group.
#
# ## To think about
#
# <details><summary>Query heads cost no cache. Do they cost anything else?</summary>
#
# Their weights: the query matrix and the output matrix have $H_q D$ rows or columns, the key and value matrices only
# $H_k D$. And arithmetic: each query head has its own scores. In decode both hide behind the reading of weights and
# cache.
# </details>
#
# <details><summary>A checkpoint with MHA is to be turned into one with GQA. What could one do?</summary>
#
# Average the key matrices of the heads that will form a group, likewise the value matrices, and train on for a short
# while. Ainslie and others did just that, with 5 % of the original training. Without training on, the model would be
# much worse: the heads had learned to look for different things.
# </details>
#
# <details><summary>Eight KV heads, and eight cards that share the model. Why is that number convenient?</summary>
#
# Heads do not talk to each other, so each card can take one KV head with its group of query heads, and its part of
# the cache, and needs nothing from the others until the output matrix. With a single KV head, every card would have
# to keep a copy of the whole cache.
# </details>
#
# ## Further reading
#
# - Ainslie and others, *GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints* (EMNLP
#   2023, arXiv:2305.13245).
# - Shazeer, *Fast Transformer Decoding: One Write-Head is All You Need* (2019, arXiv:1911.02150): multi-query
#   attention.
#
# **Next:** [lesson 13, Feed-forward, and a whole layer](13_feed_forward.ipynb).
