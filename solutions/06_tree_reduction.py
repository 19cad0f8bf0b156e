# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 · Tree reduction
#
# **At the end you have** `block_sum`: a device function that gives every thread of a block the sum of one value a
# thread. RMSNorm, softmax and attention, in every lesson from here on, call it, and it will be yours.
#
# **About 55 minutes** · builds on 00 (threads, blocks, guards) and 04 (device memory) · one *stretch* exercise
#
# **In vLLM** the same job is done by `cub::BlockReduce` from NVIDIA's CUB library, called in
# `csrc/layernorm_kernels.cu`. What you write here is what such a library does inside, without its tuning for each
# generation of cards.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, hint, measure, np, predict, progress, reset, show, show_engine, solution
from tinyvllm_ref.device import describe

print(describe())

# %% [markdown]
# > **Fast track.** You know `__shared__`, `__syncthreads()` and why a barrier in a branch is wrong? Go to
# > [exercise 06.5](#06.5-·-block_sum,-for-every-kernel-to-come), pass it, and leave. If it fails in a way that
# > surprises you, come back.

# %% [markdown]
# ## The question
#
# Add up $n$ numbers:
#
# $$S = \sum_{i=0}^{n-1} x_i$$
#
# One worker needs $n - 1$ additions, one after the other. A GPU has thousands of workers. How much faster can it be
# done?
#
# Not $n$ times: the result depends on every number, and one addition joins only two. But additions that do not wait
# for each other can happen at the same time. Pair the numbers up and add all pairs at once: half as many are left. Do
# it again. After $\log_2 n$ **rounds** one number is left, and it is the sum. Here are eight numbers:
#
# | | | | | | | | |
# |---|---|---|---|---|---|---|---|
# | **3** | 1 | **4** | 1 | **5** | 9 | **2** | 6 |
# | **4** | | 5 | | **14** | | 8 | |
# | **9** | | | | 22 | | | |
# | **31** | | | | | | | |
#
# A row is what one round leaves; the cells in bold are those whose thread adds next. Seven additions, as before, in three rounds instead of seven steps. For 1,024 numbers it is 10 rounds instead of
# 1,023 steps. This is a **tree reduction**. It relies on addition being associative,
# $(a + b) + c = a + (b + c)$. For real numbers that is so; for `float` it is so up to rounding, and the checks below
# allow for it.
#
# The whole idea in NumPy, for a number of values that is a power of two:


# %%
def tree_sum(values):
    cell = np.array(values, np.float32)
    stride = 1
    while stride < len(cell):
        cell[:: 2 * stride] += cell[stride :: 2 * stride]  # all additions of one round
        stride *= 2
    return cell[0]


tree_sum([3, 1, 4, 1, 5, 9, 2, 6])

# %% [markdown]
# ## Why not simply `sum += x[i]`?
#
# Every thread could add its element to one variable in global memory. Here is that kernel. Read the one line that
# matters, guess what comes out for 64 ones, and run the cell.

# %% tags=["nbval-ignore-output"]
racy = cp.RawKernel(r"""
extern "C" __global__ void racy(const float* x, float* sum, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) *sum += x[i];
}
""", "racy")

ones, sum_of_ones = cp.ones(64, np.float32), cp.zeros(1, np.float32)
try:
    racy((1,), (64,), (ones, sum_of_ones, np.int32(64)))
    print("the sum of 64 ones:", float(sum_of_ones[0]))
except Exception as error:
    print(type(error).__name__ + ":", error)

# %% [markdown]
# `*sum += x[i]` looks like one step. It is three: read `*sum`, add, write it back. If two threads read the same old
# value, both add to it, both write, and one addition is lost. This is a **data race**: two threads use the same place,
# at least one writes, and nothing says who comes first. On a card you get some number, often 1, with no message. The
# emulation that this course runs on without a GPU watches every access, stops, and names both sides; read its
# message once more: it gives the array, the two threads and the line.
# (`__syncwarp`, which it names too, is a barrier for the 32 threads of one warp. You need none here.)
#
# `atomicAdd` would make it right: it does the three steps in one, and threads that meet wait in line. Thousands of
# threads in one line are slow. A tree needs no line: in each round, every cell has one owner.
#
# ## What a block has to offer
#
# Two things make a tree possible within a block of threads.
#
# **Shared memory.** A small, fast memory on the chip (48 KiB a block, unless you ask for more) that all threads of one
# block see, and no other block. A kernel declares it with `extern __shared__ float cell[];`, and the launch says how
# many bytes: `shared_mem=4 * threads`. It begins with *whatever was there before*.
#
# **A barrier.** `__syncthreads()` holds every thread of the block until all of them have come to it. What was written
# before the barrier can be read after it. Between two barriers you may assume nothing about who is ahead: threads run
# in **warps** of 32, and the warps take turns as the hardware likes.
#
# So a round is: those who have something to add add; then *all* threads meet at the barrier. Three rules follow, and
# nearly every wrong reduction breaks one of them:
#
# 1. Between two barriers, a cell that one thread writes is touched by no other thread.
# 2. Every thread of the block passes every barrier. Never put one in a branch that some threads skip.
# 3. Every cell that will be read has been written, also by threads whose element does not exist.

