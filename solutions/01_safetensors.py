# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 · A model is a file
#
# **At the end you have** `read_safetensors`: it opens the weights of any Llama, a gigabyte or sixteen, in less than a
# millisecond (`benchmarks/safetensors_open.md`) and without copying a byte. From now on the engine reads its model through your function.
#
# **About 70 minutes** · builds on 00 (threads, blocks, the guard)
#
# **In vLLM** the same files are read with the `safetensors` library (`safe_open` in
# `vllm/model_executor/model_loader/weight_utils.py`). Yours does what that library does, in twenty lines.

# %% tags=["nbval-ignore-output"]
import json
import tempfile
from pathlib import Path

from tinyvllm_ref.checkpoint.names import REPOSITORY, resolve
from tinyvllm_ref.checkpoint.safetensors import read_safetensors as reference_reader, write_safetensors
from tinyvllm_ref.checkpoint.weights import tensor_shapes
from tinyvllm_ref.config import ModelConfig
from tinyvllm_ref.course import check, cp, hint, measure, np, progress, reset, show, show_engine, solution
from tinyvllm_ref.course.exercises.lesson_01_safetensors import six_broken_files
from tinyvllm_ref.device import describe

print(describe())

# %% [markdown]
# > **Fast track.** You have read such a file before? Do [01.1](#01.1-·-Read-the-header),
# > [01.2](#01.2-·-Tensors-without-a-copy) and [01.3](#01.3-·-A-tensor-on-the-device), and leave.

# %% [markdown]
# ## The question
#
# A language model is some hundred matrices of numbers, and a program that multiplies by them. The program you will
# write. The matrices come in a file. What is in it, byte by byte?
#
# Older files were Python pickles: to load one was to *run* it, and whoever made it could run anything on your machine.
# [safetensors](https://github.com/huggingface/safetensors#format) has no code in it at all. It has three parts:
#
# | bytes | what |
# |---|---|
# | 0 to 7 | $n$: the length of the header, an unsigned integer of 64 bits, **lowest byte first** |
# | 8 to $8 + n - 1$ | the header: JSON in UTF-8, perhaps with blanks at its end |
# | $8 + n$ to the end | the numbers of all tensors, one tensor after the other |
#
# Here is a small one, whole. It holds three tensors in 288 bytes.

# %%
small = (REPOSITORY / "data" / "small" / "three_tensors.safetensors").read_bytes()
print(small[:8].hex(" "), " <- the length")
print(small[8:248].decode(), " <- the header")
print(small[248:].hex(" "), " <- the numbers")

# %% [markdown]
# **The length, by hand.** `f0 00 00 00 ...`: the first byte is worth 1, the second 256, the third $256^2$. So
# $n = \text{0xf0} = 240$, and the numbers begin at byte $8 + 240 = 248$. This order, lowest byte first, is called
# *little endian*; it is also how your processor and every GPU keep integers in memory.
#
# **The header** names each tensor with its `dtype`, its `shape` and its `data_offsets` $[b, e)$: from byte $b$ up to,
# and not including, byte $e$, **counted from the first byte after the header**. `embedding` has $2 \times 3$ elements of
# BF16, two bytes each: 12 bytes, and so $[0, 12)$. In the file these are the bytes 248 to 259. `__metadata__` is free
# text, and no tensor.
#
# As a specification, in NumPy, for one tensor of this file:

# %%
n = int(np.frombuffer(small, "<u8", count=1)[0])  # "<": little endian
b, e = json.loads(small[8 : 8 + n])["scale"]["data_offsets"]
np.frombuffer(small[8 + n + b : 8 + n + e], "<f4")

# %% [markdown]
# ## 01.1 · Read the header
#
# `data` is a `bytes` or a `memoryview`, that is: something with bytes in it that you can slice. Give back the header as
# a dict without `__metadata__`, and the number of the byte at which the tensors begin. Two functions do most of it:
# `int.from_bytes(some_bytes, order)` with `order` either `"little"` or `"big"`, and `json.loads(some_bytes)`, which wants
# real `bytes`: wrap a slice in `bytes(...)`.

# %%
# Exercise 01.1 - read the header
import json


def read_header(data):
    # BEGIN SOLUTION (4 lines): the length; the JSON; __metadata__ out; header and start of the tensors
    length = int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8 : 8 + length]))
    header.pop("__metadata__", None)
    return header, 8 + length
    # STUB return {}, 0
    # END SOLUTION


# %%
check("01.1", read_header)

# %% [markdown]
# ## What is in a real model
#
# `tiny-stories` is the model that comes with this course: 2.4 million numbers, trained to tell children's stories. Its
# file has the same form as one of Llama 3.2 1B. The first tensors of it:

