// Causal attention over paged keys and values, with an online softmax.
//
// A task is the query heads of one KV head of some neighbouring tokens: its rows. Keys and values of
// a sequence are read in chunks of some blocks, whose limits depend on positions alone, and the
// arithmetic of a row does not depend on the rows beside it. So the bits of a token's result do not
// depend on what is computed together with it.
//
// Source of the softmax: FlashAttention (rescaling by exp(old maximum - new maximum)).
#include "simd.h"

enum {
  MAX_ROWS = 32,  // rows of a pass over the keys
  SLOT = 16,      // scores of a run of keys begin at a multiple of this
  CHUNK = 128,    // scores of a row per chunk, padding included, for blocks of up to this size
  MAX_SCORES = CHUNK + 3 * SLOT,
  MAX_RUNS = CHUNK / SLOT + 2,
  AHEAD = 2,      // blocks that are fetched ahead: memory takes longer than a block's arithmetic
  LINE = 64,      // bytes of a cache line
};

// Keys of one block that a chunk reads.
typedef struct run {
  int64_t first;   // position of the first in the sequence
  int64_t block;   // index of the block in the cache
  int64_t offset;  // of the first in its block
  int count;
  int slot;        // index of its first score in a row
} run;

// A part of a task: some rows, and the keys that their tokens see.
typedef struct rows {
  int64_t token;        // first token of the tile
  int64_t first_row;    // of the tile's rows, token by token
  int count;            // rows
  int64_t head;         // first query head of the KV head
  int64_t kv_head;
  int64_t position;     // of the tile's first token in its sequence
  int64_t length;       // keys that the tile's last token sees
  const int64_t *table;
} rows;

// The positions that a row sees are [first, last).
INLINE void visible(const attention_call *call, const rows *part, int row, int64_t *first,
                    int64_t *last) {
  *last = part->position + (part->first_row + row) / call->share + 1;
  *first = call->window && *last > call->window ? *last - call->window : 0;
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Keys of a chunk: a whole number of blocks, or a part of a large one.
INLINE int64_t chunk_size(int64_t block_size) {
  if (block_size > CHUNK) return CHUNK;
  const int64_t padded = (block_size + SLOT - 1) / SLOT * SLOT;
  return CHUNK / padded * block_size;
}

// List the runs of the keys [first, last); returns how many.
INLINE int list_runs(const attention_call *call, const int64_t *table, int64_t first, int64_t last,
                     run *runs) {
  int count = 0, slot = 0;
  for (int64_t at = first; at < last;) {
    const int64_t offset = at % call->block_size;
    const int64_t size = smaller(call->block_size - offset, last - at);
    runs[count++] = (run){at, table[at / call->block_size], offset, (int)size, slot};
    slot += (int)((size + SLOT - 1) / SLOT * SLOT);
    at += size;
  }
  return count;
}

// Scores of a list of runs, padding included.
INLINE int scores_of(const run *runs, int count) {
  const run *last = &runs[count - 1];
  return last->slot + (last->count + SLOT - 1) / SLOT * SLOT;
}

// Bring a block into the second-level cache; blocks lie anywhere, which processors do not predict.
INLINE void fetch(const char *from, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += LINE) __builtin_prefetch(from + i, 0, 2);
}

#include "item_float32.h"
#define MASK ints
#define KEPT float
#include "attention_plain.inc"
#include "attention.inc"

#include "item_float64.h"
#define MASK longs
#define KEPT double
#include "attention_plain.inc"
#include "attention.inc"

#include "item_bfloat16.h"
#define MASK ints
#if defined(__AVX512BF16__)
#define KEPT bf16
#include "attention_pairs.inc"
#else
#define KEPT float
#include "attention_plain.inc"
#endif
#include "attention.inc"

static int attend(const attention_call *call, const rows *part, int is_alone) {
#ifdef HAS_TILES
  if (call->dtype == KERNEL_BFLOAT16) {
    shape_tiles(part->count);
    const int is_whole = attend_bfloat16(call, part, is_alone);
    _tile_release();  // a thread without tiles is quicker to switch
    return is_whole;
  }
#endif
  if (call->dtype == KERNEL_BFLOAT16) return attend_bfloat16(call, part, is_alone);
  if (call->dtype == KERNEL_FLOAT32) return attend_float32(call, part, is_alone);
  return attend_float64(call, part, is_alone);
}

void VARIANT(attend_tile)(const attention_call *call, int64_t tile, int64_t kv_head) {
  const int64_t count = call->counts[tile], length = call->lengths[tile];
  rows part = {
      .token = call->tokens[tile],
      .head = kv_head * call->share,
      .kv_head = kv_head,
      .position = length - count,
      .length = length,
      .table = call->tables + call->requests[tile] * call->table_width,
  };
  const int64_t num_rows = count * call->share;
  for (part.first_row = 0; part.first_row < num_rows; part.first_row += MAX_ROWS) {
    part.count = (int)smaller(num_rows - part.first_row, MAX_ROWS);
    if (attend(call, &part, 0)) continue;
    // Each token again: the NaN may be where it, or another of these tokens, does not look.
    rows one = part;
    for (int done = 0; done < part.count; done += one.count) {
      one.first_row = part.first_row + done;
      const int64_t left = call->share - one.first_row % call->share;
      one.count = (int)smaller(left, part.count - done);
      attend(call, &one, 1);
    }
  }
}

void VARIANT(attention)(void *given) {
  attention_call *call = given;
  for (int64_t task; (task = take_task(&call->tasks)) < call->tasks.count;)
    VARIANT(attend_tile)(call, task / call->num_kv_heads, task % call->num_kv_heads);
}
