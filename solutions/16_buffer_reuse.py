# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16 · Buffers used again
#
# **At the end you have** `plan_buffers(lifetimes)`: it places the arrays of a forward pass in one piece of memory, so that those which
# are never needed at the same time lie in the same place. With it, decoding a token allocates nothing.
#
# **About 60 minutes** · builds on 04 (arena, alignment), 13 and 14 (a layer, a forward pass) and 15 (decode)
#
# **In vLLM** there is no such plan: PyTorch's caching allocator hands freed memory out again, and `torch.compile` with CUDA graphs
# makes the addresses of a decode step fixed (`vllm/compilation/cuda_graph.py`). What is the same is the purpose: before it sizes the KV
# cache, vLLM measures how much memory the activations of the largest step take at their peak, for the cache gets what is left
# (`determine_available_memory` in `vllm/v1/worker/gpu_worker.py`).

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, display_figure, examine, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, solution
from tinyvllm_ref.device import describe

print(describe())

# %% [markdown]
# > **Fast track.** You know liveness and first fit? Go to [exercise 16.3](#16.3-·-plan_buffers,-the-part), pass it, do the debugging of
# > [16.5](#16.5-·-A-table-with-faults), and leave.

# %% [markdown]
# ## The question
#
# A layer computes a dozen arrays on its way: the norm's output, queries, keys and values, gate and up, and so on. They are its
# **activations**. Each is read by the next operation or two, and then never again. In lesson 13 you called `cp.empty` for each of them.
# What does that cost?
#
# **Time.** With 11 arrays a layer and 16 layers, 176 requests for memory a token. CuPy's pool makes each cheap (lesson 04), but not
# free, and a CUDA graph, which replays a recorded step, needs every address to be the same each time.
#
# **Space.** What activations take, the KV cache can not have. And it is the *largest* step that counts: a prompt of 8,192 tokens on a
# model of Llama 3.2 1B's sizes needs, for `gate_up` alone, $8{,}192 \times 2 \times 8{,}192 \times 4$ bytes:

# %%
print(f"{8192 * 2 * 8192 * 4 / 1e9:.2f} GB")

# %% [markdown]
# So: **plan once, allocate once, use again and again.** Three questions lead there. When is each array needed? Where can it lie, so that
# nothing it meets lies there too? And how would we notice if the answer to the first was wrong?
#
# ## Alive from here to there
#
# A buffer is **alive** from the first operation that touches it to the last, both included. Here is a program of four operations:
#
# | step | operation | reads | writes |
# |---|---|---|---|
# | 1 | load | | a |
# | 2 | double | a | b |
# | 3 | add | a, b | c |
# | 4 | store | c | |
#
# `a` is alive in steps 1 to 3, `b` in 2 to 3, `c` in 3 to 4. Could `c` take the place of `a`? No: `c` is written in step 3, *while* `a` is
# read. A buffer that step 4 writes could.
#
# The operations of a layer, in the same form:

# %%
from tinyvllm_ref.course.exercises.lesson_16_buffer_reuse import LAYER, LIFETIMES, config, row_bytes

for step, (name, reads, writes) in enumerate(LAYER, 1):
    print(f"{step}  {name:16} {', '.join(reads):13} -> {', '.join(writes)}")

# %% [markdown]
# ## 16.1 · When is a buffer alive?
#
# A program is a list of `(name, reads, writes)`, as `LAYER` is; the steps count from 1. Give, for each buffer, its first and its last step.

# %%
# Exercise 16.1 - when is a buffer alive?
def lifetimes(program):
    """[(name, reads, writes), ...] -> {buffer: (first step, last step)}."""
    # BEGIN SOLUTION (6 lines): go through the steps, and note the first and the last that touches each buffer
    first, last = {}, {}
    for step, (_, reads, writes) in enumerate(program, 1):
        for buffer in (*reads, *writes):
            first.setdefault(buffer, step)
            last[buffer] = step
    return {buffer: (first[buffer], last[buffer]) for buffer in first}
    # STUB return {buffer: (1, 1) for name, reads, writes in program for buffer in writes}  # replace this line
    # END SOLUTION

