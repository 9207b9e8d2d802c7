// Records which gradients held inf or NaN: one launch after the check. Where the step is fine, its
// few blocks read found_inf and are done; else they read each gradient once.
#include "multi_tensor.cuh"

namespace mixprec::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVecsPerThread = kChunkSize / (kThreads * kVecSize);
constexpr uint32_t kMaxBlocks = 512;  // at once on a large GPU

enum Addresses { kGrad, kRecord, kNumAddresses };

struct Arguments {
  OverflowHeader* header;
  const float* found_inf;
  const float* grad_scale;  // null: not scaled
  bool unscaled;
  bool ends_step;
};

template <bool kFull, typename Grad>
__device__ void count_chunk(const Grad* grad, const Chunk& chunk, float inv_scale,
                            OverflowCounts<float>& counts) {
  grad += chunk.begin;
#pragma unroll
  for (int v = 0; v < kVecsPerThread; ++v) {
    float grads[kVecSize];
    load<kFull>(grads, grad, (v * kThreads + threadIdx.x) * kVecSize, chunk.valid_items);
#pragma unroll
    for (int k = 0; k < kVecSize; ++k) count_overflow(counts, grads[k], inv_scale);
  }
}

template <typename List>
__device__ OverflowRecord* record_of(const List& list, int entry) {
  return static_cast<OverflowRecord*>(list.addresses[entry][kRecord]);
}

// What the last block of a launch does: the others' counts are complete and visible to it.
template <typename List>
__device__ void finish(const List& list, const Arguments& a) {
  const unsigned long long step = a.header->steps + 1;
  for (int entry = threadIdx.x; entry < list.size; entry += kThreads) {
    OverflowRecord* record = record_of(list, entry);
    const OverflowTotals totals{atomicExch(&record->now.inf, 0ull),
                                atomicExch(&record->now.nan, 0ull),
                                atomicExch(&record->now.largest, 0ull)};
    keep_overflow(*record, totals, step);
  }
  __syncthreads();  // every thread has read the number of steps
  if (threadIdx.x == 0 && a.ends_step) a.header->steps = step;
}

template <typename List>
__global__ void __launch_bounds__(kThreads)
    record_overflow_kernel(const __grid_constant__ List list, const Arguments a) {
  if (*a.found_inf == 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && a.ends_step) ++a.header->steps;
    return;
  }
  const float scale = a.grad_scale ? *a.grad_scale : 1.0f;
  const float inv_scale = a.unscaled ? 1.0f : inverse(scale);
  __shared__ OverflowCounts<unsigned> shared;  // largest: a float's bits
  for (uint32_t i = blockIdx.x; i < list.num_chunks; i += gridDim.x) {
    const Chunk chunk = list.find(i);
    const bool full = list.aligned[chunk.entry] && chunk.valid_items == kChunkSize;
    OverflowCounts<float> counts{};
    dispatch_grad(list.addresses[chunk.entry][kGrad], list.dtypes[chunk.entry], [&](auto* grad) {
      full ? count_chunk<true>(grad, chunk, inv_scale, counts)
           : count_chunk<false>(grad, chunk, inv_scale, counts);
    });
    if (threadIdx.x == 0) shared = {};
    __syncthreads();
    if (counts.inf > 0) atomicAdd(&shared.inf, counts.inf);
    if (counts.nan > 0) atomicAdd(&shared.nan, counts.nan);
    atomicMax(&shared.largest, bit_cast<unsigned>(counts.largest));
    __syncthreads();
    if (threadIdx.x == 0) {
      OverflowTotals& now = record_of(list, chunk.entry)->now;
      const double largest = bit_cast<float>(shared.largest) * (a.unscaled ? double{scale} : 1.0);
      if (shared.inf > 0) atomicAdd(&now.inf, static_cast<unsigned long long>(shared.inf));
      if (shared.nan > 0) atomicAdd(&now.nan, static_cast<unsigned long long>(shared.nan));
      atomicMax(&now.largest, bit_cast<unsigned long long>(largest));
    }
  }
  if (is_last_block(&a.header->blocks_done, gridDim.x)) finish(list, a);
}

}  // namespace

void record_overflow(const OverflowArguments& o) {
  std::vector<ListEntry<kNumAddresses>> entries;
  entries.reserve(o.grads.size());
  for (size_t i = 0; i < o.grads.size(); ++i) {
    const Data& grad = o.grads[i];
    if (grad.numel == 0) continue;
    entries.push_back(
        {{grad.address, o.records[i]}, grad.numel, static_cast<int>(grad.dtype), is_aligned(grad)});
  }
  const uint32_t total_chunks = count_chunks(entries);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  launch_lists(entries, [&](const auto& list, uint32_t chunks_before) {
    const bool ends_step = o.ends_step && chunks_before + list.num_chunks == total_chunks;
    const Arguments arguments{o.header, o.found_inf, o.grad_scale, o.unscaled, ends_step};
    const uint32_t blocks = std::min(list.num_chunks, kMaxBlocks);
    record_overflow_kernel<<<blocks, kThreads, 0, stream>>>(list, arguments);
  });
}

}  // namespace mixprec::cuda
