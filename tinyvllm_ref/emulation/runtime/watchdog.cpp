// The time limit of a launch.
#include "watchdog.h"

#include <time.h>

#include "signals.h"

namespace emu {

double monotonic_seconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

namespace {

// One thread looks every few milliseconds whether a launch has run out of time, and signals its workers.
struct Watchdog {
    Mutex mutex;
    pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
    bool started = false, asleep = false;
    double deadline = 0;       // 0: no launch runs
    Array<pthread_t> workers;
} watchdog;

void* watch(void*) {
    block_all_signals();
    int quiet = 0;
    for (;;) {
        watchdog.mutex.lock();
        quiet = watchdog.deadline == 0 ? quiet + 1 : 0;
        if (quiet > 100) {
            watchdog.asleep = true;
            while (watchdog.deadline == 0) pthread_cond_wait(&watchdog.wake, watchdog.mutex.native());
            watchdog.asleep = false;
            quiet = 0;
        }
        if (watchdog.deadline > 0 && monotonic_seconds() > watchdog.deadline)
            for (size_t k = 0; k < watchdog.workers.size(); k++) pthread_kill(watchdog.workers[k], kTimerSignal);
        watchdog.mutex.unlock();
        timespec pause = {0, 5000000};
        nanosleep(&pause, nullptr);
    }
    return nullptr;
}

}  // namespace

void start_watch(double seconds) {
    Hold hold(watchdog.mutex);
    if (!watchdog.started) {
        watchdog.started = true;
        pthread_t thread;
        pthread_create(&thread, nullptr, watch, nullptr);
        pthread_detach(thread);
    }
    watchdog.deadline = monotonic_seconds() + seconds;
    watchdog.workers.clear();
    if (watchdog.asleep) pthread_cond_signal(&watchdog.wake);
}

void watch_this_thread() {
    Hold hold(watchdog.mutex);
    watchdog.workers.push(pthread_self());
}

void hurry_watch(double seconds) {
    Hold hold(watchdog.mutex);
    double soon = monotonic_seconds() + seconds;
    if (watchdog.deadline > soon) watchdog.deadline = soon;
}

bool time_is_over() { return watchdog.deadline > 0 && monotonic_seconds() > watchdog.deadline; }

void stop_watch() {
    Hold hold(watchdog.mutex);
    watchdog.deadline = 0;
    watchdog.workers.clear();
}

void reset_watch_after_fork() { watchdog = Watchdog(); }

}  // namespace emu
