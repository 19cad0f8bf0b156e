// Hardware faults and the time limit: they end the launch, not the process.
#include "signals.h"

#include "watchdog.h"

#if defined(__APPLE__)
#include <sys/ucontext.h>
#else
#include <ucontext.h>
#endif

namespace emu {

#if defined(__linux__)
const int kTimerSignal = SIGRTMIN + 3;
#else
const int kTimerSignal = SIGVTALRM;
#endif

namespace {

constexpr size_t kAltStack = 64 << 10;

struct Handled {
    int number;
    struct sigaction old;
} handled[] = {{SIGSEGV, {}}, {SIGBUS, {}}, {SIGFPE, {}}, {SIGILL, {}}, {SIGTRAP, {}}, {SIGINT, {}}, {0, {}}};
bool timer_is_ours = false;
constexpr int kHandled = sizeof handled / sizeof handled[0];

uint64_t program_counter(void* context) {
#if defined(__linux__) && defined(__x86_64__)
    return uint64_t(((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__linux__) && defined(__aarch64__)
    return uint64_t(((ucontext_t*)context)->uc_mcontext.pc);
#elif defined(__APPLE__) && defined(__x86_64__)
    return uint64_t(((ucontext_t*)context)->uc_mcontext->__ss.__rip);
#else
    return uint64_t(((ucontext_t*)context)->uc_mcontext->__ss.__pc);
#endif
}

bool was_write(void* context) {
#if defined(__linux__) && defined(__x86_64__)
    return ((ucontext_t*)context)->uc_mcontext.gregs[REG_ERR] >> 1 & 1;
#else
    (void)context;
    return false;
#endif
}

// The signal is not a kernel's: give it to whoever had it before.
void pass_on(int number, siginfo_t* info, void* context) {
    for (Handled& h : handled) {
        if (h.number != number) continue;
        if (h.old.sa_flags & SA_SIGINFO) {
            h.old.sa_sigaction(number, info, context);
        } else if (h.old.sa_handler == SIG_DFL) {
            signal(number, SIG_DFL);  // the instruction runs again, and the default action follows
        } else if (h.old.sa_handler != SIG_IGN) {
            h.old.sa_handler(number);
        }
        return;
    }
}

void on_signal(int number, siginfo_t* info, void* context) {
    Worker* w = self;
    if (number == kTimerSignal) {
        if (!w || !w->running || !time_is_over()) return;  // it may be late, and meant for another launch
        const char* at = (const char*)program_counter(context);
        bool in_kernel = at >= w->launch->image_lo && at < w->launch->image_hi;
        if (!in_kernel && !w->called_from) return;  // not begun yet, on a busy machine: the signal comes again
        w->timed_out = 1;
        if (w->busy) return;  // the runtime looks at timed_out when it is done
    } else if (number == SIGINT) {  // Python notes it, and the kernel stops so that Python gets to see it
        pass_on(number, info, context);
        if (!w || !w->running || w->busy) return;
    } else if (!w || !w->running) {
        pass_on(number, info, context);
        return;
    }
    Fault& f = w->fault;
    f.pc = program_counter(context);
    f.exact = 1;
    const char* pc = (const char*)f.pc;
    f.other_pc = uint64_t(w->called_from);
    if (pc < w->launch->image_lo || pc >= w->launch->image_hi) {  // in the runtime, on the kernel's behalf
        f.pc = uint64_t(w->called_from);
        f.exact = 0;
    }
    f.thread = current_thread(w);
    f.block = w->block_number;
    f.shared_slot = -1;
    char* at = (char*)info->si_addr;
    if (number == kTimerSignal) f.kind = kTimeout;
    else if (number == SIGINT) f.kind = kInterrupted;
    else if (number == SIGFPE) f.kind = kDivision;
    else if (number == SIGILL || number == SIGTRAP) f.kind = kTrap;
    else if (at >= w->stacks && at < w->stacks + kStack * kMaxThreads) f.kind = kStackOverflow;
    else f.kind = kOutOfBounds;
    f.address = uint64_t(at);
    f.access = was_write(context) ? kWrite : kRead;
    // The jump lets signals in again before it leaves this stack. A thread that had to wait for its processor has many of
    // the timer's queued: each of them must find nothing to do, or they pile up until the stack is full.
    w->running = 0;
    siglongjmp(w->escape, 1);
}

}  // namespace

void catch_signals() {
    handled[kHandled - 1].number = kTimerSignal;
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (Handled& h : handled) {
        // The timer's own signal stays ours: one that is late must not meet the default action.
        if (h.number == kTimerSignal && timer_is_ours) continue;
        sigaction(h.number, &action, &h.old);
    }
    timer_is_ours = true;
}

void release_signals() {
    for (Handled& h : handled)
        if (h.number != kTimerSignal) sigaction(h.number, &h.old, nullptr);
}

void unblock_our_signals() {
    sigset_t ours;
    sigemptyset(&ours);
    for (Handled& h : handled)
        if (h.number) sigaddset(&ours, h.number);
    sigaddset(&ours, kTimerSignal);  // a helper may be older than the first launch, which puts it in the table
    pthread_sigmask(SIG_UNBLOCK, &ours, nullptr);
}

void block_all_signals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

AlternateStack::AlternateStack() {
    static __thread char* memory;
    if (!memory) memory = (char*)malloc(kAltStack);
    stack_t mine = {};
    mine.ss_sp = memory;
    mine.ss_size = kAltStack;
    sigaltstack(&mine, &old_);
}

AlternateStack::~AlternateStack() {
    if (!(old_.ss_flags & SS_ONSTACK)) sigaltstack(&old_, nullptr);
}

}  // namespace emu
