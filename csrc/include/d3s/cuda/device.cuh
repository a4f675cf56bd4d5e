// What the kernels need of CUDA, from CUDA itself or from the emulator that runs the same source on the host in tests.
#pragma once
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#define D3S_LAUNCH(kernel, grid, block, stream, ...) kernel<<<(grid), (block), 0, (stream)>>>(__VA_ARGS__)
#else
#include "cuda_emulator.hpp"
#endif

namespace d3s {
namespace cuda {

constexpr int WARP = 32;
constexpr unsigned ALL = 0xffffffffu;

struct F32 {
  typedef float raw;
  static __device__ __forceinline__ float get(float v) { return v; }
  static __device__ __forceinline__ float put(float v) { return v; }
};

struct BF16 {
  typedef uint16_t raw;
  static __device__ __forceinline__ float get(uint16_t v) { return __uint_as_float(static_cast<uint32_t>(v) << 16); }
  static __device__ __forceinline__ uint16_t put(float v) {
    const uint32_t u = __float_as_uint(v);
    return v == v ? static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16) : 0x7fc0;
  }
};

struct F16 {
  typedef uint16_t raw;
  static __device__ __forceinline__ float get(uint16_t v) { return __half2float(__ushort_as_half(v)); }
  static __device__ __forceinline__ uint16_t put(float v) { return __half_as_ushort(__float2half_rn(v)); }
};

// Sixteen bytes: what one load or store of a thread moves.
template <class T>
union Pack {
  uint4 words;
  typename T::raw values[16 / sizeof(typename T::raw)];
};

template <class T>
constexpr int PER_PACK = 16 / sizeof(typename T::raw);

// How many entries from p on come before the first 16-byte border; never more than n.
template <class T>
__device__ __forceinline__ int64_t entries_to_border(const typename T::raw* p, int64_t n) {
  const int64_t off = (16 - reinterpret_cast<uintptr_t>(p) % 16) % 16 / sizeof(typename T::raw);
  return off < n ? off : n;
}

}  // namespace cuda
}  // namespace d3s
