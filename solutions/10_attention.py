# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · Attention
#
# **At the end you have** `attention(q, k, v, scale, out)`: the one place in a transformer where tokens read each
# other.
#
# **About 70 minutes** · builds on 02 (bfloat16), 06 (`block_sum`) and 07 (a block a row) · 09 helps
#
# **In vLLM** a layer's attention is an object of the class `Attention`, and the work is done by a *backend*, one of
# several behind one interface: `vllm/v1/attention/backends/flash_attn.py` calls FlashAttention, `flashinfer.py`
# FlashInfer. What differs from yours: they never store a row of scores (lesson 20), they serve many requests in one
# launch, and they find keys and values in pages (lessons 21 and 22).

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, display_figure, earlier, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, solution
from tinyvllm_ref.device import describe

print(describe())
BF16_CUDA, BLOCK_SUM_CUDA = earlier("BF16_CUDA", "BLOCK_SUM_CUDA")

# %% [markdown]
# > **Fast track.** You know causal attention and a stable softmax? Do [10.2](#10.2-·-Softmax,-a-block-a-row), which is
# > `block_max` and little more, and [10.4](#10.4-·-Many-heads,-one-kernel:-the-part). Then read the prediction of
# > [10.5](#10.5-·-What-is-missing?), and leave.

# %% [markdown]
# ## The question
#
# *The fox lived in a forest with a badger. One day it ...* What comes next depends on what *it* is, and that was said
# ten words ago. But the norm of lesson 07 works on one token's row, and so does the product of lesson 09. Whatever we
# stack of them, the row of *it* will know nothing of a fox.
#
# So some step must bring numbers from one row to another. Which rows, and how much of each? That can not be fixed: it
# depends on the words. The idea of **attention** is to let the tokens find out themselves. From its row each token
# makes three vectors of $D$ numbers, by three products with learned matrices:
#
# - a **query** $q$: what I am looking for;
# - a **key** $k$: what I can be found by;
# - a **value** $v$: what I hand over to whoever finds me.
#
# How well key $j$ fits query $i$ is their dot product, a **score**. The scores of a query become **weights** that are
# positive and add up to 1. What the token gets is the weighted sum of the values:
#
# $$s_{ij} = \frac{q_i \cdot k_j}{\sqrt{D}} \qquad\quad w_{ij} = \frac{e^{s_{ij}}}{\sum_{j'} e^{s_{ij'}}} \qquad\quad
# o_i = \sum_j w_{ij}\, v_j$$
#
# **By hand.** Three tokens, $D = 4$, and the query of the last one, $q = (2, 0, 1, 1)$:
#
# | token | key | $q \cdot k$ | score | $e^{s}$ | weight | value |
# |---|---|---|---|---|---|---|
# | 0 | (0, 1, 1, −1) | 0 | 0 | 1.00 | 0.09 | (10, 0) |
# | 1 | (1, 5, −1, 1) | 2 | 1 | 2.72 | 0.24 | (0, 10) |
# | 2 | (1, 0, 1, 1) | 4 | 2 | 7.39 | 0.67 | (10, 10) |
#
# The exponentials add up to 11.11; each is divided by that. The output is $0.09 \cdot (10, 0) + 0.24 \cdot (0, 10) +
# 0.67 \cdot (10, 10) = (7.6, 9.1)$. (Values have $D$ columns like keys; two are enough to see it.)
#
# ## Three questions about the formula
#
# **Why $\sqrt{D}$?** A dot product adds up $D$ products of either sign. Much cancels, and what is left grows like
# $\sqrt{D}$. See:

# %%
rng = np.random.default_rng(10)
for D in (16, 64, 256):
    dots = (rng.standard_normal((10_000, D)) * rng.standard_normal((10_000, D))).sum(axis=1)
    spread = dots.std()
    print(f"D = {D:3}: random dot products spread by {spread:4.1f}; over sqrt(D), by {spread / D**0.5:.2f}")

