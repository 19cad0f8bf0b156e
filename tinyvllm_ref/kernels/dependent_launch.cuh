// Programmatic dependent launch (compute capability 9.0 and above): a kernel may come onto the card while the one
// before it in the stream still runs. tinyvllm_ref/dependent_launch.py asks for it; launched in the ordinary way
// a kernel finds nothing to wait for, and both functions do nothing.

// Until every kernel before this one is done and what it wrote can be seen. A kernel calls it before it reads what
// others wrote and before it writes anything, in every thread that does so; until then it may only read what
// never changes, such as weights.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may come onto the card once every block of this one has called this. It still waits, as above,
// until this one is done.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
