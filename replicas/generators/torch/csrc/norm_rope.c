// Root mean square norm, rotary position embedding and the write of keys and values, in every dtype.
#include "simd.h"

#include "item_float32.h"
#include "norm_rope.inc"

#include "item_bfloat16.h"
#include "norm_rope.inc"

#include "item_float64.h"
#include "norm_rope.inc"

void VARIANT(normalise_row)(const norm_call *call, int64_t row) {
  if (call->dtype == KERNEL_BFLOAT16)
    normalise_row_bfloat16(call, row);
  else if (call->dtype == KERNEL_FLOAT32)
    normalise_row_float32(call, row);
  else
    normalise_row_float64(call, row);
}

void VARIANT(rotate_token)(const rope_call *call, int64_t token) {
  if (call->dtype == KERNEL_BFLOAT16)
    rotate_token_bfloat16(call, token);
  else if (call->dtype == KERNEL_FLOAT32)
    rotate_token_float32(call, token);
  else
    rotate_token_float64(call, token);
}

void VARIANT(norm)(void *given) {
  norm_call *call = given;
  for (int64_t row; (row = take_task(&call->tasks)) < call->tasks.count;)
    VARIANT(normalise_row)(call, row);
}

void VARIANT(rope)(void *given) {
  rope_call *call = given;
  for (int64_t token; (token = take_task(&call->tasks)) < call->tasks.count;)
    VARIANT(rotate_token)(call, token);
}
