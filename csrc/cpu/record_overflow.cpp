// Records which gradients held inf or NaN, in a step that found some.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>

#include "../ops.h"
#include "chunks.h"

namespace mixprec::cpu {
namespace {

template <typename T>
OverflowTotals count_chunk(const T* grad, int64_t size, float inv_scale, double factor) {
  using Math = at::opmath_type<T>;
  OverflowCounts<Math> counts{};
  for (int64_t i = 0; i < size; ++i) {
    count_overflow(counts, static_cast<Math>(grad[i]), static_cast<Math>(inv_scale));
  }
  return {counts.inf, counts.nan, bit_cast<unsigned long long>(counts.largest * factor)};
}

}  // namespace

void record_overflow(const OverflowArguments& a) {
  const Chunks chunks(a.grads, [](const Data& grad) { return grad.numel; });
  const auto step = a.header->steps + 1;
  if (a.ends_step) a.header->steps = step;
  if (chunks.size() == 0 || *a.found_inf == 0) return;
  const float scale = a.grad_scale ? *a.grad_scale : 1.0f;
  std::vector<std::pair<int64_t, OverflowTotals>> partials(chunks.size());
  chunks.for_each([&](int64_t chunk, int64_t index, int64_t begin, int64_t end) {
    const Data& grad = a.grads[index];
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.dtype, "record_overflow", [&] {
      partials[chunk] = {
          index, count_chunk(static_cast<const scalar_t*>(grad.address) + begin, end - begin,
                             a.unscaled ? 1.0f : inverse(scale), a.unscaled ? scale : 1.0)};
    });
  });

  std::vector<OverflowTotals> totals(a.grads.size());
  for (const auto& [index, partial] : partials) {
    OverflowTotals& total = totals[index];
    total.inf += partial.inf;
    total.nan += partial.nan;
    total.largest = std::max(total.largest, partial.largest);
  }
  for (size_t i = 0; i < totals.size(); ++i) {
    keep_overflow(*a.records[i], totals[i], step);
  }
}

}  // namespace mixprec::cpu
