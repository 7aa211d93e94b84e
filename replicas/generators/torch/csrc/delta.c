// Gated delta rules: one token of each of some sequences, with the convolution before it.
#include "simd.h"

#define ITEM float
#define REAL float
#define LANES FLOATS
#define VECTOR floats
#define KIND floats
#define DTYPE float32
#include "delta.inc"

#define ITEM double
#define REAL double
#define LANES DOUBLES
#define VECTOR doubles
#define KIND doubles
#define DTYPE float64
#include "delta.inc"

void VARIANT(delta)(void *given) {
  delta_call *call = given;
  for (int64_t task; (task = take_task(&call->tasks)) < call->tasks.count;)
    if (call->dtype == KERNEL_FLOAT32)
      step_head_float32(call, task);
    else
      step_head_float64(call, task);
}
