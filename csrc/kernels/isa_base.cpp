// Any processor with a 128-bit vector unit (x86-64 without AVX2, AArch64).
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#define D3S_ISA base
#define D3S_LANES 4
#include "kernels.inl"

namespace d3s {
const Kernels kernels_base = base::table("base");
}  // namespace d3s
