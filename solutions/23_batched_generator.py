# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 23 · A batched generator
#
# **At the end you have** an engine: many prompts go in at once, texts come out word by word, the cache may be too small for all of them, and every part that
# runs is yours. It also lies in `my_engine/` as a program of plain files: `.venv/bin/python my_engine/generate.py "Once upon a time"`.
#
# **Two sittings of about 60 minutes** · builds on 14 (forward pass), 17 (sampling), 18 (packing), 19 (scheduler), 20 to 22 (paged cache and attention) and 03 (text
# from a stream)
#
# **In vLLM** `EngineCore.step` (`vllm/v1/engine/core.py`) is the same loop: `schedule`, `execute_model`, `update_from_output`. `Scheduler` in
# `vllm/v1/core/sched/scheduler.py` preempts as you will: the last of `running` is popped, its blocks are freed, `num_computed_tokens` becomes 0, and it goes to the
# front of `waiting`. What differs: its detokenizer holds back as many characters as the longest stop string has, less one, where yours will look which of them could begin
# one.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, solution
from tinyvllm_ref.course.capstone import draw_throughput, race, show_program, write_story
from tinyvllm_ref.device import describe

print(describe())

# %% [markdown]
# > **Fast track.** You know an engine's loop? Fill in [23.1](#23.1-·-The-loop) and [23.3](#23.3-·-Text-as-it-comes) by their contracts; of [23.2](#23.2-·-When-blocks-run-out) read the
# > five rules.

# %% [markdown]
# # First sitting: the loop
#
# ## The question
#
# You have a scheduler that says who computes what, a block manager that says where keys and values go, a forward pass, two kinds of attention and a sampler. Each was
# tested by itself. What is the least that joins them into something that writes?
#
# It is one step, again and again:
#
# | | who | what comes out |
# |---|---|---|
# | **schedule** | the scheduler, with the block manager | a batch: who computes which tokens, and the blocks for them |
# | **run** | `pack`, `forward`, `attend`, then `argmax` or `sample` | a new token for each request whose last token was computed |
# | **update** | the scheduler | tokens appended; who has ended gives its blocks back |
#
# There are no phases in it. Every request has a list of tokens and one number, `num_computed_tokens`: how many of them have their keys in the cache. Each step computes some
# of those that are missing. When nothing is missing any more, the logits of the last token give one more, and so one is missing again. A prompt is the case where many are
# missing, decoding is the case where one is.
#
# **By hand.** Request `a` has 5 tokens in the cache and has just drawn its sixth, 42. Request `b` is new: 7, 8, 9. Blocks have 4 slots; `a` has the blocks 2 and 0, `b` gets 5.
#
# | | a | b |
# |---|---|---|
# | `starts`, `num_tokens` | 5, 1 | 0, 3 |
# | ids | 42 | 7 8 9 |
# | positions | 5 | 0 1 2 |
# | slots | 1 | 20 21 22 |
# | rows of `q`: `spans` | (0, 1) | (1, 4) |
# | keys that it reads: `contexts` | 6 | 3 |
# | row whose logits are wanted | 0 | 3 |
#
# Decodes come first, and `num_decodes` says how many they are: here 1. That is the order in which the parts of lessons 22 and 20 want to be called: one query a request
# for the first, and one request at a time for the second. The table above is made by `make_inputs(batch, block_size, pack)`, which is given: the same lists as arrays, with your
# `pack` inside.

# %%
from types import SimpleNamespace

from tinyvllm_ref.course.given.inputs import make_inputs


def pack_in_numpy(sequences):  # lesson 18 in a line each
    ids = np.concatenate(sequences).astype(np.int32)
    positions = np.concatenate([np.arange(len(tokens)) for tokens in sequences]).astype(np.int32)
    query_starts = np.cumsum([0, *map(len, sequences)]).astype(np.int32)
    return cp.asarray(ids), cp.asarray(positions), cp.asarray(query_starts)