# %% [markdown]
# ## 06.1 · A tree with modulo
#
# Begin with the tree of eight numbers above, as it stands. Each block sums `blockDim.x` elements (a power of two here), the last block
# perhaps fewer, and stores its sum in `out[blockIdx.x]`. In the round with stride `s`, thread `t` adds `cell[t + s]`
# to `cell[t]` if `t` is a multiple of `2 * s`.
#
# The kernel is launched with `shared_mem = 4 * blockDim.x` bytes. You write what the `TODO` asks for, in place of the
# line under it. (A loop and `a ? b : c` in C++: see "C for Python readers" in lesson 00.)
#
# What you put into the cell that begins with `# Exercise 06.1` is what the check runs, by itself, on inputs of its own.

# %%
# Exercise 06.1 - a tree with modulo
sum_modulo = cp.RawKernel(r"""
extern "C" __global__ void sum_modulo(const float* x, float* out, int n) {
    extern __shared__ float cell[];
    int t = threadIdx.x;                          // this thread's number, and its cell
    int i = blockIdx.x * blockDim.x + t;          // its element of x
    // BEGIN SOLUTION (6 lines): fill the cell of every thread, then add in rounds with s = 1, 2, 4, ...
    cell[t] = i < n ? x[i] : 0.0f;
    __syncthreads();
    for (int s = 1; s < blockDim.x; s *= 2) {
        if (t % (2 * s) == 0) cell[t] += cell[t + s];
        __syncthreads();
    }
    // STUB cell[t] = 0.0f;  // replace this line
    // END SOLUTION
    if (t == 0) out[blockIdx.x] = cell[0];        // x: (n,), out: (blocks,)
}
""", "sum_modulo")

# %%
check("06.1", sum_modulo)

# %% [markdown]
# A check that fails shows the smallest case that went wrong, and often says what you assumed. `hint("06.1")` asks you
# a question about that case; called again it goes further. Hints cost nothing.
#
# Below is the tree of *your* kernel, drawn from the accesses of its run on 16 numbers: who read what, round by round.

# %% tags=["nbval-ignore-output"]
show("06.1")

# %% [markdown]
# ## 06.2 · Halves instead of modulo
#
# Look at the picture again: in the last rounds the few threads that still add are far apart. Threads run in warps of
# 32, and a warp takes a turn if *any* of its threads has something to do; the others of the warp wait. Busy threads
# that are spread over many warps keep all these warps busy.
#
# So let the busy threads be neighbours. Start with the largest stride, half of the block: thread `t` adds
# `cell[t + s]` if `t < s`. Then halve `s`. The additions are as many, the rounds are as many; only who does them
# changes.

# %%
# Exercise 06.2 - halves instead of modulo
sum_halves = cp.RawKernel(r"""
extern "C" __global__ void sum_halves(const float* x, float* out, int n) {
    extern __shared__ float cell[];
    int t = threadIdx.x;
    int i = blockIdx.x * blockDim.x + t;
    cell[t] = i < n ? x[i] : 0.0f;
    __syncthreads();
    // BEGIN SOLUTION (4 lines): rounds with s = blockDim.x / 2, then half of that, down to 1
    for (int s = blockDim.x / 2; s > 0; s /= 2) {
        if (t < s) cell[t] += cell[t + s];
        __syncthreads();
    }
    // END SOLUTION
    if (t == 0) out[blockIdx.x] = cell[0];
}
""", "sum_halves")

# %%
check("06.2", sum_halves)

# %% tags=["nbval-ignore-output"]
show("06.2")

