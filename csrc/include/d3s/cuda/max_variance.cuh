// Max-variance subsets of all segments in one launch, a block each, nothing for the host to wait for.
// Sort (bitonic, in scratch that stays in the cache), sums from both ends, the best split, the mask.
#pragma once
#include "d3s/cuda/device.cuh"

namespace d3s {
namespace cuda {

constexpr int VARIANCE_THREADS = 256;

struct Item {
  double value;
  int64_t key;
  int64_t index;  // in the batch; -1 fills up to a power of two
};

__device__ __forceinline__ bool comes_before(const Item& x, const Item& y) {
  if ((x.index < 0) != (y.index < 0)) return y.index < 0;
  if (x.value != y.value) return x.value > y.value;
  if (x.key != y.key) return x.key < y.key;
  return x.index < y.index;
}

// The value and the k of the best split of two; see the tie rule in method 1.6.
struct Best {
  double spread;
  int64_t k;
};

// order [n]: rows sorted by segment; borders [segments + 1] into it. items: per segment a power of two >= its size,
// from items_at[segment] on; sums [2 * (n + segments)] pairs. status is set to 1 where a value is not finite.
__global__ void __launch_bounds__(VARIANCE_THREADS, 1)
    max_variance_kernel(const double* values, const int64_t* tie_key, const int64_t* order, const int64_t* borders,
                        const int64_t* items_at, int64_t m, Item* all_items, double* sums, uint8_t* mask, int* status) {
  __shared__ double of_thread[2 * VARIANCE_THREADS];
  __shared__ Best best_of[VARIANCE_THREADS];
  const int64_t segment = blockIdx.x, first = borders[segment], n = borders[segment + 1] - first;
  const int tid = threadIdx.x;
  for (int64_t i = tid; i < n; i += VARIANCE_THREADS) {
    const double v = values[order[first + i]];
    if (!(fabs(v) <= 1.7976931348623157e308)) *status = 1;
    if (m >= n || m == 0) mask[order[first + i]] = m > 0;
  }
  if (m >= n || m == 0) return;  // the same for the whole block
  Item* items = all_items + items_at[segment];
  const int64_t size = items_at[segment + 1] - items_at[segment];
  for (int64_t i = tid; i < size; i += VARIANCE_THREADS) {
    const int64_t row = i < n ? order[first + i] : -1;
    items[i] = i < n ? Item{values[row], tie_key[row], row} : Item{0.0, 0, -1};
  }
  __syncthreads();
  for (int64_t width = 2; width <= size; width *= 2) {
    for (int64_t step = width / 2; step; step /= 2) {
      for (int64_t i = tid; i < size; i += VARIANCE_THREADS) {
        const int64_t j = i ^ step;
        if (j > i && comes_before(items[j], items[i]) == ((i & width) == 0)) {
          const Item held = items[i];
          items[i] = items[j];
          items[j] = held;
        }
      }
      __syncthreads();
    }
  }
  // Mean, in units of the largest value, so that squares stay in float64.
  const double unit = fmax(fabs(items[0].value), fabs(items[n - 1].value));
  const bool flat = items[0].value == items[n - 1].value;
  double part = 0.0;
  for (int64_t i = tid; i < n; i += VARIANCE_THREADS) part += flat ? 0.0 : items[i].value / unit;
  of_thread[tid] = part;
  __syncthreads();
  double mean = 0.0;
  for (int i = 0; i < VARIANCE_THREADS; i++) mean += of_thread[i];
  mean /= static_cast<double>(n);
  __syncthreads();
  // Sums of the first j from the top and from the bottom, j = 0..m: each thread a run, then the runs' offsets.
  double* top = sums + 4 * (first + segment);  // top sum, top squares, bottom sum, bottom squares, each [m + 1]
  const int64_t stride = m + 1;
  const int64_t run = (m + VARIANCE_THREADS - 1) / VARIANCE_THREADS, from = min(m, tid * run), to = min(m, from + run);
  for (int end = 0; end < 2; end++) {
    double sum = 0.0, squares = 0.0;
    for (int64_t j = from; j < to; j++) {
      const double v = flat ? 0.0 : items[end ? n - 1 - j : j].value / unit - mean;
      sum += v;
      squares += v * v;
    }
    of_thread[2 * tid] = sum;
    of_thread[2 * tid + 1] = squares;
    __syncthreads();
    sum = squares = 0.0;
    for (int t = 0; t < tid; t++) {
      sum += of_thread[2 * t];
      squares += of_thread[2 * t + 1];
    }
    for (int64_t j = from; j < to; j++) {
      const double v = flat ? 0.0 : items[end ? n - 1 - j : j].value / unit - mean;
      sum += v;
      squares += v * v;
      top[(2 * end) * stride + j + 1] = sum;
      top[(2 * end + 1) * stride + j + 1] = squares;
    }
    if (tid == 0) top[(2 * end) * stride] = top[(2 * end + 1) * stride] = 0.0;
    __syncthreads();
  }
  auto spread_at = [&](int64_t k) {
    const double s = top[k] + top[2 * stride + m - k];
    return top[stride + k] + top[3 * stride + m - k] - s * s / static_cast<double>(m);
  };
  double most = -1.0;
  for (int64_t k = tid; k <= m; k += VARIANCE_THREADS) most = fmax(most, spread_at(k));
  best_of[tid] = {most, -1};
  __syncthreads();
  for (int i = 0; i < VARIANCE_THREADS; i++) most = fmax(most, best_of[i].spread);
  __syncthreads();
  const double border = most - 1e-12 * fabs(most);
  int64_t chosen = -1;  // ascending k: a later one wins where it is as balanced
  for (int64_t k = tid; k <= m; k += VARIANCE_THREADS)
    if (spread_at(k) >= border && (chosen < 0 || llabs(2 * k - m) <= llabs(2 * chosen - m))) chosen = k;
  best_of[tid].k = chosen;
  __syncthreads();
  for (int i = 0; i < VARIANCE_THREADS; i++) {
    const int64_t k = best_of[i].k;
    if (k < 0) continue;
    const int64_t off = llabs(2 * k - m), off_chosen = llabs(2 * chosen - m);
    if (chosen < 0 || off < off_chosen || (off == off_chosen && k > chosen)) chosen = k;
  }
  for (int64_t i = tid; i < n; i += VARIANCE_THREADS) mask[items[i].index] = i < chosen || i >= n - (m - chosen);
}

}  // namespace cuda
}  // namespace d3s
