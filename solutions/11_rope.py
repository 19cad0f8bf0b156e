# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 · RoPE
#
# **At the end you have** two parts: `rope_frequencies`, which reads from a model's config how fast each pair of
# columns turns, and `rope`, which turns queries and keys by their positions, in place.
#
# **About 55 minutes** · builds on 05 (an element a thread) and 10 (queries, keys, scores)
#
# **In vLLM** the kernel is `rotary_embedding_kernel` in `csrc/pos_encoding_kernels.cu`, and Llama 3's frequencies are
# in `vllm/model_executor/layers/rotary_embedding/llama3_rope.py`. What differs: theirs reads cosines and sines from a
# table that is made once for all positions, yours computes them; and theirs also knows the other pairing of columns,
# as `is_neox_style=False`.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, display_figure, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, solution
from tinyvllm_ref.device import describe

print(describe())

# %% [markdown]
# > **Fast track.** You know rotary embeddings? Two things still go wrong for those who do: which columns form a pair, and Llama 3's
# > scaling. Pass [11.3](#11.3-·-The-frequencies-of-a-model:-a-part) and [11.5](#11.5-·-Queries-and-keys-at-once:-the-part), and leave.

# %% [markdown]
# ## The question
#
# Lesson 10 ended with a hole: attention is a sum over keys, and a sum does not know in which order they came. *The
# fox saw the badger* and *the badger saw the fox* must not be the same.
#
# What do we want? A score $q \cdot k$ should depend on what the two tokens are, as before, and besides on **how far
# apart** they are. Not on where they are: *the word before* means the same at position 5 and at position 500.
#
# Look for an operation that puts a position into a vector, such that this comes out. In two dimensions there is a
# perfect one: **turn** the vector. At position $p$ by the angle $p\,\omega$, with a fixed $\omega$, the
# **frequency**, in radians a token:
#
# $$\begin{pmatrix} x' \\ y' \end{pmatrix} =
# \begin{pmatrix} \cos p\omega & -\sin p\omega \\ \sin p\omega & \cos p\omega \end{pmatrix}
# \begin{pmatrix} x \\ y \end{pmatrix} = R_p \begin{pmatrix} x \\ y \end{pmatrix}$$
#
# A dot product depends on the two lengths and on the angle between them. Turning changes no length. If the query
# stands at $p$ and the key at $r$, the angle between them changes by $p\omega - r\omega$. As a formula, with
# $R_p^\top = R_{-p}$ (turn back):
#
# $$(R_p\, q) \cdot (R_r\, k) = q^\top R_p^\top R_r\, k = q^\top R_{r-p}\, k$$
#
# Only the distance $r - p$ is left. That is all there is to **RoPE**, rotary position embedding.
#
# ## 11.1 · Two vectors, by hand
#
# Let $\omega$ be 30 degrees, $q = (2, 0)$ and $k = (0, 2)$. Angles grow counterclockwise, from the x axis toward the
# y axis. A drawing will do.
#
# | name | what |
# |---|---|
# | `q_x`, `q_y` | $q$ turned to position 3 |
# | `score` | the score of $q$ at position 3 and $k$ at position 1 |
# | `later` | $q$ at 13 and $k$ at 11 |
# | `swapped` | $q$ at 1 and $k$ at 3 |

# %%
# Exercise 11.1 - two vectors, by hand
# BEGIN SOLUTION (1 line): a dict of five numbers, two digits behind the point
turned = {"q_x": 0, "q_y": 2, "score": 3.46, "later": 3.46, "swapped": -3.46}
# STUB turned = {"q_x": None, "q_y": None, "score": None, "later": None, "swapped": None}
# END SOLUTION

# %%
check("11.1", turned)

# %% [markdown]
# ## Many clocks
#
# One frequency is not enough. If $\omega$ is large, neighbours are easy to tell apart, but after a full turn
# everything looks the same again. If it is small, distances of thousands are distinct and neighbours nearly equal. A
# clock has the same problem, and solves it with several hands.
#
# So the $D$ columns of a head become $D/2$ **pairs**, and each pair turns with a frequency of its own, from fast to
# slow:
#
# $$\omega_i = \theta^{-2i/D} \qquad i = 0, 1, \dots, D/2 - 1$$
#
# $\theta$ is `rope_theta` in the config: 10,000 in older models, 500,000 in Llama 3. For $D = 8$ and $\theta =
# 10{,}000$:

# %%
frequencies = 10_000.0 ** (-2 * np.arange(4) / 8)
print("radians a token: ", frequencies)
print("tokens a turn:   ", (2 * np.pi / frequencies).round(1))

