// Threads that help the calling one, kept from one piece of work to the next.
//
// Work is a function that takes tasks off a shared counter until none is left. Helpers join it while it is open and
// nobody waits for one that has not come: on a busy machine the caller does it all, and is not held up.
#pragma once

namespace emu {

// Call run(argument) on up to `helpers` other threads, always the same ones, from now until finish_help(). False, and
// nobody comes, where the helpers are at other work. `run` must bear being called after the last task was taken.
bool start_help(void (*run)(void*), void* argument, int helpers);

// No helper joins from now on; returns when those that have are done. Only after start_help() was true.
void finish_help();

int cores();  // that this process may run on

}  // namespace emu
