#include <immintrin.h>
#define D3S_ISA avx512
#define D3S_LANES 16
#include "kernels.inl"

namespace d3s {
const Kernels kernels_avx512 = avx512::table("avx512");
}  // namespace d3s
