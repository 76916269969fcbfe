// Which kernels this processor runs, and how launchers share work among torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "kernels/kernels.h"
#include "team.h"

namespace pyruntime {

// The widest instruction set that the processor has; environment PYRUNTIME_CPU_CAPABILITY
// (generic, avx2, avx512, avx512bf16) can lower it. Chosen at the first call.
const Kernels& kernels();

// work(item) for every item in [0, count), on as many threads as torch would take (torch.set_num_threads). They take
// items one by one for items differ much in size; results must not depend on which thread takes which.
template <class MakeWorker>
void for_each_item(int64_t count, const MakeWorker& make_worker) {
  int64_t workers = static_cast<int64_t>(torch::stable::get_num_threads());
  workers = workers < count ? workers : count;
  if (workers <= 1) {
    auto work = make_worker();
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  std::atomic<int64_t> next{0};
  work_together(workers, [&](int64_t) {
    auto work = make_worker();
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) work(i);
  });
}

// As for_each_item, but every thread has a run of items of its own, in order, and helps with those of the others when
// it is through: for items that lie side by side in memory, where each reads ahead into the next.
template <class MakeWorker>
void for_each_neighbour_of(int64_t count, const MakeWorker& make_worker) {
  constexpr int64_t kMostWorkers = 256;
  int64_t workers = static_cast<int64_t>(torch::stable::get_num_threads());
  workers = std::min({workers, count, kMostWorkers});
  if (workers <= 1) {
    auto work = make_worker();
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  struct alignas(64) Next {
    std::atomic<int64_t> item;
  };
  Next next[kMostWorkers];
  const auto first_of = [&](int64_t worker) { return count * worker / workers; };
  for (int64_t w = 0; w < workers; ++w) next[w].item = first_of(w);
  work_together(workers, [&](int64_t own) {
    auto work = make_worker();
    for (int64_t other = 0; other < workers; ++other) {
      const int64_t w = (own + other) % workers, end = first_of(w + 1);
      for (int64_t i = next[w].item.fetch_add(1); i < end; i = next[w].item.fetch_add(1)) work(i);
    }
  });
}

// The same for work that keeps nothing between items.
template <class Work>
void for_each_neighbour(int64_t count, const Work& work) {
  for_each_neighbour_of(count, [&] { return [&](int64_t i) { work(i); }; });
}

// Float scratch on a cache line, owned by one worker.
class Scratch {
 public:
  explicit Scratch(int64_t floats)
      : data_(
            static_cast<float*>(::operator new[](static_cast<size_t>(floats) * sizeof(float), std::align_val_t{64}))) {}
  float* get() const { return data_.get(); }

 private:
  struct Release {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<float[], Release> data_;
};

}  // namespace pyruntime
