// One SGD step over a list of parameters, fp32 ones and half ones with an fp32 master, in one
// launch. Moves 20 bytes a parameter (fp32: g, p, m read, p, m written; half: g, p, m, master read,
// p, m, master written).
#include "multi_tensor.cuh"

namespace mixprec::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kVecsPerThread = kChunkSize / (kThreads * kVecSize);

enum Addresses { kParam, kGrad, kMomentum, kMaster, kNumAddresses };
enum Dtypes { kFloat, kHalf, kHalfFloatGrad, kBFloat16, kBFloat16FloatGrad };

template <bool kFull, typename Param, typename Grad>
__device__ void step_chunk(void* const (&addresses)[kNumAddresses], const Chunk& chunk,
                           const SgdConstants<float>& constants, const StepScalars& scalars) {
  constexpr bool kHasMaster = !std::is_same_v<Param, float>;
  Param* param = static_cast<Param*>(addresses[kParam]) + chunk.begin;
  const Grad* grad = static_cast<const Grad*>(addresses[kGrad]) + chunk.begin;
  float* momentum = static_cast<float*>(addresses[kMomentum]) + chunk.begin;
  float* master = static_cast<float*>(addresses[kMaster]) + chunk.begin;

  // All loads are in flight before found_inf, whose value they would otherwise wait for, is used.
  float grads[kVecsPerThread][kVecSize], params[kVecsPerThread][kVecSize];
  float momenta[kVecsPerThread][kVecSize], masters[kVecsPerThread][kVecSize];
#pragma unroll
  for (int v = 0; v < kVecsPerThread; ++v) {
    const int i = (v * kThreads + threadIdx.x) * kVecSize;
    load_f32<kFull>(grads[v], grad, i, chunk.valid_items);
    load_f32<kFull>(params[v], param, i, chunk.valid_items);
    if (constants.has_momentum) load_f32<kFull>(momenta[v], momentum, i, chunk.valid_items);
    if constexpr (kHasMaster) load_f32<kFull>(masters[v], master, i, chunk.valid_items);
  }
  if (scalars.found_inf && *scalars.found_inf != 0) return;
  const GradFactors<float> factors = scalars.grad_factors();

#pragma unroll
  for (int v = 0; v < kVecsPerThread; ++v) {
#pragma unroll
    for (int k = 0; k < kVecSize; ++k) {
      float weight = params[v][k];
      if constexpr (kHasMaster) weight = refined_weight_f32<Param>(weight, masters[v][k]);
      sgd_update<true>(weight, momenta[v][k], grads[v][k], factors, constants);
      params[v][k] = weight;
    }
    const int i = (v * kThreads + threadIdx.x) * kVecSize;
    store_f32<kFull>(param, params[v], i, chunk.valid_items);
    if (constants.has_momentum) store_f32<kFull>(momentum, momenta[v], i, chunk.valid_items);
    if constexpr (kHasMaster) store_f32<kFull>(master, params[v], i, chunk.valid_items);
  }
}

template <typename List>
__global__ void __launch_bounds__(kThreads)
    sgd_step_kernel(const __grid_constant__ List list, const SgdConstants<float> host_constants,
                    const StepScalars scalars) {
  const SgdConstants<float> constants = scalars.constants ? *scalars.constants : host_constants;
  // Backwards, since the check read the gradients forwards: its last ones are still in L2.
  const Chunk chunk = list.find(list.num_chunks - 1 - blockIdx.x);
  const auto& addresses = list.addresses[chunk.entry];
  const bool full = list.aligned[chunk.entry] && chunk.valid_items == kChunkSize;
#define STEP(PARAM, GRAD)                                                    \
  full ? step_chunk<true, PARAM, GRAD>(addresses, chunk, constants, scalars) \
       : step_chunk<false, PARAM, GRAD>(addresses, chunk, constants, scalars)
  switch (list.dtypes[chunk.entry]) {
    case kFloat:
      STEP(float, float);
      break;
    case kHalf:
      STEP(c10::Half, c10::Half);
      break;
    case kHalfFloatGrad:
      STEP(c10::Half, float);
      break;
    case kBFloat16:
      STEP(c10::BFloat16, c10::BFloat16);
      break;
    case kBFloat16FloatGrad:
      STEP(c10::BFloat16, float);
      break;
  }
#undef STEP
}

__global__ void store_constants_kernel(const SgdConstants<float> values,
                                       SgdConstants<float>* constants) {
  *constants = values;
}

Dtypes dtypes_of(const SgdData& data) {
  const bool float_grad = data.grad.dtype == c10::kFloat;
  switch (data.param.dtype) {
    case c10::kHalf:
      return float_grad ? kHalfFloatGrad : kHalf;
    case c10::kBFloat16:
      return float_grad ? kBFloat16FloatGrad : kBFloat16;
    default:
      return kFloat;
  }
}

}  // namespace

void sgd_step(const std::vector<SgdData>& params, const SgdHyperparameters& parameters,
              const StepScalars& scalars) {
  std::vector<ListEntry<kNumAddresses>> entries;
  entries.reserve(params.size());
  for (const SgdData& data : params) {
    if (data.param.numel == 0) continue;
    entries.push_back({{data.param.address, data.grad.address, data.momentum_buffer, data.master},
                       data.param.numel,
                       dtypes_of(data),
                       is_aligned(data.param) && is_aligned(data.grad) &&
                           is_aligned({data.momentum_buffer}) && is_aligned({data.master})});
  }
  count_chunks(entries);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  launch_lists(entries, [&](const auto& list, uint32_t) {
    sgd_step_kernel<<<list.num_chunks, kThreads, 0, stream>>>(list, parameters.rounded<float>(),
                                                              scalars);
  });
}

void store_constants(const SgdHyperparameters& parameters, SgdConstants<float>* constants) {
  store_constants_kernel<<<1, 1, 0, c10::cuda::getCurrentCUDAStream()>>>(
      parameters.rounded<float>(), constants);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace mixprec::cuda
