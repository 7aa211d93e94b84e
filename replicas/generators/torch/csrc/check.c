// Checks of calls: what a kernel would read or write outside its arrays, and what it cannot compute.
#include "kernels.h"

// A product of sizes stays far below what int64_t holds.
static const int64_t MOST = (int64_t)1 << 40;

static int are_sizes(const int64_t *sizes, int count) {
  for (int i = 0; i < count; i++)
    if (sizes[i] < 1 || sizes[i] > MOST) return 0;
  return 1;
}

static int are_within(const int64_t *indices, int64_t count, int64_t first, int64_t limit) {
  for (int64_t i = 0; i < count; i++)
    if (indices[i] < first || indices[i] >= limit) return 0;
  return 1;
}

static int is_dtype(int64_t dtype) { return dtype >= KERNEL_FLOAT32 && dtype <= KERNEL_FLOAT64; }

int64_t kernels_check_norm(const norm_call *call) {
  const int64_t sizes[] = {call->size};
  if (!is_dtype(call->dtype)) return KERNEL_UNSUPPORTED;
  if (call->tasks.count == 0) return KERNEL_OK;
  if (!are_sizes(sizes, 1) || call->tasks.count < 0 || call->stride < 0) return KERNEL_BAD_SIZE;
  if (!call->x || !call->weight || !call->out) return KERNEL_NULL;
  return KERNEL_OK;
}

int64_t kernels_check_rope(const rope_call *call) {
  const int64_t sizes[] = {call->num_kv_heads, call->head_size, call->num_positions,
                           call->num_blocks, call->block_size};
  if (!is_dtype(call->dtype)) return KERNEL_UNSUPPORTED;
  if (call->tasks.count == 0) return KERNEL_OK;
  if (!are_sizes(sizes, 5) || call->tasks.count < 0 || call->num_heads < 0 ||
      call->rotary_size < 0 || call->rotary_size > call->head_size || call->rotary_size % 2)
    return KERNEL_BAD_SIZE;
  if (!call->heads || !call->cos || !call->sin || !call->positions || !call->kv_positions ||
      !call->keys || !call->values)
    return KERNEL_NULL;
  if (!are_within(call->positions, call->tasks.count, 0, call->num_positions) ||
      !are_within(call->kv_positions, call->tasks.count, 0, call->num_blocks * call->block_size))
    return KERNEL_BAD_INDEX;
  return KERNEL_OK;
}

int64_t kernels_check_attention(const attention_call *call) {
  const int64_t sizes[] = {call->num_kv_heads, call->share,      call->block_size,
                           call->key_width,    call->value_width, call->num_blocks,
                           call->num_requests, call->table_width, call->key_stride,
                           call->value_stride};
  if (!is_dtype(call->dtype)) return KERNEL_UNSUPPORTED;
  if (call->num_tiles == 0) return KERNEL_OK;
  if (!are_sizes(sizes, 10) || call->num_tiles < 0 || call->num_tiles > MOST ||
      call->tasks.count != call->num_tiles * call->num_kv_heads || call->q_stride < 0 ||
      call->out_stride < 0 || call->window < 0 || call->soft_cap < 0 ||
      call->key_stride < call->key_width || call->value_stride < call->value_width)
    return KERNEL_BAD_SIZE;
  if (call->tile_size != 1 && call->tile_size != ATTENTION_TILE) return KERNEL_BAD_SIZE;
  if (call->key_width > ATTENTION_MAX_WIDTH || call->value_width > ATTENTION_MAX_WIDTH)
    return KERNEL_UNSUPPORTED;
  if (!call->q || !call->out || !call->keys || !call->values || !call->tokens || !call->counts ||
      !call->lengths || !call->requests || !call->tables)
    return KERNEL_NULL;
  if (!are_within(call->counts, call->num_tiles, 1, call->tile_size + 1) ||
      !are_within(call->requests, call->num_tiles, 0, call->num_requests) ||
      !are_within(call->lengths, call->num_tiles, 1, call->table_width * call->block_size + 1))
    return KERNEL_BAD_INDEX;
  for (int64_t tile = 0; tile < call->num_tiles; tile++) {
    const int64_t first = call->tokens[tile], length = call->lengths[tile];
    if (first < 0 || first + call->counts[tile] > call->num_tokens) return KERNEL_BAD_INDEX;
    // A token sees itself.
    if (length < call->counts[tile]) return KERNEL_BAD_SIZE;
    const int64_t *table = call->tables + call->requests[tile] * call->table_width;
    const int64_t used = (length + call->block_size - 1) / call->block_size;
    if (!are_within(table, used, 0, call->num_blocks)) return KERNEL_BAD_INDEX;
  }
  return KERNEL_OK;
}
