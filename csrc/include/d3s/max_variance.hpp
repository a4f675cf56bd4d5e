// The subset of m of n values with the largest variance: the k highest and m - k lowest (method, section 1.6).
//
// ss(k), m times the variance at k, changes from k to k + 1 by (b - a) phi(k) / m, where b is the (k+1)-th highest, a
// the (m-k)-th lowest, S the sum of the chosen and phi(k) = (m-1) b + (m+1) a - 2 S. phi never increases, so the best
// k is the first with phi(k) <= 0. One histogram of counts and sums says which few values can decide that; only
// those are sorted. Values are taken relative to the mean. One thread: 1e7 values take tens of milliseconds, and sums
// in one order are the same everywhere.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <vector>

#include "d3s/kernels.hpp"

namespace d3s {
namespace max_variance {

constexpr int64_t SORT_BELOW = 4096;     // fewer values are sorted: simpler, and as fast
constexpr double TIE_TOLERANCE = 1e-12;  // relative; splits closer than float64 noise are tied

struct Range {
  double low, high, mean;
};

// k for values given in descending order, by prefix sums from both ends: the rule itself, as in the reference.
inline int64_t split_of_sorted(const double* descending, int64_t n, int64_t m) {
  if (m == 0) return 0;
  if (descending[0] == descending[n - 1]) return (m + 1) / 2;
  const double unit =
      std::max(std::fabs(descending[0]), std::fabs(descending[n - 1]));  // squares must not leave float64
  double mean = 0;
  for (int64_t i = 0; i < n; i++) mean += descending[i] / unit;
  mean /= static_cast<double>(n);
  std::vector<double> ss(m + 1), low_sum(m + 1, 0.0), low_squares(m + 1, 0.0);
  for (int64_t j = 0; j < m; j++) {
    const double v = descending[n - 1 - j] / unit - mean;
    low_sum[j + 1] = low_sum[j] + v;
    low_squares[j + 1] = low_squares[j] + v * v;
  }
  double sum = 0, squares = 0, best = -1;
  for (int64_t k = 0; k <= m; k++) {
    const double s = sum + low_sum[m - k];
    ss[k] = squares + low_squares[m - k] - s * s / static_cast<double>(m);
    best = std::max(best, ss[k]);
    if (k < m) {
      const double v = descending[k] / unit - mean;
      sum += v;
      squares += v * v;
    }
  }
  const double border = best - TIE_TOLERANCE * std::fabs(best);
  int64_t chosen = -1;
  for (int64_t k = 0; k <= m; k++) {
    if (ss[k] < border) continue;
    if (chosen < 0 || std::llabs(2 * k - m) <= std::llabs(2 * chosen - m)) chosen = k;
  }
  return chosen;
}

// The split and the two border values: keep x > top_value and x < bottom_value, and of their equals what is missing.
struct Split {
  int64_t k;
  double top_value, bottom_value;
};

inline Split split_by_sorting(const double* x, int64_t n, int64_t m) {
  std::vector<double> sorted(x, x + n);
  std::sort(sorted.begin(), sorted.end(), [](double a, double b) { return a > b; });
  const int64_t k = split_of_sorted(sorted.data(), n, m);
  return {k, k ? sorted[k - 1] : HUGE_VAL, m - k ? sorted[n - (m - k)] : -HUGE_VAL};
}

// Values that lie between two ascending ranks, sorted, with the sums up to them from one end of all values. What is
// chosen is summed from both ends: as a difference of two large sums, a few of many values would be lost in rounding.
struct Window {
  int64_t first = 0;           // rank of values[0]
  std::vector<double> values;  // ascending
  std::vector<double> sums;    // relative to the mean: sums[i] = of all below values[i], or of values[i] and all above

