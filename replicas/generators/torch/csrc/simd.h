// Vectors of the compiler (GCC and Clang), as wide as the instruction set's registers.
#ifndef SIMD_H
#define SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "internal.h"

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

enum { FLOATS = VECTOR_BYTES / 4, DOUBLES = VECTOR_BYTES / 8 };

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

// The sum of a vector's numbers, halves first: the same order for every vector.
INLINE float sum_floats(floats x) {
  float parts[FLOATS];
  memcpy(parts, &x, sizeof x);
  for (int half = FLOATS / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
  return parts[0];
}

INLINE double sum_doubles(doubles x) {
  double parts[DOUBLES];
  memcpy(parts, &x, sizeof x);
  for (int half = DOUBLES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
  return parts[0];
}

// By the suffix of a dtype, for files that are compiled for each.
INLINE float total_float32(floats x) { return sum_floats(x); }
INLINE float total_bfloat16(floats x) { return sum_floats(x); }
INLINE double total_float64(doubles x) { return sum_doubles(x); }
INLINE float root_float32(float x) { return sqrtf(x); }
INLINE float root_bfloat16(float x) { return sqrtf(x); }
INLINE double root_float64(double x) { return sqrt(x); }

#endif
