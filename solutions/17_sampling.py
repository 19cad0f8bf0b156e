# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 17 · Sampling
#
# **At the end you have** `sample(logits, params, steps)`: it draws the next token of every request in a batch, each by its own
# temperature, top-k and top-p, and each with randomness of its own: the same seed gives the same story, alone or among a hundred
# others.
#
# **About 70 minutes** · builds on 06 (`block_sum`), 10 (softmax in a block) and 14 (argmax) · one *stretch* exercise
#
# **In vLLM** this is `Sampler` in `vllm/v1/sample/sampler.py`, with the filters and the draw in `vllm/v1/sample/ops/topk_topp_sampler.py`.
# What differs: its plain path draws with exponential noise and an argmax instead of a prefix sum (the last question below is about
# that), and a request with a seed has a random generator that is kept from step to step, where yours needs nothing but two numbers.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, display_figure, earlier, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, solution
from tinyvllm_ref.device import describe

print(describe())
BLOCK_SUM_CUDA = earlier("BLOCK_SUM_CUDA")  # lesson 06: block_sum

# %% [markdown]
# > **Fast track.** You know temperature, top-k, top-p and why a seed belongs to a request? Do
# > [17.1](#17.1-·-Temperature-and-softmax) and [17.4](#17.4-·-A-search-along-prefix-sums), which the part is made of, then
# > [17.5](#17.5-·-sample,-the-part). Pass them, and leave.

# %% [markdown]
# ## The question
#
# After a forward pass there is a number for every token of the vocabulary: its **logit**. Lesson 14 took the largest. That is
# **greedy** decoding: it gives the same text each time, and it tends to go round in circles. A model was trained to say how
# *probable* each next token is. So why not draw one, as likely as the model says?
#
# The probabilities are the softmax of the logits $z$, which you know from attention:
#
# $$p_i = \frac{e^{z_i}}{\sum_j e^{z_j}}$$
#
# and here is what the course's model thinks of the next word:

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course.exercises.lesson_17_sampling import OPENING, next_logits, words

logits = next_logits().astype(np.float64)
p = np.exp(logits - logits.max())
p /= p.sum()
print(OPENING, "...")
for token in np.argsort(-logits)[:6]:
    print(f"{words()[token]!r:12} logit {logits[token]:6.2f}   probability {p[token]:.3f}")
print(f"the other {len(p) - 16:,} tokens than the first 16, together: {np.sort(p)[:-16].sum():.4f}")

# %% [markdown]
# Greedy decoding would call every hero of every story by the first of these words.
#
# ### How to draw
#
# Lay the probabilities end to end on a line from 0 to 1, so that each token owns a piece as long as it is probable. Throw a point $u$
# on the line, anywhere with equal chance. Whoever owns that place is drawn. With four tokens:
#
# | token | a | b | c | d |
# |---|---|---|---|---|
# | probability | 0.4 | 0.3 | 0.2 | 0.1 |
# | sum so far | 0.4 | 0.7 | 0.9 | 1.0 |
#
# $u = 0.75$ lies between 0.7 and 0.9: it is c's. In words: **the first token whose sum so far reaches $u$**. These sums are called
# **prefix sums**. NumPy says it in one line:

# %%
four = np.array([0.4, 0.3, 0.2, 0.1])
for u in (0.05, 0.4, 0.75, 0.95):
    print(u, "abcd"[np.searchsorted(np.cumsum(four), u)])

# %% [markdown]
# ### Temperature
#
# Divide the logits by a number $T$ before the softmax:
#
# $$p_i = \frac{e^{z_i / T}}{\sum_j e^{z_j / T}}$$
#
# $T = 1$ leaves the distribution as the model learned it. Below 1 differences grow, and the favourite wins more often; as $T$ goes to 0
# it always wins, which is greedy decoding. Above 1 differences shrink, and unlikely tokens get their chance. For the logits 2, 1, 0:

# %%
z = np.array([2.0, 1.0, 0.0])
for T in (0.25, 1.0, 2.0, 100.0):
    weights = np.exp((z - z.max()) / T)
    print(f"T = {T:6}: {(weights / weights.sum()).round(4)}")

