// Finds inf and NaN in gradients, unscales them or takes their norm: one read of the gradients.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>

#include "../ops.h"
#include "chunks.h"

namespace mixprec::cpu {
namespace {

constexpr int kLanes = 16;  // independent partial results, for the vectoriser

struct Partial {
  bool found_inf = false;
  double norm = 0;  // sum of squares, or maximum of magnitudes
};

template <bool kUnscale, Norm kNorm, typename T, typename Math>
MIXPREC_RULE Partial check_chunk_body(T* grad, int64_t size, Math inv_scale) {
  // Integers and selects, not bool and branches: this is the form that gcc vectorises.
  int bad[kLanes] = {};
  Math norm[kLanes] = {};
  const auto check_one = [&](int lane, T& scaled) __attribute__((always_inline)) {
    Math value = static_cast<Math>(scaled) * inv_scale;
    if (kUnscale) {
      scaled = static_cast<T>(value);
      value = static_cast<Math>(scaled);
    }
    bad[lane] |= is_finite(value) ? 0 : 1;
    norm[lane] = combine<kNorm>(norm[lane], norm_term<kNorm>(value));
  };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) check_one(lane, grad[i + lane]);
  }
  for (; i < size; ++i) check_one(0, grad[i]);

  Partial partial;
  for (int lane = 0; lane < kLanes; ++lane) {
    partial.found_inf |= bad[lane] != 0;
    partial.norm = combine<kNorm>(partial.norm, static_cast<double>(norm[lane]));
  }
  return partial;
}

template <bool kUnscale, Norm kNorm, typename T, typename Math>
MIXPREC_AVX2 Partial check_chunk_avx2(T* grad, int64_t size, Math inv_scale) {
  return check_chunk_body<kUnscale, kNorm>(grad, size, inv_scale);
}

template <bool kUnscale, Norm kNorm, typename T>
Partial check_chunk(T* grad, int64_t size, float inv_scale) {
  const at::opmath_type<T> inv_scale_math = inv_scale;
  return use_avx2() ? check_chunk_avx2<kUnscale, kNorm>(grad, size, inv_scale_math)
                    : check_chunk_body<kUnscale, kNorm>(grad, size, inv_scale_math);
}

template <bool kUnscale, Norm kNorm>
void run(const CheckArguments& a) {
  const float inv_scale = a.grad_scale ? inverse(*a.grad_scale) : 1.0f;
  const Chunks chunks(a.grads, [](const Data& grad) { return grad.numel; });
  std::vector<Partial> partials(chunks.size());
  chunks.for_each([&](int64_t chunk, int64_t index, int64_t begin, int64_t end) {
    const Data& grad = a.grads[index];
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.dtype, "check", [&] {
      partials[chunk] = check_chunk<kUnscale, kNorm>(static_cast<scalar_t*>(grad.address) + begin,
                                                     end - begin, inv_scale);
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
