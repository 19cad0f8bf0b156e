# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · The embedding kernel
#
# **At the end you have** `embedding`: the first kernel that a token meets in your engine. It turns token ids into rows of
# numbers. There is hardly any arithmetic in it; all of it is about *who touches which address*, and that decides how fast
# most kernels of this course are.
#
# **About 60 minutes** · builds on 00 (threads, blocks, guards), 02 (BF16) and 04 (device memory)
#
# **In vLLM** the same job is done by `VocabParallelEmbedding`
# (`vllm/model_executor/layers/vocab_parallel_embedding.py`). It calls PyTorch's embedding, and adds what is needed when the
# table is cut up over several GPUs: each looks up the rows that it has. Rows stay in BF16 there; in our engine the sums that
# follow are float32, so they are widened here.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, display_figure, earlier, hint, measure, np, predict, progress, reset
from tinyvllm_ref.course import show, show_engine, solution
from tinyvllm_ref.device import describe

print(describe())
BF16_CUDA = earlier("BF16_CUDA")

# %% [markdown]
# > **Fast track.** You know what coalescing is, and why a `float4` wants an address that is a multiple of 16? Go to
# > [exercise 05.5](#05.5-·-Four-at-a-time:-the-part), pass it, and leave. If it fails in a way that surprises you, come back.

# %% [markdown]
# ## The question
#
# A token is a number, such as 713. A model computes with vectors. So the first thing that happens to a token is that its
# vector is looked up, in a table $E$ with a row for each token of the vocabulary, $V$ rows of $H$ columns:
#
# $$x_t = E[\,\text{id}_t\,]$$
#
# The table is learned, like all other weights. For Llama 3.2 1B it has $V = 128{,}256$ rows of $H = 2{,}048$ columns, in
# BF16: half a gigabyte, of which a step reads the few rows that it needs. An example by hand, with $V = 4$ and $H = 3$:
#
# | id | row |
# |---|---|
# | 0 | 0.5 1 2 |
# | 1 | 3 4 5 |
# | 2 | 6 7 8 |
# | 3 | 9 10 11 |
#
# The ids 2 0 2 give three rows: 6 7 8, then 0.5 1 2, then 6 7 8 again. In NumPy that is one pair of brackets:


# %%
def embedding_in_numpy(ids, table):
    """ids: (T,), table: (V, H) bfloat16 bits -> (T, H) float32"""
    rows = table[ids]
    return (rows.astype(np.uint32) << 16).view(np.float32)  # widen BF16, as in lesson 02


bits = (np.array([[0.5, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], np.float32).view(np.uint32) >> 16).astype(np.uint16)
embedding_in_numpy(np.array([2, 0, 2]), bits)

# %% [markdown]
# ## 05.1 · One thread, one element
#
# The output has $T \times H$ elements. A natural way to share them out: **one block a token, one thread a column**. So the
# launch is `gather_one((T,), (H,), ...)`, and inside, `blockIdx.x` is the token and `threadIdx.x` the column.
#
# On the device an array is one long row of elements. A table with `hidden` columns has its row $r$ at element
# $r \cdot \text{hidden}$. For the output and for the table it is the same rule, only the row is another.
#
# Two things to know. `BF16_CUDA` in front of the kernel is the text from lesson 02. It brings the type `bf16`, which is an
# `unsigned short` that holds the 16 bits, and the function `float bf16_to_float(bf16 bits)`. And `(size_t)` in front of a row's number makes the multiplication one of 64 bits: an `int` ends at 2.1
# billion, and tables get that large.

# %%
# Exercise 05.1 - one thread, one element
gather_one = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void gather_one(const int* ids, const bf16* table, float* out, int hidden) {
    // ids: (T,), table: (V, hidden), out: (T, hidden)
    int c = threadIdx.x;
    // BEGIN SOLUTION (2 lines): where the table's row begins; its column c into this token's row of out
    const bf16* row = table + (size_t)ids[blockIdx.x] * hidden;
    out[(size_t)blockIdx.x * hidden + c] = bf16_to_float(row[c]);
    // END SOLUTION
}
""", "gather_one")

# %%
check("05.1", gather_one)

# %% [markdown]
# ## 05.2 · Two elements a thread
#
# Now with the model's real width: $H = 2{,}048$. One thread a column asks for a block of 2,048 threads. Try it:

# %% tags=["nbval-ignore-output"]
nothing = cp.RawKernel('extern "C" __global__ void nothing() { }', "nothing")
try:
    nothing((1,), (2048,), ())
except Exception as error:
    print(type(error).__name__ + ":", error)

# %% [markdown]
# **A block has at most 1,024 threads**, on every card. It is a good trap to fall into once: small tests pass, and the first
# real model does not.
#
# So a thread must do more than one element. Begin with two. The exercise launches blocks of at least $H / 2$ threads, rounded
# up; you decide which two columns a thread takes. Every column must be there once. $H$ may be odd.

# %%
# Exercise 05.2 - two elements a thread
gather_two = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void gather_two(const int* ids, const bf16* table, float* out, int hidden) {
    // BEGIN SOLUTION (5 lines): find both rows; then up to two columns for each thread
    const bf16* row = table + (size_t)ids[blockIdx.x] * hidden;
    float* to = out + (size_t)blockIdx.x * hidden;
    int first = threadIdx.x, second = threadIdx.x + blockDim.x;
    if (first < hidden) to[first] = bf16_to_float(row[first]);
    if (second < hidden) to[second] = bf16_to_float(row[second]);
    // END SOLUTION
}
""", "gather_two")

