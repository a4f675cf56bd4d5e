// The launchers as plain functions, so that only kernels.cu is compiled by nvcc. Each returns a CUDA error's name or
// null.
#pragma once
#include <cstdint>

#include "d3s/kernels.hpp"

namespace d3s {
namespace cuda {

struct Grads {
  const float *m, *log_z, *entropy, *grad_lp, *grad_h;
};

const char* row_stats(const void* logits, Dtype dtype, const int64_t* local_targets, int64_t rows, int64_t row_stride,
                      int64_t num_valid, float c, float* stats, int device, uintptr_t stream);
const char* row_backward(const void* logits, void* out, Dtype dtype, const int64_t* local_targets, int64_t rows,
                         int64_t row_stride, int64_t out_stride, int64_t columns, int64_t num_valid, float c,
                         const Grads& grads, int device, uintptr_t stream);
const char* max_variance(const double* values, const int64_t* tie_key, const int64_t* order, const int64_t* borders,
                         const int64_t* items_at, int64_t segments, int64_t m, void* items, double* sums, uint8_t* mask,
                         int* status, int device, uintptr_t stream);
const char* share_histogram(const float* scores, const int64_t* uid, const int64_t* position, int64_t n, int level,
                            int shift, int bits, const void* state, void* counts, int device, uintptr_t stream);
const char* share_pick(int level, int shift, int bits, void* state, void* counts, int device, uintptr_t stream);
const char* share_mask(const float* scores, const int64_t* uid, const int64_t* position, int64_t n, const void* state,
                       uint8_t* mask, int device, uintptr_t stream);

}  // namespace cuda
}  // namespace d3s
