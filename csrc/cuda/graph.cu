// Small memsets of a captured graph become kernels with the same neighbours. Between kernels a
// memset costs the GPU some 2 microseconds, and the host as much at every launch; another kernel
// costs next to nothing. cuDNN puts one, of 4 bytes, before most of its batch norm kernels.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>

#include <vector>

#include "../ops.h"

// CUDA 13 asks for what edges do besides ordering: those of a memset, nothing.
#if CUDART_VERSION >= 13000
#define NO_EDGE_DATA nullptr,
#else
#define NO_EDGE_DATA
#endif

namespace mixprec::cuda {
namespace {

constexpr int kThreads = 128;
constexpr size_t kMaxBytes = 4096;  // past that, one block is no match for a memset

__global__ void memset_kernel(uint8_t* dst, unsigned value, unsigned element_size, unsigned bytes) {
  for (unsigned i = threadIdx.x; i < bytes; i += kThreads) {
    dst[i] = static_cast<uint8_t>(value >> (8 * (i % element_size)));
  }
}

template <typename Query>
std::vector<cudaGraphNode_t> nodes(Query query) {
  size_t count = 0;
  C10_CUDA_CHECK(query(nullptr, &count));
  std::vector<cudaGraphNode_t> result(count);
  C10_CUDA_CHECK(query(result.data(), &count));
  return result;
}

bool is_small_and_here(const cudaMemsetParams& memset, int device) {
  if (memset.height != 1 || memset.width * memset.elementSize > kMaxBytes) return false;
  cudaPointerAttributes memory;
  C10_CUDA_CHECK(cudaPointerGetAttributes(&memory, memset.dst));
  return memory.type == cudaMemoryTypeDevice && memory.device == device;
}

void replace(cudaGraph_t graph, cudaGraphNode_t node, const cudaMemsetParams& memset) {
  auto* dst = static_cast<uint8_t*>(memset.dst);
  unsigned value = memset.value, element_size = memset.elementSize;
  unsigned bytes = static_cast<unsigned>(memset.width * memset.elementSize);
  void* arguments[] = {&dst, &value, &element_size, &bytes};
  cudaKernelNodeParams kernel{};
  kernel.func = reinterpret_cast<void*>(memset_kernel);
  kernel.gridDim = 1;
  kernel.blockDim = kThreads;
  kernel.kernelParams = arguments;
  const auto before = nodes([&](cudaGraphNode_t* out, size_t* count) {
    return cudaGraphNodeGetDependencies(node, out, NO_EDGE_DATA count);
  });
  const auto after = nodes([&](cudaGraphNode_t* out, size_t* count) {
    return cudaGraphNodeGetDependentNodes(node, out, NO_EDGE_DATA count);
  });
  cudaGraphNode_t added;
  C10_CUDA_CHECK(cudaGraphAddKernelNode(&added, graph, before.data(), before.size(), &kernel));
  const std::vector<cudaGraphNode_t> from(after.size(), added);
  C10_CUDA_CHECK(
      cudaGraphAddDependencies(graph, from.data(), after.data(), NO_EDGE_DATA after.size()));
  C10_CUDA_CHECK(cudaGraphDestroyNode(node));
}

}  // namespace

void replace_memsets(void* captured) {
  const auto graph = static_cast<cudaGraph_t>(captured);
  const int device = c10::cuda::current_device();
  const auto all = nodes(
      [&](cudaGraphNode_t* out, size_t* count) { return cudaGraphGetNodes(graph, out, count); });
  for (const cudaGraphNode_t node : all) {
    cudaGraphNodeType type;
    C10_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
    if (type != cudaGraphNodeTypeMemset) continue;
    cudaMemsetParams memset;
    C10_CUDA_CHECK(cudaGraphMemsetNodeGetParams(node, &memset));
    if (is_small_and_here(memset, device)) replace(graph, node, memset);
  }
}

}  // namespace mixprec::cuda
