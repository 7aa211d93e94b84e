// Choice of a kernel set by what the processor has.
#include "kernels.h"

extern const kernel_set kernel_set_portable;
#ifdef HAVE_avx2
extern const kernel_set kernel_set_avx2;
#endif
#ifdef HAVE_avx512
extern const kernel_set kernel_set_avx512;
#endif
#ifdef HAVE_amx
extern const kernel_set kernel_set_amx;
#endif

// Best first.
static const kernel_set *const SETS[] = {
#ifdef HAVE_amx
    &kernel_set_amx,
#endif
#ifdef HAVE_avx512
    &kernel_set_avx512,
#endif
#ifdef HAVE_avx2
    &kernel_set_avx2,
#endif
    &kernel_set_portable,
};

#if defined(__x86_64__)
#include <cpuid.h>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

// Linux lets a process use tiles only after it has asked; threads made later inherit the answer.
static int may_use_tiles(void) {
#if defined(__linux__)
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return 0;
#endif
}

// Register state that the operating system saves, as XCR0 has it.
static uint64_t saved_state(void) {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

static int has(uint32_t found, uint32_t bits) { return (found & bits) == bits; }

KERNEL_EXPORT int64_t kernels_features(void) {
  uint32_t a, b, c, d, leaf1_c, leaf7_b, leaf7_d;
  if (!__get_cpuid(1, &a, &b, &leaf1_c, &d)) return 0;
  const uint32_t osxsave = 1u << 27, fma = 1u << 12, avx = 1u << 28;
  if (!has(leaf1_c, osxsave | fma | avx)) return 0;
  const uint64_t state = saved_state();
  uint32_t subleaves;
  if (!__get_cpuid_count(7, 0, &subleaves, &leaf7_b, &c, &leaf7_d)) return 0;
  int64_t found = 0;
  if ((state & 0x6) != 0x6 || !has(leaf7_b, 1u << 5)) return 0;
  found |= KERNEL_AVX2;
  // AVX-512 F, DQ, BW, VL, and BF16 in the next subleaf.
  const uint32_t wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  if ((state & 0xe6) != 0xe6 || !has(leaf7_b, wide) || subleaves < 1) return found;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !has(a, 1u << 5)) return found;
  found |= KERNEL_AVX512;
  const uint32_t tiles = 1u << 22 | 1u << 24;
  if ((state & 0x60000) == 0x60000 && has(leaf7_d, tiles) && may_use_tiles()) found |= KERNEL_AMX;
  return found;
}
#else
KERNEL_EXPORT int64_t kernels_features(void) { return 0; }
#endif

KERNEL_EXPORT const kernel_set *kernels_for(int64_t features) {
  const unsigned count = sizeof SETS / sizeof *SETS;
  for (unsigned i = 0; i + 1 < count; i++)
    if ((SETS[i]->features & ~features) == 0) return SETS[i];
  return SETS[count - 1];
}
