// A fibre for each thread of a block, and the switch between them and the scheduler, of which sanitizers are told.
// Included by emulate.cpp alone.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <memory>
#include <random>
#include <vector>

#include "emulate.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#elif defined(EMULATE_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#endif

namespace emulate {
namespace {

constexpr int kLanes = 32;
constexpr size_t kStack = 256 * 1024;

enum class State { kReady, kAtBarrier, kInWarp, kDone };

struct Place {
  const char* file = nullptr;
  int line = 0;
  bool operator==(const Place& other) const { return line == other.line && strcmp(file, other.file) == 0; }
  std::string text() const { return std::string(file) + ":" + std::to_string(line); }
};

struct Fibre {
  ucontext_t context{};
  jmp_buf resume{};
  void* stack = nullptr;
  bool started = false;
  State state = State::kDone;
  Place place;
  uint64_t deposits[2] = {};  // two, so that a lane may reach the next operation while others still read this one
  int parity = 0, barrier_parity = 0;
  int thread = 0;
#if defined(EMULATE_THREAD_SANITIZER)
  void* sanitizer = nullptr;
#endif

  Fibre() { stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); }
  ~Fibre() { munmap(stack, kStack); }
  Fibre(const Fibre&) = delete;
  Fibre& operator=(const Fibre&) = delete;
};

struct Machine {
  std::vector<std::unique_ptr<Fibre>> fibres;
  Fibre* current = nullptr;
  const std::function<void()>* kernel = nullptr;
  dim3 grid, block, block_at;
  Order order = Order::kForward;
  std::mt19937_64 random;
  ucontext_t main_context{};
  jmp_buf main_resume{};
  std::string failure;
  // What thread sanitizer hangs the edges of barriers on. Barriers take turns: who leaves one early must not show what
  // it does next to those who have yet to leave.
  char block_start = 0, block_end = 0, barrier_sync[2] = {}, warp_sync[32][2] = {};
#if defined(__SANITIZE_ADDRESS__)
  const void* main_stack = nullptr;
  size_t main_size = 0;
#elif defined(EMULATE_THREAD_SANITIZER)
  void* main_sanitizer = nullptr;
#endif
};

Machine machine;

void release(char* at) {
#if defined(EMULATE_THREAD_SANITIZER)
  __tsan_release(at);
#else
  (void)at;
#endif
}

void acquire(char* at) {
#if defined(EMULATE_THREAD_SANITIZER)
  __tsan_acquire(at);
#else
  (void)at;
#endif
}

// --- switching. Sanitizers follow swapcontext; without them setjmp does it without a system call. ---

void to_main(Fibre& fibre) {
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, machine.main_stack, machine.main_size);
  swapcontext(&fibre.context, &machine.main_context);
  __sanitizer_finish_switch_fiber(fake, &machine.main_stack, &machine.main_size);
#elif defined(EMULATE_THREAD_SANITIZER)
  __tsan_switch_to_fiber(machine.main_sanitizer, __tsan_switch_to_fiber_no_sync);
  swapcontext(&fibre.context, &machine.main_context);
#else
  if (_setjmp(fibre.resume) == 0) _longjmp(machine.main_resume, 1);
#endif
}

void run_forever() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &machine.main_stack, &machine.main_size);
#endif
  for (;;) {
    Fibre& fibre = *machine.current;
    acquire(&machine.block_start);
    (*machine.kernel)();
    release(&machine.block_end);
    fibre.state = State::kDone;
    to_main(fibre);
  }
}

void start(Fibre& fibre) {
  fibre.started = true;
  getcontext(&fibre.context);
  fibre.context.uc_stack.ss_sp = fibre.stack;
  fibre.context.uc_stack.ss_size = kStack;
  fibre.context.uc_link = nullptr;
  makecontext(&fibre.context, run_forever, 0);
#if defined(EMULATE_THREAD_SANITIZER)
  fibre.sanitizer = __tsan_create_fiber(0);
#endif
}

void to_fibre(Fibre& fibre) {
  machine.current = &fibre;
  const bool first = !fibre.started;
  if (first) start(fibre);
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, fibre.stack, kStack);
  swapcontext(&machine.main_context, &fibre.context);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#elif defined(EMULATE_THREAD_SANITIZER)
  __tsan_switch_to_fiber(fibre.sanitizer, __tsan_switch_to_fiber_no_sync);
  swapcontext(&machine.main_context, &fibre.context);
#else
  if (_setjmp(machine.main_resume) == 0) {
    if (first) setcontext(&fibre.context);
    _longjmp(fibre.resume, 1);
  }
#endif
}

}  // namespace
}  // namespace emulate
