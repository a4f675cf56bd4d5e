// Which instruction set runs is decided here, at run time, by the processor at hand: never by the build machine's.
#include <atomic>
#include <cstring>

#include "d3s/kernels.hpp"

namespace d3s {
namespace {

bool runs(const Kernels& k) {
#if defined(D3S_X86_KERNELS)
  if (&k == &kernels_avx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx2") &&
           __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  }
  if (&k == &kernels_avx2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
  return &k == &kernels_base;
}

#if defined(D3S_X86_KERNELS)
const Kernels* const all[] = {&kernels_avx512, &kernels_avx2, &kernels_base};
#else
const Kernels* const all[] = {&kernels_base};
#endif

const Kernels* best() {
  for (const Kernels* k : all)
    if (runs(*k)) return k;
  return &kernels_base;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* k = chosen.load(std::memory_order_relaxed);
  if (!k) {
    static const Kernels* const found = best();
    k = found;
  }
  return *k;
}

bool choose_kernels(const char* name) {
  if (!*name) {
    chosen = nullptr;
    return true;
  }
  for (const Kernels* k : all) {
    if (!std::strcmp(k->name, name) && runs(*k)) {
      chosen = k;
      return true;
    }
  }
  return false;
}

const char* supported_kernels() {
  static char text[64];
  static const bool made = [] {
    for (const Kernels* k : all) {
      if (!runs(*k)) continue;
      if (*text) std::strcat(text, " ");
      std::strcat(text, k->name);
    }
    return true;
  }();
  (void)made;
  return text;
}

}  // namespace d3s
