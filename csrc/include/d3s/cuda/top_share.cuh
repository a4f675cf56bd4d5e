// Radix selection of the largest scores with its state on the device: histogram, (reduction over ranks), pick, again.
// Nothing is read back between the rounds, so they can be queued ahead or captured in a CUDA graph.
//
// Three levels in turn: the score's key (3 rounds of 11, 11, 10 bits), then the uid (6 rounds) and the position
// (6 rounds) among equals. A level that is decided early turns the remaining rounds into no-ops.
#pragma once
#include "d3s/cuda/device.cuh"

namespace d3s {
namespace cuda {

constexpr int SHARE_THREADS = 256;
constexpr int SHARE_BINS = 2048;
constexpr int SHARE_COUNTS = SHARE_BINS + 2;  // and how many scores are NaN and infinite, in the first round

// Everything a round needs to know; all of it is unsigned and ascending is from the first taken to the last.
struct ShareState {
  uint64_t prefix[3];  // of each level: the digits that are decided, in place
  int64_t nth;         // of the values that share the prefixes, which one (from 1) is the last taken
  int64_t total;       // how many they are
  int64_t done;        // 1: from here on every tie is taken
  int64_t broken[2];   // NaN and infinite scores
};

__device__ __forceinline__ uint64_t share_key(float x) {
  const uint32_t u = __float_as_uint(x + 0.0f);  // -0 ties with 0
  return ~(u ^ (static_cast<uint32_t>(static_cast<int32_t>(u) >> 31) | 0x80000000u)) & 0xffffffffu;
}

__device__ __forceinline__ uint64_t share_order(int64_t v) { return static_cast<uint64_t>(v) ^ (uint64_t{1} << 63); }

// The value of a score's token at a level.
__device__ __forceinline__ uint64_t share_value(int level, float x, const int64_t* uid, const int64_t* position,
                                                int64_t i) {
  return level == 0 ? share_key(x) : share_order(level == 1 ? uid[i] : position[i]);
}

// counts += how many undecided values have each digit [shift, shift + bits) of the level.
__global__ void __launch_bounds__(SHARE_THREADS)
    share_histogram_kernel(const float* scores, const int64_t* uid, const int64_t* position, int64_t n, int level,
                           int shift, int bits, const ShareState* state, unsigned long long* counts) {
  __shared__ unsigned int bins[SHARE_COUNTS];
  if (state->done) return;
  for (int b = threadIdx.x; b < SHARE_COUNTS; b += SHARE_THREADS) bins[b] = 0;
  __syncthreads();
  const int width = level == 0 ? 32 : 64, known = shift + bits;
  const bool first = level == 0 && known == width;
  const uint64_t key = state->prefix[0], tie_uid = state->prefix[1], prefix = state->prefix[level];
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * SHARE_THREADS + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * SHARE_THREADS) {
    const float x = scores[i];
    if (first && !(fabsf(x) <= 3.4028234663852886e38f)) atomicAdd(&bins[x == x ? SHARE_BINS + 1 : SHARE_BINS], 1u);
    if (level > 0 && share_key(x) != key) continue;
    if (level > 1 && share_order(uid[i]) != tie_uid) continue;
    const uint64_t v = share_value(level, x, uid, position, i);
    if (known < width && (v >> known) != (prefix >> known)) continue;
    atomicAdd(&bins[(v >> shift) & ((1u << bits) - 1)], 1u);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < SHARE_COUNTS; b += SHARE_THREADS)
    if (bins[b]) atomicAdd(&counts[b], static_cast<unsigned long long>(bins[b]));
}

// One block. Finds the digit that holds the nth value, narrows the state to it, clears the counts for the next round.
// In a level's last round, a tie that is taken whole ends the search.
__global__ void __launch_bounds__(SHARE_THREADS)
    share_pick_kernel(int level, int shift, int bits, ShareState* state, unsigned long long* counts) {
  constexpr int RUN = SHARE_BINS / SHARE_THREADS;
  __shared__ unsigned long long of_thread[SHARE_THREADS];
  if (state->done) return;
  const int tid = threadIdx.x;
  const int64_t nth = state->nth;
  unsigned long long sum = 0;
  for (int j = 0; j < RUN; j++) sum += counts[tid * RUN + j];
  of_thread[tid] = sum;
  __syncthreads();
  int64_t before = 0;
  for (int t = 0; t < tid; t++) before += static_cast<int64_t>(of_thread[t]);
  for (int j = 0; j < RUN; j++) {
    const int64_t here = static_cast<int64_t>(counts[tid * RUN + j]);
    if (before < nth && nth <= before + here) {  // of one thread only
      state->prefix[level] |= static_cast<uint64_t>(tid * RUN + j) << shift;
      state->nth = nth - before;
      state->total = here;
      if (shift == 0 && state->nth == here) state->done = 1 + level;
    }
    before += here;
  }
  __syncthreads();
  if (tid == 0 && level == 0 && shift + bits == 32) {
    state->broken[0] = static_cast<int64_t>(counts[SHARE_BINS]);
    state->broken[1] = static_cast<int64_t>(counts[SHARE_BINS + 1]);
  }
  __syncthreads();
  for (int b = tid; b < SHARE_COUNTS; b += SHARE_THREADS) counts[b] = 0;
}

// mask[i] = 1 for a score before the border; ties up to (uid, position) of the state.
__global__ void __launch_bounds__(SHARE_THREADS)
    share_mask_kernel(const float* scores, const int64_t* uid, const int64_t* position, int64_t n,
                      const ShareState* state, uint8_t* mask) {
  const uint64_t key = state->prefix[0], tie_uid = state->prefix[1], tie_position = state->prefix[2];
  const int64_t done = state->done;  // 1: all equals of the key, 2: all of the (key, uid) are taken
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * SHARE_THREADS + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * SHARE_THREADS) {
    const uint64_t k = share_key(scores[i]);
    bool kept = k < key || (k == key && done == 1);
    if (k == key && done != 1) {
      const uint64_t u = share_order(uid[i]);
      kept = u < tie_uid || (u == tie_uid && (done == 2 || share_order(position[i]) <= tie_position));
    }
    mask[i] = kept;
  }
}

}  // namespace cuda
}  // namespace d3s
