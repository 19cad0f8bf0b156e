// Programmatic dependent launch (compute capability 9.0 and above): a kernel may come onto the card while the one
// before it in the stream still runs. tinyvllm_ref/dependent_launch.py asks for it; launched in the ordinary way
// a kernel finds nothing to wait for, and both functions do nothing.

// When does a kernel begin that is launched so? When every block of the one before it has called let_next_start() or has
// ended. If those blocks called it after wait_for_previous(), everything before that kernel is done by then. If they
// called it before, all that is known is that they have begun, and the same question is asked of the kernel before:
// a chain of kernels that let each other start at once may all be on the card together. So
//
//   what was written before kernel K may be read without waiting by every kernel behind K, if K was launched in the
//   ordinary way, or calls let_next_start() after wait_for_previous() in every block that calls it.
//
// Such reads go to the L2 cache (load_fresh, cp.async): there is no acquire before them that would rid an L1 cache of
// what it may still hold of an address. A block that ends counts as one that has called let_next_start(), so it may end
// without waiting only if others of its launch wait: else the launch could be done before the one before it, and who
// waits for this one would not wait for that.

// Until every kernel before this one is done and what it wrote can be seen. A kernel calls it before it writes anything,
// and before it reads what others wrote, but for what the rule above allows and what never changes, such as weights; in
// every thread that does so, and in at least one block of each launch.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may come onto the card once every block of this one has called this, or has ended. It still waits, as
// above, until this one is done. The sooner it is called the more the next one can do ahead; and the less it may read.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
