// Launchers of the kernels on raw device pointers and a stream; they queue work and return.
#pragma once
#include "d3s/cuda/max_variance.cuh"
#include "d3s/cuda/row_stats.cuh"
#include "d3s/cuda/top_share.cuh"

namespace d3s {
namespace cuda {

constexpr int MOST_BLOCKS = 1024;  // of a histogram: several per multiprocessor, and few enough bins to add up

template <class T>
void launch_row_stats(const void* logits, const int64_t* local_targets, int64_t rows, int64_t row_stride,
                      int64_t num_valid, float c, float* stats, cudaStream_t stream) {
  if (rows)
    D3S_LAUNCH((row_stats_kernel<T>), rows, ROW_THREADS, stream, static_cast<const typename T::raw*>(logits),
               local_targets, rows, row_stride, num_valid, c, stats);
}

template <class T>
void launch_row_backward(const void* logits, void* out, const int64_t* local_targets, int64_t rows, int64_t row_stride,
                         int64_t out_stride, int64_t columns, int64_t num_valid, float c, const RowGrads& grads,
                         cudaStream_t stream) {
  if (rows)
    D3S_LAUNCH((row_backward_kernel<T>), rows, ROW_THREADS, stream, static_cast<const typename T::raw*>(logits),
               static_cast<typename T::raw*>(out), local_targets, row_stride, out_stride, columns, num_valid, c, grads);
}

inline void launch_max_variance(const double* values, const int64_t* tie_key, const int64_t* order,
                                const int64_t* borders, const int64_t* items_at, int64_t segments, int64_t m,
                                void* items, double* sums, uint8_t* mask, int* status, cudaStream_t stream) {
  if (segments)
    D3S_LAUNCH(max_variance_kernel, segments, VARIANCE_THREADS, stream, values, tie_key, order, borders, items_at, m,
               static_cast<Item*>(items), sums, mask, status);
}

inline int64_t share_blocks(int64_t n) {
  const int64_t blocks = (n + SHARE_THREADS * 8 - 1) / (SHARE_THREADS * 8);
  return blocks < 1 ? 1 : blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS;
}

inline void launch_share_histogram(const float* scores, const int64_t* uid, const int64_t* position, int64_t n,
                                   int level, int shift, int bits, const void* state, void* counts,
                                   cudaStream_t stream) {
  D3S_LAUNCH(share_histogram_kernel, share_blocks(n), SHARE_THREADS, stream, scores, uid, position, n, level, shift,
             bits, static_cast<const ShareState*>(state), static_cast<unsigned long long*>(counts));
}

inline void launch_share_pick(int level, int shift, int bits, void* state, void* counts, cudaStream_t stream) {
  D3S_LAUNCH(share_pick_kernel, 1, SHARE_THREADS, stream, level, shift, bits, static_cast<ShareState*>(state),
             static_cast<unsigned long long*>(counts));
}

inline void launch_share_mask(const float* scores, const int64_t* uid, const int64_t* position, int64_t n,
                              const void* state, uint8_t* mask, cudaStream_t stream) {
  if (n)
    D3S_LAUNCH(share_mask_kernel, share_blocks(n), SHARE_THREADS, stream, scores, uid, position, n,
               static_cast<const ShareState*>(state), mask);
}

}  // namespace cuda
}  // namespace d3s
