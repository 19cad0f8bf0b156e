// Full mode: every access to memory is checked before it happens.
//
// A kernel compiled with -fsanitize=thread calls __tsan_readN / __tsan_writeN with the address of each access.
// The functions here stand in for the sanitizer's own runtime: they find the array, its bounds, whether the
// bytes were ever written, and which thread used them last, and they count bytes, sectors and bank conflicts.
#include "clocks.h"
#include "context.h"

#include <stdio.h>

namespace emu {

// Who used a granule of memory last. A stamp is the number of a stretch between two barriers of one block: all
// blocks run one after another, so a stamp also tells the block.
struct Cell {
    uint32_t write_stamp, write_pc;
    uint32_t read_stamp, read_pc, read2_pc;
    uint32_t write_epoch, read_epoch, read2_epoch;  // __syncwarps of that thread's warp so far
    uint32_t write_tick, read_tick, read2_tick;     // of that thread (clocks.h); of a copy the phase that waits for it
    uint32_t far_stamp, far_pc;           // the last read by an earlier block
    uint16_t write_thread;
    uint16_t read_thread, read2_thread;   // the last reader in read_stamp's stretch, and another one before it
    uint16_t far_thread;
    uint8_t write_bytes, read_bytes;      // bit b: byte b of the granule
    uint8_t far_atomic : 1, write_atomic : 1, read_atomic : 1;
};
static_assert(sizeof(Cell) == 64, "a line of the processor's cache");

// Part of every access, and of copies besides: a call of its own would cost a tenth of the time.
#define EMU_HOT inline __attribute__((always_inline))

namespace {

// What a block has made visible to others by a fence and an atomic operation.
struct BlockClock {
    uint32_t first_stamp;
    uint32_t published_stamp;        // the last stretch in which a thread published; 0: none
    uint32_t publishers[kMaxWarps];  // the threads that did, a bit each: their own stores of that stretch too
};

// A store whose value has to be looked at once it has happened: both threads may store the same.
struct Pending {
    bool active;
    char* address;
    uint32_t bytes;
    uint8_t before[16];
    Fault fault;
};

constexpr uint32_t kMaxSites = 1024;         // accesses in one kernel's code that are counted
constexpr uint32_t kMaxOccurrences = 256;    // executions of one access by one warp between two barriers
constexpr uint32_t kEpochBits = 12;

// One warp's execution of one access: the sectors (or words of shared memory) that its lanes touch.
struct Request {
    uint32_t n;
    uint32_t unit[64];
};

struct AccessSite {
    SiteCounters counters;
    uint64_t counted_accesses;               // those whose sectors were looked at
    Array<Request> requests[kMaxWarps];
    uint32_t used[kMaxWarps];
};

struct State {
    Launch* launch;
    uint32_t stamp, launch_stamp, block_stamp;
    bool block_acquired;             // a barrier of this block followed an atomic operation: all see what it saw
    bool acquiring;                  // an atomic operation was seen in this stretch
    bool acquired[kMaxThreads];      // by this thread itself
    bool fenced[kMaxThreads];     // since its last atomic operation this thread passed a __threadfence
    Array<BlockClock> blocks;
    uint16_t copier[kMaxPhases];     // by barrier, the thread that started the last copy
    uint32_t shown_stamp;            // the last stretch in which a thread called before_bulk_copies
    uint32_t shown[kMaxThreads];     // in it, by thread: the last tick whose stores it made seen by the copy engine
    Pending pending;
    Fault unwritten;              // kind 0: none
    Counters counters;
    bool count;
    uint32_t n_sites;
    uint32_t site_of[kMaxSites * 4];          // hash table: site number + 1
    AccessSite* sites;
    uint32_t* occurrences;                    // [thread][site]: epoch << 20 | count
    uint32_t epoch;
    Array<TraceEntry> trace;
    size_t trace_limit;
    Allocation* last;
} state;

uint32_t pc32(const void* pc) { return uint32_t((const char*)pc - state.launch->image_lo); }
uint64_t pc64(uint32_t pc) { return pc ? uint64_t(state.launch->image_lo + pc) : 0; }

// ---------------- reports
void describe(Fault& f, const void* pc, const void* address, size_t bytes, uint32_t access, int slot) {
    f.pc = uint64_t(pc);
    f.address = uint64_t(address);
    f.bytes = bytes;
    f.access = access;
    f.shared_slot = slot;
}

[[noreturn]] void stop(FaultKind kind, const void* pc, const void* address, size_t bytes, uint32_t access, int slot) {
    describe(self->fault, pc, address, bytes, access, slot);
    fail(kind);
}

uint64_t block_of(uint32_t stamp) {
    size_t lo = 0, hi = state.blocks.size();
    while (hi - lo > 1) {
        size_t mid = (lo + hi) / 2;
        if (state.blocks[mid].first_stamp <= stamp) lo = mid;
        else hi = mid;
    }
    return lo;
}

// ---------------- finding the array
struct Place {
    Allocation* array;
    size_t offset;
    int slot;  // of a __shared__ variable, else -1
};

bool between(const void* p, const void* lo, const void* hi) {
    return (const char*)p >= (const char*)lo && (const char*)p < (const char*)hi;
}

// False where the address is none of ours: the thread's own stack, arguments, constants.
EMU_HOT bool locate(Worker* w, const char* p, size_t bytes, uint32_t access, const void* pc, Place* place) {
    if (in_heap(p)) {
        Allocation* a = find(p);
        if (!a || p < a->base || size_t(p - a->base) + bytes > a->size) stop(kOutOfBounds, pc, p, bytes, access, -1);
        *place = {a, size_t(p - a->base), -1};
        return true;
    }
    size_t in_shared = size_t(p - w->shared);
    if (in_shared < kSharedStride * (kMaxShared + 1)) {
        int slot = int(in_shared / kSharedStride) - 1;
        if (slot < 0 || slot >= w->n_used) stop(kOutOfBounds, pc, p, bytes, access, slot < 0 ? 0 : w->n_used - 1);
        Allocation& a = w->shared_region[slot];
        if (p < a.base || size_t(p - a.base) + bytes > a.size) stop(kOutOfBounds, pc, p, bytes, access, slot);
        *place = {&a, size_t(p - a.base), slot};
        return true;
    }
    size_t own = size_t((char*)__builtin_frame_address(0) - w->stacks) / kStack;
    if (size_t(p - w->stacks) / kStack == own) return false;
    Launch* launch = w->launch;
    if (between(p, launch->args_lo, launch->args_hi) || between(p, launch->image_lo, launch->image_hi)) return false;
    uintptr_t tls = uintptr_t(&self);  // threadIdx and its kind lie near it
    if (uintptr_t(p) - (tls - 4096) < 8192) return false;
    stop(kOutOfBounds, pc, p, bytes, access, -1);
}

// ---------------- uninitialised reads
void make_written(Worker* w, Allocation& a) {
    Busy busy(w);
    a.written_bytes = a.size + 16;
    a.written = (uint8_t*)map_pages(a.written_bytes);
}

// A read of what nothing has written is not reported at once: if another thread writes there before the next
// barrier, then it is the barrier that is missing, and the write will be found to race with this read.
EMU_HOT void check_written(Worker* w, const Place& place, const char* p, size_t bytes, uint32_t access, const void* pc) {
    Allocation& a = *place.array;
    if (a.initialized) return;
    if (!a.written) make_written(w, a);
    uint8_t* written = a.written + place.offset;
    bool reads = !(access & kWrite) || (access & kAtomic);  // an atomic operation reads, too
    for (size_t k = 0; reads && !state.unwritten.kind && k < bytes; k++) {
        if (written[k]) continue;
        Fault& f = state.unwritten;
        describe(f, pc, p + k, bytes, access, place.slot);
        f.kind = kUninitializedRead;
        f.thread = uint32_t(w->current);
        f.block = w->block_number;
    }
    if (access & kWrite) memset(written, 1, bytes);
}

void report_unwritten(Worker* w) {
    if (!state.unwritten.kind) return;
    w->fault = state.unwritten;
    siglongjmp(w->escape, 1);
}

// ---------------- races
// After the store: were the two values the same? Then it is a race in name only.
void settle(Worker* w) {
    Pending& pending = state.pending;
    if (!pending.active) return;
    pending.active = false;
    if (memcmp(pending.before, pending.address, pending.bytes) != 0) {
        Fault& f = w->fault;
        f = pending.fault;
        f.kind = kDataRace;
        siglongjmp(w->escape, 1);
    }
    Warning warning = {};
    warning.kind = kSameValueRace;
    warning.pc = pending.fault.pc;
    warning.other_pc = pending.fault.other_pc;
    warning.thread = pending.fault.thread;
    warning.other_thread = pending.fault.other_thread;
    warning.block = pending.fault.block;
    warning.other_block = pending.fault.other_block;
    warning.address = pending.fault.address;
    warning.shared_slot = pending.fault.shared_slot;
    Busy busy(w);
    warn(warning);
}

// What a thread wrote before its fence and atomic operation, and what barriers had ordered before that.
bool is_published(const BlockClock& clock, uint32_t stamp, uint16_t thread) {
    if (clock.published_stamp > stamp) return true;
    return clock.published_stamp == stamp && (clock.publishers[thread / 32] >> thread % 32 & 1);
}

bool sees_published(Worker* w) { return state.block_acquired || state.acquired[w->current]; }

// Is an earlier use at (stamp, thread, epoch, tick) ordered before what the current thread does now?
bool ordered(Worker* w, uint32_t stamp, uint16_t thread, uint32_t epoch, uint32_t tick, bool shared) {
    if (stamp < state.launch_stamp) return true;
    if (thread >= kCopies) return stamp < state.block_stamp || clocks_know_copies(w, thread - kCopies, tick);
    if (stamp < state.block_stamp) {  // another block of this launch
        if (shared) return true;
        return sees_published(w) && is_published(state.blocks[block_of(stamp)], stamp, thread);
    }
    if (stamp != state.stamp || thread == w->current) return true;  // a barrier lies between, or it was ourselves
    int warp = thread / 32;
    if (warp == w->current / 32 && epoch != w->warp[warp].sync_epoch) return true;
    if (clocks_know(w, thread, tick)) return true;
    return state.acquired[w->current] && is_published(state.blocks.back(), stamp, thread);
}

struct Access {
    const void* pc;
    char* address;
    size_t bytes;
    uint32_t flags;
};

void race(Worker* w, const Access& now, int slot, uint32_t other_pc, uint16_t other_thread, uint32_t other_stamp,
          uint32_t other_access, bool defer) {
    Fault f = {};
    describe(f, now.pc, now.address, now.bytes, now.flags, slot);
    f.thread = uint32_t(w->current);
    f.block = w->block_number;
    f.other_pc = pc64(other_pc);
    f.other_thread = other_thread < kCopies ? other_thread : state.copier[other_thread - kCopies];
    f.other_block = block_of(other_stamp);
    f.other_access = other_access | (other_thread < kCopies ? 0 : uint32_t(kCopied));
    if (!defer) {
        w->fault = f;
        fail(kDataRace);
    }
    Pending& pending = state.pending;
    pending.active = true;
    pending.fault = f;
    pending.address = now.address;
    pending.bytes = uint32_t(now.bytes < 16 ? now.bytes : 16);
    memcpy(pending.before, now.address, pending.bytes);
}

EMU_HOT void note_read(Worker* w, Cell& c, const Access& now, uint8_t bytes) {
    uint16_t me = uint16_t(w->current);
    uint32_t epoch = w->warp[me / 32].sync_epoch;
    if (c.read_stamp != state.stamp) {
        bool other_block = c.read_stamp >= state.launch_stamp && c.read_stamp < state.block_stamp;
        if (other_block) {  // it is still to be found by whoever writes here in this launch
            c.far_stamp = c.read_stamp;
            c.far_thread = c.read_thread;
            c.far_pc = c.read_pc;
            c.far_atomic = c.read_atomic;
        }
        c.read_stamp = state.stamp;
        c.read2_thread = kNobody;
        c.read_bytes = 0;
        c.read_atomic = 1;
    } else if (c.read_thread != me) {
        bool keep = c.read2_thread != kNobody && c.read2_thread / 32 != me / 32 && c.read_thread / 32 == me / 32;
        if (!keep) {
            c.read2_thread = c.read_thread;
            c.read2_epoch = c.read_epoch;
            c.read2_tick = c.read_tick;
            c.read2_pc = c.read_pc;
        }
    }
    c.read_thread = me;
    c.read_epoch = epoch;
    c.read_tick = clocks_tick(me);
    c.read_pc = pc32(now.pc);
    c.read_bytes |= bytes;
    if (!(now.flags & (kAtomic | kVolatile))) c.read_atomic = 0;
}

EMU_HOT void check_cell(Worker* w, Cell& c, const Access& now, uint8_t bytes, int slot) {
    bool shared = slot >= 0, atomic = now.flags & (kAtomic | kVolatile);
    if (c.write_stamp && (c.write_bytes & bytes) && !(atomic && c.write_atomic) &&
        !ordered(w, c.write_stamp, c.write_thread, c.write_epoch, c.write_tick, shared)) {
        uint32_t other = c.write_atomic ? uint32_t(kWrite | kAtomic) : uint32_t(kWrite);
        bool store = (now.flags & kWrite) && !atomic, copy = (now.flags & kCopied) || c.write_thread >= kCopies;
        race(w, now, slot, c.write_pc, c.write_thread, c.write_stamp, other, store && !copy);
    }
    if (!(now.flags & kWrite)) {
        note_read(w, c, now, bytes);
        return;
    }
    if (c.read_stamp && (c.read_bytes & bytes) && !(atomic && c.read_atomic)) {
        bool first = !ordered(w, c.read_stamp, c.read_thread, c.read_epoch, c.read_tick, shared);
        bool second = c.read2_thread != kNobody &&
                      !ordered(w, c.read_stamp, c.read2_thread, c.read2_epoch, c.read2_tick, shared);
        if (first) race(w, now, slot, c.read_pc, c.read_thread, c.read_stamp, kRead, false);
        if (second) race(w, now, slot, c.read2_pc, c.read2_thread, c.read_stamp, kRead, false);
    }
    if (!shared && c.far_stamp && !(atomic && c.far_atomic) && !ordered(w, c.far_stamp, c.far_thread, 0, 0, false))
        race(w, now, slot, c.far_pc, c.far_thread, c.far_stamp, kRead, false);
    bool again = c.write_stamp == state.stamp && c.write_thread == w->current;
    if (!again) c.write_bytes = 0;
    c.write_atomic = again ? c.write_atomic && atomic : atomic;  // one plain store makes it plain
    c.write_stamp = state.stamp;
    c.write_thread = uint16_t(w->current);
    c.write_epoch = w->warp[w->current / 32].sync_epoch;
    c.write_tick = clocks_tick(w->current);
    if (!again || c.write_atomic || !atomic) c.write_pc = pc32(now.pc);  // the plain store is the fault
    c.write_bytes |= bytes;
}

EMU_HOT void check_races(Worker* w, const Place& place, const Access& now) {
    Allocation& a = *place.array;
    unsigned shift = a.granule_shift;
    if (!a.cells) {
        Busy busy(w);
        size_t room = place.slot >= 0 ? kSharedLimit : a.size;  // a shared slot serves arrays of any size
        a.cells_bytes = ((room >> shift) + 2) * sizeof(Cell);
        a.cells = (Cell*)map_pages(a.cells_bytes);
        if (!a.cells) return;
    }
    size_t first = place.offset >> shift, last = (place.offset + now.bytes - 1) >> shift;
    size_t granule = size_t(1) << shift;
    for (size_t k = first; k <= last; k++) {
        size_t lo = k == first ? place.offset & (granule - 1) : 0;
        size_t hi = k == last ? ((place.offset + now.bytes - 1) & (granule - 1)) + 1 : granule;
        check_cell(w, a.cells[k], now, uint8_t(((1u << hi) - 1) & ~((1u << lo) - 1)), place.slot);
    }
}

// ---------------- counters
AccessSite* site_for(Worker* w, const Access& now, bool shared) {
    uint32_t pc = pc32(now.pc);
    uint32_t h = (pc * 2654435761u) >> 20;
    for (;; h++) {
        uint32_t& entry = state.site_of[h % (kMaxSites * 4)];
        if (!entry) {
            if (state.n_sites == kMaxSites) return nullptr;
            Busy busy(w);
            AccessSite& site = state.sites[state.n_sites];
            site.counters = SiteCounters{};
            site.counters.pc = uint64_t(now.pc);
            site.counters.access = now.flags;
            site.counters.shared = shared;
            site.counted_accesses = 0;
            memset(site.used, 0, sizeof site.used);
            entry = ++state.n_sites;
        }
        AccessSite& site = state.sites[entry - 1];
        if (site.counters.pc == uint64_t(now.pc) && site.counters.access == now.flags) return &site;
    }
}

// The warp's request that this access belongs to: the lanes' k-th executions of one access form the k-th request.
Request* request_for(Worker* w, AccessSite* site) {
    uint32_t number = uint32_t(site - state.sites), tag = (state.epoch & ((1u << kEpochBits) - 1)) << 20;
    uint32_t& slot = state.occurrences[size_t(w->current) * kMaxSites + number];
    if ((slot & ~0xFFFFFu) != tag) slot = tag;
    uint32_t k = slot & 0xFFFFF;
    if (k >= kMaxOccurrences) return nullptr;
    slot++;
    int warp = w->current / 32;
    if (k >= site->used[warp]) {
        Array<Request>& requests = site->requests[warp];
        if (k >= requests.size()) {
            Busy busy(w);
            requests.resize(k + 1);
        }
        requests[k].n = 0;
        site->used[warp] = k + 1;
    }
    return &site->requests[warp][k];
}

void add_unit(Request* request, uint32_t unit) {
    for (uint32_t k = request->n; k-- > 0;)
        if (request->unit[k] == unit) return;
    if (request->n < 64) request->unit[request->n++] = unit;
}

EMU_HOT void count_access(Worker* w, const Place& place, const Access& now) {
    if (place.array->is_constant) return;
    Counters& total = state.counters;
    bool shared = place.slot >= 0, write = now.flags & kWrite;
    total.accesses++;
    if (now.flags & kAtomic) total.atomics++;
    if (shared) (write ? total.shared_write_bytes : total.shared_read_bytes) += now.bytes;
    else (write ? total.global_write_bytes : total.global_read_bytes) += now.bytes;
    AccessSite* site = site_for(w, now, shared);
    if (!site) return;
    site->counters.accesses++;
    site->counters.bytes += now.bytes;
    Request* request = request_for(w, site);
    if (!request) {
        total.estimated = 1;
        return;
    }
    site->counted_accesses++;
    uint64_t unit = shared ? 4 : 32;
    uint64_t base = shared ? uint64_t(now.address - w->shared) : uint64_t(now.address);
    for (uint64_t k = base / unit; k <= (base + now.bytes - 1) / unit; k++) add_unit(request, uint32_t(k));
}

// Words of one request that share a bank are served one after another: the longest queue, less the turns that
// this many words need at best.
uint32_t conflicts_of(const Request& request) {
    uint8_t queue[32] = {};
    uint32_t longest = 0;
    for (uint32_t k = 0; k < request.n; k++) {
        uint32_t n = ++queue[request.unit[k] % 32];
        if (n > longest) longest = n;
    }
    uint32_t best = (request.n + 31) / 32;
    return longest > best ? longest - best : 0;
}

void flush_requests(Worker* w) {
    for (uint32_t s = 0; s < state.n_sites; s++) {
        AccessSite& site = state.sites[s];
        for (int warp = 0; warp < w->warps; warp++) {
            for (uint32_t k = 0; k < site.used[warp]; k++) {
                const Request& request = site.requests[warp][k];
                site.counters.requests++;
                if (site.counters.shared) site.counters.conflicts += conflicts_of(request);
                else site.counters.sectors += request.n;
            }
            site.used[warp] = 0;
        }
    }
    state.epoch++;
}

void sum_sites() {
    Counters& total = state.counters;
    for (uint32_t s = 0; s < state.n_sites; s++) {
        AccessSite& site = state.sites[s];
        SiteCounters& c = site.counters;
        if (site.counted_accesses && site.counted_accesses < c.accesses) {  // a long loop: scale what was counted
            double scale = double(c.accesses) / double(site.counted_accesses);
            c.sectors = uint64_t(double(c.sectors) * scale);
            c.requests = uint64_t(double(c.requests) * scale);
            c.conflicts = uint64_t(double(c.conflicts) * scale);
        }
        if (c.shared) {
            total.shared_requests += c.requests;
            total.bank_conflicts += c.conflicts;
        } else if (c.access & kWrite) {
            total.global_write_sectors += c.sectors;
            total.global_write_requests += c.requests;
        } else {
            total.global_read_sectors += c.sectors;
            total.global_read_requests += c.requests;
        }
    }
}

// ---------------- every access
void put_in_trace(Worker* w, const Access& now, int slot) {
    Busy busy(w);
    state.trace.push({uint64_t(now.address), uint64_t(now.pc), w->block_number, uint32_t(w->current), uint32_t(now.bytes),
                      now.flags & ~uint32_t(kCopied), slot});
}

void access(void* address, size_t bytes, uint32_t flags, const void* pc) {
    Worker* w = self;
    if (!w || !w->running || bytes == 0) return;
    w->called_from = pc;
    if (state.pending.active) settle(w);
    Place place;
    char* p = (char*)address;
    if (!locate(w, p, bytes, flags, pc, &place)) return;
    if ((flags & kAligned) && (uintptr_t(p) & (bytes - 1))) stop(kMisaligned, pc, p, bytes, flags, place.slot);
    flags &= ~uint32_t(kAligned);
    Access now = {pc, p, bytes, flags};
    check_written(w, place, p, bytes, flags, pc);
    check_races(w, place, now);
    count_access(w, place, now);
    if (state.trace.size() < state.trace_limit) put_in_trace(w, now, place.slot);
}

// An atomic operation publishes what was written before a fence, and shows what others published.
void synchronise(Worker* w) {
    if (!w || !w->running) return;
    state.acquired[w->current] = state.acquiring = true;
    if (!state.fenced[w->current]) return;
    BlockClock& clock = state.blocks.back();
    if (clock.published_stamp != state.stamp) memset(clock.publishers, 0, sizeof clock.publishers);
    clock.published_stamp = state.stamp;
    clock.publishers[w->current / 32] |= 1u << w->current % 32;
}

void atomic_access(volatile void* address, size_t bytes, uint32_t flags, const void* pc) {
    access((void*)address, bytes, flags | kAtomic, pc);
    synchronise(self);
}

// PTX has volatile accesses to global memory as strong as relaxed atomics. In shared memory they are what old
// warp-synchronous code hoped would replace __syncwarp: plain accesses.
void volatile_access(void* address, size_t bytes, uint32_t flags, const void* pc) {
    if (in_heap(address)) access(address, bytes, flags | kVolatile, pc), synchronise(self);
    else access(address, bytes, flags, pc);
    give_turn(self);
}

}  // namespace

// ---------------- told by the scheduler
bool checks_make() {
    if (!state.sites) state.sites = (AccessSite*)calloc(kMaxSites, sizeof(AccessSite));
    if (!state.occurrences)
        state.occurrences = (uint32_t*)map_pages(size_t(kMaxThreads) * kMaxSites * sizeof(uint32_t));
    return state.sites && state.occurrences && clocks_make();
}

// Another thread may have been in the midst of a launch: its lists are left as they are, and new ones begun. The
// stamp goes on, for the records of memory hold older ones.
void reset_checks_after_fork() {
    uint32_t stamp = state.stamp, epoch = state.epoch;
    size_t limit = state.trace_limit;
    memset((void*)&state, 0, sizeof state);
    state.stamp = stamp;
    state.epoch = epoch;
    state.trace_limit = limit;
}

void checks_begin(Worker* w) {
    state.launch = w->launch;
    state.launch_stamp = ++state.stamp;
    state.blocks.clear();
    state.pending.active = false;
    state.unwritten.kind = kNone;
    state.counters = Counters{};
    state.n_sites = 0;
    memset(state.site_of, 0, sizeof state.site_of);
    state.trace.clear();
    state.epoch++;
}

void checks_block(Worker* w) {
    state.block_stamp = ++state.stamp;
    state.block_acquired = state.acquiring = false;
    clocks_begin_block();
    state.shown_stamp = 0;
    memset(state.acquired, 0, sizeof state.acquired);
    memset(state.fenced, 0, sizeof state.fenced);
    Busy busy(w);
    flush_requests(w);
    state.blocks.push({state.stamp, 0, {}});
}

void checks_barrier(Worker* w) {
    if (state.pending.active) settle(w);
    report_unwritten(w);
    clocks_block_barrier(w);
    state.stamp++;
    if (state.acquiring) state.block_acquired = true;
    state.counters.barriers++;
    flush_requests(w);
}

void checks_block_end(Worker* w) { report_unwritten(w); }

// Whatever happened after a read of unwritten memory, but for the race that explains it, came of that read.
void checks_failed(Worker* w) {
    if (state.unwritten.kind && w->fault.kind != kDataRace) w->fault = state.unwritten;
}

void checks_thread_switch(Worker* w) {
    if (state.pending.active) settle(w);
}

void checks_thread_start(Worker* w) { state.fenced[w->current] = false; }

void checks_shared_region(Worker* w, int slot, size_t item) {
    Busy busy(w);
    Allocation& a = w->shared_region[slot];
    unsigned shift = item >= 4 ? 2 : item == 2 ? 1 : 0;
    if (a.cells && shift != a.granule_shift) {
        unmap_pages(a.cells, a.cells_bytes);
        a.cells = nullptr;
    }
    a.granule_shift = shift;
    if (!a.written) {
        a.written_bytes = kSharedLimit + 16;
        a.written = (uint8_t*)map_pages(a.written_bytes);
        if (!a.written) abort();
    }
    memset(a.written, 0, a.size);
}

uint32_t checks_stretch() { return state.stamp; }

// Not as an atomic operation, which would show others what any thread has published: clocks.h is more exact.
void checks_use_barrier(const void* barrier, uint32_t flags, const void* pc) { access((void*)barrier, 8, flags, pc); }

// A piece is its thread's own: the others know of it when they know of the thread's arrival.
void checks_piece(Worker*, void* to, const void* from, size_t bytes, const void* pc) {
    if (from) access((void*)from, bytes, kRead, pc);
    access(to, bytes, kWrite, pc);
}

// What the current thread knows to be written, the copy engine sees from now on.
void checks_before_copies(Worker* w) {
    if (state.shown_stamp != state.stamp) memset(state.shown, 0, sizeof state.shown);
    state.shown_stamp = state.stamp;
    clocks_show(w, state.shown);
}

// Copies go another way to shared memory than threads do: one may come before a store that a barrier has ordered.
void check_shown(Worker* w, const Cell& c, const Access& now) {
    if (c.write_stamp < state.block_stamp || c.write_thread >= kCopies) return;
    if (c.write_stamp < state.shown_stamp) return;
    if (c.write_stamp == state.shown_stamp && state.shown[c.write_thread] >= c.write_tick) return;
    if (!ordered(w, c.write_stamp, c.write_thread, c.write_epoch, c.write_tick, true)) return;  // a race: worse
    snprintf(w->fault.text, sizeof w->fault.text,
             "a copy to where thread %u has written: nobody who knew of it has called before_bulk_copies since",
             unsigned(c.write_thread));
    stop(kCopyRefused, now.pc, now.address, now.bytes, kWrite, -1);
}

// The issuing thread reads; what is written is the copy's until a phase of the barrier is over.
void checks_copy(Worker* w, void* to, const void* from, size_t bytes, int barrier, uint32_t phase, const void* pc) {
    if (!bytes) return;
    if (state.pending.active) settle(w);
    Access reading = {pc, (char*)from, bytes, kRead}, writing = {pc, (char*)to, bytes, kWrite | kCopied};
    Place source, target;
    locate(w, reading.address, bytes, kRead, pc, &source);
    locate(w, writing.address, bytes, kWrite, pc, &target);
    check_written(w, source, reading.address, bytes, kRead, pc);
    check_written(w, target, writing.address, bytes, kWrite, pc);
    check_races(w, source, reading);
    state.copier[barrier] = uint16_t(w->current);
    Allocation& a = *target.array;
    size_t first = target.offset >> a.granule_shift, last = (target.offset + bytes - 1) >> a.granule_shift;
    for (size_t k = first; a.cells && k <= last; k++) check_shown(w, a.cells[k], writing);
    check_races(w, target, writing);
    for (size_t k = first; a.cells && k <= last; k++) {
        a.cells[k].write_thread = uint16_t(kCopies + barrier);
        a.cells[k].write_tick = phase;
    }
    if (state.trace.size() < state.trace_limit) put_in_trace(w, reading, -1);
    if (state.trace.size() < state.trace_limit) put_in_trace(w, writing, target.slot);
    Counters& total = state.counters;
    total.accesses += 2;
    total.global_read_bytes += bytes;
    total.global_read_requests++;
    total.global_read_sectors += (uint64_t(from) % 32 + bytes + 31) / 32;
    total.shared_write_bytes += bytes;
}

void checks_end(Worker* w, Counters* out) {
    flush_requests(w);
    sum_sites();
    *out = state.counters;
}

}  // namespace emu