a = SimpleNamespace(token_ids=[1, 2, 3, 4, 5, 42])
b = SimpleNamespace(token_ids=[7, 8, 9])
example = SimpleNamespace(
    requests=[a, b], starts=[5, 0], num_tokens=[1, 3], samples=[True, True], block_tables=[[2, 0], [5]], num_decodes=1
)
inputs = make_inputs(example, 4, pack_in_numpy)
for name in ("ids", "positions", "slots", "block_tables", "context_lens", "logits_rows", "spans", "contexts"):
    value = getattr(inputs, name)
    print(f"{name:13}", value if isinstance(value, list) else value.tolist())

# %% [markdown]
# ## 23.1 · The loop
#
# Five things are missing in the cell.
#
# **`gather`**, a kernel. Your attention for prompts (lesson 20) wants the keys of a request in one piece, `(m, kv_heads, head_dim)`, and they lie in blocks. One block of
# threads copies one token: token `t` lies in the block `table[t / block_size]`, and a row has `width` = `kv_heads * head_dim` numbers of 16 bits.
#
# **`Attend`** is lesson 15's, over pages. It is called by your `decoder_layer`, once a layer, with the rows of *all* requests: `q` is `(T, Hq, D)`. First the new keys and values are
# written to their slots. Then the decodes, rows `0` to `num_decodes - 1`, go to `paged_attention` together; and each other request `b` goes to `attention_tiled`, with its rows
# of `q` and all `contexts[b]` of its keys, old ones and new. A slice such as `out[:d]` is a view, so what is written to it is in `out`.
#
# **`step`** is the table above. Two rules: a batch with nothing in it gives `[]`; and the list that `step` gives back has an output of each request that *got a token*. Whoever is
# in the midst of its prompt computes and gets none. As in lesson 19, `update(batch, tokens)` of the scheduler wants a token for each request whose `samples` is true, and gives the requests that have ended.
#
# **`next_tokens`**: `argmax(logits, out)` if all are greedy; else `sample(logits, params, steps)`; `steps`, int32 on the device, has the number of each request's draw: how many
# tokens it has drawn so far.
#
# **`abort`** ends a request before its time: neither the scheduler nor `self.requests` knows it afterwards.
#
# `parts` has all your parts: `parts.pack`, `parts.forward(inputs, weights, attend)`, `parts.kv_write(k, v, slots, keys, values)`,
# `parts.paged_attention(q, keys, values, block_tables, context_lens, scale, out)`, `parts.attention_tiled(q, k, v, scale, out)`. The check brings a scheduler of its
# own, so that steps of every kind come.

# %%
# Exercise 23.1 - the loop
import dataclasses
import itertools
from types import SimpleNamespace

from tinyvllm_ref.course.given.inputs import blocks_that_fit, check_request, make_inputs

gather = cp.RawKernel(r"""
// cache: (blocks * block_size, width); table: the blocks of one request; out: (tokens, width); a block of threads a token
extern "C" __global__ void gather(const unsigned short* cache, const int* table, unsigned short* out,
                                  int block_size, int width) {
    int t = blockIdx.x;
    // BEGIN SOLUTION (2 lines): the slot of token t; then the threads copy its row
    long long slot = (long long)table[t / block_size] * block_size + t % block_size;
    for (int c = threadIdx.x; c < width; c += blockDim.x) out[(size_t)t * width + c] = cache[slot * width + c];
    // STUB if (threadIdx.x == 0) out[(size_t)t * width] = cache[0];  // replace this line
    // END SOLUTION
}
""", "gather")


