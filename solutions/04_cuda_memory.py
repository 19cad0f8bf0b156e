# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 · CUDA memory
#
# **At the end you have** `load_weights`: all weights of a model in one piece of the card's memory, laid out by your own plan,
# with query, key and value (and gate and up) as single matrices. You also know where a kernel's numbers live, and how to measure
# time without fooling yourself.
#
# **About 55 minutes** · builds on 00 (threads, blocks, guards), 01 (tensors of a checkpoint) and 02 (bfloat16)
#
# **In vLLM** the same stacking happens while a model is loaded: a table maps `q_proj`, `k_proj`, `v_proj` onto one `qkv_proj`, and
# `gate_proj`, `up_proj` onto one `gate_up_proj`. What differs: there each parameter is a PyTorch tensor of its own, and PyTorch's
# caching allocator is what stands between it and the card.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, display_figure, earlier, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, solution
from tinyvllm_ref.device import describe, is_gpu

float_to_bf16 = earlier("float_to_bf16")  # lesson 02: yours once it has passed
print(describe())

# %% [markdown]
# > **Fast track.** You know pools, asynchronous launches and aligned arenas? Do [exercise 04.1](#04.1-·-A-plan-for-the-arena)
# > (five minutes, the loader uses it) and [04.5](#04.5-·-The-weights-in-one-arena), and leave.

# %% [markdown]
# ## The question
#
# Lesson 01 left the weights in a file: bytes in the memory of the **host**, the computer that the card is plugged into. A kernel can
# not read them there. The **device** has memory of its own, and what a kernel is to use must first be allocated there, and copied.
#
# Why so much ceremony? Because the two memories are very different in speed, and between them there is a narrow road:

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course.figures import Level, memory_hierarchy

levels = [
    Level("registers", 256 * 1024, None, "in each of the 132 SMs: a thread's own variables"),
    Level("shared memory", 228 * 1024, 32.1e12, "in each SM (the speed is of all SMs together): lesson 06"),
    Level("L2 cache", 60 * 2**20, 7.65e12, "of the whole card; you do not manage it"),
    Level("device memory", 150_109_880_320, 4.43e12, "HBM3e: what cp.empty gives you"),
    Level("host's memory", 2**37, 55e9, "over PCIe; 128 GiB in that computer"),
]
display_figure(memory_hierarchy(levels, source="measured on an NVIDIA H200: benchmarks/memory_levels.md"))

# %% [markdown]
# Llama 3.2 1B has 2.47 GB of weights in bfloat16. How long does it take to move them once, at best?

# %%
weights = 2.4715e9  # bytes
for road, speed in (("from the host, over PCIe", 55e9), ("from device memory to the SMs", 4.43e12)):
    print(f"{road:30} {1e3 * weights / speed:6.2f} ms")

# %% [markdown]
# Every token that is generated needs every weight. Were they fetched from the host each time, a token would take at least 45 ms; from
# device memory, little more than half a millisecond. So: **bring them over once, and leave them there.** That is this lesson.
#
# ## What runs where
#
# Your Python runs on the host. A card consists of **streaming multiprocessors** (SMs), 132 of them on an H200. When you launch a
# kernel, the card gives whole blocks to SMs that have room. An SM runs the threads of a block in **warps** of 32: these take each
# instruction together. When a warp waits for memory, the SM lets another one go on; it keeps up to 64 at hand for this. That is how a
# card hides that memory is far away: by having something else to do.
#
# Three calls connect the two sides. In C they are `cudaMalloc`, `cudaMemcpy` and a launch; CuPy gives them Python names:

# %%
host = np.arange(6, dtype=np.float32)  # in the host's memory
device = cp.empty(6, np.float32)  # allocate on the device: nothing is written
device.set(host)  # copy host -> device
back = device.get()  # copy device -> host
print(type(device).__name__, device.nbytes, "bytes;", back)

# %% [markdown]
# `cp.asarray(host)` is the first two in one. A slice of a device array is a **view**: it has the address of its first element
# and copies nothing, and it keeps the memory alive as long as it lives itself. `view(dtype)` reads the same bytes as other numbers.

