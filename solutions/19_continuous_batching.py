# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 19 · Continuous batching
#
# **At the end you have** `Scheduler`, the part that decides in every step whose tokens are computed. Requests come and go at any time, a
# long prompt holds nobody up, and nobody waits for ever.
#
# **About 65 minutes** · builds on 15 (the KV cache), 17 (end tokens) and 18 (packed and static batches)
#
# **In vLLM** this is `Scheduler.schedule` and `update_from_output` in `vllm/v1/core/sched/scheduler.py`. It goes the same way: a token budget for the step,
# the running requests first, then the queue, and one counter of computed tokens instead of two phases. What differs: there blocks are reserved step by step, and
# a request can lose them again (lessons 21 and 23); it can also serve by priority. When requests have ended, `InputBatch.condense` in
# `vllm/v1/worker/gpu_input_batch.py` closes the gaps in the arrays: it moves the *last* rows into the holes, where [19.3](#19.3-·-The-rows-close-up) keeps the order.

# %% tags=["nbval-ignore-output"]
from tinyvllm_ref.course import check, cp, display_figure, examine, hint, measure, np
from tinyvllm_ref.course import predict, progress, reset, show, show_engine, solution
from tinyvllm_ref.device import describe

print(describe())

# %% [markdown]
# > **Fast track.** You know continuous batching and chunked prefill? Mend [19.4](#19.4-·-Who-starves?), write the part,
# > [19.5](#19.5-·-The-scheduler:-a-part), and look at its picture.

# %% [markdown]
# ## The question
#
# A static batch takes as long as its longest member, and the seats of all others stand empty until then. In lesson 18's run that was more than a third of all seats.
# Why wait? Because in a rectangle a batch is one thing. In a packed line it is not: each step lays its tokens anew, and nothing says that they must belong to the same
# requests as in the step before.
#
# So decide in **every step** who takes part. This is **continuous batching**, and the whole engine is one loop:
#
# ```
# while there is work:
#     batch    = scheduler.schedule()              # who computes which tokens in this step
#     ids      = model(batch)                      # the new tokens
#     finished = scheduler.update(batch, ids)      # who has ended gives its seat back
# ```
#
# A request is **waiting** at first, then **running**, then **finished**. Whoever ends in step $t$ gives the seat back in `update`, and `schedule` gives it to the next in
# step $t + 1$. Not a step is lost.
#
# **By hand**, lesson 18's four requests of 2, 4, 1 and 3 tokens in two slots:
#
# | step | 1 | 2 | 3 | 4 | 5 | 6 |
# |---|---|---|---|---|---|---|
# | slot 0 | 0 | 0 | 2 | 3 | 3 | 3 |
# | slot 1 | 1 | 1 | 1 | 1 | · | · |
#
# Six steps instead of seven, and 2 empty fields of 12 instead of 4 of 14.
#
# ## 19.1 · A seat that is free is taken
#
# Begin with the `serve` of lesson 18, and let it be continuous. At the start of a step every free seat, from slot 0 on, goes to the next request that waits. Then
# one call of `next_tokens` gets the texts so far of all who sit (each a prompt and the tokens drawn after it) and draws one token for each. Who has drawn an end token or has `max_tokens` gets up. A request keeps its slot from its first token to its last,
# for the slot is its place in the cache.

# %%
# Exercise 19.1 - a seat that is free is taken
def serve(prompts, next_tokens, num_slots, end_ids, max_tokens):
    """-> outputs: the drawn tokens of each request; slots[slot][step]: a request's number, or None."""
    outputs = [[] for _ in prompts]
    slots = [[] for _ in range(num_slots)]
    seats, waiting = [None] * num_slots, list(range(len(prompts)))  # who sits in each slot, and who waits
    while waiting or any(r is not None for r in seats):
        # BEGIN SOLUTION (11 lines): fill free seats; draw; note the slots; empty seats
        for slot in range(num_slots):
            if seats[slot] is None and waiting:
                seats[slot] = waiting.pop(0)
        running = [r for r in seats if r is not None]
        tokens = next_tokens([prompts[r] + outputs[r] for r in running])
        for r, token in zip(running, tokens, strict=True):
            outputs[r].append(token)
        for slot, r in enumerate(seats):
            slots[slot].append(r)
            if r is not None and (outputs[r][-1] in end_ids or len(outputs[r]) == max_tokens):
                seats[slot] = None
        # STUB waiting, seats = [], [None] * num_slots  # replace this line
        # END SOLUTION
    return outputs, slots