# %% [markdown]
# As in lesson 10 the largest logit is subtracted first. That multiplies all weights by the same number, which the division takes out
# again; and no exponential can overflow. Subtract first, then divide by $T$: so the largest weight is $e^0 = 1$ at any temperature.
#
# ## 17.1 · Temperature and softmax
#
# One block a row. You wrote this kernel in lesson 10; now each row has its own temperature. `block_max` is given: it is your
# `block_sum` with `fmaxf` in the place of `+`. The block has any number of threads, and `scratch` holds a float for each.

# %%
# Exercise 17.1 - temperature and softmax
soften = cp.RawKernel(BLOCK_SUM_CUDA + r"""
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

// logits, out: (R, V) float32, temperature: (R,) float32; a block for each row
extern "C" __global__ void soften(const float* logits, const float* temperature, float* out, int V) {
    extern __shared__ float scratch[];
    const float* row = logits + (size_t)blockIdx.x * V;
    float* to = out + (size_t)blockIdx.x * V;
    float T = temperature[blockIdx.x];
    // BEGIN SOLUTION (7 lines): the largest logit; the sum of the weights; the probabilities
    float peak = MINUS_INFINITY;
    for (int j = threadIdx.x; j < V; j += blockDim.x) peak = fmaxf(peak, row[j]);
    peak = block_max(peak, scratch);
    float sum = 0.0f;
    for (int j = threadIdx.x; j < V; j += blockDim.x) sum += expf((row[j] - peak) / T);
    sum = block_sum(sum, scratch);
    for (int j = threadIdx.x; j < V; j += blockDim.x) to[j] = expf((row[j] - peak) / T) / sum;
    // STUB if (threadIdx.x == 0) to[0] = row[0] / T;  // replace this line
    // END SOLUTION
}
""", "soften")

# %%
check("17.1", soften)

# %% [markdown]
# ## The tail, and how to cut it
#
# Draw often enough and you will draw nonsense. Two thousand tokens that are each one in a hundred thousand are together one in fifty,
# and one wrong word in fifty spoils a story. (The tail that you saw above is thinner; a higher temperature makes it thicker.) So the
# unlikely ones are cut off first, in one of two ways or both:
#
# - **top-k** keeps the $k$ most probable tokens. But $k = 5$ is too many where only one word fits, and too few where twenty do.
# - **top-p** (nucleus sampling) keeps *the smallest set of the most probable tokens whose probabilities sum to at least $p$*. It is small
#   where the model is sure, and large where it is not.
#
# Both look at the tokens from the most probable down. What is kept is divided by its sum, so that it adds up to 1 again. The order is
# fixed, and people rely on it: **temperature, then top-k, then top-p of what top-k left.**
#
# By hand, probabilities 0.4, 0.25, 0.2, 0.1, 0.05 and $p = 0.8$: the sums are 0.4, 0.65, 0.85. Two tokens reach only 0.65, so three are
# kept: **the one that crosses $p$ belongs to the set**. Divided by 0.85 they are 0.471, 0.294, 0.235.
#
# ## 17.2 · Which tokens may be drawn?
#
# Write the specification: plain NumPy, one row, no kernel. `logits` is `(V,)` float64. Return the ids that are kept, from the most
# probable down, and their probabilities. `top_k = 0` and `top_p = 1` cut nothing. On ties the lower id comes first:
# `np.argsort(..., kind="stable")` keeps equal values in their order.

# %%
# Exercise 17.2 - which tokens may be drawn
def keep(logits, temperature, top_k, top_p):
    """logits (V,) float64 -> ids (n,) from the most probable down, and their probabilities (n,)."""
    # BEGIN SOLUTION (10 lines): sort; softmax with the temperature; top_k; top_p; always renormalised
    ids = np.argsort(-logits, kind="stable")
    scaled = logits[ids] / temperature
    p = np.exp(scaled - scaled[0])
    p = p / p.sum()
    if top_k > 0:
        ids, p = ids[:top_k], p[:top_k]
        p = p / p.sum()
    if top_p < 1:
        count = np.searchsorted(np.cumsum(p), top_p) + 1
        ids, p = ids[:count], p[:count]
    return ids, p / p.sum()
    # STUB return np.arange(1), np.ones(1)  # replace this line
    # END SOLUTION

# %%
check("17.2", keep)

# %% [markdown]
# Here is *your* function on the next word of the story above, the twenty most probable tokens:

