# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 13 · Feed-forward, and a whole layer
#
# **At the end you have** two parts: `silu_mul`, the only kernel that the feed-forward block needs besides products, and
# `decoder_layer`: one whole layer of a Llama, put together from what you have made so far.
#
# **About 55 minutes** · builds on 02 (BF16), 07 (norms and the stream), 09 (products), 11 (RoPE) and 12 (attention)
#
# **In vLLM** the kernel is `act_and_mul_kernel` in `activation_kernels.cu` under `csrc/`, which Python knows as `SiluAndMul`; the layer is
# `LlamaDecoderLayer` in `vllm/model_executor/models/llama.py`. Its `forward` also takes the stream and what has still to be added
# to it as two arguments. What differs: theirs asks whether a stream was given at all, where yours asks whether the layer is the first.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, display_figure, earlier, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, solution
from tinyvllm_ref.device import describe

print(describe())
BF16_CUDA, linear, rope = earlier("BF16_CUDA", "linear", "rope")
rms_norm, add_rms_norm = earlier("rms_norm", "add_rms_norm")

# %% [markdown]
# > **Fast track.** You know SwiGLU and where the residual is added? Go to
# > [exercise 13.3](#13.3-·-silu_mul,-the-part), then [13.4](#13.4-·-A-whole-layer,-the-part). Pass both, and leave.

# %% [markdown]
# ## The question
#
# Attention moves information *between* tokens. What it gathers has still to be worked on, and that is done for **each token by
# itself**: a small network that reads the token's row of the stream and computes what to add to it.
#
# The plainest such network widens the row, bends it, and narrows it again:
#
# $$W_\text{down}\; f(W_\text{up}\, h)$$
#
# The function $f$ works on each number alone, and must not be linear: two products with nothing between are one product, since
# $W_\text{down} W_\text{up}$ is again a matrix. For long the usual $f$ was **ReLU**, $\max(x, 0)$. Llama uses a smooth relative of
# it, **SiLU**:
#
# $$\operatorname{SiLU}(x) = x\,\sigma(x) = \frac{x}{1 + e^{-x}} \qquad\qquad \sigma(x) = \frac{1}{1 + e^{-x}}$$
#
# $\sigma$, the **sigmoid**, is a number from 0 to 1: how much of $x$ is let through.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course.exercises.lesson_13_feed_forward import draw_activations

display_figure(draw_activations())

# %% [markdown]
# ### A gate
#
# Llama's network has one thing more. Beside $W_\text{up}$ there is a second matrix of the same size, $W_\text{gate}$, and its
# result decides, number by number, how much of the first goes on:
#
# $$\operatorname{FFN}(h) = W_\text{down} \bigl( \operatorname{SiLU}(W_\text{gate}\, h) \odot (W_\text{up}\, h) \bigr)$$
#
# $\odot$ multiplies element by element. This is **SwiGLU** (Shazeer, 2020). $h$ has $H$ numbers; gate and up have $F$ each, and
# $F$ is some two and a half to four times $H$.
#
# By hand, with $F = 2$, gate = 2 −1 and up = 3 0.5: SiLU(2) = 2 / (1 + 0.135) = 1.762 and SiLU(−1) = −1 / (1 + 2.718) = −0.269.
# Times up: 5.285 and −0.134. In NumPy, with a row for each token:


# %%
def silu_in_numpy(x):
    return x / (1 + np.exp(-x))


def feed_forward_in_numpy(h, gate_weight, up_weight, down_weight):
    """h: (T, H), gate and up: (F, H), down: (H, F) -> (T, H)"""
    return (silu_in_numpy(h @ gate_weight.T) * (h @ up_weight.T)) @ down_weight.T


gate, up = np.array([2.0, -1.0]), np.array([3.0, 0.5])
print(silu_in_numpy(gate).round(3), (silu_in_numpy(gate) * up).round(3))

# %% [markdown]
# ## 13.1 · SiLU
#
# Begin with the function alone: one thread an element. `expf(v)` is $e^v$ for a float. The check has small numbers and large ones,
# so think of what the largest float is: about $3.4 \cdot 10^{38}$, which $e^x$ passes at $x = 88.7$.

