// Vectors of the compiler (GCC and Clang), as wide as the instruction set's registers.
#ifndef SIMD_H
#define SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "internal.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

enum { FLOATS = VECTOR_BYTES / 4, DOUBLES = VECTOR_BYTES / 8 };

#define ALIGNED __attribute__((aligned(VECTOR_BYTES)))

typedef float floats __attribute__((vector_size(VECTOR_BYTES)));
typedef double doubles __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES)));
typedef int64_t longs __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t halves __attribute__((vector_size(VECTOR_BYTES / 2)));

// --- numbers as they are stored -------------------------------------------------------------

INLINE float widen_bfloat16(bf16 stored) {
  const uint32_t bits = (uint32_t)stored << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

INLINE bf16 round_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  // A NaN must not be rounded into a number.
  return x != x ? 0x7fc0 : (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE floats load_float32(const float *from) {
  floats x;
  memcpy(&x, from, sizeof x);
  return x;
}

INLINE doubles load_float64(const double *from) {
  doubles x;
  memcpy(&x, from, sizeof x);
  return x;
}

INLINE floats load_bfloat16(const bf16 *from) {
  halves stored;
  memcpy(&stored, from, sizeof stored);
  return (floats)(__builtin_convertvector(stored, words) << 16);
}

INLINE void store_float32(float *to, floats x) { memcpy(to, &x, sizeof x); }

INLINE void store_float64(double *to, doubles x) { memcpy(to, &x, sizeof x); }

INLINE void store_bfloat16(bf16 *to, floats x) {
  const words bits = (words)x, is_number = (words)(x == x);
  const words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const halves stored = __builtin_convertvector((rounded & is_number) | (0x7fc0 & ~is_number), halves);
  memcpy(to, &stored, sizeof stored);
}

// --- arithmetic ---------------------------------------------------------------------------------

#if defined(__SSE2__)

// A vector as four numbers, whose sum or maximum is that of the vector.
#if defined(__AVX512F__)
#define IN_FOUR(x, join)                                                                   \
  join(join(_mm512_castps512_ps128((__m512)(x)), _mm512_extractf32x4_ps((__m512)(x), 1)), \
       join(_mm512_extractf32x4_ps((__m512)(x), 2), _mm512_extractf32x4_ps((__m512)(x), 3)))
#elif defined(__AVX2__)
#define IN_FOUR(x, join) \
  join(_mm256_castps256_ps128((__m256)(x)), _mm256_extractf128_ps((__m256)(x), 1))
#else
#define IN_FOUR(x, join) ((__m128)(x))
#endif

INLINE float sum_floats(floats x) {
  const __m128 four = IN_FOUR(x, _mm_add_ps);
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// None of the numbers is NaN.
INLINE float greatest_floats(floats x) {
  const __m128 four = IN_FOUR(x, _mm_max_ps);
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// Store the sums of up to four vectors.
INLINE void sum_each_floats(const floats *x, int count, float *to) {
  __m128 parts[4];
  for (int i = 0; i < 4; i++) parts[i] = IN_FOUR(x[i < count ? i : 0], _mm_add_ps);
  _MM_TRANSPOSE4_PS(parts[0], parts[1], parts[2], parts[3]);
  const __m128 sums =
      _mm_add_ps(_mm_add_ps(parts[0], parts[1]), _mm_add_ps(parts[2], parts[3]));
  memcpy(to, &sums, (size_t)count * sizeof(float));
}

#else

INLINE float sum_floats(floats x) {
  float parts[FLOATS];
  memcpy(parts, &x, sizeof x);
  for (int half = FLOATS / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
  return parts[0];
}

// None of the numbers is NaN.
INLINE float greatest_floats(floats x) {
  float best = x[0];
  for (int i = 1; i < FLOATS; i++) best = x[i] > best ? x[i] : best;
  return best;
}

// Store the sums of up to four vectors.
INLINE void sum_each_floats(const floats *x, int count, float *to) {
  for (int i = 0; i < count; i++) to[i] = sum_floats(x[i]);
}

#endif

INLINE double sum_doubles(doubles x) {
  double parts[DOUBLES];
  memcpy(parts, &x, sizeof x);
  for (int half = DOUBLES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
  return parts[0];
}

INLINE void sum_each_doubles(const doubles *x, int count, double *to) {
  for (int i = 0; i < count; i++) to[i] = sum_doubles(x[i]);
}

// Unroll the next loop, whose bounds are known when it is compiled.
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

// Numbers of `yes` where a mask has ones, else of `no`.
INLINE floats choose_floats(ints mask, floats yes, floats no) {
  return (floats)(((ints)yes & mask) | ((ints)no & ~mask));
}

INLINE doubles choose_doubles(longs mask, doubles yes, doubles no) {
  return (doubles)(((longs)yes & mask) | ((longs)no & ~mask));
}

// The same number everywhere.
INLINE floats all_floats(float x) { return (floats){0} + x; }
INLINE doubles all_doubles(double x) { return (doubles){0} + x; }

// Maximum of each pair of numbers; that of `best` where the other is NaN.
INLINE floats max_floats(floats x, floats best) { return choose_floats(x > best, x, best); }
INLINE doubles max_doubles(doubles x, doubles best) { return choose_doubles(x > best, x, best); }

// a * b + c, rounded once where the processor can. The compiler itself fuses nothing.
INLINE floats fuse_floats(floats a, floats b, floats c) {
#if defined(__AVX512F__)
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

INLINE doubles fuse_doubles(doubles a, doubles b, doubles c) {
#if defined(__AVX512F__)
  return (doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
  return (doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}

// The exponential of x <= 0 with an error below 2 ulp, at least exp(-87); NaN stays NaN.
// Source: Cephes expf.
INLINE floats exp_floats(floats x) {
  x = choose_floats(x < -87.f, all_floats(-87.f), x);
  // Conversion rounds towards zero, and x <= 0. What it makes of NaN does not matter.
  const floats rounded = fuse_floats(x, all_floats(-1.44269504f), all_floats(0.5f));
  const words minus_power = (words)__builtin_convertvector(rounded, ints);
  const floats minus_whole = __builtin_convertvector((ints)minus_power, floats);
  floats rest = fuse_floats(minus_whole, all_floats(0.693359375f), x);
  rest = fuse_floats(minus_whole, all_floats(-2.12194440e-4f), rest);
  floats found = fuse_floats(all_floats(1.9875691500e-4f), rest, all_floats(1.3981999507e-3f));
  found = fuse_floats(found, rest, all_floats(8.3334519073e-3f));
  found = fuse_floats(found, rest, all_floats(4.1665795894e-2f));
  found = fuse_floats(found, rest, all_floats(1.6666665459e-1f));
  found = fuse_floats(found, rest, all_floats(5.0000001201e-1f));
  found = fuse_floats(found, rest * rest, rest) + 1.f;
  return found * (floats)((127 - minus_power) << 23);
}

INLINE doubles exp_doubles(doubles x) {
  for (int i = 0; i < DOUBLES; i++) x[i] = exp(x[i]);
  return x;
}

INLINE double greatest_doubles(doubles x) {
  double best = x[0];
  for (int i = 1; i < DOUBLES; i++) best = x[i] > best ? x[i] : best;
  return best;
}

INLINE floats load_floats(const float *from) { return load_float32(from); }
INLINE doubles load_doubles(const double *from) { return load_float64(from); }
INLINE void store_floats(float *to, floats x) { store_float32(to, x); }
INLINE void store_doubles(double *to, doubles x) { store_float64(to, x); }

INLINE float root_floats(float x) { return sqrtf(x); }
INLINE double root_doubles(double x) { return sqrt(x); }

#endif
