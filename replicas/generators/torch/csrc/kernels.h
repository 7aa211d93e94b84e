// Interface between the torch generator (native.py) and its kernels.
//
// A kernel is a function of one call structure. Every thread of a team runs it with the same
// structure and takes tasks from it until none are left. `native.py` mirrors each structure;
// layout.c lists their fields, and loading fails where the two disagree.
//
// Kernels trust their arguments. Call the matching `check` first: it reports what a kernel cannot
// compute, or would read or write outside its arrays.
#ifndef KERNELS_H
#define KERNELS_H

#include <stdint.h>

// Storage type of tensors. bfloat16 is computed in float32.
enum kernel_dtype { KERNEL_FLOAT32 = 0, KERNEL_BFLOAT16 = 1, KERNEL_FLOAT64 = 2 };

// Results of a check. UNSUPPORTED: valid, but for another implementation.
enum kernel_status {
  KERNEL_OK = 0,
  KERNEL_UNSUPPORTED = 1,
  KERNEL_BAD_SIZE = 2,   // a size is not positive, or contradicts another
  KERNEL_BAD_INDEX = 3,  // an index lies outside the array that it is for
  KERNEL_NULL = 4,       // an array is missing
};

// Instruction sets, as bits. A kernel set is chosen by what the processor has.
enum kernel_feature {
  KERNEL_AVX2 = 1,        // AVX2, FMA
  KERNEL_AVX512 = 2,      // AVX-512 F, BW, DQ, VL and BF16
  KERNEL_AMX = 4,         // AMX tiles of bfloat16, permitted by the operating system
};

// Work that threads take task by task. `next` is 0 before a call.
typedef struct kernel_tasks {
  int64_t next;
  int64_t count;
} kernel_tasks;

enum {
  ATTENTION_TILE = 4,         // tokens of a prompt that read a key together
  ATTENTION_MAX_WIDTH = 1024  // numbers of a key or value
};

// Causal attention of tiles of neighbouring tokens over the blocks of their sequences.
// A task is one tile and one KV head with its query heads.
typedef struct attention_call {
  kernel_tasks tasks;
  int64_t dtype;
  const void *q;         // (tokens, heads, key width)
  void *out;             // (tokens, heads, value width)
  int64_t q_stride;      // numbers between tokens; the heads of a token follow one another
  int64_t out_stride;
  int64_t num_tokens;    // tokens of q and out
  const void *keys;      // (blocks, KV heads, block size, key stride), key width of them used
  const void *values;    // (blocks, KV heads, block size, value stride); may be part of the keys
  int64_t key_stride;    // numbers between the tokens of a block
  int64_t value_stride;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t share;         // query heads of a KV head
  int64_t block_size;
  int64_t key_width;
  int64_t value_width;
  int64_t num_tiles;
  int64_t tile_size;       // tokens of a tile at most: 1 or ATTENTION_TILE
  const int64_t *tokens;   // (tiles,), first token of each in q and out
  const int64_t *counts;   // (tiles,), 1 to tile_size
  const int64_t *lengths;  // (tiles,), keys that the last token of each sees, without a window
  const int64_t *requests; // (tiles,), rows of tables
  const int64_t *tables;   // (requests, table width), blocks of a sequence in order
  int64_t num_requests;
  int64_t table_width;
  double scale;            // factor of the scores
  double soft_cap;         // scores become cap * tanh(score / cap); 0: not
  int64_t window;          // keys that a token sees at most, itself included; 0: all
  const void *sinks;       // (heads,), a score each that has no value; NULL: none
} attention_call;

// Root mean square norm of rows. A task is a row.
typedef struct norm_call {
  kernel_tasks tasks;
  int64_t dtype;
  const void *x;  // (rows, size), `stride` numbers apart
  int64_t stride;
  const void *weight;  // (size,)
  void *out;           // (rows, size)
  int64_t size;
  double eps;
  double weight_offset;  // 0: rounded, times the weight. Else times weight + offset, as Gemma
} norm_call;

// Norm and rotation of queries and keys in place; keys and values are copied into their blocks.
// A task is a token.
typedef struct rope_call {
  kernel_tasks tasks;
  int64_t dtype;
  void *heads;  // (tokens, query heads + 2 * KV heads, head size): queries, keys, values
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t rotary_size;         // numbers of a head that rotate: channel i with i + size / 2
  const void *cos;             // (positions, rotary size), the cosines twice
  const void *sin;             // (positions, rotary size), negated sines, then sines
  int64_t num_positions;
  const int64_t *positions;    // (tokens,)
  const int64_t *kv_positions; // (tokens,), block * block size + offset
  void *keys;                  // (blocks, KV heads, block size, head size)
  void *values;
  int64_t num_blocks;
  int64_t block_size;
  const void *norm;  // (query heads + KV heads, head size), or NULL: no norm
  double eps;
} rope_call;

// A kernel: one thread's part of a call.
typedef void kernel_function(void *call);

// All kernels, compiled for one instruction set.
typedef struct kernel_set {
  const char *name;
  int64_t features;  // that it needs
  kernel_function *attention;
  kernel_function *norm;
  kernel_function *rope;
} kernel_set;

// A field of a structure, for native.py to compare with its own. The last one has no name.
typedef struct kernel_field {
  const char *structure;
  const char *field;  // "" for the structure itself, whose size this is
  int64_t offset;
  int64_t size;
} kernel_field;

#define KERNEL_EXPORT __attribute__((visibility("default")))

KERNEL_EXPORT extern const kernel_field kernels_fields[];

// Return the features of this processor that the operating system permits.
KERNEL_EXPORT int64_t kernels_features(void);
// Return the best kernel set that needs no feature besides these.
KERNEL_EXPORT const kernel_set *kernels_for(int64_t features);

// Return a kernel_status; the first fault found.
KERNEL_EXPORT int64_t kernels_check_attention(const attention_call *call);
KERNEL_EXPORT int64_t kernels_check_norm(const norm_call *call);
KERNEL_EXPORT int64_t kernels_check_rope(const rope_call *call);

#endif