  bool has(int64_t rank) const { return rank >= first && rank < first + static_cast<int64_t>(values.size()); }
  double at(int64_t rank) const { return values[rank - first]; }
  double sum(int64_t rank) const { return sums[rank - first]; }  // rank may be one past the last
  void finish(double mean, double outside, bool from_top) {
    if (!std::is_sorted(values.begin(), values.end())) std::sort(values.begin(), values.end());
    const size_t size = values.size();
    sums.resize(size + 1);
    sums[from_top ? size : 0] = outside;
    for (size_t i = 0; i < size; i++) {
      if (from_top) sums[size - 1 - i] = sums[size - i] + (values[size - 1 - i] - mean);
      else sums[i + 1] = sums[i] + (values[i] - mean);
    }
  }
};

// Counts and sums of the values in equal bins. Bin edges come from a sample: outliers fall in the end bins and do not
// widen the others.
class Bins {
 public:
  Bins(const double* x, int64_t n, const Range& range) : range_(range), last_(n < (1 << 16) ? 255 : MOST - 1) {
    double sample[SAMPLE];
    for (int64_t i = 0; i < SAMPLE; i++)
      sample[i] = x[(n - 1) / (SAMPLE - 1) * i + (n - 1) % (SAMPLE - 1) * i / (SAMPLE - 1)];
    std::sort(sample, sample + SAMPLE);
    low_ = sample[1];
    width_ = (sample[SAMPLE - 2] - low_) / (last_ - 1);
    scale_ = width_ > 0 && std::isfinite(1 / width_) ? 1 / width_ : 0;  // 0: all values are in bin 1
    edges_ = {low_, scale_, static_cast<double>(last_)};
    BinCell cells[2 * MOST];
    std::fill(cells, cells + 2 * (last_ + 1), BinCell{0, 0});
    kernels().count_bins(x, n, edges_, range.mean, cells);
    rank_[0] = 0;
    below_[0] = above_[last_ + 1] = 0;
    for (int b = 0; b <= last_; b++) {
      const int c = last_ - b;
      rank_[b + 1] = rank_[b] + static_cast<int64_t>(cells[2 * b].count + cells[2 * b + 1].count);
      below_[b + 1] = below_[b] + (cells[2 * b].sum + cells[2 * b + 1].sum);
      above_[c] = above_[c + 1] + (cells[2 * c].sum + cells[2 * c + 1].sum);
    }
  }

  // Bins ascend with the value; below the sample's range is bin 0, above it the last.
  int of(double v) const { return edges_.bin_of(v); }
  int of_rank(int64_t rank) const {  // without a branch on a rank: where a value lies is a coin toss at every step
    int bin = 0;
    for (int step = (last_ + 1) / 2; step; step /= 2) bin += rank_[bin + step] <= rank ? step : 0;
    return bin;
  }
  int64_t first_rank(int bin) const { return rank_[bin]; }
  double sum_below(int bin) const { return below_[bin]; }      // of the bins before it
  double sum_above(int bin) const { return above_[bin + 1]; }  // of the bins after it

  // No value of the bin is outside; an ulp of rounding at an edge is below `noise` in the search.
  double low_end(int b) const {
    return b == 0 || scale_ == 0 ? range_.low : std::max(range_.low, low_ + (b - 1) * width_);
  }
  double high_end(int b) const {
    return b == last_ || scale_ == 0 ? range_.high : std::min(range_.high, low_ + b * width_);
  }

  // Bounds of sums relative to the mean, of the values below a rank and of those from it on. In ascending order, the
  // first of a bin have at most the bin's average each, and the last at least that.
  void bound_below(int64_t rank, double& least, double& most) const {
    const Place at = place(rank);
    least = std::max(below_[at.bin] + at.before * at.low, below_[at.bin + 1] - at.after * at.high);
    most = below_[at.bin] + at.before * std::min(at.average, at.high);
  }
  void bound_above(int64_t rank, double& least, double& most) const {
    const Place at = place(rank);
    least = above_[at.bin + 1] + at.after * std::max(at.average, at.low);
    most = std::min(above_[at.bin + 1] + at.after * at.high, above_[at.bin] - at.before * at.low);
  }

