// The CPU kernels against plain loops, on buffers of exactly their size, for the sanitizers to watch.
// Exits 0 where all agree; prints the first disagreement and exits 1 otherwise. Built by test_sanitizers.py.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <tuple>

#include "d3s/group_advantages.hpp"
#include "d3s/max_variance.hpp"
#include "d3s/packing.hpp"
#include "d3s/row_stats.hpp"
#include "d3s/top_share.hpp"

using namespace d3s;

namespace {

std::mt19937_64 rng(7);

#define CHECK(ok, ...)                                     \
  do {                                                     \
    if (!(ok)) {                                           \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #ok); \
      std::printf(__VA_ARGS__);                            \
      std::printf("\n");                                   \
      std::exit(1);                                        \
    }                                                      \
  } while (0)

float normal() { return std::normal_distribution<float>(0, 3)(rng); }
int64_t below(int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); }

void test_rows(Dtype dtype, int64_t rows, int64_t columns, int64_t valid, int threads) {
  const int64_t size = dtype == Dtype::f32 ? 4 : 2;
  std::vector<char> data(rows * columns * size), out(data.size());
  Logits x{data.data(), dtype, rows, columns, columns}, to{out.data(), dtype, rows, columns, columns};
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < columns; j++) x.set_entry(r, j, j % 11 == 3 ? -INFINITY : normal());
  std::vector<int64_t> y(rows);
  for (auto& t : y) t = below(valid + 1) - 1;
  std::vector<double> state(3 * rows, 0.0), target(rows, 0.0);
  std::fill(state.begin(), state.begin() + rows, -HUGE_VAL);
  const float c = 1.25f;
  row_stats(x, y.data(), valid, c, state.data(), target.data(), threads);
  std::vector<float> m(rows), log_z(rows), h(rows), g(rows, 1.5f), gh(rows, 0.5f);
  for (int64_t r = 0; r < rows; r++) {
    double top = -HUGE_VAL, z = 0, w = 0;
    for (int64_t j = 0; j < valid; j++) top = std::max<double>(top, x.entry(r, j));
    for (int64_t j = 0; j < valid; j++) {
      const double a = (x.entry(r, j) - top) * c;
      if (a > -HUGE_VAL) z += std::exp(a), w -= a * std::exp(a);
    }
    if (top == -HUGE_VAL) continue;
    const double s = state[rows + r], w_got = state[2 * rows + r];
    CHECK(state[r] == top, "m %g, want %g", state[r], top);
    CHECK(std::fabs(s + 1 - z) <= 1e-6 * z && std::fabs(w_got - w) <= 1e-6 * (w + 1e-9), "%g %g, want %g %g", s, w_got,
          z - 1, w);
    if (y[r] >= 0) CHECK(target[r] == x.entry(r, y[r]), "target %g", target[r]);
    m[r] = static_cast<float>(top);
    log_z[r] = static_cast<float>(std::log1p(s));
    h[r] = static_cast<float>(std::log1p(s) + w_got / (1 + s));
  }
  const RowGrads grads{m.data(), log_z.data(), h.data(), g.data(), gh.data()};
  row_backward(x, to, y.data(), valid, c, grads, threads);
  row_backward(x, x, y.data(), valid, c, grads, threads);
  CHECK(data == out, "over the logits and beside them differ");
}

void test_variance(int64_t n, int64_t m, int kind) {
  std::vector<double> x(n);
  std::vector<int64_t> key(n), segments(n);
  for (int64_t i = 0; i < n; i++) {
    x[i] = kind == 0   ? normal()
           : kind == 1 ? static_cast<double>(below(3))
                       : std::exp2(-static_cast<double>(below(900)));
    key[i] = static_cast<int64_t>(rng());
    segments[i] = below(4);
  }
  std::vector<uint8_t> mask(n, 9);
  CHECK(max_variance::select_segments(x.data(), key.data(), nullptr, n, m, mask.data()) == -1, "refused");
  int64_t kept = 0;
  for (uint8_t b : mask) kept += b;
  CHECK(kept == std::min(m, n), "kept %lld of m=%lld n=%lld", (long long)kept, (long long)m, (long long)n);
  max_variance::select_segments(x.data(), key.data(), segments.data(), n, m, mask.data());
  std::map<int64_t, std::pair<int64_t, int64_t>> of_segment;
  for (int64_t i = 0; i < n; i++) of_segment[segments[i]].first++, of_segment[segments[i]].second += mask[i];
  for (const auto& [id, sizes] : of_segment)
    CHECK(sizes.second == std::min(m, sizes.first), "segment %lld", (long long)id);
}

