// A half parameter's master as a remainder of its weight, and back: where a training takes up the
// state of one with the other kind.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../ops.h"
#include "chunks.h"

namespace mixprec::cpu {
namespace {

template <typename Convert>
void for_each_weight(const RemainderData& data, Convert convert) {
  at::parallel_for(0, data.weight.numel, kChunkSize, [&](int64_t begin, int64_t end) {
    const auto loop = [&](auto* weight) {
      for (int64_t i = begin; i < end; ++i) convert(i, weight[i]);
    };
    data.weight.dtype == c10::kHalf ? loop(static_cast<const c10::Half*>(data.weight.address))
                                    : loop(static_cast<const c10::BFloat16*>(data.weight.address));
  });
}

}  // namespace

void to_remainder(const RemainderData& data) {
  for_each_weight(data, [&](int64_t i, auto weight) {
    data.remainder[i] = remainder_of<decltype(weight)>(data.master[i], weight);
  });
}

void to_master(const RemainderData& data) {
  for_each_weight(data, [&](int64_t i, auto weight) {
    data.master[i] = refined_weight_f32<decltype(weight)>(weight, data.remainder[i]);
  });
}

}  // namespace mixprec::cpu
