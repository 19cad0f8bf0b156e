// What a decode step leaves for the next one, without the host: the drawn tokens are its inputs, and every context is
// one token longer.
//
// Launch: grid (any), any one-dimensional block. A thread takes a request.
// Reads chosen (B,) int32. Writes ids (B,) int32, and adds one to context_lens and steps (B,) int32, except where a
// context is 0: a row that pads the batch.
extern "C" __global__ void advance(const int* chosen, int* ids, int* context_lens, int* steps, int requests) {
    int b = blockIdx.x * blockDim.x + threadIdx.x;
    if (b >= requests || context_lens[b] == 0) return;
    ids[b] = chosen[b];
    context_lens[b] += 1;
    steps[b] += 1;
}
