# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 · The cuBLAS trick
#
# **At the end you have** `linear(x, w, out)`: the matrix product in which a language model spends nearly all of its
# arithmetic. You write it three times: one thread an output, with tiles in shared memory, and as one call of NVIDIA's
# library, without moving a byte to suit it.
#
# **About 65 minutes** · builds on 02 (bfloat16), 05 (coalescing) and 06 (shared memory, barriers)
#
# **In vLLM** these products are in `vllm/model_executor/layers/linear.py`: `QKVParallelLinear` and
# `MergedColumnParallelLinear` keep several matrices as one, as you will here, and without quantization the product ends
# in PyTorch's `torch.nn.functional.linear`, which calls cuBLAS. What differs: theirs also splits each matrix over several cards.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, display_figure, earlier, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, solution
from tinyvllm_ref.device import describe

print(describe())
BF16_CUDA = earlier("BF16_CUDA")  # lesson 02: bf16, bf16_to_float, float_to_bf16

# %% [markdown]
# > **Fast track.** You know why a column-major library gives a row-major $XW^\top$ for the price of swapping its
# > arguments? Go to [exercise 09.5](#09.5-·-linear,-by-cublasGemmEx), pass it, and leave. Lesson 20 needs the tile of
# > [09.3](#09.3-·-Tiles-in-shared-memory).

# %% [markdown]
# ## The question
#
# A linear layer turns a token's $K$ numbers into $N$ others. Each output is a weighted sum of all inputs:
#
# $$y_{t,n} = \sum_{k=0}^{K-1} x_{t,k}\, w_{n,k} \qquad\text{or}\qquad Y = X W^\top$$
#
# $X$ is $(T, K)$: a row for each token. $W$ is $(N, K)$: **a row for each output**, because that is how checkpoints store
# it. So each output is the dot product of a row of $X$ and a row of $W$. By hand, with two tokens, $K = 3$ and $N = 4$:
#
# $$\begin{pmatrix}1&2&3\\0&1&-1\end{pmatrix}
# \begin{pmatrix}1&0&2\\0&1&1\\2&1&0\\1&1&1\end{pmatrix}^{\!\top}
# = \begin{pmatrix}7&5&4&6\\-2&0&1&0\end{pmatrix}$$
#
# The 7 is $1\cdot1 + 2\cdot0 + 3\cdot2$. How much of the model is this? Count:

# %%
from tinyvllm_ref.checkpoint.names import resolve
from tinyvllm_ref.checkpoint.weights import weight_plan
from tinyvllm_ref.config import ModelConfig

config = ModelConfig.from_json(resolve("tiny-stories"))
for group in weight_plan(config)[1:7]:
    print(f"{group.name:34} {group.shape!s:12} {np.prod(group.shape):>9,} parameters")

# %% [markdown]
# Only the two norms of a layer are not matrices: 384 parameters of several hundred thousand. A product of these sizes
# costs $2TNK$ operations, a multiplication and an addition for each parameter and token.
#
# The whole job in NumPy. Everything below must give these numbers:


# %%
def linear_spec(x, w):
    return x @ w.T


x = np.array([[1, 2, 3], [0, 1, -1]], np.float32)
w = np.array([[1, 0, 2], [0, 1, 1], [2, 1, 0], [1, 1, 1]], np.float32)
linear_spec(x, w)

# %% [markdown]
# ## 09.1 · One thread an output
#
# The outputs do not depend on each other, so give each one a thread. Blocks are 16 by 16 threads: `threadIdx.x` runs
# along a row of `out`, `threadIdx.y` down its rows. The grid is rounded up in both directions.
#
# All arrays are row-major: element $(r, c)$ of an array with $C$ columns lies $r \cdot C + c$ elements from its
# beginning. `x` and `w` are bfloat16; multiply and add as `float`. `BF16_CUDA`, your text of lesson 02, stands in front of the
# kernel, so a line number in a message counts its lines too.