# %%
check("16.1", lifetimes)

# %% [markdown]
# **One thing that a single layer does not show.** The layers follow each other, and use the same buffers. `residual`, the stream,
# is carried through all of them. And `x`: operation 9 writes it, and the *next* layer's operation 1 reads it. So both are alive all
# the time: steps 0 to 10, where 0 is the embedding in front of the layers, and 10 the final norm behind them. All the others begin
# and end within a layer.
#
# Here are the lifetimes with the bytes that each buffer needs for one token of tiny-stories:

# %%
sizes = row_bytes(config())
for name, (first, last) in LIFETIMES.items():
    print(f"{name:11} {sizes[name]:6,} bytes  {' ' * first + '#' * (last - first + 1):11}")

# %% [markdown]
# ## 16.2 · How many bytes a token?
#
# If each of these buffers has memory of its own, how many bytes does a token take? And how many are enough, if those that are never alive
# in a common step may share? (Do it on paper; sizes that are not multiples of 256 do not matter, since a pass has hundreds of tokens.)

# %%
# Exercise 16.2 - how many bytes a token?
# BEGIN SOLUTION (2 lines): two numbers of bytes
apart = 10368
packed = 6656
# STUB apart = None
# STUB packed = None
# END SOLUTION
predict("16.2", apart=apart, packed=packed)

# %% tags=["nbval-ignore-output"]
measure("16.2")

# %% [markdown]
# ## 16.3 · `plan_buffers`, the part
#
# Now place them. Think of a sheet of paper: time runs to the right, memory upwards. A buffer is a box: as wide as its life, as high
# as its size. Move the boxes up and down, never sideways, so that none overlap and the pile is as low as possible. Finding the very
# lowest pile is NP-hard: nobody knows a fast way to it. But a simple rule comes near: **place the largest first,
# each at the lowest offset where it fits** (Pisarchyk and Lee, *Efficient Memory Management for Deep Neural Net Inference*, 2020).
#
# - Two lifetimes $(f_1, l_1)$ and $(f_2, l_2)$ have a common step if $f_1 \le l_2$ and $f_2 \le l_1$. Lifetimes that only *touch* have one,
#   too: in that step one buffer is read while the other is written.
# - Every offset is a multiple of 256, for the reasons of lesson 04.
# - To find the lowest free offset, begin with 0 and go through the placed buffers from the lowest up. One that is alive in a common step
#   and is in the way sends you to its end.
#
# By hand: 1,000 bytes in steps 1 to 2, 500 in 2 to 3, 1,000 in 3 to 4. The first goes to 0, and ends at 1,024 (rounded up). The third is
# next: it never meets the first, and goes to 0. The second meets both: 1,024. The arena has 1,536 bytes instead of 2,560.
#
# The check does not ask for these very offsets. It asks that nothing alive overlaps, that offsets are round, and that the arena
# stays within a budget a little above what is alive at the worst step. Any rule that achieves it is right: the
# reference's is one answer.

