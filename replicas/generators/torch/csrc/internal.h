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

// Wait until other threads have published at least `wanted`, and see what they wrote before.
void wait_for(const int64_t *progress, int64_t wanted);
void publish(int64_t *progress, int64_t value);
// Publish one more finished task. Nothing waits for fewer than `last` of them.
void publish_one(int64_t *progress, int64_t last);

#ifdef KERNEL_VARIANT
kernel_function VARIANT(attention), VARIANT(norm), VARIANT(rope), VARIANT(product);
kernel_function VARIANT(token_layers), VARIANT(weight_layers);
kernel_function VARIANT(logprobs), VARIANT(delta);

// The parts that a pass over whole layers calls for its own tasks.
void VARIANT(attend_tile)(const attention_call *call, int64_t tile, int64_t kv_head);
void VARIANT(normalise_row)(const norm_call *call, int64_t row);
void VARIANT(rotate_token)(const rope_call *call, int64_t token);
// Multiply rows by the panels from the first to the one before the last. `other` and `out` are whole
// products.
void VARIANT(multiply_panels)(const packed_matrix *matrix, const bf16 *x, int64_t num_rows,
                              int64_t first_panel, int64_t last_panel, int64_t then,
                              const bf16 *other, bf16 *out);
#endif

INLINE int64_t panels_of(int64_t num_columns) {
  return (num_columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
}

// Take the next task of a call; tasks.count or more when none are left.
INLINE int64_t take_task(kernel_tasks *tasks) {
  return __atomic_fetch_add(&tasks->next, 1, __ATOMIC_RELAXED);
}

#endif
