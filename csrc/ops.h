// Every op of both backends, declared once, in plain pointers: csrc/python has checked the tensors
// behind them. All memory of a call lies on one device, which is the current one; on CUDA the work
// goes to the current stream. An entry is dense: its elements fill their memory in any order
// (channels_last is dense), and tensors that belong together have them in the same order.
#pragma once

#include <c10/core/ScalarType.h>

#include <vector>

#include "arithmetic.h"

namespace mixprec {

struct Data {
  void* address = nullptr;
  int64_t numel = 0;
  c10::ScalarType dtype = c10::kFloat;
};

struct CheckArguments {
  std::vector<Data> grads;  // float32, float16, bfloat16 (CPU: float64); any alignment; scaled
  const float* grad_scale;  // gradients are this many times too large; null: not scaled
  bool unscale;             // write grad / grad_scale back, rounded to the gradient's dtype
  Norm norm_type;           // kNone where `unscale`
  float* found_inf;  // out: 1 if a gradient, scaled or unscaled, or the norm is inf or NaN, else 0
  float* norm;       // out: norm of the unscaled gradients; NaN where they are not finite
  void* workspace;   // CUDA: 8 bytes, zeros before and after, for one check at a time
};
constexpr int kCheckWorkspaceInts = 2;

struct OverflowHeader {
  unsigned long long steps;  // recorded so far, fine ones too
  unsigned blocks_done;      // CUDA: 0 before and after
};

struct OverflowArguments {
  std::vector<Data> grads;               // as the check left them
  std::vector<OverflowRecord*> records;  // in/out; of each gradient
  OverflowHeader* header;                // in/out
  const float* found_inf;                // 0: no record changes, and no gradient is read
  const float* grad_scale;               // of the check; null: not scaled
  bool unscaled;                         // the check has written grad / grad_scale back
  bool ends_step;                        // no other gradients of this step come after these
};

struct SgdData {          // the same number of elements each
  Data param;             // in/out; float32, float16, bfloat16 (CPU: float64)
  Data grad;              // scaled, not changed; param's dtype or float32
  void* momentum_buffer;  // in/out; float32 (float64 param: float64); null without momentum
  Data master;            // in/out; for float16 and bfloat16 params: float32, or int16 remainders
};

struct RemainderData {  // of one parameter
  Data weight;          // float16, bfloat16
  float* master;
  int16_t* remainder;
};

struct SgdHyperparameters {
  double lr, momentum, dampening, weight_decay;
  bool nesterov;

  bool operator==(const SgdHyperparameters& o) const {
    return lr == o.lr && momentum == o.momentum && dampening == o.dampening &&
           weight_decay == o.weight_decay && nesterov == o.nesterov;
  }

  template <typename T>
  SgdConstants<T> rounded() const {
    return {static_cast<T>(-lr),
            static_cast<T>(momentum),
            static_cast<T>(1 - dampening),
            static_cast<T>(weight_decay),
            momentum != 0,
            weight_decay != 0,
            nesterov};
  }
};

struct StepScalars {        // read on the device
  const float* grad_scale;  // null: gradients are not scaled
  const float* found_inf;   // not 0: the step changes nothing; null: it does
  const float* norm;        // of the unscaled gradients; null: no clipping
  float max_norm;           // clip to this norm
  bool maximize;
  const SgdConstants<float>* constants;  // CUDA: instead of the call's; null: the call's

  MIXPREC_RULE GradFactors<float> grad_factors() const {
    const float clip = norm ? clip_coefficient(*norm, max_norm) : 1.0f;
    return {grad_scale ? inverse(*grad_scale) : 1.0f, maximize ? -clip : clip};
  }
};

struct ScaleData {
  float* scale;           // in/out
  int* growth_tracker;    // in/out
  ScaleHistory* history;  // in/out
  const float* found_inf;
};

// Ends of a copy that change from replay to replay of a CUDA graph lie in device memory.
enum class CopyKind {
  kBytes,    // to[0 ... bytes) = from[0 ... bytes)
  kThrough,  // the same with *to for to
  kAddress,  // *to = from
};

struct CopyData {
  void* to;
  const void* from;
  int64_t bytes;
  CopyKind kind = CopyKind::kBytes;
};

#define MIXPREC_DECLARE_OPS                                                               \
  void check(const CheckArguments& arguments);                                            \
  void record_overflow(const OverflowArguments& arguments);                               \
  void sgd_step(const std::vector<SgdData>& params, const SgdHyperparameters& parameters, \
                const StepScalars& scalars);                                              \
  void to_remainder(const RemainderData& data); /* writes the remainder */                \
  void to_master(const RemainderData& data);    /* writes the master */                   \
  void update_scale(const ScaleData& data, const ScaleRule& rule);

namespace cpu {
MIXPREC_DECLARE_OPS
}
namespace cuda {
MIXPREC_DECLARE_OPS
// What later steps read through StepScalars::constants: a captured step would else keep its own.
// The values travel by value, so the host may go on.
void store_constants(const SgdHyperparameters& parameters, SgdConstants<float>* constants);
void copy(const std::vector<CopyData>& copies);
// Of a captured cudaGraph_t, before it is instantiated: kernels for small memsets.
void replace_memsets(void* graph);
}  // namespace cuda

#undef MIXPREC_DECLARE_OPS

}  // namespace mixprec
