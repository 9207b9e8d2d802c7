// The engine: one launch walks a list of tensors, one block a chunk. The list travels in the
// kernel's parameters, so a step needs no copy to the device and a captured graph holds it by
// value.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../ops.h"

namespace mixprec::cuda {

constexpr int kChunkSize = 4096;  // elements of one block
constexpr int kVecSize = 4;       // elements of one access: 16 bytes of fp32, 8 of a half type

// All that a launch may take: 4 KB, and 32 KB from CUDA 12.1 on. What an op adds to the list
// (hyperparameters, a few pointers) fits the 256 bytes left over.
constexpr size_t kSmallListBytes = 4096 - 256;
#if CUDART_VERSION >= 12010
constexpr size_t kLargeListBytes = 32764 - 256;
#else
constexpr size_t kLargeListBytes = kSmallListBytes;
#endif

template <int kAddresses>
struct ListEntry {  // tensors that are walked together: the same elements of each
  void* addresses[kAddresses];
  int64_t numel;
  int dtypes;    // the op's own code for the combination of dtypes
  bool aligned;  // every address allows accesses of kVecSize elements

  uint32_t num_chunks() const {
    return static_cast<uint32_t>((numel + kChunkSize - 1) / kChunkSize);
  }
};

struct Chunk {
  int entry;
  int64_t begin;    // first element
  int valid_items;  // 1 ... kChunkSize
};

template <int kAddresses, size_t kBytes>
struct TensorList {
  static constexpr int kCapacity =
      (kBytes - 2 * sizeof(int)) /
      (kAddresses * sizeof(void*) + sizeof(int64_t) + sizeof(uint32_t) + 2);

  void* addresses[kCapacity][kAddresses];
  int64_t numel[kCapacity];
  uint32_t first_chunk[kCapacity];
  uint8_t dtypes[kCapacity];
  bool aligned[kCapacity];
  int size;
  uint32_t num_chunks;

  __device__ Chunk find(uint32_t chunk) const {
    int entry = 0;  // the last one that begins at or before `chunk`, found bit by bit
#pragma unroll
    for (int bit = 1 << 30; bit > 0; bit /= 2) {
      if (bit >= kCapacity) continue;  // unrolled, this leaves the bits that an index can have
      if (entry + bit < size && first_chunk[entry + bit] <= chunk) entry += bit;
    }
    const int64_t begin = static_cast<int64_t>(chunk - first_chunk[entry]) * kChunkSize;
    return {entry, begin, static_cast<int>(min(numel[entry] - begin, int64_t{kChunkSize}))};
  }
};

// Calls launch(list, chunks_before) for as many lists as the entries need, the small kind where one
// does. chunks_before counts the chunks of the lists before it.
template <int kAddresses, size_t kBytes, typename Launch>
void launch_lists_of(const std::vector<ListEntry<kAddresses>>& entries, Launch launch) {
  using List = TensorList<kAddresses, kBytes>;
  static_assert(sizeof(List) <= kBytes);
  uint32_t chunks_before = 0;
  for (size_t first = 0; first < entries.size(); first += List::kCapacity) {
    List list;
    list.size = static_cast<int>(std::min<size_t>(List::kCapacity, entries.size() - first));
    list.num_chunks = 0;
    for (int i = 0; i < list.size; ++i) {
      const ListEntry<kAddresses>& entry = entries[first + i];
      std::copy_n(entry.addresses, kAddresses, list.addresses[i]);
      list.numel[i] = entry.numel;
      list.first_chunk[i] = list.num_chunks;
      list.dtypes[i] = static_cast<uint8_t>(entry.dtypes);
      list.aligned[i] = entry.aligned;
      list.num_chunks += entry.num_chunks();
    }
    launch(list, chunks_before);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    chunks_before += list.num_chunks;
  }
}

template <int kAddresses, typename Launch>
void launch_lists(const std::vector<ListEntry<kAddresses>>& entries, Launch launch) {
  if (entries.size() <= TensorList<kAddresses, kSmallListBytes>::kCapacity) {
    launch_lists_of<kAddresses, kSmallListBytes>(entries, launch);
  } else {
    launch_lists_of<kAddresses, kLargeListBytes>(entries, launch);
  }
}

template <int kAddresses>
uint32_t count_chunks(const std::vector<ListEntry<kAddresses>>& entries) {
  uint64_t chunks = 0;
  for (const auto& entry : entries) chunks += entry.num_chunks();
  TORCH_CHECK(chunks <= INT32_MAX, "mixprec: one call takes at most ",
              int64_t{INT32_MAX} * kChunkSize, " elements; split the parameters into groups");
  return static_cast<uint32_t>(chunks);
}

inline bool is_aligned(const Data& data) {
  return reinterpret_cast<uintptr_t>(data.address) % (kVecSize * c10::elementSize(data.dtype)) == 0;
}

// Calls run with the gradient's address as a pointer of its type.
template <typename Run>
__device__ __forceinline__ void dispatch_grad(void* grad, int dtype, Run run) {
  switch (static_cast<c10::ScalarType>(dtype)) {
    case c10::kHalf:
      return run(static_cast<c10::Half*>(grad));
    case c10::kBFloat16:
      return run(static_cast<c10::BFloat16*>(grad));
    default:
      return run(static_cast<float*>(grad));
  }
}

// Whether this block is the last of `blocks` that comes here. To it, what the others' first threads
// wrote before is visible. The counter wraps to 0 at the last, so the next launch finds it clean.
__device__ __forceinline__ bool is_last_block(unsigned int* blocks_done, uint32_t blocks) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicInc(blocks_done, blocks - 1) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

template <typename T>
struct alignas(kVecSize * sizeof(T)) Vec {
  T items[kVecSize];
};

// Elements [i, i + kVecSize), converted; 0 past valid_items. kFull: whole and aligned, one access.
template <bool kFull, typename T, typename Item>
__device__ __forceinline__ void load(Item (&out)[kVecSize], const T* data, int i, int valid_items) {
  Vec<T> vec{};
  if constexpr (kFull) {
    vec = *reinterpret_cast<const Vec<T>*>(data + i);
  } else {
#pragma unroll
    for (int k = 0; k < kVecSize; ++k) {
      if (i + k < valid_items) vec.items[k] = data[i + k];
    }
  }
#pragma unroll
  for (int k = 0; k < kVecSize; ++k) out[k] = static_cast<Item>(vec.items[k]);
}

template <bool kFull, typename T, typename Item>
__device__ __forceinline__ void store(T* data, const Item (&in)[kVecSize], int i, int valid_items) {
  Vec<T> vec;
#pragma unroll
  for (int k = 0; k < kVecSize; ++k) vec.items[k] = static_cast<T>(in[k]);
  if constexpr (kFull) {
    *reinterpret_cast<Vec<T>*>(data + i) = vec;
  } else {
#pragma unroll
    for (int k = 0; k < kVecSize; ++k) {
      if (i + k < valid_items) data[i + k] = vec.items[k];
    }
  }
}

}  // namespace mixprec::cuda
