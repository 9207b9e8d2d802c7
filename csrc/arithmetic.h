// The update rules, each once, for one element. The CPU loops and the CUDA kernels both call these
// and only move memory around them.
//
// Every rounding is part of the rule: the results equal those of torch.optim.SGD(foreach=False)
// under torch.amp.GradScaler bit for bit. Both compilers therefore run without contraction
// (-ffp-contract=off, -fmad=false): `a * b + c` rounds twice, multiply_add<true> once.
#pragma once

#include <c10/util/BFloat16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__CUDACC__)
#define MIXPREC_RULE __host__ __device__ __forceinline__
#else
#define MIXPREC_RULE inline __attribute__((always_inline))
#endif

namespace mixprec {

// torch's kernels fuse where the instruction set does (CUDA, AVX2, AVX-512) and round twice in its
// plain x86 build, so the backend says which.
template <bool kFused, typename T>
MIXPREC_RULE T multiply_add(T a, T b, T c) {
  return kFused ? std::fma(a, b, c) : a * b + c;
}

template <typename To, typename From>
MIXPREC_RULE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename T>
MIXPREC_RULE bool is_finite(T x) {
  return std::fabs(x) <= std::numeric_limits<T>::max();  // false for NaN
}

// 1 / scale in fp32. torch takes the reciprocal in fp64 and rounds that to fp32: the same bits,
// since 53 >= 2 * 24 + 2 bits make the double rounding harmless.
MIXPREC_RULE float inverse(float scale) { return 1.0f / scale; }

// torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1, in torch's order of
// rounding.
MIXPREC_RULE float clip_coefficient(float norm, float max_norm) {
  const float coefficient = 1.0f / (norm + 1e-6f) * max_norm;
  return coefficient > 1.0f ? 1.0f : coefficient;
}

// Norm of all gradients together: terms are combined in any fixed order, then finished.
enum class Norm { kNone, kL2, kInf };

template <Norm kNorm, typename T>
MIXPREC_RULE T norm_term(T value) {
  return kNorm == Norm::kNone ? T{0} : kNorm == Norm::kL2 ? value * value : std::fabs(value);
}

template <Norm kNorm, typename T>
MIXPREC_RULE T combine(T total, T term) {
  return kNorm == Norm::kNone ? T{0}
         : kNorm == Norm::kL2 ? total + term
         : term > total       ? term
                              : total;
}

// A norm that is not finite skips the step as an inf among the gradients does.
template <Norm kNorm>
MIXPREC_RULE float finish_norm(double total, bool& found_inf) {
  float norm = static_cast<float>(kNorm == Norm::kL2 ? std::sqrt(total) : total);
  if (found_inf) norm = std::numeric_limits<float>::quiet_NaN();
  found_inf |= !is_finite(norm);
  return norm;
}

// Of a gradient's elements: how many are inf and NaN, as the check sees them (scaled or unscaled),
// and the largest of the other magnitudes, scaled as the elements are.
template <typename T>
struct OverflowCounts {
  unsigned inf, nan;
  T largest;
};

template <typename T>
MIXPREC_RULE void count_overflow(OverflowCounts<T>& counts, T grad, T inv_scale) {
  const T value = grad * inv_scale, magnitude = std::fabs(grad);
  const bool is_nan = value != value, is_ok = is_finite(value);
  counts.nan += is_nan;
  counts.inf += !is_nan && !is_ok;
  if (is_ok && magnitude > counts.largest) counts.largest = magnitude;
}

// 64 bits each, and largest as a double's bits, which order as what is not negative does: integer
// atomics give the same result in any order.
struct OverflowTotals {
  unsigned long long inf, nan, largest;
};

struct OverflowRecord {                 // of one parameter
  unsigned long long steps, last_step;  // how many held inf or NaN, the number of the last of them
  OverflowTotals last;                  // of that step
  OverflowTotals now;                   // CUDA: of the blocks so far; zeros before and after
};

MIXPREC_RULE void keep_overflow(OverflowRecord& record, const OverflowTotals& totals,
                                unsigned long long step) {
  if (totals.inf + totals.nan == 0) return;
  ++record.steps;
  record.last_step = step;
  record.last = totals;
}

// Momentum that no step has written yet holds this NaN in every element, so the element itself says
// whether its first write is still to come. A flag beside the buffer would have to change between
// the blocks of one launch, or cost another launch; this one cannot be left behind by a skipped
// step, a checkpoint or a graph replay. No arithmetic makes it: x86 produces 0xFFC00000 and CUDA
// 0x7FFFFFFF, and a NaN gradient keeps its own payload.
MIXPREC_RULE bool is_unwritten(float momentum) {
  return bit_cast<uint32_t>(momentum) == 0xFFFFFFFFu;
}
MIXPREC_RULE bool is_unwritten(double momentum) {
  return bit_cast<uint64_t>(momentum) == ~uint64_t{0};
}

// The fp32 value of a half weight. The weight is the truth: the master refines it only while the
// master still rounds to it, bit for bit; otherwise somebody else wrote the weight and the master
// is stale.
template <typename Half>
MIXPREC_RULE float refined_weight_f32(float weight_f32, float master) {
  const float rounded = static_cast<float>(static_cast<Half>(master));
  return bit_cast<uint32_t>(rounded) == bit_cast<uint32_t>(weight_f32) ? master : weight_f32;
}

// The weight of an updated master, which is kept beside it.
template <typename Half>
MIXPREC_RULE Half keep_master(float updated, float& master) {
  master = updated;
  return static_cast<Half>(updated);
}

// A master in 16 bits, its remainder: how many of fp32's numbers it lies beyond its weight, counted
// away from zero. Between two neighbours bfloat16 leaves out 2^16 of fp32's numbers and float16
// 2^13, so half of that fits, and the master is exact. inf and NaN are their own masters.
//
// But below its smallest normal number float16's neighbours stay 2^-24 apart, while fp32's numbers
// get denser: from 2^-17 downwards half the distance can be 2^16 of them. There a remainder counts
// steps of 2^-40, fp32's spacing around step_origin; the master is off by 2^-41 at most. Half-way
// between two weights up to 2^-16 the count would be 2^15; there it is off by up to 2^-40.
template <typename Half>
constexpr bool kIsBFloat16 = std::is_same_v<Half, c10::BFloat16>;

template <typename Half>
MIXPREC_RULE float step_origin(float weight_f32) {
  const bool fixed_steps = !kIsBFloat16<Half> && !(std::fabs(weight_f32) > 0x1p-17f);
  return fixed_steps ? std::copysign(0x1.8p-17f, weight_f32) : weight_f32;
}

// float16: to nearest even. bfloat16: half-way away from zero, so that a remainder is -2^15 there
// and never 2^15, which an int16 can't hold.
template <typename Half>
MIXPREC_RULE Half weight_of_remainder(float master) {
  if constexpr (kIsBFloat16<Half>) {
    const uint32_t rounded = (bit_cast<uint32_t>(master) + 0x8000u) >> 16;
    const bool is_nan = master != master;  // whose payload could carry into another number
    return Half(static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded), Half::from_bits());
  } else {
    return static_cast<Half>(master);
  }
}

