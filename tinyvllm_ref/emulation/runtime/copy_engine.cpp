// Barriers with phases (mbarrier), named barriers (bar.sync), and copies that go on while the block computes: what
// bulk_copy.cuh and async_copy.cuh are on a card of compute capability 9.0, for kernels compiled with
// EMULATED_BULK_COPY.
//
// A card's copy arrives at a time that nobody knows. Here it arrives as late as can be: when no thread of the block can
// go on, and one waits for it. Until then its place holds 0xFF bytes (NaN), so that a thread which reads without waiting,
// be it the one that started the copy, computes with NaN in fast mode; and so does one whose place is overwritten before
// it has read. Full mode reports both, by clocks.h.
#include "copy_engine.h"

#include <stdarg.h>
#include <stdio.h>

#include "clocks.h"

namespace emu {

// What the barrier's own 8 bytes hold is this mark and its number here.
constexpr uint64_t kStarted = 0x70686173ull << 32;
constexpr uint32_t kMostBytes = (1u << 20) - 1;  // that a phase can wait for; and as many arrivals

struct Phases {
    uint64_t* place;      // null: a named barrier
    uint32_t arrivals;    // of each phase
    uint32_t missing;     // of them, in this one
    uint32_t coming;      // arrivals that copies will make
    uint32_t bytes;       // announced in this phase, and not here yet
    uint32_t over;        // phases that are over
    uint32_t waiting;     // threads
    uint16_t starter;
    bool shown;           // to the copy engine
};

// A copy on its way; with `arrives` (and no bytes) an arrival on the heels of a thread's copies.
struct Copy {
    int barrier;          // -1: of async_copy.cuh, and not tied to one yet
    uint16_t thread;
    bool bulk, arrives;
    uint32_t bytes, group;
    char* to;
    const char* from;     // null: zeros
    const void* pc;
};

struct CopyEngine {
    Phases barrier[kMaxPhases];
    int n_barriers;
    uint32_t group[kMaxThreads];  // of async_copy.cuh: of the copies that a thread starts now
    Array<Copy> copies;           // in the order in which they were started
};

namespace {

CopyEngine& engine_of(Worker* w) {
    if (!w->engine) {
        Busy busy(w);
        w->engine = (CopyEngine*)calloc(1, sizeof(CopyEngine));
        if (!w->engine) abort();
        engine_begin_block(w);
    }
    return *w->engine;
}

// ---------------- refusing
[[noreturn]] __attribute__((format(printf, 4, 5))) void refuse(Worker* w, uint32_t thread, const void* pc,
                                                               const char* format, ...) {
    Fault& f = w->fault;
    va_list list;
    va_start(list, format);
    vsnprintf(f.text, sizeof f.text, format, list);
    va_end(list);
    f.kind = kCopyRefused;
    f.pc = uint64_t(pc);
    f.thread = thread;
    f.block = w->block_number;
    siglongjmp(w->escape, 1);
}

struct Name {
    char text[80];
};

// As the source calls it: full[2].
Name name_of(Worker* w, const void* p) {
    Name name;
    for (int k = 0; k < w->n_used; k++) {
        const SharedDeclaration& d = *w->shared_of[k];
        size_t offset = size_t((const char*)p - w->shared_at[k]);
        if (offset >= d.bytes) continue;
        const char* variable = *d.name ? d.name : "dynamic shared memory";
        if (d.bytes == d.item) snprintf(name.text, sizeof name.text, "%s", variable);
        else snprintf(name.text, sizeof name.text, "%s[%zu]", variable, offset / d.item);
        return name;
    }
    snprintf(name.text, sizeof name.text, "%p", p);
    return name;
}

Name name_of(Worker* w, const Phases& barrier) {
    if (barrier.place) return name_of(w, barrier.place);
    Name name;
    snprintf(name.text, sizeof name.text, "barrier %d", int(&barrier - w->engine->barrier));
    return name;
}

bool in_shared(Worker* w, const void* p, size_t bytes) {
    size_t at = size_t((const char*)p - w->shared), all = w->shared_used;
    if (w->launch->full) all = kSharedStride * (kMaxShared + 1);  // which variable's, the checks know
    return at < all && bytes <= all - at;
}

// The barrier at a place in shared memory that has been started.
Phases& barrier_at(Worker* w, uint64_t* place, const void* pc) {
    w->called_from = pc;
    uint32_t thread = current_thread(w);
    if (!in_shared(w, place, 8) || uintptr_t(place) % 8)
        refuse(w, thread, pc, "a barrier must lie in shared memory, at a multiple of 8 bytes; this one is at %p",
               (void*)place);
    CopyEngine& engine = engine_of(w);
    uint64_t number = *place ^ kStarted;
    if (number >= uint64_t(engine.n_barriers) || engine.barrier[number].place != place)
        refuse(w, thread, pc, "the barrier %s was used before start_phases", name_of(w, place).text);
    if (w->launch->full) checks_use_barrier(place, kWrite | kAtomic, pc);
    return engine.barrier[number];
}

// ---------------- phases
void wake_waiting(Worker* w, Phases& barrier) {
    uint64_t number = uint64_t(&barrier - w->engine->barrier);
    for (int k = 0; barrier.waiting && k < w->warps; k++)
        for (uint32_t bits = w->warp[k].in_phase; bits; bits &= bits - 1) {
            int t = k * 32 + __builtin_ctz(bits);
            if (w->thread[t].value != number || w->thread[t].mask == barrier.over % 2) continue;
            barrier.waiting--;
            wake_thread(w, t);
        }
}

void end_phase_if_complete(Worker* w, Phases& barrier) {
    if (barrier.missing || barrier.bytes) return;
    barrier.over++;
    barrier.missing = barrier.arrivals;
    if (w->launch->full) clocks_end_phase(w, int(&barrier - w->engine->barrier), barrier.over);
    wake_waiting(w, barrier);
}

void take_arrivals(Worker* w, Phases& barrier, uint32_t times, uint32_t thread, const void* pc) {
    if (times > barrier.missing - barrier.coming)
        refuse(w, thread, pc, "%u arrival(s) at %s, whose phase waits for %u more (of %u)", times,
               name_of(w, barrier).text, barrier.missing - barrier.coming, barrier.arrivals);
    barrier.missing -= times;
}

void arrive(Worker* w, Phases& barrier, uint32_t times, uint32_t bytes, const void* pc) {
    uint32_t thread = current_thread(w);
    if (bytes > kMostBytes - barrier.bytes)
        refuse(w, thread, pc, "%u bytes are announced to %s, which can wait for %u more", bytes, name_of(w, barrier).text,
               kMostBytes - barrier.bytes);
    take_arrivals(w, barrier, times, thread, pc);
    barrier.bytes += bytes;
    if (w->launch->full) clocks_arrive(w, int(&barrier - w->engine->barrier));
    end_phase_if_complete(w, barrier);
}

// Until the phase of this parity is over.
void wait(Worker* w, Phases& barrier, uint32_t parity, const void* pc) {
    uint64_t number = uint64_t(&barrier - w->engine->barrier);
    if (barrier.over % 2 == parity) {
        Thread& me = w->thread[w->current];
        me.value = number;
        me.mask = parity;
        me.result = uint64_t(pc);
        barrier.waiting++;
        wait_to_be_woken(w);
    }
    if (w->launch->full) clocks_waited(w, int(number));
}

int first_waiting(Worker* w, int number) {
    for (int k = 0; k < w->warps; k++)
        for (uint32_t bits = w->warp[k].in_phase; bits; bits &= bits - 1)
            if (w->thread[k * 32 + __builtin_ctz(bits)].value == uint64_t(number)) return k * 32 + __builtin_ctz(bits);
    return 0;
}

// ---------------- copies
void perform(Worker* w, const Copy& copy) {
    w->called_from = copy.pc;
    if (copy.from) memcpy(copy.to, copy.from, copy.bytes);
    else memset(copy.to, 0, copy.bytes);
}

void deliver(Worker* w, const Copy& copy) {
    if (copy.bytes) perform(w, copy);
    Phases& barrier = w->engine->barrier[copy.barrier];
    if (copy.bulk) {
        if (copy.bytes > barrier.bytes)
            refuse(w, copy.thread, copy.pc, "%u bytes come to %s, which has been told of %u in this phase",
                   copy.bytes, name_of(w, barrier).text, barrier.bytes);
        barrier.bytes -= copy.bytes;
        end_phase_if_complete(w, barrier);
    }
    if (copy.arrives) {
        barrier.coming--;
        take_arrivals(w, barrier, 1, copy.thread, copy.pc);
        end_phase_if_complete(w, barrier);
    }
}

// Deliver what `chosen` says, and keep the others.
template <class Chosen>
void deliver_all(Worker* w, Chosen chosen) {
    Array<Copy>& copies = w->engine->copies;
    size_t kept = 0, all = copies.size();
    for (size_t k = 0; k < all; k++) {
        Copy copy = copies[k];
        if (chosen(copy)) deliver(w, copy);
        else copies[kept++] = copy;
    }
    copies.resize(kept);
}

void start_copy(Worker* w, const Copy& copy) {
    Busy busy(w);
    engine_of(w).copies.push(copy);
    if (copy.bytes) memset(copy.to, 0xFF, copy.bytes);
}

// In fast mode, where nothing else looks.
void check_bounds(Worker* w, void* to, const void* from, size_t bytes, const void* pc) {
    if (!in_shared(w, to, bytes))
        refuse(w, current_thread(w), pc, "a copy of %zu bytes that reaches past the end of the block's shared memory",
               bytes);
    Allocation* a = find(from);
    if (!from || (a && (const char*)from >= a->base && size_t((const char*)from - a->base) + bytes <= a->size)) return;
    Fault& f = w->fault;
    f.pc = uint64_t(pc);
    f.address = uint64_t(from);
    f.bytes = bytes;
    f.access = kRead;
    f.shared_slot = -1;
    fail(kOutOfBounds);
}

void check_aligned(Worker* w, const void* p, const char* what, const void* pc) {
    if (uintptr_t(p) % 16)
        refuse(w, current_thread(w), pc, "a copy %s %p, which is no multiple of 16 bytes", what, p);
}

void check_copy(Worker* w, void* to, const void* from, uint32_t bytes, const void* pc) {
    w->called_from = pc;
    check_aligned(w, to, "to", pc);
    check_aligned(w, from, "from", pc);
    if (bytes % 16) refuse(w, current_thread(w), pc, "a copy of %u bytes, which is no multiple of 16", bytes);
    if (!in_shared(w, to, 0)) refuse(w, current_thread(w), pc, "a copy to %p, which is not in shared memory", to);
    if (from && !in_heap(from)) refuse(w, current_thread(w), pc, "a copy from %p, which is not in global memory", from);
    if (!w->launch->full) check_bounds(w, to, from, bytes, pc);
}

}  // namespace

// ---------------- called by the scheduler
void engine_begin_block(Worker* w) {
    if (!w->engine) return;
    memset((void*)w->engine->barrier, 0, kNamedBarriers * sizeof(Phases));
    memset(w->engine->group, 0, sizeof w->engine->group);
    w->engine->n_barriers = kNamedBarriers;
    w->engine->copies.clear();
}

// Shared memory becomes another block's: what is still on its way would land there.
void engine_end_block(Worker* w) {
    if (!w->engine || !w->engine->copies.size()) return;
    const Copy& copy = w->engine->copies[0];
    refuse(w, copy.thread, copy.pc, "the block ended while %zu copies were on their way, which nobody has waited for",
           w->engine->copies.size());
}

void free_engine(Worker* w) {
    if (!w->engine) return;
    w->engine->copies.free_memory();
    free(w->engine);
    w->engine = nullptr;
}

bool copies_arrive(Worker* w) {
    if (!w->engine) return false;
    Array<Copy>& copies = w->engine->copies;
    for (size_t k = 0; k < copies.size();) {
        int barrier = copies[k].barrier;
        if (barrier < 0 || !w->engine->barrier[barrier].waiting) {
            k++;
            continue;
        }
        deliver_all(w, [barrier](const Copy& copy) { return copy.barrier == barrier; });
        if (w->runnable) return true;
        k = 0;
    }
    return false;
}

bool describe_endless_phase(Worker* w) {
    Fault& f = w->fault;
    size_t length = 0;
    for (int number = 0; w->engine && number < w->engine->n_barriers; number++) {
        const Phases& barrier = w->engine->barrier[number];
        if (!barrier.waiting) continue;
        int t = first_waiting(w, number);
        uint64_t pc = w->thread[t].result;
        if (!length) f.thread = uint32_t(t), f.pc = pc;
        else if (!f.other_pc) f.other_thread = uint32_t(t), f.other_pc = pc;
        if (length >= sizeof f.text) continue;
        length += size_t(snprintf(f.text + length, sizeof f.text - length, "%s%u for %s, which lacks %u of %u arrivals",
                                  length ? "; " : "", barrier.waiting, name_of(w, barrier).text, barrier.missing,
                                  barrier.arrivals));
        if (barrier.bytes && length < sizeof f.text)
            length += size_t(snprintf(f.text + length, sizeof f.text - length, " and %u bytes", barrier.bytes));
    }
    return length;
}

}  // namespace emu

