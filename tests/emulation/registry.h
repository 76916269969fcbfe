// What Python calls: kernels by name, arguments as buffers. Each file of kernels adds its own with EMULATED.
#pragma once

#include <map>
#include <string>

#include "emulate.h"

namespace emulate {

// Buffers as handed over; a scalar is a buffer of one int64 or double, an absent optional a null pointer.
class Arguments {
 public:
  Arguments(void** buffers, int count) : buffers_(buffers), count_(count) {}
  template <class T>
  T* array(int i) const {
    return static_cast<T*>(at(i));
  }
  int64_t integer(int i) const { return *array<int64_t>(i); }
  float real(int i) const { return static_cast<float>(*array<double>(i)); }

 private:
  void* at(int i) const {
    if (i >= count_) throw Failure("argument " + std::to_string(i) + " of " + std::to_string(count_));
    return buffers_[i];
  }
  void** buffers_;
  int count_;
};

using Entry = void (*)(const Arguments&);

inline std::map<std::string, Entry>& entries() {
  static std::map<std::string, Entry> table;
  return table;
}

struct Registration {
  Registration(const char* name, Entry entry) { entries()[name] = entry; }
};

}  // namespace emulate

#define EMULATED(name)                                                 \
  static void run_##name(const ::emulate::Arguments& a);               \
  static const ::emulate::Registration add_##name(#name, &run_##name); \
  static void run_##name(const ::emulate::Arguments& a)
