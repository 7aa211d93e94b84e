// Calls the kernels with random shapes in arrays that end where the last number does, so that
// AddressSanitizer sees each access outside of them; and the checks with calls that are wrong.
//
//   random_calls CALLS SEED
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

static uint64_t state;

static int64_t draw(int64_t limit) {  // 0 to limit - 1
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (int64_t)(state >> 16) % limit;
}

static int64_t pick(const int64_t *from, int64_t count) { return from[draw(count)]; }

// Arrays of a call, freed together.
static void *arrays[32];
static int num_arrays;

static void *array(int64_t num_bytes) {
  void *found = malloc((size_t)num_bytes);
  if (!found) abort();
  arrays[num_arrays++] = found;
  return found;
}

static void free_arrays(void) {
  while (num_arrays) free(arrays[--num_arrays]);
}

static const int64_t ITEM_BYTES[] = {4, 2, 8};

// Small numbers of a dtype.
static void *numbers(int64_t dtype, int64_t count) {
  char *found = array(count * ITEM_BYTES[dtype]);
  for (int64_t i = 0; i < count; i++) {
    const double wide = (double)(draw(2001) - 1000) / 500;
    const float narrow = (float)wide;
    if (dtype == KERNEL_FLOAT64)
      memcpy(found + 8 * i, &wide, 8);
    else if (dtype == KERNEL_FLOAT32)
      memcpy(found + 4 * i, &narrow, 4);
    else
      memcpy(found + 2 * i, (const char *)&narrow + 2, 2);
  }
  return found;
}

static int64_t *indices(int64_t count, int64_t limit) {
  int64_t *found = array(count * (int64_t)sizeof *found);
  for (int64_t i = 0; i < count; i++) found[i] = draw(limit);
  return found;
}

static void require(int is_true, const char *what) {
  if (is_true) return;
  fprintf(stderr, "failed: %s\n", what);
  exit(1);
}

static void call_attention(const kernel_set *kernels) {
  static const int64_t widths[] = {1, 3, 8, 16, 20, 32, 40, 64, 72, 80, 96, 128, 200, 576};
  static const int64_t blocks[] = {1, 8, 16, 17, 24, 32, 64, 128, 150};
  static const int64_t shares[] = {1, 2, 3, 4, 5, 8, 9, 40};
  attention_call call = {
      .dtype = draw(3),
      .num_kv_heads = 1 + draw(3),
      .share = pick(shares, 8),
      .block_size = pick(blocks, 9),
      .key_width = pick(widths, 14),
      .num_tiles = 1 + draw(4),
      .tile_size = draw(2) ? 1 : ATTENTION_TILE,
      .num_requests = 1 + draw(3),
      .table_width = 1 + draw(4),
      .num_blocks = 1 + draw(6),
      .num_tokens = 4 + draw(8),
      .scale = 0.3,
      .soft_cap = draw(2) ? 0 : 2,
      .window = draw(2) ? 0 : 1 + draw(50),
  };
  // Values of their own, or the first numbers of the keys.
  const int is_latent = draw(3) == 0;
  call.key_stride = call.key_width;
  call.value_width = is_latent ? 1 + draw(call.key_width) : pick(widths, 14);
  call.value_stride = is_latent ? call.key_stride : call.value_width;
  const int64_t num_heads = call.num_kv_heads * call.share;
  const int64_t places = call.num_blocks * call.num_kv_heads * call.block_size;
  call.q_stride = num_heads * call.key_width + draw(3);
  call.out_stride = num_heads * call.value_width + draw(3);
  call.q = numbers(call.dtype, (call.num_tokens - 1) * call.q_stride + num_heads * call.key_width);
  call.out =
      numbers(call.dtype, (call.num_tokens - 1) * call.out_stride + num_heads * call.value_width);
  call.keys = numbers(call.dtype, places * call.key_stride);
  call.values = is_latent ? call.keys : numbers(call.dtype, places * call.value_stride);
  call.sinks = draw(2) ? NULL : numbers(call.dtype, num_heads);
  call.tables = indices(call.num_requests * call.table_width, call.num_blocks);
  call.requests = indices(call.num_tiles, call.num_requests);
  const int64_t keys = call.table_width * call.block_size;
  const int64_t most = call.tile_size < keys ? call.tile_size : keys;
  int64_t *counts = indices(call.num_tiles, most), *lengths = indices(call.num_tiles, keys);
  int64_t *tokens = indices(call.num_tiles, call.num_tokens);
  for (int64_t i = 0; i < call.num_tiles; i++) {
    counts[i]++;
    if (++lengths[i] < counts[i]) lengths[i] = counts[i];
    if (tokens[i] + counts[i] > call.num_tokens) tokens[i] = call.num_tokens - counts[i];
  }
  call.counts = counts;
  call.lengths = lengths;
  call.tokens = tokens;
  call.tasks.count = call.num_tiles * call.num_kv_heads;
  require(kernels_check_attention(&call) == KERNEL_OK, "a right call of attention is taken");
  kernels->attention(&call);

  // One number of the call, or of an array, is wrong: the check must see it without a crash.
  static const int64_t wrong[] = {-1, INT64_MIN, INT64_MAX, (int64_t)1 << 41};
  const int64_t bad = pick(wrong, 4);
  attention_call other = call;
  int64_t *fields[] = {&other.num_kv_heads, &other.share,      &other.block_size,
                       &other.key_width,    &other.value_width, &other.num_tiles,
                       &other.tile_size,    &other.num_blocks,  &other.num_requests,
                       &other.table_width,  &other.dtype,       &other.tasks.count};
  *fields[draw(12)] = bad;
  require(kernels_check_attention(&other) != KERNEL_OK, "a wrong size is seen");
  int64_t *all[] = {counts, lengths, tokens, (int64_t *)call.requests};
  int64_t *of_array = &all[draw(4)][draw(call.num_tiles)];
  *of_array = bad;
  require(kernels_check_attention(&call) != KERNEL_OK, "a wrong index is seen");
}

