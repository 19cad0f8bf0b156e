// Device memory of the emulation: see heap.h for the layout.
#include "heap.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "util.h"

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

namespace emu {

Heap heap;

namespace {

struct Range {
    char* start;
    size_t bytes;
};

Mutex lock;
constexpr size_t kMaxAllocations = size_t(1) << 20;
constexpr unsigned char kPoison = 0xFF;  // NaN as float32, float16 and bfloat16; -1 as an integer

char* next_free = nullptr;                         // addresses from here on were never used
Array<Range> free_ranges;                          // given back, with their gaps
Array<uint32_t> free_numbers;                      // of allocations that were freed
uint32_t used_numbers = 0;
size_t live_bytes = 0;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

size_t system_page() {
    static const size_t page = size_t(sysconf(_SC_PAGESIZE));
    return page;
}

// The gap behind an array is at least as long as the array (within limits): row strides that are wrong by a
// factor of two still fall into it.
size_t gap_behind(size_t bytes) {
    constexpr size_t least = size_t(1) << 20, most = size_t(1) << 30;
    return bytes < least ? least : bytes > most ? most : round_up(bytes, system_page());
}

bool reserve() {
    if (heap.lo) return true;
    for (size_t bytes = size_t(1) << 39; bytes >= size_t(1) << 32; bytes >>= 1) {
        void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) continue;
        void* pages = map_pages(bytes / kPage * sizeof(uint32_t));
        void* table = map_pages(kMaxAllocations * sizeof(Allocation));
        if (!pages || !table) {
            munmap(p, bytes);
            continue;
        }
        heap.lo = (char*)p;
        heap.hi = heap.lo + bytes;
        heap.pages = (uint32_t*)pages;
        heap.allocations = (Allocation*)table;
        next_free = heap.lo + system_page();
        return true;
    }
    return false;
}

void set_pages(const Allocation& a, uint32_t value) {
    size_t first = size_t(a.map_base - heap.lo) / kPage;
    for (size_t k = 0; k < a.map_size / kPage; k++) heap.pages[first + k] = value;
}

// Pages of 2 MiB, where the system has them: to get a large array in pages of 4 KiB takes several times as long.
void prefer_huge_pages(char* p, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr size_t worth_it = size_t(8) << 20;
    if (bytes >= worth_it) madvise(p, bytes, MADV_HUGEPAGE);
#else
    (void)p, (void)bytes;
#endif
}

// A range of `bytes` addresses: one of that size that was given back, else new, else a part of a larger one.
char* take_range(size_t bytes) {
    size_t larger = SIZE_MAX;
    for (size_t k = free_ranges.size(); k-- > 0;) {
        if (free_ranges[k].bytes == bytes) {
            char* p = free_ranges[k].start;
            free_ranges.remove_unordered(k);
            return p;
        }
        if (free_ranges[k].bytes > bytes) larger = k;
    }
    if (size_t(heap.hi - next_free) >= bytes) {
        char* p = next_free;
        next_free += bytes;
        return p;
    }
    if (larger == SIZE_MAX) return nullptr;
    Range& range = free_ranges[larger];
    range.bytes -= bytes;
    return range.start + range.bytes;
}

void drop_shadow(Allocation& a) {
    unmap_pages(a.cells, a.cells_bytes);
    unmap_pages(a.written, a.written_bytes);
    a.cells = nullptr;
    a.written = nullptr;
}

}  // namespace

void hold_heap(bool hold) {
    if (hold) lock.lock();
    else lock.unlock();
}

void set_granule(Allocation& a, unsigned item_bytes) {
    unsigned shift = item_bytes >= 4 ? 2 : item_bytes == 2 ? 1 : 0;
    if (shift == a.granule_shift) return;
    unmap_pages(a.cells, a.cells_bytes);  // records of another granularity say nothing
    a.cells = nullptr;
    a.granule_shift = shift;
}

void* map_pages(size_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : p;
}

void unmap_pages(void* p, size_t bytes) {
    if (p) munmap(p, bytes);
}

Allocation* nearest(const void* p) {
    Allocation* best = nullptr;
    size_t best_distance = SIZE_MAX;
    for (uint32_t k = 0; k < used_numbers; k++) {
        Allocation& a = heap.allocations[k];
        if (!a.live) continue;
        const char* q = (const char*)p;
        size_t d = q < a.base ? size_t(a.base - q) : q >= a.base + a.size ? size_t(q - (a.base + a.size)) : 0;
        if (d < best_distance) best_distance = d, best = &a;
    }
    return best;
}

}  // namespace emu

