// Threads that help the calling one: pool.h.
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include "signals.h"
#include "util.h"
#include "watchdog.h"

namespace emu {

namespace {

// A step of a model is many short calls a few microseconds apart: a helper looks for the next one so long before it
// sleeps, and a caller for the end, because waking a thread costs as much.
constexpr double kSpinSeconds = 60e-6;
constexpr int kMaxHelpers = 63;

// What is open, in one word, so that joining and closing cannot cross: generation, "open", and who is at it.
constexpr uint64_t kActive = 0xFFFF, kOpen = 0x10000, kGeneration = 0x20000;

struct Helper {
    pthread_cond_t start = PTHREAD_COND_INITIALIZER;
    bool sleeps = false;
};

struct Pool {
    Mutex mutex;
    pthread_cond_t done = PTHREAD_COND_INITIALIZER;
    uint64_t state = 0;
    bool taken = false;            // by a caller, from start_help to finish_help
    bool caller_sleeps = false;
    Helper helper[kMaxHelpers];
    int n_helpers = 0;             // that there are
    int wanted = 0;                // the first so many may join
    void (*run)(void*) = nullptr;
    void* argument = nullptr;
} pool;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

template <class T>
T load(const T& value) {
    return __atomic_load_n(&value, __ATOMIC_SEQ_CST);
}

uint64_t generation(uint64_t state) { return state / kGeneration; }

// Look at `state` until `ready` says so, for a short while.
template <class Ready>
bool spin(Ready ready) {
    const double until = monotonic_seconds() + kSpinSeconds;
    do {
        for (int k = 0; k < 32; k++) {
            if (ready(load(pool.state))) return true;
            relax();
        }
    } while (monotonic_seconds() < until);
    return false;
}

// Helper k waits for work that is later than `seen` and wants it; returns its generation.
uint64_t wait_for_work(int k, uint64_t seen) {
    auto wanted = [k, seen](uint64_t state) { return generation(state) != seen && k < load(pool.wanted); };
    if (!spin(wanted)) {
        Hold hold(pool.mutex);
        Helper& me = pool.helper[k];
        __atomic_store_n(&me.sleeps, true, __ATOMIC_SEQ_CST);
        while (!wanted(load(pool.state))) pthread_cond_wait(&me.start, pool.mutex.native());
        __atomic_store_n(&me.sleeps, false, __ATOMIC_SEQ_CST);
    }
    return generation(load(pool.state));
}

bool join(int k, uint64_t seen) {
    uint64_t state = load(pool.state);
    while (generation(state) == seen && state & kOpen && k < load(pool.wanted))
        if (__atomic_compare_exchange_n(&pool.state, &state, state + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return true;
    return false;
}

void leave() {
    uint64_t state = __atomic_sub_fetch(&pool.state, 1, __ATOMIC_SEQ_CST);
    if (state & (kActive | kOpen) || !load(pool.caller_sleeps)) return;
    Hold hold(pool.mutex);
    pthread_cond_signal(&pool.done);
}

void* help(void* argument) {
    const int k = int((Helper*)argument - pool.helper);
    block_all_signals();
    unblock_our_signals();
    AlternateStack stack;
    uint64_t seen = 0;
    for (;;) {
        seen = wait_for_work(k, seen);
        if (!join(k, seen)) continue;
        pool.run(pool.argument);
        leave();
    }
    return nullptr;
}

void start_threads(int wanted) {
    while (pool.n_helpers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, help, &pool.helper[pool.n_helpers]) != 0) return;
        pthread_detach(thread);
        pool.n_helpers++;
    }
}

// A forked child has the forking thread only: it makes its own helpers when it needs them.
void after_fork() { pool = Pool(); }

}  // namespace

bool start_help(void (*run)(void*), void* argument, int helpers) {
    if (helpers > kMaxHelpers) helpers = kMaxHelpers;
    if (helpers < 1 || __atomic_test_and_set(&pool.taken, __ATOMIC_SEQ_CST)) return false;
    static bool fork_handler = (pthread_atfork(nullptr, nullptr, after_fork), true);
    (void)fork_handler;
    start_threads(helpers);
    pool.run = run;
    pool.argument = argument;
    __atomic_store_n(&pool.wanted, helpers, __ATOMIC_SEQ_CST);
    // Nobody is at the last piece of work: it was closed, and its helpers have left.
    __atomic_store_n(&pool.state, (generation(load(pool.state)) + 1) * kGeneration | kOpen, __ATOMIC_SEQ_CST);
    for (int k = 0; k < helpers && k < pool.n_helpers; k++) {
        if (!load(pool.helper[k].sleeps)) continue;
        Hold hold(pool.mutex);
        pthread_cond_signal(&pool.helper[k].start);
    }
    return true;
}

void finish_help() {
    __atomic_fetch_and(&pool.state, ~kOpen, __ATOMIC_SEQ_CST);
    auto all_left = [](uint64_t state) { return (state & kActive) == 0; };
    if (!spin(all_left)) {
        Hold hold(pool.mutex);
        __atomic_store_n(&pool.caller_sleeps, true, __ATOMIC_SEQ_CST);
        while (!all_left(load(pool.state))) pthread_cond_wait(&pool.done, pool.mutex.native());
        __atomic_store_n(&pool.caller_sleeps, false, __ATOMIC_SEQ_CST);
    }
    __atomic_clear(&pool.taken, __ATOMIC_SEQ_CST);
}

int cores() {
    static int n = 0;
    if (n > 0) return n;
#if defined(__linux__)
    cpu_set_t mine;
    if (sched_getaffinity(0, sizeof mine, &mine) == 0) return n = CPU_COUNT(&mine) > 0 ? CPU_COUNT(&mine) : 1;
#endif
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return n = online < 1 ? 1 : int(online);
}

}  // namespace emu
