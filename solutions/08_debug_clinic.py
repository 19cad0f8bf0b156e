# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 · The debug clinic
#
# **At the end you have** mended six kernels, each with one fault of the kind that everybody plants sooner or later. You can read a
# sanitizer's report, you know which faults it finds and which it can not, and you know a mend that heals from one that hides.
#
# **About 50 minutes** · builds on 00, 05 and 06 (guards, barriers, shared memory) · makes no part of the engine
#
# **In vLLM** a faulty kernel shows itself as `an illegal memory access was encountered`, often at some later, innocent call. Its developers look for it with
# core dumps of the card and with NVIDIA's `compute-sanitizer` (issue 11340: out-of-bounds reads in an attention kernel). What differs: there the fault hides in a
# whole server. Here it is cut out for you.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref import emulation
from tinyvllm_ref.course import check, cp, examine, hint, np, progress, reset, show_engine, solution
from tinyvllm_ref.device import describe

print(describe())

# %% [markdown]
# > **Fast track.** Mend [08.4](#08.4-·-What-was-there-before), [08.5](#08.5-·-Two-that-share-one-buffer) and
# > [08.6](#08.6-·-An-index-that-does-not-fit) without a hint, and leave.

# %% [markdown]
# ## The question
#
# A kernel gives a wrong number, or the right one on Mondays. A thousand threads ran, in an order that nobody recorded. Where do you look?
#
# Not at the number. A wrong sum is the *end* of a story that began with one access: a thread touched a place that it should not have
# touched, or too early. A **sanitizer** watches every access while the kernel runs, and tells you of the first one that breaks a rule. There
# are few rules, and so there are few kinds of fault:
#
# | the rule | its fault is called | in this lesson |
# |---|---|---|
# | an access lies inside its array | `OutOfBounds` | 08.1 |
# | what one thread writes and another reads is separated by a barrier | `DataRace` | 08.2, 08.5 |
# | all threads of a block pass the same barriers | `BarrierDivergence` | 08.3 |
# | what is read has been written | `UninitializedRead` | 08.4 |
# | a kernel ends | `KernelTimeout` | |
# | a number fits into its type | nothing: the values alone show it | 08.6 |
#
# ## Reading a report together
#
# Here is a kernel that doubles $n$ numbers, and a run of it on five. Its specification in NumPy is `2 * x`. Find the fault with your eyes first; it
# takes a while, and it is one character.
#
# The cell runs it in the emulation, with full checks, also if you have a card.

# %% tags=["nbval-ignore-output"]
patient = emulation.RawKernel(r"""
extern "C" __global__ void twice(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n) y[i] = 2.0f * x[i];
}
""", "twice")

five, result = emulation.asarray(np.arange(5, dtype=np.float32)), emulation.empty(5, np.float32)
try:
    with emulation.checks("full"):
        patient((1,), (32,), (five, result, np.int32(5)))
except emulation.KernelError as report:
    print(f"{type(report).__name__}: {report}")

# %% [markdown]
# Read it from the front, as one reads a diagnosis:
#
# 1. **What kind:** out of bounds. That is a rule from the table, so you know what to look for: an index and the guard in front of it.
# 2. **Which array and which element:** `x`, element 5 of 5. The name is the kernel's parameter. An element *just* behind the end is an off-by-one; one far outside is a
#    wrong stride; a negative one is an overflow or a missing left guard.
# 3. **Which thread:** block 0, thread 5. Five numbers, and thread 5 is at work: it should have been stopped.
# 4. **Which line:** the one with the guard. `i <= n` lets one thread too many through.
#
# A report of a race has *two* sides, a thread and a line each. Then the question is not "which of them is wrong", but "what should have stood between them".
#
# ## How to work here
#
# In each exercise the cell holds the faulty kernel itself. It compiles and runs, and it is wrong. What it *should* do is written above it. Then:
#
# 1. Read the kernel. Guess.
# 2. `examine("08.1")` runs what is in the cell, in the emulation, and shows the report. It counts nothing, as often as you like.
# 3. Mend the cell as little as possible; a TODO counts the lines that stand in its place at the end, most of them old. Run it, and
#    let `check` judge: values, awkward sizes, and a clean report.
#
# Beware of the mend that only silences the report. A guard that skips the work is not a cure, and neither is taking the reduction out.