# %%
check("19.1", serve)

# %% [markdown]
# ## 19.2 · What is left of the waste?
#
# The same twelve stories as in lesson 18, in four slots. Here is how long each of them will be, and what static batches make of them:

# %%
from tinyvllm_ref.course.exercises.lesson_18_static_batching import SLOTS, stories

lengths = [len(completion) for _, completion in stories()]
static_steps = sum(max(lengths[first : first + SLOTS]) for first in range(0, len(lengths), SLOTS))
print("tokens of each story:", lengths)
print(f"{sum(lengths):,} tokens; static batches take {static_steps} steps,", end=" ")
print(f"and {1 - sum(lengths) / (SLOTS * static_steps):.0%} of the slots are idle")

# %% [markdown]
# Before you look: how many steps will *your* loop take, and what share of its slots will be idle, in percent? Zero is not the answer.

# %%
# Exercise 19.2 - what is left of the waste?
# BEGIN SOLUTION (2 lines): steps, and idle slots in percent
steps = 318
idle = 17.2
# STUB steps = None
# STUB idle = None
# END SOLUTION
predict("19.2", steps=steps, idle=idle)

# %% tags=["nbval-ignore-output"]
measure("19.2")

# %% tags=["nbval-ignore-output"]
show("19.1")

# %% [markdown]
# Below is the run of your `serve`, above it the static batches: your own of lesson 18, if you have passed it. The gaps inside are gone. What is left is at the end, where
# the queue is empty.
#
# ## 19.3 · The rows close up
#
# A loop that runs on the device keeps some numbers of each slot there: the last token, how long the text is, where its keys and values lie. When requests end, they leave
# holes between those that run. The next step's line of tokens must have none. So the rows of the running slots move up, **in their order**, and the rest is forgotten:
#
# | slot | `left` | `state` | | row | `out` |
# |---|---|---|---|---|---|
# | 0 | 5 | 10 11 | → | 0 | 10 11 |
# | 1 | 0 | 20 21 | | 1 | 30 31 |
# | 2 | 2 | 30 31 | | 2 | 40 41 |
# | 3 | 7 | 40 41 | | 3 | untouched |
#
# `left` says how many tokens a slot may still draw; with 0 its request has ended. In NumPy this is `state[left > 0]`. In a kernel every slot must find out by itself where to go,
# at the same time as all others: to the row whose number is **how many running slots lie in front of it**. (In C++ a comparison is a number, 1 or 0.) One block of 64 threads a slot.
# The rows go to another array, for in the same one a block could overwrite a row that another has not read yet.

# %%
# Exercise 19.3 - the rows close up
compact = cp.RawKernel(r"""
// state: (slots, width), left: (slots,), out: (slots, width); a block for each slot
extern "C" __global__ void compact(const int* state, const int* left, int* out, int width) {
    int slot = blockIdx.x;
    // BEGIN SOLUTION (4 lines): has it ended? how many run in front of it? the threads copy the row
    if (left[slot] == 0) return;
    int to = 0;
    for (int s = 0; s < slot; s++) to += left[s] > 0;
    for (int c = threadIdx.x; c < width; c += blockDim.x) out[to * width + c] = state[slot * width + c];
    // STUB if (threadIdx.x == 0 && width > 0) out[slot * width] = 0;  // replace this line
    // END SOLUTION
}
""", "compact")

# %%
check("19.3", compact)

# %% tags=["nbval-ignore-output"]
measure("19.3")

