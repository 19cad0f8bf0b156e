# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 · RMSNorm
#
# **At the end you have** two parts: `rms_norm`, which brings rows of numbers to one size before the layers of a Llama read them, and
# `add_rms_norm`, which adds what was computed last and normalises in the same pass.
#
# **About 60 minutes** · builds on 02 (BF16), 05 (strided loops, coalescing) and 06 (`block_sum`)
#
# **In vLLM** the same two are `rms_norm_kernel` and `fused_add_rms_norm_kernel` in `csrc/layernorm_kernels.cu`. They sum with
# NVIDIA's `cub::BlockReduce`, in float32 as you will. Their residual stream is kept in the model's own type (mostly BF16); ours is
# float32. And where addresses allow it the fused one works on vectors of eight.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, display_figure, earlier, hint, measure, np, predict, progress, reset
from tinyvllm_ref.course import show_engine, solution
from tinyvllm_ref.device import describe

print(describe())
BF16_CUDA, BLOCK_SUM_CUDA = earlier("BF16_CUDA", "BLOCK_SUM_CUDA")

# %% [markdown]
# > **Fast track.** You can write RMSNorm as a kernel with a thread block a row? Go to
# > [exercise 07.5](#07.5-·-Add-and-normalise-in-one-pass:-the-part); 07.3 is most of it already. Pass both, and leave.

# %% [markdown]
# ## The question
#
# A transformer is a stack of layers, and each layer has two **layer parts**: attention (lesson 10) and a feed-forward network (lesson 13).
# (Elsewhere these are called blocks. In this course a *block* is always a block of threads.) Through all of them runs one array, the
# **residual stream**: a row of $H$ numbers for each token. Every layer part reads the stream, computes something, and *adds* it. So the
# stream grows: after some layers its numbers may be ten or a hundred times as large as at the beginning. A layer part that was trained to
# see numbers around 1 would be lost.
#
# So what a layer part gets to read is brought to a fixed size first. The size of a row is its **root mean square**, and each element is
# divided by it, then multiplied by a learned weight $w_i$, one for each column:
#
# $$\operatorname{rms}(x) = \sqrt{\frac{1}{H} \sum_{i} x_i^2} \qquad\qquad
# y_i = \frac{x_i}{\sqrt{\frac{1}{H} \sum_j x_j^2 + \varepsilon}} \, w_i$$
#
# By hand, for the row 3 −4 12 0 and all weights 1: the squares are 9, 16, 144 and 0. Their sum is 169, their mean 42.25, and the
# root of that is 6.5. So $y$ = 0.46 −0.62 1.85 0. Had the row been ten times as large, $y$ would be the same.
#
# An older recipe, LayerNorm, also subtracts the mean of the row first. RMSNorm leaves that out, and models train as well (Zhang and
# Sennrich, 2019). In NumPy:


# %%
def rms_norm_in_numpy(x, weight, eps):
    """x: (T, H), weight: (H,) -> (T, H)"""
    mean_square = (x * x).mean(axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + eps) * weight


row = np.array([[3.0, -4.0, 12.0, 0.0]])
print(rms_norm_in_numpy(row, np.ones(4), 1e-5).round(3))
print(rms_norm_in_numpy(10 * row, np.ones(4), 1e-5).round(3))
print(rms_norm_in_numpy(0 * row, np.ones(4), 1e-5))

# %% [markdown]
# ## 07.1 · When does epsilon matter?
#
# A row of zeros has rms 0, and $0 / 0$ is not a number. The small $\varepsilon$ under the root prevents that; it is in the model's
# `config.json` as `rms_norm_eps`, $10^{-5}$ for Llama 3. It has a side effect: the rows that come out do not have rms 1 exactly, but
# a little less. (Let all weights be 1.) For ordinary rows you can not see it. For small rows you can.
#
# **At which rms $r$ of a row does the row that comes out have rms 1/2?** Derive it on paper and write the formula. The check
# compares it with a search that uses nothing but the norm itself.

# %%
# Exercise 07.1 - when does epsilon matter?
def half_rms(eps):
    """The rms of a row for which the normalised row has rms 1/2."""
    # BEGIN SOLUTION (1 line): from r / sqrt(r^2 + eps) = 1/2
    return (eps / 3) ** 0.5
    # STUB return 0.0
    # END SOLUTION