# %% [markdown]
# **Which columns form a pair?** Here is the trap of this lesson. The paper pairs neighbours: (0, 1), (2, 3), ... The
# checkpoints of this family, as they are published on Hugging Face, pair column $i$ of the *first half* with column
# $i$ of the *second*: $(i,\ i + D/2)$. Both are fine, as long as training and running agree. We always use the
# second, **half-split pairs**. With $D = 4$: columns 0 and 2, and columns 1 and 3.
#
# The whole thing in NumPy:


# %%
def rope_in_numpy(x, positions, inv_freq):
    """x: (T, heads, D), positions: (T,), inv_freq: (D/2,) -> (T, heads, D)"""
    angles = positions[:, None, None] * inv_freq  # (T, 1, D/2)
    a, b = np.split(x, 2, axis=-1)  # (T, heads, D/2) each: the first halves, and the second
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


one_head = np.array([[[1.0, 2.0, 3.0, 4.0]]])
rope_in_numpy(one_head, np.array([1]), np.array([np.pi / 2, 0.0])).round(3)

# %% [markdown]
# Pair 0 was (1, 3); a quarter turn makes it (−3, 1). Pair 1, (2, 4), has frequency 0 and stands still.
#
# Here is a real model at work: *tiny-stories*, while it goes on with a prompt. The engine called `rope` with these
# positions, step by step, and the hands show what that does to four of its sixteen pairs.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course.exercises.lesson_11_rope import draw_rotations, recorded_positions

steps, _ = recorded_positions()
print("positions of each step:", steps)
display_figure(draw_rotations())

# %% [markdown]
# Look at the steps once more. The first is the prompt, and its rows happen to have the numbers 0, 1, 2, ... In every
# later step there is *one* row, row 0, and its position is 5, then 6. A kernel that takes the row for the position
# works on the prompt and fails ever after.
#
# ## 11.2 · How far do pairs turn?
#
# Let $D = 64$ and $\theta = 10{,}000$. Over 1,000 tokens: how many full turns does the fastest pair make, pair 0? And
# by how many *degrees* has the slowest turned, pair 31? An expression will do.

# %%
# Exercise 11.2 - how far do pairs turn?
# BEGIN SOLUTION (2 lines): two numbers
fastest = round(1000 / (2 * np.pi), 1)
slowest = round(1000 * 10_000 ** (-31 / 32) / (2 * np.pi) * 360, 1)
# STUB fastest = None
# STUB slowest = None
# END SOLUTION
predict("11.2", fastest=fastest, slowest=slowest)

# %% tags=["nbval-ignore-output"]
measure("11.2")

# %% [markdown]
# ## Stretching a model's memory
#
# A model that was trained on texts of 8,192 tokens has seen every angle of its fast pairs thousands of times. Of its
# slow pairs it has seen the beginning of a turn. Let it read 100,000 tokens, and the slow pairs come to angles that
# they never had. That goes wrong.
#
# - **"linear"** scaling divides all frequencies by a factor: by 16, and position 100,000 looks as 6,250 did. But then
#   neighbours are harder to tell apart, too.
# - **"llama3"** leaves the fast pairs alone, which have seen it all, and divides the slow ones. To tell them apart it
#   counts the turns that a pair made in the original context of $L$ tokens:
#
# $$\text{turns} = \frac{L\,\omega}{2\pi} \qquad \text{kept} = \frac{\text{turns} - \text{low}}{\text{high} - \text{low}},
# \text{ cut to } 0 \dots 1 \qquad \omega' = (1 - \text{kept})\,\frac{\omega}{\text{factor}} + \text{kept}\;\omega$$
#
# With `high` turns or more a pair is kept as it is, with `low` or fewer it is slowed in full, and between there is a
# mixture. **By hand**, for $L = 128$, low 1, high 4, factor 8, which are the numbers of *tiny-stories*:
#
# | wavelength (tokens a turn) | turns | kept | $\omega'$ |
# |---|---|---|---|
# | 16 | 8 | 1 | $\omega$ |
# | 64 | 2 | 1/3 | $\tfrac{2}{3} \cdot \tfrac{\omega}{8} + \tfrac{1}{3}\,\omega = 0.417\,\omega$ |
# | 1,000 | 0.128 | 0 | $\omega / 8$ |
#
# ## 11.3 · The frequencies of a model: a part
#
# Your function gets the model's config and gives the frequencies on the device, as `(D/2,)` float32. Compute in
# float64 (NumPy does, by itself) and round once. It is called once, when a model is loaded, so there is no kernel to
# write. The fields:
#
# | | |
# |---|---|
# | `config.head_dim`, `config.rope_theta` | $D$ and $\theta$ |
# | `config.rope_scaling.rope_type` | `"default"` (none), `"linear"` or `"llama3"` |
# | `.factor` | of both kinds of scaling |
# | `.low_freq_factor`, `.high_freq_factor` | low and high |
# | `.original_max_position_embeddings` | $L$ |