# %%
whole = cp.asarray(np.arange(16, dtype=np.uint8))
part = whole[4:10].view(np.uint16).reshape(3, 1)  # 6 bytes, seen as 3 numbers
print(part.shape, "begins", part.data.ptr - whole.data.ptr, "bytes into the whole:", part.ravel().tolist())

# %% [markdown]
# **What a pool does.** Asking the driver for memory takes long, and freeing it waits for all work to end. So CuPy keeps what you
# free in a **pool** and hands it out again. The pool counts in units of 512 bytes, and an array begins at a multiple of that:

# %% tags=["nbval-ignore-output"]
pool = cp.get_default_memory_pool()
before = pool.used_bytes()
first = cp.empty(1000, np.uint8)
address = first.data.ptr
print("asked for 1,000 bytes, the pool counts", pool.used_bytes() - before)
del first  # goes back to the pool, not to the driver
second = cp.empty(1000, np.uint8)
print("the next array of that size has the same place:", second.data.ptr == address)

# %% [markdown]
# <details><summary>Pinned memory and streams, to read only</summary>
#
# The card fetches from the host's memory by itself, without the processor. It can do so only where the operating system promises not to
# move or swap out that memory: **pinned** memory (`cp.cuda.alloc_pinned_memory`). From ordinary memory the driver first copies
# into a small pinned buffer, piece by piece, and that is slower: 6 GB/s instead of 55 in the measurement above. Pinned memory is scarce for everyone else, so one does not pin gigabytes lightly.
#
# Work on a card is queued in **streams**. Within a stream everything happens in order; different streams may overlap, for instance a copy
# from pinned memory beside a kernel. All of this course uses one stream, the default, until the engine's own fast path.
# </details>
#
# ## One arena
#
# A model's weights live exactly as long as the model. So take **one** allocation for all of them, an **arena**, and divide it by
# a plan of your own. Either it fits or it does not, before anything is copied. And you decide what lies next to what:
#
# - **A group** is one array of the engine. Its tensors follow each other **without a gap**: query, key and value are rows of one matrix
#   `qkv`, gate and up of one `gate_up`. Lessons 09 and 13 multiply by them in one product.
# - **A group begins at a multiple of 256 bytes.** Kernels that read 16 bytes at a time (lesson 05) need aligned addresses, and CUDA's own
#   allocations promise 256 as well. What is left between two groups is **padding**, and nobody reads it.
#
# By hand: groups of [100, 60] and [300] bytes. The tensors of the first begin at 0 and at 100, and it ends at 160. Rounded up, the
# second begins at 256 and ends at 556. Rounded up, the arena has 768 bytes.
#
# Rounding $e$ up to a multiple of $a$ is $\lceil e / a \rceil \cdot a$. The specification in NumPy, for the beginnings of groups alone:

# %%
sizes = np.array([100 + 60, 300])
padded = np.ceil(sizes / 256).astype(int) * 256
print("groups begin at", np.concatenate([[0], np.cumsum(padded)[:-1]]))
print("the arena has", padded.sum(), "bytes")

# %% [markdown]
# ## 04.1 · A plan for the arena
#
# Write the plan for tensors. `groups` is a list of groups; a group is a list of sizes in bytes. Give the offset of every tensor, in the same
# shape, and the size of the arena: `([[0, 100], [256]], 768)` for the example.

# %%
# Exercise 04.1 - a plan for the arena
def plan_arena(groups):
    """Offsets of all tensors in bytes, as nested as groups, and the bytes of the arena."""
    offsets, end = [], 0
    for sizes in groups:
        starts = []
        # BEGIN SOLUTION (4 lines): the offset of each tensor into starts; then round the end of the group up
        for size in sizes:
            starts.append(end)
            end += size
        end = (end + 255) // 256 * 256
        # STUB starts = [0 for size in sizes]  # replace this line
        # END SOLUTION
        offsets.append(starts)
    return offsets, end


# %%
check("04.1", plan_arena)

