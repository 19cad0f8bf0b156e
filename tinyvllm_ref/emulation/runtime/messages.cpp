// What a kernel tells: faults, warnings, printf, assert.
#include <stdarg.h>
#include <stdio.h>

#include "context.h"

namespace emu {

namespace {

constexpr size_t kMaxWarnings = 1000;
constexpr size_t kPrintLimit = 1 << 20;  // the size of the card's own buffer for printf

Array<Warning> warnings;
Array<char> printed;
Mutex print_lock;

}  // namespace

void warn(const Warning& warning) {
    if (warnings.size() < kMaxWarnings) warnings.push(warning);
}

size_t count_warnings() { return warnings.size(); }

const Warning& warning_number(size_t k) { return warnings[k]; }

void clear_messages() {
    warnings.clear();
    printed.clear();
}

void reset_messages_after_fork() {
    print_lock = Mutex();
    warnings = Array<Warning>();
    printed = Array<char>();
}

void fail(FaultKind kind) {
    Worker* w = self;
    Fault& f = w->fault;
    f.kind = kind;
    f.block = w->block_number;
    if (kind != kBarrierDivergence) f.thread = current_thread(w);
    siglongjmp(w->escape, 1);
}

}  // namespace emu

using namespace emu;

EMU_API void emu_assert_failed(const char* expression, int line) {
    Worker* w = self;
    snprintf(w->fault.text, sizeof w->fault.text, "%s", expression);
    w->fault.line = line;
    fail(kAssertion);
}

EMU_API void emu_trap(int line) {
    self->fault.line = line;
    fail(kTrap);
}

EMU_API int emu_printf(const char* format, ...) {
    char text[4096];
    Busy busy(self);
    va_list list;
    va_start(list, format);
    int n = vsnprintf(text, sizeof text, format, list);
    va_end(list);
    Hold hold(print_lock);
    for (int k = 0; k < n && k < int(sizeof text) - 1 && printed.size() < kPrintLimit; k++) printed.push(text[k]);
    return n;
}

EMU_API int emu_warning(int k, Warning* out) {
    if (size_t(k) >= warnings.size()) return 0;
    *out = warnings[k];
    return 1;
}

EMU_API size_t emu_printed(const char** text) {
    *text = printed.size() ? &printed[0] : "";
    return printed.size();
}
