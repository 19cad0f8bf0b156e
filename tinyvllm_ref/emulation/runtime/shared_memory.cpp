// __shared__ variables: places in a block's own storage.
//
// In fast mode they lie one behind another. In full mode each has a stretch of addresses to itself, so that an
// index which runs off one does not land in the next.
#include "context.h"

namespace emu {

// Bytes behind a variable that are poisoned with it: what a read off its end finds without the checks is then wrong
// every time, and not zero in a block whose storage is new.
constexpr size_t kBeyond = 1024;

SharedDeclaration dynamic_shared = {"", 0, 16, 1, 0, 0};

// A block's variables get their places as its first thread meets their declarations.
int place_in_block(Worker* w, SharedDeclaration* d) {
    for (int k = 0; k < w->n_used; k++)
        if (w->shared_of[k] == d) return k;
    if (w->n_used == kMaxShared) {
        w->fault.bytes = kMaxShared;
        w->fault.problem = kTooManyVariables;
        fail(kTooMuchShared);
    }
    int slot = w->n_used++;
    w->shared_of[slot] = d;
    size_t start = (w->shared_used + d->alignment - 1) / d->alignment * d->alignment;
    w->shared_used = start + d->bytes;
    if (d != &dynamic_shared) w->static_shared_used += d->bytes;
    if (w->static_shared_used > kStaticSharedLimit || w->shared_used > w->launch->shared_limit) {
        w->fault.bytes = w->static_shared_used;
        w->fault.problem = w->static_shared_used > kStaticSharedLimit ? kStaticPart : kWithDynamicPart;
        fail(kTooMuchShared);
    }
    char* base = w->shared + start;
    if (w->launch->full) base = w->shared + kSharedStride * (slot + 1) + kSharedStride / 4;
    w->shared_at[slot] = base;
    memset(base, 0xFF, d->bytes + kBeyond);
    if (w->launch->full) {
        Allocation& region = w->shared_region[slot];
        region.base = base;
        region.size = d->bytes;
        checks_shared_region(w, slot, d->item);
    }
    return slot;
}

}  // namespace emu

using namespace emu;

EMU_API void* emu_shared(SharedDeclaration* d) {
    Worker* w = self;
    int guess = d->slot;  // where it was in the last block that used it
    if (guess < w->n_used && w->shared_of[guess] == d) return w->shared_at[guess];
    int slot = place_in_block(w, d);
    d->slot = slot;
    return w->shared_at[slot];
}

EMU_API void* emu_shared_dynamic(const char* name, size_t item) {
    Worker* w = self;
    if (w->launch->dynamic_bytes == 0) return w->shared + kSharedStride / 2;  // any access is out of bounds
    if (dynamic_shared.item != item || dynamic_shared.name != name) {
        dynamic_shared.name = name;
        dynamic_shared.item = item;
        if (w->launch->full) checks_shared_region(w, 0, item);
    }
    return w->shared_at[0];
}
