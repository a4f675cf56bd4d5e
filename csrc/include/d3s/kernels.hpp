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

// Smallest, largest and sum of some float64 values. A NaN or an infinity among them shows in one of the three.
struct ValueRange {
  double low, high, total;
};

// Equal bins 1 to last - 1 from `low` on, everything below in bin 0 and everything above in `last`.
struct BinEdges {
  double low, scale, last;

  __attribute__((always_inline)) int bin_of(double v) const {
    double t = (v - low) * scale + 1.0;
    t = t > 0.0 ? t : 0.0;
    return static_cast<int>(t < last ? t : last);
  }
};

struct BinCell {
  double count, sum;
};

// Two closed ranges of values.
struct NearRanges {
  double low_1, high_1, low_2, high_2;

  __attribute__((always_inline)) bool has(double v) const {
    return ((v >= low_1) & (v <= high_1)) | ((v >= low_2) & (v <= high_2));
  }
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

  // bits holds 16 bytes for every 64 scores, or is null: a bit a score for x[i] > high, then one for low <= x[i] <=
  // high. values lists those inside, in order; `capacity` of them may be written, and the list holds at most capacity -
  // 64: stores are whole vectors.
  SplitCounts (*split)(const float* x, int64_t n, float low, float high, uint8_t* bits, float* values,
                       int64_t capacity);

  // mask[i] = above, or inside with a value from `least` on. Goes from the last score to the first, so that the mask
  // may begin where the bits do; values_end is the end of split's list, which may be read to 64 beyond it.
  void (*expand)(const uint8_t* bits, const float* values_end, int64_t n, float least, uint8_t* mask);

  // Of n > 0 values.
  ValueRange (*value_range)(const double* x, int64_t n);

  // Counts and sums relative to the mean, added to cells[2 b] and cells[2 b + 1], which together are bin b's.
  void (*count_bins)(const double* x, int64_t n, const BinEdges& edges, double mean, BinCell* cells);

  // The values in either range, in order; returns how many. `near` has room for n + 8: stores are whole vectors.
  int64_t (*list_near)(const double* x, int64_t n, const NearRanges& ranges, double* near);

  // mask[i] = x[i] >= top or x[i] <= bottom; returns how many are set.
  int64_t (*mark_outside)(const double* x, int64_t n, double top, double bottom, uint8_t* mask);
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
