# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 18 · Static batching
#
# **At the end you have** `pack(sequences)`: it lays the tokens of many requests side by side, so that one pass of the model serves
# them all. You will know why that is nearly free, and see from your own run what a batch wastes that waits for its slowest member.
#
# **About 60 minutes** · builds on 09 (roofline), 11 (positions), 12 (bytes of the KV cache), 14 (last rows) and 15 (decode)
#
# **In vLLM** a step is packed in `_prepare_inputs` of `vllm/v1/worker/gpu_model_runner.py`: the same line of tokens, the same
# positions, and `query_start_loc`, which is your `query_starts`; `logits_indices = query_start_loc[1:] - 1` picks the last rows.
# What differs: there it is the scheduler that decides in every step who takes part, which is lesson 19's subject.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, display_figure, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, solution
from tinyvllm_ref.device import describe

print(describe())

# %% [markdown]
# > **Fast track.** You know ragged batches and why decoding is bound by bandwidth? Go to [exercise 18.2](#18.2-·-pack,-the-part), pass it,
# > then look at the picture of [18.4](#18.4-·-A-batch-that-waits), and leave.

# %% [markdown]
# ## The question
#
# So far one request had the model to itself. Decoding a token reads every weight once, and does two operations with each (lesson
# 09): a card that could do hundreds of operations in the time of one read is mostly waiting for memory. A second request needs *the
# same weights*. If it rides along in the same pass, they are read once for both.
#
# So: put several requests into one pass. A linear layer does not care; it gets more rows. What must be cared for is everything that
# is *not* the same for all: who attends to whom, where each token stands in its text, and from which row the next token is drawn.
#
# ### A rectangle
#
# Prompts have different lengths. The obvious way is to make a rectangle: a row a prompt, the short ones filled up with a token that means
# nothing, the **padding**. Two prompts, `5 6 7` and `8`:
#
# | | column 0 | 1 | 2 |
# |---|---|---|---|
# | row 0 | 5 | 6 | 7 |
# | row 1 | · | · | 8 |
#
# Padding goes on the *left* when text is to be continued: then the last token of every prompt is in the last column, and the next
# token goes behind it. Three things have to be right, and each is a famous bug:
#
# - **positions**: the 8 is at position 0, though its column is 2;
# - **the mask**: the 8 may see itself alone. The causal mask alone would let it see two paddings, with keys and values like any token's;
# - **the last row**: with padding on the right it would be in a different column for each.
#
# ## 18.1 · A rectangle of prompts
#
# In NumPy: ids `(B, L)`, padded with 0 on the left; positions `(B, L)`, 0 where there is padding; and a mask `(B, L, L)`:
# `mask[b, i, j]` is True where query `i` of row `b` may see key `j`, and False wherever padding is involved.

# %%
# Exercise 18.1 - a rectangle of prompts
def pad(sequences):
    """Lists of ids -> ids (B, L), positions (B, L), mask (B, L, L) of bool."""
    B, L = len(sequences), max(len(tokens) for tokens in sequences)
    ids, positions = np.zeros((B, L), np.int64), np.zeros((B, L), np.int64)
    mask = np.zeros((B, L, L), bool)
    # BEGIN SOLUTION (5 lines): fill each row (np.tri(n, dtype=bool) is a triangle: True where j <= i)
    for b, tokens in enumerate(sequences):
        n = len(tokens)
        ids[b, L - n :] = tokens
        positions[b, L - n :] = np.arange(n)
        mask[b, L - n :, L - n :] = np.tri(n, dtype=bool)
    # END SOLUTION
    return ids, positions, mask

# %%
check("18.1", pad)

# %% [markdown]
# ### What the rectangle costs
#
# Every padded cell goes through every layer, and comes out as nothing. Here are the prompts of this lesson's run. One long prompt
# among short ones makes the rectangle mostly empty:

# %%
from tinyvllm_ref.checkpoint.names import resolve
from tinyvllm_ref.course.exercises.lesson_18_static_batching import PROMPTS
from tinyvllm_ref.tokenizer import Tokenizer