# %%
views = reference_reader(resolve("tiny-stories") / "model.safetensors")
print(f"{'tensor':48} {'dtype':6} {'shape':12} {'parameters':>10} {'bytes':>10}")
for name, view in list(views.items())[:12]:
    parameters = int(np.prod(view.shape))
    print(f"{name:48} {view.dtype:6} {view.shape!s:12} {parameters:10,} {view.nbytes:10,}")
total = sum(view.nbytes for view in views.values())
print(f"{len(views)} tensors, {total // 2:,} parameters, {total:,} bytes")

# %% [markdown]
# Read the names aloud, and you have the plan of the whole machine: a table of embeddings; in each layer two norms,
# attention (`q_proj`, `k_proj`, `v_proj`, `o_proj`) and a feed-forward block (`gate_proj`, `up_proj`, `down_proj`); one
# last norm. For now these are names and nothing more: lessons 05 to 13 say what each of them does.
#
# ## A map instead of a copy
#
# `open(path, "rb").read()` would copy the file into memory before you have asked for anything. **`mmap`** asks the
# operating system for something cheaper: a range of addresses that *stands for* the file. Nothing is read. When someone
# looks at a byte, the system fetches the page around it (4 KiB on most machines) and keeps it as long as there is room.
# Two programs that map the same file share the pages.
#
# A **memoryview** is Python's window onto bytes that belong to something else. Slicing one gives another window, and
# copies nothing:
#
# ```python
# with open(path, "rb") as file:
#     mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
# window = mapped[1000:2000]          # no byte was read
# ```
#
# The file may be closed then: the map lives on until the last window is gone.
#
# ## 01.2 · Tensors without a copy
#
# Give back a dict: name -> `Tensor(dtype, shape, data)`, with `shape` a tuple and `data` a window onto exactly the
# tensor's bytes. Your `read_header` is there to be used. The check reads a file of 4 MiB and watches how much memory you
# take.

# %%
# Exercise 01.2 - tensors without a copy
import mmap
from typing import NamedTuple


class Tensor(NamedTuple):
    dtype: str  # as in the header: "BF16"
    shape: tuple  # (2, 3)
    data: memoryview  # its bytes


def read_safetensors(path):
    # BEGIN SOLUTION (8 lines): map the file, read the header, cut a window for each tensor
    with open(path, "rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    header, start = read_header(mapped)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), mapped[start + begin : start + end])
    return tensors
    # STUB return {}
    # END SOLUTION


# %%
check("01.2", read_safetensors)

# %% [markdown]
# The file as a strip of bytes, drawn from where *your* windows lie in the map; under it, its beginning magnified. Names are
# cut short: `0.up_proj` is that of layer 0. The header is a sliver. Where are most of the bytes?

# %% tags=["nbval-ignore-output"]
show("01.2")

# %% [markdown]
# ## 01.3 · A tensor on the device
#
# Now a kernel reads the file. All its bytes are uploaded as they are, as an array of `unsigned char`; the kernel gets
# `start` (where the tensors begin) and `begin` (the first of the tensor's two offsets), and writes its `n` numbers as
# `float`. `long long` is an integer of 64 bits: an `int` ends at 2,147,483,647, and files do not. For the same reason
# one writes `2 * (size_t)i` where a product may become large: `(size_t)i` makes `i` 64 bits wide before it is doubled.
#
# A BF16 number has two bytes. They are the **upper half of a float32**: put 16 zero bits under them, and read the 32
# bits as a float. (Lesson 02 shows why; take it as a rule for now.) By hand, the second number of `embedding` above: its
# bytes are `20 40`, lowest first, so the number is `0x4020`; with zeros under it `0x40200000`, and that is the float 2.5.
#
# Three tools of C++: `a | b << 8` puts the byte `b` above the byte `a`; `u << 16` moves bits up by 16; and
# `__uint_as_float(u)` reads the bits of an unsigned integer as a float. Read byte by byte: a tensor may begin at an odd
# address, and there a GPU refuses to load two bytes at once. The address of byte `k` of the file is `file + k`, and `at[0]`
# and `at[1]` are the bytes at an address `at` and behind it.

# %%
# Exercise 01.3 - a tensor on the device
widen = cp.RawKernel(r"""
extern "C" __global__ void widen(const unsigned char* file, long long start, long long begin,
                                 float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;    // one thread a number; out: (n,)
    // BEGIN SOLUTION (5 lines): find the two bytes of number i, put them together, read a float
    if (i < n) {
        const unsigned char* at = file + start + begin + 2 * (size_t)i;
        unsigned bits = at[0] | (unsigned)at[1] << 8;
        out[i] = __uint_as_float(bits << 16);
    }
    // STUB if (i < n) out[i] = 0.0f;
    // END SOLUTION
}
""", "widen")

# %%
check("01.3", widen)

# %% [markdown]
# What does your kernel ask of the memory? Two words for the table that comes: a GPU runs the threads of a block in groups
# of 32, called **warps**, and what a warp asks for at once is one *access*. Memory answers in pieces of 32 bytes, called
# **sectors**. (Shared memory, bank conflicts and barriers are of lessons 04 and 06; this kernel has none.)

# %% tags=["nbval-ignore-output"]
measure("01.3")

# %% [markdown]
# In the emulation, for 8,192 numbers: the file's part has 16,384 bytes, that is 512 sectors, and the result 32,768 bytes,
# 1,024 sectors. So 1,536 would do. But the kernel reads byte by byte, first the lower byte of each number and then the
# upper one, and each of the two touches all 512 sectors: $2 \times 512 + 1{,}024 = 2{,}048$. Lesson 05 is about this, and
# loads 16 bytes at once where the address allows it.

# %% [markdown]
# ## A file from a stranger
#
# Weights are downloaded, and downloads break off. Converters have bugs. And a file can be made to deceive: two tensors
# that share bytes, or a hole in which something hides. So the format has rules, and a good reader refuses a file that
# breaks one, *before* the engine turns it into noise:
#
# | word, if broken | the rule |
# |---|---|
# | `"length"` | the header has at most 100,000,000 bytes, and all of them are there (as are the 8 of the length) |
# | `"json"` | the header is JSON, in UTF-8 |
# | `"dtype"` | each dtype is a known one |
# | `"size"` | the bytes of a tensor are as many as its dtype and shape say |
# | `"overlap"` | no byte belongs to two tensors |
# | `"hole"` | every byte after the header belongs to a tensor |
# | `"truncated"` | no tensor ends behind the end of the file |
#
# Below are six files, each with one fault. Look at them as you would on a bad day at work.

# %%
for letter, content in six_broken_files().items():
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] if 8 + length <= len(content) else content[8:248]
    text = header.decode().replace('},"', '},\n     "')
    print(f"file {letter}: {len(content)} bytes, length {length:,}, header:\n    {text}\n")