# %%
# Exercise 16.3 - plan_buffers, the part
def plan_buffers(lifetimes):
    """[(bytes, first, last), ...] -> (offsets in the same order, bytes of the arena)."""
    # BEGIN SOLUTION (11 lines): the largest first, each at the lowest offset that is free in all of its steps
    offsets, placed = [0] * len(lifetimes), []
    for i in sorted(range(len(lifetimes)), key=lambda i: -lifetimes[i][0]):
        size, first, last = lifetimes[i]
        offset = 0
        for begin, end, other_first, other_last in sorted(placed):
            together = other_first <= last and first <= other_last
            if together and begin < offset + size:
                offset = max(offset, end)
        offsets[i] = offset
        placed.append((offset, offset + (size + 255) // 256 * 256, first, last))
    return offsets, max(end for _, end, _, _ in placed)
    # STUB return [0] * len(lifetimes), 256  # replace this line
    # END SOLUTION

# %%
check("16.3", plan_buffers)

# %% [markdown]
# The layer's buffers, each by itself and as *your* plan packs them, for 64 tokens:

# %% tags=["nbval-ignore-output"]
show("16.3")

# %% [markdown]
# ## 16.4 · Poison
#
# What if a lifetime was wrong: a reader was overlooked, and by the time it reads, the memory belongs to somebody else? It gets
# numbers. Wrong ones, but numbers, often plausible ones, and only for some lengths of the prompt. Such a fault can live in an
# engine for a long time.
#
# The cure is to make it loud. When a buffer dies, fill it with **NaN**: whoever reads it afterwards computes NaN, and that spreads to the
# logits at once. (The emulation does the same to all fresh memory.)
#
# The arena holds float32 and bfloat16. So the pattern must be a NaN for both: **each 16-bit word a bfloat16 NaN**, which makes
# every pair of words a float32 NaN, since its upper half decides. From lesson 02: all eight exponent bits are 1, and the fraction
# is not 0.
#
# Write the kernel, a thread a word. The grid is rounded up.

# %%
# Exercise 16.4 - poison
poison = cp.RawKernel(r"""
// words: (n,) 16-bit words of any buffer
extern "C" __global__ void poison(unsigned short* words, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    // BEGIN SOLUTION (1 line): make word i a NaN, if there is one
    if (i < n) words[i] = 0x7FC0;
    // STUB if (i < n) words[i] = 0;  // replace this line
    // END SOLUTION
}
""", "poison")

# %%
check("16.4", poison)

# %% [markdown]
# ## 16.5 · A table with faults
#
# Someone has written down the lifetimes of the layer by hand. Three lines are wrong. The check runs a small Llama of one to three
# layers with the buffers where a plan puts them, poisons in front of each operation what is not alive in it, and names the first
# operation that writes a NaN. `examine` shows you what it finds in the table as it stands.
#
# Mend the table. Do not simply let everything live for ever: the report counts bytes, too.

# %%
# Exercise 16.5 - a table with faults
# BEGIN SOLUTION (13 lines): mend three lines of this table
table = {
    "residual": (0, 10),
    "x": (0, 10),
    "normed": (1, 2),
    "qkv": (2, 3),
    "q": (3, 4),
    "k": (3, 4),
    "v": (3, 4),
    "attended": (4, 5),
    "ffn_normed": (6, 7),
    "gate_up": (7, 8),
    "activated": (8, 9),
}
# STUB table = {
# STUB     "residual": (0, 10),
# STUB     "x": (5, 6),
# STUB     "normed": (1, 2),
# STUB     "qkv": (2, 2),
# STUB     "q": (3, 4),
# STUB     "k": (3, 4),
# STUB     "v": (3, 4),
# STUB     "attended": (4, 5),
# STUB     "ffn_normed": (7, 7),
# STUB     "gate_up": (7, 8),
# STUB     "activated": (8, 9),
# STUB }
# END SOLUTION

# %% tags=["nbval-ignore-output"]
examine("16.5")

# %%
check("16.5", table)

# %% [markdown]
# Note what the poison needed: no reference result, no tolerance, no luck. A buffer that is read outside of its life *must* show.
# Without it, the fault in `x` above would have shown only where another buffer happened to lie in the same bytes.
#
# ## 16.6 · Allocate once
#
# The last step: use the plan. A `Workspace` is made once, for the largest pass that may come (`max_tokens`). Then each pass, of a
# prompt or of a single token, asks it for its arrays and gets **views**: arrays that own no memory. `a[:n]` is one; so is
# `a.view(dtype)`, the same bytes read as another type; so is `reshape` of a contiguous array. None of them allocates.
#
# `buffers` says for each name `(columns, dtype, first, last)`: the array is `(tokens, columns)`, and one number of it has
# `np.dtype(dtype).itemsize` bytes. Your `plan_buffers` may be called.

# %%
# Exercise 16.6 - allocate once
class Workspace:
    """The arrays of passes over up to max_tokens tokens, in one arena."""

    def __init__(self, buffers, max_tokens):
        """buffers: {name: (columns, dtype, first, last)}."""
        # BEGIN SOLUTION (10 lines): sizes in bytes, the plan, one arena of uint8, each buffer a view of it
        sizes = {}
        for name, (columns, dtype, *_) in buffers.items():
            sizes[name] = max_tokens * columns * np.dtype(dtype).itemsize
        offsets, total = plan_buffers([(sizes[name], *buffers[name][2:]) for name in buffers])
        arena = cp.empty(total, np.uint8)
        self.whole = {}
        for name, offset in zip(buffers, offsets, strict=True):
            columns, dtype = buffers[name][:2]
            flat = arena[offset : offset + sizes[name]].view(dtype)
            self.whole[name] = flat.reshape(max_tokens, columns)
        # STUB self.buffers = buffers  # replace this line
        # END SOLUTION

    def views(self, tokens):
        """{name: array (tokens, columns)}, without allocating."""
        # BEGIN SOLUTION (1 line): the first rows of each
        return {name: array[:tokens] for name, array in self.whole.items()}
        # STUB return {name: cp.empty((tokens, one[0]), one[1]) for name, one in self.buffers.items()}  # replace this
        # END SOLUTION

# %%
check("16.6", Workspace)

# %% [markdown]
# ## Nothing is allocated
#
# The reference engine does just this (`tinyvllm_ref/buffers.py`). Count for yourself: below, every request for device memory during
# the model's forward pass is counted while two stories are written.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref import LLM, SamplingParams

llm, counts = LLM("tiny-stories"), []
pool, forward = cp.get_default_memory_pool(), llm.model.forward


def counting_forward(inputs, kv_cache):
    made = []

    def allocate(size):
        made.append(size)
        return pool.malloc(size)

    with cp.cuda.using_allocator(allocate):
        logits = forward(inputs, kv_cache)
    counts.append((len(inputs.ids), len(made)))
    return logits


llm.model.forward = counting_forward
llm.generate(["Once upon a time", "The fox"], SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)
print("(tokens, allocations) of each pass:", counts)

# %% [markdown]
# ## Your part in the engine
#
# Your plan now places the activations of the engine. Below: the story, and what three mistakes of this lesson do to it.

# %% tags=["nbval-ignore-output"]
show_engine("16")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - A buffer is alive from the first step that touches it to the last, both included. What loops is alive all the time.
# - Buffers without a common step may share memory. The most bytes alive in one step are a bound that a good plan nearly reaches.
# - Largest first, each at the lowest offset where it fits.
# - Poison what is dead. A stale read that gives NaN is found today, one that gives numbers in a year.
# - Allocate for the largest step, once; every other step gets views.
#
# ## To think about
#
# <details><summary>q, k and v are copied out of qkv by operation 3. Could they be views of it instead?</summary>
#
# Views of its columns, yes: nothing would be copied, and qkv would live until operation 4. But the rows of such a view are not side
# by side, and every kernel that takes them would need a stride as an argument. Engines do both: vLLM hands strided views on, and
# its kernels take strides.
# </details>
#
# <details><summary>silu_mul reads gate_up and writes activated. Could activated lie in the same bytes as gate_up?</summary>
#
# Element by element it looks possible: each thread reads its two inputs before it writes its one output. But activated is bfloat16
# and packed more tightly, so thread $i$ would write bytes that another thread has yet to read, and threads run in any order.
# In-place is safe where each element's bytes are its own: rope on q, or the addition to the residual.
# </details>
#
# <details><summary>Why plan for the largest pass, if nearly all passes decode a few tokens?</summary>
#
# Because the memory must be there when the prompt comes, and until then nobody else may have taken it for good. The KV cache is
# sized with what is left *after* the largest pass. That is also a reason to cut long prompts into pieces: a budget of tokens a
# step, as in lesson 19, bounds the activations.
# </details>
#
# ## Further reading
#
# - Yury Pisarchyk, Juhyun Lee, *Efficient Memory Management for Deep Neural Net Inference* (2020): greedy by size, and its rivals,
#   measured.
# - Tianqi Chen and others, *Training Deep Nets with Sublinear Memory Cost* (2016): when even the bound is too much, compute again.
# - Jordan Gergov, *Algorithms for Compile-Time Memory Optimization* (SODA 1999): how far from the lowest pile a fast rule can be.
#
# **Next:** [lesson 17, Sampling](17_sampling.ipynb).