# %% [markdown]
# Scores that spread by 16 would give nearly all the weight to one key, whatever the vectors mean. Divided by
# $\sqrt{D}$ they keep one size, for any $D$.
#
# **Why an exponential?** It makes every score positive, and it turns differences into ratios: a score that is larger
# by 1 has 2.7 times the weight. So adding the same number to all scores of a row changes nothing, $e^{s + c} = e^s
# e^c$, and the factor cancels. Keep that in mind: $e^{89}$ is already more than a float32 can hold, and 10.2 uses
# this freedom to stay away from there. This function, from scores to weights, is called **softmax**.
#
# **Which keys?** A text is written from left to right. When token $i$ was computed, later ones did not exist; so a
# query sees its own key and the earlier ones, and no other. This is the **causal mask**: the scores of later keys are
# set to $-\infty$, and $e^{-\infty} = 0$. Thanks to it, what was computed for a token stays true when the text goes
# on. All of lesson 15 rests on that.
#
# And one detail of an engine: it often has $n$ *new* tokens and $m \ge n$ in all, for the keys of the older ones are
# kept. Then query $i$ is token $m - n + i$, and it sees keys $j \le m - n + i$.
#
# The whole thing in NumPy, for one head:


# %%
def attention_in_numpy(q, k, v):
    """q: (n, D), k and v: (m, D), the queries being the last n of m tokens -> (n, D)"""
    n, m, D = len(q), len(k), q.shape[1]
    scores = q @ k.T / np.sqrt(D)
    sees = np.arange(m)[None, :] <= m - n + np.arange(n)[:, None]
    scores[~sees] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights @ v


k = np.array([[0, 1, 1, -1], [1, 5, -1, 1], [1, 0, 1, 1]], float)
v = np.array([[10, 0], [0, 10], [10, 10]], float)
attention_in_numpy(np.array([[2, 0, 1, 1]], float), k, v).round(1)

# %% [markdown]
# ## 10.1 · Scores and the mask
#
# Begin with the scores of one head. Thread $(j, i)$ makes `scores[i][j]`, as in lesson 09: blocks of 16 by 16
# threads, `threadIdx.x` along a row. `q` comes in float32, straight out of a product; `k` in BF16, because keys are
# kept, and kept numbers are stored small. (Reports show them as numbers, not as bits.)
#
# A `float` has a pattern for $-\infty$, `0xFF800000` (lesson 02: sign, all ones in the exponent, no fraction). The
# `#define` gives it a name: wherever `MINUS_INFINITY` stands below, the compiler reads the text behind it.
# `rsqrtf(v)` is $1/\sqrt{v}$, as in lesson 07.

# %%
# Exercise 10.1 - scores and the mask
score_kernel = cp.RawKernel(BF16_CUDA + r"""
#define MINUS_INFINITY __uint_as_float(0xFF800000u)

// q: (n, head_dim) float32, k: (m, head_dim) bf16, scores: (n, m) float32;
// the queries are the last n of m tokens
extern "C" __global__ void score_kernel(const float* q, const bf16* k, float* scores,
                                        int n, int m, int head_dim) {
    int j = blockIdx.x * blockDim.x + threadIdx.x;    // this thread's key
    int i = blockIdx.y * blockDim.y + threadIdx.y;    // and its query
    // BEGIN SOLUTION (5 lines): the scaled dot product, or MINUS_INFINITY where i may not see j
    if (i < n && j < m) {
        float dot = 0.0f;
        for (int d = 0; d < head_dim; d++) dot += q[i * head_dim + d] * bf16_to_float(k[j * head_dim + d]);
        scores[i * m + j] = j <= m - n + i ? dot * rsqrtf(head_dim) : MINUS_INFINITY;
    }
    // STUB if (i == 0 && j == 0) scores[0] = 0.0f;  // replace this line
    // END SOLUTION
}
""", "score_kernel")

# %%
check("10.1", score_kernel)

# %% [markdown]
# Your kernel on the queries and keys of a real model: one head of *tiny-stories*, reading a sentence. NumPy makes
# weights of your scores. Each row is a token that reads, and adds up to 1.

# %% tags=["nbval-ignore-output"]
show("10.1")

