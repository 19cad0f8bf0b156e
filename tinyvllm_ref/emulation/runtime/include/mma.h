#error "WMMA (mma.h) needs tensor cores: it is not emulated. Put it behind #ifdef __CUDA_ARCH__"
