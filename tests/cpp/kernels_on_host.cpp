// The CUDA kernels' source compiled for the host with the emulator, as C functions for tests/cpp/test_cuda_source.py.
#include "d3s/cuda/launch.cuh"

using namespace d3s::cuda;

extern "C" {

void row_stats(int dtype, const void* x, const int64_t* y, int64_t rows, int64_t stride, int64_t valid, float c,
               float* stats) {
  auto run = [&](auto type) { launch_row_stats<decltype(type)>(x, y, rows, stride, valid, c, stats, nullptr); };
  dtype == 0 ? run(F32{}) : dtype == 1 ? run(BF16{}) : run(F16{});
}

void row_backward(int dtype, const void* x, void* out, const int64_t* y, int64_t rows, int64_t stride,
                  int64_t out_stride, int64_t columns, int64_t valid, float c, const float* m, const float* log_z,
                  const float* entropy, const float* grad_lp, const float* grad_h) {
  const RowGrads grads = {m, log_z, entropy, grad_lp, grad_h};
  auto run = [&](auto type) {
    launch_row_backward<decltype(type)>(x, out, y, rows, stride, out_stride, columns, valid, c, grads, nullptr);
  };
  dtype == 0 ? run(F32{}) : dtype == 1 ? run(BF16{}) : run(F16{});
}

void max_variance(const double* values, const int64_t* key, const int64_t* order, const int64_t* borders,
                  const int64_t* items_at, int64_t segments, int64_t m, void* items, double* sums, uint8_t* mask,
                  int* status) {
  launch_max_variance(values, key, order, borders, items_at, segments, m, items, sums, mask, status, nullptr);
}

void share_histogram(const float* x, const int64_t* uid, const int64_t* position, int64_t n, int level, int shift,
                     int bits, const void* state, void* counts) {
  launch_share_histogram(x, uid, position, n, level, shift, bits, state, counts, nullptr);
}

void share_pick(int level, int shift, int bits, void* state, void* counts) {
  launch_share_pick(level, shift, bits, state, counts, nullptr);
}

void share_mask(const float* x, const int64_t* uid, const int64_t* position, int64_t n, const void* state,
                uint8_t* mask) {
  launch_share_mask(x, uid, position, n, state, mask, nullptr);
}

}  // extern "C"
