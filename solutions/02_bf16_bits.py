# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 · The bits of BF16
#
# **At the end you have** `bf16_to_float` and `float_to_bf16`, twice: in NumPy for the host, and as device functions
# that are pasted in front of every kernel you will write.
#
# **About 60 minutes** · builds on 00 (threads and guards) and 01 (the file's bytes)
#
# **In vLLM** weights and activations are `torch.bfloat16`, and kernels convert with NVIDIA's `__float2bfloat16`
# (`csrc/attention/dtype_bfloat16.cuh`), one instruction on cards since the A100's generation. You do it by integers: the
# same results, on any card and with no header.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, hint, reset, solution
from tinyvllm_ref.course import cp, display_figure, measure, np, progress, show, show_engine
from tinyvllm_ref.course.figures import bit_layout, number_spacing
from tinyvllm_ref.device import describe

print(describe())

# %% [markdown]
# > **Fast track.** You know why a bfloat16 widens by a shift, and what the `0x7FFF + odd` trick does? Do
# > [02.2](#02.2-·-From-16-bits-to-32), [02.4](#02.4-·-Round-to-nearest-even) and
# > [02.5](#02.5-·-BF16-for-every-kernel-to-come), and leave.

# %% [markdown]
# ## The question
#
# Llama 3.2 1B has 1,235,814,400 weights (lesson 01 counts them). To write one token, nearly all of them are read from memory once. In float32
# that is 4.94 GB a token, in a 16-bit format 2.47 GB: half the bytes, twice the speed, before you have written a
# single clever line. So which 16 bits should be kept, and what is lost with the others?
#
# ## Scientific notation, in binary
#
# In decimal, $-650 = -6.5 \times 10^2$: a sign, a number with one digit in front of the point, an exponent. A
# floating-point number is the same in base 2:
#
# $$-6.5 = -1.625 \times 2^2 = -(1.101)_2 \times 2^2$$
#
# Three fields hold it.
#
# - **sign** $s$: one bit, 1 for minus;
# - **exponent** $e$: the power of two plus a **bias**, so that it is never negative. With $E$ exponent bits the bias is
#   $2^{E-1} - 1$: 127 for 8 bits, 15 for 5;
# - **fraction**: $F$ bits behind the point. The digit in front of it is always 1, and so it is not stored.
#
# With $f$ the fraction bits divided by $2^F$:
#
# | exponent bits | value | called |
# |---|---|---|
# | neither all 0 nor all 1 | $(-1)^s \, (1 + f) \, 2^{\,e - \text{bias}}$ | normal |
# | all 0 | $(-1)^s \, f \, 2^{\,1 - \text{bias}}$ | zero and **subnormal** |
# | all 1, fraction 0 | $(-1)^s \, \infty$ | infinity |
# | all 1, fraction not 0 | NaN | not a number |
#
# For $-6.5$ in bfloat16 ($E = 8$, $F = 7$): $s = 1$, $e = 2 + 127 = 129$, $f = 0.625 = 80/128$. The bits are
# `1 10000001 1010000`, in hexadecimal `0xC0D0`. The same number in three formats:

# %% tags=["nbval-ignore-output"]
display_figure(bit_layout(value=-6.5))

# %% [markdown]
# ## 02.1 · A pattern as a number
#
# Write the table above as a function. `bits` is a Python integer, and the sizes of the two fields are arguments, so one
# function reads all three formats. Two operations cut a pattern up: `bits >> k` drops the lowest `k` bits, and
# `bits & 2**k - 1` keeps only these. The check gives it every pattern of 16 bits there is, both as bfloat16 and as
# float16.

# %%
# Exercise 02.1 - a pattern as a number
def decode(bits, exponent_bits, fraction_bits):
    # BEGIN SOLUTION (9 lines): cut out the three fields, then one line for each row of the table
    bias = 2 ** (exponent_bits - 1) - 1
    fraction = (bits & 2**fraction_bits - 1) / 2**fraction_bits
    exponent = bits >> fraction_bits & 2**exponent_bits - 1
    sign = -1.0 if bits >> (exponent_bits + fraction_bits) else 1.0
    if exponent == 2**exponent_bits - 1:
        return sign * float("inf") if fraction == 0 else float("nan")
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)
    # STUB return 0.0
    # END SOLUTION


# %%
check("02.1", decode)

# %% [markdown]
# ## Range against precision
#
# float16 and bfloat16 both have 16 bits and spend them differently. Computed from the fields:

# %%
for name, E, F in (("float32", 8, 23), ("float16", 5, 10), ("bfloat16", 8, 7)):
    bias = 2 ** (E - 1) - 1
    largest = (2 - 2.0**-F) * 2.0**bias
    smallest = 2.0 ** (1 - bias)
    print(f"{name:9} largest {largest:.4g}   smallest normal {smallest:.4g}   numbers from 1 to 2: {2**F:,}")

# %% [markdown]
# bfloat16 has float32's range and a fraction of 7 bits: between 1 and 2 there are 128 numbers, $1/128$ apart. float16 is
# eight times finer, but ends at 65,504. Networks bear coarse numbers well, for errors of many terms cancel; a single
# overflow to infinity ruins everything after it. This is why models are trained and stored in bfloat16.
#
# In the picture each step up is a doubling of the distance between neighbours. The distance *relative* to the number
# stays the same, about $2^{-F}$, which is what "floating" means.

# %% tags=["nbval-ignore-output"]
display_figure(number_spacing(low=1e-6, high=1e6))

# %% [markdown]
# ## 02.2 · From 16 bits to 32
#
# Compare the layouts of float32 and bfloat16 in the first picture. Sign and exponent are the same; bfloat16 stops after
# 7 bits of fraction. **A bfloat16 is the upper half of a float32.** To widen one, move it up by 16 bits and put zeros
# under it. No table, no cases: zeros, subnormals, infinities and NaNs all come out right, and nothing is rounded.
#
# NumPy has no bfloat16, and so the course keeps the bits in `uint16`. Two methods matter here: `astype` converts
# *values* (16,256 becomes 16,256.0), `view` keeps the *bits* and reads them as another type: of the same size, or else two
# numbers of 16 bits become one of 32. And NumPy keeps the dtype when it shifts: what is moved out of 16 bits is gone.

# %%
# Exercise 02.2 - from 16 bits to 32
def bf16_to_float(u):
    """uint16 bits, any shape -> float32 of the same shape, exactly."""
    u = np.asarray(u)
    # BEGIN SOLUTION (1 line): make room, shift, read as float32
    return (u.astype(np.uint32) << 16).view(np.float32)
    # STUB return np.zeros(u.shape, np.float32)
    # END SOLUTION


# %%
check("02.2", bf16_to_float)

# %% [markdown]
# ## The way back loses something
#
# From 32 bits to 16, the lower half must go. The naive way is to cut it off. What does that do to a sum? Take 10,000
# numbers between 1 and 2, cut each, and compare the mean with the true one:

# %%
x = np.random.default_rng(0).uniform(1, 2, 10_000).astype(np.float32)
cut = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
print(f"mean {x.mean(dtype=np.float64):.5f}, cut off {cut.mean(dtype=np.float64):.5f}")
print(f"off by {(cut.astype(np.float64) - x).mean() * 128:+.2f} steps of 1/128 on average")

# %% [markdown]
# Every number went down, by half a step on average, and however many you add, the errors never cancel. We want the
# **nearest** of the two neighbours instead: the error is at most half a step, up as often as down.
#
# One case is left: the number that lies exactly in the middle, a **tie**. School rounding sends it up, always, and that
# is a small drift again. The rule of IEEE 754, **round half to even**, sends a tie to the neighbour whose last bit is 0.
# Of two neighbouring patterns one always ends in 0, and so ties go up and down equally often.
#
# As a specification: look at both neighbours, and choose.


# %%
def round_by_looking(x):
    """One positive, finite float32 -> the pattern of the nearest bfloat16. Slow, and plainly right."""
    below = int(np.float32(x).view(np.uint32)) >> 16
    above = below + 1

    def value(pattern):
        return float(np.uint32(pattern << 16).view(np.float32))

    to_below, to_above = x - value(below), value(above) - x
    if to_below != to_above:
        return below if to_below < to_above else above
    return below if below % 2 == 0 else above


for x in (1.0, 1 + 5 / 256, 3.14159265, 0.1):
    print(f"{x:<12} 0x{round_by_looking(x):04X}")