tokenizer = Tokenizer(resolve("tiny-stories"))
lengths = np.array([len(tokenizer.encode(prompt)) for prompt in PROMPTS])
print("tokens of each prompt:", lengths)
for what, some in (("these 12 prompts", lengths), ("with one of 500 more", np.append(lengths, 500))):
    cells = len(some) * some.max()
    print(f"{what:21} {some.sum():4} tokens, a rectangle of {cells:5}: {1 - some.sum() / cells:.0%} padding")

# %% [markdown]
# ## One line instead
#
# Almost everything in a model works on each token by itself: norms, products, RoPE, the feed-forward. For these a batch need not be
# a rectangle. Lay the prompts **one after the other in one line**, and note where each begins:
#
# | ids | 5 | 6 | 7 | 8 | 9 |
# |---|---|---|---|---|---|
# | request | 0 | 0 | 0 | 1 | 1 |
# | positions | 0 | 1 | 2 | 0 | 1 |
#
# `query_starts` is `0 3 5`: request $b$ has the tokens from `query_starts[b]` up to, not including, `query_starts[b + 1]`. So it
# has one entry more than there are requests, and the last entry is the number of tokens. Only attention has to look at it: it takes
# the requests one by one, or starts blocks that know whose tokens they have. There is no padding, and so nothing to mask.
#
# In a decode step every request has one token: ids `7 9`, `query_starts` `0 1 2`. The same function serves both, and a mixture of
# them. (Where a request has tokens in the cache already, the engine adds their number to the positions.)
#
# ## 18.2 · `pack`, the part
#
# Lists of ids in, three arrays on the device out, all int32.

# %%
# Exercise 18.2 - pack, the part
def pack(sequences):
    """B lists of ids, T in all -> ids (T,), positions (T,), query_starts (B + 1,): int32, on the device."""
    # BEGIN SOLUTION (4 lines): the line, the positions, where each begins
    ids = np.concatenate([np.array(tokens, np.int32) for tokens in sequences])
    positions = np.concatenate([np.arange(len(tokens), dtype=np.int32) for tokens in sequences])
    query_starts = np.cumsum([0] + [len(tokens) for tokens in sequences], dtype=np.int32)
    return cp.asarray(ids), cp.asarray(positions), cp.asarray(query_starts)
    # STUB return cp.zeros(1, np.int32), cp.zeros(1, np.int32), cp.zeros(2, np.int32)  # replace this line
    # END SOLUTION

# %%
check("18.2", pack)

# %% [markdown]
# ## 18.3 · Only the last row of each
#
# The next token comes from the last token of each request. The LM head is the widest product of all, and nobody wants its logits
# for the other rows (lesson 14). So between the final norm and the LM head stands a small kernel: `x` is `(T, H)` in bfloat16,
# `out` is `(B, H)`, and row $b$ of it is the last row of request $b$. One block a request; the block has 128 threads, and a row any
# number of columns.

# %%
# Exercise 18.3 - only the last row of each
gather_last = cp.RawKernel(r"""
// x: (T, H) bf16 bits, query_starts: (B + 1,) int32, out: (B, H) bf16 bits; a block for each request
extern "C" __global__ void gather_last(const unsigned short* x, const int* query_starts, unsigned short* out, int H) {
    int b = blockIdx.x;
    // BEGIN SOLUTION (2 lines): which row of x; then the threads copy it
    int row = query_starts[b + 1] - 1;
    for (int c = threadIdx.x; c < H; c += blockDim.x) out[(size_t)b * H + c] = x[(size_t)row * H + c];
    // STUB if (threadIdx.x == 0 && H > 0) out[(size_t)b * H] = 0;  // replace this line
    // END SOLUTION
}
""", "gather_last")

# %%
check("18.3", gather_last)

# %% tags=["nbval-ignore-output"]
measure("18.3")