# %% [markdown]
# ## 08.1 · The neighbour that is not there
#
# **It should** smooth a curve: each $y_i$ is the mean of three neighbours. Where a neighbour lies outside, the nearest element counts in its place:
#
# $$y_i = \tfrac13\left(x_{\max(i-1,\,0)} + x_i + x_{\min(i+1,\,n-1)}\right)$$
#
# For 3, 6, 9 that gives 4, 6, 8. In NumPy:

# %%
def smooth_spec(x):
    wide = np.pad(x, 1, mode="edge")
    return (wide[:-2] + wide[1:-1] + wide[2:]) / 3


smooth_spec(np.array([3.0, 6.0, 9.0]))

# %%
# Exercise 08.1 - the neighbour that is not there
smooth = cp.RawKernel(r"""
extern "C" __global__ void smooth(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    // BEGIN SOLUTION (4 lines): mend this; all of y must still be written
    if (i < n) {
        int left = i > 0 ? i - 1 : 0, right = i < n - 1 ? i + 1 : n - 1;
        y[i] = (x[left] + x[i] + x[right]) / 3.0f;
    }
    // STUB if (i < n) y[i] = (x[i - 1] + x[i] + x[i + 1]) / 3.0f;
    // END SOLUTION
}
""", "smooth")

# %% tags=["nbval-ignore-output"]
examine("08.1")

# %%
check("08.1", smooth)

# %% [markdown]
# ## 08.2 · Someone was faster
#
# **It should** turn each head (a row of `blockDim.x` numbers, even) by a quarter, *in place*: the second half, negated, comes first, and then the first half. You
# will meet this in lesson 11. For 1, 2, 3, 4 it gives -3, -4, 1, 2. One block a head, one thread a number.
#
# With heads of up to 32 this kernel may well pass every test on a card: the threads of a single warp mostly go through it together. With wider heads there are several warps, and
# nothing keeps these in step. A test that passes does not show that there is no race.

# %%
# Exercise 08.2 - someone was faster
rotate_half = cp.RawKernel(r"""
extern "C" __global__ void rotate_half(float* x) {
    extern __shared__ float head[];
    int t = threadIdx.x, half = blockDim.x / 2;
    int i = blockIdx.x * blockDim.x + t;
    // BEGIN SOLUTION (3 lines): mend this
    head[t] = x[i];
    __syncthreads();
    x[i] = t < half ? -head[t + half] : head[t - half];
    // STUB head[t] = x[i];
    // STUB x[i] = t < half ? -head[t + half] : head[t - half];
    // END SOLUTION
}
""", "rotate_half")

# %% tags=["nbval-ignore-output"]
examine("08.2")

# %%
check("08.2", rotate_half)

# %% [markdown]
# ## 08.3 · Those who never came
#
# **It should** subtract from each number the largest of its row, the first step of a softmax: one block a row of $n$ numbers, and a power of two of threads, at least $n$. For a row
# 4, 7, 5 it gives -3, 0, -2. Whoever wrote this kernel has learnt that threads without an element must stay out, and has taken it too far.

# %%
# Exercise 08.3 - those who never came
minus_max = cp.RawKernel(r"""
extern "C" __global__ void minus_max(const float* x, float* out, int n) {
    extern __shared__ float cell[];
    int t = threadIdx.x;
    // BEGIN SOLUTION (6 lines): mend this
    if (t < n) cell[t] = x[blockIdx.x * n + t];
    __syncthreads();
    for (int s = blockDim.x / 2; s > 0; s /= 2) {
        if (t < s && t + s < n) cell[t] = fmaxf(cell[t], cell[t + s]);
        __syncthreads();
    }
    // STUB if (t < n) {
    // STUB     cell[t] = x[blockIdx.x * n + t];
    // STUB     __syncthreads();
    // STUB     for (int s = blockDim.x / 2; s > 0; s /= 2) {
    // STUB         if (t < s && t + s < n) cell[t] = fmaxf(cell[t], cell[t + s]);
    // STUB         __syncthreads();
    // STUB     }
    // STUB }
    // END SOLUTION
    float most = cell[0];
    __syncthreads();    // cell is free for whatever comes next
    if (t < n) out[blockIdx.x * n + t] = x[blockIdx.x * n + t] - most;
}
""", "minus_max")

# %% tags=["nbval-ignore-output"]
examine("08.3")

# %%
check("08.3", minus_max)