using namespace emu;

EMU_API void* emu_malloc(size_t nbytes) {
    Hold hold(lock);
    if (!reserve() || nbytes > size_t(heap.hi - heap.lo) / 2) return nullptr;
    size_t body = round_up(nbytes ? nbytes : 1, kAlignment);
    size_t map_size = round_up(body, system_page());
    size_t range = map_size + gap_behind(map_size);
    if (!free_numbers.size() && used_numbers == kMaxAllocations) return nullptr;
    char* p = take_range(range);
    if (!p) return nullptr;
    if (mprotect(p, map_size, PROT_READ | PROT_WRITE) != 0) {
        free_ranges.push({p, range});
        return nullptr;
    }
    prefer_huge_pages(p, map_size);
    uint32_t number;
    if (!free_numbers.size()) {
        number = used_numbers++;
    } else {
        number = free_numbers.back();
        free_numbers.pop();
    }
    Allocation& a = heap.allocations[number];
    a = Allocation{};
    a.map_base = p;
    a.map_size = map_size;
    a.base = p + map_size - body;  // the end, not the start, lies against the inaccessible page
    a.size = nbytes;
    a.live = true;
    set_pages(a, number + 1);
    memset(a.base, kPoison, nbytes);
    memset(p, kSlack, size_t(a.base - p));
    memset(a.base + nbytes, kSlack, body - nbytes);
    live_bytes += nbytes;
    return a.base;
}

EMU_API void emu_free(void* p) {
    Hold hold(lock);
    Allocation* a = find(p);
    if (!a || a->base != p || !a->live) return;
    set_pages(*a, 0);
    drop_shadow(*a);
    a->live = false;
    live_bytes -= a->size;
    madvise(a->map_base, a->map_size, MADV_DONTNEED);
    mprotect(a->map_base, a->map_size, PROT_NONE);
    free_ranges.push({a->map_base, a->map_size + gap_behind(a->map_size)});
    free_numbers.push(uint32_t(a - heap.allocations));
}

// 1 when [p, p + nbytes) lies inside one live allocation.
EMU_API int emu_is_live(const void* p, size_t nbytes) {
    Hold hold(lock);
    Allocation* a = find(p);
    return a && (const char*)p >= a->base && (const char*)p + nbytes <= a->base + a->size;
}

// The base and size of the allocation that holds p: 0 when there is none.
EMU_API int emu_allocation_of(const void* p, void** base, size_t* size) {
    Hold hold(lock);
    Allocation* a = find(p);
    if (!a) return 0;
    *base = a->base;
    *size = a->size;
    return 1;
}

EMU_API size_t emu_live_bytes() {
    Hold hold(lock);
    return live_bytes;
}

EMU_API void emu_mark_initialized(const void* p, size_t nbytes) {
    Hold hold(lock);
    Allocation* a = find(p);
    if (!a || a->initialized) return;
    if (p == a->base && nbytes >= a->size) {
        a->initialized = true;
        return;
    }
    if (!a->written) {
        a->written_bytes = round_up(a->size + 16, system_page());
        a->written = (uint8_t*)map_pages(a->written_bytes);
        if (!a->written) return;
    }
    size_t first = size_t((const char*)p - a->base);
    if (first >= a->size) return;
    if (nbytes > a->size - first) nbytes = a->size - first;
    memset(a->written + first, 1, nbytes);
}

EMU_API void emu_mark_uninitialized(const void* p, size_t nbytes) {
    Hold hold(lock);
    Allocation* a = find(p);
    if (!a) return;
    size_t first = size_t((const char*)p - a->base);
    if (first >= a->size) return;
    if (nbytes > a->size - first) nbytes = a->size - first;
    if (a->initialized && !a->written) {
        a->written_bytes = round_up(a->size + 16, system_page());
        a->written = (uint8_t*)map_pages(a->written_bytes);
        if (!a->written) return;
        memset(a->written, 1, a->size);
    }
    a->initialized = false;
    if (a->written) memset(a->written + first, 0, nbytes);
    memset(a->base + first, kPoison, nbytes);
}
