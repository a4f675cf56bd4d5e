// The loops over float64 values that max_variance.hpp is made of. Included in kernels.inl.
// Sums have one order on every instruction set, so all of them choose the same values.

ValueRange value_range(const double* x, int64_t n) {
  constexpr int64_t BLOCK = 2048;  // running sums are folded after so many: their rounding stays that of a short sum
  double total = 0, low = x[0], high = x[0];
  for (int64_t start = 0; start < n; start += BLOCK) {
    const int64_t size = n - start < BLOCK ? n - start : BLOCK;
    const double* block = x + start;
    double sum[8] = {}, lo[8], hi[8];
    for (int j = 0; j < 8; j++) lo[j] = hi[j] = block[0];
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
      for (int j = 0; j < 8; j++) {
        const double v = block[i + j];
        sum[j] += v;
        lo[j] = v < lo[j] ? v : lo[j];
        hi[j] = v > hi[j] ? v : hi[j];
      }
    }
    for (; i < size; i++) {
      const double v = block[i];
      sum[0] += v;
      lo[0] = v < lo[0] ? v : lo[0];
      hi[0] = v > hi[0] ? v : hi[0];
    }
    for (int j = 0; j < 8; j++) {
      total += sum[j];
      low = lo[j] < low ? lo[j] : low;
      high = hi[j] > high ? hi[j] : high;
    }
  }
  return {low, high, total};
}

typedef double vd2 __attribute__((vector_size(16)));

void count_bins(const double* x, int64_t n, const BinEdges& edges, double mean, BinCell* cells) {
  constexpr int64_t BLOCK = 64;
  int32_t bin[BLOCK];
  int64_t start = 0;
  auto add = [&](int64_t i, int j) __attribute__((always_inline)) {
    // Two tables in turn: a value that meets its neighbour's bin need not wait for it. One addition for count and sum.
    double* cell = &cells[2 * bin[j] + (j & 1)].count;
    vd2 v;
    __builtin_memcpy(&v, cell, 16);
    v += vd2{1.0, x[i] - mean};
    __builtin_memcpy(cell, &v, 16);
  };
  for (; start + BLOCK <= n; start += BLOCK) {
    for (int j = 0; j < BLOCK; j++) bin[j] = edges.bin_of(x[start + j]);
    for (int j = 0; j < BLOCK; j += 2) {
      add(start + j, j);
      add(start + j + 1, j + 1);
    }
  }
  for (int j = 0; start + j < n; j++) {
    bin[j] = edges.bin_of(x[start + j]);
    add(start + j, j);
  }
}

int64_t list_near(const double* x, int64_t n, const NearRanges& r, double* near) {
  int64_t num = 0, i = 0;
#if D3S_LANES == 16
  const __m512d low_1 = _mm512_set1_pd(r.low_1), high_1 = _mm512_set1_pd(r.high_1);
  const __m512d low_2 = _mm512_set1_pd(r.low_2), high_2 = _mm512_set1_pd(r.high_2);
  for (; i + 8 <= n; i += 8) {
    const __m512d v = _mm512_loadu_pd(x + i);
    const __mmask8 one = _mm512_mask_cmp_pd_mask(_mm512_cmp_pd_mask(v, low_1, _CMP_GE_OQ), v, high_1, _CMP_LE_OQ);
    const __mmask8 two = _mm512_mask_cmp_pd_mask(_mm512_cmp_pd_mask(v, low_2, _CMP_GE_OQ), v, high_2, _CMP_LE_OQ);
    const __mmask8 either = one | two;
    if (!either) continue;
    _mm512_storeu_pd(near + num, _mm512_maskz_compress_pd(either, v));
    num += __builtin_popcount(either);
  }
#else
  for (; i + 8 <= n; i += 8) {
    int64_t any = 0;
    for (int j = 0; j < 8; j++) any |= r.has(x[i + j]);
    if (!any) continue;
    for (int j = 0; j < 8; j++) {
      near[num] = x[i + j];
      num += r.has(x[i + j]);
    }
  }
#endif
  for (; i < n; i++) {
    near[num] = x[i];
    num += r.has(x[i]);
  }
  return num;
}

int64_t mark_outside(const double* x, int64_t n, double top, double bottom, uint8_t* mask) {
  int64_t kept = 0, i = 0;
#if D3S_LANES == 16
  const __m512d vtop = _mm512_set1_pd(top), vbottom = _mm512_set1_pd(bottom);
  for (; i + 64 <= n; i += 64) {
    uint64_t bits = 0;
    for (int j = 0; j < 64; j += 8) {
      const __m512d v = _mm512_loadu_pd(x + i + j);
      const __mmask8 outside = _mm512_cmp_pd_mask(v, vtop, _CMP_GE_OQ) | _mm512_cmp_pd_mask(v, vbottom, _CMP_LE_OQ);
      bits |= static_cast<uint64_t>(outside) << j;
    }
    kept += __builtin_popcountll(bits);
    _mm512_storeu_si512(mask + i, _mm512_maskz_set1_epi8(bits, 1));
  }
#elif D3S_LANES == 8
  const __m256d vtop = _mm256_set1_pd(top), vbottom = _mm256_set1_pd(bottom);
  for (; i + 64 <= n; i += 64) {
    uint64_t bits = 0;
    for (int j = 0; j < 64; j += 4) {
      const __m256d v = _mm256_loadu_pd(x + i + j);
      const __m256d outside = _mm256_or_pd(_mm256_cmp_pd(v, vtop, _CMP_GE_OQ), _mm256_cmp_pd(v, vbottom, _CMP_LE_OQ));
      bits |= static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_pd(outside))) << j;
    }
    kept += __builtin_popcountll(bits);
    for (int j = 0; j < 64; j += 8) {
      const uint64_t bytes = bytes_of(bits >> j);
      __builtin_memcpy(mask + i + j, &bytes, 8);
    }
  }
#endif
  for (; i < n; i++) kept += mask[i] = (x[i] >= top) | (x[i] <= bottom);
  return kept;
}
