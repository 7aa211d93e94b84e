// Gated delta rules: one token of each of some sequences, with the convolution before it.
#include "simd.h"

#include "item_float32.h"
#include "delta.inc"

#include "item_float64.h"
#include "delta.inc"

void VARIANT(delta)(void *given) {
  delta_call *call = given;
  for (int64_t task; (task = take_task(&call->tasks)) < call->tasks.count;)
    if (call->dtype == KERNEL_FLOAT32)
      step_head_float32(call, task);
    else
      step_head_float64(call, task);
}
