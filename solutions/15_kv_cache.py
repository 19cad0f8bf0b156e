# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 15 · The KV cache
#
# **At the end you have** `kv_write`, which puts keys and values where they are kept, and a generator of your own: a prompt is read in
# one step, and from then on each token costs the work of one token.
#
# **About 55 minutes** · builds on 02 (BF16), 10 and 12 (attention), 11 (positions) and 14 (the forward pass)
#
# **In vLLM** the kernel is `reshape_and_cache_flash_kernel` in `cache_kernels.cu` under `csrc/`; its list of slots is called `slot_mapping`,
# and a slot below 0 is skipped there as well. What differs: the cache can also hold 8-bit floats, and keys and values may lie in one
# tensor with strides of its own.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, display_figure, earlier, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, show_layers, solution
from tinyvllm_ref.device import describe

print(describe())
BF16_CUDA, attention_gqa, forward, argmax = earlier("BF16_CUDA", "attention_gqa", "forward", "argmax")

# %% [markdown]
# > **Fast track.** You know why keys and values are kept, and queries are not? Go to
# > [exercise 15.1](#15.1-·-kv_write,-the-part) for the part, then [15.3](#15.3-·-A-text,-token-by-token).

# %% [markdown]
# ## The question
#
# The model gives one token. For the next one, that token is put behind the text, and the model is run again. And again. With a prompt
# of 1,000 tokens and 100 new ones, that is 100 runs over more than 1,000 tokens each. How much of it is new?
#
# Look at one layer. Each token makes a query, a key and a value, and token $i$ reads the tokens up to $i$:
#
# $$\text{out}_i = \sum_{j \le i} \operatorname{softmax}_j\!\left(\frac{q_i \cdot k_j}{\sqrt{D}}\right) v_j$$
#
# Put a token $n$ behind the text. For $i < n$ nothing changes in this formula: an earlier token never sees a later one. So its output
# is the same as before, and so is what it becomes in the next layer, its key and value there, and so on to the last layer.
# **Everything that was computed for the earlier tokens is computed again, with the same result.**
#
# What of it does the new token need? Only what the formula asks for with $i = n$: its own query, and the keys and values of all. So
# keep these:
#
# - **keys and values** of every token, in every layer: every later token reads them;
# - **queries** not: $q_i$ is used for out$_i$ and never again;
# - nothing else: the stream, gate and up are of use only to the token that they belong to.
#
# That is the **KV cache**. A step now has two forms. **Prefill** reads the prompt: many tokens, nothing kept yet. **Decode** computes one new
# token, and reads what is kept.
#
# In NumPy, with one head, the outputs of five tokens at once, and then token by token:


# %%
def attend_in_numpy(q, k, v):
    """q: (n, D), k, v: (m, D): the queries belong to the last n of m tokens."""
    n, m = len(q), len(k)
    scores = q @ k.T / np.sqrt(q.shape[1])
    scores[~np.tri(n, m, m - n, dtype=bool)] = -np.inf
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True) @ v


rng = np.random.default_rng(15)
q, k, v = rng.standard_normal((3, 5, 4))
at_once = attend_in_numpy(q, k, v)

kept_k, kept_v, one_by_one = np.empty((0, 4)), np.empty((0, 4)), []
for i in range(5):
    kept_k, kept_v = np.vstack([kept_k, k[i : i + 1]]), np.vstack([kept_v, v[i : i + 1]])
    one_by_one.append(attend_in_numpy(q[i : i + 1], kept_k, kept_v))
print(np.allclose(at_once, np.vstack(one_by_one)))

# %% [markdown]
# Look at the function: one token with a cache is **the same attention with one query**. Your `attention(q, k, v, scale, out)` has been
# ready for it since lesson 10: $n$ queries belong to the last $n$ of $m$ keys.
#
# How large is the cache? 2 (K and V) × layers × KV heads × head_dim × 2 bytes for each token, as in lesson 12. For Llama 3.2 1B:

# %%
layers, kv_heads, head_dim = 16, 8, 64
bytes_a_token = 2 * layers * kv_heads * head_dim * 2
print(f"{bytes_a_token:,} bytes a token, {bytes_a_token * 8192 / 1e6:,.0f} MB for a text of 8,192 tokens")

