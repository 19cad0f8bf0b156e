// Barriers with phases and the copies that they wait for: what the scheduler asks of copy_engine.cpp.
#pragma once
#include "context.h"

namespace emu {

void engine_begin_block(Worker* w);
void engine_end_block(Worker* w);
void free_engine(Worker* w);

// No thread can go on: let copies arrive until one can. False when none will.
bool copies_arrive(Worker* w);

// A thread that waits for a phase which never ends, with what is missing in the fault's text; false when none waits.
bool describe_endless_phase(Worker* w);

// Told to the scheduler.
void wake_thread(Worker* w, int thread);
void wait_to_be_woken(Worker* w);  // in_phase of its warp says that the current thread waits

}  // namespace emu