# %%
check("05.2", gather_two)

# %% [markdown]
# ## What really moves: sectors
#
# Did you take the columns $t$ and $t + \text{blockDim}$, or $2t$ and $2t + 1$? Both are right, and one of them moves nearly twice as
# much (the table after 05.5 shows yours). To see why we must look at how memory answers.
#
# - Threads run in **warps** of 32 (lesson 04), and a warp runs one instruction at a time. So a load is not 32 loads: it is one
#   **request** with 32 addresses.
# - Memory does not deliver bytes. It delivers **sectors**: 32 bytes that begin at a multiple of 32. Of whatever sectors the 32
#   addresses of a request touch, each is moved, whole.
#
# If the 32 threads ask for 32 neighbouring BF16 numbers, that is 64 bytes: 2 sectors, every byte wanted. If their addresses are
# far apart, it can be 32 sectors, 1,024 bytes moved for 64 that were wanted. Requests whose addresses lie together are called
# **coalesced**.
#
# Here are two ways to share out a row of 256 columns among the 32 threads of one warp, 8 columns a thread:
#
# ```c
# for (int c = t; c < n; c += 32) ...             // neighbours take neighbours
# for (int c = 8 * t; c < 8 * t + 8; c++) ...     // each thread its own piece
# ```
#
# The second looks tidier, and on a CPU it would be the right one. The pictures show the *first* request of each:

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course.exercises.lesson_05_embedding_kernel import draw_walk

print("Neighbours take neighbours:")
display_figure(draw_walk("for (int c = threadIdx.x; c < n; c += 32) to[c] = widen(row[c]);"))
print("Each thread its own piece:")
display_figure(draw_walk("for (int c = 8 * threadIdx.x; c < 8 * threadIdx.x + 8; c++) to[c] = widen(row[c]);"))

# %% [markdown]
# ## 05.3 · How many sectors move?
#
# Now a whole row of Llama 3.2 1B: 2,048 columns of 2 bytes, one block of 256 threads, so 8 columns a thread again. Count, over
# *all* requests of all 8 warps, the sectors that loading the row touches; a sector that two requests touch counts twice. Do it
# for both ways.
#
# Write down what you expect, then measure. Any number gets the credit.

# %%
# Exercise 05.3 - how many sectors move?
# BEGIN SOLUTION (2 lines): two numbers
neighbours = 128
pieces = 1024
# STUB neighbours = None
# STUB pieces = None
# END SOLUTION
predict("05.3", neighbours=neighbours, pieces=pieces)

# %% tags=["nbval-ignore-output"]
measure("05.3")

# %% [markdown]
# That was loading. Storing has the same rule, and the stores here are floats, so they touch twice as many sectors.
#
# Now the choice of 05.2 has an answer. With $2t$ and $2t + 1$ the threads of a warp ask for every second element, and come back for the
# others: each of the two requests touches all sectors of a stretch of 64 columns, and so each sector is moved twice. With $t$ and
# $t + \text{blockDim}$ each request is for 32 neighbours, and each sector moves once.
#
# ## 05.4 · Any width, any id
#
# You know now how a thread should go on: not to its neighbour's column, but by `blockDim.x`. A **strided loop** does that for
# any width and any block, and needs no guard besides its own condition.
#
# And one thing more: an id that is no row of the table. It should never come, and one day it does (a tokenizer with a token more
# than the model). A kernel that reads at row $V$ reads whatever lies behind the table. The contract of this part is: **the row of
# an unknown id is NaN**, which spreads through everything that is computed from it and can not be overlooked.
#
# "Is a row" means two comparisons, `id >= 0 && id < vocab`. (Python's `0 <= id < vocab` compiles in C and means something else: the
# first comparison gives 0 or 1, and that is compared with `vocab`.) In this check and the next, `out` is full of 77 before your kernel
# runs: where a report says "got 77", nothing was written.