# %% [markdown]
# This head reads one token back, or two, nearly always. Nobody has told it to: training did. (`<bos>` is the token
# that begins every text, and its column is dark in many heads. Weights must add up to 1, so a head that finds nothing
# has to look *somewhere*.)
#
# ## 10.2 · Softmax, a block a row
#
# Now each row of scores becomes weights. You know the shape of this kernel from RMSNorm: a block takes a row, each
# thread walks along it in steps of `blockDim.x`, and something is added up over the block.
#
# But first the largest score of the row must be found, and subtracted from all. Then the largest exponent is 0 and
# nothing can overflow; and at least one term of the sum is $e^0 = 1$, so nothing is divided by 0. With the scores
# 1000, 999 and 998:
#
# - without: $e^{1000} = \infty$, and $\infty / \infty$ is NaN;
# - with: $e^{0}, e^{-1}, e^{-2}$ = 1, 0.368, 0.135, and the weights are 0.67, 0.24, 0.09.
#
# So the answer has two pieces. `block_max` is `block_sum` with `fmaxf(a, b)`, the larger of two floats, in the place
# of `a + b`. The kernel uses both, one after the other, with the same `scratch`.

# %%
# Exercise 10.2 - softmax, a block a row
BLOCK_MAX_CUDA = r"""
#define MINUS_INFINITY __uint_as_float(0xFF800000u)

// The largest value of all threads, for every thread; scratch: blockDim.x floats of shared memory
__device__ __forceinline__ float block_max(float value, float* scratch) {
    int t = threadIdx.x;
    // BEGIN SOLUTION (11 lines): your block_sum of lesson 06, with fmaxf in the place of +
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
    // STUB scratch[t] = value;  // replace this line
    // STUB return 0.0f;  // and this one
    // END SOLUTION
}
"""

softmax = cp.RawKernel(BLOCK_SUM_CUDA + BLOCK_MAX_CUDA + r"""
// scores: (rows, m) -> weights: (rows, m); a block a row, any number of threads
extern "C" __global__ void softmax(const float* scores, float* weights, int m) {
    extern __shared__ float scratch[];                     // blockDim.x floats, for block_max and block_sum
    const float* row = scores + (size_t)blockIdx.x * m;
    float* to = weights + (size_t)blockIdx.x * m;
    // BEGIN SOLUTION (7 lines): the largest score of the row; the sum of the exponentials; the weights
    float peak = MINUS_INFINITY;
    for (int j = threadIdx.x; j < m; j += blockDim.x) peak = fmaxf(peak, row[j]);
    peak = block_max(peak, scratch);
    float sum = 0.0f;
    for (int j = threadIdx.x; j < m; j += blockDim.x) sum += expf(row[j] - peak);
    sum = block_sum(sum, scratch);
    for (int j = threadIdx.x; j < m; j += blockDim.x) to[j] = expf(row[j] - peak) / sum;
    // STUB if (threadIdx.x == 0) to[0] = row[0];  // replace this line
    // END SOLUTION
}
""", "softmax")

# %%
check("10.2", softmax)

# %% [markdown]
# ## 10.3 · How many pairs?
#
# Everything else in a transformer costs the same for each token, however long the text is. Attention does not. Count
# the pairs of a query and a key that it sees: for a prompt of 100 tokens, and for one of 200.

# %%
# Exercise 10.3 - how many pairs?
# BEGIN SOLUTION (2 lines): two numbers
hundred = 5050
two_hundred = 20100
# STUB hundred = None
# STUB two_hundred = None
# END SOLUTION
predict("10.3", hundred=hundred, two_hundred=two_hundred)

# %% tags=["nbval-ignore-output"]
measure("10.3")

# %% [markdown]
# The cost grows with the *square* of the length, $O(n^2 D)$. With the sizes of Llama 3.2 1B, for a prompt of $n$
# tokens:

# %%
hidden, ffn, heads, kv_heads, D = 2048, 8192, 32, 8, 64
matrices = hidden * (2 * heads * D + 2 * kv_heads * D + 3 * ffn)  # parameters of one layer, but for the norms
for n in (128, 1024, 8192, 131072):
    attention_work = 2 * D * heads * n * (n + 1) // 2  # multiplications: scores, and weighted sums
    share = attention_work / (attention_work + matrices * n)
    print(f"n = {n:7,}: {share:5.1%} of a layer's multiplications, {4 * heads * n * n / 1e9:8.2f} GB of scores")

