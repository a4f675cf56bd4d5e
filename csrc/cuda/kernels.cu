// The one file that nvcc compiles.
#include "api.hpp"
#include "d3s/cuda/launch.cuh"

namespace d3s {
namespace cuda {
namespace {

// The tensors' device for the length of a call; the caller's is put back.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) error_ = cudaSetDevice(device);
  }
  ~OnDevice() {
    if (error_ == cudaSuccess) cudaSetDevice(before_);
  }
  bool ok() const { return error_ == cudaSuccess; }
  const char* name() const { return cudaGetErrorName(error_); }

 private:
  int before_ = 0;
  cudaError_t error_;
};

template <class Launch>
const char* guarded(int device, const Launch& launch) {
  OnDevice on(device);
  if (!on.ok()) return on.name();
  launch();
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorName(error);
}

cudaStream_t as_stream(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace

const char* row_stats(const void* logits, Dtype dtype, const int64_t* local_targets, int64_t rows, int64_t row_stride,
                      int64_t num_valid, float c, float* stats, int device, uintptr_t stream) {
  return guarded(device, [&] {
    auto run = [&](auto type) {
      launch_row_stats<decltype(type)>(logits, local_targets, rows, row_stride, num_valid, c, stats, as_stream(stream));
    };
    dtype == Dtype::f32 ? run(F32{}) : dtype == Dtype::bf16 ? run(BF16{}) : run(F16{});
  });
}

const char* row_backward(const void* logits, void* out, Dtype dtype, const int64_t* local_targets, int64_t rows,
                         int64_t row_stride, int64_t out_stride, int64_t columns, int64_t num_valid, float c,
                         const Grads& g, int device, uintptr_t stream) {
  return guarded(device, [&] {
    const RowGrads grads = {g.m, g.log_z, g.entropy, g.grad_lp, g.grad_h};
    auto run = [&](auto type) {
      launch_row_backward<decltype(type)>(logits, out, local_targets, rows, row_stride, out_stride, columns, num_valid,
                                          c, grads, as_stream(stream));
    };
    dtype == Dtype::f32 ? run(F32{}) : dtype == Dtype::bf16 ? run(BF16{}) : run(F16{});
  });
}

const char* max_variance(const double* values, const int64_t* tie_key, const int64_t* order, const int64_t* borders,
                         const int64_t* items_at, int64_t segments, int64_t m, void* items, double* sums, uint8_t* mask,
                         int* status, int device, uintptr_t stream) {
  return guarded(device, [&] {
    launch_max_variance(values, tie_key, order, borders, items_at, segments, m, items, sums, mask, status,
                        as_stream(stream));
  });
}

const char* share_histogram(const float* scores, const int64_t* uid, const int64_t* position, int64_t n, int level,
                            int shift, int bits, const void* state, void* counts, int device, uintptr_t stream) {
  return guarded(device, [&] {
    launch_share_histogram(scores, uid, position, n, level, shift, bits, state, counts, as_stream(stream));
  });
}

const char* share_pick(int level, int shift, int bits, void* state, void* counts, int device, uintptr_t stream) {
  return guarded(device, [&] { launch_share_pick(level, shift, bits, state, counts, as_stream(stream)); });
}

const char* share_mask(const float* scores, const int64_t* uid, const int64_t* position, int64_t n, const void* state,
                       uint8_t* mask, int device, uintptr_t stream) {
  return guarded(device, [&] { launch_share_mask(scores, uid, position, n, state, mask, as_stream(stream)); });
}

}  // namespace cuda
}  // namespace d3s
