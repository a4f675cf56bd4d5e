#include <immintrin.h>
#define D3S_ISA avx512
#define D3S_LANES 16
#include "kernels.inl"

namespace d3s {
const Kernels kernels_avx512 = {"avx512", avx512::row_stats_any, avx512::row_backward_any, avx512::split,
                                avx512::expand};
}  // namespace d3s