# %% [markdown]
# ## Where a token's key lies
#
# The cache of one layer is an array of **slots**, each with room for one token: `heads * head_dim` numbers in BF16, one after the
# other. The engine has arrays of shape (blocks, block_size, heads, head_dim), and a slot's number is
#
# $$\text{slot} = \text{block} \times \text{block size} + \text{offset}$$
#
# In memory that is simply slot after slot. In this lesson a request has *one* block as long as the longest text, so a token's slot is
# its position. Lesson 21 cuts the cache into small blocks, and then the slots of a text lie all over it. Your kernel need not know: it gets a **list of
# slots**, one for each new token.
#
# Keys are kept *after* RoPE. A key's rotation depends on its own position, which never changes; so it is rotated once, when it is made.
#
# ## 15.1 · kv_write, the part
#
# One block of threads a token, threads along its `width = heads * head_dim` columns, a strided loop for any width. The numbers come as
# float32 and are kept as BF16. A **negative slot** means: do not keep this token. (A batch may be filled up with tokens that are
# nobody's.)
#
# By hand: width 2, two tokens with k = 1 2 and 3 4, and slots 2 0. Token 0 goes to elements 4 and 5 of the cache, token 1 to elements
# 0 and 1: the cache is 3 4 · · 1 2, where · is what was there before.
#
# `slots` holds int64: in C++ `long long`, 8 bytes.

# %%
# Exercise 15.1 - kv_write, the part
kv_write_kernel = cp.RawKernel(BF16_CUDA + r"""
// k, v: (tokens, width) float32; key_cache, value_cache: (slots, width) bf16. A block a token.
extern "C" __global__ void kv_write_kernel(
    const float* k, const float* v, const long long* slots, bf16* key_cache, bf16* value_cache, int width) {
    // BEGIN SOLUTION (7 lines): this block's token to its slot, keys and values; a negative slot is skipped
    long long slot = slots[blockIdx.x];
    if (slot < 0) return;
    size_t from = (size_t)blockIdx.x * width, to = (size_t)slot * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        key_cache[to + c] = float_to_bf16(k[from + c]);
        value_cache[to + c] = float_to_bf16(v[from + c]);
    }
    // END SOLUTION
}
""", "kv_write_kernel")