class Attend:
    """attend(layer, q, k, v, out) of one step; keys, values: (layers, blocks, block_size, kv_heads, head_dim) bf16."""

    def __init__(self, inputs, keys, values, parts):
        self.inputs, self.keys, self.values, self.parts = inputs, keys, values, parts
        self.positions = inputs.positions

    def __call__(self, layer, q, k, v, out):
        """q (T, Hq, D), k and v (T, Hk, D) float32 -> out (T, Hq, D) bf16."""
        inputs, parts, scale = self.inputs, self.parts, q.shape[2] ** -0.5
        keys, values, d = self.keys[layer], self.values[layer], inputs.num_decodes
        # BEGIN SOLUTION (8 lines): write; the first d requests by paged_attention; each other by attention_tiled
        parts.kv_write(k, v, inputs.slots, keys, values)
        if d > 0:
            tables, lens = inputs.block_tables[:d], inputs.context_lens[:d]
            parts.paged_attention(q[:d], keys, values, tables, lens, scale, out[:d])
        for b in range(d, len(inputs.spans)):
            first, last = inputs.spans[b]
            own_keys, own_values = self.gathered(keys, b), self.gathered(values, b)
            parts.attention_tiled(q[first:last], own_keys, own_values, scale, out[first:last])
        # STUB out.fill(0)  # replace this line
        # END SOLUTION
        return out

    def gathered(self, cache, b):
        """Keys (or values) of request b in one piece: (contexts[b], Hk, D) bf16."""
        block_size, kv_heads, head_dim = cache.shape[1:]
        tokens = self.inputs.contexts[b]
        out = cp.empty((tokens, kv_heads, head_dim), np.uint16)
        sizes = np.int32(block_size), np.int32(kv_heads * head_dim)
        gather((tokens,), (128,), (cache, self.inputs.block_tables[b], out, *sizes))
        return out


class Engine:
    """Any number of requests at once. model has config and weights; parts has the parts; config the engine's sizes."""

    def __init__(self, model, parts, config):
        self.model, self.parts, self.config = model, parts, config
        num_blocks, block_size = blocks_that_fit(model.config, config), config.block_size
        m = model.config
        shape = (m.num_hidden_layers, num_blocks, block_size, m.num_key_value_heads, m.head_dim)
        self.keys, self.values = cp.empty(shape, np.uint16), cp.empty(shape, np.uint16)
        self.blocks = parts.BlockManager(num_blocks, block_size)
        self.scheduler = parts.Scheduler(config.max_num_seqs, config.max_num_batched_tokens, self.blocks)
        self.requests = {}  # id -> request, of those that have not ended
        self.seeds = itertools.count(config.seed)  # for requests that bring none

    @property
    def has_work(self):
        return bool(self.requests)

    def add_request(self, request):
        check_request(request, self.model.config, self.config)
        if request.params.seed is None:
            request.params = dataclasses.replace(request.params, seed=next(self.seeds))
        self.scheduler.add(request)  # raises ValueError if it can never fit
        self.requests[request.request_id] = request

    def abort(self, id):
        """Nobody wants this request any more."""
        # BEGIN SOLUTION (2 lines): who must know?
        self.scheduler.abort(id)
        self.requests.pop(id, None)
        # STUB pass  # replace this line
        # END SOLUTION

    def step(self):
        """Compute one batch; returns an output of each request that got a token."""
        # BEGIN SOLUTION (11 lines): schedule; inputs, attend, logits, tokens; update: who has ended is forgotten
        batch = self.scheduler.schedule()
        if not batch:
            return []
        inputs = make_inputs(batch, self.config.block_size, self.parts.pack)
        attend = Attend(inputs, self.keys, self.values, self.parts)
        logits = self.parts.forward(inputs, self.model.weights, attend)
        sampling = [request for request, samples in zip(batch.requests, batch.samples, strict=True) if samples]
        ids = self.next_tokens(logits, sampling)
        for request in self.scheduler.update(batch, ids):
            del self.requests[request.request_id]
        return [self.output_of(request) for request in sampling]
        # STUB return []  # replace this line
        # END SOLUTION

    def next_tokens(self, logits, requests):
        """logits: a row for each of these requests -> a token for each, as a list of int."""
        if not requests:
            return []
        params = [request.params for request in requests]
        # BEGIN SOLUTION (4 lines): argmax if all have the temperature 0, else sample; .tolist() brings the tokens to the host
        if all(p.temperature == 0 for p in params):
            return self.parts.argmax(logits, cp.empty(len(requests), np.int32)).tolist()
        steps = [request.num_output_tokens for request in requests]
        return self.parts.sample(logits, params, cp.asarray(np.array(steps, np.int32))).tolist()
        # STUB return [0 for request in requests]  # replace this line
        # END SOLUTION

    def output_of(self, request):
        completion = SimpleNamespace(
            index=0, text="", token_ids=request.output_token_ids, finish_reason=request.finish_reason
        )
        return SimpleNamespace(request_id=request.request_id, finished=request.finished, outputs=[completion])

# %%
check("23.1", Engine)