# %% tags=["nbval-ignore-output"]
show("17.2")

# %% [markdown]
# ## 17.3 · How many are kept?
#
# The vocabulary has 2,048 tokens. With this model and this opening, how many does top-p keep: at $T = 1$ with $p = 0.9$, and at $T = 2$
# with $p = 0.99$?

# %%
# Exercise 17.3 - how many are kept?
# BEGIN SOLUTION (2 lines): two numbers of tokens
plain = 15
hot = 731
# STUB plain = None
# STUB hot = None
# END SOLUTION
predict("17.3", plain=plain, hot=hot)

# %% tags=["nbval-ignore-output"]
measure("17.3")

# %% [markdown]
# ## 17.4 · A search along prefix sums
#
# Two of the steps above are the same question. Top-p: which is the first token whose sum so far reaches $p$? The draw: which is the
# first whose sum so far reaches $u$? One device function answers both, and a block of threads shares the work:
#
# ```c
# int index = search(weights, n, target, scratch);   // every thread of the block calls it, and gets the index
# ```
#
# A prefix sum looks as if it had to be made one step after the other. The trick is to cut the row into shares, one a thread, **side by
# side**. Take the weights 8 7 6 5 4 3 2 1, four threads, and the target 20:
#
# | thread | 0 | 1 | 2 | 3 |
# |---|---|---|---|---|
# | its share | 8 7 | 6 5 | 4 3 | 2 1 |
# | sum of the share | 15 | 11 | 7 | 3 |
# | **sum of all in front of it** | **0** | **15** | **26** | **33** |
# | its own walk | 8, 15 | **21** | 30 | 35 |
#
# 1. Each thread sums its share, all at once.
# 2. The sums in front: one short walk, over as many numbers as there are threads. Thread 0 may do it alone.
# 3. Each thread walks through its share again, beginning with what lies in front, and stops where the sum reaches the target.
#    Thread 1 finds it at index 2. Threads 2 and 3 are past the target from the start, and report 4 and 6. **The smallest index is right.**
#
# For the last step there is `atomicMin(&found, j)`: it makes `found` the smaller of itself and `j`, in one step that no other thread
# can get between (lesson 06 said why plain writes are a race). `found` begins with `n - 1`: rounding can leave every sum a hair below the
# target, and then the last token is meant. The function must be **safe to call twice in a row**, as `block_sum` is.
#
# `min(a, b)` of two ints exists in CUDA. `(n + blockDim.x - 1) / blockDim.x` is $n$ divided by the number of threads, rounded up; the
# last threads may have no share at all, and `begin` is then `end`.

# %%
# Exercise 17.4 - a search along prefix sums
SEARCH_CUDA = r"""
// The first index with weights[0] + ... + weights[index] >= target; n - 1 where there is none.
// weights: (n,); before: shared memory of blockDim.x floats
__device__ int search(const float* weights, int n, float target, float* before) {
    __shared__ int found;
    int t = threadIdx.x;
    int each = (n + blockDim.x - 1) / blockDim.x;
    int begin = min(n, t * each), end = min(n, begin + each);    // this thread's share
    // BEGIN SOLUTION (25 lines): 1. sums of the shares; 2. what lies in front of each; 3. the walk; for every thread, safely
    float mine = 0.0f;
    for (int j = begin; j < end; j++) mine += weights[j];
    before[t] = mine;
    if (t == 0) found = n - 1;
    __syncthreads();
    if (t == 0) {
        float sum = 0.0f;
        for (int s = 0; s < blockDim.x; s++) {
            float next = sum + before[s];
            before[s] = sum;
            sum = next;
        }
    }
    __syncthreads();
    float running = before[t];
    for (int j = begin; j < end; j++) {
        running += weights[j];
        if (running >= target) {
            atomicMin(&found, j);
            break;
        }
    }
    __syncthreads();
    int index = found;
    __syncthreads();  // nobody sets found again before all have read it
    return index;
    // STUB if (t == 0) found = end - begin;  // replace these three lines
    // STUB __syncthreads();
    // STUB return found;
    // END SOLUTION
}
"""

# %%
check("17.4", SEARCH_CUDA)

