// One SGD step over a list of parameters, fp32 ones and half ones with an fp32 master or its
// remainder.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <type_traits>

#include "../ops.h"
#include "chunks.h"

namespace mixprec::cpu {
namespace {

// Param is float or double, its own master, or a half type with one.
template <bool kFused, typename Math, typename Param, typename Grad, typename Master>
MIXPREC_RULE void sgd_range_body(Param* __restrict param, const Grad* __restrict grad,
                                 Math* __restrict momentum_buffer, Master* __restrict master,
                                 int64_t size, GradFactors<Math> factors,
                                 SgdConstants<Math> constants) {
  constexpr bool kHasMaster = !std::is_same_v<Math, Param>;
  for (int64_t i = 0; i < size; ++i) {
    Math weight = static_cast<Math>(param[i]);
    if constexpr (kHasMaster) weight = refined_weight_f32<Param>(weight, master[i]);
    Math momentum = constants.has_momentum ? momentum_buffer[i] : Math{};
    sgd_update<kFused>(weight, momentum, static_cast<Math>(grad[i]), factors, constants);
    if (constants.has_momentum) momentum_buffer[i] = momentum;
    if constexpr (kHasMaster) {
      param[i] = keep_master<Param>(weight, master[i]);
    } else {
      param[i] = weight;
    }
  }
}

// The loop again for each setting of the flags, which are constants in it: gcc vectorises only
// then.
template <bool kFused, typename Math, typename... Pointers>
MIXPREC_RULE void sgd_range_flags(int64_t size, const GradFactors<Math>& factors,
                                  SgdConstants<Math> c, Pointers... pointers) {
  const auto run = [&](bool momentum, bool nesterov, bool weight_decay) MIXPREC_INLINE {
    c.has_momentum = momentum;
    c.nesterov = nesterov;
    c.has_weight_decay = weight_decay;
    sgd_range_body<kFused>(pointers..., size, factors, c);
  };
  const auto run_momentum = [&](bool momentum, bool nesterov) MIXPREC_INLINE {
    c.has_weight_decay ? run(momentum, nesterov, true) : run(momentum, nesterov, false);
  };
  if (!c.has_momentum) return run_momentum(false, false);
  c.nesterov ? run_momentum(true, true) : run_momentum(true, false);
}

template <typename Math, typename Param, typename Grad, typename Master = float>
void step(const SgdData& data, int64_t begin, int64_t end, GradFactors<float> factors,
          const SgdHyperparameters& parameters) {
  const auto from = [begin](auto* address) { return address ? address + begin : nullptr; };
  const auto param = from(static_cast<Param*>(data.param.address));
  const auto grad = from(static_cast<const Grad*>(data.grad.address));
  const auto momentum_buffer = from(static_cast<Math*>(data.momentum_buffer));
  const auto master = from(static_cast<Master*>(data.master.address));
  const GradFactors<Math> f{factors.inv_scale, factors.clip};
  const SgdConstants<Math> constants = parameters.rounded<Math>();
  vectorised([=](auto fused) MIXPREC_INLINE {
    sgd_range_flags<fused.value>(end - begin, f, constants, param, grad, momentum_buffer, master);
  });
}

template <typename Half, typename Master>
void step_half(const SgdData& data, int64_t begin, int64_t end, GradFactors<float> factors,
               const SgdHyperparameters& parameters) {
  if (data.grad.dtype == c10::kFloat) {
    step<float, Half, float, Master>(data, begin, end, factors, parameters);
  } else {
    step<float, Half, Half, Master>(data, begin, end, factors, parameters);
  }
}

}  // namespace

void sgd_step(const std::vector<SgdData>& params, const SgdHyperparameters& parameters,
              const StepScalars& scalars) {
  if (scalars.found_inf && *scalars.found_inf != 0) return;
  const GradFactors<float> factors = scalars.grad_factors();
  const Chunks chunks(params, [](const SgdData& data) { return data.param.numel; });
  chunks.for_each_range([&](int64_t index, int64_t begin, int64_t end) {
    const SgdData& data = params[index];
    const bool remainder = data.master.dtype == c10::kShort;
    switch (data.param.dtype) {
      case c10::kDouble:
        return step<double, double, double>(data, begin, end, factors, parameters);
      case c10::kHalf:
        return remainder ? step_half<c10::Half, int16_t>(data, begin, end, factors, parameters)
                         : step_half<c10::Half, float>(data, begin, end, factors, parameters);
      case c10::kBFloat16:
        return remainder ? step_half<c10::BFloat16, int16_t>(data, begin, end, factors, parameters)
                         : step_half<c10::BFloat16, float>(data, begin, end, factors, parameters);
      default:
        return step<float, float, float>(data, begin, end, factors, parameters);
    }
  });
}

}  // namespace mixprec::cpu