# %%
# Exercise 11.3 - the frequencies of a model: a part
def rope_frequencies(config):
    """The config of a model -> (head_dim / 2,) float32 on the device: radians a token of each pair."""
    head_dim, scaling = config.head_dim, config.rope_scaling
    # BEGIN SOLUTION (9 lines): theta^(-2i / head_dim); then the scaling of this model, if it has one
    pairs = np.arange(head_dim // 2)
    inv_freq = config.rope_theta ** (-2 * pairs / head_dim)
    if scaling.rope_type == "linear":
        inv_freq = inv_freq / scaling.factor
    if scaling.rope_type == "llama3":
        turns = scaling.original_max_position_embeddings * inv_freq / (2 * np.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        inv_freq = (1 - kept) * inv_freq / scaling.factor + kept * inv_freq
    # STUB inv_freq = np.zeros(head_dim // 2)  # replace this line
    # END SOLUTION
    return cp.asarray(inv_freq.astype(np.float32))


# %%
check("11.3", rope_frequencies)

# %% [markdown]
# What your function makes of the real model's config, and what it would be without the scaling:

# %% tags=["nbval-ignore-output"]
show("11.3")

# %% [markdown]
# The pairs on the left are the same in both, and they decide most of what is near. So a model whose scaling was
# forgotten may write well at first. Here is the pair that the scaling changes most, at some positions. (A Llama whose
# original context was 8,192 is off by as much only some 64 times further on.)

# %%
_, scaled = recorded_positions()  # the frequencies that the engine hands to rope
plain = 10_000.0 ** (-2 * np.arange(16) / 32)
pair = int(np.argmax(plain - scaled))
for p in (1, 10, 100):
    print(f"position {p:3}: pair {pair} is off by {np.degrees(p * (plain - scaled)[pair]):5.1f} degrees")

# %% [markdown]
# ## 11.4 · A pair a thread
#
# Now the kernel. First the plain one: a thread for each pair of each head of each token. It works on what lesson 09's
# product of a layer gives, **in place**: a row for each token, holding all its query heads, then its key heads, then
# its value heads. Queries and keys are turned. Values are not: they are what is handed over, and it should not matter
# from where. So of `heads` heads the first `turned` are.
#
# There are `tokens * turned * half` pairs, where `half` is $D/2$, and a thread for each, rounded up. Thread $p$ finds
# out what is its own by dividing: `p % half` is its pair, `p / half % turned` its head, and `p / (half * turned)` its
# token.
#
# `cosf` and `sinf` are cosine and sine of a float. In place means: what is written is gone. Read both numbers of the
# pair first.

# %%
# Exercise 11.4 - a pair a thread
turn_heads = cp.RawKernel(r"""
// x: (tokens, heads, 2 * half) float32, changed in place
extern "C" __global__ void turn_heads(float* x, const int* positions, const float* inv_freq,
                                      int tokens, int heads, int turned, int half) {
    int p = blockIdx.x * blockDim.x + threadIdx.x;
    // BEGIN SOLUTION (7 lines): which pair, head and token; the angle; both old numbers; both new ones
    if (p >= tokens * turned * half) return;
    int i = p % half, head = p / half % turned, token = p / (half * turned);
    float* row = x + ((size_t)token * heads + head) * 2 * half;
    float angle = positions[token] * inv_freq[i];
    float a = row[i], b = row[i + half];
    row[i] = a * cosf(angle) - b * sinf(angle);
    row[i + half] = b * cosf(angle) + a * sinf(angle);
    // STUB if (p == 0) x[0] = x[0] * cosf(positions[0] * inv_freq[0]);  // replace this line
    // END SOLUTION
}
""", "turn_heads")

# %%
check("11.4", turn_heads)

# %% [markdown]
# ## 11.5 · Queries and keys at once: the part
#
# The angle of pair $i$ is the same in every head of a token, in queries and in keys. 11.4 computes it anew in each,
# with a cosine and a sine of a float, which take dozens of instructions for large angles. So let a thread take **one
# pair of one token**: it computes one angle, one cosine and one sine, and turns that pair in all heads of `q` and
# then in all heads of `k`.
#
# The engine hands over `q` and `k` as two arrays. Mind that they need not have the same number of heads: many models
# have fewer key heads (lesson 12 says why). The two-line device function `turn` does one pair of one head.

# %%
# Exercise 11.5 - queries and keys at once: the part
rope_kernel = cp.RawKernel(r"""
// Turn pair i of the head that begins at row.
__device__ __forceinline__ void turn(float* row, int i, int half, float cosine, float sine) {
    // BEGIN SOLUTION (3 lines): both old numbers; both new ones
    float a = row[i], b = row[i + half];
    row[i] = a * cosine - b * sine;
    row[i + half] = b * cosine + a * sine;
    // END SOLUTION
}

// q: (tokens, q_heads, 2 * half) float32 and k: (tokens, k_heads, 2 * half) float32, changed in place
extern "C" __global__ void rope_kernel(float* q, float* k, const int* positions, const float* inv_freq,
                                       int tokens, int q_heads, int k_heads, int half) {
    int p = blockIdx.x * blockDim.x + threadIdx.x;
    // BEGIN SOLUTION (8 lines): which pair and token; its cosine and sine; every head of q, every head of k
    if (p >= tokens * half) return;
    int i = p % half, token = p / half;
    float angle = positions[token] * inv_freq[i];
    float cosine = cosf(angle), sine = sinf(angle);
    for (int head = 0; head < q_heads; head++)
        turn(q + ((size_t)token * q_heads + head) * 2 * half, i, half, cosine, sine);
    for (int head = 0; head < k_heads; head++)
        turn(k + ((size_t)token * k_heads + head) * 2 * half, i, half, cosine, sine);
    // STUB if (p == 0) q[0] = 0.0f;  // replace this line
    // END SOLUTION
}
""", "rope_kernel")


def rope(q, k, positions, inv_freq):
    """Turn q (T, q_heads, D) and k (T, k_heads, D) float32 in place by positions (T,) int32."""
    tokens, q_heads, _ = q.shape
    k_heads, half, threads = k.shape[1], len(inv_freq), 64
    sizes = (np.int32(tokens), np.int32(q_heads), np.int32(k_heads), np.int32(half))
    # BEGIN SOLUTION (2 lines): how many blocks; the launch
    blocks = (tokens * half + threads - 1) // threads
    rope_kernel((blocks,), (threads,), (q, k, positions, inv_freq, *sizes))
    # END SOLUTION

# %%
check("11.5", rope)

# %% [markdown]
# Did it come out as promised? Below, your kernel turns the *same* query and the *same* key at 24 positions. Each
# square is a score (its exponential). Along a diagonal the distance is the same, and so is the shade.

# %% tags=["nbval-ignore-output"]
show("11.5")

# %% tags=["nbval-ignore-output"]
measure("11.4", "11.5")

# %% [markdown]
# Both move the same queries and keys; neighbouring threads have neighbouring columns, so no sector is fetched in
# vain. What 11.5 saves is the reading of positions and frequencies, and what is not counted here: of 40 cosines of
# each pair, 39.
#
# ## Your parts in the engine
#
# The story with your rotations and your frequencies, and four mistakes. The one that forgets the scaling is the
# meanest: the text may well be the same, and only the error of the logits tells.

# %% tags=["nbval-ignore-output"]
show_engine("11")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - RoPE turns queries and keys by their positions. The score of two tokens then depends on their distance, and on
#   nothing else about where they are.
# - Pair $i$ is columns $i$ and $i + D/2$ here; other checkpoints pair neighbours. A wrong pairing raises no error.
# - $\omega_i = \theta^{-2i/D}$: fast pairs for neighbours, slow ones for far away. Llama 3 slows the slow ones only.
# - A token's position is its place in its own text. It is not its row in this step.
# - Values are never turned. And keys are turned *before* they are kept, so each is turned once in its life.
#
# ## To think about
#
# <details><summary>A checkpoint was trained with adjacent pairs. Could you still use your kernel?</summary>
#
# Yes: put the columns into another order, once, when it is loaded. Move row $2i$ of each head of the query and key
# matrices to row $i$, and row $2i + 1$ to row $i + D/2$. A dot product does not care in which order its terms are
# added, as long as queries and keys agree. That is how Meta's Llama weights were converted for Hugging Face.
# </details>
#
# <details><summary>Why is a cosine of a large angle a problem in float32, and does it matter here?</summary>
#
# At position 100,000 pair 0 has the angle 100,000 radians. A float there has steps of 1/128, so the angle is off by
# up to 0.004 radians before its cosine is taken. For the fast pairs that is a small error; the slow pairs never have
# large angles. Whoever needs more makes a table in float64.
# </details>
#
# <details><summary>What would happen if the values were turned, too?</summary>
#
# Each value would arrive turned by its own position, and their weighted sum would mix directions that depend on where
# the tokens stood. One could turn the sum back by the query's position, and then what is handed over would depend on
# the distance. It is not what these models were trained with.
# </details>
#
# ## Further reading
#
# - Su and others, *RoFormer: Enhanced Transformer with Rotary Position Embedding* (2021, arXiv:2104.09864).
# - Chen and others, *Extending Context Window of Large Language Models via Positional Interpolation* (2023,
#   arXiv:2306.15595): linear scaling.
# - Peng and others, *YaRN: Efficient Context Window Extension of Large Language Models* (2023, arXiv:2309.00071): why
#   fast pairs should be kept.
#
# **Next:** [lesson 12, Grouped-query attention](12_gqa.ipynb).