# %% [markdown]
# ## 08.4 · What was there before
#
# **It should** count how often each of the 256 byte values occurs in a text: one block a text of $n$ bytes, *any* number of threads, and the counts of a block gathered in shared memory.
# `atomicAdd(&cell, 1)` reads, adds and writes in one step, so that threads that meet at one cell lose nothing; it is right here, and so is what comes after it.
#
# If a block happens to find zeros in its shared memory, all is well. The next one finds what this one left.

# %%
# Exercise 08.4 - what was there before
histogram = cp.RawKernel(r"""
extern "C" __global__ void histogram(const unsigned char* symbols, int* out, int n) {
    __shared__ int count[256];
    int t = threadIdx.x;
    // BEGIN SOLUTION (4 lines): mend this
    for (int b = t; b < 256; b += blockDim.x) count[b] = 0;
    __syncthreads();
    for (int i = t; i < n; i += blockDim.x) atomicAdd(&count[symbols[blockIdx.x * n + i]], 1);
    __syncthreads();
    // STUB for (int i = t; i < n; i += blockDim.x) atomicAdd(&count[symbols[blockIdx.x * n + i]], 1);
    // STUB __syncthreads();
    // END SOLUTION
    for (int b = t; b < 256; b += blockDim.x) out[blockIdx.x * 256 + b] = count[b];
}
""", "histogram")

# %% tags=["nbval-ignore-output"]
examine("08.4")

# %%
check("08.4", histogram)

# %% [markdown]
# ## 08.5 · Two that share one buffer
#
# **It should** be the softmax of each row, one thread a number:
#
# $$\mathrm{out}_i = \frac{e^{x_i - m}}{\sum_j e^{x_j - m}}, \qquad m = \max_j x_j$$
#
# `reduce` has been tested by itself, for maxima and for sums, and it is right. The kernel calls it twice.

# %%
# Exercise 08.5 - two that share one buffer
softmax = cp.RawKernel(r"""
__device__ float reduce(float value, float* cell, bool maximum) {
    int t = threadIdx.x;
    cell[t] = value;
    __syncthreads();
    for (int active = blockDim.x; active > 1;) {
        int half = (active + 1) / 2;
        if (t + half < active) cell[t] = maximum ? fmaxf(cell[t], cell[t + half]) : cell[t] + cell[t + half];
        __syncthreads();
        active = half;
    }
    return cell[0];
}
extern "C" __global__ void softmax(const float* x, float* out) {
    extern __shared__ float cell[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    // BEGIN SOLUTION (5 lines): mend this; leave reduce as it is
    float most = reduce(x[i], cell, true);
    __syncthreads();
    float e = expf(x[i] - most);
    float total = reduce(e, cell, false);
    out[i] = e / total;
    // STUB float most = reduce(x[i], cell, true);
    // STUB float e = expf(x[i] - most);
    // STUB float total = reduce(e, cell, false);
    // STUB out[i] = e / total;
    // END SOLUTION
}
""", "softmax")

# %% tags=["nbval-ignore-output"]
examine("08.5")

# %%
check("08.5", softmax)

# %% [markdown]
# ## 08.6 · An index that does not fit
#
# **It should** say where a token's numbers begin in a cache `[layer][slot][width]`: at $(\text{layer} \cdot \text{slots} + \text{slot}) \cdot \text{width}$, counted in elements. The result is a
# `long long`, 64 bits, and there is room for any cache.
#
# No rule of the table is broken, so a sanitizer is silent. Had the kernel *used* this index, you would have got an `OutOfBounds` far outside, with a negative element: remember this
# sign. Here you see the number itself.

# %%
# Exercise 08.6 - an index that does not fit
cache_offset = cp.RawKernel(r"""
extern "C" __global__ void cache_offset(const int* layer, const int* slot, long long* offset,
                                        int slots, int width, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    // BEGIN SOLUTION (1 line): mend this
    offset[i] = ((long long)layer[i] * slots + slot[i]) * width;
    // STUB offset[i] = (layer[i] * slots + slot[i]) * width;
    // END SOLUTION
}
""", "cache_offset")

# %% tags=["nbval-ignore-output"]
examine("08.6")

# %%
check("08.6", cache_offset)

