// Walks a list of tensors in chunks on all of torch's CPU threads, and picks the instruction set.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
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
    at::parallel_for(0, size(), kChunksPerTask, [&](int64_t from, int64_t to) {
      auto tensor = std::upper_bound(first_.begin(), first_.end(), from) - first_.begin() - 1;
      for (int64_t chunk = from; chunk < to; ++chunk) {
        while (chunk >= first_[tensor + 1]) ++tensor;
        const int64_t begin = (chunk - first_[tensor]) * kChunkSize;
        run(chunk, tensor, begin, std::min(begin + kChunkSize, numels_[tensor]));
      }
    });
  }

 private:
  std::vector<int64_t> first_;  // first chunk of each tensor, and the number of chunks
  std::vector<int64_t> numels_;
};

// A function marked MIXPREC_AVX2 is compiled for AVX2 with FMA, whatever the file's flags, and
// called where torch itself runs its AVX2 or AVX-512 kernels (ATEN_CPU_CAPABILITY can lower that).
// Both round alike: the rules are element-wise.
#if defined(__x86_64__)
#define MIXPREC_AVX2 __attribute__((target("avx2,fma,f16c")))
constexpr bool kDefaultIsFused = false;
inline bool use_avx2() {
  static const bool use = at::get_cpu_capability().find("AVX") == 0;
  return use;
}
#else
#define MIXPREC_AVX2
constexpr bool kDefaultIsFused = true;  // Arm's vector fmadd, as torch uses it
inline bool use_avx2() { return false; }
#endif

}  // namespace mixprec::cpu