# %% [markdown]
# That is an engine. What is gathered for a prompt is read twice and written once more; how many sectors, and how well they are used:

# %% tags=["nbval-ignore-output"]
measure("23.1")

# %% [markdown]
# ## 23.2 · When blocks run out
#
# Lesson 21 left a question open. The pool is full, every running request needs one more block, and none has ended. Nobody can go on. What would *you* do? Some ways out:
#
# - Reserve blocks for the longest text that each request may become. Then nobody ever runs out, and most of the cache is empty: the waste that paging has just done away with.
# - Copy somebody's keys and values to the host, and bring them back later. That works, and costs the bandwidth of the bus.
# - Throw somebody's keys and values away. They can be **computed again**: they depend on the tokens alone, and the tokens we have. And computing them again is cheaper than it was, for now all of
#   them are known, so it is one step, like a prompt, and not one step a token.
#
# The third is **preemption** by recomputation. Who must go? Not the oldest: it has most to lose, and its row may be in this step's batch already. The *newest* has least to lose. Where does it go? To
# the *front* of the queue, for it came before all that wait there. And no request ever loses anything to a newer one, so the oldest always gets on; and as it ends, each in turn becomes the oldest. So
# everyone comes to an end, if it fits at all. What can never fit must be refused when it comes.
#
# The rules, in full:
#
# 1. **Running** requests are gone through from the oldest to the newest. Each gets the tokens that it misses, at most what is left of `max_tokens`. Once nothing is left, no more get a row. Each needs
#    blocks for `num_computed_tokens + count` tokens. As long as `allocate` says no, the newest running request is preempted, at the last this one itself.
# 2. **Waiting** requests come in from the front of the queue, while there are seats (`max_seqs`), tokens of the budget, and blocks for *all tokens the request has*. The first that does not fit stops it: nobody
#    overtakes.
# 3. **Preempted**: blocks given back, `num_computed_tokens` 0, tokens kept, front of the queue; its id in `batch.preempted`.
# 4. **Refused**, by a `ValueError`: whose prompt and completion together are more than all blocks hold. A prompt must leave room for one token at least.
# 5. **Aborted**: gone from where it was, its blocks given back if it has any. An id that is not there is no error.
#
# **By hand.** 3 blocks of 2; `a` has a prompt of 2 and writes 4, `b` has 2 and writes 3. (`a 2+1`: with 2 tokens computed, it computes 1.)
#
# | step | computed | |
# |---|---|---|
# | 1 | a 0+2, b 0+2 | a block each, 1 is free; both get a token |
# | 2 | a 2+1 | `a` takes the last block. `b` needs one, and is itself the newest: preempted, with 3 tokens |
# | 3 | a 3+1 | 1 block is free, `b` needs 2 |
# | 4 | a 4+1 | `a` takes the third block, gets its fourth token, and ends: 3 are free |
# | 5 | b 0+3 | all that `b` has in one step; it gets its second token |
# | 6 | b 3+1 | the third, and `b` ends |
#
# `request.state` is `"waiting"`, `"running"` or `"finished"`. `update` is as in lesson 19, and given. In Python a `while` may have an `else`: it runs when the condition has become false, and not after a `break`.

# %%
# Exercise 23.2 - when blocks run out
from collections import deque
from dataclasses import dataclass, field


@dataclass
class ScheduledBatch:
    """What one step computes: an entry a request in each list, decodes first. False if it has none."""

    requests: list = field(default_factory=list)
    starts: list = field(default_factory=list)  # how many of the request's tokens are in the cache
    num_tokens: list = field(default_factory=list)  # how many this step computes
    samples: list = field(default_factory=list)  # whether its last token is among them
    block_tables: list = field(default_factory=list)
    num_decodes: int = 0
    preempted: list = field(default_factory=list)  # ids

    def __bool__(self):
        return bool(self.requests)

    def take(self, request, count, table):
        """Add a row: the request computes its next `count` tokens."""
        start = request.num_computed_tokens
        self.requests.append(request)
        self.starts.append(start)
        self.num_tokens.append(count)
        self.samples.append(start + count == request.num_tokens)
        self.block_tables.append(table)
        self.num_decodes += count == 1 and self.samples[-1] and start >= request.num_prompt_tokens


