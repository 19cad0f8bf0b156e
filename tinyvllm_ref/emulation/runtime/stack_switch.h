// Switching from one stack to another: a few instructions that no compiler emits from C++.
#pragma once
#include <string.h>

// emu_switch(&save, load): put the callee-saved registers on this stack, its pointer into `save`, and go on
// where the stack `load` was left.
extern "C" void emu_switch(void** save, void* load);
#if defined(__APPLE__)
#define SYMBOL "_emu_switch"
#define HIDDEN ""
#else
#define SYMBOL "emu_switch"
#define HIDDEN ".hidden emu_switch\n.type emu_switch,%function\n"
#endif
#if defined(__x86_64__)
asm(".text\n.globl " SYMBOL "\n" HIDDEN SYMBOL R"(:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
static void* first_frame(char* top, void (*entry)()) {
    void** sp = (void**)top;
    *--sp = nullptr;  // the return address of `entry`, which never returns
    *--sp = (void*)entry;
    for (int k = 0; k < 6; k++) *--sp = nullptr;
    return sp;
}
#elif defined(__aarch64__)
asm(".text\n.globl " SYMBOL "\n" HIDDEN SYMBOL R"(:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
static void* first_frame(char* top, void (*entry)()) {
    void** sp = (void**)(top - 160);
    memset(sp, 0, 160);
    sp[11] = (void*)entry;  // x30
    return sp;
}
#else
#error "the emulation runs on x86-64 and arm64 processors"
#endif
