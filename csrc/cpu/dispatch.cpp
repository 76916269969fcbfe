#include "dispatch.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace pyruntime {

#define DECLARE_TABLE(level)  \
  namespace level {           \
  extern const Kernels table; \
  }
DECLARE_TABLE(generic)
#if defined(__x86_64__)
DECLARE_TABLE(avx2)
DECLARE_TABLE(avx512)
DECLARE_TABLE(avx512bf16)
#endif
#undef DECLARE_TABLE

namespace {

const Kernels* choose() {
  const Kernels* available[4] = {&generic::table};
  int count = 1;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v3")) available[count++] = &avx2::table;
  if (count == 2 && __builtin_cpu_supports("x86-64-v4")) available[count++] = &avx512::table;
  // Compiled with VNNI as well, which every processor with bfloat16 products has.
  const bool has_both = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (count == 3 && has_both) available[count++] = &avx512bf16::table;
#endif
  const char* wanted = std::getenv("PYRUNTIME_CPU_CAPABILITY");
  if (wanted == nullptr || *wanted == '\0') return available[count - 1];
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(available[i]->name, wanted) == 0) return available[i];
  }
  throw std::runtime_error(std::string("PYRUNTIME_CPU_CAPABILITY=") + wanted + " is unknown or not in this processor");
}

}  // namespace

const Kernels& kernels() {
  static const Kernels* chosen = choose();
  return *chosen;
}

}  // namespace pyruntime
