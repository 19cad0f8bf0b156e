// Hardware faults and the time limit: they end the launch, not the process.
#pragma once
#include <signal.h>

#include "context.h"

namespace emu {

extern const int kTimerSignal;  // what the watchdog sends

// Between these two, faults of this process come here first; those that are not a kernel's are passed on.
void catch_signals();
void release_signals();

void block_all_signals();
void unblock_our_signals();

// Faults are handled on a stack of their own: the thread's may be the one that is full.
class AlternateStack {
  public:
    AlternateStack();
    ~AlternateStack();

  private:
    stack_t old_;
};

}  // namespace emu
