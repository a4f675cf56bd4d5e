// Integer packing, exactly as ops/packing.py does it: first fit (Garey et al. 1972) into bins of a capacity, and
// balanced partition by the largest differencing method (Karmarkar and Karp 1982).
#pragma once
#include <algorithm>
#include <cstdint>
#include <queue>
#include <tuple>
#include <vector>

namespace d3s {

// bin[i] = the first bin with room for lengths[i], each in 0 to capacity; returns how many bins were opened.
inline int64_t first_fit(const int64_t* lengths, int64_t n, int64_t capacity, int64_t* bin) {
  int64_t size = 1;
  while (size < n) size *= 2;
  std::vector<int64_t> room(2 * size, capacity);  // a tree of the largest room below each node; leaf size + b is bin b
  int64_t num_bins = 0;
  for (int64_t i = 0; i < n; i++) {
    int64_t node = 1;
    while (node < size) node = room[2 * node] >= lengths[i] ? 2 * node : 2 * node + 1;
    bin[i] = node - size;
    num_bins = std::max(num_bins, bin[i] + 1);
    room[node] -= lengths[i];
    while (node > 1) {
      node /= 2;
      room[node] = std::max(room[2 * node], room[2 * node + 1]);
    }
  }
  return num_bins;
}

// part[i] = which of num_parts lists index i goes to. With group > 1, lists get one index of every `group` in turn, so
// that their counts stay equal; else group is 1. Sums must stay inside int64: the caller checks.
inline void balanced_partition(const int64_t* lengths, int64_t n, int64_t num_parts, int64_t group, int64_t* part) {
  struct Piece {
    int64_t sum, first, last;  // a chain of indices through `next`; first < 0: empty
  };
  std::vector<int64_t> next(n, -1), order(n);
  for (int64_t i = 0; i < n; i++) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return lengths[i] > lengths[j]; });
  std::vector<std::vector<Piece>> states;
  using Entry = std::tuple<int64_t, int64_t, int64_t>;  // smallest sum - largest sum, serial number, state
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> heap;
  for (int64_t start = 0; start < n; start += group) {
    std::vector<Piece> pieces(num_parts, Piece{0, -1, -1});
    for (int64_t j = start; j < std::min(n, start + group); j++)
      pieces[j - start] = {lengths[order[j]], order[j], order[j]};
    heap.emplace(pieces.back().sum - pieces.front().sum, static_cast<int64_t>(states.size()), states.size());
    states.push_back(std::move(pieces));
  }
  int64_t serial = static_cast<int64_t>(states.size());
  while (heap.size() > 1) {
    const int64_t a = std::get<2>(heap.top());
    heap.pop();
    const int64_t b = std::get<2>(heap.top());
    heap.pop();
    std::vector<Piece>& merged = states[a];
    for (int64_t p = 0; p < num_parts; p++) {  // the largest of one with the smallest of the other
      const Piece& other = states[b][num_parts - 1 - p];
      merged[p].sum += other.sum;
      if (other.first < 0) continue;
      if (merged[p].first < 0) merged[p].first = other.first;
      else next[merged[p].last] = other.first;
      merged[p].last = other.last;
    }
    std::vector<Piece>().swap(states[b]);
    std::stable_sort(merged.begin(), merged.end(), [](const Piece& x, const Piece& y) { return x.sum > y.sum; });
    heap.emplace(merged.back().sum - merged.front().sum, serial++, a);
  }
  if (!n) return;
  const std::vector<Piece>& pieces = states[std::get<2>(heap.top())];
  for (int64_t p = 0; p < num_parts; p++)
    for (int64_t i = pieces[p].first; i >= 0; i = next[i]) part[i] = p;
}

}  // namespace d3s
