# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14 · The forward pass
#
# **At the end you have** `forward` and `argmax`: token ids go in, and the next token comes out. Your model computes what Hugging
# Face's transformers computes, operation by operation. And you have a way to find the one line that is wrong when it does not.
#
# **About 65 minutes** · builds on 05 (embedding), 06 (the tree), 07 (norms), 09 (products) and 13 (a layer)
#
# **In vLLM** the loop over the layers is `LlamaModel.forward` in `vllm/model_executor/models/llama.py`, and the LM head is
# `compute_logits` in the same file. It too is given only the rows whose logits are wanted, `hidden_states[logits_indices]`. What
# differs: the vocabulary may be padded and split over several cards, so that logits are gathered and cut before anyone looks at them.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, display_figure, earlier, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, show_layers, solution
from tinyvllm_ref.device import describe

print(describe())
embedding, rms_norm, add_rms_norm = earlier("embedding", "rms_norm", "add_rms_norm")
linear, decoder_layer = earlier("linear", "decoder_layer")

# %% [markdown]
# > **Fast track.** Go to [exercise 14.2](#14.2-·-argmax,-the-part) (it needs 14.1) and
# > [14.3](#14.3-·-The-forward-pass,-the-part). Then read "Is it right?", and keep `show_layers` in mind.

# %% [markdown]
# ## The question
#
# You have all the pieces. What is the whole? Here it is, for a prompt of ten tokens:

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course.exercises.lesson_14_forward_pass import draw_stack

display_figure(draw_stack())

# %% [markdown]
# The embedding makes the stream. Each layer adds to it twice. Then comes one norm more, and the last product, the **LM head**: a
# matrix of a row for each token of the vocabulary. Its product with a token's row of the stream gives one number for each possible
# next token, the **logits**:
#
# $$\text{logit}_v = h \cdot w_v \qquad\qquad p_v = \frac{e^{\text{logit}_v}}{\sum_u e^{\text{logit}_u}}$$
#
# The larger the logit, the more probable the token. By hand, with three tokens and logits 2 1 −1: $e^2 = 7.39$, $e^1 = 2.72$ and
# $e^{-1} = 0.37$ add up to 10.47, so the probabilities are 0.71, 0.26 and 0.04. To know the *most probable* one you need none of
# that: it is where the logit is largest, at token 0.
#
# **Tied or not.** The embedding is also a matrix of a row for each token. Small models use it twice: as the embedding and as the LM
# head. They are called **tied**. It is the same array in memory, and no transposing is needed: `linear(x, w, out)` multiplies by
# $w^\top$, so it wants a row for each output, and that is what the table has.
#
# **Only the last row.** Each token's row says what comes after *it*. While a prompt is read, what comes after its first nine tokens
# is known. So only the last row needs to go through the LM head. How much is that worth?

# %%
vocab, hidden, tokens = 128_256, 2048, 1000  # Llama 3.2 1B, and a prompt of 1,000 tokens
print(f"{4 * vocab * tokens / 1e6:,.0f} MB of logits for every position, {4 * vocab / 1e6:.1f} MB for the last")
print(f"{2 * vocab * hidden * tokens / 1e9:,.0f} billion operations, or {2 * vocab * hidden / 1e9:.1f}")

# %% [markdown]
# The specification in NumPy, with `layer_in_numpy` of lesson 13:


# %%
def forward_in_numpy(ids, table, layers, norm, layer_in_numpy, head):
    """ids: (T,) -> logits of the last token, (V,)"""
    s = table[ids]
    for weights in layers:
        s = layer_in_numpy(s, weights)
    return norm(s[-1]) @ head.T


# %% [markdown]
# ## Which token?
#
# Begin at the end. The logits of one token lie on the device, a row of 2,048 numbers here and 128,256 for Llama 3. Which is the
# largest? Fetching them all to the host to look would cost more than the search. So it is a kernel.
#
# It is lesson 06 again, with one difference. The tree there joined two numbers by adding them. Here it joins two **candidates**, each
# a value and its index, by keeping the better one. And "better" needs a rule for equal values: **the lower index wins**, as in
# NumPy. It sounds like a detail. But without a rule the answer depends on the order of the threads, and the same prompt may give another text.
#
# In C++, two things that belong together are a `struct`:
#
# ```c++
# struct Candidate { float value; int index; };
# Candidate best = {-1.5f, 7};       // makes one
# best.index                         // its second field
# ```
#
# ## 14.1 · The best of a block
#
# Two device functions. `beats(a, b)` says whether `a` wins over `b`. `block_best` is `block_sum` with another way to join: every
# thread brings a candidate, and gets the best of all. `scratch` has a cell for each thread.
#
# Any number of threads; safe to call twice in a row. Your tree of 06.5 is the place to look, if it has been a while.