using namespace emu;

// ---------------- what the compiler's calls end up in
#define PC __builtin_return_address(0)
#define ACCESS(n)                                                                              \
    EMU_API void __tsan_read##n(void* p) { access(p, n, kRead | kAligned, PC); }               \
    EMU_API void __tsan_write##n(void* p) { access(p, n, kWrite | kAligned, PC); }             \
    EMU_API void __tsan_unaligned_read##n(void* p) { access(p, n, kRead, PC); }                \
    EMU_API void __tsan_unaligned_write##n(void* p) { access(p, n, kWrite, PC); }              \
    EMU_API void __tsan_volatile_read##n(void* p) { volatile_access(p, n, kRead, PC); }        \
    EMU_API void __tsan_volatile_write##n(void* p) { volatile_access(p, n, kWrite, PC); }      \
    EMU_API void __tsan_unaligned_volatile_read##n(void* p) { volatile_access(p, n, kRead, PC); }   \
    EMU_API void __tsan_unaligned_volatile_write##n(void* p) { volatile_access(p, n, kWrite, PC); } \
    EMU_API void __tsan_read_write##n(void* p) {                                               \
        access(p, n, kRead, PC);                                                               \
        access(p, n, kWrite, PC);                                                              \
    }                                                                                          \
    EMU_API void __tsan_unaligned_read_write##n(void* p) {                                     \
        access(p, n, kRead, PC);                                                               \
        access(p, n, kWrite, PC);                                                              \
    }

ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)

