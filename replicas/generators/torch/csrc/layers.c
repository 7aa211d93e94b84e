// Decoder layers of a pass in one call.
//
// A layer: root mean square norm, one matrix for queries, keys and values, norm of heads if any,
// rotation of halves, causal attention, output projection, norm, SwiGLU. Threads take tasks in
// order. A task waits for others that it depends on. These were taken earlier, so a waiting thread
// always waits for a running one.
#include <stddef.h>
#include <string.h>

#include "internal.h"

// --- parts of a layer ---------------------------------------------------------------------------

INLINE int64_t query_size(const layers_pass *pass) {
  return pass->num_kv_heads * pass->share * pass->head_size;
}

INLINE int64_t heads_size(const layers_pass *pass) {
  return query_size(pass) + 2 * pass->num_kv_heads * pass->head_size;
}

static void normalise_rows(const layers_pass *pass, const bf16 *x, int64_t rows,
                           const void *weight, bf16 *out) {
  const norm_call call = {
      .dtype = KERNEL_BFLOAT16,
      .x = x,
      .stride = pass->hidden_size,
      .weight = weight,
      .out = out,
      .size = pass->hidden_size,
      .eps = pass->eps,
  };
  for (int64_t row = 0; row < rows; row++) VARIANT(normalise_row)(&call, row);
}

// Rotate the queries and keys of rows `first` to `last`, and store their keys and values; row 0 is
// token `begin`.
static void rotate_rows(const layers_pass *pass, const decoder_layer *layer, bf16 *heads,
                        int64_t begin, int64_t first, int64_t last) {
  const rope_call call = {
      .dtype = KERNEL_BFLOAT16,
      .heads = heads,
      .num_heads = pass->num_kv_heads * pass->share,
      .num_kv_heads = pass->num_kv_heads,
      .head_size = pass->head_size,
      .rotary_size = pass->rotary_size,
      .cos = pass->cos,
      .sin = pass->sin,
      .num_positions = pass->num_positions,
      .positions = pass->positions + begin,
      .kv_positions = pass->kv_positions + layer->group * pass->num_tokens + begin,
      .keys = layer->keys,
      .values = layer->values,
      .num_blocks = pass->num_blocks[layer->group],
      .block_size = pass->block_size,
      .norm = layer->head_norm,
      .eps = pass->eps,
  };
  for (int64_t row = first; row < last; row++) VARIANT(rotate_token)(&call, row);
}

// Attention of a layer; the caller adds the tiles.
static attention_call attention_of(const layers_pass *pass, const decoder_layer *layer,
                                   const bf16 *heads, bf16 *attended) {
  return (attention_call){
      .dtype = KERNEL_BFLOAT16,
      .q = heads,
      .out = attended,
      .q_stride = heads_size(pass),
      .out_stride = query_size(pass),
      .num_tokens = pass->num_tokens,
      .keys = layer->keys,
      .values = layer->values,
      .key_stride = pass->head_size,
      .value_stride = pass->head_size,
      .num_blocks = pass->num_blocks[layer->group],
      .num_kv_heads = pass->num_kv_heads,
      .share = pass->share,
      .block_size = pass->block_size,
      .key_width = pass->head_size,
      .value_width = pass->head_size,
      .tables = pass->tables + layer->group * pass->num_requests * pass->table_width,
      .num_requests = pass->num_requests,
      .table_width = pass->table_width,
      .scale = pass->scale,
      .window = layer->window,
  };
}

// Move wanted tokens, from the nth on: attention results to the first rows of `attended`, hidden
// states to `out`. Row 0 of `attended` is token `begin`; no row moves to a later place.
static void keep_wanted(const layers_pass *pass, int64_t first, int64_t last, int64_t begin,
                        bf16 *attended) {
  const int64_t size = query_size(pass), hidden = pass->hidden_size;
  for (int64_t nth = first; nth < last; nth++) {
    const int64_t token = pass->wanted[nth];
    memmove(attended + (nth - first) * size, attended + (token - begin) * size, 2 * (size_t)size);
    memcpy((bf16 *)pass->out + nth * hidden, (const bf16 *)pass->x + token * hidden,
           2 * (size_t)hidden);
  }
}