# %% [markdown]
# ## 01.4 · Name the fault
#
# Write the inspector: the bytes of a file -> the word from the table, or `"ok"`. The files of the check have one fault
# at most. It gives you these six and others, in which the header names the tensors in another order than their bytes
# come; a report shows what is in the file that went wrong. An answer cell stands alone: the table `BYTES` is in it, and
# `read_header` from 01.1 is not known there. (It would not say which rule was broken, either.)

# %%
# Exercise 01.4 - name the fault
import json
import math

BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
         "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}  # of one element


def fault_in(data):
    length = int.from_bytes(data[:8], "little")
    # BEGIN SOLUTION (22 lines): rule by rule, from the front of the file to its end
    if len(data) < 8 or length > 100_000_000 or 8 + length > len(data):
        return "length"
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError:
        return "json"
    header.pop("__metadata__", None)
    position = 0  # every byte before it belongs to a tensor
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in BYTES:
            return "dtype"
        if math.prod(entry["shape"]) * BYTES[entry["dtype"]] != end - begin:
            return "size"
        if begin != position:
            return "overlap" if begin < position else "hole"
        position = end
    rest = len(data) - 8 - length
    if position > rest:
        return "truncated"
    return "hole" if position < rest else "ok"
    # STUB return "ok"
    # END SOLUTION


# %%
check("01.4", fault_in)

# %% [markdown]
# ## One model, many files
#
# Large models come in **shards**, so that no file is larger than some gigabytes. Beside them lies
# `model.safetensors.index.json`, whose `weight_map` says which tensor is in which file. Each shard is a whole
# safetensors file. Here tiny-stories is cut in two, in a folder that is thrown away, and put together again:

# %%
with tempfile.TemporaryDirectory() as folder:
    names = list(views)
    weight_map = {}
    for number, part in ((1, names[:20]), (2, names[20:])):
        shard = f"model-{number:05}-of-00002.safetensors"
        tensors = {name: (views[name].dtype, views[name].shape) for name in part}
        write_safetensors(Path(folder) / shard, tensors, [views[name].data for name in part])
        weight_map |= dict.fromkeys(part, shard)
    again = {}
    for shard in dict.fromkeys(weight_map.values()):
        again |= reference_reader(Path(folder) / shard)
print(json.dumps(dict(list(weight_map.items())[18:22]), indent=1))
print("the same tensors:", all(again[name].data == views[name].data for name in views))