# %% [markdown]
# ## The same on a card
#
# NVIDIA's tool is `compute-sanitizer`. It wraps a whole process, and has one tool for each kind of rule. Cut out a small program that launches your kernel, compile with line
# numbers, and give the array memory of its own, because in a pool's large block nobody knows where an array ends:
#
# ```python
# kernel = cp.RawKernel(code, "smooth", options=("-lineinfo",))
# cp.cuda.set_allocator(None)          # no pool: each array is its own allocation
# ```
# ```
# $ compute-sanitizer --tool memcheck python smooth_alone.py
# ========= Invalid __global__ read of size 4 bytes
# =========     at smooth+0xc0 in bfc45240c5cc.cubin.cu:5
# =========     by thread (0,0,0) in block (0,0,0)
# =========     Access to 0x7fbee47ffffc is out of bounds
# ```
#
# The same story as above: kind, line, thread, and an address instead of the array's name. These are the errors that each tool counted in this lesson's six faulty kernels
# (`benchmarks/sanitizers.md`: NVIDIA H200, compute-sanitizer 2025.3.1, each kernel on three of its cases, without the pool), beside what the emulation calls them:
#
# | kernel | memcheck | racecheck | initcheck | synccheck | the emulation |
# |---|---|---|---|---|---|
# | 08.1 | 3 | 0 | 0 | 0 | `OutOfBounds` |
# | 08.2 | 0 | 3 | 0 | 0 | `DataRace` |
# | 08.3 | does not end | does not end | does not end | does not end | `BarrierDivergence` |
# | 08.4 | 0 | 0 | 0 | 0 | `UninitializedRead` |
# | 08.5 | 0 | 2 | 0 | 0 | `DataRace` |
# | 08.6 | 0 | 0 | 0 | 0 | |
#
# Two rows deserve a word. initcheck watches the *global* memory only, so that the rubbish in shared memory of 08.4 passes. And 08.3 hangs: its threads wait for each other at different
# barriers, with the tools (each was stopped after a minute) and without. Had the skipping threads simply *returned*, this card would have let the others go on, and CUDA's rules forbid that all
# the same.
#
# So use both. The emulation also helps you while you own a card: `emulation.RawKernel`, as in the first cell, takes the same text, and a fault there costs you neither your
# notebook's process nor the arrays on the card. (That is why `check` tries an answer in the emulation before it launches anything on your card.) What it can not show is anything about speed.
#
# ## Your engine so far
#
# No part was made today. Here is the engine with what you have.

# %% tags=["nbval-ignore-output"]
show_engine("08")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - Look for the first access that breaks a rule, not at the wrong number that came of it.
# - A report names the kind, the array, the element, the thread and the line. A race has two sides, and what is missing stands between them.
# - A launch stops at its first fault. Mend it, and look again: the other end may have it too.
# - A barrier belongs where *all* threads pass, and between the last use of a buffer and its next filling.
# - Silence proves little: sanitizers see accesses, not values. Test odd sizes, negative numbers, and indices beyond 2,147,483,647.
#
# ## To think about
#
# <details><summary>A kernel gives the right result in a thousand runs on a card. Can it have a data race?</summary>
#
# Yes. Warps usually start in order and a small block may even run as one warp; another card, another compiler or a busy SM changes that. A race is a property of the program, not
# of a run, which is why a tool that checks the *order* of accesses finds it in one run, and a test of values may never.
# </details>
#
# <details><summary>You add a printf to find a race, and the fault is gone. What happened?</summary>
#
# printf takes time and a little order: threads that met before now miss each other. Nothing was mended. Take the printf out and use a tool that does not depend on timing.
# </details>
#
# <details><summary>Why does the emulation stop at the first fault, instead of listing all?</summary>
#
# After a first fault the rest of a run means little: a value read from outside may become an index, and all that follows are consequences. One fault, its cause, one mend, and again.
# </details>
#
# ## Further reading
#
# - NVIDIA, *Compute Sanitizer* user manual: the tools memcheck, racecheck, initcheck and synccheck.
# - NVIDIA, *CUDA C++ Programming Guide*: "Synchronization Functions" and "Memory Fence Functions".
# - Kaichao You, *CUDA Core Dump: An Effective Tool to Debug Memory Access Issues and Beyond* and *Tracing Hanging and Complicated GPU Kernels Down To The Source
#   Code* (vLLM's blog, 2025): the same hunt in a large engine; the second is about kernels that hang, as 08.3 does on a card.
# - John Regehr, *A Guide to Undefined Behavior in C and C++* (2010): why an overflow may do anything.
#
# **Next:** [lesson 09, The cuBLAS trick](09_cublas_trick.ipynb).
