// Threads for one call: started, joined, forgotten. No pool lives on, so a fork at any time is safe, several callers
// never share state, and no second OpenMP runtime competes with torch's.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace d3s {

// Calls body(item) for item in [0, num_items) on at most num_threads threads; items are taken in any order, so a
// body's result must depend on its item alone. That is what makes results independent of the number of threads.
template <class Body>
void parallel_for(int num_threads, int64_t num_items, const Body& body) {
  if (num_threads > num_items) num_threads = static_cast<int>(num_items);
  if (num_threads <= 1) {
    for (int64_t item = 0; item < num_items; item++) body(item);
    return;
  }
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < num_items;) body(item);
  };
  std::vector<std::thread> others;
  others.reserve(num_threads - 1);
  try {
    for (int i = 1; i < num_threads; i++) others.emplace_back(work);
  } catch (const std::exception&) {
    // The system gives no more threads (ulimit, cgroup): the ones there are, and this one, do all of the work.
  }
  work();
  for (auto& thread : others) thread.join();
}

}  // namespace d3s