def kv_write(k, v, slots, key_cache, value_cache):
    """k, v (T, Hk, D) float32, slots (T,) int64 -> into the caches (NB, BS, Hk, D) bf16 of one layer."""
    tokens, heads, head_dim = k.shape
    width = heads * head_dim
    threads = min(256, -(-width // 32) * 32)
    kv_write_kernel((tokens,), (threads,), (k, v, slots, key_cache, value_cache, np.int32(width)))

# %%
check("15.1", kv_write)

# %% tags=["nbval-ignore-output"]
measure("15.1")

# %% [markdown]
# ## 15.2 · attend, with a cache
#
# Your `decoder_layer` calls `attend(layer, q, k, v, out)` and does not ask where the keys come from. Now write that `attend`: a class
# whose objects remember. One object is one text. A step goes like this:
#
# | call | what it does |
# |---|---|
# | `begin(count)` | a step with `count` new tokens follows: sets `positions` and `slots` |
# | `attend(layer, q, k, v, out)`, for each layer | keeps the new keys and values of *this layer*, then attends to all that are kept |
# | `end()` | the new tokens belong to the text from now on: `length` grows |
#
# (An object whose class has `__call__` can be called like a function.) `length` is the number of tokens kept. By hand, with 3 tokens
# kept and 1 new: its position is 3, its slot is 3; in each layer it reads 4 keys, the last of which is its own; at the end `length` is 4.
#
# `self.keys` has the shape (layers, 1, max_len, heads, head_dim): one block for each layer. `self.keys[layer]` is what `kv_write`
# wants; `self.keys[layer, 0, :m]` are the first `m` keys, without gaps. `cp.arange(a, b, dtype=...)` gives a, ..., b − 1.
#
# The check also sets `length` back in the middle of a text and goes on with other tokens. If you have followed the table, nothing needs to be done
# for that: what lies behind `length` is not read, and will be written over.

# %%
# Exercise 15.2 - attend, with a cache
class CachedAttend:
    """attend(layer, q, k, v, out) of one text, whose keys and values are kept from step to step."""

    def __init__(self, config, max_len):
        shape = (config.num_hidden_layers, 1, max_len, config.num_key_value_heads, config.head_dim)
        self.keys, self.values = cp.empty(shape, np.uint16), cp.empty(shape, np.uint16)
        self.scale = config.head_dim ** -0.5
        self.length = 0  # tokens that are kept

    def begin(self, count):
        """A step with `count` new tokens follows."""
        # BEGIN SOLUTION (2 lines): self.positions, int32, and self.slots, int64, of the new tokens
        self.positions = cp.arange(self.length, self.length + count, dtype=np.int32)
        self.slots = self.positions.astype(np.int64)
        # STUB self.positions, self.slots = cp.zeros(count, np.int32), cp.zeros(count, np.int64)  # replace this line
        # END SOLUTION

    def __call__(self, layer, q, k, v, out):
        """q (n, Hq, D), k, v (n, Hk, D) float32 of the new tokens -> out (n, Hq, D) bf16."""
        # BEGIN SOLUTION (3 lines): keep k and v in this layer's cache; attention_gqa(q, keys, values, self.scale, out)
        kv_write(k, v, self.slots, self.keys[layer], self.values[layer])
        m = self.length + len(q)
        attention_gqa(q, self.keys[layer, 0, :m], self.values[layer, 0, :m], self.scale, out)
        # STUB out.fill(0)  # replace this line
        # END SOLUTION
        return out

    def end(self):
        """The step is over, and its tokens are kept."""
        # BEGIN SOLUTION (1 line): the new length
        self.length += len(self.slots)
        # STUB pass
        # END SOLUTION

# %%
check("15.2", CachedAttend)

# %% [markdown]
# ## 15.3 · A text, token by token
#
# You have `forward`, `argmax` and an `attend` that remembers. The loop around them is an inference engine, the smallest there is:
#
# 1. the first step computes the whole prompt; the logits of its *last* row give the first new token;
# 2. every further step computes the one token that was found last.
#
# `forward(inputs, weights, attend)` needs `inputs.ids` and `inputs.logits_rows`, both int32 on the device; `inputs.positions` goes along.
# `SimpleNamespace` makes an object with such fields. Return the `count` new tokens. (The last one that you return was never computed:
# nobody asked what comes after it.)
#
# The check uses your `CachedAttend`, and looks at how many tokens each step computes.

# %%
# Exercise 15.3 - a text, token by token
from types import SimpleNamespace


def generate(prompt, count, weights):
    """prompt: list of token ids -> the `count` most probable next ones, greedily."""
    attend = CachedAttend(weights.config, len(prompt) + count)
    new, tokens = list(prompt), []
    # BEGIN SOLUTION (11 lines): steps until there are `count` tokens
    while len(tokens) < count:
        attend.begin(len(new))
        inputs = SimpleNamespace(
            ids=cp.asarray(np.array(new, np.int32)),
            positions=attend.positions,
            logits_rows=cp.asarray(np.array([len(new) - 1], np.int32)),
        )
        logits = forward(inputs, weights, attend)
        attend.end()
        tokens.append(int(argmax(logits, cp.empty(1, np.int32))[0]))
        new = tokens[-1:]
    # END SOLUTION
    return tokens

# %%
check("15.3", generate)

# %% [markdown]
# The check's model is a toy with random weights. This is *your* `generate`, with tiny-stories, and no engine around it:

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course.exercises.lesson_15_kv_cache import compare_with_one_prefill, draw_work, write_own_story

write_own_story()

# %% [markdown]
# Does one token at a time give what a single run over the whole text gives? Not the same words only: the same logits, at every
# position. The engine with your parts, on 30 tokens:

# %% tags=["nbval-ignore-output"]
compare_with_one_prefill()

# %% [markdown]
# ## What a token costs now
#
# Without a cache, the step that makes token $n$ computes $n$ tokens. Products: $n$ times those of one token. Attention: each of $n$
# queries with up to $n$ keys, some $n^2/2$ pairs. With the cache there is one token: its products once, and one query with $n$ keys.
#
# | | anew | kept |
# |---|---|---|
# | products | $\propto n$ | constant |
# | attention | $\propto n^2$ | $\propto n$ |
#
# So with the cache the products do not grow any more, and attention does. One day it must catch up.
#
# ## 15.4 · When does attention cost as much as the products?
#
# Count multiplications, for **one** new token in **one** layer. Its products take one for each weight of the layer. Attention takes $D$
# for each score and $D$ more for adding up the value: $2 D$ for each query head and key.
#
# At which number of tokens are the two equal: for tiny-stories ($H$ = 192, 6 query and 2 KV heads of 32, $F$ = 512), and for Llama
# 3.2 1B ($H$ = 2,048, 32 query and 8 KV heads of 64, $F$ = 8,192)?

# %%
# Exercise 15.4 - when does attention cost as much as the products?
# BEGIN SOLUTION (2 lines): two numbers of tokens
tiny = (192 * (192 + 2 * 64) + 192 * 192 + 3 * 512 * 192) / (2 * 192)
llama_1b = (2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 8192 * 2048) / (2 * 2048)
# STUB tiny = None
# STUB llama_1b = None
# END SOLUTION
predict("15.4", tiny=tiny, llama_1b=llama_1b)

# %% tags=["nbval-ignore-output"]
measure("15.4")

# %% [markdown]
# And the whole picture, from steps of tiny-stories that were really run:

# %% tags=["nbval-ignore-output"]
display_figure(draw_work())

# %% [markdown]
# For a text of 256 tokens the cache saves a factor of 256 in products. Nothing else in this course is worth that much.
#
# Multiplications are not time, though. With one token a product is limited by reading the weights (lesson 09), and attention by reading
# the keys and values: for Llama 3.2 1B, 32 KB for each token of the text, beside 2.5 GB of weights.
#
# ## Your part in the engine
#
# The engine's `attend` is yours in spirit: it writes with your `kv_write`, and attends to what is kept. Below the story are two
# mistakes of this lesson, and two that no check of `kv_write` can find, because they are made around it. The second of these is
# nearly invisible: a whole story, with one word changed. That is why lesson 14 compares activations, and this one logits.
#
# ("The logits are equal to the bit" under a wrong text is no slip: logits are compared for the story computed in *one* step, and
# some mistakes need a second step to show.)

# %% tags=["nbval-ignore-output"]
show_engine("15")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - An earlier token never sees a later one. So its keys and values never change, and can be kept.
# - Keep K and V of every layer, K after RoPE. Queries are used once.
# - Prefill and decode are the same code, with many queries and with one.
# - Write first, then attend: the new token reads itself. The length grows once a step, not once a layer.
# - Going back is free: set the length back.
# - The cache trades arithmetic for memory: 32,768 bytes a token at 1B sizes, and someone has to find room for them (lesson 21).
#
# ## To think about
#
# <details><summary>Two requests begin with the same 1,000 tokens. Could they share a cache?</summary>
#
# For these tokens, yes: K and V of a token depend on the tokens before it and on nothing else. Both requests read the same slots and
# write to others. That is prefix caching; with the cache cut into blocks (lesson 21) it needs a count of who uses which block.
# </details>
#
# <details><summary>Could a cache keep the tokens in the middle of a text, if a token before them is changed?</summary>
#
# No. From layer 1 on, the key of every later token has been computed from a stream that holds what attention read from the changed one.
# A cache is good up to the first token that differs, and not beyond.
# </details>
#
# <details><summary>Why not keep the keys before RoPE, and rotate all of them in each step?</summary>
#
# It would work, if every key is then rotated by its own position. But it means $n$ rotations in each step where one is enough. It is
# done where positions must change later: where old tokens are dropped from the cache, and the rest move up.
# </details>
#
# ## Further reading
#
# - Pope and others, *Efficiently Scaling Transformer Inference* (2022): prefill and decode, and what each of them is limited by.
# - Shazeer, *Fast Transformer Decoding: One Write-Head is All You Need* (2019): reading the keys and values is the cost; hence
#   multi-query attention.
# - Kwon and others, *Efficient Memory Management for Large Language Model Serving with PagedAttention* (2023): the cache in pages, and
#   vLLM.
#
# **Next:** [lesson 16, Buffers used again](16_buffer_reuse.ipynb).