void test_share(int64_t n, double rho, int kind, int threads) {
  std::vector<float> x(n);
  std::vector<int64_t> uid(n), position(n);
  for (int64_t i = 0; i < n; i++) {
    x[i] = kind == 0 ? normal() : kind == 1 ? static_cast<float>(below(4)) : below(20) ? 0.0f : normal();
    uid[i] = static_cast<int64_t>(static_cast<uint64_t>(i % 5) * 0x9E3779B97F4A7C15u);
    position[i] = i;
  }
  const int64_t k = std::max<int64_t>(1, static_cast<int64_t>(rho * static_cast<double>(n)));
  TopShare top(x.data(), uid.data(), position.data(), n, threads);
  std::vector<int64_t> counts(2048, 0), finer(4096, 0);
  top.sample(counts.data());
  top.refine(1000, 1000, finer.data());
  std::vector<uint8_t> mask(n);
  int64_t found[3];
  top.split(kind == 0 ? key_of(-1.0f) : LEAST_KEY, kind == 0 ? key_of(1.0f) : LARGEST_KEY, mask.data(), found);
  CHECK(!found[2], "finite scores called broken");
  if (k <= found[0] || k > found[0] + found[1]) return;  // the border is outside this test's bracket
  auto nth = [&](int64_t wanted) {  // the wanted-th undecided value, from the ends inward by histograms
    for (;;) {
      int64_t ends[2];
      top.ends(ends);
      const int64_t low = -1 - ends[0], high = ends[1];
      if (low == high) return std::pair<int64_t, int64_t>(low, wanted);
      int shift = 0;
      while (((static_cast<uint64_t>(high) - static_cast<uint64_t>(low)) >> shift) >= 2048) shift++;
      std::vector<int64_t> bins(((static_cast<uint64_t>(high) - static_cast<uint64_t>(low)) >> shift) + 1, 0);
      CHECK(top.counts(low, shift, bins.data(), static_cast<int64_t>(bins.size())), "a value without a bin");
      int64_t digit = 0;
      while (wanted > bins[digit]) wanted -= bins[digit++];
      const uint64_t from = static_cast<uint64_t>(low) + (static_cast<uint64_t>(digit) << shift);
      const uint64_t to = from + (uint64_t{1} << shift) - 1;
      top.narrow(static_cast<int64_t>(from),
                 static_cast<int64_t>(std::min<uint64_t>(to - low, static_cast<uint64_t>(high) - low) + low));
    }
  };
  top.look_at_keys();
  auto [key, ties] = nth(k - found[0]);
  top.look_at_uids(~key);
  auto [tie_uid, left] = nth(ties);
  top.look_at_positions(tie_uid);
  auto [tie_position, one] = nth(left);
  CHECK(one == 1, "two scores of one place");
  top.write(~key, tie_uid, tie_position);
  std::vector<int64_t> order(n);
  for (int64_t i = 0; i < n; i++) order[i] = i;
  std::sort(order.begin(), order.end(), [&](int64_t i, int64_t j) {
    return std::make_tuple(-x[i], uid[i], position[i]) < std::make_tuple(-x[j], uid[j], position[j]);
  });
  for (int64_t i = 0; i < n; i++)
    CHECK(mask[order[i]] == (i < k), "n=%lld k=%lld rank %lld", (long long)n, (long long)k, (long long)i);
}

void test_packing(int64_t n, int64_t num_parts) {
  std::vector<int64_t> lengths(n), bin(n), part(n), sums;
  for (auto& x : lengths) x = below(21);
  const int64_t num_bins = first_fit(lengths.data(), n, 20, bin.data());
  for (int64_t i = 0; i < n; i++) {
    size_t b = 0;
    while (b < sums.size() && sums[b] + lengths[i] > 20) b++;
    if (b == sums.size()) sums.push_back(0);
    sums[b] += lengths[i];
    CHECK(bin[i] == static_cast<int64_t>(b), "n=%lld index %lld", (long long)n, (long long)i);
  }
  CHECK(num_bins == static_cast<int64_t>(sums.size()), "%lld bins", (long long)num_bins);
  for (int64_t group : {int64_t{1}, num_parts}) {
    balanced_partition(lengths.data(), n, num_parts, group, part.data());
    sums.assign(num_parts, 0);
    for (int64_t i = 0; i < n; i++) sums.at(part[i]) += lengths[i];
    if (group == 1)
      CHECK(*std::max_element(sums.begin(), sums.end()) <= *std::min_element(sums.begin(), sums.end()) + 20,
            "n=%lld parts=%lld", (long long)n, (long long)num_parts);
  }
}