# %% [markdown]
# **Bank conflicts, in a paragraph.** Shared memory is cut into 32 banks of 4-byte words: word $k$ lies in bank
# $k \bmod 32$. In one turn each bank serves one word to a warp. If two threads of a warp want *different* words of the
# same bank, the access takes another turn. Neighbouring threads that read neighbouring words never meet in a bank, and
# that is what both of your trees do within a warp. A third tree that people write, `cell[2 * s * t]`, packs the busy
# threads as 06.2 does but spreads their *words*: with `s = 16` all of them lie in one bank.
#
# **Occupancy, in a paragraph.** A streaming multiprocessor (SM) keeps many warps at hand and switches to another one
# whenever a warp waits for memory. How many it can keep depends on the registers and the shared memory that each block
# takes. A block that asked for all 48 KiB would leave room for few others; `4 * blockDim.x` bytes are next to nothing.

# %% [markdown]
# ## 06.3 · Any length, any block
#
# A row of the model's activations has 2,048 numbers, or 576, or any other count, and a block has at most 1,024
# threads. Two things must give.
#
# - **Any length:** before the tree, each thread walks along the row in steps of `blockDim.x` and adds up what it meets,
#   in a variable of its own. No barrier is needed for that: nobody shares anything yet.
# - **Any block size:** with an odd number of cells, the middle one has no partner and stays for the next round. With
#   `active` cells left, `half = (active + 1) / 2` of them go on (an integer division, which rounds down). Five cells
#   3, 1, 4, 1, 5: `half` is 3, cell 0 gets cell 3, cell 1 gets cell 4, cell 2 has no partner, and 4, 6, 4 are left.
#
# One block sums one row: `x` is `(rows, n)`, `out` is `(rows,)`.

# %%
# Exercise 06.3 - any length, any block
sum_rows = cp.RawKernel(r"""
extern "C" __global__ void sum_rows(const float* x, float* out, int n) {
    extern __shared__ float cell[];
    int t = threadIdx.x;
    const float* row = x + (size_t)blockIdx.x * n;    // this block's row
    // BEGIN SOLUTION (10 lines): this thread's elements into its cell; then a tree for any blockDim.x
    float sum = 0.0f;
    for (int i = t; i < n; i += blockDim.x) sum += row[i];
    cell[t] = sum;
    __syncthreads();
    for (int active = blockDim.x; active > 1;) {
        int half = (active + 1) / 2;
        if (t + half < active) cell[t] += cell[t + half];
        __syncthreads();
        active = half;
    }
    // STUB cell[t] = 0.0f;  // replace this line
    // END SOLUTION
    if (t == 0) out[blockIdx.x] = cell[0];
}
""", "sum_rows")

# %%
check("06.3", sum_rows)

# %% [markdown]
# ## 06.4 · How busy are the warps?
#
# Take one block of 1,024 threads: 32 warps. For each round, count the warps in which at least one thread adds; then
# add these counts up over the 10 rounds. Do it for the tree with modulo, and for the one with halves.
#
# Write down what you expect *before* you measure. Any number gets the credit; it is the surprise that teaches.

# %%
# Exercise 06.4 - how busy are the warps?
# BEGIN SOLUTION (2 lines): two numbers
modulo = 191
halves = 36
# STUB modulo = None
# STUB halves = None
# END SOLUTION
predict("06.4", modulo=modulo, halves=halves)

# %% tags=["nbval-ignore-output"]
measure("06.4")

# %% tags=["nbval-ignore-output"]
measure("06.1", "06.2")

# %% [markdown]
# Both kernels ask global memory for the same bytes, and pass the same barriers. What differs is how often a warp goes to
# shared memory: that is the count that you predicted, times three (two reads and a write an addition), and the filling.

# %% [markdown]
# ## 06.5 · `block_sum`, for every kernel to come
#
# A kernel seldom wants a sum for its own sake: RMSNorm needs it to divide *every* element of a row. So the last step
# is a **device function** that any kernel can call, and that gives the sum to **all** threads.
#
# ```c
# float total = block_sum(my_value, scratch);    // every thread of the block calls it
# ```
#
# `scratch` is shared memory of `blockDim.x` floats, which the kernel provides. The block may have any size. And the
# function must be **safe to call twice in a row with the same scratch**: think of the fastest thread, which is back
# with its next value while the slowest has not even read the first sum.
#
# The answer is a *string*: it is pasted in front of kernels.