# %%
# Exercise 13.1 - SiLU
silu = cp.RawKernel(r"""
extern "C" __global__ void silu(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    // BEGIN SOLUTION (1 line): where there is such an element: out[i] = SiLU of x[i]
    if (i < n) out[i] = x[i] / (1.0f + expf(-x[i]));
    // STUB if (i == 0) out[0] = 0.0f;  // replace this line
    // END SOLUTION
}
""", "silu")

# %%
check("13.1", silu)

# %% [markdown]
# ## 13.2 · Where are the parameters?
#
# The feed-forward looks simple beside attention. It is where most of the model *is*. Predict it, before you look: how many
# parameters have the four matrices of attention (queries, keys, values, output) in **one layer** of tiny-stories, and how many the
# three of the feed-forward? $H$ = 192, $F$ = 512; there are 6 query heads and 2 KV heads, each of 32 numbers.

# %%
# Exercise 13.2 - where are the parameters?
# BEGIN SOLUTION (2 lines): two numbers
attention = 192 * 192 + 2 * 64 * 192 + 192 * 192
feed_forward = 3 * 512 * 192
# STUB attention = None
# STUB feed_forward = None
# END SOLUTION
predict("13.2", attention=attention, feed_forward=feed_forward)

# %% tags=["nbval-ignore-output"]
measure("13.2")

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course.exercises.lesson_13_feed_forward import draw_parameters

display_figure(draw_parameters())

# %% [markdown]
# (The sizes are those of each model's `config.json`.) With one token at a time a product costs what its weights cost to read, as
# lesson 09 showed. So this is also where a decode step spends most of its time.
#
# ## One product for gate and up
#
# Gate and up are products with the same `h`. Lesson 04 put the two weights under each other in the arena, gate first, so that one
# product makes both, just as for q, k and v:
#
# $$h\,[W_\text{gate}; W_\text{up}]^\top = [\text{gate}\;\;\text{up}] \qquad (T, 2F)$$
#
# For $T = 2$ and $F = 2$ the result lies in memory like this:
#
# | | | | | | | | |
# |---|---|---|---|---|---|---|---|
# | $g_{00}$ | $g_{01}$ | $u_{00}$ | $u_{01}$ | $g_{10}$ | $g_{11}$ | $u_{10}$ | $u_{11}$ |
#
# Token 0's gates, token 0's ups, token 1's gates, token 1's ups.
#
# ## 13.3 · silu_mul, the part
#
# In NumPy, SiLU and the product with up are several passes: exponential, sum, division, product. Each would read its input from
# memory and write its result back. As one kernel it is one pass: 8 bytes are read for every output, 2 are written, and everything
# between happens in registers. It also rounds to BF16, with `float_to_bf16`, since what comes
# next is a product.
#
# One thread an output, as in 13.1: thread `i` makes `out[i]`. `out` has `ffn` columns, so that `i / ffn` (integer division) is its
# row and `i % ffn` (the remainder) its column. Your job is to find the two numbers that it needs.

# %%
# Exercise 13.3 - silu_mul, the part
silu_mul_kernel = cp.RawKernel(BF16_CUDA + r"""
// gate_up: (tokens, 2 * ffn) float32, out: (tokens, ffn) bf16; n = tokens * ffn
extern "C" __global__ void silu_mul_kernel(const float* gate_up, bf16* out, int ffn, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    // BEGIN SOLUTION (5 lines): the row and column of out[i]; its gate and its up; out[i]
    if (i >= n) return;
    int t = i / ffn, c = i % ffn;
    const float* row = gate_up + (size_t)t * 2 * ffn;
    float gate = row[c], up = row[ffn + c];
    out[i] = float_to_bf16(gate / (1.0f + expf(-gate)) * up);
    // STUB if (i == 0) out[0] = 0;  // replace this line
    // END SOLUTION
}
""", "silu_mul_kernel")


