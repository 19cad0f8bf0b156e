# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 21 · A KV cache in pages
#
# **At the end you have** `BlockManager`, which decides who owns which piece of the cache, and a `kv_write` that puts keys and values
# wherever it says. Together they let an engine hold several times as many requests in the same memory.
#
# **About 60 minutes** · builds on 02 (bfloat16), 12 (KV heads), 15 (the KV cache) and 19 (a scheduler that lets requests in)
#
# **In vLLM** `KVCacheManager.allocate_slots` (`vllm/v1/core/kv_cache_manager.py`) gives blocks, or `None` where there are too few; its free
# blocks are kept by `BlockPool` in `block_pool.py`; and the kernel `reshape_and_cache_flash_kernel` (`cache_kernels.cu`) writes keys and values by
# `slot_mapping`, in which −1 marks a row that only pads. What differs: its blocks carry reference counts, because requests may share them
# (prefix caching), the free list is a queue, so that the block freed longest ago is reused first, and block 0 is never given to anyone.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, earlier, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, solution
from tinyvllm_ref.device import describe

print(describe())
BF16_CUDA = earlier("BF16_CUDA")

# %% [markdown]
# > **Fast track.** You know block tables and slots? Do [21.4](#21.4-·-Who-owns-which-block:-a-part), which is the allocator, and
# > [21.3](#21.3-·-Keys-and-values-into-their-slots:-a-part), which is ten lines. [21.5](#21.5-·-Shrink-a-leaking-trace) is a tool that you will
# > want again.

# %% [markdown]
# ## The question
#
# In lesson 15 each request got one piece of the cache, long enough for the longest text that it might become. How long a text will be
# nobody knows beforehand: the model decides when it ends. So a request that might write 1,024 tokens reserves 1,024 slots, asks one short
# question, and leaves the rest empty. Memory that is reserved and empty is of no use to anyone else, and it is memory that says how many
# requests an engine can serve at once.
#
# Could one not reserve little, and get more when it is needed? The next piece of memory belongs to a neighbour by then. One could move the
# whole request somewhere else, or keep gaps; but gaps of all sizes are what is left after a while, none of them large enough: **fragmentation**.
#
# Operating systems met this problem long before, and their answer was **pages**. Cut memory into small blocks of one size, and let the
# pieces of a text lie in any blocks, in any order. A list says where: the **block table** of a request. Blocks are all alike, so
# any free one will do, and no gap is too small.
#
# **By hand.** Blocks of 4 slots; a request of 10 tokens has the block table 5, 2, 7:
#
# | token | 0 1 2 3 | 4 5 6 7 | 8 9 |
# |---|---|---|---|
# | block of the text | 0 | 1 | 2 |
# | block of the cache | **5** | **2** | **7** |
# | slot | 20 21 22 23 | 8 9 10 11 | 28 29 |
#
# Token 6 lies in block 1 of the text ($6 \div 4$, rounded down), at offset 2 (the remainder). Block 1 of the text is block 2 of the cache, and so its
# **slot** is $2 \cdot 4 + 2 = 10$. In general, with blocks of $B$ slots:
#
# $$\mathrm{slot}(p) = \mathrm{table}[\lfloor p / B \rfloor] \cdot B + p \bmod B$$
#
# When token 12 comes, a fourth block is taken, whichever is free. At most $B - 1$ slots of a request are ever empty: those at the end of its last
# block.
#
# The whole idea in NumPy. A cache is `(blocks, block_size, kv_heads, head_dim)`; with the first two axes joined, a slot is a row:


