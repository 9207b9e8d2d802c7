// Walks a list of tensors in chunks on all of torch's CPU threads, and picks the instruction set.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

namespace mixprec::cpu {

// Elements of one chunk: 16 KB of fp32. Fixed, so that a sum of per-chunk partial sums has the
// same bits at any number of threads.
constexpr int64_t kChunkSize = 4096;

// What torch thinks worth a thread is 32768 elements (at::internal::GRAIN_SIZE).
constexpr int64_t kChunksPerTask = 32768 / kChunkSize;

class Chunks {
 public:
  template <typename Tensors, typename Numel>
  Chunks(const Tensors& tensors, Numel numel) {
    first_.reserve(tensors.size() + 1);
    numels_.reserve(tensors.size());
    first_.push_back(0);
    for (const auto& tensor : tensors) {
      numels_.push_back(numel(tensor));
      first_.push_back(first_.back() + (numels_.back() + kChunkSize - 1) / kChunkSize);
    }
  }

  int64_t size() const { return first_.back(); }

  // Calls run(chunk, tensor, begin, end): elements [begin, end) of list entry `tensor`.
  template <typename Run>
  void for_each(Run run) const {
    for_each_range([&](int64_t tensor, int64_t begin, int64_t end) {
      for (; begin < end; begin += kChunkSize) {
        const int64_t chunk = first_[tensor] + begin / kChunkSize;
        run(chunk, tensor, begin, std::min(begin + kChunkSize, end));
      }
    });
  }

  // Calls run(tensor, begin, end) for as many of a tensor's chunks as a thread has in a row: one
  // long walk through memory, which the prefetchers follow.
  template <typename Run>
  void for_each_range(Run run) const {
    at::parallel_for(0, size(), kChunksPerTask, [&](int64_t from, int64_t to) {
      auto tensor = std::upper_bound(first_.begin(), first_.end(), from) - first_.begin() - 1;
      for (; from < to; from = first_[++tensor]) {
        const int64_t first = first_[tensor], last = std::min(to, first_[tensor + 1]);
        const int64_t begin = (from - first) * kChunkSize, end = (last - first) * kChunkSize;
        if (begin < end) run(tensor, begin, std::min(end, numels_[tensor]));
      }
    });
  }

 private:
  std::vector<int64_t> first_;  // first chunk of each tensor, and the number of chunks
  std::vector<int64_t> numels_;
};

// Calls run(std::bool_constant<kFused>), compiled for the instruction set that torch's own kernels
// use on this machine (ATEN_CPU_CAPABILITY can lower that), whatever the file's flags. `run` has to
// be inlined: MIXPREC_INLINE. All sets round alike but for kFused: the rules are element-wise.
#define MIXPREC_INLINE __attribute__((always_inline))
#if defined(__x86_64__)
enum class InstructionSet { kDefault, kAvx2, kAvx512 };

inline InstructionSet instruction_set() {
  static const InstructionSet set = [] {
    const std::string capability = at::get_cpu_capability();
    return capability == "AVX512"        ? InstructionSet::kAvx512
           : capability.find("AVX") == 0 ? InstructionSet::kAvx2
                                         : InstructionSet::kDefault;
  }();
  return set;
}

template <typename Run>
__attribute__((target("avx2,fma,f16c"))) auto run_avx2(Run run) {
  return run(std::true_type{});
}

template <typename Run>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))) auto run_avx512(Run run) {
  return run(std::true_type{});
}

template <typename Run>
auto vectorised(Run run) {
  switch (instruction_set()) {
    case InstructionSet::kAvx512:
      return run_avx512(run);
    case InstructionSet::kAvx2:
      return run_avx2(run);
    default:
      return run(std::false_type{});
  }
}
#else
template <typename Run>
auto vectorised(Run run) {
  return run(std::true_type{});  // Arm's vector fmadd, as torch uses it
}
#endif

}  // namespace mixprec::cpu