// Multiply rows by all panels of a matrix, or by some.
static void multiply_all(const packed_matrix *matrix, const bf16 *x, int64_t rows, int64_t then,
                         bf16 *out) {
  VARIANT(multiply_panels)(matrix, x, rows, 0, panels_of(matrix->num_outputs), then, out, out);
}

static void multiply_panel(const packed_matrix *matrix, const bf16 *x, int64_t rows, int64_t panel,
                           int64_t then, bf16 *out) {
  VARIANT(multiply_panels)(matrix, x, rows, panel, panel + 1, then, out, out);
}

// --- units of tokens ----------------------------------------------------------------------------

// Attend with the tokens of a unit, tile by tile from each request's first token on.
static void attend_unit(const token_layers_call *call, const decoder_layer *layer, int64_t unit,
                        const bf16 *heads, bf16 *attended) {
  const layers_pass *pass = &call->pass;
  const int64_t begin = call->cuts[unit], end = call->cuts[unit + 1];
  int64_t row, count, length, request = call->unit_requests[unit];
  attention_call attention = attention_of(pass, layer, heads, attended);
  attention.num_tokens = end - begin;
  attention.num_tiles = 1;
  attention.tokens = &row;
  attention.counts = &count;
  attention.lengths = &length;
  attention.requests = &request;
  for (int64_t token = begin; token < end; token += count) {
    while (call->starts[request + 1] <= token) request++;
    const int64_t behind = call->starts[request + 1], left = (behind < end ? behind : end) - token;
    attention.tile_size = behind - call->starts[request] == 1 ? 1 : ATTENTION_TILE;
    row = token - begin;
    count = left < ATTENTION_TILE ? left : ATTENTION_TILE;
    length = pass->lengths[request] - (behind - token - count);
    for (int64_t head = 0; head < pass->num_kv_heads; head++)
      VARIANT(attend_tile)(&attention, 0, head);
  }
}

void VARIANT(token_layers)(void *given) {
  token_layers_call *call = given;
  const layers_pass *pass = &call->pass;
  const int64_t thread = __atomic_fetch_add(&call->entered, 1, __ATOMIC_RELAXED);
  if (thread >= call->num_threads) return;
  const int64_t hidden = pass->hidden_size, most = call->max_rows;
  bf16 *normed = (bf16 *)call->scratch + thread * call->scratch_size;
  bf16 *heads = normed + most * hidden;
  bf16 *attended = heads + most * heads_size(pass);
  bf16 *gated = attended + most * query_size(pass);
  for (int64_t task; (task = take_task(&call->tasks)) < call->tasks.count;) {
    const int64_t nth = task / call->num_units, unit = task % call->num_units;
    const decoder_layer *layer = &pass->layers[nth];
    const int64_t begin = call->cuts[unit];
    int64_t rows = call->cuts[unit + 1] - begin;
    bf16 *x = (bf16 *)pass->x + begin * hidden;
    wait_for(&call->done[unit], nth);
    normalise_rows(pass, x, rows, layer->input_norm, normed);
    multiply_all(&layer->qkv, normed, rows, PRODUCT_ONLY, heads);
    rotate_rows(pass, layer, heads, begin, 0, rows);
    publish(&call->stored[unit], nth + 1);
    // Earlier tokens of a request that a cut divides.
    for (int64_t before = call->needs[unit]; before < unit; before++)
      wait_for(&call->stored[before], nth + 1);
    attend_unit(call, layer, unit, heads, attended);
    if (pass->is_end && nth == pass->num_layers - 1) {
      // Nothing reads the other tokens any more.
      const int64_t first = call->unit_wanted[unit], last = call->unit_wanted[unit + 1];
      rows = last - first;
      if (rows) {
        keep_wanted(pass, first, last, begin, attended);
        x = (bf16 *)pass->out + first * hidden;
      }
    }
    // Without a row there may be no output to take an address in.
    if (!rows) continue;
    multiply_all(&layer->o, attended, rows, PRODUCT_PLUS, x);
    normalise_rows(pass, x, rows, layer->post_norm, normed);
    multiply_all(&layer->gate, normed, rows, PRODUCT_SWISH, gated);
    multiply_all(&layer->up, normed, rows, PRODUCT_TIMES, gated);
    multiply_all(&layer->down, gated, rows, PRODUCT_PLUS, x);
    publish(&call->done[unit], nth + 1);
  }
}