# %% [markdown]
# **What a share side by side costs.** Thread $t$ reads `weights[t * each]`, its neighbour the weight `each` further on: not coalesced, as
# lesson 05 would say. It is a row of at most some hundred thousand floats, once for each token, beside billions of bytes of weights, and
# it stays in the cache for the second walk. Order matters more here: a prefix sum needs neighbours together.
#
# ## Randomness that belongs to a request
#
# Where does $u$ come from? `np.random` keeps a **state**: each number depends on how many were drawn before. In an engine that is a bug in
# waiting. Your request shares the batch with others; whoever comes or goes changes how many numbers are drawn, and so changes *your*
# text. A user who sets `seed=17` wants the same story today, tomorrow, alone, or among a hundred.
#
# So there is no state. $u$ is a *function* of two numbers: the **seed** of the request, and the **step**, the number of the token within
# its completion. The function scrambles their bits until nothing can be seen of them. It is given below: splitmix64 (Steele, Lea and
# Flood, *Fast Splittable Pseudorandom Number Generators*, 2014). Here is the same thing in Python:

# %%
from tinyvllm_ref.kernels.sampling import uniform

print("seed 17:", [round(uniform(17, step), 3) for step in range(6)])
print("seed 18:", [round(uniform(18, step), 3) for step in range(6)])
print("again  :", [round(uniform(17, step), 3) for step in range(6)])
many = np.array([uniform(seed, 5) for seed in range(20_000)])
print("mean", many.mean().round(3), " in each tenth:", np.histogram(many, 10, (0, 1))[0])

# %% [markdown]
# ## 17.5 · `sample`, the part
#
# Now all together. Your cell may use `soften` and `SEARCH_CUDA` as they passed. The function sorts each row from the largest logit
# down, with `cp.argsort`, which keeps ties in the order of their ids; it softens the *sorted* rows; and the kernel `pick` does the
# rest, a block a row.
#
# In `uniform`, `unsigned long long` is NumPy's uint64, `ull` behind a number makes it one, and `^` is exclusive or, bit by bit.
#
# Two device functions are given besides `uniform`. `sum_of(p, n, scratch)` is the sum of the first `n` probabilities. And
# `at_least(p, n, bound, scratch)` counts the ones that are at least `bound`: it serves **min-p**, a third filter, which drops tokens less
# probable than `min_p` times the most probable. That line is given; it also drops tokens of probability 0.
#
# - `n` is how many of the sorted tokens are left; it begins with `V`.
# - The probabilities of the `n` that are left do not sum to 1 any more. Nothing need be renormalised: multiply the *target* by their sum.
# - A batch may mix greedy requests with others. $T = 0$ can not divide anything. But greedy is also "keep one token, at any temperature".
# - `params` is a list of `SamplingParams`, one a request. A seed may be any 64-bit number; `% 2**64` makes negative ones fit into `uint64`.

# %%
# Exercise 17.5 - sample, the part
pick = cp.RawKernel(BLOCK_SUM_CUDA + SEARCH_CUDA + r"""
__device__ unsigned long long mix(unsigned long long x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}
// 0 <= u < 1, from a request's seed and the number of its token
__device__ float uniform(unsigned long long seed, int step) {
    unsigned long long stream = mix(seed + 0x9e3779b97f4a7c15ull);
    unsigned long long bits = mix(stream + ((unsigned long long)step + 1) * 0x9e3779b97f4a7c15ull);
    return (float)(unsigned)(bits >> 40) / 16777216.0f;
}
__device__ float sum_of(const float* p, int n, float* scratch) {
    float sum = 0.0f;
    for (int j = threadIdx.x; j < n; j += blockDim.x) sum += p[j];
    return block_sum(sum, scratch);
}
__device__ int at_least(const float* p, int n, float bound, float* scratch) {
    float count = 0.0f;
    for (int j = threadIdx.x; j < n; j += blockDim.x) count += p[j] > 0.0f && p[j] >= bound ? 1.0f : 0.0f;
    return (int)block_sum(count, scratch);
}

// probabilities: (R, V) float32, from the largest down; ids: (R, V) int64, whose they are; top_k, steps: (R,) int32;
// top_p, min_p: (R,) float32; seeds: (R,) uint64; out: (R,) int32; a block for each row
extern "C" __global__ void pick(const float* probabilities, const long long* ids, const int* top_k,
                                const float* top_p, const float* min_p, const unsigned long long* seeds,
                                const int* steps, int* out, int V) {
    extern __shared__ float scratch[];
    int r = blockIdx.x;
    const float* p = probabilities + (size_t)r * V;    // this block's row
    int n = V;
    // BEGIN SOLUTION (1 line): top_k, where it is above 0
    if (top_k[r] > 0) n = min(n, top_k[r]);
    // END SOLUTION
    int limit = at_least(p, n, min_p[r] * p[0], scratch);    // min-p: n will be at most this
    // BEGIN SOLUTION (1 line): top_p, where it is below 1
    if (top_p[r] < 1.0f) n = search(p, n, top_p[r] * sum_of(p, n, scratch), scratch) + 1;
    // END SOLUTION
    n = min(n, limit);
    // BEGIN SOLUTION (3 lines): the target, from this request's seed and step; the rank; and which token that is
    float target = uniform(seeds[r], steps[r]) * sum_of(p, n, scratch);
    int rank = search(p, n, target, scratch);
    if (threadIdx.x == 0) out[r] = (int)ids[(size_t)r * V + rank];
    // STUB if (threadIdx.x == 0) out[r] = (int)(n * uniform(seeds[r], steps[r]));  // replace this line
    // END SOLUTION
}
""", "pick")


