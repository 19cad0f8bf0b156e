# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 · Welcome
#
# Press **Shift + Enter**: it runs a cell and goes on to the next. Do so until there is a story below. The first time that
# takes some 20 seconds, in which nothing is shown: the engine's kernels are compiled, and kept.

# %% tags=["nbval-ignore-output"]
import textwrap

from tinyvllm_ref import LLM, SamplingParams

llm = LLM("tiny-stories")
(story,) = llm.generate("Once upon a time", SamplingParams(max_tokens=140, temperature=0.7, seed=5))
print(textwrap.fill(story.prompt + story.outputs[0].text, 100))

# %% [markdown]
# Nobody wrote this story down before. A **language model** made it up, piece by piece: a file of numbers, and a program
# that runs it. The file lies ready in `data/tiny-stories`. The program is called an **inference engine**, and it is what
# you are going to build: part by part, in CUDA, until all of the program that writes such stories is yours.
#
# You need to read Python with NumPy. You need no GPU, and no knowledge of CUDA or of language models.
#
# **At the end of this lesson you have** two CUDA kernels of your own and a launch that fits any array, and you know your
# way around the course. **About 30 minutes** · builds on nothing. **Your first kernel is some five minutes
# away**; the map comes after it.
#
# > **Fast track.** You write CUDA already? Fill in the three exercises (four lines in all) and read
# > [How this course works](#How-this-course-works).

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, display_figure, figures, hint, np, progress, reset, show, solution

display_figure(figures.blocks_over_array(n=12, block=4, grid=3))

# %% [markdown]
# ## 00.1 · Which element is mine?
#
# A **kernel** is a small C++ function that a GPU runs many times at once, each time by another **thread**. All threads
# run the same lines. What differs is only *who they are*: threads come in **blocks**, and each one can ask for
#
# | in the kernel | | in the picture above |
# |---|---|---|
# | `blockIdx.x` | the number of its block, from 0 | 0, 1 or 2 |
# | `blockDim.x` | how many threads a block has | 4 |
# | `threadIdx.x` | its number within its block, from 0 | 0, 1, 2 or 3 |
#
# The kernel below doubles an array of 12 numbers with 3 blocks of 4 threads: one thread, one element. In NumPy that is
# <code>y&nbsp;=&nbsp;2&nbsp;*&nbsp;x</code>. One expression is missing: from who it is, each thread must find the
# number `i` of *its* element.
#
# Take thread 3 of block 2. Which element is it in the picture? How do you get there from 2, 4 and 3? Replace the `0`,
# run the cell, then run the check under it.
#
# <details><summary>New to C? Unfold this: <b>C for Python readers</b></summary>
#
# | C++ | what it is |
# |---|---|
# | `int i = 3;` | Every variable has a type, and every statement ends with `;`. Blocks stand in `{ }`, indented or not. |
# | `2.0f` | A `float`: 4 bytes. `2.0` without the `f` is a `double` of 8 bytes, and slow on most cards. |
# | `7 / 2` | Between integers it is 3. It rounds toward zero: `-7 / 2` is -3, where Python's `-7 // 2` is -4. |
# | `const float* x` | A **pointer**: the address of a `float`, with others behind it. `x[i]` is the `i`-th. It does not know how many there are, and nothing checks. `const` means: only to be read. |
# | `i < n ? a : b` | `a if i < n else b` |
# | `for (int i = 0; i < n; i++)` | `for i in range(n):` |
# | `i += 4` | The same as in Python. |
# | `a && b` | `a and b` |
# | <code>a &#124;&#124; b</code> | `a or b` |
# | `!a` | `not a` |
# | `int`, `unsigned short` | 32 bits with a sign: up to 2,147,483,647, then it wraps around. 16 bits without a sign: 0 to 65,535; the weights of models will come in these. |
# | `void twice(...)` | A function that returns nothing. A kernel returns nothing: it writes into arrays that it is given. |
# | `__global__` | Makes a function a kernel. (`__device__` makes one that kernels call.) |
# | `extern "C"` | Keeps the function's name as you wrote it, so that it is found by that name. |
# | `// ...` | A comment. |
#
# In Python, `cp.RawKernel(source, name)` makes a kernel of a string, and `kernel((3,), (4,), (x, y, np.int32(n)))`
# launches it: 3 blocks, 4 threads each, and the arguments. Arrays are passed by their address. Numbers are passed
# *byte by byte as they are*: say `np.int32(n)` for an `int`, and `np.float32(a)` for a `float`.
# </details>

# %%
# Exercise 00.1 - which element is mine?
twice = cp.RawKernel(r"""
extern "C" __global__ void twice(const float* x, float* y) {
    // BEGIN SOLUTION (1 line): the number of this thread's element, in place of the 0
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    // STUB int i = 0;
    // END SOLUTION
    y[i] = 2.0f * x[i];
}
""", "twice")

# %%
check("00.1", twice)

# %% [markdown]
# If it says *passed*: you have written a CUDA kernel, and it was right for six different launches. Nearly every kernel of
# this course begins with that line.
#
# If it says something else, good: that is how one finds out. Read the report, then run the next cell: a hint. Run it
# again, and the hint goes one step further. (It has passed? Go on.)

