#include "team.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pyruntime {
namespace {

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether something comes true while one waits without giving the processor away.
template <class Condition>
bool comes_soon(const Condition& is_true) {
  // A few times what lies between two parts of a layer. Who waits for longer is in the way of other threads.
  constexpr auto kPatience = std::chrono::microseconds(50);
  constexpr int kLooks = 64;
  const auto until = std::chrono::steady_clock::now() + kPatience;
  do {
    for (int i = 0; i < kLooks; ++i) {
      if (is_true()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < until);
  return false;
}

// A part of work is open from an odd number of `part_` to the even one that follows. A helper says that it is inside
// before it looks whether the part is open still, and the owner closes the part before it looks who is inside: so
// either the helper sees it closed, or the owner sees the helper.
class Team {
 public:
  void run(int64_t workers, void (*work)(int64_t, void*), void* context) {
    if (workers <= 1 || is_taken_.test_and_set(std::memory_order_acquire)) return work(0, context);
    hire(workers - 1);
    work_ = work, context_ = context, workers_ = workers;
    part_.fetch_add(1);
    part_.notify_all();
    attempt(0);
    part_.fetch_add(1);
    while (!comes_soon([&] { return inside_.load() == 0; })) {
      const int32_t count = inside_.load();
      if (count != 0) inside_.wait(count);
    }
    const std::exception_ptr failure = std::exchange(failure_, nullptr);
    is_taken_.clear(std::memory_order_release);
    if (failure) std::rethrow_exception(failure);
  }

 private:
  void attempt(int64_t worker) {
    try {
      work_(worker, context_);
    } catch (...) {
      const std::lock_guard lock(failing_);
      failure_ = std::current_exception();
    }
  }

  void hire(int64_t count) {
    for (; helpers_ < count; ++helpers_) {
      try {
        std::thread([this, worker = helpers_ + 1] { help(worker); }).detach();
      } catch (const std::exception&) {
        return;  // the system gives no more threads, and it goes without
      }
    }
  }

  [[noreturn]] void help(int64_t worker) {
    uint32_t seen = 0;
    for (;;) {
      const auto is_new = [&] { return part_.load() != seen; };
      if (!comes_soon(is_new)) part_.wait(seen);
      seen = part_.load();
      if (seen % 2 == 0) continue;
      inside_.fetch_add(1);
      if (part_.load() == seen && worker < workers_) attempt(worker);
      if (inside_.fetch_sub(1) == 1) inside_.notify_all();
    }
  }

  std::atomic_flag is_taken_;
  int64_t helpers_ = 0;
  void (*work_)(int64_t, void*) = nullptr;
  void* context_ = nullptr;
  int64_t workers_ = 0;
  std::mutex failing_;
  std::exception_ptr failure_;
  alignas(64) std::atomic<uint32_t> part_{0};
  alignas(64) std::atomic<int32_t> inside_{0};
};

}  // namespace

void work_together(int64_t workers, void (*work)(int64_t, void*), void* context) {
  static Team* team = new Team;  // outlives its helpers, which end with the process
  team->run(workers, work, context);
}

}  // namespace pyruntime
