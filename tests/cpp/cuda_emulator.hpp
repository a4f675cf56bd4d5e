// Runs CUDA kernels on the host, for tests: every thread of a block is a fiber, blocks run one after another.
// Enough of CUDA for csrc/include/d3s/cuda: block barriers, full-warp shuffles, atomics, shared memory.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__ static
#define __device__
#define __forceinline__ inline
#define __shared__ static  // one block at a time: a static is shared by exactly its threads
#define __launch_bounds__(...)

struct uint4 {
  uint32_t x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
typedef void* cudaStream_t;

namespace emulator {

constexpr int WARP = 32;

struct Fiber {
  ucontext_t context;
  unsigned index = 0;
  bool finished = false;
};

struct Block {
  std::vector<Fiber> fibers;
  ucontext_t scheduler;
  Fiber* running = nullptr;
  std::function<void()> body;
  unsigned arrived = 0, generation = 0;                 // of the block's barrier
  std::vector<unsigned> warp_arrived, warp_generation;  // of each warp's
  std::vector<uint32_t> slots;                          // what a thread offers to the others of its warp
};

inline Block* block = nullptr;
inline dim3 block_index, grid_size, block_size;

inline void yield() { swapcontext(&block->running->context, &block->scheduler); }

inline void enter() {
  block->body();
  block->running->finished = true;
  yield();
}

inline void wait_for(unsigned& arrived, unsigned& generation, unsigned count) {
  const unsigned mine = generation;
  if (++arrived == count) {
    arrived = 0;
    generation++;
  } else {
    while (generation == mine) yield();
  }
}

constexpr size_t STACK = 32 << 10;

inline char* stack_of(unsigned thread) {  // kept between launches: making 256 stacks costs more than most kernels
  static char* const stacks = static_cast<char*>(std::malloc(1024 * STACK));
  return stacks + thread * STACK;
}

inline void run_block(unsigned threads, const std::function<void()>& body) {
  Block b;
  b.fibers.resize(threads);
  b.warp_arrived.assign(threads / WARP, 0);
  b.warp_generation.assign(threads / WARP, 0);
  b.slots.resize(threads);
  b.body = body;
  block = &b;
  for (unsigned i = 0; i < threads; i++) {
    Fiber& f = b.fibers[i];
    f.index = i;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stack_of(i);
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, reinterpret_cast<void (*)()>(enter), 0);
  }
  for (bool busy = true; busy;) {
    busy = false;
    // backwards: a kernel that needs the order in which threads run would be caught by the lowest ones running last
    for (unsigned i = threads; i-- > 0;) {
      Fiber& f = b.fibers[i];
      if (f.finished) continue;
      busy = true;
      b.running = &f;
      swapcontext(&b.scheduler, &f.context);
    }
  }
  block = nullptr;
}

struct ThreadIndex {
  struct X {
    operator unsigned() const { return block->running->index; }
  } x;
};

}  // namespace emulator

static emulator::ThreadIndex threadIdx;
#define blockIdx emulator::block_index
#define gridDim emulator::grid_size

inline void __syncthreads() {
  emulator::Block& b = *emulator::block;
  emulator::wait_for(b.arrived, b.generation, static_cast<unsigned>(b.fibers.size()));
}

inline float __shfl_xor_sync(unsigned mask, float value, int step) {
  emulator::Block& b = *emulator::block;
  if (mask != 0xffffffffu) std::abort();
  const unsigned me = b.running->index, warp = me / emulator::WARP;
  auto meet = [&] { emulator::wait_for(b.warp_arrived[warp], b.warp_generation[warp], emulator::WARP); };
  std::memcpy(&b.slots[me], &value, 4);
  meet();
  float other;
  std::memcpy(&other, &b.slots[me ^ static_cast<unsigned>(step)], 4);
  meet();
  return other;
}

template <class T>
inline T atomicAdd(T* at, T value) {
  const T before = *at;
  *at += value;
  return before;
}

inline uint32_t __float_as_uint(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float __uint_as_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
inline int64_t min(int64_t x, int64_t y) { return x < y ? x : y; }

typedef _Float16 __half;
inline __half __ushort_as_half(uint16_t h) {
  __half x;
  std::memcpy(&x, &h, 2);
  return x;
}
inline uint16_t __half_as_ushort(__half x) {
  uint16_t h;
  std::memcpy(&h, &x, 2);
  return h;
}
inline float __half2float(__half x) { return static_cast<float>(x); }
inline __half __float2half_rn(float x) { return static_cast<__half>(x); }

#define D3S_LAUNCH(kernel, grid, threads, stream, ...)            \
  do {                                                            \
    (void)(stream);                                               \
    emulator::grid_size.x = static_cast<unsigned>(grid);          \
    for (unsigned g = 0; g < emulator::grid_size.x; g++) {        \
      emulator::block_index.x = g;                                \
      emulator::run_block(threads, [&] { kernel(__VA_ARGS__); }); \
    }                                                             \
  } while (0)