# %%
# Exercise 09.1 - one thread an output
product_naive = cp.RawKernel(BF16_CUDA + r"""
// x: (T, K) bf16, w: (N, K) bf16, out: (T, N) float32
extern "C" __global__ void product_naive(const bf16* x, const bf16* w, float* out, int T, int N, int K) {
    int n = blockIdx.x * blockDim.x + threadIdx.x;    // this thread's column of out
    int t = blockIdx.y * blockDim.y + threadIdx.y;    // and its row
    // BEGIN SOLUTION (5 lines): where there is such an element: the dot product of row t of x and row n of w
    if (t < T && n < N) {
        float sum = 0.0f;
        for (int k = 0; k < K; k++) sum += bf16_to_float(x[t * K + k]) * bf16_to_float(w[n * K + k]);
        out[t * N + n] = sum;
    }
    // STUB if (t == 0 && n == 0) out[0] = 0.0f;  // replace this line
    // END SOLUTION
}
""", "product_naive")

# %%
check("09.1", product_naive)

# %% [markdown]
# Every shape in this lesson's checks is lopsided, and that is on purpose. With a square matrix a wrong stride, a missing
# transpose and swapped sizes all still read *something* of the right shape.
#
# Below, from the run of *your* kernel: how often the threads of one block read each element. `w` is drawn transposed, so
# that a row of `x` and a column of `w` meet at their output.

# %% tags=["nbval-ignore-output"]
show("09.1")

# %% [markdown]
# ## 09.2 · What is read, and what had to be
#
# Each element is read over and over: 16 threads of a block want the same row of `x`, 16 others the same row of `w`. Each
# time it is asked for anew.
#
# Now let a block bring a **tile** of each matrix to shared memory first: 16 rows of `x` and 16 rows of `w`, 16 columns at
# a time. Its 256 threads read the tiles there; from global memory each element of a tile is read once by that block.
#
# Take `x` of (32, 64) and `w` of (48, 64) in bfloat16. How many bytes does the kernel of 09.1 read from global memory, all
# threads together? And how many a kernel with tiles of 16 by 16?

# %%
# Exercise 09.2 - what is read, and what had to be
# BEGIN SOLUTION (2 lines): two numbers of bytes
naive = 32 * 48 * 2 * 64 * 2
tiled = 2 * 3 * 2 * 16 * 64 * 2
# STUB naive = None
# STUB tiled = None
# END SOLUTION
predict("09.2", naive=naive, tiled=tiled)

# %% tags=["nbval-ignore-output"]
measure("09.2")

# %% [markdown]
# ## 09.3 · Tiles in shared memory
#
# A block makes 16 by 16 outputs, in steps along $K$. In each step:
#
# 1. every thread brings **one** element of `x` and **one** of `w` into the tiles, as `float`; what lies outside a matrix is 0;
# 2. all wait: the tiles must be complete;
# 3. every thread adds 16 products to its own sum, reading row `ty` of `x_tile` and row `tx` of `w_tile`;
# 4. all wait again: think of what the fastest thread does next.
#
# Two rows are in play for a thread. Its *output* is $(t, n)$, with $n$ from `tx`. But the row of `w` that it *brings* is `row`,
# from `ty`: then threads side by side bring elements side by side, and the loads are coalesced (lesson 05).
#
# **One column too many.** `w_tile` has 17 columns, and the last is never used. In step 3 threads side by side read the
# *same column* of different rows. With 16 words a row, these words lie in only two banks of shared memory (lesson 06), and
# the threads wait in line; with 17 each row begins one bank further on, and nobody waits. (In step 1 a warp fills two rows, and
# with 17 words between them one thread still meets another: that one turn a warp is all that the measurement below will find.
# Take the `+ 1` away, pass again and measure again, to see what it saves.)