# %% tags=["nbval-ignore-output"]
hint("00.1")

# %% [markdown]
# ## How this course works
#
# Each lesson is a notebook with three to six exercises. An **answer cell** begins with `# Exercise 00.1`; under it stands
# its **check**.
#
# | | |
# |---|---|
# | `check("00.1", twice)` | Runs your answer on small and on awkward inputs. If it fails, you see the smallest input that went wrong, and often what you assumed. |
# | `hint("00.1")` | Asks you a question about *your* failing input. Called again, it gives the rule with an example by hand; then code with holes. Hints cost nothing. Type it in a new cell: Esc, then **B**, puts one below. |
# | `solution("00.1")` | Shows one way to do it, once you have passed. |
# | `progress()` | Draws the map of the course and marks where you are. |
# | `reset("00.1")` | Begins an exercise again, with a fresh stub in a new cell; `reset("00")` a lesson. Nothing you wrote is deleted. |
#
# A check that fails stops **Run All** there: the cells below it have not run. So go on cell by cell (Shift + Enter), or run
# the cells that you need once the check has passed.
#
# What you pass is kept in the folder `my_engine/`, as plain files. You can close the notebook at any time and go on later:
# run the cells at the top again, those with the `import` lines. You can also begin anywhere; parts that you have not made
# come from the reference.

# %% [markdown]
# ## What runs your kernels here

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.device import describe, is_gpu
from tinyvllm_ref.emulation import toolchain

print("kernels run on: ", describe())
if not is_gpu:
    print("compiled with:  ", toolchain.find().version)

# %% [markdown]
# With an NVIDIA GPU your kernels run on it, and their speed is measured. Without one they are compiled for your processor
# and run in an **emulation** of a GPU, from the same source. It watches every access to memory, so it finds faults that a
# card would keep silent about. It says nothing about speed: it counts what moves through memory instead.
#
# If something is missing, `tinyvllm doctor` says what, and what to do about it. Type it in JupyterLab's terminal (File, New,
# Terminal), or `!tinyvllm doctor` in a cell.

# %% [markdown]
# ## A language model is a file and a program
#
# The file holds numbers, called weights or parameters. These are the files of the model that wrote the story:

# %%
for name in ("config.json", "tokenizer.json", "model.safetensors"):
    print(f"{(llm.folder / name).stat().st_size:>10,} bytes  {name}")

# %% [markdown]
# `config.json` says what shape the model has, `tokenizer.json` how text is cut into pieces called **tokens**, and
# `model.safetensors` holds the weights. The model is small so that it fits into the repository. Llama 3.2 1B, whose sizes
# this course uses in its examples, has the same three kinds of files; its weights take 2.47 GB, some 500 times as much.
#
# The program takes the tokens so far and computes one number, a **logit**, for each token that could come next. The larger
# the logit, the more probable the token:
#
# $$p_k = \frac{e^{\ell_k}}{\sum_j e^{\ell_j}}$$
#
# Here is what the model thinks of one beginning:

# %% tags=["nbval-ignore-output"]
beginning = "Once upon a time, there was a little"
tokens = llm.tokenizer.encode(beginning)
logits = llm.logits(tokens)[-1]                       # a number for each of 2,048 tokens
p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
print(beginning, "...")
for k in np.argsort(-p)[:6]:
    print(f"{p[k]:6.1%} {llm.tokenizer.decode([int(k)])}")

# %% [markdown]
# That is all a model does. To write, take one token, put it at the end, and ask again. This is a whole text generator:

# %% tags=["nbval-ignore-output"]
ids, passed_through = list(tokens), 0
for _ in range(30):
    logits = llm.logits(ids)                          # all tokens go through the model
    passed_through += len(ids)
    ids.append(int(logits[-1].argmax()))              # the most probable one goes to the end
print(llm.tokenizer.decode(ids))
print(f"\n{len(ids) - len(tokens)} new tokens; {passed_through} tokens went through the model")

# %% [markdown]
# ## What an inference engine does
#
# The loop above is right, and wasteful. Each new token sends the *whole* text through the model again: 30 new tokens, and
# hundreds went through. And it serves one person at a time, though the weights, once they have been read from memory, could
# be used for many texts.
#
# An inference engine gives the same tokens without the waste. It keeps what it has computed for earlier tokens (a **KV
# cache**), cuts that memory into pages so that many texts of different lengths fit (**paging**), and lets requests join and
# leave a running batch at every step (**continuous batching**). vLLM made this combination known. You will build each of
# these, from the bytes of the weight file up, and the kernels they run on.
#
# Names in the course are vLLM's names wherever there is one: with the real thing, too, you write
# `from vllm import LLM, SamplingParams`.
#
# ## The map
#
# | part | lessons | what you make |
# |---|---|---|
# | 0 · Orientation | 00 | your first kernels |
# | I · A model is a file | 01 to 03 | a reader for weight files, numbers of 16 bits, a tokenizer |
# | II · Kernels | 04 to 09 | memory, lookups, sums, normalisation, products of matrices; and a clinic for sick kernels |
# | III · One transformer | 10 to 14 | attention, positions, the feed-forward block: a model that says its first token |
# | IV · Generation at scale | 15 to 24 | caching, sampling, batching, paging, scheduling, and a server |
#
# From lesson 01 on, a part that you pass runs inside the engine at once, and the story at the end of the lesson is written
# by a machine that is a little more yours.

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## 00.2 · A guard
#
# In 00.1 there was exactly one thread for each element. That was luck: a launch has whole blocks, and arrays have any
# length. Ten elements and blocks of 4 make three blocks, so 12 threads, and two of them have no element:

