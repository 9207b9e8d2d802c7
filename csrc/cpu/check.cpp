// Finds inf and NaN in gradients, unscales them or takes their norm: one read of the gradients.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>

#include "../ops.h"
#include "chunks.h"

namespace mixprec::cpu {
namespace {

constexpr int kLanes = 16;  // independent partial sums, for the vectoriser

struct Partial {
  bool found_inf = false;
  double norm = 0;  // sum of squares, or maximum of magnitudes
};

// Loops of a form that gcc vectorises. Magnitudes order as their bits do, inf and NaN last.
template <bool kUnscale, Norm kNorm, typename T, typename Math>
MIXPREC_RULE Partial check_chunk(T* grad, int64_t size, Math inv_scale) {
  using Bits = std::conditional_t<sizeof(Math) == sizeof(uint64_t), uint64_t, uint32_t>;
  Bits largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    Math value = static_cast<Math>(grad[i]) * inv_scale;
    if (kUnscale) {
      grad[i] = static_cast<T>(value);
      value = static_cast<Math>(grad[i]);
    }
    largest = std::max(largest, bit_cast<Bits>(std::fabs(value)));
  }
  const Math magnitude = bit_cast<Math>(largest);
  Partial partial{!is_finite(magnitude), kNorm == Norm::kInf ? magnitude : 0.0};
  if (kNorm == Norm::kL2) {
    Math lanes[kLanes] = {};
    const auto add = [&](int lane, int64_t i) MIXPREC_INLINE {
      lanes[lane] += norm_term<kNorm>(static_cast<Math>(grad[i]) * inv_scale);
    };
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) add(lane, i + lane);
    }
    for (; i < size; ++i) add(0, i);
    for (const Math lane : lanes) partial.norm += static_cast<double>(lane);
  }
  return partial;
}

template <bool kUnscale, Norm kNorm>
void run(const CheckArguments& a) {
  const float inv_scale = a.grad_scale ? inverse(*a.grad_scale) : 1.0f;
  const Chunks chunks(a.grads, [](const Data& grad) { return grad.numel; });
  std::vector<Partial> partials(chunks.size());
  chunks.for_each([&](int64_t chunk, int64_t index, int64_t begin, int64_t end) {
    const Data& grad = a.grads[index];
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.dtype, "check", [&] {
      const auto address = static_cast<scalar_t*>(grad.address) + begin;
      const auto factor = static_cast<at::opmath_type<scalar_t>>(inv_scale);
      partials[chunk] = vectorised([=](auto) MIXPREC_INLINE {
        return check_chunk<kUnscale, kNorm>(address, end - begin, factor);
      });
    });
  });

  Partial total;
  for (const Partial& partial : partials) {
    total.found_inf |= partial.found_inf;
    total.norm = combine<kNorm>(total.norm, partial.norm);
  }
  if (kNorm != Norm::kNone) *a.norm = finish_norm<kNorm>(total.norm, total.found_inf);
  *a.found_inf = total.found_inf ? 1.0f : 0.0f;
}

}  // namespace

void check(const CheckArguments& arguments) {
  if (arguments.unscale) return run<true, Norm::kNone>(arguments);
  switch (arguments.norm_type) {
    case Norm::kNone:
      return run<false, Norm::kNone>(arguments);
    case Norm::kL2:
      return run<false, Norm::kL2>(arguments);
    case Norm::kInf:
      return run<false, Norm::kInf>(arguments);
  }
}

}  // namespace mixprec::cpu