# %%
# Exercise 09.3 - tiles in shared memory
product_tiled = cp.RawKernel(BF16_CUDA + r"""
#define TILE 16
// x: (T, K) bf16, w: (N, K) bf16, out: (T, N) float32; blocks of TILE by TILE threads
extern "C" __global__ void product_tiled(const bf16* x, const bf16* w, float* out, int T, int N, int K) {
    __shared__ float x_tile[TILE][TILE], w_tile[TILE][TILE + 1];
    int tx = threadIdx.x, ty = threadIdx.y;
    int n = blockIdx.x * TILE + tx, t = blockIdx.y * TILE + ty;    // this thread's output
    int row = blockIdx.x * TILE + ty;                              // the row of w that it brings
    // BEGIN SOLUTION (10 lines): in steps of TILE along K: bring, wait, add, wait; at the end store what exists
    float sum = 0.0f;
    for (int start = 0; start < K; start += TILE) {
        int k = start + tx;
        x_tile[ty][tx] = t < T && k < K ? bf16_to_float(x[t * K + k]) : 0.0f;
        w_tile[ty][tx] = row < N && k < K ? bf16_to_float(w[row * K + k]) : 0.0f;
        __syncthreads();
        for (int c = 0; c < TILE; c++) sum += x_tile[ty][c] * w_tile[tx][c];
        __syncthreads();
    }
    if (t < T && n < N) out[t * N + n] = sum;
    // STUB if (t == 0 && n == 0 && row == 0) out[0] = 0.0f;  // replace this line
    // END SOLUTION
}
""", "product_tiled")

# %%
check("09.3", product_tiled)

# %% tags=["nbval-ignore-output"]
show("09.3")

# %% tags=["nbval-ignore-output"]
measure("09.1", "09.3")

# %% [markdown]
# ## The roof over every kernel
#
# A card does two things: it moves bytes and it computes. A kernel that makes $I$ operations for each byte that it moves
# can not go faster than
#
# $$\min(\text{operations a second},\; I \times \text{bytes a second})$$
#
# Drawn over $I$, the **arithmetic intensity**, this is a slope and then a ceiling: the **roofline**. Your naive kernel makes
# 2 operations for each 4 bytes that its threads ask for: $I = 0.5$. A tile of 16 serves each number 16 times: $I = 8$. The
# product itself allows more, if every number were read only once. For $W$ of 2,048 by 2,048 it depends on how many tokens
# share the weights:

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course.figures import Point, roofline


def intensity(T, N=2048, K=2048):
    return 2 * T * N * K / (2 * (T * K + N * K) + 4 * T * N)  # bf16 in, float32 out


points = [Point("naive", 0.5), Point("tiles of 16 by 16", 8.0)]
points += [Point(f"at best, T = {T:,}", intensity(T)) for T in (1, 32, 256, 2048)]
h100 = "H100 SXM: NVIDIA's data sheet, BF16 without sparsity."
display_figure(roofline(points, 3.35e12, 989e12, device=h100))

# %% [markdown]
# With one token the best possible kernel makes one operation a byte. It is as fast as the weights can be read, and no
# cleverness in arithmetic helps: that is **decode**. With hundreds of tokens arithmetic is the limit: that is **prefill**.
# Lesson 18 turns this into a reason to serve many requests at once.
#
# Your tiles are far under the ceiling still. Those who climb on keep sums of several outputs in each thread's registers,
# load the next tile while computing this one, and use the tensor cores, a unit that multiplies small matrices in one
# instruction. NVIDIA has done it for every card and every size: in **cuBLAS**. So from here on the question is how to call it.

# %% [markdown]
# ## The same bytes, read two ways
#
# cuBLAS speaks Fortran: its matrices are **column-major**. Element $(r, c)$ lies at $r + c \cdot ld$, where the **leading
# dimension** $ld$ is the distance, in elements, from one column to the next. Ours are row-major. Must everything be
# transposed, then? Look at six numbers in memory:

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course.figures import row_column_major

display_figure(row_column_major((2, 3)))

# %% [markdown]
# Nothing has to move. **A row-major $(R, C)$ array *is* a column-major $(C, R)$ matrix with $ld = C$: its transpose.** Hand
# cuBLAS our three arrays and this is what it sees:
#
# | array | row-major | cuBLAS sees | leading dimension |
# |---|---|---|---|
# | `x` | $X$: $(T, K)$ | $X^\top$: $(K, T)$ | $K$ |
# | `w` | $W$: $(N, K)$ | $W^\top$: $(K, N)$ | $K$ |
# | `out` | $Y$: $(T, N)$ | $Y^\top$: $(N, T)$ | $N$ |
#
# What it must write, so that we find $Y$, is $Y^\top$. And a transposed product swaps its factors:
#
# $$Y^\top = (X W^\top)^\top = W X^\top$$
#
# cuBLAS computes $C = \alpha\, \mathrm{op}(A)\, \mathrm{op}(B) + \beta\, C$, where $\mathrm{op}$ is `N` (as it is seen) or
# `T` (transposed); $\mathrm{op}(A)$ is $(m, k)$, $\mathrm{op}(B)$ is $(k, n)$ and $C$ is $(m, n)$. A leading dimension belongs
# to a matrix *as it lies in memory*; the flag does not change it.
#
# In NumPy one can look through cuBLAS's glasses: `order="F"` reads the same bytes column-major.

