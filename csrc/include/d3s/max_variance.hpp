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

namespace d3s {
namespace max_variance {

constexpr int64_t SORT_BELOW = 4096;     // fewer values are sorted: simpler, and as fast
constexpr double TIE_TOLERANCE = 1e-12;  // relative; splits closer than float64 noise are tied

struct Range {
  double low, high, mean;
};

// Kept apart so that the compiler may vectorise it: eight running sums, added in a fixed order.
inline Range range_and_mean(const double* x, int64_t n) {
  constexpr int64_t BLOCK = 2048;
  double total = 0, low = x[0], high = x[0];
  for (int64_t start = 0; start < n; start += BLOCK) {
    const int64_t end = std::min(n, start + BLOCK);
    double sum[8] = {}, lo[8], hi[8];
    for (int j = 0; j < 8; j++) lo[j] = hi[j] = x[start];
    int64_t i = start;
    for (; i + 8 <= end; i += 8) {
      for (int j = 0; j < 8; j++) {
        sum[j] += x[i + j];
        lo[j] = x[i + j] < lo[j] ? x[i + j] : lo[j];
        hi[j] = x[i + j] > hi[j] ? x[i + j] : hi[j];
      }
    }
    for (; i < end; i++) {
      sum[0] += x[i];
      lo[0] = std::min(lo[0], x[i]);
      hi[0] = std::max(hi[0], x[i]);
    }
    for (int j = 0; j < 8; j++) {
      total += sum[j];
      low = std::min(low, lo[j]);
      high = std::max(high, hi[j]);
    }
  }
  return {low, high, total / static_cast<double>(n)};
}

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

// Values that lie between two ascending ranks, sorted, with the sum of all values below them.
struct Window {
  int64_t first = 0;           // rank of values[0]
  double below = 0;            // sum of the values of smaller rank, relative to the mean
  std::vector<double> values;  // ascending
  std::vector<double> prefix;  // prefix[i] = below + values[0..i) relative to the mean

  bool has(int64_t rank) const { return rank >= first && rank < first + static_cast<int64_t>(values.size()); }
  double at(int64_t rank) const { return values[rank - first]; }
  double sum_below(int64_t rank) const { return prefix[rank - first]; }  // rank may be one past the last
  void finish(double mean) {
    if (!std::is_sorted(values.begin(), values.end())) std::sort(values.begin(), values.end());
    prefix.resize(values.size() + 1);
    prefix[0] = below;
    for (size_t i = 0; i < values.size(); i++) prefix[i + 1] = prefix[i] + (values[i] - mean);
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
    for (int64_t i = 0; i < n; i++) {
      const int b = of(x[i]);
      rank_[b + 1]++;
      total_[b + 1] += x[i] - range.mean;
    }
    for (int b = 0; b <= last_; b++) {
      rank_[b + 1] += rank_[b];
      total_[b + 1] += total_[b];
    }
  }

  // Bins ascend with the value; below the sample's range is bin 0, above it the last.
  int of(double v) const {
    double t = (v - low_) * scale_ + 1.0;
    t = t > 0.0 ? t : 0.0;
    return static_cast<int>(t < last_ ? t : last_);
  }
  int of_rank(int64_t rank) const {
    return static_cast<int>(std::upper_bound(rank_, rank_ + last_ + 1, rank) - rank_) - 1;
  }
  int64_t first_rank(int bin) const { return rank_[bin]; }
  double sum_before(int bin) const { return total_[bin]; }
  double total() const { return total_[last_ + 1]; }

  // No value of the bin is outside; an ulp of rounding at an edge is below `noise` in the search.
  double low_end(int b) const {
    return b == 0 || scale_ == 0 ? range_.low : std::max(range_.low, low_ + (b - 1) * width_);
  }
  double high_end(int b) const {
    return b == last_ || scale_ == 0 ? range_.high : std::min(range_.high, low_ + b * width_);
  }

  // Bounds of the sum of the `rank` smallest values, relative to the mean: ascending, the first of a bin have at most
  // the bin's average each.
  void sum_below(int64_t rank, double& least, double& most) const {
    if (rank >= rank_[last_ + 1]) {
      least = most = total();
      return;
    }
    const int b = of_rank(rank);
    const double inside = static_cast<double>(rank - rank_[b]), outside = static_cast<double>(rank_[b + 1] - rank);
    const double lo = low_end(b) - range_.mean, hi = high_end(b) - range_.mean;
    least = std::max(total_[b] + inside * lo, total_[b + 1] - outside * hi);
    most = std::min(total_[b] + inside * (total_[b + 1] - total_[b]) / (inside + outside), total_[b] + inside * hi);
  }