def column(values, dtype):
    """A value for each request, on the device."""
    return cp.asarray(np.array(values, dtype))


def sample(logits, params, steps):
    """logits (R, V) float32, R SamplingParams, steps (R,) int32 -> tokens (R,) int32."""
    R, V = logits.shape
    # BEGIN SOLUTION (3 lines): temperature and top_k, with what makes a request greedy
    greedy = [p.temperature == 0 for p in params]
    temperature = column([1.0 if g else p.temperature for p, g in zip(params, greedy, strict=True)], np.float32)
    top_k = column([1 if g else p.top_k for p, g in zip(params, greedy, strict=True)], np.int32)
    # STUB temperature = column([1.0 for p in params], np.float32)  # replace these two lines
    # STUB top_k = column([0 for p in params], np.int32)
    # END SOLUTION
    top_p = column([p.top_p for p in params], np.float32)
    min_p = column([p.min_p for p in params], np.float32)
    seeds = column([(p.seed or 0) % 2**64 for p in params], np.uint64)
    ids = cp.argsort(-logits, axis=1, kind="stable")
    ranked = cp.take_along_axis(logits, ids, axis=1)
    p, out = cp.empty((R, V), np.float32), cp.empty(R, np.int32)
    threads = 128
    soften((R,), (threads,), (ranked, temperature, p, np.int32(V)), shared_mem=4 * threads)
    arguments = (p, ids, top_k, top_p, min_p, seeds, steps, out, np.int32(V))
    pick((R,), (threads,), arguments, shared_mem=4 * threads)
    return out

# %%
check("17.5", sample)

# %% [markdown]
# The check knows exactly which token each seed and step must give. Whether that is *fair* is another question: below, your function draws
# 2,000 times, with 2,000 seeds, beside the probabilities that it was asked for.

# %% tags=["nbval-ignore-output"]
show("17.5")

# %% [markdown]
# ## 17.6 · The end of a completion
#
# A drawn token may be the end. Models have **several** end tokens: the course's has two, one that ends a text and one that ends a turn of
# a chat (`eos_token_id` in its config.json is a list). The OpenAI protocol, which lesson 24 will speak, tells the reader why a text ended:
# `"stop"` if the model ended it, `"length"` if it ran into the limit. If both are true the model had finished: `"stop"`.

# %%
# Exercise 17.6 - the end of a completion
def finish_reason(output_ids, end_ids, max_tokens):
    """Tokens of the completion so far (one or more), the end tokens, the limit -> "stop", "length" or None."""
    # BEGIN SOLUTION (5 lines): why it ends with its last token, or None if it goes on
    if output_ids[-1] in end_ids:
        return "stop"
    if len(output_ids) >= max_tokens:
        return "length"
    return None
    # STUB return "length"  # replace this line
    # END SOLUTION

# %%
check("17.6", finish_reason)

