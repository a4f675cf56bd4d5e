// One read of the scores: mask of those above the bracket, list of those inside it. Included in kernels.inl.

D3S_INLINE bool not_finite(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return (u & 0x7f800000) == 0x7f800000;
}

D3S_INLINE void split_one(float x, int64_t i, float low, float high, uint8_t* mask, uint32_t* offsets, float* values,
                          int64_t capacity, SplitCounts& counts) {
  const bool is_above = x > high;
  if (mask) mask[i] = is_above;
  counts.above += is_above;
  if (x >= low && !is_above) {
    if (counts.complete && counts.inside < capacity) {
      offsets[counts.inside] = static_cast<uint32_t>(i);
      values[counts.inside] = x;
    } else {
      counts.complete = false;
    }
    counts.inside++;
  }
  counts.broken |= not_finite(x);
}

#if D3S_LANES == 16
SplitCounts split(const float* x, int64_t n, float low, float high, uint8_t* mask, uint32_t* offsets, float* values,
                  int64_t capacity) {
  SplitCounts counts{0, 0, true, false};
  const __m512 vlow = _mm512_set1_ps(low), vhigh = _mm512_set1_ps(high);
  const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __mmask16 broken = 0;
  int64_t i = 0, listed = 0;
  for (; i + 64 <= n; i += 64) {
    uint64_t above = 0, inside = 0;
    __m512 v[4];
    for (int j = 0; j < 4; j++) {
      v[j] = _mm512_loadu_ps(x + i + 16 * j);
      const __mmask16 over = _mm512_cmp_ps_mask(v[j], vhigh, _CMP_GT_OQ);
      const __mmask16 in = _mm512_cmp_ps_mask(v[j], vlow, _CMP_GE_OQ) & static_cast<__mmask16>(~over);
      broken |= _mm512_fpclass_ps_mask(v[j], 0x99);  // quiet and signalling NaN, both infinities
      above |= static_cast<uint64_t>(over) << (16 * j);
      inside |= static_cast<uint64_t>(in) << (16 * j);
    }
    if (mask) _mm512_storeu_si512(mask + i, _mm512_maskz_set1_epi8(above, 1));
    counts.above += __builtin_popcountll(above);
    if (!inside) continue;
    counts.inside += __builtin_popcountll(inside);
    if (counts.complete && listed <= capacity - 64) {
      for (int j = 0; j < 4; j++) {  // compressed in a register, then stored whole: the masked store is microcode
        const __mmask16 in = static_cast<__mmask16>(inside >> (16 * j));
        const __m512i at = _mm512_add_epi32(iota, _mm512_set1_epi32(static_cast<int>(i + 16 * j)));
        _mm512_storeu_ps(values + listed, _mm512_maskz_compress_ps(in, v[j]));
        _mm512_storeu_si512(offsets + listed, _mm512_maskz_compress_epi32(in, at));
        listed += __builtin_popcount(in);
      }
    } else {  // nearly full: the caller will read the scores again; the count alone goes on
      counts.complete = false;
    }
  }
  counts.broken = broken != 0;
  for (; i < n; i++) split_one(x[i], i, low, high, mask, offsets, values, capacity, counts);
  return counts;
}
#else
SplitCounts split(const float* x, int64_t n, float low, float high, uint8_t* mask, uint32_t* offsets, float* values,
                  int64_t capacity) {
  SplitCounts counts{0, 0, true, false};
  int64_t i = 0;
#if D3S_LANES == 8
  const __m256 vlow = _mm256_set1_ps(low), vhigh = _mm256_set1_ps(high);
  const __m256i one = _mm256_set1_epi8(1), spread = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i exponent = _mm256_set1_epi32(0x7f800000);
  __m256i broken = _mm256_setzero_si256();
  for (; i + 32 <= n; i += 32) {
    __m256i over[4];
    uint32_t inside = 0;
    for (int j = 0; j < 4; j++) {
      const __m256 v = _mm256_loadu_ps(x + i + 8 * j), g = _mm256_cmp_ps(v, vhigh, _CMP_GT_OQ);
      over[j] = _mm256_castps_si256(g);
      const __m256 in = _mm256_andnot_ps(g, _mm256_cmp_ps(v, vlow, _CMP_GE_OQ));
      inside |= static_cast<uint32_t>(_mm256_movemask_ps(in)) << (8 * j);
      const __m256i bits = _mm256_and_si256(_mm256_castps_si256(v), exponent);
      broken = _mm256_or_si256(broken, _mm256_cmpeq_epi32(bits, exponent));
    }
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(over[0], over[1]), _mm256_packs_epi32(over[2], over[3]));
    bytes = _mm256_permutevar8x32_epi32(bytes, spread);
    if (mask) _mm256_storeu_si256((__m256i*)(mask + i), _mm256_and_si256(bytes, one));
    counts.above += __builtin_popcount(static_cast<uint32_t>(_mm256_movemask_epi8(bytes)));
    for (; inside; inside &= inside - 1) {
      const int64_t at = i + __builtin_ctz(inside);
      if (counts.inside < capacity) {
        offsets[counts.inside] = static_cast<uint32_t>(at);
        values[counts.inside] = x[at];
      } else {
        counts.complete = false;
      }
      counts.inside++;
    }
  }
  counts.broken = !_mm256_testz_si256(broken, broken);
#endif
  for (; i < n; i++) split_one(x[i], i, low, high, mask, offsets, values, capacity, counts);
  return counts;
}
#endif