// The remainder of any master and weight; 0 where the master is too far away to be the weight's.
template <typename Half>
MIXPREC_RULE int16_t remainder_of(float master, float weight_f32) {
  const float origin = step_origin<Half>(weight_f32);
  const uint32_t beyond = bit_cast<uint32_t>(master - weight_f32 + origin);  // exact, or stale
  const int32_t steps = static_cast<int32_t>(beyond - bit_cast<uint32_t>(origin));
  // -2^15 of a float16 weight can be half-way to another one, and round to that.
  constexpr int32_t kLowest = kIsBFloat16<Half> ? -0x8000 : -0x7FFF;
  const int32_t raised = steps < kLowest ? kLowest : steps;
  const int32_t clamped = raised > 0x7FFF ? 0x7FFF : raised;
  return static_cast<int16_t>(steps < -0x8000 || steps > 0x8000 ? 0 : clamped);
}

// As with a master: a remainder counts only where the weight is its rounding, which any remainder
// in range is. What somebody wrote over the weight stays, whatever remainder is still there.
template <typename Half>
MIXPREC_RULE float refined_weight_f32(float weight_f32, int16_t remainder) {
  const float origin = step_origin<Half>(weight_f32);
  const float beyond = bit_cast<float>(bit_cast<uint32_t>(origin) + remainder);
  if constexpr (kIsBFloat16<Half>) {  // the same in few operations: beyond zero lies a NaN
    return is_finite(weight_f32) && is_finite(beyond) ? beyond : weight_f32;
  }
  const float master = weight_f32 + (beyond - origin);
  const float rounded = static_cast<float>(weight_of_remainder<Half>(master));
  return bit_cast<uint32_t>(rounded) == bit_cast<uint32_t>(weight_f32) ? master : weight_f32;
}