EMU_API void __tsan_read_range(void* p, size_t n) { access(p, n, kRead, PC); }
EMU_API void __tsan_write_range(void* p, size_t n) { access(p, n, kWrite, PC); }
EMU_API void __tsan_init() {}
EMU_API void __tsan_func_entry(void*) {}
EMU_API void __tsan_func_exit() {}
EMU_API void __tsan_vptr_update(void**, void*) {}
EMU_API void __tsan_vptr_read(void**) {}

EMU_API void* emu_checked_memcpy(void* to, const void* from, size_t n, const void* pc) {
    access((void*)from, n, kRead, pc);
    access(to, n, kWrite, pc);
    return memcpy(to, from, n);
}
EMU_API void* emu_checked_memmove(void* to, const void* from, size_t n, const void* pc) {
    access((void*)from, n, kRead, pc);
    access(to, n, kWrite, pc);
    return memmove(to, from, n);
}
EMU_API void* emu_checked_memset(void* to, int value, size_t n, const void* pc) {
    access(to, n, kWrite, pc);
    return memset(to, value, n);
}
EMU_API void* __tsan_memcpy(void* to, const void* from, size_t n) { return emu_checked_memcpy(to, from, n, PC); }
EMU_API void* __tsan_memmove(void* to, const void* from, size_t n) { return emu_checked_memmove(to, from, n, PC); }
EMU_API void* __tsan_memset(void* to, int value, size_t n) { return emu_checked_memset(to, value, n, PC); }

