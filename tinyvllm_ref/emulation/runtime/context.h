// What the scheduler and the checks share: one launch, one worker (an OS thread that runs blocks), the fault
// that stopped a launch, and the records that Python reads (their layouts are repeated in launch.py).
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>

#include "heap.h"
#include "util.h"

namespace emu {

constexpr int kMaxThreads = 1024;     // threads of a block
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr size_t kStack = 640 << 10;  // addresses of a thread's stack; memory is used as it is touched
constexpr int kMaxShared = 256;       // __shared__ variables that one block can use
constexpr size_t kSharedLimit = 232448;  // bytes, the most that any card gives a block
constexpr size_t kStaticSharedLimit = 48 << 10;     // of variables with a size in the source
constexpr size_t kSharedStride = size_t(1) << 20;   // full mode: distance of two shared variables
constexpr uint16_t kNobody = 0xFFFF;
constexpr int kNamedBarriers = 16;    // of a block: bar.sync has their numbers
constexpr int kMaxPhases = 128;       // named barriers, and those in shared memory that a block starts
constexpr uint16_t kCopies = kMaxThreads;  // kCopies + k stands for the copies that barrier k waits for, as if a thread

struct Uint3 {
    unsigned x, y, z;
};

}  // namespace emu

// Kernels see these as constants: they never change under a thread.
#define EMU_TLS __attribute__((visibility("default"), tls_model("initial-exec")))
extern "C" {
extern EMU_TLS __thread emu::Uint3 threadIdx, blockIdx, blockDim, gridDim;
}

namespace emu {

enum FaultKind : int32_t {
    kNone = 0,
    kOutOfBounds,
    kUninitializedRead,
    kDataRace,
    kBarrierDivergence,
    kTimeout,
    kAssertion,
    kDivision,
    kTrap,
    kStackOverflow,
    kTooMuchShared,
    kMisaligned,
    kSlackOverwritten,
    kNoMemory = 13,     // for the stacks of a worker
    kInterrupted = 14,
    kCopyRefused = 15,  // what the copy engine or a barrier with phases can not do: `text` says why
};

enum AccessFlags : uint32_t { kRead = 0, kWrite = 1, kAtomic = 2, kVolatile = 4, kAligned = 8, kCopied = 16 };

// Why kTooMuchShared: the variables alone, the dynamic part with them, or too many of them to keep apart.
constexpr int32_t kStaticPart = 0, kWithDynamicPart = 1, kTooManyVariables = 2;
constexpr int32_t kArrayIndex = 1;  // an OutOfBounds of an array of known size: `address` is the index

// Why a BarrierDivergence was raised.
enum BarrierProblem : int32_t {
    kDifferentBarriers = 1,  // threads of one block stand at two __syncthreads
    kWaitsForever,           // the rest of the block will never come
    kDifferentCollectives,   // lanes of one warp stand at different warp operations
    kLanesMissing,           // a warp operation's mask names lanes that will never come
    kNotInMask,              // a lane called a warp operation whose mask leaves it out
    kEndlessPhase,           // a phase of a barrier lacks arrivals or bytes: `text`
};

struct Fault {
    int32_t kind;
    int32_t problem;          // BarrierProblem
    uint64_t pc, other_pc;    // return addresses (the faulting instruction itself where `exact` is set)
    uint64_t address;
    uint64_t bytes;
    uint32_t access, other_access;  // AccessFlags
    uint32_t thread, other_thread;
    uint64_t block, other_block;
    int32_t line, other_line;       // of barriers and collectives, where there is no address of code
    int32_t count, other_count;     // threads that wait at either
    int32_t shared_slot;            // -1, or which __shared__ variable
    int32_t exact;
    uint32_t mask, other_mask;
    char text[256];                 // an assertion's expression, or what is wrong
};

enum WarningKind : int32_t {
    kSameValueRace = 1,    // two threads store the same value: a race in name only
    kExitedBeforeBarrier,  // threads returned before a barrier that the others wait at
    kCastOutOfRange,       // a float was cast to an integer type that can not hold it
    kShiftTooFar,          // a shift by more bits than there are, or by a negative number
    kMissingLanes,         // a lane reads from one that its mask names and that is not there
};

struct Warning {
    int32_t kind;
    int32_t line;
    uint64_t pc, other_pc;
    uint32_t thread, other_thread;
    uint64_t block, other_block;
    uint64_t address;
    int32_t shared_slot;
    int32_t count;
};

// Counters of one launch in full mode; sizes in bytes.
struct Counters {
    uint64_t global_read_bytes, global_write_bytes;      // asked for by threads
    uint64_t global_read_sectors, global_write_sectors;  // 32-byte sectors, a warp's request at a time
    uint64_t global_read_requests, global_write_requests;
    uint64_t shared_read_bytes, shared_write_bytes;
    uint64_t shared_requests, bank_conflicts;
    uint64_t barriers, atomics;
    uint64_t accesses;
    uint64_t threads, blocks;
    uint64_t shared_bytes;
    int32_t estimated;  // 1 when a loop was too long to count each sector, and the rest was scaled
    int32_t n_warnings;
};

// Counters of one access in the source.
struct SiteCounters {
    uint64_t pc;
    uint32_t access;
    int32_t shared;
    uint64_t accesses, bytes, sectors, requests, conflicts;
};

struct TraceEntry {
    uint64_t address, pc, block;
    uint32_t thread, bytes, access;
    int32_t shared_slot;
};

// A __shared__ declaration; the translated source holds one for each (and for each instance of a template).
struct SharedDeclaration {
    const char* name;
    size_t bytes, alignment, item;
    int line;
    int slot;  // where it stood in the block that used it last: a guess that is mostly right
};

struct Launch {
    void (*entry)(void**);
    void** args;
    const char *args_lo, *args_hi;
    const char *image_lo, *image_hi;  // the kernel's library: constants and __device__ variables
    Uint3 grid, block;
    uint64_t blocks;
    size_t dynamic_bytes;
    size_t shared_limit;              // bytes of static and dynamic shared memory together
    const uint8_t* indexed_lines;     // 1 where a line of the source indexes a __shared__ or __device__ variable
    uint32_t n_lines;
    bool full;
    bool plain;                       // `entry` runs a whole block, in which no thread waits
    uint64_t next_block;              // taken atomically
    int stop;                         // set when a worker failed
};

struct alignas(64) Thread {
    void* sp;          // its stack, while it waits
    uint64_t value, result;  // of a warp's collective
    uint32_t mask;
    int32_t source, width, kind, line;
};

// The lanes of a warp, a bit each, by what they do. A lane that is in none of these sets waits at a barrier of
// the block, or runs.
struct Warp {
    uint32_t existing;       // lanes that the block has
    uint32_t unstarted, ready, in_collective, in_active_mask, in_phase, exited;
    uint32_t sync_epoch;     // __syncwarps so far
    int first;               // thread number of lane 0
};

struct CopyEngine;

struct Worker {
    Launch* launch;
    volatile sig_atomic_t running;    // in a kernel's code: a fault is the kernel's
    volatile sig_atomic_t busy;       // in a part of the runtime that must not be left half done
    volatile sig_atomic_t timed_out;
    const void* called_from;          // the last call from the kernel into the runtime
    sigjmp_buf escape;
    Fault fault;
    void* pthread;                    // where the watchdog sends its signal