static void call_norm(const kernel_set *kernels) {
  norm_call call = {.dtype = draw(3), .size = 1 + draw(200), .eps = 1e-5};
  const int64_t rows = 1 + draw(5);
  call.tasks.count = rows;
  call.stride = call.size + draw(3);
  call.x = numbers(call.dtype, (rows - 1) * call.stride + call.size);
  call.weight = numbers(call.dtype, call.size);
  call.out = numbers(call.dtype, rows * call.size);
  call.weight_offset = (double)draw(2);
  require(kernels_check_norm(&call) == KERNEL_OK, "a right call of the norm is taken");
  kernels->norm(&call);
}

static void call_rope(const kernel_set *kernels) {
  rope_call call = {
      .dtype = draw(3),
      .num_heads = draw(5),
      .num_kv_heads = 1 + draw(3),
      .head_size = 1 + draw(150),
      .num_positions = 1 + draw(9),
      .num_blocks = 1 + draw(4),
      .block_size = 1 + draw(20),
      .eps = 1e-5,
  };
  const int64_t tokens = 1 + draw(6), groups = call.num_kv_heads, size = call.head_size;
  const int64_t plane = call.num_blocks * groups * call.block_size * size;
  call.tasks.count = tokens;
  call.rotary_size = draw(size / 2 + 1) * 2;
  call.heads = numbers(call.dtype, tokens * (call.num_heads + 2 * groups) * size);
  call.cos = numbers(call.dtype, call.num_positions * call.rotary_size);
  call.sin = numbers(call.dtype, call.num_positions * call.rotary_size);
  call.positions = indices(tokens, call.num_positions);
  call.kv_positions = indices(tokens, call.num_blocks * call.block_size);
  call.keys = numbers(call.dtype, plane);
  call.values = numbers(call.dtype, plane);
  call.norm = draw(2) ? NULL : numbers(call.dtype, (call.num_heads + groups) * size);
  require(kernels_check_rope(&call) == KERNEL_OK, "a right call of the rotation is taken");
  kernels->rope(&call);
  *(int64_t *)(draw(2) ? call.positions : call.kv_positions) = draw(2) ? -1 : 1000;
  require(kernels_check_rope(&call) == KERNEL_BAD_INDEX, "a wrong position is seen");
}

static void call_product(const kernel_set *kernels) {
  const int64_t rows = 1 + draw(70), inputs = 2 + 2 * draw(80), outputs = 1 + draw(200);
  const int64_t panels = (outputs + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
  const int64_t of_panel = inputs * PANEL_COLUMNS;
  void *weight = NULL;
  if (posix_memalign(&weight, 64, (size_t)(panels * of_panel * 2))) abort();
  arrays[num_arrays++] = weight;
  memset(weight, 0, (size_t)(panels * of_panel * 2));
  product_call call = {
      .matrix = {weight, draw(2) ? NULL : numbers(KERNEL_BFLOAT16, outputs), inputs, outputs,
                 (kernels->features & KERNEL_AVX512) && (kernels_features() & KERNEL_AMX) &&
                     inputs % 32 == 0},
      .num_rows = rows,
      .rows_of_task = 32 * (1 + draw(3)),
      .then = draw(4),
      .x = numbers(KERNEL_BFLOAT16, rows * inputs),
      .other = numbers(KERNEL_BFLOAT16, rows * outputs),
      .out = numbers(KERNEL_BFLOAT16, rows * outputs),
  };
  call.tasks.count = panels * ((rows + call.rows_of_task - 1) / call.rows_of_task);
  require(kernels_check_product(&call) == KERNEL_OK, "a right product is taken");
  kernels->product(&call);
}

int main(int count, char **arguments) {
  if (count != 3) return 2;
  const int64_t features = kernels_features();
  const int64_t masks[] = {~(int64_t)0, ~(int64_t)(KERNEL_AVX512 | KERNEL_AMX), 0};
  for (int m = 0; m < 3; m++) {
    state = strtoull(arguments[2], NULL, 10) * 2654435761u + 1;
    const kernel_set *kernels = kernels_for(features & masks[m]);
    for (int64_t i = strtoll(arguments[1], NULL, 10); i > 0; i--) {
      call_attention(kernels);
      free_arrays();
      call_norm(kernels);
      free_arrays();
      call_rope(kernels);
      free_arrays();
      call_product(kernels);
      free_arrays();
    }
    printf("%s: no fault\n", kernels->name);
  }
  return 0;
}