// --- shares of the weights ----------------------------------------------------------------------

// With few tokens, reading the weights takes the time. Threads that divided the tokens would each
// read all of them.

enum phase { QKV, ROTATE, ATTEND, KEEP_WANTED, O, GATE_UP, DOWN };

void VARIANT(weight_layers)(void *given) {
  weight_layers_call *call = given;
  const layers_pass *pass = &call->pass;
  const int64_t thread = __atomic_fetch_add(&call->entered, 1, __ATOMIC_RELAXED);
  if (thread >= call->num_threads) return;
  bf16 *normed = (bf16 *)call->normed + thread * pass->num_tokens * pass->hidden_size;
  int64_t normed_for = -1;  // the phase whose input `normed` holds
  int64_t tasks_of_layer = 0;
  for (int phase = 0; phase < SHARE_PHASES; phase++) tasks_of_layer += call->phase_tasks[phase];
  for (int64_t task; (task = take_task(&call->tasks)) < call->tasks.count;) {
    const int64_t nth = task / tasks_of_layer;
    int64_t part = task % tasks_of_layer, before = call->phase_tasks[SHARE_PHASES - 1];
    int phase = 0;
    for (; part >= call->phase_tasks[phase]; phase++) {
      before = call->phase_tasks[phase];
      part -= before;
    }
    const int64_t at = nth * SHARE_PHASES + phase;
    if (at > 0) wait_for(&call->done[at - 1], before);
    const decoder_layer *layer = &pass->layers[nth];
    // Behind the last layer's attention nothing reads the other tokens any more.
    const int is_last = pass->is_end && nth == pass->num_layers - 1;
    const int is_reduced = is_last && phase > KEEP_WANTED;
    const int64_t rows = is_reduced ? pass->num_wanted : pass->num_tokens;
    bf16 *x = is_reduced ? pass->out : pass->x;
    if (!rows) {  // there may be no output to take an address in
      publish_one(&call->done[at], call->phase_tasks[phase]);
      continue;
    }
    if ((phase == QKV || phase == GATE_UP) && normed_for != at) {
      const void *weight = phase == QKV ? layer->input_norm : layer->post_norm;
      normalise_rows(pass, x, rows, weight, normed);
      normed_for = at;
    }
    switch (phase) {
      case QKV: multiply_panel(&layer->qkv, normed, rows, part, PRODUCT_ONLY, call->heads); break;
      case ROTATE: {
        const int64_t first = part * SHARE_ROTATE_ROWS, last = first + SHARE_ROTATE_ROWS;
        rotate_rows(pass, layer, call->heads, 0, first, last < rows ? last : rows);
        break;
      }
      case ATTEND: {
        attention_call attention = attention_of(pass, layer, call->heads, call->attended);
        const int64_t tile = part / pass->num_kv_heads;
        attention.num_tiles = call->num_tiles;
        attention.tile_size = call->are_alone[tile] ? 1 : ATTENTION_TILE;
        attention.tokens = call->tiles;
        attention.counts = call->tiles + call->num_tiles;
        attention.lengths = call->tiles + 2 * call->num_tiles;
        attention.requests = call->tiles + 3 * call->num_tiles;
        VARIANT(attend_tile)(&attention, tile, part % pass->num_kv_heads);
        break;
      }
      case KEEP_WANTED:
        if (is_last) keep_wanted(pass, 0, pass->num_wanted, 0, call->attended);
        break;
      case O: multiply_panel(&layer->o, call->attended, rows, part, PRODUCT_PLUS, x); break;
      case GATE_UP:
        multiply_panel(&layer->gate, normed, rows, part, PRODUCT_SWISH, call->gated);
        multiply_panel(&layer->up, normed, rows, part, PRODUCT_TIMES, call->gated);
        break;
      default: multiply_panel(&layer->down, call->gated, rows, part, PRODUCT_PLUS, x);
    }
    publish_one(&call->done[at], call->phase_tasks[phase]);
  }
}