# %%
check("07.1", half_rms)

# %% [markdown]
# Keep the number in mind: for $\varepsilon = 10^{-5}$ it is about 0.0018. The checks below have a case with rows of rms 0.001, where a
# misplaced epsilon shows; with rows of rms 1 nobody would notice for years.
#
# ## 07.2 · One thread a row
#
# First the formula, as plainly as it can be written: each thread does a whole row by itself. What comes in is float32 (the stream),
# what goes out is BF16 (the next thing is a product of matrices, whose inputs are BF16). Everything between is float32.
#
# `rsqrtf(v)` is $1/\sqrt{v}$ for a float, in one instruction. `float bf16_to_float(bf16 bits)` and `bf16 float_to_bf16(float v)` are those
# of lesson 02; a `bf16` is 16 bits in an `unsigned short`, so never compute with one, or assign a float to one, without them. And in C a
# variable has no value until it gets one: a sum begins with `float squares = 0.0f;`.

# %%
# Exercise 07.2 - one thread a row
norm_naive = cp.RawKernel(BF16_CUDA + r"""
extern "C" __global__ void norm_naive(const float* x, const bf16* weight, bf16* out, int rows, int hidden, float eps) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;        // this thread's row
    if (r >= rows) return;
    const float* row = x + (size_t)r * hidden;
    bf16* to = out + (size_t)r * hidden;
    // BEGIN SOLUTION (4 lines): add up the squares; the factor for the row; write the row to `to`
    float squares = 0.0f;
    for (int c = 0; c < hidden; c++) squares += row[c] * row[c];
    float scale = rsqrtf(squares / hidden + eps);
    for (int c = 0; c < hidden; c++) to[c] = float_to_bf16(row[c] * scale * bf16_to_float(weight[c]));
    // END SOLUTION
}
""", "norm_naive")

# %%
check("07.2", norm_naive)

# %% [markdown]
# ## 07.3 · One block a row: the part
#
# What is wrong with the kernel of 07.2? Two things, and you know both.
#
# - While a model writes for one person, each step of the engine has *one* new token, and so one row. One thread would work, and
#   thousands would watch.
# - With many rows, the threads of a warp read column 0 of 32 different rows: 32 addresses, $4H$ bytes apart, 32 sectors for 128
#   bytes. Lesson 05 has a picture of that.
#
# So let a whole block do a row. Each thread takes every `blockDim.x`-th column, as in lesson 05, and adds up *its* squares. Then your
# `block_sum(value, scratch)` of lesson 06 makes one sum of these, and gives it to **every** thread: all of them need it to write their
# columns. It has barriers inside, so *every* thread of the block must call it, once, also a thread that has no column.
#
# This is the part that the engine calls, with two places to fill in. In the kernel: its body. In `rms_norm`: the number of threads, and
# the launch. The kernel's scratch is dynamic shared memory, a float for each thread, and the launch says how many **bytes** that is, as
# its last argument:
#
# ```python
# kernel((blocks,), (threads,), (arguments, ...), shared_mem=4 * threads)
# ```
#
# Choose the number of threads by the *width* alone, and not by how many rows there are: it decides the order in which a row's squares are
# added, and a token's numbers should not depend on who else is in the batch.

# %%
# Exercise 07.3 - one block a row: the part
norm_kernel = cp.RawKernel(BF16_CUDA + BLOCK_SUM_CUDA + r"""
extern "C" __global__ void norm_kernel(const float* x, const bf16* weight, bf16* out, int hidden, float eps) {
    extern __shared__ float scratch[];                    // blockDim.x floats, for block_sum
    const float* row = x + (size_t)blockIdx.x * hidden;
    bf16* to = out + (size_t)blockIdx.x * hidden;
    // BEGIN SOLUTION (5 lines): this thread's squares; the factor, from block_sum; this thread's columns
    float squares = 0.0f;
    for (int c = threadIdx.x; c < hidden; c += blockDim.x) squares += row[c] * row[c];
    float scale = rsqrtf(block_sum(squares, scratch) / hidden + eps);
    for (int c = threadIdx.x; c < hidden; c += blockDim.x)
        to[c] = float_to_bf16(row[c] * scale * bf16_to_float(weight[c]));
    // END SOLUTION
}
""", "norm_kernel")


