// The two ways in: emulate_call for ctypes, and main for sanitizer builds, which replays one recorded call with every
// buffer in an allocation of its own.
#include <cstdio>
#include <fstream>
#include <memory>
#include <vector>

#include "registry.h"

namespace {

std::string failure;

int64_t read_size(std::istream& in) {
  int64_t size = 0;
  in.read(reinterpret_cast<char*>(&size), sizeof(size));
  return size;
}

}  // namespace

// Null, or what went wrong.
extern "C" const char* emulate_call(const char* name, void** buffers, int count, int order, uint64_t seed) {
  try {
    emulate::set_order(static_cast<emulate::Order>(order), seed);
    const auto entry = emulate::entries().find(name);
    if (entry == emulate::entries().end()) throw emulate::Failure(std::string("no kernel is called ") + name);
    entry->second(emulate::Arguments(buffers, count));
    return nullptr;
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
}

// replay FILE: order, seed, name, number of buffers, then each buffer's size (-1: null) and bytes. The buffers after
// the call are written over FILE, in the same order.
int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::ifstream in(argv[1], std::ios::binary);
  const int64_t order = read_size(in), seed = read_size(in);
  std::string name(read_size(in), ' ');
  in.read(name.data(), static_cast<std::streamsize>(name.size()));
  std::vector<std::unique_ptr<char[]>> owners(read_size(in));
  std::vector<void*> buffers;
  std::vector<int64_t> sizes;
  for (auto& owner : owners) {
    sizes.push_back(read_size(in));
    if (sizes.back() >= 0) {
      owner.reset(new char[sizes.back()]);
      in.read(owner.get(), sizes.back());
    }
    buffers.push_back(owner.get());
  }
  if (!in) return 2;
  const char* problem = emulate_call(name.c_str(), buffers.data(), static_cast<int>(buffers.size()),
                                     static_cast<int>(order), static_cast<uint64_t>(seed));
  if (problem != nullptr) {
    fprintf(stderr, "%s\n", problem);
    return 1;
  }
  std::ofstream out(argv[1], std::ios::binary);
  for (size_t i = 0; i < owners.size(); ++i) {
    if (sizes[i] > 0) out.write(owners[i].get(), sizes[i]);
  }
  return out ? 0 : 2;
}
