// A float vector of LANES lanes and the few operations the kernels need. Included inside the namespace of one
// instruction set; D3S_LANES is 16 (AVX-512), 8 (AVX2) or 4 (anything, AArch64 included).
// Everything here has internal linkage: a function compiled for AVX-512 must never be the copy another file links to.

constexpr int LANES = D3S_LANES;
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

#define D3S_INLINE static inline __attribute__((always_inline))

D3S_INLINE vf splat(float x) { return x - vf{}; }  // -0.0 - 0 = -0.0, NaN stays: the value in every lane

#if D3S_LANES == 16
D3S_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
D3S_INLINE vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }  // b where either is NaN
#elif D3S_LANES == 8
D3S_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
D3S_INLINE vf larger(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
#elif defined(__aarch64__)
D3S_INLINE vf fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
D3S_INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
#else
D3S_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }  // rounds twice where the processor has no fused one
D3S_INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
#endif

// ---- element types: load to float, store with round to nearest even ----
struct F32 {
  typedef float raw;
  D3S_INLINE vf load(const raw* p) {
    vf v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  D3S_INLINE void store(raw* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }
  D3S_INLINE float one(const raw* p) { return *p; }
  static constexpr raw minus_infinity = -INFINITY;
  static constexpr bool wide = true;  // 24 significant bits: differences round
};

struct BF16 {
  typedef uint16_t raw;
  D3S_INLINE vf load(const raw* p) {
    vh h;
    __builtin_memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
  }
  D3S_INLINE void store(raw* p, vf v) {
    vu u = (vu)v;
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    rounded = (v == v) ? rounded : ((u >> 16) | 0x40);  // a NaN must stay one
    vh h = __builtin_convertvector(rounded, vh);
    __builtin_memcpy(p, &h, sizeof h);
  }
  D3S_INLINE float one(const raw* p) {
    uint32_t u = static_cast<uint32_t>(*p) << 16;
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
  }
  static constexpr raw minus_infinity = 0xff80;
  static constexpr bool wide = false;
};

D3S_INLINE float half_to_float(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, u;
  if (exponent == 31) {
    u = sign | 0x7f800000 | (mantissa << 13);
  } else if (exponent) {
    u = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {
    float f = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -f : f;
  }
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}

D3S_INLINE uint16_t float_to_half(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  uint32_t sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (a >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and more round to infinity
  if (a < 0x38800000) {  // below 2^-14: subnormal, by a float addition that rounds at the right bit
    float g, magic = 0.5f;
    __builtin_memcpy(&g, &a, 4);
    g += magic;
    uint32_t v;
    __builtin_memcpy(&v, &g, 4);
    return static_cast<uint16_t>(sign | (v - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((a + 0xfff + ((a >> 13) & 1) - 0x38000000) >> 13));
}

struct F16 {
  typedef uint16_t raw;
#if D3S_LANES == 16
  D3S_INLINE vf load(const raw* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  D3S_INLINE void store(raw* p, vf v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#elif D3S_LANES == 8
  D3S_INLINE vf load(const raw* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  D3S_INLINE void store(raw* p, vf v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#else
  D3S_INLINE vf load(const raw* p) {
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = half_to_float(p[i]);
    return v;
  }
  D3S_INLINE void store(raw* p, vf v) {
    for (int i = 0; i < LANES; i++) p[i] = float_to_half(v[i]);
  }
#endif
  D3S_INLINE float one(const raw* p) { return half_to_float(*p); }
  static constexpr raw minus_infinity = 0xfc00;
  static constexpr bool wide = false;
};

// ---- e^r * 2^n ----
constexpr float LOG2E = 1.44269504088896341f;
constexpr float LN2_HIGH = 0.693359375f;  // 9 bits: n * LN2_HIGH is exact for the n that occur
constexpr float LN2_LOW = -2.12194440e-4f;
constexpr float ROUND_MAGIC =
    12582912.0f + 127.0f;                 // 1.5 * 2^23: adding it rounds to an integer, + 127 the exponent bias
constexpr float LOWEST_POWER = -127.25f;  // clamped here, 2^n is built as +0, so e^x is exactly 0

// e^r for |r| <= ln2 / 2, relative error 5e-9 before rounding; own least-squares fit at Chebyshev nodes.
D3S_INLINE vf exp_reduced(vf r) {
  vf p = splat(0x1.6a1a6ap-10f);
  p = fma(p, r, splat(0x1.123fc8p-7f));
  p = fma(p, r, splat(0x1.555916p-5f));
  p = fma(p, r, splat(0x1.55548ap-3f));
  p = fma(p, r, splat(0x1.fffffcp-2f));
  p = fma(p, r, splat(1.0f));
  return fma(p, r, splat(1.0f));
}

// e^(c a + c e) for c a <= 0; scaled = c * log2(e); a NaN comes through, -infinity gives exactly 0.
template <bool kCorrected>
D3S_INLINE vf exp_scaled(vf a, vf e, vf c, vf scaled, vf lowest) {
  a = larger(lowest, a);
  vf q = fma(a, scaled, splat(ROUND_MAGIC));
  vf n = q - splat(ROUND_MAGIC);
  vf r = fma(a, c, -(n * splat(LN2_HIGH)));  // one rounding, of a small number: the product c a is never rounded
  r = fma(n, splat(-LN2_LOW), r);
  if (kCorrected) r = fma(e, c, r);
  return exp_reduced(r) * (vf)((vi)q << 23);
}
