#include "clocks.h"

namespace emu {

int clocks_used_by;

namespace {

struct Clock {
    uint32_t stretch;                 // `threads` is of this stretch between two barriers of the block, or knows nothing
    uint32_t threads[kMaxThreads];
    uint32_t copies[kMaxPhases];      // by barrier: phases that are over
};

// Of threads; of barriers what the threads that have arrived in this phase know, and what those of earlier ones knew.
struct Clocks {
    Clock of_thread[kMaxThreads], arriving[kMaxPhases], over[kMaxPhases];
};

Clocks* clocks;
int n_barriers;  // used since the block began

// Nothing is known of a new stretch; a thread begins it with tick 1.
Clock& now(Worker* w, Clock& clock, int own = -1) {
    if (clock.stretch != checks_stretch()) {
        memset(clock.threads, 0, size_t(w->threads) * sizeof clock.threads[0]);
        if (own >= 0) clock.threads[own] = 1;
        clock.stretch = checks_stretch();
    }
    return clock;
}

Clock& mine(Worker* w) { return now(w, clocks->of_thread[w->current], w->current); }

void raise(uint32_t* to, const uint32_t* from, int count) {
    for (int k = 0; k < count; k++) to[k] = to[k] > from[k] ? to[k] : from[k];
}

void learn(Worker* w, Clock& clock, const Clock& other) {
    if (other.stretch == clock.stretch) raise(clock.threads, other.threads, w->threads);
    raise(clock.copies, other.copies, n_barriers);
}

void use(Worker* w, int barrier) {
    clocks_used_by = w->threads;
    if (n_barriers <= barrier) n_barriers = barrier + 1;
}

}  // namespace

bool clocks_make() {
    if (!clocks) clocks = (Clocks*)map_pages(sizeof(Clocks));
    return clocks;
}

void clocks_begin_block() {
    for (int t = 0; t < clocks_used_by; t++) memset(clocks->of_thread[t].copies, 0, sizeof clocks->of_thread[t].copies);
    memset((void*)clocks->arriving, 0, n_barriers * sizeof(Clock));
    memset((void*)clocks->over, 0, n_barriers * sizeof(Clock));
    clocks_used_by = n_barriers = 0;
}

uint32_t clocks_own_tick(int thread) {
    const Clock& clock = clocks->of_thread[thread];
    return clock.stretch == checks_stretch() ? clock.threads[thread] : 1;
}

bool clocks_know(Worker* w, int thread, uint32_t tick) { return clocks_used_by && mine(w).threads[thread] >= tick; }

bool clocks_know_copies(Worker* w, int barrier, uint32_t phase) {
    return clocks->of_thread[w->current].copies[barrier] >= phase;
}

void clocks_block_barrier(Worker* w) {
    if (!clocks_used_by) return;
    uint32_t all[kMaxPhases] = {};
    for (int t = 0; t < w->threads; t++) raise(all, clocks->of_thread[t].copies, n_barriers);
    for (int t = 0; t < w->threads; t++) memcpy(clocks->of_thread[t].copies, all, sizeof all);
}

void clocks_sync_warp(Worker* w, int warp, uint32_t lanes) {
    if (!clocks_used_by) return;
    int first = -1;
    for (uint32_t bits = lanes; bits; bits &= bits - 1) {
        int t = warp * 32 + __builtin_ctz(bits);
        now(w, clocks->of_thread[t], t);
        if (first < 0) first = t;
        else learn(w, clocks->of_thread[first], clocks->of_thread[t]);
    }
    for (uint32_t bits = lanes; bits; bits &= bits - 1) {
        int t = warp * 32 + __builtin_ctz(bits);
        if (t != first) learn(w, clocks->of_thread[t], clocks->of_thread[first]);
    }
    for (uint32_t bits = lanes; bits; bits &= bits - 1) {
        int t = warp * 32 + __builtin_ctz(bits);
        clocks->of_thread[t].threads[t]++;
    }
}

void clocks_arrive(Worker* w, int barrier) {
    use(w, barrier);
    Clock& clock = mine(w);
    learn(w, now(w, clocks->arriving[barrier]), clock);
    clock.threads[w->current]++;
}

void clocks_end_phase(Worker* w, int barrier, uint32_t phase) {
    use(w, barrier);
    Clock &over = now(w, clocks->over[barrier]), &arriving = now(w, clocks->arriving[barrier]);
    learn(w, over, arriving);
    over.copies[barrier] = phase;
    memset((void*)&arriving, 0, sizeof arriving);
}

void clocks_show(Worker* w, uint32_t* ticks) { raise(ticks, mine(w).threads, w->threads); }

void clocks_waited(Worker* w, int barrier) {
    use(w, barrier);
    learn(w, mine(w), now(w, clocks->over[barrier]));
}

}  // namespace emu