template <typename Half>
MIXPREC_RULE Half keep_master(float updated, int16_t& remainder) {
  const Half weight = weight_of_remainder<Half>(updated);
  const float weight_f32 = static_cast<float>(weight);
  if constexpr (kIsBFloat16<Half>) {  // the same in few operations: the master's low half
    const auto low = static_cast<int16_t>(bit_cast<uint32_t>(updated));
    remainder = is_finite(weight_f32) ? low : 0;
  } else {
    remainder = remainder_of<Half>(updated, weight_f32);
  }
  return weight;
}

// What a gradient is multiplied by, one after the other: folding the two would change a quarter of
// all bits. maximize is a clip of the other sign, which is exact.
template <typename T>
struct GradFactors {
  T inv_scale, clip;
};

// Hyperparameters of one step, rounded as torch rounds the scalars of its element-wise kernels.
template <typename T>
struct SgdConstants {
  T neg_lr, momentum, one_minus_dampening, weight_decay;
  bool has_momentum, has_weight_decay, nesterov;
};

// One element of torch.optim.SGD. Momentum's first value is the gradient, without dampening.
template <bool kFused, typename T>
MIXPREC_RULE void sgd_update(T& param, T& momentum_buffer, T scaled_grad, const GradFactors<T>& f,
                             const SgdConstants<T>& c) {
  T grad = scaled_grad * f.inv_scale * f.clip;
  grad = c.has_weight_decay ? multiply_add<kFused>(c.weight_decay, param, grad) : grad;
  if (c.has_momentum) {
    const T decayed = momentum_buffer * c.momentum;
    const T next = multiply_add<kFused>(c.one_minus_dampening, grad, decayed);
    momentum_buffer = is_unwritten(momentum_buffer) ? grad : next;
    grad = c.nesterov ? multiply_add<kFused>(c.momentum, momentum_buffer, grad) : momentum_buffer;
  }
  param = multiply_add<kFused>(c.neg_lr, grad, param);
}

struct ScaleRule {
  double growth_factor, backoff_factor;
  int growth_interval;
  float min_scale, max_scale;
  int hysteresis;
};

struct ScaleHistory {
  int steps_skipped, last_step_skipped;
  int hysteresis_left;  // overflows until the scale backs off
};

// torch's _amp_update_scale_ (product in double; growth only while finite), then Megatron-LM's
// hysteresis and the limits. hysteresis 1 without limits is torch's rule.
MIXPREC_RULE void update_scale_rule(float& scale, int& growth_tracker, ScaleHistory& history,
                                    bool found_inf, const ScaleRule& rule) {
  history.steps_skipped += found_inf;
  history.last_step_skipped = found_inf;
  if (found_inf) {
    growth_tracker = 0;
    if (history.hysteresis_left > 0) --history.hysteresis_left;
    if (history.hysteresis_left == 0) scale = static_cast<float>(scale * rule.backoff_factor);
  } else if (++growth_tracker == rule.growth_interval) {
    growth_tracker = 0;
    history.hysteresis_left = rule.hysteresis;
    const float grown = static_cast<float>(scale * rule.growth_factor);
    if (is_finite(grown)) scale = grown;
  }
  scale = scale < rule.min_scale ? rule.min_scale : scale;
  scale = scale > rule.max_scale ? rule.max_scale : scale;
}

}  // namespace mixprec
