// Row statistics of vocabulary logits and their backward, over rows and threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "d3s/kernels.hpp"
#include "d3s/parallel.hpp"

namespace d3s {

// A matrix of logits: `rows` rows of `columns` unit-stride entries, `row_stride` entries apart.
struct Logits {
  void* data;
  Dtype dtype;
  int64_t rows, columns, row_stride;

  int64_t size_of_entry() const { return dtype == Dtype::f32 ? 4 : 2; }
  char* row(int64_t r) const { return static_cast<char*>(data) + r * row_stride * size_of_entry(); }
  float entry(int64_t r, int64_t column) const {
    const char* at = row(r) + column * size_of_entry();
    if (dtype == Dtype::f32) {
      float f;
      std::memcpy(&f, at, 4);
      return f;
    }
    uint16_t h;
    std::memcpy(&h, at, 2);
    return dtype == Dtype::bf16 ? bf16_to_float(h) : half_to_float_scalar(h);
  }
  void set_entry(int64_t r, int64_t column, float value) const;

  static float bf16_to_float(uint16_t h) {
    const uint32_t u = static_cast<uint32_t>(h) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
  static float half_to_float_scalar(uint16_t h);
};

inline float Logits::half_to_float_scalar(uint16_t h) {
  const float sign = (h & 0x8000) ? -1.0f : 1.0f;
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024.0f + mantissa, exponent - 25) : std::ldexp(1.0f * mantissa, -24));
}

inline void Logits::set_entry(int64_t r, int64_t column, float value) const {
  char* at = row(r) + column * size_of_entry();
  if (dtype == Dtype::f32) {
    std::memcpy(at, &value, 4);
    return;
  }
  uint16_t h;
  if (dtype == Dtype::bf16) {
    uint32_t u;
    std::memcpy(&u, &value, 4);
    h = std::isnan(value) ? 0x7fc0 : static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  } else {  // round to nearest even through the spacing of half floats at this magnitude
    const float a = std::fabs(value);
    if (std::isnan(value)) {
      h = 0x7e00;
    } else if (a >= 65520.0f) {
      h = 0x7c00;
    } else {
      const int exponent = a < 0x1p-14f ? -14 : std::ilogb(a);
      const float units = std::nearbyint(std::ldexp(a, 10 - exponent));  // 1024..2048, or less when subnormal
      h = static_cast<uint16_t>((exponent + 14) * 1024 + static_cast<int>(units));
    }
    h |= std::signbit(value) ? 0x8000 : 0;
  }
  std::memcpy(at, &h, 2);
}

constexpr int64_t LOGITS_PER_THREAD = 1 << 17;  // about 40 us of work: less is not worth a thread

inline int threads_for(int num_threads, int64_t work, int64_t grain) {
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(num_threads, work / grain)));
}

// state [3, rows] double (m, s, W) takes in columns [0, num_valid); target [rows] double becomes the logit of
// local_targets where that is a column here and stays as it is where it is -1.
inline void row_stats(const Logits& x, const int64_t* local_targets, int64_t num_valid, float c, double* state,
                      double* target, int num_threads) {
  const Kernels& k = kernels();
  num_threads = threads_for(num_threads, x.rows * num_valid, LOGITS_PER_THREAD);
  const int64_t step = num_threads == 1 ? x.rows : std::max<int64_t>(1, x.rows / (8 * num_threads));
  parallel_for(num_threads, x.rows ? (x.rows + step - 1) / step : 0, [&](int64_t item) {
    for (int64_t r = item * step; r < std::min(x.rows, (item + 1) * step); r++) {
      double row[3] = {state[r], state[x.rows + r], state[2 * x.rows + r]};
      k.row_stats(x.row(r), x.dtype, num_valid, c, row);
      for (int j = 0; j < 3; j++) state[j * x.rows + r] = row[j];
      if (local_targets[r] >= 0 && local_targets[r] < x.columns) target[r] = x.entry(r, local_targets[r]);
    }
  });
}

struct RowGrads {
  const float *m, *log_z, *entropy, *grad_lp;
  const float* grad_h;  // null: no gradient through the entropy
};

// out = d loss / d logits; out may be x itself. Padding columns get 0.
inline void row_backward(const Logits& x, const Logits& out, const int64_t* local_targets, int64_t num_valid, float c,
                         const RowGrads& g, int num_threads) {
  const Kernels& k = kernels();
  num_threads = threads_for(num_threads, x.rows * num_valid, LOGITS_PER_THREAD);
  const int64_t step = num_threads == 1 ? x.rows : std::max<int64_t>(1, x.rows / (8 * num_threads));
  parallel_for(num_threads, x.rows ? (x.rows + step - 1) / step : 0, [&](int64_t item) {
    for (int64_t r = item * step; r < std::min(x.rows, (item + 1) * step); r++) {
      const float grad_h = g.grad_h ? g.grad_h[r] : 0.0f;
      const int64_t y = local_targets[r];
      const bool here = y >= 0 && y < num_valid;
      double d_target = 0;
      if (here) {  // 1 - p of the target, without cancelling where p is close to 1
        const double log_p = (static_cast<double>(x.entry(r, y)) - g.m[r]) * c - g.log_z[r], p = std::exp(log_p);
        d_target = -static_cast<double>(g.grad_lp[r]) * std::expm1(log_p);
        if (grad_h != 0 && !(p == 0)) d_target -= static_cast<double>(grad_h) * p * (log_p + g.entropy[r]);
        d_target *= c;
      }
      k.row_backward(x.row(r), out.row(r), x.dtype, num_valid, c, g.m[r], g.log_z[r], g.entropy[r], g.grad_lp[r],
                     grad_h);
      if (here) out.set_entry(r, y, static_cast<float>(d_target));
      const int64_t rest = (x.columns - num_valid) * x.size_of_entry();
      if (rest) std::memset(out.row(r) + num_valid * x.size_of_entry(), 0, rest);
    }
  });
}

}  // namespace d3s
