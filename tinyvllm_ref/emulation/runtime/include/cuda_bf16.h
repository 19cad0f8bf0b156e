// The emulation's <cuda_bf16.h>: __nv_bfloat16 (the upper half of a float) and __nv_bfloat162, under
// NVIDIA's names. As there, cuda_fp16.h comes with it.
#pragma once
#include "cuda_fp16.h"
#pragma GCC system_header

#define EMU_TYPE __nv_bfloat16
#define EMU_PAIR __nv_bfloat162
#define EMU_OTHER __half
#define EMU_RAW __nv_bfloat16_raw
#define EMU_RAW_PAIR __nv_bfloat162_raw
#define EMU_NAME bfloat16
#define EMU_FRACTION 7
#define EMU_BIAS 127
#include "emu_small_float_ops.h"
#undef EMU_TYPE
#undef EMU_PAIR
#undef EMU_OTHER
#undef EMU_RAW
#undef EMU_RAW_PAIR
#undef EMU_NAME
#undef EMU_FRACTION
#undef EMU_BIAS

inline __half::__half(__nv_bfloat16 other) : __half((float)other) {}
inline __nv_bfloat16::__nv_bfloat16(__half other) : __nv_bfloat16((float)other) {}

typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
