// The kernels, once per instruction set. The includer defines D3S_ISA and D3S_LANES and includes the intrinsics.
#include <cmath>
#include <cstdint>

#include "d3s/kernels.hpp"

namespace d3s {
namespace D3S_ISA {
namespace {

#include "simd.hpp"

constexpr int CHUNK = 32;  // logical lanes; summed in one fixed order, so AVX2 and AVX-512 agree bit for bit
constexpr int VECTORS = CHUNK / LANES;
constexpr int64_t BLOCK = 4096;  // a block is read from memory once and from the first-level cache once more
constexpr float NO_MASS = -INFINITY;

struct Sums {
  vf z[VECTORS], w[VECTORS];
};

template <class T>
D3S_INLINE void add_chunk(const typename T::raw* x, vf m, vf c, vf scaled, vf lowest, Sums& sums) {
  for (int j = 0; j < VECTORS; j++) {
    vf v = T::load(x + j * LANES);
    vf a = v - m, e{};
    if (T::wide) {  // what the rounding of v - m lost (Knuth's two-sum), worth 1e-6 of e^a when a is near -20
      vf b = a - v;
      e = (v - (a - b)) - (m + b);
      e = (e == e) ? e : vf{};  // infinities: there is nothing to correct
    }
    vf p = exp_scaled<T::wide>(a, e, c, scaled, lowest);
    sums.z[j] += p;
    a = larger(lowest, a);  // 0 * -infinity must be 0
    sums.w[j] = fma(a, p, sums.w[j]);
  }
}

D3S_INLINE double add_lanes(const vf* v) {
  double total = 0;
  for (int j = 0; j < VECTORS; j++)
    for (int i = 0; i < LANES; i++) total += v[j][i];
  return total;
}

template <class T>
D3S_INLINE float largest(const typename T::raw* x, int64_t n) {
  vf best[VECTORS];
  for (int j = 0; j < VECTORS; j++) best[j] = splat(NO_MASS);
  int64_t i = 0;
  for (; i + CHUNK <= n; i += CHUNK)
    for (int j = 0; j < VECTORS; j++) best[j] = larger(T::load(x + i + j * LANES), best[j]);
  float m = NO_MASS;
  for (int j = 0; j < VECTORS; j++)
    for (int l = 0; l < LANES; l++) m = best[j][l] > m ? best[j][l] : m;
  for (; i < n; i++) {
    float v = T::one(x + i);
    m = v > m ? v : m;
  }
  return m;
}

template <class T>
void row_stats(const typename T::raw* x, int64_t n, float c, double* state) {
  double m = state[0], s = state[1], w = state[2];
  const vf vc = splat(c), scaled = splat(c * LOG2E), lowest = splat(LOWEST_POWER / (c * LOG2E));
  for (int64_t start = 0; start < n; start += BLOCK) {
    const int64_t size = n - start < BLOCK ? n - start : BLOCK;
    const typename T::raw* block = x + start;
    const float block_max = largest<T>(block, size);
    int64_t top = -1;
    if (block_max > m) {
      for (top = 0; T::one(block + top) != block_max;) top++;
      if (m != -INFINITY) {  // the sums so far, their old top term included, become part of the rest
        const double drop = (block_max - m) * c, shrink = std::exp(-drop);
        w = shrink * (w + drop * (1 + s));
        s = shrink * (1 + s);
      }
      m = block_max;
    }
    if (m == -INFINITY) {  // nothing but -infinity so far, unless a NaN hides among it
      for (int64_t i = 0; i < size; i++)
        if (T::one(block + i) != T::one(block + i)) s = NAN;
      continue;
    }
    Sums sums{};
    const vf vm = splat(static_cast<float>(m));
    int64_t i = 0;
    const int64_t top_chunk = top < 0 ? -1 : top / CHUNK * CHUNK;
    for (; i + CHUNK <= size; i += CHUNK)
      if (i != top_chunk) add_chunk<T>(block + i, vm, vc, scaled, lowest, sums);
    // The chunk with the top term and the last, short one: a copy in which what must not count is -infinity.
    auto add_copy = [&](int64_t from) {
      typename T::raw copy[CHUNK];
      for (int64_t j = 0; j < CHUNK; j++) {
        const bool counts = from + j < size && from + j != top;
        copy[j] = counts ? block[from + j] : T::minus_infinity;
      }
      add_chunk<T>(copy, vm, vc, scaled, lowest, sums);
    };
    if (top_chunk >= 0) add_copy(top_chunk);
    if (i < size && i != top_chunk) add_copy(i);
    s += add_lanes(sums.z);
    w -= static_cast<double>(c) * add_lanes(sums.w);
  }
  if (m == INFINITY) s = w = NAN;
  state[0] = m;
  state[1] = s;
  state[2] = w;
}

template <class T, bool kEntropy>
void row_backward(const typename T::raw* x, typename T::raw* out, int64_t n, float c, float m, float log_z,
                  float entropy, float grad_lp, float grad_h) {
  const vf vm = splat(m), vc = splat(c), shift = splat(-log_z), lowest = splat(LOWEST_POWER / LOG2E);
  const vf gl = splat(-grad_lp * c), gh = splat(-grad_h * c), h = splat(entropy), one = splat(1.0f);
  auto chunk = [&](const typename T::raw* from, typename T::raw* to) __attribute__((always_inline)) {
    for (int j = 0; j < VECTORS; j++) {
      vf log_p = larger(lowest, fma(T::load(from + j * LANES) - vm, vc, shift));
      vf p = exp_scaled<false>(log_p, one, one, splat(LOG2E), lowest);
      vf g = kEntropy ? fma(gh, log_p + h, gl) : gl;
      T::store(to + j * LANES, p * g);
    }
  };
  int64_t i = 0;
  for (; i + CHUNK <= n; i += CHUNK) chunk(x + i, out + i);
  if (i < n) {
    typename T::raw from[CHUNK] = {}, to[CHUNK];
    for (int64_t j = i; j < n; j++) from[j - i] = x[j];
    chunk(from, to);
    for (int64_t j = i; j < n; j++) out[j] = to[j - i];
  }
}

void row_stats_any(const void* x, Dtype dtype, int64_t n, float c, double* state) {
  switch (dtype) {
    case Dtype::f32:
      return row_stats<F32>(static_cast<const float*>(x), n, c, state);
    case Dtype::bf16:
      return row_stats<BF16>(static_cast<const uint16_t*>(x), n, c, state);
    case Dtype::f16:
      return row_stats<F16>(static_cast<const uint16_t*>(x), n, c, state);
  }
}

template <class T>
void row_backward_typed(const void* x, void* out, int64_t n, float c, float m, float log_z, float entropy,
                        float grad_lp, float grad_h) {
  auto* from = static_cast<const typename T::raw*>(x);
  auto* to = static_cast<typename T::raw*>(out);
  if (grad_h != 0)  // a NaN counts as not 0
    row_backward<T, true>(from, to, n, c, m, log_z, entropy, grad_lp, grad_h);
  else row_backward<T, false>(from, to, n, c, m, log_z, entropy, grad_lp, grad_h);
}

void row_backward_any(const void* x, void* out, Dtype dtype, int64_t n, float c, float m, float log_z, float entropy,
                      float grad_lp, float grad_h) {
  switch (dtype) {
    case Dtype::f32:
      return row_backward_typed<F32>(x, out, n, c, m, log_z, entropy, grad_lp, grad_h);
    case Dtype::bf16:
      return row_backward_typed<BF16>(x, out, n, c, m, log_z, entropy, grad_lp, grad_h);
    case Dtype::f16:
      return row_backward_typed<F16>(x, out, n, c, m, log_z, entropy, grad_lp, grad_h);
  }
}

#include "split.inl"
#include "variance.inl"

constexpr Kernels table(const char* name) {
  return {name, row_stats_any, row_backward_any, split, expand, value_range, count_bins, list_near, mark_outside};
}

}  // namespace
}  // namespace D3S_ISA
}  // namespace d3s
