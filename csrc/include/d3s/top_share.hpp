// One rank's part of the exact selection of the largest scores over all ranks.
//
// The caller (d3s_megatron/ops/top_share.py) reduces the small arrays made here over the ranks and says what to look at
// next; nothing here knows of other ranks. The order of the steps:
//   sample      histogram of a few scores          -> a bracket [low, high] that holds the border almost surely
//   split       ONE read of all scores: mask of those above, list of those inside the bracket
//   column 0..2 ends and histograms of keys, then of uid, then of position among what is still undecided
//   write       the undecided scores' mask
// Where the list overflows (millions of tied zeros) the same histograms are made from the scores themselves.
#pragma once
#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "d3s/kernels.hpp"
#include "d3s/parallel.hpp"

namespace d3s {

// Ascending keys in the order of the floats; -0.0 and 0.0 share one.
inline uint32_t key_of(float x) {
  x += 0.0f;
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u ^ (static_cast<uint32_t>(static_cast<int32_t>(u) >> 31) | 0x80000000u);
}

inline float score_of(uint32_t key) {
  const uint32_t u = key & 0x80000000u ? key ^ 0x80000000u : ~key;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

constexpr uint32_t LEAST_KEY = 0x00800000u, LARGEST_KEY = 0xff7fffffu;  // of -FLT_MAX and FLT_MAX

class TopShare {
 public:
  static constexpr int64_t SEGMENT = int64_t{1} << 21;  // scores a task takes: 8 MB, offsets fit 32 bits
  static constexpr int64_t SLACK = 64;                  // split() stores whole vectors
  static constexpr int FIRST_BITS = 11;                 // digits of the sample's two histograms

  TopShare(const float* scores, const int64_t* uid, const int64_t* position, int64_t n, int num_threads)
      : x_(scores), uid_(uid), position_(position), n_(n), threads_(num_threads) {}

  // counts[0..2048) += weight for the leading 11 bits of a sample of at most `size` scores; weight * sample ~ 256 n.
  void sample(int64_t size, int64_t* counts) {
    sample_.clear();
    const int64_t num = std::min(n_, size);
    weight_ = num ? n_ * 256 / num : 0;
    uint64_t state = 0x9E3779B97F4A7C15u;
    for (int64_t i = 0; i < num; i++) {
      // one score of every stretch, at a hashed place in it: a stride alone could beat with the layout of the batch
      const int64_t from = stretch(i, num), width = stretch(i + 1, num) - from;
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      sample_.push_back(key_of(x_[from + static_cast<int64_t>((state >> 20) % static_cast<uint64_t>(width))]));
      counts[sample_.back() >> (32 - FIRST_BITS)] += weight_;
    }
  }

  // The next 11 bits of the sample within the two leading digits given; counts is [2][2048].
  void refine(uint32_t low_digit, uint32_t high_digit, int64_t* counts) const {
    constexpr int SHIFT = 32 - 2 * FIRST_BITS, BINS = 1 << FIRST_BITS;
    for (uint32_t key : sample_) {
      const uint32_t digit = key >> (32 - FIRST_BITS), next = (key >> SHIFT) & (BINS - 1);
      if (digit == low_digit) counts[next] += weight_;
      if (digit == high_digit) counts[BINS + next] += weight_;
    }
  }

  // Sets the bracket of keys [low, high]. out = scores above it, scores in it, 1 where a score is not finite.
  // mask may be null. With everything in the bracket nothing is read twice: lists are given up at once.
  void split(uint32_t low, uint32_t high, uint8_t* mask, int64_t* out) {
    low_ = low;
    high_ = high;
    const int64_t num = (n_ + SEGMENT - 1) / SEGMENT;
    const int64_t capacity = n_ <= (1 << 17) ? n_ + SLACK : std::min(n_, SEGMENT) / 16 + SLACK;
    parts_.clear();
    parts_.resize(num);
    parallel_for(n_ < (1 << 18) ? 1 : threads_, num, [&](int64_t p) {
      Part& part = parts_[p];
      const int64_t start = p * SEGMENT, size = std::min(SEGMENT, n_ - start);
      part.offsets.reset(static_cast<uint32_t*>(std::malloc(capacity * sizeof(uint32_t))));
      part.values.reset(static_cast<float*>(std::malloc(capacity * sizeof(float))));
      const bool room = part.offsets && part.values;
      part.counts = kernels().split(x_ + start, size, score_of(low), score_of(high), mask ? mask + start : nullptr,
                                    part.offsets.get(), part.values.get(), room ? capacity : 0);
      if (!part.counts.complete) part.drop_lists();
    });
    out[0] = out[1] = out[2] = 0;
    for (const Part& part : parts_) {
      out[0] += part.counts.above;
      out[1] += part.counts.inside;
      out[2] |= part.counts.broken;
    }
    level_ = 0;
  }

  void count_broken(int64_t* out) const {
    out[0] = out[1] = 0;
    for (int64_t i = 0; i < n_; i++) {
      out[0] += x_[i] != x_[i];
      out[1] += x_[i] - x_[i] != 0 && x_[i] == x_[i];
    }
  }

  // ---- the undecided, by level: 0 keys in the bracket, 1 uids of one key, 2 positions of one (key, uid) ----
  void look_at_keys() { set_level(0, ~static_cast<int64_t>(high_), ~static_cast<int64_t>(low_)); }
  void look_at_uids(int64_t key) {
    key_ = static_cast<uint32_t>(key);
    set_level(1, INT64_MIN, INT64_MAX);
  }
  void look_at_positions(int64_t uid) {
    tie_uid_ = uid;
    set_level(2, INT64_MIN, INT64_MAX);
  }

  // Only values from first to last stay undecided. Keys are negated (~key): ascending is from the highest score.
  void narrow(int64_t first, int64_t last) {
    first_ = first;
    last_ = last;
  }

  // ends = [-1 - smallest, largest] of the undecided values; INT64_MIN twice where there are none.
  void ends(int64_t* out) const {
    std::mutex mutex;
    int64_t low = INT64_MAX, high = INT64_MIN;
    each_part([&](int64_t p) {
      int64_t lo = INT64_MAX, hi = INT64_MIN;
      each_value(p, [&](int64_t v) {
        lo = std::min(lo, v);
        hi = std::max(hi, v);
      });
      std::lock_guard<std::mutex> lock(mutex);
      low = std::min(low, lo);
      high = std::max(high, hi);
    });
    out[0] = -1 - low;
    out[1] = high;
  }

  // counts[(v - first) >> shift] += 1 over the undecided values; false where one has no bin.
  bool counts(int64_t first, int shift, int64_t* out, int64_t num_bins) const {
    std::mutex mutex;
    bool fits = true;
    each_part([&](int64_t p) {
      std::vector<int64_t> here(num_bins, 0);
      bool fits_here = true;
      each_value(p, [&](int64_t v) {
        const uint64_t bin = (static_cast<uint64_t>(v) - static_cast<uint64_t>(first)) >> shift;
        if (bin < static_cast<uint64_t>(num_bins)) here[bin]++; else fits_here = false;
      });
      std::lock_guard<std::mutex> lock(mutex);
      for (int64_t b = 0; b < num_bins; b++) out[b] += here[b];
      fits &= fits_here;
    });
    return fits;
  }

  // The mask of the scores in the bracket: key above `key`, or equal and (uid, position) up to the tie's.
  void write(int64_t key, int64_t tie_uid, int64_t tie_position, uint8_t* mask) const {
    const uint32_t border = static_cast<uint32_t>(key);
    auto kept = [&](int64_t i, uint32_t k) {
      if (k != border) return k > border;
      return tie_uid == INT64_MAX || uid_[i] < tie_uid || (uid_[i] == tie_uid && position_[i] <= tie_position);
    };
    each_part([&](int64_t p) {
      const Part& part = parts_[p];
      const int64_t start = p * SEGMENT;
      if (part.counts.complete) {
        for (int64_t j = 0; j < part.counts.inside; j++) {
          const int64_t i = start + part.offsets[j];
          mask[i] = kept(i, key_of(part.values[j]));
        }
      } else {
        for (int64_t i = start; i < std::min(n_, start + SEGMENT); i++) mask[i] = kept(i, key_of(x_[i]));
      }
    });
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  struct Part {
    SplitCounts counts{};
    std::unique_ptr<uint32_t[], Free> offsets;
    std::unique_ptr<float[], Free> values;
    void drop_lists() {
      offsets.reset();
      values.reset();
    }
  };

  int64_t stretch(int64_t i, int64_t num) const { return n_ / num * i + n_ % num * i / num; }

  void set_level(int level, int64_t first, int64_t last) {
    level_ = level;
    first_ = first;
    last_ = last;
  }

  template <class Body>
  void each_part(const Body& body) const {
    int64_t work = 0;
    for (const Part& part : parts_) work += part.counts.complete ? part.counts.inside : SEGMENT;
    parallel_for(work < (1 << 18) ? 1 : threads_, static_cast<int64_t>(parts_.size()), body);
  }

  // Calls body(value) for every undecided value of a part.
  template <class Body>
  void each_value(int64_t p, const Body& body) const {
    const Part& part = parts_[p];
    const int64_t start = p * SEGMENT;
    if (part.counts.complete) {
      for (int64_t j = 0; j < part.counts.inside; j++) visit(start + part.offsets[j], part.values[j], body);
    } else {
      for (int64_t i = start; i < std::min(n_, start + SEGMENT); i++) visit(i, x_[i], body);
    }
  }

  template <class Body>
  void visit(int64_t i, float score, const Body& body) const {
    int64_t v = ~static_cast<int64_t>(key_of(score));
    if (level_ > 0) {
      if (v != ~static_cast<int64_t>(key_)) return;
      v = uid_[i];
      if (level_ > 1) {
        if (v != tie_uid_) return;
        v = position_[i];
      }
    }
    if (v >= first_ && v <= last_) body(v);
  }

  const float* x_;
  const int64_t *uid_, *position_;
  int64_t n_;
  int threads_;
  std::vector<uint32_t> sample_;
  int64_t weight_ = 0;
  std::vector<Part> parts_;
  uint32_t low_ = LEAST_KEY, high_ = LARGEST_KEY, key_ = 0;
  int level_ = 0;
  int64_t first_ = INT64_MIN, last_ = INT64_MAX, tie_uid_ = 0;
};

}  // namespace d3s