# %%
def slots_in_numpy(table, positions, block_size):
    return np.array(table)[positions // block_size] * block_size + positions % block_size


slots_in_numpy([5, 2, 7], np.arange(10), 4)

# %% [markdown]
# ## 21.1 · How much is wasted?
#
# At some moment eight requests hold 30, 100, 17, 250, 64, 500, 33 and 128 tokens. How many slots are reserved and empty
#
# - if each request has 1,024 slots in one piece?
# - if each has as many blocks of 16 as it needs?
#
# Write down what you expect; a rough number will do. (With the `sum` of a list Python will count for you.)

# %%
# Exercise 21.1 - how much is wasted?
# BEGIN SOLUTION (2 lines): two numbers
contiguous = 7070
paged = 62
# STUB contiguous = None
# STUB paged = None
# END SOLUTION
predict("21.1", contiguous=contiguous, paged=paged)

# %% tags=["nbval-ignore-output"]
measure("21.1")

# %% [markdown]
# The numbers are invented, but not their kind: the authors of vLLM measured, in the systems of their time, that only 20 to 38 % of the memory
# for keys and values held any (Kwon and others, 2023, section 1). What would Llama 3.2 1B make of 7,070 empty slots?

# %%
layers, kv_heads, head_dim = 16, 8, 64
bytes_a_token = 2 * layers * kv_heads * head_dim * 2  # keys and values, every layer, two bytes a number
print(f"{bytes_a_token:,} bytes a token; 7,070 empty slots are {7070 * bytes_a_token / 1e6:,.0f} MB")

# %% [markdown]
# ## 21.2 · From a token to its slot
#
# A step of the engine brings tokens of several requests, packed one behind the other (lesson 18). For each token you get its position in its own
# text and the number of its request. All block tables come in one array, a row a request, padded with −1 where a request has fewer blocks than the
# longest. Find the slots: one thread a token.
#
# A slot is a `long long`, 64 bits. A cache may have many blocks, and the address in bytes, which we make of the slot later, is larger by a
# factor of some hundreds: this is where 32 bits run out. In C++ a product of two `int` is an `int`, *even if it is then stored in a `long long`*. So
# make one factor long first, with `(long long)`.

# %%
# Exercise 21.2 - from a token to its slot
find_slots = cp.RawKernel(r"""
// positions, requests: (tokens,); block_tables: (requests, max_blocks) -> slots: (tokens,)
extern "C" __global__ void find_slots(const int* positions, const int* requests, const int* block_tables,
                                      long long* slots, int tokens, int max_blocks, int block_size) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    // BEGIN SOLUTION (5 lines): the table of this token's request; its block; the slot
    if (t < tokens) {
        const int* table = block_tables + requests[t] * max_blocks;
        int position = positions[t];
        slots[t] = (long long)table[position / block_size] * block_size + position % block_size;
    }
    // STUB if (t == 0) slots[0] = 0;  // replace this line
    // END SOLUTION
}
""", "find_slots")

# %%
check("21.2", find_slots)

# %% [markdown]
# ## 21.3 · Keys and values into their slots: a part
#
# Now write the new keys and values of one layer to their slots. `k` and `v` are `(tokens, kv_heads, head_dim)` in float32; the caches are
# `(blocks, block_size, kv_heads, head_dim)` in BF16. The row of slot $s$ begins $s \cdot \mathrm{width}$ numbers in, with
# $\mathrm{width} = \mathrm{kv\_heads} \cdot \mathrm{head\_dim}$: the slot knows about blocks already, and the kernel need not.
#
# One block of threads a token; its threads share the columns in a strided loop. A slot of −1 belongs to a row that only pads the batch: write nothing for it.
# (`return` is safe here, because no barrier follows.)
#
# If you wrote `kv_write` in lesson 15, the contract is the same: paste it in, and see whether it holds for slots in any order.

# %%
# Exercise 21.3 - keys and values into their slots: a part
kv_write_kernel = cp.RawKernel(BF16_CUDA + r"""
// k, v: (tokens, width) float32; slots: (tokens,); caches: (blocks * block_size, width) bf16; a block a token
extern "C" __global__ void kv_write_kernel(const float* k, const float* v, const long long* slots,
                                           bf16* key_cache, bf16* value_cache, int width) {
    // BEGIN SOLUTION (7 lines): this token's slot; where its rows begin in k and in the cache; the columns
    long long slot = slots[blockIdx.x];
    if (slot < 0) return;
    size_t from = (size_t)blockIdx.x * width, to = (size_t)slot * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        key_cache[to + c] = float_to_bf16(k[from + c]);
        value_cache[to + c] = float_to_bf16(v[from + c]);
    }
    // STUB if (threadIdx.x == 0) key_cache[0] = 0;  // replace this line
    // END SOLUTION
}
""", "kv_write_kernel")


def kv_write(k, v, slots, key_cache, value_cache):
    """k, v (tokens, kv_heads, head_dim) float32 -> caches (blocks, block_size, kv_heads, head_dim) bf16."""
    tokens, kv_heads, head_dim = k.shape
    if tokens:
        arguments = (k, v, slots, key_cache, value_cache, np.int32(kv_heads * head_dim))
        kv_write_kernel((tokens,), (128,), arguments)
    return key_cache, value_cache

# %%
check("21.3", kv_write)

# %% tags=["nbval-ignore-output"]
measure("21.3")

# %% [markdown]
# Shuffled slots cost nothing extra. A row of 8 heads of 64 is 1,024 bytes, 32 whole sectors; whether the next row lies beside it or elsewhere makes no
# difference to the memory. That is why paging is cheap on a GPU: the pages are far larger than what memory moves at a time.
#
# ## 21.4 · Who owns which block: a part
#
# Something must keep account: which blocks are free, and which belong to whom. That is plain Python; no array is touched. The cache can be full at
# any time, and that is no error. Then the answer is **no**, and the request waits.
#
# - `allocate(id, num_tokens)` makes the table of a request long enough for `num_tokens` tokens *in all*, and says `True`. Called for 5 tokens and then for
#   6, with blocks of 4, it takes 2 blocks the first time and none the second; a table never gets shorter. If too few blocks are free it says `False`, and **nothing has changed**.
# - `free(id)` gives back all blocks of a request. For an id that has none it raises a `KeyError`: somebody has lost count, and we want to know.
# - `table(id)` is the list of the request's blocks, in the order of its tokens. `num_free` says how many blocks are free.
# - `check()` raises a `RuntimeError` unless every block is in just one place: in the free list, or in one table, once.
#
# An allocator that is wrong rarely fails where it is wrong. A block that is lost shows hours later, as an engine that takes no requests any more; a block
# that is given twice shows as a story into which another one leaks. So the check plays hundreds of random steps, looks at all tables after each, and
# it also damages your lists on purpose, to see whether your `check()` notices. For this it needs the two names that stand in `__init__`.

# %%
# Exercise 21.4 - who owns which block: a part
class BlockManager:
    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free_blocks = list(range(num_blocks))  # blocks that belong to nobody
        self.tables = {}  # id of a request -> list of its blocks

    @property
    def num_free(self):
        return len(self.free_blocks)

    def allocate(self, id, num_tokens):
        # BEGIN SOLUTION (8 lines): how many are missing? False if too few are free; else move them
        table = self.tables.get(id, [])
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > len(self.free_blocks):
            return False
        self.tables[id] = table
        for _ in range(missing):
            table.append(self.free_blocks.pop())
        return True
        # STUB return False  # replace this line
        # END SOLUTION

    def free(self, id):
        # BEGIN SOLUTION (3 lines): KeyError for an id without blocks; else give all of them back
        if id not in self.tables:
            raise KeyError(f"request {id!r} has no blocks: never allocated, or freed already")
        self.free_blocks += self.tables.pop(id)
        # STUB pass  # replace this line
        # END SOLUTION

    def table(self, id):
        return self.tables[id]

    def check(self):
        # BEGIN SOLUTION (3 lines): RuntimeError unless free list and tables hold each block once
        everywhere = sorted(self.free_blocks + [block for table in self.tables.values() for block in table])
        if everywhere != list(range(self.num_blocks)):
            raise RuntimeError(f"blocks lost, doubled or foreign: {everywhere}")
        # STUB pass  # replace this line
        # END SOLUTION

# %%
check("21.4", BlockManager)

# %% [markdown]
# Twelve requests come at once and share 256 slots. Your `BlockManager` serves them twice: first with 4 blocks of 64 (each drawn as four rows), which is one piece a request, as in
# lesson 15; then with 16 blocks of 16. The memory is the same. A coloured field is a block that holds tokens; what is reserved and empty is hatched.

# %% tags=["nbval-ignore-output"]
show("21.4")

# %% [markdown]
# In the upper picture no more than four requests ever run, and more than half of what they hold is hatched. In the lower one a new request is let in as soon as
# blocks for its prompt are free, so more run at a time and all are done earlier. The heading says how much of the reserved memory was empty.
#
# Why not blocks of 1, then, and waste nothing? Tables would be as long as the texts, and the kernel that reads the cache (lesson 22) would look up every
# single token. With 16 slots a block, as vLLM mostly has it, one entry serves 16 tokens, and half a block a request is little.
#
# ## 21.5 · Shrink a leaking trace
#
# A server has run for an hour, and three blocks are missing. You have the **trace**, a list of all steps: `"allocate a 9"`, `"free a"`, thousands of them. Played
# again on a fresh manager, the blocks are missing again. But which of the steps is to blame?
#
# There is a way that needs no thinking. Leave a step out, and play the rest. Does it still leak? Then that step had nothing to do with it, and need not come
# back. Go on like this until nothing more can go. What is left is a few steps that you can follow by hand, and the fault is in plain sight.
#
# One thing stands in the way. `leaks(steps)` plays a list of steps on a fresh manager and answers whether blocks are missing at the end; but where a list makes no sense, a
# `free` without its `allocate`, it answers `False`. So of an `allocate` and its `free` neither may be able to go alone, and yet both can go *together*.
#
# Write `shrink(trace, leaks)`. Return a list that leaks, in the old order, from which no single step and no two steps can be left out. The list that you are
# given must stay as it is. `combinations(range(4), 2)` goes through (0, 1), (0, 2), … (2, 3), and `combinations(range(4), 1)` through (0,), (1,), (2,), (3,).

# %%
# Exercise 21.5 - shrink a leaking trace
from itertools import combinations


def shrink(trace, leaks):
    # BEGIN SOLUTION (11 lines): leave out one step or two, as long as the rest leaks; until nothing more can go
    def shorter(trace):
        for count in (1, 2):
            for out in combinations(range(len(trace)), count):
                rest = [step for i, step in enumerate(trace) if i not in out]
                if leaks(rest):
                    return rest
        return None

    while (rest := shorter(trace)) is not None:
        trace = rest
    return trace
    # STUB return list(trace)  # replace this line
    # END SOLUTION

# %%
check("21.5", shrink)

# %% [markdown]
# Here is a manager with one of the faults that the check had planted, and a trace of 40 steps that leaks. A field of its picture is a block; one marked *lost* belongs to
# nobody and is not free either. What does *your* `shrink` leave of it?

# %% tags=["nbval-ignore-output"]
show("21.5")

# %% [markdown]
# Each of the steps is needed: something that takes a part of the pool, and an `allocate` that is too large for what is left and must be refused. So it is the
# refusal that leaks: the first thing to look at in `allocate` is what it does before it says no. The same few lines shrink a failing input of anything: a scheduler's trace (lesson 19), a prompt, a program. Testing libraries such as
# Hypothesis do this to every failure before they show it.
#
# ## Your parts in the engine
#
# Both parts are at work below; a second story is written beside yours, in the same cache. Then four mistakes. The first gives both stories the same block: each step
# overwrites what the other has just written. The second has no block for a token that it must write, and the engine stops.

# %% tags=["nbval-ignore-output"]
show_engine("21")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - One piece of memory a request must be as long as the longest text, and is mostly empty. Blocks waste less than one block a request.
# - slot = table[position // block_size] · block_size + position % block_size. The table has an entry a block; a slot counts tokens.
# - The allocator answers "no" by its return value, and a "no" changes nothing.
# - Every block is in the free list or in one table, just once. A `check()` that can say so finds faults where they happen.
# - Shrink a failing trace before you think about it.
#
# ## To think about
#
# <details><summary>Could two requests with the same beginning share blocks?</summary>
#
# Yes: their keys and values for the common tokens are the same numbers. Two tables may name the same block as long as nobody writes to it, and full blocks are never
# written again. But then `free` must know when the last owner is gone: each block gets a count of its owners. vLLM finds such beginnings by a hash of the block's
# tokens and all before it: prefix caching.
# </details>
#
# <details><summary>Blocks of 16 of how many bytes? In Llama 3.2 1B a block holds the keys and values of 16 tokens in all layers.</summary>
#
# 16 · 32,768 bytes = 512 KiB. One layer's keys of a block are 16 · 8 · 64 · 2 bytes = 16 KiB. It is this piece that lies together in memory, and it is large compared with a
# sector of 32 bytes.
# </details>
#
# <details><summary>The pool is full, every running request needs one more block, and none has ended. What now?</summary>
#
# Nobody can go on: each waits for the others. Somebody must give blocks back without having ended. Lesson 23 takes the newest request, frees all its blocks and puts it in
# front of the queue; its keys and values will be computed again. This is called preemption.
# </details>
#
# ## Further reading
#
# - Kwon and others, *Efficient Memory Management for Large Language Model Serving with PagedAttention* (SOSP 2023): where this comes from.
# - Kilburn, Edwards, Lanigan and Sumner, *One-Level Storage System* (IRE Transactions on Electronic Computers, 1962): where *that* comes from; pages in the Atlas computer.
# - Zeller and Hildebrandt, *Simplifying and Isolating Failure-Inducing Input* (IEEE Transactions on Software Engineering, 2002): shrinking, done faster.
#
# **Next:** [lesson 22, Paged attention](22_paged_attention.ipynb).
