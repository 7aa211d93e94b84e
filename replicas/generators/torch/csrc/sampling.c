// Log probabilities of tokens, on the host.
#include "simd.h"

enum { BLOCK = 256 };  // logits that are read into the first-level cache together

// The likeliest tokens so far: a heap with the least likely one in front.
typedef struct likeliest {
  float *values;
  int64_t *tokens;
  int64_t count;
} likeliest;

// Of equal tokens the lower one is likelier.
INLINE int is_less(const likeliest *found, int64_t a, int64_t b) {
  const float x = found->values[a], y = found->values[b];
  return x < y || (x == y && found->tokens[a] > found->tokens[b]);
}

INLINE void swap(likeliest *found, int64_t a, int64_t b) {
  const float value = found->values[a];
  const int64_t token = found->tokens[a];
  found->values[a] = found->values[b];
  found->tokens[a] = found->tokens[b];
  found->values[b] = value;
  found->tokens[b] = token;
}

static void sink(likeliest *found, int64_t at, int64_t count) {
  for (int64_t child; (child = 2 * at + 1) < count; at = child) {
    if (child + 1 < count && is_less(found, child + 1, child)) child++;
    if (!is_less(found, child, at)) return;
    swap(found, child, at);
  }
}

// Take tokens of a block in order, as far as there is room or they are likelier than others.
static void add_block(likeliest *found, int64_t room, const float *x, int64_t first, int64_t size) {
  int64_t i = 0;
  for (; i < size && found->count < room; i++) {
    // What is no number is the least likely.
    found->values[found->count] = x[i] == x[i] ? x[i] : -INFINITY;
    found->tokens[found->count] = first + i;
    for (int64_t at = found->count++; at && is_less(found, at, (at - 1) / 2); at = (at - 1) / 2)
      swap(found, at, (at - 1) / 2);
  }
  for (; i < size; i++)
    if (x[i] > found->values[0]) {
      found->values[0] = x[i];
      found->tokens[0] = first + i;
      sink(found, 0, found->count);
    }
}

static void sort(likeliest *found) {
  for (int64_t last = found->count - 1; last > 0; last--) {
    swap(found, 0, last);
    sink(found, 0, last);
  }
}

INLINE int64_t count_not_less(const float *x, float than) {
  int32_t count = 0;
  for (int i = 0; i < BLOCK; i++) count += x[i] >= than;
  return count;
}

INLINE float greatest_of(const float *x) {
  floats best = all_floats(-INFINITY);
  for (int i = 0; i < BLOCK; i += FLOATS) best = max_floats(load_floats(x + i), best);
  return greatest_floats(best);
}

INLINE float sum_of_powers(const float *x, float greatest) {
  floats sum = all_floats(0.f);
  for (int i = 0; i < BLOCK; i += FLOATS)
    sum += exp_floats(load_floats(x + i) - all_floats(greatest));
  return sum_floats(sum);
}

// Return a logit, or those of a whole block, which are copied unless they lie so already.
INLINE float load_logit(const logprobs_call *call, int64_t at) {
  return call->dtype == KERNEL_FLOAT32 ? ((const float *)call->logits)[at]
                                       : widen_bfloat16(((const bf16 *)call->logits)[at]);
}

INLINE const float *load_block(const logprobs_call *call, int64_t at, int64_t size, float *copy) {
  const bf16 *narrow = (const bf16 *)call->logits + at;
  if (size < BLOCK) {
    for (int64_t i = 0; i < BLOCK; i++) copy[i] = i < size ? load_logit(call, at + i) : -INFINITY;
  } else if (call->dtype == KERNEL_FLOAT32) {
    return (const float *)call->logits + at;
  } else {
    for (int i = 0; i < BLOCK; i += FLOATS) store_float32(copy + i, load_bfloat16(narrow + i));
  }
  return copy;
}

static void read_row(const logprobs_call *call, int64_t row) {
  const int64_t begin = call->places[row] * call->vocabulary;
  const int64_t first = call->firsts[row], num_given = call->num_given[row];
  const int64_t room = call->firsts[row + 1] - first - num_given;
  float *values = call->values + first;
  int64_t *ranks = call->ranks + first, *tokens = call->tokens + first;
  likeliest best = {values + num_given, tokens + num_given, 0};
  for (int64_t i = 0; i < num_given; i++) {
    values[i] = load_logit(call, begin + tokens[i]);
    ranks[i] = 0;
  }
  float greatest = -INFINITY;
  double sum = 0.;
  for (int64_t start = 0; start < call->vocabulary; start += BLOCK) {
    const int64_t left = call->vocabulary - start, size = left < BLOCK ? left : BLOCK;
    ALIGNED float copy[BLOCK];
    const float *x = load_block(call, begin + start, size, copy);
    const float of_block = greatest_of(x);
    for (int64_t i = 0; i < num_given; i++) {
      if (!(of_block >= values[i])) continue;
      ranks[i] += count_not_less(x, values[i]);
      // Minus infinity is as likely as the padding.
      if (values[i] == -INFINITY) ranks[i] -= BLOCK - size;
    }
    if (best.count < room || (room && of_block > best.values[0]))
      add_block(&best, room, x, start, size);
    if (of_block > greatest) {
      sum *= exp((double)greatest - (double)of_block);
      greatest = of_block;
    }
    if (greatest > -INFINITY)
      sum += (double)sum_of_powers(x, greatest);
    else
      for (int64_t i = 0; i < size; i++) sum += x[i] == x[i] ? 0. : NAN;
  }
  // Of a row without any number above minus infinity this is not a number.
  call->log_sums[row] = greatest > -INFINITY ? (double)greatest + log(sum) : NAN;
  sort(&best);
  for (int64_t i = 0; i < room; i++) ranks[num_given + i] = i + 1;
}

void VARIANT(logprobs)(void *given) {
  logprobs_call *call = given;
  for (int64_t row; (row = take_task(&call->tasks)) < call->tasks.count;) read_row(call, row);
}