# %% [markdown]
# ## A batch is nobody's business
#
# A request must not notice that others are there. In this emulation that holds to the bit, for every sum is added up in an order
# that depends on nothing but its own row. (On a card, a product of 12 rows may add in another order than one of a single row: last
# bits may differ, and where the best two tokens are nearly tied, the story may part.)

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref import LLM, SamplingParams

llm, params = LLM("tiny-stories"), SamplingParams(max_tokens=24, temperature=0.0)
together = [out.outputs[0].token_ids for out in llm.generate(list(PROMPTS[:6]), params, use_tqdm=False)]
alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS[:6]]
print("six stories in one batch are the same as one by one:", together == alone)

# %% [markdown]
# ## 18.4 · A batch that waits
#
# Now serve more requests than fit at once. There are `num_slots` seats. The simplest rule is **static batching**: take the first
# `num_slots` requests, decode until *all* of them have ended, then take the next ones. Who ends early keeps the seat, empty, until
# the batch is over.
#
# `next_tokens(sequences)` is the model: it gets a list of sequences, each a prompt and the tokens that it has drawn, and gives one
# new token for each. (How it computes them, with a cache or without, is not your business here.) Ask it only for requests that are
# still running: rows of finished ones are work for nothing.
#
# A request ends with any of `end_ids`, which is kept as its last token, or when it has `max_tokens`. Return the drawn tokens of
# each request, and `slots`: for each slot a list with an entry a step: the number of the request that it worked for, or None.
#
# By hand, two slots and four requests whose texts will have 2, 4, 1 and 3 tokens:
#
# | step | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
# |---|---|---|---|---|---|---|---|
# | slot 0 | 0 | 0 | · | · | 2 | · | · |
# | slot 1 | 1 | 1 | 1 | 1 | 3 | 3 | 3 |

# %%
# Exercise 18.4 - a batch that waits
def serve(prompts, next_tokens, num_slots, end_ids, max_tokens):
    """-> outputs: the drawn tokens of each request; slots[slot][step]: a request's number, or None."""
    outputs = [[] for _ in prompts]
    slots = [[] for _ in range(num_slots)]
    for first in range(0, len(prompts), num_slots):
        # BEGIN SOLUTION (8 lines): serve requests first, first + 1, ... until all of this batch have ended
        running = list(range(first, min(first + num_slots, len(prompts))))
        while running:
            tokens = next_tokens([prompts[r] + outputs[r] for r in running])
            for slot in range(num_slots):
                slots[slot].append(first + slot if first + slot in running else None)
            for r, token in zip(running, tokens, strict=True):
                outputs[r].append(token)
            running = [r for r in running if outputs[r][-1] not in end_ids and len(outputs[r]) < max_tokens]
        # STUB outputs[first].append(next_tokens([prompts[first]])[0])  # replace this line
        # END SOLUTION
    return outputs, slots

# %%
check("18.4", serve)

# %% [markdown]
# ## 18.5 · How many slots are idle?
#
# Before you look: the course's model continues the twelve prompts above, some of which are nearly at their end. *Your* loop serves
# them in four slots, at most 160 tokens each. What share of all slots and steps is idle, in percent?

# %%
# Exercise 18.5 - how many slots are idle?
# BEGIN SOLUTION (1 line): a number of percent
idle = 38
# STUB idle = None
# END SOLUTION
predict("18.5", idle=idle)

# %% tags=["nbval-ignore-output"]
measure("18.5")

# %% tags=["nbval-ignore-output"]
show("18.4")

# %% [markdown]
# The picture is drawn from the run of your `serve`. The hatched part is what lesson 19 will win back: a seat that is free is given
# to the next request at once.
#
# ## 18.6 · What a step must read
#
# How large should a batch be? Decoding is bound by the bytes that it reads (lesson 09), so count them. In one decode step of a batch:
#
# - the **weights** of all matrices, once, however many requests there are: in each layer qkv, the output projection, gate, up and
#   down; then the LM head ($V \times H$). Norms are too small to count, and the embedding reads one row a token;
# - the **KV cache** of each request: keys and values of its whole context, in every layer. These nobody shares.
#
# All in bfloat16. `m` is a dict of sizes: `m["hidden"]`, and so `layers`, `heads`, `kv_heads`, `head_dim`, `ffn` and `vocab`.