# %%
bytes_of_x = x.ravel()  # 1 2 3 0 1 -1, as they lie
seen = bytes_of_x.reshape(3, 2, order="F")
print(seen)
print("the transpose of x:", np.array_equal(seen, x.T))

# %% [markdown]
# ## 09.4 · The call, derived
#
# Work it out on paper for `x` of (5, 7) and `w` of (3, 7), so that `out` is (5, 3). Which array comes first, which flag does
# each get, and what are the six numbers? The check makes exactly the call that you describe.

# %%
# Exercise 09.4 - the call, derived
# BEGIN SOLUTION (6 lines): A and B are "x" or "w"; opA and opB are "N" or "T"; the rest are numbers
call = {
    "A": "w", "opA": "T",
    "B": "x", "opB": "N",
    "m": 3, "n": 5, "k": 7,
    "lda": 7, "ldb": 7, "ldc": 3,
}
# STUB call = {
# STUB     "A": None, "opA": None,
# STUB     "B": None, "opB": None,
# STUB     "m": None, "n": None, "k": None,
# STUB     "lda": None, "ldb": None, "ldc": None,
# STUB }
# END SOLUTION

# %%
check("09.4", call)

# %% [markdown]
# ## 09.5 · `linear`, by `cublasGemmEx`
#
# `gemmEx` is the product with a type for each matrix. In CuPy:
#
# ```python
# cp.cuda.cublas.gemmEx(handle, opA, opB, m, n, k,
#                       alpha, A, typeA, lda, B, typeB, ldb,
#                       beta, C, typeC, ldc, compute_type, algorithm)
# ```
#
# - `handle` is `cp.cuda.device.get_cublas_handle()`; the flags are `cp.cuda.cublas.CUBLAS_OP_N` and `CUBLAS_OP_T`;
# - `A`, `B`, `C` are addresses on the device: `x.data.ptr`. Nobody checks what lies there: type 14 says bfloat16, type 0 says
#   float32. `compute_type` 68 says that sums are kept in float32, and `algorithm` is -1 for "choose yourself";
# - `alpha` and `beta` are addresses **in host memory** of one float32 each: `ONE.ctypes.data`. Keep these arrays alive: an
#   address does not.
#
# Your function is the part. The engine calls it for every product, with one token and with many. It fills `out`, returns it,
# and makes no array on the way.

# %%
# Exercise 09.5 - linear, by cublasGemmEx
BF16, FLOAT32, COMPUTE_32F = 14, 0, 68
ONE, ZERO = np.array(1, np.float32), np.array(0, np.float32)


def linear(x, w, out):
    """out = x w^T: x (T, K) bf16, w (N, K) bf16, out (T, N) float32."""
    T, K = x.shape
    N = len(w)
    cublas = cp.cuda.cublas
    # BEGIN SOLUTION (6 lines): one call of gemmEx, for any T, N and K
    cublas.gemmEx(
        cp.cuda.device.get_cublas_handle(), cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N,
        N, T, K,
        ONE.ctypes.data, w.data.ptr, BF16, K, x.data.ptr, BF16, K,
        ZERO.ctypes.data, out.data.ptr, FLOAT32, N, COMPUTE_32F, -1,
    )
    # STUB out.fill(0)  # replace this line
    # END SOLUTION
    return out


# %%
check("09.5", linear)

# %% [markdown]
# On a card, the next cell times your three products: `x` of (512, 2,048) with `w` of (3,072, 2,048), 6.4 billion operations. On an NVIDIA H200 (2026-11-29)
# it gave 7,091 microseconds for one thread an output, 822 for the tiles and 26 for cuBLAS.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.device import is_gpu

if is_gpu:
    measure("09.1", "09.3", "09.5")
