// Calls the kernels with random shapes in arrays that end where the last number does, so that
// AddressSanitizer sees each access outside of them; and the checks with calls that are wrong.
//
// Passes over layers are computed by several threads, which ThreadSanitizer watches; both ways of
// dividing them must give the same bits.
//
//   random_calls CALLS SEED [layers]
#include <math.h>
#include <pthread.h>
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
static void *arrays[128];
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
      .num_tokens = ATTENTION_TILE + draw(8),
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

// A weight matrix of small numbers.
static packed_matrix matrix(int64_t inputs, int64_t outputs, int has_tiles) {
  const int64_t count = (outputs + PANEL_COLUMNS - 1) / PANEL_COLUMNS * PANEL_COLUMNS * inputs;
  void *weight = NULL;
  if (posix_memalign(&weight, 64, (size_t)count * 2)) abort();
  memcpy(weight, numbers(KERNEL_BFLOAT16, count), (size_t)count * 2);
  free(arrays[--num_arrays]);
  arrays[num_arrays++] = weight;
  return (packed_matrix){weight, draw(2) ? NULL : numbers(KERNEL_BFLOAT16, outputs), inputs,
                         outputs, has_tiles && inputs % 32 == 0};
}

static void call_product(const kernel_set *kernels, int has_tiles) {
  const int64_t rows = 1 + draw(70), inputs = 2 + 2 * draw(80), outputs = 1 + draw(200);
  const int64_t panels = (outputs + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
  product_call call = {
      .matrix = matrix(inputs, outputs, has_tiles),
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

enum { MAX_THREADS = 4, MAX_REQUESTS = 4, MAX_LAYERS = 3, MAX_GROUPS = 2, MOST_NEW = 40 };
enum { BLOCK = 16, WIDTH = 6 };

typedef struct work {
  kernel_function *kernel;
  void *call;
} work;

static void *run_one(void *given) {
  const work *todo = given;
  todo->kernel(todo->call);
  return NULL;
}

static void run_threads(kernel_function *kernel, void *call, int64_t num_threads) {
  pthread_t threads[MAX_THREADS];
  work todo = {kernel, call};
  for (int64_t i = 1; i < num_threads; i++)
    if (pthread_create(&threads[i], NULL, run_one, &todo)) abort();
  run_one(&todo);
  for (int64_t i = 1; i < num_threads; i++) pthread_join(threads[i], NULL);
}

static void *copy_of(const void *from, int64_t num_bytes) {
  return memcpy(array(num_bytes), from, (size_t)num_bytes);
}

static int64_t *zeros(int64_t count) {
  int64_t *found = array(count * (int64_t)sizeof *found);
  return memset(found, 0, (size_t)count * sizeof *found);
}

// Requests of a pass: their tokens, the blocks of each, and which tokens are wanted.
static void draw_requests(layers_pass *pass, int64_t *starts) {
  int64_t *lengths = zeros(MAX_REQUESTS), *tables = zeros(MAX_REQUESTS * WIDTH);
  int64_t *positions = zeros(MAX_REQUESTS * MOST_NEW), *places = zeros(MAX_REQUESTS * MOST_NEW);
  int64_t *num_blocks = zeros(MAX_GROUPS);
  int64_t *wanted = zeros(MAX_REQUESTS * MOST_NEW), token = 0;
  const int64_t limit = 1 + draw(4);
  pass->num_requests = 1 + draw(MAX_REQUESTS);
  for (int64_t request = 0; request < pass->num_requests; request++) {
    const int64_t before = draw(WIDTH * BLOCK - MOST_NEW), now = draw(2) ? 1 : 1 + draw(MOST_NEW);
    for (int64_t i = 0; i < WIDTH; i++)
      tables[request * WIDTH + i] = (i * MAX_REQUESTS + request) ^ 1;
    starts[request] = token;
    for (int64_t at = before; at < before + now; at++, token++) {
      positions[token] = at;
      places[token] = tables[request * WIDTH + at / BLOCK] * BLOCK + at % BLOCK;
      if (!draw(limit)) wanted[pass->num_wanted++] = token;
    }
    lengths[request] = before + now;
  }
  if (!draw(4)) pass->num_wanted = 0;
  starts[pass->num_requests] = pass->num_tokens = token;
  // Another group has the same sequences in blocks of other ids.
  pass->num_groups = 1 + draw(MAX_GROUPS);
  const int64_t num_entries = pass->num_requests * WIDTH;
  int64_t *all_tables = zeros(pass->num_groups * num_entries);
  int64_t *all_places = zeros(pass->num_groups * token);
  for (int64_t group = 0; group < pass->num_groups; group++) {
    num_blocks[group] = MAX_REQUESTS * WIDTH + group;
    for (int64_t i = 0; i < num_entries; i++)
      all_tables[group * num_entries + i] = tables[i] + group;
    for (int64_t i = 0; i < token; i++) all_places[group * token + i] = places[i] + group * BLOCK;
  }
  pass->num_blocks = num_blocks;
  pass->block_size = BLOCK;
  pass->table_width = WIDTH;
  pass->num_positions = WIDTH * BLOCK;
  pass->lengths = lengths;
  pass->tables = all_tables;
  pass->positions = positions;
  pass->kv_positions = all_places;
  pass->wanted = pass->num_wanted ? wanted : NULL;
}

static void draw_layers(layers_pass *pass, decoder_layer *layers, int has_tiles) {
  static const int64_t head_sizes[] = {8, 16, 20, 32};
  pass->num_layers = 1 + draw(MAX_LAYERS);
  pass->num_kv_heads = 1 + draw(2);
  pass->share = 1 + draw(3);
  pass->head_size = pick(head_sizes, 4);
  pass->rotary_size = draw(pass->head_size / 2 + 1) * 2;
  pass->hidden_size = draw(2) ? 64 : 2 + 2 * draw(50);
  pass->inner_size = draw(2) ? 96 : 2 + 2 * draw(60);
  pass->eps = 1e-5;
  pass->scale = 0.3;
  pass->cos = numbers(KERNEL_BFLOAT16, pass->num_positions * pass->rotary_size);
  pass->sin = numbers(KERNEL_BFLOAT16, pass->num_positions * pass->rotary_size);
  const int64_t hidden = pass->hidden_size, inner = pass->inner_size;
  const int64_t queries = pass->num_kv_heads * pass->share, groups = pass->num_kv_heads;
  const int64_t size = pass->head_size;
  for (int64_t i = 0; i < pass->num_layers; i++) {
    const int64_t group = draw(pass->num_groups);
    const int64_t plane = pass->num_blocks[group] * groups * BLOCK * size;
    layers[i] = (decoder_layer){
        .input_norm = numbers(KERNEL_BFLOAT16, hidden),
        .qkv = matrix(hidden, (queries + 2 * groups) * size, has_tiles),
        .head_norm = draw(2) ? NULL : numbers(KERNEL_BFLOAT16, (queries + groups) * size),
        .o = matrix(queries * size, hidden, has_tiles),
        .post_norm = numbers(KERNEL_BFLOAT16, hidden),
        .gate = matrix(hidden, inner, has_tiles),
        .up = matrix(hidden, inner, has_tiles),
        .down = matrix(inner, hidden, has_tiles),
        .keys = numbers(KERNEL_BFLOAT16, plane),
        .values = numbers(KERNEL_BFLOAT16, plane),
        .window = draw(2) ? 0 : 1 + draw(50),
        .group = group,
    };
  }
  pass->layers = layers;
  pass->is_end = draw(2);
  pass->x = numbers(KERNEL_BFLOAT16, pass->num_tokens * hidden);
  if (pass->is_end && pass->num_wanted)
    pass->out = numbers(KERNEL_BFLOAT16, pass->num_wanted * hidden);
}

static void run_token_layers(const kernel_set *kernels, const layers_pass *pass,
                             const int64_t *starts, int64_t num_threads) {
  token_layers_call call = {.pass = *pass, .num_threads = num_threads, .starts = starts};
  const int64_t num_tokens = pass->num_tokens, rows = 1 + draw(num_tokens);
  int64_t *cuts = zeros(num_tokens + 1), *requests = zeros(num_tokens), *needs = zeros(num_tokens);
  int64_t *firsts = zeros(num_tokens + 1), request = 0, nth = 0;
  for (int64_t begin = 0; begin < num_tokens; begin += rows) {
    const int64_t unit = call.num_units++;
    while (starts[request + 1] <= begin) request++;
    while (nth < pass->num_wanted && pass->wanted[nth] < begin) nth++;
    cuts[unit] = begin;
    requests[unit] = request;
    firsts[unit] = nth;
    needs[unit] = starts[request] / rows;
  }
  cuts[call.num_units] = num_tokens;
  firsts[call.num_units] = pass->num_wanted;
  call.max_rows = rows;
  call.cuts = cuts;
  call.unit_requests = requests;
  call.needs = needs;
  call.unit_wanted = firsts;
  call.stored = zeros(call.num_units);
  call.done = zeros(call.num_units);
  const int64_t heads = 2 * pass->num_kv_heads * (pass->share + 1) * pass->head_size;
  call.scratch_size = rows * (pass->hidden_size + heads + pass->inner_size);
  call.scratch = array(2 * num_threads * call.scratch_size);
  call.tasks.count = call.num_units * pass->num_layers;
  require(kernels_check_token_layers(&call) == KERNEL_OK, "a right pass of units is taken");
  run_threads(kernels->token_layers, &call, num_threads);
}

static int64_t panels(int64_t columns) { return (columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS; }

static void run_weight_layers(const kernel_set *kernels, const layers_pass *pass,
                              const int64_t *starts, int64_t num_threads) {
  weight_layers_call call = {.pass = *pass, .num_threads = num_threads};
  int64_t rows[4][MAX_REQUESTS * MOST_NEW], *are_alone = zeros(pass->num_tokens);
  for (int64_t request = 0; request < pass->num_requests; request++)
    for (int64_t token = starts[request]; token < starts[request + 1]; token += ATTENTION_TILE) {
      const int64_t tile = call.num_tiles++, left = starts[request + 1] - token;
      rows[0][tile] = token;
      rows[1][tile] = left < ATTENTION_TILE ? left : ATTENTION_TILE;
      rows[2][tile] = pass->lengths[request] - left + rows[1][tile];
      rows[3][tile] = request;
      are_alone[tile] = starts[request + 1] - starts[request] == 1;
    }
  int64_t *tiles = zeros(4 * call.num_tiles);
  for (int row = 0; row < 4; row++)
    memcpy(tiles + row * call.num_tiles, rows[row], 8 * (size_t)call.num_tiles);
  const int64_t queries = pass->num_kv_heads * pass->share * pass->head_size;
  const int64_t heads = queries + 2 * pass->num_kv_heads * pass->head_size;
  const int64_t phase_tasks[SHARE_PHASES] = {
      panels(heads), (pass->num_tokens + SHARE_ROTATE_ROWS - 1) / SHARE_ROTATE_ROWS,
      call.num_tiles * pass->num_kv_heads, 1, panels(pass->hidden_size), panels(pass->inner_size),
      panels(pass->hidden_size)};
  for (int i = 0; i < SHARE_PHASES; i++) call.tasks.count += phase_tasks[i] * pass->num_layers;
  call.tiles = tiles;
  call.are_alone = are_alone;
  call.phase_tasks = phase_tasks;
  call.done = zeros(SHARE_PHASES * pass->num_layers);
  call.heads = array(2 * pass->num_tokens * heads);
  call.attended = array(2 * pass->num_tokens * queries);
  call.gated = array(2 * pass->num_tokens * pass->inner_size);
  call.normed = array(2 * num_threads * pass->num_tokens * pass->hidden_size);
  require(kernels_check_weight_layers(&call) == KERNEL_OK, "a right pass of shares is taken");
  run_threads(kernels->weight_layers, &call, num_threads);
}

static void call_layers(const kernel_set *kernels, int has_tiles) {
  layers_pass pass = {0};
  decoder_layer layers[MAX_LAYERS], others[MAX_LAYERS];
  int64_t starts[MAX_REQUESTS + 1];
  draw_requests(&pass, starts);
  draw_layers(&pass, layers, has_tiles);
  layers_pass other = pass;
  const int64_t block = 2 * pass.num_kv_heads * BLOCK * pass.head_size;
  const int64_t all = 2 * pass.num_tokens * pass.hidden_size;
  const int64_t some = 2 * pass.num_wanted * pass.hidden_size;
  other.layers = others;
  other.x = copy_of(pass.x, all);
  if (pass.out) other.out = copy_of(pass.out, some);
  for (int64_t i = 0; i < pass.num_layers; i++) {
    const int64_t plane = pass.num_blocks[layers[i].group] * block;
    others[i] = layers[i];
    others[i].keys = copy_of(layers[i].keys, plane);
    others[i].values = copy_of(layers[i].values, plane);
  }
  run_token_layers(kernels, &pass, starts, 1 + draw(MAX_THREADS));
  run_weight_layers(kernels, &other, starts, 1 + draw(MAX_THREADS));
  const char *const same = "both ways give the same bits";
  if (pass.out) require(!memcmp(pass.out, other.out, (size_t)some), same);
  if (!pass.is_end) require(!memcmp(pass.x, other.x, (size_t)all), same);
  for (int64_t i = 0; i < pass.num_layers; i++) {
    const int64_t plane = pass.num_blocks[layers[i].group] * block;
    require(!memcmp(layers[i].keys, others[i].keys, (size_t)plane), same);
    require(!memcmp(layers[i].values, others[i].values, (size_t)plane), same);
  }
}

static void call_logprobs(const kernel_set *kernels) {
  const int64_t rows = 1 + draw(4), vocabulary = 1 + draw(draw(2) ? 300 : 1500);
  int64_t *firsts = indices(rows + 1, 1), *given = indices(rows, 4), entries = 0;
  for (int64_t row = 0; row < rows; row++) {
    entries += given[row] + draw(draw(2) ? 1 : vocabulary + 1);
    firsts[row + 1] = entries;
  }
  const int64_t logit_rows = 1 + draw(4);
  int64_t *places = indices(rows, logit_rows);
  logprobs_call call = {
      .tasks.count = rows,
      .dtype = draw(2),
      .logits = numbers(KERNEL_FLOAT32, logit_rows * vocabulary),
      .num_logit_rows = logit_rows,
      .places = places,
      .vocabulary = vocabulary,
      .firsts = firsts,
      .num_given = given,
      .tokens = indices(entries, vocabulary),
      .values = array(entries * 4),
      .ranks = array(entries * 8),
      .log_sums = array(rows * 8),
  };
  static const float special[] = {NAN, INFINITY, -INFINITY};
  float *logits = (float *)call.logits;
  const int64_t among = 1 + draw(50), num_logits = logit_rows * vocabulary;
  for (int64_t i = 0; i < num_logits && among < 40; i++)
    if (!draw(among)) logits[i] = special[draw(3)];
  if (call.dtype == KERNEL_BFLOAT16) {
    char *narrow = array(num_logits * 2);
    for (int64_t i = 0; i < num_logits; i++) memcpy(narrow + 2 * i, (char *)&logits[i] + 2, 2);
    call.logits = narrow;
  }
  require(kernels_check_logprobs(&call) == KERNEL_OK, "a right call of log probabilities is taken");
  kernels->logprobs(&call);
  for (int64_t i = 0; i < entries; i++)
    require(call.tokens[i] >= 0 && call.tokens[i] < vocabulary, "a token is in the vocabulary");
  const int64_t row = draw(rows);
  if (given[row]) {
    call.tokens[firsts[row]] = draw(2) ? -1 : vocabulary;
    require(kernels_check_logprobs(&call) == KERNEL_BAD_INDEX, "a wrong token is seen");
  }
  static const int64_t wrong[] = {-1, INT64_MIN, INT64_MAX};
  int64_t *const all[] = {&firsts[row + 1], &given[row], &places[row]};
  *all[draw(3)] = pick(wrong, 3);
  require(kernels_check_logprobs(&call) != KERNEL_OK, "a wrong size is seen");
}

static void call_delta(const kernel_set *kernels) {
  const int64_t singles = 1 + draw(4), blocks = 2 * singles, tokens = singles + draw(3);
  delta_call call = {
      .dtype = draw(2) ? KERNEL_FLOAT32 : KERNEL_FLOAT64,
      .num_tokens = tokens,
      .num_blocks = blocks,
      .key_heads = 1 + draw(3),
      .share = 1 + draw(3),
      .key_dim = 1 + draw(40),
      .value_dim = 1 + draw(40),
      .kernel = 1 + draw(4),
      .num_singles = singles,
  };
  const int64_t heads = call.key_heads * call.share;
  const int64_t channels = 2 * call.key_heads * call.key_dim + heads * call.value_dim;
  call.tasks.count = singles * call.key_heads;
  call.state_size = heads * call.key_dim * call.value_dim + (call.kernel - 1) * channels;
  call.mixed_stride = channels + draw(3);
  call.mixed = numbers(call.dtype, (tokens - 1) * call.mixed_stride + channels);
  call.rates = numbers(call.dtype, tokens * heads);
  call.decays = numbers(call.dtype, tokens * heads);
  call.out = numbers(call.dtype, tokens * heads * call.value_dim);
  call.states = numbers(call.dtype, blocks * call.state_size);
  call.convolution = numbers(call.dtype, call.kernel * channels);
  call.scratch = numbers(call.dtype, call.tasks.count * 2 * (call.key_dim + call.value_dim));
  int64_t *taken = indices(singles, 1), *read = indices(singles, 1), *written = indices(singles, 1);
  uint8_t *is_first = array(singles);
  for (int64_t i = 0; i < singles; i++) {
    taken[i] = i;
    written[i] = 2 * i;
    read[i] = 2 * i + draw(2);
    is_first[i] = (uint8_t)draw(2);
  }
  call.tokens = taken;
  call.read = read;
  call.written = written;
  call.is_first = is_first;
  require(kernels_check_delta(&call) == KERNEL_OK, "a right call of the delta rule is taken");
  kernels->delta(&call);
  static const int64_t wrong[] = {-1, INT64_MIN, INT64_MAX, (int64_t)1 << 41};
  const int64_t bad = pick(wrong, 4);
  delta_call other = call;
  int64_t *fields[] = {&other.key_heads,  &other.share,      &other.key_dim,    &other.value_dim,
                       &other.kernel,     &other.num_blocks, &other.num_tokens, &other.num_singles,
                       &other.state_size, &other.dtype,      &other.tasks.count};
  *fields[draw(11)] = bad;
  require(kernels_check_delta(&other) != KERNEL_OK, "a wrong size is seen");
  int64_t *all[] = {taken, read, written};
  all[draw(3)][draw(singles)] = bad;
  require(kernels_check_delta(&call) == KERNEL_BAD_INDEX, "a wrong index is seen");
}

int main(int count, char **arguments) {
  if (count < 3) return 2;
  const int only_layers = count > 3;
  const int64_t features = kernels_features();
  const int64_t masks[] = {~(int64_t)0, ~(int64_t)KERNEL_AMX,
                           ~(int64_t)(KERNEL_AVX512 | KERNEL_AMX), 0};
  for (int m = 0; m < 4; m++) {
    state = strtoull(arguments[2], NULL, 10) * 2654435761u + 1;
    const kernel_set *kernels = kernels_for(features & masks[m]);
    const int has_tiles = (features & masks[m] & KERNEL_AMX) != 0;
    for (int64_t i = strtoll(arguments[1], NULL, 10); i > 0; i--) {
      if (!only_layers) {
        call_attention(kernels);
        free_arrays();
        call_norm(kernels);
        free_arrays();
        call_rope(kernels);
        free_arrays();
        call_product(kernels, has_tiles);
        free_arrays();
        call_delta(kernels);
        free_arrays();
        call_logprobs(kernels);
        free_arrays();
      }
      if (i % 4) continue;  // as long as all the others
      call_layers(kernels, has_tiles);
      free_arrays();
    }
    printf("%s%s: no fault\n", kernels->name, has_tiles ? " with tiles" : "");
  }
  return 0;
}