// Atomic operations that the compiler has no built-in for.
#define ATOMIC_UPDATE(name, type, result)                      \
    EMU_API type emu_atomic_##name(type* p, type v) {          \
        atomic_access(p, sizeof(type), kWrite, PC);            \
        type old = *p;                                         \
        *p = (type)(result);                                    \
        return old;                                            \
    }
ATOMIC_UPDATE(add_float, float, old + v)
ATOMIC_UPDATE(add_double, double, old + v)
ATOMIC_UPDATE(min_int, int, old < v ? old : v)
ATOMIC_UPDATE(max_int, int, old < v ? v : old)
ATOMIC_UPDATE(min_uint, unsigned, old < v ? old : v)
ATOMIC_UPDATE(max_uint, unsigned, old < v ? v : old)
ATOMIC_UPDATE(min_long, long long, old < v ? old : v)
ATOMIC_UPDATE(max_long, long long, old < v ? v : old)
ATOMIC_UPDATE(min_ulong, unsigned long long, old < v ? old : v)
ATOMIC_UPDATE(max_ulong, unsigned long long, old < v ? v : old)
ATOMIC_UPDATE(inc_uint, unsigned, old >= v ? 0 : old + 1)
ATOMIC_UPDATE(dec_uint, unsigned, old == 0 || old > v ? v : old - 1)