# %% [markdown]
# ## 04.2 · Copies and padding
#
# Here are the groups of `tiny-stories`, the model of this course: those outside of the layers, and those of the first of five layers,
# which are all alike.

# %%
from tinyvllm_ref.checkpoint.names import resolve
from tinyvllm_ref.checkpoint.weights import open_checkpoint, weight_plan

config, views = open_checkpoint(resolve("tiny-stories"))
for group in weight_plan(config):
    if "layers." not in group.name or "layers.0." in group.name:
        count = len(group.sources)
        print(f"{group.name:36} {group.shape!s:12} {count} tensor{'s' if count > 1 else ''}")

# %% [markdown]
# How many copies does it take to send every *tensor* by itself? And how many bytes of padding does the arena need, when every group begins
# at a multiple of 256? Write down two numbers before you run the measurement; any number gets the credit.

# %%
# Exercise 04.2 - copies and padding
# BEGIN SOLUTION (2 lines): a number of copies, and a number of bytes
copies = 5 * 9 + 2
padding = 11 * (512 - 2 * 192)
# STUB copies = None
# STUB padding = None
# END SOLUTION
predict("04.2", copies=copies, padding=padding)

# %% tags=["nbval-ignore-output"]
measure("04.2")

# %% [markdown]
# ## 04.3 · All tensors in one launch
#
# Suppose the bytes of the file are on the device already, in the file's order, and each tensor must go to its place in the arena. One
# `memcpy` a tensor would do, and be hundreds of calls for a large model. A kernel can move them all **in one launch**.
#
# A grid may have two dimensions. Here `blockIdx.y` is the number of a tensor, and the blocks in the direction of x share its elements, 256
# each. The grid is as wide as the *longest* tensor needs. `source` and `target` say where each tensor begins, **in bytes**, in the file and in
# the arena; `count` is its number of two-byte elements. They are `long long`, integers of 64 bits: a file may have more
# bytes than an `int` can count.

# %%
# Exercise 04.3 - all tensors in one launch
move_tensors = cp.RawKernel(r"""
extern "C" __global__ void move_tensors(const unsigned short* file, unsigned short* arena,
                                        const long long* source, const long long* target,
                                        const long long* count) {
    int tensor = blockIdx.y;                                          // which tensor
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;   // which of its elements
    // BEGIN SOLUTION (1 line): move element i of this tensor, if it has one
    if (i < count[tensor]) arena[target[tensor] / 2 + i] = file[source[tensor] / 2 + i];
    // STUB if (tensor == 0 && i == 0) arena[0] = 0;  // replace this line
    // END SOLUTION
}
""", "move_tensors")

# %%
check("04.3", move_tensors)

# %% [markdown]
# On a card this shows how close your kernel comes to a plain copy within the card's memory. In emulation it counts the **sectors**: device
# memory moves in pieces of 32 bytes, and a piece moves whole, however little of it was wanted. Lesson 05 is about that. On
# an NVIDIA H200 this kernel reaches 35 % of a copy's speed.

# %% tags=["nbval-ignore-output"]
measure("04.3")

# %% [markdown]
# ## When is a kernel done?
#
# A launch is **asynchronous**: it puts work into the card's queue and returns, after some microseconds. The card does the work later, in order.
# Whoever stops a clock right after a launch has measured how long it takes to *ask*: 71 microseconds for the launch below on an H200, where the
# work took 269.
#
# `cp.cuda.Device().synchronize()` waits until the queue is empty. (Copying to the host with `get()` waits as well, because it needs the result. So a
# program without any synchronize is still right; only its clock may be wrong.) See it on your machine:

# %% tags=["nbval-ignore-output"]
import time

add_one = cp.RawKernel(r"""
extern "C" __global__ void add_one(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += 1.0f;
}
""", "add_one")