# %% [markdown]
# (The folder is gone, and `again` still works: a map keeps its file alive.)
#
# ## What the file does not say
#
# Nothing in it tells how many heads attention has, or how a position becomes an angle. That is in **config.json**, beside
# it. The keys that decide how large the model is:

# %%
config = json.loads((resolve("tiny-stories") / "config.json").read_text())
for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "tie_word_embeddings"):
    print(f"{key:22} {config[key]}")

# %% [markdown]
# With $H$ the hidden size, $V$ the vocabulary, $F$ the intermediate size, $D$ the head's size, $n_q$ query and $n_k$
# key/value heads, the tensors are (rows × columns):
#
# | tensor | shape | how many |
# |---|---|---|
# | `embed_tokens` | $V \times H$ | 1 |
# | `q_proj` | $n_q D \times H$ | one a layer |
# | `k_proj`, `v_proj` | $n_k D \times H$ | one a layer, each |
# | `o_proj` | $H \times n_q D$ | one a layer |
# | `gate_proj`, `up_proj` | $F \times H$ | one a layer, each |
# | `down_proj` | $H \times F$ | one a layer |
# | `input_layernorm`, `post_attention_layernorm` | $H$ | one a layer, each |
# | `norm` | $H$ | 1 |
# | `lm_head` | $V \times H$ | 1, or none: with `tie_word_embeddings` the embedding table serves at both ends |
#
# ## 01.5 · Parameters from config.json
#
# How many numbers does a model have? Count them from the config alone; no file needed. Some configs leave keys out, and
# the defaults are: as many key/value heads as query heads, $D = H / n_q$, and not tied. The check tries Llama 3.2 1B,
# whose name you can then judge.

# %%
# Exercise 01.5 - parameters from config.json
def count_parameters(config):
    # BEGIN SOLUTION (8 lines): add up the table
    vocab, hidden, heads = config["vocab_size"], config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    size = config.get("head_dim", hidden // heads)
    attention = 2 * heads * size * hidden + 2 * kv_heads * size * hidden
    feed_forward = 3 * config["intermediate_size"] * hidden
    layers = config["num_hidden_layers"] * (attention + feed_forward + 2 * hidden)
    head = 0 if config.get("tie_word_embeddings", False) else vocab * hidden
    return vocab * hidden + layers + hidden + head
    # STUB return 0
    # END SOLUTION


# %%
check("01.5", count_parameters)

# %% [markdown]
# The same by the reference, which lists the shapes of all tensors for a config:

# %%
llama = dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
             num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True)
shapes = tensor_shapes(ModelConfig.from_dict({**config, **llama}))
sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
total = sum(sizes.values())
print(f"Llama 3.2 1B: {total:,} parameters, {2 * total / 1e9:.2f} GB in BF16")
print(f"the embedding table: {sizes['model.embed_tokens.weight'] / total:.0%} of them")

# %% [markdown]
# ## Your part in the engine
#
# The engine opens its model with your function, writes a story, and does it again with two mistakes of this lesson.
# One of them is not stopped by anything: the engine runs, at full speed, on the header's text and on weights that are all
# shifted by some kilobytes.

# %% tags=["nbval-ignore-output"]
show_engine("01")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - A safetensors file is a length, a JSON header, and bytes. Offsets count from behind the header, `[begin, end)`.
# - A map reads nothing until somebody looks. Slicing a memoryview copies nothing.
# - Check a file before you use it: a wrong offset gives no error, it gives noise.
# - The names in the header are the plan of the machine; config.json holds the sizes.
#
# ## To think about
#
# <details><summary>Why do the offsets count from behind the header, and not from the start of the file?</summary>
#
# If they counted from the start, they would depend on the header's length, which depends on how many digits the offsets
# have. Whoever writes a file would go round in circles.
# </details>
#
# <details><summary>You open a file of 16 GB in a millisecond. When does the reading happen?</summary>
#
# When the bytes are looked at: as the weights are copied to the GPU. The millisecond is only the header's. The first
# run after a restart is slow, because pages come from the disk; the second finds them in the system's memory.
# </details>
#
# <details><summary>Why does the header have a limit of 100 MB?</summary>
#
# The length is the first thing a reader believes. Without a limit, a file of a few bytes could make a program reserve
# $2^{64}$ bytes, or parse JSON for hours.
# </details>
#
# ## Further reading
#
# - Hugging Face, [*safetensors: format*](https://github.com/huggingface/safetensors#format): all the rules, on one page.
# - `man 2 mmap`, or the Python documentation of `mmap`.
# - Ulrich Drepper, *What Every Programmer Should Know About Memory* (2007), section 4: virtual memory.
#
# **Next:** [lesson 02, The bits of BF16](02_bf16_bits.ipynb).