def silu_mul(gate_up, out):
    """gate_up (T, 2F) float32, gate first -> out (T, F) bf16."""
    tokens, ffn = out.shape
    n = tokens * ffn
    silu_mul_kernel((-(-n // 256),), (256,), (gate_up, out, np.int32(ffn), np.int32(n)))
    return out

# %%
check("13.3", silu_mul)

# %% tags=["nbval-ignore-output"]
measure("13.3")

# %% [markdown]
# ## A layer is two blocks and a stream
#
# Now all parts are there. A layer reads the stream twice and adds to it twice:
#
# $$s \leftarrow s + \operatorname{Attention}(\operatorname{norm}_1(s)) \qquad\qquad s \leftarrow s + \operatorname{FFN}(\operatorname{norm}_2(s))$$
#
# Your `add_rms_norm` of lesson 07 adds and normalises in one pass. So each addition is put off until the next norm, and two arrays
# go through the model:
#
# - **`residual`**, the stream;
# - **`x`**, what the last block has computed and *nobody has added yet*.
#
# | step | part | `residual` | `x` |
# |---|---|---|---|
# | | | $s$ | $f$ of the layer before |
# | 1 | `add_rms_norm` → `h` | $s + f$ | |
# | 2 | `linear` with `qkv`, then cut into q, k, v | | |
# | 3 | `rope` on q and k | | |
# | 4 | `attend` → `attended` | | |
# | 5 | `linear` with `o_proj` → `x` | | $a$ |
# | 6 | `add_rms_norm` → `h` | $s + f + a$ | |
# | 7 | `linear` with `gate_up` | | |
# | 8 | `silu_mul` | | |
# | 9 | `linear` with `down_proj` → `x` | | this layer's $f$ |
#
# An empty cell means "as before". Before **layer 0** there is no $f$: `x` has never been written, and step 1 is a plain `rms_norm`
# of `residual`.
#
# In NumPy, for one layer that begins with a complete stream (float32 throughout, `attend` and `rotate` given):


# %%
def norm(s, weight, eps=1e-5):
    return s / np.sqrt((s * s).mean(axis=-1, keepdims=True) + eps) * weight


def layer_in_numpy(s, w, rotate, attend):
    """s: (T, H) -> the stream after the layer."""
    h = norm(s, w["input_layernorm"])
    q, k, v = h @ w["q"].T, h @ w["k"].T, h @ w["v"].T
    s = s + attend(rotate(q), rotate(k), v) @ w["o_proj"].T
    h = norm(s, w["post_attention_layernorm"])
    return s + feed_forward_in_numpy(h, w["gate"], w["up"], w["down_proj"])


# %% [markdown]
# ## 13.4 · A whole layer, the part
#
# Put it together. No kernel this time: a layer is an order of calls. What you get:
#
# - `x` and `residual`, $(T, H)$ float32, to be changed in place. Return `x`.
# - `weights`: a dict of arrays, and `weights.config` with the sizes; $F$ is `config.intermediate_size`. `weight("qkv")` below is this
#   layer's; the other names are `input_layernorm`, `o_proj`, `post_attention_layernorm` (in step 6), `gate_up` and `down_proj`.
#   `weights["inv_freq"]` is for RoPE.
# - `attend(layer, q, k, v, out)`: attention over this request's keys, also those of earlier steps. Who keeps them is lesson 15's
#   business; your layer only calls it. It fills `out`, $(T, H_q, D)$ BF16. `attend.positions` are the tokens' positions.
# - `rms_norm(x, weight, eps, out)`, `add_rms_norm(x, residual, weight, eps, out)`, `linear(x, w, out)`,
#   `rope(q, k, positions, inv_freq)` and `silu_mul(gate_up, out)`. All but `rope` return their `out`.
#
# `new(columns, dtype)` makes an array for a result: `np.uint16` for BF16, `np.float32` otherwise. (Making arrays in every step is
# wasteful. Lesson 16 ends that.)
#
# **One trap.** `qkv[:, :q_end]` is a *view*: the same memory, with gaps between its rows. A kernel gets an address and knows nothing
# of gaps. `cp.ascontiguousarray` copies the columns into an array of their own, which can then be reshaped.

# %%
# Exercise 13.4 - a whole layer, the part
def decoder_layer(x, residual, weights, layer, attend):
    """x, residual (T, H) float32, changed in place; returns x, which has still to be added to residual."""
    config, tokens = weights.config, len(x)
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    eps = config.rms_norm_eps

    def new(columns, dtype):
        return cp.empty((tokens, columns), dtype)

    def weight(name):
        return weights[f"layers.{layer}.{name}"]

    h = new(config.hidden_size, np.uint16)
    # BEGIN SOLUTION (17 lines): steps 1 to 9 of the table
    if layer == 0:
        rms_norm(residual, weight("input_layernorm"), eps, h)
    else:
        add_rms_norm(x, residual, weight("input_layernorm"), eps, h)
    qkv = linear(h, weight("qkv"), new((heads + 2 * kv_heads) * head_dim, np.float32))
    q_end, k_end = heads * head_dim, (heads + kv_heads) * head_dim
    q = cp.ascontiguousarray(qkv[:, :q_end]).reshape(tokens, heads, head_dim)
    k = cp.ascontiguousarray(qkv[:, q_end:k_end]).reshape(tokens, kv_heads, head_dim)
    v = cp.ascontiguousarray(qkv[:, k_end:]).reshape(tokens, kv_heads, head_dim)
    rope(q, k, attend.positions, weights["inv_freq"])
    attended = cp.empty((tokens, heads, head_dim), np.uint16)
    attend(layer, q, k, v, attended)
    linear(attended.reshape(tokens, heads * head_dim), weight("o_proj"), x)
    add_rms_norm(x, residual, weight("post_attention_layernorm"), eps, h)
    gate_up = linear(h, weight("gate_up"), new(2 * config.intermediate_size, np.float32))
    activated = silu_mul(gate_up, new(config.intermediate_size, np.uint16))
    linear(activated, weight("down_proj"), x)
    # STUB x.fill(0)  # replace this line
    # END SOLUTION
    return x

# %%
check("13.4", decoder_layer)

# %% [markdown]
# ## Your parts in the engine
#
# The engine calls your layer five times for every step, with the prompt first and then with one token at a time. Below are the story
# and three mistakes. The second one leaves every step of a single token right, and ruins the prompt. In the third the words are
# still words, and the thread is lost: the feed-forward speaks without having heard what attention found.

# %% tags=["nbval-ignore-output"]
show_engine("13")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - $\operatorname{FFN}(h) = W_\text{down}(\operatorname{SiLU}(W_\text{gate} h) \odot W_\text{up} h)$: each token by itself, and most
#   of the model's parameters.
# - Write SiLU as $x / (1 + e^{-x})$: the same formula with $e^x$ above and below is NaN for large $x$.
# - Gate and up are one product. Each *row* of it is $F$ gates, then $F$ ups.
# - A layer reads norms of the stream and adds to the stream. What has been computed waits in `x` until the next norm adds it.
#
# ## To think about
#
# <details><summary>Two matrices and a gate, or one matrix and ReLU: is it not unfair to compare them?</summary>
#
# With the same $F$ the gated network has half as many parameters again. So when it was proposed, $F$ was made smaller by a third, to
# compare at the same size; the gated one was still better (Shazeer, 2020). That is where widths such as $\tfrac{8}{3} H$ come from:
# $\tfrac{2}{3}$ of the usual $4H$. tiny-stories has exactly that, 512 = 8/3 · 192.
# </details>
#
# <details><summary>Why is the output of a block added to the stream, and not put in its place?</summary>
#
# Then every layer would have to pass on all that later ones need. With the sum, a layer only has to compute what is *new*, and what
# an early layer found is still there for the last one. It also keeps training stable: the gradient reaches every layer through the
# sum, undiminished.
# </details>
#
# <details><summary>In which step of a layer do tokens of a prompt learn of each other? What does that mean for a batch of requests?</summary>
#
# In step 4 alone. Every other step treats each row by itself: tokens of many requests can be put under each other and go through the
# products together. Only <code>attend</code> must know whose tokens are whose. Lesson 18 lives on that.
# </details>
#
# ## Further reading
#
# - Noam Shazeer, *GLU Variants Improve Transformer* (2020).
# - Elfwing, Uchibe and Doya, *Sigmoid-Weighted Linear Units for Neural Network Function Approximation in Reinforcement Learning*
#   (2017), and Ramachandran, Zoph and Le, *Searching for Activation Functions* (2017): where SiLU comes from, also called Swish.
# - Touvron and others, *LLaMA: Open and Efficient Foundation Language Models* (2023), section 2.2.
#
# **Next:** [lesson 14, The forward pass](14_forward_pass.ipynb).