# %% tags=["nbval-ignore-output"]
display_figure(figures.blocks_over_array(n=10, block=4, grid=3, guarded=False))

# %% [markdown]
# Those two still run the same lines. A pointer does not know where its array ends, so `y[10] = ...` writes into whatever
# lies behind. The threads without an element must be stopped, by an `if`: the **guard**.
#
# The kernel is the one that linear algebra calls *axpy*, "a times x plus y", into `y`. In NumPy:


# %%
def axpy_in_numpy(a, x, y, n):
    y[:n] = a * x[:n] + y[:n]
    return y


axpy_in_numpy(2.0, np.array([1, 2, 3], np.float32), np.array([10, 10, 10], np.float32), 3)

# %% [markdown]
# **Do it wrong first.** Write the line without a guard and run the check: you will see what a fault looks like in this
# course. Then add the guard.

# %%
# Exercise 00.2 - a guard
axpy = cp.RawKernel(r"""
extern "C" __global__ void axpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    // BEGIN SOLUTION (1 line): y[i] becomes a * x[i] + y[i], where there is an element i
    if (i < n) y[i] = a * x[i] + y[i];
    // END SOLUTION
}
""", "axpy")

# %%
check("00.2", axpy)

# %% [markdown]
# ## 00.3 · A launch for any n
#
# So far the exercise chose how many blocks there are. Now you do. Your function gets arrays of any length `n` (at least 1)
# and the number of threads a block is to have. It must launch **just enough blocks**, so that every element has a thread
# and no block is without an element:
#
# $$\text{blocks} = \left\lceil \frac{n}{\text{threads}} \right\rceil$$
#
# that is, $n / \text{threads}$ rounded up. For blocks of 4: 8 elements need 2 blocks, 9 and 10 elements need 3. Python has
# `//`, which rounds down, so there is a little thinking to do.
#
# One more thing. The kernel's first parameter is a `float`, 4 bytes. The `a` that your function gets is a Python float, and
# that has 8. A kernel takes what it is given byte by byte, so pass `np.float32(a)`.
#
# `axpy` is your kernel of 00.2. Return `y`: a function that fills an array gives that array back, here and everywhere in
# the engine.

# %%
# Exercise 00.3 - a launch for any n
def add_scaled(a, x, y, threads=256):
    """y += a * x, for x and y of shape (n,), float32 on the device."""
    n = len(x)
    # BEGIN SOLUTION (2 lines): how many blocks; then launch axpy with blocks of `threads` threads
    blocks = (n + threads - 1) // threads
    axpy((blocks,), (threads,), (np.float32(a), x, y, np.int32(n)))
    # END SOLUTION
    return y

# %%
check("00.3", add_scaled)

# %% [markdown]
# Your launch for 27 elements, with blocks of 8:

# %% tags=["nbval-ignore-output"]
show("00.3")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - All threads of a kernel run the same lines; `blockIdx.x * blockDim.x + threadIdx.x` tells a thread who it is.
# - A launch has whole blocks. Round their number up, and let a guard stop the threads that have no element.
# - A kernel knows addresses, not lengths, and takes numbers byte by byte: `np.int32(n)`, `np.float32(a)`.
# - A language model maps tokens to a logit for each possible next token. An engine asks it again and again, without doing
#   anything twice.
#
# ## To think about
#
# <details><summary>Blocks may run in any order, some at once and some after others. Why does <code>twice</code> not mind?</summary>
#
# Each element belongs to one thread, and no thread reads what another writes. So there is no order that could matter. When
# threads do have to read from each other (to add up an array, say), order matters a great deal: that is lesson 06.
# </details>
#
# <details><summary>Why not simply launch n blocks of one thread, and do without the guard?</summary>
#
# It would give the right values. But the hardware works on 32 threads of a block at a time. In a block of one, 31 of these
# places stay empty.
# </details>
#
# <details><summary>Why does the model not write ten tokens at once?</summary>
#
# Because each token depends on the one before it, and that one is only known once it has been chosen. What *can* be done at
# once: all tokens of a prompt, which are known already; and one token each of many different texts. An engine lives from
# both.
# </details>
#
# ## Further reading
#
# - NVIDIA, *CUDA C++ Programming Guide*: "Thread Hierarchy".
# - CuPy's documentation: "User-Defined Kernels", for `RawKernel`.
# - Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention* (SOSP 2023): the paper
#   behind vLLM. Come back to it after lesson 22, and it will read like your own notes.
#
# **Next:** [lesson 01, A model is a file](01_safetensors.ipynb), where you open the weight file with your own hands.
