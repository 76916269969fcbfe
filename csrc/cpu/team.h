// The threads that kernels share work among.
#pragma once

#include <cstdint>
#include <type_traits>

namespace pyruntime {

// work(worker) on this thread, as worker 0, and, as workers 1 to workers - 1, on those helpers that come before it is
// through: every call must be ready to do all of the work. Returns when none is at it any more. Nobody waits for a
// helper that has no processor just now, which is what a team of OpenMP does at each end of a parallel part: beside an
// event loop on the same cores that was a fifth of a decode step.
//
// Helpers wait a while for more work before they sleep. There is one team a process, as large as was ever asked for;
// whoever comes while another thread has it, or from inside work, works alone.
void work_together(int64_t workers, void (*work)(int64_t worker, void* context), void* context);

template <class Work>
void work_together(int64_t workers, const Work& work) {
  const auto call = [](int64_t worker, void* context) { (*static_cast<const Work*>(context))(worker); };
  work_together(workers, call, const_cast<void*>(static_cast<const void*>(&work)));
}

}  // namespace pyruntime
