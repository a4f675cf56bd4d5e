// One read of the scores: bits of those above the bracket and of those inside it; and the mask made of these bits.
// Included in kernels.inl.

D3S_INLINE bool not_finite(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return (u & 0x7f800000) == 0x7f800000;
}

struct Bits {
  uint64_t above, inside;  // of 64 scores
};

D3S_INLINE void put(uint8_t* bits, int64_t i, const Bits& b) {
  if (bits) __builtin_memcpy(bits + i / 4, &b, sizeof b);
}

// The 64 scores from i on, or fewer at the end.
D3S_INLINE void split_word(const float* x, int64_t i, int64_t n, float low, float high, uint8_t* bits, float* values,
                           int64_t capacity, SplitCounts& counts) {
  Bits b{0, 0};
  for (int j = 0; j < 64 && i + j < n; j++) {
    const float v = x[i + j];
    const bool is_above = v > high, is_inside = v >= low && !is_above;
    b.above |= static_cast<uint64_t>(is_above) << j;
    b.inside |= static_cast<uint64_t>(is_inside) << j;
    if (is_inside) {
      if (counts.inside < capacity) values[counts.inside] = v;
      else counts.complete = false;
      counts.inside++;
    }
    counts.broken |= not_finite(v);
  }
  counts.above += __builtin_popcountll(b.above);
  put(bits, i, b);
}

#if D3S_LANES == 16
SplitCounts split(const float* x, int64_t n, float low, float high, uint8_t* bits, float* values, int64_t capacity) {
  SplitCounts counts{0, 0, true, false};
  const __m512 vlow = _mm512_set1_ps(low), vhigh = _mm512_set1_ps(high);
  __mmask16 broken = 0;
  int64_t i = 0, listed = 0;
  float nowhere[64];
  if (capacity < 64) {  // no room for one store: only bits and counts are made
    counts.complete = false;
    values = nowhere;
    capacity = 64;
  }
  // No branch depends on a score: a few in 100 are inside the bracket, and guessing where costs more than listing them.
  for (; i + 64 <= n; i += 64) {
    Bits b{0, 0};
    for (int j = 0; j < 4; j++) {
      const __m512 v = _mm512_loadu_ps(x + i + 16 * j);
      const __mmask16 over = _mm512_cmp_ps_mask(v, vhigh, _CMP_GT_OQ);
      const __mmask16 in = _mm512_mask_cmp_ps_mask(static_cast<__mmask16>(~over), v, vlow, _CMP_GE_OQ);
      broken |= _mm512_fpclass_ps_mask(v, 0x99);  // quiet and signalling NaN, both infinities
      b.above |= static_cast<uint64_t>(over) << (16 * j);
      b.inside |= static_cast<uint64_t>(in) << (16 * j);
      _mm512_storeu_ps(values + listed, _mm512_maskz_compress_ps(in, v));  // the masked store would be microcode
      listed += __builtin_popcount(in);
    }
    put(bits, i, b);
    counts.above += __builtin_popcountll(b.above);
    counts.inside += __builtin_popcountll(b.inside);
    if (listed > capacity - 64) {  // nearly full: the caller will read the scores again
      counts.complete = false;
      listed = 0;
    }
  }
  counts.broken = broken != 0;
  if (!counts.complete) capacity = 0;
  for (; i < n; i += 64) split_word(x, i, n, low, high, bits, values, capacity, counts);
  return counts;
}
#else
SplitCounts split(const float* x, int64_t n, float low, float high, uint8_t* bits, float* values, int64_t capacity) {
  SplitCounts counts{0, 0, true, false};
  int64_t i = 0;
#if D3S_LANES == 8
  const __m256 vlow = _mm256_set1_ps(low), vhigh = _mm256_set1_ps(high);
  const __m256i exponent = _mm256_set1_epi32(0x7f800000);
  __m256i broken = _mm256_setzero_si256();
  for (; i + 64 <= n; i += 64) {
    Bits b{0, 0};
    for (int j = 0; j < 64; j += 8) {
      const __m256 v = _mm256_loadu_ps(x + i + j), over = _mm256_cmp_ps(v, vhigh, _CMP_GT_OQ);
      const __m256 in = _mm256_andnot_ps(over, _mm256_cmp_ps(v, vlow, _CMP_GE_OQ));
      b.above |= static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_ps(over))) << j;
      b.inside |= static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_ps(in))) << j;
      const __m256i exponents = _mm256_and_si256(_mm256_castps_si256(v), exponent);
      broken = _mm256_or_si256(broken, _mm256_cmpeq_epi32(exponents, exponent));
    }
    put(bits, i, b);
    counts.above += __builtin_popcountll(b.above);
    const int num = __builtin_popcountll(b.inside);
    if (counts.complete && counts.inside + num <= capacity) {
      float* to = values + counts.inside;
      for (; b.inside; b.inside &= b.inside - 1) *to++ = x[i + __builtin_ctzll(b.inside)];
    } else {
      counts.complete = false;
    }
    counts.inside += num;
  }
  counts.broken = !_mm256_testz_si256(broken, broken);
  if (!counts.complete) capacity = 0;
#endif
  for (; i < n; i += 64) split_word(x, i, n, low, high, bits, values, capacity, counts);
  return counts;
}
#endif

// A byte of 0 or 1 for each of eight bits, the first bit in the lowest byte.
D3S_INLINE uint64_t bytes_of(uint64_t bits) {
  const uint64_t apart = (bits & 255) * 0x0101010101010101u & 0x8040201008040201u;
  return (apart + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}

void expand(const uint8_t* bits, const float* values_end, int64_t n, float least, uint8_t* mask) {
  const float* value = values_end;
  for (int64_t i = (n - 1) / 64 * 64; n && i >= 0; i -= 64) {
    Bits b;
    __builtin_memcpy(&b, bits + i / 4, sizeof b);
    value -= __builtin_popcountll(b.inside);
    uint64_t kept = 0;
#if D3S_LANES == 16
    const __m512 border = _mm512_set1_ps(least);
    for (int j = 0; j < 64; j += 16)  // what lies past this word's values is dropped by the deposit
      kept |= static_cast<uint64_t>(_mm512_cmp_ps_mask(_mm512_loadu_ps(value + j), border, _CMP_GE_OQ)) << j;
    kept = b.above | _pdep_u64(kept, b.inside);
    if (i + 64 <= n) _mm512_storeu_si512(mask + i, _mm512_maskz_set1_epi8(kept, 1));
    else _mm512_mask_storeu_epi8(mask + i, ~uint64_t{0} >> (64 - (n - i)), _mm512_maskz_set1_epi8(kept, 1));
#else
    const float* one = value;
    for (uint64_t left = b.inside; left; left &= left - 1)
      kept |= (*one++ >= least ? uint64_t{1} : uint64_t{0}) << __builtin_ctzll(left);
    kept |= b.above;
    if (i + 64 <= n) {
      for (int j = 0; j < 64; j += 8) {
        const uint64_t bytes = bytes_of(kept >> j);
        __builtin_memcpy(mask + i + j, &bytes, 8);
      }
    } else {
      for (int64_t j = i; j < n; j++) mask[j] = kept >> (j - i) & 1;
    }
#endif
  }
}
