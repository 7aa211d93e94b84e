// Shared by the kernels themselves; native.py sees kernels.h alone.
//
// A source of kernels is compiled once for every instruction set, with KERNEL_VARIANT defined as
// its name. VARIANT(f) names the function of that instruction set.
#ifndef INTERNAL_H
#define INTERNAL_H

#include "kernels.h"

#define JOIN_NAMES(a, b) a##_##b
#define JOIN(a, b) JOIN_NAMES(a, b)
#define VARIANT(name) JOIN(name, KERNEL_VARIANT)
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;  // the upper half of a float32

#ifdef KERNEL_VARIANT
kernel_function VARIANT(attention), VARIANT(norm), VARIANT(rope);

// The parts that a pass over whole layers calls for its own tasks.
void VARIANT(attend_tile)(const attention_call *call, int64_t tile, int64_t kv_head);
void VARIANT(normalise_row)(const norm_call *call, int64_t row);
void VARIANT(rotate_token)(const rope_call *call, int64_t token);
#endif

// Take the next task of a call; tasks.count or more when none are left.
INLINE int64_t take_task(kernel_tasks *tasks) {
  return __atomic_fetch_add(&tasks->next, 1, __ATOMIC_RELAXED);
}

#endif
