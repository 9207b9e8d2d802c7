// One SGD step over a list of parameters, fp32 ones and half ones with an fp32 master or its
// remainder, in one launch. Reads g, p, m and master, writes p, m and master: 20 bytes a parameter
// in fp32, which has no master, 22 in half, 18 with remainders.
#include "multi_tensor.cuh"

namespace mixprec::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kVecsPerThread = kChunkSize / (kThreads * kVecSize);

enum Addresses { kParam, kGrad, kMomentum, kMaster, kNumAddresses };
// The dtypes of an entry: a parameter's, plus flags.
enum Dtypes { kFloat = 0, kHalf = 4, kBFloat16 = 8, kFloatGrad = 1, kRemainder = 2 };

template <bool kFull, typename Param, typename Grad, typename Master>
__device__ void step_chunk(void* const (&addresses)[kNumAddresses], const Chunk& chunk,
                           const SgdConstants<float>& constants, const StepScalars& scalars) {
  constexpr bool kHasMaster = !std::is_same_v<Param, float>;
  Param* param = static_cast<Param*>(addresses[kParam]) + chunk.begin;
  const Grad* grad = static_cast<const Grad*>(addresses[kGrad]) + chunk.begin;
  float* momentum = static_cast<float*>(addresses[kMomentum]) + chunk.begin;
  Master* master = static_cast<Master*>(addresses[kMaster]) + chunk.begin;

  // All loads are in flight before found_inf, whose value they would otherwise wait for, is used.
  float grads[kVecsPerThread][kVecSize], params[kVecsPerThread][kVecSize];
  float momenta[kVecsPerThread][kVecSize];
  Master masters[kVecsPerThread][kVecSize];
#pragma unroll
  for (int v = 0; v < kVecsPerThread; ++v) {
    const int i = (v * kThreads + threadIdx.x) * kVecSize;
    load<kFull>(grads[v], grad, i, chunk.valid_items);
    load<kFull>(params[v], param, i, chunk.valid_items);
    if (constants.has_momentum) load<kFull>(momenta[v], momentum, i, chunk.valid_items);
    if constexpr (kHasMaster) load<kFull>(masters[v], master, i, chunk.valid_items);
  }
  if (scalars.found_inf && *scalars.found_inf != 0) return;
  const GradFactors<float> factors = scalars.grad_factors();

#pragma unroll
  for (int v = 0; v < kVecsPerThread; ++v) {
    Param weights[kVecSize];
#pragma unroll
    for (int k = 0; k < kVecSize; ++k) {
      float weight = params[v][k];
      if constexpr (kHasMaster) weight = refined_weight_f32<Param>(weight, masters[v][k]);
      sgd_update<true>(weight, momenta[v][k], grads[v][k], factors, constants);
      if constexpr (kHasMaster) {
        weights[k] = keep_master<Param>(weight, masters[v][k]);
      } else {
        weights[k] = weight;
      }
    }
    const int i = (v * kThreads + threadIdx.x) * kVecSize;
    store<kFull>(param, weights, i, chunk.valid_items);
    if (constants.has_momentum) store<kFull>(momentum, momenta[v], i, chunk.valid_items);
    if constexpr (kHasMaster) store<kFull>(master, masters[v], i, chunk.valid_items);
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
#define STEP(TAG, PARAM, GRAD, MASTER)                                                   \
  case TAG:                                                                              \
    full ? step_chunk<true, PARAM, GRAD, MASTER>(addresses, chunk, constants, scalars)   \
         : step_chunk<false, PARAM, GRAD, MASTER>(addresses, chunk, constants, scalars); \
    break
  switch (list.dtypes[chunk.entry]) {
    STEP(kFloat, float, float, float);
    STEP(kHalf, c10::Half, c10::Half, float);
    STEP(kHalf | kFloatGrad, c10::Half, float, float);
    STEP(kHalf | kRemainder, c10::Half, c10::Half, int16_t);
    STEP(kHalf | kFloatGrad | kRemainder, c10::Half, float, int16_t);
    STEP(kBFloat16, c10::BFloat16, c10::BFloat16, float);
    STEP(kBFloat16 | kFloatGrad, c10::BFloat16, float, float);
    STEP(kBFloat16 | kRemainder, c10::BFloat16, c10::BFloat16, int16_t);
    STEP(kBFloat16 | kFloatGrad | kRemainder, c10::BFloat16, float, int16_t);
  }
#undef STEP
}

__global__ void store_constants_kernel(const SgdConstants<float> values,
                                       SgdConstants<float>* constants) {
  *constants = values;
}

int dtypes_of(const SgdData& data) {
  if (data.param.dtype == c10::kFloat) return kFloat;
  return (data.param.dtype == c10::kHalf ? kHalf : kBFloat16) |
         (data.grad.dtype == c10::kFloat ? kFloatGrad : 0) |
         (data.master.dtype == c10::kShort ? kRemainder : 0);
}

}  // namespace

void sgd_step(const std::vector<SgdData>& params, const SgdHyperparameters& parameters,
              const StepScalars& scalars) {
  std::vector<ListEntry<kNumAddresses>> entries;
  entries.reserve(params.size());
  for (const SgdData& data : params) {
    if (data.param.numel == 0) continue;
    entries.push_back(
        {{data.param.address, data.grad.address, data.momentum_buffer, data.master.address},
         data.param.numel,
         dtypes_of(data),
         is_aligned(data.param) && is_aligned(data.grad) && is_aligned({data.momentum_buffer}) &&
             is_aligned(data.master)});
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
