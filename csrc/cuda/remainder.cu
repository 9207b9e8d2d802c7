// A half parameter's master as a remainder of its weight, and back: where a training takes up the
// state of one with the other kind. Once a parameter, so plain: one thread an element.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../ops.h"

namespace mixprec::cuda {
namespace {

constexpr int kThreads = 256;

template <bool kToMaster, typename Half>
__global__ void convert_kernel(const RemainderData data) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= data.weight.numel) return;
  const float weight = static_cast<const Half*>(data.weight.address)[i];
  if constexpr (kToMaster) {
    data.master[i] = refined_weight_f32<Half>(weight, data.remainder[i]);
  } else {
    data.remainder[i] = remainder_of<Half>(data.master[i], weight);
  }
}

template <bool kToMaster>
void convert(const RemainderData& data) {
  const auto blocks = static_cast<uint32_t>((data.weight.numel + kThreads - 1) / kThreads);
  if (blocks == 0) return;
  const auto kernel = data.weight.dtype == c10::kHalf ? convert_kernel<kToMaster, c10::Half>
                                                      : convert_kernel<kToMaster, c10::BFloat16>;
  kernel<<<blocks, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(data);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void to_remainder(const RemainderData& data) { convert<false>(data); }

void to_master(const RemainderData& data) { convert<true>(data); }

}  // namespace mixprec::cuda