class Scheduler:
    def __init__(self, max_seqs, max_tokens, blocks):
        self.max_seqs, self.max_tokens, self.blocks = max_seqs, max_tokens, blocks
        self.waiting, self.running = deque(), []  # running: the oldest first

    def add(self, request):
        most = self.blocks.num_blocks * self.blocks.block_size  # tokens that the whole pool holds
        if request.params.max_tokens is None:
            request.max_num_tokens = min(request.max_num_tokens, most)  # it may write as long as there is room
        # BEGIN SOLUTION (2 lines): rule 4 (request.max_num_tokens counts prompt and completion)
        if max(request.max_num_tokens, request.num_prompt_tokens + 1) > most:
            raise ValueError(f"request {request.request_id!r} can have {request.max_num_tokens} tokens; {most} fit")
        # END SOLUTION
        self.waiting.append(request)

    def schedule(self):
        batch, budget = ScheduledBatch(), self.max_tokens
        # BEGIN SOLUTION (26 lines): rule 1; rule 2 (self.waiting.popleft(); state); batch.take(request, count, its table)
        index = 0
        while index < len(self.running):
            request = self.running[index]
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if count == 0:
                break
            while not self.blocks.allocate(request.request_id, request.num_computed_tokens + count):
                victim = self.running.pop()
                self.preempt(victim)
                batch.preempted.append(victim.request_id)
                if victim is request:
                    break
            else:
                batch.take(request, count, self.blocks.table(request.request_id))
                budget -= count
                index += 1
        while self.waiting and len(self.running) < self.max_seqs and budget > 0:
            request = self.waiting[0]
            if not self.blocks.allocate(request.request_id, request.num_tokens):
                break
            self.running.append(self.waiting.popleft())
            request.state = "running"
            count = min(request.num_tokens, budget)
            batch.take(request, count, self.blocks.table(request.request_id))
            budget -= count
        # END SOLUTION
        return batch

    def preempt(self, request):
        """Take a running request's blocks; the caller takes it out of self.running, and notes its id in batch.preempted."""
        request.state = "waiting"
        request.num_preemptions += 1
        # BEGIN SOLUTION (3 lines): rule 3
        self.blocks.free(request.request_id)
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)
        # END SOLUTION

    def update(self, batch, ids):
        """ids: a token for each request that samples -> the requests that have ended."""
        tokens, finished = iter(ids), []
        for request, count, samples in zip(batch.requests, batch.num_tokens, batch.samples, strict=True):
            token = next(tokens) if samples else None
            if request.state != "running":  # aborted while the step was computed
                continue
            request.num_computed_tokens += count
            if not samples:
                continue
            request.append(int(token))
            if token in request.stop_tokens or request.num_tokens == request.max_num_tokens:
                request.finish_reason = "stop" if token in request.stop_tokens else "length"
                request.state = "finished"
                self.running.remove(request)
                self.blocks.free(request.request_id)
                finished.append(request)
        return finished

    def abort(self, id):
        # BEGIN SOLUTION (6 lines): rule 5; then state "finished" and finish_reason "abort"
        for queue in (self.waiting, self.running):
            for request in [one for one in queue if one.request_id == id]:
                queue.remove(request)
                if request.state == "running":
                    self.blocks.free(id)
                request.state, request.finish_reason = "finished", "abort"
        # STUB pass  # replace this line
        # END SOLUTION

# %%
check("23.2", Scheduler)

# %% [markdown]
# Forty prompts of very different lengths want 24 tokens each, in 48 blocks of 16. Here is what your scheduler makes of it: a row a request, a column a step.

# %% tags=["nbval-ignore-output"]
show("23.2")

