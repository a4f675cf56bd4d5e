// The loops that are compiled once per instruction set, as a table of functions on raw pointers.
#pragma once
#include <cstdint>

namespace d3s {

enum class Dtype : int { f32, bf16, f16 };

// What a split of scores by [low, high] found in one segment.
struct SplitCounts {
  int64_t above;   // scores > high
  int64_t inside;  // low <= score <= high
  bool complete;   // all of those inside are listed; else the list is of no use
  bool broken;     // a NaN or an infinity is among the scores
};

struct Kernels {
  const char* name;

  // Adds the statistics of x[0..n) to state = {m, s, W}: see d3s_megatron/ops/row_stats.py. An empty state is {-inf, 0,
  // 0}.
  void (*row_stats)(const void* x, Dtype dtype, int64_t n, float c, double* state);

  // out[i] = grad of the logit x[i]: see reference_backward there; the target's entry is written by the caller.
  // out may be x. has_entropy: grad_h (times c) counts too.
  void (*row_backward)(const void* x, void* out, Dtype dtype, int64_t n, float c, float m, float log_z, float entropy,
                       float grad_lp, float grad_h);

  // mask[i] = x[i] > high (mask may be null); lists offset and value of the scores inside. `capacity` entries
  // of the lists may be written; they hold at most capacity - 48: stores are whole vectors.
  SplitCounts (*split)(const float* x, int64_t n, float low, float high, uint8_t* mask, uint32_t* offsets,
                       float* values, int64_t capacity);
};

extern const Kernels kernels_base;
#if defined(D3S_X86_KERNELS)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

const Kernels& kernels();               // the best this processor runs, unless a test chose another
bool choose_kernels(const char* name);  // for tests; "" goes back to the best; false: not on this processor
const char* supported_kernels();        // space-separated names

}  // namespace d3s