# %% [markdown]
# ## A budget in tokens
#
# So far a prompt came into the cache by itself, somehow. But a prompt is work: 200 tokens of it are 200 rows in each product of the step, next to the single rows of those who
# are writing. A few rows more cost next to nothing, for the weights are read anyhow (lesson 18); thousands cost time, and everyone who takes part in a step waits for its end. If a prompt of
# 8,000 tokens comes in, all texts stand still until it is computed.
#
# So a step gets a **budget**, the most *tokens* that it computes, and a prompt that does not fit is computed in **pieces**: this step some, the next step more. That works because of the KV
# cache: what a piece has computed is kept (lesson 15), and the next goes on where it ended. (In papers this is called *chunked prefill*.)
#
# And this makes things simpler, not harder. There are no longer prompts and decode steps, only one number: **how many tokens a request misses**, which is
#
# $$\text{missing} = \text{tokens that it has} - \text{tokens that are computed}$$
#
# A new request misses its whole prompt. One that is writing has just drawn a token, which has not been through the model yet: it misses 1. In either case it draws when it misses none any more.
#
# **By hand**: a budget of 4; `a` has a prompt of 6, `b` one of 2, and each wants 2 tokens.
#
# | step | `a` misses | `b` misses | computed | |
# |---|---|---|---|---|
# | 1 | 6 | 2 | a 4 | the budget is used up |
# | 2 | 2 | 2 | a 2, b 2 | both draw |
# | 3 | 1 | 1 | a 1, b 1 | both draw, and end |
#
# ## 19.4 · Who starves?
#
# Who gets the budget if it is not enough for all? `plan` decides it for one step. It gets two lists of `(name, missing)`: those that run and those that wait, each in the order in which they came; and it
# gives a list of `(name, count)`. At most `max_seqs` requests run at once, and a step has at most `max_tokens` tokens.
#
# Below is a plan that somebody meant well. Short prompts first, so that many are served soon; a prompt in one piece, which is simple; and whoever runs gets a token from what is left. On most days nobody
# notices. Then there are requests that never end.
#
# `examine("19.4")` plays a few days. An arrival `long@1 17+3` means: `long` comes in step 1 with a prompt of 17 and wants 3 tokens. Find all that is wrong, and mend it so that **nobody is ever passed by one who came
# later**: running requests come before those that wait, older ones before newer ones, each gets what it misses or what is left of the budget, and who gets nothing is not in the list.

# %%
# Exercise 19.4 - who starves?
def plan(running, waiting, max_seqs, max_tokens):
    """Two lists of (name, missing), oldest first -> list of (name, count) for this step."""
    rows, budget, seats = [], max_tokens, max_seqs - len(running)
    # BEGIN SOLUTION (5 lines): mend this
    for name, missing in running + waiting[:seats]:
        count = min(missing, budget)
        if count > 0:
            rows.append((name, count))
            budget -= count
    # STUB for name, missing in sorted(waiting, key=lambda one: one[1])[:seats]:  # short prompts first
    # STUB     if missing <= budget:
    # STUB         rows.append((name, missing))
    # STUB         budget -= missing
    # STUB for name, missing in running:
    # STUB     if budget > 0:
    # STUB         rows.append((name, 1))
    # STUB         budget -= 1
    # END SOLUTION
    return rows

# %% tags=["nbval-ignore-output"]
examine("19.4")

# %%
check("19.4", plan)

# %% tags=["nbval-ignore-output"]
show("19.4")

