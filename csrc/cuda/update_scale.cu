// Dynamic loss scale: grows after growth_interval good steps, backs off after an overflow. One
// thread; the scale never leaves the device.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "../ops.h"

namespace mixprec::cuda {
namespace {

__global__ void update_scale_kernel(const ScaleData data, const ScaleRule rule) {
  update_scale_rule(*data.scale, *data.growth_tracker, *data.history, *data.found_inf != 0, rule);
}

}  // namespace

void update_scale(const ScaleData& data, const ScaleRule& rule) {
  update_scale_kernel<<<1, 1, 0, c10::cuda::getCurrentCUDAStream()>>>(data, rule);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace mixprec::cuda