def rms_norm(x, weight, eps, out):
    """x (T, H) float32, weight (H,) bf16 -> out (T, H) bf16."""
    rows, hidden = x.shape
    # BEGIN SOLUTION (3 lines): how many threads; then the launch, with shared memory for block_sum
    threads = min(256, max(32, hidden // 32 * 32))
    arguments = (x, weight, out, np.int32(hidden), np.float32(eps))
    norm_kernel((rows,), (threads,), arguments, shared_mem=4 * threads)
    # END SOLUTION
    return out

# %%
check("07.3", rms_norm)

# %% tags=["nbval-ignore-output"]
measure("07.2", "07.3")

# %% [markdown]
# Same bytes asked for, an eighth of the sectors. The rest is there for a reason: each element of `x` is read twice, once for the sum
# and once to be written, and the weights are read again for every row. So about half of what is asked for is what was needed. On a
# card the second reading of a row mostly finds it in a cache. Measured once on an NVIDIA H200 (driver 580.159, CuPy 14.2), for 8,192
# rows of 2,048: 483 µs with one thread a row, 69 µs with one block a row.
#
# ## 07.4 · Where does a sum stop growing?
#
# Why add up in float32, if everything comes out as BF16 in the end? Because rounding *once*, at the end, is harmless, and rounding at
# every step is not. Take the simplest row there is, all ones, and let one thread add them up.
#
# What does it get for **2,048 ones, if the sum is kept in BF16** (rounded after every addition)? And for **20 million ones in
# float32**? Remember lesson 02: BF16 has 8 significant bits (7 that are stored and the leading 1), float32 has 24. With $b$ significant
# bits, numbers from $2^{k}$ to $2^{k+1}$ lie $2^{k+1-b}$ apart. A result that falls between two of them becomes the nearer one, and one
# that falls right in the middle (a *tie*) the one whose last bit is 0 (the *even* one). With 3 bits, for example, there are 4 5 6 7 and
# then 8 10 12 14: 8 + 1 is in the middle of 8 (binary 100 × 2) and 10 (101 × 2), and becomes 8.

# %%
# Exercise 07.4 - where does a sum stop growing?
# BEGIN SOLUTION (2 lines): two numbers
bf16 = 256
float32 = 16777216
# STUB bf16 = None
# STUB float32 = None
# END SOLUTION
predict("07.4", bf16=bf16, float32=float32)

# %% tags=["nbval-ignore-output"]
measure("07.4")

# %% [markdown]
# And this is what it does to the norm of a random row:

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course.exercises.lesson_07_rms_norm import draw_accumulation

display_figure(draw_accumulation())

# %% [markdown]
# So the rule of this course, and of most engines: **numbers are stored small and added up large.**
#
# ## 07.5 · Add and normalise in one pass: the part
#
# In the model a norm seldom comes alone. A layer part has computed `x`; that is added to the stream; and the sum is normalised for the
# next layer part:
#
# $$\text{residual} \leftarrow \text{residual} + x \qquad\qquad \text{out} = \operatorname{norm}(\text{residual})$$
#
# As two kernels, the first writes the new stream to memory and the second reads it all again. But at the moment of the addition the
# sum is in a register, and its square is just what the norm needs. **Fusing** the two saves a launch and a pass over memory, and such
# kernels do nothing *but* move memory.
#
# Note what is kept: `residual` gets the sum, *not* the normalised values. It lives on to the end of the model. `x` is only read. By
# hand, with all weights 1: residual = 1 2 and x = 2 −6 give residual = 3 −4, and out = 0.85 −1.13.
#
# Write the whole kernel's body this time. `row`, `residual_row` and `to` point to the rows of this block of threads.

# %%
# Exercise 07.5 - add and normalise in one pass: the part
add_norm_kernel = cp.RawKernel(BF16_CUDA + BLOCK_SUM_CUDA + r"""
extern "C" __global__ void add_norm_kernel(
    const float* x, float* residual, const bf16* weight, bf16* out, int hidden, float eps) {
    extern __shared__ float scratch[];
    const float* row = x + (size_t)blockIdx.x * hidden;
    float* residual_row = residual + (size_t)blockIdx.x * hidden;
    bf16* to = out + (size_t)blockIdx.x * hidden;
    // BEGIN SOLUTION (9 lines): add x to residual and square the sum; the factor; the norm to `to`
    float squares = 0.0f;
    for (int c = threadIdx.x; c < hidden; c += blockDim.x) {
        float v = residual_row[c] + row[c];
        residual_row[c] = v;
        squares += v * v;
    }
    float scale = rsqrtf(block_sum(squares, scratch) / hidden + eps);
    for (int c = threadIdx.x; c < hidden; c += blockDim.x)
        to[c] = float_to_bf16(residual_row[c] * scale * bf16_to_float(weight[c]));
    // END SOLUTION
}
""", "add_norm_kernel")


def add_rms_norm(x, residual, weight, eps, out):
    """residual (T, H) float32 += x (T, H) float32 in place; the norm of residual -> out (T, H) bf16."""
    rows, hidden = x.shape
    threads = min(256, max(32, hidden // 32 * 32))
    arguments = (x, residual, weight, out, np.int32(hidden), np.float32(eps))
    add_norm_kernel((rows,), (threads,), arguments, shared_mem=4 * threads)
    return out

# %%
check("07.5", add_rms_norm)

# %% tags=["nbval-ignore-output"]
measure("07.5")

# %% [markdown]
# And the same work as two kernels, an addition and then a norm like that of 07.3, counted in emulation at the small size:

# %%
from tinyvllm_ref.course.exercises.lesson_07_rms_norm import count_two_kernels

count_two_kernels()

# %% [markdown]
# What it touches beyond your 07.5 is the sum, which the second kernel fetches once more. On the H200, for 8,192 rows of 2,048: 123 µs as two kernels (an addition, then a norm), 83 µs as one.
#
# ## Your parts in the engine
#
# Both norms at work in the engine, and three mistakes of this lesson. The last one is worth reading twice: the text begins like a
# story and falls apart, because the stream of every layer has been flattened to the same size.

# %% tags=["nbval-ignore-output"]
show_engine("07")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - RMSNorm divides a row by its root mean square and multiplies by a weight. Epsilon stands under the root, and is compared with the
#   mean *square*.
# - One block of threads a row: a strided loop, `block_sum`, another strided loop. Softmax and attention will have the same shape.
# - Store small, add up large: BF16 in memory, float32 in every sum.
# - Kernels that do little arithmetic cost what they move. Fuse what reads the same numbers.
#
# ## To think about
#
# <details><summary>The kernel reads each row twice. How could it read it once, and what does that cost?</summary>
#
# Keep the row between the two loops: in registers (each thread holds its own few columns; their number must then be known to the
# compiler) or in shared memory ($4H$ bytes a block; 8 KB for 2,048 columns). Either leaves room for fewer blocks on a
# multiprocessor. Where the row still lies in the cache, there is little to gain.
# </details>
#
# <details><summary>Could the weight be left out, by multiplying it into the matrix that comes next?</summary>
#
# Yes. The next step is a product with a matrix $W$, and $W(w \odot y) = (W \operatorname{diag}(w))\,y$: scale the columns of $W$ once
# when the model is loaded. But the scaled matrix has to be rounded to BF16 again, so the results are no longer those of the
# checkpoint to the last bit.
# </details>
#
# <details><summary>The order in which a row's squares are added depends on the number of threads. Does that matter?</summary>
#
# The last bits of the sum depend on it, and now and then a BF16 value is rounded the other way. So the number of threads here depends
# on the *width* alone, and not on how many rows there are: a token's numbers are the same whether it is computed alone or in a batch.
# The engine relies on that in lesson 18.
# </details>
#
# ## Further reading
#
# - Zhang and Sennrich, *Root Mean Square Layer Normalization* (NeurIPS 2019).
# - Ba, Kiros and Hinton, *Layer Normalization* (2016): the older recipe.
# - Nicholas Higham, *The Accuracy of Floating Point Summation* (SIAM J. Sci. Comput., 1993).
#
# **Next:** [lesson 08, The debug clinic](08_debug_clinic.ipynb).