# %% [markdown]
# Why does nobody starve now? Whoever has waited longest is passed by nobody. The oldest request of all gets its tokens in every step until it ends, and then the next one is the oldest. So everybody's turn comes, after
# a number of steps that depends only on those who came *before*. It does not matter how many come after.
#
# Fair is not the same as fast: short prompts first lets the *average* request wait less. That is a choice. Starving somebody is not.
#
# ## 19.5 · The scheduler: a part
#
# Now the part itself. It keeps the two lists, and it reserves room in the cache. A `request` is the engine's own, and has all that you need:
#
# | | |
# |---|---|
# | `request_id` | its name |
# | `num_tokens`, `num_prompt_tokens` | how many tokens it has, and how many of these are the prompt |
# | `num_computed_tokens` | how many are in the cache: *you* keep count |
# | `max_num_tokens` | the most it may have, prompt included |
# | `stop_tokens` | a set: any of these ends it |
# | `append(token)` | one more token; `num_tokens` grows by itself |
# | `state` | `"waiting"`, `"running"` or `"finished"`: *you* set it; `finished` says whether it is the last of these |
# | `finish_reason` | `"stop"` (an end token, also where it is the last token that it may have), `"length"` or `"abort"`: *you* set it |
#
# `blocks` keeps account of the cache. `blocks.allocate(id, n)` reserves room for `n` tokens of a request, *in all*, and says `False` where there is none; `blocks.free(id)` gives it back, and complains if there is nothing to give back;
# `blocks.table(id)` says where the room is. (Lesson 21 makes this part.) Reserve for `max_num_tokens` when a request is let in, not before: then nobody ever runs out in the middle of a text. If there is no room for the
# first in the queue, it waits, **and so does everybody behind it**.
#
# - `schedule()` is `plan`, and whoever is let in moves from `waiting` to `running`. It also says who **draws**: those whose *last* token is among the computed ones. A piece from the middle of a prompt draws nothing.
# - `update(batch, ids)` gets the drawn tokens: one for each request of the batch with `samples`, in the batch's order. It counts, appends, and ends those that are done; it returns a list of these.
# - `abort(id)` ends a request from outside, because a client has gone: in the queue, or running, or *between* `schedule` and `update`. In the last case `update` meets a request that has finished. Its token in `ids` is taken and dropped.
#   An `id` that nobody has is no error: the request may just have ended by itself.
#
# The check plays events: `a@1 3+2` comes in step 1 with a prompt of 3 and may draw 2 tokens; with `end 1` its first drawn token is an end token; `abort a@3` comes before step 3, with `meanwhile` while it is computed. It compares
# a line for each step: `a 0:3*` means that tokens 0 to 2 of `a` are computed, and the star that it draws; `1 decoding` is `num_decodes`; and `a: length` that `a` has finished. After that it compares every text with the one that the request has when it is alone.
#
# One trap lies on the way. Do not take things out of a list while a `for` goes through that same list: the rest moves up, and the loop steps over the next one.

# %%
# Exercise 19.5 - the scheduler: a part
from dataclasses import dataclass


@dataclass
class Batch:
    """One step: an entry per request in each list."""

    requests: list
    starts: list  # the first token that the step computes
    num_tokens: list  # how many it computes
    samples: list  # whether the request draws
    block_tables: list  # where its keys and values lie
    num_decodes: int  # so many, the first ones, have their prompt behind them
    preempted: list  # lesson 23

    def __bool__(self):
        return bool(self.requests)


class Scheduler:
    def __init__(self, max_seqs, max_tokens, blocks):
        self.max_seqs, self.max_tokens, self.blocks = max_seqs, max_tokens, blocks
        self.waiting, self.running = [], []  # both from the oldest to the newest

    def add(self, request):
        self.waiting.append(request)

    def schedule(self):
        """Who computes how many tokens in the next step."""
        rows, budget = [], self.max_tokens  # rows: (request, count)
        # BEGIN SOLUTION (14 lines): who runs; then the queue, while there is budget, seat and room
        for request in self.running:
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if count > 0:
                rows.append((request, count))
                budget -= count
        while self.waiting and budget > 0 and len(self.running) < self.max_seqs:
            request = self.waiting[0]
            if not self.blocks.allocate(request.request_id, request.max_num_tokens):
                break
            self.running.append(self.waiting.pop(0))
            request.state = "running"
            count = min(request.num_tokens, budget)
            rows.append((request, count))
            budget -= count
        # STUB pass
        # END SOLUTION
        return self.batch(rows)

    def batch(self, rows):
        """The rows (request, count) as a Batch."""
        requests = [request for request, _ in rows]
        counts = [count for _, count in rows]
        starts = [request.num_computed_tokens for request in requests]
        # BEGIN SOLUTION (1 line): for each row, whether the request's last token is among those computed
        samples = [request.num_computed_tokens + count == request.num_tokens for request, count in rows]
        # STUB samples = [True for request, count in rows]  # replace this line
        # END SOLUTION
        tables = [self.blocks.table(request.request_id) for request in requests]
        decodes = sum(request.num_computed_tokens >= request.num_prompt_tokens for request in requests)
        return Batch(requests, starts, counts, samples, tables, decodes, [])

    def update(self, batch, ids):
        """Take note of a computed step; returns the requests that have finished."""
        finished, ids = [], iter(ids)
        for request, count, samples in zip(batch.requests, batch.num_tokens, batch.samples, strict=True):
            token = next(ids) if samples else None
            # BEGIN SOLUTION (11 lines): skip the aborted; count; append; end it where it is done
            if request.finished:
                continue
            request.num_computed_tokens += count
            if token is not None:
                request.append(token)
                if token in request.stop_tokens:
                    self.end(request, "stop")
                elif request.num_tokens >= request.max_num_tokens:
                    self.end(request, "length")
                if request.finished:
                    finished.append(request)
            # STUB pass
            # END SOLUTION
        return finished

    def end(self, request, reason):
        """Take a request out of its list, give its room back if it has any, and mark it."""
        # BEGIN SOLUTION (6 lines): out of its list; free the room of one that runs; state, reason
        if request.state == "running":
            self.running.remove(request)
            self.blocks.free(request.request_id)
        else:
            self.waiting.remove(request)
        request.state, request.finish_reason = "finished", reason
        # STUB pass
        # END SOLUTION

    def abort(self, id):
        # BEGIN SOLUTION (3 lines): find it, running or waiting, and end it
        for request in self.running + self.waiting:
            if request.request_id == id:
                self.end(request, "abort")
        # STUB pass
        # END SOLUTION