# %% [markdown]
# Note `above = below + 1`. Patterns are in the order of the numbers they stand for, across the borders of exponents
# too: after `0x3FFF`, the last number below 2, comes `0x4000`, which is 2. A carry out of the fraction goes into the
# exponent, and that is right. And after `0x7F7F`, the largest finite number, comes `0x7F80`: infinity.
#
# ## 02.3 · Six numbers by hand
#
# Round these to bfloat16, with pencil and the rule; no code. Near 1 the numbers are $1/128$ apart: `0x3F80` is 1,
# `0x3F81` is $1 + 1/128$, `0x3F82` is $1 + 2/128$; with a minus sign they begin with `0xBF`. Write patterns.
#
# | name | number |
# |---|---|
# | `tie_low` | $1 + 1/256$ |
# | `tie_high` | $1 + 3/256$ |
# | `just_above` | $1 + 1/256 + 2^{-23}$ |
# | `negative_tie` | $-(1 + 3/256)$ |
# | `nearly_two` | $2 - 2^{-23}$, the last float32 below 2 |
# | `largest` | FLT_MAX, the largest finite float32, `0x7F7FFFFF` |

# %%
# Exercise 02.3 - six numbers by hand
# BEGIN SOLUTION (8 lines): a dict of six patterns: {"tie_low": 0x____, ...}
rounded = {
    "tie_low": 0x3F80,
    "tie_high": 0x3F82,
    "just_above": 0x3F81,
    "negative_tie": 0xBF82,
    "nearly_two": 0x4000,
    "largest": 0x7F80,
}
# STUB rounded = None
# END SOLUTION

# %%
check("02.3", rounded)

# %% [markdown]
# ## 02.4 · Round to nearest even
#
# Now all float32 numbers, and as fast as NumPy can: three lines, and no loop. Comparing distances for every number is slow. Look at the lower half as an integer $r$ from 0 to `0xFFFF`, and at the
# last bit that stays, $b$ (bit 16 of the float32). The pattern must go up by one
#
# - if $r > $ `0x8000`, or
# - if $r = $ `0x8000` and $b = 1$, because then the even neighbour is the one above.
#
# Now add `0x7FFF` $+\, b$ to the whole number. The lower half carries into the upper one exactly if
# $r + \text{0x7FFF} + b \ge \text{0x10000}$, that is, if $r \ge \text{0x8001} - b$. With $b = 0$ these are the $r$ above
# `0x8000`; with $b = 1$, `0x8000` as well. That is the rule, both halves of it: **one addition and one shift**. By hand,
# for $1 + 3/256$ = `0x3F818000`: $b = 1$, the sum is `0x3F820000`, the result `0x3F82`.
#
# The addition works for every number, and not for NaN. A NaN is all ones in the exponent and *any* ones in the
# fraction:
#
# - `0x7F800001 + 0x7FFF = 0x7F808000`, cut to `0x7F80`: the NaN became infinity;
# - `0x7FFFFFFF + 0x8000 = 0x80007FFF`, cut to `0x8000`: the NaN became $-0$, and an engine that has gone wrong looks
#   healthy.
#
# So NaNs are set apart. They are the patterns above `0x7F800000`, *once the sign is masked off*. Cut them, and set one
# of the fraction bits that stay (`0x40` is the usual one), in case all the ones were in the half that goes.
#
# Your function gets float32 of any shape and gives back patterns, `uint16` of the same shape. In Python `+` comes before
# `>>`, and `>>` before `&`: `(bits >> 16 & 1)` is the last bit that stays, and needs its brackets in a sum.

# %%
# Exercise 02.4 - round to nearest even
def float_to_bf16(x):
    """float32, any shape -> uint16 bits of the same shape: nearest, ties to even; a NaN stays a NaN."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    # BEGIN SOLUTION (3 lines): round by one addition; find the NaNs; choose between the two
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, bits >> 16 | 0x40, rounded).astype(np.uint16)
    # STUB return np.zeros(bits.shape, np.uint16)
    # END SOLUTION


# %%
check("02.4", float_to_bf16)

# %% [markdown]
# Your function between 1 and $1 + 5/128$, beside cutting off. The dots are the ties: see which way each went, up by half a
# step or down.

# %% tags=["nbval-ignore-output"]
show("02.4")

# %% [markdown]
# ## 02.5 · BF16 for every kernel to come
#
# The same two functions in CUDA C++, for one number each. Every kernel from lesson 05 on reads its weights with the one
# and stores its results with the other; between the two, all arithmetic is float32. Four things are new.
#
# - `typedef unsigned short bf16;` only gives `unsigned short` (16 bits) another name. The compiler knows nothing of the
#   format, and `bits * 2` would be integer arithmetic on a pattern.
# - `__float_as_uint(x)` and `__uint_as_float(u)` are C++'s `view`: the same bits, another type, no instruction at all.
#   A cast, `(float)u`, is C++'s `astype`.
# - C++ widens a 16-bit number to 32 bits *before* it shifts; NumPy does not.
# - In C++, and not in Python, comparisons come before `&`: `bits & m > x` is `bits & (m > x)`. Write `(bits & m) > x`.
#   (Constants get a `u`, as in `0x7FFFu`, so that everything stays unsigned.)
#
# `__device__` marks a function that kernels call, and `__forceinline__` asks the compiler to put its body at the place
# of the call. The answer is a string. The two kernels that test it, one thread a number, come from the check.

# %%
# Exercise 02.5 - bf16 for every kernel to come
BF16_CUDA = r"""
typedef unsigned short bf16;

