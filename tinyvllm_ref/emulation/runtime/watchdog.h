// The time limit of a launch.
#pragma once

namespace emu {

double monotonic_seconds();
void start_watch(double seconds);
void watch_this_thread();           // it gets the signal when the time is over
void hurry_watch(double seconds);   // there is no more time than this
bool time_is_over();                // may be called in a signal handler
void stop_watch();
void reset_watch_after_fork();

}  // namespace emu