using namespace emu;

// ---------------- called by kernels: `pc` is where, in their own lines
EMU_API void emu_start_phases(uint64_t* place, uint32_t arrivals, const void* pc) {
    Worker* w = self;
    w->called_from = pc;
    uint32_t thread = current_thread(w);
    if (!in_shared(w, place, 8) || uintptr_t(place) % 8)
        refuse(w, thread, pc, "a barrier must lie in shared memory, at a multiple of 8 bytes; this one is at %p",
               (void*)place);
    CopyEngine& engine = engine_of(w);
    if (w->launch->full) checks_use_barrier(place, kWrite, pc);
    for (int k = kNamedBarriers; k < engine.n_barriers; k++)
        if (engine.barrier[k].place == place)
            refuse(w, thread, pc, "the barrier %s is started twice", name_of(w, place).text);
    if (arrivals == 0 || arrivals > kMostBytes)
        refuse(w, thread, pc, "the barrier %s is started for %u arrivals; it must be 1 to %u", name_of(w, place).text,
               arrivals, kMostBytes);
    if (engine.n_barriers == kMaxPhases)
        refuse(w, thread, pc, "a block starts more than %d barriers with phases; the emulation keeps no more",
               kMaxPhases - kNamedBarriers);
    *place = kStarted | uint64_t(engine.n_barriers);
    engine.barrier[engine.n_barriers++] = {place, arrivals, arrivals, 0, 0, 0, 0, uint16_t(thread), false};
}

