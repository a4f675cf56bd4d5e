#include <immintrin.h>
#define D3S_ISA avx2
#define D3S_LANES 8
#include "kernels.inl"

namespace d3s {
const Kernels kernels_avx2 = avx2::table("avx2");
}  // namespace d3s
