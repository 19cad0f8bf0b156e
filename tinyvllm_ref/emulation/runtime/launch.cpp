// A launch: its blocks, taken by number by the calling thread and, in fast mode, by one helper a core.
#include <sys/mman.h>
#include <unistd.h>

#include "context.h"
#include "copy_engine.h"
#include "pool.h"
#include "signals.h"
#include "watchdog.h"

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

EMU_TLS __thread emu::Uint3 threadIdx;
EMU_TLS __thread emu::Uint3 blockIdx;
EMU_TLS __thread emu::Uint3 blockDim;
EMU_TLS __thread emu::Uint3 gridDim;

namespace emu {

__thread Worker* self __attribute__((tls_model("initial-exec")));

namespace {

// Pages under stacks that all workers together make inaccessible: each costs two of the mappings that the system
// allows a process (65,530 on Linux), and on many cores they would take all of them.
constexpr int kMaxGuards = 12000;
int n_guards = 0;

constexpr size_t kSharedArena = kSharedStride * (kMaxShared + 1);
constexpr uint64_t kManyThreads = 8192;   // a launch of so many threads is worth waking the other cores
constexpr double kLongSeconds = 20e-6;    // so is one whose first block shows that the rest will take this long

// False where the system has no more memory, or no more mappings, to give.
bool make_worker(Worker* w) {
    w->stacks = (char*)mmap(nullptr, kStack * kMaxThreads, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    w->shared = (char*)mmap(nullptr, kSharedArena, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    size_t page = size_t(sysconf(_SC_PAGESIZE));
    bool good = w->stacks != MAP_FAILED && w->shared != MAP_FAILED;
    good = good && mprotect(w->shared + kSharedArena - page, page, PROT_NONE) == 0;
    good = good && mprotect(w->shared + kSharedStride - page, page, PROT_NONE) == 0;  // fast mode's arena ends here
    if (good) return true;
    if (w->stacks != MAP_FAILED) munmap(w->stacks, kStack * kMaxThreads);
    if (w->shared != MAP_FAILED) munmap(w->shared, kSharedArena);
    return false;
}

// A thread of Python's that ends takes its worker along.
void free_worker(void* p) {
    Worker* w = (Worker*)p;
    __atomic_fetch_sub(&n_guards, w->n_guarded, __ATOMIC_RELAXED);
    munmap(w->stacks, kStack * kMaxThreads);
    munmap(w->shared, kSharedArena);
    for (Allocation& region : w->shared_region) {
        unmap_pages(region.written, region.written_bytes);
        unmap_pages(region.cells, region.cells_bytes);
    }
    free_engine(w);
    free(w);
    self = nullptr;
}

// This thread's worker; null where there is no memory for one.
Worker* this_worker() {
    static pthread_key_t key;
    static bool has_key = pthread_key_create(&key, free_worker) == 0;
    if (!self) {
        void* p = nullptr;
        if (posix_memalign(&p, 64, sizeof(Worker)) != 0) return nullptr;
        memset(p, 0, sizeof(Worker));
        if (!make_worker((Worker*)p)) {
            free(p);
            return nullptr;
        }
        self = (Worker*)p;
        if (has_key) pthread_setspecific(key, p);
    }
    return self;
}

}  // namespace

// Before a stack is used for the first time: what overruns it must not reach the next one.
void guard_stack(Worker* w, int number) {
    if (number != w->n_guarded) return;  // made before, or one was left out
    if (__atomic_add_fetch(&n_guards, 1, __ATOMIC_RELAXED) > kMaxGuards ||
        mprotect(w->stacks + size_t(number) * kStack, size_t(sysconf(_SC_PAGESIZE)), PROT_NONE) != 0) {
        __atomic_fetch_sub(&n_guards, 1, __ATOMIC_RELAXED);
        return;
    }
    w->n_guarded++;
}

namespace {

void fill_index(Worker* w, Uint3 dim) {
    if (w->index_of.x == dim.x && w->index_of.y == dim.y && w->index_of.z == dim.z) return;
    w->index_of = dim;
    int t = 0;
    for (unsigned z = 0; z < dim.z; z++)
        for (unsigned y = 0; y < dim.y; y++)
            for (unsigned x = 0; x < dim.x; x++) w->index[t++] = {x, y, z};
}

// Run blocks until none is left or a worker has failed.
void run_blocks(Worker* w, Launch* launch) {
    w->launch = launch;
    w->threads = int(launch->block.x * launch->block.y * launch->block.z);
    w->warps = (w->threads + 31) / 32;
    w->fault = Fault{};
    w->fault.shared_slot = -1;
    w->timed_out = 0;
    w->called_from = nullptr;
    w->busy = 0;
    w->warned_exit = false;
    blockDim = launch->block;
    gridDim = launch->grid;
    fill_index(w, launch->block);
    if (sigsetjmp(w->escape, 1) == 0) {
        w->running = 1;
        while (!__atomic_load_n(&launch->stop, __ATOMIC_RELAXED)) {
            uint64_t k = __atomic_fetch_add(&launch->next_block, 1, __ATOMIC_RELAXED);
            if (k >= launch->blocks) break;
            run_block(w, k);
        }
        w->running = 0;
    } else {
        w->running = 0;
        if (launch->full) checks_failed(w);
        w->n_stacks = w->n_idle = 0;  // their threads stopped half-way: start each stack anew
        __atomic_store_n(&launch->stop, 1, __ATOMIC_RELAXED);
        hurry_watch(0.5);  // the others finish their blocks, unless one never does
    }
}

// ---------------- helpers
int wanted_workers = 0;  // 0: one a core

// A launch that several threads work on, and the first fault that a helper met.
struct Shared {
    Launch* launch;
    Mutex mutex;
    Fault fault;
};

void help_launch(void* argument) {
    Shared& shared = *(Shared*)argument;
    Worker* w = this_worker();
    if (!w) return;  // no memory for one: the others run all the blocks
    watch_this_thread();
    run_blocks(w, shared.launch);
    Hold hold(shared.mutex);
    if (w->fault.kind && !shared.fault.kind) shared.fault = w->fault;
}

Mutex launch_lock;

// A forked child has this thread only.
void after_fork() {
    launch_lock = Mutex();
    reset_watch_after_fork();
    reset_messages_after_fork();
    reset_variables_after_fork();
    reset_checks_after_fork();
    hold_heap(false);
}

// From the moment the library is loaded: the first launch may be another thread's.
// The heap is whole in a child, for it is held while the process forks.
__attribute__((constructor)) void prepare_for_fork() {
    pthread_atfork([] { hold_heap(true); }, [] { hold_heap(false); }, after_fork);
}

constexpr size_t kMaxArgumentBytes = 32764, kMaxArguments = 256;  // the card's limit, and describe()'s
constexpr size_t kFrontSlack = 64;

struct LaunchRequest {
    void (*entry)(void**);
    const char* args;           // packed values
    uint64_t args_bytes;
    const int32_t* offsets;     // where each argument starts
    const int32_t* item_sizes;  // of a pointer the bytes of an item, negative where const; else 0
    uint64_t n_args;
    const char *image_lo, *image_hi;
    uint32_t grid[3], block[3];
    uint64_t dynamic_bytes, shared_limit;
    const uint8_t* indexed_lines;
    uint64_t n_lines;
    int32_t full, plain;
    double timeout;
};

alignas(64) char argument_bytes[kMaxArgumentBytes];
void* arguments[kMaxArguments];

Allocation* pointed_to(const LaunchRequest* request, uint64_t k) {
    return request->item_sizes[k] ? find(*(void**)arguments[k]) : nullptr;
}

void prepare_arguments(const LaunchRequest* request) {
    memcpy(argument_bytes, request->args, request->args_bytes);
    for (uint64_t k = 0; k < request->n_args; k++) {
        arguments[k] = argument_bytes + request->offsets[k];
        Allocation* a = pointed_to(request, k);
        if (a && request->full) set_granule(*a, unsigned(abs(request->item_sizes[k])));
    }
}

// The bytes around an array that no array owns still hold what they were filled with: fast mode's way to see a small overrun.
bool slack_is_whole(const Allocation& a, const char** where) {
    const char* front = a.base - a.map_base > ptrdiff_t(kFrontSlack) ? a.base - kFrontSlack : a.map_base;
    for (const char* p = front; p < a.base; p++)
        if (*p != char(kSlack)) return *where = p, false;
    for (const char* p = a.base + a.size; p < a.map_base + a.map_size; p++)
        if (*p != char(kSlack)) return *where = p, false;
    return true;
}

// After a fast launch: what the kernel may have written counts as written, and nothing beside it was.
void look_after_arguments(const LaunchRequest* request, Fault* fault) {
    for (uint64_t k = 0; k < request->n_args; k++) {
        Allocation* a = pointed_to(request, k);
        if (!a || request->item_sizes[k] < 0) continue;
        a->initialized = true;
        const char* where;
        if (slack_is_whole(*a, &where)) continue;
        memset((void*)(a->base + a->size), kSlack, size_t(a->map_base + a->map_size - (a->base + a->size)));
        memset((void*)a->map_base, kSlack, size_t(a->base - a->map_base));
        if (fault->kind) continue;
        *fault = Fault{};
        fault->kind = kSlackOverwritten;
        fault->shared_slot = -1;
        fault->access = kWrite;
        fault->address = uint64_t(where);
    }
}

// Run block 0 alone, and tell from its time whether the others are worth sharing.
bool first_block_is_long(Worker* w, Launch* launch) {
    uint64_t all = launch->blocks;
    launch->blocks = 1;
    double start = monotonic_seconds();
    run_blocks(w, launch);
    double seconds = monotonic_seconds() - start;
    launch->blocks = all;
    launch->next_block = 1;
    return !launch->stop && seconds * double(all - 1) > kLongSeconds;
}

}  // namespace
}  // namespace emu

using namespace emu;

EMU_API int emu_launch(const LaunchRequest* request, Fault* fault, Counters* counters) {
    Hold hold(launch_lock);
    *counters = Counters{};
    Launch launch = {};
    launch.entry = request->entry;
    if (request->args_bytes > kMaxArgumentBytes || request->n_args > kMaxArguments) {
        fault->kind = kTrap;
        return kTrap;
    }
    prepare_arguments(request);
    launch.args = arguments;
    launch.args_lo = argument_bytes;
    launch.args_hi = argument_bytes + kMaxArgumentBytes;
    launch.image_lo = request->image_lo;
    launch.image_hi = request->image_hi;
    launch.grid = {request->grid[0], request->grid[1], request->grid[2]};
    launch.block = {request->block[0], request->block[1], request->block[2]};
    launch.blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
    launch.dynamic_bytes = request->dynamic_bytes;
    launch.shared_limit = request->shared_limit < kSharedLimit ? request->shared_limit : kSharedLimit;
    launch.indexed_lines = request->indexed_lines;
    launch.n_lines = uint32_t(request->n_lines);
    launch.full = request->full != 0;
    launch.plain = request->plain != 0;
    dynamic_shared.bytes = request->dynamic_bytes;
    dynamic_shared.name = "";
    clear_messages();

    Worker* w = this_worker();
    if (!w || (launch.full && !checks_make())) {
        fault->kind = kNoMemory;
        return kNoMemory;
    }
    w->launch = &launch;
    AlternateStack stack;
    catch_signals();
    start_watch(request->timeout);
    watch_this_thread();
    uint64_t threads = launch.blocks * launch.block.x * launch.block.y * launch.block.z;
    int helpers = (wanted_workers ? wanted_workers : cores()) - 1;
    bool may_share = !launch.full && launch.blocks > 1 && helpers > 0;
    bool parallel = may_share && threads >= kManyThreads;
    if (launch.full) checks_begin(w);
    if (may_share && !parallel) parallel = first_block_is_long(w, &launch);
    Shared shared = {};
    shared.launch = &launch;
    parallel = parallel && start_help(help_launch, &shared, helpers);
    if (!launch.stop) run_blocks(w, &launch);
    *fault = w->fault;
    if (parallel) finish_help();
    // A worker that was hurried because another had failed is not what went wrong.
    if (shared.fault.kind && (!fault->kind || fault->kind == kTimeout)) *fault = shared.fault;
    stop_watch();
    release_signals();
    if (launch.full) checks_end(w, counters);
    else look_after_arguments(request, fault);
    counters->threads = threads;
    counters->blocks = launch.blocks;
    counters->shared_bytes = w->shared_used;
    counters->n_warnings = int32_t(count_warnings());
    return fault->kind;
}

EMU_API void emu_set_workers(int n) { wanted_workers = n; }
EMU_API int emu_workers() { return wanted_workers ? wanted_workers : cores(); }

// Name, address, size and item size of a __shared__ variable of the last full launch on this thread.
EMU_API int emu_shared_info(int slot, const char** name, uint64_t* base, uint64_t* bytes, uint64_t* item) {
    Worker* w = self;
    if (!w || slot < 0 || slot >= w->n_used) return 0;
    *name = w->shared_of[slot]->name;
    *base = uint64_t(w->shared_at[slot]);
    *bytes = w->shared_of[slot]->bytes;
    *item = w->shared_of[slot]->item;
    return 1;
}