# %%
# Exercise 18.6 - what a step must read
def step_bytes(m, batch, context):
    """Dict of sizes, requests, context of each -> bytes of weights and of KV cache that a decode step reads."""
    # BEGIN SOLUTION (5 lines): both, for any model
    q, kv = m["heads"] * m["head_dim"], m["kv_heads"] * m["head_dim"]
    layer = (q + 2 * kv) * m["hidden"] + q * m["hidden"] + 3 * m["hidden"] * m["ffn"]
    weights = 2 * (m["layers"] * layer + m["vocab"] * m["hidden"])
    cache = 2 * 2 * m["layers"] * kv * context * batch
    return weights, cache
    # STUB return 0, 0  # replace this line
    # END SOLUTION

# %%
check("18.6", step_bytes)

# %% [markdown]
# Bytes for each *token* that comes out, by your function: the step's bytes divided by the batch.

# %% tags=["nbval-ignore-output"]
show("18.6")

# %% [markdown]
# With short contexts the line falls as $1/B$: twice the requests for the same reading. Then it bends, and runs level at the bytes
# of a single request's KV cache, which no batch can share. For 32 requests of 8,192 tokens the cache is 8.6 GB beside 2.5 GB of
# weights, and a larger batch gains next to nothing in speed. So the *cache* is what limits an engine in the end: its bytes in every
# step, and the room that it takes. Lesson 21 is about that room.
#
# ## Your part in the engine
#
# Below, three requests share a batch, and the story of the last one is shown: with your `pack`, with the reference's, and with
# three mistakes. The last of them changes nothing that you can see. Lesson 11 says why: RoPE sees only differences of positions.

# %% tags=["nbval-ignore-output"]
show_engine("18")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - In a batch the weights are read once for all. That is why serving many costs little more than serving one.
# - A rectangle needs padding, and padding must be kept out of attention, of positions, and of the logits. A line with
#   `query_starts` needs none.
# - `query_starts` has one entry more than there are requests; positions begin anew for each.
# - A static batch takes as long as its longest member. The rest of the slots is idle.
# - KV bytes grow with the batch; weights do not. At long contexts the cache is what decides.
#
# ## To think about
#
# <details><summary>Would sorting the requests by length help a static batch?</summary>
#
# Yes, if one knew the lengths: batches of similar length waste little. The lengths of the prompts are known, and sorting by them
# saves padding. But how long an *answer* will be is known when its end token has been drawn, and not before.
# </details>
#
# <details><summary>From one request to 32, does a decode step take no longer at all?</summary>
#
# A little. The products do 32 times the operations, hidden behind the reading of the weights as long as the intensity stays left of
# the roofline's corner (lesson 09). The KV caches are read for each. And the small kernels have 32 rows instead of one. On an H200
# with Llama 3.2 1B's sizes, cuBLAS needs 0.831 ms for the products of one token, 0.882 ms for 32 and 1.158 ms for 256 (measured in
# a CUDA graph, 2026).
# </details>
#
# <details><summary>Can a prompt of one request and the decode steps of others be in the same pass?</summary>
#
# With a packed line, yes: the prompt has 500 tokens in it, each other request one. A rectangle would have padded 499 cells a
# request. This is what makes lesson 19 possible, where requests come and go in any step.
# </details>
#
# ## Further reading
#
# - Gyeong-In Yu and others, *Orca: A Distributed Serving System for Transformer-Based Generative Models* (OSDI 2022): what static
#   batches waste, and the way out.
# - Reiner Pope and others, *Efficiently Scaling Transformer Inference* (2022): the bytes of weights and cache, by batch and context.
# - Tri Dao and others, *FlashAttention* (the library): `cu_seqlens` in its variable-length functions is your `query_starts`.
#
# **Next:** [lesson 19, Continuous batching](19_continuous_batching.ipynb).
