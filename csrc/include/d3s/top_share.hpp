// One rank's part of the exact selection of the largest scores over all ranks.
//
// The caller (d3s_megatron/ops/top_share.py) reduces the small arrays made here over the ranks and says what to look at
// next; nothing here knows of other ranks. The order of the steps:
//   sample      histogram of a few scores          -> a bracket [low, high] that holds the border almost surely
//   split       ONE read of all scores: bits of those above and of those inside the bracket, and a list of the latter
//   column 0..2 ends and histograms of keys, then of uid, then of position among what is still undecided
//   write       the mask; until then its memory holds the bits, so that no other is touched
// Where the list overflows (millions of tied zeros), or no mask is made, the scores are read again.
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
  static constexpr int FIRST_BITS = 11;  // digits of the sample's two histograms

  TopShare(const float* scores, const int64_t* uid, const int64_t* position, int64_t n, int num_threads)
      : x_(scores), uid_(uid), position_(position), n_(n), threads_(num_threads) {}

  // counts[0..2048) += weight for the leading 11 bits of a sample; weight * size of the sample ~ 256 n.
  // Returns the size: all scores, or a power of two that makes the sample cost a tenth of what reading all does.
  int64_t sample(int64_t* counts) {
    const int log2_size = n_ < (int64_t{1} << 24)   ? 14
                          : n_ < (int64_t{1} << 25) ? 15
                          : n_ < (int64_t{1} << 27) ? 16
                                                    : 17;
    const bool whole = n_ <= int64_t{1} << log2_size;
    const int64_t num = whole ? n_ : int64_t{1} << log2_size;
    sample_.resize(num);
    weight_ = num ? n_ * 256 / num : 0;
    uint64_t state = 0x9E3779B97F4A7C15u;
    for (int64_t start = 0, end; start < num; start = end) {
      // One score of every stretch, at a random place in it: a stride alone could beat with the layout of the batch.
      // Places first, loads after: the loads miss every cache, and this way many of them are in flight.
      int64_t places[64];
      end = std::min(num, start + 64);
      for (int64_t i = start; i < end; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        const uint64_t at = static_cast<uint64_t>(i) << (48 - log2_size) | state >> (16 + log2_size);  // of 2^48
        places[i - start] = whole ? i : scaled(at, n_);
        __builtin_prefetch(x_ + places[i - start]);
      }
      for (int64_t i = start; i < end; i++) {
        sample_[i] = key_of(x_[places[i - start]]);
        counts[sample_[i] >> (32 - FIRST_BITS)] += weight_;
      }
    }
    return num;
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
  // mask may be null: then only the border is wanted. Else it belongs to this object until write().
  void split(uint32_t low, uint32_t high, uint8_t* mask, int64_t* out) {
    low_ = low;
    high_ = high;
    mask_ = mask;
    // Parts end where the mask's large pages do: two threads that meet in a page would both pay for zeroing it.
    const int64_t first =
        std::min(n_, mask ? PART - static_cast<int64_t>(reinterpret_cast<uintptr_t>(mask) % PART) : PART);
    parts_.clear();
    parts_.resize(n_ ? 1 + (n_ - first + PART - 1) / PART : 0);
    parallel_for(n_ < (1 << 18) ? 1 : threads_, static_cast<int64_t>(parts_.size()), [&](int64_t p) {
      Part& part = parts_[p];
      part.start = p ? first + (p - 1) * PART : 0;
      part.size = p ? std::min(PART, n_ - part.start) : first;
      const int64_t capacity = (part.size <= (1 << 17) ? part.size : part.size / 16) + SLACK;
      if (mask && part.size < 64) part.few.reset(new uint8_t[BYTES_A_WORD]);
      part.bits = !mask ? nullptr : part.few ? part.few.get() : mask + part.start;
      part.values.reset(static_cast<float*>(std::malloc(capacity * sizeof(float))));
      part.counts = kernels().split(x_ + part.start, part.size, score_of(low), score_of(high), part.bits,
                                    part.values.get(), part.values ? capacity : 0);
      if (!part.counts.complete) part.values.reset();
    });
    out[0] = out[1] = out[2] = 0;
    for (const Part& part : parts_) {
      out[0] += part.counts.above;
      out[1] += part.counts.inside;
      out[2] |= part.counts.broken;
    }
    level_ = 0;
    pooled_ = false;
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
  // Few survive a round: they are then pooled, and later rounds do not pass over the lists again.
  void narrow(int64_t first, int64_t last) {
    std::vector<int64_t> kept;
    first_ = first;
    last_ = last;
    if (pooled_) {
      for (int64_t v : pool_)
        if (v >= first && v <= last) kept.push_back(v);
      pool_.swap(kept);
      return;
    }
    std::mutex mutex;
    bool small = true;
    each_part([&](int64_t p) {
      std::vector<int64_t> here;
      bool fits = true;
      each_value(p, [&](int64_t v) {
        if (static_cast<int64_t>(here.size()) < POOL) here.push_back(v);
        else fits = false;
      });
      std::lock_guard<std::mutex> lock(mutex);
      small &= fits;
      if (small) kept.insert(kept.end(), here.begin(), here.end());
    });
    pooled_ = small;
    if (small) pool_.swap(kept);
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
        if (bin < static_cast<uint64_t>(num_bins)) here[bin]++;
        else fits_here = false;
      });
      std::lock_guard<std::mutex> lock(mutex);
      for (int64_t b = 0; b < num_bins; b++) out[b] += here[b];
      fits &= fits_here;
    });
    return fits;
  }

  // The mask: key above `key`, or equal and (uid, position) up to the tie's. Once: the bits are gone then.
  void write(int64_t key, int64_t tie_uid, int64_t tie_position) const {
    const float border = score_of(static_cast<uint32_t>(key));
    const bool all_ties = tie_uid == INT64_MAX && tie_position == INT64_MAX;
    auto tie_kept = [&](int64_t i) {
      return all_ties || uid_[i] < tie_uid || (uid_[i] == tie_uid && position_[i] <= tie_position);
    };
    parallel_for(n_ < (1 << 18) ? 1 : threads_, static_cast<int64_t>(parts_.size()), [&](int64_t p) {
      const Part& part = parts_[p];
      if (!part.values) {
        for (int64_t i = part.start; i < part.start + part.size; i++)
          mask_[i] = x_[i] > border || (x_[i] == border && tie_kept(i));
        return;
      }
      std::vector<int64_t> tied;
      const float *first = part.values.get(), *end = first + part.counts.inside;
      if (!all_ties && std::find(first, end, border) != end) {
        each_inside(part, [&](int64_t i, float x) {
          if (x == border) tied.push_back(i);
        });
      }
      kernels().expand(part.bits, end, part.size, border, mask_ + part.start);
      for (int64_t i : tied) mask_[i] = tie_kept(i);
    });
  }

 private:
  static constexpr int64_t PART = int64_t{1} << 21;  // scores a task takes: 8 MB of them, 2 MB of mask
  static constexpr int64_t SLACK = 64;               // split() stores whole vectors
  static constexpr int64_t BYTES_A_WORD = 16;        // of bits: 64 above and 64 inside
  static constexpr int64_t POOL = int64_t{1} << 14;  // survivors of a part that are worth keeping

  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  struct Part {
    int64_t start = 0, size = 0;
    SplitCounts counts{};
    uint8_t* bits = nullptr;                // as split() makes them: where the mask of these scores will be,
    std::unique_ptr<uint8_t[]> few;         // or here where that is too short
    std::unique_ptr<float[], Free> values;  // the scores inside, in order; null where they were too many
  };

  // Calls visit(index, score) for every score of a part that is inside the bracket.
  template <class Visit>
  void each_inside(const Part& part, const Visit& visit) const {
    if (!part.values || !part.bits) {
      const float low = score_of(low_), high = score_of(high_);
      for (int64_t i = part.start; i < part.start + part.size; i++)
        if (x_[i] >= low && x_[i] <= high) visit(i, x_[i]);
      return;
    }
    const float* value = part.values.get();
    for (int64_t at = 0; at < part.size; at += 64) {
      uint64_t inside;
      std::memcpy(&inside, part.bits + at / 64 * BYTES_A_WORD + 8, 8);
      for (; inside; inside &= inside - 1) visit(part.start + at + __builtin_ctzll(inside), *value++);
    }
  }

  static int64_t scaled(uint64_t of_2_48, int64_t n) {
    return static_cast<int64_t>(static_cast<unsigned __int128>(of_2_48) * static_cast<uint64_t>(n) >> 48);
  }

  void set_level(int level, int64_t first, int64_t last) {
    level_ = level;
    first_ = first;
    last_ = last;
    pooled_ = false;
  }

  int threads_for_lists() const {
    int64_t work = 0;
    for (const Part& part : parts_) work += part.counts.complete ? part.counts.inside : part.size;
    return work < (1 << 18) ? 1 : threads_;
  }

  template <class Body>
  void each_part(const Body& body) const {
    if (pooled_) body(0);
    else parallel_for(threads_for_lists(), static_cast<int64_t>(parts_.size()), body);
  }

  // Calls body(value) for every undecided value of a part.
  template <class Body>
  void each_value(int64_t p, const Body& body) const {
    if (pooled_) {
      for (int64_t v : pool_) body(v);
      return;
    }
    const Part& part = parts_[p];
    // One comparison, rarely true; two would each be a coin toss for the branch predictor.
    const uint64_t first = static_cast<uint64_t>(first_), width = static_cast<uint64_t>(last_) - first;
    auto in_range = [&](int64_t v) { return static_cast<uint64_t>(v) - first <= width; };
    auto look_at_key = [&](float x) {
      const int64_t v = ~static_cast<int64_t>(key_of(x));
      if (in_range(v)) body(v);
    };
    if (level_ == 0) {
      if (part.values) std::for_each(part.values.get(), part.values.get() + part.counts.inside, look_at_key);
      else each_inside(part, [&](int64_t, float x) { look_at_key(x); });
      return;
    }
    const float border = score_of(key_);
    each_inside(part, [&](int64_t i, float x) {
      if (x != border) return;
      if (level_ > 1 && uid_[i] != tie_uid_) return;
      const int64_t v = level_ == 1 ? uid_[i] : position_[i];
      if (in_range(v)) body(v);
    });
  }

  const float* x_;
  const int64_t *uid_, *position_;
  int64_t n_;
  int threads_;
  std::vector<uint32_t> sample_;
  int64_t weight_ = 0;
  uint8_t* mask_ = nullptr;
  std::vector<Part> parts_;
  uint32_t low_ = LEAST_KEY, high_ = LARGEST_KEY, key_ = 0;
  int level_ = 0;
  bool pooled_ = false;  // the undecided are in pool_, not in the lists
  std::vector<int64_t> pool_;
  int64_t first_ = INT64_MIN, last_ = INT64_MAX, tie_uid_ = 0;
};

}  // namespace d3s