# %%
# Exercise 06.5 - block_sum, for every kernel to come
BLOCK_SUM_CUDA = r"""
__device__ __forceinline__ float block_sum(float value, float* scratch) {
    int t = threadIdx.x;
    // BEGIN SOLUTION (11 lines): the tree of 06.3 on scratch; then the sum for every thread, safely
    scratch[t] = value;
    __syncthreads();
    for (int active = blockDim.x; active > 1;) {
        int half = (active + 1) / 2;
        if (t + half < active) scratch[t] += scratch[t + half];
        __syncthreads();
        active = half;
    }
    float total = scratch[0];
    __syncthreads();  // nobody writes scratch again before all have read the sum
    return total;
    // STUB return 0.0f;  // replace this line
    // END SOLUTION
}
"""

# %%
check("06.5", BLOCK_SUM_CUDA)

# %% [markdown]
# ## 06.6 · Finish with shuffles *(stretch)*
#
# When 32 cells are left, one warp does all the work, and its threads need neither shared memory nor a barrier to talk
# to each other: `__shfl_down_sync(0xffffffff, v, k)` hands a thread the `v` of the thread `k` further on in its warp,
# from register to register. The first argument names the threads that take part, a bit each; all of them must call it.
#
# Blocks here have a multiple of 32 threads, a power of two. Use the tree of 06.2 until 32 cells are left; then let the
# first warp finish. The check counts your barriers.

# %%
# Exercise 06.6 - finish with shuffles
sum_shuffle = cp.RawKernel(r"""
extern "C" __global__ void sum_shuffle(const float* x, float* out, int n) {
    extern __shared__ float cell[];
    int t = threadIdx.x;
    int i = blockIdx.x * blockDim.x + t;
    cell[t] = i < n ? x[i] : 0.0f;
    __syncthreads();
    // BEGIN SOLUTION (9 lines): rounds down to s = 32; then the first warp shuffles, and thread 0 stores the sum
    for (int s = blockDim.x / 2; s >= 32; s /= 2) {
        if (t < s) cell[t] += cell[t + s];
        __syncthreads();
    }
    if (t < 32) {
        float sum = cell[t];
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
        if (t == 0) out[blockIdx.x] = sum;
    }
    // STUB if (t == 0) out[blockIdx.x] = 0.0f;  // replace this line
    // END SOLUTION
}
""", "sum_shuffle")

# %%
check("06.6", sum_shuffle)

# %% [markdown]
# ## Your part in the engine
#
# Below, the engine writes a story twice: with your `block_sum` inside its RMSNorm, and with the reference's. Then it
# shows what two of this lesson's mistakes would have done to the text. All of it is computed when you run the cell.

# %% tags=["nbval-ignore-output"]
show_engine("06")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - A tree turns $n - 1$ steps into $\log_2 n$ rounds, because additions that do not wait for each other share a round.
# - Between two barriers, a cell that one thread writes is nobody else's. All threads of the block pass every barrier.
# - Shared memory begins with rubbish: every cell that will be read must be written.
# - Busy threads should be neighbours: the hardware works in warps of 32.
# - The order of additions decides the last bits of a `float` sum. It is fixed here by the block's size alone, which is
#   why your engine gives the same tokens each time.
#
# ## To think about
#
# <details><summary>A block sums 1,024 numbers in 10 rounds. How would you sum a million?</summary>
#
# Each thread first adds a thousand numbers of its own in a loop, which needs no barrier at all; then one tree. That is
# 06.3. To use the whole card, let many blocks do this, each for a part; a second, small launch sums their results.
# </details>
#
# <details><summary>Why can a block not wait for another block with a barrier?</summary>
#
# There may be more blocks than the card can hold at once. A block that waits keeps its place, and the one it waits for
# may never get one. Blocks must be able to run in any order, also one after the other.
# </details>
#
# <details><summary>Which of the two is more exact: one thread that adds a million floats in a row, or the tree?</summary>
#
# The tree. In a row, the running sum soon is large against each new number, and each addition loses low bits: the
# error grows like $n$. In a tree the two numbers that are added are of similar size, and each number takes part in
# $\log_2 n$ additions only: the error grows like $\log n$.
# </details>
#
# ## Further reading
#
# - Mark Harris, *Optimizing Parallel Reduction in CUDA* (NVIDIA): seven kernels, each faster than the one before.
# - NVIDIA, *CUDA C++ Programming Guide*: "Synchronization Functions" and "Warp Shuffle Functions".
# - Nicholas Higham, *The Accuracy of Floating Point Summation* (SIAM J. Sci. Comput., 1993): how large the error is.
#
# **Next:** [lesson 07, RMSNorm](07_rms_norm.ipynb).