void test_advantages(int64_t n, int num_levels, bool in_order) {
  std::vector<double> rewards(n), out(n);
  std::vector<int64_t> ids(n);
  std::vector<uint8_t> kept(n);
  for (int64_t i = 0; i < n; i++) {
    rewards[i] = num_levels ? 0.1 * static_cast<double>(below(num_levels)) : normal();
    ids[i] = below(n / 8 + 1) * 1000 - 7;
    kept[i] = below(5) > 0;
  }
  if (in_order) std::sort(ids.begin(), ids.end());
  CHECK(group_advantages::all_groups(rewards.data(), ids.data(), kept.data(), n, true, out.data()) == -1, "refused");
  std::map<int64_t, std::pair<double, double>> sums;
  for (int64_t i = 0; i < n; i++) sums[ids[i]].first += out[i], sums[ids[i]].second += kept[i];
  for (const auto& [id, group] : sums)
    CHECK(std::fabs(group.first) <= 1e-12 * group.second, "group %lld adds up to %g", (long long)id, group.first);
  if (n) {
    rewards[n - 1] = NAN;
    const int64_t bad = group_advantages::all_groups(rewards.data(), ids.data(), kept.data(), n, false, out.data());
    CHECK(bad == (kept[n - 1] ? n - 1 : -1), "index %lld", (long long)bad);
  }
}

void test_halves() {
  for (uint32_t h = 0; h < 65536; h++) {  // every half float survives the round trip
    uint16_t bits = static_cast<uint16_t>(h), back = 0;
    Logits one{&bits, Dtype::f16, 1, 1, 1}, other{&back, Dtype::f16, 1, 1, 1};
    const float v = one.entry(0, 0);
    other.set_entry(0, 0, v);
    CHECK(v != v || back == bits, "half %04x came back as %04x", bits, back);
  }
}

}  // namespace

int main(int argc, char**) {
  if (argc > 1) {  // only what starts threads, for ThreadSanitizer
    test_rows(Dtype::bf16, 100, 4099, 4099, 4);
    for (int kind : {0, 2}) test_share(600001, 0.4, kind, 4);
    std::printf("all agree\n");
    return 0;
  }
  test_halves();
  for (const char* set : {"base", "avx2", "avx512"}) {
    if (!choose_kernels(set)) continue;
    for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
      for (int64_t columns : {1, 2, 15, 16, 17, 31, 32, 33, 95, 4095, 4096, 4097, 9001})
        for (int threads : {2}) test_rows(dtype, 3, columns, std::max<int64_t>(1, columns - columns % 3), threads);
    test_rows(Dtype::bf16, 100, 4099, 4099, 4);  // enough work for threads to start
    for (int64_t n : {1, 2, 63, 64, 65, 4097, 70000})
      for (int kind = 0; kind < 3; kind++)
        for (double rho : {0.01, 0.4, 0.6, 1.0}) test_share(n, rho, kind, 3);
    test_share(600001, 0.4, 0, 4);
    test_share(600001, 0.3, 2, 4);
    for (int64_t n : {1, 2, 5, 63, 100, 4095, 4096, 9000})
      for (int64_t m : {int64_t{0}, int64_t{1}, int64_t{2}, n / 3, n / 2, n - 1, n, n + 1})
        for (int kind = 0; kind < 3; kind++) test_variance(n, m, kind);
  }
  for (int64_t n : {0, 1, 2, 7, 33, 500})
    for (int64_t parts : {1, 2, 5, 64}) test_packing(n, parts);
  for (int64_t n : {0, 1, 2, 33, 1000})
    for (int levels : {0, 1, 2, 5})
      for (bool in_order : {false, true}) test_advantages(n, levels, in_order);
  std::printf("all agree\n");
  return 0;
}