// __threadfence and __threadfence_block.
EMU_API void emu_fence() {
    Worker* w = self;
    if (w && w->running && w->launch->full) state.fenced[w->current] = true;
}

#define ATOMIC(bits, type)                                                                                        \
    EMU_API type __tsan_atomic##bits##_load(const volatile type* p, int) {                                        \
        atomic_access((volatile void*)p, sizeof(type), kRead, PC);                                                \
        return *p;                                                                                                \
    }                                                                                                             \
    EMU_API void __tsan_atomic##bits##_store(volatile type* p, type v, int) {                                     \
        access((void*)p, sizeof(type), kWrite | kVolatile, PC); /* atomic, but it does not read */                                   \
        *p = v;                                                                                                   \
        synchronise(self);                                                                                        \
    }                                                                                                             \
    EMU_API type __tsan_atomic##bits##_exchange(volatile type* p, type v, int) {                                  \
        atomic_access(p, sizeof(type), kWrite, PC);                                                               \
        type old = *p;                                                                                            \
        *p = v;                                                                                                   \
        return old;                                                                                               \
    }                                                                                                             \
    FETCH(bits, type, add, old + v)                                                                               \
    FETCH(bits, type, sub, old - v)                                                                               \
    FETCH(bits, type, and, old& v)                                                                                \
    FETCH(bits, type, or, old | v)                                                                                \
    FETCH(bits, type, xor, old ^ v)                                                                               \
    EMU_API int __tsan_atomic##bits##_compare_exchange_strong(volatile type* p, type* expected, type v, int, int) { \
        atomic_access(p, sizeof(type), kWrite, PC);                                                               \
        type old = *p;                                                                                            \
        if (old == *expected) {                                                                                   \
            *p = v;                                                                                               \
            return 1;                                                                                             \
        }                                                                                                         \
        *expected = old;                                                                                          \
        return 0;                                                                                                 \
    }                                                                                                             \
    EMU_API int __tsan_atomic##bits##_compare_exchange_weak(volatile type* p, type* expected, type v, int s, int f) { \
        atomic_access(p, sizeof(type), kWrite, PC);                                                               \
        type old = *p;                                                                                            \
        if (old == *expected) {                                                                                   \
            *p = v;                                                                                               \
            return 1;                                                                                             \
        }                                                                                                         \
        *expected = old;                                                                                          \
        (void)s, (void)f;                                                                                         \
        return 0;                                                                                                 \
    }                                                                                                             \
    EMU_API type __tsan_atomic##bits##_compare_exchange_val(volatile type* p, type c, type v, int, int) {         \
        atomic_access(p, sizeof(type), kWrite, PC);                                                               \
        type old = *p;                                                                                            \
        if (old == c) *p = v;                                                                                     \
        return old;                                                                                               \
    }
