// The emulation's <cuda_fp16.h>: __half (IEEE binary16) and __half2, under NVIDIA's names.
#pragma once
#ifndef EMU_CUDA_SHIM
#include "../cuda_shim.h"
#endif
#pragma GCC system_header
#include "emu_small_float.h"

#define EMU_TYPE __half
#define EMU_PAIR __half2
#define EMU_OTHER __nv_bfloat16
#define EMU_RAW __half_raw
#define EMU_RAW_PAIR __half2_raw
#define EMU_NAME half
#define EMU_FRACTION 10
#define EMU_BIAS 15
#include "emu_small_float_ops.h"
#undef EMU_TYPE
#undef EMU_PAIR
#undef EMU_OTHER
#undef EMU_RAW
#undef EMU_RAW_PAIR
#undef EMU_NAME
#undef EMU_FRACTION
#undef EMU_BIAS

typedef __half half;
typedef __half2 half2;
typedef __half nv_half;
typedef __half2 nv_half2;
typedef __half __nv_half;
typedef __half2 __nv_half2;