    uint64_t block_number;
    int threads, warps, current;
    Warp* current_warp;               // of `current`
    Warp warp[kMaxWarps];
    uint32_t runnable;                // bit k: warp k has unstarted or ready lanes
    int arrived, n_exited, barrier_site, barrier_line;
    uint32_t barrier_thread;
    int count_true, all_result, any_result, count_result;
    uint32_t spins, turns;            // of threads that ask again and again
    bool solo;                        // no thread of this block has waited yet, and nothing counts them one by one
    bool warned_exit;
    CopyEngine* engine;               // made at its first use

    Thread thread[kMaxThreads];
    Uint3 index[kMaxThreads];         // thread -> threadIdx
    Uint3 index_of;                   // the blockDim that `index` was made for

    char* stacks;                     // kMaxThreads of them
    int n_stacks, n_idle;             // made so far, and free to start a thread on
    int n_guarded;                    // stacks with an inaccessible page under them
    void* idle[kMaxThreads];
    void* main_sp;

    char* shared;                     // the arena
    size_t shared_used, static_shared_used;
    char* shared_at[kMaxShared];      // slot -> address in this block, null until used
    SharedDeclaration* shared_of[kMaxShared];
    int used_slots[kMaxShared];
    int n_used;
    Allocation shared_region[kMaxShared];  // full mode
};

extern __thread Worker* self;  // this OS thread's

[[noreturn]] void fail(FaultKind kind);
uint32_t current_thread(Worker* w);   // its flat number

// Marks a part of the runtime that a time limit must not cut short.
class Busy {
  public:
    explicit Busy(Worker* w) : w_(w) { w_->busy++; }
    ~Busy() {
        if (--w_->busy == 0 && w_->timed_out) fail(kTimeout);
    }

  private:
    Worker* w_;
};
void warn(const Warning& warning);
size_t count_warnings();
const Warning& warning_number(size_t k);
void clear_messages();
void reset_messages_after_fork();
void reset_variables_after_fork();
void reset_checks_after_fork();

void guard_stack(Worker* w, int number);                 // launch.cpp
void run_block(Worker* w, uint64_t number);              // scheduler.cpp
void give_turn(Worker* w);
int place_in_block(Worker* w, SharedDeclaration* d);     // shared_memory.cpp
extern SharedDeclaration dynamic_shared;

// checks.cpp
bool checks_make();                         // false: no memory
void checks_begin(Worker* w);               // a launch
void checks_block(Worker* w);
void checks_block_end(Worker* w);
void checks_failed(Worker* w);              // before the fault is reported
void checks_barrier(Worker* w);
void checks_thread_switch(Worker* w);
void checks_thread_start(Worker* w);
void checks_shared_region(Worker* w, int slot, size_t item);
void checks_end(Worker* w, Counters* out);
uint32_t checks_stretch();                  // the number of this stretch between two barriers of a block
void checks_use_barrier(const void* barrier, uint32_t access, const void* pc);
void checks_copy(Worker* w, void* to, const void* from, size_t bytes, int barrier, uint32_t phase, const void* pc);
void checks_before_copies(Worker* w);
void checks_piece(Worker* w, void* to, const void* from, size_t bytes, const void* pc);

}  // namespace emu