__device__ __forceinline__ float bf16_to_float(bf16 bits) {
    // BEGIN SOLUTION (1 line): the upper half of a float
    return __uint_as_float((unsigned)bits << 16);
    // STUB return 0.0f;
    // END SOLUTION
}

// To nearest, ties to even; a NaN stays a NaN.
__device__ __forceinline__ bf16 float_to_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    // BEGIN SOLUTION (2 lines): NaNs first; then one addition and one shift
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (bf16)(bits >> 16 | 0x40u);
    return (bf16)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
    // STUB return (bf16)0;
    // END SOLUTION
}
"""

# %%
check("02.5", BF16_CUDA)

# %% [markdown]
# Why test all patterns by their bits, and not by arithmetic? The compiler is told to flush subnormals to zero
# (`-ftz=true`, CuPy always adds it): on a card, `x * 1.0f` makes 0 of a subnormal `x`. Moving bits does no arithmetic,
# and keeps them all.
#
# What does a conversion cost? It reads four bytes and writes two, and does a handful of integer instructions in between.
# On a card you will see that one number a thread does not yet reach the pace of a plain copy: lesson 05 is about that.

# %% tags=["nbval-ignore-output"]
measure("02.5")

# %% [markdown]
# ## Your part in the engine
#
# The engine writes a story with your functions in front of all its kernels. Then a dial is turned: weights,
# activations, and what attention remembers of earlier tokens, keep 7, 5, 3 and at last 2 bits of fraction. (3 and 2 are
# what the 8-bit formats E4M3 and E5M2 have. The names count bits: 4 of exponent and 3 of fraction, 5 and 2.)
#
# Watch the error of the logits: it grows with every bit that goes. How long the *text* holds is chance as well. A token
# changes where two were nearly equally probable, and from there on it is another story; a coarser setting may agree for
# longer by luck. Below are two mistakes of this lesson. (The first time takes some seconds: every kernel is compiled anew
# for each setting.)

# %% tags=["nbval-ignore-output"]
show_engine("02")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - A bfloat16 is the upper half of a float32: float32's range, and about two and a half decimal digits.
# - Widening is a shift by 16 and exact. Narrowing rounds: add `0x7FFF` plus the last bit that stays, shift down by 16.
# - Cutting off drifts. Rounding to nearest does not, and ties to even keep it so.
# - A carry from the fraction into the exponent is right, up to infinity. A NaN must not be rounded.
# - `view` and `__float_as_uint` keep bits; `astype` and casts convert values.
# - Each bit of fraction that goes about doubles the error of the logits.
#
# ## To think about
#
# <details><summary>You add 1.0 to a bfloat16 sum again and again. Where does it stop growing?</summary>
#
# At 256. From 256 to 512 the numbers are 2 apart; $256 + 1$ is a tie between 256 and 258, and 256 is even. This is why
# every kernel of this course sums in float32 and rounds once, at the end.
# </details>
#
# <details><summary>float32 -> bfloat16 -> float32 -> bfloat16: does the second rounding change anything?</summary>
#
# No. What comes back from bfloat16 has sixteen zeros at the end; adding `0x7FFF` plus a bit to them never carries. A
# model that is loaded and saved again stays the same to the bit.
# </details>
#
# <details><summary>A float64 is rounded to float32 and then to bfloat16. Can that differ from rounding once?</summary>
#
# Yes, when the first rounding lands on a tie. $1 + 1/256 + 2^{-40}$ is above the tie and belongs to $1 + 1/128$. As a
# float32 it is exactly $1 + 1/256$, and that goes to 1. It is called double rounding.
# </details>
#
# ## Further reading
#
# - David Goldberg, *What Every Computer Scientist Should Know About Floating-Point Arithmetic* (ACM Computing Surveys,
#   1991).
# - IEEE Std 754-2019, section 4.3: the directions of rounding, with ties to even as the default.
# - Dhiraj Kalamkar and others, *A Study of BFLOAT16 for Deep Learning Training* (2019, arXiv:1905.12322).
#
# **Next:** [lesson 03, Tokenization](03_tokenization.ipynb).