# %% [markdown]
# ## 17.7 · Penalties *(stretch)*
#
# Some requests ask that the model repeat itself less. Before anything else, the logits of tokens that were seen are lowered. For each of
# them, once, and in this order:
#
# - **repetition** $\rho$, for tokens of the prompt and the completion: a logit above 0 is divided by $\rho$, any other multiplied;
# - **presence** $\alpha$ and **frequency** $\beta$, for tokens that the completion has $c > 0$ times: $\alpha + \beta c$ is subtracted.
#
# One row, one thread for each seen token. `tokens` are the seen tokens, each once, and `counts` says how often the *completion* has them.

# %%
# Exercise 17.7 - penalties
penalize = cp.RawKernel(r"""
// logits: (V,) float32, changed in place; tokens, counts: (n,) int32
extern "C" __global__ void penalize(float* logits, const int* tokens, const int* counts,
                                    float repetition, float presence, float frequency, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    // BEGIN SOLUTION (6 lines): lower the logit of seen token i
    if (i < n) {
        float x = logits[tokens[i]];
        x = x > 0.0f ? x / repetition : x * repetition;
        if (counts[i] > 0) x -= presence + frequency * counts[i];
        logits[tokens[i]] = x;
    }
    // END SOLUTION
}
""", "penalize")

# %%
check("17.7", penalize)

# %% [markdown]
# ## Your part in the engine
#
# Below, a story is drawn with your `sample` and with the reference's, from the same seed: the tokens are the same, one by one. Then three
# mistakes. The last two write good stories, and that is what makes mistakes with randomness so hard to see: one story tells nothing. With
# the step left out every token of a request gets the same $u$; with a global state the text is not the one that this seed stands for. Only
# a check that knows the seed, or the counting of many stories, finds them.

# %% tags=["nbval-ignore-output"]
show_engine("17")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - Temperature divides the *logits*. Dividing probabilities by a number and renormalising does nothing.
# - The order is temperature, top-k, top-p; each sees what the one before has left. The token that crosses $p$ is kept.
# - A draw is a search along prefix sums. Shares side by side make it parallel.
# - Randomness is a function of (seed, step), not of a state: so a request's text does not depend on its neighbours.
# - A tail of thousands of improbable tokens is not improbable.
#
# ## To think about
#
# <details><summary>Why sort the whole row, if top-k keeps 50 of 128,256 tokens?</summary>
#
# One need not: finding the 50 largest is cheaper than sorting everything, and fast samplers find the bound of top-p by bisection, without
# any sort. Sorting is the plain way, serves all filters at once, and its price is small beside a forward pass of a large model. For a small
# model it is not: then it is worth measuring.
# </details>
#
# <details><summary>With the seed fixed, can the text still differ between two runs on a card?</summary>
#
# Yes, if the logits differ in their last bits, as they may when other requests share the batch and a product adds up in another
# order. If $u$ then lies very near to the border between two tokens, the other one is drawn, and the stories part. The randomness
# is the same; what it is applied to is not. In the emulation the order of additions does not depend on the batch, and the tokens
# are equal to the bit.
# </details>
#
# <details><summary>vLLM's plain path draws without any prefix sum: it divides each probability by an exponential random number, and takes the
# argmax. Why is that a fair draw?</summary>
#
# Give every token a clock that rings after an exponentially distributed time with rate $p_i$: that is $E_i / p_i$, where $E_i$ has
# rate 1. The chance that clock $i$ rings first is $p_i / \sum_j p_j$, a property of exponential times. First to ring is the
# smallest $E_i / p_i$, which is the largest $p_i / E_i$. It needs a random number for each token instead of one for each row, but
# neither sorting nor a sum. Adding Gumbel noise to the logits is the same trick after a logarithm.
# </details>
#
# ## Further reading
#
# - Ari Holtzman and others, *The Curious Case of Neural Text Degeneration* (ICLR 2020): nucleus sampling, and why greedy text is dull.
# - Nguyen Nhat Minh and others, *Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs* (2024).
# - Mark Harris, Shubhabrata Sengupta, John Owens, *Parallel Prefix Sum (Scan) with CUDA* (GPU Gems 3, chapter 39).
# - John Salmon and others, *Parallel Random Numbers: As Easy as 1, 2, 3* (SC 2011): random numbers as functions of a counter.
#
# **Next:** [lesson 18, Static batching](18_static_batching.ipynb).