# %% [markdown]
# Look for a dark mark. What follows it is a gap, in which the request waits, and then one orange step, in which it computes all that it had at once; from there on it writes as before. Below, the
# cache is all but full as long as anybody waits: memory is what limits an engine, and here hardly any of it lies idle. The right-hand end is where nobody waits any more.
#
# This is a good place to stop for today.
#
# # Second sitting: text
#
# ## 23.3 · Text as it comes
#
# An engine deals in tokens, and people read text, as it is written. Four things lie between:
#
# - **What is new?** An output has *all* tokens of its request so far. An engine may tell you of a request in a step in which it got none, because it was preempted or reads a long prompt in pieces; another engine
#   brings two tokens in a step. So remember how many you have read.
# - **Half a character.** The tokenizer's stream (lesson 03) waits for the other half; `push(id)` gives what is complete, and `end()` what is left.
# - **An end token** is not text. If the engine says that a request has ended with `"stop"`, its last token is one.
# - **Stop strings.** "Stop before `END`" is easy to say. But `END` may come as `E`, `N`, `D`, and once the `E` is on the reader's screen it cannot be taken back. So whatever *could* be the beginning
#   of a stop string is held back until it is clear.
#
# **By hand**, with the stop string `END`; what is held is the longest end of the text that a stop string begins with:
#
# | piece | held before | text | given out | held |
# |---|---|---|---|---|
# | `one E` | | `one E` | `one ` | `E` |
# | `N` | `E` | `EN` | | `EN` |
# | `ds, E` | `EN` | `ENds, E` | `ENds, ` | `E` |
# | `ND two` | `E` | `END two` | | stop |
#
# When a stop string has been found, the request is done, and the engine does not know it: `engine.abort(id)`. If a request ends without one, what is held is text after all.
#
# Fill in `Stops.push`, and the loop of `generate`. Give text out as soon as it is certain, by `give`. The last case of the check is the whole machine: forty ragged prompts on a small model with few
# blocks, by *your* engine and scheduler. Every text must be what NumPy says, and all blocks must be free again.

# %%
# Exercise 23.3 - text as it comes
from tinyvllm_ref.course.given.request import Request