# %%
# Exercise 05.4 - any width, any id
gather = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void gather(const int* ids, const bf16* table, float* out, int vocab, int hidden) {
    float nan = __uint_as_float(0x7fc00000u);      // the bits of a NaN
    int id = ids[blockIdx.x];
    float* to = out + (size_t)blockIdx.x * hidden;
    // BEGIN SOLUTION (4 lines): row `id` into `to`, in a strided loop; NaN if there is no such row
    bool known = id >= 0 && id < vocab;
    const bf16* row = table + (size_t)id * hidden;
    for (int c = threadIdx.x; c < hidden; c += blockDim.x)
        to[c] = known ? bf16_to_float(row[c]) : nan;
    // END SOLUTION
}
""", "gather")

# %%
check("05.4", gather)

# %% [markdown]
# Your kernel's first load of the table, with 32 threads:

# %% tags=["nbval-ignore-output"]
show("05.4")

# %% [markdown]
# ## 05.5 · Four at a time: the part
#
# All bytes that move are wanted now. What is left to save is *instructions*: each load fetches 2 bytes and each store writes 4,
# and a thread can move up to **16 bytes** with one. C++ has types for that: `uint2` is two 32-bit numbers `.x` and `.y` (8
# bytes), `float4` is four floats (16 bytes).
#
# Our floats are twice as wide as the BF16 numbers they come from, so with **four elements at a time** a thread loads 8 bytes and
# stores 16, and on both sides neighbours stay neighbours:
#
# ```c
# uint2 raw = ((const uint2*)row)[v];                     // elements 4v to 4v + 3, as two words
# ((float4*)to)[v] = make_float4(..., ..., ..., ...);     // the same elements, as floats
# ```
#
# The casts say: take this address for one of `uint2`s; then `[v]` counts in steps of 8 bytes. In a word, the element that comes
# first in memory is the *lower* half: `raw.x & 0xffff` is element $4v$, and `raw.x >> 16` is element $4v + 1$.
#
# Two things can go wrong, and the check knows both.
#
# - **Alignment.** A load of 8 bytes must begin at a multiple of 8 bytes; a store of 16, at a multiple of 16. With a width of 33, row
#   1 begins at byte 66. A pointer tells you: `(size_t)row % 8 == 0`. Where a row does not fit, use no vectors.
# - **The tail.** If $H$ is no multiple of 4, columns are left after the last whole vector: do them one by one. (After *no* vectors,
#   that is all of them, so one loop serves both.)
#
# This is the part that the engine calls: `embedding(ids, table, out)`, with `ids` (T,) int32, `table` (V, H) BF16 and `out` (T, H)
# float32. It returns `out`. You also choose the number of threads: right for every width (1 and 4,100 too: never 0, never above 1,024),
# and at least 64 for a row of 2,048 columns or more, so that more than one warp works on it.

# %%
# Exercise 05.5 - four at a time: the part
gather_rows = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void gather_rows(const int* ids, const bf16* table, float* out, int vocab, int hidden) {
    float nan = __uint_as_float(0x7fc00000u);
    int id = ids[blockIdx.x];
    float* to = out + (size_t)blockIdx.x * hidden;
    if (id < 0 || id >= vocab) {
        for (int c = threadIdx.x; c < hidden; c += blockDim.x) to[c] = nan;
        return;
    }
    const bf16* row = table + (size_t)id * hidden;
    // BEGIN SOLUTION (7 lines): how many vectors; a loop over these; a loop over the columns that are left
    int vectors = (size_t)row % 8 == 0 && (size_t)to % 16 == 0 ? hidden / 4 : 0;
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        uint2 raw = ((const uint2*)row)[v];
        ((float4*)to)[v] = make_float4(bf16_to_float(raw.x & 0xffff), bf16_to_float(raw.x >> 16),
                                       bf16_to_float(raw.y & 0xffff), bf16_to_float(raw.y >> 16));
    }
    for (int c = 4 * vectors + threadIdx.x; c < hidden; c += blockDim.x) to[c] = bf16_to_float(row[c]);
    // END SOLUTION
}
""", "gather_rows")