# %% [markdown]
# For short texts attention is nearly free. At 131,072 tokens, the longest that this model takes, it is most of the
# work. And look at the last column: whoever stores all scores of a long prompt runs out of memory long before that.
# In this lesson you *will* store them, because it is the plain way; lesson 20 does without.
#
# ## 10.4 · Many heads, one kernel: the part
#
# One head finds one kind of thing: the token before, or the name that was said first. So there are several **heads**,
# each with its own queries, keys and values of $D$ columns, and each knows nothing of the others. The arrays are
# `(tokens, heads, head_dim)`: the heads of a token lie side by side, for they came out of one product. Element $d$ of
# head $h$ of token $j$ lies at
#
# $$(j \cdot \mathrm{heads} + h) \cdot \mathrm{head\_dim} + d$$
#
# Now put it all together. **A block works on one query of one head**, so the grid is `(n, heads)`. Its threads
#
# 1. share the keys among them: a scaled dot product each, to `score[j]`, keeping the largest; then `block_max`;
# 2. share the keys again: `score[j]` becomes its exponential; then `block_sum`;
# 3. share the *columns* of the output: column $d$ is the sum of `score[j]` times column $d$ of `v`, over all keys,
#    divided by the sum.
#
# The mask becomes simpler than in 10.1: keys that a query does not see are never touched. And `score[j]` is read in
# step 3 by threads that have not written it: between writing and reading the block must have met at a barrier. It
# has. Where?
#
# `scale` is an argument now; the caller has computed $1/\sqrt{D}$. The part makes its own array for the scores; `out`
# is BF16, for the next thing is a product. `head_dim` may be any number, and so may $m$.

# %%
# Exercise 10.4 - many heads, one kernel: the part
attention_kernel = cp.RawKernel(BF16_CUDA + BLOCK_SUM_CUDA + BLOCK_MAX_CUDA + r"""
// q: (n, heads, head_dim) float32, k and v: (m, heads, head_dim) bf16, scores: (n, heads, m) float32,
// out: (n, heads, head_dim) bf16; a block for each (query, head)
extern "C" __global__ void attention_kernel(
    const float* q, const bf16* k, const bf16* v, float* scores, bf16* out,
    float scale, int n, int m, int heads, int head_dim) {
    extern __shared__ float scratch[];
    int i = blockIdx.x, head = blockIdx.y;
    float* score = scores + ((size_t)i * heads + head) * m;    // this block's own row of scores
    // BEGIN SOLUTION (24 lines): how many keys it sees; then steps 1, 2 and 3 above
    int keys = m - n + i + 1;
    const float* query = q + ((size_t)i * heads + head) * head_dim;
    float peak = MINUS_INFINITY;
    for (int j = threadIdx.x; j < keys; j += blockDim.x) {
        const bf16* key = k + ((size_t)j * heads + head) * head_dim;
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
    sum = block_sum(sum, scratch);    // its barriers also let every thread see all scores
    bf16* to = out + ((size_t)i * heads + head) * head_dim;
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float total = 0.0f;
        for (int j = 0; j < keys; j++)
            total += score[j] * bf16_to_float(v[((size_t)j * heads + head) * head_dim + d]);
        to[d] = float_to_bf16(total / sum);
    }
    // STUB if (threadIdx.x == 0) score[0] = scale;  // replace this line
    // END SOLUTION
}
""", "attention_kernel")


def attention(q, k, v, scale, out):
    """q (n, heads, head_dim) float32, k and v (m, heads, head_dim) bf16 -> out (n, heads, head_dim) bf16."""
    n, heads, head_dim = q.shape
    m, threads = len(k), 64
    scores = cp.empty((n, heads, m), np.float32)
    sizes = (np.int32(n), np.int32(m), np.int32(heads), np.int32(head_dim))
    arguments = (q, k, v, scores, out, np.float32(scale), *sizes)
    attention_kernel((n, heads), (threads,), arguments, shared_mem=4 * threads)
    return out

# %%
check("10.4", attention)

