// Group advantages, (r - mean) / std within each group, exactly as ops/group_advantages.py computes them.
//
// Sums run over a group's values in ascending order, so no result depends on the order of the rows; there is one thread
// and no fused multiply-add, so it is the same everywhere.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace d3s {
namespace group_advantages {

// The values of one group, in any order, to their advantages in place; `sorted` is room for as many.
inline void one_group(double* x, int64_t n, bool normalize, double* sorted) {
  double low = x[0], high = x[0];
  for (int64_t i = 1; i < n; i++) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  if (low == high) {  // exactly 0, whatever the value is
    std::fill(x, x + n, 0.0);
    return;
  }
  const double unit = normalize ? high - low : 1.0;  // squares can neither overflow nor vanish
  for (int64_t i = 0; i < n; i++) x[i] = (x[i] - low) / unit;
  const double top = (high - low) / unit;
  int64_t num_low = 0, num_high = 0;
  for (int64_t i = 0; i < n; i++) {
    num_low += x[i] == 0;
    num_high += x[i] == top;
  }
  if (num_low + num_high == n) {  // right or wrong: counted, not sorted
    std::fill(sorted, sorted + num_low, 0.0);
    std::fill(sorted + num_low, sorted + n, top);
  } else {
    std::copy(x, x + n, sorted);
    std::sort(sorted, sorted + n);
  }
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += sorted[i];
  const double mean = sum / static_cast<double>(n);
  double scale = 1.0;
  if (normalize) {
    double squares = 0;
    for (int64_t i = 0; i < n; i++) squares += (sorted[i] - mean) * (sorted[i] - mean);
    scale = std::sqrt(squares / static_cast<double>(n - 1));
  }
  for (int64_t i = 0; i < n; i++) x[i] = (x[i] - mean) / scale;
}

// out[i] = the advantage of rewards[i] among the kept ones of its group; 0 where kept[i] is 0.
// Returns the index of the first kept reward that is not finite, or -1.
inline int64_t all_groups(const double* rewards, const int64_t* group_ids, const uint8_t* kept, int64_t n,
                          bool normalize, double* out) {
  for (int64_t i = 0; i < n; i++)
    if (kept[i] && !std::isfinite(rewards[i])) return i;
  const bool in_order = std::is_sorted(group_ids, group_ids + n);
  std::vector<int64_t> order, rows;
  if (!in_order) {
    order.resize(n);
    for (int64_t i = 0; i < n; i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return group_ids[i] < group_ids[j]; });
  }
  auto row = [&](int64_t at) { return in_order ? at : order[at]; };
  std::vector<double> values, sorted;
  for (int64_t start = 0, end; start < n; start = end) {
    rows.clear();
    values.clear();
    const int64_t id = group_ids[row(start)];
    for (end = start; end < n && group_ids[row(end)] == id; end++) {
      const int64_t i = row(end);
      out[i] = 0;
      if (!kept[i]) continue;
      rows.push_back(i);
      values.push_back(rewards[i]);
    }
    if (values.empty()) continue;
    sorted.resize(values.size());
    one_group(values.data(), static_cast<int64_t>(values.size()), normalize, sorted.data());
    for (size_t j = 0; j < rows.size(); j++) out[rows[j]] = values[j];
  }
  return -1;
}

}  // namespace group_advantages
}  // namespace d3s
