// Which of two numbers is the largest one, with its index: the lowest index wins a tie, and a NaN counts as larger than
// any number, as NumPy has it.
struct Candidate {
    float value;
    int index;  // -1: there is none
};

__device__ __forceinline__ bool is_nan(float x) { return x != x; }

__device__ __forceinline__ Candidate better(Candidate a, Candidate b) {
    if (a.index < 0 || b.index < 0) return a.index < 0 ? b : a;
    bool equal = a.value == b.value || (is_nan(a.value) && is_nan(b.value));
    if (equal) return a.index < b.index ? a : b;
    return a.value > b.value || is_nan(a.value) ? a : b;
}