# %%
check("19.5", Scheduler)

# %% [markdown]
# How large should the budget be? Your `Scheduler` plays the same afternoon twice. Three requests are writing when a prompt of 200 tokens comes.

# %% tags=["nbval-ignore-output"]
show("19.5")

# %% [markdown]
# With a large budget the whole prompt goes into one step, and that step is a tower: the three others wait for its end, and whoever reads along sees their texts stop. With a small one the prompt takes several steps, in each of
# which all three get their token; but its own first token comes later, and small steps use the card less well, for the weights are read in each of them (lesson 18). The budget trades the one for the other. In vLLM it is called
# `max_num_batched_tokens`.
#
# ## Your part in the engine
#
# Three requests, two seats, and a budget of 8 tokens a step. The third must wait, and its prompt takes several steps. Which requests share a batch is nobody's business: the story is the same as one by one. Below it are three mistakes that show. Those of order, seats and
# fairness change nothing in any text, only *when* it comes. That is why such faults live long.

# %% tags=["nbval-ignore-output"]
show_engine("19")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - Schedule, run, update. Who ends in a step is gone when the next is planned, and the seat is taken.
# - One counter instead of two phases: a request computes what it misses, and draws when it misses nothing any more.
# - The budget is in tokens, since that is what a step's time depends on. Long prompts are computed in pieces, behind the tokens of those who write.
# - First come, first served, in everything: then the oldest always gets on, and everyone becomes the oldest.
# - Faults of a scheduler do not show in the text. They show in a trace.
#
# ## To think about
#
# <details><summary>Why is the room for the whole answer reserved when a request comes in, and what does that waste?</summary>
#
# If room were taken only when it is needed, a request could find none in the middle of its text, with all others in the same position: nobody could go on. Reserved beforehand, it cannot happen. But most texts end long before
# they are as long as they may be, and the rest of their room was empty all the time: seats could not be given to others for lack of it. Lessons 21 and 23 take the other way: small blocks when they are needed, and a rule for when there are none.
# </details>
#
# <details><summary>If nobody may overtake, one request that needs very much room stops all that could run. Should a small one not be let in meanwhile?</summary>
#
# It would use room that would otherwise be empty, so yes, if one could be sure that the large one does not wait longer for it. That is so when the small one is done before enough room for the large one is free; which one would have to know beforehand. Supercomputer centres
# do just that under the name of backfilling: there every job states how long it will run at most.
# </details>
#
# <details><summary>In a decode step every running request needs one token. What if the budget is smaller than the number of seats?</summary>
#
# Then some seats stay empty. Whoever runs misses one token or more, and somebody is let in only while some budget is left: so never more run than the budget has tokens, and each of them gets on in every step. Nobody starves, but the other seats are of
# no use. A budget should be at least the number of seats, plus something for prompts.
# </details>
#
# ## Further reading
#
# - Gyeong-In Yu and others, *Orca: A Distributed Serving System for Transformer-Based Generative Models* (OSDI 2022): scheduling by iterations, which is continuous batching.
# - Amey Agrawal and others, *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve* (OSDI 2024): prompts in pieces, and how large the budget should be.
# - Woosuk Kwon and others, *Efficient Memory Management for Large Language Model Serving with PagedAttention* (SOSP 2023): section 4.5 is on scheduling and preemption.
#
# **Next:** [lesson 20, Online softmax](20_online_softmax.ipynb).
