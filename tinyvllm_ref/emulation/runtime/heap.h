// Device memory: one reserved range of addresses, from which every allocation is carved.
//
// One range makes "is this address device memory?" two comparisons, and a table with an entry a page answers
// "which allocation?" with one load. Allocations never share a page, end against inaccessible memory, and lie
// far apart, so that an index which runs off one array does not land in another.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace emu {

constexpr size_t kPage = 4096;        // granule of the page table; the system's page may be larger
constexpr size_t kAlignment = 512;    // what cudaMalloc gives

constexpr unsigned char kSlack = 0xFD;  // fills the accessible bytes beside an array, which no array owns

struct Cell;

struct Allocation {
    char* base = nullptr;             // 512-byte aligned
    size_t size = 0;                  // as asked for: the exact bound of full mode
    char* map_base = nullptr;         // first accessible page
    size_t map_size = 0;
    bool live = false;
    bool is_constant = false;         // a __constant__ variable: a card reads it through a cache of its own
    bool initialized = false;         // every byte has been written: `written` need not be looked at
    uint8_t* written = nullptr;       // one byte a byte, 1 where written (full mode)
    Cell* cells = nullptr;            // one record a granule for race checks (full mode)
    unsigned granule_shift = 2;       // log2 of the bytes that one Cell stands for
    size_t written_bytes = 0;         // sizes of those two maps, to give them back
    size_t cells_bytes = 0;
};

struct Heap {
    char* lo = nullptr;
    char* hi = nullptr;
    uint32_t* pages = nullptr;        // page number -> allocation number + 1, 0 where nothing is
    Allocation* allocations = nullptr;
};
extern Heap heap;

inline bool in_heap(const void* p) {
    return size_t((const char*)p - heap.lo) < size_t(heap.hi - heap.lo);
}

// The live allocation whose pages hold p, or null.
inline Allocation* find(const void* p) {
    if (!in_heap(p)) return nullptr;
    uint32_t k = heap.pages[((const char*)p - heap.lo) / kPage];
    return k ? &heap.allocations[k - 1] : nullptr;
}

// The live allocation nearest to p (for reports only: looks at all of them).
Allocation* nearest(const void* p);

// One record of checks.cpp stands for an item of this size (1, 2, or 4 bytes at most).
void set_granule(Allocation& a, unsigned item_bytes);

void hold_heap(bool hold);            // while the process forks

void* map_pages(size_t bytes);        // zeroed memory that costs nothing until it is touched; null if refused
void unmap_pages(void* p, size_t bytes);

}  // namespace emu
