// Runs the threads of a block.
//
// A thread runs as an ordinary call until it waits for others. Then its stack is set aside, and the next thread
// starts on a new one (a "fiber"): kernels without a barrier cost a plain loop, and a barrier costs one switch of
// stacks a thread, some nanoseconds, in one OS thread.
#include "clocks.h"
#include "context.h"
#include "copy_engine.h"
#include "stack_switch.h"

namespace emu {

namespace {

constexpr int kSpinsBeforeYield = 64;  // atomic operations in a row before other threads get a turn
constexpr int kTurnsBeforeCopies = 256;  // turns given in a row before a copy arrives, though threads could go on

// The numbers are repeated in cuda_shim.h.
enum Collective {
    kShuffle,
    kShuffleUp,
    kShuffleDown,
    kShuffleXor,
    kBallot,
    kAny,
    kAll,
    kSyncWarp,
    kMatchAny,
    kMatchAll,
    kReduceAdd,
    kReduceMin,
    kReduceMax,
    kReduceAnd,
    kReduceOr,
    kReduceXor
};

int lowest(uint32_t bits) { return __builtin_ctz(bits); }

// ---------------- which thread next
void make_current(Worker* w, int t) {
    w->current = t;
    w->current_warp = &w->warp[t / 32];
    threadIdx = w->index[t];
}

// Until a thread of a block waits, lanes run one after another, and only `unstarted` keeps account of them.
void leave_solo(Worker* w) {
    if (!w->solo) return;
    w->solo = false;
    for (int k = 0; k < w->warps; k++) {
        Warp& warp = w->warp[k];
        warp.exited = warp.existing & ~warp.unstarted;
        if (k == w->current / 32) warp.exited &= ~(1u << w->current % 32);
        for (uint32_t bits = warp.exited; bits; bits &= bits - 1) w->n_exited++;
    }
}

void update_runnable(Worker* w, int warp) {
    uint32_t bit = 1u << warp;
    if (w->warp[warp].unstarted | w->warp[warp].ready) w->runnable |= bit;
    else w->runnable &= ~bit;
}

// The lane of `bits` that follows `lane`, in a circle.
int following(uint32_t bits, int lane) {
    uint32_t after = bits & (~1u << lane);
    return lowest(after ? after : bits);
}

// __activemask: the lanes that wait at one call of it, once no other lane of their warp can run, are the answer
// for each of them.
void release_active(Worker* w, int warp) {
    Thread* lanes = &w->thread[warp * 32];
    uint32_t waiting = w->warp[warp].in_active_mask;
    w->warp[warp].in_active_mask = 0;
    w->warp[warp].ready |= waiting;
    update_runnable(w, warp);
    while (waiting) {
        uint32_t here = 0;
        for (uint32_t bits = waiting; bits; bits &= bits - 1)
            if (lanes[lowest(bits)].value == lanes[lowest(waiting)].value) here |= bits & -bits;
        for (uint32_t bits = here; bits; bits &= bits - 1) lanes[lowest(bits)].result = here;
        waiting &= ~here;
    }
}

// Only the current thread's warp can have lanes at __activemask and none that runs: others were released when
// their last lane stopped. Copies arrive when nothing else happens.
bool nothing_runs(Worker* w) { return !w->runnable && !w->current_warp->in_active_mask && !copies_arrive(w); }

// The next thread of a warp that has one to run.
inline int take_lane(Worker* w, int number, bool* start) {
    Warp& warp = w->warp[number];
    uint32_t& set = (*start = warp.unstarted != 0) ? warp.unstarted : warp.ready;
    int lane = *start ? lowest(set) : following(set, w->current % 32);
    set &= ~(1u << lane);
    if (!(warp.unstarted | warp.ready)) w->runnable &= ~(1u << number);
    return number * 32 + lane;
}

// The next thread to run, near the current one; -1 when every thread waits or has returned. Lanes of the same
// warp come first, so that a warp's collectives complete early and few stacks are in use.
inline int take_next(Worker* w, bool* start) {
    int number = w->current / 32;
    if (!(w->runnable >> number & 1)) {
        if (w->warp[number].in_active_mask) {
            release_active(w, number);
        } else {
            if (!w->runnable) return -1;
            number = following(w->runnable, number);
        }
    }
    return take_lane(w, number, start);
}

// ---------------- fibers
void fiber_main();

// A stack on which the current thread will start when it is switched to.
void* take_stack(Worker* w) {
    if (w->n_idle) return w->idle[--w->n_idle];
    int number = w->n_stacks++;
    if (number >= w->n_guarded) guard_stack(w, number);
    char* top = w->stacks + size_t(number + 1) * kStack - size_t(number % 146) * 448;  // spread over the cache
    return first_frame(top, fiber_main);
}

// Leave the current thread where it stands (its state says why) and run another; returns when it is resumed.
inline void run_others(Worker* w) {
    Thread& me = w->thread[w->current];
    bool start;
    int next = take_next(w, &start);
    if (w->launch->full) checks_thread_switch(w);
    make_current(w, next);
    emu_switch(&me.sp, start ? take_stack(w) : w->thread[next].sp);
}

void release_barrier(Worker* w);
[[noreturn]] void report_deadlock(Worker* w);
void try_collective(Worker* w, int warp);

// A thread returned from the kernel.
void thread_exit(Worker* w) {
    if (w->solo) return;
    int warp = w->current / 32;
    w->warp[warp].exited |= 1u << (w->current % 32);
    w->n_exited++;
    if (w->launch->full) checks_thread_switch(w);
    if (w->warp[warp].in_collective) try_collective(w, warp);
    if (w->arrived && w->arrived + w->n_exited == w->threads) release_barrier(w);
}

// Run the current thread, and after it those that emu_next_lane makes current.
inline void run_lanes(Worker* w, Launch* launch) {
    if (launch->full) checks_thread_start(w);
    w->spins = 0;
    launch->entry(launch->args);
}

// The life of a stack: run the current thread, then unstarted ones, until a thread that waits can go on.
void fiber_main() {
    for (;;) {
        Worker* w = self;
        if (w->launch->plain) {
            w->launch->entry(w->launch->args);
            emu_switch(&w->idle[w->n_idle++], w->main_sp);
            continue;
        }
        run_lanes(w, w->launch);
        thread_exit(w);
        bool start;
        int t = take_next(w, &start);
        if (t < 0 && !w->solo && copies_arrive(w)) t = take_next(w, &start);
        if (t >= 0) {
            make_current(w, t);
            if (start) continue;
            emu_switch(&w->idle[w->n_idle++], w->thread[t].sp);
        } else if (w->solo || w->n_exited == w->threads) {
            emu_switch(&w->idle[w->n_idle++], w->main_sp);
        } else {
            report_deadlock(w);
        }
    }
}

// ---------------- barriers
void release_barrier(Worker* w) {
    if (w->n_exited && w->launch->full && !w->warned_exit) {
        w->warned_exit = true;
        Warning warning = {};
        warning.kind = kExitedBeforeBarrier;
        warning.line = w->barrier_line;
        warning.block = w->block_number;
        warning.count = w->n_exited;
        warning.shared_slot = -1;
        for (int k = 0; k < w->warps; k++)
            if (w->warp[k].exited) {
                warning.thread = k * 32 + lowest(w->warp[k].exited);
                break;
            }
        warn(warning);
    }
    w->count_result = w->count_true;
    w->all_result = w->count_true == w->arrived;
    w->any_result = w->count_true != 0;
    w->count_true = w->arrived = 0;
    for (int k = 0; k < w->warps; k++) {
        w->warp[k].ready = w->warp[k].existing & ~w->warp[k].exited;
        update_runnable(w, k);
    }
    if (w->launch->full) checks_barrier(w);
}

inline void wait_at_barrier(Worker* w, int site, int line, bool predicate) {
    leave_solo(w);
    if (w->arrived == 0) {
        w->barrier_site = site;
        w->barrier_line = line;
        w->barrier_thread = w->current;
    } else if (site != w->barrier_site) {
        Fault& f = w->fault;
        f.problem = kDifferentBarriers;
        f.line = line;
        f.other_line = w->barrier_line;
        f.thread = w->current;
        f.other_thread = w->barrier_thread;
        f.other_block = w->block_number;
        f.count = 1;
        f.other_count = w->arrived;
        fail(kBarrierDivergence);
    }
    w->count_true += predicate;
    w->arrived++;
    w->spins = 0;
    if (w->arrived + w->n_exited == w->threads) {
        release_barrier(w);
        int warp = w->current / 32;
        w->warp[warp].ready &= ~(1u << (w->current % 32));  // the last to arrive goes straight on
        update_runnable(w, warp);
        return;
    }
    if (nothing_runs(w)) report_deadlock(w);
    run_others(w);
}

// Nothing can run and the block is not done: say who waits where.
void report_deadlock(Worker* w) {
    Fault& f = w->fault;
    f.other_thread = ~0u;
    f.other_block = w->block_number;
    if (describe_endless_phase(w)) {
        f.problem = kEndlessPhase;
        fail(kBarrierDivergence);
    }
    for (int k = 0; k < w->warps; k++)
        for (uint32_t bits = w->warp[k].in_collective; bits; bits &= bits - 1) {
            int t = k * 32 + lowest(bits);
            Thread& thread = w->thread[t];
            if (f.count == 0) {
                f.line = thread.line;
                f.thread = t;
                f.mask = thread.mask;
            }
            f.count++;
        }
    if (w->arrived) {
        f.other_line = w->barrier_line;
        f.other_thread = w->barrier_thread;
        f.other_count = w->arrived;
    }
    if (f.count) {
        int warp = f.thread / 32;
        f.other_mask = f.mask & ~w->warp[warp].in_collective;  // the lanes that do not come
        f.problem = kLanesMissing;
        if (!w->arrived)  // another lane of this warp may stand at another collective
            for (uint32_t bits = w->warp[warp].in_collective; bits; bits &= bits - 1) {
                Thread& thread = w->thread[warp * 32 + lowest(bits)];
                if (thread.line != f.line || thread.kind != w->thread[f.thread].kind) {
                    f.problem = kDifferentCollectives;
                    f.other_line = thread.line;
                    f.other_thread = warp * 32 + lowest(bits);
                    break;
                }
            }
    } else {
        f.problem = kWaitsForever;
        f.line = f.other_line;
        f.thread = f.other_thread;
        f.count = f.other_count;
    }
    fail(kBarrierDivergence);
}

// ---------------- warp collectives
constexpr uint64_t kUndefined = ~uint64_t(0);  // what a shuffle from a lane that takes no part gives: NaN

int shuffle_source(const Thread& thread, int lane) {
    int width = thread.width, base = lane / width * width, k = lane % width, s = thread.source;
    switch (thread.kind) {
        case kShuffle: return base + (s & (width - 1));
        case kShuffleUp: return k - s >= 0 ? lane - s : lane;
        case kShuffleDown: return k + s < width ? lane + s : lane;
        default: return ((k ^ s) < width) ? base + (k ^ s) : ((lane ^ s) < base ? lane ^ s : lane);
    }
}

uint64_t combine(int kind, uint64_t a, uint64_t b, bool is_signed) {
    uint32_t x = uint32_t(a), y = uint32_t(b);
    bool less = is_signed ? int32_t(x) < int32_t(y) : x < y;
    switch (kind) {
        case kReduceAdd: return x + y;
        case kReduceMin: return less ? x : y;
        case kReduceMax: return less ? y : x;
        case kReduceAnd: return x & y;
        case kReduceOr: return x | y;
        default: return x ^ y;
    }
}

// A mask that names a lane which is not there: what a shuffle from it gives is not defined, and may not matter.
void warn_of_missing_lane(Worker* w, int thread, int source) {
    int line = w->thread[thread].line;
    for (size_t k = 0; k < count_warnings(); k++)
        if (warning_number(k).kind == kMissingLanes && warning_number(k).line == line) return;
    Warning warning = {};
    warning.kind = kMissingLanes;
    warning.line = line;
    warning.thread = uint32_t(thread);
    warning.other_thread = uint32_t(source);
    warning.block = w->block_number;
    warning.shared_slot = -1;
    warn(warning);
}

// All lanes of `have` stand at one collective: give each its result.
void resolve(Worker* w, int warp, uint32_t have, int kind) {
    Thread* lanes = &w->thread[warp * 32];
    if (kind <= kShuffleXor) {
        for (uint32_t bits = have; bits; bits &= bits - 1) {
            int lane = lowest(bits), source = shuffle_source(lanes[lane], lane);
            bool present = have >> source & 1;
            lanes[lane].result = present ? lanes[source].value : kUndefined;
            if (!present && w->launch->full && lanes[lane].mask >> source & 1)
                warn_of_missing_lane(w, warp * 32 + lane, source);
        }
        return;
    }
    uint32_t ballot = 0;
    uint64_t total = lanes[lowest(have)].value;
    bool same = true, first = true, is_signed = lanes[lowest(have)].source != 0;
    for (uint32_t bits = have; bits; bits &= bits - 1) {
        Thread& thread = lanes[lowest(bits)];
        if (thread.value) ballot |= bits & -bits;
        same = same && thread.value == lanes[lowest(have)].value;
        if (kind >= kReduceAdd && !first) total = combine(kind, total, thread.value, is_signed);
        first = false;
    }
    for (uint32_t bits = have; bits; bits &= bits - 1) {
        Thread& thread = lanes[lowest(bits)];
        switch (kind) {
            case kBallot: thread.result = ballot; break;
            case kAny: thread.result = ballot != 0; break;
            case kAll: thread.result = ballot == have; break;
            case kMatchAll: thread.result = same ? have : 0; break;
            case kMatchAny: {
                uint32_t equal = 0;
                for (uint32_t more = have; more; more &= more - 1)
                    if (lanes[lowest(more)].value == thread.value) equal |= more & -more;
                thread.result = equal;
                break;
            }
            default: thread.result = total;
        }
    }
    if (kind == kSyncWarp) w->warp[warp].sync_epoch++;
    if (kind == kSyncWarp && w->launch->full) clocks_sync_warp(w, warp, have);
}

// The lanes that a waiting lane's collective needs, if all of them stand at it; else 0.
uint32_t complete_lanes(Worker* w, int warp, const Thread& first) {
    uint32_t need = first.mask & w->warp[warp].existing & ~w->warp[warp].exited;
    if ((w->warp[warp].in_collective & need) != need) return 0;
    for (uint32_t bits = need; bits; bits &= bits - 1) {
        const Thread& thread = w->thread[warp * 32 + lowest(bits)];
        if (thread.kind != first.kind || thread.mask != first.mask || thread.line != first.line) return 0;
    }
    return need;
}

// Complete a collective of this warp whose lanes have all come, if there is one.
void try_collective(Worker* w, int warp) {
    for (uint32_t waiting = w->warp[warp].in_collective; waiting; waiting &= waiting - 1) {
        const Thread& first = w->thread[warp * 32 + lowest(waiting)];
        uint32_t lanes = complete_lanes(w, warp, first);
        if (!lanes) continue;
        resolve(w, warp, lanes, first.kind);
        w->warp[warp].in_collective &= ~lanes;
        w->warp[warp].ready |= lanes;
        update_runnable(w, warp);
        return;
    }
}

void begin_block(Worker* w, uint64_t number) {
    Launch* launch = w->launch;
    w->block_number = number;
    blockIdx = {unsigned(number % launch->grid.x), unsigned(number / launch->grid.x % launch->grid.y),
                unsigned(number / launch->grid.x / launch->grid.y)};
    w->runnable = w->warps == 32 ? ~0u : (1u << w->warps) - 1;
    for (int k = 0; k < w->warps; k++) {
        int lanes = w->threads - k * 32;
        uint32_t existing = lanes >= 32 ? ~0u : (1u << lanes) - 1;
        w->warp[k] = {existing, existing, 0, 0, 0, 0, 0, 0, k * 32};
    }
    w->arrived = w->n_exited = w->count_true = 0;
    w->n_used = 0;
    w->shared_used = w->static_shared_used = 0;
    w->current = 0;
    w->solo = !launch->full;
    engine_begin_block(w);
    if (launch->full) checks_block(w);
    if (launch->dynamic_bytes) place_in_block(w, &dynamic_shared);
}

}  // namespace

uint32_t current_thread(Worker* w) {
    if (!w->launch->plain) return uint32_t(w->current);
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

void run_block(Worker* w, uint64_t number) {
    begin_block(w, number);
    bool start;
    make_current(w, take_next(w, &start));
    emu_switch(&w->main_sp, take_stack(w));
    if (w->launch->full) checks_block_end(w);
    engine_end_block(w);
}

// ---------------- barriers with phases
void wake_thread(Worker* w, int thread) {
    Warp& warp = w->warp[thread / 32];
    warp.in_phase &= ~(1u << thread % 32);
    warp.ready |= 1u << thread % 32;
    update_runnable(w, thread / 32);
}

void wait_to_be_woken(Worker* w) {
    leave_solo(w);
    int warp = w->current / 32;
    uint32_t bit = 1u << w->current % 32;
    w->warp[warp].in_phase |= bit;
    w->spins = 0;
    if (nothing_runs(w)) report_deadlock(w);
    if (w->warp[warp].in_phase & bit) {
        run_others(w);
    } else {  // what came meanwhile was waited for by this thread: it goes straight on
        w->warp[warp].ready &= ~bit;
        update_runnable(w, warp);
    }
}

}  // namespace emu

using namespace emu;

// ---------------- called by translated kernels
#define FROM_KERNEL(w) (w->called_from = __builtin_return_address(0))

EMU_API void emu_syncthreads(int site, int line) {
    Worker* w = self;
    FROM_KERNEL(w);
    wait_at_barrier(w, site, line, false);
}

EMU_API int emu_syncthreads_reduce(int what, int predicate, int site, int line) {
    Worker* w = self;
    FROM_KERNEL(w);
    wait_at_barrier(w, site, line, predicate != 0);
    return what == 0 ? w->count_result : what == 1 ? w->all_result : w->any_result;
}

EMU_API uint64_t emu_collective(int kind, uint32_t mask, uint64_t value, int source, int width, int line) {
    Worker* w = self;
    FROM_KERNEL(w);
    leave_solo(w);
    int warp = w->current / 32, lane = w->current % 32;
    Thread& me = w->thread[w->current];
    me.kind = kind;
    me.mask = mask;
    me.value = value;
    me.source = source;
    me.width = width;
    me.line = line;
    if (!(mask >> lane & 1)) {
        w->fault.problem = kNotInMask;
        w->fault.line = line;
        w->fault.thread = uint32_t(w->current);
        w->fault.mask = mask;
        w->fault.count = 1;
        fail(kBarrierDivergence);
    }
    Warp& lanes = w->warp[warp];
    lanes.in_collective |= 1u << lane;
    w->spins = 0;
    uint32_t need = mask & lanes.existing & ~lanes.exited;
    if ((lanes.in_collective & need) == need) {
        try_collective(w, warp);
        if (!(lanes.in_collective >> lane & 1)) {  // complete: this lane goes straight on
            lanes.ready &= ~(1u << lane);
            update_runnable(w, warp);
            return me.result;
        }
    }
    if (nothing_runs(w)) report_deadlock(w);
    run_others(w);
    return me.result;
}

// A call is told from others by its address: each copy of an inlined function is one of its own, as on a card.
EMU_API uint32_t emu_active_mask() {
    Worker* w = self;
    FROM_KERNEL(w);
    leave_solo(w);
    int number = w->current / 32;
    Warp& warp = w->warp[number];
    Thread& me = w->thread[w->current];
    uint32_t bit = 1u << (w->current % 32);
    me.value = uint64_t(__builtin_return_address(0));
    warp.in_active_mask |= bit;
    w->spins = 0;
    if (warp.unstarted | warp.ready) {
        run_others(w);
    } else {
        release_active(w, number);
        warp.ready &= ~bit;  // the last to arrive goes straight on
        update_runnable(w, number);
    }
    return uint32_t(me.result);
}

// After a thread has returned: make the next unstarted lane of its warp current, as long as nobody waits and
// another one is left behind it. This is the loop in which a kernel without barriers spends its time.
EMU_API bool emu_next_lane() {
    Worker* w = self;
    Warp* warp = w->current_warp;
    uint32_t left = warp->unstarted, rest = left & (left - 1);
    if (!w->solo || !rest) return false;
    warp->unstarted = rest;
    w->spins = 0;
    int t = warp->first + lowest(left);
    w->current = t;
    threadIdx = w->index[t];
    return true;
}

EMU_API void emu_yield() {
    FROM_KERNEL(self);
    give_turn(self);
}

// Fibers never pre-empt each other: a thread that spins on an atomic gives the others a turn.
void emu::give_turn(Worker* w) {
    if (++w->spins < kSpinsBeforeYield) return;
    if (w->current_warp->in_active_mask) release_active(w, w->current / 32);  // this lane may spin until they go on
    if ((!w->runnable || ++w->turns % kTurnsBeforeCopies == 0) && !copies_arrive(w) && !w->runnable) return;
    leave_solo(w);
    w->spins = 0;
    int me = w->current, warp = me / 32, number = warp;
    bool start, later = (w->warp[warp].unstarted | w->warp[warp].ready) & (~1u << me % 32);
    if (!later) number = following(w->runnable, warp);  // all lanes of a warp may ask for what another warp has to do
    int next = take_lane(w, number, &start);
    w->warp[warp].ready |= 1u << (me % 32);
    update_runnable(w, warp);
    if (w->launch->full) checks_thread_switch(w);
    make_current(w, next);
    emu_switch(&w->thread[me].sp, start ? take_stack(w) : w->thread[next].sp);
}