#define FETCH(bits, type, name, result)                                                 \
    EMU_API type __tsan_atomic##bits##_fetch_##name(volatile type* p, type v, int) {    \
        atomic_access(p, sizeof(type), kWrite, PC);                                     \
        type old = *p;                                                                  \
        *p = type(result);                                                              \
        return old;                                                                     \
    }
ATOMIC(8, uint8_t) ATOMIC(16, uint16_t) ATOMIC(32, uint32_t) ATOMIC(64, uint64_t)
EMU_API void __tsan_atomic_thread_fence(int) { emu_fence(); }
EMU_API void __tsan_atomic_signal_fence(int) {}

// ---------------- read by Python
EMU_API int emu_site(int k, SiteCounters* out) {
    if (uint32_t(k) >= state.n_sites) return 0;
    *out = state.sites[k].counters;
    return 1;
}
EMU_API void emu_set_trace(size_t limit) {
    state.trace_limit = limit;
    state.trace.clear();
}
EMU_API size_t emu_trace(TraceEntry* out, size_t room) {
    size_t n = state.trace.size() < room ? state.trace.size() : room;
    if (n) memcpy(out, &state.trace[0], n * sizeof(TraceEntry));
    return state.trace.size();
}
EMU_API void* emu_nearest(const void* p, uint64_t* base, uint64_t* bytes) {
    Allocation* a = nearest(p);
    if (!a) return nullptr;
    *base = uint64_t(a->base);
    *bytes = a->size;
    return a->base;
}