 private:
  struct Place {
    int bin;
    double before, after;       // values of the bin below the rank, and from it on
    double low, average, high;  // of the bin, relative to the mean
  };
  Place place(int64_t rank) const {
    const int b = of_rank(rank);
    const double before = static_cast<double>(rank - rank_[b]), after = static_cast<double>(rank_[b + 1] - rank);
    const double size = before + after, sum = below_[b + 1] - below_[b];
    return {b, before, after, low_end(b) - range_.mean, size > 0 ? sum / size : 0, high_end(b) - range_.mean};
  }

  static constexpr int MOST = 1024, SAMPLE = 128;
  Range range_;
  int last_;  // a power of two less 1
  double low_, width_, scale_;
  BinEdges edges_;
  int64_t rank_[MOST + 1];
  double below_[MOST + 1], above_[MOST + 1];
};

// Finds k by the sign of phi. Returns false where ties or the values' spread ask for the whole sorted order.
inline bool split_by_search(const double* x, int64_t n, int64_t m, const Range& range, Split& split) {
  const double mean = range.mean, dm = static_cast<double>(m);
  const Bins bins(x, n, range);
  // far above the rounding of phi's bounds
  const double noise = (1e-12 * dm + 1e-15 * static_cast<double>(n)) * (range.high - range.low);

  // 1 where phi(k) > 0 for sure, -1 where phi(k) <= 0 for sure, 0 where the bins cannot tell
  auto sign_by_bins = [&](int64_t k) {
    const int64_t b = n - 1 - k, a = m - 1 - k;
    double high_least, high_most, low_least, low_most;
    bins.bound_above(n - k, high_least, high_most);
    bins.bound_below(m - k, low_least, low_most);
    const double s_least = high_least + low_least, s_most = high_most + low_most;
    const int bin_b = bins.of_rank(b), bin_a = bins.of_rank(a);
    auto phi_of = [&](double vb, double va, double s) {
      return (dm - 1) * (vb - mean) + (dm + 1) * (va - mean) - 2 * s;
    };
    if (phi_of(bins.low_end(bin_b), bins.low_end(bin_a), s_most) > noise) return 1;
    if (phi_of(bins.high_end(bin_b), bins.high_end(bin_a), s_least) < -noise) return -1;
    return 0;
  };
  int64_t left = 0, right = m;  // the first k with phi(k) <= 0 is in [left, right]; phi(m) counts as negative
  for (int64_t from = 0, to = m; from < to;) {
    const int64_t k = from + (to - from) / 2;
    const int sign = sign_by_bins(k);
    if (sign > 0) from = left = k + 1;
    else to = k;
  }
  for (int64_t from = left, to = m; from < to;) {
    const int64_t k = from + (to - from) / 2;
    const int sign = sign_by_bins(k);
    if (sign < 0) to = right = k;
    else from = k + 1;
  }

  // Every rank that a decision or a border in [left, right] can ask for, one step more on each side for ties.
  const int64_t k_low = std::max<int64_t>(0, left - 1), k_high = std::min(m, right + 1);
  Window high, low;
  struct Span {
    int from, to;
    double least, most;  // no value of these bins is outside; of() has the last word
  };
  const double slack = 1e-9 * (range.high - range.low);
  auto span_of = [&](int64_t first, int64_t last, Window& window) {
    const int from = bins.of_rank(std::max<int64_t>(0, first)), to = bins.of_rank(std::min(n - 1, last));
    window.first = bins.first_rank(from);
    window.values.reserve(bins.first_rank(to + 1) - window.first);
    return Span{from, to, bins.low_end(from) - slack, bins.high_end(to) + slack};
  };
  const Span for_high = span_of(n - 1 - k_high, n - k_low, high), for_low = span_of(m - 1 - k_high, m - k_low, low);
  constexpr int64_t BLOCK = 1024;
  double near[BLOCK + 8];
  const NearRanges ranges{for_high.least, for_high.most, for_low.least, for_low.most};
  for (int64_t start = 0; start < n; start += BLOCK) {
    const int64_t num = kernels().list_near(x + start, std::min(BLOCK, n - start), ranges, near);
    for (int64_t i = 0; i < num; i++) {
      const int b = bins.of(near[i]);
      if (b >= for_high.from && b <= for_high.to) high.values.push_back(near[i]);
      if (b >= for_low.from && b <= for_low.to) low.values.push_back(near[i]);
    }
  }
  high.finish(mean, bins.sum_above(for_high.to), true);
  low.finish(mean, bins.sum_below(for_low.from), false);

  auto sum_at = [&](int64_t k) { return high.sum(n - k) + low.sum(m - k); };
  auto phi = [&](int64_t k) {
    return (dm - 1) * (high.at(n - 1 - k) - mean) + (dm + 1) * (low.at(m - 1 - k) - mean) - 2 * sum_at(k);
  };
  int64_t k = left;
  for (int64_t to = right; k < to;) {
    const int64_t middle = k + (to - k) / 2;
    if (phi(middle) > 0) k = middle + 1;
    else to = middle;
  }

  // Ties: walk towards the balanced split while what is lost stays below the tolerance.
  const int64_t balanced = (m + 1) / 2;
  const double s0 = sum_at(k), farthest = std::max(range.high - mean, mean - range.low);
  double tolerance = TIE_TOLERANCE * dm * farthest * farthest;  // at least the true one, which costs a pass
  bool exact = false;
  double lost = 0, s = s0;
  const int64_t step = balanced > k ? 1 : -1;
  while (k != balanced) {
    const int64_t at = step > 0 ? k : k - 1;  // the move between at and at + 1
    if (at < 0 || at >= m || !high.has(n - 1 - at) || !low.has(m - 1 - at)) return false;
    const double b = high.at(n - 1 - at) - mean, a = low.at(m - 1 - at) - mean;
    const double s_at = step > 0 ? s : s - (b - a);
    lost -= step * (b - a) * ((dm - 1) * b + (dm + 1) * a - 2 * s_at) / dm;
    if (lost > tolerance) break;
    if (!exact && lost > 0) {  // only now is the variance itself needed
      exact = true;
      if (!high.has(n - k) && k > 0) return false;
      const double top = k ? high.at(n - k) : HUGE_VAL, bottom = k < m ? low.at(m - 1 - k) : -HUGE_VAL;
      int64_t num_top = 0, num_bottom = 0;
      double squares = 0;
      for (int64_t i = 0; i < n; i++) {
        if (x[i] > top || x[i] < bottom) squares += (x[i] - mean) * (x[i] - mean);
        num_top += x[i] > top;
        num_bottom += x[i] < bottom;
      }
      if (k) squares += static_cast<double>(k - num_top) * (top - mean) * (top - mean);
      if (k < m) squares += static_cast<double>(m - k - num_bottom) * (bottom - mean) * (bottom - mean);
      tolerance = TIE_TOLERANCE * std::fabs(squares - s * s / dm);
      if (lost > tolerance) break;
    }
    s = step > 0 ? s + (b - a) : s_at;
    k += step;
  }
  if ((k > 0 && !high.has(n - k)) || (k < m && !low.has(m - 1 - k))) return false;
  split = {k, k ? high.at(n - k) : HUGE_VAL, k < m ? low.at(m - 1 - k) : -HUGE_VAL};
  return true;
}

// Marks the chosen values. Equals of a border value are taken in the order of (tie key, index): the first of them at
// the top, the last of them at the bottom.
inline void mark(const double* x, const int64_t* tie_key, int64_t n, int64_t m, const Split& split, uint8_t* mask) {
  if (kernels().mark_outside(x, n, split.top_value, split.bottom_value, mask) == m) return;  // no tie is cut
  std::vector<int64_t> tops, bottoms;
  int64_t num_top = 0, num_bottom = 0;
  constexpr int64_t BLOCK = 128;
  for (int64_t start = 0; start < n; start += BLOCK) {
    const int64_t end = std::min(n, start + BLOCK);
    int64_t top = 0, bottom = 0, ties = 0;
    for (int64_t i = start; i < end; i++) {  // no branch and no store but the mask's: this loop is vector code
      const bool is_top = x[i] > split.top_value, is_bottom = x[i] < split.bottom_value;
      mask[i] = is_top | is_bottom;
      top += is_top;
      bottom += is_bottom;
      ties += (x[i] == split.top_value) | (x[i] == split.bottom_value);
    }
    num_top += top;
    num_bottom += bottom;
    for (int64_t i = start; ties && i < end; i++) {
      if (x[i] == split.top_value) tops.push_back(i);
      if (x[i] == split.bottom_value) bottoms.push_back(i);
    }
  }
  auto before = [&](int64_t i, int64_t j) { return tie_key[i] != tie_key[j] ? tie_key[i] < tie_key[j] : i < j; };
  const int64_t want_top = split.k - num_top, want_bottom = m - split.k - num_bottom;
  auto take = [&](std::vector<int64_t>& ties, int64_t want, bool first) {
    if (want <= 0) return;
    const int64_t size = static_cast<int64_t>(ties.size()), cut = first ? want : size - want;
    if (cut > 0 && cut < size) std::nth_element(ties.begin(), ties.begin() + cut, ties.end(), before);
    for (int64_t i = first ? 0 : cut; i < (first ? want : size); i++) mask[ties[i]] = 1;
  };
  take(tops, want_top, true);
  take(bottoms, want_bottom, false);
}

inline Range range_of(const double* x, int64_t n) {
  const ValueRange r = kernels().value_range(x, n);
  return {r.low, r.high, r.total / static_cast<double>(n)};
}

inline void select(const double* x, const int64_t* tie_key, int64_t n, int64_t m, const Range& range, uint8_t* mask) {
  if (m >= n || m == 0) {
    std::fill(mask, mask + n, static_cast<uint8_t>(m > 0));
    return;
  }
  Split split;
  if (m == 1) {  // one value has no variance, whichever it is: all splits are tied, and the rule takes the highest
    split = {1, range.high, -HUGE_VAL};
  } else if (range.low == range.high) {
    split = {(m + 1) / 2, range.low, m / 2 ? range.low : -HUGE_VAL};
  } else if (n < SORT_BELOW || !(range.high - range.low > 1e-140 && range.high < 1e140 && range.low > -1e140) ||
             !split_by_search(x, n, m, range, split)) {
    split = split_by_sorting(x, n, m);
  }
  mark(x, tie_key, n, m, split, mask);
}

// Every segment on its own; returns the index of the first value that is not finite, or -1.
inline int64_t select_segments(const double* x, const int64_t* tie_key, const int64_t* segments, int64_t n, int64_t m,
                               uint8_t* mask) {
  if (n == 0) return -1;
  const Range whole = range_of(x, n);
  if (!std::isfinite(whole.mean) || !std::isfinite(whole.low) || !std::isfinite(whole.high))
    for (int64_t i = 0; i < n; i++)  // the sum of finite values may leave float64, so that these decide
      if (!std::isfinite(x[i])) return i;
  if (!segments) {
    select(x, tie_key, n, m, whole, mask);
    return -1;
  }
  std::vector<int64_t> order(n);
  for (int64_t i = 0; i < n; i++) order[i] = i;
  if (!std::is_sorted(segments, segments + n))
    std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return segments[i] < segments[j]; });
  std::vector<double> values;
  std::vector<int64_t> keys;
  std::vector<uint8_t> part;
  for (int64_t start = 0, end; start < n; start = end) {
    for (end = start; end < n && segments[order[end]] == segments[order[start]];) end++;
    values.clear();
    keys.clear();
    for (int64_t i = start; i < end; i++) {
      values.push_back(x[order[i]]);
      keys.push_back(tie_key[order[i]]);
    }
    part.resize(end - start);
    const Range range = range_of(values.data(), end - start);
    select(values.data(), keys.data(), end - start, m, range, part.data());
    for (int64_t i = start; i < end; i++) mask[order[i]] = part[i - start];
  }
  return -1;
}

}  // namespace max_variance
}  // namespace d3s