EMU_API void emu_before_bulk_copies() {
    if (self->launch->full) checks_before_copies(self);
}

EMU_API void emu_show_barriers() {
    Worker* w = self;
    emu_before_bulk_copies();
    CopyEngine& engine = engine_of(w);
    for (int k = kNamedBarriers; k < engine.n_barriers; k++)
        if (engine.barrier[k].starter == current_thread(w)) engine.barrier[k].shown = true;
}

EMU_API void emu_arrive(uint64_t* place, uint32_t times, uint32_t bytes, const void* pc) {
    Worker* w = self;
    arrive(w, barrier_at(w, place, pc), times, bytes, pc);
}

EMU_API void emu_wait_phase(uint64_t* place, uint32_t phase, const void* pc) {
    Worker* w = self;
    if (phase > 1) refuse(w, current_thread(w), pc, "a wait for phase %u: phases are numbered 0 and 1 in turn", phase);
    wait(w, barrier_at(w, place, pc), phase, pc);
}

EMU_API void emu_copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* place, const void* pc) {
    Worker* w = self;
    check_copy(w, to, from, bytes, pc);
    Phases& barrier = barrier_at(w, place, pc);
    int number = int(&barrier - w->engine->barrier);
    if (!barrier.shown)
        refuse(w, current_thread(w), pc, "a copy is to tell %s, which show_barriers has not shown to the copy engine",
               name_of(w, barrier).text);
    if (w->launch->full) checks_copy(w, to, from, bytes, number, barrier.over + 1, pc);
    start_copy(w, {number, uint16_t(current_thread(w)), true, false, bytes, 0, (char*)to, (const char*)from, pc});
}

