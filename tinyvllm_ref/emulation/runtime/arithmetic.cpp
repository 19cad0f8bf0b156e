// Full mode: indices that leave an array of known size, and arithmetic that C++ leaves undefined and a card does
// not do as a CPU does it. The compiler calls these functions of its sanitizer's when it happens; their arguments
// are laid out as LLVM's and GCC's sanitizers have them.
#include <stdio.h>

#include "context.h"

namespace emu {
namespace {

struct Location {
    const char* file;
    uint32_t line, column;
};

struct Type {
    uint16_t kind;  // 0 integer, 1 floating
    uint16_t info;  // of an integer: 2 * log2(bits) + is signed; of a floating type: bits
    char name[1];
};

struct IndexData {
    Location where;
    const Type *array, *index;
};

struct ShiftData {
    Location where;
    const Type *value, *count;
};

int64_t integer(const Type* type, uint64_t bits) {
    int width = 1 << (type->info >> 1);
    if (type->kind != 0 || width > 64) return 0;
    return type->info & 1 ? int64_t(bits << (64 - width)) >> (64 - width) : int64_t(bits);
}

bool in_kernel(Worker* w) { return w && w->running && w->launch->full; }

// Once for each place in the code.
void warn_once(Worker* w, int32_t kind, const void* pc, int32_t count) {
    Busy busy(w);
    for (size_t k = 0; k < count_warnings(); k++) {
        const Warning& other = warning_number(k);
        if (other.kind == kind && other.pc == uint64_t(pc)) return;
    }
    Warning warning = {};
    warning.kind = kind;
    warning.pc = uint64_t(pc);
    warning.thread = current_thread(w);
    warning.block = w->block_number;
    warning.shared_slot = -1;
    warning.count = count;
    warn(warning);
}

}  // namespace
}  // namespace emu

using namespace emu;

// An index past an array's own size. Where the line indexes a __shared__ or __device__ variable, the check of the
// address says more.
EMU_API void __ubsan_handle_out_of_bounds(const IndexData* data, uint64_t index) {
    Worker* w = self;
    if (!in_kernel(w)) return;
    const Launch* launch = w->launch;
    if (data->where.line < launch->n_lines && launch->indexed_lines[data->where.line]) return;
    Fault& f = w->fault;
    f.problem = kArrayIndex;
    f.pc = uint64_t(__builtin_return_address(0));
    f.address = uint64_t(integer(data->index, index));
    f.count = int32_t(data->where.column);
    f.shared_slot = -1;
    snprintf(f.text, sizeof f.text, "%s", data->array->name);
    fail(kOutOfBounds);
}

EMU_API void __ubsan_handle_shift_out_of_bounds(const ShiftData* data, uint64_t, uint64_t count) {
    if (in_kernel(self)) warn_once(self, kShiftTooFar, __builtin_return_address(0), int32_t(integer(data->count, count)));
}

EMU_API void __ubsan_handle_float_cast_overflow(const void*, uint64_t) {
    if (in_kernel(self)) warn_once(self, kCastOutOfRange, __builtin_return_address(0), 0);
}
