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
//
// A state is num_parts lists in places 0 to num_parts - 1, largest sum first. Only lists that hold an index are stored:
// those with a sum stand in the first places in their order, so that most merges append one list at the end; a list of
// zero lengths alone has its place beside it, anywhere after them.
class Differencing {
 public:
  Differencing(const int64_t* lengths, int64_t n, int64_t num_parts, int64_t group)
      : lengths_(lengths), n_(n), num_parts_(num_parts), group_(group), next_(n, -1), order_(n) {
    for (int64_t i = 0; i < n; i++) order_[i] = i;
    std::stable_sort(order_.begin(), order_.end(), [&](int64_t i, int64_t j) { return lengths[i] > lengths[j]; });
  }

  void run(int64_t* part) {
    if (!n_) return;
    using Entry = std::tuple<int64_t, int64_t, int64_t>;  // smallest sum - largest sum, serial number, slot
    std::vector<Entry> entries;
    const int64_t num_first = (n_ + group_ - 1) / group_;
    for (int64_t s = 0; s < num_first; s++) entries.emplace_back(-spread(first_state(s)), s, -1);
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> heap(std::greater<Entry>(), std::move(entries));
    std::vector<State> states;  // those that were merged; a first one is made when it is its turn
    std::vector<int64_t> free_slots;
    auto take = [&] {
      const auto [key, serial, slot] = heap.top();
      heap.pop();
      if (slot < 0) return first_state(serial);
      free_slots.push_back(slot);
      return std::move(states[slot]);
    };
    int64_t serial = num_first;
    while (heap.size() > 1) {
      State a = take();
      merge(a, take());
      if (free_slots.empty()) {
        free_slots.push_back(static_cast<int64_t>(states.size()));
        states.emplace_back();
      }
      const int64_t slot = free_slots.back();
      free_slots.pop_back();
      heap.emplace(-spread(a), serial++, slot);
      states[slot] = std::move(a);
    }
    const State last = take();
    for (const Piece& piece : last)
      for (int64_t i = piece.first; i >= 0; i = next_[i]) part[i] = piece.place;
  }

 private:
  struct Piece {
    int64_t sum, place, first, last;  // a chain of indices through next_
  };
  using State = std::vector<Piece>;  // by place

  State first_state(int64_t serial) const {
    State state;
    for (int64_t j = serial * group_; j < std::min(n_, (serial + 1) * group_); j++)
      state.push_back({lengths_[order_[j]], j - serial * group_, order_[j], order_[j]});
    return state;
  }

  int64_t spread(const State& state) const {
    const bool full = static_cast<int64_t>(state.size()) == num_parts_;  // else one list is empty: a sum of 0
    return state.front().sum - (full ? state.back().sum : 0);
  }

  // The largest of one with the smallest of the other, in order of their sums; equal sums keep their places.
  void merge(State& a, const State& b) {
    if (b.size() == 1 && b[0].sum > 0 && b[0].sum <= a.back().sum && static_cast<int64_t>(a.size()) < num_parts_) {
      a.push_back(b[0]);  // into the last place, which is empty, and from there to the end of the sums
      a.back().place = static_cast<int64_t>(a.size()) - 1;
      return;
    }
    State loads, zeros;
    auto add = [&](const Piece& piece) {
      if (piece.sum > 0) {
        loads.push_back(piece);
      } else {
        zeros.push_back(piece);
        zeros.back().place -= static_cast<int64_t>(loads.size());  // now: how many sums of 0 stand before it
      }
    };
    auto from_end = b.rbegin();
    for (Piece piece : a) {
      for (; from_end != b.rend() && num_parts_ - 1 - from_end->place < piece.place; ++from_end)
        add({from_end->sum, num_parts_ - 1 - from_end->place, from_end->first, from_end->last});
      if (from_end != b.rend() && num_parts_ - 1 - from_end->place == piece.place) {
        piece.sum += from_end->sum;
        next_[piece.last] = from_end->first;
        piece.last = from_end->last;
        ++from_end;
      }
      add(piece);
    }
    for (; from_end != b.rend(); ++from_end)
      add({from_end->sum, num_parts_ - 1 - from_end->place, from_end->first, from_end->last});
    std::stable_sort(loads.begin(), loads.end(), [](const Piece& x, const Piece& y) { return x.sum > y.sum; });
    const int64_t num_loads = static_cast<int64_t>(loads.size());
    for (int64_t p = 0; p < num_loads; p++) loads[p].place = p;
    for (Piece& piece : zeros) {
      piece.place += num_loads;
      loads.push_back(piece);
    }
    a.swap(loads);
  }

  const int64_t* lengths_;
  int64_t n_, num_parts_, group_;
  std::vector<int64_t> next_, order_;
};

inline void balanced_partition(const int64_t* lengths, int64_t n, int64_t num_parts, int64_t group, int64_t* part) {
  Differencing(lengths, n, num_parts, group).run(part);
}

}  // namespace d3s