# %% [markdown]
# One of the cases that you have passed has a *loud* last token: all its values are 300. Had a single earlier query
# seen it, its output would be off by far. So a token's output does not change when the text goes on.
#
# Now look through your kernel at every head of the real model. How can one see the weights, if the kernel keeps them
# to itself? Give it the rows of the identity matrix as values. Then $o_i = \sum_j w_{ij} e_j$: the output *is* the
# row of weights.

# %% tags=["nbval-ignore-output"]
show("10.4")

# %% tags=["nbval-ignore-output"]
measure("10.4")

# %% [markdown]
# Far more moves than has to: each query reads all its keys anew, and in step 1 threads side by side read *different
# rows* of `k`. What a thread reads next lies in a sector that it has just fetched, so a card's cache will save much
# of it, and still this is the slow and plain way. Lessons 20 and 22 come back to it, with the tiles of lesson 09.
#
# ## 10.5 · What is missing?
#
# Take attention in the real model, with one thing taken out that you will write in lesson 11. Let it read the
# sentence from above; then again with all tokens but the last **shuffled**.
#
# - Of the 192 numbers that attention gives the *last* token in the *first* layer, how many change? (By more than 1 %,
#   so that rounding does not count.)
# - In how many of the 5 layers does nothing change for the last token?

# %%
# Exercise 10.5 - what is missing?
# BEGIN SOLUTION (2 lines): two numbers
numbers = 0
layers = 1
# STUB numbers = None
# STUB layers = None
# END SOLUTION
predict("10.5", numbers=numbers, layers=layers)

# %% tags=["nbval-ignore-output"]
measure("10.5")

# %% [markdown]
# ## Your part in the engine
#
# Your attention is at work in all layers now. Then four mistakes, and what they do to the story. Note how differently
# they look. Without a mask the story may well come out the same: a single new token has no later ones to hide, so
# only the prompt is read in the wrong way. But the error of the logits is large. A good text proves little; this is
# why a check compares numbers.

# %% tags=["nbval-ignore-output"]
show_engine("10")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - A query's dot products with the keys say how much of each value it gets. Scale by $1/\sqrt{D}$, mask, softmax,
#   weighted sum.
# - Softmax: subtract the largest score first. It changes nothing, and nothing overflows.
# - Query $i$ of $n$ new tokens is token $m - n + i$. In a decode step $n = 1$, and it sees everything.
# - Masked means $-\infty$ *before* the softmax, or never touched.
# - The cost grows with the square of the length; all else grows with the length.
# - The order of the keys does not matter to the sum. Position has to come from somewhere else.
#
# ## To think about
#
# <details><summary>Why are keys and values kept in BF16, and the scores in float32?</summary>
#
# Keys and values are stored for as long as the request lives, and read again for every new token: their bytes are
# what counts. A score is made and used at once. And it goes through an exponential: with 8 significant bits a score
# of 20 would be off by up to 1/16, and its weight by 6 %.
# </details>
#
# <details><summary>Could one skip the division by the sum, since the next thing is a product with a matrix anyway?</summary>
#
# No: the sum is another one for each query and head. But it can come last, after the weighted sum, as in 10.4: one
# division a column instead of one a key. Lesson 20 depends on that: there the sum is not known until the last key has
# been seen.
# </details>
#
# <details><summary>With n = 1 your grid has as many blocks as there are heads. What does that mean on a card with 132 multiprocessors?</summary>
#
# With 32 heads, three quarters of the card have nothing to do. Serving many requests at once fills it (lesson 18).
# For one request with a very long text, the keys themselves can be shared among several blocks and the partial
# results merged (lesson 20 has the rule for merging).
# </details>
#
# ## Further reading
#
# - Vaswani and others, *Attention Is All You Need* (NeurIPS 2017): scaled dot products, heads, and the whole
#   architecture.
# - Bahdanau, Cho and Bengio, *Neural Machine Translation by Jointly Learning to Align and Translate* (ICLR 2015):
#   where it began.
# - Elhage and others, *A Mathematical Framework for Transformer Circuits* (2021): what single heads do.
#
# **Next:** [lesson 11, RoPE](11_rope.ipynb).