class Stops:
    """Gives out a text that comes in pieces, up to the first stop string that is in it."""

    def __init__(self, stops):
        self.stops, self.held, self.found = stops, "", None  # found: the stop string, once there is one

    def push(self, piece):
        """The text that is certain now."""
        text = self.held + piece
        # BEGIN SOLUTION (8 lines): found? what stands before the first; else hold back what could be a beginning
        hits = [(text.index(stop), stop) for stop in self.stops if stop in text]
        if hits:
            end, self.found = min(hits)
            self.held = ""
            return text[:end]
        held = max((n for stop in self.stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        self.held = text[len(text) - held :]
        return text[: len(text) - held]
        # STUB return text  # replace this line
        # END SOLUTION


def generate(engine, tokenizer, prompts, params, on_text):
    """Texts and their SamplingParams -> [(text, finish reason), ...]; on_text(number, piece) as the text comes."""
    texts, reasons, read = [""] * len(prompts), [None] * len(prompts), [0] * len(prompts)
    streams = [tokenizer.stream() for _ in prompts]
    stops = [Stops(one.stop_strings) for one in params]
    for number, prompt in enumerate(prompts):
        ids = tokenizer.encode(prompt)
        engine.add_request(Request(str(number), ids, params[number], engine.model.config.eos_token_ids))

    def give(number, piece):
        if piece:
            texts[number] += piece
            on_text(number, piece)

    while engine.has_work:
        for output in engine.step():
            number, completion = int(output.request_id), output.outputs[0]
            # BEGIN SOLUTION (15 lines): the new tokens as text; the rest at the end; the reason; abort after a stop string
            new = completion.token_ids[read[number] :]
            read[number] += len(new)
            if completion.finish_reason == "stop":
                new = new[:-1]
            for id in new:
                if stops[number].found is None:
                    give(number, stops[number].push(streams[number].push(id)))
            if output.finished and stops[number].found is None:
                give(number, stops[number].push(streams[number].end()))
                give(number, stops[number].held)
            reasons[number] = completion.finish_reason
            if stops[number].found is not None:
                reasons[number] = "stop"
                if not output.finished:
                    engine.abort(output.request_id)
            # STUB give(number, "?")  # replace this line
            # END SOLUTION
    return list(zip(texts, reasons, strict=True))

# %%
check("23.3", generate)

# %% [markdown]
# Your whole engine, on the course's model; what you see is printed piece by piece by `on_text`. The second story is to stop before the words "apple tree".

# %% tags=["nbval-ignore-output"]
write_story("Once upon a time")
write_story("One windy morning, a shy girl named Mia", stop=["apple tree"])

# %% [markdown]
# ## 23.4 · How often are the weights read?
#
# Why all this? Decoding is reading (lesson 18): in each step all weights, whoever is in it. Take the forty prompts, 24 new tokens each. How many steps does it take to serve them
#
# - one after the other, never two at once?
# - all in one batch, with blocks for everyone?

# %%
# Exercise 23.4 - how often are the weights read?
# BEGIN SOLUTION (2 lines): two numbers of steps
one_by_one = 960
together = 24
# STUB one_by_one = None
# STUB together = None
# END SOLUTION
predict("23.4", one_by_one=one_by_one, together=together)

# %% tags=["nbval-ignore-output"]
measure("23.4")

# %% [markdown]
# Now the run itself, on the course's model: your engine, the reference, and your engine one by one. Two times are what a reader feels: the **time to first token**, from the request to its first word, waiting
# included; and the **time of a later token**, which is how fast the text runs. The third, new tokens a second over all requests, is what whoever pays for the machine looks at. A batch makes the last one better and
# the middle one worse; where the queue is long it makes the first one better, too.

# %% tags=["nbval-ignore-output"]
race()

# %% tags=["nbval-ignore-output"]
draw_throughput()

# %% [markdown]
# ## All of it is yours
#
# Three stories in a cache of 9 blocks, which is too small for them; the one that came last is the one you read. Then five mistakes. With the first two a story reads keys that are not its own.
# The third writes a token for which it has no block. The fourth goes on where it was stopped, though its keys are gone, and the engine notices that what it is given does not fit together. The last one throws its tokens away and writes them
# again, and as nothing here is left to chance they come out the same: only whoever had already read them would notice.

# %% tags=["nbval-ignore-output"]
show_engine("23")

# %% [markdown]
# With 23.3 your program has been written. It has your parts, a few plain modules that were given (what a model's `config.json` says, what a request is, `make_inputs`), and of this project it imports
# `tinyvllm_ref.device` and nothing else.

# %% tags=["nbval-ignore-output"]
show_program()

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - An engine is schedule, run, update. There are no phases: one counter per request, and each step computes some of what it misses.
# - Keys are written before anybody reads. Decodes go to the paged kernel together; a prompt reads all that came before it, and not only its own piece.
# - When blocks run out the newest goes, to the front of the queue, with its tokens and without its keys. The oldest always gets on, so everyone does.
# - What can never fit is refused when it comes. What holds blocks gives them back on every way out: end, stop string, abort, preemption.
# - Shown is what is certain: whole characters, and nothing that could begin a stop string.
#
# ## To think about
#
# <details><summary>A preempted request computes its tokens again. Are its keys the same numbers as before?</summary>
#
# In this emulation, to the bit: every sum runs in an order that depends on nothing but its own row. On a card a product of 30 rows may add in another order than 30 products of one row, so last bits may differ; where two tokens are nearly
# tied the text may take another turn. Engines that promise the same tokens in any batch must choose their kernels for it.
# </details>
#
# <details><summary>Two requests, each of which needs just more than half of the pool in the end. Can they preempt each other for ever?</summary>
#
# No. Only the newer one is ever preempted, and the older one gets on in every step, until it has ended. If the victim were "whoever asks", they could take turns at losing everything.
# </details>
#
# <details><summary>Why not let a request in only if blocks for its longest text are free?</summary>
#
# Then nobody is preempted, and most of the cache is reserved and empty (lesson 21). Preemption costs work now and then; the reservation costs memory all the time. With few preemptions the first is far cheaper. If there are many,
# the engine computes the same things again and again: a sign that fewer requests should run at once.
# </details>
#
# ## Further reading
#
# - Kwon and others, *Efficient Memory Management for Large Language Model Serving with PagedAttention* (SOSP 2023), section 4.5: preemption, by swapping and by recomputation.
# - Yu and others, *Orca: A Distributed Serving System for Transformer-Based Generative Models* (OSDI 2022): scheduling by the step.
# - Agrawal and others, *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve* (OSDI 2024): prompts in pieces beside decodes.
#
# **Next:** [lesson 24, Serving](24_serving.ipynb).