# %%
# Exercise 14.1 - the best of a block
BLOCK_BEST_CUDA = r"""
struct Candidate { float value; int index; };

__device__ __forceinline__ bool beats(Candidate a, Candidate b) {
    // BEGIN SOLUTION (1 line): the larger value; among equals the lower index
    return a.value > b.value || (a.value == b.value && a.index < b.index);
    // STUB return false;  // replace this line
    // END SOLUTION
}

__device__ __forceinline__ Candidate block_best(Candidate mine, Candidate* scratch) {
    int t = threadIdx.x;
    // BEGIN SOLUTION (11 lines): fill scratch; the tree; every thread reads cell 0; safe to call again
    scratch[t] = mine;
    __syncthreads();
    for (int active = blockDim.x; active > 1;) {
        int half = (active + 1) / 2;
        if (t + half < active && beats(scratch[t + half], scratch[t])) scratch[t] = scratch[t + half];
        __syncthreads();
        active = half;
    }
    Candidate best = scratch[0];
    __syncthreads();
    return best;
    // STUB return mine;  // replace this line
    // END SOLUTION
}
"""

# %%
check("14.1", BLOCK_BEST_CUDA)

# %% [markdown]
# ## 14.2 · argmax, the part
#
# One block could now search a row: a strided loop, then `block_best`. In a decode step of one request there is *one* row, so one
# multiprocessor would work and the other hundred would watch. So two passes:
#
# 1. cut the row into **parts** of `PART` columns, with a block for each: `values` and `indices` get the best of each part;
# 2. one block a row finds the best among the parts' winners.
#
# Two launches, because blocks can not wait for each other: only the end of a kernel makes sure that all parts are there.
#
# A thread's search must begin with something. Not with 0, for all logits may be negative. Begin with a candidate that any real one
# beats: minus infinity, which has a name below as in lesson 10, with an index larger than any in the row.
#
# `values` and `indices` are $(R, \text{parts})$; the grid of pass 1 is (parts, rows), so `blockIdx.y` is the row.

# %%
# Exercise 14.2 - argmax, the part
THREADS, PART = 64, 512
argmax_parts = cp.RawKernel(BLOCK_BEST_CUDA + r"""
#define MINUS_INFINITY __uint_as_float(0xFF800000u)
extern "C" __global__ void argmax_parts(const float* logits, float* values, int* indices, int vocab, int part) {
    extern __shared__ Candidate scratch[];
    const float* row = logits + (size_t)blockIdx.y * vocab;
    // BEGIN SOLUTION (7 lines): this part's columns; this thread's best of them; the block's best
    int begin = blockIdx.x * part, end = min(vocab, begin + part);
    Candidate best = {MINUS_INFINITY, vocab};
    for (int c = begin + threadIdx.x; c < end; c += blockDim.x) {
        Candidate one = {row[c], c};
        if (beats(one, best)) best = one;
    }
    best = block_best(best, scratch);
    // STUB Candidate best = {row[0], 0};  // replace this line
    // END SOLUTION
    if (threadIdx.x == 0) {
        values[blockIdx.y * gridDim.x + blockIdx.x] = best.value;
        indices[blockIdx.y * gridDim.x + blockIdx.x] = best.index;
    }
}
""", "argmax_parts")
argmax_merge = cp.RawKernel(BLOCK_BEST_CUDA + r"""
#define MINUS_INFINITY __uint_as_float(0xFF800000u)
extern "C" __global__ void argmax_merge(const float* values, const int* indices, int* out, int parts) {
    extern __shared__ Candidate scratch[];
    size_t row = (size_t)blockIdx.x * parts;            // where this row's parts begin in values and indices
    // BEGIN SOLUTION (6 lines): this thread's best of the parts' winners; the block's best
    Candidate best = {MINUS_INFINITY, 2147483647};           // the largest int there is
    for (int p = threadIdx.x; p < parts; p += blockDim.x) {
        Candidate one = {values[row + p], indices[row + p]};
        if (beats(one, best)) best = one;
    }
    best = block_best(best, scratch);
    // STUB Candidate best = {values[row], indices[row]};  // replace this line
    // END SOLUTION
    if (threadIdx.x == 0) out[blockIdx.x] = best.index;
}
""", "argmax_merge")


