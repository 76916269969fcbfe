// The scheduler of emulate.h. Compiled without -fsanitize=thread even where the kernels have it: what this file does is
// not to be checked, and it tells the sanitizers of every switch.
#include <algorithm>
#include <numeric>
#include <utility>

#include "fibres.h"

namespace emulate {
namespace {

[[noreturn]] void fail(const std::string& text) {
  // Fibres that wait are left where they are; their stacks go with them.
  machine.fibres.clear();
  throw Failure("block " + std::to_string(machine.block_at.x) + "," + std::to_string(machine.block_at.y) + ": " + text);
}

void arrange(std::vector<int64_t>& items) {
  if (machine.order == Order::kReverse) std::reverse(items.begin(), items.end());
  if (machine.order == Order::kRandom) std::shuffle(items.begin(), items.end(), machine.random);
}

// Lets a warp go on when all its lanes wait at one operation.
bool open_warp(int warp) {
  Fibre& first = *machine.fibres[warp * kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const Fibre& f = *machine.fibres[warp * kLanes + i];
    if (f.state != State::kInWarp) return false;
    if (!(f.place == first.place)) fail("lanes of a warp wait at " + first.place.text() + " and " + f.place.text());
  }
  for (int i = 0; i < kLanes; ++i) machine.fibres[warp * kLanes + i]->state = State::kReady;
  return true;
}

bool open_barrier(int threads) {
  const Fibre& first = *machine.fibres[0];
  for (int i = 0; i < threads; ++i) {
    const Fibre& f = *machine.fibres[i];
    if (f.state != State::kAtBarrier) return false;
    if (!(f.place == first.place)) fail("threads wait at barriers " + first.place.text() + " and " + f.place.text());
  }
  for (int i = 0; i < threads; ++i) machine.fibres[i]->state = State::kReady;
  return true;
}

void report_stuck(int threads) {
  int counts[4] = {};
  std::string where;
  for (int i = 0; i < threads; ++i) {
    const Fibre& f = *machine.fibres[i];
    counts[static_cast<int>(f.state)]++;
    if (where.empty() && f.state != State::kDone) where = f.place.text();
  }
  fail("stuck: " + std::to_string(counts[1]) + " threads wait at a barrier, " + std::to_string(counts[2]) +
       " in a warp operation, " + std::to_string(counts[3]) + " have left; the first waits at " + where);
}

void run_block(int threads) {
  for (int i = 0; i < threads; ++i) {
    Fibre& fibre = *machine.fibres[i];
    fibre.state = State::kReady;
    fibre.parity = fibre.barrier_parity = 0;
  }
  std::vector<int64_t> turn(threads);
  std::iota(turn.begin(), turn.end(), 0);
  arrange(turn);
  release(&machine.block_start);
  for (;;) {
    bool moved = false;
    for (int64_t i : turn) {
      Fibre& fibre = *machine.fibres[i];
      if (fibre.state != State::kReady) continue;
      moved = true;
      to_fibre(fibre);
      if (!machine.failure.empty()) fail(std::exchange(machine.failure, ""));
    }
    for (int warp = 0; warp < threads / kLanes; ++warp) moved = open_warp(warp) || moved;
    moved = open_barrier(threads) || moved;
    if (moved) continue;
    const bool done = std::all_of(machine.fibres.begin(), machine.fibres.begin() + threads,
                                  [](const auto& f) { return f->state == State::kDone; });
    if (done) break;
    report_stuck(threads);
  }
  acquire(&machine.block_end);
}

Fibre& wait_in_warp(unsigned mask, uint64_t value, const char* file, int line) {
  Fibre& self = *machine.current;
  if (mask != 0xffffffffu) {
    machine.failure = "a warp operation with a partial mask at " + Place{file, line}.text();
    to_main(self);
  }
  self.parity ^= 1;
  self.deposits[self.parity] = value;
  self.place = {file, line};
  self.state = State::kInWarp;
  to_main(self);
  return self;
}

const Fibre& neighbour(const Fibre& self, int lane) { return *machine.fibres[self.thread / kLanes * kLanes + lane]; }

}  // namespace

void set_order(Order order, uint64_t seed) {
  machine.order = order;
  machine.random.seed(seed);
}

void launch(dim3 grid, int threads, const std::function<void()>& kernel) {
  if (threads < kLanes || threads > 1024 || threads % kLanes != 0)
    throw Failure("a block of " + std::to_string(threads));
#if defined(EMULATE_THREAD_SANITIZER)
  machine.main_sanitizer = __tsan_get_current_fiber();
#endif
  while (static_cast<int>(machine.fibres.size()) < threads) {
    machine.fibres.push_back(std::make_unique<Fibre>());
    machine.fibres.back()->thread = static_cast<int>(machine.fibres.size()) - 1;
  }
  machine.grid = grid, machine.block = dim3(static_cast<unsigned>(threads)), machine.kernel = &kernel;
  std::vector<int64_t> blocks(int64_t{grid.x} * grid.y * grid.z);
  std::iota(blocks.begin(), blocks.end(), 0);
  arrange(blocks);
  for (int64_t b : blocks) {
    machine.block_at = dim3(static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                            static_cast<unsigned>(b / grid.x / grid.y));
    run_block(threads);
  }
}

dim3 thread_index() { return dim3(static_cast<unsigned>(machine.current->thread), 0, 0); }
dim3 block_index() { return machine.block_at; }
dim3 block_size() { return machine.block; }
dim3 grid_size() { return machine.grid; }
int lane() { return machine.current->thread % kLanes; }

void barrier(const char* file, int line) {
  Fibre& self = *machine.current;
  self.place = {file, line};
  self.state = State::kAtBarrier;
  self.barrier_parity ^= 1;
  char* sync = &machine.barrier_sync[self.barrier_parity];
  release(sync);
  to_main(self);
  acquire(sync);
}

void warp_barrier(unsigned mask, const char* file, int line) {
  const Fibre& self = *machine.current;
  char* sync = &machine.warp_sync[self.thread / kLanes][self.parity];
  release(sync);
  wait_in_warp(mask, 0, file, line);
  acquire(sync);
}

// Shuffles and votes order no memory, as on the device.
uint64_t warp_shuffle(unsigned mask, uint64_t value, int from, const char* file, int line) {
  const Fibre& self = wait_in_warp(mask, value, file, line);
  return neighbour(self, from & 31).deposits[self.parity];
}

unsigned warp_ballot(unsigned mask, bool vote, const char* file, int line) {
  const Fibre& self = wait_in_warp(mask, vote ? 1 : 0, file, line);
  unsigned votes = 0;
  for (int i = 0; i < kLanes; ++i) votes |= static_cast<unsigned>(neighbour(self, i).deposits[self.parity]) << i;
  return votes;
}

}  // namespace emulate