// ---------------- copies of async_copy.cuh
EMU_API void emu_copy_piece(void* to, const void* from, uint32_t bytes, const void* pc) {
    Worker* w = self;
    check_copy(w, to, from, bytes, pc);
    if (w->launch->full) checks_piece(w, to, from, bytes, pc);
    uint32_t thread = current_thread(w);
    uint32_t group = engine_of(w).group[thread];
    start_copy(w, {-1, uint16_t(thread), false, false, bytes, group, (char*)to, (const char*)from, pc});
}

EMU_API void emu_commit_pieces() {
    Worker* w = self;
    engine_of(w).group[current_thread(w)]++;
}

EMU_API void emu_wait_pieces(uint32_t newest) {
    Worker* w = self;
    CopyEngine& engine = engine_of(w);
    uint32_t thread = current_thread(w), group = engine.group[thread];
    size_t kept = 0;
    for (size_t k = 0; k < engine.copies.size(); k++) {
        Copy copy = engine.copies[k];
        if (copy.barrier < 0 && copy.thread == thread && copy.group + newest < group) perform(w, copy);
        else engine.copies[kept++] = copy;
    }
    engine.copies.resize(kept);
}

EMU_API void emu_arrive_with_pieces(uint64_t* place, const void* pc) {
    Worker* w = self;
    Phases& barrier = barrier_at(w, place, pc);
    CopyEngine& engine = engine_of(w);
    uint32_t thread = current_thread(w);
    int number = int(&barrier - engine.barrier);
    if (barrier.coming == barrier.missing) take_arrivals(w, barrier, 1, thread, pc);  // refuses
    for (size_t k = engine.copies.size(); k-- > 0;)
        if (engine.copies[k].barrier < 0 && engine.copies[k].thread == thread) engine.copies[k].barrier = number;
    barrier.coming++;
    if (w->launch->full) clocks_arrive(w, number);
    start_copy(w, {number, uint16_t(thread), false, true, 0, 0, nullptr, nullptr, pc});
}

// ---------------- named barriers: bar.sync and bar.arrive
EMU_API void emu_named_barrier(uint32_t number, uint32_t threads, bool waits, const void* pc) {
    Worker* w = self;
    w->called_from = pc;
    if (number >= kNamedBarriers || threads == 0 || threads % 32 || threads > kMaxThreads)
        refuse(w, current_thread(w), pc,
               "barrier %u of %u threads: there are barriers 0 to %d, of a multiple of 32 threads", number, threads,
               kNamedBarriers - 1);
    Phases& barrier = engine_of(w).barrier[number];
    if (barrier.missing == barrier.arrivals) barrier.arrivals = barrier.missing = threads;
    if (barrier.arrivals != threads)
        refuse(w, current_thread(w), pc, "barrier %u of %u threads, at which others wait for %u", number, threads,
               barrier.arrivals);
    uint32_t parity = barrier.over % 2;
    arrive(w, barrier, 1, 0, pc);
    if (waits) wait(w, barrier, parity, pc);
}
