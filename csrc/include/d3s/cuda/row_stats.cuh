// Row statistics of vocabulary logits and their backward: one block a row, 16-byte loads, four in flight a thread.
// The same quantities and rules as csrc/include/d3s/row_stats.hpp.
#pragma once
#include "d3s/cuda/device.cuh"

namespace d3s {
namespace cuda {

constexpr int ROW_THREADS = 512;
constexpr int IN_FLIGHT = 4;
constexpr float LOG2E = 1.44269504088896341f, LOG2E_LOW = 1.92596299e-8f, LN2 = 0.693147180559945309f;

// e^(c a) for a <= 0 with the rounding of the exponent given back: exp2 of a rounded 28 alone is off by 1e-6.
__device__ __forceinline__ float exp_of(float a, float scaled, float scaled_low) {
  const float p = a * scaled;
  const float lost = fmaf(a, scaled, -p) + a * scaled_low;
  const float e = exp2f(p);
  return e > 0.0f ? fmaf(e, lost * LN2, e) : e;  // for a = -infinity `lost` is NaN and e is 0
}

// A part of a row: its maximum, Z - 1 and W (see d3s_megatron/ops/row_stats.py). Empty: {-inf, 0, 0}.
struct Part {
  float m, s, w;
};

__device__ __forceinline__ void merge(Part& x, const Part& y, float c) {
  const bool first = x.m >= y.m;  // selected field by field: a reference chosen at run time would live on the stack
  const float high_m = first ? x.m : y.m, high_s = first ? x.s : y.s, high_w = first ? x.w : y.w;
  const float low_m = first ? y.m : x.m, low_s = first ? y.s : x.s, low_w = first ? y.w : x.w;
  const bool nothing = low_m == -INFINITY;  // its s is 0, or NaN where a NaN is all it saw
  const float drop = nothing ? 0.0f : (high_m - low_m) * c, shrink = nothing ? 0.0f : expf(-drop);
  const float z = nothing ? low_s : shrink * (1.0f + low_s);
  x.m = high_m;
  x.s = high_s + z;
  x.w = high_w + shrink * low_w + (z > 0.0f ? drop * z : 0.0f);
}

struct RowScale {
  float c, scaled, scaled_low;
};

// Takes in N values; the first that is a new maximum is left out of s, as the 1 of Z = 1 + s.
template <int N>
__device__ __forceinline__ void take(Part& part, const float (&v)[N], const RowScale& k) {
  float top = v[0];
  bool is_nan = v[0] != v[0];
#pragma unroll
  for (int i = 1; i < N; i++) {
    top = v[i] > top || top != top ? v[i] : top;
    is_nan |= v[i] != v[i];
  }
  bool fresh = false;
  if (top > part.m) {
    if (part.m != -INFINITY) {
      const float drop = (top - part.m) * k.c, shrink = expf(-drop);
      part.w = shrink * (part.w + drop * (1.0f + part.s));
      part.s = shrink * (1.0f + part.s);
    }
    part.m = top;
    fresh = true;
  }
  if (is_nan) part.s = NAN;
  if (part.m == -INFINITY) return;
  float s = 0.0f, w = 0.0f;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float a = v[i] - part.m;
    const bool leave_out = fresh && v[i] == part.m;
    fresh = fresh && !leave_out;
    const float e = leave_out ? 0.0f : exp_of(a, k.scaled, k.scaled_low);
    s += e;
    w += e > 0.0f ? a * e : 0.0f;
  }
  part.s += s;
  part.w -= k.c * w;
}

// stats [4, rows]: m, s, W, and the target's logit where local_targets[row] is a column here, else 0.
template <class T>
__global__ void __launch_bounds__(ROW_THREADS)
    row_stats_kernel(const typename T::raw* logits, const int64_t* local_targets, int64_t rows, int64_t row_stride,
                     int64_t num_valid, float c, float* stats) {
  __shared__ Part of_warp[ROW_THREADS / WARP];
  const int64_t row = blockIdx.x;
  const typename T::raw* x = logits + row * row_stride;
  const RowScale k = {c, c * LOG2E, fmaf(c, LOG2E, -(c * LOG2E)) + c * LOG2E_LOW};
  Part part = {-INFINITY, 0.0f, 0.0f};
  const int64_t head = entries_to_border<T>(x, num_valid), packs = (num_valid - head) / PER_PACK<T>;
  const int64_t tail = head + packs * PER_PACK<T>;
  const uint4* body = reinterpret_cast<const uint4*>(x + head);
  int64_t p = threadIdx.x;
  for (; p + (IN_FLIGHT - 1) * ROW_THREADS < packs; p += IN_FLIGHT * ROW_THREADS) {
    Pack<T> pack[IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; j++) pack[j].words = body[p + j * ROW_THREADS];
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; j++) {
      float v[PER_PACK<T>];
#pragma unroll
      for (int i = 0; i < PER_PACK<T>; i++) v[i] = T::get(pack[j].values[i]);
      take(part, v, k);
    }
  }
  for (; p < packs; p += ROW_THREADS) {
    Pack<T> pack;
    pack.words = body[p];
    float v[PER_PACK<T>];
#pragma unroll
    for (int i = 0; i < PER_PACK<T>; i++) v[i] = T::get(pack.values[i]);
    take(part, v, k);
  }
  const int64_t edge = threadIdx.x < head ? threadIdx.x : tail + threadIdx.x - head;
  if (edge < num_valid) {  // fewer than a pack on each side: the first threads take one entry each
    const float v[1] = {T::get(x[edge])};
    take(part, v, k);
  }
  for (int step = WARP / 2; step; step /= 2) {
    const Part other = {__shfl_xor_sync(ALL, part.m, step), __shfl_xor_sync(ALL, part.s, step),
                        __shfl_xor_sync(ALL, part.w, step)};
    merge(part, other, c);
  }
  if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = part;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < ROW_THREADS / WARP; i++) merge(part, of_warp[i], c);
    if (part.m == INFINITY) part.s = part.w = NAN;
    const int64_t y = local_targets[row];
    stats[row] = part.m;
    stats[rows + row] = part.s;
    stats[2 * rows + row] = part.w;
    stats[3 * rows + row] = y >= 0 ? T::get(x[y]) : 0.0f;
  }
}