n = 1 << 26 if is_gpu else 1 << 16
x = cp.zeros(n, np.float32)
arguments = (((n + 255) // 256,), (256,), (x, np.int32(n)))
add_one(*arguments)  # the first call compiles
cp.cuda.Device().synchronize()
start = time.perf_counter()
add_one(*arguments)
launched = time.perf_counter()
cp.cuda.Device().synchronize()
done = time.perf_counter()
if is_gpu:
    print(f"the launch returned after {1e6 * (launched - start):.0f} us")
    print(f"the work was done after   {1e6 * (done - start):.0f} us")
else:
    print("no GPU here: in the emulation a launch returns when all is done, and its time says nothing")

# %% [markdown]
# ## 04.4 · How long did it take?
#
# Write the stopwatch. You get three functions: `launch()` launches a kernel, `clock()` gives seconds, `synchronize()` waits for the card.
# Return how long the kernel takes *on the card*. Think of two disturbances: the first call of a kernel compiles it, and the card may still be busy
# with something else when you begin.
#
# The check plays the card with a clock of its own, so that it gives the same answer on every machine.

# %%
# Exercise 04.4 - how long did it take?
def seconds_of(launch, clock, synchronize):
    """Seconds that what launch() puts into the queue takes on the card."""
    # BEGIN SOLUTION (6 lines): the seconds of one launch, whatever the card did before
    launch()
    synchronize()
    start = clock()
    launch()
    synchronize()
    return clock() - start
    # STUB launch()  # replace these two lines
    # STUB return 0.0
    # END SOLUTION


# %%
check("04.4", seconds_of)

# %% tags=["nbval-ignore-output"]
if is_gpu:
    try:
        spent = seconds_of(lambda: add_one(*arguments), time.perf_counter, cp.cuda.Device().synchronize)
        print(f"your stopwatch: {1e6 * spent:.0f} us for {x.nbytes:,} bytes, read and written")
    except Exception as error:
        print("your stopwatch does not run yet:", error)
else:
    print("with a GPU your stopwatch would now time add_one")

# %% [markdown]
# Real stopwatches repeat this many times and take the median, and they use *events*, marks in the card's own queue, so that the host's hiccups
# do not count. `measure` does both.
#
# ## 04.5 · The weights in one arena
#
# Now the part. `views` maps the checkpoint's names to tensors (lesson 01: `dtype`, `shape` and the bytes as `data`). Give a dict of device arrays of
# bfloat16 bits (`uint16`), with the names and the shapes of the table above. Demanded are **one allocation** on the device and **one copy** to it: gather the tensors
# on the host first, by your plan, and send the whole.
#
# Two things are there already. `bf16_bits(view)` gives a tensor's numbers as a flat `uint16` array, rounded where the file has 32 or 16 bits a number in
# another format: so a tensor may need fewer bytes in the arena than in the file. And `stacks` lists the tensors of every group, but for the two groups that
# have several: you say which, and in which order.

# %%
# Exercise 04.5 - the weights in one arena
LAYER = {
    "input_layernorm": ["input_layernorm"],
    # BEGIN SOLUTION (2 lines): "qkv": query, key, value; "gate_up": gate, up (self_attn.?_proj and mlp.?_proj)
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "o_proj": ["self_attn.o_proj"],
    "post_attention_layernorm": ["post_attention_layernorm"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    # STUB "qkv": ["self_attn.q_proj"],  # replace this line
    # STUB "o_proj": ["self_attn.o_proj"],
    # STUB "post_attention_layernorm": ["post_attention_layernorm"],
    # STUB "gate_up": ["mlp.gate_proj"],  # replace this line
    # END SOLUTION
    "down_proj": ["mlp.down_proj"],
}


def bf16_bits(view):
    """The numbers of a tensor as bfloat16 bits: a flat uint16 array on the host."""
    if view.dtype == "BF16":
        return np.frombuffer(view.data, np.uint16)
    numbers = np.frombuffer(view.data, {"F16": np.float16, "F32": np.float32}[view.dtype])
    return float_to_bf16(numbers.astype(np.float32))


def load_weights(views, config):
    """All weights in one arena on the device: a dict of name -> array of bfloat16 bits."""
    stacks = {"embed_tokens": ["model.embed_tokens.weight"]}
    for i in range(config.num_hidden_layers):
        for name, tensors in LAYER.items():
            stacks[f"layers.{i}.{name}"] = [f"model.layers.{i}.{tensor}.weight" for tensor in tensors]
    stacks["norm"] = ["model.norm.weight"]
    if not config.tie_word_embeddings:
        stacks["lm_head"] = ["lm_head.weight"]
    # BEGIN SOLUTION (12 lines): bits of all tensors; the plan; pack on the host; one copy; a view for each group
    bits = {name: [bf16_bits(views[tensor]) for tensor in stack] for name, stack in stacks.items()}
    offsets, total = plan_arena([[part.nbytes for part in parts] for parts in bits.values()])
    host = np.zeros(total, np.uint8)
    for starts, parts in zip(offsets, bits.values(), strict=True):
        for start, part in zip(starts, parts, strict=True):
            host[start : start + part.nbytes] = part.view(np.uint8)
    arena = cp.asarray(host)
    weights = {}
    for (name, parts), starts in zip(bits.items(), offsets, strict=True):
        size = sum(part.nbytes for part in parts)
        rows = arena[starts[0] : starts[0] + size].view(np.uint16)
        weights[name] = rows.reshape(-1, *views[stacks[name][0]].shape[1:])
    # STUB weights = {}  # replace this line
    # END SOLUTION
    return weights


# %%
check("04.5", load_weights)

# %% [markdown]
# Here is *your* arena of `tiny-stories`, from the addresses of the arrays that you returned. Norms are a hair wide, and yet each has its own 512
# bytes.

# %% tags=["nbval-ignore-output"]
show("04.5")

# %% [markdown]
# ## Your part in the engine
#
# The engine now reads every weight from where you put it. Open the two mistakes: they only change the *order* of rows, every shape stays
# right, and the text is lost all the same.

# %% tags=["nbval-ignore-output"]
show_engine("04")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - Host and device have memories of their own, and the road between them is the slowest part. Weights cross it once.
# - One arena, one plan: groups aligned, the tensors of a group without a gap. Count in bytes until the last moment.
# - A view is an address and a reference that keeps the memory alive. An address alone keeps nothing.
# - A launch returns before the work is done. Synchronize before you read a clock, on both sides of what you measure.
# - Freed memory goes to the pool, and the next array may get it, with the old bytes still in it.
#
# ## To think about
#
# <details><summary>Your loader needs the whole model twice on the host: in the file's map and in <code>host</code>. How would you load a model that is larger than the host's memory?</summary>
#
# Piece by piece: allocate the arena empty, pack one layer at a time into a staging buffer, copy it to its place, and use the buffer again. That is one
# copy a layer instead of one in all, and no worse: each is still large. The pages of the file that have been copied may be forgotten by the system. The
# reference does it tensor by tensor, in pieces of two megabytes.
# </details>
#
# <details><summary>Why does nobody need to synchronize between a launch and the next launch that uses its result?</summary>
#
# Both are in one stream, and a stream keeps its order. The host may run far ahead; the card does one thing after the other. Waiting is only needed where the
# *host* looks at something: a result, or a clock.
# </details>
#
# <details><summary>A kernel gets the address of an array, and Python drops the last reference to it right after the launch. Is that a fault?</summary>
#
# Not with a pool and one stream: the memory goes back to the pool, and whoever gets it next launches later in the same stream, so the first kernel has
# finished with it. With two streams it is one, and such faults are hard to find.
# </details>
#
# ## Further reading
#
# - NVIDIA, *CUDA C++ Programming Guide*: "Heterogeneous Programming", "Asynchronous Concurrent Execution".
# - NVIDIA, *CUDA C++ Best Practices Guide*: "Data Transfer Between Host and Device", "Timing".
# - CuPy, *User Guide*: "Memory Management".
# - NVIDIA, *H100 Tensor Core GPU Architecture*: what is inside an SM of the generation that the picture was measured on.
#
# **Next:** [lesson 05, The embedding kernel](05_embedding_kernel.ipynb).
