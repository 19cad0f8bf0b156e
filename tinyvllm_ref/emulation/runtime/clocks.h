// Who knows of whom, where barriers with phases order threads: full mode's vector clocks.
//
// A thread's time is cut into ticks by what lets others know of it (an arrival, a __syncwarp). Its clock holds, for each
// thread of its block, the last tick of it that it knows to be over, and for each barrier the last phase whose copies
// it knows to have arrived. A barrier of the whole block orders all threads, and needs no clock; not so the copies.
#pragma once
#include "context.h"

namespace emu {

extern __attribute__((visibility("hidden"))) int clocks_used_by;  // threads; 0: this block has used no such barrier yet

bool clocks_make();                                   // false: no memory
void clocks_begin_block();
uint32_t clocks_own_tick(int thread);
bool clocks_know(Worker* w, int thread, uint32_t tick);  // does the current thread?
bool clocks_know_copies(Worker* w, int barrier, uint32_t phase);
void clocks_block_barrier(Worker* w);                 // all threads know of the copies that any of them knew of
void clocks_sync_warp(Worker* w, int warp, uint32_t lanes);
void clocks_arrive(Worker* w, int barrier);
void clocks_end_phase(Worker* w, int barrier, uint32_t phase);
void clocks_waited(Worker* w, int barrier);
void clocks_show(Worker* w, uint32_t* ticks);         // raised to what the current thread knows

// The tick in which a thread is.
inline uint32_t clocks_tick(int thread) { return clocks_used_by ? clocks_own_tick(thread) : 1; }

}  // namespace emu