struct RowGrads {
  const float *m, *log_z, *entropy, *grad_lp;
  const float* grad_h;  // null: no gradient through the entropy
};

// out = d loss / d logits, rows of out_stride entries; out may be the logits themselves. Padding columns get 0.
template <class T>
__global__ void __launch_bounds__(ROW_THREADS)
    row_backward_kernel(const typename T::raw* logits, typename T::raw* out, const int64_t* local_targets,
                        int64_t row_stride, int64_t out_stride, int64_t columns, int64_t num_valid, float c,
                        RowGrads grads) {
  const int64_t row = blockIdx.x, y = local_targets[row];
  const typename T::raw* x = logits + row * row_stride;
  typename T::raw* to = out + row * out_stride;
  const float m = grads.m[row], log_z = grads.log_z[row], h = grads.entropy[row];
  const float gl = grads.grad_lp[row] * c, gh = grads.grad_h ? grads.grad_h[row] * c : 0.0f;
  auto grad = [&](float v, bool is_target) {
    const float log_p = (v - m) * c - log_z, p = expf(log_p);
    const float direct = is_target ? -gl * expm1f(log_p) : -gl * p;  // 1 - p without cancelling near 1
    return gh == 0.0f || p == 0.0f ? direct : direct - gh * p * (log_p + h);
  };
  const int64_t head = entries_to_border<T>(x, num_valid);
  const bool aligned = reinterpret_cast<uintptr_t>(to + head) % 16 == 0;
  const int64_t packs = aligned ? (num_valid - head) / PER_PACK<T> : 0, tail = head + packs * PER_PACK<T>;
  for (int64_t q = threadIdx.x; q < packs; q += ROW_THREADS) {
    Pack<T> pack;
    pack.words = reinterpret_cast<const uint4*>(x + head)[q];
#pragma unroll
    for (int i = 0; i < PER_PACK<T>; i++)
      pack.values[i] = T::put(grad(T::get(pack.values[i]), head + q * PER_PACK<T> + i == y));
    reinterpret_cast<uint4*>(to + head)[q] = pack.words;
  }
  for (int64_t i = threadIdx.x; i < head; i += ROW_THREADS) to[i] = T::put(grad(T::get(x[i]), i == y));
  for (int64_t i = tail + threadIdx.x; i < num_valid; i += ROW_THREADS) to[i] = T::put(grad(T::get(x[i]), i == y));
  for (int64_t i = num_valid + threadIdx.x; i < columns; i += ROW_THREADS) to[i] = T::put(0.0f);
}

}  // namespace cuda
}  // namespace d3s
