// A list of copies in one launch: for the few inputs of a graph the host is done in a fraction of
// the time that a cudaMemcpyAsync each would take.
#include "multi_tensor.cuh"

namespace mixprec::cuda {
namespace {

constexpr int kThreads = 512;
constexpr size_t kListBytes = 512;  // 16 copies; the less a launch takes, the sooner it is made

enum Addresses { kTo, kFrom, kNumAddresses };
// The dtypes of an entry: words of 4 bytes, or single bytes, plus the kind of copy.
enum Dtypes { kWords = 0, kSingle = 1, kThrough = 2, kAddress = 4 };

template <bool kFull, typename T>
__device__ void copy_chunk(T* to, const T* from, const Chunk& chunk) {
  to += chunk.begin;
  from += chunk.begin;
#pragma unroll
  for (int v = 0; v < kChunkSize / (kThreads * kVecSize); ++v) {
    const int i = (v * kThreads + threadIdx.x) * kVecSize;
    T items[kVecSize];
    load<kFull>(items, from, i, chunk.valid_items);
    store<kFull>(to, items, i, chunk.valid_items);
  }
}

template <typename T>
__device__ void copy_chunk(void* to, const void* from, const Chunk& chunk, bool full) {
  full ? copy_chunk<true>(static_cast<T*>(to), static_cast<const T*>(from), chunk)
       : copy_chunk<false>(static_cast<T*>(to), static_cast<const T*>(from), chunk);
}

template <typename List>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ List list) {
  const Chunk chunk = list.find(blockIdx.x);
  void* to = list.addresses[chunk.entry][kTo];
  void* from = list.addresses[chunk.entry][kFrom];
  const int dtypes = list.dtypes[chunk.entry];
  if (dtypes & kAddress) {
    if (threadIdx.x == 0) *static_cast<void**>(to) = from;
    return;
  }
  if (dtypes & kThrough) to = *static_cast<void**>(to);
  const bool full = list.aligned[chunk.entry] && chunk.valid_items == kChunkSize;
  (dtypes & kSingle) ? copy_chunk<uint8_t>(to, from, chunk, full)
                     : copy_chunk<int32_t>(to, from, chunk, full);
}

ListEntry<kNumAddresses> entry_of(const CopyData& data) {
  void* from = const_cast<void*>(data.from);
  if (data.kind == CopyKind::kAddress) return {{data.to, from}, 1, kAddress, false};
  const bool through = data.kind == CopyKind::kThrough;  // to memory of an allocation's alignment
  const auto place = reinterpret_cast<uintptr_t>(from) |
                     (through ? uintptr_t{0} : reinterpret_cast<uintptr_t>(data.to));
  const bool words = (place | data.bytes) % sizeof(int32_t) == 0;
  const int size = words ? sizeof(int32_t) : 1;
  return {{data.to, from},
          data.bytes / size,
          (words ? kWords : kSingle) | (through ? kThrough : 0),
          place % (kVecSize * size) == 0};
}

}  // namespace

void copy(const std::vector<CopyData>& copies) {
  std::vector<ListEntry<kNumAddresses>> entries;
  entries.reserve(copies.size());
  for (const CopyData& data : copies) {
    if (data.bytes > 0) entries.push_back(entry_of(data));
  }
  count_chunks(entries);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  launch_lists_of<kNumAddresses, kListBytes>(entries, [&](const auto& list, uint32_t) {
    copy_kernel<<<list.num_chunks, kThreads, 0, stream>>>(list);
  });
}

}  // namespace mixprec::cuda
