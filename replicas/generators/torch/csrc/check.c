// Checks of calls: what a kernel would read or write outside its arrays, and what it cannot compute.
#include "kernels.h"

// The product of two sizes and a width stays below what int64_t holds.
static const int64_t MOST = (int64_t)1 << 24;

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
  if (!call->heads || !call->positions || !call->kv_positions || !call->keys || !call->values ||
      (call->rotary_size && (!call->cos || !call->sin)))
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
    if (first < 0 || first > call->num_tokens - call->counts[tile]) return KERNEL_BAD_INDEX;
    // A token sees itself.
    if (length < call->counts[tile]) return KERNEL_BAD_SIZE;
    const int64_t *table = call->tables + call->requests[tile] * call->table_width;
    const int64_t used = (length + call->block_size - 1) / call->block_size;
    if (!are_within(table, used, 0, call->num_blocks)) return KERNEL_BAD_INDEX;
  }
  return KERNEL_OK;
}

static int is_matrix(const packed_matrix *matrix, int64_t num_inputs, int64_t num_outputs) {
  return matrix->num_inputs == num_inputs && matrix->num_outputs == num_outputs &&
         num_inputs % 2 == 0 && (!matrix->uses_tiles || num_inputs % 32 == 0);
}

int64_t kernels_check_product(const product_call *call) {
  const packed_matrix *matrix = &call->matrix;
  const int64_t sizes[] = {matrix->num_inputs, matrix->num_outputs, call->rows_of_task};
  if (call->then < PRODUCT_ONLY || call->then > PRODUCT_SWISH) return KERNEL_UNSUPPORTED;
  if (call->num_rows == 0) return KERNEL_OK;
  if (!are_sizes(sizes, 3) || call->num_rows < 0 || call->num_rows > MOST ||
      !is_matrix(matrix, matrix->num_inputs, matrix->num_outputs) || call->rows_of_task % 32)
    return KERNEL_BAD_SIZE;
  const int64_t num_panels = (matrix->num_outputs + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
  const int64_t num_parts = (call->num_rows + call->rows_of_task - 1) / call->rows_of_task;
  if (call->tasks.count != num_panels * num_parts) return KERNEL_BAD_SIZE;
  const int has_other = call->then == PRODUCT_PLUS || call->then == PRODUCT_TIMES;
  if (!matrix->weight || !call->x || !call->out || (has_other && !call->other)) return KERNEL_NULL;
  return KERNEL_OK;
}

static int64_t check_pass(const layers_pass *pass) {
  const int64_t sizes[] = {pass->num_layers,   pass->hidden_size,   pass->inner_size,
                           pass->num_kv_heads, pass->share,         pass->head_size,
                           pass->num_groups,   pass->block_size,    pass->num_positions,
                           pass->num_tokens,   pass->num_requests,  pass->table_width};
  if (!are_sizes(sizes, 12) || pass->num_wanted < 0 || pass->rotary_size < 0 ||
      pass->rotary_size > pass->head_size || pass->rotary_size % 2)
    return KERNEL_BAD_SIZE;
  if (pass->head_size > ATTENTION_MAX_WIDTH) return KERNEL_UNSUPPORTED;
  const int64_t hidden = pass->hidden_size, inner = pass->inner_size;
  const int64_t queries = pass->num_kv_heads * pass->share * pass->head_size;
  const int64_t heads = queries + 2 * pass->num_kv_heads * pass->head_size;
  if (!pass->layers || !pass->cos || !pass->sin || !pass->x || !pass->positions ||
      !pass->kv_positions || !pass->lengths || !pass->tables || !pass->num_blocks ||
      (pass->is_end && pass->num_wanted && (!pass->wanted || !pass->out)))
    return KERNEL_NULL;
  for (int64_t i = 0; i < pass->num_layers; i++) {
    const decoder_layer *layer = &pass->layers[i];
    if (!is_matrix(&layer->qkv, hidden, heads) || !is_matrix(&layer->o, queries, hidden) ||
        !is_matrix(&layer->gate, hidden, inner) || !is_matrix(&layer->up, hidden, inner) ||
        !is_matrix(&layer->down, inner, hidden) || layer->window < 0 || layer->group < 0 ||
        layer->group >= pass->num_groups)
      return KERNEL_BAD_SIZE;
    if (!layer->input_norm || !layer->post_norm || !layer->keys || !layer->values ||
        !layer->qkv.weight || !layer->o.weight || !layer->gate.weight || !layer->up.weight ||
        !layer->down.weight)
      return KERNEL_NULL;
  }
  if (!are_within(pass->positions, pass->num_tokens, 0, pass->num_positions) ||
      !are_within(pass->lengths, pass->num_requests, 1, pass->table_width * pass->block_size + 1))
    return KERNEL_BAD_INDEX;
  for (int64_t group = 0; group < pass->num_groups; group++) {
    const int64_t num_blocks = pass->num_blocks[group];
    const int64_t *places = pass->kv_positions + group * pass->num_tokens;
    const int64_t *tables = pass->tables + group * pass->num_requests * pass->table_width;
    if (!are_sizes(&num_blocks, 1)) return KERNEL_BAD_SIZE;
    if (!are_within(places, pass->num_tokens, 0, num_blocks * pass->block_size))
      return KERNEL_BAD_INDEX;
    for (int64_t request = 0; request < pass->num_requests; request++) {
      const int64_t used = (pass->lengths[request] + pass->block_size - 1) / pass->block_size;
      if (!are_within(tables + request * pass->table_width, used, 0, num_blocks))
        return KERNEL_BAD_INDEX;
    }
  }
  for (int64_t i = 0; pass->is_end && i < pass->num_wanted; i++)
    if (pass->wanted[i] < (i ? pass->wanted[i - 1] + 1 : 0) || pass->wanted[i] >= pass->num_tokens)
      return KERNEL_BAD_INDEX;
  return KERNEL_OK;
}

int64_t kernels_check_token_layers(const token_layers_call *call) {
  const layers_pass *pass = &call->pass;
  const int64_t status = check_pass(pass);
  if (status) return status;
  const int64_t sizes[] = {call->num_threads, call->num_units, call->max_rows};
  const int64_t queries = pass->num_kv_heads * pass->share * pass->head_size;
  const int64_t room = pass->hidden_size + 2 * queries +
                       2 * pass->num_kv_heads * pass->head_size + pass->inner_size;
  if (!are_sizes(sizes, 3) || call->scratch_size < call->max_rows * room ||
      call->tasks.count != call->num_units * pass->num_layers)
    return KERNEL_BAD_SIZE;
  if (!call->starts || !call->cuts || !call->unit_requests || !call->needs ||
      !call->unit_wanted || !call->stored || !call->done || !call->scratch)
    return KERNEL_NULL;
  const int64_t *starts = call->starts, *cuts = call->cuts;
  if (starts[0] != 0 || starts[pass->num_requests] != pass->num_tokens || cuts[0] != 0 ||
      cuts[call->num_units] != pass->num_tokens)
    return KERNEL_BAD_INDEX;
  for (int64_t i = 0; i < pass->num_requests; i++)
    if (starts[i + 1] < starts[i] || pass->lengths[i] < starts[i + 1] - starts[i])
      return KERNEL_BAD_INDEX;
  for (int64_t unit = 0; unit < call->num_units; unit++) {
    const int64_t request = call->unit_requests[unit], rows = cuts[unit + 1] - cuts[unit];
    if (rows < 1 || rows > call->max_rows || request < 0 || request >= pass->num_requests ||
        starts[request] > cuts[unit] || starts[request + 1] <= cuts[unit] ||
        call->needs[unit] < 0 || call->needs[unit] > unit)
      return KERNEL_BAD_INDEX;
    const int64_t first = call->unit_wanted[unit], last = call->unit_wanted[unit + 1];
    if (!pass->is_end) continue;
    if (first < 0 || last < first || last > pass->num_wanted) return KERNEL_BAD_INDEX;
    if (first < last &&
        (pass->wanted[first] < cuts[unit] || pass->wanted[last - 1] >= cuts[unit + 1]))
      return KERNEL_BAD_INDEX;
  }
  return KERNEL_OK;
}

int64_t kernels_check_weight_layers(const weight_layers_call *call) {
  const layers_pass *pass = &call->pass;
  const int64_t status = check_pass(pass);
  if (status) return status;
  const int64_t sizes[] = {call->num_threads, call->num_tiles};
  if (!are_sizes(sizes, 2)) return KERNEL_BAD_SIZE;
  if (!call->tiles || !call->are_alone || !call->phase_tasks || !call->done || !call->heads ||
      !call->attended || !call->gated || !call->normed)
    return KERNEL_NULL;
  const int64_t queries = pass->num_kv_heads * pass->share * pass->head_size;
  const int64_t columns[] = {queries + 2 * pass->num_kv_heads * pass->head_size, pass->hidden_size,
                             pass->inner_size};
  int64_t panels[3];
  for (int i = 0; i < 3; i++) panels[i] = (columns[i] + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
  const int64_t rotations = (pass->num_tokens + SHARE_ROTATE_ROWS - 1) / SHARE_ROTATE_ROWS;
  const int64_t wanted[SHARE_PHASES] = {
      panels[0], rotations, call->num_tiles * pass->num_kv_heads, 1, panels[1], panels[2], panels[1]};
  int64_t total = 0;
  for (int i = 0; i < SHARE_PHASES; i++) {
    if (call->phase_tasks[i] != wanted[i]) return KERNEL_BAD_SIZE;
    total += wanted[i];
  }
  if (call->tasks.count != total * pass->num_layers) return KERNEL_BAD_SIZE;
  const int64_t *tokens = call->tiles, *counts = tokens + call->num_tiles;
  const int64_t *lengths = counts + call->num_tiles, *requests = lengths + call->num_tiles;
  for (int64_t tile = 0; tile < call->num_tiles; tile++) {
    const int64_t most = call->are_alone[tile] ? 1 : ATTENTION_TILE;
    if (counts[tile] < 1 || counts[tile] > most || tokens[tile] < 0 ||
        tokens[tile] > pass->num_tokens - counts[tile] || requests[tile] < 0 ||
        requests[tile] >= pass->num_requests || lengths[tile] < counts[tile] ||
        lengths[tile] > pass->lengths[requests[tile]])
      return KERNEL_BAD_INDEX;
  }
  return KERNEL_OK;
}

int64_t kernels_check_logprobs(const logprobs_call *call) {
  const int64_t sizes[] = {call->vocabulary, call->num_logit_rows}, rows = call->tasks.count;
  if (call->dtype != KERNEL_FLOAT32 && call->dtype != KERNEL_BFLOAT16) return KERNEL_UNSUPPORTED;
  if (rows == 0) return KERNEL_OK;
  if (!are_sizes(sizes, 2) || rows < 0 || rows > MOST) return KERNEL_BAD_SIZE;
  if (!call->logits || !call->places || !call->firsts || !call->num_given || !call->tokens ||
      !call->values || !call->ranks || !call->log_sums)
    return KERNEL_NULL;
  if (call->firsts[0] != 0 || !are_within(call->places, rows, 0, call->num_logit_rows))
    return KERNEL_BAD_INDEX;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t first = call->firsts[row], given = call->num_given[row];
    const int64_t count = call->firsts[row + 1] < first ? -1 : call->firsts[row + 1] - first;
    if (given < 0 || given > count || count - given > call->vocabulary) return KERNEL_BAD_SIZE;
    if (!are_within(call->tokens + first, given, 0, call->vocabulary)) return KERNEL_BAD_INDEX;
  }
  return KERNEL_OK;
}

int64_t kernels_check_delta(const delta_call *call) {
  const int64_t sizes[] = {call->key_heads, call->share, call->key_dim, call->value_dim,
                           call->kernel, call->num_blocks, call->num_tokens};
  if (call->dtype != KERNEL_FLOAT32 && call->dtype != KERNEL_FLOAT64) return KERNEL_UNSUPPORTED;
  if (call->num_singles == 0) return KERNEL_OK;
  if (!are_sizes(sizes, 7) || call->num_singles < 0 || call->num_singles > MOST)
    return KERNEL_BAD_SIZE;
  // The products below stay within int64_t.
  for (int i = 0; i < 5; i++)
    if (sizes[i] > 1 << 12) return KERNEL_BAD_SIZE;
  const int64_t heads = call->key_heads * call->share;
  const int64_t channels = 2 * call->key_heads * call->key_dim + heads * call->value_dim;
  const int64_t state = heads * call->key_dim * call->value_dim + (call->kernel - 1) * channels;
  if (call->tasks.count != call->num_singles * call->key_heads || call->state_size != state ||
      state > (int64_t)1 << 36 || call->mixed_stride < channels || call->mixed_stride > MOST)
    return KERNEL_BAD_SIZE;
  if (!call->mixed || !call->rates || !call->decays || !call->out || !call->states ||
      !call->convolution || !call->tokens || !call->read || !call->written || !call->is_first ||
      !call->scratch)
    return KERNEL_NULL;
  if (!are_within(call->tokens, call->num_singles, 0, call->num_tokens) ||
      !are_within(call->read, call->num_singles, 0, call->num_blocks) ||
      !are_within(call->written, call->num_singles, 0, call->num_blocks))
    return KERNEL_BAD_INDEX;
  return KERNEL_OK;
}
