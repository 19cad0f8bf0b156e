// __device__ and __constant__ variables: each is an array of device memory, one for a source, in whatever mode it
// is compiled.
#include <string.h>

#include "context.h"
#include "heap.h"
#include "util.h"

extern "C" void* emu_malloc(size_t bytes);
extern "C" void emu_free(void* p);

namespace emu {

namespace {

struct Variable {
    uint64_t module;
    int number, is_constant;
    const char* name;
    void* place;
    size_t bytes, item;
};

Mutex lock;
Array<Variable> variables;
__thread uint64_t loading;  // the source whose library this thread loads

}  // namespace

void reset_variables_after_fork() { lock = Mutex(); }

}  // namespace emu

using namespace emu;

// Told before a library is loaded: its variables are those of the source with this hash.
EMU_API void emu_begin_module(uint64_t module) { loading = module; }

// Called while the library is loaded, for each of its variables in order.
EMU_API void* emu_variable(int number, const char* name, void* home, size_t bytes, size_t item, int is_constant) {
    Hold hold(lock);
    for (size_t k = 0; k < variables.size(); k++) {
        const Variable& v = variables[k];
        if (v.module == loading && v.number == number && v.bytes == bytes) return v.place;
    }
    char* place = (char*)emu_malloc(bytes);
    if (!place) return home;
    memcpy(place, home, bytes);
    Allocation* a = find(place);
    a->initialized = true;
    a->is_constant = is_constant != 0;
    set_granule(*a, unsigned(item));
    variables.push({loading, number, is_constant, name, place, bytes, item});
    return place;
}

// The k-th variable of a source; 0 when there are not as many.
EMU_API int emu_variable_info(uint64_t module, int k, const char** name, uint64_t* base, uint64_t* bytes,
                              uint64_t* item, int* is_constant) {
    Hold hold(lock);
    for (size_t j = 0; j < variables.size(); j++) {
        const Variable& v = variables[j];
        if (v.module != module || k-- > 0) continue;
        *name = v.name;
        *base = uint64_t(v.place);
        *bytes = v.bytes;
        *item = v.item;
        *is_constant = v.is_constant;
        return 1;
    }
    return 0;
}

// ---------------- malloc, free, new and delete in a kernel
namespace {
constexpr size_t kDeviceHeap = 8 << 20;  // bytes, what a card gives them unless it is told otherwise
size_t device_heap_used = 0;
}  // namespace

EMU_API void* emu_device_malloc(size_t bytes) {
    Busy busy(self);
    Hold hold(lock);
    if (bytes == 0 || bytes > kDeviceHeap - device_heap_used) return nullptr;
    void* p = emu_malloc(bytes);
    if (p) device_heap_used += bytes;
    return p;
}

EMU_API void emu_device_free(void* p) {
    if (!p) return;
    Busy busy(self);
    Hold hold(lock);
    Allocation* a = find(p);
    if (!a || a->base != p) return;
    device_heap_used -= a->size;
    emu_free(p);
}