 private:
  static constexpr int MOST = 1024, SAMPLE = 128;
  Range range_;
  int last_;
  double low_, width_, scale_;
  int64_t rank_[MOST + 1] = {};
  double total_[MOST + 1] = {};
};

// Finds k by the sign of phi. Returns false where ties or the values' spread ask for the whole sorted order.
inline bool split_by_search(const double* x, int64_t n, int64_t m, const Range& range, Split& split) {
  const double mean = range.mean, dm = static_cast<double>(m);
  const Bins bins(x, n, range);
  const double total = bins.total();
  const double noise = 1e-12 * dm * (range.high - range.low);  // far above the rounding of phi's bounds

  // 1 where phi(k) > 0 for sure, -1 where phi(k) <= 0 for sure, 0 where the bins cannot tell
  auto sign_by_bins = [&](int64_t k) {
    const int64_t b = n - 1 - k, a = m - 1 - k;
    double high_least, high_most, low_least, low_most;
    bins.sum_below(n - k, high_least, high_most);
    bins.sum_below(m - k, low_least, low_most);
    const double s_least = total - high_most + low_least, s_most = total - high_least + low_most;
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
    window.below = bins.sum_before(from);
    window.values.reserve(bins.first_rank(to + 1) - window.first);
    return Span{from, to, bins.low_end(from) - slack, bins.high_end(to) + slack};
  };
  const Span for_high = span_of(n - 1 - k_high, n - k_low, high), for_low = span_of(m - 1 - k_high, m - k_low, low);
  for (int64_t i = 0; i < n; i++) {
    const bool near_high = (x[i] >= for_high.least) & (x[i] <= for_high.most);
    const bool near_low = (x[i] >= for_low.least) & (x[i] <= for_low.most);
    if (!(near_high | near_low)) continue;
    const int b = bins.of(x[i]);
    if (b >= for_high.from && b <= for_high.to) high.values.push_back(x[i]);
    if (b >= for_low.from && b <= for_low.to) low.values.push_back(x[i]);
  }
  high.finish(mean);
  low.finish(mean);

  auto sum_at = [&](int64_t k) { return total - high.sum_below(n - k) + low.sum_below(m - k); };
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
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i++) kept += mask[i] = (x[i] >= split.top_value) | (x[i] <= split.bottom_value);
  if (kept == m) return;  // no tie at a border, or all of them fit
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

inline void select(const double* x, const int64_t* tie_key, int64_t n, int64_t m, uint8_t* mask) {
  if (m >= n || m == 0) {
    std::fill(mask, mask + n, static_cast<uint8_t>(m > 0));
    return;
  }
  Split split;
  if (m == 1) {  // one value has no variance, whichever it is: all splits are tied, and the rule takes the highest
    split = {1, *std::max_element(x, x + n), -HUGE_VAL};
  } else if (n < SORT_BELOW) {
    split = split_by_sorting(x, n, m);
  } else {
    const Range range = range_and_mean(x, n);
    if (range.low == range.high) split = {(m + 1) / 2, range.low, m / 2 ? range.low : -HUGE_VAL};
    else if (!(range.high - range.low > 1e-140 && range.high < 1e140 && range.low > -1e140) ||
             !split_by_search(x, n, m, range, split))
      split = split_by_sorting(x, n, m);
  }
  mark(x, tie_key, n, m, split, mask);
}

// Every segment on its own; returns the index of the first value that is not finite, or -1.
inline int64_t select_segments(const double* x, const int64_t* tie_key, const int64_t* segments, int64_t n, int64_t m,
                               uint8_t* mask) {
  for (int64_t start = 0; start < n; start += 1024) {
    const int64_t end = std::min(n, start + 1024);
    int64_t bad = 0;
    for (int64_t i = start; i < end; i++) bad += !(std::fabs(x[i]) <= DBL_MAX);
    for (int64_t i = start; bad && i < end; i++)
      if (!std::isfinite(x[i])) return i;
  }
  if (!segments) {
    select(x, tie_key, n, m, mask);
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
    select(values.data(), keys.data(), end - start, m, part.data());
    for (int64_t i = start; i < end; i++) mask[order[i]] = part[i - start];
  }
  return -1;
}

}  // namespace max_variance
}  // namespace d3s
