// Finds inf and NaN in gradients, unscales them or takes their norm: one launch that reads each
// gradient once. No memory has to be cleared before it, and the norm has the same bits on every
// run.
#include <c10/cuda/CUDACachingAllocator.h>

#include "multi_tensor.cuh"

namespace mixprec::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kVecsPerThread = kChunkSize / (kThreads * kVecSize);

struct Workspace {  // zeros before and after a check
  unsigned int blocks_done;
  int found_inf;
};
static_assert(sizeof(Workspace) == kCheckWorkspaceInts * sizeof(int));

struct Arguments {
  const float* grad_scale;  // null: not scaled
  float* found_inf;
  float* norm;      // null: none wanted
  float* partials;  // one a chunk: its sum of squares, or its maximum
  Workspace* workspace;
  uint32_t chunks_before;  // of earlier launches
  uint32_t total_chunks;   // of all launches
};

// The block's combined value in thread 0, always in the same order. kWarps values of shared memory.
template <Norm kNorm, typename T>
__device__ T reduce_block(T x, T* shared) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    x = combine<kNorm>(x, __shfl_down_sync(0xFFFFFFFFu, x, offset));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kWarps; ++warp) x = combine<kNorm>(x, shared[warp]);
  }
  return x;
}

template <bool kFull, bool kUnscale, Norm kNorm, typename Grad>
__device__ void check_chunk(Grad* grad, const Chunk& chunk, const float* grad_scale, bool& bad,
                            float& norm) {
  grad += chunk.begin;
  float grads[kVecsPerThread][kVecSize];
#pragma unroll
  for (int v = 0; v < kVecsPerThread; ++v) {
    load<kFull>(grads[v], grad, (v * kThreads + threadIdx.x) * kVecSize, chunk.valid_items);
  }
  const float inv_scale = grad_scale ? inverse(*grad_scale) : 1.0f;
#pragma unroll
  for (int v = 0; v < kVecsPerThread; ++v) {
#pragma unroll
    for (int k = 0; k < kVecSize; ++k) {
      float value = grads[v][k] * inv_scale;
      if constexpr (kUnscale) value = static_cast<float>(static_cast<Grad>(value));
      bad |= !is_finite(value);
      norm = combine<kNorm>(norm, norm_term<kNorm>(value));
      grads[v][k] = value;
    }
    if constexpr (kUnscale) {
      store<kFull>(grad, grads[v], (v * kThreads + threadIdx.x) * kVecSize, chunk.valid_items);
    }
  }
}

// What the last block of all does: the others' results are complete and visible to it.
template <Norm kNorm>
__device__ void finish(const Arguments& a) {
  __shared__ double shared[kWarps];
  double total = 0;
  if constexpr (kNorm != Norm::kNone) {
    for (uint32_t i = threadIdx.x; i < a.total_chunks; i += kThreads) {
      total = combine<kNorm>(total, static_cast<double>(__ldcg(a.partials + i)));
    }
    total = reduce_block<kNorm>(total, shared);
  }
  if (threadIdx.x != 0) return;
  bool found_inf = atomicExch(&a.workspace->found_inf, 0) != 0;
  if constexpr (kNorm != Norm::kNone) *a.norm = finish_norm<kNorm>(total, found_inf);
  *a.found_inf = found_inf ? 1.0f : 0.0f;
}

template <bool kUnscale, Norm kNorm, typename List>
__global__ void __launch_bounds__(kThreads)
    check_kernel(const __grid_constant__ List list, const Arguments a) {
  const Chunk chunk = list.find(blockIdx.x);
  const bool full = list.aligned[chunk.entry] && chunk.valid_items == kChunkSize;
  bool bad = false;
  float norm = 0;
  dispatch_grad(list.addresses[chunk.entry][0], list.dtypes[chunk.entry], [&](auto* grad) {
    full ? check_chunk<true, kUnscale, kNorm>(grad, chunk, a.grad_scale, bad, norm)
         : check_chunk<false, kUnscale, kNorm>(grad, chunk, a.grad_scale, bad, norm);
  });

  __shared__ float shared[kWarps];
  bad = __syncthreads_or(bad);
  if constexpr (kNorm != Norm::kNone) norm = reduce_block<kNorm>(norm, shared);
  if (threadIdx.x == 0) {
    if constexpr (kNorm != Norm::kNone) a.partials[a.chunks_before + blockIdx.x] = norm;
    if (bad) atomicExch(&a.workspace->found_inf, 1);
  }
  if (is_last_block(&a.workspace->blocks_done, a.total_chunks)) finish<kNorm>(a);
}

template <bool kUnscale, Norm kNorm>
void launch_check(const std::vector<ListEntry<1>>& entries, Arguments arguments,
                  cudaStream_t stream) {
  launch_lists(entries, [&](const auto& list, uint32_t chunks_before) {
    arguments.chunks_before = chunks_before;
    check_kernel<kUnscale, kNorm><<<list.num_chunks, kThreads, 0, stream>>>(list, arguments);
  });
}

}  // namespace

void check(const CheckArguments& c) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  std::vector<ListEntry<1>> entries;
  entries.reserve(c.grads.size());
  for (const Data& grad : c.grads) {
    if (grad.numel == 0) continue;
    entries.push_back({{grad.address}, grad.numel, static_cast<int>(grad.dtype), is_aligned(grad)});
  }
  if (entries.empty()) {
    C10_CUDA_CHECK(cudaMemsetAsync(c.found_inf, 0, sizeof(float), stream));
    if (c.norm) C10_CUDA_CHECK(cudaMemsetAsync(c.norm, 0, sizeof(float), stream));
    return;
  }

  const uint32_t total_chunks = count_chunks(entries);
  c10::DataPtr partials;  // goes back to the allocator of this stream, which the kernel runs on
  if (c.norm_type != Norm::kNone) {
    partials = c10::cuda::CUDACachingAllocator::get()->allocate(total_chunks * sizeof(float));
  }
  const Arguments arguments{c.grad_scale,
                            c.found_inf,
                            c.norm,
                            static_cast<float*>(partials.get()),
                            static_cast<Workspace*>(c.workspace),
                            0,
                            total_chunks};
  if (c.unscale) return launch_check<true, Norm::kNone>(entries, arguments, stream);
  switch (c.norm_type) {
    case Norm::kNone:
      return launch_check<false, Norm::kNone>(entries, arguments, stream);
    case Norm::kL2:
      return launch_check<false, Norm::kL2>(entries, arguments, stream);
    case Norm::kInf:
      return launch_check<false, Norm::kInf>(entries, arguments, stream);
  }
}

}  // namespace mixprec::cuda
