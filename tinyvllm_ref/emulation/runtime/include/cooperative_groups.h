// Cooperative groups, as far as one block goes: the block itself and tiles of a warp.
#pragma once

namespace cooperative_groups {

class thread_block {
  public:
    void sync() const { __syncthreads(); }
    unsigned thread_rank() const { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
    unsigned size() const { return blockDim.x * blockDim.y * blockDim.z; }
    unsigned num_threads() const { return size(); }
    dim3 group_index() const { return dim3(blockIdx); }
    dim3 thread_index() const { return dim3(threadIdx); }
    dim3 group_dim() const { return dim3(blockDim); }
};
EMU_INLINE thread_block this_thread_block() { return thread_block(); }

// Size consecutive threads of a warp.
template <unsigned Size, class Parent = thread_block>
class thread_block_tile {
    static_assert(Size && Size <= 32 && (Size & (Size - 1)) == 0, "a tile has 1, 2, 4, 8, 16 or 32 threads");

  public:
    explicit thread_block_tile(unsigned rank) : rank_(rank) {}
    unsigned thread_rank() const { return rank_ % Size; }
    static constexpr unsigned size() { return Size; }
    static constexpr unsigned num_threads() { return Size; }
    unsigned meta_group_rank() const { return rank_ / Size; }
    unsigned meta_group_size() const { return (this_thread_block().size() + Size - 1) / Size; }
    void sync(EMU_LINE) const { __syncwarp(mask(), line); }
    template <class T> T shfl(T v, int rank, EMU_LINE) const { return __shfl_sync(mask(), v, rank, Size, line); }
    template <class T> T shfl_up(T v, unsigned n, EMU_LINE) const { return __shfl_up_sync(mask(), v, n, Size, line); }
    template <class T> T shfl_down(T v, unsigned n, EMU_LINE) const {
        return __shfl_down_sync(mask(), v, n, Size, line);
    }
    template <class T> T shfl_xor(T v, unsigned n, EMU_LINE) const {
        return __shfl_xor_sync(mask(), v, (int)n, Size, line);
    }
    int any(int p, EMU_LINE) const { return __any_sync(mask(), p, line); }
    int all(int p, EMU_LINE) const { return __all_sync(mask(), p, line); }
    unsigned ballot(int p, EMU_LINE) const { return (__ballot_sync(mask(), p, line) >> shift()) & lanes(); }

  private:
    static constexpr unsigned lanes() { return Size == 32 ? 0xffffffffu : (1u << Size % 32) - 1; }
    unsigned shift() const { return rank_ % 32 / Size * Size; }
    unsigned mask() const { return lanes() << shift(); }
    unsigned rank_;
};
template <unsigned Size>
EMU_INLINE thread_block_tile<Size> tiled_partition(const thread_block& block) {
    return thread_block_tile<Size>(block.thread_rank());
}
template <unsigned Size, unsigned Outer>
EMU_INLINE thread_block_tile<Size> tiled_partition(const thread_block_tile<Outer>& tile) {
    static_assert(Size <= Outer, "a tile is cut into smaller ones");
    return thread_block_tile<Size>(this_thread_block().thread_rank());
}
template <class Group>
EMU_INLINE void sync(const Group& group) { group.sync(); }

// What spans blocks or clusters, or forms while threads diverge, needs a card.
template <class T>
struct emu_needs_a_card {
    static_assert(sizeof(T) == 0, "the emulation has thread_block and tiled_partition of cooperative groups only");
};
template <class T = void> EMU_INLINE auto this_grid() -> emu_needs_a_card<T*> { return {}; }
template <class T = void> EMU_INLINE auto this_cluster() -> emu_needs_a_card<T*> { return {}; }
template <class T = void> EMU_INLINE auto coalesced_threads() -> emu_needs_a_card<T*> { return {}; }

}  // namespace cooperative_groups