def embedding(ids, table, out):
    """Rows of `table` (V, H) bf16 by `ids` (T,) int32, into `out` (T, H) float32."""
    tokens, (vocab, hidden) = len(ids), table.shape
    # BEGIN SOLUTION (1 line): how many threads a block gets
    threads = min(256, max(32, hidden // 4))
    # STUB threads = 32
    # END SOLUTION
    gather_rows((tokens,), (threads,), (ids, table, out, np.int32(vocab), np.int32(hidden)))
    return out

# %%
check("05.5", embedding)

# %% tags=["nbval-ignore-output"]
show("05.5")

# %% tags=["nbval-ignore-output"]
measure("05.2", "05.4", "05.5")

# %% [markdown]
# Without a card you see counts. 05.4 and 05.5 move hardly more than what is needed (what is over: each warp reads the token's id for
# itself), and so does 05.2 if you took the columns $t$ and $t + \text{blockDim}$. If you took $2t$ and $2t + 1$, you see about twice as
# many sectors there: each is moved for the even columns and once more for the odd ones. 05.5 makes far fewer accesses than the others.
#
# With a card you see times. Measured once on an NVIDIA H200, for 8,192 tokens and 2,048 columns (GB/s of bytes that are needed; a plain
# copy reached 3,715 GB/s):
#
# | | time | |
# |---|---|---|
# | each thread its own piece of 8 columns | 161 µs | 624 GB/s |
# | strided loop, 256 threads | 55 µs | 1,836 GB/s |
# | strided loop, 1,024 threads | 70 µs | 1,436 GB/s |
# | four at a time, 256 threads | 38 µs | 2,685 GB/s |
# | eight at a time (loads of 16 bytes, two `float4` stores) | 38 µs | 2,655 GB/s |
# | eight at a time, and eight single stores | 137 µs | 735 GB/s |
#
# *(driver 580.159, CuPy 14.2, median of 100 launches. The same sectors in the first row as in the second, asked for eight times:
# the caches soften it to a factor of three.)*

# %% [markdown]
# ## Your part in the engine
#
# The engine writes a story with your `embedding` and with the reference's, and then with two mistakes of this lesson. Look at their
# logit errors as well as at the text: one mistake is loud, the other nearly silent.

# %% tags=["nbval-ignore-output"]
show_engine("05")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - A block has at most 1,024 threads. A strided loop makes a kernel independent of it.
# - Memory moves in sectors of 32 bytes, a warp asks with one request: neighbours should take neighbours.
# - One instruction moves up to 16 bytes a thread, where the address is a multiple of the size. Look at both sides, the load's and the
#   store's; and do not forget the tail.
# - A mistake that is too small to change the text is still a mistake. The check compares numbers because text forgives.
#
# ## To think about
#
# <details><summary>In the table above, loads of 16 bytes with eight single stores are slower than no vectors at all. Why?</summary>
#
# With eight elements a thread, the first store of thread 0 goes to float 0 and that of thread 1 to float 8, 32 bytes further on. So
# one request touches 32 sectors and fills an eighth of each, and eight such requests follow each other. The loads became better and
# the stores much worse: pieces, as in 05.3.
# </details>
#
# <details><summary>Two tokens of a batch have the same id. Is their row read from memory twice?</summary>
#
# By the kernel, yes: two blocks load it. Whether it comes from memory twice depends on the cache (L2), which keeps what was read a
# moment ago. The counts of this course are what the kernel *asks for*.
# </details>
#
# <details><summary>Could one launch threads for the output as one long array, T x H elements, and forget about rows?</summary>
#
# Yes: element $i$ belongs to token $i / H$ and column $i \bmod H$, two integer divisions. The reads and writes are as well coalesced,
# and no thread is idle even where $H$ is small. But each thread then looks up the id for itself, and a vector may straddle two rows.
# A block a row is simpler here.
# </details>
#
# ## Further reading
#
# - NVIDIA, *CUDA C++ Best Practices Guide*: "Coalesced Access to Global Memory".
# - NVIDIA's developer blog, Justin Luitjens, *CUDA Pro Tip: Increase Performance with Vectorized Memory Access* (2013).
# - Press and Wolf, *Using the Output Embedding to Improve Language Models* (2017): why the same table often serves at the end of the
#   model too, as it does in the model of our stories.
#
# **Next:** [lesson 06, Tree reduction](06_tree_reduction.ipynb).