def argmax(logits, out):
    """logits (R, V) float32 -> out (R,) int32."""
    rows, vocab = logits.shape
    parts = -(-vocab // PART)
    values, indices = cp.empty((rows, parts), np.float32), cp.empty((rows, parts), np.int32)
    first = (logits, values, indices, np.int32(vocab), np.int32(PART))
    argmax_parts((parts, rows), (THREADS,), first, shared_mem=8 * THREADS)
    argmax_merge((rows,), (THREADS,), (values, indices, out, np.int32(parts)), shared_mem=8 * THREADS)
    return out

# %%
check("14.2", argmax)

# %% tags=["nbval-ignore-output"]
measure("14.2")

# %% [markdown]
# ## 14.3 · The forward pass, the part
#
# Now put the model together. You get:
#
# - `inputs.ids`, $(T,)$: the tokens of this step. They may belong to several requests, one after the other;
# - `inputs.logits_rows`, $(R,)$: the rows whose logits are wanted, mostly the last one of each request. There may be none: a long
#   prompt can be computed in pieces, and only the last piece has a token to predict;
# - `weights["embed_tokens"]`, `weights["norm"]` and `weights.lm_head`, which is the table itself where the two are tied;
# - `attend`, to be handed on to the layers, and `config.num_hidden_layers`, how many there are;
# - `embedding(ids, table, out)`, `decoder_layer(x, residual, weights, layer, attend)`, `add_rms_norm(x, residual, weight, eps, out)`,
#   `rms_norm(x, weight, eps, out)` and `linear(x, w, out)`.
#
# Remember the two arrays of lesson 13: `residual` is the stream, `x` what has still to be added. The embedding *is* the stream as it
# begins.
#
# `h[inputs.logits_rows]` takes rows by an array of numbers, as in NumPy, and gives a new array without gaps.

# %%
# Exercise 14.3 - the forward pass, the part
def forward(inputs, weights, attend):
    """Token ids -> logits (R, V) float32 of the rows in inputs.logits_rows."""
    config, tokens = weights.config, len(inputs.ids)
    residual = cp.empty((tokens, config.hidden_size), np.float32)
    x = cp.empty((tokens, config.hidden_size), np.float32)
    # BEGIN SOLUTION (8 lines): embedding, layers, final norm (BF16), rows wanted, LM head
    embedding(inputs.ids, weights["embed_tokens"], residual)
    for layer in range(config.num_hidden_layers):
        decoder_layer(x, residual, weights, layer, attend)
    h = cp.empty((tokens, config.hidden_size), np.uint16)
    add_rms_norm(x, residual, weights["norm"], config.rms_norm_eps, h)
    rows = h[inputs.logits_rows]
    logits = cp.empty((len(rows), config.vocab_size), np.float32)
    return linear(rows, weights.lm_head, logits)
    # STUB return cp.zeros((len(inputs.logits_rows), config.vocab_size), np.float32)  # replace this line
    # END SOLUTION

# %%
check("14.3", forward)

# %% [markdown]
# What comes after a prompt, by *your* engine? These are the ten most probable next tokens and their probabilities:

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course.exercises.lesson_14_forward_pass import compare_greedy, draw_next_tokens, draw_stream

display_figure(draw_next_tokens("Once upon a time, there was a brave little"))

# %% [markdown]
# Take the most probable one, put it behind the prompt, and run again: that is **greedy** generation. Below are 64 tokens of it,
# beside those of Hugging Face's transformers in float32. (Theirs were computed once and are kept with the model;
# `data/tiny-stories/golden_operations.npz` has them.)

# %% tags=["nbval-ignore-output"]
compare_greedy()

# %% [markdown]
# ## Is it right?
#
# The text is the same. That is a good sign, and a weak one: some mistakes hardly show in a text. And if it had *not* been the same,
# what then? 53 operations ran, and any of them may be wrong. So compare each of them, in order. `show_layers()` runs your engine on
# a prompt of ten tokens, and sets what every operation puts out beside what transformers computes:

# %% tags=["nbval-ignore-output"]
show_layers()

# %% [markdown]
# Each cell is a relative error, $\lVert \text{yours} - \text{theirs} \rVert / \lVert \text{theirs} \rVert$. It is not 0: the inputs
# of your products are BF16, with 8 significant bits, and theirs are float32. But it is small everywhere. `show_layers("14.3")`
# compares the cell of an exercise as it was last run, right or wrong; try it with a layer too few.
#
# Why relative? Because activations have many sizes. Look at the stream:

# %% tags=["nbval-ignore-output"]
display_figure(draw_stream())

# %% [markdown]
# In the last layer it is a hundred times as large as at the beginning. An error of 0.1 is a catastrophe in the first place, and
# rounding in the second.
#
# ## 14.4 · Where two runs first differ
#
# Write the heart of that tool. `mine` and `golden` are dicts of the same names, each with an array, in the order in which they were
# computed. Give back the **first name** whose relative error is above the tolerance, or `None`. `np.linalg.norm(a)` is the root of
# the sum of all squares.
#
# By hand, with golden = 3 4 and mine = 3 4.5: the difference is 0 0.5, its norm 0.5; golden's norm is 5; the relative error is 0.1.
#
# Mind two things: it is a tool for *broken* models, so numbers may be NaN. And an error that has come in travels on.

# %%
# Exercise 14.4 - where two runs first differ
def first_difference(mine, golden, tolerance):
    """The first name whose array is further off than the tolerance; None where there is none."""
    # BEGIN SOLUTION (4 lines): the relative error of each array, in order
    for name in golden:
        error = np.linalg.norm(mine[name] - golden[name]) / np.linalg.norm(golden[name])
        if not error <= tolerance:
            return name
    # STUB pass
    # END SOLUTION
    return None

# %%
check("14.4", first_difference)

# %% [markdown]
# ## 14.5 · Three broken models
#
# Here are three models, A, B and C. In each of them one operation of one layer is wrong. `broken("A")` gives all that A has computed
# for the prompt, by the names of the picture above: `layers.1.qkv` is the operation `qkv` in the row of layer 1.

# %%
from tinyvllm_ref.course.exercises.lesson_14_forward_pass import FAULTS, broken, golden_activations

golden = golden_activations()
print("what may be wrong:", *FAULTS, sep="\n  ")
print("an operation's output, for 10 tokens:", broken("A")["layers.0.qkv"].shape)

# %% [markdown]
# For each of them find **where** it goes wrong, with your tool, and then **what** is wrong there. For the second question you have a
# strong position: everything *before* the first difference is right. So the golden values of the operation before are its input.
# Compute in NumPy what each fault would have made of it, and see which one matches `broken("A")[...]`.
#
# - `gate_up` holds the 512 gates of a token, then its 512 ups.
# - `qkv` holds 6 query heads, 2 key heads and 2 value heads of 32 columns each. `rope` holds the query and key heads, rotated.
# - `attention` holds 6 heads of 32. What must be in the *first token's* row, if it can see no other?
#
# The cell below is for you; make more of them. The check judges each model by itself.

# %%
# first_difference(broken("A"), golden, 0.03)

# %%
# Exercise 14.5 - three broken models
# BEGIN SOLUTION (5 lines): for each model ("layers.0.some_operation", "a fault of the list")
found = {
    "A": ("layers.1.silu_mul", "sigmoid in place of SiLU"),
    "B": ("layers.3.rope", "pairs side by side"),
    "C": ("layers.2.attention", "future tokens seen"),
}
# STUB found = {
# STUB     "A": (None, None),
# STUB     "B": (None, None),
# STUB     "C": (None, None),
# STUB }
# END SOLUTION

# %%
check("14.5", found)

# %% [markdown]
# Keep the method. It works for any model that another program can run: the same input, the activations of both in order, the first
# that differs. It turns "the text is odd" into one line of code.
#
# ## Your parts in the engine
#
# A prompt goes into your embedding and comes out of your argmax. Below are the story and three mistakes. The first one loses no more
# than what the last of five feed-forwards has to say; as the picture of the stream shows, in this model that is nearly all of it.

# %% tags=["nbval-ignore-output"]
show_engine("14")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - A model is: embedding, layers that add to a stream, one norm, one product. The LM head is run for the rows that are wanted only.
# - After the last layer there is still an `x` to be added.
# - argmax is a tree of candidates. Ties need a rule, a search needs a start that loses to everything, and the last part is shorter.
# - Compare with a known implementation operation by operation, in order, by relative error. The first difference is the fault; the
#   largest is only where it has grown to.
#
# ## To think about
#
# <details><summary>The same text came out in BF16 and in float32. Must that always be so?</summary>
#
# No. Where the two best logits lie closer together than the rounding errors, either may win, and from there on the texts differ. Such
# near ties are rare in a confident model: in these 64 tokens the smallest gap is what <code>golden_operations.npz</code> keeps as
# <code>margins</code>. A comparison of texts has to allow for them; a comparison of activations needs not.
# </details>
#
# <details><summary>Why does a wrong attention in layer 2 hardly change layer 2's own norms before it, but all of layer 3?</summary>
#
# What comes before it in the layer has been computed already. Its own result is added to the stream, and from there on every norm
# and product reads a stream that holds the error. Nothing is ever taken out of the stream again.
# </details>
#
# <details><summary>How many bytes of weights does one token read, in a model with tied embeddings?</summary>
#
# All of them once, but for the embedding: as the LM head the whole table is read, as the embedding one row of it. So it is nearly
# the size of the file. Without tying there is a second table of the same size in memory, of which one row a token is read.
# </details>
#
# ## Further reading
#
# - Touvron and others, *LLaMA: Open and Efficient Foundation Language Models* (2023).
# - Press and Wolf, *Using the Output Embedding to Improve Language Models* (2017): why the two tables can be one.
# - Elhage and others, *A Mathematical Framework for Transformer Circuits* (2021): the model as a stream that is read and added to.
#
# **Next:** [lesson 15, The KV cache](15_kv_cache.ipynb).