else:
    print("no GPU here: what cuBLAS does inside can only be timed, on a card")

# %% [markdown]
# <details><summary>You have a card older than compute capability 8.0, such as a T4?</summary>
#
# cuBLAS multiplies bfloat16 matrices from 8.0 on, and refuses the call on older cards. Two ways are left: widen both matrices to float32, which reads
# twice the bytes, or a kernel of one's own. The reference does the second, in `tinyvllm_ref/kernels/linear.cu`: your 09.3 with several outputs a thread. You can do
# the same: put your `product_tiled` into the cell of 09.5 (it may name `BF16_CUDA`), and let `linear` launch it where
# `0 < int(cp.cuda.Device().compute_capability) < 80`. Everywhere else, also in the emulation, whose number is 0, it makes the call.
# </details>
#
# ## Three products in one
#
# Attention needs a query, a key and a value of each token: three products with the same `x`. Stack the three weights by rows and they
# are one: $X\,[W_q; W_k; W_v]^\top = [Q\;K\;V]$. Lesson 04 laid them out in the arena without a gap for this reason. It is one launch
# instead of three, `x` is read once, and a larger product fills more of the card. Gate and up of lesson 13 are joined in the same way.

# %%
rng = np.random.default_rng(9)
tokens = rng.standard_normal((4, 192))
wq, wk, wv = (rng.standard_normal((rows, 192)) for rows in (192, 64, 64))
together = tokens @ np.concatenate([wq, wk, wv]).T  # (4, 320)
q, k, v = np.split(together, [192, 256], axis=1)
print(together.shape)
print([np.allclose(part, tokens @ weight.T) for part, weight in ((q, wq), (k, wk), (v, wv))])

# %% [markdown]
# ## Your part in the engine
#
# Your `linear` now makes every product of the model. Below are its story, the reference's, and what three mistakes do to the text.
# Look at the transposed result: with a single token $Y$ and $Y^\top$ are the same bytes, so it is only the *prompt* that it ruins.

# %% tags=["nbval-ignore-output"]
show_engine("09")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - $Y = XW^\top$: each output is the dot product of a row of $X$ and a row of $W$, because $W$ is stored a row an output.
# - A tile in shared memory lets each number that was read serve many threads. Two barriers a step: one so that the tile is complete,
#   one so that nobody overwrites what others still read.
# - A row-major array is the transpose of the same bytes read column-major. Ask cuBLAS for $Y^\top = W X^\top$ and nothing moves.
# - Test products with $T$, $N$ and $K$ all different. Squares hide transposes.
# - With one token a product is limited by reading the weights, with many by arithmetic.
#
# ## To think about
#
# <details><summary>Why is the second barrier not needed after the last step of the loop?</summary>
#
# After the last step nobody writes the tiles again, so there is nothing to protect. It stays in the loop because a barrier that only
# some steps have would be one more condition to get wrong, and it costs next to nothing.
# </details>
#
# <details><summary>What would a tile of 32 by 32 change?</summary>
#
# Each number serves 32 threads, so the traffic halves once more: $I = 16$. The block has 1,024 threads, the most that there can be, and
# the two tiles take 8 KiB. Beyond that a thread must make several outputs, which is what fast kernels do: the sums lie in registers.
# </details>
#
# <details><summary>alpha and beta are given by address. What goes wrong with <code>np.array(1, np.float32).ctypes.data</code> as an argument?</summary>
#
# Nothing keeps the array alive once its address has been taken: its memory may be given to something else before cuBLAS reads it.
# Often it works, and some day it does not. Names at the top of the cell keep both numbers for as long as the function lives.
# </details>
#
# ## Further reading
#
# - NVIDIA, *cuBLAS Library*, the sections on data layout and on `cublasGemmEx`.
# - Samuel Williams, Andrew Waterman, David Patterson, *Roofline: An Insightful Visual Performance Model for Multicore Architectures*
#   (Communications of the ACM, 2009).
# - Simon Boehm, *How to Optimize a CUDA Matmul Kernel for cuBLAS-like Performance: a Worklog* (2022): ten kernels, from 09.1 upwards.
#
# **Next:** [lesson 10, Attention](10_attention.ipynb).
